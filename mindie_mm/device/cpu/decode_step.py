"""Decode steps of Llama-like text models in compiled code.

In torch, a decode step of a small model spends a third of its time in calls to operators, and each product waits for
all threads. decode_step.c runs all layers in one call. Its weights are the tensors of the model, which prefills read,
too. The limits of the code are the conditions below. Torch runs all other steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from mindie_mm.device.choices import forced
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear, is_exact
from mindie_mm.device.quantized_linear import FLOAT8, FLOAT8_UNIT

MOST_ROWS = 32
"""Maximum number of new tokens in a compiled step."""
GROUP = 8
"""Number of rows that are multiplied at a time. More rows read the weights again."""
_MULTIPLE = 16
"""Number that divides the widths of compiled layers: the floats in the largest vector."""
NIBBLES = 128
"""Number of values of 4 bits in the largest vector. It divides the inputs of layers with such weights."""
_NUMBERS_READ = {torch.int8: 64, FLOAT8: 64, torch.uint8: NIBBLES}
"""Number of values in the largest vector, by dtype of the weights. It divides the inputs of compiled layers."""
_PADDING = 16
"""Number of floats after the scales and shifts of a weight that may be read."""
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_QUANTIZED_FORMATS = {torch.int8: 2, FLOAT8: 2, torch.uint8: 3}
_NONE, _BY_LARGEST, _CONSTANTS = range(3)
"""How a layer rounds its input, as in decode_step.c."""
_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (silu, lambda values: gelu(values, approximate="tanh"))
_BEST = "best"


class NotCompiled(Exception):
    """The reason why torch runs the decode steps of a model."""


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A decoder layer as compiled code needs it."""

    norm: Tensor
    """Weight of the norm before the attention, [hidden]."""
    eps: float
    qkv: nn.Module
    """Linear layer whose output is the queries, keys and values of all heads."""
    head_norm: tuple[Tensor, float] | None
    """Weight, [heads + kv_heads, head_dim], and epsilon of the norms of queries and keys."""
    norms_late: bool
    """True if these norms follow the rotation."""
    scaling: float
    """Factor of the attention scores."""
    window: int | None
    """Maximum number of tokens that a token attends to."""
    output: nn.Module
    mlp_norm: Tensor
    mlp_eps: float
    gate_up: nn.Module
    """Linear layer whose output is the gates followed by the values that they multiply."""
    activation: Callable[[Tensor], Tensor]
    """Function of the gates."""
    down: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "shifts", "codes", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "stride", "format")),
        *((name, ctypes.c_int64) for name in ("is_float8", "group", "rounding")),
        *((name, ctypes.c_float) for name in ("input_step", "input_zero")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "head_norm")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scaling", "eps", "mlp_eps", "head_eps")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("norm", "scratch")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, ctypes.c_int64) for name in ("norms_late", "activation")),
        ("eps", ctypes.c_float),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "starts", "lengths", "blocks", "cache")),
        *((name, ctypes.c_int64) for name in ("sequences", "rows", "blocks_per_row", "block_size")),
        *((name, ctypes.c_int64) for name in ("cache_stride", "cache_format")),
    )


