"""Sampling settings of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs import shown, whole
from mindie_mm.msgspec_errors import in_words

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_SALT_CHARACTERS = 1024
_MAX_SHOWN = 40


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request; checked by `check`, which every way into the engine calls."""

    max_tokens: int | None = None
    """Maximum number of tokens to generate. None: as many as the context holds. 0: only score the prompt, which may
    fill the context."""
    cut_max_tokens: bool = False
    """Generate fewer than `max_tokens` if the context has no room for them. Otherwise the request is refused. Set where
    `max_tokens` is a default of the checkpoint."""
    min_tokens: int = 0
    """No end-of-sequence and no stop before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are dropped, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens generated so far, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logits of tokens generated so far, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt and output (Keskar et al., 2019).

    In [0.01, 100]: what is much less makes infinities of them.
    """
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, in [-100, 100]."""
    seed: int | None = None
    """The same seed, prompt and settings draw the same tokens, independent of other requests in the batch."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings. `check` also accepts a list, or one string."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with the first of these ids."""
    ignore_eos: bool = False
    """Generate past the end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities of the drawn token and of this many of the likeliest, per position, before any penalty."""
    prompt_logprobs: int | None = None
    """The same for each position of the prompt but the first."""
    cache_salt: str = ""
    """Only requests with the same one share what is kept: preprocessed media, a tower's features, the KV cache."""
    json_schema: str | None = None
    """A JSON schema, as JSON. The output conforms to it, unless `max_tokens` ends it first (grammar.py)."""

    @property
    def least_room(self) -> int:
        """Number of tokens that must fit the context after the prompt."""
        if self.max_tokens is None:
            return 1
        return min(self.max_tokens, 1) if self.cut_max_tokens else self.max_tokens

    def most_tokens(self, room: int) -> int:
        """Return the maximum number of tokens to generate in a context that has `room` for so many."""
        return room if self.max_tokens is None else min(room, self.max_tokens)

    def stating(self, **stated: Any) -> SamplingParams:
        """Return these settings with those of a request in their place. None is no setting.

        A `max_tokens` that a request states is not cut.
        """
        given = {name: value for name, value in stated.items() if value is not None}
        if "max_tokens" in given:
            given["cut_max_tokens"] = False
        return msgspec.structs.replace(self, **given)

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely token. A float32 cannot be divided by a temperature below 1e-5."""
        return self.temperature < 1e-5

    def check(self, vocab_size: float) -> SamplingParams:
        """Return the same settings, each converted to its type.

        Args:
            vocab_size: Upper limit of token ids. math.inf skips this check before the model is loaded.

        Raises:
            InputError: A setting is wrong. The message names the setting, its value and its limits.

        """
        _require_ranges(self)
        typed = self._typed()
        if typed.top_p == 0:
            raise InputError("top_p is 0, it must be above 0", param="top_p")
        if typed.max_tokens is not None and typed.min_tokens > typed.max_tokens:
            raise InputError(
                f"min_tokens is {typed.min_tokens}, above max_tokens, {typed.max_tokens}", param="min_tokens"
            )
        if len(typed.cache_salt) > MAX_SALT_CHARACTERS:
            raise InputError(
                f"cache_salt has {len(typed.cache_salt)} characters, the limit is {MAX_SALT_CHARACTERS}",
                param="cache_salt",
            )
        with blaming("stop"):
            _require_stop(typed.stop)
        _require_ids(typed, vocab_size)
        try:
            msgspec.msgpack.encode(typed)  # as it goes to the engine
        except UnicodeEncodeError as error:
            raise InputError("a stop string, the salt or the JSON schema holds a lone surrogate") from error
        if typed.json_schema is not None and (typed.ignore_eos or typed.min_tokens):
            raise InputError("a JSON schema determines the end of the output; leave out ignore_eos and min_tokens")
        return typed

    def _typed(self) -> SamplingParams:
        """Convert each setting to its type: 16.0 to 16, and one stop string to a tuple. Raise InputError."""
        given = {
            name: whole(value) if name in _INTEGERS else value for name, value in msgspec.structs.asdict(self).items()
        }
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        if isinstance(self.stop_token_ids, list | tuple):
            given["stop_token_ids"] = tuple(map(whole, self.stop_token_ids))
        if isinstance(self.logit_bias, dict):
            given["logit_bias"] = {whole(token): bias for token, bias in self.logit_bias.items()}
        try:
            return msgspec.convert(given, SamplingParams)
        except msgspec.ValidationError as error:
            raise _mistyped(given, in_words(error)) from error


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
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_INTEGERS = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"})


def _require_ranges(params: SamplingParams) -> None:
    """Raise InputError if a number is outside its range. Do so before the conversion to 64 bits."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if isinstance(value, int | float) and not low <= value <= high:
            raise InputError(f"{name} is {shown(value)}, it must be in [{low}, {high}]", param=name)


def _require_stop(stop: Sequence[str]) -> None:
    """Raise InputError if there are too many stop strings, or one is too long or empty."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InputError(f"there are {len(stop)} stop strings, the limit is {MAX_STOP_STRINGS}")
    if "" in stop:
        raise InputError(f"stop string {stop.index('')} of {len(stop)} is empty")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        raise InputError(f"a stop string has {longest} characters, the limit is {MAX_STOP_CHARACTERS}")


def _require_ids(params: SamplingParams, vocab_size: float) -> None:
    """Raise InputError if a token id is outside the vocabulary, a bias is outside its range, or there are too many."""
    limit = min(vocab_size, _INT32 + 1)
    for name, ids, most in (
        ("logit_bias", params.logit_bias, MAX_BIASES),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
    ):
        if len(ids) > most:
            raise InputError(f"{name} names {len(ids)} tokens, the limit is {most}", param=name)
        if bad := [i for i in ids if not 0 <= i < limit]:
            raise InputError(f"{name} names token {shown(bad[0])}, ids are in [0, {limit})", param=name)
    if bad_bias := [b for b in params.logit_bias.values() if not -100 <= b <= 100]:
        raise InputError(f"logit_bias is {bad_bias[0]}, it must be in [-100, 100]", param="logit_bias")


def _mistyped(given: Mapping[str, Any], message: str) -> InputError:
    """Return the error for `said`, which gets the setting's value if that is short."""
    name = message.removeprefix("a key of ").partition(" ")[0].partition("[")[0]
    value = given.get(name)
    if message.startswith(f"{name} ") and isinstance(value, str | int | float) and len(repr(value)) <= _MAX_SHOWN:
        message = f"{name} is {value!r}: it{message.removeprefix(name)}"
    return InputError(message, param=name if name in given else None)
