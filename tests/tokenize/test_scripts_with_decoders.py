"""Tests for LLM and Tokenizer with decoder processes: in a script, from standard input and in a running event loop."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mindie_mm import LLM, SamplingParams
from mindie_mm.decode import Decoders
from mindie_mm.errors import InputError
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.local import LocalTokenizer
from mindie_mm.tokenize.requests import request_of_items
from mindie_mm.worker.worker import Worker
from tests.decode.conftest import busy, stopped
from tests.media_samples import encoded, photograph
from tests.warm import SUBPROCESS
from tests.watching import wait_until

pytestmark = pytest.mark.slow  # each test starts processes whose imports take seconds

CAT = photograph("chelsea.png", (150, 120))
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

HEAD = """
import os, signal, sys, threading, time
import psutil
from PIL import Image
from mindie_mm import LLM, SamplingParams, Tokenizer

IMAGE = Image.linear_gradient("L").convert("RGB")

def make(decoders):
    if {kind!r} == "LLM":
        made = LLM({path!r}, decoders=decoders)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        return made, lambda: made.generate([[{{"image": IMAGE}}, {{"text": "What?"}}]] * 3, params)[2].token_ids
    made = Tokenizer.from_pretrained({path!r}, decoders=decoders)
    items = [{{"image": IMAGE}}, {{"image": IMAGE}}, {{"text": "What?"}}]
    return made, lambda: [id for id in made.tokenize(items, {path_file!r}).tolist() if id >= 0]

made, ask = make(2)
processes = psutil.Process().children(recursive=True)
print(*[process.pid for process in processes], flush=True)
"""

ENDS_WITHOUT_CLOSE = """
import asyncio

async def main():
    return ask()

found = asyncio.run(main())
print(found == make(0)[1](), len(found) > 3, flush=True)
"""

INTERRUPTED = """
decoders = [process for process in processes if "mindie_mm.decode.nursery" in process.parent().cmdline()]
for decoder in decoders:
    decoder.suspend()

def interrupt():
    while psutil.Process().children(recursive=True) == processes and not is_decoding():
        time.sleep(0.01)
    os.killpg(os.getpgrp(), signal.SIGINT)

def is_decoding():
    stage = (made._worker.tokenizer_stage._prompts if {kind!r} == "LLM" else made.prompts).stage
    return any(process.job for process in stage.decoders._processes)

threading.Thread(target=interrupt, daemon=True).start()
ask()
"""


def run_script(script: str, kind: str, checkpoint: Path, folder: Path) -> tuple[int, list[str], str]:
    """Run a script from standard input. Return its exit status, the lines that it prints, and its standard error.

    Before returning, wait until all processes of the script have ended.
    """
    text = (HEAD + script).format(kind=kind, path=str(checkpoint), path_file=str(folder / "shm_name.txt"))
    ended = subprocess.run(
        [sys.executable], input=text, capture_output=True, text=True, timeout=120, check=False, start_new_session=True
    )
    assert ended.stdout, ended.stderr
    pids, *printed = ended.stdout.splitlines()
    assert len(pids.split()) == (4 if kind == "LLM" else 3), "two decoders, their nursery, and the LLM's engine, if any"
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.split()))
    assert "Task was destroyed" not in ended.stderr
    return ended.returncode, printed, ended.stderr


@pytest.mark.parametrize("kind", ["Tokenizer", "LLM"])
def test_a_script_without_close_leaves_no_process(kind: str, random_checkpoint: Path, tmp_path: Path) -> None:
    """The script has no main guard and runs an event loop. The result is the same as without decoder processes."""
    status, lines, errors = run_script(ENDS_WITHOUT_CLOSE, kind, random_checkpoint, tmp_path)
    assert status == 0, errors
    assert lines == ["True True"]
    assert "Traceback" not in errors


@pytest.mark.parametrize("kind", ["Tokenizer", "LLM"])
def test_ctrl_c_ends_a_script_while_a_decoder_hangs(kind: str, random_checkpoint: Path, tmp_path: Path) -> None:
    """SIGINT goes to the whole process group, as a terminal sends it."""
    status, _, errors = run_script(INTERRUPTED, kind, random_checkpoint, tmp_path)
    assert status == -signal.SIGINT, errors
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1, errors


@pytest.fixture
def tokenizer(random_checkpoint: Path, arena: Arena, copied_workers: None) -> Iterator[Tokenizer]:
    with Tokenizer.from_pretrained(random_checkpoint, arena=arena, decoders=2) as tokenizer:
        yield tokenizer


def decoders_of(tokenizer: Tokenizer) -> Decoders:
    stage: Any = tokenizer.prompts.stage
    decoders: Decoders = stage.decoders
    return decoders


def processes_of(decoders: Decoders) -> list[int]:
    """Return the pids of the decoders and their nursery."""
    return [*decoders.pids, psutil.Process(decoders.pids[0]).ppid()]


def test_an_interrupt_while_decoding_ends_only_the_item(tokenizer: Tokenizer, arena: Arena, tmp_path: Path) -> None:
    items = [{"image": CAT}, {"text": "What?"}]
    right = tokenizer.tokenize(items, tmp_path / "shm_name.txt").clamp(min=-1)
    release(tmp_path / "shm_name.txt")
    decoders = decoders_of(tokenizer)

    def interrupt() -> None:
        wait_until(lambda: busy(decoders))
        os.kill(os.getpid(), signal.SIGINT)

    before = decoders.pids
    with stopped(*before):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            tokenizer.tokenize(items, tmp_path / "shm_name.txt")
        thread.join()
        assert arena.num_blocks == 0
    wait_until(lambda: len(decoders.pids) == 2 and decoders.pids != before)
    assert (tokenizer.tokenize(items, tmp_path / "shm_name.txt").clamp(min=-1) == right).all()
    release(tmp_path / "shm_name.txt")


def test_a_closed_tokenizer_has_no_process_and_refuses_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pids = processes_of(decoders_of(tokenizer))
    tokenizer.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(InputError, match="the tokenizer is closed"):
        tokenizer.tokenize([{"image": CAT}], tmp_path / "shm_name.txt")
    tokenizer.close()


@pytest.mark.usefixtures("copied_workers")
def test_a_garbage_collected_tokenizer_ends_its_decoders(random_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(random_checkpoint, decoders=2)
    pids = processes_of(decoders_of(tokenizer))
    del tokenizer
    gc.collect()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.fixture(scope="module")
def llms(random_checkpoint: Path) -> Iterator[tuple[LLM, LLM]]:
    """Yield an LLM without decoder processes, and an LLM with two decoder processes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(random_checkpoint) as alone,
    ):
        patch.setattr("mindie_mm.processes.ipc.subprocess", SUBPROCESS)
        with LLM(random_checkpoint, decoders=2) as decoding:
            yield alone, decoding


