"""Messages between the tokenizer process and its client, as msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import ContentFormat, MediaCaps, WorkerConfig
from mindie_mm.tokenize.prompt import MediaSpan, Prompt, PromptOptions


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to tokenize, given as exactly one of `messages`, `items` and `text`.

    Media sources are those of `mindie_mm.inputs`. Only paths, URLs and bytes can be sent to another process.
    """

    messages: list[dict[str, Any]] | None = None
    """Chat messages."""
    items: list[dict[str, Any]] | None = None
    """Items in order, each a mapping such as {"text": ...} or {"image": ...}."""
    text: str | None = None
    """Plain text, used without a template."""
    chat: bool = True
    """Format `items` as one user turn of the checkpoint's chat template, if it has one. False: join them."""
    path_file: str = ""
    """Path file of the request. Only a prompt without media needs none."""
    folder: str = ""
    """Directory for relative paths of media. Empty: the tokenizer's working directory."""
    add_generation_prompt: bool = True
    """End the chat with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """End the chat with the text of its last message."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as `tools`."""
    options: PromptOptions = PromptOptions()


class Setup(msgspec.Struct, frozen=True):
    """Settings of the tokenizer process, passed as JSON."""

    model: str
    """Directory of the checkpoint."""
    family: str | None
    num_decoders: int
    arena_bytes: int
    arena_request_bytes: int | None
    arena_wait_s: float
    preprocessed_cache_bytes: int
    chat_template_content_format: ContentFormat
    media: MediaCaps

    @classmethod
    def of(cls, model: Path, config: WorkerConfig) -> Setup:
        """Return the settings for the checkpoint directory `model`. The model named in `config` is not used."""
        return cls(str(model), **{name: getattr(config, name) for name in cls.__struct_fields__[1:]})


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Process to client, once: the checkpoint has been read. A process that cannot start sends a Failure instead."""

    shown_tokens: list[str] = []
    """As `Prompts.shown_tokens`."""


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """Client to process: make the prompts of a request."""

    number: int
    """Number of the request, for its reply."""
    requests: list[TokenizeRequest]
    """Its prompts."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Client to process: drop a request. The reply comes nevertheless, with the prompts if they are made."""

    number: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Client to process: a request for a sign of life."""


class SentPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt in a message."""

    ids: bytes
    """Token ids as int64 in native byte order."""
    spans: tuple[MediaSpan, ...]


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """Process to client: the prompts of a request, in order."""

    number: int
    sent: list[SentPrompt]

    def prompts(self) -> list[Prompt]:
        """Return the prompts."""
        return [Prompt(np.frombuffer(one.ids, np.int64), one.spans) for one in self.sent]

    @classmethod
    def of(cls, number: int, prompts: Sequence[Prompt]) -> Tokenized:
        """Return the reply that carries `prompts`."""
        return cls(number, [SentPrompt(prompt.ids.tobytes(), prompt.spans) for prompt in prompts])


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Process to client: a request has failed."""

    number: int
    error: Failure


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Process to client: the answer to `Ping`."""


ToProcess = Tokenize | Cancel | Ping
FromProcess = Tokenized | Failed | Pong
