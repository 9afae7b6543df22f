"""Tests that each kind of structured output allows exactly the texts that it describes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import MAX_STRUCTURE_BYTES, StructuredOutputs
from tests.structured.conftest import Takes, takes_ids

AUDIO = 786
"""Id of the added token `<|AUDIO|>`."""
DATE = {
    "type": "object",
    "properties": {"d": {"type": "string", "format": "date"}},
    "required": ["d"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("wanted", "fitting", "others"),
    [
        ({"json": '{"type": "boolean"}'}, ["true", "false"], ["1", "", " true", "tru"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", '{"a":1}', "{", "x"]),
        ({"regex": "[a-c]+[0-9]{2}"}, ["a12", "abc00"], ["a1", "12", "a123", "A12"]),
        ({"regex": "^yes|no$"}, ["yes", "no"], ["ye", "yesno"]),
        ({"regex": ""}, [""], ["a"]),
        ({"regex": r"\d\w\D\W"}, ["1a-+"], ["\u0663a-+", "1\u00e9-+"]),
        ({"regex": r"a/b\\(?:\n|x)\u00e9"}, ["a/b\\\n\u00e9", "a/b\\x\u00e9"], ["a/b"]),
        ({"regex": "(?i)ab?.*"}, ["A", "aBcd"], ["b", "a\n"]),
        ({"choice": ("a", "ab", 'c"\\/\n', "日本")}, ["a", "ab", 'c"\\/\n', "日本"], ["b", "", "abc", "日"]),
        ({"choice": ("",)}, [""], ["a"]),
        ({"grammar": 'start: "a" start "b" | "c"'}, ["c", "aacbb"], ["acbb", "ab"]),
        ({"grammar": '%llguidance {}\nstart: "a" /[0-9]+/\n%ignore / +/'}, ["a12", "a 12"], ["a", "12"]),
        ({"grammar": 'root ::= "a" root "b" | "c"'}, ["c", "aacbb"], ["acbb", "ab"]),
        ({"grammar": 'start ::= "x"\nroot ::= start{2}'}, ["xx"], ["x"]),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "x"}}'}, ["x"], ["xx", ""]),
    ],
)
def test_each_kind_allows_exactly_its_texts(
    takes: Takes, wanted: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    assert [text for text in fitting if not takes(text, **wanted)] == []
    assert [text for text in others if takes(text, **wanted)] == []


@pytest.mark.parametrize("seed", range(4))
def test_every_drawn_text_fits_its_description(drawn: Any, seed: int) -> None:
    assert re.fullmatch("[a-c]{2,5}(x|yz)", drawn(seed, regex="[a-c]{2,5}(x|yz)"))
    assert drawn(seed, choice=("one", "two", "three")) in ("one", "two", "three")
    assert re.fullmatch(r"\d\d\d\d-\d\d-\d\d", json.loads(drawn(seed, json=json.dumps(DATE)))["d"])
    assert re.fullmatch("(ab|c){1,4}", drawn(seed, grammar='root ::= x{1,4}\nx ::= "ab" | "c"'))
    assert drawn(seed, grammar='start: "x" %json {"enum": [1, "a"]}') in ("x1", 'x"a"')


def test_schemas_in_a_grammar_have_the_same_meaning_as_separate_schemas(takes: Takes) -> None:
    """Numbers are exact, and white space is as in json.dumps.

    `%json` in strings and comments does not start a schema.
    """
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**53 + 3}}, "required": ["a"]}
    grammar = f'start: "%json {{" /\\/"%json/ %json\n {json.dumps(schema)} # %json {{\n'
    assert takes('%json {/"%json{"a": 9007199254740992}', grammar=grammar)
    assert not takes('%json {/"%json{"a":1}', grammar=grammar)
    assert not takes('%json {/"%json{"a": 9007199254740996}', grammar=grammar)
    with pytest.raises(InputError, match="1234567890123456789 in const"):
        takes("", grammar='start: %json {"const": 1234567890123456789}')


SPELLED = "<|AUDIO|><|im_end|>"


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": json.dumps({"const": SPELLED})},
        {"choice": (json.dumps(SPELLED),)},
        {"regex": re.escape(json.dumps(SPELLED)).replace("<", "[<]").replace(">", "[>]")},
        {"grammar": f"start: {json.dumps(json.dumps(SPELLED))}"},
        {"grammar": f"root ::= {json.dumps(json.dumps(SPELLED))}"},
        {"structural_tag": json.dumps({"format": {"type": "const_string", "value": json.dumps(SPELLED)}})},
    ],
)
def test_the_text_of_a_special_token_is_written_in_letters(drawn: Any, wanted: dict[str, Any]) -> None:
    """If only one text is possible, llguidance without `no_forcing` proposes the special token and then refuses it."""
    assert drawn(0, **wanted) == json.dumps(SPELLED)


MARKED = [
    {"json": '{"enum": ["yes"]}'},
    {"regex": '"y.s"'},
    {"choice": ('"yes"',)},
    {"grammar": 'start: "\\"" "yes" "\\""'},
    {"grammar": 'root ::= "\\"" "yes" "\\""'},
    {"structural_tag": '{"format": {"type": "const_string", "value": "\\"yes\\""}}'},
]


@pytest.mark.parametrize("wanted", MARKED)
def test_an_output_may_begin_after_the_reasoning(takes: Takes, wanted: dict[str, Any]) -> None:
    for before in ("", "hm", 'a\n<b> "yes"', "<|IMAGE|><|VIDEO|>so <|AUDIO|>."):
        assert takes(f'{before}</think>"yes"', after="</think>", **wanted), before
    for text in ('"yes"', "", "</think>", 'a</think>"no"', 'a</think>b</think>"yes"', '<|im_start|>"yes"'):
        assert not takes(text, after="</think>", **wanted), text


def test_the_end_of_the_reasoning_may_be_a_token_or_its_letters(
    takes: Takes, grammars: Grammars, tokenizer: Any
) -> None:
    wanted: dict[str, Any] = {"choice": ("ok",), "after": "<|AUDIO|>"}
    spelled = [i for c in "a<|AUDIO|>ok" for i in tokenizer.encode(c, add_special_tokens=False).ids]
    assert AUDIO not in spelled
    assert takes_ids(grammars, spelled, **wanted)
    assert takes("a<|AUDIO|>ok", **wanted)
    assert takes("a<|VIDEO|>b<|AUDIO|>ok", **wanted)
    assert not takes("a<|VIDEO|>b<|AUDIO|>a", **wanted)
    assert not takes("a<|endoftext|><|AUDIO|>ok", **wanted)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, "has none; give exactly one of json, regex, choice"),
        ({"after": "</think>"}, "has none"),
        ({"json": "{}", "regex": "a"}, "has json and regex"),
        ({"choice": ("a",), "json_object": True}, "has choice and json_object"),
        ({"choice": ()}, "choice is an empty list"),
        ({"regex": "a", "after": ""}, "after is empty"),
        ({"regex": "a" * (MAX_STRUCTURE_BYTES + 1)}, "the regular expression has 32769 bytes; the limit is 32768"),
        ({"choice": tuple(f"choice {i}" for i in range(10_000))}, "the choice has 108890 bytes; the limit is 32768"),
    ],
)
def test_invalid_descriptions_are_refused_with_the_sampling_parameters(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(**wanted)).check(100)
    assert caught.value.param == "structured_outputs"


def test_a_json_schema_is_the_same_as_structured_outputs() -> None:
    wanted = StructuredOutputs(json="{}")
    assert SamplingParams(json_schema="{}").structure == SamplingParams(structured_outputs=wanted).structure == wanted
    assert SamplingParams().structure is None
    with pytest.raises(InputError, match="json_schema and structured_outputs cannot be used together"):
        SamplingParams(json_schema="{}", structured_outputs=wanted).check(100)
    with pytest.raises(InputError, match="determines the end of the output"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True).check(100)


def test_fields_are_converted_to_their_types() -> None:
    listed: Any = ["a", "b"]
    checked = SamplingParams(structured_outputs=StructuredOutputs(choice=listed)).check(100)
    assert checked.structured_outputs == StructuredOutputs(choice=("a", "b"))
    wrong: Any = {"type": "object"}
    with pytest.raises(InputError, match=r"structured_outputs\.json must be a string") as caught:
        SamplingParams(structured_outputs=StructuredOutputs(json=wrong)).check(100)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"regex": "(?=a)b"}, "regular expression is not supported.*look-around"),
        ({"regex": r"\bab"}, "regular expression is not supported.*lookarounds"),
        ({"regex": "a^b"}, "regular expression is not supported"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "a\\"}, "ends with a single backslash"),
        ({"regex": "[a&&b]"}, "no output can match it"),
        ({"grammar": ""}, "no start rule"),
        ({"grammar": "x"}, "the grammar is not supported"),
        ({"grammar": 'start: "a" b'}, "the grammar is not supported"),
        ({"grammar": "start: start"}, "no output can match it"),
        ({"grammar": "start: %json {"}, "after %json in the grammar is not valid JSON"),
        ({"grammar": "start: %json " + '{"a": ' * 5000}, "is nested too deeply"),
        ({"grammar": 'start: %json {"$ref": "http://127.0.0.1:1/schema.json"}'}, "the grammar is not supported"),
        ({"grammar": "start: <no_such_token>"}, "the grammar is not supported"),
        ({"json": "[]"}, "not a JSON object"),
        ({"json": '{"not": {}}'}, "Unimplemented"),
        ({"json": '{"$ref": "http://127.0.0.1:1/schema.json"}'}, "the JSON schema is not supported"),
    ],
)
def test_descriptions_that_cannot_be_enforced_are_refused(takes: Takes, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"(?s){said}"):
        takes("", **wanted)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a" start', ""),
        ('start: "a" start  // "b"\n  | part', "b"),
        ('root ::= "a" part', ""),
        ('root ::= ("a" root) | "b" part?', "b"),
        ('start: ("a"i start)* %json {"const": 1}', "1"),
    ],
)
def test_a_grammar_that_only_endless_texts_match_is_refused(takes: Takes, grammar: str, text: str) -> None:
    """Answers would end only at max_tokens, because llguidance accepts such a grammar."""
    mark = "::=" if "::=" in grammar else ":"
    grammar += f'\npart {mark} part "x"'
    if mark == ":" and text == "b":
        grammar += ' | "b"'
    if text:
        assert takes(text, grammar=grammar)
    else:
        with pytest.raises(InputError, match="no output can match it, because its rules never end"):
            takes(text, grammar=grammar)
