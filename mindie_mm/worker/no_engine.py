"""The place of the engines in a worker that only plans prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from mindie_mm.engine.requests.default_sampling import default_sampling
from mindie_mm.engine.requests.engine_messages import Features, Progress, Ready
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes.restarts import Restarts
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from mindie_mm.tokenize.tokenizer_traits import Sizes


@dataclass(frozen=True, slots=True)
class NoEngine:
    """An engine that does not exist. It has the sizes that prompts are checked against, but answers no prompts."""

    info: Ready
    """Sizes that an engine would have if its memory sufficed for the whole context."""
    engines: Sequence[NoReturn] = ()
    num_alive: int = 0
    restarts: Restarts = field(default_factory=lambda: Restarts(0, 0))

    @classmethod
    def of(cls, config: WorkerConfig, sizes: Sizes) -> Self:
        """Return the place of an engine for a checkpoint with these sizes.

        Raises:
            UnsupportedCheckpoint: The checkpoint does not state a size, or has an invalid generation_config.json.
            InputError: `config.generation_config` is not valid.

        """
        checkpoint = Checkpoint.open(config.model)
        vocab_size, longest_output = sizes.vocabulary, sizes.longest_answer
        if vocab_size is None:
            vocab_size = load_tokenizer(checkpoint, config.family, ()).get_vocab_size()
        if (limits := [limit for limit in (config.engine.max_model_len, sizes.context) if limit]) == []:
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


def _refusal() -> InputError:
    return InputError("this service has no engine, because it was started with mindie-mm render; use mindie-mm serve")
