"""Names the content of a request from its raw body, without the tokenizer, so that a router can compare requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from threading import Lock
from typing import Any

import msgspec

from mindie_mm.routing import Content

_STORING = ("/v1/responses", "/responses")
"""Beginnings of the paths whose requests may refer to stored responses."""
_KEPT_ID = re.compile(rb"\b(?:resp|msg|rs|fc|ctc)_([0-9a-z]{1,32})_[0-9a-f]{24}")
"""Pattern of an id that names the replica which made it."""
_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"resp_([0-9a-z]{1,32})_[0-9a-f]{24}"')
_MEDIA = ("image", "video", "audio", "input_audio", "file", "document")
"""Beginnings of the names of fields that contain media."""
_PROMPTS = ("messages", "inputs", "prompt", "input", "documents", "text_2", "data_2", "items")
"""Names of the fields that contain prompts, or most of their text."""
_CHARACTERS_PER_TOKEN = 4
_BYTES_PER_TOKEN = 256
"""Estimated number of bytes in JSON per token of a media item."""
_MEDIA_TOKENS = (256, 8192)
"""Lower and upper limit of the estimated number of tokens of a media item."""
_PIECE_BYTES = 1024
_MAX_PIECES = 64
"""Maximum number of pieces of text. The rest of longer text is one more piece."""
_MAX_CONTENTS = 1024
"""Maximum number of contents of a request. The tokens of further contents are counted with the last one, because the
router compares all contents with those of each replica."""
_MIN_TOKENS = 8
"""Lower limit of the estimated number of tokens of a message or a piece of text. A router records as many contents of
a replica as have the tokens of its KV cache together, so this limit bounds the router's memory."""


class Loads:
    """Estimated numbers of tokens of the requests in progress, by replica. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tokens = Counter[str]()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, name: str) -> int:
        return self._tokens[name]

    def add(self, name: str, num_tokens: int) -> None:
        with self._lock:
            self._tokens[name] += num_tokens
            if not self._tokens[name]:
                del self._tokens[name]  # the replica may be gone


class Route:
    """The content of a request, and the replicas that have received the request.

    The ingress creates it, and the router, which runs in another thread of the same process, completes it. It is not
    sent to the worker.
    """

    def __init__(self, contents: tuple[Content, ...] = (), first_key: bytes = b"", only: str | None = None) -> None:
        self.contents = contents
        """Media, and beginnings of the prompt. Their numbers of tokens are estimates."""
        self.first_key = first_key
        """Key of the first media item. Without media, key of the prompt up to the first question."""
        self.num_tokens = sum(content.num_tokens for content in contents)
        self.only = only
        """Name of the replica that must receive the request, or None for any replica."""
        self.keeper: str | None = None
        """Name of the replica that stores the response that the request refers to, as in the ids of responses. None if
        there is no such response."""
        self.names: list[str] = []
        """Names of all replicas when the router last chose one."""
        self.tried: list[str] = []
        """Names of the replicas that have received the request."""
        self.nodes: list[str] = []
        """Nodes of these replicas."""
        self._lock = Lock()
        self._counted: tuple[Loads, str] | None = None
        self._ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, ()

    @property
    def has_others(self) -> bool:
        """True if there are replicas that have not received the request."""
        return any(name not in self.tried for name in self.names)

    def begin(self, name: str, loads: Loads) -> None:
        """Record that replica `name` has received the request, and count the request's tokens in `loads`."""
        self.tried.append(name)
        with self._lock:
            self._uncount()
            if not self._ended:
                loads.add(name, self.num_tokens)
                self._counted = loads, name

    def end(self) -> None:
        """Record that the request has been answered, or that its client is gone."""
        with self._lock:
            self._ended = True
            self._uncount()

    def _uncount(self) -> None:
        if self._counted is not None:
            loads, name = self._counted
            self._counted = None
            loads.add(name, -self.num_tokens)


