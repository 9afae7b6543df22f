"""The imports of the fork server: the modules of the tokenizer, the decoders and the engine."""

from __future__ import annotations

import importlib
from contextlib import suppress

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mindie_mm.device import forkable
from mindie_mm.errors import MindieMMError
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.pretrained_family import PretrainedFamily

_MODULES = (
    "mindie_mm.decode.nursery",
    "mindie_mm.engine.process.engine_process",
    "mindie_mm.tokenize.stage.tokenizer_process",
    "transformers.modeling_layers",
    "transformers.models.auto.tokenization_auto",
)


def prepare(model: str, family: str) -> list[str]:
    """Import the modules that the processes of a checkpoint need. Start no threads, and load no weights.

    An error of the checkpoint is left to the processes, which report it.

    Args:
        model: Checkpoint directory, or "" for the embedded checkpoint.
        family: Name of the family, or "" to find the family as `family_of` does.

    Returns:
        Values of the setting `device` that allow an engine to be forked from this process.

    """
    for module in _MODULES:
        importlib.import_module(module)
    get_checkpoint_conversion_mapping("")  # fills a cache of a thousand regular expressions
    with suppress(MindieMMError):
        chosen = family_of(Checkpoint.open(model or None), family or None)
        if issubclass(chosen, PretrainedFamily):
            chosen.module_class()
    return forkable()
