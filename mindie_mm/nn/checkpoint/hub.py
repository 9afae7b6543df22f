"""Checkpoints that are named as on the Hugging Face Hub, and downloaded into its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from mindie_mm.errors import MindieMMError, OperationalError, UnsupportedCheckpoint
from mindie_mm.settings.paths import working_directory

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""Pattern of the name of a repository, owner/name. A relative path may also match."""
_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model")
_SAFETENSORS = ("*.safetensors",)
_PICKLED = ("*.bin", "*.pt", "*.pth")
_UNUSED = (
    *("onnx/*", "openvino/*", "original/*", "metal/*", "checkpoint-*", ".*"),
    *("consolidated*", "training_args*", "optimizer*", "scheduler*", "rng_state*"),
)
"""Files that are not downloaded: weights for other programs, and the state of a training run. Other subfolders may be
needed."""
_CACHED = "models--"
"""Beginning of the name of a repository's folder in the Hugging Face cache."""
_GB = 1e9


def repository_name(model: Path) -> str | None:
    """Return the name of a repository if `model`, which may be absolute, does not exist and may be such a name."""
    # The settings made the path absolute, so recover the relative path that the user may have given.
    folder = working_directory()
    relative = str(model.relative_to(folder)) if folder and model.is_relative_to(folder) else str(model)
    return relative if _NAME.fullmatch(relative) and not model.exists() else None


def checkpoint_name(checkpoint: Path) -> str:
    """Return the name of the checkpoint's folder, or `owner/name` for a folder in the Hugging Face cache.

    Symbolic links are not resolved.
    """
    folder = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - the user may have chosen the name of a link
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(_CACHED):
        return repository.removeprefix(_CACHED).replace("--", "/")  # repository names never contain "--"
    return folder.name


def downloaded(name: str, revision: str | None, agrees: Callable[[str], bool] | None, *, weights: bool = True) -> Path:
    """Return the folder of a repository in the Hugging Face cache. Download the files that it lacks.

    If the cache has all files, the Hub is not contacted. huggingface_hub shows the progress, continues an interrupted
    download, and honours HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        name: Name of the repository, owner/name.
        revision: Branch, tag or commit. None is the branch main.
        agrees: Function that takes a sentence about the size of the download and returns whether to begin. None means
            that nothing is downloaded.
        weights: Whether the weights are needed.

    Raises:
        UnsupportedCheckpoint: The repository or revision does not exist or is not accessible, or the download was
            declined.
        OperationalError: The Hub cannot be reached, or a file cannot be written.

    """
    from huggingface_hub import HfApi, constants, snapshot_download  # imported late, because it is slow to import

    with _hub_errors(name, revision):
        folder = _in_cache(name, revision, _SAFETENSORS) or _in_cache(name, revision, _PICKLED)
        if folder is None and not weights:
            folder = _in_cache(name, revision, ())
    if folder is not None:
        return folder
    if agrees is None:
        raise UnsupportedCheckpoint(
            f"there is no folder {name} here. To download {constants.ENDPOINT}/{name}, set download: add --download to "
            "the command, or download=True to LLM"
        )
    with _hub_errors(name, revision):
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        files = _needed(_sizes(info), weights=weights)
        size = f"{sum(files.values()) / _GB:.2g} GB" if sum(files.values()) >= _GB / 100 else "less than 10 MB"
        if not agrees(f"{name}: {len(files)} files, {size}, from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}"):
            raise UnsupportedCheckpoint(f"{name} was not downloaded")
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))


def weight_bytes(name: str, revision: str | None) -> int | None:
    """Return the size in bytes of the weights that `downloaded` would download.

    Return None if the Hub does not answer.
    """
    from huggingface_hub import HfApi

    try:
        with _hub_errors(name, revision):
            info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=10)
    except MindieMMError:
        return None
    sizes = _sizes(info)
    return sum(_needed(sizes, weights=True).values()) - sum(_needed(sizes, weights=False).values())


def _sizes(info: ModelInfo) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _in_cache(name: str, revision: str | None, weights: Collection[str]) -> Path | None:
    """Return the folder of a repository with all its files, including those that match `weights`.

    Return None if files are missing.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                local_files_only=True,
                allow_patterns=[*_SETTINGS, *weights],
                ignore_patterns=list(_UNUSED),
            )
        )
    except LocalEntryNotFoundError:
        return None
    has_weights = not weights or any(any(folder.glob(pattern)) for pattern in weights)
    return folder if has_weights and (folder / "config.json").is_file() else None


def _needed(sizes: Mapping[str, int], *, weights: bool) -> dict[str, int]:
    """Return the files to download, with their sizes in bytes. Pickled weights are left out if there are others."""

    def matching(patterns: Collection[str]) -> list[str]:
        unused = {name for name in sizes for pattern in _UNUSED if fnmatch(name, pattern)}
        return [name for name in sizes if name not in unused and any(fnmatch(name, pattern) for pattern in patterns)]

    chosen = matching(_SETTINGS)
    if weights:
        chosen += matching(_SAFETENSORS) or matching(_PICKLED)
    return {name: sizes[name] for name in chosen}


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Raise errors of huggingface_hub as errors of this package, with what to do."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    url = f"{constants.ENDPOINT}/{name}"
    try:
        yield
    except GatedRepoError as error:
        message = f"{url} is gated: accept its licence on that page, then log in with `hf auth login` or set HF_TOKEN"
        raise UnsupportedCheckpoint(message) from error
    except RepositoryNotFoundError as error:
        message = f"there is no folder {name} here, and no public repository {url}. If it is private, set HF_TOKEN"
        raise UnsupportedCheckpoint(message) from error
    except RevisionNotFoundError as error:
        raise UnsupportedCheckpoint(f"{url} has no branch, tag or commit {revision}") from error
    except HFValidationError as error:
        raise UnsupportedCheckpoint(f"{name} is not the name of a repository: {error}") from error
    except OfflineModeIsEnabled as error:
        message = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no complete copy of {name}"
        raise OperationalError(f"{message}; unset it, or give a folder") from error
    except (httpx2.HTTPError, OSError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error).rstrip(".")
        raise OperationalError(f"{name} cannot be downloaded from {url}: {reason}. Try again to continue") from error
