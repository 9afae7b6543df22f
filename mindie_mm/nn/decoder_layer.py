"""Decoder layers of the Llama kind that run few operators, in place of transformers' layers.

The operators of a decode step are so small that their number determines the time, on the CPU as on accelerators. Most
families share one kind of layer: pre-normalization with RMSNorm, rotary attention, and a gated MLP or a mixture of
experts. `fuse` replaces such a layer after a trial has shown that the replacement computes the same results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mindie_mm.device import Kernels, QuantizedLinear, kernels_of
from mindie_mm.device.cpu.decode_step import NotCompiled, StepLayer
from mindie_mm.device.cpu.wide_linear import widens
from mindie_mm.nn import attention
from mindie_mm.nn.angles import Angles
from mindie_mm.nn.attention import paged_attention
from mindie_mm.nn.experts import Experts, JoinedExperts
from mindie_mm.nn.layers import FewOperatorNorm, FusedNorm, is_silu, norm_of
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from mindie_mm.nn.paged_cache import PagedCache
from mindie_mm.nn.split_linear import Split, split_of

_PROBE = "mindie_mm_probe"
"""Name under which the attention of a trial is registered with transformers."""
_TOKENS = 5
"""Number of tokens in a trial."""
_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = ("q_norm", "k_norm")
_LATE_NORMS = ("query_layernorm", "key_layernorm")
"""Norms of the queries and keys of each head after the rotation, instead of before it."""
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference of a trial, by dtype."""
_TRANSPOSED = "transposed"
"""Attribute of a plain linear layer, a view of its weight. `F.linear` would create the view with three operators.

Another kind of layer, such as a quantized one, that later replaces the linear layer does not have it.
"""


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments that a transformers layer passes to its attention."""

    layer: int
    scaling: float
    sliding_window: int | None
    chunk_size: int | None


class _Unlike(Exception):
    """The layer differs from the layers that `DecoderLayer` can replace."""


class DecoderLayer(nn.Module, ABC):
    """A pre-norm decoder layer. One matrix product computes queries, keys and values. Another computes gate and up.

    The layer may have a mixture of experts in place of the gated MLP.
    """

    def __init__(self, layer: Any, call: _Call) -> None:
        """Create the layer with the weights of a transformers layer.

        Args:
            layer: The layer.
            call: Arguments of its attention.

        """
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = own.head_dim
        self.num_heads = _shape(own.q_proj)[0] // self.head_dim
        self.num_kv_heads = _shape(own.k_proj)[0] // self.head_dim
        self.call = call
        self._splits = {name: split_of(layer.get_submodule(name)) for name in _names(layer)}
        self.norms_late = hasattr(own, _LATE_NORMS[0])
        """True if the norms of the queries and keys of each head follow the rotation."""
        self.attention_type = getattr(layer, "attention_type", None)  # the text models of some families read this
        self.norm = _norm(layer.input_layernorm)
        self.qkv = _joined(own.q_proj, own.k_proj, own.v_proj)
        self.output: nn.Module = own.o_proj
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.mixture: nn.Module | None = mlp if _is_mixture(mlp) else None
        """A mixture of experts in place of the gated MLP of the next attributes."""
        if self.mixture is None:
            self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
            self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
            self.down: nn.Module = mlp.down_proj

    @abstractmethod
    def run(
        self, hidden: Tensor, added: Tensor | None, angles: Angles | tuple[Tensor, Tensor], paged: PagedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Its input and its output are sums of two tensors, because the norm that follows can add them faster.

        Args:
            hidden: First term of the input, [T, hidden].
            added: Second term of the input, [T, hidden], or None for zero.
            angles: Angles of the rotary embedding, from `AngleTable` or `ResidentAngles`.
            paged: The tokens that each row attends to, and the KV cache.

        Returns:
            Both terms of the output.

        """

    @abstractmethod
    def angles(self, cos: Tensor, sin: Tensor) -> Angles | tuple[Tensor, Tensor]:
        """Return the angles for `run` from those of transformers, [1, T, head_dim] each."""

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], paged: PagedBatch, **_: Any
    ) -> Tensor:
        """Run the layer with the arguments that transformers passes.

        Args:
            hidden_states: [1, T, hidden].
            position_embeddings: Cosines and sines of the rotary embedding, [1, T, head_dim] each.
            paged: The tokens that each row attends to, and the KV cache.

        Returns:
            [1, T, hidden].

        """
        hidden, added = self.run(hidden_states[0], None, self.angles(*position_embeddings), paged)
        return (hidden if added is None else hidden + added).unsqueeze(0)

    def projections(self) -> Iterator[tuple[str, nn.Module, int, int, Split | None]]:
        """Yield the linear layers of the transformers layer.

        Each has its name, the joined layer, the start and stop of its outputs there, and this rank's share (`Split`).
        """
        for name, layer, start, stop in self._ranges():
            yield name, layer, start, stop, self._splits[name]

    def _ranges(self) -> Iterator[tuple[str, nn.Module, int, int]]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "self_attn.q_proj", self.qkv, 0, q
        yield "self_attn.k_proj", self.qkv, q, q + kv
        yield "self_attn.v_proj", self.qkv, q + kv, q + 2 * kv
        yield "self_attn.o_proj", self.output, 0, _shape(self.output)[0]
        if self.mixture is None:
            half = _shape(self.gate_up)[0] // 2
            yield "mlp.gate_proj", self.gate_up, 0, half
            yield "mlp.up_proj", self.gate_up, half, 2 * half
            yield "mlp.down_proj", self.down, 0, _shape(self.down)[0]

    def ignores_rest(self, cache: PagedCache) -> bool:
        """Return whether the layer never reads the rest of a KV block after the end of its sequence."""
        keys, values = cache.keys[self.call.layer], cache.values[self.call.layer]
        has_window = self.call.sliding_window is not None or self.call.chunk_size is not None
        is_plain = not has_window and keys.shape == values.shape
        return is_plain and kernels_of(keys.device).ignores_rest(keys, self.num_heads)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, paged: PagedBatch) -> Tensor:
        """Return the attention of rows [T, heads, head_dim] as [T, heads * head_dim]."""
        call = self.call
        q, k, v = (part.transpose(0, 1) for part in (query, key, value))
        window, size = call.sliding_window, call.chunk_size
        return paged_attention(call.layer, q, k, v, paged, call.scaling, window, chunk_size=size).flatten(1)


