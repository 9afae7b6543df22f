"""doctor on a machine whose NPUs answer, or fail as they do: files by a fixture, the runtime by the simulated CANN."""

import json
import os

import pytest

from mindie_mm.device.npu.doctor import findings
from tests.ascend.environment import environment
from tests.cli.ascend_tree import AscendTree
from tests.cli.shell import run


@pytest.fixture
def tree(tmp_path):
    """A machine on which all is well, with the simulated CANN at its own place."""
    tree = AscendTree(tmp_path)
    folder = environment()["ASCEND_HOME_PATH"]
    tree.at(folder).parent.mkdir(parents=True)
    tree.at(folder).symlink_to(folder)
    return tree


@pytest.fixture
def said(tree, monkeypatch):
    """What is said of NPUs, by subject, with some settings of the simulator."""

    def said(**settings):
        for name, value in environment(PATH=f"{tree.at('/bin')}:{os.environ['PATH']}", **settings).items():
            monkeypatch.setenv(name, value)
        return {one.subject: one for one in findings(tree.root)}

    return said


def test_npus_that_start(said):
    found = said(devices=2, memory_bytes=2**30)
    assert {one.status for one in found.values()} == {"ok"}
    assert found["npu runtime"].found == "2 x Ascend910B1, 1.0 of 1.0 GiB free on the first"
    assert found["torch and torch_npu"].status == "ok"


def test_an_npu_whose_memory_is_used_up_by_others(said):
    one = said(memory_bytes=2**30, others_bytes=2**30 - 2**27)["npu runtime"]
    assert one.status == "warning"
    assert one.found == "1 x Ascend910B1, 0.1 of 1.0 GiB free on the first"
    assert "stop the processes that use it" in one.advice


def test_what_is_amiss_where_they_start_is_no_error(said, tree):
    tree.remove("/dev/hisi_hdc", "/etc/ld.so.conf.d/ascend_driver_so.conf")
    tree.npu_smi("dcmi module initialize failed. ret is -8005", status=1)
    found = said()
    assert found["npu runtime"].status == "ok"
    amiss = {subject: one.status for subject, one in found.items() if one.status != "ok"}
    assert amiss == dict.fromkeys(("npu driver", "npu device files", "npu health"), "warning")


def test_cann_prints_its_log_on_standard_output(said):
    """ASCEND_SLOG_PRINT_TO_STDOUT=1, here by the simulator's trace: before the answer, and after it, at the end."""
    one = said(memory_bytes=2**30, trace="/dev/stdout")["npu runtime"]
    assert (one.status, one.found) == ("ok", "1 x Ascend910B1, 1.0 of 1.0 GiB free on the first")


def test_an_internal_error_of_the_driver(said):
    one = said(fail="aclrtSetDevice=507899")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith("an internal error of the driver (507899, drvRet=87): RuntimeError: ")
    assert "error code is 507899" in one.found


def test_cann_without_its_operators(said):
    """The toolkit alone: memory can be had, and nothing computed."""
    one = said(missing="aten::matmul")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith(
        "CANN's operators are not installed, or have another version: RuntimeError: aclnnMatmul or "
    )
    assert one.advice.startswith("install the ops package")


def test_an_npu_that_multiplies_wrongly(said):
    one = said(idle="aten::matmul")["npu runtime"]
    assert one.status == "error"
    assert (
        one.found
        == "the process that starts the NPU exited with status 1: the NPU computes wrong results: a sum of products "
        "is nan instead of 4096"
    )


def test_an_error_that_is_not_known(said):
    one = said(fail="aclrtGetMemInfo=500000")["npu runtime"]
    assert one.status == "error"
    assert one.found.startswith("the process that starts the NPU exited with status 1: RuntimeError: GetDeviceMemories")


def test_no_npu_is_visible(said):
    one = said(fail="aclrtGetDeviceCount=507899")["npu runtime"]
    assert one.status == "error"
    assert one.found == "the process that starts the NPU exited with status 1: no NPU is visible; check npu-smi info"


def test_torch_npu_without_canns_environment(tree, monkeypatch):
    """The real one's own words."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tree.at('/bin')}:{os.environ['PATH']}")
    found = {one.subject: one for one in findings(tree.root) if one.status != "ok"}
    assert found.keys() == {"npu runtime", "CANN"}
    assert found["npu runtime"].found.startswith("CANN's libraries are not on the loader's path")
    assert "libhccl.so" in found["npu runtime"].found
    assert found["CANN"].advice.startswith("source /usr/local/Ascend/cann/set_env.sh")


def doctor(tree, *arguments, status=0, **settings):
    """As an operator runs it."""
    variables = environment(PATH=f"{tree.at('/bin')}:{os.environ['PATH']}", **settings)
    said = run("doctor", "--json", "--root", tree.root, *arguments, status=status, **variables)
    return {one["subject"]: one for one in json.loads(said)}


def test_doctor_where_npus_start(tree):
    found = doctor(tree, memory_bytes=2**30)
    assert {one["status"] for one in found.values()} == {"ok"}
    assert found["device"]["found"].startswith("npu:0, 1.0 GiB free")


def test_doctor_where_none_starts(tree):
    found = doctor(tree, "--device", "npu", status=1, fail="aclrtSetDevice=507033")
    amiss = {subject: one["status"] for subject, one in found.items() if one["status"] != "ok"}
    assert amiss == {"npu runtime": "error", "device": "error"}
    assert found["npu runtime"]["found"].startswith("the NPU does not start (507033): RuntimeError: ")
    assert found["device"]["advice"] == "see the findings about npu below"
