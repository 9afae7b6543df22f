"""Sampling settings of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs import shown, whole
from mindie_mm.msgspec_errors import in_words
from mindie_mm.settings.config import Pooling
from mindie_mm.settings.limits import python_number
from mindie_mm.structured.outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
LEAST_URGENT = 2**63 - 1
"""Highest value of `priority`, whose requests come last."""
MAX_SALT_CHARACTERS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGPROB_TOKEN_IDS = 128
ALL_TOKENS = -1
"""Value of `logprobs` that means the whole vocabulary."""
_MAX_SHOWN = 40


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request. Every entry point of the engine calls `check`."""

    max_tokens: int | None = None
    """Maximum number of tokens to generate. None means as many as fit in the context. 0 means that only
    log-probabilities of the prompt are computed. In this case the prompt may fill the context."""
    cut_max_tokens: bool = False
    """Whether to generate fewer than `max_tokens` tokens if the context is too short. If it is False, such a request is
    refused. It is True if `max_tokens` is a default of the checkpoint."""
    min_tokens: int = 0
    """Minimum number of tokens before an end-of-sequence token, a stop token or a stop string can end the output."""
    temperature: float = 1.0
    """Divisor of the logits, in [0, 100]. 0 means greedy sampling."""
    top_p: float = 1.0
    """Probability, in (0, 1]. Tokens are drawn from the smallest set of most likely tokens whose total probability
    reaches `top_p`."""
    top_k: int = 0
    """Number of most likely tokens to keep. 0 means all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the highest probability, in [0, 1]."""
    presence_penalty: float = 0.0
    """Penalty, in [-2, 2], that is subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Penalty, in [-2, 2], that is subtracted from the logit of a token for each of its occurrences in the output."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in prompt and output (Keskar et al., 2019).

    The factor is in [0.01, 100]. With a much smaller factor, logits would overflow to infinity.
    """
    logit_bias: dict[int, float] = {}
    """Biases, in [-100, 100], by token id. A bias is added to the logit of its token."""
    seed: int | None = None
    """Seed of the random generator, or None for a random seed. With the same seed, prompt and settings, the same tokens
    are drawn in any batch."""
    stop: tuple[str, ...] = ()
    """Stop strings. The output ends before the first stop string. `check` also accepts a list, or a single string."""
    include_stop_str_in_output: bool = False
    """True if the output's text includes the stop string or the stop token that ends the output. A special token is
    written only if `skip_special_tokens` is False."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop token ids. The output ends with the first stop token."""
    ignore_eos: bool = False
    """Whether to generate past the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Whether to leave special tokens out of the output's text."""
    spaces_between_special_tokens: bool = True
    """True if the tokenizer may write spaces between consecutive special tokens. Few tokenizers do so."""
    bad_words: tuple[str, ...] = ()
    """Words that are not generated: at most 128 words of at most 256 characters each. If a word has several tokens,
    its last token is never drawn directly after its other tokens. `Worker` adds the tokens to `bad_token_ids`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output does not contain."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that may be generated. None means all ids."""
    logprobs: int | None = None
    """Number of most likely tokens, in [-1, 20], whose log-probabilities are returned at each position. The
    log-probability of the drawn token is also returned. -1 means the whole vocabulary. None means that no
    log-probabilities are returned. They are computed before penalties are applied."""
    logprob_token_ids: tuple[int, ...] | None = None
    """At most 128 token ids. Their log-probabilities are returned in place of the log-probabilities of the most likely
    tokens. `logprobs` must be set, but its value has no effect."""
    prompt_logprobs: int | None = None
    """Same as `logprobs`, for each position of the prompt except the first."""
    priority: int = 0
    """Rank in the engine's queue. Requests with a lower number are scheduled earlier and preempted later."""
    cache_salt: str = ""
    """Salt of cache keys. Only requests with the same salt share preprocessed media, features and KV blocks."""
    lora: str | None = None
    """Name of the LoRA adapter that computes the output, or None for the model alone. The argument `lora` of `LLM`'s
    methods, and a model name in a request, set this field."""
    json_schema: str | None = None
    """JSON schema, as JSON text. This is short for `structured_outputs=StructuredOutputs(json=...)`."""
    pooling: Pooling | None = None
    """Hidden states of the prompt that the engine returns instead of generating tokens. `LLM.embed` sets this field.
    `max_tokens` must be 0."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the output. The output conforms to it unless `max_tokens` ends the output first (grammar.py)."""

    @property
    def text_options(self) -> dict[str, bool]:
        """The settings that determine how tokens become text, by name."""
        names = ("skip_special_tokens", "spaces_between_special_tokens")
        return {name: getattr(self, name) for name in names}

    @property
    def needs_whole_prompt(self) -> bool:
        """True if the result needs the hidden states of tokens before the last, so that no prefix may be reused."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls")

    @property
    def least_room(self) -> int:
        """Number of tokens that must fit in the context after the prompt."""
        if self.max_tokens is None:
            return 1
        return min(self.max_tokens, 1) if self.cut_max_tokens else self.max_tokens

    @property
    def structure(self) -> StructuredOutputs | None:
        """Constraint on the output, from `structured_outputs` or `json_schema`."""
        return self.structured_outputs if self.json_schema is None else StructuredOutputs(json=self.json_schema)

    def most_tokens(self, room: int) -> int:
        """Return the maximum number of tokens to generate if `room` tokens fit in the context after the prompt."""
        return room if self.max_tokens is None else min(room, self.max_tokens)

    def stating(self, **stated: Any) -> SamplingParams:
        """Return a copy with the settings of a request. Arguments that are None are ignored.

        An explicit `max_tokens` sets `cut_max_tokens` to False.
        """
        given = {name: value for name, value in stated.items() if value is not None}
        if "max_tokens" in given:
            given["cut_max_tokens"] = False
        return msgspec.structs.replace(self, **given)

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely token, because the temperature is 0 or too small as a divisor in float32."""
        return self.temperature < 1e-5

    def check(self, vocab_size: float) -> SamplingParams:
        """Return a copy with each setting converted to its type.

        Args:
            vocab_size: Exclusive upper limit of token ids. Before the model is loaded, pass math.inf to skip this
                check.

        Raises:
            InputError: A setting is invalid. The message gives the setting, its value and its limits.

        """
        _require_ranges(self)
        typed = self._typed()
        if typed.top_p == 0:
            raise InputError("top_p=0 must be above 0", param="top_p")
        if typed.max_tokens is not None and typed.min_tokens > typed.max_tokens:
            raise InputError(
                f"min_tokens={typed.min_tokens} must not exceed max_tokens={typed.max_tokens}",
                param="min_tokens",
            )
        if typed.pooling is not None and typed.max_tokens != 0:
            raise InputError(
                f"max_tokens={typed.max_tokens} must be 0 with pooling={typed.pooling!r}",
                param="max_tokens",
            )
        if len(typed.cache_salt) > MAX_SALT_CHARACTERS:
            raise InputError(
                f"cache_salt has {len(typed.cache_salt)} characters; the limit is {MAX_SALT_CHARACTERS}",
                param="cache_salt",
            )
        with blaming("stop"):
            _require_texts("stop string", typed.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        with blaming("bad_words"):
            _require_texts("bad word", typed.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        _require_ids(typed, vocab_size)
        if typed.logprob_token_ids is not None and typed.logprobs is None:
            raise InputError(
                "logprob_token_ids is set, but logprobs is not; set logprobs, or leave logprob_token_ids out",
                param="logprob_token_ids",
            )
        try:
            msgspec.msgpack.encode(typed)  # raise an error here rather than when the request is sent to the engine
        except UnicodeEncodeError as error:
            raise InputError(
                "a stop string, a bad word, cache_salt or the structured output contains a lone surrogate"
            ) from error
        except OverflowError as error:
            raise InputError("a sampling parameter is an integer of more than 64 bits") from error
        _require_structure(typed)
        return typed

    def _typed(self) -> SamplingParams:
        """Convert each setting to its type, such as 16.0 to 16. Raise InputError if a setting has a wrong type."""
        given = {
            name: whole(value) if name in _INTEGERS else python_number(value)
            for name, value in msgspec.structs.asdict(self).items()
        }
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        for name in _ID_LISTS:
            ids = given[name].tolist() if hasattr(given[name], "tolist") else given[name]  # of numpy or torch
            if isinstance(ids, list | tuple):
                given[name] = tuple(map(whole, ids))
        if isinstance(self.logit_bias, dict):
            given["logit_bias"] = {whole(token): python_number(bias) for token, bias in self.logit_bias.items()}
        if isinstance(self.structured_outputs, StructuredOutputs):
            given["structured_outputs"] = msgspec.structs.asdict(self.structured_outputs)
        try:
            return msgspec.convert(given, SamplingParams)
        except msgspec.ValidationError as error:
            raise _mistyped(given, in_words(error)) from error
        except (
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # msgspec raises them for some types and for surrogates
            raise InputError("a sampling parameter has an unsupported type, or contains a lone surrogate") from error


_INT32 = 2**31 - 1
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, _INT32),
    ("min_tokens", 0, _INT32),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", 0, _INT32),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
    ("seed", -(2**63), 2**63 - 1),
    ("priority", -(2**63), LEAST_URGENT),
    ("logprobs", ALL_TOKENS, MAX_LOGPROBS),
    ("prompt_logprobs", ALL_TOKENS, MAX_LOGPROBS),
)
_INTEGERS = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "priority", "logprobs", "prompt_logprobs"})
_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def _require_ranges(params: SamplingParams) -> None:
    """Raise InputError if a number is outside its range. Call this before the conversion to 64 bits."""
    for name, low, high in _RANGES:
        value = python_number(getattr(params, name))
        if isinstance(value, int | float) and not low <= value <= high:
            raise InputError(f"{name}={shown(value)} must be in [{low}, {high}]", param=name)


