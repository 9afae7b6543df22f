"""Tests that a request holds shared memory only until the engine has consumed its media."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.warm import running_service
from tests.watching import metric, process, stopped_engine, wait_until
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

pytestmark = pytest.mark.slow  # the shorter suite tests early release in tests/engine/test_early_release.py
KiB = 2**10
TOKENS = 400
"""Number of tokens that fit into the KV cache: enough for one long answer about two images, but not for two."""
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, values per head, bytes of a float32
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "kv_cache_bytes": TOKENS * TOKEN_BYTES,
    "encoder_cache_bytes": 0,  # keeps the features of one image at a time; each request has two
    "prefix_caching": False,
    "max_num_seqs": 2,
    "arena_bytes": 256 * KiB,
    "grace_s": 0.2,
}
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 60, 220), "black": (0, 0, 0)}
ATTEMPTS = 50
"""Number of attempts to stop the engine before the third choice starts. On a slow machine, an attempt may be late."""
LONG = 220
"""Length of an answer in tokens. Of two answers of this length that run together, the second is preempted."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("early")
    with running_service(SETTINGS | {"spool": folder / "spool", "device": device}, folder / "log") as running:
        yield running
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir()), "request directories are left"


@pytest.fixture(autouse=True)
def nothing_is_left(service: RunningService) -> Iterator[None]:
    yield
    assert service.wait_until_free()["bytes"] == 0
    wait_until(lambda: not spooled(service))
    wait_until(lambda: metric(service, "num_requests_running") + metric(service, "num_requests_waiting") == 0)


