"""Tests for log records, including records with exceptions."""

import asyncio
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mindie_mm import logs
from mindie_mm.errors import InputError
from mindie_mm.processes.ipc import Child

SECRET = "what the client sent"


@contextmanager
def logging_to(settings: logs.LogSettings) -> Iterator[io.StringIO]:
    """Yield the stream that records are written to, and restore the state of logging afterwards."""
    root, hook = logging.root, sys.excepthook
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in logs.OURS], logs.current()
    stream = io.StringIO()
    try:
        logs.configure(settings, "api", stream)
        yield stream
    finally:
        root.handlers[:], level, levels, current = before
        root.setLevel(level)
        for name, own in zip(logs.OURS, levels, strict=True):
            logging.getLogger(name).setLevel(own)
        logs._current = current
        logging.captureWarnings(False)
        sys.excepthook = hook


def test_a_record_is_a_line_of_text():
    with logging_to(logs.LogSettings()) as stream:
        logging.getLogger("service.x").info("said %s", "so\nand so")
        logging.getLogger("service.x").debug("not said")
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO api\[\d+\] service\.x: said so\\nand so\n"
    assert re.fullmatch(line, stream.getvalue())


def test_control_characters_of_a_terminal_are_escaped():
    with logging_to(logs.LogSettings()) as stream:
        logging.getLogger("service.x").info("a\r2026 INFO forged\x1b[2K\x7f\x9b\u2028\tb é")
        logging.getLogger("service.x").error("it failed", exc_info=InputError("c\r\x1b[2Kd"))
    escaped, failed, *trace = stream.getvalue().split("\n")
    assert escaped.endswith(r"service.x: a\r2026 INFO forged\x1b[2K\x7f\x9b\u2028\tb é")
    assert failed.endswith("service.x: it failed")
    assert trace[-2:] == [r"InputError: c\r\x1b[2Kd", ""]


def test_a_record_is_a_line_of_json():
    with logging_to(logs.LogSettings("json", "debug")) as stream:
        token = logs.request_id.set("abc")
        logging.getLogger("mindie_mm.x").debug("said %d", 1, extra={"fields": {"status": 200}})
        logs.request_id.reset(token)
        logging.getLogger("other").debug("not said")
        logging.getLogger("other").info("a lone surrogate: \udc80")
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            logging.captureWarnings(True)
            warnings.warn("careful", UserWarning, stacklevel=1)
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("pid") > 0
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "debug",
        "logger": "mindie_mm.x",
        "process": "api",
        "message": "said 1",
        "request_id": "abc",
        "status": 200,
    }
    assert "lone surrogate" in second["message"]
    assert "request_id" not in second
    assert third["logger"] == "py.warnings"
    assert "careful" in third["message"]


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_a_traceback_omits_the_messages_of_library_exceptions(format_name):
    def fail() -> None:
        try:
            {}[SECRET]
        except KeyError as error:
            raise InputError("the limit is 3") from error

    with logging_to(logs.LogSettings(format_name)) as stream:
        try:
            fail()
        except InputError:
            logging.getLogger("service.x").exception("a request")
    output = stream.getvalue()
    assert "KeyError" in output
    assert "InputError: the limit is 3" in output
    assert "in fail" in output
    assert SECRET not in output
    if format_name == "json":
        assert len(output.splitlines()) == 1


def test_an_exception_that_ends_a_process_is_logged():
    with logging_to(logs.LogSettings("json")) as stream:
        try:
            int(SECRET)
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["level"] == "critical"
    assert SECRET not in line


async def test_a_child_logs_as_its_parent_does(capfd):
    with logging_to(logs.LogSettings("json", "debug")):
        child = await Child.start("tests.logging_worker")
        async with asyncio.timeout(120):
            assert await child.channel.recv() == b"logged"
        await child.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["process"], line["logger"], line["level"]) for line in lines] == [
        ("logging_worker", "mindie_mm.worker", "debug"),
        ("logging_worker", "library", "warning"),
    ]


def test_adopting_a_library_removes_all_its_handlers(tmp_path, monkeypatch):
    library = logging.getLogger("a library")
    file = logging.FileHandler(tmp_path / "log")
    for handler in file, logging.StreamHandler(), logging.NullHandler():
        library.addHandler(handler)
    library.propagate = False
    monkeypatch.setattr(logging.root.manager, "loggerDict", {library.name: library})
    logs.adopt()
    file.close()
    assert library.handlers == []
    assert library.propagate
