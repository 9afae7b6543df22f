"""Tests for every module in tools/, bench/, training/ and tests/ that runs as a command with `python -m`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools", "bench", "training", "tests")
OTHER_ENVIRONMENTS = {"bench.peers.runner", "bench.batch.transformers_map", "tests.published.record_resolved"}
"""Scripts that import packages which this environment does not have."""
HELP, UNKNOWN = "--help", "--no-such-argument"
Outcomes = dict[str, tuple[int | str, str]]
WALK = """
import contextlib, io, json, runpy, signal, sys

def outcome(module, arguments):
    sys.argv, out = [module, *arguments], io.StringIO()
    signal.alarm(60)  # a command that ignores its arguments may run for hours
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code or 0, out.getvalue()
    except BaseException as error:
        return repr(error), out.getvalue()
    finally:
        signal.alarm(0)
    return "did not exit", out.getvalue()

signal.signal(signal.SIGALRM, signal.default_int_handler)
modules, option = json.load(sys.stdin)
print(json.dumps({module: outcome(module, [option]) for module in modules}))
"""


def entry_points() -> Iterator[str]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            content = path.read_bytes()
            if path.name == "__main__.py":
                yield ".".join(parts[:-1])
            elif b"__main__" in content and any(map(_is_main, ast.parse(content).body)):
                yield ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "'__main__'" in ast.unparse(statement.test)


MODULES = sorted({*entry_points()} - OTHER_ENVIRONMENTS)


def outcomes(option: str, folder: Path) -> Outcomes:
    """Run every entry point with one option, all in one process in an empty folder. Return status and output."""
    given = json.dumps([MODULES, option])
    command = [sys.executable, "-c", WALK]
    ended = subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True, timeout=600, check=True)
    assert not [*folder.iterdir()]
    found: Outcomes = json.loads(ended.stdout)
    return found


def test_every_kind_of_entry_point_is_found() -> None:
    assert {"tools.demo", "tools.random_checkpoint", "bench", "bench.serve", "training.train_tiny"} <= {*MODULES}
    assert {"tests.soak", "tests.fuzz", "tests.ascend", "tests.lockdown.acts"} <= {*MODULES}


@pytest.mark.slow
def test_help_shows_the_usage(tmp_path: Path) -> None:
    assert not {name: end for name, end in outcomes(HELP, tmp_path).items() if end[0] != 0 or "usage:" not in end[1]}


@pytest.mark.slow
def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    assert not {
        name: end for name, end in outcomes(UNKNOWN, tmp_path).items() if end[0] != 2 or "error: " not in end[1]
    }


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "no-such-benchmark"],
        pytest.param(["tools.random_checkpoint", "out", "no-such-size"], marks=pytest.mark.slow),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(command: list[str], tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"usage: python -m {command[0]} ")
    assert "no-such" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [*tmp_path.iterdir()]
