"""A full arena makes nobody wait who needs no room in it, and those who wait for room are served in the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import psutil
import pytest

from tests.media_samples import photograph
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.demo import data_url, image
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
SIZE = 448
"""Side of a picture in pixels. The embedded model sees it smaller."""
BLOCK_BYTES = 40960
"""Size of its block."""
SETTINGS = {"arena_bytes": 4 * BLOCK_BYTES, "kv_cache_bytes": 64 * 2**20, "decoders": 2, "grace_s": 0.2}
NUM_ANSWERS = 4


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[RunningService]:
    """A service whose arena holds four pictures."""
    folder = tmp_path_factory.mktemp("narrow")
    settings = SETTINGS | {"spool": folder / "spool", "device": device}
    with running_service(settings, folder / "log") as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


def ask(service: RunningService, *media: dict[str, Any], stream: bool = False, max_tokens: int = 4) -> tuple[int, str]:
    """Return status and body of an answer."""
    content = [*media, {"type": "text", "text": "What is in the image?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx2.post(service.url + CHAT, json=body | {"stream": stream}, timeout=300)
    return answer.status_code, answer.text


def engine_of(service: RunningService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if "mindie_mm.engine.process.engine_process" in child.cmdline())


def test_text_passes_pictures_that_wait_for_room(narrow: RunningService) -> None:
    """The engine is held up, so that it has not taken the pictures of the first requests out of the arena."""
    picture = image(data_url(photograph(size=(SIZE, SIZE))))
    assert ask(narrow, picture)[0] == 200
    engine = engine_of(narrow)
    waits = metric(narrow, "shm_waits_total")
    with ThreadPoolExecutor(NUM_ANSWERS + 3) as pool:
        engine.suspend()
        try:
            long = [pool.submit(ask, narrow, picture, stream=True, max_tokens=64) for _ in range(NUM_ANSWERS)]
            wait_until(lambda: narrow.shm()["blocks"] == NUM_ANSWERS)
            assert metric(narrow, "shm_waiting_bytes") == 0
            waiting = [pool.submit(ask, narrow, picture) for _ in range(2)]
            wait_until(lambda: metric(narrow, "shm_waiting_bytes") > BLOCK_BYTES)
            for _ in range(5):
                answer = httpx2.post(f"{narrow.url}/tokenize", json={"prompt": "What is it?"}, timeout=300)
                assert answer.status_code == 200
            text = pool.submit(ask, narrow)
            assert not any(task.done() for task in (*long, *waiting))
            assert metric(narrow, "shm_waiting_bytes") > BLOCK_BYTES, "text was tokenized while pictures wait"
        finally:
            engine.resume()
        assert text.result()[0] == 200
        statuses = [task.result()[0] for task in (*long, *waiting)]
    assert statuses == [200] * (NUM_ANSWERS + 2)
    assert all("[DONE]" in task.result()[1] for task in long)
    assert metric(narrow, "shm_waits_total") == waits + 2
    assert metric(narrow, "shm_full_total") == 0
    assert metric(narrow, "shm_waiting_bytes") == 0
