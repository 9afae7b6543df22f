"""Tests for the number of CPUs that the affinity mask and the cgroups allow."""

import os
import subprocess
import sys

import pytest

from mindie_mm.settings.cgroup import available_cpus

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def groups(tmp_path):
    """Return a folder like a mount of cgroups. This process is in /a/b (version 2) and in /c (version 1)."""
    (tmp_path / "own").write_text("4:cpu,cpuacct:/c\n3:memory:/d\n0::/a/b\n")
    for folder in ("a/b", "cpu/c", "cpu/d"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def count(groups):
    return available_cpus(groups, groups / "own")


def test_without_a_quota_the_affinity_mask_decides(groups):
    assert count(groups) == CPUS
    (groups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (groups / "cpu" / "c" / "cpu.cfs_quota_us").write_text("-1\n")
    (groups / "cpu" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    assert count(groups) == CPUS


@pytest.mark.parametrize(
    ("quota", "cpus"), [("100000", 1), ("20000", 1), ("150000", min(2, CPUS)), ("100000000", CPUS)]
)
def test_a_quota_is_rounded_up(groups, quota, cpus):
    (groups / "a" / "b" / "cpu.max").write_text(f"{quota} 100000\n")
    assert count(groups) == cpus


@pytest.mark.parametrize("folder", ["", "a"])
def test_a_quota_of_an_enclosing_group_counts(groups, folder):
    (groups / folder / "cpu.max").write_text("50000 100000\n")
    assert count(groups) == 1


def test_a_quota_of_version_1_counts(groups):
    (groups / "cpu" / "c" / "cpu.cfs_quota_us").write_text("100000\n")
    (groups / "cpu" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    assert count(groups) == 1


def test_the_quota_of_another_group_does_not_count(groups):
    (groups / "cpu" / "d" / "cpu.cfs_quota_us").write_text("100000\n")
    (groups / "cpu" / "d" / "cpu.cfs_period_us").write_text("100000\n")
    assert count(groups) == CPUS


def test_the_affinity_mask_sets_the_number_of_threads_unless_a_variable_does():
    script = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "import torch; usual = torch.get_num_threads()\n"
        "from mindie_mm.device import default_num_threads as threads\n"
        "print(threads() == 1); os.environ['OMP_NUM_THREADS'] = '2'; print(threads() == usual)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
