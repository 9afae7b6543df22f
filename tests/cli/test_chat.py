"""Tests for `chat`, with lines from a pipe and on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mindie_mm.cli.chat import completions
from tests import warm
from tests.cli.shell import BIN, TIMEOUT_S
from tools.demo import draw_shape

GREETING = "Hello! Show me a picture of a shape and ask me about it."


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "a red square.png"
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(path)
    return path


def chatted(tmp_path: Path, *lines: str) -> tuple[int, list[str], list[str]]:
    """Send lines to `chat` through a pipe. Return its exit status, its lines of output and its error messages."""
    (tmp_path / "in").write_text("\n".join(lines))
    with (
        (tmp_path / "in").open() as given,
        (tmp_path / "out").open("w+") as out,
        (tmp_path / "errors").open("w+") as err,
    ):
        process = warm.Popen(
            [str(BIN), "chat", "--limit-mm-per-prompt", "image=1"], stdin=given.fileno(), stdout=out, stderr=err
        )
        status = process.wait(TIMEOUT_S)
    errors = [line for line in (tmp_path / "errors").read_text().splitlines() if line.startswith("Error: ")]
    return status, (tmp_path / "out").read_text().splitlines(), errors


def test_lines_from_a_pipe_are_a_conversation(tmp_path: Path, red: Path) -> None:
    audio = tmp_path / "audio.wav"
    audio.touch()
    status, printed, errors = chatted(
        tmp_path,
        "Hello!",
        f"/image '{red}'",
        "too long " * 3000,  # the image goes with the next message that is answered
        "What color is it?",
        f"/image {red}",
        "What shape is it?",
        "/clear",
        "/nothing",
        "/image",
        f"/video {red}",
        f"/audio {audio}",
        "",
        "Hello!",
        "/exit",
        "Hello!",
    )
    assert status == 1
    assert printed == [GREETING, "red", "square", GREETING]
    assert len(errors) == 6
    assert errors[0].endswith(". /clear begins a new conversation")
    assert errors[1].startswith("Error: the prompt has 2 media items of kind image; the limit is 1")
    assert errors[2] == "Error: there is no command /nothing; /help lists the commands"
    assert errors[3] == "Error: /image: '' is not a file; give the path of a file, as in /image PATH"


@contextmanager
def terminal(*options: object) -> Iterator[tuple[warm.Popen, Screen]]:
    """Run `chat` on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb", buffering=0) as stream:
        process = warm.Popen([str(BIN), "chat", *map(str, options)], stdin=theirs, stdout=stream, stderr=stream)
    try:
        yield process, Screen(ours)
    finally:
        process.kill()
        os.close(ours)


class Screen:
    """Our end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until `text` appears after the text that the last call waited for."""
        while (found := self.text.find(text, self._start)) < 0:
            readable, _, _ = select.select([self._descriptor], [], [], TIMEOUT_S / 10)
            assert readable, self.text[self._start :]
            self.text += os.read(self._descriptor, 2**16).decode(errors="replace")
        self._start = found + len(text)

    def wait_for_more(self) -> None:
        """Read until anything appears after the text that the last call waited for."""
        while len(self.text) == self._start:
            self.text += os.read(self._descriptor, 2**16).decode(errors="replace")

    def interrupt(self, process: warm.Popen) -> None:
        """Send SIGINT until something is written. readline misses a signal that arrives just before it waits."""
        while not select.select([self._descriptor], [], [], 1.0)[0]:
            process.send_signal(signal.SIGINT)

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for_end(self) -> None:
        with suppress(OSError):  # the process has closed the terminal
            while data := os.read(self._descriptor, 2**16):
                self.text += data.decode()


def test_a_terminal_has_a_prompt_history_and_commands(red: Path) -> None:
    with terminal() as (process, screen):
        screen.wait_for("tiny runs on cpu in float32. /help lists the commands")
        screen.wait_for("> ")
        screen.type(f"/image {red}\n")
        screen.wait_for("\n> ")
        screen.type("What color is it?\n")
        screen.wait_for("red\r\n> ")
        screen.type("\x1b[A\n")  # the key for the earlier line
        screen.wait_for("What color is it?\r\n")
        screen.wait_for("red\r\n> ")
        screen.type("/help\n")
        screen.wait_for("Ctrl-D does\r\n> ")
        screen.interrupt(process)
        screen.wait_for("/exit or Ctrl-D ends the chat\r\n> ")
        screen.type("\x04")
        screen.wait_for_end()
        assert process.wait(TIMEOUT_S) == 0
    assert "Traceback" not in screen.text


def test_the_tab_key_completes_commands_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pictures").mkdir()
    (tmp_path / "my pictures" / "a red.png").touch()
    assert completions("/i") == ["/image "]
    assert completions("/image m") == ["/image my pictures/"]
    assert completions("/image my pictures/") == ["/image my pictures/a red.png"]
    assert completions(f"/image {tmp_path}/my") == [f"/image {tmp_path}/my pictures/"]
    assert completions("/image ") == ["/image my pictures/"]
    assert completions("/video missing/x") == completions("What is") == completions("") == []


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(random_checkpoint: Path) -> None:
    """The random checkpoint answers up to the maximum number of tokens."""
    with terminal("--model", random_checkpoint, "--max-tokens", 8000) as (process, screen):
        for question in ("Hello?", "And now?"):
            screen.wait_for("\n> ")
            screen.type(f"{question}\n")
            screen.wait_for(f"{question}\r\n")
            screen.wait_for_more()
            process.send_signal(signal.SIGINT)
        screen.wait_for("\n> ")
        screen.type("/exit\n")
        screen.wait_for_end()
        assert process.wait(TIMEOUT_S) == 0
    assert "Traceback" not in screen.text
