"""Tests for the state after recordings, including failed recordings.

`torch.cuda.graph` runs over a simulated GPU. The simulation follows torch's CUDAGraph.cpp and CUDACachingAllocator.cpp.
It has not been compared with a GPU.
"""

from contextlib import contextmanager
from itertools import count

import pytest
import torch

from mindie_mm.device.cuda import CUDA, _aside


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class GPU:
    """A simulated GPU: its current stream, and the number of recordings that use each memory pool."""

    def __init__(self):
        self.current = Stream()
        self.recording = None
        self.pools = {}
        self.numbers = count(1)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait(self):
        """Synchronize, as `float(tensor)` does. During a recording, this fails and invalidates the recording."""
        if self.recording is not None:
            self.recording.spoiled = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def graph(self):
        return Graph(self)


class Graph:
    def __init__(self, gpu):
        self.gpu = gpu
        self.spoiled = self.ended = False

    def capture_begin(self, pool=None, **_):
        self.stream, self._pool = self.gpu.current, pool or next(self.gpu.numbers)
        if self.gpu.pools.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.gpu.pools[self._pool] = self.gpu.pools.get(self._pool, 0) + 1
        self.gpu.recording = self

    def capture_end(self):
        assert self.gpu.current is self.stream
        self.gpu.recording = None
        if self.spoiled:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.ended = True

    def pool(self):
        assert self.ended
        return self._pool

    def replay(self):
        pass

    def __del__(self):
        if self.ended:  # a failed recording never releases its pool
            self.gpu.pools[self._pool] -= 1


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    for name, fake in {
        "CUDAGraph": gpu.graph,
        "Stream": Stream,
        "stream": gpu.stream,
        "current_stream": lambda: gpu.current,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    _aside.cache_clear()
    yield gpu
    _aside.cache_clear()


def test_recordings_share_one_side_stream_and_one_memory_pool(gpu):
    streams = []
    launches = [CUDA.record(lambda: streams.append(gpu.current)) for _ in range(3)]
    assert gpu.pools == {1: len(launches)}
    assert len(streams) == 6
    assert len(set(streams)) == 1
    assert gpu.current not in streams


def test_a_failed_recording_restores_the_stream(gpu):
    before = gpu.current
    with pytest.raises(RuntimeError) as failed:
        CUDA.record(gpu.wait)
    assert "not permitted" in str(failed.value.__context__)
    assert gpu.current is before


def test_a_pool_without_recordings_is_not_reused(gpu):
    """An engine that follows another engine uses a new pool (vLLM issue 28426)."""
    launch = CUDA.record(lambda: None)
    del launch
    assert gpu.pools == {1: 0}
    launch = CUDA.record(lambda: None)
    assert gpu.pools == {1: 0, 2: 1}, launch


def test_the_work_that_a_failed_first_run_queued_is_awaited(gpu):
    """Work that is still queued may read memory that the next step reuses."""

    def lacking():
        raise torch.OutOfMemoryError("lacking")

    with pytest.raises(torch.OutOfMemoryError):
        CUDA.record(lacking)
    assert gpu.current.waited_for == [_aside(0)]
