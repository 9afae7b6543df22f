"""Builder that executes Dockerfiles with chroot instead of a Docker engine. Each stage gets its own root file system.

As Docker does, the builder respects the order of instructions, the build context, stages, variables and the user. The
entry point runs as process 1 of a PID namespace, without capabilities and on a read-only root. Unlike Docker, the
builder does not create layers, uses a replacement for the base image, and uses this machine's network.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.docker.dockerfile import (
    ROOT,
    Instruction,
    healthcheck,
    ignore_patterns,
    is_sent,
    of,
    pairs,
    read,
    substituted,
)

_MACHINE = ("http_proxy", "https_proxy", "no_proxy", "PIP_CERT", "PIP_INDEX_URL", "PIP_FIND_LINKS")
"""Proxy and pip variables of this machine that RUN instructions see. Docker passes proxy settings in the same way."""
START_TIMEOUT_S = 240.0
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(slots=True)
class Stage:
    """A stage of a build. The last stage is the finished image."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"})
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"

    def at(self, path: str) -> Path:
        """Return where `path`, a path in the stage's root file system, is on this machine."""
        return self.root / str(PurePosixPath(self.workdir) / path).lstrip("/")

    def shell(self, command: str, *, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        """Run a command in the stage as root, with this machine's network. Raise RuntimeError if the command fails."""
        machine = {name: value for name in _MACHINE if (value := os.environ.get(name))}
        bound = {"/etc/resolv.conf": "/etc/resolv.conf"}
        bound |= {path: path for path in machine.get("PIP_FIND_LINKS", "").split() if path.startswith("/")}
        if certificates := machine.get("PIP_CERT"):
            machine["PIP_CERT"] = "/run/certificates.pem"
            bound[certificates] = machine["PIP_CERT"]
        lines = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        for path, inside in bound.items():
            place = self.root / inside.lstrip("/")
            if Path(path).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.touch()
            lines.append(f"mount --bind {path} {place}")
        env = machine | {"HOME": "/root"} | self.args | self.env
        words = shlex.join(["env", f"--chdir={self.workdir}", "-i", *_assignments(env), "/bin/sh", "-c", command])
        script = " && ".join(["set -e", *lines, f"exec chroot {self.root} {words}"])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]


@dataclass(frozen=True, slots=True)
class Image:
    """An image that `build` has finished."""

    stage: Stage
    entrypoint: list[str]
    healthcheck: list[str]
    ran: list[str]
    """Commands of the RUN instructions that were executed."""

    @contextmanager
    def run(
        self, log: Path, env: Mapping[str, str], *, shm_bytes: int, tmp_bytes: int
    ) -> Iterator[subprocess.Popen[str]]:
        """Run the entry point as process 1 with the image's user. When the context exits, kill the process.

        The process has no capabilities, and its root is read-only. Only /tmp and /dev/shm are writable. They are tmpfs
        file systems of the given sizes.
        """
        root, (uid, gid) = self.stage.root, self.stage.user.split(":")
        dev = "".join(f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name} && " for name in _DEVICES)
        privileges = f"--reuid {uid} --regid {gid} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs"
        words = _assignments(self.stage.env | dict(env))
        command = shlex.join(["env", f"--chdir={self.stage.workdir}", "-i", *words, *self.entrypoint])
        script = (
            f"mount --bind {root} {root} && mount -o remount,bind,ro {root} && mount -t proc proc {root}/proc && "
            f"mount -t tmpfs -o size=64k,mode=755 tmpfs {root}/dev && {dev}"
            f"ln -s /proc/self/fd {root}/dev/fd && mkdir {root}/dev/shm && "
            f"mount -t tmpfs -o size={shm_bytes},nosuid,nodev,noexec tmpfs {root}/dev/shm && "
            f"mount -t tmpfs -o size={tmp_bytes},nosuid,nodev,noexec tmpfs {root}/tmp && "
            f"exec chroot {root} setpriv {privileges} {command}"
        )
        with log.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def healthy(self, env: Mapping[str, str]) -> bool:
        """Run the HEALTHCHECK command in the image, and return whether the check passed."""
        root, words = self.stage.root, _assignments(self.stage.env | dict(env))
        command = ["chroot", str(root), "env", f"--chdir={self.stage.workdir}", "-i", *words, *self.healthcheck]
        return subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == 0


