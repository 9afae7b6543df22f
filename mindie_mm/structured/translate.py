"""Translation of every kind of structured output into one llguidance grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mindie_mm.structured import lark
from mindie_mm.structured.gbnf import is_gbnf, lark_of_gbnf
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.structured.structural_tag import TagWriter

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Without it, llguidance proposes the added token `<|image|>` for that text in a grammar, and then refuses it."""
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(wanted: StructuredOutputs, added: Mapping[str, int], shown: Mapping[str, int]) -> str:
    """Return llguidance's grammar of an output, as JSON text.

    Args:
        wanted: The checked description.
        added: Ids of the added tokens, by text, without the end-of-sequence tokens.
        shown: Those of them that appear in decoded text.

    Raises:
        InputError: The description is not valid, or cannot be enforced exactly.

    """
    grammars = _grammars(wanted, shown)
    if wanted.after is not None:
        grammars[0] = {**grammars[0], "name": "output"}
        grammars.insert(0, {"name": "reasoning", "lark_grammar": _free_up_to(wanted.after, added, "@output")})
    grammars[0] = {**grammars[0], "lark_grammar": _OPTIONS + grammars[0]["lark_grammar"]}
    return json.dumps({"grammars": grammars})


def _grammars(wanted: StructuredOutputs, shown: Mapping[str, int]) -> list[dict[str, str]]:
    if wanted.json is not None or wanted.json_object:
        schema = lark.schema(wanted.json if wanted.json is not None else _ANY_OBJECT)
        return [{"lark_grammar": f"start: %json {json.dumps(schema)}"}]
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
    """Return the Lark of free text that may contain added tokens, up to the first `marker`, and of `then` after it."""
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
