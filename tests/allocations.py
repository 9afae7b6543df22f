"""The memory that PyTorch's allocator on the CPU gives out, which is exact, unlike the memory of a process."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated_bytes(work: Callable[[], object]) -> int:
    """Run `work` and return the peak of its allocations in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
