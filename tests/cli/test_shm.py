"""Tests for the commands of `mindie-mm shm`."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mindie_mm.shm import Arena, ArraySpec, attach, collect, request_directory
from mindie_mm.shm.mindie import create_shm
from tests.cli.shell import BIN, run

SPECS = {"pixel_values": ArraySpec((4, 588), "uint8")}
PREAMBLE = """
import os, signal, sys
from pathlib import Path
from mindie_mm.shm import Arena, ArraySpec, request_directory
def say(*values): print(*values, flush=True)
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""


REQUEST = "entered = request_directory(Path(sys.argv[1])); say(entered.__enter__().path)"


def run_and_kill(script, *arguments):
    """Run a script in a process that then kills itself with SIGKILL, and return the words of the output."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{PREAMBLE}{script}\ndie()", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.split()


def publish(arena, path_file):
    with arena.allocate(SPECS, path_file=path_file) as block:
        block["pixel_values"][...] = 1
        return block.publish()


@pytest.fixture
def arena():
    with Arena.create(1 << 20) as arena:
        yield arena


@pytest.fixture
def path_file(tmp_path):
    path_file = tmp_path / "request" / "shm_name.txt"
    path_file.parent.mkdir(mode=0o700)
    return path_file


@pytest.fixture
def dead_arena():
    (path,) = run_and_kill("arena = Arena.create(1 << 20); say(arena.path)")
    yield Path(path)
    Path(path).unlink(missing_ok=True)


def listed(arena):
    (found,) = [found for found in json.loads(run("shm", "list", "--json")) if found["file"] == str(arena.path)]
    return found


def gc(*arguments, status=0, **environment):
    """Run `gc --json`. Return the cause for each arena, block and request folder that was reclaimed."""
    collected = json.loads(run("shm", "gc", "--json", *arguments, status=status, **environment))
    return {one["what"]: one["cause"] for one in collected["reclaimed"]}


@pytest.mark.parametrize(
    "command",
    [
        ("shm", "list", "-b"),
        ("shm", "gc", "--dry-run", "--spool", "/var/empty"),
        ("shm", "watch", "--count", "1"),
        ("shm", "free", "--help"),
        ("--help",),
    ],
)
def test_the_tools_start_without_slow_imports(command, tmp_path):
    command = [str(tmp_path) if argument == "/var/empty" else argument for argument in command]
    script = f"""
import sys
from mindie_mm.cli import main
try:
    main({command!r})
finally:
    print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    slow = {"numpy", "torch", "transformers", "msgspec", "rich", "fastapi", "asyncio", "PIL", "pydantic", "service"}
    if command == ["--help"]:  # the help needs the options of all commands, so it imports the settings
        slow -= {"msgspec"}
    assert slow.isdisjoint(ended.stderr.split())


def test_list_shows_arenas_and_blocks(arena, path_file):
    ref = publish(arena, path_file)
    found = listed(arena)
    assert found["alive"]
    assert found["owner"]["pid"] == os.getpid()
    assert found["stats"]["allocations"] == 1
    (block,) = found["blocks"]
    assert (block["block"], block["generation"]) == (ref.block, ref.generation)
    assert block["request"] == str(path_file)
    printed = run("shm", "list")
    (row,) = [line for line in printed.splitlines() if line.startswith(arena.path.name)]
    assert f"alive, pid {os.getpid()}" in row
    assert "1 published" in row
    assert row.endswith(str(path_file)), "in a pipe, a row is not wrapped"
    assert "/dev/shm: " in printed
    assert f"{arena.path.name}:{ref.block}" not in printed
    assert f"{arena.path.name}:{ref.block}" in run("shm", "list", "-b")


@pytest.fixture
def segment(tmp_path):
    """Create a segment and remove its record, as if MindIE had been killed."""
    segment = create_shm(5000, tmp_path / "path_file.txt")
    os.utime(f"/dev/shm/{segment.name}", (time.time() - 3 * 86400,) * 2)
    yield segment
    segment.unlink()


