"""What crosses between the engine's client and the engine process: msgpack, one union a direction."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig

FinishReason = Literal["stop", "length"]
"""Why a finished request has no more tokens: it ended itself, or may have no more."""


class Start(msgspec.Struct, frozen=True):
    """The first message: what to serve."""

    model: str | None
    """Checkpoint directory; None is the embedded one."""
    config: EngineConfig
    family: str | None = None
    """As `WorkerConfig.family`."""
    end_token_ids: tuple[int, ...] | None = None
    """As `load_model` takes them."""
    generation_config: str = "vllm"
    """As `WorkerConfig.generation_config`."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Start a request."""

    request_id: str
    input_ids: bytes
    """int64 [T], native byte order, with words in their slots: all that the engine learns of the request's media."""
    params: SamplingParams
    asked_s: float = msgspec.field(default_factory=time.monotonic)
    """When the engine was asked for it, on the clock of time.monotonic, which is one for all processes of a machine."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request; unknown and finished ones are ignored."""

    request_id: str


class Refill(msgspec.Struct, frozen=True, tag="refill"):
    """Media of a request that asked for them (`Progress.needs_media`); ignored if the request has ended."""

    request_id: str
    input_ids: bytes
    """As `Add.input_ids`: the same prompt, with words of new blocks."""


class Mount(msgspec.Struct, frozen=True, tag="mount"):
    """Read the blocks of a file on disk where words name arena `number`; requests behind it may have such words."""

    path: str
    number: int


class Unmount(msgspec.Struct, frozen=True, tag="unmount"):
    """No request has words of arena `number` any more."""

    number: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One position's log-probabilities."""

    token_id: int
    """The token at this position."""
    logprob: float
    """Its natural log-probability."""
    top: list[tuple[int, float]]
    """The likeliest tokens with theirs, likeliest first."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a request spent in each stage, in seconds."""

    queue_s: float
    """Waiting to be scheduled; where the engine is just started again, for that, too."""
    prefill_s: float
    """From the first scheduled chunk to the first token; the tower's time is in it."""
    tower_s: float
    """In the vision tower."""
    decode_s: float
    """From the first token to the last."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one request in one step."""

    request_id: str
    token_ids: list[int] = []
    """Output tokens of this step. Empty if the request only scores its prompt, and where only its media are told of."""
    logprobs: list[TokenLogprob] | None = None
    """One per token, where asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Positions 1.. of the prompt, with the first token, where asked for."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache, with the first token."""
    finish_reason: FinishReason | None = None
    """None while it runs."""
    stop_token_id: int | None = None
    """The id of `stop_token_ids` that ended it."""
    media_consumed: bool = False
    """Whether the engine needs the blocks of the request's media no longer. It is told once for each Add and Refill."""
    needs_media: bool = False
    """Whether the request was preempted and needs its media again: it waits for a Refill, and nothing waits for it."""
    error: Failure | None = None
    """Error that ended the request. No progress follows."""
    timings: Timings | None = None
    """Times up to this step's token, told with each."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests; a Failure in its place says why it does not."""

    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together, or of the prompt alone where `max_output_len` is given."""
    device: str
    kv_cache_tokens: int
    """Tokens that the KV cache holds."""
    kv_cache_bytes: int
    """Bytes that the KV cache takes, of each rank."""
    kv_block_size: int
    """Tokens in one of its blocks."""
    max_output_len: int | None = None
    """Most tokens of output, where they take none of the prompt's room."""
    default_sampling: SamplingParams = SamplingParams()
    """Sampling settings of requests that state none."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's gauges after a step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Used share of the KV cache's blocks, in [0, 1]."""
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    prefix_cache_queries: int = 0
    """Tokens of prompts looked for in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens of those that were there."""
    preemptions: int = 0


class Stepped(msgspec.Struct, frozen=True):
    """One step's news, once the engine is ready."""

    progress: list[Progress]
    stats: Stats


ToEngine = Add | Abort | Refill | Mount | Unmount
