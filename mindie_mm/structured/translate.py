"""Translates structured outputs of all kinds into llguidance grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLParserLimits

from mindie_mm.errors import InputError
from mindie_mm.structured import lark
from mindie_mm.structured.dead_rules import refuse_endless, without_dead_parts
from mindie_mm.structured.gbnf import is_gbnf, lark_of_gbnf
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.structured.structural_tag import TagWriter

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Option that prevents an error: llguidance proposes the added token `<|image|>` where a grammar contains this text,
but then refuses the token."""
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(
    wanted: StructuredOutputs,
    added: Mapping[str, int],
    shown: Mapping[str, int],
    limits: LLParserLimits,
    *,
    check_schemas: bool = False,
) -> str:
    """Translate a description to an llguidance grammar, as JSON text.

    Args:
        wanted: Description that has been checked.
        added: Text and id of each added token, except end-of-sequence tokens.
        shown: Text and id of each added token that decoded text shows.
        limits: Limits for compiling a part of the grammar.
        check_schemas: Whether to check each JSON schema in a Lark grammar for output.

    Raises:
        InputError: The description is not valid, or cannot be enforced exactly.

    """
    first, *others = _output(wanted, shown, limits, check_schemas=check_schemas)
    for part in (first, *others):
        refuse_endless(part.get("lark_grammar", ""))
    whole = "start: @output" if wanted.after is None else _after_reasoning(wanted, added)
    grammars = [{"name": "whole", "lark_grammar": _OPTIONS + whole}, first | {"name": "output"}, *others]
    return json.dumps({"grammars": grammars})


def _output(
    wanted: StructuredOutputs, shown: Mapping[str, int], limits: LLParserLimits, *, check_schemas: bool
) -> list[dict[str, Any]]:
    """Return the grammar of the output without its reasoning, and the grammars that it refers to."""
    if wanted.json is not None or wanted.json_object:
        return [{"json_schema": lark.schema(wanted.json if wanted.json is not None else _ANY_OBJECT)}]
    if wanted.regex is not None:
        return [{"lark_grammar": f"start: X\nX: {lark.regex(wanted.regex)}"}]
    if wanted.choice is not None:
        return [{"lark_grammar": f"start: X\nX: {lark.any_of(wanted.choice)}"}]
    if wanted.grammar is not None:
        if is_gbnf(wanted.grammar):
            return [{"lark_grammar": lark_of_gbnf(wanted.grammar)}]
        grammar = lark.with_exact_schemas(wanted.grammar)
        return [{"lark_grammar": without_dead_parts(grammar, limits, schemas=check_schemas)}]
    assert wanted.structural_tag is not None, "check has found one"
    return TagWriter(shown).write(wanted.structural_tag)


def _after_reasoning(wanted: StructuredOutputs, added: Mapping[str, int]) -> str:
    """Return the Lark rules of the reasoning and of the output after the reasoning."""
    assert wanted.after is not None
    if wanted.reasoning_tokens is None:
        lines = _free_up_to(wanted.after, added)
    else:
        lines = _limited_up_to(wanted.after, added, wanted.reasoning_tokens)
    if wanted.opening is None:
        return "\n".join(["start: reasoning @output", *lines])
    opening = _sequence(wanted.opening, added)
    return "\n".join([f"start: @output | {opening} reasoning @output", *lines])


def _sequence(text: str, added: Mapping[str, int]) -> str:
    """Return a Lark sequence that matches text, which may contain added tokens."""
    pieces = lark.pieces_of(text, added)
    return " ".join(lark.token(added[piece]) if piece in added else lark.literal(piece) for piece in pieces)


def _free_up_to(marker: str, added: Mapping[str, int]) -> list[str]:
    """Return rules that match any text, with any added tokens, up to the first `marker`."""
    others = [token_id for text, token_id in added.items() if text != marker]
    ends = ["spelled", *([f"TEXT {lark.token(added[marker])}"] if marker in added else [])]
    lines = [
        f"reasoning: {'other{0,} ' if others else ''}({' | '.join(ends)})",
        f"TEXT: {lark.TEXT}",
        f"spelled[lazy]: TEXT {lark.literal(marker)}",
    ]
    if others:
        lines.append(f"other: TEXT {lark.token(*others)}")
    return lines


def _limited_up_to(marker: str, added: Mapping[str, int], num_tokens: int) -> list[str]:
    """Return rules that match at most `num_tokens` tokens of text and the `marker` after the text.

    Raises:
        InputError: The marker is not a single token, so the model could write it in several ways.

    """
    if marker not in added:
        raise InputError(
            f"the reasoning cannot be limited, because the vocabulary has no token {marker}, which ends it"
        )
    if not num_tokens:
        return [f"reasoning: {lark.token(added[marker])}"]
    return [
        f"reasoning: limited {lark.token(added[marker])}",
        f"limited[max_tokens={num_tokens}]: UNMARKED",
        f"UNMARKED: {lark.TEXT} & ~({lark.TEXT} {lark.literal(marker)} {lark.TEXT})",
    ]
