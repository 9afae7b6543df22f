"""Records of an input: rows as they stand in their file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_128


@dataclass(frozen=True, slots=True)
class Files:
    """A row of a tar."""

    key: str
    files: dict[str, bytes]
    """Contents by name, in the order of the tar."""
    repeated: str | None = None
    """Name of several of the files, or None. `files` has only the last of them."""

    def own(self, suffix: str) -> bytes | None:
        """Return the file with the name of the row and `suffix`, such as `3.json` but not `3.meta.json`, or None."""
        return next((data for name, data in self.files.items() if name.removeprefix(self.key).lower() == suffix), None)


Record = bytes | dict[str, Any] | Files
"""A line of JSON, a row of a table, or files of a tar."""


_encoder = msgspec.msgpack.Encoder(enc_hook=repr)


class RecordsDigest:
    """Digest of consecutive records. A later call uses it to tell whether a shard was made from the same records."""

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
