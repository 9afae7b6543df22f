"""Loaders of transformers modules with a checkpoint's weights, and with paged attention in the text layers.

The modeling code in transformers takes seconds to import. It is imported late here, because the tokenizer imports the
families but never loads a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mindie_mm.device import Device, kernels_of
from mindie_mm.device.cpu.decode_step import DecodeStep, NotCompiled, StepLinear, instructions
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn import attention, experts
from mindie_mm.nn.angles import MOST_ROWS, Angles, AngleTable, ResidentAngles
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.checkpoint.renaming import RenamedWeights
from mindie_mm.nn.checkpoint.resolved import context_length, settle
from mindie_mm.nn.decoder_layer import TOLERANCES, DecoderLayer, FewOperatorLayer, fuse, unrounded
from mindie_mm.nn.layers import FewOperatorNorm, FusedNorm, norm_of
from mindie_mm.nn.lora.loras import Loras
from mindie_mm.nn.model import Model, ModelSpec
from mindie_mm.nn.paged_batch import Chunk, PagedBatch, top_position
from mindie_mm.nn.paged_cache import KVLayer, Layer, PagedCache, SharedLayer
from mindie_mm.nn.split_linear import num_shares
from mindie_mm.nn.weights.formats import format_of, read_packed
from mindie_mm.nn.weights.formats.float8 import runs_in_transformers
from mindie_mm.nn.weights.placing import Placing, with_packed
from mindie_mm.nn.weights.quantized import check_quantization, quantization, try_layers
from mindie_mm.nn.weights.shards import weight_files
from mindie_mm.nn.weights.shares import layer_configs, localize, refuse_shares, shared
from mindie_mm.nn.weights.stored_tensors import PLAIN, check_stored

_log = logging.getLogger(__name__)
_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers that attend to the KV cache or a window of it."""


