import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from mindie_mm.device.cpu.weight_pages import drop_unused_pages
from tools.random_checkpoint import write_checkpoint

ELEMENTS = 2**21  # 8 MiB in float32


def resident_kib(path: Path) -> int:
    """Return how much of the mapped file `path` is in the memory of this process."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    return sum(int(kib) for kib in re.findall(rf" {re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.full((ELEMENTS,), float(value)) for value, name in enumerate(("used", "unused"))}, file)
    return file


def test_pages_that_no_parameter_needs_are_dropped(path: Path) -> None:
    with safe_open(path, "pt") as file:
        used, unused = file.get_tensor("used"), file.get_tensor("unused")
    module = nn.ParameterList([nn.Parameter(used, requires_grad=False)])
    assert used.sum() == 0
    assert unused.sum() == ELEMENTS
    assert resident_kib(path) >= 2 * 8192
    drop_unused_pages(module)
    assert 8192 <= resident_kib(path) < 8192 + 1024
    assert unused.sum() == ELEMENTS, "the tensor stays valid"
    assert used.sum() == 0


def test_a_file_with_changed_weights_keeps_them(path: Path) -> None:
    with safe_open(path, "pt") as file:
        used, unused = file.get_tensor("used"), file.get_tensor("unused")
    used.fill_(3)
    unused[0] = 5
    drop_unused_pages(nn.ParameterList([nn.Parameter(used, requires_grad=False)]))
    assert used.sum() == 3 * ELEMENTS
    assert unused.sum() == ELEMENTS + 4


def test_weights_in_layouts_without_an_address_are_skipped(path: Path) -> None:
    with safe_open(path, "pt") as file:
        used = file.get_tensor("used")
    module = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(512, 512))
    module[1].weight = nn.Parameter(torch.zeros(512, 512).to_mkldnn(), requires_grad=False)
    module[0].weight = nn.Parameter(used.view(1024, 2048), requires_grad=False)
    drop_unused_pages(module)
    assert 8192 <= resident_kib(path) < 8192 + 1024


LOAD = """
import json, re, sys
from pathlib import Path
from mindie_mm.models import load_model

path, weights = sys.argv[1:]
module = load_model(path, "cpu", weights=weights).module
[tensor.sum() for tensor in module.parameters() if tensor.is_floating_point() and not tensor.is_mkldnn]
rss = re.search(r"model.safetensors\\n(?:.*\\n)*?Rss: +(\\d+) kB", Path("/proc/self/smaps").read_text())
print(json.dumps(int(rss[1]) * 1024))
"""


@pytest.mark.parametrize("kernels", [pytest.param("onednn=no", marks=pytest.mark.slow), "onednn=yes"])
@pytest.mark.parametrize(("weights", "most"), [("auto", 0.62), pytest.param("int8", 0.4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_replaced_weights_of_a_model_are_not_resident(
    tmp_path: Path, weights: str, most: float, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", kernels)
    write_checkpoint(tmp_path, "mid")
    out = subprocess.run([sys.executable, "-c", LOAD, tmp_path, weights], check=True, capture_output=True, text=True)
    assert json.loads(out.stdout) < most * (tmp_path / "model.safetensors").stat().st_size
