"""Properties of a checkpoint that its tokenizer tells the other parts of a worker."""

from __future__ import annotations

import msgspec

from mindie_mm.inputs import Kind
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.nn.vllm_tiles import TileLayout
from mindie_mm.tokenize.text.chat_traits import ChatTraits


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a checkpoint in numbers of tokens, as its configuration states them. None stands for unknown."""

    vocabulary: int | None = None
    context: int | None = None
    """Maximum number of tokens of a prompt and its answer together."""
    longest_answer: int | None = None
    """Maximum answer length of an encoder-decoder in tokens. None for other models."""


class TokenizerTraits(msgspec.Struct, frozen=True, tag="traits"):
    """Properties of a checkpoint that other parts than its tokenizer need.

    They are the first message from a tokenizer process, and say that it is ready. A process that cannot start sends a
    Failure instead.
    """

    shown_tokens: list[str] = []
    """Tokens that are special in tokenizer.json, but that the family treats as text in prompts and in answers."""
    chat: ChatTraits = ChatTraits()
    """Traits of the chat template for conversations with tools."""
    speech: SpeechTraits | None = None
    """How the checkpoint is asked to transcribe speech. None if it does not accept audio."""
    sizes: Sizes = Sizes()
    """Sizes, with `Setup.states_sizes`."""
    vllm_items: dict[Kind, PatchLayout | TileLayout] = {}
    """`Processor.vllm_items` of the checkpoint."""
    family: str = ""
    """Name of the checkpoint's family for error messages."""