def read_config(name: str, checkpoint: Checkpoint) -> Any:
    """Read config.json with the transformers configuration class `name`, which fills in defaults.

    Raises:
        UnsupportedCheckpoint: The class does not accept config.json.

    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _configuration(getattr(transformers, name), checkpoint)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path}: config.json cannot be read as {name}: {error}") from error


def _configuration(cls: type[Any], checkpoint: Checkpoint) -> Any:
    return cls.from_dict(deepcopy(dict(checkpoint.config)))  # it changes its argument


def text_width(name: str, checkpoint: Checkpoint) -> int:
    """Return the width of the text model's hidden states, from config.json read with the configuration class `name`.

    Raises:
        UnsupportedCheckpoint: The class does not accept config.json.

    """
    width: int = read_config(name, checkpoint).get_text_config().hidden_size
    return width


class PretrainedModel(Model):
    """A decoder-only model from transformers.

    Each family implements `tower`, and also `positions` if positions differ from the token indices.
    """

    def __init__(self, module: Any, spec: ModelSpec, text_model: Any, lm_head: Callable[[Tensor], Tensor]) -> None:
        """Wrap a loaded module.

        Args:
            module: The whole model.
            spec: Sizes of the decoder.
            text_model: Part of `module` that has the embeddings and the decoder's layers.
            lm_head: Function from hidden states to logits.

        """
        self.spec = spec
        self.module = module
        self.text_model = text_model
        self.lm_head = lm_head
        self.runs_layers = False
        """True if `decode` runs the layers of `text_model` itself, without the masks and checks of its `forward`."""
        self._angles: Callable[[Tensor, Tensor, int | None], Any]
        """Function from hidden states, positions and `PagedBatch.top_position` to the angles of `DecoderLayer.run`."""
        self._norm: FewOperatorNorm | FusedNorm
        self._step: DecodeStep | None = None
        """Compiled code that runs the layers in decode steps."""
        self._step_head: StepLinear | None = None

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.text_model.get_input_embeddings()(input_ids)
        return hidden

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        assert extra is None, "a family with `layer_inputs` has its own decode"
        if self.runs_layers:
            return self._run_layers(hidden, positions, paged)
        return self.run_text_model(hidden, positions, paged)

    def ignores_rest(self, cache: PagedCache) -> bool:
        has_spans = type(self).bidirectional_spans is not Model.bidirectional_spans
        layers = self.text_model.layers if self.runs_layers and not has_spans else ()
        return bool(layers) and all(layer.ignores_rest(cache) for layer in layers)

    def text_modules(self) -> list[nn.Module]:
        return [self.text_model, *([self.lm_head] if isinstance(self.lm_head, nn.Module) else ())]

    def fuse(self) -> None:
        """Replace layers of the text model as `decoder_layer.fuse` does, and run them without its `forward`.

        A trial decides whether the results are the same.
        """
        fuse(self.module)
        layers = getattr(self.text_model, "layers", ())
        if not all(isinstance(layer, DecoderLayer) for layer in layers):
            return
        weight = self.text_model.get_input_embeddings().weight
        hidden = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        prompt = self.positions(len(hidden), ()).prompt
        positions = prompt.to(weight.device)
        paged = PagedBatch([Chunk(0, len(hidden), ())], None, weight.device, top_position(prompt.numpy()))
        with torch.inference_mode(), unrounded(self.module):
            expected = self.run_text_model(hidden, positions, paged)
            try:
                self._angles = self._angle_table(len(positions))
                norm = self.text_model.norm
                self._norm = norm_of(norm.weight.detach(), norm.variance_epsilon)
                actual = self._run_layers(hidden, positions, paged)
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, TypeError, RuntimeError):  # the text model has an unexpected structure
                return
        tolerance = 1e-4 if weight.device.type == "cpu" else TOLERANCES[weight.dtype]
        self.runs_layers = torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)

    def compile_steps(self) -> None:
        try:
            self._step = self._compiled_step()
        except NotCompiled as reason:
            _log.info("torch runs all decode steps: %s", reason)
            return
        with suppress(NotCompiled):
            self._step_head = StepLinear(cast("nn.Module", self.lm_head))
        _log.info("compiled code (%s) runs steps of up to %d tokens", instructions(), self._step.most_rows)

    def enable_loras(self, max_loras: int, max_rank: int) -> Loras:
        self.loras = Loras(self.module, self.text_modules(), self.spec.dtype, max_loras, max_rank)
        if self._step is not None:
            _log.info("torch instead of compiled code runs steps with requests for LoRA adapters")
        return self.loras

    def _compiled_step(self) -> DecodeStep:
        if not self.runs_layers or kernels_of(self.spec.device).has_layers:
            raise NotCompiled("the text model has layers that are not replaced, or is not on the CPU")
        layers: list[FewOperatorLayer] = list(self.text_model.layers)
        if [layer.call.layer for layer in layers] != [*range(len(layers))]:
            raise NotCompiled("the layers have another order in the KV cache")
        if set(self.spec.layers) != {KVLayer(layers[0].num_kv_heads, layers[0].head_dim)}:
            raise NotCompiled("the layers do not all keep keys and values of the same size")
        assert isinstance(self._norm, FewOperatorNorm)
        return DecodeStep([layer.step_layer() for layer in layers], self._norm.weight, self._norm.eps)

    def _angle_table(self, num_axes: int) -> Callable[[Tensor, Tensor, int | None], Any]:
        rotary_emb = self.text_model.rotary_emb
        if kernels_of(self.spec.device).has_layers:
            return ResidentAngles(rotary_emb, num_axes, self.spec.max_model_len).angles
        return AngleTable(rotary_emb).angles

    @cached_property
    def _widens(self) -> bool:
        """True if torch computes large steps of a model of bfloat16 in float32, because this is faster."""
        layers = self.text_model.layers
        return all(isinstance(layer, FewOperatorLayer) and layer.widens for layer in layers)

    def _run_layers(self, hidden: Tensor, positions: Tensor, paged: PagedBatch) -> Tensor:
        dtype = hidden.dtype
        if len(hidden) > MOST_ROWS and not self.is_adapted and self._widens:
            hidden = hidden.float()
        angles = self._angles(hidden, positions, paged.top_position)
        if (
            self._step is not None
            and not self.is_adapted
            and paged.cache is not None
            and self._step.takes(hidden, paged.cache.memory)
            and (table := paged.decode_table()) is not None
        ):
            assert isinstance(angles, Angles)
            return self._step.run(hidden, (angles.cos, angles.sin), *table, paged.cache.memory[0])
        added = None
        for layer in self.text_model.layers:
            hidden, added = layer.run(hidden, added, angles, paged)
        return self._norm.add(hidden, added)[0].to(dtype)

    def run_text_model(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, **further: Any) -> Tensor:
        """Run the text model as `decode` does, with further keyword arguments.

        Args:
            hidden: Embeddings, [T, hidden].
            positions: int64 [axes, T].
            paged: The tokens that each row attends to, and the KV cache.
            further: Additional keyword arguments for the text model.

        Returns:
            Hidden states, [T, hidden].

        """
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
        if self._step_head is not None and not self.is_adapted and self._step_head.takes(hidden):
            return self._step_head(hidden)
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
    states: Mapping[str, Callable[[Any], Layer]] | None = None,
) -> tuple[Any, ModelSpec]:
    """Load a transformers model for inference, and switch its text layers to paged attention.

    Args:
        cls: A subclass of PreTrainedModel.
        checkpoint: Where the weights are.
        device: Where the module runs.
        dtype: The dtype of the weights.
        unused: Patterns (fnmatch) for names of weights that the checkpoint may have in addition to the model's own.
        tp_plan: Tensor-parallel plan for layers of the text model for which transformers has none.
        renamed: Weights of a translated checkpoint. None if the checkpoint was not translated.
        default_theta: Has the same meaning as in `settle`.
        states: Functions from the text model's configuration to what a layer keeps, by its type.

    Returns:
        The module, and the sizes of its text model. With tensor parallelism, these are the sizes of this rank's share.

    Raises:
        UnsupportedCheckpoint: The weights do not match the model, or a layer has an unsupported type. Several ranks
            share the weights, but there is no tensor-parallel plan, the heads cannot be divided evenly, or the weights
            are quantized. Rotary frequencies depend on the batch. The weights are quantized, and a package or an
            operator of the device is missing.

    """
    from transformers import AttentionInterface

    module, has_head = _load(cls, checkpoint, device, dtype, unused, tp_plan, renamed, default_theta)
    if not has_head:
        _log.warning("%s has no output layer (lm_head); it computes embeddings, but generates no text", checkpoint.path)
    layers = _layers(checkpoint, module.config.get_text_config(), states or {})
    # No mask function is registered, so transformers builds no mask. Building one would wait for the positions.
    AttentionInterface.register(attention.NAME, attention.attend)
    # A single name instead of a mapping would also switch the towers, which must keep sdpa, or eager if they lack sdpa.
    sections = {name: getattr(module.config, name, None) for name in module.config.sub_configs}
    eager = {type(part.config) for part in module.modules() if not getattr(part, "_supports_sdpa", True)}
    parts = {name: "eager" if type(part) in eager else "sdpa" for name, part in sections.items() if part is not None}
    parts["text_config" if "text_config" in parts else ""] = attention.NAME
    module.set_attn_implementation(parts)
    return module, replace(_spec(checkpoint, module.config.get_text_config(), layers, device, dtype), has_head=has_head)


def load_module(
    cls: type[Any], checkpoint: Checkpoint, device: Device, dtype: torch.dtype, renamed: RenamedWeights | None = None
) -> Any:
    """Load a transformers model for inference, and keep its own attention.

    Args:
        cls: A subclass of PreTrainedModel.
        checkpoint: Where the weights are.
        device: Where the module runs.
        dtype: The dtype of the weights.
        renamed: Weights of a translated checkpoint. None if the checkpoint was not translated.

    Raises:
        UnsupportedCheckpoint: The weights do not match the model, or several ranks share them. Rotary frequencies
            depend on the batch. The weights are quantized, and a package or an operator of the device is missing.

    """
    refuse_shares(checkpoint)
    module, has_head = _load(cls, checkpoint, device, dtype, renamed=renamed)
    if not has_head:
        raise UnsupportedCheckpoint(f"{checkpoint.path} lacks the weights of the output layer (lm_head)")
    return module


def _load(
    cls: type[Any],
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    unused: Sequence[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    renamed: RenamedWeights | None = None,
    default_theta: float | None = None,
) -> tuple[Any, bool]:
    """Return the module, and whether the checkpoint has an output layer, which embedding models lack.

    If not, the module's output layer is not used, and shares the memory of the embeddings.
    """
    settings = _settings_for_transformers(checkpoint, device)
    placing = Placing(device, packing := format_of(checkpoint) if settings is None else None)
    weight_files(checkpoint)
    # This logger warns of settings in generation_config.json that `generate` ignores, but `generate` is never called.
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)
    # accelerate loads weights directly to the device, so that the host never holds all of them.
    placed: dict[str, Any] = {"device_map": {"": device.torch_device}}
    try:
        config = _configuration(cls.config_class, checkpoint)
        settle(checkpoint, config, default_theta)
        if num_shares() > 1:
            cls, placed = shared(cls, checkpoint, config, device, tp_plan)
        _set_quantization(config, settings)
        state = renamed.weights if renamed else None
        if packing is not None:
            cls, state = with_packed(cls, config, read_packed(checkpoint, packing), placing, dtype)
        check_shapes(checkpoint, placing.misfits)
        module, loaded = cls.from_pretrained(
            checkpoint.path if state is None else None,
            config=config,
            state_dict=state,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' error does not name the weights
            **placed,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} cannot be loaded as {cls.__name__}: {error}") from error
    check_shapes(checkpoint, loaded["mismatched_keys"])
    missing, unexpected = loaded["missing_keys"], loaded["unexpected_keys"]
    of_head = _share_missing_head(module, missing) if renamed is None else set[str]()
    missing = missing - of_head
    if renamed is not None:
        missing = sorted({renamed.published[name] for name in missing})
        unexpected = [*unexpected, *renamed.others]
    # transformers initializes missing weights at random, and the answers would look like those of a bad model.
    check_weights(checkpoint, missing, unexpected, unused)
    placing.finish(module, dtype)
    module.requires_grad_(False).eval()
    if settings is not None:
        _cast_plain_weights(module, dtype)
        try_layers(checkpoint, module, device, dtype)
    if num_shares() > 1:
        localize(module)
    experts.arrange(module)
    return module, not of_head


def _share_missing_head(module: Any, missing: Collection[str]) -> set[str]:
    """Return the weights of the output layer among `missing`. Its memory is freed, because it is not used then."""
    of_head = {name for name in missing if name.endswith("lm_head.weight")}
    if of_head and num_shares() == 1:
        module.get_output_embeddings().weight = module.get_input_embeddings().weight
    return of_head


def _settings_for_transformers(checkpoint: Checkpoint, device: Device) -> Mapping[str, Any] | None:
    """Return the quantization settings that transformers needs to load the weights.

    Return None if the weights are not quantized, or if this package reads them.
    """
    if (settings := quantization(checkpoint)) is None:
        check_stored(checkpoint)
        return None
    refuse_shares(checkpoint, "is quantized")
    if format_of(checkpoint) is not None and not runs_in_transformers(settings, device):
        return None
    check_quantization(checkpoint, device)
    return settings


def _set_quantization(config: Any, settings: Mapping[str, Any] | None) -> None:
    """Set the quantization settings of `config`. The checkpoint may store them in a file other than config.json."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if settings is not None:
        config.quantization_config = dict(settings)


