"""Memory of the host that a device's driver registers, or refuses to.

On the CPU nothing is registered; the refusal of a true driver is met where `--device` names an accelerator.
"""

import mmap

import pytest
import torch

from mindie_mm.device import kind_of, open_device


@pytest.fixture
def kind(device):
    return kind_of(open_device(device).torch_device)


@pytest.fixture
def pages():
    return torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)


def test_a_refusal_is_said_and_harms_nothing_after_it(kind, pages):
    """Memory that is registered already: CUDA keeps the error of its refusal for whatever kernel comes next."""
    taken = kind.pin(pages.data_ptr(), pages.nbytes)
    assert taken or kind.name != "cuda"
    assert kind.pin(pages.data_ptr(), pages.nbytes) is False
    assert torch.arange(4, device=kind().torch_device).add(1).tolist() == [1, 2, 3, 4]
    if taken:
        kind.unpin(pages.data_ptr())
        assert kind.pin(pages.data_ptr(), pages.nbytes), "as if it had never been"
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
