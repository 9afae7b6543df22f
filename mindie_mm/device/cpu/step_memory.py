"""The memory of a step on the CPU, computed from the shapes of its tensors.

`computed_peak_bytes` runs the step on fake tensors, which have shapes and no data, and adds up the tensors that exist
at the same time. The result depends on the model and the settings, and not on other programs or on time
(docs/decisions/0016-memory-is-computed.md).

PyTorch's own fake tensors serve its compiler, whose modules take 1.3 s of processor time to import.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mindie_mm.device.host_memory import MAPPED_BYTES

_MOST_NUMBERS, _MOST_FLOATS = 2**20, 2**12
"""Maximum number of elements of a tensor that is computed: for tensors of integers, and for other tensors. Models read
sizes from such tensors, for example from the grids of images."""
_PR_SET_PDEATHSIG = 1
_MOST_WRITTEN = 4096  # a pipe takes this at once
_PLAIN = (bool, int, float, str, type(None))


class _Computation:
    """A forked process that computes a bound."""

    def __init__(self, pid: int, reading: int) -> None:
        self._pid = pid
        self._reading = reading
        self._outcome: str | None = None

    def wait(self) -> str:
        """Wait for the end of the process, and return what it has written."""
        if self._outcome is None:
            with os.fdopen(self._reading, "rb") as file:
                self._outcome = file.read().decode()
            os.waitpid(self._pid, 0)
            _running.remove(self)
        return self._outcome

    def num_bytes(self) -> int:
        if not (outcome := self.wait()).isdecimal():
            raise RuntimeError(outcome or "the process died")
        return int(outcome)


_running: list[_Computation] = []
"""At most one for each thread of this process."""


def computed_peak_bytes(work: Callable[[], object], scale: float = 1.0) -> Callable[[], int]:
    """Start to compute an upper bound of the memory in bytes that `work` allocates at a time, without running it.

    The bound is 1.25 times the peak of the tensors' sizes. A tensor below 32 MiB counts twice, because the C library
    puts it in its heap, where free pieces may be too small for the next tensor.

    A forked process computes the bound, because models keep tensors for later steps, such as positions. In this
    process, they would keep fake ones. Several processes run at the same time, one for each thread of this process.

    Args:
        work: Function that runs the step.
        scale: Factor for the size of each tensor.

    Returns:
        Function that waits for the bound. It raises RuntimeError if the process fails, for example because `work`
        depends on values that only a real run computes.

    """
    while len(_running) >= torch.get_num_threads():
        _running[0].wait()
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # the process uses neither the threads of this process nor their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _write_peak(writing, work, scale)
    os.close(writing)
    _running.append(started := _Computation(pid, reading))
    return started.num_bytes


def _write_peak(writing: int, work: Callable[[], object], scale: float) -> NoReturn:
    """Compute the bound in a forked process. Write it, or the message of an error, to a pipe."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # this process holds the sockets of its parent
        torch.set_num_threads(1)  # the threads of OpenMP exist in the parent process only
        shapes = _Shapes(scale)
        with shapes:
            work()
        outcome = str(shapes.peak_bytes * 5 // 4)
    except BaseException as error:  # noqa: BLE001 - nothing may return into the code of the parent process
        outcome = f"{type(error).__name__}: {error}"
    try:
        os.write(writing, outcome.encode()[:_MOST_WRITTEN])
    finally:
        os._exit(0)


def allocated_peak_bytes(work: Callable[[], object]) -> int:
    """Run `work`, and return the peak of the memory in bytes that PyTorch's allocator gives out.

    The result is exact, but `work` takes its full time.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes), default=0)


def _refuse(_: type, func: Any, *__: Any) -> NoReturn:
    raise NotImplementedError(f"{func.name()} on a tensor that only has a shape")


class _Fake(Tensor):
    """A tensor on the CPU without data. `like` is the same tensor on the device "meta", whose operators give shapes."""

    like: Tensor
    __torch_dispatch__: Any = classmethod(_refuse)

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - there is no public name
            return func(*args, **kwargs or {})

    @classmethod
    def of(cls, like: Tensor) -> _Fake:
        with torch.inference_mode(mode=False):  # a view of a tensor that autograd knows must be known, too
            made: Any = Tensor._make_wrapper_subclass(  # noqa: SLF001 - there is no public name
                cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=torch.device("cpu")
            )
        made.like = like
        return cast("_Fake", made)


class _Shapes(TorchDispatchMode):
    """A mode in which operators only compute shapes, and small tensors of integers.

    An integer that depends on weights or media is 0: each token takes the first expert, for example.
    """

    def __init__(self, scale: float) -> None:
        cast("Any", super()).__init__()
        self.peak_bytes = 0
        self._scale = scale
        self._now_bytes = 0
        self._sizes: dict[int, int] = {}
        self._results: dict[Any, tuple[int, Any, Any]] = {}
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        """Weights that operators have read, with their likenesses, by the weight's `id`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because TorchDispatchMode would otherwise import PyTorch's compiler."""
        return False

    def once(self, key: tuple[Any, ...], inputs: Any, evaluate: Callable[[], Any]) -> Any:
        """Return the result of `evaluate`, which is called once for each `key` and for each shape of the inputs.

        A later call adds the same memory, and returns tensors of the same shapes.
        """
        leaves = tree_leaves(inputs)
        key += tuple(map(_described, leaves))
        if (known := self._results.get(key)) is not None:
            extra_bytes, like, _ = known
            self.peak_bytes = max(self.peak_bytes, self._now_bytes + extra_bytes)
            with self:
                return tree_map_only(Tensor, lambda one: torch.empty_like(one, device="cpu"), like)
        earlier, before = self.peak_bytes, self._now_bytes
        self.peak_bytes = before
        out = evaluate()
        like = tree_map_only(_Fake, lambda one: torch.empty_like(one.like), out)
        others = [leaf for leaf in leaves if not isinstance(leaf, _Fake)]  # kept, so that their ids stay theirs
        self._results[key] = self.peak_bytes - before, like, others
        self.peak_bytes = max(self.peak_bytes, earlier)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if given and all(map(_is_small, given)) and len({one.shape for one in given}) == 1:
            out = func(*args, **kwargs)
            self._count(_tensors(out), given)
            return out
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # a tower may have 1,000 equal windows
            return self.once((func,), (args, kwargs), lambda: self._decomposed(func, args, kwargs))
        if (own := _OWN.get(func.name())) is not None:
            return own(self, func, args)
        if func._can_decompose():  # noqa: SLF001 - there is no public name
            return self._decomposed(func, args, kwargs)
        return self.shaped(func, args, kwargs, given)

    def shaped(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Return the outputs of an operator that reads the tensors `given`, and count their memory."""
        makes = not given and any(argument.name == "device" for argument in func._schema.arguments)  # noqa: SLF001
        device = {"device": "meta"} if makes or kwargs.get("device") is not None else {}
        likes = {id(one): self._like(one) for one in given}
        originals = {id(likes[id(one)]): one for one in given}

        def fake(one: Tensor) -> Tensor:
            return originals[id(one)] if id(one) in originals else _Fake.of(one)

        shapes = func(*_mapped(args, likes), **_mapped(kwargs, likes) | device)
        out = _with_known_integers(func, args, kwargs, given, tree_map_only(Tensor, fake, shapes))
        self._count(_tensors(out), list(likes.values()))
        return out

    def _like(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the device "meta"."""
        if isinstance(tensor, _Fake):
            return tensor.like
        if tensor.is_meta:
            return tensor
        if (known := self._weights.get(id(tensor))) is not None:
            return known[1]
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            self._weights[id(tensor)] = tensor, like
        return like

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _count(self, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        views = {_storage(part) for part in given}
        for one in made:
            key = _storage(one)
            if key is None or key in views or key in self._sizes:
                continue
            storage = (one.like if isinstance(one, _Fake) else one).untyped_storage()
            self._sizes[key] = size = _occupied(math.ceil(storage.nbytes() * self._scale))
            self._now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._now_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now_bytes -= self._sizes.pop(key, 0)


def _mapped(values: Any, likes: dict[int, Tensor]) -> Any:
    return tree_map_only(Tensor, lambda one: likes[id(one)], values)


def _described(value: Any) -> Any:
    if isinstance(value, _Fake):
        return tuple(value.shape), value.stride(), value.dtype
    return value if isinstance(value, _PLAIN) else id(value)


def _with_known_integers(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], out: Any) -> Any:
    """Return real tensors instead of small fake tensors of integers."""
    if all(map(_is_small, given)):
        return func(*args, **kwargs) if all(map(_may_be_small, _tensors(out))) else out
    views = {_storage(part) for part in given}

    def known(one: _Fake) -> Tensor:
        is_known = not one.is_floating_point() and one.numel() <= _MOST_NUMBERS and _storage(one) not in views
        return torch.zeros(one.shape, dtype=one.dtype) if is_known else one

    return tree_map_only(_Fake, known, out)


def _occupied(num_bytes: int) -> int:
    """Return the memory that a tensor may occupy. It never falls when the tensor grows."""
    return max(num_bytes, min(2 * num_bytes, 2 * MAPPED_BYTES))


def _storage(tensor: Tensor) -> int | None:
    like = tensor.like if isinstance(tensor, _Fake) else tensor
    return like.untyped_storage()._cdata if like.layout == torch.strided else None  # noqa: SLF001


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _is_small(tensor: Tensor) -> bool:
    return not (isinstance(tensor, _Fake) or tensor.is_meta) and _may_be_small(tensor)


def _may_be_small(tensor: Tensor) -> bool:
    most = _MOST_FLOATS if tensor.is_floating_point() else _MOST_NUMBERS
    return tensor.layout == torch.strided and tensor.numel() <= most


def _index(mode: _Shapes, func: Any, args: Any) -> Tensor:
    """Return the rows that a mask selects."""
    values, indices = args
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, _Fake):
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return cast("Tensor", mode.shaped(func, (values, places), {}, _tensors((values, places))))


_OWN: dict[str, Callable[[_Shapes, Any, Any], Tensor]] = {"aten::index.Tensor": _index}
"""Operators that need values."""