class DecodeStep:
    """The layers and the final norm of a text model, for steps with few new tokens."""

    def __init__(self, layers: Sequence[StepLayer], norm: Tensor, eps: float) -> None:
        """Prepare the step.

        Args:
            layers: All layers of the model.
            norm: Weight of the final norm, [hidden].
            eps: Epsilon of the final norm.

        Raises:
            NotCompiled: The code cannot run these layers, or this processor cannot run the code.

        """
        self._library = _load(instructions())
        self._kept: list[Tensor] = []
        """The tensors whose addresses the structures contain."""
        first = layers[0]
        sizes = {(one.num_heads, one.num_kv_heads, one.head_dim, one.norms_late) for one in layers}
        if len(sizes) > 1 or len({_activation(one.activation) for one in layers}) > 1:
            raise NotCompiled("its layers differ")
        _require_width("the head size", first.head_dim)
        self.most_rows = min(_most_rows(part) for layer in layers for part in (layer.qkv, layer.gate_up, layer.down))
        """Maximum number of new tokens in a step."""
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._model = _Model(
            layers=self._layers,
            norm=self._floats(norm),
            num_layers=len(layers),
            hidden=len(norm),
            heads=first.num_heads,
            kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            intermediate=self._layers[0].down.inputs,
            norms_late=first.norms_late,
            activation=_activation(first.activation),
            eps=eps,
        )
        numbers = self._model.hidden + 2 * (first.num_heads + first.num_kv_heads) * first.head_dim
        self._model.scratch = self._floats(torch.empty(MOST_ROWS, numbers + 3 * self._model.intermediate))

    def run(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        blocks: NDArray[np.int64],
        cache: Tensor,
    ) -> Tensor:
        """Run a step, and store the new keys and values in the cache.

        Args:
            hidden: Embeddings of the new tokens of S sequences, [T, hidden].
            angles: Cosines and sines of the rotary embedding, [T, head_dim] each. The first half of the sines is
                negated.
            starts: First row of each sequence, and T, [S + 1].
            lengths: Number of tokens of the sequence up to the token of each row, [T].
            blocks: KV blocks of the sequence of each row, [T, blocks].
            cache: Keys and values of each layer in turn, [2 * layers, blocks, block_size, kv_heads, head_dim].

        Returns:
            Hidden states after the final norm, [T, hidden].

        """
        rows = hidden.to(torch.float32, copy=True)
        cosines, sines = (part.float().contiguous() for part in angles)
        batch = _Batch(
            cosines.data_ptr(),
            sines.data_ptr(),
            starts.ctypes.data,
            lengths.ctypes.data,
            blocks.ctypes.data,
            cache.data_ptr(),
            len(starts) - 1,
            len(rows),
            blocks.shape[1],
            cache.shape[2],
            cache.stride(0),
            _FORMATS[cache.dtype],
        )
        self._library.run_step(ctypes.byref(self._model), ctypes.byref(batch), rows.data_ptr(), torch.get_num_threads())
        return rows.to(hidden.dtype)

    def takes(self, hidden: Tensor, cache: Sequence[Tensor]) -> bool:
        """Return whether `run` can run a step with these hidden states and this cache, which consists of tensors."""
        return (
            type(hidden) is Tensor  # and not a tensor that only has a shape (step_memory.py)
            and len(hidden) <= self.most_rows
            and len(cache) == 1
            and len(cache[0]) == 2 * len(self._layers)
            and cache[0].dtype in _FORMATS
        )

    def _layer(self, layer: StepLayer) -> _Layer:
        head_norm, head_eps = layer.head_norm or (None, 0.0)
        return _Layer(
            norm=self._floats(layer.norm),
            mlp_norm=self._floats(layer.mlp_norm),
            head_norm=None if head_norm is None else self._floats(head_norm),
            qkv=_matrix(layer.qkv, self._kept),
            output=_matrix(layer.output, self._kept),
            gate_up=_matrix(layer.gate_up, self._kept),
            down=_matrix(layer.down, self._kept),
            window=2**62 if layer.window is None else layer.window,
            scaling=layer.scaling,
            eps=layer.eps,
            mlp_eps=layer.mlp_eps,
            head_eps=head_eps,
        )

    def _floats(self, values: Tensor) -> int:
        return _address(values.float(), self._kept)


class StepLinear:
    """A linear layer for few rows, such as the output layer of a decode step."""

    def __init__(self, linear: nn.Module) -> None:
        """Prepare the layer.

        Raises:
            NotCompiled: The code cannot multiply the weight, or this processor cannot run the code.

        """
        self._library = _load(instructions())
        self._kept: list[Tensor] = []
        self._matrix = _matrix(linear, self._kept)
        self._most_rows = _most_rows(linear)

    def takes(self, rows: Tensor) -> bool:
        """Return whether the layer can multiply `rows`."""
        return type(rows) is Tensor and 0 < len(rows) <= self._most_rows

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [rows, inputs] to float32 [rows, outputs]."""
        given = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        out = torch.empty(len(rows), self._matrix.outputs)
        self._library.run_linear(
            ctypes.byref(self._matrix), given.data_ptr(), out.data_ptr(), len(rows), torch.get_num_threads()
        )
        return out


def instructions() -> str:
    """Return the instruction set of compiled steps on this processor, as in the name of the library.

    Raises:
        NotCompiled: There is no library for this processor.

    """
    name = forced("step") or _BEST
    if name == "no":
        raise NotCompiled("MINDIE_MM_KERNELS contains step=no")
    if name == _BEST:
        name = _best()
    if _load(name) is None:
        raise NotCompiled(
            f"the package has no decode_step_{name}.so of this version; install a C compiler, such as gcc, and then "
            "the package again"
        )
    return name


def _best() -> str:
    """Return the name of the library for the largest vectors that the processor has."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "generic")


@cache
def _load(name: str) -> Any:
    try:
        loaded = ctypes.CDLL(str(Path(__file__).with_name(f"decode_step_{name}.so")))
    except OSError:
        return None
    if not _is_of_this_version(loaded):
        return None
    pointer = ctypes.c_void_p
    loaded.run_step.argtypes = (pointer, pointer, pointer, ctypes.c_int)
    loaded.run_step.restype = None
    loaded.run_linear.argtypes = (pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int)
    loaded.run_linear.restype = None
    return loaded


