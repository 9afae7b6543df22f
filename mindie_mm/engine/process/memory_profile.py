"""The size of the KV cache. It is what the model's largest step leaves of the memory."""

from __future__ import annotations

import logging

from mindie_mm.device import Device
from mindie_mm.engine.cache.kv_cache_size import block_size, useful_bytes
from mindie_mm.engine.process.largest_step import Part, Step, mib
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.errors import DeviceError
from mindie_mm.nn.model import Model
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)


def kv_cache_bytes(
    model: Model | Seq2SeqModel,
    step: Step,
    device: Device,
    config: EngineConfig,
    ranks: Ranks = ALONE,
    num_engines: int = 1,
) -> int:
    """Return the size in bytes of this rank's KV cache.

    The size is `config.kv_cache_bytes` if that is set. Otherwise it is the memory that `memory_share` allows, minus the
    memory of the largest step and of the encoder cache. It never exceeds the size that all sequences at full length
    use. If the default share leaves less than one sequence of full length uses, the cache may take more of the free
    memory. Ranks and engines on CPUs divide the host's memory equally.

    Args:
        model: Loaded model.
        step: The largest step. If an earlier process computed its memory, only the caches must fit, so that an engine
            starts again although other programs have taken memory.
        device: Device of the model.
        config: Settings of the engine.
        ranks: All ranks of the engine.
        num_engines: Number of engines of the service that are being started, and still need memory.

    Raises:
        DeviceError: No memory is left, or `config.kv_cache_bytes` does not fit.

    """
    spec = model.spec
    useful, least = useful_bytes(model, config), block_size(spec, config) * spec.kv_token_bytes
    taken = step.num_bytes + config.encoder_cache_bytes
    divided = num_engines > 1 and spec.device.type == "cpu"
    each, fewer = (f" for each of {num_engines} engines", ", or lower replicas") if divided else ("", "")
    free = device.free_bytes() // (ranks.count * num_engines if spec.device.type == "cpu" else 1)
    encoder_cache = Part("the encoder cache", config.encoder_cache_bytes, "encoder_cache_bytes")
    largest = max(*step.parts, encoder_cache, key=lambda part: part.num_bytes)
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
    share = config.memory_share or device.memory_share

    def left_of(num_bytes: int) -> int:
        left = num_bytes - taken
        # A decode step copies one layer of the sequences' KV cache. Padding at most doubles the size of the copy.
        return left - 2 * left // (spec.num_layers + 2)

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
