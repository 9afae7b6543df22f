"""The useful size of a KV cache, and the context length that fits in it.

`process/memory_profile.py` computes how much memory is left for the cache. `Engine` in `core.py` divides it into KV
blocks.
"""

from __future__ import annotations

import logging

from mindie_mm.device import kind_of
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.errors import DeviceError
from mindie_mm.nn.model import Model, ModelSpec
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)

MORE_ROOM = (
    "Raise memory_share, lower max_num_batched_tokens, max_tower_tokens, max_tower_bytes, encoder_cache_bytes or "
    "max_model_len, or set kv_cache_bytes"
)
"""Advice for an operator when memory is insufficient."""


def context_length(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the maximum number of tokens of one request."""
    return min(config.max_model_len or spec.max_model_len, spec.max_model_len)


def block_size(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the number of tokens in a KV block."""
    return config.kv_block_size or kind_of(spec.device).kv_block_size


def useful_blocks(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the number of KV blocks that requests use if all are at full length. More blocks would never be used."""
    return config.max_num_seqs * -(-context_length(spec, config) // block_size(spec, config))


def cache_sizes(spec: ModelSpec, config: EngineConfig, num_bytes: int) -> tuple[int, int]:
    """Return the number of KV blocks, and of slots for states, of a decoder-only model's cache of `num_bytes` bytes.

    There are no slots if no layer keeps a state. Otherwise, the memory is divided in this order: blocks and a slot for
    one request of full length, half of the remaining memory for slots, and the other half for blocks. If requests
    cannot use that many blocks, the memory that is left goes to slots.
    """
    block_bytes, useful = block_size(spec, config) * spec.kv_token_bytes, useful_blocks(spec, config)
    if not spec.state_bytes:
        return max(1, min(num_bytes // block_bytes, useful)), 0
    num_bytes -= spec.state_bytes  # for the scratch slot
    most = _useful_slots(config)
    rest = max(0, num_bytes - spec.state_bytes - useful // config.max_num_seqs * block_bytes)
    slots = min(most, 1 + rest // 2 // spec.state_bytes)
    blocks = max(1, min((num_bytes - slots * spec.state_bytes) // block_bytes, useful))
    return blocks, max(slots, min(most, (num_bytes - blocks * block_bytes) // spec.state_bytes))


def _useful_slots(config: EngineConfig) -> int:
    """Return the number of slots for all requests, and as many for snapshots if prefixes are cached."""
    return config.max_num_seqs * (2 if config.prefix_caching else 1)


def useful_bytes(model: Model | Seq2SeqModel, config: EngineConfig) -> int:
    """Return the size in bytes of a KV cache that holds all requests at full length."""
    spec = model.spec
    if isinstance(model, Seq2SeqModel):
        token_bytes = model.prompt_token_bytes + spec.kv_token_bytes  # assumes prompt and answer of equal length
        return config.max_num_seqs * context_length(spec, config) * token_bytes
    blocks = useful_blocks(spec, config) * block_size(spec, config) * spec.kv_token_bytes
    return blocks + (1 + _useful_slots(config)) * spec.state_bytes


def least_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the size in bytes of the smallest cache of a decoder-only model, for one block of one request."""
    return block_size(spec, config) * spec.kv_token_bytes + 2 * spec.state_bytes  # one is the scratch slot


def fitting_context(
    model: Model | Seq2SeqModel, config: EngineConfig, num_bytes: int, num_tokens: int, ranks: Ranks = ALONE
) -> int:
    """Return the maximum number of tokens of one request that fit in the KV cache, and log the result.

    If the checkpoint's context length does not fit, it is reduced and a warning is logged.

    Args:
        model: Loaded model.
        config: Settings of the engine.
        num_bytes: Size of each rank's KV cache in bytes.
        num_tokens: Capacity of the KV cache in tokens.
        ranks: Ranks of the engine. Only rank 0 logs.

    Raises:
        DeviceError: `config.max_model_len` does not fit, or not even one token fits.

    """
    wanted = context_length(model.spec, config)
    fitting = min(wanted, num_tokens)
    needed = useful_bytes(model, config) // config.max_num_seqs
    says = (
        f"a context of {wanted} tokens needs {needed} bytes of KV cache; the cache has {num_bytes} bytes, enough for "
        f"{num_tokens} tokens"
    )
    advice = MORE_ROOM if config.kv_cache_bytes is None else "Raise kv_cache_bytes, or lower max_model_len"
    if fitting < wanted and (config.max_model_len is not None or not fitting):
        raise DeviceError(f"{says}. {advice}")
    if ranks.number == 0:  # the other ranks get the same result
        if fitting < wanted:
            _log.warning("%s. Longer requests are refused. %s", says, advice)
        _log.info("the KV cache holds %d tokens in %d bytes; the context length is %d", num_tokens, num_bytes, fitting)
    return fitting
