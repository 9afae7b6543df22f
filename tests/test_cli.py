"""The command line, as a shell runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindie_mm.shm import Arena, ArraySpec

BIN = Path(sys.executable).parent / "mindie-mm"


def run(*arguments, status=0, **environment):
    ended = subprocess.run(
        [BIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended.stdout if status == 0 else ended.stderr or ended.stdout


@pytest.fixture
def block(tmp_path):
    """A published block of a request that still lives."""
    path_file = tmp_path / "request" / "shm_name.txt"
    path_file.parent.mkdir()
    with Arena.create(1 << 20) as arena:
        with arena.allocate({"pixel_values": ArraySpec((4, 588), "uint8")}, path_file=path_file) as block:
            block["pixel_values"][...] = 1
            ref = block.publish()
        yield f"mindie_mm-{ref.arena:04x}", ref, path_file


def test_list_shows_arenas_and_blocks(block):
    name, ref, path_file = block
    (arena,) = [arena for arena in json.loads(run("shm", "list", "--json")) if arena["file"].endswith(name)]
    assert arena["alive"]
    assert arena["owner"]["pid"] == os.getpid()
    (listed,) = arena["blocks"]
    assert (listed["block"], listed["generation"]) == (ref.block, ref.generation)
    assert listed["request"] == str(path_file)
    assert f"{name}:{ref.block}" in run("shm", "list")


@pytest.mark.parametrize("target", ["block", "path file"])
def test_free_frees_what_it_is_told(block, target):
    name, ref, path_file = block
    what = f"{name}:{ref.block}" if target == "block" else path_file
    assert json.loads(run("shm", "free", "--json", what)) == {"freed": 1}
    listed = json.loads(run("shm", "list", "--json"))
    assert [arena["blocks"] for arena in listed if arena["file"].endswith(name)] == [[]]


def test_free_names_what_it_does_not_know():
    assert "nothing-here is neither" in run("shm", "free", "nothing-here", status=2)


def test_gc_removes_what_a_killed_owner_leaves(tmp_path):
    create = "from mindie_mm.shm import Arena; arena = Arena.create(1 << 20)"
    script = f"import os, signal; {create}; os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False)
    collected = json.loads(run("shm", "gc", "--json", "--spool", tmp_path))
    assert len(collected["arenas"]) == 1
    assert collected["arena_bytes"] >= 1 << 20


def test_models_lists_every_file_of_the_package():
    import mindie_mm.models

    files = {path.stem for path in Path(mindie_mm.models.__file__).parent.glob("*.py")} - {"__init__"}
    assert {family["name"] for family in json.loads(run("models", "--json"))} >= files


def test_doctor_says_what_is_fine_and_what_is_not(random_checkpoint, tmp_path):
    findings = json.loads(run("doctor", random_checkpoint, "--json"))
    assert {finding["status"] for finding in findings} == {"ok"}
    found = run("doctor", tmp_path, "--json", "--arena-bytes", 10**15, status=1)
    problems = {finding["subject"]: finding["advice"] for finding in json.loads(found) if finding["status"] == "error"}
    assert problems.keys() == {"checkpoint", "shared memory"}
    assert "--shm-size" in problems["shared memory"]


def test_ask_answers_about_a_picture(random_checkpoint, tmp_path):
    picture = tmp_path / "picture.png"
    Image.fromarray(np.full((60, 60, 3), 200, np.uint8)).save(picture)
    asked = ("ask", "What?", "--image", picture, "--model", random_checkpoint, "--max-tokens", 3)
    answer = json.loads(run(*asked, "--json"))
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["timings"]["tower_s"] > 0
    assert list(tmp_path.iterdir()) == [picture]


def test_mistakes_are_one_line(random_checkpoint):
    said = run("ask", "What?", "--image", "/no/such.png", "--model", random_checkpoint, status=1)
    assert "/no/such.png" in said
    assert "Traceback" not in said
    assert "MINDIE_MM_NUM_TOKENIZERS is 'two'" in run("doctor", status=1, MINDIE_MM_NUM_TOKENIZERS="two")


def test_serve_help_names_every_setting():
    import dataclasses

    from mindie_mm.config import EngineConfig, ServiceConfig, WorkerConfig

    said = run("serve", "--help")
    for cls in (ServiceConfig, WorkerConfig, EngineConfig):
        for field in dataclasses.fields(cls):
            if field.name not in ("model", "engine"):
                assert f"--{field.name.replace('_', '-')}" in said
