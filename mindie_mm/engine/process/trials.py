"""What work takes of a device's memory, tried at growing sizes and extrapolated to larger ones.

Trials grow until all are done or the next one would take too long. What a larger size would take is extrapolated from
the line through the first trial and the last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mindie_mm.device import Device
from mindie_mm.engine.ranks import Ranks
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.settings.config import MiB

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """Work of one size."""

    size: int
    """Tokens or features."""
    prepare: Callable[[], Callable[[], object]]
    """Returns the work; what it allocates itself is not measured."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials on one device, of all ranks together."""

    device: Device
    ranks: Ranks

    def measure(self, what: str, unit: str, trials: Iterator[Trial], most: int, seconds: float) -> int:
        """Bytes that work of size `most` takes, by trials in ascending order and in about so many seconds."""
        deadline = time.monotonic() + seconds
        tried: list[tuple[int, int]] = []
        took = 0.0
        for trial in trials:
            if not tried:
                self._tried(trial, what, unit)  # what only the first run takes stays taken, and is no peak
            elif trial.size <= tried[-1][0]:
                continue
            else:
                enough = _extrapolate(tried, trial.size) > self.device.free_bytes() or (
                    # Two are tried in any case: one alone would not tell what grows from what does not.
                    len(tried) > 1 and took * trial.size / tried[-1][0] > deadline - time.monotonic()
                )
                if not self.ranks.all_reduce_min(int(not enough)):  # all do the next one, or none
                    break
            start = time.monotonic()
            tried.append((trial.size, self._tried(trial, what, unit)))
            took = time.monotonic() - start
        extrapolated = _extrapolate(tried, most)
        says = "%s of %d %s: %.2f s and %s; extrapolated for %d: %s"
        _log.debug(says, what, tried[-1][0], unit, took, mib(tried[-1][1]), most, mib(extrapolated))
        return extrapolated

    def _tried(self, trial: Trial, what: str, unit: str) -> int:
        """What fails on one rank alone is heard by all, before any of them waits for the others' next step."""
        return self.ranks.run_on_all(lambda: self._peak_bytes(trial, what, unit))

    def _peak_bytes(self, trial: Trial, what: str, unit: str) -> int:
        try:
            return self.device.peak_bytes(trial.prepare())
        except MindieMMError:
            raise
        except Exception as error:
            raise DeviceError(
                f"{what} of {trial.size} {unit}, which requests may ask for, fails on {self.device.torch_device}: "
                f"{error}. Lower max_model_len, max_num_batched_tokens, max_tower_tokens or max_tower_bytes, or set "
                "measure_s to 0 to start without the trial"
            ) from error


def _extrapolate(tried: list[tuple[int, int]], size: int) -> int:
    """Bytes of work of `size` on the line through the first and the last (size, bytes), or in proportion to the one."""
    (first, low), (last, high) = (0, 0) if len(tried) == 1 else tried[0], tried[-1]
    return high + max(0, (high - low) * (size - last) // (last - first))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.0f} MiB"
