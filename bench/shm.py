"""Benchmark of handing an array from one process to another, through an arena and by other methods.

It also measures the cost of each step of an arena.

    python -m bench shm

Every method repeats the same cycle between two processes:

    result    The producer computes its result into memory that is faulted in. Here it copies a source array. With
              "arena, in place", this memory is the block itself. Otherwise it is an array that the producer reuses.
    hand over The producer sends handle words, a segment's name, or the array itself. If the method is a fresh segment
              or "arena, copied in", the producer first allocates the memory and copies its array there.
    read      The consumer copies the array once, into a buffer that it reuses. A copy to a device would read
              the same amount.
    free      The consumer replies, and the producer frees the block or unlinks the segment.

Two times are measured. Both exclude the computation of the result, which costs the same for every method. With "arena,
in place", both include the allocation of the block. `hand over` ends when the consumer has an array, and includes the
wake-up of the consumer. `whole` ends when the producer can hand over the next array, and cannot be less than one
memcpy. Ray is measured if it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from bench.shm_costs import costs
from bench.shm_methods import METHODS, Channels, Method
from tools.arguments import parser

MB = 1 << 20
SIZES_MB = (0.1, 1, 4, 20, 80)
REPEATS = 60
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one method at one size: medians, and deciles of the hand-over, in milliseconds."""

    method: str
    size_mb: float
    repeats: int
    hand_over_ms: float
    whole_ms: float
    hand_over_p10_ms: float
    hand_over_p90_ms: float

    @classmethod
    def of(cls, method: str, size_mb: float, handed: list[float], whole: list[float]) -> Timing:
        """Create a Timing from the seconds of all cycles, which include the warm-up."""
        handed, whole = ([1e3 * value for value in values[WARM_UP:]] for values in (handed, whole))
        deciles = statistics.quantiles(handed, n=10)
        return cls(
            method, size_mb, len(handed), statistics.median(handed), statistics.median(whole), deciles[0], deciles[-1]
        )


def consume(channels: Channels, method_class: type[Method], size: int, checksum: int, repeats: int) -> None:
    """Run the consumer process."""
    method = method_class(size)
    kept = np.ones(size, np.uint8)
    for _ in range(repeats):
        array = method.receive(channels)
        received = time.perf_counter()  # Linux has one such clock for all processes
        np.copyto(kept, array)
        del array
        method.done()
        channels.pipe.send(received)
    channels.pipe.send(int(kept.sum(dtype=np.int64)) == checksum)


def measure(method_class: type[Method], size_mb: float, repeats: int) -> Timing:
    size = int(size_mb * MB)
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    context = get_context("spawn")
    pipe, other_pipe = context.Pipe()
    stream, other_stream = socket.socketpair()
    queue = context.Queue()
    theirs = Channels(other_pipe, queue, other_stream)
    arguments = (theirs, method_class, size, int(source.sum(dtype=np.int64)), WARM_UP + repeats)
    consumer = context.Process(target=consume, args=arguments, daemon=True)
    consumer.start()
    other_pipe.close()
    other_stream.close()
    channels = Channels(pipe, queue, stream)
    method = method_class(size)
    method.open()
    handed, whole = [], []
    try:
        for _ in range(WARM_UP + repeats):
            start = time.perf_counter()
            target = method.target()
            allocated = time.perf_counter()
            target[...] = source
            written = time.perf_counter()
            method.send(channels)
            received = pipe.recv()
            method.free()
            handed.append(received - written + allocated - start)
            whole.append(time.perf_counter() - written + allocated - start)
        if not pipe.recv():
            raise RuntimeError(f"{method.name}: the consumer read other bytes than were sent")
    finally:
        method.close()
    consumer.join()
    stream.close()
    return Timing.of(method.name, size_mb, handed, whole)


