"""The runbook of docs/operate.md: each of its commands, run in what it is for."""

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
    """The lines of every fenced block of the page, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def dead(script: str, *arguments: object) -> Path:
    """What a process printed before it died by SIGKILL."""
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
    """A full /dev/shm, with a bit of everything in it."""

    folder: Path
    arena: Arena
    """This process's: it lives."""
    url: str
    foreign: Path = field(init=False)
    """Another program's file."""

    def __post_init__(self) -> None:
        self.spool = self.folder / "spool"
        self.dead_arena = dead(DEAD_ARENA)
        self.dead_request = dead(DEAD_REQUEST, self.spool)
        self.of_dead_request = self.publish(self.dead_request / "shm_name.txt")
        self.path_file = self.folder / "living" / "shm_name.txt"
        self.path_file.parent.mkdir()
        self.of_path_file = self.publish(self.path_file)
        self.segment = Path("/dev/shm", mindie.create_shm(4096, self.path_file).name)
        self.living = self.publish(self.folder / "living" / "other.txt")
        self.foreign = Path(f"/dev/shm/of-another-program-{os.getpid()}")
        self.foreign.write_bytes(b"mindieMM" + bytes(4096))

    def publish(self, path_file: Path) -> Ref:
        with self.arena.allocate(SPECS, path_file=path_file) as block:
            return block.publish()

    def block_name(self, ref: Ref) -> str:
        return f"{self.arena.path.name}:{ref.block}"

    def run(self, command: str) -> str:
        """What the command, with the examples' names replaced, prints; it must end with 0."""
        for example, real in (
            ("/var/spool/mindie_mm/7f3c/shm_name.txt", str(self.path_file)),
            ("mindie_mm-1f2a:17", self.block_name(self.of_path_file)),
            ("http://127.0.0.1:8000", self.url),
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
        made = Situation(tmp_path, arena, service.url)
        yield made
        for path in (made.dead_arena, made.foreign, made.segment):
            path.unlink(missing_ok=True)


def sees_all(it: Situation, said: str) -> None:
    (row,) = [line for line in said.splitlines() if line.startswith(it.dead_arena.name)]
    assert "DEAD" in row
    (row,) = [line for line in said.splitlines() if line.startswith(it.arena.path.name)]
    assert "alive" in row
    assert "3 published" in row
    assert re.search(r"in other files$", said)


def names_the_foreign_file(it: Situation, said: str) -> None:
    assert it.foreign.name in said


def changes_nothing(it: Situation, said: str) -> None:
    for path in (it.dead_arena, it.dead_request):
        assert str(path) in said
        assert path.exists()
    assert is_attachable(it.of_dead_request)


def takes_the_dead_alone(it: Situation, said: str) -> None:
    for path in (it.dead_arena, it.dead_request):
        assert str(path) in said
        assert not path.exists()
    assert not is_attachable(it.of_dead_request)
    assert is_attachable(it.of_path_file)
    assert is_attachable(it.living)
    assert it.segment.exists()
    assert it.foreign.exists()


def would_free_the_path_file(it: Situation, said: str) -> None:
    assert it.block_name(it.of_path_file) in said
    assert it.segment.name in said
    assert is_attachable(it.of_path_file)
    assert it.segment.exists()


def frees_the_path_file(it: Situation, said: str) -> None:
    assert it.segment.name in said
    assert not is_attachable(it.of_path_file)
    assert not it.segment.exists()
    assert is_attachable(it.living)
    it.of_path_file = it.publish(it.path_file)  # for those who free it in another way


def lists_blocks(it: Situation, said: str) -> None:
    (row,) = [line for line in said.splitlines() if line.startswith(it.block_name(it.living))]
    assert row.endswith("other.txt")


def frees_it(it: Situation, said: str) -> None:
    assert said == "freed 1 block\n"
    assert not is_attachable(it.of_path_file)
    assert is_attachable(it.living)
    it.of_path_file = it.publish(it.path_file)


def says_three_lines(_: Situation, said: str) -> None:
    assert len(said.splitlines()) == 3


def says_ok(_: Situation, said: str) -> None:
    assert json.loads(said)["status"] == "ok"


def lists_as_json(it: Situation, said: str) -> None:
    assert str(it.arena.path) in {arena["file"] for arena in json.loads(said)}


def finds_nothing_more(it: Situation, said: str) -> None:
    ours = {str(it.dead_arena), str(it.dead_request)}
    assert ours.isdisjoint(one["what"] for one in json.loads(said)["reclaimed"])


EFFECTS: dict[str, Callable[[Situation, str], None]] = {
    "df -h /dev/shm": lambda _, said: None if "/dev/shm" in said else pytest.fail(said),
    "mindie-mm shm list": sees_all,
    "ls -lAS /dev/shm": names_the_foreign_file,
    "mindie-mm shm gc --dry-run": changes_nothing,
    "mindie-mm shm gc": takes_the_dead_alone,
    "mindie-mm shm gc --path-file /var/spool/mindie_mm/7f3c/shm_name.txt --dry-run": would_free_the_path_file,
    "mindie-mm shm gc --path-file /var/spool/mindie_mm/7f3c/shm_name.txt": frees_the_path_file,
    "mindie-mm shm list --blocks": lists_blocks,
    "mindie-mm shm free mindie_mm-1f2a:17": frees_it,
    "mindie-mm shm free /var/spool/mindie_mm/7f3c/shm_name.txt": frees_it,
    "mindie-mm shm watch --count 3": says_three_lines,
    "curl -sf http://127.0.0.1:8000/health": says_ok,
    "mindie-mm shm list --json": lists_as_json,
    "mindie-mm shm gc --json": finds_nothing_more,
}


def test_every_command_of_the_runbook_does_what_the_page_says(situation: Situation) -> None:
    found = commands()
    assert found == list(EFFECTS), "each command of the page has its effect here, in the same order"
    for command in found:
        EFFECTS[command](situation, situation.run(command))
