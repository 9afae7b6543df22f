"""Tests for the order of streams and events. Queued work runs when something waits for it, and not earlier."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.ascend.processes import call
from tests.ascend.test_runtime import simulator


def queued_copies() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {}
    stream = torch.npu.Stream()
    source = torch.arange(4.0).pin_memory()
    landing = torch.full((4,), -1.0).pin_memory()
    with torch.npu.stream(stream):
        on_device = source.to("npu", non_blocking=True)
        landing.copy_(on_device, non_blocking=True)
    found["before"] = landing.tolist()
    stream.synchronize()
    found["after"] = landing.tolist()

    with torch.npu.stream(stream):
        on_device.copy_(source, non_blocking=True)
    source.fill_(9.0)  # this write comes too early, because the queued copy reads its source only when it runs
    stream.synchronize()
    found["rewritten source"] = on_device.cpu().tolist()
    return found


def test_a_queued_copy_runs_when_its_stream_is_synchronized():
    assert call(queued_copies) == {
        "before": [-1.0] * 4,
        "after": [0.0, 1.0, 2.0, 3.0],
        "rewritten source": [9.0] * 4,
    }


def waits() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {}
    first, second = torch.npu.Stream(), torch.npu.Stream()
    source = torch.arange(4.0).pin_memory()
    on_device = torch.zeros(4).to("npu")
    met = torch.full((4,), -1.0).pin_memory()
    torch.npu.synchronize()

    with torch.npu.stream(first):
        on_device.copy_(source, non_blocking=True)
        event = torch.npu.Event()
        event.record()
    with torch.npu.stream(second):
        second.wait_event(event)
        met.copy_(on_device, non_blocking=True)
    second.synchronize()
    found["met"] = met.tolist()
    found["event"] = event.query()
    return found


def test_a_stream_waits_for_an_event():
    assert call(waits) == {"met": [0.0, 1.0, 2.0, 3.0], "event": True}


def events() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {}
    stream = torch.npu.Stream()
    source = torch.ones(4).pin_memory()
    start, stop, other = (torch.npu.Event(enable_timing=True) for _ in range(3))
    found["never recorded"] = start.query()
    with torch.npu.stream(stream):
        start.record()
        source.to("npu", non_blocking=True)
        source.to("npu", non_blocking=True)
        stop.record()
    with pytest.raises(RuntimeError):
        start.elapsed_time(other)
    polls = 0
    while not stop.query():
        polls += 1
    found["polls"] = polls  # each query runs one queued task: the first record and two copies
    found["elapsed"] = 0 <= start.elapsed_time(stop) < 60000
    stop.record(stream)
    found["recorded anew"] = stop.query()
    stream.synchronize()
    found["stream"] = stream.query()
    return found


def test_events_are_reached_in_order():
    assert call(events) == {
        "never recorded": True,
        "polls": 3,
        "elapsed": True,
        "recorded anew": True,  # the queue is empty, so the first query reaches the record
        "stream": True,
    }


def own_exports() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {}
    sim = simulator()
    sim.sim_syncs_reset()
    stream, other = torch.npu.Stream(), torch.npu.Stream()
    on_device = torch.zeros(4, dtype=torch.uint8).to("npu")
    landing = torch.zeros(4, dtype=torch.uint8).pin_memory()
    torch.npu.synchronize()
    sim.sim_syncs_reset()

    found["queued"] = sim.sim_enqueue_write(stream.npu_stream, on_device.data_ptr(), b"\1\2\3\4", 4)
    event = stream.record_event()
    other.wait_event(event)
    with torch.npu.stream(other):
        landing.copy_(on_device, non_blocking=True)
    found["before"] = landing.tolist()
    found["drained"] = sim.sim_drain(other.npu_stream)
    found["after"] = landing.tolist()
    found["syncs"] = sim.sim_syncs()
    return found


def test_a_stream_is_drained_even_if_the_host_does_not_wait():
    assert call(own_exports) == {
        "queued": 0,
        "before": [0] * 4,
        "drained": 0,
        "after": [1, 2, 3, 4],
        "syncs": 0,
    }


def freed_source() -> str:
    import mmap

    import torch
    import torch_npu  # noqa: F401

    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpyAsync.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    memory = mmap.mmap(-1, 4096)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    assert not torch.npu.npurt().npuHostRegister(host.data_ptr(), 4096, 2)
    on_device = torch.zeros(4096, dtype=torch.uint8).to("npu")
    stream = torch.npu.Stream()
    assert not library.aclrtMemcpyAsync(on_device.data_ptr(), 4096, host.data_ptr(), 4096, 1, stream.npu_stream)
    assert not torch.npu.npurt().npuHostUnregister(host.data_ptr())
    del host
    memory.close()
    try:
        stream.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_copy_from_freed_memory_is_an_error_of_the_stream():
    message = call(freed_source)
    assert "507013" in message
    assert "freed before a copy of them had run" in message


def foreign_stream() -> list[int]:
    import torch
    import torch_npu  # noqa: F401

    library = ctypes.CDLL("libascendcl.so")
    library.aclrtSynchronizeStream.argtypes = [ctypes.c_void_p]
    stream = torch.npu.Stream("npu:1")
    codes = []
    for device in (0, 1):
        torch.npu.set_device(device)
        codes.append(library.aclrtSynchronizeStream(stream.npu_stream))
    return codes


def test_a_stream_belongs_to_its_device():
    assert call(foreign_stream, devices=2) == [107003, 0]


def threads() -> list[float]:
    import torch
    import torch_npu  # noqa: F401

    sums = [0.0] * 4

    def work(number):
        stream = torch.npu.Stream()
        landing = torch.zeros(64).pin_memory()
        with torch.npu.stream(stream):
            for turn in range(50):
                source = torch.full((64,), float(number + turn)).pin_memory()
                landing.copy_(source.to("npu", non_blocking=True), non_blocking=True)
                stream.synchronize()
                sums[number] += float(landing[0]) - turn

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sums


def test_threads_may_use_their_own_streams():
    assert call(threads) == [0.0, 50.0, 100.0, 150.0]


def races() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {}
    first, second = torch.npu.Stream(), torch.npu.Stream()
    source = torch.arange(4.0).pin_memory()
    landing = torch.full((4,), -1.0).pin_memory()
    on_device = torch.zeros(4).to("npu")

    def attempt(name, stream, function):
        with torch.npu.stream(stream):
            try:
                function()
                found[name] = "done"
            except RuntimeError as error:
                text = str(error)
                found[name] = text[text.index("race") :].split("0x", maxsplit=1)[0] if "race" in text else text

    def bring():
        on_device.copy_(source, non_blocking=True)

    def fetch():
        landing.copy_(on_device, non_blocking=True)

    attempt("write", first, bring)
    attempt("read by another stream", second, fetch)
    attempt("read by the host", second, on_device.cpu)
    event = first.record_event()
    attempt("read after the event was recorded", second, fetch)
    second.wait_event(event)
    attempt("read after a wait", second, fetch)
    attempt("write while it is read", first, bring)
    first.wait_stream(second)
    attempt("write after a wait", first, bring)
    attempt("read on the same stream", first, fetch)
    first.synchronize()
    attempt("read after the host has waited", second, fetch)
    attempt("host after the host has waited", second, on_device.cpu)
    found["value"] = landing.tolist()
    return found


def test_unordered_use_of_memory_is_an_error():
    found = call(races)
    raced = {name: message for name, message in found.items() if str(message).startswith("race")}
    assert list(raced) == [
        "read by another stream",
        "read by the host",
        "read after the event was recorded",
        "write while it is read",
    ]
    assert " reads " in raced["read by another stream"]
    assert raced["read by the host"].startswith("race: stream -1 reads")
    assert " writes " in raced["write while it is read"]
    assert [message for name, message in found.items() if name not in raced] == ["done"] * 6 + [[0.0, 1.0, 2.0, 3.0]]


def operators_race() -> list[int]:
    import torch
    import torch_npu  # noqa: F401

    sim = simulator()
    sim.sim_reads.argtypes = sim.sim_writes.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memory = torch.zeros(1024, dtype=torch.uint8).to("npu")
    start = memory.data_ptr()
    torch.npu.synchronize()
    first, second = (torch.npu.Stream() for _ in range(2))
    one, other = first.npu_stream, second.npu_stream
    codes = [
        sim.sim_writes(one, start + 100, 100),
        sim.sim_reads(other, start, 100),
        sim.sim_reads(other, start + 200, 100),
        sim.sim_reads(other, start + 150, 1),
        sim.sim_reads(one, start, 1024),
    ]
    event = first.record_event()
    codes.append(sim.sim_writes(one, start + 300, 1))
    second.wait_event(event)
    codes += [sim.sim_reads(other, start, 300), sim.sim_reads(other, start, 301)]
    return codes


def test_operators_report_the_memory_that_they_use():
    race = 107003
    assert call(operators_race) == [0, 0, 0, race, 0, 0, 0, race]
    assert call(operators_race, races=0) == [0] * 8


def results_beside_another_thread() -> int:
    import torch
    import torch_npu  # noqa: F401

    ended = threading.Event()

    def synchronise() -> None:
        torch.npu.set_device(0)
        while not ended.is_set():
            torch.npu.current_stream().synchronize()

    ones = torch.ones(64, device="npu")
    thread = threading.Thread(target=synchronise)
    thread.start()
    wrong = sum((ones + number).cpu().tolist() != [1.0 + number] * 64 for number in range(2000))
    ended.set()
    thread.join()
    return wrong


def test_results_are_correct_while_another_thread_synchronizes():
    assert call(results_beside_another_thread) == 0
