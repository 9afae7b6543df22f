"""Errors for paths that are not checkpoint directories, and for damaged files in a checkpoint directory.

A folder may be unusable for a few typical reasons. Git-LFS leaves pointers in place of large files. The Hugging Face
cache has a different folder layout. Other programs use other formats. Each message names the file and says what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.hub import repository_name
from mindie_mm.nn.checkpoint.missing_files import also_missing

POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the file that Git-LFS leaves in place of a large file."""
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""Pattern of a repository's folder in the Hugging Face cache."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_SHOWN = 3
"""Maximum number of folders that a message names."""


def check_link(file: Path) -> None:
    """Raise UnsupportedCheckpoint if a file is a dangling link, as in a partial copy of a cache."""
    if file.is_symlink() and not file.exists():
        raise UnsupportedCheckpoint(
            f"{file} is a link to {file.readlink()}, which does not exist: the folder was copied without the "
            "targets of its links, or the targets were removed. Download the folder: `hf download OWNER/NAME "
            f"--local-dir {file.parent}`"
        )


def check_pointer(file: Path) -> None:
    """Raise UnsupportedCheckpoint if an existing file is a Git-LFS pointer."""
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"), file.open("rb") as opened:
        start = opened.read(len(POINTER))
    if start == POINTER:
        raise UnsupportedCheckpoint(
            f"{file} is a Git-LFS pointer, not the file itself: run `git lfs pull` in {file.parent}, or download the "
            f"repository with `hf download OWNER/NAME --local-dir {file.parent}`"
        )


def check_adapter(root: Path) -> None:
    """Raise UnsupportedCheckpoint if a checkpoint directory contains an adapter in addition to its weights.

    Without this check, the answers would come from the base model.
    """
    with os_errors_as(UnsupportedCheckpoint, f"{root} cannot be read"):
        names = sorted(name for name in _ADAPTER_FILES if (root / name).is_file())
    if names:
        settings = _adapter_settings(root)
        kind = f"a {settings['peft_type']} adapter" if settings.get("peft_type") else "an adapter"
        base = settings.get("base_model_name_or_path") or "the base model"
        raise UnsupportedCheckpoint(
            f"{root} has {names[0]}, {kind} of {base}, beside the weights of a model. Move the adapter's files "
            "to a folder of their own and serve it with --lora NAME=FOLDER, or merge it into the weights: "
            f"PeftModel.from_pretrained(model, {str(root)!r}).merge_and_unload().save_pretrained(FOLDER). Or remove "
            "the file to serve the model without it"
        )


def no_checkpoint(root: Path) -> UnsupportedCheckpoint:
    """Return the error for a path that is not a directory with a config.json. The error says which path to give."""
    message = f"{root} is not a checkpoint directory: it has no config.json"
    if root.is_file():
        return UnsupportedCheckpoint(f"{root} is not a checkpoint directory: {_file(root)}")
    if not root.is_dir():
        return UnsupportedCheckpoint(message + _download(root))
    with os_errors_as(UnsupportedCheckpoint, f"{root} cannot be read"):
        names = sorted(entry.name for entry in root.iterdir())
    reason = _cached(root, names) or _other_format(root, names) or _incomplete(root, names)
    message = f"{message}; {reason}" if reason else message
    return UnsupportedCheckpoint(message if reason else f"{message}{also_missing(root, 'config.json')}")


def _other_format(root: Path, names: list[str]) -> str | None:
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return _gguf(gguf[0])
    return _adapter(root) if "adapter_config.json" in names else None


def _incomplete(root: Path, names: list[str]) -> str | None:
    if below := [str(root / name) for name in names if (root / name / "config.json").is_file()]:
        return f"give {' or '.join(below[:_SHOWN])}, which has a config.json"
    if {"tokenizer_config.json", "processor_config.json", "preprocessor_config.json"} & {*names}:
        return (
            "it has only tokenizer or processor files, like many saved adapters. If it is an adapter, give its base "
            "model, and the adapter with --lora NAME=FOLDER, or merge them with peft's merge_and_unload"
        )
    return None


def _download(root: Path) -> str:
    """Return advice if `root` may be the name of a repository, or otherwise an empty string."""
    if (name := repository_name(root)) is None:
        return ""
    return (
        f". If {name} is a repository on the Hugging Face Hub, download it and give its folder: hf download {name} "
        f"--local-dir {root.name}"
    )


def _file(file: Path) -> str:
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"), file.open("rb") as opened:
        if opened.read(4) == b"GGUF":
            return _gguf(file.name)
    if (file.parent / "config.json").is_file():
        return f"it is a file; give its directory, {file.parent}"
    return "it is a file; give the directory of a checkpoint, with its config.json and its weights"


def _gguf(name: str) -> str:
    return (
        f"{name} is a GGUF file, a format of llama.cpp that is not supported; give the directory of the "
        "original checkpoint, with its config.json and weights in safetensors"
    )


def _adapter(root: Path) -> str:
    base = _adapter_settings(root).get("base_model_name_or_path") or "its base model"
    return (
        f"it is an adapter of {base}, without the weights of that model; give the folder of the model, and the "
        f"adapter with --lora NAME={root}, or merge them with peft's merge_and_unload"
    )


def _adapter_settings(root: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json, or {} if it cannot be read."""
    try:
        settings = json.loads((root / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _cached(root: Path, names: list[str]) -> str | None:
    """Return advice if `root` is a folder of the Hugging Face cache, or None."""
    if root.name == "snapshots" and _CACHED.fullmatch(root.parent.name):
        root, names = root.parent, ["snapshots"]
    if (match := _CACHED.fullmatch(root.name)) and "snapshots" in names:
        if snapshot := _snapshot(root):
            return f"it is a folder of the Hugging Face cache; give {snapshot}"
        repository = "/".join(match.groups())
        return (
            "it is a folder of the Hugging Face cache, and none of its snapshots has a config.json; download "
            f"the repository with `hf download {repository}`, and give the folder that the command prints"
        )
    if repositories := [root / name for name in names if _CACHED.fullmatch(name)]:
        given = (_snapshot(repository) or repository / "snapshots" / "COMMIT" for repository in repositories)
        return f"it is the Hugging Face cache; give the folder of one snapshot, such as {next(given)}"
    return None


def _snapshot(repository: Path) -> Path | None:
    """Return the snapshot of the branch main, or else the latest snapshot.

    Return None if no snapshot has a config.json.
    """
    complete = [folder for folder in (repository / "snapshots").glob("*") if (folder / "config.json").is_file()]
    main = repository / "refs" / "main"
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else None
    return max(complete, key=lambda folder: (folder.name == commit, folder.stat().st_mtime), default=None)
