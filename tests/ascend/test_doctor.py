"""Tests for doctor with NPUs that start or fail. System files come from a fixture, and the simulated CANN is used."""

import json
import os

import pytest
import torch

from mindie_mm.device.npu.doctor import findings
from tests.ascend.environment import environment
from tests.cli.ascend_tree import AscendTree
from tests.cli.shell import run

AMISS = {"torch build"} if torch.version.cuda is not None else set()
"""Findings that are warnings here. Only the simulator can use a build of torch for CUDA."""


@pytest.fixture
def tree(tmp_path):
    """Return the system files of a healthy machine. The simulated CANN is at its real path."""
    tree = AscendTree(tmp_path)
    folder = environment()["ASCEND_HOME_PATH"]
    tree.at(folder).parent.mkdir(parents=True)
    tree.at(folder).symlink_to(folder)
    return tree


@pytest.fixture
def diagnose(tree, monkeypatch):
    """Return a function that returns doctor's findings about NPUs by subject. Its arguments configure the simulator."""

    def diagnose(**settings):
        for name, value in environment(PATH=f"{tree.at('/bin')}:{os.environ['PATH']}", **settings).items():
            monkeypatch.setenv(name, value)
        return {one.subject: one for one in findings(tree.root)}

    return diagnose


def test_npus_that_start_are_ok(diagnose):
    found = diagnose(devices=2, memory_bytes=2**30)
    assert {one.status for subject, one in found.items() if subject not in AMISS} == {"ok"}
    assert found["npu runtime"].found == "2 x Ascend910B1, 1.0 of 1.0 GiB free on the first"
    assert found["torch and torch_npu"].status == "ok"


@pytest.mark.slow
def test_an_npu_whose_memory_other_processes_use_is_a_warning(diagnose):
    one = diagnose(memory_bytes=2**30, others_bytes=2**30 - 2**27)["npu runtime"]
    assert one.status == "warning"
    assert one.found == "1 x Ascend910B1, 0.1 of 1.0 GiB free on the first"
    assert "stop the processes that use it" in one.advice


@pytest.mark.slow
def test_problems_are_warnings_if_the_npus_start(diagnose, tree):
    tree.remove("/dev/hisi_hdc", "/etc/ld.so.conf.d/ascend_driver_so.conf")
    tree.npu_smi("dcmi module initialize failed. ret is -8005", status=1)
    found = diagnose()
    assert found["npu runtime"].status == "ok"
    amiss = {subject: one.status for subject, one in found.items() if one.status != "ok"}
    assert amiss == dict.fromkeys(("npu driver", "npu device files", "npu health"), "warning")


@pytest.mark.slow
def test_the_answer_is_found_among_canns_log_lines(diagnose):
    """CANN's log lines surround the answer, as with ASCEND_SLOG_PRINT_TO_STDOUT=1. Here, a trace prints the lines."""
    one = diagnose(memory_bytes=2**30, trace="/dev/stdout")["npu runtime"]
    assert (one.status, one.found) == ("ok", "1 x Ascend910B1, 1.0 of 1.0 GiB free on the first")


@pytest.mark.slow
def test_an_internal_error_of_the_driver_is_reported(diagnose):
    one = diagnose(fail="aclrtSetDevice=507899")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith("an internal error of the driver (507899, drvRet=87): RuntimeError: ")
    assert "error code is 507899" in one.found


def test_missing_operators_of_cann_are_reported(diagnose):
    """The simulated CANN has no operators: it allocates memory, but cannot compute."""
    one = diagnose(missing="aten::matmul")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith(
        "CANN's operators are not installed, or have another version: RuntimeError: aclnnMatmul or "
    )
    assert one.advice.startswith("install the ops package")


@pytest.mark.slow
def test_a_wrong_product_is_an_error(diagnose):
    one = diagnose(idle="aten::matmul")["npu runtime"]
    assert one.status == "error"
    assert (
        one.found
        == "the process that starts the NPU exited with status 1: the NPU computes wrong results: a sum of products "
        "is nan instead of 4096"
    )


@pytest.mark.slow
def test_an_unknown_error_is_shown_unchanged(diagnose):
    one = diagnose(fail="aclrtGetMemInfo=500000")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith("the process that starts the NPU exited with status 1: RuntimeError: GetDeviceMemories")


@pytest.mark.slow
def test_a_machine_without_visible_npus_is_an_error(diagnose):
    one = diagnose(fail="aclrtGetDeviceCount=507899")["npu runtime"]
    assert one.status == "error"
    assert one.found == "the process that starts the NPU exited with status 1: no NPU is visible; check npu-smi info"


@pytest.mark.slow
def test_a_missing_environment_of_cann_is_reported(tree, monkeypatch):
    """The finding contains torch_npu's own error message."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tree.at('/bin')}:{os.environ['PATH']}")
    found = {one.subject: one for one in findings(tree.root) if one.status != "ok"}
    assert found.keys() == {"npu runtime", "CANN"}
    assert found["npu runtime"].found.startswith("CANN's libraries are not on the loader's path")
    assert "libhccl.so" in found["npu runtime"].found
    assert found["CANN"].advice.startswith("source /usr/local/Ascend/cann/set_env.sh")


def doctor(tree, *arguments, status=0, **settings):
    """Run doctor as a user does, and return its findings by subject."""
    variables = environment(PATH=f"{tree.at('/bin')}:{os.environ['PATH']}", **settings)
    output = run("doctor", "--json", "--root", tree.root, *arguments, status=status, **variables)
    return {one["subject"]: one for one in json.loads(output)}


def test_doctor_reports_npus_that_start(tree):
    found = doctor(tree, memory_bytes=2**30)
    assert {one["status"] for subject, one in found.items() if subject not in AMISS} == {"ok"}
    assert found["device"]["found"].startswith("npu:0, 1.0 GiB free")


@pytest.mark.slow
def test_doctor_fails_if_the_chosen_npu_does_not_start(tree):
    found = doctor(tree, "--device", "npu", status=1, fail="aclrtSetDevice=507033")
    amiss = {subject: one["status"] for subject, one in found.items() if one["status"] != "ok"}
    assert amiss == {"npu runtime": "error", "device": "error"}
    assert found["npu runtime"]["found"].startswith("the NPU does not start (507033): RuntimeError: ")
    assert found["device"]["advice"] == "see the findings about npu below"
