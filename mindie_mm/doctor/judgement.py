"""The judgement of a checkpoint from its config.json, without its weights and without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindie_mm.device import KINDS
from mindie_mm.device.finding import Finding
from mindie_mm.errors import MindieMMError, UnsupportedCheckpoint
from mindie_mm.inputs import Media
from mindie_mm.models import family_of, name_of, processor_of, reading, unknown_keys
from mindie_mm.nn.checkpoint.config_only import ConfigOnly
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from mindie_mm.nn.checkpoint.missing_files import listed, missing_files
from mindie_mm.nn.checkpoint.resolved import positions_of
from mindie_mm.nn.family import Family, Processor
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.weights.build import check_quantized
from mindie_mm.nn.weights.formats import format_of
from mindie_mm.nn.weights.quantized import method_of, quantization
from mindie_mm.settings.config import EngineConfig, GiB, kind_of_name

_MOST_BYTES = 1 << 60
"""Largest size of weights that an index may state. Other numbers are ignored."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TEXT_TOKEN = re.compile(r"<[^<>]+>|\n+|\w+|[^\w\s]")
"""Pattern of the parts of text that usually have one token each."""


def judge(
    path: Path,
    family_name: str | None,
    size: tuple[int, int],
    engine: EngineConfig = EngineConfig(),  # noqa: B008 - it is frozen
    weight_bytes: int | None = None,
) -> Iterator[Finding]:
    """Judge whether a checkpoint can be served, and what an image costs. Yield the findings one by one.

    Args:
        path: Directory of the checkpoint, or its config.json.
        family_name: Same as in `family_of`.
        size: Width and height of the image, in pixels.
        engine: Settings with the device, and with the number of devices that share the weights.
        weight_bytes: Size of the weights in bytes if the directory has neither them nor their index. None if unknown.

    """
    try:
        checkpoint = ConfigOnly.open(path)
        family = family_of(checkpoint, family_name)
    except MindieMMError as error:
        yield Finding("family", "error", str(path), str(error))
        return
    name = name_of(family)
    try:
        processor = processor_of(checkpoint, family)
        with reading(checkpoint, family):
            translated = family.translated(checkpoint)
            config = family.configuration(translated) if issubclass(family, PretrainedFamily) else None
    except UnsupportedCheckpoint as error:
        yield Finding("family", "error", f"family {name}, which does not support this checkpoint", str(error))
        return
    # Not every family needs a file with preprocessing settings. Reading its settings has shown whether this one does.
    missing = {*missing_files(checkpoint.path)} - {"preprocessor_config.json"} | checkpoint.assumed
    yield _served(name, checkpoint_name(checkpoint.path), listed(sorted(missing)))
    yield _settings(checkpoint, family)
    yield _quantization(checkpoint, family)
    yield _context(checkpoint, config)
    yield _weights(checkpoint, engine, weight_bytes)
    yield _image(checkpoint, family, processor, size)


def _served(family: str, checkpoint: str, missing: str) -> Finding:
    if not missing:
        return Finding("family", "ok", f"family {family}, served")
    advice = "download them: hf download OWNER/NAME --local-dir FOLDER"
    if "/" in checkpoint:
        advice = f"to download them: mindie-mm serve {checkpoint} --download"
    return Finding("family", "ok", f"family {family}, served; these files are missing: {missing}", advice)


def _settings(checkpoint: ConfigOnly, family: type[Family]) -> Finding:
    try:
        with reading(checkpoint, family):
            message = unknown_keys(checkpoint, family)
    except UnsupportedCheckpoint as error:
        return Finding("settings", "error", "a setting is not supported", str(error))
    if message:
        return Finding("settings", "warning", message, "check the spelling of these keys, and whether they are needed")
    return Finding("settings", "ok", "every key of config.json is honoured, or does not affect answers")


def _quantization(checkpoint: ConfigOnly, family: type[Family]) -> Finding:
    own_layers = not issubclass(family, PretrainedFamily)
    try:
        if (settings := quantization(checkpoint)) is None:
            return Finding("quantization", "ok", "the weights are not quantized")
        with reading(checkpoint, family):
            check_quantized(family.translated(checkpoint), own_layers=own_layers)
    except UnsupportedCheckpoint as error:
        return Finding("quantization", "error", "the quantization is not supported here", str(error))
    method = method_of(settings)
    if format_of(checkpoint) is not None:
        path = "the log says how many layers stay quantized, and whether compiled code multiplies them"
        return Finding("quantization", "ok", f"{method}, supported on every device", path)
    found = f"{method}, supported on the devices for which transformers supports this method"
    return Finding("quantization", "ok", found)


