"""Reads Dockerfiles and .dockerignore, as far as ours go."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DEVICES = ("cpu", "cuda", "npu")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str
    """FROM, RUN and so on."""
    flags: dict[str, str]
    """Of --from=build and the like."""
    value: str
    """What follows, not substituted."""

    @property
    def argv(self) -> list[str]:
        """Of the exec form; ValueError for the shell form."""
        found: list[str] = json.loads(self.value)
        return found


def read(device: str) -> list[Instruction]:
    """Those of docker/Dockerfile.DEVICE."""
    return parse((FOLDER / f"Dockerfile.{device}").read_text())


def parse(text: str) -> list[Instruction]:
    """Comments and empty lines are nothing, within an instruction too; no heredocs, no parser directives."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [_instruction(line) for line in joined.splitlines()]


def _instruction(line: str) -> Instruction:
    name, _, value = line.strip().partition(" ")
    flags = {}
    while name.upper() in ("COPY", "HEALTHCHECK", "RUN") and (found := re.match(r"\s*--([\w-]+)=(\S+)\s+", value)):
        flags[found[1]] = found[2]
        value = value[found.end() :]
    return Instruction(name.upper(), flags, value.strip())


def substituted(text: str, values: Mapping[str, str]) -> str:
    """Variables that are not set are empty."""
    return _VARIABLE.sub(lambda found: values.get(found[1] or found[2], ""), text)


def pairs(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """Of ENV and LABEL."""
    return dict(word.partition("=")[::2] for word in shlex.split(substituted(text, values)))


def of(instructions: list[Instruction], name: str) -> list[Instruction]:
    """Those of that name."""
    return [one for one in instructions if one.name == name]


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    """Those that make the image itself."""
    last = max(index for index, one in enumerate(instructions) if one.name == "FROM")
    return instructions[last:]


def healthcheck(instructions: list[Instruction]) -> list[str]:
    """The command of HEALTHCHECK, which is to be of the exec form."""
    (found,) = of(instructions, "HEALTHCHECK")
    return Instruction("CMD", {}, found.value.removeprefix("CMD").strip()).argv


def is_sent(path: PurePosixPath, patterns: list[str]) -> bool:
    """Whether .dockerignore lets `path`, relative to the context, into a build: the last pattern that fits decides.

    Of patterns: names in the root, and `**/name` for any depth; both mean all that lies below, too.
    """
    sent = True
    for line in patterns:
        pattern = line.removeprefix("!")
        parts = path.parts if pattern.startswith("**/") else path.parts[:1]
        if any(fnmatchcase(part, pattern.removeprefix("**/")) for part in parts):
            sent = line.startswith("!")
    return sent


def ignore_patterns() -> list[str]:
    """Those of our .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
