"""Tests for the check that refuses schemas if they take too long to compile."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest

from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.process.engine_process import received
from mindie_mm.engine.requests.engine_messages import Add, ToEngine
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, ProcessDied
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes.ipc import ChildChannel
from mindie_mm.structured import schema_check
from mindie_mm.structured.grammar import KEPT, Grammars
from mindie_mm.structured.outputs import MAX_STRUCTURE_BYTES, StructuredOutputs
from mindie_mm.structured.schema_check import COMPILE_S, SchemaCheck
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.processor_time import processor_s

LONG = '{{"type": "integer", "multipleOf": {}}}'
"""A schema that takes seconds to minutes to compile if the number is a large prime."""
FIELDS = {f"field_{i}": {"enum": [f"choice {i} {j}" for j in range(9)]} for i in range(30)}


def fits(schema: str) -> StructuredOutputs:
    return StructuredOutputs(json=schema)


@pytest.fixture
async def check() -> AsyncIterator[SchemaCheck]:
    ready = SchemaCheck(Checkpoint.open(None).path, None)
    await ready.verify(fits("{}"))
    yield ready
    await ready.close()


def process() -> psutil.Process:
    (found,) = [child for child in psutil.Process().children() if schema_check.__name__ in child.cmdline()]
    return found


def used_s() -> float:
    """Return the processor time of the process that checks schemas, and of its children."""
    return processor_s(process().pid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "object", "properties": FIELDS}}},
        {"enum": [f"value number {i}" for i in range(100)]},
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"type": "object", "properties": {"e": {"format": "email", "type": "string"}, "n": {"multipleOf": 0.01}}},
    ],
)
async def test_ordinary_schemas_pass(check: SchemaCheck, schema: dict[str, Any]) -> None:
    await check.verify(fits(json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        LONG.format(1000003),
        json.dumps({"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 99991}], "minItems": 1}),
        json.dumps({"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}|.*b.{{{i + 3}}})$"} for i in range(60)]}),
    ],
)
async def test_a_schema_that_takes_too_long_is_refused(check: SchemaCheck, schema: str) -> None:
    before = used_s()
    with pytest.raises(InputError, match=r"more processor time than the limit of 0.1 s"):
        await check.verify(fits(schema))
    assert used_s() - before < 0.25
    before = used_s()
    with pytest.raises(InputError, match="processor time"):
        await check.verify(fits(schema))
    assert used_s() == before, "the result is cached"
    await check.verify(fits('{"type": "boolean"}'))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"type": "string", "pattern": "((a|b)*c(a|b){900})*x"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "minItems": 10**9},
        {"anyOf": [{"enum": [f"v{i}"]} for i in range(1000)]},
        {"allOf": [{"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b*{j}"} for i in range(6)]} for j in range(6)]},
    ],
)
async def test_the_time_of_a_hostile_schema_is_bounded(check: SchemaCheck, schema: dict[str, object]) -> None:
    before = used_s()
    with contextlib.suppress(InputError):
        await check.verify(fits(json.dumps(schema)))
    assert used_s() - before < 0.25


async def test_a_schema_that_the_engine_must_compile_again_is_checked_again(
    check: SchemaCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second check includes a pause, too, so that a client with many schemas rarely delays a step."""
    tried: list[str] = []
    ask = check._ask

    async def asking(wanted: StructuredOutputs) -> str:
        tried.append(wanted.json or "")
        return await ask(wanted)

    monkeypatch.setattr(check, "_ask", asking)
    first, second, *others = [json.dumps({"const": i}) for i in range(KEPT + 1)]
    for schema in (first, second, *others[:-1], first, others[-1]):
        await check.verify(fits(schema))
    assert tried == [first, second, *others]
    await check.verify(fits(first))  # not checked again: this schema was used recently, so it is still compiled
    await check.verify(fits(second))  # checked again: other schemas have evicted this schema
    assert tried == [first, second, *others, second]


async def test_a_process_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    check = SchemaCheck(tmp_path / "gone", None)
    with pytest.raises(
        ProcessDied, match=f"structured outputs did not start: {tmp_path}/gone is not a checkpoint directory"
    ):
        await check.verify(fits("{}"))
    await check.close()


