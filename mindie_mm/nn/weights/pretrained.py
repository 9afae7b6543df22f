"""transformers' own modules with a checkpoint's weights, their text layers on our attention.

transformers' modelling code takes seconds to import, so this module imports it late: the tokenizer imports the
families, and never loads a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn import attention
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.checkpoint.renaming import RenamedWeights
from mindie_mm.nn.checkpoint.resolved import settle
from mindie_mm.nn.model import Model, ModelSpec
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.weights.bitsandbytes import avoid_cpu_kernel
from mindie_mm.nn.weights.dequantize import must_dequantize, read_dequantized
from mindie_mm.nn.weights.quantized import check_quantization, method_of, quantization, try_layers
from mindie_mm.nn.weights.shards import weight_files
from mindie_mm.nn.weights.shares import localize, num_shares, refuse_shares, shared
from mindie_mm.nn.weights.stored_tensors import PLAIN, check_stored

_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layers that attend to no more and no less than the KV cache and a window of it; others have states of their own."""


def read_config(name: str, checkpoint: Checkpoint) -> Any:
    """config.json as transformers' configuration class `name`, defaults and all; UnsupportedCheckpoint."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _configuration(getattr(transformers, name), checkpoint)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} is not read as {name}: {error}") from error


def _configuration(cls: type[Any], checkpoint: Checkpoint) -> Any:
    """Return config.json as `cls`, a configuration class of transformers."""
    if checkpoint.renamings is None:
        return cls.from_pretrained(checkpoint.path, local_files_only=True)
    return cls.from_dict(deepcopy(dict(checkpoint.config)))


def text_width(name: str, checkpoint: Checkpoint) -> int:
    """Width of the hidden states of the text model in config.json, read as `name`. UnsupportedCheckpoint."""
    width: int = read_config(name, checkpoint).get_text_config().hidden_size
    return width


class PretrainedModel(Model):
    """A decoder of transformers': a family adds its tower, and its positions where they are not the index."""

    def __init__(self, module: Any, spec: ModelSpec, text_model: Any, lm_head: Callable[[Tensor], Tensor]) -> None:
        """`text_model` are the decoder's layers with their embeddings, in `module`, which is the whole."""
        self.spec = spec
        self.module = module
        self.text_model = text_model
        self.lm_head = lm_head

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.text_model.get_input_embeddings()(input_ids)
        return hidden

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        assert extra is None, "a family with extra columns has its own decode"
        return self.run_text_model(hidden, positions, paged)

    def run_text_model(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, **further: Any) -> Tensor:
        """`decode` with further arguments for the text model: [T, hidden] and [axes, T] -> [T, hidden]."""
        out = self.text_model(
            inputs_embeds=hidden.unsqueeze(0),
            position_ids=positions if len(positions) == 1 else positions.unsqueeze(1),
            use_cache=False,
            paged=paged,
            **further,
        )
        decoded: Tensor = out.last_hidden_state[0]
        return decoded

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()