def test_an_llm_with_decoders_accepts_all_forms_of_media(llms: tuple[LLM, LLM], tmp_path: Path) -> None:
    data = encoded(CAT)
    (tmp_path / "cat.jpg").write_bytes(data)
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    forms = [CAT, np.asarray(CAT), data, url, tmp_path / "cat.jpg"]
    inputs = [[{"image": form}, {"text": "What?"}] for form in forms]
    videos = [[{"video": [CAT] * 4}, {"text": "What?"}], [{"video": np.stack([np.asarray(CAT)] * 4)}]]
    alone, decoding = [
        [output.token_ids for output in llm.generate([*inputs, *videos, "Hello"], PARAMS)] for llm in llms
    ]
    assert decoding == alone


def test_a_wrong_input_of_an_llm_with_decoders_fails_alone(llms: tuple[LLM, LLM]) -> None:
    inputs = [[{"image": CAT}], [{"image": b"junk"}], "Hello"]
    alone, decoding = [llm.generate(inputs, PARAMS, on_error="return") for llm in llms]
    assert [str(output.error) for output in decoding] == [str(output.error) for output in alone]
    assert [output.token_ids for output in decoding] == [output.token_ids for output in alone]


def test_a_text_does_not_wait_for_an_image_in_an_llm_with_decoders(llms: tuple[LLM, LLM]) -> None:
    _, llm = llms
    decoders: Any = llm._worker.tokenizer_stage._prompts.stage.decoders
    with stopped(*decoders.pids):
        done = threading.Event()
        image = threading.Thread(target=lambda: (llm.generate([[{"image": CAT}]], PARAMS), done.set()))
        image.start()
        wait_until(lambda: busy(decoders))
        assert llm.generate(["Hello"], PARAMS)[0].token_ids
        assert not done.is_set()
    image.join(300)
    assert done.is_set()


@pytest.mark.usefixtures("copied_workers")
def test_a_closed_llm_has_no_process_and_refuses_requests(random_checkpoint: Path) -> None:
    llm = LLM(random_checkpoint, decoders=2)
    decoders: Any = llm._worker.tokenizer_stage._prompts.stage.decoders
    pids = processes_of(decoders)
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(InputError, match="the LLM is closed"):
        llm.generate([[{"image": CAT}]], PARAMS)


@pytest.mark.usefixtures("copied_workers")
async def test_cancelling_a_request_of_an_in_process_worker_ends_its_decoder(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    config = WorkerConfig(model=random_checkpoint, decoders=2, arena_bytes=2**24)
    async with await Worker.start(config, in_process=True) as worker:
        stage = worker.tokenizer_stage
        assert isinstance(stage, LocalTokenizer)
        decoders: Any = stage._prompts.stage.decoders
        before = decoders.pids
        with stopped(*before):
            request = request_of_items([{"image": CAT}], path_file=str(tmp_path / "shm_name.txt"))
            task = asyncio.create_task(stage.tokenize(request))
            async with asyncio.timeout(300):
                while not busy(decoders):  # noqa: ASYNC110 - no event announces this
                    await asyncio.sleep(0.002)
            (pid,) = busy(decoders)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(300):
                while psutil.pid_exists(pid):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.002)