def _cast_plain_weights(module: Any, dtype: torch.dtype) -> None:
    """Cast the unquantized weights of a quantized checkpoint to `dtype`, unless transformers keeps them in float32.

    transformers loads the unquantized weights of such a checkpoint in their stored dtype.
    """
    kept = set(module._keep_in_fp32_modules_strict or ())  # noqa: SLF001 - there is no public name
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())  # noqa: SLF001
    for name, weight in module.named_parameters():
        if name.endswith("weight") and weight.dtype in PLAIN:
            weight.data = weight.data.to(torch.float32 if kept.intersection(name.split(".")) else dtype)


def check_shapes(checkpoint: Checkpoint, misfits: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise UnsupportedCheckpoint if there are weights of the wrong shape.

    Args:
        checkpoint: Where the weights are.
        misfits: Name of each such weight, its shape, and the shape that the model needs.

    """
    if misfits:
        name, actual, needed = min(misfits)
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {len(misfits)} weights whose shape does not match config.json; the first "
            f"is {name}, which has shape {list(actual)} instead of {list(needed)}"
        )


def check_weights(
    checkpoint: Checkpoint, missing: Sequence[str], unexpected: Sequence[str], unused: Sequence[str] = ()
) -> None:
    """Raise UnsupportedCheckpoint if weights are missing, or are unexpected and match no pattern in `unused`."""
    if missing:
        raise UnsupportedCheckpoint(f"{checkpoint.path} lacks {len(missing)} weights; the first is {min(missing)}")
    unknown = [name for name in unexpected if not any(fnmatch(name, pattern) for pattern in unused)]
    if unknown:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {len(unknown)} weights that its model class does not have; the first is "
            f"{min(unknown)}"
        )


def _layers(checkpoint: Checkpoint, text: Any, states: Mapping[str, Callable[[Any], Layer]]) -> tuple[Layer, ...]:
    """Return the description of the data that each layer of a text model keeps between steps, on this rank."""
    types = getattr(text, "layer_types", None) or ("full_attention",) * text.num_hidden_layers
    supported = _LAYERS | {attention.CHUNKED} if hasattr(text, "attention_chunk_size") else _LAYERS
    if other := set(types) - supported - states.keys():
        raise UnsupportedCheckpoint(f"{checkpoint.path} has layers of type {min(other)!r}, which are not supported")
    modes = getattr(text, "kv_sharing_modes", None) or (None,) * len(types)
    layers: list[Layer] = []
    stored: dict[str, int] = {}  # the layer whose keys and values later layers of the same type read
    for index, (config, kind, mode) in enumerate(zip(layer_configs(text), types, modes, strict=True)):
        if mode == "reuse":
            layers.append(SharedLayer(stored[kind]))
        else:
            layers.append(states[kind](text) if kind in states else _kv_layer(config, kind))
        if mode == "store":
            stored[kind] = index
    return tuple(layers)


def _kv_layer(config: Any, kind: str) -> KVLayer:
    heads: int = config.num_attention_heads
    num_kv_heads = (getattr(config, "num_key_value_heads", None) or heads) // num_shares()
    chunk_size = config.attention_chunk_size if kind == attention.CHUNKED else None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayer(num_kv_heads, head_dim, chunk_size=chunk_size)


def _spec(
    checkpoint: Checkpoint, text: Any, layers: tuple[Layer, ...], device: Device, dtype: torch.dtype
) -> ModelSpec:
    return ModelSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_model_len=context_length(text),
        layers=layers,
        eos_token_ids=eos_token_ids(checkpoint),
        device=device.torch_device,
        dtype=dtype,
    )
