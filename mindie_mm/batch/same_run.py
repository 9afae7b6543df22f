"""The properties that all calls for a run must share, such as versions and the checkpoint, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import Any

from blake3 import blake3

from mindie_mm.batch.input.file_state import digest_of
from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.directory import Checkpoint

_PACKAGES = (
    "mindie_mm",
    "transformers",
    "tokenizers",
    "jinja2",
    "torch",
    "numpy",
    "pillow",
    "simplejpeg",
    "av",
    "soxr",
)
_TOKENIZING_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return each name whose value differs, with a description that contains both values."""
    return {
        name: _difference(name, before.get(name), value) for name, value in now.items() if before.get(name) != value
    }


def first_difference(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ."""
    return next(at for at, (was, value) in enumerate(zip_longest(before, now)) if was != value)


def _difference(name: str, before: Any, now: Any) -> str:
    """Describe how a value differs. For a mapping, show the keys that differ. For a list, show its first difference."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return f"{name} was {_shown(before, keys)} and is now {_shown(now, keys)}"
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        at = first_difference(before, now)
        was, value = (one[at] if at < len(one) else None for one in (before, now))
        return f"{name}[{at}] was {was} and is now {value}"
    return f"{name} was {before} and is now {now}"


def _shown(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {values.get(key, '(none)')}" for key in keys)


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the installed versions of this package, of the packages that decode and tokenize, and of `more`.

    Packages that are not installed are left out. FFmpeg's libraries are listed separately, because PyAV may use the
    libraries of the system.
    """
    import av  # imported late, because listing and checking a run's files do not need a decoder

    versions = {}
    for name in (*_PACKAGES, *more):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    libraries = sorted(av.library_versions.items())
    return versions | {name: ".".join(map(str, numbers)) for name, numbers in libraries}


def model_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the files that tokenization reads. Broken links count as missing.

    Raises:
        UnsupportedCheckpoint: A file cannot be read.

    """
    digest = blake3()
    files = {file for pattern in _TOKENIZING_FILES for file in checkpoint.path.glob(pattern)}
    for file in sorted(files):
        if not file.name.endswith(".index.json") and file.is_file():
            with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
                content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest(16)


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the names of a checkpoint's weight files, and of pieces of each file.

    Raises:
        UnsupportedCheckpoint: A file cannot be read.

    """
    digest = blake3()
    for file in checkpoint.weight_files():
        with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"), file.open("rb") as opened:
            digest.update(f"{file.name}\0{digest_of(opened)}\0".encode())
    return digest.hexdigest(16)
