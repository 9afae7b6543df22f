"""The text of a streamed transcript, whose clips are transcribed at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from service.audio.answer import Ended, TokenUsage, ended, separator, token_usage
from service.schemas.choices import Usage


class SpeechText:
    """The transcript so far. The text of a clip is sent when all earlier clips are complete."""

    def __init__(self, send: Callable[[str], None]) -> None:
        """Create an empty transcript. `send` takes the next text."""
        self._send = send
        self._clips: list[ClipText] = []
        self.text = ""

    @property
    def usage(self) -> TokenUsage:
        """Usage of all clips."""
        return token_usage([clip.usage for clip in self._clips if clip.usage is not None])

    @property
    def end(self) -> Ended:
        """The field of the last event that says that the text is cut off."""
        return ended(clip.is_cut_off for clip in self._clips)

    def clip(self, answer_start: str) -> ClipText:
        """Append a clip. `answer_start` is the trait of the checkpoint."""
        clip = ClipText(answer_start, self._push)
        self._clips.append(clip)
        return clip

    def _push(self) -> None:
        for clip in self._clips:
            if (text := clip.take()) and not clip.is_begun:
                clip.is_begun = True
                text = separator(self.text, text) + text
            if text:
                self.text += text
                self._send(text)
            if not clip.is_complete:
                return


class ClipText:
    """The text of one clip. White space at its beginning and end is left out."""

    def __init__(self, answer_start: str, changed: Callable[[], None]) -> None:
        """Create an empty text. `changed` is called after each addition."""
        self._answer_start = answer_start
        self._changed = changed
        self._waiting = ""
        self.is_begun = False
        """True if a part of the text has been taken."""
        self.is_complete = False
        self.is_cut_off = False
        self.usage: Usage | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next chunk of the chat completion."""
        self.usage = chunk.get("usage", self.usage)
        for choice in chunk["choices"]:
            self._waiting += choice["delta"].get("content") or ""
            self.is_cut_off |= choice["finish_reason"] == "length"
        self._changed()

    def finish(self) -> None:
        """Record that the text is complete."""
        self.is_complete = True
        self._changed()

    def take(self) -> str:
        """Return the text that may be sent now, and forget it."""
        if self._answer_start:
            _, found, rest = self._waiting.partition(self._answer_start)
            if not found and not self.is_complete:
                return ""
            self._waiting, self._answer_start = rest if found else self._waiting, ""
        text = self._waiting if self.is_begun else self._waiting.lstrip()
        shown = text.rstrip()  # more text may follow the white space
        self._waiting = "" if self.is_complete else text[len(shown) :]
        return shown
