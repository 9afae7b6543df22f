"""The sizes of the caches. They get the memory that the model's largest step does not need."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mindie_mm.device import Device
from mindie_mm.engine.cache.kv_cache_size import least_bytes, useful_bytes
from mindie_mm.engine.process.largest_step import Step, mib
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.errors import DeviceError
from mindie_mm.nn.model import Model
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank, which its caches divide. Ranks and engines on CPUs divide the host's memory equally."""

    model: Model | Seq2SeqModel
    step: Step
    """The largest step. If an earlier process computed its memory, only the caches must fit, so that an engine starts
    again although other programs have taken memory."""
    device: Device
    ranks: Ranks = ALONE
    num_engines: int = 1
    """Number of engines of the service that are being started, and still need memory."""

    def encoder_cache_bytes(self, config: EngineConfig) -> int:
        """Return the size in bytes of the encoder cache.

        The size is `config.encoder_cache_bytes`, or less if memory is short: the KV cache of one request of full
        length, or of `config.kv_cache_bytes`, comes first.
        """
        model, step = self.model, self.step
        spec, asked = model.spec, config.encoder_cache_bytes
        if config.kv_cache_bytes is not None:
            first = min(config.kv_cache_bytes, useful_bytes(model, config)) + (0 if step.is_kept else step.num_bytes)
        else:
            one = max(useful_bytes(model, config) // config.max_num_seqs, least_bytes(spec, config))
            # `kv_cache_bytes` subtracts this copy of a layer.
            first = one + 2 * one * spec.kv_layer_bytes // spec.kv_token_bytes + 1 + step.num_bytes
        left = max(0, min(asked, int(self._free_bytes() * (config.memory_share or 1)) - first))
        if left < asked:
            _log.warning(
                "memory is short: the encoder cache takes %s instead of the %s of encoder_cache_bytes",
                mib(left),
                mib(asked),
            )
        return left

    def _free_bytes(self) -> int:
        on_cpu = self.model.spec.device.type == "cpu"
        return self.device.free_bytes() // (self.ranks.count * self.num_engines if on_cpu else 1)

    def kv_cache_bytes(self, config: EngineConfig) -> int:
        """Return the size in bytes of the KV cache.

        The size is `config.kv_cache_bytes` if that is set. Otherwise it is the memory that `memory_share` allows, minus
        the memory of the largest step and of the encoder cache. It never exceeds the size that all requests at full
        length use. If the default share leaves less than one request of full length uses, the cache may take more of
        the free memory.

        Raises:
            DeviceError: No memory is left, or `config.kv_cache_bytes` does not fit.

        """
        model, step, num_engines = self.model, self.step, self.num_engines
        spec = model.spec
        useful, least = useful_bytes(model, config), least_bytes(spec, config)
        taken = step.num_bytes + config.encoder_cache_bytes
        divided = num_engines > 1 and spec.device.type == "cpu"
        each, fewer = (f" for each of {num_engines} engines", ", or lower replicas") if divided else ("", "")
        free = self._free_bytes()
        # `encoder_cache_bytes` has already made room, so that a smaller encoder cache would not help.
        largest = max(step.parts, key=lambda part: part.num_bytes)
        says = f"{spec.device} has {mib(free)} free{each} after loading the weights; {step}; the encoder cache takes "
        says += mib(config.encoder_cache_bytes)
        if config.kv_cache_bytes is not None:
            asked = min(config.kv_cache_bytes, useful)
            if asked + (config.encoder_cache_bytes if step.is_kept else taken) > free:
                raise DeviceError(
                    f"kv_cache_bytes of {mib(asked)} does not fit: {says}. Lower kv_cache_bytes{fewer}, or "
                    f"{largest.settings}: the largest part is {largest.name} with {mib(largest.num_bytes)}"
                )
            why = "as before" if step.is_kept else "kv_cache_bytes"
            _log.info("%s; the KV cache takes %s (%s)", says, mib(asked), why)
            return asked
        share = config.memory_share or self.device.memory_share

        def left_of(num_bytes: int) -> int:
            left = num_bytes - taken
            # A decode step copies one layer of the requests' KV cache. Padding at most doubles the size of the copy.
            return left - 2 * left * spec.kv_layer_bytes // (spec.kv_token_bytes + 2 * spec.kv_layer_bytes)

        left = left_of(int(free * share))
        one = max(useful // config.max_num_seqs, least)
        if config.memory_share is None and left < one and left_of(free) >= least:
            left = max(left, min(one, left_of(free)))
            _log.warning(
                "memory_share %g leaves too little for one request of full length; the KV cache takes up to %s of the "
                "remaining memory. Free memory, or set kv_cache_bytes",
                share,
                mib(left),
            )
        if left < least:
            raise_share = f"raise memory_share, which is {share:g}, or " if share < 1 and left_of(free) >= least else ""
            raise DeviceError(
                f"no memory is left for the KV cache: {says}; memory_share is {share:g}. To start, {raise_share}free "
                f"memory{fewer}, or lower {largest.settings}: the largest part is {largest.name} with "
                f"{mib(largest.num_bytes)}"
            )
        _log.info(
            "%s; the KV cache takes %s of the %s that memory_share %g leaves",
            says,
            mib(min(left, useful)),
            mib(left),
            share,
        )
        return min(left, useful)
