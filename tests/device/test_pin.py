"""Tests for host memory that the device's driver registers, or refuses to register.

The CPU registers nothing. Run the tests with `--device` to let the driver of an accelerator refuse memory.
"""

import mmap
from types import SimpleNamespace

import pytest
import torch

from mindie_mm.device import kind_of, npu, open_device
from mindie_mm.device.cuda import CUDA
from mindie_mm.device.npu import NPU


@pytest.fixture
def kind(device):
    return kind_of(open_device(device).torch_device)


@pytest.fixture
def pages():
    return torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)


def test_a_refusal_is_reported_and_does_not_affect_later_work(kind, pages):
    """Memory is registered twice. CUDA would otherwise report the refusal as an error of the next kernel."""
    taken = kind.pin(pages.data_ptr(), pages.nbytes)
    assert taken or kind.name != "cuda"
    assert kind.pin(pages.data_ptr(), pages.nbytes) is False
    assert torch.arange(4, device=kind().torch_device).add(1).tolist() == [1, 2, 3, 4]
    if taken:
        kind.unpin(pages.data_ptr())
        assert kind.pin(pages.data_ptr(), pages.nbytes), "memory can be registered again after it was unregistered"
        kind.unpin(pages.data_ptr())


def test_registered_memory_is_read(kind, pages):
    pages.copy_(torch.arange(2**20) % 251)
    if not kind.pin(pages.data_ptr(), pages.nbytes):
        pytest.skip(f"{kind.name} registers no memory")
    try:
        stream = torch.Stream(kind().torch_device)
        target = kind.read(pages, stream)
        stream.synchronize()
        assert torch.equal(target.cpu(), pages)
    finally:
        kind.unpin(pages.data_ptr())


def lacking(*_, **__):
    """Raise the error of a CANN that lacks the function, or of a runtime that cannot be called."""
    raise RuntimeError("Failed to find function aclrtHostRegisterV2\n[ERROR] ...")


@pytest.mark.skipif(not hasattr(torch.Stream, "native_handle"), reason="torch lacks what copies from there take")
@pytest.mark.parametrize("lacks", [{"npuHostRegister": lacking}, {}, None], ids=["CANN", "the binding", "the runtime"])
def test_an_npu_refuses_if_cann_cannot_register_memory(pages, monkeypatch, caplog, lacks):
    runtime = lacking if lacks is None else lambda: SimpleNamespace(**lacks)
    monkeypatch.setattr(npu, "_npu", lambda: SimpleNamespace(npurt=runtime))
    monkeypatch.setattr(npu, "registers", lambda _: True)
    assert NPU.pin(pages.data_ptr(), pages.nbytes) is False
    (message,) = caplog.messages
    assert message.startswith("CANN cannot register host memory, so media are copied once more")
    assert "HostRegister" in message


def test_a_gpu_refuses_if_its_runtime_cannot_be_called(pages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lacking)
    monkeypatch.setattr(torch, "zeros", lacking)
    assert CUDA.pin(pages.data_ptr(), pages.nbytes) is False
