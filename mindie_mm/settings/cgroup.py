"""The cgroups that limit this process, and the number of CPUs that it may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
"""Mount point of the cgroups."""
OWN = Path("/proc/self/cgroup")
"""File that lists the cgroups of this process."""


def folders(controller: str, mount: Path = MOUNT, own: Path = OWN) -> tuple[list[Path], list[Path]]:
    """Return the folders of the groups that limit this process by `controller`, such as "memory" or "cpu".

    The first list contains folders of cgroup version 2, and the second list contains folders of version 1. Both include
    the ancestors of the groups, because an ancestor limits the process, too. Some folders may not exist, because a
    container often mounts its own group as the root.
    """
    groups = {PurePosixPath("/")}
    for line in read(own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            groups |= {PurePosixPath(path), *PurePosixPath(path).parents}
    below = [group.relative_to("/") for group in groups]
    return [mount / group for group in below], [mount / controller / group for group in below]


def available_cpus(mount: Path = MOUNT, own: Path = OWN) -> int:
    """Return the number of CPUs in the affinity mask, or a cgroup's CPU quota if the quota is lower.

    A quota is rounded up. With a quota of 1.5 CPUs, two threads do more work than one thread, although both pause when
    the quota is used up.
    """
    quotas = [max(1, math.ceil(quota)) for quota in _quotas(mount, own)]
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(mount: Path, own: Path) -> Iterator[float]:
    """Yield the CPU quota of each group that has one, in CPUs."""
    version_2, version_1 = folders("cpu", mount, own)
    texts = [read(folder / "cpu.max").split() for folder in version_2]
    texts += [[read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")] for folder in version_1]
    for text in texts:
        # If there is no limit, version 2 has the text "max", and version 1 has -1.
        if len(text) == 2 and all(part.strip().isdecimal() for part in text) and int(text[1]):
            yield int(text[0]) / int(text[1])


def read(file: Path) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
