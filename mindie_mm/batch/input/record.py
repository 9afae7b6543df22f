"""Records of the input: rows as they were read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
from xxhash import xxh3_128

from mindie_mm.inputs import KINDS

_SOURCES = (*KINDS, *(f"{kind}_url" for kind in KINDS), "input_audio")
MEDIA_KEYS = frozenset({*_SOURCES, *(f"{source}s" for source in _SOURCES)})
"""Keys of a row whose values are media."""
UNREAD_KEYS = frozenset({"tools", "tool_calls", "chat_template_kwargs"})
"""JSON keys whose values are passed to the chat template unchanged, because nulls in them may have a meaning."""


@dataclass(frozen=True, slots=True)
class Files:
    """A row of a tar: the files that share a key."""

    key: str
    files: dict[str, bytes]
    """Name and content of each file, in the order of the tar."""
    repeated: str | None = None
    """A name that several files of the row share, or None. `files` contains only the last of these files."""

    def own(self, suffix: str) -> bytes | None:
        """Return the content of the file whose name is the key and `suffix`. Return None if there is no such file.

        For the key `3` and the suffix `.json`, this is `3.json` but not `3.meta.json`.
        """
        return next((data for name, data in self.files.items() if name.removeprefix(self.key).lower() == suffix), None)


Record = bytes | dict[str, Any] | Files
"""A line of JSON, a row of a table, or the files of a tar's row."""


_encoder = msgspec.msgpack.Encoder(enc_hook=repr)


class RecordsDigest:
    """Digest of consecutive records. It shows a later call whether a shard was written from the same records."""

    def __init__(self) -> None:
        self._hash = xxh3_128()

    def add(self, record: Record) -> None:
        """Add the next record."""
        if isinstance(record, Files):
            for name, data in record.files.items():
                self._add(name.encode(errors="surrogateescape"))
                self._add(data)
        else:
            self._add(record if isinstance(record, bytes) else _encoder.encode(record))

    def hex(self) -> str:
        """Return the digest of the records so far."""
        return str(self._hash.hexdigest())

    def _add(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)


def number_of(value: Decimal) -> int | float:
    """Convert a decimal to a JSON number. Integral values, for example of type decimal(20, 0), become integers."""
    return int(value) if value == value.to_integral_value() else float(value)
