"""Body and answer of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Raw
from pydantic import Field
from typing_extensions import TypedDict

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF
from mindie_mm.tokenize.prompt import PromptOptions
from service.schemas.body import (
    INT32_MAX,
    WHOLE,
    Array,
    Body,
    CacheSalt,
    NotServed,
    Settings,
    TokenIds,
    must_be,
)
from service.schemas.choices import Timed, Usage
from service.schemas.message_types import AnyMessage
from service.schemas.not_served import NOT_SERVED
from service.schemas.openai_answers import json_of

MAX_INPUTS = 2048
"""Maximum number of inputs in one request, as in OpenAI's API."""

_FORMS = "a string, token ids, messages of a chat, or a list of one of these"


class PoolingBody(Body, Settings):
    """Fields that requests for embeddings and for scores share."""

    not_served: ClassVar[NotServed] = {
        **NOT_SERVED,
        **dict.fromkeys(("stream", "logprobs", "tools"), OFF),
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
        "truncate": (*OFF, "NONE"),
    }

    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    mm_processor_kwargs: Any = None
    """Has the same meaning as in a chat completion."""
    media_io_kwargs: Any = None
    """Has the same meaning as in a chat completion."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """Priority in the queue. Lower numbers come first. Must be 0 unless `--scheduling-policy priority` is set."""
    cache_salt: CacheSalt | None = None
    """Has the same meaning as in a chat completion."""
    user: str | None = None
    """Ignored."""

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        return SamplingParams(max_tokens=0, priority=self.priority or 0, cache_salt=self.cache_salt or "")


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings. Exactly one of `input` and `messages` must be given."""

    input: Annotated[
        str | Array[str] | TokenIds | Array[TokenIds] | Array[AnyMessage] | Array[Array[AnyMessage]] | None,
        must_be(_FORMS),
    ] = None
    """One input or a list of inputs: texts, token ids or chats."""
    messages: Annotated[
        Array[AnyMessage] | Array[Array[AnyMessage]] | None, must_be("a list of messages, or a list of such lists")
    ] = None
    """One chat or a list of chats, which may contain images, as in vLLM. Each chat gets one embedding."""
    encoding_format: Literal["float", "base64"] | None = None
    """float: a list of numbers. base64: little-endian float32 values. Default: float."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    """Number of leading values to keep. The shorter embedding is normalized again. Default: all values."""
    normalize: bool | None = None
    """True if embeddings have the length 1. Default: the checkpoint's setting."""
    use_activation: bool | None = None
    """Another name of `normalize`."""
    prompt_name: str | None = None
    """Name of the instruction in the checkpoint's config_sentence_transformers.json. Default: the checkpoint's
    default."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS, to texts without a chat template. Default: true."""
    parse_special: bool | None = None
    """Has the same meaning as in a completion. It has no effect on texts that become turns of a chat."""
    add_generation_prompt: bool | None = None
    """True if the prompt of a chat ends with the start of the assistant's turn. Default: the checkpoint's setting, or
    else false."""
    continue_final_message: bool | None = None
    """True if the prompt of a chat ends with the text of the last message."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Number of tokens to keep of a longer input. -1: as many tokens as the model supports."""
    truncation_side: Literal["left", "right"] | None = None
    """Side from which inputs are truncated. Default: left, which keeps the last tokens."""

    def inputs(self) -> tuple[list[str], list[list[int]], list[list[dict[str, Any]]]]:
        """Return the texts, the token ids and the chats. Only one of the lists has elements.

        Raises:
            InputError: There is no input, an input is empty, or both fields are given.

        """
        if (self.input is None) == (self.messages is None):
            raise InputError("the request must have exactly one of input and messages", param="input")
        field, given = ("messages", self.messages) if self.input is None else ("input", self.input)
        several: list[Any] = given if isinstance(given, list) else [given]
        if several and isinstance(several[0], int | dict):
            several = [several]
        if not several or not all(several):
            raise InputError(f"{field} is empty, or contains an empty input", param=field)
        if len(several) > MAX_INPUTS:
            raise InputError(f"{field} has {len(several)} inputs; the limit is {MAX_INPUTS}", param=field)
        if isinstance(several[0], str):
            return several, [], []
        return ([], several, []) if isinstance(several[0][0], int) else ([], [], several)

    @property
    def normalizes(self) -> bool | None:
        """Value of `normalize` or `use_activation`. Raise InputError if they differ."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InputError("normalize and use_activation differ; give only one of them", param="normalize")
        return self.use_activation if self.normalize is None else self.normalize

    @property
    def prompt_options(self) -> PromptOptions:
        """Options for encoding and truncating the inputs. Raise InputError if truncation would remove all tokens."""
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens=0 must be -1 or at least 1"
            raise InputError(message, param="truncate_prompt_tokens")
        return PromptOptions(
            cut_to=self.truncate_prompt_tokens or 0,
            cut_side=self.truncation_side or "left",
            add_special_tokens=self.add_special_tokens is not False,
            parse_special=self.parse_special,
        )


class EmbeddingEntry(TypedDict):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[Raw, json_of(list[float] | str)]


class EmbeddingAnswer(Timed):
    """The response of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    data: list[EmbeddingEntry]
    """One entry per input, in order."""
    usage: Usage
