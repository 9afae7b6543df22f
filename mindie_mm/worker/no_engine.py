"""The place of the engines in a worker that only plans prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from mindie_mm.engine.requests.default_sampling import default_sampling
from mindie_mm.engine.requests.engine_messages import Features, Progress, Ready
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.config_only import ConfigOnly
from mindie_mm.processes.restarts import Restarts
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.tokenize.text.detokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class NoEngine:
    """An engine that does not exist. It has the sizes that prompts are checked against, but answers no prompts."""

    info: Ready
    """Sizes that an engine would have if its memory sufficed for the whole context."""
    engines: Sequence[NoReturn] = ()
    num_alive: int = 0
    restarts: Restarts = field(default_factory=lambda: Restarts(0, 0))

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        """Read the sizes of a checkpoint.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported, does not state a size, or has an invalid
                generation_config.json.
            InputError: `config.generation_config` is not valid.

        """
        checkpoint = ConfigOnly.open(config.model)
        vocab_size, positions, longest_output = _sizes(checkpoint, config.family)
        if vocab_size is None:
            vocab_size = load_tokenizer(checkpoint, config.family, ()).get_vocab_size()
        if (limits := [limit for limit in (config.engine.max_model_len, positions) if limit]) == []:
            raise UnsupportedCheckpoint("config.json does not state max_position_embeddings; set --max-model-len")
        return cls(
            Ready(
                vocab_size=vocab_size,
                max_model_len=min(limits),
                max_output_len=longest_output and min(*limits, longest_output),
                device="no device",
                dtype="no data type",
                kv_cache_tokens=0,
                kv_cache_bytes=0,
                kv_block_size=1,
                eos_token_ids=(),
                default_sampling=default_sampling(checkpoint, config.generation_config),
            )
        )

    def check(self) -> None:
        """Do nothing, because nothing can have died."""

    async def close(self) -> None:
        """Do nothing, because there are no processes."""

    async def reload(self, grace_s: float) -> None:
        """Do nothing, because there are no weights."""

    async def wait_until_up(self, *_: Any) -> None:
        raise _refusal()

    async def load_lora(self, *_: Any) -> NoReturn:
        raise _refusal()

    def keep_loras(self, *_: Any) -> NoReturn:
        raise _refusal()

    def generate(self, *_: Any) -> AsyncGenerator[Progress, None]:
        raise _refusal()

    def encode(self, *_: Any) -> AsyncGenerator[list[Features], None]:
        raise _refusal()


def _sizes(checkpoint: ConfigOnly, family_name: str | None) -> tuple[int | None, int | None, int | None]:
    """Return the sizes of the vocabulary and of the context, and the longest answer of an encoder-decoder."""
    # Imported late, because they import torch, which other services do not need in this process.
    from mindie_mm.models import family_of, reading
    from mindie_mm.nn.family import PretrainedFamily

    family = family_of(checkpoint, family_name)
    if not issubclass(family, PretrainedFamily):
        stated = checkpoint.stated_anywhere
        return stated("vocab_size"), stated("max_position_embeddings"), None
    with reading(checkpoint, family):
        translated = family.translated(checkpoint)
        config, longest = family.configuration(translated), family.longest_prompt(translated)
        text = config.get_text_config()
        if not (config.is_encoder_decoder or text.is_encoder_decoder):
            return text.vocab_size, longest, None
        targets = getattr(text, "max_target_positions", None)
        return text.vocab_size, longest, longest if targets is None else targets - 1  # one is for the first token


def _refusal() -> InputError:
    return InputError("this service has no engine, because it was started with mindie-mm render; use mindie-mm serve")
