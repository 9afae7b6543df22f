"""Tests for doctor on a simulated Ascend machine, whose files a fixture writes and whose npu-smi is a script.

tests/ascend/test_doctor.py tests doctor with the real torch_npu.
"""

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mindie_mm.device.npu.doctor import driver, findings, runtime, smi
from mindie_mm.device.npu.doctor.cann import CANN
from mindie_mm.device.npu.doctor.machine import Machine, Software
from mindie_mm.device.npu.doctor.symptoms import SYMPTOMS, explain
from mindie_mm.device.npu.doctor.versions import findings as pairs
from tests.cli.ascend_tree import TCP_HEAD, AscendTree, smi_table
from tests.cli.shell import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here, it would answer for itself"
)

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SOFTWARE = Software("2.13.0", None, "2.13.0", "x86_64")
_NAMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_BASE_PORT")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a healthy machine, and give this process the environment variables of that machine."""
    for name in (*_NAMES, "HCCL_HOST_SOCKET_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tree = AscendTree(tmp_path / "machine")
    for name, value in tree.variables.items():
        monkeypatch.setenv(name, value)
    return tree


def problems(tree):
    """Return the findings that are not ok, by subject. Leave out the finding about starting the NPU."""
    return {one.subject: one for one in findings(tree.root) if one.status != "ok" and one.subject != "npu runtime"}


def only(tree):
    """Return the only finding of `problems`. Fail if there are several or none."""
    (one,) = problems(tree).values()
    return one


def test_a_machine_without_a_sign_of_ascend_has_no_findings(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(findings(tmp_path)) == []


def test_a_healthy_machine_has_only_ok_findings(tree):
    found = {one.subject: one.found for one in findings(tree.root) if one.status == "ok"}
    assert problems(tree) == {}
    assert found["npu driver"] == "25.5.1 in /usr/local/Ascend/driver"
    assert found["npu device files"] == "number of NPUs: 2 (/dev/davinci0, 1)"
    assert found["CANN"] == f"9.2.0 in {tree.home}"
    assert found["npu health"] == "2 x 910B2"
    assert found["npu use"] == "no other process, 60.7 GiB free on each"
    assert found["HCCL ports"] == "60000-60031 are free and reserved"


def test_a_missing_torch_npu_is_an_error(tree):
    (one,) = (one for one in findings(tree.root) if one.subject == "npu runtime")
    assert (one.status, one.found) == ("error", "torch_npu is not installed")
    assert one.advice == f"pip install torch_npu=={torch.__version__.partition('+')[0]}"


# --- the driver and its files


def test_a_missing_driver_is_an_error(tree):
    tree.remove("/usr/local/Ascend/driver/version.info", *(f"/dev/{node.name}" for node in tree.at("/dev").iterdir()))
    assert problems(tree)["npu driver"].status == "error"
    assert "no driver" in problems(tree)["npu driver"].found
    assert "/dev/davinci0, /dev/davinci_manager" in problems(tree)["npu device files"].found


def test_a_board_without_a_driver_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    board = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    board.mkdir(parents=True)
    for name, value in {"vendor": "0x19e5", "class": "0x120000", "device": "0xd802"}.items():
        (board / name).write_text(f"{value}\n")
    found = {one.subject: one for one in findings(tmp_path)}
    assert found["npu driver"].found.startswith("NPUs on the PCI bus: 1; no driver")
    assert "reboot" in found["npu driver"].advice
    (board / "device").write_text("0xa250\n")  # HiSilicon's ZIP engine, which has the same class
    assert list(findings(tmp_path)) == []


def test_a_container_without_the_drivers_files_gets_advice_to_mount_them(tree):
    tree.remove("/usr/local/Ascend/driver/version.info")
    assert only(tree).status == "warning"
    tree.remove("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    assert only(tree).status == "error"
    assert only(tree).found == "the driver is loaded, but /usr/local/Ascend/driver/version.info cannot be read"
    assert "-v /usr/local/Ascend/driver/lib64" in only(tree).advice


def test_a_container_without_the_drivers_libraries_is_an_error(tree):
    shutil.rmtree(tree.at("/usr/local/Ascend/driver/lib64"))
    assert only(tree).status == "error"
    assert only(tree).found == "25.5.1, but /usr/local/Ascend/driver/lib64 does not exist"
    assert "-v /usr/local/Ascend/driver" in only(tree).advice


def test_a_path_that_is_too_long_does_not_exist(tmp_path):
    assert not Machine.here(tmp_path).exists("/" + "x" * 300)


def test_a_driver_library_outside_the_loaders_path_is_reported(tree):
    tree.remove("/etc/ld.so.conf.d/ascend_driver_so.conf")
    assert only(tree).found == "25.5.1, but the loader does not find libascend_hal.so"
    assert "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver" in only(tree).advice


def test_a_driver_installed_elsewhere_is_found(tree):
    tree.at("/opt").mkdir()
    shutil.move(tree.at("/usr/local/Ascend/driver"), tree.at("/opt/driver"))
    tree.write("/etc/ascend_install.info", "Driver_Install_Path_Param=/opt\n")
    tree.write("/etc/ld.so.conf.d/ascend_driver_so.conf", "/opt/driver/lib64/driver\n")
    assert problems(tree) == {}


@pytest.mark.parametrize("node", ["davinci_manager", "devmm_svm", "hisi_hdc"])
def test_a_missing_device_file_is_an_error(tree, node):
    tree.remove(f"/dev/{node}")
    assert (only(tree).status, only(tree).found) == ("error", f"/dev/{node}: missing")
    assert f"--device /dev/{node}" in only(tree).advice


@contextmanager
def as_nobody():
    """Run the block as the user `nobody` if the tests run as root. Otherwise, run it as the current user."""
    if os.geteuid():
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_device_files_without_permission_name_the_group(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        tree = AscendTree(Path(folder))
        for name, value in tree.variables.items():
            monkeypatch.setenv(name, value)
        denied = ("davinci0", "davinci_manager")
        for node in denied:
            tree.at(f"/dev/{node}").chmod(0o000)
        with as_nobody():
            one = only_device_files(tree)
    assert one.status == "error"
    assert one.found.startswith("/dev/davinci0, /dev/davinci1, " if not os.geteuid() else "/dev/davinci0, ")
    assert "their group is HwHiAiUser" in one.found
    assert "usermod -aG HwHiAiUser" in one.advice
    assert "--group-add" in one.advice


def only_device_files(tree):
    """Return the finding about device files, without running npu-smi, which `nobody` could not run."""
    return next(one for one in driver.findings(Machine.here(tree.root)) if one.subject == "npu device files")


# --- CANN


def test_a_missing_cann_is_reported(tree, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH")
    tree.at("/usr/local/Ascend/cann").unlink()
    assert only(tree).found.startswith("not installed: /usr/local/Ascend/cann, ")
    assert "Ascend-cann-toolkit" in only(tree).advice


def test_cann_without_its_environment_is_an_error(tree, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert only(tree).status == "error"
    assert "9.2.0 in /usr/local/Ascend/cann, but its environment is not set" in only(tree).found
    assert only(tree).advice.startswith("source /usr/local/Ascend/cann/set_env.sh")


def test_a_loader_path_without_cann_variables_is_reported(tree, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert only(tree).found.endswith("ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set")


def test_cann_variables_without_a_loader_path_are_reported(tree, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH")  # as sudo and set-uid programs do
    assert "the loader does not find libhccl.so" in only(tree).found
    assert only(tree).advice.startswith(f"source {tree.home}/set_env.sh")


def test_the_folder_layout_until_cann_8_3_is_found(tree, monkeypatch):
    old = "/usr/local/Ascend/ascend-toolkit/latest"
    tree.at("/usr/local/Ascend/cann").unlink()
    tree.at("/usr/local/Ascend/ascend-toolkit").mkdir()
    shutil.move(tree.at(tree.home), tree.at(old))
    (tree.at(old) / "set_env.sh").rename(tree.at("/usr/local/Ascend/ascend-toolkit/set_env.sh"))
    shutil.rmtree(tree.at(f"{old}/{platform.machine()}-linux"))
    tree.write(f"{old}/version.cfg", "toolkit_running_version=[7.7.T20.0.B210:9.1.RC1]\n")
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert only(tree).found.startswith(f"9.1.RC1 in {old}")
    assert only(tree).advice.startswith("source /usr/local/Ascend/ascend-toolkit/set_env.sh")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", old)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{old}/lib64")
    assert problems(tree) == {}


def test_the_version_of_cann_is_read_from_version_info(tree):
    shutil.rmtree(tree.at(f"{tree.home}/{platform.machine()}-linux"))
    tree.write(f"{tree.home}/version.info", "Version=9.2.1\n")
    (found,) = (one.found for one in findings(tree.root) if one.subject == "CANN")
    assert found == f"9.2.1 in {tree.home}"


def test_variables_of_a_removed_cann_are_reported(tree, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/cann-8.5.0")
    assert only(tree).found == "ASCEND_HOME_PATH is /usr/local/Ascend/cann-8.5.0, which does not exist"


# --- versions


def paired(tree, **changes):
    """Return the findings about incompatible versions, by subject. `changes` replaces some versions."""
    software = {"torch": "2.13.0+cpu", "accelerator": None, "torch_npu": "2.13.0", "architecture": "x86_64"} | changes
    machine = Machine.here(tree.root)
    cann = CANN(tree.home, software.pop("cann", "9.2.0"), software.pop("drivers", "[V100R001C23]"), in_force=True)
    found = pairs(machine, Software(**software), cann)
    return {one.subject: one for one in found if one.status != "ok"}


def test_matching_versions_have_no_findings(tree):
    assert paired(tree) == {}
    assert paired(tree, torch="2.10.0", torch_npu="2.10.0.post4", cann="9.1.0") == {}
    # This torch_npu was released for another CANN, but is documented to work with this one.
    assert paired(tree, torch="2.12.0", torch_npu="2.12.0", cann="9.0.1") == {}


def test_torch_and_torch_npu_of_different_versions_are_an_error(tree):
    one = paired(tree, torch="2.12.1+cpu")["torch and torch_npu"]
    assert (one.status, one.found) == ("error", "torch_npu 2.13.0 is for torch 2.13.0, not 2.12.1+cpu")
    assert "torch==2.13.0" in one.advice


def test_an_unknown_pair_of_versions_is_a_warning(tree):
    assert paired(tree, torch="2.10.0", torch_npu="2.10.0", cann="8.3.RC1")["torch_npu and CANN"].status == "warning"
    unknown = paired(tree, torch="2.15.0", torch_npu="2.15.0.post1")["torch_npu and CANN"]
    assert unknown.status == "warning"
    assert "2.15.0.post1 and 9.2.0" in unknown.found


def test_a_driver_too_old_for_cann_is_a_warning(tree):
    subject = "CANN and driver"
    tree.write("/usr/local/Ascend/driver/version.info", "Version=25.0.rc1.1\nInnerversion=V100R001C21SPC001B220\n")
    assert subject not in paired(tree, cann="9.0.0")
    one = paired(tree, cann="9.1.0")[subject]
    assert one.status == "warning"
    assert "release notes of this CANN list the drivers 25.2" in one.found
    # If a CANN is not in doctor's tables, the CANN's own list of compatible drivers decides. The list contains single
    # versions and ranges.
    assert subject not in paired(tree, cann="10.0.0", drivers="[V100R001C15],[V100R001C19,V100R001C23]")
    assert paired(tree, cann="10.0.0", drivers="[V100R001C22],[V100R002C21]")[subject].status == "warning"
    tree.write("/usr/local/Ascend/driver/version.info", "Version=25.0.rc1.1\nInnerversion=unknown\n")
    assert paired(tree, cann="10.0.0", drivers="[V100R001C19,V100R001C23]")[subject].status == "warning"
    assert paired(tree, cann="10.0.0", drivers="")[subject].status == "warning"


def test_a_cuda_build_of_torch_beside_torch_npu_is_an_error(tree):
    one = paired(tree, torch="2.13.0", accelerator="CUDA 13.0")["torch build"]
    assert (one.status, one.found) == ("error", "2.13.0 is built for CUDA 13.0; torch_npu needs the CPU build")
    assert "download.pytorch.org/whl/cpu" in one.advice
    assert "aarch64" not in one.advice
    assert (
        "aarch64" in paired(tree, torch="2.13.0", accelerator="CUDA 13.0", architecture="aarch64")["torch build"].advice
    )


# --- npu-smi


@pytest.mark.parametrize(
    ("state", "status"), [("Warning", "warning"), ("Alarm", "error"), ("Critical", "error"), ("UNKNOWN", "error")]
)
def test_an_unhealthy_npu_is_reported(tree, state, status):
    tree.npu_smi(smi_table(health=("OK", state)))
    assert (only(tree).subject, only(tree).status) == ("npu health", status)
    assert only(tree).found == f"NPU 1 chip 0 (910B2): {state}"
    assert "npu-smi info -t health -i 1" in only(tree).advice


def test_an_unhealthy_npu_that_is_not_visible_is_ignored(tree, monkeypatch):
    tree.npu_smi(smi_table(health=("OK", "Alarm")))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    assert problems(tree) == {}


def test_an_npu_in_use_by_other_processes_is_a_warning(tree):
    tree.npu_smi(smi_table(used=(41000, 3395), processes=[(0, 1333928, "", 37709), (0, 1333929, "python", 132)]))
    assert (only(tree).subject, only(tree).status) == ("npu use", "warning")
    assert only(tree).found == (
        "NPU 0 chip 0: 24.0 of 64.0 GiB free, process 1333928 has 37709 MiB, process 1333929 python has 132 MiB"
    )
    assert "1 are idle, ASCEND_RT_VISIBLE_DEVICES=1;" in only(tree).advice
    tree.npu_smi(smi_table(used=(41000, 3395), first=4))
    assert only(tree).found.startswith("NPU 4 chip 0")
    assert "1 are idle, ASCEND_RT_VISIBLE_DEVICES=1;" in only(tree).advice, (
        "the value is the index of an NPU, not the number of its card"
    )


def test_memory_used_by_no_visible_process_is_reported(tree):
    tree.npu_smi(smi_table(used=(60000, 60000)))
    assert "5.4 of 64.0 GiB free" in only(tree).found
    assert only(tree).advice.startswith("a process in another container or a dead process uses the memory")


def test_memory_that_npu_smi_does_not_report_is_left_out(tree):
    table = smi_table(health=("OK", "Critical"))
    unreported = table.replace("0    / 0          3395 / 65536", "NA   / NA         NA   / NA   ")
    assert unreported != table
    tree.npu_smi(unreported)
    found = {one.subject: one for one in findings(tree.root)}
    assert "NPU 1 chip 0 (910B2): Critical" in found["npu health"].found
    assert found["npu use"].found == "no other process, 60.7 GiB free on each"
    tree.npu_smi(unreported.replace("0    / 0          3397 / 65536", "NA   / NA         NA   / NA   "))
    found = {one.subject: one for one in findings(tree.root)}
    assert found["npu use"].found == "no other process, npu-smi does not report free memory"


def test_both_chips_of_an_a3_are_parsed():
    """The output has two chips per NPU, and a column of physical ids (vllm-project/vllm-ascend#12980)."""
    npus = smi.parse("""\
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
+===========================+===============+======================================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       1                 | 3328327       | VLLMWorker_TP            | 50119                   |
""")
    assert [(one.npu, one.chip, one.used_mib) for one in npus] == [(0, 0, 3419), (0, 1, 2874)]
    assert npus[1].processes == (smi.Process(3328327, "VLLMWorker_TP", 50119),)


def test_a_driver_that_does_not_answer_npu_smi_is_an_error(tree):
    tree.npu_smi("DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005", 1)
    assert (only(tree).subject, only(tree).status) == ("npu health", "error")
    assert "ret is -8005 (the driver does not answer)" in only(tree).found
    assert "another container" in only(tree).advice


def test_a_missing_npu_smi_is_a_warning(tree, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert only(tree).status == "warning"
    assert "/usr/local/bin/npu-smi" in only(tree).advice


# --- visible NPUs


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("2", "error", "which selects none of the 2 NPUs"),
        ("", "error", "which selects none of the 2 NPUs"),
        ("7,0", "error", "which selects none of the 2 NPUs"),
        ("npu0", "error", "which selects none of the 2 NPUs"),
        ("0, 1", "warning", "CANN reads only 0"),
        ("0,1,7", "warning", "CANN reads only 0, 1"),
        ("1,0", "warning", "not in ascending order"),
    ],
)
def test_invalid_visible_devices_are_reported(tree, monkeypatch, value, status, words):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    one = problems(tree)["visible NPUs"]
    assert one.status == status
    assert repr(value) in one.found
    assert words in one.found
    assert "from 0 to 1" in one.advice


# --- ports


def test_hccl_ports_in_use_are_reported(tree):
    line = "   0: 0100007F:{:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0\n"
    tree.write("/proc/net/tcp", TCP_HEAD + line.format(60001) + line.format(8000))
    line6 = line.replace("0100007F", "0" * 32).replace("00000000:0000 0A", f"{'0' * 32}:0000 0A")
    tree.write("/proc/net/tcp6", TCP_HEAD + line6.format(60031))
    assert only(tree).found.startswith("60001, 60031 of 60000-60031 are in use")
    assert "HCCL_HOST_SOCKET_PORT_RANGE=auto" in only(tree).advice


def test_hccl_ports_that_are_not_reserved_are_reported(tree):
    for reserved in ("\n", "60000-60015\n", "60000-60010,60012-60031\n"):
        tree.write("/proc/sys/net/ipv4/ip_local_reserved_ports", reserved)
        assert only(tree).advice == "sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031"
    tree.write("/proc/sys/net/ipv4/ip_local_port_range", "32768\t59999\n")
    assert problems(tree) == {}


def test_configured_hccl_ports_are_checked(tree, monkeypatch):
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "50000")
    assert only(tree).advice == "sysctl -w net.ipv4.ip_local_reserved_ports=50000-50031"
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "65530")
    assert "must be from 1024 to 65520" in only(tree).found
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "auto")
    assert problems(tree) == {}
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "60000,60010-60020")
    assert problems(tree) == {}
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "any")
    assert "is 'any'" in only(tree).found


def test_a_user_without_a_passwd_entry_is_a_warning(tree, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 987_654)
    one = only(tree)
    assert (one.subject, one.status) == ("HCCL user", "warning")
    assert one.found.startswith("user 987654 is not in /etc/passwd; --tensor-parallel would fail")


def test_one_npu_needs_no_ports(tree, monkeypatch):
    tree.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "\n")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert problems(tree) == {}


# --- errors of torch_npu and CANN

# gpustack/gpustack#2527
ARGUMENT = (
    "EE1001: [PID: 112081] 2025-07-17-08:06:53.296.370 The argument is invalid.Reason: set "
    "ASCEND_RT_VISIBLE_DEVICES:0,2,4,6,1,3,5,7 error, it must be configured in ascending order"
)
# hw-native-sys/PTOAS#948, printed together with error 507033
NO_MESSAGES = (
    "[PID: 278366] 2026-07-21-07:08:52.810.217 Invalid_Argument(EE1001): The argument is invalid.Reason: rtGetDevMsg "
    "execution failed, the context is a null pointer."
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # printed when torch_npu is imported without set_env.sh: vllm-project/vllm-ascend#262
        ("ImportError: libhccl.so: cannot open shared object file: No such file or directory", "CANN's libraries"),
        ("ImportError: libascend_hal.so: cannot open shared object file: No such file or directory", "the driver's"),
        (
            "RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda.",
            "another accelerator",
        ),
        ("ImportError: libtorch_npu.so: undefined symbol: _ZN3c1017RegisterOperators", "incompatible versions"),
        # vllm-ascend#4284, with the lines that follow the error in the traceback
        ("NPU function error: c10_npu::SetDevice(device_id_), error code is 507033", "does not start"),
        ("SetDevice, error code is 507033\nE30006: Failed to verify the OPP\nPossible Cause: 1.The OPP", "operators"),
        ("GetDeviceType:Call halGetDeviceInfo failed: drvRet=87, module type=0, info type=1.", "internal error"),
        ("[Error]: error code is 507899", "internal error"),
        ("EL0005: The resources are busy.\nPossible Cause: 1. The resources have been occupied.", "in use"),
        ("EL0020: Device0 is occupied by multiple containers.", "another container"),
        ("dcmi model initialized failed, because the device is used. ret is -8020", "in use"),
        ("EL0004: Failed to allocate memory. error code is 207001", "memory of the NPU is used up"),
        ("Bind_Failed(EJ0003): Failed to bind the IP port. Reason: The IP address and port have been bound", "a port"),
        ("EI0006: Getting socket times out. Reason: ...", "did not connect"),
        ("error code is 107001: Invalid device ID", "no NPU with this number"),
        ("EL0002: The device ID is invalid.", "no NPU with this number"),
        # from CANN's documentation of EE1001
        (
            "EE1001: The argument is invalid.Reason: Invalid device ID 8. The valid device range is [0, 7).",
            "no NPU with",
        ),
    ],
)
@pytest.mark.parametrize("beside", ["{}", "{}\n{ARGUMENT}", "{ARGUMENT}\n{}", "{NO_MESSAGES}\n{}"])
def test_known_errors_are_explained(text, words, beside):
    symptom = explain(beside.format(text, ARGUMENT=ARGUMENT, NO_MESSAGES=NO_MESSAGES))
    assert words in symptom.meaning
    assert symptom.advice


