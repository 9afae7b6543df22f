"""The families, one file each: `ls` of this folder is the support matrix.

A checkpoint's family is found by its model_type: the file of that name first, then every other file, then the
entry points of the group `mindie_mm.models`, which name `Family` classes of other packages.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

from mindie_mm.device import Device, open_device
from mindie_mm.errors import DeviceError, InputError, MindieMMError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Family
from mindie_mm.nn.model import Model
from mindie_mm.nn.placement import TOGETHER, Placement, place
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.weights.quantized import refuse_mindie
from mindie_mm.nn.weights.shares import is_first
from mindie_mm.nn.weights.stored_tensors import stored_dtype

GROUP = "mindie_mm.models"
_MOST_KEYS = 12  # in one line
_log = logging.getLogger(__name__)


def family_names() -> list[str]:
    """Every family's name, sorted; imports none of them."""
    return sorted({*_own_names(), *_entries()})


def _own_names() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}


def _entries() -> Mapping[str, EntryPoint]:
    """Other packages' families by name; reads the metadata of every package there is, which takes a while."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def family_named(name: str) -> type[Family]:
    """The family `name`: the one Family class that its module defines, or what its entry point loads."""
    return _named_of(name, _entries())


def _named_of(name: str, entries: Mapping[str, EntryPoint]) -> type[Family]:
    if name in entries:
        return _loaded(entries[name])
    if name not in _own_names():
        raise InputError(f"no family is named {name!r}; there are {', '.join(family_names())}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # a family that is being written: it fails as it likes, and has to be told by name
        raise InputError(f"the family {name!r}, {__name__}.{name}, does not load: {error!r}") from error
    families = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.__name__
    ]
    if len(families) != 1:
        raise InputError(f"{module.__file__} defines {len(families)} Family classes, it must be one")
    return families[0]


def family_of(checkpoint: Checkpoint, name: str | None = None) -> type[Family]:
    """The family that serves a checkpoint: the one called `name`, else the one that its config.json is of.

    UnsupportedCheckpoint names the checkpoint's model_type and what there is; InputError an unknown `name`.
    """
    entries = _entries()
    if name is not None:
        return _named_of(name, entries)
    model_type = checkpoint.config.get("model_type")
    broken: InputError | None = None
    for candidate in _candidates(str(model_type), entries):
        try:
            family = _named_of(candidate, entries)
        except InputError as error:  # that is broken: no reason to refuse what others serve
            broken = broken or error
            continue
        if family.serves(checkpoint.config):
            return family
    if broken is not None:
        raise broken
    found = "no model_type" if model_type is None else f"model_type {model_type!r}"
    if isinstance(architectures := checkpoint.config.get("architectures"), list) and architectures:
        found += f" ({', '.join(map(str, architectures))})"
    raise UnsupportedCheckpoint(
        f"{checkpoint.path} has {found} in its config.json, which no family serves{_nearest(str(model_type))}; the "
        f"families are {', '.join(family_names())}, and docs/families.md names a published checkpoint of each. If it "
        "is one of them, name it (--family); docs/adding-a-model.md says how to add another"
    )


def _nearest(model_type: str) -> str:
    """Return a hint at the family whose name begins a model type that is not served, or an empty string."""
    own = [name for name in _own_names() if model_type.startswith((f"{name}_", f"{name}-"))]
    if not own:
        return ""
    family = family_named(max(own, key=len))
    return f"; that of the nearest name is {max(own, key=len)}, such as {family.published}"


def _candidates(model_type: str, entries: Collection[str]) -> list[str]:
    """The family of that very name, then this package's, those first whose name begins the type, then others'."""
    own = _own_names()
    return sorted(
        {*own, *entries},
        key=lambda name: (name != model_type, name not in own, not model_type.startswith(name), name),
    )


def _loaded(entry: EntryPoint) -> type[Family]:
    try:
        value = entry.load()
    except Exception as error:  # another package's code: it fails as it likes, and has to be told by name
        raise InputError(f"the entry point {entry.name!r} of {GROUP}, {entry.value}, does not load: {error}") from error
    if isinstance(value, type) and issubclass(value, Family):
        return value
    raise InputError(f"the entry point {entry.name!r} of {GROUP} gives {value!r}, not a Family")


@contextmanager
def reading(checkpoint: Checkpoint, family: type[Family]) -> Iterator[None]:
    """Whatever a family's code trips over in a checkpoint is the checkpoint's, and is told as UnsupportedCheckpoint.

    A family checks what it can name; a setting of another type or meaning, or another family's config, ends here.
    """
    try:
        yield
    except (MindieMMError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} cannot be read: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _log.debug("%s cannot be read as %s", checkpoint.path, family.__name__, exc_info=True)
        raise UnsupportedCheckpoint(f"{checkpoint.path} cannot be read as {family.__name__}: {what}") from error


def load_model(
    path: str | Path | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    family: str | None = None,
    *,
    vision: Placement = TOGETHER,
    projector: Placement = TOGETHER,
    end_token_ids: Sequence[int] | None = None,
) -> Model | Seq2SeqModel:
    """The model of a checkpoint directory (None: the embedded one), its weights on the device.

    `dtype` is auto, the name of a torch dtype, or one; `family` as in `family_of`; `vision` and `projector` say where
    these parts run, unless with the rest. `end_token_ids` take the place of those in generation_config.json.
    UnsupportedCheckpoint, DeviceError, InputError.
    """
    checkpoint = Checkpoint.open(path)
    if end_token_ids is not None:
        stated = checkpoint.json("generation_config.json")
        checkpoint = checkpoint.with_files({"generation_config.json": {**stated, "eos_token_id": [*end_token_ids]}})
    opened = open_device(device)
    chosen = family_of(checkpoint, family)
    try:
        with reading(checkpoint, chosen):
            refuse_mindie(checkpoint)
            processor = chosen.processor(checkpoint)  # first: it refuses by name, before any weight is read
            model = chosen.model(checkpoint, processor, opened, _dtype(dtype, checkpoint, opened))
            if is_first() and (message := unknown_keys(checkpoint, chosen)):
                _log.warning("%s: %s", checkpoint.path, message)
        place(model, vision, projector)
        opened.prepare(model.module)
    except torch.OutOfMemoryError as error:
        where, reason = opened.torch_device, str(error).partition("\n")[0]
        raise DeviceError(f"{checkpoint.path} does not fit into the memory of {where}: {reason}") from error
    return model


def unknown_keys(checkpoint: Checkpoint, family: type[Family]) -> str:
    """Return a sentence about the keys of config.json that `family` does not use, or nothing if it uses all."""
    if not (names := family.unknown_keys(checkpoint)):
        return ""
    more = [f"and {len(names) - _MOST_KEYS} more"] if len(names) > _MOST_KEYS else []
    name = family.__module__.rpartition(".")[2]
    return f"config.json has keys that the family {name} does not use: {', '.join(names[:_MOST_KEYS] + more)}"


def _dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: Device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        return _named(dtype)
    # As transformers does it: what config.json says of the whole, else what the weights are.
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return device.default_dtype(_named(str(stated)) if stated else stored_dtype(checkpoint))


def _named(name: str) -> torch.dtype:
    if name not in ("float32", "bfloat16", "float16"):
        raise InputError(f"dtype is {name!r}, it must be float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
