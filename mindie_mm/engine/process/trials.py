"""Measurement of the memory that an operation needs on a device, by trials of increasing size.

Trials are run until none is left, or the next trial would take too much memory or time. The memory for a larger size is
extrapolated linearly from the first and the last trial.
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
    """A trial of an operation at one size."""

    size: int
    """Number of tokens, features or rows."""
    prepare: Callable[[], Callable[[], object]]
    """Function that returns the operation. Allocations of this function are not measured."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials that all ranks run together. Each rank uses its own device."""

    device: Device
    ranks: Ranks

    def measure(self, what: str, unit: str, trials: Iterator[Trial], most: int, seconds: float) -> int:
        """Return the memory in bytes that the operation needs at size `most`.

        Args:
            what: Name of the operation, for messages.
            unit: Unit of sizes, for messages.
            trials: Trials in ascending order of size.
            most: Size to extrapolate to.
            seconds: Approximate time limit of all trials.

        Raises:
            DeviceError: A trial fails on one of the ranks.

        """
        deadline = time.monotonic() + seconds
        tried: list[tuple[int, int]] = []
        took = 0.0
        for trial in trials:
            if not tried:
                self._tried(trial, what, unit)  # warm-up, because the first run also allocates memory that it keeps
            elif trial.size <= tried[-1][0]:
                continue
            else:
                enough = _extrapolate(tried, trial.size) > self.device.free_bytes() or (
                    # Run at least two trials. One trial does not separate constant from growing memory.
                    len(tried) > 1 and took * trial.size / tried[-1][0] > deadline - time.monotonic()
                )
                if not self.ranks.all_reduce_min(int(not enough)):  # either all ranks run the next trial or none
                    break
            start = time.monotonic()
            tried.append((trial.size, self._tried(trial, what, unit)))
            took = time.monotonic() - start
        extrapolated = _extrapolate(tried, most)
        says = "%s of %d %s: %.2f s and %s; extrapolated for %d: %s"
        _log.debug(says, what, tried[-1][0], unit, took, mib(tried[-1][1]), most, mib(extrapolated))
        return extrapolated

    def _tried(self, trial: Trial, what: str, unit: str) -> int:
        """Run a trial on all ranks. If a rank fails, raise its error on all ranks."""
        return self.ranks.run_on_all(lambda: self._peak_bytes(trial, what, unit))

    def _peak_bytes(self, trial: Trial, what: str, unit: str) -> int:
        try:
            return self.device.peak_bytes(trial.prepare())
        except MindieMMError:
            raise
        except Exception as error:
            raise DeviceError(
                f"{what} of {trial.size} {unit}, which requests may cause, fails on "
                f"{self.device.torch_device}: {error}. Lower max_model_len, max_num_batched_tokens, "
                "max_tower_tokens or max_tower_bytes, or set measure_s to 0 to start without the trial"
            ) from error


def _extrapolate(tried: list[tuple[int, int]], size: int) -> int:
    """Extrapolate the memory in bytes for `size` from the first and the last (size, bytes) pair.

    With a single pair, memory is proportional to size.
    """
    (first, low), (last, high) = (0, 0) if len(tried) == 1 else tried[0], tried[-1]
    return high + max(0, (high - low) * (size - last) // (last - first))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.0f} MiB"
