"""Tests for `generate` with an engine that fails.

A row that makes the engine fail loses only its own answer. An engine that is broken loses no answers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from mindie_mm.batch import Dataset
from mindie_mm.cli import main
from mindie_mm.engine.requests.engine_messages import Progress
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.worker.async_engine import AsyncEngine
from tests.batch.conftest import run_in_process, settings, written

pytestmark = pytest.mark.usefixtures("copied_workers")

POISON = "3"
"""Row that makes the engine fail."""


@pytest.fixture(scope="module")
def folder(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with six rows in three shards. The answers to two rows are sampled with a seed."""
    rows: list[dict[str, Any]] = [{"inputs": [{"image": f"{i}.jpg"}, {"text": "What?"}]} for i in range(6)]
    for row in (1, 4):
        rows[row] |= {"temperature": 1.5, "seed": row}
    folder = tmp_path_factory.mktemp("failures") / "run"
    run_in_process(settings(written(media / "failures.jsonl", rows), shard_rows=2), folder)
    return folder


def generate(folder: Path, output: Path, *options: object) -> Result:
    arguments = ["generate", "--tokenized", folder, "--output", output, "--max-tokens", "8", *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """Return the output file of a `generate` whose engine does not fail."""
    output = folder.parent / "whole.jsonl"
    assert generate(folder, output).exit_code == 0
    return output.read_bytes()


Fail = Callable[[AsyncEngine, str, bool], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fail], set[str]]:
    """Return the function `install`, which installs a callback and returns the set of running requests.

    The callback is called before each request is sent, and at each step of the request. It gets the engine, the
    request's id, and whether the request has been sent. If the callback raises a DeviceError, the request fails.
    """
    own = AsyncEngine.generate
    asked: set[str] = set()

    def install(fail: Fail) -> set[str]:
        async def generate(
            self: AsyncEngine, request_id: str, ids: NDArray[np.int64], params: SamplingParams, *more: Any
        ) -> AsyncGenerator[Progress, None]:
            fail(self, request_id, False)
            failure: DeviceError | None = None
            asked.add(request_id)
            try:
                async with aclosing(own(self, request_id, ids, params, *more)) as steps:
                    async for step in steps:  # after a failure, read the remaining steps as well
                        try:
                            fail(self, request_id, True)
                        except DeviceError as error:
                            failure = error
                        if failure is None:
                            yield step
            finally:
                asked.discard(request_id)
            if failure is not None:
                raise failure

        monkeypatch.setattr(AsyncEngine, "generate", generate)
        return asked

    return install


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_a_killed_engine_loses_no_answer(
    folder: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    """Even rows whose output had already begun get the same answers as from one engine that is not killed."""
    if replicas > available_cpus():
        pytest.skip(f"{replicas} engines need {replicas} CPUs")
    monkeypatch.setenv("MINDIE_MM_FAULTS", str(tmp_path))
    (tmp_path / "engine.mid-decode").touch()
    done = generate(folder, tmp_path / "out.jsonl", "--replicas", replicas)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "engine.mid-decode").exists()
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_row_that_kills_every_engine_becomes_an_error(
    folder: Path, whole: bytes, tmp_path: Path, failing: Callable[[Fail], set[str]], replicas: int
) -> None:
    def kill(engine: AsyncEngine, request: str, sent: bool) -> None:
        if request == "1" and not sent:
            os.kill(engine.pid, signal.SIGKILL)

    failing(kill)
    done = generate(folder, tmp_path / "out.jsonl", "--limit", 2, "--replicas", replicas)
    assert (done.exit_code, "2 rows in" in done.stdout) == (1, True), done.output
    first, second = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert first == whole.splitlines()[0]
    assert "ProcessDied: the engine process" in json.loads(second)["error"]


