"""Answers of /render: a planned prompt as the body of a request to vLLM's /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray
from typing_extensions import TypedDict

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind, Media, MediaDefaults, MediaOptions, Paths, media_defaults
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.nn.vllm_tiles import TileLayout
from mindie_mm.settings.config import Colour
from mindie_mm.shm import attach
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize.prompt import PlannedPrompt, PlannedSpan
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.tokenizer_traits import TokenizerTraits
from service.render.media_hash import FileContent, has_options, media_hash, video_metadata
from service.schemas.openai_answers import json_of

Base64 = Annotated[msgspec.Raw, json_of(str)]
"""A JSON string of base64. It is not encoded again, because it may have many megabytes."""


class PlaceholderRange(TypedDict):
    """The ids that stand for a media item."""

    offset: int
    length: int


class Features(TypedDict):
    """The media of a prompt, in order for each kind."""

    mm_hashes: dict[str, list[str]]
    """Name of the content of each item in vLLM's caches."""
    mm_placeholders: dict[str, list[PlaceholderRange]]
    kwargs_data: dict[str, list[Base64]] | None
    """All preprocessed tensors of each item, or null if they were not requested."""
    mm_metadata: dict[str, list[Base64]] | None
    """The small tensors of each item that vLLM keeps on the CPU."""


class GenerateRequest(TypedDict):
    """A prompt and its settings, with the fields of vLLM's GenerateRequest."""

    request_id: str
    token_ids: Annotated[msgspec.Raw, json_of(list[int])]
    token_offsets: None
    features: Features | None
    """Media of the prompt, or null if it has none."""
    content_parts: None
    sampling_params: dict[str, Any]
    """Sampling parameters that differ from vLLM's defaults, and always `max_tokens`."""
    model: str | None
    reasoning_ended: None
    reasoning_parser_kwargs: None
    return_token_ids: bool | None
    output_mode: Literal["tokens"]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None


_NOT_SENT = frozenset({"cut_max_tokens", "bad_token_ids", "priority", "cache_salt", "json_schema", "pooling", "lora"})
"""Fields of `SamplingParams` that vLLM's class does not have, or that are fields of the request."""
_NEUTRAL = msgspec.to_builtins(SamplingParams(), str_keys=True)


def sampling_params(params: SamplingParams, bad_words: Sequence[str] | None, room: int, n: int) -> dict[str, Any]:
    """Return sampling parameters for vLLM.

    vLLM leaves `max_tokens` out if it equals its default, 16, and then fills the context. It is therefore always given.

    Args:
        params: Parameters of the request. Their `bad_token_ids` contain the tokens of `bad_words`.
        bad_words: Words of the request that must not be generated.
        room: Number of tokens that the context leaves for an answer.
        n: Number of choices.

    """
    stated = msgspec.to_builtins(params, str_keys=True)
    changed = {name: value for name, value in stated.items() if value != _NEUTRAL[name] and name not in _NOT_SENT}
    if (structure := params.structured_outputs) is not None:
        value = getattr(structure, structure.kind)
        changed["structured_outputs"] = {structure.kind: value}
    if bad_words:
        changed["bad_words"] = [*bad_words]
    if n > 1:
        changed["n"] = n
    return {**changed, "max_tokens": room if params.max_tokens is None else min(params.max_tokens, room)}


@dataclass(frozen=True, slots=True)
class Hashing:
    """The parts of media hashes that all items of a request share."""

    model_id: str
    background: Colour
    options: Mapping[str, Any]
    """Fields of the request with options of media, without empty ones."""
    defaults: MediaDefaults
    """`options` as `MediaOptions`, by kind."""

    @classmethod
    def of(cls, model_id: str, background: Colour, mm_processor_kwargs: Any, media_io_kwargs: Any) -> Hashing:
        """Return the parts for a request with these fields. Raise InputError if they are not valid."""
        given = {"mm_processor_kwargs": mm_processor_kwargs, "media_io_kwargs": media_io_kwargs}
        options = {name: value for name, value in given.items() if value}
        return cls(model_id, background, options, media_defaults(mm_processor_kwargs, media_io_kwargs))

    def hash_of(self, span: PlannedSpan, media: Media, files: Paths) -> str:
        """Return the hash of an item. `files` are its files in the spool."""
        kind, options = span.kind, self.options
        if media.options != self.defaults.get(kind, MediaOptions()):  # the item has its own, which vLLM does not know
            own = {name: value for name, value in asdict(media.options).items() if value is not None}
            options = {**options, "mm_processor_kwargs": {**options.get("mm_processor_kwargs", {}), **own}}
        content: Any
        if media.uuid is not None:
            if not has_options(kind, options):
                return media.uuid
            content = media.uuid
        elif isinstance(files, Path) and not media.is_embeddings and media.page is None:
            data = files.read_bytes()
            content = FileContent(kind, data, None if span.is_rgb else self.background)
            if (sample := span.sample) is not None:
                if sample.num_bytes < len(data):  # vLLM hashes the decoded frames
                    return span.digest.hex()
                content = [content, video_metadata(sample)]
        else:
            return span.digest.hex()
        return media_hash(kind, content, self.model_id, options)


