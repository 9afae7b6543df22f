"""Tests for modules that are imported when code first uses one of their names."""

import subprocess
import sys
from textwrap import dedent

import pytest

START = """
import sys
from mindie_mm.processes.late_modules import import_late
import_late()
"""
FORK_SERVER = """
from mindie_mm.worker import preloading
assert "cpu" in preloading.prepare("", "")
assert "transformers.modeling_utils" in sys.modules
slow = {"accelerate.accelerator", "scipy.linalg", "sympy", "torch._dynamo.config", "torch.distributed.tensor._api"}
assert not slow & {*sys.modules}, slow & {*sys.modules}

import torch
from torch.distributed.tensor import DTensor, Shard
def annotated(tensor: DTensor | None) -> "int | DTensor": ...
assert not isinstance(torch.ones(1), DTensor)
assert "sympy" not in sys.modules
assert isinstance(Shard(1), Shard) and Shard(1).dim == 1
assert "sympy" in sys.modules

from accelerate.hooks import AlignDevicesHook
class Hook(AlignDevicesHook):
    pass
assert "accelerate.accelerator" in sys.modules
assert issubclass(Hook, AlignDevicesHook) and isinstance(Hook(), AlignDevicesHook)
assert Hook.__mro__[1].__module__ == "accelerate.hooks"
"""
USES = {
    "a call": """
        from scipy.optimize import linear_sum_assignment
        assert "scipy.linalg" not in sys.modules
        assert linear_sum_assignment([[4, 1], [2, 0]])[1].tolist() == [1, 0]
    """,
    "a name that is not listed": """
        import scipy
        assert scipy.linalg.norm([3.0, 4.0]) == 5
    """,
    "a module that is not listed": """
        import scipy.fft
        assert scipy.fft.fft([1.0]) == [1]
        assert scipy.optimize.linear_sum_assignment([[1]])[0] == [0]
    """,
    "an assignment": """
        import scipy
        scipy.ours = 1
        assert sys.modules["scipy"].ours == 1 and scipy.linalg.norm([3.0, 4.0]) == 5
    """,
}


NAMES = """
from transformers.utils import import_utils
read = import_utils.create_import_structure_from_path
misses = read.cache_info().misses
import transformers.models
assert read.cache_info().misses == misses > 400
path = transformers.models.__file__
found = import_utils.define_import_structure(path)
read.cache_clear()
assert found == import_utils.define_import_structure.__wrapped__(path)
"""


def run(code):
    subprocess.run([sys.executable, "-c", START + dedent(code)], check=True, timeout=120)


def test_the_fork_server_does_not_import_what_only_training_and_distributed_models_need():
    run(FORK_SERVER)


@pytest.mark.parametrize("use", USES)
def test_a_late_module_is_imported_by(use):
    run(USES[use])


def test_a_module_that_is_not_installed_is_not_found():
    run("""
        import importlib.util
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
        assert importlib.util.find_spec("scipy") is None
    """)


def test_the_names_of_all_models_are_read_once():
    run(NAMES)
