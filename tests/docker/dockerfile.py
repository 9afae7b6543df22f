"""Parser for Dockerfiles and .dockerignore that supports the syntax used in this project."""

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
    """An instruction of a Dockerfile, with its continuation lines joined into one line."""

    name: str
    """Name in upper case, such as FROM or RUN."""
    flags: dict[str, str]
    """Values of flags such as --from=build, by the name of the flag."""
    value: str
    """Rest of the instruction, before variables are substituted."""

    @property
    def argv(self) -> list[str]:
        """Return the command's words. Raise ValueError if the instruction has the shell form, not the exec form."""
        words: list[str] = json.loads(self.value)
        return words


def read(device: str) -> list[Instruction]:
    """Return the instructions of docker/Dockerfile.DEVICE."""
    return parse((FOLDER / f"Dockerfile.{device}").read_text())


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Comments and empty lines are skipped, even within an instruction. Heredocs and parser directives are not supported.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [_instruction(line) for line in joined.splitlines()]


def _instruction(line: str) -> Instruction:
    name, _, value = line.strip().partition(" ")
    flags = {}
    while name.upper() in ("COPY", "HEALTHCHECK", "RUN") and (flag := re.match(r"\s*--([\w-]+)=(\S+)\s+", value)):
        flags[flag[1]] = flag[2]
        value = value[flag.end() :]
    return Instruction(name.upper(), flags, value.strip())


def substituted(text: str, values: Mapping[str, str]) -> str:
    """Replace the variables in `text` with their `values`. Variables that are not set become empty."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def pairs(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the keys and values of an ENV or LABEL instruction."""
    return dict(word.partition("=")[::2] for word in shlex.split(substituted(text, values)))


def of(instructions: list[Instruction], name: str) -> list[Instruction]:
    """Return the instructions that have this name."""
    return [one for one in instructions if one.name == name]


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions of the last stage, which becomes the image."""
    last = max(index for index, one in enumerate(instructions) if one.name == "FROM")
    return instructions[last:]


def healthcheck(instructions: list[Instruction]) -> list[str]:
    """Return the words of the HEALTHCHECK command, which must have the exec form."""
    (check,) = of(instructions, "HEALTHCHECK")
    return Instruction("CMD", {}, check.value.removeprefix("CMD").strip()).argv


def is_sent(path: PurePosixPath, patterns: list[str]) -> bool:
    """Return whether .dockerignore lets `path`, relative to the build context, into the build.

    The last pattern that matches decides. A pattern may be a name in the root of the context, or `**/name` for a name
    at any depth. A pattern that matches a folder also matches everything inside.
    """
    sent = True
    for line in patterns:
        pattern = line.removeprefix("!")
        parts = path.parts if pattern.startswith("**/") else path.parts[:1]
        if any(fnmatchcase(part, pattern.removeprefix("**/")) for part in parts):
            sent = line.startswith("!")
    return sent


def ignore_patterns() -> list[str]:
    """Return the patterns of this project's .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def args(device: str) -> dict[str, str]:
    """Return the defaults of the build arguments, by name. Arguments without a default are left out."""
    arguments = (one.value.partition("=") for one in read(device) if one.name == "ARG")
    return {name: value for name, _, value in arguments if value}
