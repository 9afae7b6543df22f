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

# Their frequencies depend on the longest position in the batch, so one sequence of a flat batch would bend another's.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_pretrained(cls: type[PreTrainedModel], checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> Any:
    """A `cls` with the checkpoint's weights on `device`, in inference mode, its text layers on paged attention.

    UnsupportedCheckpoint where rotary frequencies depend on the batch, or weights do not load.
    """
    try:
        module = cls.from_pretrained(checkpoint.path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} does not load as {cls.__name__}: {error}") from error
    text: Any = module.config.get_text_config()
    rope_type = (text.rope_parameters or {}).get("rope_type", "default")
    if rope_type in BATCH_DEPENDENT_ROPE:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has rope_type {rope_type!r}, whose frequencies depend on the longest sequence in a batch"
        )
    AttentionInterface.register(attention.NAME, attention.attend)
    # A plain name would switch the towers as well; those that are not named keep sdpa.
    parts = {name: "sdpa" for name in module.config.sub_configs}
    module.set_attn_implementation({**parts, "text_config": attention.NAME})
    module.requires_grad_(False).eval().to(device.torch_device)
    device.prepare(module)
    return module


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids that end a sequence: generation_config.json's, else config.json's."""
    text = checkpoint.config.get("text_config") or {}
    for source in (checkpoint.json("generation_config.json"), checkpoint.config, text):
        if (value := source.get("eos_token_id")) is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
