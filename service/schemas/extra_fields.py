"""Request fields that vLLM adds to OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mindie_mm.engine.requests.sampling_params import MAX_LOGPROBS
from mindie_mm.errors import InputError
from mindie_mm.inputs import refused_fields
from mindie_mm.tokenize.prompt import PromptOptions
from service.schemas.body import INT32_MAX, WHOLE, Array, MaxTokens, Settings, TokenIds
from service.schemas.not_served import WITHOUT_BEAMS

Ids = Annotated[TokenIds, AfterValidator(tuple)]


class ExtraFields(Settings):
    """Fields of vLLM that chat completions and text completions share."""

    max_new_tokens: MaxTokens | None = None
    """Another name of `max_tokens`."""
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """Another name of `min_tokens`."""
    include_stop_str_in_output: bool | None = None
    """Include the stop string in the text. If `skip_special_tokens` is false, include the final special token too."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default: true."""
    spaces_between_special_tokens: bool | None = None
    """Keep the spaces that some tokenizers write between special tokens. Default: true."""
    bad_words: Annotated[Array[str], AfterValidator(tuple)] | None = None
    """Words that must not be generated."""
    allowed_token_ids: Ids | None = None
    """The only tokens that may be generated."""
    logprob_token_ids: Ids | None = None
    """Tokens whose log-probabilities are reported instead of the most likely tokens. Requires `logprobs`."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """Number of most likely tokens to report for each token of the prompt. Not supported in a stream."""
    return_token_ids: bool | None = None
    """Report the token ids of the prompt and of the answer."""
    return_tokens_as_token_ids: bool | None = None
    """Write the tokens of log-probabilities in the form `token_id:5`."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Number of tokens to keep of a longer prompt. -1: as many tokens as fit into the context with the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Side from which the prompt is truncated. Default: left, which keeps the last tokens."""
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    """Priority in the queue. Lower numbers come first. Must be 0 unless `--scheduling-policy priority` is set."""

    use_beam_search: bool | None = None
    """Return the `n` most likely answers that a beam search with `n` beams finds, instead of drawing tokens."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    """Exponent of the number of tokens. A beam search divides log-probabilities by this power. Default: 1."""

    @property
    def beam_length_penalty(self) -> float | None:
        """Length penalty of the beam search, or None without a beam search."""
        if not self.use_beam_search:
            return None
        return 1.0 if self.length_penalty is None else self.length_penalty

    @property
    def prompt_options(self) -> PromptOptions:
        """Rules for truncating the prompt."""
        return PromptOptions(cut_to=self.truncate_prompt_tokens or 0, cut_side=self.truncation_side or "left")

    def check_extra(self, *, stream: bool) -> None:
        """Raise InputError for a value that is not supported."""
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens=0 must be -1 or at least 1"
            raise InputError(message, param="truncate_prompt_tokens")
        if stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs are not supported in a stream; set stream to false or leave prompt_logprobs out"
            raise InputError(message, param="prompt_logprobs")
        if self.use_beam_search:
            for name in refused_fields({name: getattr(self, name, None) for name in WITHOUT_BEAMS}, WITHOUT_BEAMS):
                message = f"{name} is not supported with use_beam_search; leave one of them out"
                raise InputError(message, param=name)
        elif self.length_penalty not in (None, 1):
            message = f"length_penalty={self.length_penalty} must be 1 without use_beam_search"
            raise InputError(message, param="length_penalty")

    def same(self, *names: str) -> Any:
        """Return the value of fields that have the same meaning, or None. Raise InputError if their values differ."""
        given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise InputError(
                    f"{given[0][0]} is {given[0][1]} and {name} is {value}; give only one of them", param=given[0][0]
                )
        return given[0][1] if given else None
