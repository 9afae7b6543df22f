"""Tests that the media of waiting requests are read while the device computes other requests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.processes import call

SIZES = ((84, 112), (84, 84), (112, 112))
"""Sizes of images that differ in their number of bytes, so that a trace shows which image was copied."""


def undisturbed(engine: Any, refs: list) -> None:
    pass


def abort_second(engine: Any, refs: list) -> None:
    from mindie_mm.engine.requests.engine_messages import Abort

    engine.abort(Abort("1"))


def free_second(engine: Any, refs: list) -> None:
    from mindie_mm.shm import free

    free(refs[1])


def answers(
    beside: bool, disturb: Callable[[Any, list], None] = undisturbed, encoder_decoder: str | None = None
) -> dict:
    """Return the results for each image, and the calls to CANN in each step.

    If `beside` is set, all requests are added at once, and later requests wait until the first has ended. `disturb`
    runs after the first step. `encoder_decoder` is the path of a checkpoint. None means the embedded checkpoint.
    """
    import tempfile

    import numpy as np

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.engine.seq2seq import Seq2SeqEngine
    from mindie_mm.models import load_model
    from mindie_mm.nn import staging
    from mindie_mm.nn.checkpoint.directory import Checkpoint
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer

    trace = Path(os.environ["ASCEND_SIM_TRACE"])
    path = Path(encoder_decoder) if encoder_decoder else Checkpoint.open(None).path
    kind = Seq2SeqEngine if encoder_decoder else Engine
    engine = kind(load_model(path, "npu", "bfloat16"), EngineConfig(max_num_seqs=1, async_scheduling=False), 2**26)
    results: dict[str, list] = {}
    calls: list[list[str]] = []
    refs, nbytes = [], []
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def step() -> None:
        begun = trace.stat().st_size
        for progress in engine.step().progress:
            news = [progress.error.name] if progress.error else progress.token_ids
            results.setdefault(progress.request_id, []).extend(news)
        with trace.open(encoding="utf-8") as file:
            file.seek(begun)
            calls.append([line.split(" ", 3)[3].rstrip() for line in file])

    with tempfile.TemporaryDirectory() as folder, Tokenizer.from_pretrained(path) as tokenizer:
        path_file = Path(folder) / "shm_name.txt"
        for number, size in enumerate(SIZES):
            image = rng.integers(0, 255, (*size, 3), dtype=np.uint8)
            ids = tokenizer.tokenize([{"image": image}, {"text": "What is it?"}], path_file).numpy()
            assert engine.add(Add(str(number), ids.tobytes(), params)) is None
            (item,) = engine._requests[str(number)].items
            refs.append(item.ref)
            nbytes.append(max(array.nbytes for array in item.view.values()))
            del item
            while not beside and engine.has_work():
                step()
        if beside:
            step()
        disturb(engine, refs)
        while engine.has_work():
            step()
        release(path_file)
    held = sum(len(staging._staging(device)._fetched) for device in engine._devices)
    return {"results": results, "calls": calls, "nbytes": nbytes, "held": held}


def answers_without_room() -> dict:
    """Return the results of `answers(True)` if the device has no memory in which media can be read early."""
    from mindie_mm.nn import staging

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory is left for what comes later")

    staging.Staging.fetch = refuse
    return answers(True)


def read(calls: list[str]) -> list[int]:
    """Return the number of bytes of each copy from the host, in order. A 0 represents a wait for a stream."""
    found = []
    for line in calls:
        if copied := re.match(r"aclrtMemcpyAsync .* n=(\d+) kind=1", line):
            found.append(int(copied[1]))
        elif line.startswith("aclrtSynchronizeStream"):
            found.append(0)
    return found


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the results if no request waits for another request."""
    return call(answers, False, trace=str(tmp_path_factory.mktemp("apart") / "trace"))


def test_images_of_waiting_requests_are_read_during_a_step_of_other_requests(apart: dict, tmp_path: Path) -> None:
    found = call(answers, True, trace=str(tmp_path / "trace"))
    assert found["results"] == apart["results"]
    first, *rest = (read(calls) for calls in found["calls"])
    own, *others = found["nbytes"]
    assert len({own, *others}) == len(SIZES)
    encoded = first.index(0, first.index(own))  # after this wait, the first image has been encoded
    assert first[-1] == 0, "the last wait of a step is for its token"
    assert [size for size in first[encoded:] if size in others] == others
    assert not [size for step in rest for size in step if size in found["nbytes"]], "no image is read twice"
    assert found["held"] == 0


@pytest.mark.slow
def test_an_encoder_decoder_reads_waiting_images_early_too(tmp_path: Path) -> None:
    """All images have the same size, as the model requires."""
    # An import at the top of this module would open the device too early.
    from tests.models.test_florence2 import TestFlorence2

    (tmp_path / "model").mkdir()
    TestFlorence2.write_checkpoint(tmp_path / "model")
    found, apart = (
        call(answers, beside, undisturbed, str(tmp_path / "model"), trace=str(tmp_path / f"trace {beside}"))
        for beside in (True, False)
    )
    assert found["results"] == apart["results"]
    (nbytes,) = {*found["nbytes"]}
    assert [read(calls).count(nbytes) for calls in found["calls"]] == [3] + [0] * (len(found["calls"]) - 1)
    assert found["held"] == 0


def test_an_image_that_is_freed_after_it_was_read_fails_its_own_request(apart: dict, tmp_path: Path) -> None:
    found = call(answers, True, free_second, trace=str(tmp_path / "trace"))
    assert found["results"] == apart["results"] | {"1": ["StaleReference"]}


def test_the_image_of_an_aborted_request_is_dropped(apart: dict, tmp_path: Path) -> None:
    found = call(answers, True, abort_second, trace=str(tmp_path / "trace"))
    assert found["results"] == {number: results for number, results in apart["results"].items() if number != "1"}
    assert found["held"] == 0


def test_images_that_cannot_be_read_early_are_read_in_their_step(apart: dict, tmp_path: Path) -> None:
    assert call(answers_without_room, trace=str(tmp_path / "trace"))["results"] == apart["results"]
