"""The command mindie-mm: one module a command, imported when it is asked for.

A command's module imports what takes long (torch, a web framework, rich) in its function, so that `--help` and the
tools for shared memory start at once.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mindie_mm.environment import keep_backends_out
from mindie_mm.errors import InputError, MindieMMError, SharedMemoryError

COMMANDS = ("serve", "ask", "tokenize", "inspect", "generate", "models", "shm", "doctor")


class _Mistake(click.ClickException):
    """A path, a setting or a permission that the operator has to mend, told apart from what failed."""

    exit_code = 2


class _Commands(click.Group):
    """Each command is `command` of the module of its name."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"{__name__}.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "serve":
            context.with_resource(_ending_at_once())
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Shows our own errors as one line, without a trace."""
        try:
            return super().invoke(context)
        except MindieMMError as error:
            mistake = isinstance(error, InputError | SharedMemoryError)
            raise (_Mistake if mistake else click.ClickException)(str(error)) from error


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """SIGTERM and SIGINT end this process with status 0, until others handle them: for as long as it holds nothing.

    The kernel drops signals that process 1 of a container has no handler for, and `serve` imports for a second or more.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mindie_mm")
def main() -> None:
    """A multimodal serving worker: token ids carry references to pixels in shared memory.

    Exits with 0 if all is fine, 1 if something failed, 2 if the command, a setting or a permission is to be mended.
    `tokenize` and `generate` have 3 and 130, too.
    """
    keep_backends_out()
