"""transformers' own modules with a checkpoint's weights, their text layers on our attention.

The only module of nn/ that imports transformers' modelling code, which takes seconds: families import it late.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn import attention
from mindie_mm.nn.checkpoint import Checkpoint

# Their frequencies depend on a batch's longest position, so one sequence of a flat batch would bend another's.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_pretrained(cls: type[PreTrainedModel], checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> Any:
    """A `cls` with the checkpoint's weights on `device`, in inference mode, its text layers on paged attention.

    UnsupportedCheckpoint where rotary frequencies depend on the batch, or weights do not load.
    """
    try:
        config = cls.config_class.from_pretrained(checkpoint.path, local_files_only=True)
        _check_rope(checkpoint, config)
        module, loaded = cls.from_pretrained(
            checkpoint.path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} does not load as {cls.__name__}: {error}") from error
    if missing := sorted(loaded["missing_keys"]):
        # transformers would draw them at random, and the answers would look like a bad model's
        raise UnsupportedCheckpoint(f"{checkpoint.path} lacks {len(missing)} weights, the first is {missing[0]}")
    AttentionInterface.register(attention.NAME, attention.attend)
    # A plain name would switch the towers as well; those that are not named keep sdpa.
    parts = dict.fromkeys(module.config.sub_configs, "sdpa")
    module.set_attn_implementation({**parts, "text_config": attention.NAME})
    module.requires_grad_(False).eval().to(device.torch_device)
    return module


def _check_rope(checkpoint: Checkpoint, config: Any) -> None:
    rope_type = (config.get_text_config().rope_parameters or {}).get("rope_type", "default")
    if rope_type in BATCH_DEPENDENT_ROPE:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has rope_type {rope_type!r}, whose frequencies depend on a batch's longest sequence"
        )


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids that end a sequence: generation_config.json's, else config.json's."""
    text = checkpoint.config.get("text_config") or {}
    for source in (checkpoint.json("generation_config.json"), checkpoint.config, text):
        if (value := source.get("eos_token_id")) is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
