"""Tests for devices and calls: devices that torch_npu finds, counters, traces and injected failures."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.ascend.cann.build import build
from tests.ascend.environment import environment
from tests.ascend.processes import call, needs, traced


def simulator() -> ctypes.CDLL:
    """Load the simulator's library of this process, and declare its functions."""
    library = ctypes.CDLL("libhccl.so")
    library.sim_syncs.restype = library.sim_calls.restype = ctypes.c_long
    library.sim_calls.argtypes = library.sim_fail.argtypes = [ctypes.c_char_p]
    library.sim_memory_used.restype = library.sim_memory_peak.restype = ctypes.c_size_t
    library.sim_drain.argtypes = [ctypes.c_void_p]
    library.sim_enqueue_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    return library


def devices() -> dict:
    import torch
    import torch_npu  # noqa: F401

    found = {"count": torch.npu.device_count(), "name": torch.npu.get_device_name(), "current": []}
    tensors = []
    for device in range(torch.npu.device_count()):
        torch.npu.set_device(device)
        tensors.append(torch.full((3,), float(device)).to(f"npu:{device}"))
        found["current"].append(torch.npu.current_device())
    found["values"] = [tensor.cpu().tolist() for tensor in tensors]
    found["bf16"] = torch.npu.is_bf16_supported()
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.append(tensors[-1].cpu().tolist()))
    thread.start()
    thread.join()
    found["in_thread"] = in_thread
    with pytest.raises(RuntimeError, match=r"107001|nvalid device"):
        torch.npu.set_device(torch.npu.device_count())
    return found


@pytest.mark.parametrize("count", [1, 8])
def test_torch_npu_finds_the_devices(count):
    found = call(devices, devices=count, soc="Ascend910B2")
    assert found["count"] == count
    assert found["name"] == "Ascend910B2"
    assert found["bf16"] is True
    assert found["current"] == list(range(count))
    assert found["values"] == [[float(device)] * 3 for device in range(count)]
    assert found["in_thread"] == [[float(count - 1)] * 3]


@pytest.mark.parametrize(("visible", "count"), [("3,1", 2), ("0,9,1", 1), ("", 0)])
def test_visible_devices_are_limited_by_their_variable(visible, count):
    assert call(no_device, devices=4, ASCEND_RT_VISIBLE_DEVICES=visible) == [count > 0, count]


def no_device() -> list:
    import torch
    import torch_npu  # noqa: F401

    return [torch.npu.is_available(), torch.npu.device_count()]


def test_a_process_may_have_no_device():
    assert call(no_device, devices=0) == [False, 0]


def test_a_bad_setting_stops_the_process():
    with pytest.raises(AssertionError, match="ASCEND_SIM_DEVICES=9: a whole number from 0 to 8 is wanted"):
        call(no_device, devices=9)


def synchronisations() -> dict:
    import torch
    import torch_npu  # noqa: F401

    sim = simulator()
    source = torch.arange(8.0)
    pinned = source.pin_memory()
    stream = torch.npu.Stream()
    event = torch.npu.Event()
    on_device = source.to("npu")
    element = on_device[3]
    landing = torch.empty(8).pin_memory()
    counted = {}

    def count(name, function):
        sim.sim_syncs_reset()
        function()
        counted[name] = sim.sim_syncs()

    count("to the device", lambda: source.to("npu"))
    count("to the device, pinned", lambda: pinned.to("npu", non_blocking=True))
    count("to the host", on_device.cpu)
    count("to the host, pinned", lambda: landing.copy_(on_device, non_blocking=True))
    count("item", element.item)
    count("record", lambda: event.record(stream))
    count("wait", lambda: stream.wait_event(event))
    count("query", event.query)
    count("event", event.synchronize)
    count("stream", stream.synchronize)
    count("device", torch.npu.synchronize)
    counted["calls"] = sim.sim_calls(b"aclrtSynchronizeEvent")
    counted["no calls"] = sim.sim_calls(b"aclrtNothing")
    return counted


def test_every_wait_of_the_host_is_counted():
    assert call(synchronisations) == {
        "to the device": 1,
        "to the device, pinned": 0,
        "to the host": 1,
        "to the host, pinned": 0,
        "item": 1,
        "record": 0,
        "wait": 0,
        "query": 0,
        "event": 1,
        "stream": 1,
        "device": 1,
        "calls": 1,
        "no calls": 0,
    }


def one_copy() -> None:
    import torch
    import torch_npu  # noqa: F401

    torch.arange(5.0).to("npu:1")


def test_calls_are_traced(tmp_path):
    call(one_copy, devices=2, trace=tmp_path / "trace")
    calls = traced(tmp_path / "trace")
    assert calls[0].startswith("aclInit path=")
    copies = [line for line in calls if line.startswith("aclrtMemcpy ")]
    assert len(copies) == 1
    assert copies[0].endswith("n=20 kind=1")
    assert any(line.startswith("aclrtSetDevice device=1") for line in calls)


def failures() -> list[str]:
    import torch
    import torch_npu  # noqa: F401

    errors = []

    def attempt(function):
        try:
            function()
            errors.append("done")
        except RuntimeError as error:
            errors.append("507033" if "507033" in str(error) else str(error))

    attempt(lambda: torch.npu.set_device(1))
    attempt(lambda: torch.npu.set_device(1))
    sim = simulator()
    tensor = torch.ones(2).to("npu:1")
    sim.sim_fail(b"aclrtMemcpy=507033,aclrtSynchronizeEvent=1")
    attempt(tensor.cpu)
    sim.sim_fail(b"")
    attempt(tensor.cpu)
    return errors


def test_calls_fail_on_demand():
    errors = call(failures, devices=2, fail="aclrtSetDevice=507033@1,aclrtNothing=5")
    assert errors == ["507033", "done", "507033", "done"]


@pytest.mark.slow
def test_the_version_of_cann_is_the_configured_one():
    script = "import torch, torch_npu; print(torch.npu.utils.get_cann_version(), torch.npu.utilization())"
    command = [sys.executable, "-c", script]  # a new process, because torch_npu reads the version when it is imported
    done = subprocess.run(
        command, env=environment(cann="8.5.0"), capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["8.5.0", "0"]


def first_tensor() -> str:
    import torch
    import torch_npu  # noqa: F401

    with pytest.raises(RuntimeError) as raised:
        torch.ones(1).to("npu")
    return str(raised.value)


def test_an_injected_failure_has_a_message():
    errors = call(first_tensor, fail="aclrtSetDevice=507033")
    assert "error code is 507033" in errors
    assert "aclrtSetDevice: failure injected" in errors


def unknown() -> list[str]:
    import torch
    import torch_npu  # noqa: F401

    torch.npu.current_stream().synchronize()  # this also calls functions that succeed without an effect
    errors = []
    for function in (lambda: torch.npu.get_device_limit(0), lambda: torch.npu.set_device_limit(0, 8, 8)):
        try:
            function()
            errors.append("no error")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@needs("2.13.0", "this torch_npu calls other functions")
def test_a_function_of_cann_that_is_not_simulated_fails():
    assert all("is not simulated" in error for error in call(unknown))


def test_a_build_is_reused():
    folder = build()
    before = (folder / "libhccl.so").stat().st_mtime_ns
    assert build() == folder
    assert (folder / "libhccl.so").stat().st_mtime_ns == before
    assert not list(Path(folder).parent.glob("tmp*"))
