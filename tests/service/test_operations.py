"""Tests for the runbook in docs/operate.md. Each command runs in a situation for which it is meant."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mindie_mm.errors import StaleReference
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, mindie
from tools.serving import RunningService

PAGE = Path(__file__).parents[2] / "docs/operate.md"
BIN = Path(sys.executable).parent
SPECS = {"pixel_values": ArraySpec((4, 588), "uint8")}

DEAD_ARENA = """
import os, signal
from mindie_mm.shm import Arena
arena = Arena.create(1 << 20)  # by a name: what is dropped is removed
print(arena.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
DEAD_REQUEST = """
import os, signal, sys
from pathlib import Path
from mindie_mm.shm import request_directory
entered = request_directory(Path(sys.argv[1]), "7f3c")
print(entered.__enter__().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def commands() -> list[str]:
    """Return the commands in the fenced blocks of shell code in the section about a full /dev/shm, in order."""
    section = PAGE.read_text().partition("\n## /dev/shm is full")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def dead(script: str, *arguments: object) -> Path:
    """Run `script`, which prints a path and then kills its own process with SIGKILL. Return the path."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return Path(ended.stdout.strip())


def is_attachable(ref: Ref) -> bool:
    try:
        attach(ref).verify()
    except StaleReference:
        return False
    return True


@dataclass
class Situation:
    """A /dev/shm that contains files of living and dead processes and a file of another program."""

    folder: Path
    arena: Arena
    """Arena of this process, as an example of an arena whose owner is alive."""
    url: str
    foreign: Path = field(init=False)
    """File of another program."""
    unrecorded: Path = field(init=False)
    """Segment in MindIE's format that no path file in the spool records."""

    def __post_init__(self) -> None:
        self.spool = self.folder / "spool"
        self.dead_arena = dead(DEAD_ARENA)
        self.dead_request = dead(DEAD_REQUEST, self.spool)
        self.of_dead_request = self.publish(self.dead_request / "shm_name.txt")
        self.path_file = self.folder / "living" / "shm_name.txt"
        self.path_file.parent.mkdir()
        self.of_path_file = self.publish(self.path_file)
        self.segment = Path("/dev/shm", mindie.create_shm(4096, self.path_file).name)
        self.unrecorded = Path("/dev/shm", mindie.create_shm(4096, self.folder / "lost.txt").name)
        self.living = self.publish(self.folder / "living" / "other.txt")
        self.foreign = Path(f"/dev/shm/of-another-program-{os.getpid()}")
        self.foreign.write_bytes(b"mindieMM" + bytes(4096))

    def publish(self, path_file: Path) -> Ref:
        with self.arena.allocate(SPECS, path_file=path_file) as block:
            return block.publish()

    def block_name(self, ref: Ref) -> str:
        return f"{self.arena.path.name}:{ref.block}"

    def run(self, command: str) -> str:
        """Run a command, with the page's example names replaced by real names. Return its output.

        The command must exit with status 0 and write nothing to standard error.
        """
        for example, real in (
            ("/var/spool/mindie_mm/7f3c/shm_name.txt", str(self.path_file)),
            ("mindie_mm-1f2a:17", self.block_name(self.of_path_file)),
            ("http://127.0.0.1:8000", self.url),
            ("psm_8c9d4828", self.unrecorded.name),
        ):
            command = command.replace(example, real)
        ended = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "MINDIE_MM_SPOOL": str(self.spool)},
        )
        assert (ended.returncode, ended.stderr) == (0, ""), (command, ended)
        return ended.stdout


@pytest.fixture
def situation(tmp_path: Path, service: RunningService) -> Iterator[Situation]:
    with Arena.create(1 << 20) as arena:
        full = Situation(tmp_path, arena, service.url)
        yield full
        for path in (full.dead_arena, full.foreign, full.segment, full.unrecorded):
            path.unlink(missing_ok=True)


def lists_all(situation: Situation, output: str) -> None:
    (row,) = [line for line in output.splitlines() if line.startswith(situation.dead_arena.name)]
    assert "DEAD" in row
    (row,) = [line for line in output.splitlines() if line.startswith(situation.arena.path.name)]
    assert "alive" in row
    assert "3 published" in row
    assert re.search(r"in other files$", output)
    assert situation.foreign.name in output


