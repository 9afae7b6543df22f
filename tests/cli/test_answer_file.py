"""Tests for the answer file: writes that fail, locks, and files that contain the answers of another run."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import msgspec
import pytest

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, StorageError
from mindie_mm.worker.answer_file import Origin, continued

ORIGIN = Origin(run="r", model="", model_digest="m", sampling=SamplingParams())
LINE = b'{"row":%d,"id":null,"text":"a"}\n'


def answer(output: Path, *rows: int) -> list[object]:
    """Append the answers to `rows`, and return the state that the file had before."""
    with continued(output, ORIGIN) as (append, *begun):
        for row in rows:
            append(LINE % row)
    return begun


def test_an_unrelated_os_error_is_not_reported_as_a_write_error(tmp_path: Path) -> None:
    """Errors of operations other than writing the file are raised unchanged, for example EAGAIN from a fork."""
    with pytest.raises(BlockingIOError), continued(tmp_path / "out.jsonl", ORIGIN):
        raise BlockingIOError(errno.EAGAIN, "no process")


def test_a_partial_line_is_reported_and_removed_by_the_next_call(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert answer(output, 0) == [0, 0, None]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (output.stat().st_size + 5, hard))
    try:
        with pytest.raises(StorageError, match=r"out\.jsonl cannot be written: File too large"):
            answer(output, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.read_bytes() == LINE % 0 + b'{"row'
    assert answer(output, 1) == [1, 0, None]
    assert output.read_bytes() == LINE % 0 + LINE % 1


def test_a_second_call_cannot_write_the_same_file(tmp_path: Path) -> None:
    with continued(tmp_path / "out.jsonl", ORIGIN), pytest.raises(InputError, match="another process is writing"):
        answer(tmp_path / "out.jsonl", 0)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weights_digest", "other", "weights_digest was  and is now other"),
        ("settings", {"weights": "int8"}, "settings was weights auto and is now weights int8"),
        ("versions", {"torch": "3"}, "versions was torch 2 and is now torch 3"),
        ("sampling", SamplingParams(top_p=0.5), "top_p was 1.0 and is now 0.5"),
    ],
)
def test_answers_of_another_origin_are_refused(part: str, value: object, message: str, tmp_path: Path) -> None:
    first = msgspec.structs.replace(ORIGIN, settings={"weights": "auto", "family": ""}, versions={"torch": "2"})
    with continued(tmp_path / "out.jsonl", first) as (append, *_):
        append(LINE % 0)
    if isinstance(value, dict):
        value = {**getattr(first, part), **value}
    other = msgspec.structs.replace(first, **{part: value})
    with (
        pytest.raises(
            InputError, match=rf"out\.jsonl has answers of another run: {message}\. Choose another file for --output"
        ),
        continued(tmp_path / "out.jsonl", other),
    ):
        pass
    moved = msgspec.structs.replace(first, model="/elsewhere")
    with continued(tmp_path / "out.jsonl", moved) as (_, begun, *_):
        assert begun == 1


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "float16", "device was npu and is now cpu"),
        ("npu:2", "float32", "dtype was float16 and is now float32"),
        ("cpu", "float32", "device was npu and is now cpu; dtype was float16 and is now float32"),
    ],
)
def test_answers_of_another_device_or_data_type_are_refused(
    device: str, dtype: str, message: str, tmp_path: Path
) -> None:
    answer(tmp_path / "out.jsonl", 0)
    ORIGIN.require_engine(tmp_path / "out.jsonl", "npu:0", "float16")
    ORIGIN.require_engine(tmp_path / "out.jsonl", "npu:1", "float16")
    with pytest.raises(InputError, match=f"has answers of another run: {message}"):
        ORIGIN.require_engine(tmp_path / "out.jsonl", device, dtype)
    assert answer(tmp_path / "out.jsonl", 1) == [1, 0, None]
