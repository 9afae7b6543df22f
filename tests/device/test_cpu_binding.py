"""Tests for the CPUs to which processes and threads of an NPU are bound, with canned outputs of npu-smi and lscpu."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindie_mm.device import bind_tokenizer
from mindie_mm.device.npu import NPU, cpu_binding
from mindie_mm.device.npu.cpu_binding import Share, shares
from mindie_mm.errors import InputError
from mindie_mm.settings.config import EngineConfig, WorkerConfig

HEADINGS = "NPU ID                         Chip ID                        Chip Logic ID                  Chip Name"
CHINESE = "NPU 编号                        芯片编号                        芯片逻辑编号                     芯片名称"


def mapping(chips: list[int], name: str, heading: str = HEADINGS, mcu: bool = True) -> str:
    """Return the output of `npu-smi info -m` for cards with these numbers of chips."""
    rows, logic = [heading], 0
    for card, count in enumerate(chips):
        for chip in range(count):
            rows.append(f"{card:<31}{chip:<31}{logic:<31}{name}")
            logic += 1
        if mcu:
            rows.append(f"{card:<31}{count:<31}{'-':<31}Mcu")
    return "\n".join(f"\t{row}" for row in rows) + "\n"


def topology(affinity: list[str], link: str = "HCCS", heading: str = "CPU Affinity") -> str:
    """Return the output of `npu-smi info -t topo`."""
    names = [f"NPU{number}" for number in range(len(affinity))]
    rows = ["\t   " + "".join(f"{name:<11}" for name in names) + (heading if any(affinity) else "")]
    for number, (name, cpus) in enumerate(zip(names, affinity, strict=True)):
        cells = ["X" if number == other else link for other in range(len(names))]
        rows.append(f"{name:<11}" + "".join(f"{cell:<11}" for cell in cells) + cpus)
    return "\n".join([*rows, "", "Legend:", "  X    = Self", "  HCCS = Connection traversing HCCS."]) + "\n"


def nodes(count: int, each: int) -> str:
    """Return the output of `lscpu -e=CPU,NODE`."""
    return "\n".join(["CPU NODE", *(f"{cpu:>3} {cpu // each:>4}" for cpu in range(count))]) + "\n"


A2 = mapping([1] * 8, "Ascend 910B3"), topology([f"{48 * (i // 2)}-{48 * (i // 2) + 47}" for i in range(8)])
A3 = mapping([2] * 8, "Ascend910"), topology([""] * 16, "SIO")
DUO = mapping([2, 2], "Ascend 310P3"), topology(["0-15", "0-15", "16-31,40", "16-31,40"], "SYS")


def own(first: int, stop: int) -> Share:
    return Share(tuple(range(first + 2, stop - 2)), (stop - 2, stop - 1))


def test_npus_of_an_a2_divide_their_near_cpus() -> None:
    found = shares(*A2, nodes(192, 48), range(192))
    assert found == [own(24 * npu, 24 * npu + 24) for npu in range(8)]


def test_the_chips_of_an_a3_divide_all_cpus_in_the_order_of_the_numa_nodes() -> None:
    assert shares(*A3, nodes(320, 40), range(320)) == [own(20 * npu, 20 * npu + 20) for npu in range(16)]
    interleaved = "\n".join(f"{cpu} {cpu % 2}" for cpu in range(320))
    assert {cpu % 2 for cpu in shares(*A3, interleaved, range(320))[0].main} == {0}


def test_the_chips_of_a_310p_divide_their_near_cpus() -> None:
    assert [share.main for share in shares(*DUO, nodes(41, 41), range(41))] == [
        tuple(range(2, 6)),
        tuple(range(10, 14)),
        tuple(range(18, 22)),
        tuple(range(26, 31)),
    ]


def test_headings_in_another_language_change_nothing() -> None:
    localized = mapping([1] * 8, "Ascend 910B3", CHINESE), A2[1].replace("CPU Affinity", "CPU 亲和性")
    assert shares(*localized, nodes(192, 48).replace("CPU NODE", "处理器 节点"), range(192)) == shares(
        *A2, nodes(192, 48), range(192)
    )


def test_only_allowed_cpus_are_used() -> None:
    assert shares(*A2, nodes(192, 48), range(0, 192, 2))[0].main == tuple(range(4, 20, 2))
    few = shares(*A2, nodes(192, 48), range(48))
    assert few == [own(6 * npu, 6 * npu + 6) for npu in range(8)], "no CPU is near the last NPUs"


@pytest.mark.parametrize(
    ("texts", "allowed", "reason"),
    [(A2, 39, "NPU 0 has 4 CPUs, and needs 5"), (("", "error: no driver"), 192, "npu-smi lists no NPU")],
    ids=["four CPUs each", "no NPU"],
)
def test_processes_are_not_bound_without_npus_or_enough_cpus(texts: tuple[str, str], allowed: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        shares(*texts, nodes(192, 48), range(allowed))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
    """Pretend to be an A2 host, with threads of torch_npu. Yield the CPUs to which each thread is bound."""
    outputs = {"-m": A2[0], "-t": A2[1]}
    cases = "\n".join(f"{option}) cat <<'END'\n{text}\nEND\n;;" for option, text in outputs.items())
    programs = {"npu-smi": f'case "$2" in\n{cases}\nesac', "lscpu": f'[ "$LC_ALL" = C ] && echo "{nodes(192, 48)}"'}
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CPU_AFFINITY_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(192)})
    bound: dict[int, list[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cpus: bound.__setitem__(task, [*cpus]))
    ended, ready = threading.Event(), threading.Barrier(3)

    def run(name: str) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name, encoding="utf-8")
        ready.wait(60)
        ended.wait(60)

    threads = [threading.Thread(target=run, args=[name]) for name in ("acl_thread", "release_thread")]
    for thread in threads:
        thread.start()
    ready.wait(60)
    yield bound
    ended.set()
    for thread in threads:
        thread.join()


def names(bound: dict[int, list[int]]) -> dict[str, list[int]]:
    return {
        Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8").strip(): cpus for task, cpus in bound.items()
    }


def test_an_engine_and_the_threads_of_torch_npu_get_cpus_of_their_own(
    host: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")  # the other NPUs may belong to other services
    cpu_binding.bind_engine(1)
    found = names(host)
    assert (found.pop("acl_thread"), found.pop("release_thread")) == ([94], [95])
    assert host[os.getpid()] == [*range(74, 94)]
    assert {tuple(cpus) for cpus in found.values()} == {tuple(range(74, 94))}
    (record,) = caplog.records
    assert record.getMessage() == ("CPU binding: the engine uses CPUs 74 to 93, and torch_npu's threads CPUs 94,95")


def test_the_tokenizer_uses_the_cpus_of_all_visible_npus(
    host: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,7")
    bind_tokenizer("npu:1")
    assert host == {0: [*range(2, 22), *range(170, 190)]}
    host.clear()
    bind_tokenizer("cpu")
    assert host == {}


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CPU_AFFINITY_CONF", "1", "CPU_AFFINITY_CONF is set"),
        ("ASCEND_RT_VISIBLE_DEVICES", "8", "ASCEND_RT_VISIBLE_DEVICES is 8, but npu-smi lists 8 NPUs"),
        ("PATH", "/nowhere", "No such file or directory: 'npu-smi'"),
    ],
)
def test_a_failed_binding_is_one_line_in_the_log(
    host: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(variable, value)
    NPU.bind_tokenizer()
    assert host == {}
    (record,) = caplog.records
    assert record.getMessage().startswith("CPU binding: the tokenizer is not bound to CPUs: ")
    assert reason in record.getMessage()


def test_a_driver_that_hangs_does_not_delay_the_start(
    host: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cpu_binding, "_TIMEOUT_S", 0.2)
    program = Path(os.environ["PATH"].partition(os.pathsep)[0]) / "npu-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    cpu_binding.bind_engine(0)
    assert host == {}
    assert "npu-smi info -m did not respond within 0.2 s" in caplog.text


def test_a_service_without_visible_devices_uses_all_npus(host: dict[int, list[int]]) -> None:
    cpu_binding.bind_tokenizer()
    assert host[0] == [cpu for first in range(0, 192, 24) for cpu in range(first + 2, first + 22)]


def test_hosts_with_other_processors_are_not_bound(host: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpu_binding.bind_engine(0)
    assert host == {}


def test_the_binding_can_be_turned_off() -> None:
    assert WorkerConfig(engine=EngineConfig(device="npu")).bound_device == "npu"
    assert WorkerConfig(engine=EngineConfig(device="npu", cpu_binding="off")).bound_device is None
    with pytest.raises(InputError, match="cpu_binding"):
        EngineConfig(cpu_binding="on")  # type: ignore[arg-type]
