"""Settings, as frozen dataclasses. Relative paths become absolute when an object is created.

Set a field with a flag of `mindie-mm serve`, with the variable MINDIE_MM_<FIELD>, or with the key <field> of a TOML
file. A flag overrides a variable, and a variable overrides the file (`sources.py`). A field's docstring is the help
text of its flag.
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
from mindie_mm.settings.limits import Count, CountOrNone, PromptLimits, Seconds, complete_paths, converted, require
from mindie_mm.settings.paths import absolute

MiB = 2**20
GiB = 2**30
MAX_IMAGE_PIXELS = 178_956_970
"""Maximum number of pixels in an image that Pillow opens."""
MAX_LORA_NAME = 256
"""Maximum number of characters in the name of a LoRA adapter."""
MAX_SOURCE_BYTES = 512 * MiB
"""Maximum size of one encoded media item in bytes."""
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}|\*))?")
_ROOT_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")
_MOST_DECODERS = 8
"""Maximum number of decoders if no setting states a number."""
SERVICE_PROMPT_LIMITS: PromptLimits = {"image": 32, "video": 8, "audio": 8}
"""Default of `limit_mm_per_prompt` in the service, whose clients may be strangers."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_Byte = Annotated[int, Meta(ge=0, le=255)]
Colour = tuple[_Byte, _Byte, _Byte]
"""Red, green and blue."""
TowerParallel = Literal["replicate", "items"]
Pooling = Literal["last", "mean", "cls"]
"""Hidden states that become an embedding: the last token's, the mean of all tokens', or the first token's."""
ContentFormat = Literal["auto", "string", "openai"]
Switch = Literal["on", "off"]
Replicas = Count | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine process."""

    device: str = "auto"
    """Device that runs the model: auto, npu, cuda or cpu, or one of several devices, such as npu:3 or cuda:1. auto
    chooses an accelerator if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations: auto, float32, bfloat16 or float16. auto: the checkpoint's data type. On a
    CPU, auto is bfloat16 only if the checkpoint is stored in it and the processor has `avx512_bf16` or AMX, and else
    float32. Also that of normalized pixels in tensors of /render. auto: that of vLLM, which takes bfloat16 instead of
    float32."""
    weights: Literal["auto", "int8"] = "auto"
    """Precision of the text model's linear layers: auto, which keeps the data type, or int8. int8 needs a
    quarter of the memory of float32, makes decoding faster and prefills slightly slower, and changes answers slightly.
    It requires a CPU, and data type float32 or bfloat16."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Maximum number of tokens in prompt and answer together; for an encoder-decoder model, in each of them. The engine
    does not start if the KV cache is too small for this number. Default: the checkpoint's maximum, with the factor of
    YaRN or linear scaling, reduced if the KV cache is smaller."""
    max_num_seqs: Count = 64
    """Maximum number of requests in one step. A higher value increases the throughput, and uses more of the KV
    cache."""
    max_num_batched_tokens: Count = 2048
    """Maximum number of tokens in one step. Longer prompts are computed in chunks. A lower value makes the streams of
    other requests smoother, but slows down long prompts."""
    max_tower_tokens: Count = 4096
    """Maximum number of media features that one step computes. An item with more features gets its own step."""
    max_tower_bytes: Count = 256 * MiB
    """Maximum total size of the media that one step reads and of their features. A larger item gets its own step."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Fraction of the free memory that the KV cache, the encoder cache and the largest step may use together. The free
    memory is measured after the weights are loaded. Default: 0.5 on the CPU, else 0.9."""
    kv_cache_bytes: Count | None = None
    """Size of the KV cache. The cache is never larger than max_num_seqs requests of maximum length need. Default: the
    rest of memory_share."""
    kv_block_size: Count | None = None
    """Number of tokens in one block of the KV cache. Default: 128 on an NPU, else 16."""
    encoder_cache_bytes: CountOrNone = 256 * MiB
    """Maximum size of the cache of media features. The tower does not run again for an item in this cache. The cache
    is smaller if memory is short."""
    prefix_caching: bool = True
    """Reuse the KV cache for prompts that begin with the same tokens and media."""
    num_speculative_tokens: CountOrNone | None = None
    """Maximum number of next tokens of a request that are guessed and checked in one step. The guesses are the tokens
    that followed the last three tokens at an earlier place of prompt and answer. They speed up answers that repeat
    such places, and do not change them. 0: no guesses. On accelerators, another value turns off `async_scheduling`.
    Default: 7 on the CPU, else 0."""
    enforce_eager: bool = False
    """Do not capture decode steps as graphs. Off: use graphs if the device supports them."""
    async_scheduling: bool = True
    """Schedule and launch each step while an accelerator still computes the step before. Off: wait for each step. It
    has no effect on the CPU."""
    step_timeout_s: Seconds = 300.0
    """Maximum time of one step. If a step takes longer, the engine process is killed and restarted."""
    num_threads: CountOrNone = 0
    """Number of CPU threads of the engine, or of each rank. 0: OMP_NUM_THREADS, or one thread for each CPU that the
    affinity mask and the cgroup allow; ranks and engines share these threads."""
    cpu_binding: Literal["auto", "off"] = "auto"
    """Binding of the engine, the tokenizer and the decoders to CPUs. auto: CPUs near their devices, on NPUs of hosts
    with Arm processors. off: no binding."""
    tensor_parallel: Count = 1
    """Number of devices, or of processes on the CPU, among which the text model is divided."""
    max_loras: Count = 4
    """Maximum number of LoRA adapters on the device, and of different adapters in one step. Others leave the device,
    the least recently used first, and come back when a request needs them. Each takes memory that the KV cache then
    lacks."""
    max_lora_rank: Count = 64
    """Maximum rank of a LoRA adapter. Memory is reserved for adapters of this rank in all linear layers."""
    tower_parallel: TowerParallel = "replicate"
    """How ranks encode media. replicate: every rank encodes every item. items: each rank encodes a share of the items,
    which is faster for many concurrent images."""
    vision_device: str | None = None
    """Device that runs the vision tower, such as cpu or cuda:1. Default: the same as the model."""
    vision_bits: int | None = None
    """Precision of the vision tower in bits: 16 or 32. Default: the model's dtype, but 32 instead of bfloat16 on
    processors of Intel without AMX, which multiply float32 faster."""
    projector_device: str | None = None
    """Device that runs the projector between vision tower and text model. Default: the same as the model."""
    projector_bits: int | None = None
    """Precision of the projector in bits: 16 or 32. Default: the default of the vision tower."""

    def __post_init__(self) -> None:
        require(self)
        if self.tensor_parallel > 1 and ":" in self.device:
            raise InputError(
                f"device is {self.device!r}, which is one device, but tensor_parallel is {self.tensor_parallel}; leave "
                "out the index"
            )
        for name in ("vision_bits", "projector_bits"):
            if (bits := getattr(self, name)) not in (None, 16, 32):
                raise InputError(
                    f"{name}={bits} must be 16 or 32. To run a part in fewer bits, use a checkpoint "
                    "in which this part is quantized"
                )


def kind_of_name(device: str) -> str:
    """Return the name of a device without its index, which does not affect answers."""
    return device.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaCaps:
    """Decoding of media items, and limits on them.

    Limits are checked before decoding, against the item's header, and again during decoding.
    """

    max_image_pixels: Annotated[int, Meta(ge=1, le=MAX_IMAGE_PIXELS)] = MAX_IMAGE_PIXELS
    """Maximum number of pixels of one image, before resizing. The default is also the highest value."""
    max_request_pixels: Count = 2**30
    """Maximum number of pixels of all images in one request, before resizing. Frames that are sent as images count,
    too."""
    max_pdf_pages: CountOrNone = 32
    """Maximum number of pages of all PDFs and TIFF documents in one request. Each page becomes an image. 0 refuses
    documents."""
    max_pdf_page_pixels: Annotated[int, Meta(ge=1, le=MAX_IMAGE_PIXELS)] = 2**22
    """Maximum number of pixels of a rendered page. A page that is larger at 144 dpi is rendered at a lower
    resolution."""
    max_pdf_page_s: Seconds = 10.0
    """Maximum CPU time for rendering one page of a document."""
    max_video_pixels: Count = 2**25
    """Maximum number of pixels of one video frame."""
    max_video_frames: Count = 2**18
    """Maximum number of frames in a video file, including frames that are not sampled."""
    max_video_seconds: Seconds = 4 * 3600.0
    """Maximum length of a video."""
    max_request_video_pixels: Count = 2**38
    """Maximum number of pixels of all decoded video frames in one request, including decoded frames that are not
    sampled."""
    max_audio_seconds: Seconds = 4 * 3600.0
    """Maximum length of an audio clip, according to its container."""
    max_audio_samples: Count = 2**26
    """Maximum number of samples per channel to decode from an audio clip. Samples of an upload count at 16 kHz."""
    max_decode_bytes: CountOrNone = 4 * GiB
    """Memory that a decoder process may allocate, in addition to its memory at startup. If a request needs more, only
    this request fails. 0 removes the limit."""
    max_decode_s: Seconds = 600.0
    """Maximum CPU time for decoding one media item. If an item needs more, only its
    request fails."""
    isolate_requests: bool = False
    """Decode each request in decoder processes of its own, which takes 36 ms more processor time per request. Off:
    requests with the same API key and the same `cache_salt` share decoder processes."""
    rgba_background_color: Colour = (255, 255, 255)
    """Background color of transparent images and videos: red, green and blue, each from 0 to 255."""
    hdr_to_sdr: bool = True
    """Convert HDR videos (HLG and PQ) to SDR colors. Off: keep the values of the file, as torchcodec does, which makes
    colors pale."""

    def __post_init__(self) -> None:
        require(self)


NO_DECODERS = frozenset({"max_decode_bytes", "isolate_requests"})
"""Fields of `MediaCaps` that have no effect where no decoder processes are started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of the worker.

    A worker runs one checkpoint. It consists of a tokenizer process, its decoder processes and engine processes.
    """

    model: Path | None = None
    """Checkpoint directory, or the name of a repository on the Hugging Face Hub, such as `Qwen/Qwen2-VL-2B-Instruct`.
    Default: the embedded checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of a repository on the Hugging Face Hub. Default: the branch main."""
    download: bool = False
    """Whether to download the files of a repository that the Hugging Face cache lacks. On a terminal, the commands
    ask."""
    family: str | None = None
    """Model family of the checkpoint. Default: the family that config.json specifies."""
    generation_config: str = "auto"
    """Source of sampling parameters that a request does not set. auto: the checkpoint's generation_config.json. vllm:
    neutral values, such as temperature 1. A folder: the generation_config.json in this folder, including its
    end-of-sequence tokens."""
    decoders: CountOrNone = 0
    """Number of decoder processes, which decode media in parallel. 0: one for each CPU that the affinity mask and the
    cgroup allow, but at most 8. For LLM in a Python script, 0 means that a thread of the script decodes
    media."""
    arena_bytes: Annotated[int, Meta(ge=2**16)] = 256 * MiB
    """Size of the arena, the shared memory for preprocessed media. An image of 640x480 pixels takes about 1 MiB until
    the engine has read it."""
    arena_request_bytes: Count | None = None
    """Maximum space in the arena for the media of one request. Default: half of the arena."""
    arena_wait_s: Seconds = 60.0
    """Maximum time that a request waits for space in the arena. After that, the request gets status 503."""
    preprocessed_cache_bytes: CountOrNone = 256 * MiB
    """Size of the cache of preprocessed media, for media that are sent again, as in every turn of a chat. 0 turns off
    the cache."""
    limit_mm_per_prompt: PromptLimits = field(default_factory=dict)
    """Maximum number of images, videos and audio clips in one prompt, such as `image=4,video=1` or, as JSON, `{"image":
    4, "video": 1, "audio": 0}`. The pages of a PDF count as images. Default: 32 images, 8 videos and 8 audio
    clips in the service, also for kinds that are left out; elsewhere no limit other than the model's."""
    replicas: Replicas = 1
    """Number of engines, each with its own device, or with `tensor_parallel` devices. auto: as many as the visible
    devices allow, and one on the CPU. On the CPU, the engines divide the processors among themselves.
    With --ray, it is the number of workers, each with one engine."""
    replica_surplus_tokens: CountOrNone = 1024
    """An engine that has computed the media or the prefix of a request before gets the request if it has at most this
    number of queued tokens more than the least loaded engine. The difference may also be at most four times the number
    of tokens that the request saves."""
    lora: tuple[str, ...] = ()
    """LoRA adapter to load at the start, as NAME=FOLDER. Requests with this model name use the adapter. Repeatable."""
    lora_dir: Path | None = None
    """Folder below which /v1/load_lora_adapter may read LoRA adapters. Default: /v1/load_lora_adapter and
    /v1/unload_lora_adapter get status 404."""
    truncate: bool = False
    """If a prompt is too long, remove its oldest text and media items instead of refusing the request."""
    chat_template_content_format: ContentFormat = "auto"
    """Format in which the chat template gets the content of messages. string: one text that begins with the markers of
    the media items. openai: a list of content parts. auto: the format that the template expects."""
    parse_special: Switch = "on"
    """Treatment of control tokens, such as `<|im_start|>`, in the text of prompts without a template. on: they are
    control tokens, except those of media items. off: they are plain text, as in chats. A request may set
    `parse_special` itself."""
    pooling: Literal["auto"] | Pooling = "auto"
    """Hidden states that become an embedding: last (of the last token), mean (of all tokens) or cls (of the first
    token). auto: as the checkpoint's files for sentence-transformers (modules.json) specify, last for a checkpoint
    without an output layer, and no embeddings otherwise."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaCaps = field(default_factory=MediaCaps)

    def __post_init__(self) -> None:
        limits = converted("limit_mm_per_prompt", self.limit_mm_per_prompt, PromptLimits)
        object.__setattr__(self, "limit_mm_per_prompt", limits)
        loose = isinstance(self.replicas, str)  # a number in an option is a string
        object.__setattr__(self, "replicas", converted("replicas", self.replicas, Replicas, strict=not loose))
        require(self)
        if self.replicas != 1 and ":" in self.engine.device:
            raise InputError(
                f"device is {self.engine.device!r}, which is one device, but replicas is {self.replicas}; leave out "
                "the index"
            )
        complete_paths(self)
        object.__setattr__(self, "lora", tuple(f"{name}={path}" for name, path in self.lora_folders.items()))

    @property
    def lora_folders(self) -> dict[str, Path]:
        """The folders of the LoRA adapters, by name. Raise InputError if an adapter is not NAME=FOLDER."""
        folders: dict[str, Path] = {}
        for text in self.lora:
            name, _, folder = text.partition("=")
            if not folder.strip():
                raise InputError(f"lora={text!r} must be NAME=FOLDER, such as sql=/adapters/sql")
            if (name := lora_name(name)) in folders:
                raise InputError(f"lora gives the name {name!r} twice; give each adapter its own name")
            folders[name] = absolute(folder)
        return folders

    @property
    def serves_loras(self) -> bool:
        """True if requests may use LoRA adapters."""
        return bool(self.lora or self.lora_dir)

    @property
    def bound_device(self) -> str | None:
        """Device near which the tokenizer runs, or None if it is not bound to CPUs."""
        return self.engine.device if self.engine.cpu_binding == "auto" else None

    @property
    def num_decoders(self) -> int:
        """Number of decoder processes of a service."""
        return self.decoders or min(available_cpus(), _MOST_DECODERS)


def lora_name(name: str) -> str:
    """Return the name of a LoRA adapter. Raise InputError if clients could not send or read it."""
    if not name or name != name.strip() or not name.isprintable() or "=" in name or len(name) > MAX_LORA_NAME:
        raise InputError(
            f"the name of a LoRA adapter is {name!r}; it must have 1 to {MAX_LORA_NAME} printable characters, no = and "
            "no space at its ends"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of the HTTP service."""

    host: str = "127.0.0.1"
    """Address to listen on. Set an API key before you listen on an address other than loopback."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on. 0 chooses a free port, which the service prints when it starts."""
    uds: Path | None = None
    """Unix socket on which the service listens as well. Only processes of the same user can connect. Default: the
    service listens only on the port."""
    accept_handles: bool = False
    """Accept token ids with handles on the socket of --uds. Such a client can refer to all shared memory of the
    user."""
    api_key: tuple[str, ...] = field(default=(), metadata={"secret": True})
    """API key that requests must send as `Authorization: Bearer KEY`. Repeatable. Default: requests need no key."""
    api_key_file: Path | None = None
    """TOML file with further API keys, each with a name and quotas. The service reads the file again when it changes.
    Default: no file."""
    admin_key: str | None = field(default=None, metadata={"secret": True})
    """Key for /admin/reload, /v1/load_lora_adapter and /v1/unload_lora_adapter, which take this key in place of an API
    key. Default: they are accepted only on the socket of --uds."""
    ssl_certfile: Path | None = None
    """PEM file with the certificate and its chain, to serve HTTPS. The service reads the file again when it changes.
    Default: the service serves HTTP."""
    ssl_keyfile: Path | None = None
    """PEM file with the key of the certificate, without a password. Default: the key is in ssl_certfile."""
    root_path: str | None = None
    """Path under which a proxy publishes the service, such as /mm. The proxy may remove it from requests or not.
    Default: the root."""
    allow_open: bool = True
    """Without an API key, start with a warning if the service listens on an address other than loopback. Off, as in the
    images: do not start in this case."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call the service, such as https://example.org, http://localhost:* for any port, or *
    for all origins. Repeatable."""
    web_page: bool = True
    """Show a web page at / for questions and for watching the service."""
    served_model_name: tuple[str, ...] = ()
    """Name of the model in requests and answers. Repeatable; answers contain the first name. Default: the name of the
    checkpoint's directory, or `owner/name` in the Hugging Face cache."""
    any_model_name: bool = False
    """Answer requests for any model name. Off: requests for another model get status 404."""
    spool: Path | None = None
    """Folder for the media and the path file of each request. Default: mindie_mm-<uid> in the temporary directory."""
    enable_scale_out: bool = False
    """Serve vLLM's /render routes, which return the token ids of prompts, and /inference/v1/generate, which continues
    them. Off: these routes get status 403."""
    like: Literal["auto", "vllm", "transformers"] = "auto"
    """Implementation that the /render routes follow where vLLM and transformers differ: vllm or transformers. It must
    be that of the servers that get the answers. auto: vllm for `mindie-mm render`, transformers for this service."""
    model_id: str | None = None
    """Name of the model in the hashes of media of the /render routes. It must equal the --model of vLLM servers.
    Default: the path or name of the checkpoint as given."""
    workers: Count = 1
    """Number of processes of `mindie-mm render` that share the port. Limits on requests apply to each of them."""
    plan_cache_bytes: CountOrNone = 64 * MiB
    """Size of the cache of media that the /render routes have planned. 0: every item is read again."""
    plan_url_s: CountOrNone = 60
    """Time in seconds after which a URL that was planned is fetched again. 0: URLs are fetched each time."""
    reclaim_interval_s: Seconds = 60.0
    """Time between two searches for shared memory that dead processes left behind."""
    max_concurrent_requests: Count = 256
    """Maximum number of requests in progress. Further requests get status 429."""
    request_timeout_s: Seconds = 600.0
    """Maximum time of one request, from fetching its media to the end of its answer."""
    send_timeout_s: Annotated[float, Meta(ge=0.001, le=86400)] = 60.0
    """Maximum time for which a client may stop reading its answer before the connection is closed."""
    grace_s: Annotated[float, Meta(ge=0)] = 5.0
    """Maximum time for running requests to finish after a stop signal. A second signal ends this period."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text, or json for one JSON object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    strict: bool = False
    """Refuse requests with unknown fields, and chats with unknown keys in messages or content parts or with a
    `reasoning_effort` that the chat template does not use. Off: ignore them, with one warning per name."""
    json_additional_properties: Literal["allow", "close"] = "close"
    """Rule for JSON schemas without additionalProperties. close: objects have only the properties in the schema. allow:
    objects may have other properties, as in JSON Schema. Schemas with `strict` are always closed."""
    tool_call_parser: str | None = None
    """Format of tool calls, such as hermes or mistral. Default: the format that the chat template shows, or else
    hermes."""
    reasoning_parser: str | None = None
    """Format of reasoning, such as qwen3 or mistral, or none to leave reasoning in the content. Default: the format
    that the chat template shows, if there is one."""
    tools_without_template: Literal["describe", "ignore", "refuse"] = "describe"
    """Treatment of tools if the chat template does not support them. describe: describe the tools in a system message,
    and parse calls as hermes. ignore: leave the tools out, with a warning. refuse: answer with status 400."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order in which requests are scheduled. fcfs: first come, first served. priority: requests with a lower `priority`
    come first, so any client may delay the others."""
    log_prompts: bool = False
    """Log the text of prompts. Media are never logged."""
    otlp_endpoint: str | None = None
    """URL that receives OpenTelemetry spans of requests, such as http://localhost:4318/v1/traces. Requires the extra
    `otel`."""
    max_request_bytes: Count = 64 * MiB
    """Maximum size of a request body. For an uploaded file, max_item_bytes applies instead."""
    max_request_values: Count = 2**18
    """Maximum number of JSON values in a request body, estimated by counting brackets, braces and commas."""
    max_held_bytes: Count = 1 * GiB
    """Maximum total size of the bodies of all requests in progress, and of the tensors in the answers of the /render
    routes. Further requests get status 429."""
    max_held_logprobs: Count = 2**21
    """Maximum number of log-probabilities of prompts and of the whole vocabulary in the answers of all requests in
    progress. Each takes about 500 bytes of memory. Further requests get status 429."""
    max_item_bytes: Count = 64 * MiB
    """Maximum size of one encoded media item, such as a JPEG file or an upload. For base64, the size of the decoded
    file counts."""
    max_media_bytes: Count = 256 * MiB
    """Maximum total size of the encoded media items of one request."""
    max_spool_bytes: Count = 2 * GiB
    """Maximum total size of all media files in the spool. Further requests are refused. The value must be at least
    max_media_bytes."""
    media_uuid_bytes: CountOrNone = 64 * MiB
    """Size of the store for media that chats send with a `uuid`. 0 turns off the store."""
    response_store_bytes: CountOrNone | None = None
    """Size of the store for the responses of each API key in /v1/responses. 0 turns off the store. Default: 64 MiB if
    there are API keys, and 0 without keys, because all clients could then read all responses."""
    response_store_age_s: Seconds = 24 * 3600.0
    """Time after which a stored response is removed."""
    files_path: Path | None = None
    """Folder for the files of /v1/files and the batches of /v1/batches. Workers on several nodes must share the folder.
    Default: both paths get status 404."""
    max_file_bytes: Count = 512 * MiB
    """Maximum size of one file of /v1/files. With --ray, max_request_bytes is a limit, too."""
    max_files_per_key: Count = 1000
    """Maximum number of files of each API key, or of all clients if there are no keys."""
    max_file_bytes_per_key: Count = 8 * GiB
    """Maximum total size of the files of each API key, or of all clients if there are no keys."""
    max_batch_requests: Count = 50_000
    """Maximum number of requests in one batch of /v1/batches."""
    max_concurrent_batch_requests: Count = 16
    """Maximum number of requests of batches in progress. They do not count toward max_concurrent_requests, and yield to
    other requests."""
    enable_mm_embeds: bool = False
    """Accept `image_embeds`, `video_embeds` and `audio_embeds` in place of media. Enable this only for clients that you
    trust, because embeddings bypass the tower."""
    enable_prompt_embeds: bool = False
    """Accept `prompt_embeds`, which are embeddings of text tokens, in place of text. Enable this only for clients that
    you trust, because embeddings can contain control tokens and what no text can."""
    enable_force_include_usage: bool = False
    """Send the usage so far in every chunk of every stream, and the usage at its end, without `stream_options`."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as `token_id:64`, unless the request sets `return_tokens_as_token_ids`."""
    webui_images: bool = False
    """Read images in the texts of chats and of items, in the format of text-generation-webui: `<img
    src="data:image/jpeg;base64,...">`."""
    max_media_items: CountOrNone = 32
    """Maximum number of media items in one request."""
    fetch_timeout_s: Seconds = 30.0
    """Maximum time to fetch one media item over HTTP, including redirects."""
    fetch_connect_timeout_s: Seconds = 5.0
    """Maximum time to connect to a media server."""
    fetch_read_timeout_s: Seconds = 10.0
    """Maximum time between two pieces of data from a media server."""
    max_fetch_redirects: CountOrNone = 3
    """Maximum number of redirects when fetching an item."""
    max_concurrent_fetches: Count = 16
    """Maximum number of items that are fetched over HTTP at the same time. One request may use a quarter of this
    number. Further items wait."""
    allowed_media_dir: Path | None = None
    """Folder from which requests may read media files. Default: requests may not read files."""
    allowed_media_domains: tuple[str, ...] = ()
    """Host from which media may be fetched, including its subdomains. Repeatable. Default: any public host."""
    allow_private_media: bool = False
    """Also fetch media from private addresses, such as 10.0.0.1 or localhost."""

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):  # earlier versions took a single name
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        require(self)
        complete_paths(self)
        if not all(name.strip() for name in self.served_model_name):
            raise InputError("served_model_name is '', which is empty; leave it out, or give a value")
        if self.accept_handles and self.uds is None:
            raise InputError("accept_handles is on, but uds is not set; set uds, or leave accept_handles out")
        if self.max_spool_bytes < self.max_media_bytes:
            spool, media = f"max_spool_bytes={self.max_spool_bytes}", f"max_media_bytes={self.max_media_bytes}"
            raise InputError(f"{spool} must be at least {media}; raise max_spool_bytes, or lower max_media_bytes")
        if not all(map(is_key, self.api_key)):
            raise InputError(
                "an api_key is empty or has a character that an HTTP header cannot have; use printable ASCII"
            )
        if self.admin_key is not None and not is_key(self.admin_key):
            raise InputError("admin_key has a character that an HTTP header cannot have; use printable ASCII")
        _require_front(self)
        for origin in self.cors_origin:
            _require_origin(origin)
        if self.otlp_endpoint is not None:
            _require_url("otlp_endpoint", self.otlp_endpoint)

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_key or self.api_key_file)

    @property
    def stored_response_bytes(self) -> int:
        """Size of the store for the responses of each API key."""
        if self.response_store_bytes is not None:
            return self.response_store_bytes
        return 64 * MiB if self.has_keys else 0


