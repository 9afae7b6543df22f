"""Tests for fault points. They do nothing for users, and can kill a process in a test."""

import signal
import subprocess
import sys

from click.testing import CliRunner

from mindie_mm.cli import main
from mindie_mm.processes import faults
from mindie_mm.settings.environment import fault_folder

SCRIPT = """
import sys
from pathlib import Path
from mindie_mm.processes import faults
faults.arm("engine", Path(sys.argv[1]))
faults.point("elsewhere")
print("ready", flush=True)
sys.stdin.read(1)
faults.point("here")
"""


def test_an_armed_point_kills_one_process_once(tmp_path):
    (tmp_path / "tokenizer.here").touch()
    (tmp_path / "engine.here").touch()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.communicate(b"x", timeout=300)
    assert sorted(process.returncode for process in processes) == [-signal.SIGKILL, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.here"]


def test_fault_points_do_nothing_by_default():
    assert fault_folder() is None
    faults.point("here")


def test_the_help_of_the_command_line_shows_no_fault_option():
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    assert "--port" in shown
    assert "--fault" not in shown