def _context(checkpoint: ConfigOnly, config: Any) -> Finding:
    """Return a finding about the context. `config` is transformers' configuration, or None if there is none."""
    positions = checkpoint.stated_anywhere("max_position_embeddings") if config is None else positions_of(config)
    if positions is None:
        return Finding("context", "warning", "unknown: config.json does not state max_position_embeddings")
    return Finding("context", "ok", f"{positions} tokens")


def _weights(checkpoint: ConfigOnly, engine: EngineConfig, elsewhere: int | None) -> Finding:
    """Compare the size of the weights with the free memory of the device that would hold them."""
    index: Mapping[str, Any] = next(filter(None, map(checkpoint.json, _INDEXES)), {})
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if not isinstance(stated, int | float) or not 0 < stated < _MOST_BYTES:
        stated = 0
    num_bytes = int(stated) or sum(file.stat().st_size for file in checkpoint.weight_files()) or elsewhere
    if not num_bytes:
        advice = "give OWNER/NAME on the Hugging Face Hub in place of the folder, because the Hub states their size"
        found = "their size is unknown, because the folder has neither them nor their index"
        return Finding("weights", "ok", found, advice)
    found = f"{num_bytes / GiB:.1f} GiB in the files"
    name = kind_of_name(engine.device)
    kinds = [kind for kind in KINDS if name == kind.name or (name == "auto" and kind.may_exist())]
    reported = ((kind.name, free) for kind in kinds if (free := kind.reported_free_bytes()))
    if (chosen := next(reported, None)) is None:
        return Finding("weights", "ok", f"{found}; the free memory of the device {name} is unknown")
    name, free = chosen
    first = 0 if name == "cpu" else int(engine.device.partition(":")[2] or 0)
    if not (shared := free[first : first + engine.tensor_parallel]):
        return Finding("weights", "ok", f"{found}; the free memory of the device {engine.device} is unknown")
    num = f"{len(shared)} {name} devices have" if len(shared) > 1 else f"the device {name} has"
    found += f"; {num} {sum(shared) / GiB:.1f} GiB of free memory"
    if num_bytes > sum(shared):
        advice = "use a device with more memory, several devices (--tensor-parallel), or a smaller checkpoint"
        return Finding("weights", "warning", found, advice)
    return Finding("weights", "ok", found)


def _image(checkpoint: ConfigOnly, family: type[Family], processor: Processor, size: tuple[int, int]) -> Finding:
    width, height = size
    if "image" not in family.kinds:
        return Finding("image", "ok", f"the family takes no images, only {', '.join(family.kinds)}")
    try:
        with reading(checkpoint, family):
            return Finding(
                "image", "ok", f"{width}x{height}: {_cost(processor, width, height)}", _assumption(checkpoint)
            )
    except MindieMMError as error:
        return Finding("image", "warning", f"an image of {width}x{height} is refused", str(error))


def _cost(processor: Processor, width: int, height: int) -> str:
    """Return what an image costs, in words."""
    pixels = np.broadcast_to(np.uint8(0), (height, width, 3))
    plan, _ = processor.plan(Media("image", None), pixels, {"image": 1})
    spelling = processor.spelling("image", plan.num_features, plan.grid)
    placeholder = processor.placeholders["image"]
    assert spelling is not None, "a family can spell the items that it plans"
    runs = plan.num_features if spelling.runs is None else sum(map(len, spelling.runs))
    tokens = len(placeholder.before) + runs + len(placeholder.after)
    about = ""
    if spelling.text is not None:
        words = len(_TEXT_TOKEN.findall(spelling.text)) - len(spelling.runs or (None,))
        tokens, about = tokens + max(words, 0), "about " if words > 0 else ""
    num_bytes = sum(spec.nbytes for spec in plan.specs.values())
    return f"{about}{tokens} tokens, {plan.num_features} features, {num_bytes} bytes of shared memory"


def _assumption(checkpoint: ConfigOnly) -> str:
    assumed = sorted(checkpoint.assumed & {"preprocessor_config.json", "processor_config.json"})
    if not assumed:
        return ""
    return f"{' and '.join(assumed)} is missing; this assumes the defaults of the reference's preprocessor"
