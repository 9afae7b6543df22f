"""Launch of an operator. The host computes the operator in the device's memory, in the order of the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators import cache_writes, counts, graphs, order
from tests.ascend.operators.aliases import alias, on_device, span
from tests.ascend.operators.generators import host_generator

_UNKNOWN_SIZES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Advanced indexing in torch. Only these operators accept indices on the host, and copy them with a synchronization."""


_ON_HOST = {"seq_len"}
"""Tensors that ATB reads on the host."""


class Launch:
    """One call to an operator, with the device tensors that it reads and writes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = order.begin(device)
        self.mode = graphs.mode(self.stream)
        self.lent: dict[int, Tensor] = {}  # device tensors by the address of their storage
        self.aliases: dict[int, Tensor] = {}  # device tensors by the id() of their host alias
        self.tensors: list[Tensor] = []  # all device tensors of the call
        self.changed: list[tuple[Tensor, Tensor]] = []  # device tensors, each with its host alias
        self._kept: list[Tensor] = []

    def host(self, value: Any, *, written: bool = False, indices: bool = False) -> Any:
        """Convert an argument for the operator on the host."""
        if isinstance(value, Tensor):
            return value if indices and not on_device(value) else self._host_tensor(value, written=written)
        if isinstance(value, list | tuple):
            return type(value)(self.host(item, written=written, indices=indices) for item in value)
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    def _host_tensor(self, tensor: Tensor, *, written: bool) -> Tensor:
        if not on_device(tensor):
            if tensor.dim():
                raise RuntimeError(
                    "Expected all tensors to be on the same device. Expected NPU tensor, "
                    "please check whether the input tensor device is correct."
                )
            return tensor
        if tensor.device != self.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.device} and {tensor.device}!"
            )
        self.tensors.append(tensor)
        if not written and not self.mode:
            order.note_read(self.stream, tensor)
        # The operator resizes an empty tensor that is passed as out=, and an alias cannot be resized.
        same = torch.empty(0, dtype=tensor.dtype) if written and tensor.shape == (0,) else alias(tensor)
        self.lent[same.untyped_storage().data_ptr()] = tensor
        self.aliases[id(same)] = tensor
        self._kept.append(same)
        if written:
            self.changed.append((tensor, same))
        return same

    def finish(self, rows: Mapping[int, tuple[int, Tensor]]) -> None:
        """Publish the contents of the device tensors that the operator has written.

        `rows` are the written rows by the id() of the host alias, as `cache_writes.written_rows` returns them.
        """
        for tensor, same in self.changed:
            if not tensor.numel() and same.numel():
                tensor.resize_(same.shape)
                order.put(self.stream, tensor, same.contiguous())
            elif id(same) in rows and tensor.is_contiguous():
                axes, places = rows[id(same)]
                order.publish(self.stream, tensor.flatten(0, axes - 1), places)
            else:
                order.publish(self.stream, tensor)

    def device_result(self, value: Any) -> Any:
        """Convert a result of the operator on the host to a device tensor for the caller."""
        if isinstance(value, list | tuple):
            return type(value)(self.device_result(item) for item in value)
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        if id(value) in self.aliases:
            return self.aliases[id(value)]
        address = value.untyped_storage().data_ptr()
        if address and address in self.lent:
            return self.lent[address].as_strided(value.size(), value.stride(), value.storage_offset())
        if span(value) is None:
            value = value.contiguous()
        out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.device)
        order.put(self.stream, out, value)
        return out


def device_of(arguments: Any) -> torch.device | None:
    """Return the device of the first device tensor in `arguments`. If there is none, return the device argument."""
    named = None
    for value in arguments:
        if isinstance(value, list | tuple):
            if (found := device_of(value)) is not None:
                return found
        elif on_device(value):
            device: torch.device = value.device
            return device
        elif isinstance(value, torch.device) and value.type == "npu":
            named = value
    return named


def _needs_the_host(index: Tensor | None) -> bool:
    """Return whether indexing must wait for the device.

    Indexing waits to copy indices from the host, and to count the true elements of a mask.
    """
    return index is not None and (not on_device(index) or index.dtype in {torch.bool, torch.uint8})


def kernel(op: Any, function: Callable[..., Any] | None = None, check: Callable[..., None] | None = None) -> Any:
    """Return a simulated device kernel for the operator `op`.

    The kernel runs `function` on the host, or the operator itself if `function` is None. `check` gets the arguments by
    name, and raises an error if the device would refuse them.
    """
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written |= {"out"} & {*names}  # some schemas of torch_npu do not say that `out` is written
    random = "generator" in names
    unknown_sizes = bool(_UNKNOWN_SIZES & set(op.tags))
    indexed = schema.name.partition("::")[2] in _INDEXED
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    run = function or op

    def launch(*args: Any, **kwargs: Any) -> Any:
        device = device_of([*args, *kwargs.values()]) or torch.device("npu")
        if device.index is None:
            device = torch.device("npu", torch.npu.current_device())
        named = dict(zip(names, args, strict=False)) | kwargs
        if check is not None:
            check(defaults | named)
        if any(map(_needs_the_host, named["indices"])) if indexed else unknown_sizes:
            order.synchronise(device)
        one = Launch(device)
        given = {
            name: one.host(value, written=name in written, indices=name in _ON_HOST or (indexed and name == "indices"))
            for name, value in named.items()
        }
        if random:
            given["generator"] = host_generator(named.get("generator"), device)
        in_order = dict(given)
        first = [given.pop(name) for name in names[: 0 if function else len(args)]]
        if one.mode:
            return _in_graph(one, op, written, named, lambda: run(*first, **given), len(first))
        written_rows = cache_writes.written_rows(schema.name, in_order)
        rows = {id(in_order[name]): value for name, value in written_rows.items()}
        out = run(*first, **given)
        counts.launched(one.stream, schema.name, named, one.tensors, [tensor for tensor, _ in one.changed], out)
        result = one.device_result(out)
        one.finish(rows)
        return result

    return launch


def _in_graph(
    one: Launch, op: Any, written: set[str], named: Mapping[str, Any], run: Callable[[], Any], num_first: int
) -> Any:
    """Capture an operator instead of running it, or update a captured operator. Return its results.

    The first `num_first` arguments in `named` are passed by position.
    """
    changed = {name: value for name, value in named.items() if name in written}
    if changed:
        values = [*changed.values()]
        results = values[0] if len(values) == 1 else tuple(values)
        new, targets = [], []
    else:
        meta = {name: graphs.on_meta(value) for name, value in named.items()}
        first = [meta.pop(name) for name in [*meta][:num_first]]
        results = graphs.like(op(*first, **meta), one.device)
        new = graphs.tensors(results)
        targets = [alias(tensor) for tensor in new]

    def compute() -> None:
        out = run()
        for target, value in zip(targets, (out,) if isinstance(out, Tensor) else out or (), strict=not changed):
            target.copy_(value)

    if one.mode == graphs.UPDATES:
        graphs.update(one.stream, op.name(), compute)
    else:
        read = [tensor for name, value in named.items() if name not in written for tensor in graphs.tensors(value)]
        graphs.capture(one.stream, op.name(), compute, read, [*new, *graphs.tensors([*changed.values()])])
        on_device = [tensor for tensor, _ in one.changed]
        counts.launched(one.stream, op._schema.name, named, one.tensors, on_device, results, captured=True)
    return results if len(op._schema.returns) else None
