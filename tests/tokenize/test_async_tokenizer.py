"""Tests for the tokenizer in a separate process."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from mindie_mm.errors import (
    ContextLengthExceeded,
    InputError,
    MediaError,
    NoProcess,
    ProcessDied,
    SharedMemoryError,
    UnsupportedCheckpoint,
)
from mindie_mm.processes import ipc
from mindie_mm.processes.restarts import RESTART_WAIT_S
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import Ref, attach, release, survey
from mindie_mm.tokenize import AsyncTokenizer, Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items, request_of_messages
from tests.media_samples import encode_video, encoded, moving_frames, photograph

ARENA_BYTES = 16 * 2**20

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture(scope="module")
async def tokenizer(checkpoint_path):
    tokenizer = await AsyncTokenizer.start(checkpoint_path, WorkerConfig(decoders=2, arena_bytes=ARENA_BYTES))
    yield tokenizer
    await tokenizer.close()
    assert tokenizer.pids == []


@pytest.fixture
def request_path(tmp_path) -> Path:
    """Yield a request directory that contains an image and a video."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "0.jpg").write_bytes(encoded(photograph("chelsea.png", (150, 120))))
    (tmp_path / "image" / "0.mp4").write_bytes(encode_video(moving_frames(8)))
    yield tmp_path
    release(tmp_path / "shm_name.txt")


def blocks(tokenizer: AsyncTokenizer, state: str | None = None) -> int:
    """Return the number of blocks in the tokenizer process's arena.

    If `state` is given, count only blocks in this state.
    """
    arenas = [arena for arena in survey() if arena.owner and arena.owner.pid in tokenizer.pids]
    return sum(state in (None, block.state) for arena in arenas for block in arena.blocks)


def items_of(path: Path) -> list[dict]:
    return [{"text": "what is it?"}, {"image": str(path / "image" / "0.jpg")}, {"video": str(path / "image" / "0.mp4")}]


async def test_prompts_equal_those_of_the_library(tokenizer, request_path, checkpoint_path, arena):
    path_file = request_path / "shm_name.txt"
    items = items_of(request_path)
    raw = await tokenizer.tokenize(request_of_items(items, chat=False, path_file=str(path_file)))
    chat = await tokenizer.tokenize(request_of_items(items, path_file=str(path_file)))
    messages = [{"role": "user", "content": items}]
    same = await tokenizer.tokenize(request_of_messages(messages, path_file=str(path_file)))
    assert np.array_equal(chat.plain_ids, same.plain_ids)
    text = await tokenizer.tokenize(request_of_items([{"text": "what is it?"}], chat=False))
    with Tokenizer.from_pretrained(checkpoint_path, arena=arena) as library:
        expected = library.answer(request_of_items(items, chat=False, path_file=str(path_file)))
        assert np.array_equal(raw.plain_ids, expected.plain_ids)
        assert raw.spans == expected.spans
        assert text.ids.tolist() == library.tokenize([{"text": "what is it?"}]).tolist()
    assert raw.ids.dtype == np.int64
    span = raw.spans[0]
    with attach(Ref.from_words(*raw.ids[span.start : span.start + 2].tolist())) as view:
        assert view["pixel_values"].shape == (4 * (span.stop - span.start), 588)


async def test_prompts_tokenized_together_equal_prompts_tokenized_alone(tokenizer, request_path):
    path_file = request_path / "shm_name.txt"
    text, image, video = items_of(request_path)
    given = [[text], [image, text, image], [video, text], [text, text]]
    requests = [request_of_items(items, path_file=str(path_file)) for items in given]
    together = await tokenizer.tokenize_together(requests)
    assert blocks(tokenizer, "published") == release(path_file) == 3
    for prompt, request in zip(together, requests, strict=True):
        alone = await tokenizer.tokenize(request)
        assert np.array_equal(prompt.plain_ids, alone.plain_ids)
        assert prompt.spans == alone.spans


async def test_a_failed_prompt_frees_the_blocks_of_the_other_prompts(tokenizer, request_path):
    text, image, _ = items_of(request_path)
    (request_path / "image" / "1.jpg").write_bytes((request_path / "image" / "0.jpg").read_bytes()[:-3000])
    broken = {"image": str(request_path / "image" / "1.jpg")}
    path_file = str(request_path / "shm_name.txt")
    requests = [request_of_items(items, path_file=path_file) for items in ([image], [text], [image, broken])]
    with pytest.raises(MediaError, match=r"^media item 1 \(image\): "):
        await tokenizer.tokenize_together(requests)
    assert blocks(tokenizer) == 0
    other = request_of_items([image], path_file=str(request_path / "other.txt"))
    with pytest.raises(InputError, match="share one path file"):
        await tokenizer.tokenize_together([*requests[:2], other])


async def test_sources_can_be_bytes(tokenizer, request_path):
    data = (request_path / "image" / "0.jpg").read_bytes()
    request = request_of_items([{"image": data}], path_file=str(request_path / "shm_name.txt"))
    assert len((await tokenizer.tokenize(request)).spans) == 1