def body(colour: str, **changes: Any) -> dict[str, Any]:
    images = [draw_shape(colour, COLOURS[colour], shape, x=0.4) for shape in ("square", "star")]
    content = [*({"type": "image_url", "image_url": {"url": data_url(image)}} for image in images)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is in the image?"}]}]
    settings = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": LONG, "n": 1}
    return {"messages": messages} | settings | changes


def ask(service: RunningService, colour: str, **changes: Any) -> list[str]:
    """Return the texts of the choices of an answer that is not streamed."""
    answer = httpx2.post(f"{service.url}/v1/chat/completions", json=body(colour, **changes), timeout=300)
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


class Stream:
    """A streamed answer, read event by event."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.texts: dict[int, str] = {}

    def read(self) -> bool:
        """Read one event. Return False at the end."""
        for line in self._lines:
            if line == "data: [DONE]":
                return False
            if not line:
                continue
            piece = json.loads(line.removeprefix("data: "))
            assert "error" not in piece, piece
            for choice in piece["choices"]:
                text = self.texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
                self.texts[choice["index"]] = text
            return True
        return False

    def until(self, index: int) -> None:
        """Read until choice `index` has text."""
        while not self.texts.get(index):
            assert self.read()

    def rest(self) -> dict[int, str]:
        """Read to the end and return the texts of all choices."""
        while self.read():
            pass
        return self.texts


@contextmanager
def streaming(service: RunningService, colour: str, **changes: Any) -> Iterator[Stream]:
    url = f"{service.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body(colour, stream=True, **changes), timeout=300) as answer:
        assert answer.status_code == 200
        yield Stream(answer.iter_lines())


def spooled(service: RunningService) -> list[Path]:
    return list((service.log.parent / "spool").glob("*/image/*"))


@contextmanager
def stopped_tokenizer(service: RunningService) -> Iterator[Callable[[], None]]:
    """Yield a function that stops the tokenizer. The tokenizer continues when the context exits."""
    tokenizer = process(service, "mindie_mm.tokenize.")
    try:
        yield lambda: tokenizer.send_signal(signal.SIGSTOP)
    finally:
        tokenizer.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(service: RunningService) -> dict[str, str]:
    """Return each request's answer when no other request runs, by color."""
    texts = {colour: ask(service, colour)[0] for colour in COLOURS}
    assert len(set(texts.values())) == len(texts)
    assert metric(service, "num_preemptions_total") == metric(service, "media_remade_total") == 0
    return texts


def test_an_answer_frees_its_blocks_at_the_first_token_and_keeps_its_files_to_the_end(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    with streaming(service, "red") as stream:
        stream.until(0)
        shm = service.shm()
        assert metric(service, "num_requests_running") == 1, "it goes on"
        assert (shm["blocks"], shm["bytes"]) == (0, 0)
        assert len(spooled(service)) == 2
        assert stream.rest() == {0: undisturbed["red"]}


def test_blocks_live_until_the_last_choice_has_consumed_them(service: RunningService) -> None:
    """Only two choices run at a time, so the blocks are kept until the third choice has started."""
    for _ in range(ATTEMPTS):
        with streaming(service, "red", n=3, max_tokens=90) as stream:
            stream.until(1)
            with stopped_engine(service):
                held = service.shm()["blocks"]
            stream.until(2)
            assert service.shm()["blocks"] == 0
            stream.rest()
        if held:
            return
    pytest.fail(f"no block was held after the second choice's first token in any of {ATTEMPTS} attempts")


def test_answers_that_preempt_each_other_equal_undisturbed_answers(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    preempted, remade = (metric(service, f"{name}_total") for name in ("num_preemptions", "media_remade"))
    with ThreadPoolExecutor() as threads:
        answers = {colour: threads.submit(ask, service, colour) for colour in ("red", "green")}
    assert {colour: answer.result()[0] for colour, answer in answers.items()} == {c: undisturbed[c] for c in answers}
    assert metric(service, "num_preemptions_total") > preempted
    assert metric(service, "media_remade_total") >= remade + 2


@pytest.mark.slow
def test_media_needed_again_wait_for_memory_that_queued_requests_hold(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    remade = metric(service, "media_remade_total")
    with ThreadPoolExecutor(8) as threads:
        answers = [(colour, threads.submit(ask, service, colour)) for colour in [*COLOURS] * 2]
        wait_until(lambda: service.shm()["bytes"] > 0.7 * service.shm()["capacity_bytes"])
    for colour, answer in answers:
        assert answer.result() == [undisturbed[colour]]
    assert metric(service, "media_remade_total") > remade


@contextmanager
def two_streams(service: RunningService) -> Iterator[tuple[Stream, Stream]]:
    """Yield streams of the answers about the red and the green images.

    The engine has consumed the media of both requests, and will preempt the second answer.
    """
    with streaming(service, "red") as first, streaming(service, "green") as second:
        first.until(0)
        second.until(0)
        assert service.shm()["blocks"] == 0
        yield first, second


def wait_until_lost(service: RunningService) -> None:
    """Wait until the preempted answer has left the engine, and the service waits for its media."""
    wait_until(lambda: metric(service, "num_requests_running") + metric(service, "num_requests_waiting") == 0)


def test_an_answer_that_waits_for_its_media_can_be_aborted(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    aborted = metric(service, "request_success_total", finished_reason="abort")
    with stopped_tokenizer(service) as stopped, two_streams(service) as (first, _):
        stopped()
        assert first.rest() == {0: undisturbed["red"]}, "it goes on"
        wait_until_lost(service)
    wait_until(lambda: metric(service, "request_success_total", finished_reason="abort") == aborted + 1)
    assert ask(service, "blue") == [undisturbed["blue"]]


def test_an_answer_that_waits_for_its_media_resumes_with_them(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    with two_streams(service) as (first, second):
        with stopped_tokenizer(service) as stopped:
            stopped()
            assert first.rest() == {0: undisturbed["red"]}
            wait_until_lost(service)
        assert second.rest() == {0: undisturbed["green"]}


@pytest.mark.slow
def test_an_answer_that_waits_for_its_media_survives_a_killed_tokenizer(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    restarts = metric(service, "process_restarts_total", process="tokenizer")
    with two_streams(service) as (first, second):
        process(service, "mindie_mm.tokenize.").kill()
        assert first.rest() == {0: undisturbed["red"]}
        assert second.rest() == {0: undisturbed["green"]}
    assert metric(service, "process_restarts_total", process="tokenizer") == restarts + 1


def test_a_stream_survives_an_engine_killed_after_the_release(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    remade = metric(service, "media_remade_total")
    with streaming(service, "red") as stream:
        stream.until(0)
        assert service.shm()["blocks"] == 0
        process(service, "mindie_mm.engine.").kill()
        assert stream.rest() == {0: undisturbed["red"]}
    assert metric(service, "media_remade_total") == remade + 2


def test_media_that_cannot_be_decoded_again_fail_only_their_answer(
    service: RunningService, undisturbed: dict[str, str]
) -> None:
    with two_streams(service) as (first, second):
        for path in spooled(service):
            path.write_bytes(b"no image")
        assert first.rest() == {0: undisturbed["red"]}
        with pytest.raises(AssertionError, match="media item 0"):
            second.rest()
