"""The command mindie-mm. Each of its commands has a module, which is imported when the command is called.

A command's module imports slow libraries (torch, a web framework, rich) inside its function, so that `--help` and the
commands for shared memory start quickly. The options of `serve` are the fields of the classes in
`mindie_mm/settings/config.py`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mindie_mm.cli.foreign_options import FOREIGN_OPTIONS
from mindie_mm.errors import InputError, MindieMMError, SharedMemoryError
from mindie_mm.processes.interrupts import INTERRUPTED, importing, interruptible
from mindie_mm.processes.standard_streams import has_terminal, use_utf8
from mindie_mm.settings.environment import keep_backends_out, restart_in_utf8

COMMANDS = {
    "serve": "Serve a checkpoint over HTTP.",
    "render": "Serve token ids and hashes of media for routers, without a model.",
    "ask": "Ask one question and print the answer.",
    "chat": "Chat with a model in the terminal.",
    "tokenize": "Tokenize and preprocess a data set.",
    "merge": "Combine the parts of a tokenized data set.",
    "generate": "Run the model on tokenized rows.",
    "inspect": "Show a tokenized data set, or a row of it.",
    "verify": "Check the files of a tokenized data set.",
    "models": "List the supported model families.",
    "shm": "List, free and reclaim shared memory.",
    "doctor": "Check whether this machine can serve a checkpoint.",
}
"""The commands and their short descriptions, which are shown without importing the commands."""

_WIDEST_HELP = 160
"""Number of columns of help texts on wider terminals."""


class _Mistake(click.ClickException):
    """An error in a path, setting or permission that the user has to correct."""

    exit_code = 2


class _Commands(click.Group):
    """The group of commands. Each command is the function `command` of the module with its name."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse the command line and run the command. If parsing is interrupted, exit with status 130.

        The encoding of the standard streams is set first.
        """
        restart_in_utf8()
        use_utf8()
        with importing():
            return super().main(*args, **extra)

    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with importing():
            command = importlib.import_module(f"{__name__}.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in ("serve", "render"):
            context.with_resource(_ending_at_once())
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", context)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Run a command. Show an error of this package as one line. On an interrupt, exit with status 130."""
        try:
            interruptible()
            return super().invoke(context)
        except click.NoSuchOption as error:
            if (advice := FOREIGN_OPTIONS.get(error.option_name)) is None:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. {advice}.", error.ctx) from error
        except MindieMMError as error:
            mistake = isinstance(error, InputError | SharedMemoryError)
            raise (_Mistake if mistake else click.ClickException)(str(error)) from error
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Exit with status 0 on SIGTERM, SIGINT and SIGHUP until the server handles these signals.

    Without a terminal, SIGHUP asks for a reload, and is ignored because no engine runs yet.

    The process has not allocated resources yet. Handlers are needed because the kernel drops a signal to process 1 of a
    container if the process has no handler, and the imports of `serve` take a second or more. Signals that are already
    ignored, such as SIGHUP under nohup, stay ignored.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            reloads = number == signal.SIGHUP and not has_terminal()
            signal.signal(number, (lambda *_: None) if reloads else (lambda *_: os._exit(0)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST_HELP},
)
@click.version_option(package_name="mindie_mm")
def main() -> None:
    """Serve multimodal models, and prepare and inspect their inputs.

    Start with `mindie-mm serve`, ask one question with `mindie-mm ask`, or chat in the terminal with `mindie-mm chat`.
    They use a small embedded model unless you name the folder of a checkpoint.

    Exit status: 0 for success, 1 for a failure, 2 for a wrong command, setting or permission, 130 if interrupted.
    """
    keep_backends_out()
