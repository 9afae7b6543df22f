"""Settings, frozen.

Every field can be set by a flag of `mindie-mm serve`, by the variable MINDIE_MM_<FIELD>, or by the key <field> of a
TOML file; the first of these that is given counts (`sources.py`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from mindie_mm.errors import InputError
from mindie_mm.limits import Count, CountOrNone, Seconds, require

MiB = 2**20
GiB = 2**30
MAX_IMAGE_PIXELS = 178_956_970
"""Most pixels of an image that Pillow opens."""
MAX_SOURCE_BYTES = 512 * MiB
"""Most bytes of one encoded medium."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
TowerParallel = Literal["replicate", "items"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine process."""

    device: str = "auto"
    """auto, npu, cuda or cpu."""
    dtype: str = "auto"
    """auto (float32 on the CPU, else the checkpoint's own), float32, bfloat16 or float16."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Most tokens of prompt and output together, of an encoder-decoder of each; the start fails if the KV cache does
    not hold them. None: the checkpoint's own, or fewer if it does not hold those."""
    max_num_seqs: Count = 64
    """Most requests in one step."""
    max_num_batched_tokens: Count = 2048
    """Most tokens in one step; longer prompts are prefilled in chunks."""
    max_tower_tokens: Count = 16384
    """Most features that the towers compute in one step, unless a single item has more."""
    max_tower_bytes: Count = 256 * MiB
    """Most bytes of the media that they take, and of the features that they give, in one step; as above."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the memory that is free beside the weights, for the KV cache, the encoder cache and the largest step
    together; None: 0.5 on the CPU, else 0.9."""
    kv_cache_bytes: Count | None = None
    """Memory for the KV cache; None: what the others leave of memory_share. Never more than max_num_seqs full contexts
    need."""
    measure_s: Annotated[float, Meta(ge=0)] | None = None
    """About how long the largest step is tried at the start, for the memory that it takes: larger sizes are reckoned
    from smaller ones. 0: not at all; None: 0.5 on the CPU, else 10."""
    kv_block_size: Count | None = None
    """Tokens in one block of the KV cache; None: what suits the device, 128 on an NPU, else 16."""
    encoder_cache_bytes: CountOrNone = 256 * MiB
    """Memory for the towers' features, kept by content."""
    prefix_caching: bool = True
    """Whether prompts that begin alike, media included, share what the KV cache holds of them."""
    enforce_eager: bool = False
    """Whether each operator of a decode step is launched by itself, where the device could record the step and launch
    it as one (CUDA graphs; with one device)."""
    step_timeout_s: Seconds = 300.0
    """Longest that a step may take while requests wait: an engine that hangs is ended, and started again."""
    num_threads: CountOrNone = 0
    """Threads of the engine process on the CPU, of each rank if there are several. 0: as many as the CPUs that the
    affinity mask and the control group allow, shared by the ranks; OMP_NUM_THREADS comes before that."""
    tensor_parallel: Count = 1
    """Processes, and devices, that share the text model's weights and heads."""
    tower_parallel: TowerParallel = "replicate"
    """What their towers do, which are whole on each: replicate, each encodes all items; items, each a share of them."""
    vision_device: str | None = None
    """Where the vision tower runs, as `device`; None: where the rest does."""
    vision_bits: int | None = None
    """Precision of the vision tower: 32 or 16; None: the model's dtype."""
    projector_device: str | None = None
    """Where the projector runs, which brings the tower's features to the decoder's width; None: with the rest."""
    projector_bits: int | None = None
    """Precision of the projector: 32 or 16; None: the model's dtype."""

    def __post_init__(self) -> None:
        require(self)
        for name in ("vision_bits", "projector_bits"):
            if (bits := getattr(self, name)) not in (None, 16, 32):
                raise InputError(
                    f"{name} is {bits}, it must be 16 or 32: a part is not quantised at load; a checkpoint that is "
                    "quantised says so in its config.json, and is loaded as it says"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaCaps:
    """How much media items may be, told by their headers before they are decoded, or while they are decoded."""

    max_image_pixels: Annotated[int, Meta(ge=1, le=MAX_IMAGE_PIXELS)] = MAX_IMAGE_PIXELS
    """Most pixels of an image, as stored. No more than the default, above which Pillow reads no image."""
    max_request_pixels: Count = 2**30
    """Most pixels of all images of a request, as stored, with those of frames that are handed in as images."""
    max_video_pixels: Count = 2**25
    """Most pixels of one frame of a video."""
    max_video_frames: Count = 2**18
    """Most frames of a video as encoded, sampled or not."""
    max_video_seconds: Seconds = 4 * 3600.0
    """Longest video."""
    max_request_video_pixels: Count = 2**38
    """Most pixels of the frames of a request's videos that are decoded, those between the sampled ones included."""
    max_audio_seconds: Seconds = 4 * 3600.0
    """Longest clip of sound, as its container states it."""
    max_audio_samples: Count = 2**26
    """Most samples of one channel that are decoded of a clip, whatever its container states."""
    max_decode_bytes: CountOrNone = 4 * GiB
    """Memory of its own that a tokenizer process may take while it decodes, beyond what it has when it is ready; what
    asks for more fails alone. 0: no limit."""

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Tokenizer processes and an engine over one checkpoint."""

    model: Path | None = None
    """Checkpoint directory; None is the embedded one."""
    family: str | None = None
    """Family that serves it, whatever its config.json suggests; None: the one that its config.json names."""
    num_tokenizers: Count = 1
    """Tokenizer processes."""
    arena_bytes: Annotated[int, Meta(ge=2**16)] = 256 * MiB
    """Shared memory of each tokenizer process; a picture of 640x480 pixels takes about a MiB of it."""
    arena_request_bytes: Count | None = None
    """Most of it that one request may hold; None: half."""
    preprocessed_cache_bytes: CountOrNone = 256 * MiB
    """Memory in which each tokenizer process keeps media that it preprocessed, for requests that bring them again, as
    every turn of a chat does. 0: none."""
    truncate: bool = False
    """Drop the oldest text and whole media items of a prompt that is too long, instead of refusing it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaCaps = field(default_factory=MediaCaps)

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The HTTP service over one worker."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes a free port; the line printed when ready names it."""
    api_key: tuple[str, ...] = field(default=(), metadata={"secret": True})
    """Keys, one of which a request must bear, as `Authorization: Bearer KEY`; empty: nobody is asked for one. /health
    and /metrics never ask."""
    cors_origin: tuple[str, ...] = ()
    """Web pages' origins, such as https://example.org, whose scripts may call the service; * is every page."""
    web_page: bool = True
    """Serve a page at / to ask with, and to watch the service."""
    served_model_name: str | None = None
    """Name of the model in requests and answers; None: the name of the checkpoint's directory, `owner/name` of one
    in Hugging Face's cache."""
    spool: Path | None = None
    """Folder in which requests keep their path files and media; None: mindie_mm-<uid> in the
    temporary directory."""
    reclaim_interval_s: Seconds = 60.0
    """How often shared memory of dead processes is looked for."""
    max_concurrent_requests: Count = 256
    """Most requests being answered; further ones are refused."""
    request_timeout_s: Seconds = 600.0
    """Longest that one request may take, media fetching included."""
    send_timeout_s: Annotated[float, Meta(ge=0.001, le=86400)] = 60.0
    """Longest that a client may take nothing of an answer before its connection is dropped."""
    grace_s: Annotated[float, Meta(ge=0)] = 5.0
    """How long running requests may go on after a stop was asked for, before they are aborted; a second signal ends
    it."""
    log_format: Literal["text", "json"] = "text"
    """text, or json: an object a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe records that are logged: debug, info, warning or error. Of other libraries, no debug records."""
    log_prompts: bool = False
    """Log the text of prompts, too; media never are."""
    otlp_endpoint: str | None = None
    """URL that takes OpenTelemetry spans, as http://localhost:4318/v1/traces: one a request. Needs the extra otel."""
    max_request_bytes: Count = 64 * MiB
    """Longest request body."""
    max_request_values: Count = 2**18
    """Most values in a request body: brackets, braces and commas are counted, in texts too. Each takes memory and time
    before anything else is known of the request."""
    max_held_bytes: Count = 1 * GiB
    """Longest sum of the bodies of the requests being read and answered; further ones are refused."""
    max_item_bytes: Count = 64 * MiB
    """Longest media item, decoded from base64, before it is decoded as media."""
    max_media_bytes: Count = 256 * MiB
    """Longest sum of a request's media items."""
    max_spool_bytes: Count = 2 * GiB
    """Longest sum of the media items of all requests, as files in the spool; further ones are refused. At least
    max_media_bytes."""
    max_media_items: CountOrNone = 32
    """Most media items in one request."""
    max_images: CountOrNone = 32
    """Most images in one request."""
    max_videos: CountOrNone = 8
    """Most videos in one request."""
    max_audios: CountOrNone = 8
    """Most clips of sound in one request."""
    fetch_timeout_s: Seconds = 30.0
    """Longest that fetching one item over HTTP may take, redirects included."""
    fetch_connect_timeout_s: Seconds = 5.0
    """Longest that connecting to a media server may take."""
    fetch_read_timeout_s: Seconds = 10.0
    """Longest that a media server may be silent."""
    max_fetch_redirects: CountOrNone = 3
    """Most redirects that a fetch follows, each judged as the first URL is."""
    max_concurrent_fetches: Count = 16
    """Most items being fetched over HTTP, a quarter of them for one request; further ones wait."""
    allowed_media_dir: Path | None = None
    """Files named by a request must lie under this folder; None: no file is read."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts, with their subdomains, that media may be fetched from; empty: every host."""
    allow_private_media: bool = False
    """Fetch from addresses that are not public, too."""

    def __post_init__(self) -> None:
        require(self)
        if self.max_spool_bytes < self.max_media_bytes:
            raise InputError(f"max_spool_bytes is {self.max_spool_bytes}, it must be at least {self.max_media_bytes}")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_key):
            raise InputError("an api_key is empty, or holds what a header cannot: a key is printable ASCII")
        for origin in self.cors_origin:
            _require_origin(origin)
        if self.otlp_endpoint is not None:
            _require_url("otlp_endpoint", self.otlp_endpoint)


def _require_origin(origin: str) -> None:
    """InputError for what is neither * nor an origin as browsers write it."""
    if not _ORIGIN.fullmatch(origin):
        raise InputError(
            f"cors_origin is {origin!r}, it must be * or such as https://example.org, in small letters, a port behind "
            "it where there is one, no slash"
        )


def _require_url(name: str, url: str) -> None:
    """InputError unless `url` is of http or https, and holds no password: settings are logged."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{name} is no URL: {error}") from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InputError(f"{name} holds a user name or a query, which may be secret, and settings are logged")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{name} is {url!r}, it must be a URL of http or https")


def require_media_dir(config: ServiceConfig) -> None:
    """InputError unless `allowed_media_dir`, where one is set, is a folder whose files this user may open."""
    folder = config.allowed_media_dir
    if folder is None:
        return
    if not os.path.isdir(folder):  # noqa: PTH112 - False where it cannot be looked at, too
        raise InputError(f"allowed_media_dir is {folder}, which is no folder")
    if not os.access(folder, os.X_OK):
        raise InputError(f"allowed_media_dir is {folder}, which user {os.geteuid()} may not enter")
