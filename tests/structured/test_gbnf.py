"""Tests that GBNF has the same meaning as in llama.cpp, even where llguidance's conversion would change the meaning."""

from __future__ import annotations

import json

import pytest

from mindie_mm.errors import InputError
from mindie_mm.structured.gbnf import is_gbnf
from tests.structured.conftest import Takes

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""llama.cpp's grammar for JSON."""


@pytest.mark.parametrize(
    ("grammar", "fitting", "others"),
    [
        ('root ::= word "foo"\nword ::= [a-z]*', ["abcfoo", "foo", "foofoo", "fofoo"], ["abc", "food"]),
        ('root ::= [a-z]* "foo" root | "."', [".", "foo.", "abfoafoofoo."], ["fo."]),
        (r'root ::= "\u0041BC" "\xe9" "é" "\u00e9" "\U0001f389"', ["ABCééé🎉"], ["\u41bcééé🎉"]),
        ("root ::= [a&&b] [x~~y-z] [+--]", ["ax,", "&~-", "bz+"], ["ca+", "aw+"]),
        ("root ::= [-a] [a-] [a-c]", ["--b", "aac"], ["b-b", "---"]),
        ("root ::= . [^a]", ["\n\n", "xb"], ["xa", "x"]),
        (r'root ::= [\]\[\\"] "\"" "[" "\\"', ['["[\\', ']"[\\', '""[\\'], ['a"[\\']),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"? "e"+', ["aabe", "aabbccdee"], ["abe", "aabccce"]),
        ('root ::= ("a" | "b" "c")* # "x\n# [ "\nx ::= root', ["", "abc", "bca"], ["b", "x"]),
        ('root ::= "a"{0} [b]{0,0} "c"', ["c"], ["ac", "bc"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
        ('root ::=\n  "a" |\n  "b"\n', ["a", "b"], ["ab"]),
        ('root ::= "<|AUDIO|>"', [], ["<|AUDIO|>"]),
        (JSON, [json.dumps({"a": ["x" * 300, 1.5e3, True, {"b\n": "é"}], "c": [[]] * 20})], ["{", "[]", '{"a": 01}']),
    ],
)
def test_a_grammar_allows_exactly_its_texts(takes: Takes, grammar: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in fitting if not takes(text, grammar=grammar)] == []
    assert [text for text in others if takes(text, grammar=grammar)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('x ::= "a"', "no rule named root"),
        ('root ::= "a" b', "there is no rule 'b'"),
        ("root ::= [a-z", "Unexpected end|Expected"),
        ('root ::= (("a"', "Expected '\\)'"),
        (r'root ::= "\q"', "not an escape sequence"),
        ("root ::= []", "the grammar is not supported"),
        ("root ::= [z-a]", "the grammar is not supported"),
        (r'root ::= "\ud800"', "the grammar is not supported"),
        ('root ::= "a"{3,2}', "the grammar is not supported"),
        ("root ::= <think>", "Expected name"),
        ("root ::= !<[7]>*", "Expected name"),
        ("root ::= x\nx ::= root", "no output can match it"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nests too deeply"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(1500)) + 'r1500 ::= "a"', "nests too deeply"),
    ],
)
def test_invalid_and_unsupported_grammars_are_refused(takes: Takes, grammar: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        takes("", grammar=grammar)


def test_gbnf_is_distinguished_from_lark() -> None:
    assert is_gbnf('# start: x\nstart ::= "a"\nroot ::= start')
    assert is_gbnf('  root   ::= "a"')
    assert not is_gbnf('start: "a ::= b"\n// root ::= x')
    assert not is_gbnf("")
