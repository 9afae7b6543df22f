"""Run fuzzing targets: guided by coverage if atheris is installed, and otherwise by seeded mutation."""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz import attached, media, parsers
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target

TARGETS: Mapping[str, Callable[[], AbstractContextManager[Target]]] = {
    "words": parsers.words,
    "block_header": parsers.block_header,
    "arena_header": parsers.arena_header,
    "path_file": parsers.path_file,
    "mindie_words": parsers.mindie_words,
    "living_arena": attached.living_arena,
    "arena_file": attached.arena_file,
    "images": media.images,
    "videos": media.videos,
    "clips": media.clips,
    "embeddings": media.embeddings,
}
SLOW = {"living_arena": 10, "arena_file": 10, "images": 10, "videos": 10, "clips": 10, "embeddings": 10}
"""Divisors of the number of inputs, for targets that are slow because they write or decode a file for each input."""
HANG_S = 30.0
_KEPT = 256


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run without findings."""

    inputs: int
    accepted: int
    """Number of inputs that the code accepted. The number shows whether the fuzzer gets past the checks."""
    seconds: float


class Finding(AssertionError):
    """An input for which the code breaks a rule."""


def run(name: str, inputs: int, seed: int) -> Result:
    """Run a target with seeded mutation. The inputs depend only on the seed. A hang ends the process.

    Raises:
        Finding: The code breaks a rule for an input.
    """
    draw = Random(f"{name} {seed}")
    accepted, started = 0, time.monotonic()
    with TARGETS[name]() as target:
        corpus = list(target.seeds)
        for number in range(inputs):
            if number % 64 == 0:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
            data = mutated(draw.choice(corpus), draw, corpus, target.max_bytes)
            if _accepts(target, data):
                accepted += 1
                # Accepted inputs reach more code, so they join the corpus. The seeds always stay in the corpus.
                if len(corpus) < len(target.seeds) + _KEPT:
                    corpus.append(data)
                else:
                    corpus[len(target.seeds) + int(draw.random() * _KEPT)] = data
        faulthandler.cancel_dump_traceback_later()
    return Result(inputs, accepted, time.monotonic() - started)


def _accepts(target: Target, data: bytes) -> bool:
    try:
        return target.check(data)
    except BaseException as error:
        raise Finding(f"{type(error).__name__}: {error}, for the input {data.hex()}") from error


def run_guided(name: str, inputs: int, seed: int) -> None:
    """Run a target under atheris, which ends the process. The exit status is 0 if there is no finding.

    Raises:
        ImportError: atheris is not installed.
    """
    import atheris

    accepted = counted = 0
    started = time.monotonic()
    draw = Random(f"{name} {seed}")
    with ExitStack() as stack:  # also closed explicitly below, because atheris ends the process inside this block
        target, corpus = stack.enter_context(TARGETS[name]()), stack.enter_context(tempfile.TemporaryDirectory())
        for number, data in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(data)

        def check(data: bytes) -> None:
            nonlocal accepted, counted
            if counted == inputs:
                return
            try:
                accepted += _accepts(target, data)
            except Finding:
                stack.close()
                raise
            counted += 1
            if counted == inputs:
                say(name, Result(counted, accepted, time.monotonic() - started), "atheris")
                stack.close()

        def mutate(data: bytes, max_size: int, _: int) -> bytes:
            if draw.random() < 0.5:
                return mutated(data, draw, target.seeds, max_size)
            return bytes(atheris.Mutate(data, max_size))

        options = [f"-runs={inputs}", f"-seed={seed}", f"-max_len={target.max_bytes}", f"-timeout={HANG_S:.0f}"]
        options += ["-rss_limit_mb=2048", "-verbosity=0", f"-artifact_prefix={corpus}/", corpus]
        atheris.Setup([name, *options], check, custom_mutator=mutate)
        atheris.Fuzz()


def say(name: str, result: Result, how: str) -> None:
    """Print a line with the figures of a run."""
    figures = f"{result.inputs:>9,} inputs, {result.accepted:>9,} of them accepted, {result.seconds:6.1f} s"
    print(f"{name:14} {figures} ({how})", flush=True)
