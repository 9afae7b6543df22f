"""The model families. Each file in this folder whose name has no leading underscore implements one family.

`family_of` finds the family of a checkpoint by its model_type. It first tries the file of that name, then the other
files, and finally the entry points of the group `mindie_mm.models`, which refer to `Family` classes of other packages.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from difflib import SequenceMatcher
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal

import torch

from mindie_mm.device import Device, open_device
from mindie_mm.errors import DeviceError, InputError, MindieMMError, UnsupportedCheckpoint, panics_as
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Family, Processor
from mindie_mm.nn.int8 import quantize
from mindie_mm.nn.model import Model
from mindie_mm.nn.placement import TOGETHER, Placement, place
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.split_linear import is_first
from mindie_mm.nn.weights.stored_tensors import stored_dtype

GROUP = "mindie_mm.models"
_MOST_KEYS = 12  # maximum number of keys in one log message
_LIST = "docs/families.md lists all families, as `mindie-mm models` does"
_log = logging.getLogger(__name__)

_NO_TEMPLATE = (
    "its authors publish a tokenizer and prompt format (tekken.json) that only the package mistral-common reads, "
    "instead of a tokenizer.json and a chat template"
)
_REMOTE_TOKENIZER = (
    "this layout has a tokenizer that needs remote code; download a revision in transformers' layout instead, such as "
    "refs/pr/11 of baidu/ERNIE-4.5-VL-28B-A3B-PT"
)
_REFUSED = {
    "ernie4_5_moe_vl": _REMOTE_TOKENIZER,
    "voxtral": _NO_TEMPLATE,
    "voxtral_realtime": _NO_TEMPLATE,
}
"""Reasons why checkpoints are not supported although transformers has their classes, by `model_type`."""


def family_names() -> list[str]:
    """Return the names of all families, sorted, without importing any family."""
    return sorted({*_own_names(), *_entries()})


def _own_names() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}


def _entries() -> Mapping[str, EntryPoint]:
    """Return the families of other packages, by name. This reads the metadata of all packages, which takes 5 ms."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def name_of(family: type[Family]) -> str:
    """Return the name of a family: that of its module in this package, or of its entry point."""
    package, _, module = family.__module__.rpartition(".")
    if package == __name__:
        return module
    value = f"{family.__module__}:{family.__qualname__}"
    return next((name for name, entry in _entries().items() if entry.value == value), module)


def family_named(name: str) -> type[Family]:
    """Return the family called `name`.

    `name` is the name of a module in this package or of an entry point.

    Raises:
        InputError: No family has this name, or the family cannot be loaded.

    """
    return _named_of(name, _entries())


def _named_of(name: str, entries: Mapping[str, EntryPoint]) -> type[Family]:
    if not isinstance(name, str):
        raise InputError(f"family is of type {type(name).__name__}; it must be a string")
    if name in entries:
        return _loaded(entries[name])
    if name not in _own_names():
        nearest = max(family_names(), key=lambda known: _similarity(name, known))
        raise InputError(f"there is no family named {name!r}; the nearest name is {nearest}, and {_LIST}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # a family under development may raise anything, and the error must name the family
        raise InputError(f"the family {name!r} ({__name__}.{name}) cannot be imported: {error!r}") from error
    families = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.__name__
    ]
    if len(families) != 1:
        raise InputError(f"{module.__file__} defines {len(families)} Family classes; it must define exactly one")
    return families[0]