def _is_of_this_version(loaded: ctypes.CDLL) -> bool:
    """Return whether a library was compiled for the structures of this module.

    A library of another version could crash the process.
    """
    structures = (_Matrix, _Layer, _Model, _Batch)
    try:
        sizes = (ctypes.c_int64 * len(structures)).in_dll(loaded, "structure_sizes")
    except ValueError:
        return False
    return [*sizes] == [ctypes.sizeof(one) for one in structures]


def _most_rows(linear: nn.Module) -> int:
    """Return the maximum number of rows up to which compiled code is fastest."""
    has_faster = isinstance(linear, CPUQuantizedLinear) and linear.rounds_input and is_exact()
    return GROUP if has_faster else MOST_ROWS


def _matrix(linear: nn.Module, kept: list[Tensor]) -> _Matrix:
    if type(linear) not in (nn.Linear, CPUQuantizedLinear) or linear._forward_pre_hooks or "forward" in vars(linear):  # noqa: SLF001
        raise NotCompiled(f"a layer is {type(linear).__name__}, or does more than a product")
    assert isinstance(linear, nn.Linear | CPUQuantizedLinear)
    if isinstance(linear, CPUQuantizedLinear):
        return _quantized_matrix(linear, kept)
    weight, bias = linear.weight.detach(), linear.bias
    if weight.dtype not in _FORMATS or weight.device.type != "cpu" or not weight.is_contiguous():
        raise NotCompiled(f"a weight is {weight.dtype} on {weight.device}")
    outputs, inputs = weight.shape
    _require_width("the input of a layer", inputs)
    return _Matrix(
        weights=_address(weight, kept),
        bias=None if bias is None else _address(bias.detach().float(), kept),
        outputs=outputs,
        inputs=inputs,
        stride=inputs,
        format=_FORMATS[weight.dtype],
    )


def _quantized_matrix(linear: CPUQuantizedLinear, kept: list[Tensor]) -> _Matrix:
    (outputs, inputs), groups = linear.shape, linear.scales.shape[1]
    group, read = inputs // groups, _NUMBERS_READ[linear.values.dtype]
    if linear.group_of is not None:
        raise NotCompiled("the groups of inputs of a quantized weight are not consecutive")
    _require_width("the input of a quantized layer", inputs, read)
    if group % read and (read % group or group % 8):
        raise NotCompiled(
            f"a quantized weight has groups of {group} inputs; the size must divide {read} or be a multiple of it"
        )
    scales, shifts = linear.scales, None
    if linear.values.dtype == FLOAT8:
        scales = scales * FLOAT8_UNIT
    elif groups > 1 or linear.zeros is not None or linear.values.dtype == torch.uint8:
        shifts = torch.zeros_like(linear.scales) if linear.zeros is None else -linear.zeros * linear.scales
    bias = None if linear.bias is None else linear.bias.detach().float()
    if linear.input_scale is not None:
        assert linear.sum_bias is not None
        assert linear.product_scales is not None
        sums = linear.sum_bias + linear.input_offset * linear.values.sum(1).double()
        constant = (sums * linear.product_scales).float()
        bias = constant if bias is None else bias + constant
    return _Matrix(
        weights=_address(linear.values, kept),
        scales=_padded(scales, kept),
        shifts=None if shifts is None else _padded(shifts, kept),
        codes=None if linear.codes is None else _address(linear.codes, kept),
        bias=None if bias is None else _address(bias, kept),
        outputs=outputs,
        inputs=inputs,
        stride=inputs,
        format=_QUANTIZED_FORMATS[linear.values.dtype],
        is_float8=linear.values.dtype == FLOAT8,
        group=group,
        rounding=_NONE if not linear.rounds_input else _BY_LARGEST if linear.input_scale is None else _CONSTANTS,
        input_step=linear.input_scale or 0.0,
        input_zero=linear.input_offset,
    )


def _padded(values: Tensor, kept: list[Tensor]) -> int:
    return _address(nn.functional.pad(values.flatten(), (0, _PADDING)), kept)


def _require_width(name: str, width: int, multiple: int = _MULTIPLE) -> None:
    if width % multiple:
        raise NotCompiled(f"{name} has {width} dimensions, which is not a multiple of {multiple}")


def _activation(function: Callable[[Tensor], Tensor]) -> int:
    values = torch.linspace(-4, 4, 64)
    for number, known in enumerate(_ACTIVATIONS):
        if torch.equal(function(values), known(values)):
            return number
    raise NotCompiled("its activation is neither SiLU nor GELU with tanh")


def _address(tensor: Tensor, kept: list[Tensor]) -> int:
    tensor = tensor.contiguous()
    kept.append(tensor)
    return tensor.data_ptr()