def test_list_shows_segments_that_no_path_file_records_and_only_free_removes_them(arena, segment, tmp_path):
    other = Path("/dev/shm", f"test-{os.getpid()}.bin")
    other.write_bytes(b"x" * 10)
    spool = tmp_path / "spool"
    with request_directory(spool) as request:
        recorded = create_shm(4096, request.path_file)
        rows = run("shm", "list", "--spool", spool).splitlines()
        assert not any(line.startswith(recorded.name) for line in rows)
    (row,) = [line.split() for line in rows if line.startswith(segment.name)]
    assert row == [segment.name, "uid", str(os.geteuid()), "3", "d", "4.9", "KiB", "pid", str(os.getpid())]
    (row,) = [line.split() for line in rows if line.startswith(other.name)]
    assert row[-3:-1] == ["10", "B"]
    assert row[-1] in ("no", "unknown")
    segments = {one["name"]: one for one in json.loads(run("shm", "list", "--segments", "--json"))}
    assert arena.path.name not in segments
    assert segments[segment.name]["num_bytes"] == 5000
    assert (segments[segment.name]["mapped"], segments[segment.name]["pids"]) == (True, [os.getpid()])
    assert segments[other.name]["mapped"] in (False, None)
    gc("--spool", spool)
    assert "is an arena" in run("shm", "free", segment.name, arena.path.name, status=2)
    assert other.exists()
    assert Path("/dev/shm", segment.name).exists()
    assert json.loads(run("shm", "free", "--json", segment.name, f"/dev/shm/{segment.name}", other.name)) == {
        "freed": 2
    }
    assert not other.exists()
    assert not Path("/dev/shm", segment.name).exists()


def test_list_marks_arenas_of_dead_owners(dead_arena):
    (row,) = [line for line in run("shm", "list").splitlines() if line.startswith(dead_arena.name)]
    assert "DEAD, pid" in row


@pytest.mark.parametrize("target", ["block", "path file"])
def test_free_frees_its_target_only_once(arena, path_file, target):
    ref = publish(arena, path_file)
    what = f"{arena.path.name}:{ref.block}" if target == "block" else path_file
    assert json.loads(run("shm", "free", "--json", what)) == {"freed": 1}
    assert listed(arena)["blocks"] == []
    assert json.loads(run("shm", "free", "--json", what)) == {"freed": 0}


def test_free_frees_nothing_if_one_target_is_wrong(arena, path_file):
    ref = publish(arena, path_file)
    printed = run("shm", "free", path_file, "nothing-here", status=2)
    (error,) = printed.splitlines()
    assert error.startswith("Error: nothing-here: neither a block or segment of `mindie-mm shm list -b` nor a path ")
    assert error.endswith(": No such file or directory")
    attach(ref).verify()


def test_the_valid_lines_of_a_damaged_path_file_are_freed(arena, path_file):
    for command in (("free",), ("gc", "--path-file")):
        publish(arena, path_file)
        with path_file.open("a") as file:
            file.write("mindie_mm-12")
        assert "not references" in run("shm", *command, path_file, status=1)
        assert listed(arena)["blocks"] == []
        path_file.unlink()


def test_gc_and_its_dry_run_report_the_same_causes(dead_arena, arena, path_file, tmp_path):
    spool = tmp_path / "spool"
    (dead_request,) = run_and_kill(REQUEST, spool)
    with arena.allocate(SPECS, path_file=Path(dead_request, "shm_name.txt")) as block:
        of_the_dead = block.publish()
    living = publish(arena, path_file)
    orphan = publish(arena, tmp_path / "gone.txt")
    (tmp_path / "gone.txt").unlink()
    expected = {
        str(dead_arena): "owner_dead",
        dead_request: "request_dead",
        f"{arena.path.name}:{orphan.block}": "request_gone",
    }
    for dry in ("--dry-run", "--dry-run"):
        assert expected.items() <= gc("--spool", spool, dry).items()
    assert dead_arena.exists()
    assert Path(dead_request).exists()
    assert len(listed(arena)["blocks"]) == 3
    attach(of_the_dead).verify()
    assert gc("--spool", spool).items() >= expected.items()
    assert not dead_arena.exists()
    assert not Path(dead_request).exists()
    assert [block["block"] for block in listed(arena)["blocks"]] == [living.block]
    assert gc("--spool", spool).keys().isdisjoint(expected)


def test_a_collection_reports_each_object_when_it_is_reclaimed(dead_arena):
    reported = []
    collected = collect(report=reported.append)
    assert tuple(reported) == collected.reclaimed
    assert str(dead_arena) in [one.what for one in reported]


def test_gc_of_a_path_file_frees_only_its_blocks_and_can_be_repeated(dead_arena, arena, path_file):
    ref = publish(arena, path_file)
    expected = {f"{arena.path.name}:{ref.block}": "path_file"}
    assert gc("--path-file", path_file, "--dry-run") == expected
    attach(ref).verify()
    assert gc("--path-file", path_file) == expected
    assert gc("--path-file", path_file) == {}
    assert listed(arena)["blocks"] == []
    assert dead_arena.exists()
    assert path_file.exists()