def load_pretrained(
    cls: type[Any],
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    *,
    unused: Sequence[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    renamed: RenamedWeights | None = None,
    default_theta: float | None = None,
) -> tuple[Any, ModelSpec]:
    """A `cls`, a PreTrainedModel, with the checkpoint's weights on `device`, its text layers on paged attention.

    In inference mode, and with the sizes of its text model, in a process that is one of several ranks those of its
    share. `unused` are patterns (fnmatch) of weights that the checkpoint may have beside the model's own; `tp_plan` is
    the text model's plan of shares where transformers has none. `renamed` are the weights of a translated checkpoint,
    and `default_theta` is as `settle` takes it.
    UnsupportedCheckpoint as `load_module`.
    """
    from transformers import AttentionInterface

    module = _load(cls, checkpoint, device, dtype, unused, tp_plan, renamed, default_theta)
    if other := set(getattr(module.config.get_text_config(), "layer_types", None) or ()) - _LAYERS:
        raise UnsupportedCheckpoint(f"{checkpoint.path} has layers of type {min(other)!r}, which are not served")
    # Without a mask function of that name no mask is worked out, which would make a device wait for the positions.
    AttentionInterface.register(attention.NAME, attention.attend)
    # A plain name would switch the towers as well; those that are not named keep sdpa.
    parts = dict.fromkeys(module.config.sub_configs, "sdpa")
    parts["text_config" if "text_config" in parts else ""] = attention.NAME
    module.set_attn_implementation(parts)
    return module, _spec(checkpoint, module.config.get_text_config(), device, dtype)


def load_module(
    cls: type[Any], checkpoint: Checkpoint, device: Device, dtype: torch.dtype, renamed: RenamedWeights | None = None
) -> Any:
    """A `cls`, a PreTrainedModel, with the checkpoint's weights on `device`, in inference mode, as it comes.

    UnsupportedCheckpoint where rotary frequencies depend on the batch, the weights are not the model's, or they are
    quantised and a package or a device for that is missing; and where several ranks are to share them.
    """
    refuse_shares(checkpoint)
    return _load(cls, checkpoint, device, dtype, renamed=renamed)


def _load(
    cls: type[Any],
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    unused: Sequence[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    renamed: RenamedWeights | None = None,
    default_theta: float | None = None,
) -> Any:
    if (settings := quantization(checkpoint)) is None:
        check_stored(checkpoint)
    else:
        refuse_shares(checkpoint, "is quantised")
    if dequantized := must_dequantize(checkpoint, device):
        settings = None
    else:
        check_quantization(checkpoint, device)
    weight_files(checkpoint)
    # It warns of settings in generation_config.json that its own `generate`, which nobody calls, would not use.
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)
    # Straight to the device, by accelerate: the host never holds them all.
    placed: dict[str, Any] = {"device_map": {"": device.torch_device}}
    try:
        config = _configuration(cls.config_class, checkpoint)
        settle(checkpoint, config, default_theta)
        if num_shares() > 1:
            cls, placed = shared(cls, checkpoint, config.get_text_config(), device, tp_plan)
        _set_quantization(config, settings)
        state = renamed.weights if renamed else None
        if dequantized:
            state = dict(read_dequantized(checkpoint, dtype))
        module, loaded = cls.from_pretrained(
            None if dequantized or renamed else checkpoint.path,
            config=config,
            state_dict=state,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # its own error names none of them
            **placed,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} does not load as {cls.__name__}: {error}") from error
    check_shapes(checkpoint, loaded["mismatched_keys"])
    missing, unexpected = loaded["missing_keys"], loaded["unexpected_keys"]
    if renamed is not None:
        missing = sorted({renamed.published[name] for name in missing})
        unexpected = [*unexpected, *renamed.others]
    # transformers would draw missing ones at random, and the answers would look like a bad model's
    check_weights(checkpoint, missing, unexpected, unused)
    module.requires_grad_(False).eval()
    if settings is not None:
        _cast_plain_weights(module, dtype)
        avoid_cpu_kernel(module)
        try_layers(checkpoint, module, device, dtype)
    if num_shares() > 1:
        localize(module)
    return module


def _set_quantization(config: Any, settings: Mapping[str, Any] | None) -> None:
    """Have transformers' `config` say how the weights are quantised, in whatever file the checkpoint says it."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if settings is not None:
        config.quantization_config = dict(settings)
        if method_of(settings) == "compressed-tensors":
            # It would unpack weights when the whole model is called, but here its parts are.
            config.quantization_config["dequantize"] = True


def _cast_plain_weights(module: Any, dtype: torch.dtype) -> None:
    """Cast the plain weights of a quantised checkpoint to `dtype`, but for modules that transformers keeps in float32.

    transformers leaves these weights as they are stored.
    """
    kept = set(module._keep_in_fp32_modules_strict or ())  # noqa: SLF001 - there is no public name
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())  # noqa: SLF001
    for name, weight in module.named_parameters():
        if name.endswith("weight") and weight.dtype in PLAIN and not hasattr(weight, "quant_state"):
            weight.data = weight.data.to(torch.float32 if kept.intersection(name.split(".")) else dtype)


def check_shapes(checkpoint: Checkpoint, misfits: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """UnsupportedCheckpoint names the first of the weights of another shape: (its name, its shape, the model's)."""
    if misfits:
        name, found, needed = min(misfits)
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {len(misfits)} weights of another shape than config.json makes, the first is "
            f"{name}: {list(found)}, not {list(needed)}"
        )


def check_weights(
    checkpoint: Checkpoint, missing: Sequence[str], unexpected: Sequence[str], unused: Sequence[str] = ()
) -> None:
    """UnsupportedCheckpoint names the first weight that is missing, or is there and no part of the model."""
    if missing:
        message = f"{checkpoint.path} lacks {len(missing)} weights, the first is {min(missing)}"
        if all(name.endswith("lm_head.weight") for name in missing):
            message += "; a model without a head generates no text, such as one that makes embeddings"
        raise UnsupportedCheckpoint(message)
    unknown = [name for name in unexpected if not any(fnmatch(name, pattern) for pattern in unused)]
    if unknown:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {len(unknown)} weights that its model does not know, the first is {min(unknown)}"
        )


def _spec(checkpoint: Checkpoint, text: Any, device: Device, dtype: torch.dtype) -> ModelSpec:
    heads: int = text.num_attention_heads
    return ModelSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_model_len=text.max_position_embeddings,
        num_layers=text.num_hidden_layers,
        num_kv_heads=(getattr(text, "num_key_value_heads", None) or heads) // num_shares(),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        eos_token_ids=eos_token_ids(checkpoint),
        device=device.torch_device,
        dtype=dtype,
    )
