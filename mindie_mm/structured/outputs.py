"""The description of a structured output. All interfaces translate their requests into this description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from mindie_mm.errors import InputError

MAX_STRUCTURE_BYTES = 32768


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A description of an output. Exactly one of the fields before `after` is set. The fields have vLLM's names."""

    json: str | None = None
    """JSON schema, as JSON text."""
    regex: str | None = None
    """Regular expression of the whole output, in the syntax of the Rust crate `regex`. `\\d` and `\\w` match only
    ASCII."""
    choice: tuple[str, ...] | None = None
    """Texts that are allowed as output."""
    grammar: str | None = None
    """Grammar in llguidance's Lark syntax with a rule `start`, or in GBNF with a rule `root`."""
    json_object: bool = False
    """True if the output may be any JSON object."""
    structural_tag: str | None = None
    """Structural tag in the format of xgrammar or vLLM, as JSON text."""
    after: str | None = None
    """Text that ends the reasoning, such as `</think>`. The text before this marker is not constrained. The output
    begins after the marker."""
    opening: str | None = None
    """Text that starts the reasoning, such as `<think>`, if the model may leave out the reasoning. None if the text
    always begins with reasoning. Requires `after`."""
    reasoning_tokens: int | None = None
    """Maximum number of reasoning tokens, without the texts that start and end the reasoning. `after` must be a single
    token."""

    nouns: ClassVar[Mapping[str, str]] = {
        "json": "the JSON schema",
        "regex": "the regular expression",
        "choice": "the choice",
        "grammar": "the grammar",
        "json_object": "the JSON schema",
        "structural_tag": "the structural tag",
    }

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in self.nouns if getattr(self, name) not in (None, False))

    @property
    def noun(self) -> str:
        """Noun for the description in error messages."""
        return self.nouns[self.kind]

    def check(self) -> None:
        """Raise InputError unless exactly one description is set, and all values are valid and not too long."""
        given = [name for name in self.nouns if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise InputError(f"structured_outputs has {names}; give exactly one of {', '.join(self.nouns)}")
        if self.choice is not None and not self.choice:
            raise InputError("choice is an empty list; give at least one string")
        if self.after == "":
            raise InputError("the field after is empty; give the text that ends the reasoning, or None")
        if self.after is None and (self.opening is not None or self.reasoning_tokens is not None):
            raise InputError("opening and reasoning_tokens require the field `after`, the text that ends the reasoning")
        if self.opening == "" or (self.reasoning_tokens or 0) < 0:
            raise InputError(
                "opening must be None or a non-empty string, and reasoning_tokens must be None or at least 0"
            )
        texts = (*(self.choice or ()), self.json, self.regex, self.grammar, self.structural_tag)
        texts = (*texts, self.after, self.opening)
        try:
            num_bytes = sum(len(text.encode()) for text in texts if text)
        except UnicodeEncodeError as error:
            raise InputError(f"{self.noun} contains a lone surrogate") from error
        if num_bytes > MAX_STRUCTURE_BYTES:
            raise InputError(f"{self.noun} has {num_bytes} bytes; the limit is {MAX_STRUCTURE_BYTES}")