class FewOperatorLayer(DecoderLayer):
    """A layer for the CPU, where matrix products add the residual and queries and keys are rotated together."""

    def __init__(self, layer: Any, call: _Call, *, scales_angles: bool) -> None:
        super().__init__(layer, call)
        for linear in (self.qkv, self.output, *((self.gate_up, self.down) if self.mixture is None else ())):
            if type(linear) is nn.Linear:
                setattr(linear, _TRANSPOSED, linear.weight.detach().t())
        self.num_rotated = self.num_heads + self.num_kv_heads
        self.head_norm: FewOperatorNorm | None = None
        """Norm of the queries and keys of each head."""
        if norms := _head_norms(layer):
            counts = self.num_heads, self.num_kv_heads
            weights = [norm.weight.expand(count, -1) for norm, count in zip(norms, counts, strict=True)]
            self.head_norm = FewOperatorNorm(torch.cat(weights), _eps(norms[0]))

    @property
    def widens(self) -> bool:
        """True if `run` also takes float32 in a model of bfloat16."""
        return self.mixture is None and all(map(widens, (self.qkv, self.output, self.gate_up, self.down)))

    def angles(self, cos: Tensor, sin: Tensor) -> Angles:
        return Angles.of(cos, sin)

    def run(
        self, hidden: Tensor, added: Tensor | None, angles: Angles | tuple[Tensor, Tensor], paged: PagedBatch
    ) -> tuple[Tensor, Tensor | None]:
        assert added is None
        assert isinstance(angles, Angles)
        heads = _product(self.qkv, self.norm(hidden)).view(len(hidden), -1, self.head_dim)
        # Tensor.split is written in Python and takes twice as long.
        rotated, value = heads.split_with_sizes((self.num_rotated, self.num_kv_heads), 1)
        if self.head_norm is not None and not self.norms_late:
            rotated = self.head_norm(rotated)
        rotated = angles.rotate(rotated)
        if self.head_norm is not None and self.norms_late:
            rotated = self.head_norm(rotated)
        query, key = rotated.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        hidden = _product(self.output, self.attend(query, key, value, paged), hidden)
        if self.mixture is not None:
            return hidden.add_(_mixed(self.mixture, self.mlp_norm(hidden))), None
        gate, up = _product(self.gate_up, self.mlp_norm(hidden)).chunk(2, -1)
        return _product(self.down, self.activation(gate) * up, hidden), None

    def step_layer(self) -> StepLayer:
        """Return the layer as compiled decode steps need it.

        Raises:
            NotCompiled: The layer has experts, or computes attention within chunks.

        """
        if self.mixture is not None or self.call.chunk_size is not None:
            raise NotCompiled("a layer has experts, or computes attention within chunks")
        assert isinstance(self.norm, FewOperatorNorm)
        assert isinstance(self.mlp_norm, FewOperatorNorm)
        return StepLayer(
            norm=self.norm.weight,
            eps=self.norm.eps,
            qkv=self.qkv,
            head_norm=None if self.head_norm is None else (self.head_norm.weight, self.head_norm.eps),
            norms_late=self.norms_late,
            scaling=self.call.scaling,
            window=self.call.sliding_window,
            output=self.output,
            mlp_norm=self.mlp_norm.weight,
            mlp_eps=self.mlp_norm.eps,
            gate_up=self.gate_up,
            activation=self.activation,
            down=self.down,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class FusedOperatorLayer(DecoderLayer):
    """A layer for a device with fused operators (`Kernels.has_layers`). The next norm adds the residual."""

    def __init__(self, layer: Any, call: _Call, *, scales_angles: bool) -> None:
        super().__init__(layer, call)
        like = _reference(layer)
        self.kernels = kernels_of(like.device)
        self.widths = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.head_norms = [_norm(norm) for norm in _head_norms(layer)]
        # Fused operators require cosines in [-1, 1], but YaRN scales cosines.
        self.rotate = (Kernels() if scales_angles else self.kernels).rotate
        self.is_swiglu = self.mixture is None and is_silu(self.activation, like)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos[0], sin[0]

    def run(
        self, hidden: Tensor, added: Tensor | None, angles: Angles | tuple[Tensor, Tensor], paged: PagedBatch
    ) -> tuple[Tensor, Tensor | None]:
        assert not isinstance(angles, Angles)
        normed, hidden = self.norm.add(hidden, added)
        parts = self.kernels.split(self.qkv(normed), self.widths)
        query, key, value = (part.view(len(hidden), -1, self.head_dim) for part in parts)
        if self.head_norms and not self.norms_late:
            query, key = (norm(part) for norm, part in zip(self.head_norms, (query, key), strict=True))
        query, key = self.rotate(query, key, *angles)
        if self.head_norms and self.norms_late:
            query, key = (norm(part) for norm, part in zip(self.head_norms, (query, key), strict=True))
        attended = self.attend(query, key, value, paged)
        normed, hidden = self.mlp_norm.add(hidden, self.output(attended))
        if self.mixture is not None:
            return hidden, _mixed(self.mixture, normed)
        joined = self.gate_up(normed)
        if self.is_swiglu:
            return hidden, self.down(self.kernels.swiglu(joined))
        gate, up = joined.chunk(2, -1)
        return hidden, self.down(self.activation(gate) * up)


def fuse(module: nn.Module) -> int:
    """Replace the layers of `module` that `DecoderLayer` can replace. Return their number.

    Layers are replaced if they use `attention.attend` and compute in float32 or bfloat16 on the CPU, or in any of
    `TOLERANCES` on a device with fused operators.
    """
    from transformers import AttentionInterface  # imported late: takes seconds, and not every process has a model

    calls: list[_Call] = []

    def probe(module: nn.Module, *args: Any, scaling: float, sliding_window: int | None = None, **kwargs: Any) -> Any:
        layer: Any = module.layer_idx
        calls.append(_Call(layer, scaling, sliding_window, attention.chunk_size_of(module)))
        return attention.attend(module, *args, scaling=scaling, sliding_window=sliding_window, **kwargs)

    AttentionInterface.register(_PROBE, probe)
    scales_angles = any(getattr(part, "attention_scaling", 1.0) != 1.0 for part in module.modules())
    count = 0
    for layers in [part for part in module.modules() if isinstance(part, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            try:
                _require_parts(layer)
                layers[index] = _replacement(layer, calls, scales_angles=scales_angles)
                count += 1
            except _Unlike:
                continue
    return count


def _replacement(layer: Any, calls: list[_Call], *, scales_angles: bool) -> DecoderLayer:
    """Return the replacement of a layer after a trial. Raise _Unlike if the results differ."""
    weight = _reference(layer)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TOKENS, _shape(layer.self_attn.q_proj)[1], generator=generator).to(weight)
    angles = torch.randn(2, 1, _TOKENS, layer.self_attn.head_dim // 2, generator=generator).repeat(1, 1, 1, 2)
    arguments: dict[str, Any] = {
        "position_embeddings": (angles[0].cos().to(weight), angles[1].sin().to(weight)),
        "paged": PagedBatch([Chunk(0, _TOKENS, ())], None, weight.device),
    }
    config = layer.self_attn.config
    implementation = config._attn_implementation  # noqa: SLF001 - there is no public name
    calls.clear()
    with torch.inference_mode():
        try:
            config._attn_implementation = _PROBE  # noqa: SLF001
            with unrounded(layer):
                expected = layer(hidden, attention_mask=None, position_ids=None, past_key_values=None, **arguments)
        except torch.OutOfMemoryError:  # if only one rank went on, the ranks would wait for each other
            raise
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:  # the layer needs other arguments
            raise _Unlike from error
        finally:
            config._attn_implementation = implementation  # noqa: SLF001
        if len(calls) != 1 or not isinstance(expected, Tensor):
            raise _Unlike
        if _is_mixture(layer.mlp) and not isinstance(layer.mlp(hidden), Tensor):  # some routers return their scores
            raise _Unlike
        kind = FusedOperatorLayer if kernels_of(weight.device).has_layers else FewOperatorLayer
        replacement = kind(layer, calls[0], scales_angles=scales_angles).eval()
        with unrounded(replacement):
            actual = replacement(hidden, **arguments)
    tolerance = TOLERANCES[weight.dtype]
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance):
        raise _Unlike
    return replacement


@contextmanager
def unrounded(module: nn.Module) -> Iterator[None]:
    """Let quantized layers multiply without rounding their inputs, which would enlarge small differences."""
    rounding = [one for one in module.modules() if isinstance(one, QuantizedLinear) and one.rounds_input]
    for one in rounding:
        one.rounds_input = False
    try:
        yield
    finally:
        for one in rounding:
            one.rounds_input = True


def _require_parts(layer: nn.Module) -> None:
    """Raise _Unlike if `layer` is not a layer of the Llama kind, or if its weights cannot be joined."""
    if not _has_parts(layer):
        raise _Unlike
    own: Any = layer.get_submodule("self_attn")
    norms = _weighted(own) - _PROJECTIONS
    if not _weighted(own) >= _PROJECTIONS or norms not in (set(), {*_HEAD_NORMS}, {*_LATE_NORMS}):
        raise _Unlike
    implementation = getattr(getattr(own, "config", None), "_attn_implementation", None)
    if implementation != attention.NAME or not isinstance(getattr(own, "head_dim", None), int):
        raise _Unlike
    if any(own.get_submodule(name).weight.shape != (own.head_dim,) for name in norms):
        raise _Unlike  # the norm extends over all heads
    if _shape(own.q_proj)[0] != _shape(own.o_proj)[1] or _rotates_parts(own.config):
        raise _Unlike  # the projection of the queries also computes a gate, or a part of each head is not rotated
    linears = [layer.get_submodule(name) for name in _names(layer)]
    if not _supports(_reference(layer)) or any(not _is_linear(linear) for linear in linears):
        raise _Unlike
    for part in layer.modules():
        if part._forward_pre_hooks or part._forward_hooks:  # noqa: SLF001 - nn/placement.py adds them
            raise _Unlike
        if "forward" in vars(part) and not (part in linears and _is_shared(part)):
            raise _Unlike


def _names(layer: nn.Module) -> list[str]:
    """Return the names of the linear layers of a layer, except those of experts."""
    in_mlp = () if _is_mixture(layer.get_submodule("mlp")) else _MLP
    return [*(f"self_attn.{name}" for name in _PROJECTIONS), *(f"mlp.{name}" for name in in_mlp)]


def _has_parts(layer: nn.Module) -> bool:
    if _weighted(layer) != _PARTS:
        return False
    mlp = layer.get_submodule("mlp")
    return _is_mixture(mlp) or _weighted(mlp) == _MLP


def _head_norms(layer: Any) -> list[Any]:
    """Return the norms of the queries and keys of each head, or an empty list."""
    return [norm for name in (*_HEAD_NORMS, *_LATE_NORMS) if (norm := getattr(layer.self_attn, name, None))]


def _is_mixture(mlp: nn.Module) -> bool:
    """Return whether `mlp` has experts that `nn/experts.py` has arranged."""
    return any(isinstance(part, Experts | JoinedExperts) for part in mlp.modules())


def _mixed(mixture: nn.Module, rows: Tensor) -> Tensor:
    """Run a mixture of experts on rows [T, hidden]. transformers' mixtures need a batch axis, so add and remove one."""
    mixed: Tensor = mixture(rows.unsqueeze(0))
    return mixed.view(rows.shape)


def _rotates_parts(config: Any) -> bool:
    """Return whether only a part of each head is rotated."""
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(rope.get("partial_rotary_factor", 1.0) != 1.0)


def _is_shared(linear: Any) -> bool:
    """Return whether tensor parallelism has replaced the `forward` of a linear layer on a device with fused layers.

    `FusedOperatorLayer` can use such a layer, because it joins only this rank's rows of the weights, and calls the
    layers that sum the results of all ranks.
    """
    split = split_of(linear)
    return split is not None and not split.gathers and kernels_of(linear.weight.device).has_layers


def _supports(like: Tensor) -> bool:
    if like.device.type == "cpu":
        return like.dtype in (torch.float32, torch.bfloat16)
    return kernels_of(like.device).has_layers and like.dtype in TOLERANCES


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, QuantizedLinear)


def _reference(layer: Any) -> Tensor:
    """Return a weight of the dtype in which a layer computes, on its device."""
    query = layer.self_attn.q_proj
    weight: Tensor = layer.input_layernorm.weight if isinstance(query, QuantizedLinear) else query.weight
    return weight


def _shape(linear: Any) -> tuple[int, ...]:
    """Return the outputs and inputs of a linear layer. With tensor parallelism, its weight is a share."""
    return linear.shape if isinstance(linear, QuantizedLinear) else tuple(linear.weight.shape)


def _weighted(module: nn.Module) -> set[str]:
    """Return the names of the children with weights. The weights of quantized layers are buffers."""
    return {
        name
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
        or any(isinstance(part, QuantizedLinear) for part in child.modules())
    }


def _joined(*linears: nn.Module) -> nn.Module:
    """Return one layer whose output is the concatenated output of `linears`, which have the same input.

    Raise _Unlike if some of them are quantized, and others are not or are quantized in another way.
    """
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if not quantized:
        return _joined_plain(cast("Sequence[nn.Linear]", linears))
    if len(quantized) < len(linears):
        raise _Unlike
    try:
        return type(quantized[0]).joined(quantized)
    except ValueError as error:
        raise _Unlike from error


def _joined_plain(linears: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


def _product(linear: nn.Module, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return `linear(rows)`, plus `residual` if it is given. The hooks of LoRA adapters run."""
    own = vars(linear)  # faster than attributes of a module
    if (transposed := own.get(_TRANSPOSED)) is not None and not own["_forward_hooks"]:
        bias = own["_parameters"]["bias"]
        if bias is None:
            return torch.mm(rows, transposed) if residual is None else torch.addmm(residual, rows, transposed)
        if residual is None:
            return torch.addmm(bias, rows, transposed)
    out: Tensor = linear(rows)
    return out if residual is None else out.add_(residual)


def _eps(norm: Any) -> float:
    """Return the epsilon of a transformers RMSNorm. The attribute has one of two names."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        raise _Unlike
    return eps


def _norm(norm: Any) -> FewOperatorNorm | FusedNorm:
    return norm_of(norm.weight.detach(), _eps(norm))