def test_gc_reports_a_request_that_it_cannot_reclaim(tmp_path):
    spool = tmp_path / "spool"
    (request,) = run_and_kill(REQUEST, spool)
    path_file = Path(request, "shm_name.txt")
    path_file.unlink()
    os.mkfifo(path_file)
    (error,) = run("shm", "gc", "--spool", spool, status=1).splitlines()
    assert "not a regular file" in error


def test_an_unsafe_default_spool_does_not_stop_gc_elsewhere(dead_arena, tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    assert "other users can write to it" in run("shm", "gc", "--spool", spool, status=2)
    assert dead_arena.exists()
    assert gc(status=1, MINDIE_MM_SPOOL=str(spool))[str(dead_arena)] == "owner_dead"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("gc", "--spool", "{tmp}/none"), "not a spool: No such file"),
        (("gc", "--spool", "{tmp}/file"), "is not a directory"),
        (
            ("gc", "--spool", "{tmp}/data"),
            "not a request directory, because its mode is not 1700; {tmp}/data is therefore not a spool",
        ),
        (("gc", "--path-file", "{tmp}/none"), "not a path file: No such file"),
        (("gc", "--path-file", "{tmp}/data"), "not a path file: it is not a regular file"),
        (("gc", "--path-file", "{tmp}/pipe"), "not a path file: it is not a regular file"),
        (("gc", "--path-file", "{tmp}/link"), "not a path file: it is not a regular file"),
        (("free", "{tmp}/pipe"), "not a regular file"),
        (("free", "mindie_mm-0000:99999"), "this user has no arena mindie_mm-0000"),
    ],
)
def test_an_operators_mistake_gives_one_line_and_status_2(tmp_path, arguments, printed):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    samples = tmp_path / "data" / "samples"
    samples.mkdir(parents=True)
    (samples / "shm_name.txt").touch()
    (samples / "1.jpg").touch()
    (error,) = run("shm", *(text.format(tmp=tmp_path) for text in arguments), status=2).splitlines()
    assert printed.format(tmp=tmp_path) in error
    assert (samples / "1.jpg").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_sees_and_reclaims_nothing(dead_arena, arena, segment, path_file, tmp_path):
    publish(arena, path_file)
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    probe = tmp_path / "private.txt"
    probe.touch(mode=0o600)
    tmp_path.chmod(0o755)
    site = "import os, sys; os.setuid(65534); from mindie_mm.cli import main; main(sys.argv[1:])"

    def as_nobody(*arguments):
        return subprocess.run(
            [sys.executable, "-c", f"import mindie_mm.cli.shm; {site}", "shm", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={key: value for key, value in os.environ.items() if not key.startswith("MINDIE_MM")},
        )

    assert json.loads(as_nobody("list", "--json").stdout) == []
    (found,) = [
        one for one in json.loads(as_nobody("list", "--segments", "--json").stdout) if one["name"] == segment.name
    ]
    assert (found["uid"], found["mapped"], found["pids"]) == (0, None, [])
    assert "is not a regular file of user 65534" in as_nobody("free", segment.name).stderr
    assert Path("/dev/shm", segment.name).exists()
    ended = as_nobody("gc", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["reclaimed"]) == (0, []), ended.stderr
    assert dead_arena.exists()
    assert len(listed(arena)["blocks"]) == 1
    for arguments in (("gc", "--spool", spool), ("gc", "--path-file", probe), ("free", probe)):
        ended = as_nobody(*arguments)
        assert ended.returncode == 2, ended
        assert len(ended.stderr.splitlines()) == 1


def test_watch_prints_a_line_per_interval(arena):
    lines = run("shm", "watch", "--interval", 0.05, "--count", 3).splitlines()
    assert len(lines) == 3
    words = lines[-1].split()[1:]
    figures = dict(zip(words[::2], words[1::2], strict=True))
    assert int(figures["arenas"]) >= 1
    assert int(figures["capacity_bytes"]) >= arena.capacity_bytes


def test_watch_updates_in_a_terminal_and_ends_with_0_on_ctrl_c(arena):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [BIN, "shm", "watch", "--interval", "0.05"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        # If a shell runs pytest in the background, SIGINT is ignored in pytest and therefore in its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 60
    while seen.count(arena.path.name.encode()) < 3 and time.monotonic() < deadline:
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # EIO marks the end. If the test stopped reading, the process could block.
        while part := os.read(master, 4096):
            seen += part
    os.close(master)
    assert process.wait(120) == 0, seen
    assert b"Traceback" not in seen


def test_watch_ends_when_its_reader_closes_the_pipe(tmp_path):
    process = subprocess.Popen(
        [BIN, "shm", "watch", "--interval", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) in (0, 1)
    assert process.stderr.read() == b""
    process.stderr.close()