async def test_each_concurrent_request_gets_its_own_answer(tokenizer):
    texts = [f"text {i}" * (i + 1) for i in range(40)]
    requests = [request_of_items([{"text": text}], chat=False) for text in texts]
    prompts = await asyncio.gather(*map(tokenizer.tokenize, requests))
    again = [await tokenizer.tokenize(request) for request in requests]
    assert [p.ids.tolist() for p in prompts] == [p.ids.tolist() for p in again]
    assert len({p.ids.tobytes() for p in prompts}) == 40


@pytest.mark.parametrize(
    ("request_fields", "error", "message"),
    [
        ({"inputs": [{"image": "/no/such.jpg"}], "path_file": "x"}, MediaError, "there is no file /no/such.jpg"),
        (
            {"inputs": [{"text": "what is it?" * 9}], "options": PromptOptions(5)},
            ContextLengthExceeded,
            "the limit is 5",
        ),
        (
            {"inputs": [{"text": "a"}], "chat": False, "add_generation_prompt": False},
            InputError,
            "chat template variables",
        ),
        (
            {"inputs": [{"text": "a"}], "chat": False, "chat_template_kwargs": {"b": 1}},
            InputError,
            "does not use a chat template",
        ),
        ({"inputs": [{"image": "http://127.0.0.1:9/a.jpg"}], "path_file": "x"}, MediaError, "public"),
    ],
)
async def test_errors_keep_their_type_across_processes(tokenizer, request_fields, error, message):
    with pytest.raises(error, match=message) as caught:
        await tokenizer.tokenize(request_of_items(**request_fields))
    assert type(caught.value) is error


async def test_a_long_prompt_is_truncated_by_option(tokenizer):
    prompt = await tokenizer.tokenize(
        request_of_items([{"text": "what is it? " * 9}], chat=False, options=PromptOptions(5, truncate=True))
    )
    assert len(prompt) == 5


async def test_a_killed_process_fails_its_requests_and_is_restarted(tokenizer, request_path):
    before = tokenizer.pids
    big = {"image": encoded(photograph("coffee.png", (1200, 1100)), "PNG")}
    requests = [request_of_items([big], path_file=str(request_path / "shm_name.txt")) for _ in range(2)]
    tasks = [asyncio.create_task(tokenizer.tokenize(request)) for request in requests]
    await asyncio.sleep(0)
    for pid in before:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [ProcessDied] * 2
    assert "died with status -9" in str(results[0])
    prompt = await tokenizer.tokenize(request_of_items([{"text": "hello"}], chat=False))
    assert len(prompt) > 0
    assert not set(before) & set(tokenizer.pids)


async def test_no_request_waits_for_a_process_that_cannot_restart(tokenizer, tmp_path, monkeypatch):
    """While the checkpoint is missing, waiting and new requests fail immediately."""
    await up(tokenizer)
    gone = msgspec.json.decode(tokenizer._setup) | {"model": str(tmp_path / "gone")}
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_setup", msgspec.json.encode(gone).decode())
        for pid in tokenizer.pids:
            os.kill(pid, signal.SIGKILL)
        while tokenizer.pids:  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0)
        async with asyncio.timeout(0.9 * RESTART_WAIT_S):
            for text in ("waits", "comes later"):
                with pytest.raises(NoProcess, match=f"{tmp_path}/gone is not a checkpoint directory"):
                    await tokenizer.tokenize(request_of_items([{"text": text}], chat=False))
    await up(tokenizer)
    assert len(await tokenizer.tokenize(request_of_items([{"text": "once it is back"}], chat=False))) > 0


async def up(tokenizer: AsyncTokenizer) -> None:
    async with asyncio.timeout(RESTART_WAIT_S):
        while not tokenizer.pids:  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0.01)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Prevent this process from opening files and sockets, and from starting processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_failed_restart_is_repeated_until_it_succeeds(tokenizer, request_path, caplog):
    big = {"image": encoded(photograph("coffee.png", (1200, 1100)), "PNG")}
    request = request_of_items([big], path_file=str(request_path / "shm_name.txt"))
    task = asyncio.create_task(tokenizer.tokenize(request))
    await asyncio.sleep(0)
    with no_descriptors():
        for pid in tokenizer.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDied):
            await task
        async with asyncio.timeout(120):
            while "the tokenizer process will be restarted in 0.5 s" not in caplog.text:  # noqa: ASYNC110 - as below
                await asyncio.sleep(0.01)
        assert "OSError: [Errno 24] Too many open files" in caplog.text
    async with asyncio.timeout(300):
        assert len(await tokenizer.tokenize(request_of_items([{"text": "hello"}], chat=False))) > 0


async def test_the_blocks_of_a_request_that_is_cancelled_after_its_answer_are_freed(tokenizer, request_path):
    """The request is canceled while its answer is in the socket and has not been read yet."""
    image = {"image": str(request_path / "image" / "0.jpg")}
    request = request_of_items([image], path_file=str(request_path / "shm_name.txt"))
    cancelled = asyncio.create_task(tokenizer.tokenize(request))
    await asyncio.sleep(0)
    while blocks(tokenizer, "published") != 1:  # the event loop must not run, or it would read the answer
        pass
    cancelled.cancel()
    assert len(await tokenizer.tokenize(request_of_items([{"text": "hello"}], chat=False))) > 0
    assert blocks(tokenizer) == 0


