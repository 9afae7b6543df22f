"""Tests for names of devices with and without an index."""

import pytest
import torch

from mindie_mm.device import open_device
from mindie_mm.device.cuda import CUDA
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import load_model
from mindie_mm.nn.placement import Placement
from mindie_mm.settings.config import EngineConfig


def test_an_index_selects_one_of_the_visible_devices(monkeypatch):
    monkeypatch.setattr(CUDA, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert open_device("cuda:1").torch_device == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match=r"there is no device cuda:2; the visible devices are cuda:0, cuda:1$"):
        open_device("cuda:2")
    assert open_device("cpu:0").torch_device == torch.device("cpu")


def test_an_index_of_a_device_that_cannot_be_used_gives_the_reason(monkeypatch):
    monkeypatch.setattr(CUDA, "missing", lambda: "no driver")
    with pytest.raises(DeviceError, match="the device cuda:1 cannot be used: no driver"):
        open_device("cuda:1")


def test_auto_says_once_why_an_installed_accelerator_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(CUDA, "may_exist", lambda: True)
    monkeypatch.setattr(CUDA, "missing", lambda: "the driver of this test is too old")
    for _ in range(2):
        assert open_device("auto").name != "cuda"
    assert caplog.messages.count("the device cuda is not used: the driver of this test is too old") == 1


@pytest.mark.parametrize(
    "name", ["gpu", "gpu:1", "CPU", "cpu:", "cpu:00", "cpu:-1", "cpu:x", "cpu:0 ", "auto:0", "", "cpu:12345"]
)
def test_a_wrong_name_is_refused(name):
    with pytest.raises(InputError, match=f"device='{name}' must be one of auto, npu, cuda, cpu, or a name with"):
        open_device(name)


def test_a_missing_device_of_a_part_is_reported_before_weights_are_read(random_checkpoint):
    for parts in ({"vision": Placement("cpu:1")}, {"projector": Placement("cpu:1")}):
        with pytest.raises(DeviceError, match="there is no device cpu:1"):
            load_model(random_checkpoint, "cpu", **parts)


def test_one_device_cannot_be_divided_among_ranks():
    assert EngineConfig(device="npu:1", tensor_parallel=1).device == "npu:1"
    with pytest.raises(InputError, match="device is 'npu:1', which is one device, but tensor_parallel is 2"):
        EngineConfig(device="npu:1", tensor_parallel=2)
