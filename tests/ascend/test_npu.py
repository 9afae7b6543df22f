"""Tests for `--device npu`: conditions under which the device can be used, and its properties."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindie_mm.device.npu import registers
from tests.ascend.environment import environment
from tests.ascend.processes import call, needs_registration


def opened() -> dict:
    import torch

    from mindie_mm.device import kind_of, open_device
    from mindie_mm.errors import DeviceError

    try:
        device = open_device("npu")
    except DeviceError as error:
        return {"error": str(error)}
    before = device.free_bytes()
    kept: list[torch.Tensor] = []
    found = {
        "device": str(device.torch_device),
        "auto": open_device("auto").name,
        "kind": kind_of(device.torch_device).name,
        "bfloat16": str(device.default_dtype(torch.bfloat16)),
        "float32": str(device.default_dtype(torch.float32)),
        "peak": device.peak_bytes(lambda: torch.empty(3 * 2**20, dtype=torch.uint8, device="npu"))(),
    }
    kept.append(torch.empty(2**28, dtype=torch.uint8, device="npu"))
    return found | {"taken": before - device.free_bytes()}


@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend910_9392"], ids=["A2", "A3"])
def test_an_npu_is_opened_and_measured(soc):
    found = call(opened, soc=soc)
    assert found["device"] == "npu:0"
    assert (found["auto"], found["kind"]) == ("npu", "npu")
    assert (found["bfloat16"], found["float32"]) == ("torch.bfloat16", "torch.float32")
    assert 3 * 2**20 <= found["peak"] < 32 * 2**20
    assert 2**28 <= found["taken"] < 2**28 + 32 * 2**20


def test_a_310p_is_refused_with_the_operators_that_it_lacks():
    found = call(opened, soc="Ascend310P3")
    assert found == {
        "error": "the device npu cannot be used: the NPU is an Ascend310P3, whose CANN lacks "
        "npu_fused_infer_attention_score, npu_fusion_attention, npu_scatter_pa_kv_cache and index_copy_; use an Atlas "
        "A2 or A3, or --device cpu"
    }


def test_an_npu_that_is_not_visible_is_refused():
    found = call(opened, fail="aclrtGetDeviceCount=507033")
    assert found == {"error": "the device npu cannot be used: no NPU is visible; check npu-smi info"}


@pytest.mark.parametrize(
    ("kernel", "does"),
    [
        ("5.10.0-136.12.0.86.oe2203.aarch64", False),
        ("4.19.90-52", False),
        ("5.15.0-91-generic", True),
        ("6.6.0", True),
        ("?", False),
    ],
)
def test_shared_memory_is_registered_only_on_kernels_that_cann_supports(kernel, does):
    assert registers(kernel) is does


def too_large() -> str:
    from mindie_mm.errors import DeviceError
    from mindie_mm.models import load_model

    try:
        load_model(None, "npu", "float32")
    except DeviceError as error:
        return str(error)
    return "loaded"


def test_weights_that_do_not_fit_raise_a_device_error():
    message = call(too_large, memory_bytes=4 * 2**20)
    assert "does not fit in the memory of npu:0: NPU out of memory" in message


def without_torch_npu() -> str:
    import sys

    from mindie_mm.device.npu import NPU

    sys.modules["torch_npu"] = None  # importing torch_npu fails, as if it were not installed
    return NPU.missing()


def test_the_error_says_that_torch_npu_is_missing():
    release = torch.__version__.partition("+")[0]
    assert call(without_torch_npu) == f"torch_npu is not installed: install CANN, then pip install torch_npu=={release}"


def test_the_error_says_that_cann_is_missing():
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_LIBRARY"))}
    variables["PYTHONPATH"] = str(Path.cwd())
    code = (
        "from mindie_mm.device import open_device\ntry:\n    open_device('npu')\nexcept Exception as e:\n    print(e)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=variables | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert answer.stdout.startswith("the device npu cannot be used: torch_npu cannot be imported (")
    assert "source CANN's set_env.sh first" in answer.stdout


def refused() -> list[bool]:
    import mmap

    import torch

    from mindie_mm.device import npu, open_device

    device = open_device("npu")
    source = torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)
    taken = [device.pin(source.data_ptr(), source.nbytes)]
    device.unpin(source.data_ptr())
    npu.registers = lambda _: False
    return [*taken, device.pin(source.data_ptr(), source.nbytes)]


@needs_registration
def test_memory_is_not_registered_on_an_unsupported_kernel():
    assert call(refused) == [True, False]


@needs_registration
def test_memory_is_not_registered_with_an_older_cann(tmp_path):
    """A new torch_npu may run on a CANN without aclrtHostRegisterV2. Copies then go through other host memory."""
    variables = environment()
    older = Path(shutil.copytree(variables["LD_LIBRARY_PATH"], tmp_path / "cann", symlinks=True))
    library = older / "libhccl.so"
    library.write_bytes(library.read_bytes().replace(b"aclrtHostRegisterV2", b"aclrtHostRegisterV0"))
    variables |= {"ASCEND_HOME_PATH": str(older), "LD_LIBRARY_PATH": str(older)}
    code = "import torch_npu\nfrom tests.ascend.test_npu import pinned\nprint(pinned())"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == "False"
    assert "CANN cannot register host memory" in answer.stderr
    assert call(pinned)


def pinned() -> bool:
    import mmap

    import torch

    from mindie_mm.device import open_device

    device = open_device("npu")
    pages = torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)
    taken = device.pin(pages.data_ptr(), pages.nbytes)
    assert torch.arange(4, device="npu").add(1).tolist() == [1, 2, 3, 4]
    return taken


def reading() -> str:
    """Return "copied" or the error of a copy from registered memory."""
    import mmap

    import torch

    from mindie_mm.device import open_device
    from mindie_mm.errors import DeviceError

    device = open_device("npu")
    pages = mmap.mmap(-1, 2**20)
    source = torch.frombuffer(pages, dtype=torch.uint8)
    assert device.pin(source.data_ptr(), source.nbytes)
    stream = torch.Stream(device.torch_device)
    try:
        device.read(source, stream)
        message = "copied"
    except DeviceError as error:
        message = str(error)
    stream.synchronize()
    device.unpin(source.data_ptr())
    return message


@needs_registration
def test_a_failed_copy_raises_a_device_error():
    assert call(reading) == "copied"
    message = call(reading, fail="aclrtMemcpyAsync=507899")
    assert message == "aclrtMemcpyAsync of 1048576 bytes to npu:0 failed with CANN error 507899"
