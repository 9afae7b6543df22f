"""Digests of a checkpoint's files, which show whether two calls use the same checkpoint, even at different paths."""

from __future__ import annotations

from blake3 import blake3

from mindie_mm.batch.input.file_state import digest_of
from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.directory import Checkpoint

_TOKENIZING_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")


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
