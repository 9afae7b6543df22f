"""A checkpoint directory in Hugging Face layout. Each file is read once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as, panics_as
from mindie_mm.inputs import Kind
from mindie_mm.nn.checkpoint.config_keys import check_sizes
from mindie_mm.nn.checkpoint.folder_errors import check_adapter, check_link, check_pointer, no_checkpoint
from mindie_mm.nn.checkpoint.missing_files import VOCABULARIES, also_missing
from mindie_mm.settings.paths import absolute

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mindie_mm.nn.checkpoint.renaming import Renaming

EMBEDDED = Path(__file__).parents[2] / "assets" / "tiny"
"""Directory of the embedded checkpoint."""

_PARTS: Mapping[Kind, Sequence[str]] = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
"""Keys of processor_config.json for the preprocessing settings of each kind, in order of precedence."""
_FILES: Mapping[Kind, Sequence[str]] = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
    "audio": ("preprocessor_config.json",),
}
"""Files with the preprocessing settings if processor_config.json has none, in order of precedence."""
_CLASS_KEYS: Mapping[Kind, str] = {
    "image": "image_processor_type",
    "video": "video_processor_type",
    "audio": "feature_extractor_type",
}
"""Key that names the transformers class for the preprocessing settings of each kind."""
_MAX_CONFIG_BYTES = 1024 * 1024
"""Maximum size of config.json. Published files have some kilobytes, or some hundred with a list of quantized layers."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER_TEXTS = ("chat_template.jinja", "merges.txt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory and its parsed config.json."""

    path: Path
    """Absolute path of the directory."""
    config: Mapping[str, Any]
    """Contents of config.json."""
    _files: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Contents of the files that `json` has read. They are kept because parsing a tokenizer.json takes a second."""
    renamings: Sequence[Renaming] | None = field(default=None, repr=False, compare=False)
    """Rules for the published names of weights. Empty if transformers itself reads the published names.

    None if the checkpoint was not translated.
    """

    @classmethod
    def open(cls, path: str | Path | None = None) -> Checkpoint:
        """Open a checkpoint and read its config.json. None opens the embedded checkpoint.

        Raises:
            UnsupportedCheckpoint: There is no readable config.json, it is too large, there is an adapter beside it, or
                the name of the directory is not UTF-8. A size in config.json is not positive.
            InputError: The path is relative, and the working directory was removed.

        """
        root = absolute(path) if path is not None else EMBEDDED
        _require_utf8(root)
        file = root / "config.json"
        if not _is_file(file):
            raise no_checkpoint(root)
        check_adapter(root)
        _require_small(file)
        config = _read(file)
        check_sizes(config, str(file))
        return cls(root, config)

    def translated(
        self, config: Mapping[str, Any], files: Mapping[str, dict[str, Any]], renamings: Sequence[Renaming]
    ) -> Checkpoint:
        """Return this checkpoint in transformers' layout. No files are written.

        Args:
            config: Contents of config.json in transformers' layout.
            files: Contents of other JSON files in that layout, by name.
            renamings: Rules for the published names of the weights.

        """
        return replace(self, config=config, _files={**self._files, **files}, renamings=renamings)

    @property
    def contents(self) -> tuple[Mapping[str, Any], Mapping[str, dict[str, Any]]]:
        """Contents of config.json and of the other files that were read or translated. Used to compare translations."""
        return self.config, self._files

    def with_files(self, files: Mapping[str, dict[str, Any]]) -> Checkpoint:
        """Return this checkpoint with the contents of some JSON files replaced. No files are written."""
        return replace(self, _files={**self._files, **files})

    def json(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON file, or {} if the checkpoint does not have it. Do not change the result.

        Raises:
            UnsupportedCheckpoint: The file cannot be read, or is not a JSON object.

        """
        if name not in self._files:
            file = self.path / name
            self._files[name] = _read(file) if _is_file(file) else {}
        return self._files[name]

    def preprocessor(self, kind: Kind, classes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the preprocessing settings of a kind of media, with the defaults of their class filled in.

        As in transformers, the settings come from processor_config.json or else from the file of the kind (see
        `_FILES`), and a null counts as absent.

        Args:
            kind: The kind of media.
            classes: Names of the supported transformers classes, with their default settings. The first class applies
                if the settings name no class. The suffixes Fast and Pil denote backends of the same class.

        Raises:
            UnsupportedCheckpoint: No file has the settings, or their class is not supported.

        """
        content, source = self._stated(kind)
        settings = {name: value for name, value in content.items() if value is not None}
        key = _CLASS_KEYS[kind]
        stated = str(settings.get(key) or _implied_class(kind, settings) or next(iter(classes)))
        name = stated.removesuffix("Fast").removesuffix("Pil")
        if name not in classes:
            files = " or ".join([f"processor_config.json ({_PARTS[kind][0]})", *_FILES[kind]])
            raise UnsupportedCheckpoint(
                f"{self.path}: {key} is {stated!r} in {source}; only {', '.join(classes)} is supported. Copy "
                f"{files} from the original repository"
            )
        return {**classes[name], **settings, key: name}

    def _stated(self, kind: Kind) -> tuple[Mapping[str, Any], str]:
        """Return the settings of `kind` and the name of their file. Raise UnsupportedCheckpoint if there are none."""
        joint = self.json("processor_config.json")
        for part in _PARTS[kind]:
            if (part_settings := joint.get(part)) is not None:
                if not isinstance(part_settings, dict):
                    raise UnsupportedCheckpoint(
                        f"{self.path}: {part}={part_settings!r} in processor_config.json must be an object"
                    )
                return part_settings, "processor_config.json"
        for file in _FILES[kind]:
            if self.has(file):
                return self.json(file), file
        raise UnsupportedCheckpoint(
            f"{self.path} has no preprocessing settings for {kind} inputs: it has no {_FILES[kind][0]}, and no "
            f"{_PARTS[kind][0]} in processor_config.json. Copy one of these files from the original repository"
            f"{also_missing(self.path, 'preprocessor_config.json')}"
        )

    def require(self, name: str, keys: Collection[str]) -> dict[str, Any]:
        """Return the contents of a JSON file. Raise UnsupportedCheckpoint if it is missing or lacks one of `keys`."""
        settings = self.json(name)
        if missing := [key for key in keys if settings.get(key) is None]:
            what = f"its {name} has no {', '.join(missing)}" if self.has(name) else f"it has no {name}"
            raise UnsupportedCheckpoint(
                f"{self.path} has incomplete preprocessing settings for images: {what}. Copy the file from the "
                "original repository"
            )
        return settings

    def binary(self, name: str) -> bytes:
        """Return the contents of a file that is not JSON. Raise UnsupportedCheckpoint if it cannot be read."""
        if not self.has(name):
            raise UnsupportedCheckpoint(f"{self.path} has no {name}. Copy it from the original repository")
        with os_errors_as(UnsupportedCheckpoint, f"{self.path / name} cannot be read"):
            return (self.path / name).read_bytes()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the file. Raise UnsupportedCheckpoint if the folder cannot be searched."""
        return bool(self._files.get(name)) or _is_file(self.path / name)

    def token_id(self, token: str) -> int:
        """Return the id of an added token of tokenizer.json. Raise UnsupportedCheckpoint if the token is missing."""
        if (index := self.ids_of(self.tokenizer_json()).get(token)) is not None:
            return index
        raise UnsupportedCheckpoint(f"{self.path}: tokenizer.json has no added token {token}")

    def tokenizer_json(self) -> dict[str, Any]:
        """Return the contents of tokenizer.json. Do not change the result.

        Raises:
            UnsupportedCheckpoint: The file is missing or cannot be read.

        """
        if not self.has("tokenizer.json"):
            convert = "AutoTokenizer.from_pretrained(FOLDER)"
            if has_tekken := self.has("tekken.json"):
                convert = 'transformers.integrations.mistral.convert_tekken_tokenizer("tekken.json")'
            raise UnsupportedCheckpoint(
                f"{self.path} has {'tekken.json, but ' * has_tekken}no tokenizer.json. Copy it from the original "
                "repository or from another repository of the same model, or create it from the other tokenizer files: "
                f"{convert}.save_pretrained(FOLDER){also_missing(self.path, 'tokenizer.json')}"
            )
        return self.json("tokenizer.json")

    def ids_of(self, described: Mapping[str, Any]) -> dict[str, int]:
        """Return the id of each added token in `described`, the contents of this checkpoint's tokenizer.json."""
        return {token["content"]: int(token["id"]) for token in described.get("added_tokens", ())}

    def weight_files(self) -> list[Path]:
        """Return the files that may contain weights, sorted. Broken links count as missing."""
        files = {file for pattern in _WEIGHTS for file in self.path.glob(pattern)}
        return sorted(file for file in files if file.is_file())

    def weights_state(self) -> bytes:
        """Return a digest that changes if a file of the weights is replaced or written. No file is read."""
        digest = blake3()
        for file in self.weight_files():
            with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
                state = file.stat()
            digest.update(f"{file.name}\0{state.st_ino} {state.st_size} {state.st_ctime_ns}\0".encode())
        return digest.digest(16)

    def check_tokenizer(self) -> None:
        """Raise UnsupportedCheckpoint if there is no vocabulary file, or one of the tokenizer's files is damaged."""
        vocabularies = [name for name in VOCABULARIES if self.has(name)]
        if not vocabularies:
            self.tokenizer_json()  # raises an error with advice
        for name in (*vocabularies[:1], *_TOKENIZER_SETTINGS, *_TOKENIZER_TEXTS):
            if _is_file(file := self.path / name):
                check_pointer(file)
                if name in _TOKENIZER_SETTINGS:
                    self.json(name)

    def tokenizer(self, is_special: Callable[[Mapping[str, Any]], bool]) -> Tokenizer:
        """Return the tokenizer of tokenizer.json, in which only the selected added tokens are special.

        Args:
            is_special: Function that returns whether the entry of an added token is special.

        Raises:
            UnsupportedCheckpoint: tokenizer.json is missing or cannot be read.

        """
        from tokenizers import Tokenizer  # imported late: few processes that read a checkpoint need it

        described = self.tokenizer_json()
        added = [{**token, "special": is_special(token)} for token in described.get("added_tokens", ())]
        with panics_as(UnsupportedCheckpoint, f"{self.path / 'tokenizer.json'} cannot be read"):
            return Tokenizer.from_str(json.dumps({**described, "added_tokens": added}))

    def fast_tokenizer(self, config: Any = None) -> Any:
        """Return the tokenizer as a transformers fast tokenizer.

        Args:
            config: The model's configuration. None means that transformers reads it.

        Raises:
            UnsupportedCheckpoint: There is no readable tokenizer, or no fast tokenizer.

        """
        from transformers import AutoTokenizer  # imported late: the import takes a second, and clients do not need it

        self.check_tokenizer()
        # This logger warns of a model_type that transformers lacks, but a family of another package serves it.
        logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, config=config, local_files_only=True, trust_remote_code=False
            )  # None would ask on a terminal
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            self.json("tokenizer.json")  # raises an error that names the file if it is truncated
            raise UnsupportedCheckpoint(f"{self.path} has no readable tokenizer: {error}") from error
        if not tokenizer.is_fast:
            self.tokenizer_json()  # raises an error with advice if the file is missing
            raise UnsupportedCheckpoint(
                f"{self.path}: its tokenizer, {type(tokenizer).__name__}, does not read tokenizer.json; correct "
                "tokenizer_class in tokenizer_config.json"
            )
        return tokenizer

    def special_token(self, name: str) -> str | None:
        """Return the text of the special token under a key of tokenizer_config.json, such as sep_token, or None."""
        config = self.json("tokenizer_config.json")
        extra = config.get("extra_special_tokens")
        token = config.get(name) or (extra.get(name) if isinstance(extra, dict) else None)
        return token["content"] if isinstance(token, dict) else token

    def require_special_token(self, *names: str) -> str:
        """Return the text of a special token, under the first of the keys `names` that tokenizer_config.json has.

        Raises:
            UnsupportedCheckpoint: tokenizer_config.json has none of the keys.

        """
        for name in names:
            if (token := self.special_token(name)) is not None:
                return token
        if not self.has("tokenizer_config.json"):
            missing = f"tokenizer_config.json with its {' or '.join(names)}"
        else:
            missing = f"{' and no '.join(names)} in its tokenizer_config.json"
        raise UnsupportedCheckpoint(
            f"{self.path} has no {missing}. Copy tokenizer_config.json from the original repository"
        )