def family_of(checkpoint: Checkpoint, name: str | None = None) -> type[Family]:
    """Return the family that supports a checkpoint.

    Args:
        checkpoint: The checkpoint.
        name: Name of the family. If None, config.json decides.

    Raises:
        InputError: No family is called `name`, or a family that might support the checkpoint cannot be loaded.
        UnsupportedCheckpoint: No family supports this model_type, or the family called `name` does not.

    """
    entries = _entries()
    if name is not None:
        named = _named_of(name, entries)
        if checkpoint.config.get("model_type") is None or _serves(named, checkpoint):
            return named
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {_stated_type(checkpoint)} in its config.json, which the family {name} does not "
            f"support; leave out --family to use the family that config.json selects{_nearest(checkpoint)}"
        )
    broken: InputError | None = None
    for candidate in _candidates(str(checkpoint.config.get("model_type")), entries):
        try:
            family = _named_of(candidate, entries)
        except InputError as error:  # a broken family must not prevent others from serving the checkpoint
            broken = broken or error
            continue
        if _serves(family, checkpoint):
            return family
    if broken is not None:
        raise broken
    if reason := _REFUSED.get(str(checkpoint.config.get("model_type"))):
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {_stated_type(checkpoint)} in its config.json, which is not supported, because "
            f"{reason}; {_LIST}"
        )
    raise UnsupportedCheckpoint(
        f"{checkpoint.path} has {_stated_type(checkpoint)} in its config.json, and no family supports such a "
        f"checkpoint{_nearest(checkpoint)}; {_LIST}, and docs/adding-a-model.md describes how to add another family"
    )


def _serves(family: type[Family], checkpoint: Checkpoint) -> bool:
    try:
        return family.serves(checkpoint.config)
    except (AttributeError, TypeError):  # a section of config.json is not an object
        return False


def _stated_type(checkpoint: Checkpoint) -> str:
    """Return the model_type and the architectures of config.json, as an error message names them."""
    model_type = checkpoint.config.get("model_type")
    stated = "no model_type" if model_type is None else f"model_type {model_type!r}"
    names = _architectures(checkpoint)
    return f"{stated} ({', '.join(names)})" if names else stated


def _architectures(checkpoint: Checkpoint) -> list[str]:
    names = checkpoint.config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _nearest(checkpoint: Checkpoint) -> str:
    """Return a hint that names the family with the nearest model_type or architecture, or an empty string."""
    model_type = checkpoint.config.get("model_type")
    stated = [*([] if model_type is None else [str(model_type)]), *_architectures(checkpoint)]
    scores: dict[str, float] = {}
    for name in sorted(_own_names()):
        with suppress(InputError):  # a broken family has no model types
            family = _named_of(name, {})  # without the slow search for families of other packages
            known = [name, *family.model_types, getattr(family, "module_name", "")]
            scores[name] = max((_similarity(own, other) for own in stated for other in known), default=0.0)
    nearest = max(scores, key=lambda name: scores[name])
    if not scores[nearest]:
        return ""
    return f"; the nearest family by name is {nearest}, for checkpoints such as {family_named(nearest).published}"


def _similarity(stated: str, known: str) -> float:
    """Return how similar two model types or architectures are, from 0 to 1. A common beginning counts most."""
    first, second = (re.sub(r"For[A-Z]\w*$|[\W_]", "", name).lower() for name in (stated, known))
    if not first or not second:
        return 0.0
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    begins_alike = next((block.size for block in matcher.get_matching_blocks() if block.a == block.b == 0), 0)
    return (begins_alike / max(len(first), len(second)) + matcher.ratio()) / 2


def _candidates(model_type: str, entries: Collection[str]) -> list[str]:
    """Return the names of all families in the order in which `family_of` tries them for `model_type`.

    The first family is the family with exactly this name. The other families of this package follow, and then families
    of other packages. Within each group, names that are a prefix of `model_type` precede other names.
    """
    own = _own_names()
    return sorted(
        {*own, *entries},
        key=lambda name: (name != model_type, name not in own, not model_type.startswith(name), name),
    )


def _loaded(entry: EntryPoint) -> type[Family]:
    try:
        value = entry.load()
    except Exception as error:  # code of another package may raise anything, and the error must name the entry point
        raise InputError(
            f"the entry point {entry.name!r} of {GROUP} ({entry.value}) cannot be loaded: {error}"
        ) from error
    if isinstance(value, type) and issubclass(value, Family):
        return value
    raise InputError(f"the entry point {entry.name!r} of {GROUP} is {value!r}; it must be a Family")