def measure_ray(size_mb: float, repeats: int) -> Timing:
    """Measure Ray's object store. This process puts an array into the store, and passes its reference to an actor."""
    import ray

    @ray.remote
    class Consumer:
        def __init__(self, size: int) -> None:
            self.kept = np.ones(size, np.uint8)

        def take(self, references: list[Any]) -> float:
            array = ray.get(references[0])
            received = time.perf_counter()
            np.copyto(self.kept, array)
            return received

    size = int(size_mb * MB)
    result = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    consumer = Consumer.remote(size)
    handed, whole = [], []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        reference = ray.put(result)
        received = ray.get(consumer.take.remote([reference]))
        del reference
        handed.append(received - start)
        whole.append(time.perf_counter() - start)
    return Timing.of("Ray's object store", size_mb, handed, whole)


def copy_ms(size_mb: float, repeats: int) -> float:
    """Return the median milliseconds of a memcpy within one process.

    Both arrays are faulted in. The source is written before each copy, as in the benchmark.
    """
    size = int(size_mb * MB)
    source, middle, target = (np.full(size, value, np.uint8) for value in (1, 2, 3))
    times = []
    for _ in range(WARM_UP + repeats):
        np.copyto(middle, source)
        start = time.perf_counter()
        np.copyto(target, middle)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[WARM_UP:])


def run(repeats: int) -> dict[str, Any]:
    methods: list[Callable[[float, int], Timing]] = [
        lambda size_mb, few, method=method: measure(method, size_mb, few)  # type: ignore[misc]
        for method in METHODS
    ]
    with_ray = importlib.util.find_spec("ray") is not None
    if with_ray:
        import ray

        ray.init(num_cpus=2, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
        methods.append(measure_ray)
    timings: list[Timing] = []
    memcpy: dict[float, float] = {}
    for size_mb in SIZES_MB:
        few = max(15, repeats // (4 if size_mb > 20 else 1))
        memcpy[size_mb] = copy_ms(size_mb, few)
        for method in methods:
            timing = method(size_mb, few)
            timings.append(timing)
            print(
                f"{size_mb:5} MB  {timing.method:22s} {timing.hand_over_ms:9.3f} ms, whole {timing.whole_ms:9.3f} ms, "
                f"memcpy {memcpy[size_mb]:.3f}",
                flush=True,
            )
    if with_ray:
        ray.shutdown()
    return {
        "what": (__doc__ or "").strip().splitlines()[0],
        "load_average": os.getloadavg()[0],
        "memcpy_ms": memcpy,
        "timings": [asdict(timing) for timing in timings],
        "ratios": [ratios(size_mb, memcpy[size_mb], timings) for size_mb in SIZES_MB],
        "costs": costs(),
    }


def ratios(size_mb: float, memcpy_ms: float, timings: list[Timing]) -> dict[str, Any]:
    """Return ratios of hand-over times.

    The time of "arena, copied in" is divided by the time of one memcpy. The time of every other method is divided by
    the times of "arena, copied in" and "arena, in place".
    """
    here = {timing.method: timing.hand_over_ms for timing in timings if timing.size_mb == size_mb}
    copied_in, in_place = here.pop("arena, copied in"), here.pop("arena, in place")
    return {
        "size_mb": size_mb,
        "copied_in_times_memcpy": round(copied_in / memcpy_ms, 2),
        "in_place_ms": round(in_place, 3),
        "times_copied_in": {method: round(ms / copied_in, 1) for method, ms in here.items()},
        "times_in_place": {method: round(ms / in_place, 1) for method, ms in here.items()},
    }


def draw(axis: Any, results: dict[str, Any]) -> None:
    for name in dict.fromkeys(row["method"] for row in results["timings"]):
        rows = [row for row in results["timings"] if row["method"] == name]
        axis.loglog([row["size_mb"] for row in rows], [row["hand_over_ms"] for row in rows], marker="o", label=name)
    axis.loglog(SIZES_MB, list(results["memcpy_ms"].values()), "k:", label="one memcpy, for scale")
    axis.set(title="From a finished result to an array of it in another process", xlabel="MB", ylabel="ms, median")
    axis.set_xticks(SIZES_MB, [str(size) for size in SIZES_MB])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()


def main() -> None:
    from bench import report  # imported here, because it imports torch, which the consumers do not need

    results = run(REPEATS)
    report.write("shm", results)
    report.plot("shm", lambda axis: draw(axis, results))


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
