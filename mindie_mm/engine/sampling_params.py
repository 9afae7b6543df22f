"""How one request's tokens are drawn, and when it stops."""

from __future__ import annotations

import math

import msgspec

from mindie_mm.errors import InputError, blaming

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_SALT_CHARACTERS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request; checked by `check`, which every way into the engine calls."""

    max_tokens: int | None = None
    """Most tokens to generate; None: what the context still holds."""
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
    """The same seed, prompt and settings draw the same tokens, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings."""
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
    """A JSON schema, as JSON: the output fits it, unless `max_tokens` ends it first (grammar.py)."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: below 1e-5 a temperature no longer divides a float32."""
        return self.temperature < 1e-5

    def check(self, vocab_size: float) -> SamplingParams:
        """The same, each setting of its type; InputError names the setting, its value and its limits.

        `vocab_size` may be math.inf before the model is loaded: all but the upper limit of ids is checked.
        """
        try:
            typed = msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except msgspec.ValidationError as error:
            raise InputError(f"the sampling parameters are not of their types: {error}") from error
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise InputError(f"{name} is {value}, it must be in [{low}, {high}]", param=name)
        if self.top_p == 0:
            raise InputError("top_p is 0, it must be above 0", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}", param="min_tokens"
            )
        try:
            msgspec.msgpack.encode(self)  # as it goes to the engine
        except UnicodeEncodeError as error:
            raise InputError("a stop string, the salt or the JSON schema holds a lone surrogate") from error
        if len(self.cache_salt) > MAX_SALT_CHARACTERS:
            raise InputError(
                f"cache_salt has {len(self.cache_salt)} characters, the limit is {MAX_SALT_CHARACTERS}",
                param="cache_salt",
            )
        with blaming("stop"):
            self._check_stop()
        self._check_ids(vocab_size)
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise InputError("a JSON schema says where the output ends: neither ignore_eos nor min_tokens goes with it")
        return typed

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(f"{len(self.stop)} stop strings, at most {MAX_STOP_STRINGS} are taken")
        if "" in self.stop:
            raise InputError(f"stop string {self.stop.index('')} of {len(self.stop)} is empty")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise InputError(f"a stop string has {longest} characters, the limit is {MAX_STOP_CHARACTERS}")

    def _check_ids(self, vocab_size: float) -> None:
        for name, ids, most in (
            ("logit_bias", self.logit_bias, MAX_BIASES),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ):
            if len(ids) > most:
                raise InputError(f"{name} names {len(ids)} tokens, the limit is {most}", param=name)
            if bad := [i for i in ids if not 0 <= i < vocab_size]:
                raise InputError(f"{name} names token {bad[0]}, ids are in [0, {vocab_size})", param=name)
        if bad_bias := [b for b in self.logit_bias.values() if not -100 <= b <= 100]:
            raise InputError(f"logit_bias is {bad_bias[0]}, it must be in [-100, 100]", param="logit_bias")


_INT32 = 2**31 - 1
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, _INT32),
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