@contextmanager
def reading(checkpoint: Checkpoint, family: type[Family]) -> Iterator[None]:
    """Raise UnsupportedCheckpoint in place of unexpected exceptions while a family reads a checkpoint.

    Families check the settings that they read. This function catches other faults, such as settings of an unexpected
    type or the config.json of another family.

    Args:
        checkpoint: The checkpoint that is read.
        family: The family that reads it.

    Raises:
        UnsupportedCheckpoint: The body of the `with` statement raised an exception other than a MindieMMError or
            torch.OutOfMemoryError.

    """
    try:
        with panics_as(UnsupportedCheckpoint, f"{checkpoint.path} cannot be read as {family.__name__}"):
            yield
    except (MindieMMError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} cannot be read: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _log.debug("%s cannot be read as %s", checkpoint.path, family.__name__, exc_info=True)
        raise UnsupportedCheckpoint(f"{checkpoint.path} cannot be read as {family.__name__}: {what}") from error


def processor_of(checkpoint: Checkpoint, family: type[Family]) -> Processor:
    """Return the processor of a family for a checkpoint.

    Raises:
        UnsupportedCheckpoint: The family does not support a setting, or the id of a token of media items is outside the
            vocabulary.

    """
    with reading(checkpoint, family):
        translated = family.translated(checkpoint)
        processor = family.processor(translated)
        known = processor.num_embeddings
        if known is None and issubclass(family, PretrainedFamily):
            known = _vocabulary(translated, family)
    if known is not None:
        _check_tokens(processor, known, str(checkpoint.path))
    return processor


def _vocabulary(checkpoint: Checkpoint, family: type[PretrainedFamily]) -> int:
    """Return `vocab_size` of the text model, from config.json or else from transformers' configuration."""
    stated: object = (checkpoint.config.get("text_config") or checkpoint.config).get("vocab_size")
    if type(stated) is int:
        return stated
    config = family.config_class().from_dict(deepcopy(dict(checkpoint.config)))  # it changes its argument
    size: int = config.get_text_config().vocab_size
    return size


def _check_tokens(processor: Processor, known: int, where: str) -> None:
    """Raise UnsupportedCheckpoint if a token of media items has an id of `known` or more, which no embedding has."""
    for kind, one in processor.placeholders.items():
        for token in (one.token, *one.before, *one.after, *one.control_ids):
            if token >= known:
                raise UnsupportedCheckpoint(
                    f"{where}: a token of {kind} items has the id {token}; ids must be below {known}, the size of the "
                    "vocabulary. Copy config.json and the tokenizer's files from the original repository, or correct "
                    "the id of the token or vocab_size in config.json"
                )