def _require_structure(params: SamplingParams) -> None:
    """Raise InputError for an invalid structured output, or settings that contradict it."""
    if (wanted := params.structure) is None:
        return
    if params.json_schema is not None and params.structured_outputs is not None:
        raise InputError(
            "json_schema and structured_outputs cannot be used together; leave one of them out",
            param="structured_outputs",
        )
    with blaming("structured_outputs" if params.json_schema is None else "json_schema"):
        wanted.check()
    if params.ignore_eos or params.min_tokens:
        raise InputError(
            f"ignore_eos and min_tokens cannot be used with {wanted.noun}, which determines the end of the output; "
            "leave them out"
        )


def _require_texts(noun: str, texts: Sequence[str], most: int, most_characters: int) -> None:
    """Raise InputError if there are too many texts, or one is too long or empty."""
    if len(texts) > most:
        raise InputError(f"there are {len(texts)} {noun}s; the limit is {most}")
    if "" in texts:
        raise InputError(f"{noun} {texts.index('')} of {len(texts)} is empty")
    if (longest := max(map(len, texts), default=0)) > most_characters:
        raise InputError(f"a {noun} has {longest} characters; the limit is {most_characters}")


def _require_ids(params: SamplingParams, vocab_size: float) -> None:
    """Raise InputError if a token id or a bias is out of range, or if a setting has too many ids or too few."""
    limit = min(vocab_size, _INT32 + 1)
    for name, ids, most in (
        ("logit_bias", params.logit_bias, MAX_BIASES),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", params.allowed_token_ids, limit),
        ("logprob_token_ids", params.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
        *(("bad_token_ids", ids, _MAX_BAD_TOKENS) for ids in params.bad_token_ids),
    ):
        if ids is None:
            continue
        if len(ids) > most:
            raise InputError(f"{name} has {len(ids)} tokens; the limit is {most}", param=name)
        if not ids and name in _NEVER_EMPTY:
            raise InputError(f"{name} is empty; leave it out, or give at least one token", param=name)
        if (bad := next((i for i in ids if not 0 <= i < limit), None)) is not None:
            raise InputError(f"{name} has token id {shown(bad)}; it must be in [0, {limit})", param=name)
    if len(params.bad_token_ids) > 2 * MAX_BAD_WORDS:
        message = f"there are {len(params.bad_token_ids)} bad_token_ids; the limit is {2 * MAX_BAD_WORDS}"
        raise InputError(message, param="bad_token_ids")
    if bad_bias := [b for b in params.logit_bias.values() if not -100 <= b <= 100]:
        raise InputError(f"logit_bias={bad_bias[0]} must be in [-100, 100]", param="logit_bias")


_MAX_BAD_TOKENS = 4 * MAX_BAD_WORD_CHARACTERS + 1
"""Maximum number of tokens of a bad word. A character has at most 4 bytes, and the word may follow a space."""
_NEVER_EMPTY = frozenset({"allowed_token_ids", "logprob_token_ids", "bad_token_ids"})


def _mistyped(given: Mapping[str, Any], message: str) -> InputError:
    """Return the error for msgspec's `message`. It shows the setting's value if the value is short."""
    name = message.removeprefix("a key of ").partition(" ")[0].partition("[")[0].partition(".")[0]
    value = given.get(name)
    if message.startswith(f"{name} ") and isinstance(value, str | int | float) and len(repr(value)) <= _MAX_SHOWN:
        message = f"{name}={value!r}{message.removeprefix(name)}"
    return InputError(message, param=name if name in given else None)
