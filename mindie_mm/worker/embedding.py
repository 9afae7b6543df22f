"""Embeddings of prompts: how a prompt is made, and how the engine's hidden states become the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.requests.engine_messages import Ready
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.inputs import Item, Message, Text, require_switches, type_of, whole
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.sentence_transformers import SentenceModules
from mindie_mm.settings.config import Pooling, WorkerConfig
from mindie_mm.settings.limits import python_number
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.requests import TokenizeRequest

_NOT_CONFIGURED = (
    "this checkpoint does not specify how hidden states become an embedding: it has no modules.json of "
    "sentence-transformers. Set the option --pooling of the service, or WorkerConfig.pooling, to last or mean"
)
_SEQ2SEQ = "this model is an encoder-decoder, which computes no embeddings and no scores; use a decoder-only model"


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one embedding."""

    dimensions: int | None = None
    """Number of leading values to keep, for models that are trained for it (Matryoshka). None means all values. If
    embeddings are normalized, the shorter embedding is normalized again."""
    normalize: bool | None = None
    """True if the embedding has the length 1. None means the checkpoint's own setting, or else True."""
    prompt_name: str | None = None
    """Name of the instruction in the checkpoint's config_sentence_transformers.json to put before the text. None means
    the checkpoint's default, which may be no instruction."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """The way in which a checkpoint computes embeddings."""

    size: int
    """Number of values of an embedding."""
    modules: SentenceModules
    """Settings from the checkpoint's files, or the defaults of a checkpoint without these files."""
    pooling: Pooling | None
    """Hidden states of an embedding, or None if the checkpoint computes none."""
    chat: bool
    """True if text becomes a turn of a chat."""
    matryoshka: Sequence[int] | None
    """The numbers of dimensions that the checkpoint supports, if it lists them."""
    refusal: str
    """Error message if `pooling` is None."""

    @classmethod
    def of(cls, config: WorkerConfig, info: Ready, *, has_template: bool) -> Self:
        """Read the checkpoint's files, and apply the setting `pooling`.

        Args:
            config: Settings of the worker.
            info: Sizes of the engine.
            has_template: Whether the checkpoint has a chat template.

        Raises:
            UnsupportedCheckpoint: A file cannot be read.

        """
        checkpoint = Checkpoint.open(config.model)
        modules = SentenceModules.of(checkpoint)
        if modules is None:
            is_embedding_model = not info.has_head
            modules = SentenceModules(
                pooling="last" if is_embedding_model else None,
                normalizes=True,
                chat=is_embedding_model,
                opens_turn=is_embedding_model,
                refusal=_NOT_CONFIGURED,
            )
        pooling = modules.pooling if config.pooling == "auto" else config.pooling
        refusal = modules.refusal or "this checkpoint scores pairs of texts, and computes no embeddings"
        if info.hidden_size is None:
            pooling, refusal = None, _SEQ2SEQ
        listed = checkpoint.config.get("matryoshka_dimensions")
        return cls(
            info.hidden_size or 0,
            modules,
            pooling,
            modules.chat and has_template,
            listed if isinstance(listed, list) else None,
            refusal,
        )

    def sampling_params(self, priority: int = 0, cache_salt: str = "") -> SamplingParams:
        """Return the settings that make the engine pool hidden states.

        Raises:
            InputError: The checkpoint computes no embeddings.

        """
        if self.pooling is None:
            raise InputError(self.refusal)
        return SamplingParams(max_tokens=0, pooling=self.pooling, priority=priority, cache_salt=cache_salt)

    def check(self, params: PoolingParams) -> PoolingParams:
        """Return a copy of `params` with each setting converted to its type.

        Raises:
            InputError: A setting is invalid. The message gives its value and its limits.

        """
        if not isinstance(params, PoolingParams):
            raise InputError(f"params is {type_of(params)}; it must be PoolingParams")
        if params.normalize is not None:
            require_switches(normalize=params.normalize)
        if (number := python_number(whole(params.dimensions))) is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= self.size:
                raise InputError(f"dimensions={number!r} must be in [1, {self.size}]", param="dimensions")
            if self.matryoshka is not None and number not in (*self.matryoshka, self.size):
                supported = ", ".join(map(str, self.matryoshka))
                raise InputError(
                    f"dimensions is {number}; the checkpoint supports only {supported}", param="dimensions"
                )
        self.instruction(params.prompt_name)
        return msgspec.structs.replace(params, dimensions=number)

    def instruction(self, name: str | None) -> str:
        """Return the instruction with a name, or the default if `name` is None. It is empty if there is none.

        Raises:
            InputError: The checkpoint has no instruction with this name.

        """
        known = self.modules.prompts
        if name is None:
            return known.get(self.modules.default_prompt or "", "")
        if name not in known:
            names = ", ".join(known) or "none"
            raise InputError(
                f"prompt_name is {str(name)[:40]!r}; the checkpoint's instructions are {names}", param="prompt_name"
            )
        return known[name]

    def request(self, items: Sequence[Item], prompt_name: str | None = None) -> TokenizeRequest:
        """Return the request to tokenize text, or texts and media, with its instruction.

        Raises:
            InputError: The checkpoint has no instruction with this name, or cannot combine it with media.

        """
        instruction = self.instruction(prompt_name)
        if self.chat:
            return TokenizeRequest(
                messages=[*self.system(instruction), Message("user", tuple(items))],
                add_generation_prompt=self.modules.opens_turn,
            )
        if instruction and not self.modules.includes_prompt and self.pooling != "last":
            raise InputError("the checkpoint does not pool the tokens of instructions, which is not supported")
        if instruction and items and isinstance(items[0], Text):
            items = [Text(instruction + items[0].text), *items[1:]]
        elif instruction:
            items = [Text(instruction), *items]
        return TokenizeRequest(items=[*items], chat=False)

    @staticmethod
    def system(instruction: str) -> list[Message]:
        """Return the message that carries an instruction, if there is one."""
        return [Message("system", (Text(instruction),))] if instruction else []

    def check_length(self, prompt: Prompt) -> None:
        """Raise ContextLengthExceeded if the checkpoint's files allow only shorter prompts."""
        if (limit := self.modules.max_tokens) is not None and len(prompt) > limit:
            raise ContextLengthExceeded.of(limit, f"the prompt has {len(prompt)} tokens (max_seq_length)")

    def embedding(self, pooled: bytes, params: PoolingParams) -> NDArray[np.float32]:
        """Return the embedding, float32 [dimensions], from the pooled hidden states.

        As in torch's `normalize`, which sentence-transformers calls, the length is at least 1e-12.
        """
        values = np.frombuffer(pooled, np.float32)[: params.dimensions]
        if self.modules.normalizes if params.normalize is None else params.normalize:
            values = values / max(float(np.linalg.norm(values)), 1e-12)
        return values
