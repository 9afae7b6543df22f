"""Tests for the build of torch that `make install` selects. A fake pip prints its arguments."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Quiet(SimpleHTTPRequestHandler):
    """A request handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in {"pip": 'echo "$@"', "nvidia-smi": "exit 9"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a package index that contains torch."""
    (tmp_path / "index/torch").mkdir(parents=True)
    with HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def installed(programs: Path, index: str) -> str:
    """Return the arguments of the last call to pip."""
    command = ["make", "--silent", "torch", f"BIN={programs}", f"CPU_INDEX={index}"]
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
    return ended.stdout.splitlines()[-1]


def test_a_machine_without_a_gpu_takes_the_build_for_the_cpu(programs: Path, index: str) -> None:
    assert f"--index-url {index} torch==" in installed(programs, index)


def test_a_machine_with_an_nvidia_gpu_takes_the_build_of_pypi(programs: Path, index: str) -> None:
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    assert "--index-url" not in installed(programs, index)


def test_pypi_is_used_if_the_index_cannot_be_reached(programs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert "--index-url" not in installed(programs, f"http://127.0.0.1:{closed}")


def test_pypi_is_used_if_the_index_lacks_the_build(programs: Path, index: str) -> None:
    (programs / "pip").write_text('#!/bin/sh\necho "$@"\ncase "$*" in *--index-url*) exit 1;; esac\n')
    assert "--index-url" not in installed(programs, index)
