"""Messages between the tokenizer process and its client, as msgpack."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mindie_mm.inputs import Media
from mindie_mm.processes.ipc import Failure
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.prompt import MediaSpan, PlannedPrompt, PlannedSpan, Prompt
from mindie_mm.tokenize.requests import TokenizeRequest


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """Message to the tokenizer process: make the prompts of a request."""

    number: int
    """Number of the request. The reply has the same number."""
    requests: list[TokenizeRequest]
    """Prompts of the request."""
    plans: bool = False
    """Whether to reply with planned prompts."""
    fill: bool = True
    """Whether to preprocess the media. It may be false only for planned prompts."""


class Cut(msgspec.Struct, frozen=True, array_like=True, tag="cut"):
    """Message to the tokenizer process: cut speech into clips, as `MediaStage.cut` does."""

    number: int
    """Number of the request. The reply has the same number."""
    speech: Media
    folder: str
    max_bytes: int
    domain: tuple[bytes, str]
    always: bool


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Message to the tokenizer process: cancel a request. A reply is still sent, with the prompts if they are done."""

    number: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Message to the tokenizer process: answer with Pong, to show that the event loop runs."""


class SentPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as it is encoded in a message."""

    ids: bytes
    """Token ids as int64 in native byte order."""
    spans: tuple[MediaSpan, ...]


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """Message from the tokenizer process: the prompts of a request, in order."""

    number: int
    sent: list[SentPrompt]

    def prompts(self) -> list[Prompt]:
        """Decode the prompts."""
        return [Prompt(np.frombuffer(one.ids, np.int64), one.spans) for one in self.sent]

    @classmethod
    def of(cls, number: int, prompts: Sequence[Prompt]) -> Tokenized:
        """Create the reply with `prompts`."""
        return cls(number, [SentPrompt(prompt.ids.tobytes(), prompt.spans) for prompt in prompts])


class SentPlan(msgspec.Struct, frozen=True, array_like=True):
    """A planned prompt as it is encoded in a message."""

    ids: bytes
    """Token ids as int64 in native byte order."""
    spans: tuple[PlannedSpan, ...]
    first_item: int


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="planned"):
    """Message from the tokenizer process: the planned prompts of a request, in order."""

    number: int
    sent: list[SentPlan]

    def prompts(self) -> list[PlannedPrompt]:
        """Decode the prompts."""
        return [PlannedPrompt(np.frombuffer(one.ids, np.int64), one.spans, one.first_item) for one in self.sent]

    @classmethod
    def of(cls, number: int, prompts: Sequence[PlannedPrompt]) -> Planned:
        """Create the reply with `prompts`."""
        return cls(number, [SentPlan(one.ids.tobytes(), one.spans, one.first_item) for one in prompts])


class CutUp(msgspec.Struct, frozen=True, array_like=True, tag="cut_up"):
    """Message from the tokenizer process: the clips into which it has cut speech."""

    number: int
    clips: Clips


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Message from the tokenizer process: a request has failed."""

    number: int
    error: Failure


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Message from the tokenizer process: the answer to `Ping`."""


ToProcess = Tokenize | Cut | Cancel | Ping
FromProcess = Tokenized | Planned | CutUp | Failed | Pong
