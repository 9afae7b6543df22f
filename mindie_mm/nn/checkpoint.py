"""A checkpoint directory in Hugging Face layout, read once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.inputs import Kind
from mindie_mm.paths import absolute, working_directory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EMBEDDED = Path(__file__).parent.parent / "assets" / "tiny"
"""The checkpoint that comes with the package."""

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""owner/name, as repositories of a hub are called; a relative path may look like it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory and its parsed config.json."""

    path: Path
    """The directory, absolute."""
    config: Mapping[str, Any]
    """config.json."""
    _files: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """What `json` has read: a tokenizer.json takes a second."""

    @classmethod
    def open(cls, path: str | Path | None = None) -> Checkpoint:
        """Read config.json of `path` (None: the embedded one); UnsupportedCheckpoint if there is none. InputError."""
        root = absolute(path) if path is not None else EMBEDDED
        _require_utf8(root)
        file = root / "config.json"
        if not _is_file(file):
            said = f"{root} is no checkpoint directory: it has no config.json"
            # Settings hold the path absolute, whatever was given.
            relative = str(root).removeprefix(f"{working_directory()}/")
            if _REPOSITORY.fullmatch(relative) and not root.exists():
                said += (
                    f". Names of Hugging Face's hub are not taken; if {relative} is one, fetch its files and name "
                    f"their folder: hf download {relative} --local-dir {root.name}"
                )
            raise UnsupportedCheckpoint(said)
        return cls(root, _read(file))

    def json(self, name: str) -> dict[str, Any]:
        """The file `name` parsed, once, or {} where the checkpoint has none. Not to be changed."""
        if name not in self._files:
            file = self.path / name
            self._files[name] = _read(file) if _is_file(file) else {}
        return self._files[name]

    def preprocessor(self, kind: Kind, classes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """How items of `kind` are preprocessed: the checkpoint's settings, completed by its class's defaults.

        `classes` are transformers' classes of processors that are served, with their defaults, the first one that of a
        checkpoint that names none; a name with Fast or Pil behind it is a backend of the same class. The settings are
        processor_config.json's, else preprocessor_config.json's, of videos video_preprocessor_config.json's before
        that; a null is none, as in transformers. UnsupportedCheckpoint.
        """
        files = ["video_preprocessor_config.json"] * (kind == "video") + ["preprocessor_config.json"]
        sources = (self.json("processor_config.json").get(f"{kind}_processor"), *(self.json(file) for file in files))
        settings = {name: value for name, value in next(filter(None, sources), {}).items() if value is not None}
        key = f"{kind}_processor_type"
        stated = str(settings.get(key) or next(iter(classes)))
        name = stated.removesuffix("Fast").removesuffix("Pil")
        if name not in classes:
            raise UnsupportedCheckpoint(f"{self.path}: {key} is {stated!r}, only {', '.join(classes)} is served")
        return {**classes[name], **settings, key: name}

    def token_id(self, token: str) -> int:
        """The id of an added token of tokenizer.json; UnsupportedCheckpoint where it has none of that name."""
        for added in self.json("tokenizer.json").get("added_tokens", ()):
            if added["content"] == token:
                return int(added["id"])
        raise UnsupportedCheckpoint(f"{self.path}: tokenizer.json has no added token {token}")

    def tokenizer(self, is_special: Callable[[Mapping[str, Any]], bool]) -> Tokenizer:
        """tokenizer.json, which there is, with those of its added tokens special whose entries `is_special` takes."""
        from tokenizers import Tokenizer  # late: most who read a checkpoint make none

        described = self.json("tokenizer.json")
        added = [{**token, "special": is_special(token)} for token in described.get("added_tokens", ())]
        return Tokenizer.from_str(json.dumps({**described, "added_tokens": added}))

    def special_token(self, name: str) -> str | None:
        """The spelling of what tokenizer_config.json calls `name`, such as sep_token; None where it has none."""
        config = self.json("tokenizer_config.json")
        extra = config.get("extra_special_tokens")
        token = config.get(name) or (extra.get(name) if isinstance(extra, dict) else None)
        return token["content"] if isinstance(token, dict) else token


def _require_utf8(root: Path) -> None:
    """UnsupportedCheckpoint unless the libraries that read a checkpoint find it: they take its name as UTF-8."""
    name = os.fsencode(root)
    if str(root).encode(errors="replace") != name:
        raise UnsupportedCheckpoint(
            f"the name of the checkpoint directory, {name!r}, is not UTF-8, or file names of this process are not: "
            "rename it, or start Python with PYTHONUTF8=1"
        )


def _is_file(file: Path) -> bool:
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):  # its folder may be another user's
        return file.is_file()


def _read(file: Path) -> dict[str, Any]:
    try:
        with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
            value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{file} holds no JSON object")
    return value
