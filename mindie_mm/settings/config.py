"""Settings, as frozen dataclasses. Relative paths are made absolute when the settings are made.

Set a field by a flag of `mindie-mm serve`, by the variable MINDIE_MM_<FIELD>, or by the key <field> of a TOML file. A
flag wins over a variable, and a variable over the file (`sources.py`). A field's docstring is the help of its flag.
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
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.settings.limits import Count, CountOrNone, Seconds, complete_paths, require

MiB = 2**20
GiB = 2**30
MAX_IMAGE_PIXELS = 178_956_970
"""Maximum number of pixels of an image that Pillow opens."""
MAX_SOURCE_BYTES = 512 * MiB
"""Maximum size of one encoded medium in bytes."""
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}|\*))?")
_MOST_DECODERS = 8
"""Number of decoders on hosts with more CPUs, unless a setting asks for more."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_Byte = Annotated[int, Meta(ge=0, le=255)]
Colour = tuple[_Byte, _Byte, _Byte]
"""Red, green and blue."""
TowerParallel = Literal["replicate", "items"]
ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine process."""

    device: str = "auto"
    """Device that runs the model: auto, npu, cuda or cpu. auto takes an accelerator if there is one."""
    dtype: str = "auto"
    """Type of weights and activations: auto, float32, bfloat16 or float16. auto is float32 on the CPU, and the
    checkpoint's own type on other devices."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Maximum number of tokens of prompt and output together; of an encoder-decoder, of each. The start fails if
    the KV cache cannot hold so many. Default: the checkpoint's own, or fewer if the KV cache holds fewer."""
    max_num_seqs: Count = 64
    """Maximum number of requests in one step. More raise the throughput and take more KV cache."""
    max_num_batched_tokens: Count = 2048
    """Maximum number of tokens in one step. Longer prompts are computed in chunks, so a lower value
    makes running answers smoother and long prompts slower."""
    max_tower_tokens: Count = 16384
    """Maximum number of media features that one step computes. A single larger item has a step of its own."""
    max_tower_bytes: Count = 256 * MiB
    """Maximum size of the media that one step reads, and of the features that it computes, in bytes. A single larger
    item has a step of its own."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Fraction of the memory left by the weights that the KV cache, the encoder cache and the largest step may use
    together. Default: 0.5 on the CPU, else 0.9."""
    kv_cache_bytes: Count | None = None
    """Size of the KV cache in bytes. The cache never exceeds the need of max_num_seqs full contexts. Default:
    the rest of memory_share."""
    measure_s: Annotated[float, Meta(ge=0)] | None = None
    """Time in seconds to measure how much memory the largest step takes, during the start. Larger sizes are
    extrapolated. 0 skips the measurement and reserves nothing for that step. Default: 0.5 on the CPU, else 10."""
    kv_block_size: Count | None = None
    """Number of tokens in one block of the KV cache. Default: 128 on an NPU, else 16."""
    encoder_cache_bytes: CountOrNone = 256 * MiB
    """Memory in bytes for features of media, so that an item that comes again skips the tower."""
    prefix_caching: bool = True
    """Reuse the KV cache for prompts with the same beginning, media included."""
    enforce_eager: bool = False
    """Launch each operator of a decode step by itself. Off: record the step and launch it at once, as CUDA graphs do,
    if one device runs the model and supports it."""
    step_timeout_s: Seconds = 300.0
    """Maximum time of one step in seconds. An engine that takes longer is stopped and restarted."""
    num_threads: CountOrNone = 0
    """Number of CPU threads of the engine, of each rank if there are several. 0: one for each CPU that the affinity
    mask and the control group allow, shared by the ranks, or OMP_NUM_THREADS."""
    tensor_parallel: Count = 1
    """Number of devices (on the CPU: of processes) that share the text model's weights."""
    tower_parallel: TowerParallel = "replicate"
    """How ranks encode media. replicate: every rank encodes every item. items: each rank encodes a share of the items,
    which is faster for many pictures at once."""
    vision_device: str | None = None
    """Device that runs the vision tower. Default: the same as the model."""
    vision_bits: int | None = None
    """Precision of the vision tower in bits: 16 or 32. Default: the model's dtype."""
    projector_device: str | None = None
    """Device that runs the projector between tower and decoder. Default: the same as the model."""
    projector_bits: int | None = None
    """Precision of the projector in bits: 16 or 32. Default: the model's dtype."""

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
    """Decoding of media items, and limits on them.

    Limits are checked from an item's header before decoding, and while it is decoded.
    """

    max_image_pixels: Annotated[int, Meta(ge=1, le=MAX_IMAGE_PIXELS)] = MAX_IMAGE_PIXELS
    """Maximum number of pixels of one image, as stored. The default is also the highest value, because Pillow opens no
    larger image."""
    max_request_pixels: Count = 2**30
    """Maximum number of pixels of all images in one request, as stored. Frames that are sent as images count too."""
    max_video_pixels: Count = 2**25
    """Maximum number of pixels of one video frame."""
    max_video_frames: Count = 2**18
    """Maximum number of frames in a video file, whether they are sampled or not."""
    max_video_seconds: Seconds = 4 * 3600.0
    """Maximum length of a video in seconds."""
    max_request_video_pixels: Count = 2**38
    """Maximum number of pixels of all decoded video frames in one request. Frames between the sampled ones count too,
    because they have to be decoded."""
    max_audio_seconds: Seconds = 4 * 3600.0
    """Maximum length of a sound in seconds, as its container states it."""
    max_audio_samples: Count = 2**26
    """Maximum number of samples per channel to decode from a sound, whatever its container states."""
    max_decode_bytes: CountOrNone = 4 * GiB
    """Maximum memory in bytes that a decoder process may allocate, beyond its size at the start. A request that needs
    more fails alone. 0 removes the limit."""
    max_decode_s: Seconds = 600.0
    """Maximum processor time in seconds to decode one media item, in whole seconds. A request that needs more fails
    alone."""
    rgba_background_color: Colour = (255, 255, 255)
    """Background of transparent images: red, green and blue, from 0 to 255 each."""

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of the worker.

    A worker has a tokenizer with decoders, and an engine, over one checkpoint.
    """

    model: Path | None = None
    """Checkpoint directory. Default: the embedded checkpoint."""
    family: str | None = None
    """Model family to use, whatever config.json says. Default: the family that config.json names."""
    generation_config: str = "auto"
    """Source of the sampling parameters that a request leaves out. auto: the checkpoint's generation_config.json. vllm:
    neutral values, temperature 1 and no other limits. Or a folder with a generation_config.json, whose end-of-sequence
    tokens count, too."""
    decoders: CountOrNone = 0
    """Number of decoder processes, which decode media in parallel. 0: one for each CPU that the affinity mask and the
    control group allow, but at most 8. In a script (LLM), 0 decodes on a thread of the script."""
    arena_bytes: Annotated[int, Meta(ge=2**16)] = 256 * MiB
    """Shared memory in bytes for preprocessed media. A picture of 640x480 pixels takes about 1 MiB, until the engine
    has read it."""
    arena_request_bytes: Count | None = None
    """Maximum number of bytes of the arena that one request may hold. Default: half of the arena."""
    arena_wait_s: Seconds = 60.0
    """Maximum time in seconds that a request waits for room in the arena. Then it gets status 503."""
    preprocessed_cache_bytes: CountOrNone = 256 * MiB
    """Memory in bytes of the tokenizer process for preprocessed media. Media that come again, as in every turn of a
    chat, are copied from it. 0 turns it off."""
    truncate: bool = False
    """Shorten a prompt that is too long, by its oldest text and whole media items, instead of refusing it."""
    chat_template_content_format: ContentFormat = "auto"
    """Form in which the chat template gets the content of messages. string: one text, with the markers of media items
    in front. openai: a list of parts. auto: the form that the template reads."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaCaps = field(default_factory=MediaCaps)

    def __post_init__(self) -> None:
        require(self)
        complete_paths(self)

    @property
    def num_decoders(self) -> int:
        """Number of decoder processes of a service."""
        return self.decoders or min(available_cpus(), _MOST_DECODERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of the HTTP service."""

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you listen on more than loopback."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on. 0 takes a free port, which the line printed at the start names."""
    api_key: tuple[str, ...] = field(default=(), metadata={"secret": True})
    """API key that requests must send as `Authorization: Bearer KEY`. Repeat the option for several keys. /health and
    /metrics need no key. Default: no request needs one."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call the service, such as https://example.org, http://localhost:* for any port, or *
    for all. Repeat the option for several origins."""
    web_page: bool = True
    """Serve a web page at / for questions and for watching the service."""
    served_model_name: str | None = None
    """Name of the model in requests and answers. Default: the name of the checkpoint's directory, or `owner/name` in
    the Hugging Face cache."""
    spool: Path | None = None
    """Folder for the media and the path file of each request. Default: mindie_mm-<uid> in the temporary directory."""
    reclaim_interval_s: Seconds = 60.0
    """Time in seconds between two searches for shared memory that dead processes left."""
    max_concurrent_requests: Count = 256
    """Maximum number of requests in progress. Further requests get status 429."""
    request_timeout_s: Seconds = 600.0
    """Maximum time in seconds of one request, from fetching its media to the end of its answer."""
    send_timeout_s: Annotated[float, Meta(ge=0.001, le=86400)] = 60.0
    """Maximum time in seconds that a client may read nothing of its answer. Then the connection is closed."""
    grace_s: Annotated[float, Meta(ge=0)] = 5.0
    """Time in seconds that running requests have to finish after a stop signal. A second signal ends it."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text, or json for one object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info, warning or error. Other libraries never log at debug."""
    strict: bool = False
    """Refuse chats with unknown keys in content parts. Off: ignore such keys, with one warning per key."""
    json_additional_properties: Literal["allow", "close"] = "close"
    """Whether an object of a JSON schema may have properties that the schema does not name, where the schema does not
    state additionalProperties. close: it may not, so that small models end. allow: it may, as JSON Schema says. A
    schema with `strict` is closed in any case."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order in which requests are scheduled. fcfs: first come, first served; a `priority` other than 0 is refused.
    priority: requests with a lower `priority` come first. Any client may then delay the others."""
    log_prompts: bool = False
    """Log the text of prompts. Media are never logged."""
    otlp_endpoint: str | None = None
    """URL that receives OpenTelemetry spans, such as http://localhost:4318/v1/traces: one span per request. Requires
    the extra `otel`."""
    max_request_bytes: Count = 64 * MiB
    """Maximum size of a request body in bytes."""
    max_request_values: Count = 2**18
    """Maximum number of JSON values in a request body, counted by its brackets, braces and commas, including those in
    texts."""
    max_held_bytes: Count = 1 * GiB
    """Maximum size of the bodies of all requests in progress, in bytes. Further requests are refused."""
    max_item_bytes: Count = 64 * MiB
    """Maximum size of one media item in bytes, after base64 and before media decoding."""
    max_media_bytes: Count = 256 * MiB
    """Maximum size of all media items of one request, in bytes."""
    max_spool_bytes: Count = 2 * GiB
    """Maximum size of all media files in the spool, in bytes. Further requests are refused. Must be at least
    max_media_bytes."""
    max_media_items: CountOrNone = 32
    """Maximum number of media items in one request."""
    max_images: CountOrNone = 32
    """Maximum number of images in one request."""
    max_videos: CountOrNone = 8
    """Maximum number of videos in one request."""
    max_audios: CountOrNone = 8
    """Maximum number of sounds in one request."""
    fetch_timeout_s: Seconds = 30.0
    """Maximum time in seconds to fetch one media item over HTTP, redirects included."""
    fetch_connect_timeout_s: Seconds = 5.0
    """Maximum time in seconds to connect to a media server."""
    fetch_read_timeout_s: Seconds = 10.0
    """Maximum time in seconds that a media server may send nothing."""
    max_fetch_redirects: CountOrNone = 3
    """Maximum number of redirects when fetching an item. Each target is checked like the first URL."""
    max_concurrent_fetches: Count = 16
    """Maximum number of items fetched over HTTP at once. One request may use a quarter of them; more wait."""
    allowed_media_dir: Path | None = None
    """Folder that requests may read media files from. Default: requests may read no files."""
    allowed_media_domains: tuple[str, ...] = ()
    """Host, with its subdomains, that media may be fetched from. Repeat the option for several hosts. Default: any
    public host."""
    allow_private_media: bool = False
    """Fetch media from private addresses too, such as 10.0.0.1 or localhost."""

    def __post_init__(self) -> None:
        require(self)
        complete_paths(self)
        if self.max_spool_bytes < self.max_media_bytes:
            raise InputError(f"max_spool_bytes is {self.max_spool_bytes}, it must be at least {self.max_media_bytes}")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_key):
            raise InputError("an api_key is empty, or holds what a header cannot: a key is printable ASCII")
        for origin in self.cors_origin:
            _require_origin(origin)
        if self.otlp_endpoint is not None:
            _require_url("otlp_endpoint", self.otlp_endpoint)


