"""Bodies of /inference/v1/generate, with the fields of vLLM's GenerateRequest: prompts that were rendered elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import KINDS, OFF, Kind, Media
from mindie_mm.tokenize.requests import TokenizeRequest
from service.schemas.body import (
    INT32_MAX,
    WHOLE,
    Array,
    Body,
    CacheSalt,
    Fields,
    Logprobs,
    NotServed,
    Penalty,
    RepetitionPenalty,
    Settings,
    Stop,
    Structure,
    TokenIds,
    TopP,
)
from service.schemas.openai_types import MAX_CHOICES, StreamOptions, biases_by_id
from service.schemas.structured_outputs import StructuredOutputsBody

_Ids = Annotated[TokenIds, AfterValidator(tuple)]
_Count = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
_MAX_REQUEST_ID = 256


class TokenRange(Fields):
    """The ids that stand for a media item."""

    offset: _Count
    length: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]


class TokenFeatures(Fields):
    """The media of a prompt, in order for each kind. All lists of a kind have the same length."""

    mm_hashes: dict[str, Array[str]]
    """Ignored, because the caches of this service name media by their content."""
    mm_placeholders: dict[str, Array[TokenRange]]
    kwargs_data: dict[str, Array[str | None]] | None = None
    """Preprocessed tensors of each item, in base64. null is refused, because no item is kept from earlier requests."""
    mm_metadata: Any = None
    """Ignored, because `kwargs_data` contains these tensors, too."""


class TokenParams(Fields):
    """vLLM's SamplingParams. A field that is left out has vLLM's neutral default, not that of the checkpoint."""

    not_served: ClassVar[NotServed] = {
        **dict.fromkeys(("extra_args", "repetition_detection", "watermarking", "trace_decode_token_ids"), OFF),
        "thinking_token_budget": (None, -1),
        **dict.fromkeys(("prompt_logprob_start", "routed_experts_prompt_start"), (None, 0)),
    }
    ignored: ClassVar[Collection[str]] = (
        *("flat_logprobs", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length"),
        "skip_reading_prefix_cache",
    )

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Stop | None = None
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    """Maximum number of tokens. If it is left out, the answer may fill the context."""
    min_tokens: _Count | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    """Not supported in a stream."""
    logprob_token_ids: _Ids | None = None
    detokenize: bool | None = None
    """Must not be false if `output_mode` is text."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None
    logit_bias: Annotated[dict[str, float], Field(fail_fast=True)] | None = None
    allowed_token_ids: _Ids | None = None
    bad_words: Annotated[Array[str], AfterValidator(tuple)] | None = None


class TokenBody(Body, Settings):
    """POST /inference/v1/generate. The answer of /render is such a body."""

    not_served: ClassVar[NotServed] = dict.fromkeys(("content_parts", "kv_transfer_params", "ec_transfer_params"), OFF)
    instead: ClassVar[Mapping[str, str]] = {"content_parts": "features, which /render returns"}
    ignored: ClassVar[Collection[str]] = ("sampling_params", "token_offsets", "reasoning_parser_kwargs")

    request_id: Annotated[str, Field(max_length=_MAX_REQUEST_ID)] | None = None
    """Name of the request in the answer."""
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    """Ids of the prompt, with a placeholder for each feature of its media."""
    features: TokenFeatures | None = None
    drawing: TokenParams = Field(alias="sampling_params")
    reasoning_ended: bool | None = None
    """Must not be false with structured outputs, which apply from the first token."""
    return_token_ids: bool | None = None
    """Report the ids of the prompt, and the ranges of its media."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """With `text`, choices also have their text, and log-probabilities have the texts of their tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        drawing = self.drawing
        if self.stream and drawing.prompt_logprobs is not None:
            message = "prompt_logprobs are not supported in a stream; set stream to false or leave prompt_logprobs out"
            raise InputError(message, param="sampling_params")
        if self.output_mode == "text" and drawing.detokenize is False:
            raise InputError("output_mode is text, which requires detokenize to be true", param="sampling_params")
        given = {name: getattr(drawing, name, None) for name in SamplingParams.__struct_fields__}
        own = {
            "top_k": 0 if drawing.top_k == -1 else drawing.top_k,
            "logit_bias": biases_by_id(drawing.logit_bias) if drawing.logit_bias else None,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "structured_outputs": None,  # they become `structure`
        }
        return SamplingParams().stating(**given | own)

    def structure(self, *, close: bool) -> Structure | None:
        if (described := self.drawing.structured_outputs) is None:
            return None
        if self.reasoning_ended is False:
            raise InputError(
                "reasoning_ended is false, but structured outputs apply from the first token; leave one of them out, "
                "or send the chat to /v1/chat/completions",
                param="reasoning_ended",
            )
        wanted = described.wanted(close=close)
        wanted.check()
        return Structure(wanted, "sampling_params")

    def items(self) -> list[TokenItem]:
        """Return the media of the prompt in the order of their ranges.

        Raises:
            InputError: The features contradict each other, lack tensors, or have ranges that overlap or end behind the
                prompt.

        """
        if self.features is None:
            return []
        items = sorted(_items(self.features), key=lambda item: item.start)
        for one, other in pairwise(items):
            if other.start < one.stop:
                raise InputError(f"the ranges of mm_placeholders at {one.start} and {other.start} overlap")
        if items and items[-1].stop > (length := len(self.token_ids)):
            raise InputError(
                f"a range of mm_placeholders ends at {items[-1].stop}, but the prompt has only {length} token_ids"
            )
        return items


@dataclass(frozen=True, slots=True)
class TokenItem:
    """A media item of a prompt."""

    kind: Kind
    start: int
    stop: int
    tensors: str
    """The item as vLLM encodes it (`mindie_mm.nn.vllm_items`), in base64."""


def request_of(ids: list[int], items: Sequence[TokenItem]) -> TokenizeRequest:
    """Return the prompt with these ids and media."""
    media = [Media(item.kind, f"data:;base64,{item.tensors}", is_vllm_item=True) for item in items]
    return TokenizeRequest(ids=ids, items=[*media], ranges=[(item.start, item.stop) for item in items], chat=False)


def _items(features: TokenFeatures) -> list[TokenItem]:
    tensors = features.kwargs_data or {}
    kinds = {*features.mm_hashes, *features.mm_placeholders, *tensors}
    if unknown := kinds - {*KINDS}:
        raise InputError(f"features have the kind {min(unknown)[:40]!r}; it must be one of {', '.join(KINDS)}")
    items = []
    for kind in KINDS:
        ranges = features.mm_placeholders.get(kind, [])
        counts = [len(ranges), len(features.mm_hashes.get(kind, []))]
        if features.kwargs_data is not None:
            counts.append(len(tensors.get(kind, [])))
        if len({*counts}) > 1:
            raise InputError(
                f"the lists of mm_placeholders, mm_hashes and kwargs_data of the kind {kind} have {counts} items; the "
                "numbers must be equal"
            )
        for place, one in zip(ranges, tensors.get(kind) or [None] * len(ranges), strict=True):
            if one is None:
                raise InputError(
                    f"kwargs_data has no tensors for the {kind} at token {place.offset}, and this service keeps none "
                    "from earlier requests; render the prompt with mm_payload tensors"
                )
            items.append(TokenItem(kind, place.offset, place.offset + place.length, one))
    return items