def hashes_of(plan: PlannedPrompt, media: Sequence[tuple[Media, Paths | str]], hashing: Hashing) -> list[str]:
    """Return the hash of each item of a planned prompt.

    `media` are the items of the prompt before it was truncated, with their files, or with their hashes if known.
    """
    own = zip(plan.spans, media[plan.first_item : plan.first_item + len(plan.spans)], strict=True)
    return [file if isinstance(file, str) else hashing.hash_of(span, item, file) for span, (item, file) in own]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Which tensors are sent for the media of a prompt."""

    layouts: Mapping[Kind, PatchLayout | TileLayout]
    """`Processor.vllm_items` of the checkpoint."""
    family: str
    """Name of the checkpoint's family."""

    @classmethod
    def known(cls, traits: TokenizerTraits, dtype: str) -> Tensors:
        """Return the tensors of a checkpoint. `dtype` is that of normalized pixels, or auto for vLLM's choice."""
        layouts = {
            kind: layout
            if isinstance(layout, PatchLayout) or dtype == "auto"
            else msgspec.structs.replace(layout, dtype=dtype)
            for kind, layout in traits.vllm_items.items()
        }
        return cls(layouts, traits.family)

    def require(self, request: TokenizeRequest) -> None:
        """Raise InputError if the prompt has media whose tensors are not known."""
        for media in request.media:
            if media.kind not in self.layouts or media.is_embeddings:
                noun = "embeddings" if media.is_embeddings else f"media of the kind {media.kind}"
                raise InputError(
                    f"mm_payload=tensors is not supported for {noun} of {self.family}; set mm_payload to "
                    "none, or send the chat itself to a server that answers it",
                    param="mm_payload",
                )

    def num_bytes(self, plan: PlannedPrompt) -> int:
        """Return the size in bytes of the pixels of a prompt in base64, without their padding."""
        sizes = (self.layouts[span.kind].num_bytes(span.num_features, span.num_bytes) for span in plan.spans)
        return sum(sizes) * 4 // 3

    def of(self, plan: PlannedPrompt) -> tuple[dict[str, list[Base64]], dict[str, list[Base64]] | None]:
        """Return `kwargs_data` and `mm_metadata` of a prompt whose media are in shared memory."""
        tensors: dict[str, list[Base64]] = {}
        metadata: dict[str, list[Base64]] = {}
        for span, ref in zip(plan.spans, plan.refs(), strict=True):
            with attach(ref) as view:
                payload = self.layouts[span.kind].encoded(view, MediaShape.of(view).grid)
            tensors.setdefault(span.kind, []).append(_base64(payload.tensors))
            if payload.metadata is not None:
                metadata.setdefault(span.kind, []).append(_base64(payload.metadata))
        return tensors, metadata or None


def _base64(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"".join((b'"', pybase64.b64encode(data), b'"')))  # formatting would take four times as long


def features(plan: PlannedPrompt, own_hashes: Sequence[str], tensors: Tensors | None = None) -> Features | None:
    """Return the features of a planned prompt, or None if it has no media.

    Args:
        plan: The prompt.
        own_hashes: Hash of each item.
        tensors: Which tensors of the items are sent. None means that none are sent.

    """
    if not plan.spans:
        return None
    sent = (None, None) if tensors is None else tensors.of(plan)
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[PlaceholderRange]] = {}
    ids = None if tensors is None else plan.plain_ids
    for span, own in zip(plan.spans, own_hashes, strict=True):
        start, stop = span.start - span.written_lead, span.stop + span.written_tail
        if ids is not None:
            start, stop = _placeholders(ids, span) or (start, stop)
        hashes.setdefault(span.kind, []).append(own)
        ranges.setdefault(span.kind, []).append({"offset": start, "length": stop - start})
    return {"mm_hashes": hashes, "mm_placeholders": ranges, "kwargs_data": sent[0], "mm_metadata": sent[1]}


def _placeholders(ids: NDArray[np.int64], span: PlannedSpan) -> tuple[int, int] | None:
    """Return the range of the placeholders of an item, or None if there are other ids between them.

    vLLM's server takes every id of a range as a placeholder, and its engine ends if there are more ids than features.
    """
    places = span.start + np.flatnonzero(ids[span.start : span.stop] == span.token)
    first, stop = int(places[0]), int(places[-1]) + 1
    return (first, stop) if stop - first == len(places) else None


def num_bytes(media: Sequence[tuple[Media, Paths | str]]) -> int:
    """Return the total size in bytes of the files that `hashes_of` reads."""
    return sum(files.stat().st_size for _, files in media if isinstance(files, Path))


def like_vllm(request: TokenizeRequest) -> TokenizeRequest:
    """Return a prompt that is tokenized as in vLLM, which ignores `detail` of images and samples other frames."""
    return msgspec.structs.replace(request.with_media(_like_vllm), options=replace(request.options, like_vllm=True))


def _like_vllm(media: Media) -> Media:
    return msgspec.structs.replace(media, options=replace(media.options, detail=None), is_like_vllm=True)


def require_no_pages(request: TokenizeRequest) -> TokenizeRequest:
    """Return the prompt. Raise InputError if it contains a document, whose pages vLLM does not know."""
    if any(media.is_document for media in request.media):
        raise InputError("documents are not supported by /render; send their pages as images")
    return request