def route_of(body: bytes, owner: bytes = b"", loras: Collection[str] = ()) -> Route:
    """Return the content of the request with the JSON `body`. If the body is not a valid request, its content is empty.

    Equal media and equal beginnings of prompts have equal keys if the requests have the same `cache_salt`, because
    other requests do not share a worker's caches. They must also have the same LoRA adapter. `loras` are the names of
    the adapters; `model` may be one of them. A media item with a `uuid` is named by this uuid and `owner`, the digest
    of the API key, because the request may leave out the data.
    """
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Route()
    if not isinstance(request, dict):
        return Route()
    lora = request.get("model")
    salt = str(request.get("cache_salt") or "") + (f"\0{lora}" if isinstance(lora, str) and lora in loras else "")
    names = _Names(salt.encode(), owner)
    prompt = next((request[name] for name in _PROMPTS if request.get(name)), None)
    if isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt):
        is_chat = "messages" in request or "input" in request
        names.add_messages(prompt if is_chat else [{"role": "user", "content": prompt}], request)
    elif prompt is not None:
        names.add_text(prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt))
    return Route(tuple(names.contents), names.first_key)


def keeper_of(path: str, body: bytes) -> str | None:
    """Return the name of the replica that stores the response or item that a request refers to.

    It is part of the first such id in the request. Return None if there is no such id. If text of the client only
    looks like an id, the request is offered to that replica first, which does no harm.
    """
    if not path.startswith(_STORING):
        return None
    match = _KEPT_ID.search(path.encode(errors="replace")) or _PREVIOUS.search(body) or _KEPT_ID.search(body)
    return None if match is None else match[1].decode()


class _Names:
    """The named content of one request."""

    def __init__(self, salt: bytes, owner: bytes) -> None:
        self._salt = salt
        self._owner = owner
        self._beginning = b""
        """Key of the prompt up to the last added part."""
        self.contents: list[Content] = []
        self.first_key = b""

    def add_messages(self, messages: list[dict[str, Any]], request: Mapping[str, Any]) -> None:
        beginning = [request.get(name) for name in ("tools", "system", "instructions")]
        self._beginning = self._key(msgspec.json.encode(beginning))
        first_beginning = b""
        for message in messages:
            parts = message.get("content")
            if isinstance(parts, list):
                named = [self._named(part) for part in parts]
                media = [content for _, contents in named for content in contents]
                message = {**message, "content": [shown for shown, _ in named]}  # noqa: PLW2901 - with names for media
                for content in media:
                    self._add(content)
                self.first_key = self.first_key or next((content.key for content in media), b"")
            written = msgspec.json.encode(message)
            self._continue(written)
            if message.get("role") == "user":
                first_beginning = first_beginning or self._beginning
        self.first_key = self.first_key or first_beginning or self._beginning

    def add_text(self, text: bytes) -> None:
        for piece in _pieces(text):
            self._continue(piece)
            self.first_key = self.first_key or self._beginning

    def _continue(self, part: bytes) -> None:
        """Add the beginning of the prompt that ends with `part`."""
        self._beginning = self._key(self._beginning, part)
        self._add(Content(self._beginning, max(len(part) // _CHARACTERS_PER_TOKEN + 1, _MIN_TOKENS)))

    def _add(self, content: Content) -> None:
        if len(self.contents) < _MAX_CONTENTS:
            self.contents.append(content)
        else:
            last = self.contents[-1]
            self.contents[-1] = Content(last.key, last.num_tokens + content.num_tokens)

    def _named(self, part: Any) -> tuple[Any, list[Content]]:
        """Return a content part with keys in place of its media, and the media."""
        if not isinstance(part, dict):
            return part, []
        shown, media = dict(part), []
        for name, value in part.items():
            if not name.startswith(_MEDIA) or not isinstance(value, str | dict | list):
                continue
            if isinstance(value, dict):  # the same image in another form, or with other options
                value = value.get("url") or value.get("data") or value  # noqa: PLW2901 - the source of the media item
            data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
            uuid = part.get("uuid")
            key = self._key(b"uuid", self._owner, uuid.encode()) if isinstance(uuid, str) else self._key(data)
            least, most = _MEDIA_TOKENS
            media.append(Content(key, min(max(len(data) // _BYTES_PER_TOKEN, least), most)))
            shown[name] = key.hex()
        return shown, media

    def _key(self, *parts: bytes) -> bytes:
        digest = blake2b(self._salt, digest_size=16)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()


def _pieces(text: bytes) -> Iterator[bytes]:
    end = min(len(text), _PIECE_BYTES * _MAX_PIECES)
    for start in range(0, end, _PIECE_BYTES):
        yield text[start : start + _PIECE_BYTES]
    if end < len(text):
        yield text[end:]