def load_model(
    path: str | Path | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    family: str | None = None,
    *,
    weights: Literal["auto", "int8"] = "auto",
    vision: Placement = TOGETHER,
    projector: Placement = TOGETHER,
    end_token_ids: Sequence[int] | None = None,
    prepares: bool = True,
) -> Model | Seq2SeqModel:
    """Load the model of a checkpoint and place its weights on a device.

    Args:
        path: Checkpoint directory. None loads the embedded checkpoint.
        device: Device that runs the model, or "auto".
        dtype: A torch dtype, its name, or "auto".
        family: Name of the family, or None to find the family as `family_of` does.
        weights: "int8" quantizes the linear layers of the text model. "auto" keeps the dtype.
        vision: Placement of the vision tower. By default, it runs with the rest of the model.
        projector: Placement of the projector, with the same default.
        end_token_ids: Token ids that replace eos_token_id of generation_config.json.
        prepares: Whether to also call `prepare_model`.

    Returns:
        The loaded model.

    Raises:
        DeviceError: The device is not available, or the weights do not fit into its memory.
        InputError: An argument is invalid.
        UnsupportedCheckpoint: The checkpoint cannot be read or is not supported.

    """
    _require_types(weights, vision, projector, end_token_ids)
    checkpoint = Checkpoint.open(path)
    if end_token_ids is not None:
        stated = checkpoint.json("generation_config.json")
        checkpoint = checkpoint.with_files({"generation_config.json": {**stated, "eos_token_id": [*end_token_ids]}})
    opened = open_device(device)
    for placement in (vision, projector):
        if placement.device is not None:
            open_device(placement.device)  # to report a missing device before weights are read
    chosen = family_of(checkpoint, family)
    with _fitting(checkpoint, opened):
        with reading(checkpoint, chosen):
            processor = processor_of(checkpoint, chosen)  # first, to report faults before weights are read
            model = chosen.model(checkpoint, processor, opened, _dtype(dtype, checkpoint, opened))
            model.processor = processor
            if is_first() and (message := unknown_keys(checkpoint, chosen)):
                _log.warning("%s: %s", checkpoint.path, message)
        place(model, vision, projector)
    if prepares:
        prepare_model(model, checkpoint, opened, weights)
    return model


def prepare_model(
    model: Model | Seq2SeqModel, checkpoint: Checkpoint, device: Device, weights: Literal["auto", "int8"] = "auto"
) -> None:
    """Prepare a loaded model for its device. Layers may be replaced after trials, which all ranks run together.

    Args:
        model: Model that `load_model` has loaded on the device.
        checkpoint: Checkpoint of the model.
        device: Device of the model.
        weights: Same as in `load_model`.

    Raises:
        DeviceError: The prepared weights do not fit into the memory of the device.

    """
    with _fitting(checkpoint, device):
        if device.fuses_layers:
            model.fuse()
        if weights == "int8":
            quantize(model, device)
        model.compile_steps()
        device.prepare(model.module)


@contextmanager
def _fitting(checkpoint: Checkpoint, device: Device) -> Iterator[None]:
    """Raise DeviceError if the body of the `with` statement runs out of the device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where, reason = device.torch_device, str(error).partition("\n")[0]
        raise DeviceError(f"{checkpoint.path} does not fit in the memory of {where}: {reason}") from error


def unknown_keys(checkpoint: Checkpoint, family: type[Family]) -> str:
    """Return a sentence that lists the keys of config.json that `family` does not use.

    The result is an empty string if the family uses all keys.
    """
    if not (names := family.unknown_keys(checkpoint)):
        return ""
    more = [f"and {len(names) - _MOST_KEYS} more"] if len(names) > _MOST_KEYS else []
    return (
        f"config.json has keys that the family {name_of(family)} does not use: {', '.join(names[:_MOST_KEYS] + more)}"
    )


def _require_types(weights: str, vision: Placement, projector: Placement, ends: Sequence[int] | None) -> None:
    """Raise InputError for an argument of `load_model` that has a wrong type or is unknown."""
    if not isinstance(weights, str) or weights not in ("auto", "int8"):
        raise InputError(f"weights={weights!r} must be auto or int8")
    for name, placement in (("vision", vision), ("projector", projector)):
        if not isinstance(placement, Placement):
            raise InputError(f"{name} is of type {type(placement).__name__}; it must be a Placement")
    if ends is not None and not (isinstance(ends, list | tuple) and all(type(one) is int for one in ends)):
        raise InputError(f"end_token_ids is of type {type(ends).__name__}; it must be a list of integers")


def _dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: Device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype != "auto":
        return _named(dtype)
    # As in transformers, the dtype in config.json takes precedence over the dtype of the weights.
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return device.default_dtype(_named(str(stated)) if stated else stored_dtype(checkpoint))


def _named(name: str) -> torch.dtype:
    if not isinstance(name, str) or name not in ("float32", "bfloat16", "float16"):
        raise InputError(f"dtype={name!r} must be float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
