"""Tests for transferring media to the device.

The pages of an arena are registered once, and the device reads them. Then the transfers are settled, and the blocks are
verified.
"""

from __future__ import annotations

import pytest

from tests.ascend.processes import call, needs_registration, traced


def staged(releases: bool = False) -> dict:
    """Transfer two blocks of another process's arena to the device.

    Return what was read and which calls were traced.
    """
    import logging
    import subprocess
    import sys
    from contextlib import suppress

    import torch

    from mindie_mm.device import open_device
    from mindie_mm.errors import SegmentMissing, StaleReference
    from mindie_mm.nn import staging
    from mindie_mm.shm import Ref, attach, free
    from mindie_mm.shm.mapped import close_removed
    from tests.ascend.test_runtime import simulator

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("mindie_mm.nn.staging").addHandler(Kept())
    device = open_device("npu").torch_device
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        refs = [Ref.from_words(*map(int, owner.stdout.readline().split())) for _ in range(2)]
        views = [attach(ref) for ref in refs]
        brought = [staging.to_device(view, "a", device) for view in views]
        staging.settle(device)
        values = [tensor.cpu().flatten().tolist() for tensor in brought]
        for view in views:
            view.verify()
        staging.fetch(views[1:], device)
        late = staging.to_device(views[0], "a", device)
        free(refs[0])
        owner.stdin.write("overwrite\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "done\n"
        staging.settle(device)
        read = sorted(set(late.cpu().flatten().tolist()))
        try:
            views[0].verify()
            error = ""
        except StaleReference as stale:
            error = str(stale)
    finally:
        owner.communicate()
    del late, brought
    close_removed()  # any thread may call this, but arenas that a device reads must stay mapped
    kept = simulator().sim_calls(b"aclrtHostUnregister")
    fetched = [len(staging._staging(device)._fetched)]
    with suppress(SegmentMissing):
        attach(refs[0])  # this unmaps the removed arena
    fetched.append(len(staging._staging(device)._fetched))
    after = sorted(set(staging.to_device(views[1], "a", device).cpu().flatten().tolist()))
    found = {
        "values": [sorted(set(one)) for one in values],
        "read": read,
        "error": error,
        "lines": lines,
        "kept": kept,
        "fetched": fetched,
        "after": after,
    }
    torch.accelerator.synchronize()
    return found


_OWNER = """
import sys
from contextlib import ExitStack
from mindie_mm.shm import Arena, ArraySpec

with Arena.create(3 * 98304) as arena:
    for number in range(2):
        with arena.allocate({"a": ArraySpec((300, 300), "uint8")}, path_file=None) as block:
            block["a"][...] = number + 1
            print(*block.publish().to_words(), flush=True)
    sys.stdin.readline()
    with ExitStack() as stack:  # the arena has room for two blocks, and one of them reuses the first block
        for number in range(2):
            block = stack.enter_context(arena.allocate({"a": ArraySpec((300, 300), "uint8")}, path_file=None))
            block["a"][...] = 9
    print("done", flush=True)
    sys.stdin.readline()
"""


@needs_registration
def test_the_arena_is_registered_once_and_read_by_the_device(tmp_path):
    trace = tmp_path / "trace"
    found = call(staged, trace=str(trace))
    assert found["values"] == [[1], [2]]
    assert not found["lines"]
    assert not found["kept"]
    assert found["fetched"] == [1, 0], (
        "fetched copies are dropped with their arena, because its handle words may be used again"
    )
    assert found["after"] == [2], "attached media can still be read, with one more copy"
    # The device has read bytes of the next item, and verifying the block after settling reports an error.
    assert found["read"] == [9]
    assert "freed" in found["error"] or "generation" in found["error"]
    calls = traced(trace)
    registered = [line for line in calls if line.startswith("aclrtHostRegister")]
    assert len(registered) == 1
    assert sum(line.startswith("aclrtHostUnregister") for line in calls) == 1
    assert not any(line.startswith("aclrtMallocHost") for line in calls[: calls.index(registered[0])])


def staged_on(kernel: str) -> dict:
    """Return the result of `staged` on a host with this release of Linux."""
    import platform

    platform.release = lambda: kernel
    return staged()


@pytest.mark.parametrize(
    ("kernel", "fail"),
    [
        pytest.param("6.6.0", "aclrtHostRegisterV2=507899,aclrtHostRegister=507899", marks=needs_registration),
        ("5.10.0-136.12.0.86.oe2203.aarch64", ""),
        pytest.param("4.19.90-52", "", marks=pytest.mark.slow),
    ],
)
def test_media_of_an_unregistered_arena_go_through_pinned_memory(tmp_path, kernel, fail):
    """CANN fails to register the arena, or the kernel is one on which it must not be registered."""
    trace = tmp_path / "trace"
    found = call(staged_on, kernel, trace=str(trace), fail=fail, kernel=kernel)
    assert any(line.startswith("aclrtHostRegister") for line in traced(trace)) == bool(fail)
    assert found["values"] == [[1], [2]]
    assert len(found["lines"]) == 1
    assert found["read"] == [1]  # the bytes were copied before they were overwritten
    assert found["error"]
    assert any(line.startswith("aclrtMallocHost") for line in traced(trace))


def reused(size: int, keeps: bool) -> str:
    """Return the error of transferring an item into memory that a queued operator still reads."""
    import platform

    import torch

    from mindie_mm.device import open_device
    from mindie_mm.nn import staging
    from mindie_mm.shm import Arena, ArraySpec, attach

    platform.release = lambda: "5.10.0"  # on which arenas are not registered, so that the copies are queued

    device = open_device("npu").torch_device
    if not keeps:
        torch.Tensor.record_stream = lambda *_: None
    with Arena.create(2**24) as arena:
        with arena.allocate({"a": ArraySpec((size,), "uint8")}, path_file=None) as block:
            block["a"][...] = 7
            ref = block.publish()
        view = attach(ref)
        read = staging.to_device(view, "a", device) + 1
        try:
            staging.to_device(view, "a", device)
        except RuntimeError as error:
            return str(error)
        assert set(read.cpu().tolist()) == {8}
    return ""


@pytest.mark.parametrize("size", [1000, 2**22])
def test_memory_is_not_reused_before_queued_operators_have_read_it(size):
    assert call(reused, size, True, kernel="5.10.0") == ""
    message = call(reused, size, False, kernel="5.10.0")
    assert "race: stream" in message
    assert "which reads it" in message