def lists_segments(situation: Situation, output: str) -> None:
    for path in (situation.foreign, situation.unrecorded):
        assert path.name in output
        assert path.exists()


def frees_the_segment(situation: Situation, output: str) -> None:
    assert output == "freed 1 segment\n"
    assert not situation.unrecorded.exists()


def names_the_dead_and_keeps_them(situation: Situation, output: str) -> None:
    for path in (situation.dead_arena, situation.dead_request):
        assert str(path) in output
        assert path.exists()
    assert is_attachable(situation.of_dead_request)


def removes_only_the_dead(situation: Situation, output: str) -> None:
    for path in (situation.dead_arena, situation.dead_request):
        assert str(path) in output
        assert not path.exists()
    assert not is_attachable(situation.of_dead_request)
    assert is_attachable(situation.of_path_file)
    assert is_attachable(situation.living)
    assert situation.segment.exists()
    assert situation.foreign.exists()


def would_free_the_path_file(situation: Situation, output: str) -> None:
    assert situation.block_name(situation.of_path_file) in output
    assert situation.segment.name in output
    assert is_attachable(situation.of_path_file)
    assert situation.segment.exists()


def frees_the_path_file(situation: Situation, output: str) -> None:
    assert situation.segment.name in output
    assert not is_attachable(situation.of_path_file)
    assert not situation.segment.exists()
    assert is_attachable(situation.living)
    situation.of_path_file = situation.publish(situation.path_file)  # for the next command, which also frees the block


def lists_blocks(situation: Situation, output: str) -> None:
    (row,) = [line for line in output.splitlines() if line.startswith(situation.block_name(situation.living))]
    assert row.endswith("other.txt")


def frees_the_block(situation: Situation, output: str) -> None:
    assert output == "freed 1 block\n"
    assert not is_attachable(situation.of_path_file)
    assert is_attachable(situation.living)
    situation.of_path_file = situation.publish(situation.path_file)


def prints_three_lines(_: Situation, output: str) -> None:
    assert len(output.splitlines()) == 3


def prints_ok(_: Situation, output: str) -> None:
    assert json.loads(output)["status"] == "ok"


def lists_as_json(situation: Situation, output: str) -> None:
    assert str(situation.arena.path) in {arena["file"] for arena in json.loads(output)}


def reports_none_of_ours(situation: Situation, output: str) -> None:
    ours = {str(situation.dead_arena), str(situation.dead_request)}
    assert ours.isdisjoint(one["what"] for one in json.loads(output)["reclaimed"])


EFFECTS: dict[str, Callable[[Situation, str], None]] = {
    "df -h /dev/shm": lambda _, said: None if "/dev/shm" in said else pytest.fail(said),
    "mindie-mm shm list": lists_all,
    "mindie-mm shm gc --dry-run": names_the_dead_and_keeps_them,
    "mindie-mm shm gc": removes_only_the_dead,
    "mindie-mm shm gc --path-file /var/spool/mindie_mm/7f3c/shm_name.txt --dry-run": would_free_the_path_file,
    "mindie-mm shm gc --path-file /var/spool/mindie_mm/7f3c/shm_name.txt": frees_the_path_file,
    "mindie-mm shm list --segments": lists_segments,
    "mindie-mm shm free psm_8c9d4828": frees_the_segment,
    "mindie-mm shm list --blocks": lists_blocks,
    "mindie-mm shm free mindie_mm-1f2a:17": frees_the_block,
    "mindie-mm shm free /var/spool/mindie_mm/7f3c/shm_name.txt": frees_the_block,
    "mindie-mm shm watch --count 3": prints_three_lines,
    "curl -sf http://127.0.0.1:8000/health": prints_ok,
    "mindie-mm shm list --json": lists_as_json,
    "mindie-mm shm gc --json": reports_none_of_ours,
}


def test_every_command_of_the_runbook_has_its_documented_effect(situation: Situation) -> None:
    documented = commands()
    assert documented == list(EFFECTS), "each command of the page has its effect here, in the same order"
    for command in documented:
        EFFECTS[command](situation, situation.run(command))
