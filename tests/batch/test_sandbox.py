"""Tests for runs whose media are decoded in sandboxed processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mindie_mm.batch import Dataset
from mindie_mm.lockdown import support
from tests.batch.conftest import CLI, content, run_in_process, settings, tokenize, written
from tests.lockdown.attacker import environment, running
from tests.media_samples import encoded, photograph

PNG = encoded(photograph("chelsea.png", (150, 120)), "PNG")
ATTACK = """
def attack():
    import os, socket
    found = []
    for act in (lambda: os.open("secret", 0), lambda: os.open("/etc/passwd", 0), socket.socket, os.fork):
        try:
            act()
            found.append("done")
        except OSError as error:
            found.append(type(error).__name__)
    return say(" ".join(found))
"""


@pytest.mark.slow
def test_a_sandboxed_run_writes_the_same_files(lines: Path, tmp_path: Path) -> None:
    run_in_process(settings(lines), tmp_path / "here")
    done = tokenize(lines, "--output", tmp_path / "run", "--shard-rows", 7, "--workers", 2, "--sandbox")
    assert (done.returncode, "3 rows failed" in done.stdout) == (1, True), done.stderr
    assert content(tmp_path / "run") == content(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.skipif(bool(support().missing), reason="; ".join(support().missing))
def test_code_in_an_image_cannot_open_files_or_sockets(tmp_path: Path) -> None:
    """The image runs the attacker's code in the process that decodes it. The next row is tokenized as usual."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "bad.png").write_bytes(running(PNG, ATTACK))
    (tmp_path / "good.png").write_bytes(PNG)
    rows = [{"inputs": [{"image": name}, {"text": "What?"}]} for name in ("bad.png", "good.png")]
    given = written(tmp_path / "rows.jsonl", rows)
    (tmp_path / "hook").mkdir()
    command = [CLI, "tokenize", str(given), "--output", str(tmp_path / "run"), "--workers", "1", "--sandbox"]
    done = subprocess.run(
        command,
        env=os.environ | environment(tmp_path / "hook"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    (failed,) = map(json.loads, (tmp_path / "run/errors.jsonl").read_text().splitlines())
    refused = " ".join(["PermissionError"] * 4)
    assert failed["error"] == f"MediaError: media item 0 (image): said: {refused}"
    assert [sample.error is None for sample in Dataset(tmp_path / "run")] == [False, True]