async def test_closing_kills_a_stuck_process(checkpoint_path, monkeypatch):
    monkeypatch.setattr(ipc, "PATIENCE_S", 0.2)  # a stopped process cannot exit
    tokenizer = await AsyncTokenizer.start(checkpoint_path, WorkerConfig(arena_bytes=ARENA_BYTES))
    (pid,) = tokenizer.pids
    os.kill(pid, signal.SIGSTOP)
    more_than_a_socket_holds = "x" * 2**23
    task = asyncio.create_task(tokenizer.tokenize(request_of_items([{"text": more_than_a_socket_holds}], chat=False)))
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        await tokenizer.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(ProcessDied, match="status -9"):
        await task


async def test_a_cancelled_request_leaves_no_block(tokenizer, request_path):
    before = blocks(tokenizer)
    big = {"image": encoded(photograph("coffee.png", (900, 800)), "PNG")}
    task = asyncio.create_task(tokenizer.tokenize(request_of_items([big], path_file=str(request_path / "x.txt"))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await tokenizer.tokenize(request_of_items([{"text": "a"}], chat=False))) > 0, (
        "another request must not wait for the canceled one"
    )
    async with asyncio.timeout(300):
        while blocks(tokenizer) != before:  # noqa: ASYNC110 - another process frees the block and sends no event
            await asyncio.sleep(0.01)


async def test_a_request_cancelled_before_it_starts_is_forgotten(tokenizer):
    for _ in range(20):
        task = asyncio.create_task(tokenizer.tokenize(request_of_items([{"text": "a"}], chat=False)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(300):
        while tokenizer._replies:  # noqa: ASYNC110 - no task waits for these replies
            await asyncio.sleep(0.01)


@contextmanager
def stopped_decoders(tokenizer: AsyncTokenizer) -> Iterator[list[psutil.Process]]:
    """Suspend the decoder processes. Yield the nursery process, which starts them, and the decoder processes."""
    nursery, *decoders = psutil.Process(tokenizer.pids[0]).children(recursive=True)
    for decoder in decoders:
        decoder.suspend()
    yield [nursery, *decoders]
    for decoder in decoders:
        if decoder.is_running():
            decoder.resume()


async def handed_out(tokenizer: AsyncTokenizer, path: Path) -> None:
    """Wait until the tokenizer has opened the file that it passes to a decoder."""
    process = psutil.Process(tokenizer.pids[0])
    async with asyncio.timeout(300):
        while not any(file.path == str(path) for file in process.open_files()):  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_decoders_end_with_their_tokenizer_while_items_are_decoded(tokenizer, request_path, number):
    await up(tokenizer)
    image = request_path / "image" / "0.jpg"
    request = request_of_items([{"image": str(image)}] * 3, path_file=str(request_path / "shm_name.txt"))
    with stopped_decoders(tokenizer) as processes:
        task = asyncio.create_task(tokenizer.tokenize(request))
        await handed_out(tokenizer, image)
        os.kill(tokenizer.pids[0], number)
        with pytest.raises(ProcessDied):
            await task
        async with asyncio.timeout(300):
            while any(process.is_running() for process in processes):  # noqa: ASYNC110 - orphans send no event
                await asyncio.sleep(0.01)
    assert len((await tokenizer.tokenize(request)).spans) == 3


async def test_a_nursery_ends_with_its_tokenizer_during_startup(checkpoint_path, capfd):
    mine, nurseries = psutil.Process(), []
    before = set(mine.children(recursive=True))
    starting = asyncio.create_task(
        AsyncTokenizer.start(checkpoint_path, WorkerConfig(decoders=1, arena_bytes=ARENA_BYTES))
    )
    async with asyncio.timeout(300):
        while not nurseries:
            await asyncio.sleep(0)
            for one in set(mine.children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    # The tokenizer is a child of this process, and the nursery is a child of the tokenizer.
                    nurseries += [one] if one.ppid() != mine.pid else []
    (nursery,) = nurseries
    psutil.Process(nursery.ppid()).kill()
    with pytest.raises(ProcessDied):
        await starting
    async with asyncio.timeout(300):
        while nursery.is_running():  # noqa: ASYNC110 - orphans send no event
            await asyncio.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err


async def test_a_closed_tokenizer_refuses_requests(checkpoint_path):
    tokenizer = AsyncTokenizer(checkpoint_path, WorkerConfig(arena_bytes=ARENA_BYTES))
    await tokenizer.close()
    with pytest.raises(ProcessDied, match="closed"):
        await tokenizer.tokenize(request_of_items([{"text": "hello"}], chat=False))


async def test_an_error_during_startup_is_raised(checkpoint_path, tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        await AsyncTokenizer.start(tmp_path, WorkerConfig(arena_bytes=ARENA_BYTES))
    with pytest.raises((SharedMemoryError, InputError)):
        await AsyncTokenizer.start(checkpoint_path, WorkerConfig(arena_bytes=2**50))
