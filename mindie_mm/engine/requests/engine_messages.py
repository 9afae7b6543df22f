"""Messages between the engine's client and the engine process, encoded as msgpack."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig

FinishReason = Literal["stop", "length"]
"""Reason why a request has finished: a stop condition, or the maximum number of tokens."""


class Replica(msgspec.Struct, frozen=True):
    """The place of an engine among the engines of its service, which share the host or its devices."""

    number: int = 0
    """Number of the engine, from 0."""
    count: int = 1
    """Number of engines."""
    others_started: bool = False
    """True if the engine is being restarted. The other engines have then already allocated their memory."""


class LoraFolder(msgspec.Struct, frozen=True):
    """A LoRA adapter that the engine reads at its start."""

    folder: str
    key: str = ""
    """Key that an earlier process of the engine reported, or an empty string for the first process. If the files have
    another key or cannot be read, requests for the adapter fail, but the engine starts."""


class Start(msgspec.Struct, frozen=True):
    """The first message, which contains the checkpoint to load."""

    model: str | None
    """Checkpoint directory, or None for the embedded checkpoint."""
    config: EngineConfig
    family: str | None = None
    """See `WorkerConfig.family`."""
    end_token_ids: tuple[int, ...] | None = None
    """Same as the argument of `load_model`."""
    generation_config: str = "vllm"
    """See `WorkerConfig.generation_config`."""
    replica: Replica = Replica()
    loras: tuple[LoraFolder, ...] | None = None
    """LoRA adapters, or None if the engine does not serve adapters."""
    step_bytes: int | None = None
    """Memory of the largest step that the first process of the engine reported, or None for that process."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of an output, apart from its settings.

    After a failure, an output continues only if they are the same.
    """

    prompt: bytes
    """Digest of the prompt's ids and media."""
    weights: bytes
    """Digest of the state of the checkpoint's weight files."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A new request, or a request whose output continues."""

    request_id: str
    input_ids: bytes
    """Prompt ids, int64 [T], native byte order. The handle words among them are all that the engine receives about
    media."""
    params: SamplingParams
    asked_s: float = msgspec.field(default_factory=time.monotonic)
    """Time at which the client received the request, by time.monotonic. All processes of a machine share this clock."""
    drawn_ids: list[int] = []
    """Output tokens that were drawn before. The engine continues after them as if it had drawn them itself."""
    origin: Origin | None = None
    """Origin of an output that has begun. The request fails if its origin is another one."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Cancellation of a request. It is ignored if the request is unknown or has finished."""

    request_id: str


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """A request for the features of a prompt's media. The answer is one Progress with the features of some items.

    The client sends another message for the remaining items, so that a step of other requests can come between.
    """

    request_id: str
    input_ids: bytes
    """Prompt ids with handle words, int64 [T], native byte order."""
    start: int = 0
    """Index of the first item to encode."""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """A request to read a LoRA adapter. The answer is one Progress with the adapter's key."""

    request_id: str
    folder: str
    key: str = ""
    """Key that the adapter must have, because other engines have it under this key, or an empty string."""


class KeepLoras(msgspec.Struct, frozen=True, tag="keep_loras"):
    """Notice that requests use no other LoRA adapters than these."""

    keys: list[str]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position."""

    token_id: int
    """Token at this position."""
    logprob: float
    """Natural log-probability of the token."""
    top: list[tuple[int, float]]
    """The most likely tokens in descending order, or the `logprob_token_ids`, each with its log-probability."""
    rank: int | None = None
    """Rank of a prompt token by its probability, from 1. Equally likely tokens have the same rank. None for output
    tokens."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a request spent in each stage, in seconds."""

    queue_s: float
    """Time until the request is scheduled, including the time to restart an engine that died."""
    prefill_s: float
    """Time from the first scheduled chunk to the first token. This includes `tower_s`."""
    tower_s: float
    """Time in the towers."""
    decode_s: float
    """Time from the first token to the last."""


class Features(msgspec.Struct, frozen=True, array_like=True):
    """The features of one media item."""

    data: bytes
    """Values in native byte order."""
    dtype: str
    """`float16` or `float32`."""
    num_features: int
    grid: tuple[int, ...]
    """`MediaShape.grid` of the item."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of one request in one or several steps."""

    request_id: str
    token_ids: list[int] = []
    """Output tokens of these steps. Empty if the request only scores its prompt, or if the progress only concerns
    media."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each prompt token except the first, if the request asked for them. They are sent with the
    first output token."""
    cached_tokens: int | None = None
    """Number of prompt tokens that were in the prefix cache. It is sent with the first output token."""
    finish_reason: FinishReason | None = None
    """Reason why the request has finished, or None while it runs."""
    stop_token_id: int | None = None
    """The id in `stop_token_ids` that ended the request, if any."""
    media_consumed: bool = False
    """True if the blocks of the request's media may be freed. This is sent once for each Add. If the engine needs the
    blocks later, the request fails with StaleReference."""
    origin: Origin | None = None
    """Origin of the output. It is sent with `media_consumed` and with the first output token."""
    pooled: bytes = b""
    """Pooled hidden states, float32 in native byte order, if the request asked for them. They are sent with the finish
    reason."""
    features: list[Features] = []
    """Features of the next media items of an `Encode`."""
    lora_key: str = ""
    """Key of the adapter that a `LoadLora` has loaded."""
    error: Failure | None = None
    """Error that ended the request. No more progress follows."""
    timings: Timings | None = None
    """Time in each stage up to the last of these tokens. Every message with tokens contains it."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Notice that the engine is ready for requests. An engine that cannot start sends a Failure instead."""

    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of prompt and output together, or of the prompt alone if `max_output_len` is set."""
    device: str
    dtype: str
    """Data type of the model, such as float32."""
    kv_cache_tokens: int
    """Capacity of the KV cache in tokens."""
    kv_cache_bytes: int
    """Size of each rank's KV cache in bytes."""
    kv_block_size: int
    """Number of tokens in a KV block."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids, which end an output."""
    max_output_len: int | None = None
    """Maximum number of output tokens, if they do not count toward `max_model_len`."""
    default_sampling: SamplingParams = SamplingParams()
    """Default sampling settings of requests."""
    step_bytes: int = 0
    """Memory of the largest step of each rank, in bytes."""
    free_bytes: int = 0
    """Free memory of the device in bytes, after the KV cache was allocated."""
    encoder_cache_tokens: int = 0
    """Number of media features that the encoder cache holds."""
    hidden_size: int | None = None
    """Width of the hidden states, or None if the engine does not pool them."""
    has_head: bool = True
    """See `ModelSpec.has_head`."""
    lora_keys: dict[str, str] = {}
    """Keys of the adapters in `Start.loras` that were read, by folder."""
    num_devices: int = 1
    """Number of visible devices that the setting `device` allows. It is 1 for the CPU and for a name with an index."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gauges of the engine after a step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV cache that is in use, in [0, 1]."""
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    prefix_cache_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    preemptions: int = 0
    drafts: int = 0
    """Number of times that a step computed guesses of a request."""
    draft_tokens: int = 0
    """Number of guesses."""
    accepted_tokens: int = 0
    """Number of guesses that were drawn."""


class Stepped(msgspec.Struct, frozen=True):
    """The results of one or several steps. These messages follow Ready."""

    progress: list[Progress]
    stats: Stats


ToEngine = Add | Abort | Encode | LoadLora | KeepLoras
