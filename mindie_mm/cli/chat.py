"""mindie-mm chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindie_mm.cli.asking import Session, check_media, model_options, prepared, webui_option
from mindie_mm.errors import ContextLengthExceeded, MediaError, MindieMMError
from mindie_mm.processes.interrupts import importing
from mindie_mm.settings.config import WorkerConfig

if TYPE_CHECKING:
    from mindie_mm.engine.requests.sampling_params import SamplingParams

PROMPT = "> "
_KINDS = ("image", "video", "audio")
HELP = """\
/image PATH   send an image with the next message
/video PATH   send a video with the next message
/audio PATH   send an audio clip with the next message
/clear        begin a new conversation
/help         show this help
/exit         end the session, as Ctrl-D does"""


@click.command("chat")
@webui_option
@model_options
def command(*, webui_images: bool, **flags: Any) -> None:
    """Chat with a model in the terminal. The model answers each message in the context of the conversation so far.

    /image PATH adds an image to the next message, and /help lists the other commands. Ctrl-C stops an answer, and
    Ctrl-D ends the session.

    If standard input is not a terminal, each line is a message. The exit status is then 1 if a message could not be
    answered, and otherwise 0.
    """
    config, params = prepared("chat", **flags)
    check_media(config, {})
    with importing():
        from mindie_mm.nn.checkpoint.demo import demo_note
        from mindie_mm.nn.checkpoint.directory import EMBEDDED
        from mindie_mm.nn.checkpoint.hub import checkpoint_name

    with Session(config) as session:
        chat = _Chat(session, config, params, webui=webui_images)
        if sys.stdin.isatty():
            info, name = session.worker.engine.info, checkpoint_name(config.model or EMBEDDED)
            click.echo(
                f"{name} runs on {info.device} in {info.dtype}. /help lists the commands, and Ctrl-D ends the chat."
            )
        if note := demo_note(config.model, "mindie-mm chat --model"):
            click.echo(note, err=True)
        for line in _lines():
            if line == "/exit":
                break
            chat.take(line)
    sys.exit(chat.failed and not sys.stdin.isatty())


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, without surrounding spaces and empty lines. A terminal shows a prompt."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with suppress(ImportError):
        import readline  # lets users of `input` edit a line and recall earlier lines

        readline.set_completer_delims("")  # a path may contain spaces
        readline.set_completer(_Completer())
        readline.parse_and_bind("tab: complete")
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D ends the chat")
            continue
        if line:
            yield line


class _Completer:
    """A completer for readline, which asks for one completion after the other."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __call__(self, line: str, index: int) -> str | None:
        if index == 0:
            self._found = completions(line)
        return self._found[index] if index < len(self._found) else None


def completions(line: str) -> list[str]:
    """Return the lines that the Tab key offers for the beginning of a line: commands, or paths of files."""
    command, space, start = line.partition(" ")
    if not space:
        names = [f"/{kind} " for kind in _KINDS] + ["/clear", "/help", "/exit"]
        return [name for name in names if name.startswith(line)] if line else []
    if command.removeprefix("/") not in _KINDS:
        return []
    folder = Path(start if start.endswith("/") else Path(start).parent).expanduser()
    beginning = start.rpartition("/")[2]
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    shown = start.removesuffix(beginning)
    return [
        f"{command} {shown}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.name.startswith(beginning)
    ]


class _Chat:
    """A conversation, and the media for its next message."""

    def __init__(self, session: Session, config: WorkerConfig, params: SamplingParams, *, webui: bool) -> None:
        self._session = session
        self._config = config
        self._params = params
        self._webui = webui
        self._messages: list[dict[str, Any]] = []
        self._media: list[dict[str, str]] = []
        self.failed = False
        """True if a command or a message has failed."""

    def take(self, line: str) -> None:
        """Handle a line: run a command, or send a message. Print an error if that fails."""
        try:
            if line.startswith("/"):
                self._run(*line.partition(" ")[::2])
            else:
                self._send(line)
        except ContextLengthExceeded as error:
            self._fail(f"{error}. /clear begins a new conversation" if self._messages else str(error))
        except MindieMMError as error:
            self._fail(str(error))

    def _fail(self, message: str) -> None:
        self.failed = True
        click.echo(f"Error: {message}", err=True)

    def _run(self, name: str, argument: str) -> None:
        kind = name.removeprefix("/")
        if kind in _KINDS:
            self._add(kind, argument.strip().strip("'\""))
        elif name == "/clear":
            self._messages, self._media = [], []
        elif name == "/help":
            click.echo(HELP)
        else:
            self._fail(f"there is no command {name}; /help lists the commands")

    def _add(self, kind: str, argument: str) -> None:
        path = Path(argument).expanduser()
        if not argument or not path.is_file():
            self._fail(f"/{kind}: {argument!r} is not a file; give the path of a file, as in /{kind} PATH")
            return
        sent = [part for message in self._messages if message["role"] == "user" for part in message["content"]]
        earlier = [part for part in [*sent, *self._media] if "text" not in part]
        check_media(self._config, {kind: [path]}, sign="/", earlier=earlier)
        self._media.append({kind: str(path.absolute())})

    def _send(self, text: str) -> None:
        with importing():
            from mindie_mm.tokenize.requests import request_of_messages
            from mindie_mm.worker.deltas import Answer

        message = {"role": "user", "content": [*self._media, {"text": text}]}
        messages = [*self._messages, message]
        request = request_of_messages(messages, webui=self._webui)
        answer = Answer()
        try:
            self._session.answer(request, self._params, answer)
        except MediaError:
            self._media = []
            raise
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            if answer.texts:
                click.echo()
                self._messages += [message, {"role": "assistant", "content": answer.text}]
                self._media = []  # otherwise the media would be sent again with the next message