def test_the_engine_makes_a_step_between_two_compilations() -> None:
    """The engine takes messages up to and including the first schema that it has not compiled yet."""
    grammars = Grammars(load_tokenizer(Checkpoint.open(None)), [0])
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder[ToEngine](ToEngine)
    schemas = ["{}", None, '{"const": 1}', '{"const": 1}', '{"const": 2}', "{}"]
    sent = [Add(str(i), b"", SamplingParams(json_schema=schema)) for i, schema in enumerate(schemas)]
    taken: list[int] = []
    mine, theirs = socket.socketpair()
    engine = cast("BaseEngine", SimpleNamespace(grammars=grammars, has_work=lambda: True))
    engine.must_compile = partial(BaseEngine.must_compile, engine)  # type: ignore[method-assign]
    with ChildChannel(theirs.detach()) as channel, ChildChannel(mine.detach()) as parent:
        for add in sent:
            parent.send(encoder.encode(add))
        while messages := received(channel, engine, decoder):
            taken.append(len(messages))
            for message in messages:
                if schema := decoder.decode(message).params.json_schema:  # type: ignore[union-attr]
                    grammars.constraint(fits(schema))
    assert taken == [1, 2, 2, 1]


async def test_a_schema_that_is_too_large_is_refused_unread(check: SchemaCheck) -> None:
    with pytest.raises(InputError, match=f"{MAX_STRUCTURE_BYTES + 2} bytes; the limit is {MAX_STRUCTURE_BYTES}"):
        await check.verify(fits(f'"{"x" * MAX_STRUCTURE_BYTES}"'))


async def test_canceled_checks_do_not_run(check: SchemaCheck) -> None:
    before = used_s()
    asked = [asyncio.create_task(check.verify(fits(LONG.format(1000003 + i)))) for i in range(40)]
    await asyncio.sleep(0)
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)
    await check.verify(fits('{"type": "null"}'))
    assert used_s() - before < 0.5, "of the 40 checks, only the one that has begun runs"
    with pytest.raises(InputError):
        await check.verify(fits("5"))


async def test_canceled_checks_do_not_enlarge_the_cache_of_results(check: SchemaCheck) -> None:
    """The check must not remember more schemas than the engine keeps compiled.

    Otherwise, a schema that the engine has to compile again could pass the check without a pause.
    """
    for i in range(KEPT + 4):
        asked = asyncio.create_task(check.verify(fits(json.dumps({"const": i}))))
        while (asking := check._asking) is None or asking.done():  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked, asking})
    assert [*check._known] == [fits(json.dumps({"const": i})) for i in range(4, KEPT + 4)]


async def test_a_process_that_dies_or_hangs_is_replaced(check: SchemaCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "silence_s", 2.0)
    died = process()
    died.kill()
    await check.verify(fits('{"type": "null"}'))
    hung = process()
    assert hung.pid != died.pid
    os.kill(hung.pid, signal.SIGSTOP)
    await check.verify(fits('{"type": "string"}'))
    assert not psutil.pid_exists(hung.pid)


async def test_closing_does_not_wait_for_schemas() -> None:
    check = SchemaCheck(Checkpoint.open(None).path, None)
    await check.verify(fits("{}"))
    before = processor_s(os.getpid())
    asked = [asyncio.create_task(check.verify(fits(LONG.format(1000003 + i)))) for i in range(20)]
    await asyncio.sleep(0)
    await check.close()
    assert processor_s(os.getpid()) - before < 10 * COMPILE_S, "waiting schemas are not compiled"
    for ended in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(ended, ProcessDied | asyncio.CancelledError)
    assert not [child for child in psutil.Process().children() if schema_check.__name__ in child.cmdline()]


def test_a_busy_machine_does_not_refuse_a_schema() -> None:
    """TimeoutError ends the process, so that another process checks the schema."""

    def wait(_: StructuredOutputs) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # replace the handler of pytest-timeout
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # instead of 10 s
        time.sleep(60)

    with pytest.raises(TimeoutError, match="too busy to compile the JSON schema within 10 s"):
        schema_check._tried(cast("Grammars", SimpleNamespace(rehearse=wait)), fits("{}"))