def test_a_row_that_fails_every_step_becomes_an_error_and_the_others_are_answered(
    folder: Path, whole: bytes, tmp_path: Path, failing: Callable[[Fail], set[str]]
) -> None:
    asked: list[str] = []

    def fail(engine: AsyncEngine, request: str, sent: bool) -> None:
        asked.append(request)
        if sent and POISON in running:
            raise DeviceError("the step failed: Poison")

    running = failing(fail)
    done = generate(folder, tmp_path / "out.jsonl")
    assert done.exit_code == 1, done.output
    found, expected = ((path.splitlines()) for path in ((tmp_path / "out.jsonl").read_bytes(), whole))
    assert json.loads(found.pop(3)) == {"row": 3, "id": "3", "error": "DeviceError: the step failed: Poison"}
    del expected[3]
    assert found == expected
    behind = asked[len(asked) - asked[::-1].index("3") :]
    assert behind[:2] == ["anything"] * 2, "before a row gets an error, the engine must answer a trivial request"
    assert asked.count("anything") == 2, "the row gets an error only once"


@pytest.mark.slow
def test_an_engine_that_fails_every_request_ends_the_run_without_row_errors(
    folder: Path, whole: bytes, tmp_path: Path, failing: Callable[[Fail], set[str]]
) -> None:
    failed: list[str] = []

    def fail(engine: AsyncEngine, request: str, sent: bool) -> None:
        if failed or request == POISON:
            failed.append(request)
            raise DeviceError("the step failed: Broken")

    failing(fail)
    ended = generate(folder, tmp_path / "out.jsonl")
    assert ended.exit_code == 3
    assert "Error: the step failed: Broken. " in ended.stderr
    assert ended.stderr.endswith(
        " of 6 rows were answered before the failure. Fix that, then run the same command again to continue\n"
    )
    begun = (tmp_path / "out.jsonl").read_bytes()
    assert whole.startswith(begun)
    assert len(begun.splitlines()) < int(POISON) + 1


@pytest.mark.slow
def test_an_engine_that_does_not_restart_ends_the_run(
    folder: Path, whole: bytes, tmp_path: Path, failing: Callable[[Fail], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(engine: AsyncEngine) -> None:
        raise DeviceError("no such device")

    def kill(engine: AsyncEngine, request: str, sent: bool) -> None:
        if request == POISON and not sent:
            monkeypatch.setattr(AsyncEngine, "_launch", gone)
            os.kill(engine.pid, signal.SIGKILL)

    monkeypatch.setattr("mindie_mm.worker.offline._BACK_S", 0.5)
    failing(kill)
    ended = generate(folder, tmp_path / "out.jsonl")
    assert ended.exit_code == 3
    assert "it was not restarted within 0.5 s. " in ended.stderr
    assert ended.stderr.endswith(
        " of 6 rows were answered before the failure. Fix that, then run the same command again to continue\n"
    )
    assert whole.startswith((tmp_path / "out.jsonl").read_bytes())


def test_rows_wait_for_room_in_a_small_arena(
    folder: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena has room for two of the largest rows, and six rows are requested at once."""
    monkeypatch.setenv("MINDIE_MM_ARENA_BYTES", "65536")
    done = generate(folder, tmp_path / "out.jsonl")
    assert done.exit_code == 0, done.output
    manifest = Dataset(folder).manifest
    assert 2**16 < 2 * max(shard.info.max_row_bytes for shard in manifest.shards) < manifest.num_bytes
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_all_rows_before_a_damaged_shard_are_answered(folder: Path, whole: bytes, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "run"))
    arrays = max(damaged.glob("*.safetensors"))
    data = bytearray(arrays.read_bytes())
    data[-9000] ^= 1
    arrays.write_bytes(data)
    ended = generate(damaged, tmp_path / "out.jsonl")
    assert (ended.exit_code, f"{arrays} is not the file that the run wrote" in ended.stderr) == (3, True)
    assert (tmp_path / "out.jsonl").read_bytes().splitlines() == whole.splitlines()[:4]