def is_key(key: str) -> bool:
    """Return whether an HTTP header can contain the key."""
    return key.isascii() and key.isprintable() and key.strip() == key != ""


def _require_front(config: ServiceConfig) -> None:
    """Raise InputError if the settings of the certificate or of the path behind a proxy are not valid."""
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise InputError("ssl_keyfile is set, but ssl_certfile is not; set both")
    if config.root_path is not None and not _ROOT_PATH.fullmatch(config.root_path):
        raise InputError(
            f"root_path={config.root_path!r} must begin with a slash and end without one, such as /mm, and "
            "have letters, digits and . _ ~ -"
        )


def _require_origin(origin: str) -> None:
    """Raise InputError unless `origin` is * or an origin in the spelling of browsers. Its port may be *."""
    parts = _ORIGIN.fullmatch(origin)
    port = parts[3] if parts is not None else None
    if origin != "*" and (parts is None or (port not in (None, "*") and int(port or 0) > 65535)):
        raise InputError(
            f"cors_origin={origin!r} must be * or an origin such as https://example.org, in lower-case "
            "ASCII (xn--), without a trailing slash. It may end with a port, or with :* for any port"
        )
    if parts is not None and port is not None and port == _DEFAULT_PORTS.get(parts[1]):
        raise InputError(
            f"cors_origin={origin!r} must not end with :{port}, because browsers omit the port of {parts[1]}"
        )


def _require_url(name: str, url: str) -> None:
    """Raise InputError unless `url` is an http or https URL without secrets such as a password. Settings are logged."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{name} is not a valid URL: {error}") from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InputError(
            f"{name} has a user name or a query, which may be secret; remove it, because settings are logged"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{name}={url!r} must be an http or https URL")


def require_media_dir(config: ServiceConfig) -> None:
    """Raise InputError if `allowed_media_dir` is set and is not a folder that this user may enter."""
    folder = config.allowed_media_dir
    if folder is None:
        return
    if not os.path.isdir(folder):  # noqa: PTH112 - False where it cannot be looked at, too
        raise InputError(f"allowed_media_dir is {folder}, which is not a folder")
    if not os.access(folder, os.X_OK):
        raise InputError(f"allowed_media_dir is {folder}, which user {os.geteuid()} may not enter")
