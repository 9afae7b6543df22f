"""Translation of structured outputs of all kinds into llguidance grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mindie_mm.structured import lark
from mindie_mm.structured.gbnf import is_gbnf, lark_of_gbnf
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.structured.structural_tag import TagWriter

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Option that prevents an error: llguidance proposes the added token `<|image|>` where a grammar contains this text,
but then refuses the token."""
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(wanted: StructuredOutputs, added: Mapping[str, int], shown: Mapping[str, int]) -> str:
    """Translate a description to an llguidance grammar, as JSON text.

    Args:
        wanted: Description that has been checked.
        added: Ids of the added tokens except end-of-sequence tokens, by text.
        shown: Ids of the added tokens that are shown in decoded text, by text.

    Raises:
        InputError: The description is not valid, or cannot be enforced exactly.

    """
    first, *others = _output(wanted, shown)
    whole = "start: @output" if wanted.after is None else _free_up_to(wanted.after, added, "@output")
    grammars = [{"name": "whole", "lark_grammar": _OPTIONS + whole}, first | {"name": "output"}, *others]
    return json.dumps({"grammars": grammars})


def _output(wanted: StructuredOutputs, shown: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the grammar of the output without its reasoning, and the grammars that it refers to."""
    if wanted.json is not None or wanted.json_object:
        return [{"json_schema": lark.schema(wanted.json if wanted.json is not None else _ANY_OBJECT)}]
    if wanted.regex is not None:
        return [{"lark_grammar": f"start: X\nX: {lark.regex(wanted.regex)}"}]
    if wanted.choice is not None:
        return [{"lark_grammar": f"start: X\nX: {lark.any_of(wanted.choice)}"}]
    if wanted.grammar is not None:
        return [
            {"lark_grammar": (lark_of_gbnf if is_gbnf(wanted.grammar) else lark.with_exact_schemas)(wanted.grammar)}
        ]
    assert wanted.structural_tag is not None, "check has found one"
    return TagWriter(shown).write(wanted.structural_tag)


def _free_up_to(marker: str, added: Mapping[str, int], then: str) -> str:
    """Return a Lark grammar of free text, with added tokens, up to the first `marker`, followed by `then`."""
    others = [str(token_id) for text, token_id in added.items() if text != marker]
    ends = ["spelled", *([f"TEXT {lark.token(added[marker])}"] if marker in added else [])]
    lines = [
        f"start: {'other{0,} ' if others else ''}({' | '.join(ends)}) {then}",
        f"TEXT: {lark.TEXT}",
        f"spelled[lazy]: TEXT {lark.literal(marker)}",
    ]
    if others:
        lines.append(f"other: TEXT <[{','.join(others)}]>")
    return "\n".join(lines)
