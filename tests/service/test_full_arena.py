"""Tests for a full arena.

A full arena does not delay requests without media. Requests that wait for memory are answered eventually.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import psutil
import pytest

from tests.media_samples import encoded, photograph
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.demo import data_url, image
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
SIZE = 448
"""Width and height of an image in pixels. The embedded model's processor shrinks the image."""
BLOCK_BYTES = 40960
"""Size of the block in shared memory that stores one image."""
NUM_ANSWERS = 4
SETTINGS = {
    "arena_bytes": NUM_ANSWERS * BLOCK_BYTES,
    "arena_request_bytes": NUM_ANSWERS * BLOCK_BYTES,
    "arena_wait_s": 30,
    "kv_cache_bytes": 64 * 2**20,
    "decoders": 2,
    "grace_s": 0.2,
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[RunningService]:
    """Yield a service whose arena has room for four images."""
    folder = tmp_path_factory.mktemp("narrow")
    settings = SETTINGS | {"spool": folder / "spool", "device": device}
    with running_service(settings, folder / "log") as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


def ask(service: RunningService, *media: dict[str, Any], stream: bool = False, max_tokens: int = 4) -> tuple[int, str]:
    """Ask about `media`, and return the status and body of the response."""
    content = [*media, {"type": "text", "text": "What is in the image?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx2.post(service.url + CHAT, json=body | {"stream": stream}, timeout=300)
    return answer.status_code, answer.text


def complete(service: RunningService, *nums_images: int) -> httpx2.Response:
    """Request completions of several prompts. Prompt i has `nums_images[i]` images."""
    data = base64.b64encode(encoded(photograph(size=(SIZE, SIZE)))).decode()
    tag = f'<img src="data:image/jpeg;base64,{data}">'
    prompts = [f"{tag * count}What is in the image?" for count in nums_images]
    return httpx2.post(f"{service.url}/v1/completions", json={"prompt": prompts, "max_tokens": 4}, timeout=300)


def waits_for(service: RunningService, num_blocks: int) -> bool:
    """Return whether requests wait for at least `num_blocks` blocks."""
    return metric(service, "shm_waiting_bytes") >= num_blocks * BLOCK_BYTES


def engine_of(service: RunningService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if "mindie_mm.engine.process.engine_process" in child.cmdline())


def test_text_requests_overtake_images_that_wait_for_memory(narrow: RunningService) -> None:
    """Text is tokenized while images wait for memory, which the suspended engine cannot release."""
    part = image(data_url(photograph(size=(SIZE, SIZE))))
    assert ask(narrow, part)[0] == 200
    engine = engine_of(narrow)
    waits = metric(narrow, "shm_waits_total")
    with ThreadPoolExecutor(NUM_ANSWERS + 3) as pool:
        engine.suspend()
        try:
            long = [pool.submit(ask, narrow, part, stream=True, max_tokens=64) for _ in range(NUM_ANSWERS)]
            wait_until(lambda: narrow.shm()["blocks"] == NUM_ANSWERS)
            assert metric(narrow, "shm_waiting_bytes") == 0
            waiting = [pool.submit(ask, narrow, part) for _ in range(2)]
            wait_until(lambda: metric(narrow, "shm_waiting_bytes") > BLOCK_BYTES)
            for _ in range(5):
                answer = httpx2.post(f"{narrow.url}/tokenize", json={"prompt": "What is it?"}, timeout=300)
                assert answer.status_code == 200
            text = pool.submit(ask, narrow)
            assert not any(task.done() for task in (*long, *waiting))
            assert metric(narrow, "shm_waiting_bytes") > BLOCK_BYTES, "text was tokenized while images wait"
        finally:
            engine.resume()
        assert text.result()[0] == 200
        statuses = [task.result()[0] for task in (*long, *waiting)]
    assert statuses == [200] * (NUM_ANSWERS + 2)
    assert all("[DONE]" in task.result()[1] for task in long)
    assert metric(narrow, "shm_waits_total") == waits + 2
    assert metric(narrow, "shm_full_total") == 0
    assert metric(narrow, "shm_waiting_bytes") == 0


def test_the_prompts_of_a_request_are_allocated_together_or_not_at_all(narrow: RunningService) -> None:
    """Two requests each need the whole arena. If each got memory for its first prompt, both would wait forever."""
    assert complete(narrow, 1).status_code == 200
    waits, full = (metric(narrow, name) for name in ("shm_waits_total", "shm_full_total"))
    engine = engine_of(narrow)
    with ThreadPoolExecutor(3) as pool:
        engine.suspend()
        try:
            tasks = [pool.submit(complete, narrow, 2)]
            wait_until(lambda: narrow.shm()["blocks"] == 2 or tasks[0].done())
            for number in (1, 2):
                tasks.append(pool.submit(complete, narrow, 1, 3))
                wait_until(partial(waits_for, narrow, 3 * number))
            num_held = narrow.shm()["blocks"]
        finally:
            engine.resume()
        answers = [task.result() for task in tasks]
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert num_held == 2, "who waits holds nothing"
    assert [len(answer.json()["choices"]) for answer in answers] == [1, 2, 2]
    assert metric(narrow, "shm_waits_total") == waits + 2
    assert metric(narrow, "shm_full_total") == full


def test_prompts_that_exceed_the_arena_together_are_refused_at_once(narrow: RunningService) -> None:
    """The request does not wait for memory. The message is the same as for one prompt with all the images."""
    assert complete(narrow, 1).status_code == 200
    waits, engine = metric(narrow, "shm_waits_total"), engine_of(narrow)
    with ThreadPoolExecutor(1) as pool:
        engine.suspend()
        try:
            held = pool.submit(complete, narrow, 1)
            wait_until(lambda: narrow.shm()["blocks"] == 1 or held.done())
            together, alone = complete(narrow, 3, 2), complete(narrow, NUM_ANSWERS + 1)
            assert narrow.shm()["blocks"] == 1
        finally:
            engine.resume()
        assert held.result().status_code == 200
    assert together.status_code == 400
    assert together.json() == alone.json()
    message = f"the request's media take {5 * BLOCK_BYTES} bytes of shared memory; the arena has only {4 * BLOCK_BYTES}"
    assert message in together.json()["error"]["message"]
    assert metric(narrow, "shm_waits_total") == waits