def with_special_tokens(described: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a tokenizer.json with `tokens` added as special tokens.

    New tokens get the next free ids, in order, as in transformers' `add_special_tokens`.
    """
    added = {token["content"]: token for token in described.get("added_tokens", ())}
    vocabulary = described["model"]["vocab"]
    known = (
        vocabulary if isinstance(vocabulary, dict) else {piece: index for index, (piece, _) in enumerate(vocabulary)}
    )
    next_id = tokenizer_length(described)
    for content in tokens:
        if content in added:
            continue
        if (index := known.get(content)) is None:
            index, next_id = next_id, next_id + 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added[content] = {"id": index, "content": content, **flags, "special": True}
    return {**described, "added_tokens": [*added.values()]}


def tokenizer_length(described: Mapping[str, Any]) -> int:
    """Return the number of ids of a tokenizer.json, as `len` of a transformers tokenizer does."""
    added = (int(token["id"]) + 1 for token in described.get("added_tokens", ()))
    return max(len(described["model"]["vocab"]), *added, 0)


def _require_utf8(root: Path) -> None:
    """Raise UnsupportedCheckpoint if the name of the directory is not UTF-8.

    Libraries that read the directory require UTF-8.
    """
    name = os.fsencode(root)
    if str(root).encode(errors="replace") != name:
        raise UnsupportedCheckpoint(
            f"the name of the checkpoint directory, {name!r}, is not UTF-8, or Python does not use UTF-8 for "
            "file names. Rename the directory, or start Python with PYTHONUTF8=1"
        )


def _require_small(file: Path) -> None:
    """Raise UnsupportedCheckpoint if a config.json is too large to be one."""
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
        size = file.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise UnsupportedCheckpoint(
            f"{file} has {size} bytes; the limit is {_MAX_CONFIG_BYTES}. Copy config.json from the original repository"
        )


def _implied_class(kind: Kind, settings: Mapping[str, Any]) -> str | None:
    """Return the class that transformers derives from the class of another kind of media, or None."""
    if kind == "image":
        return str(settings.get("feature_extractor_type", "")).replace("FeatureExtractor", "ImageProcessor") or None
    if kind == "video" and (image := settings.get("image_processor_type")):
        import transformers  # imported late: few processes that read a checkpoint need it

        name = str(image).removesuffix("Fast").removesuffix("Pil").replace("ImageProcessor", "VideoProcessor")
        # dir() takes 0.2 s. The doctor's stand-in for transformers has no list.
        return name if name in getattr(transformers, "__all__", ()) else None
    return None


def _is_file(file: Path) -> bool:
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):  # the folder may belong to another user
        check_link(file)
        return file.is_file()


def _read(file: Path) -> dict[str, Any]:
    check_pointer(file)
    try:
        with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
            value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedCheckpoint(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{file} does not contain a JSON object")
    return value
