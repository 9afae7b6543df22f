"""`make screenshots`: record a session in a terminal with the embedded checkpoint, as SVG for docs/serve.md."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tools.arguments import parser

FILE = Path("docs/images/terminal.svg")
WIDTH = 88
TIMEOUT_S = 300.0
SESSION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mindie-mm ask 'What is in the image?' --image docs/images/red_circle.png", ()),
    (
        "mindie-mm chat",
        ("Hello!", "/image docs/images/red_circle.png", "What color is it?", "What shape is it?", "/exit"),
    ),
)
"""Commands, each with the lines to type after it has started."""
_PROMPT = "> "
_FONT_FACES = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)
"""Fonts that rich loads from another host. Images in a page load nothing."""


def main() -> None:
    """Write docs/images/terminal.svg."""
    screen = "".join(f"$ {command}\n{recorded(command, lines)}" for command, lines in SESSION)
    FILE.write_text(drawn(screen), encoding="utf-8")


def recorded(command: str, lines: tuple[str, ...]) -> str:
    """Run a command on a pseudo-terminal, type `lines`, and return what the terminal shows.

    Standard error is not shown, because its progress depends on the machine.
    """
    ours, theirs = pty.openpty()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs, "TERM": "dumb"}
    with subprocess.Popen(  # noqa: S602 - one of our own commands
        command, shell=True, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(theirs)
        shown = ""
        for line in lines:
            shown = read_until(ours, shown, _PROMPT)
            os.write(ours, f"{line}\n".encode())
        shown = read_until(ours, shown, None)
        if process.wait(TIMEOUT_S):
            assert process.stderr is not None
            raise RuntimeError(f"{command} exited with status {process.returncode}: {process.stderr.read().decode()}")
    os.close(ours)
    return shown.replace("\r\n", "\n")


def read_until(descriptor: int, shown: str, end: str | None) -> str:
    """Return `shown` with the further output until it ends with `end`, or with all output if `end` is None."""
    read = ""
    while end is None or not read.endswith(end):
        if not select.select([descriptor], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"the command printed nothing for {TIMEOUT_S:g} s after {shown + read!r}")
        try:
            read += os.read(descriptor, 2**16).decode()
        except OSError:  # the command has ended
            break
    return shown + read


def drawn(screen: str) -> str:
    """Return the text of a terminal as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in screen.splitlines():
        text = Text(line)
        text.stylize("bold green", 0, 1 if line.startswith(("$ ", _PROMPT)) else 0)
        console.print(text, highlight=False)
    image = console.export_svg(title="mindie-mm", unique_id="terminal")
    return "\n".join(line.rstrip() for line in _FONT_FACES.sub("", image).splitlines()) + "\n"


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