def free_port() -> int:
    """Return the number of a TCP port that is currently free on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ready(process: subprocess.Popen[str], log: Path, *, timeout_s: float = START_TIMEOUT_S) -> str:
    """Wait until the service prints its URL, and return the URL.

    After the timeout, raise AssertionError with the end of the log.
    """
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    announced = re.search(r"mindie_mm serves \S+ at (http://\S+)", process.stdout.readline()) if readable else None
    assert announced is not None, log.read_text(encoding="utf-8")[-2000:]
    return announced[1]


def stop(process: subprocess.Popen[str]) -> int:
    """Send SIGTERM to process 1, as `docker stop` does, and return its exit status."""
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    os.kill(int(first), signal.SIGTERM)
    return process.wait(300)


def base(cache: Path) -> Path:
    """Return an archive of a minimal Debian 12, which resembles debian:12-slim. The archive is created only once.

    Raise RuntimeError if the archive cannot be created.
    """
    packed = cache / "debian-12.tar"
    if not packed.exists():
        making = packed.with_name(f"{packed.stem}-{os.getpid()}.tar")
        options = [f'--aptopt=Acquire::{name} "false"' for name in ("Check-Valid-Until", "Check-Date")]
        command = ["mmdebstrap", "--quiet", "--variant=minbase", *options, "bookworm", str(making)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise RuntimeError(f"no base: {done.stderr[-1000:]}")
        making.rename(packed)
    return packed


def build(device: str, folder: Path, packed: Path, arguments: Mapping[str, str], *, prepare: str = "") -> Image:
    """Build docker/Dockerfile.DEVICE with the build arguments `arguments`. The stages are created in `folder`.

    The archive `packed` replaces the base image. Before the build, the command `prepare` installs in it whatever else
    the real base image contains.
    """
    instructions = read(device)
    stages: dict[str, Stage] = {}
    stage, outer, ran = Stage(folder), dict[str, str](), []
    for one in instructions:
        values = outer | stage.args | stage.env if stages else outer
        match one.name:
            case "ARG":
                name, _, default = one.value.partition("=")
                given = arguments.get(name, default or outer.get(name, ""))
                (stage.args if stages else outer)[name] = given
            case "FROM":
                source, _, name = substituted(one.value, values).partition(" AS ")
                stages[name] = stage = _start_stage(folder / name, stages.get(source), packed, prepare)
            case "RUN":
                stage.shell(one.value)
                ran.append(one.value)
            case "COPY":
                _copy(one, stage, stages)
            case _:
                _apply(one, stage, values)
    return Image(stage, of(instructions, "ENTRYPOINT")[-1].argv, healthcheck(instructions), ran)


def _start_stage(root: Path, source: Stage | None, packed: Path, prepare: str) -> Stage:
    """Start a stage from another stage or from the base image."""
    if source is not None:
        subprocess.run(["cp", "-a", str(source.root), str(root)], check=True)
        return Stage(root, dict(source.env))
    root.mkdir()
    subprocess.run(["tar", "-C", str(root), "-xf", str(packed)], check=True)
    stage = Stage(root)
    if prepare:
        stage.shell(prepare)
    return stage


def _apply(one: Instruction, stage: Stage, values: Mapping[str, str]) -> None:
    """Apply an instruction that does not change files. WORKDIR is an exception, because it creates its folder."""
    match one.name:
        case "ENV":
            stage.env |= pairs(one.value, values)
        case "WORKDIR":
            stage.workdir = one.value
            stage.at("").mkdir(parents=True, exist_ok=True)
        case "USER":
            stage.user = one.value


def _copy(one: Instruction, stage: Stage, stages: Mapping[str, Stage]) -> None:
    *sources, place = one.value.split()
    target = stage.at(place)
    if one.flags:
        (source,) = sources
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(stages[one.flags["from"]].at(source)), str(target)], check=True)
        return
    patterns = ignore_patterns()
    for source in sources:
        path = ROOT / source
        assert is_sent(PurePosixPath(source), patterns), f".dockerignore keeps {source} out of the build"
        if path.is_file():
            shutil.copy2(path, target / source)
            continue
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            if file.is_file() and is_sent(PurePosixPath(source) / inside, patterns):
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target / inside)


def why_not() -> str | None:
    """Return the reason why this machine cannot build images, or None if it can."""
    if os.geteuid():
        return "root file systems are made by root alone"
    missing = [name for name in ("mmdebstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "no namespaces can be made here"


def machine_of_pip() -> dict[str, str]:
    """Return this machine's settings for pip as environment variables: the index, wheel folders and certificates."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = (line.partition("=") for line in listed.stdout.splitlines())
    named = {f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}": value.strip("'") for key, _, value in settings}
    return {name: value for name, value in named.items() if name in _MACHINE}
