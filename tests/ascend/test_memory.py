"""Tests for device memory and its limit, of pinned memory, and host memory that is registered for copies."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import Any

import pytest

from tests.ascend.counted import counted
from tests.ascend.environment import environment
from tests.ascend.processes import call, traced
from tests.ascend.test_runtime import simulator

_MIB = 2**20
_SPARE = 4096  # torch_npu adds 32 bytes to each allocation and rounds it up, to multiples of 2 MiB if it is large
_MAPPED, _PINNED = 2, 0x10000000  # ACL_HOST_REG_MAPPED and ACL_HOST_REG_PINNED


def limits() -> dict:
    import torch
    import torch_npu  # noqa: F401

    torch.empty(1, device="npu:0")  # a device does not report its memory before it is opened
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    found = {"empty": torch.npu.mem_get_info()}
    first = torch.empty(100 * _MIB - _SPARE, dtype=torch.uint8, device="npu:0")
    found["after 100 MiB"] = torch.npu.mem_get_info()
    second = torch.empty(60 * _MIB - _SPARE, dtype=torch.uint8, device="npu:0")
    del second
    found["allocated"] = torch.npu.memory_allocated()
    found["peak"] = torch.npu.max_memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory. Tried to allocate 200.00 MiB"):
        torch.empty(200 * _MIB - _SPARE, dtype=torch.uint8, device="npu:0")
    other = torch.ones((200 * _MIB - _SPARE) // 4).to("npu:1")  # each device has its own memory
    found["other"] = float(other.cpu().sum())
    found["other used"] = simulator().sim_memory_used(1)
    torch.npu.reset_peak_memory_stats()
    found["peak anew"] = torch.npu.max_memory_allocated()
    del first
    torch.npu.empty_cache()
    found["at the end"] = torch.npu.mem_get_info()
    third = torch.empty(200 * _MIB - _SPARE, dtype=torch.uint8, device="npu:0")
    found["peak of the device"] = simulator().sim_memory_peak(0)
    del third
    return found


def test_device_memory_has_a_limit():
    total = 256 * _MIB
    assert call(limits, devices=2, memory_bytes=total) == {
        "empty": (total, total),
        "after 100 MiB": (total - 100 * _MIB, total),
        "allocated": pytest.approx(100 * _MIB, abs=_SPARE),
        "peak": pytest.approx(160 * _MIB, abs=2 * _SPARE),
        "other": (200 * _MIB - _SPARE) // 4,
        "other used": 200 * _MIB,
        "peak anew": pytest.approx(100 * _MIB, abs=_SPARE),
        "at the end": (total, total),
        "peak of the device": 200 * _MIB,
    }


def fresh() -> list[bool]:
    import torch
    import torch_npu  # noqa: F401

    return [bool(torch.empty(5 * _MIB, device="npu").cpu().isnan().all()) for _ in range(2)]


def test_fresh_memory_is_poisoned():
    assert call(fresh) == [True, True]
    assert call(fresh, poison_bytes=0) == [False, False]


def expandable() -> dict:
    import torch
    import torch_npu  # noqa: F401

    held = [torch.full((30 * _MIB // 4,), float(number)).to("npu") for number in range(4)]
    found = {"values": [float(tensor.cpu()[-1]) for tensor in held], "allocated": torch.npu.memory_allocated()}
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * _MIB, dtype=torch.uint8, device="npu:0")
    held.clear()
    torch.npu.empty_cache()
    found["free"] = torch.npu.mem_get_info()[0]
    return found


def test_expandable_segments_are_mapped_and_freed(tmp_path):
    settings = {"memory_bytes": 256 * _MIB, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    found = call(expandable, trace=tmp_path / "trace", **settings)
    assert found["values"] == [0.0, 1.0, 2.0, 3.0]
    assert found["allocated"] == pytest.approx(120 * _MIB, abs=_SPARE)
    assert found["free"] == 256 * _MIB
    assert any(line.startswith("aclrtMapMem ") for line in traced(tmp_path / "trace"))


def opened() -> float:
    import torch

    from mindie_mm.device import open_device

    return float(torch.ones(3, device=open_device("npu").torch_device).sum().cpu())


@pytest.mark.parametrize(
    ("configured", "mapped"),
    [({}, True), ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:512"}, False), ({"PYTORCH_ALLOC_CONF": ""}, False)],
    ids=["default", "by the user", "by the user, for each device"],
)
def test_segments_are_expandable_unless_the_user_configures_the_allocator(tmp_path, configured, mapped):
    assert call(opened, trace=tmp_path / "trace", **configured) == 3.0
    assert any(line.startswith("aclrtMapMem ") for line in traced(tmp_path / "trace")) == mapped


def pinned() -> dict:
    import torch
    import torch_npu  # noqa: F401

    source = torch.arange(1000)
    held = source.pin_memory()
    sim = simulator()
    copied = held.to("npu", non_blocking=True)
    return {
        "is pinned": [source.is_pinned(), held.is_pinned()],
        "calls": sim.sim_calls(b"aclrtMallocHost"),
        "same": bool((copied.cpu() == source).all()),
        "device memory": sim.sim_memory_used(0),
    }


def test_pinned_memory_is_host_memory():
    found = call(pinned)
    assert found == {"is pinned": [False, True], "calls": 1, "same": True, "device memory": 2 * _MIB}


def registration() -> dict:
    import torch
    import torch_npu  # noqa: F401

    runtime = torch.npu.npurt()
    size = 4 * _MIB
    memory = mmap.mmap(-1, size)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    host[:] = 7
    start = host.data_ptr()
    codes = {
        "registered": runtime.npuHostRegister(start, size, _MAPPED),
        "twice": runtime.npuHostRegister(start, 4096, _MAPPED),
        "unaligned": runtime.npuHostRegister(start + 16, 4096, _MAPPED),
        "null": runtime.npuHostRegister(0, 4096, _MAPPED),
    }
    device = torch.empty(size, dtype=torch.uint8, device="npu")
    sim = simulator()
    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpyAsync.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    stream = torch.npu.current_stream().npu_stream
    sim.sim_syncs_reset()
    codes["copy"] = library.aclrtMemcpyAsync(device.data_ptr(), size, start, size, 1, stream)
    codes["syncs"] = sim.sim_syncs()
    codes["equal"] = bool((device.cpu() == 7).all())
    codes["unregistered"] = runtime.npuHostUnregister(start)
    codes["unregistered twice"] = runtime.npuHostUnregister(start)
    del host
    memory.close()
    codes["unmapped"] = runtime.npuHostRegister(start, size, _MAPPED)
    return codes


def test_host_memory_is_registered_with_canns_codes():
    assert call(registration) == {
        "registered": 0,
        "twice": 507910,
        "unaligned": 507899,
        "null": 100000,
        "copy": 0,
        "syncs": 0,
        "equal": True,
        "unregistered": 0,
        "unregistered twice": 507911,
        "unmapped": 507899,
    }


def raw_copies() -> dict:
    import torch
    import torch_npu  # noqa: F401

    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpy.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
    device = torch.ones(4).to("npu")
    host = torch.zeros(4)

    def copy(room, kind, target=host, source=device):
        return library.aclrtMemcpy(target.data_ptr(), room, source.data_ptr(), 16, kind)

    codes = {"too small": copy(15, 2), "wrong kind": copy(16, 1), "good": copy(16, 2)}
    codes["came"] = host.tolist()
    codes["wrong place"] = copy(16, 3)
    return codes


def test_copies_with_wrong_arguments_fail():
    assert call(raw_copies) == {
        "too small": 107000,
        "wrong kind": 107000,
        "good": 0,
        "came": [1.0] * 4,
        "wrong place": 107000,
    }


def exhausted() -> str:
    import torch
    import torch_npu  # noqa: F401

    torch.empty(_MIB, device="npu")
    try:
        torch.empty(64 * _MIB, device="npu")
    except torch.OutOfMemoryError as error:
        return str(error)
    return "no error"


def test_memory_runs_out_on_demand():
    assert "NPU out of memory" in call(exhausted, fail="aclrtMallocAlign32=207001@2+,aclrtMalloc=207001@2+")


def queued_copies() -> dict:
    """Return the codes of queued copies, and how many of them waited."""
    import torch
    import torch_npu  # noqa: F401

    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpyAsync.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    device = torch.zeros(512, dtype=torch.uint8).to("npu")
    pinned = torch.ones(512, dtype=torch.uint8).pin_memory()
    memory = mmap.mmap(-1, 4096)
    pageable = torch.frombuffer(memory, dtype=torch.uint8)
    pageable[:] = 3
    stream = torch.npu.current_stream().npu_stream

    def copy(source, target):
        return library.aclrtMemcpyAsync(target.data_ptr(), 64, source.data_ptr(), 64, 1, stream)

    codes = {
        "source with an offset": copy(pinned[32:], device),
        "target with an offset": copy(pinned, device[1:]),
        "aligned": copy(pinned[64:], device[128:]),
    }
    with counted() as counts:
        codes["pageable"] = copy(pageable, device)
        pageable[:] = 5  # the copy has already read its source
    codes["waits"] = counts.syncs, counts.pageable_copies
    codes["values"] = device.cpu()[:64].unique().tolist()
    return codes


def test_queued_copies_need_aligned_addresses_and_wait_for_pageable_memory():
    assert call(queued_copies) == {
        "source with an offset": 107000,
        "target with an offset": 107000,
        "aligned": 0,
        "pageable": 0,
        "waits": (1, 1),
        "values": [3],
    }


def registered(flags: int, offset: int, size: int) -> int:
    """Return CANN's code for registering a part of memory that begins at a multiple of 64 KiB."""
    import torch
    import torch_npu  # noqa: F401

    memory = mmap.mmap(-1, 2**20)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    start = -(-host.data_ptr() // 2**16) * 2**16
    code: int = torch.npu.npurt().npuHostRegister(start + offset, size, flags)
    return code


@pytest.mark.parametrize(
    ("settings", "flags", "offset", "size", "code"),
    [
        ({}, _MAPPED, 4096, 4096, 0),
        ({}, _MAPPED, 0, 5000, 507899),
        ({}, _PINNED, 100, 5000, 0),
        ({"page_bytes": 2**16}, _MAPPED, 2**16, 2**16, 0),
        ({"page_bytes": 2**16}, _MAPPED, 4096, 2**16, 507899),
        ({"page_bytes": 2**16}, _MAPPED, 0, 4096, 507899),
        ({"register_bytes": 8192}, _MAPPED, 0, 8192, 0),
        ({"register_bytes": 8192}, _MAPPED, 0, 12288, 207001),
        ({"soc": "Ascend910_9392"}, _MAPPED, 0, 4096, 0),
        ({"soc": "Ascend310P3"}, _MAPPED, 0, 4096, 207000),
    ],
)
def test_registration_depends_on_flags_pages_quota_and_product(settings, flags, offset, size, code):
    assert call(registered, flags, offset, size, **settings) == code


def foreign_copy(unregisters: bool) -> str | int:
    """Copy registered memory with torch_npu. Return how often this waits, or the error of the device."""
    import torch
    import torch_npu  # noqa: F401

    memory = mmap.mmap(-1, 4096)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    device = torch.zeros(4096, dtype=torch.uint8).to("npu")
    assert not torch.npu.npurt().npuHostRegister(host.data_ptr(), 4096, _MAPPED)
    with counted() as counts:
        device.copy_(host, non_blocking=True)
    if unregisters:
        assert not torch.npu.npurt().npuHostUnregister(host.data_ptr())
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return "507013" if "507013" in str(error) else str(error)
    return counts.syncs


@pytest.mark.parametrize(
    ("settings", "unregisters", "found"),
    [
        ({}, False, 0),
        ({}, True, "507013"),
        ({"driver": "25.2.3"}, False, 1),
        ({"cann": "8.3.0"}, False, 1),
        ({"kernel": "5.10.0-136.oe2203"}, False, "507013"),
        ({"kernel": "5.15.0-91-generic"}, False, 0),
    ],
)
def test_copies_of_registered_memory_depend_on_driver_cann_and_kernel(settings, unregisters, found):
    assert call(foreign_copy, unregisters, **settings) == found


def test_a_cann_without_registration_is_an_error_of_torch_npu():
    script = "import torch, torch_npu; torch.npu.npurt().npuHostRegister(4096, 4096, 2)"
    command = [sys.executable, "-c", script]  # a new process, because others have loaded the libraries
    variables = environment(without="aclrtHostRegisterV2")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert "aclrtHostRegisterV2" in done.stderr
    assert "RuntimeError" in done.stderr


def reused() -> list[Any]:
    """Read memory that a tensor has freed: in a new tensor, and by its address."""
    import torch
    import torch_npu  # noqa: F401

    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpy.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
    ones, landing = torch.ones(1000, device="npu"), torch.zeros(1000)
    torch.npu.synchronize()
    address = ones.data_ptr()
    del ones
    code = library.aclrtMemcpy(landing.data_ptr(), landing.nbytes, address, landing.nbytes, 2)
    return [bool(torch.empty(1000, device="npu").cpu().isnan().all()), code]


def test_freed_and_new_memory_shows_without_the_caching_allocator():
    assert call(reused) == [False, 0]
    assert call(reused, PYTORCH_NO_NPU_MEMORY_CACHING=1) == [True, 107000]