def _require_origin(origin: str) -> None:
    """Raise InputError unless `origin` is * or an origin as browsers write it, perhaps with * as its port."""
    parts = _ORIGIN.fullmatch(origin)
    port = parts[3] if parts is not None else None
    if origin != "*" and (parts is None or (port not in (None, "*") and int(port or 0) > 65535)):
        raise InputError(
            f"cors_origin is {origin!r}, it must be * or an origin such as https://example.org, in lower case and "
            "ASCII (xn--), without a slash at its end. A port may follow, or :* for any port"
        )
    if parts is not None and port is not None and port == _DEFAULT_PORTS.get(parts[1]):
        raise InputError(f"cors_origin is {origin!r}; leave out :{port}, because browsers omit the port of {parts[1]}")


def _require_url(name: str, url: str) -> None:
    """Raise InputError unless `url` is an http or https URL without a password. Settings are logged."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{name} is no URL: {error}") from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InputError(f"{name} holds a user name or a query, which may be secret, and settings are logged")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{name} is {url!r}, it must be a URL of http or https")


def require_media_dir(config: ServiceConfig) -> None:
    """Raise InputError if `allowed_media_dir` is set and is not a folder that this user may enter."""
    folder = config.allowed_media_dir
    if folder is None:
        return
    if not os.path.isdir(folder):  # noqa: PTH112 - False where it cannot be looked at, too
        raise InputError(f"allowed_media_dir is {folder}, which is no folder")
    if not os.access(folder, os.X_OK):
        raise InputError(f"allowed_media_dir is {folder}, which user {os.geteuid()} may not enter")