def test_an_argument_that_cann_refuses_is_explained():
    assert explain(ARGUMENT).meaning == explain(f"{NO_MESSAGES}\n{ARGUMENT}").meaning == "CANN refuses an argument"
    assert explain(f"error code is 207004\n{NO_MESSAGES}") is None, "this message alone does not show the cause"


def test_an_unknown_error_is_not_explained():
    assert explain("RuntimeError: something else, 5070331") is None
    assert len({one.pattern for one in SYMPTOMS}) == len(SYMPTOMS)


# --- the whole command


def doctor(tree, code, *arguments, status=0, **variables):
    """Run the command `doctor` with a torch_npu whose import runs `code`, and return the findings by subject."""
    asked = ("doctor", "--json", "--root", tree.root, *arguments)
    found = run(*asked, status=status, PYTHONPATH=tree.torch_npu("2.13.0", code), **variables)
    return {one["subject"]: one for one in json.loads(found)}


@pytest.mark.slow
def test_doctor_works_when_torch_npu_breaks_the_import_of_torch(tree, monkeypatch):
    """`import torch` fails because torch loads torch_npu automatically. Doctor reports the reason and continues."""
    for name in ("ASCEND_HOME_PATH", "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    code = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"
    found = doctor(tree, code, "--device", "npu", status=1)
    assert found["device"]["status"] == found["CANN"]["status"] == found["npu runtime"]["status"] == "error"
    assert found["CANN"]["advice"].startswith("source /usr/local/Ascend/cann/set_env.sh")
    assert found["npu runtime"]["found"].startswith("CANN's libraries are not on the loader's path")
    assert found["npu driver"]["status"] == found["checkpoint"]["status"] == "ok"
    # Without --device npu, the service would start on the CPU, so these findings are only warnings.
    found = doctor(tree, code)
    assert found["device"]["status"] == found["CANN"]["status"] == found["npu runtime"]["status"] == "warning"
    assert found["device"]["found"].startswith("cpu, ")
    assert (
        found["device"]["advice"] == "use --device cpu if this is intended; otherwise see the findings about npu below"
    )


def test_a_torch_npu_for_another_torch_falls_back_to_the_cpu(tree):
    """The import of such a torch_npu fails with AttributeError. The default device is the CPU, and `npu` is refused."""
    site = tree.torch_npu("2.13.0", "import torch\ntorch.storage.no_such_name")
    code = "from mindie_mm.device import open_device\nprint(open_device().name)\nopen_device('npu')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{site}:{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "cpu\n"
    assert (
        "DeviceError: the device npu cannot be used: torch_npu cannot be imported (module 'torch.storage'"
        in ended.stderr
    )


@pytest.mark.slow
def test_doctor_survives_a_library_that_crashes(tree):
    found = doctor(tree, f"import os\nos.kill(os.getpid(), {signal.SIGSEGV:d})", "--device", "npu", status=1)
    assert found["npu runtime"]["found"].startswith("the process that starts the NPU exited with signal 11")
    assert found["device"]["found"].startswith("no npu: see below")


# --- the finding about starting the NPU


@pytest.fixture
def started(tree, monkeypatch):
    """Return a function that returns the finding about starting the NPU.

    The function's argument is the code that runs when torch_npu is imported.
    """

    def start(code):
        monkeypatch.setenv("PYTHONPATH", f"{tree.torch_npu('2.13.0', code)}:{ROOT}")
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as the command line does
        return runtime.finding(SOFTWARE)

    return start


def test_a_start_that_ends_without_a_report_is_explained(started):
    one = started("import os\nos._exit(0)")
    assert one.found == "the process that starts the NPU exited without an error and without a result"
    assert "python -m mindie_mm.device.npu.doctor.probe" in one.advice


@pytest.mark.slow
def test_the_decisive_error_of_several_is_reported(started):
    def found(*lines):
        return started(f"raise RuntimeError({chr(10).join(lines)!r})").found

    memory = "EL0004: Failed to allocate memory."
    assert found("SetDevice failed", ARGUMENT, memory, NO_MESSAGES) == f"the memory of the NPU is used up: {memory}"
    assert found("SetDevice failed", NO_MESSAGES, ARGUMENT).startswith(f"CANN refuses an argument: {ARGUMENT}")


def test_an_npu_that_does_not_answer_is_an_error():
    one = runtime.finding(SOFTWARE, timeout_s=0.1)
    assert (one.status, one.found) == ("error", "the NPU did not respond within 0 s")


def test_an_npu_smi_that_does_not_answer_is_an_error(tree):
    tree.write("/bin/npu-smi", f"#!/bin/sh\necho $$ > {tree.root}/pid\nexec sleep 100\n").chmod(0o755)
    one, *_ = smi.findings(Machine.here(tree.root), None, timeout_s=2)
    assert (one.status, one.found) == ("error", "npu-smi info did not respond within 2 s")
    assert not Path("/proc", tree.at("/pid").read_text().strip()).exists()
    tree.write("/bin/npu-smi", "\x7fELF").chmod(0o755)
    one, *_ = smi.findings(Machine.here(tree.root), None)
    assert one.found.startswith("npu-smi cannot be run: ")
