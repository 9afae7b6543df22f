"""Request bodies of the OpenAI-compatible endpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mindie_mm.engine.requests.sampling_params import ALL_TOKENS, SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF
from mindie_mm.settings.config import ServiceConfig
from service.schemas.body import (
    INT32_MAX,
    WHOLE,
    Array,
    Body,
    CacheSalt,
    Fields,
    Logprobs,
    MaxTokens,
    NotServed,
    Penalty,
    RepetitionPenalty,
    Stop,
    TokenIds,
    TopP,
    must_be,
)
from service.schemas.extra_fields import ExtraFields
from service.schemas.message_types import AnyMessage
from service.schemas.not_served import INSTEAD, MINDIES, NOT_SERVED
from service.schemas.structured_outputs import StructureFields
from service.schemas.tool_types import ToolFields

MAX_CHOICES = 64

_MAX_NAMED = 8
"""Maximum number of wrong keys that an error names."""
_ID = re.compile(r"0|[1-9][0-9]{0,39}")
"""Pattern of a token id in decimal digits. `SamplingParams.check` checks its range."""


class StreamOptions(Fields):
    """Options of a streamed answer."""

    ignored: ClassVar[Collection[str]] = ("include_obfuscation",)

    include_usage: bool | None = None
    """Send a last chunk that has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Add the usage so far to all chunks before the last. Requires `include_usage`."""


class GenerationBody(Body, StructureFields, ExtraFields):
    """Fields that the bodies of chat and text completions share."""

    instead: ClassVar[Mapping[str, str]] = INSTEAD

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Only 1 and the value of `n` are supported, because exactly `n` choices are generated."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Allowed only with `stream`."""
    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Number of most likely tokens to sample from. 0 and, as in vLLM, -1 mean all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, float], Field(fail_fast=True)] | None = None
    """Biases to add to logits. The keys are token ids as decimal strings."""
    # The limit is written as lt=2**63, because OpenAPI writes limits as floats, and no float equals 2**63 - 1.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[TokenIds, AfterValidator(tuple)] | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    """Salt of the prefix cache. Requests share cached KV blocks only if they have the same salt, or none at all."""
    user: str | None = None
    """Ignored."""
    metadata: dict[str, Any] | None = None
    """Ignored."""

    @field_validator("stream_options", mode="before")
    @classmethod
    def _of_a_stream(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse stream options without a stream, as OpenAI and vLLM do. Empty options count as absent."""
        if given and not info.data.get("stream"):
            raise PydanticCustomError("no_stream", "requires stream to be true")
        return given

    def with_defaults(self, config: ServiceConfig) -> Self:
        """Return the body with the service's settings for fields that the request may leave out."""
        changes: dict[str, Any] = {}
        if config.enable_force_include_usage and self.stream:
            changes["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
        if config.return_tokens_as_token_ids and self.return_tokens_as_token_ids is None:
            changes["return_tokens_as_token_ids"] = True
        return self.model_copy(update=changes) if changes else self

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(self, default: SamplingParams, **overrides: Any) -> SamplingParams:
        """Return `default` updated with the fields and `overrides`. Raise InputError if a value is not supported."""
        if self.best_of not in (None, 1, self.n):
            raise InputError(f"best_of is {self.best_of}; only 1 and the value of n are supported", param="best_of")
        self.check_extra(stream=bool(self.stream))
        own = {
            "min_tokens": self.same("min_tokens", "min_new_tokens"),
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logit_bias": biases_by_id(self.logit_bias) if self.logit_bias else None,
            "json_schema": None,  # the body's fields with these names become `structure`
            "structured_outputs": None,
        }
        return super().params(default, **(own | overrides))


class ChatBody(ToolFields, GenerationBody):
    """POST /v1/chat/completions."""

    not_served: ClassVar[NotServed] = {**NOT_SERVED, **MINDIES}

    messages: Array[AnyMessage]
    parse_special: bool | None = None
    """Refused if true, because the texts of a chat never contain control tokens."""
    media_spans: bool | None = None
    """Report the position of each media item's tokens in the answer's `media_spans`."""
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    """Number of most likely tokens to report per position. Requires `logprobs`."""
    add_generation_prompt: bool | None = None
    """True if the chat template ends with the start of the assistant's turn. Default: true."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it. Cannot be combined with `add_generation_prompt`."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS, although chat templates usually contain them. Default: false."""
    echo: bool | None = None
    """Put the text of the last message before the answer, if both have the same role."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    """Default options of images and videos: `min_pixels`, `max_pixels`, `fps`, `num_frames`, ..."""
    media_io_kwargs: Any = None
    """Default options of videos: `{"video": {"fps": ..., "num_frames": ...}}`."""
    parallel_tool_calls: bool | None = None
    """True if the answer may have several tool calls. Default: true."""
    reasoning_effort: str | None = None
    """Variable of the chat template. For a template that has only `enable_thinking`, "none" turns thinking off and any
    other value turns it on. Ignored if the template has neither variable, unless `--strict` is set."""
    include_reasoning: bool | None = None
    """True if the answer includes the reasoning. Default: true."""
    separate_reasoning: bool | None = None
    """True if the reasoning has fields of its own. Default: true. If false, the content begins with the reasoning."""
    stream_reasoning: bool | None = None
    """True if a stream sends the reasoning in pieces. Default: true. If false, one chunk contains all of it."""
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Maximum number of reasoning tokens, after which the reasoning is ended. -1: no limit."""

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            message = (
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true; set logprobs to true, or leave "
                "top_logprobs out"
            )
            raise InputError(message, param="top_logprobs")
        return self.params(
            default,
            max_tokens=self.same("max_tokens", "max_completion_tokens", "max_new_tokens"),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    @property
    def opens_turn(self) -> bool:
        """Result of the function `opens_turn`, which may raise InputError."""
        return opens_turn(self.add_generation_prompt, self.continue_final_message)

    @property
    def role(self) -> str:
        """Role of the answer: `assistant`, or the role of the last message if the prompt does not open a turn."""
        return "assistant" if self.opens_turn or not self.messages else str(self.messages[-1].get("role"))

    @property
    def echoed(self) -> str:
        """Text to put before each answer."""
        if not self.echo or not self.messages or self.messages[-1].get("role") != self.role:
            return ""
        content = self.messages[-1].get("content")
        if isinstance(content, str):
            return content
        parts = [part.get("text") for part in content or () if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))


def opens_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether a chat's prompt ends with the start of the assistant's turn.

    Raise InputError if both arguments are true.
    """
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message and add_generation_prompt are true; set add_generation_prompt to false"
        raise InputError(message, param="continue_final_message")
    return add_generation_prompt is not False and not continue_final_message


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_served: ClassVar[NotServed] = {
        **NOT_SERVED,
        **MINDIES,
        **dict.fromkeys(("suffix", "tools"), OFF),
    }

    prompt: Annotated[
        str | Array[str] | TokenIds | Array[TokenIds] | None,
        must_be("a string, a list of strings, a list of token ids or a list of lists of token ids"),
    ] = None
    """One prompt or a list of prompts, each as text or as a list of token ids."""
    prompt_embeds: Annotated[
        str | Array[str] | None, must_be("base64 of safetensors or of torch.save's output, or a list of them")
    ] = None
    """Embeddings of the tokens of one prompt, or a list of them. Their choices precede those of `prompt`."""
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """If the value is 0, only the prompt is returned. This requires `echo`."""
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS, to texts that do not have them. Default: true."""
    parse_special: bool | None = None
    """True if the spelling of a control token in text, such as `<|im_start|>`, becomes the control token, except for
    tokens of media items. If not, it is plain text. Default: `--parse-special`."""
    logprobs: Logprobs | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        if not self.prompt and self.embeddings():
            return []
        if self.prompt is None:
            raise InputError("prompt is missing; send a string, token ids, or prompt_embeds", param="prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    def embeddings(self) -> list[str]:
        """Return the prompts that are given as embeddings."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        given = {"echo": self.echo, "prompt_logprobs": self.prompt_logprobs is not None}
        if self.embeddings() and (name := next((name for name, value in given.items() if value), None)):
            raise InputError(f"{name} is not compatible with prompt_embeds; leave one out", param=name)
        max_tokens = self.same("max_tokens", "max_new_tokens")
        if max_tokens == 0 and not self.echo:
            raise InputError(
                "max_tokens is 0, but echo is not true; raise max_tokens, or set echo to true", param="max_tokens"
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise InputError("echo with logprobs is not supported with use_beam_search; leave one out", param="echo")
        counts = [one for one in (self.prompt_logprobs, self.logprobs if self.echo else None) if one is not None]
        return self.params(
            default,
            max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
            prompt_logprobs=ALL_TOKENS if ALL_TOKENS in counts else max(counts, default=None),
        )


DEFAULT_COMPLETION_TOKENS = 16


def biases_by_id(biases: dict[str, float]) -> dict[int, float]:
    """Return biases by token id. Raise InputError if a key is no id in decimal digits."""
    if bad := [token for token in biases if not _ID.fullmatch(token)]:
        named = ", ".join(repr(token[:40]) for token in bad[:_MAX_NAMED])
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        message = (
            f"logit_bias has the key{'s' * (len(bad) > 1)} {named}{more}; keys must be token ids in decimal digits, "
            f"each below {2**31}"
        )
        raise InputError(message, param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}
