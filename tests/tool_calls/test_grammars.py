"""Tests for grammars that force tool calls, compiled for the vocabulary of the embedded checkpoint."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer

import mindie_mm
from mindie_mm.errors import InputError
from mindie_mm.tool_calls.registry import FORMATS, parser_named
from mindie_mm.tool_calls.schemas import Tool
from tests.tool_calls.assembling import CROP, NOW, READ, SAMPLES, TOOLS, answer_of, calls_of, name_of

TOKENIZER = Path(mindie_mm.__file__).parent / "assets/tiny/tokenizer.json"
END = 0

# Functions that convert a sample, as the model writes it, to the text that the grammar forces.
FORCED = {
    "llama3_json": lambda text: text.removeprefix("<|python_tag|>"),
    "internlm": lambda text: text.replace("> <", "><").replace("}\n<", "}<"),
    "gemma4": lambda text: text.replace("{box:[0,10,40,90],page:2}", "{page:2,box:[0, 10, 40, 90]}"),
    "pythonic": lambda text: text.replace("'de'", '"de"').replace("'Größe \"A4\"\\nzwei'", '"Größe \\"A4\\"\\nzwei"'),
}
FORCED["lfm2"] = FORCED["pythonic"]
JSON_CALLS = ("hermes", "llama3_json", "mistral_v3", "internlm", "phi4", "granite", "granite-20b-fc")


class Vocabulary:
    """The vocabulary of the embedded checkpoint, with additional special tokens."""

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        added = self.tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: number for number, token in added.items()}
        self.guided = LLTokenizer(self.tokenizer.to_str(), eos_token=[END])

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.guided, grammar, log_level=0)
        assert not matcher.is_error(), (grammar, matcher.get_error())
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def random_answer(self, grammar: str, seed: int, max_tokens: int = 600) -> str | None:
        """Draw tokens that the grammar allows until the text may end.

        Return None if it does not end within `max_tokens`.
        """
        matcher, chosen, tokens = self.matcher(grammar), random.Random(seed), []
        bits = allocate_token_bitmask(1, self.guided.vocab_size)
        for _ in range(max_tokens):
            if matcher.is_stopped() or (matcher.is_accepting() and chosen.random() < 0.7):
                return self.tokenizer.decode(tokens, skip_special_tokens=False)
            fill_next_token_bitmask(matcher, bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            tokens.append(int(chosen.choice(allowed[allowed != END])))
            assert matcher.consume_token(tokens[-1])
        return None


@cache
def vocabularies(name: str) -> tuple[Vocabulary, Vocabulary]:
    """Return a vocabulary without the markers of a format, and a vocabulary with the markers as special tokens."""
    return Vocabulary(), Vocabulary(parser_named(name).markers)


def test_each_format_accepts_its_own_calls_and_no_others():
    for sample in SAMPLES:
        name = name_of(sample)
        parser = parser_named(name)
        forced = FORCED.get(name, str)
        one, two = (forced(sample[key].removeprefix("I crop it.").lstrip()) for key in ("one", "two"))
        for vocabulary in vocabularies(name):

            def accepts(text, names=("crop_image", "read_text"), *, parallel=True, here=vocabulary, parser=parser):
                added = here.added_tokens
                return here.accepts(parser.grammar(TOOLS, parallel=parallel, one_of=names, added_tokens=added), text)

            assert accepts(one), (name, one)
            assert accepts(two), (name, two)
            assert accepts(one, ("crop_image",), parallel=False), name
            assert not accepts(two, parallel=False), name
            assert not accepts(one, ("read_text",)), name
            assert not accepts(two, ("crop_image",)), name
            assert not accepts(one.replace("90]", "90, 1]")), name
            assert not accepts(one.replace("page", "side")), name
            assert not accepts(two.replace("de", "fr")), name
            assert not accepts(one[:-1]), name
            assert not accepts(f"I crop it. {one}"), name


def test_each_format_forces_calls_that_parse_and_fit_their_schema():
    for name in FORMATS:
        parser = parser_named(name)
        num_ended = 0
        for number, vocabulary in enumerate(vocabularies(name)):
            grammar = parser.grammar(
                TOOLS, parallel=True, one_of=[tool.name for tool in TOOLS], added_tokens=vocabulary.added_tokens
            )
            for seed in range(2):
                text = vocabulary.random_answer(grammar, 10 * number + seed)
                if text is None:
                    continue
                num_ended += 1
                answer = answer_of(parser(TOOLS), [text])
                calls = calls_of(answer)
                assert not answer.content, (name, text)
                assert calls, (name, text)
                assert len(calls) == len(answer.calls), (name, text)
                for call in calls:
                    schema = next(tool.schema for tool in TOOLS if tool.name == call["name"])
                    jsonschema.validate(call["arguments"], schema)
        assert num_ended >= 2, name


def test_a_tool_without_arguments_can_be_forced():
    for name in FORMATS:
        for vocabulary in vocabularies(name):
            grammar = parser_named(name).grammar(
                [NOW], parallel=False, one_of=["now"], added_tokens=vocabulary.added_tokens
            )
            text = vocabulary.random_answer(grammar, 1)
            assert text is not None
            assert calls_of(answer_of(parser_named(name)([NOW]), [text])) == [{"name": "now", "arguments": {}}], text


STRINGS = Tool(
    "f",
    {
        "properties": {
            "pattern": {"type": "string", "pattern": "^[a-c]{2,3}$"},
            "inner": {"type": "string", "pattern": "x/y", "maxLength": 5},
            "date": {"type": "string", "format": "date"},
            "union": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}, {"const": "here"}]},
            "several": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
        },
        "required": ["pattern", "inner", "date", "union", "several"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)


def test_raw_strings_follow_the_keywords_of_their_schema():
    for name in ("qwen3_coder", "glm47", "deepseek_v32", "minicpm5", "gemma4"):
        parser, vocabulary = parser_named(name), Vocabulary()
        grammar = parser.grammar([STRINGS], parallel=False, one_of=["f"], added_tokens=vocabulary.added_tokens)
        for seed in range(3):
            text = vocabulary.random_answer(grammar, seed)
            assert text is not None
            (call,) = calls_of(answer_of(parser([STRINGS]), [text]))
            jsonschema.validate(call["arguments"], STRINGS.schema)


def test_schemas_that_cannot_be_enforced_in_raw_text_are_refused():
    refused = (
        ({"properties": {"a": {"type": "string", "format": "regex"}}}, "'regex'"),
        ({"properties": {"a": {"minimum": 3}}}, "f.a"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}], "minLength": 2}}}, "'anyOf'"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "'$ref'"),
        ({"properties": {"a": {"$ref": "#/$defs/a", "minLength": 1}}, "$defs": {"a": {"minLength": 2}}}, "'$ref'"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "'not'"),
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
    )
    for schema, said in refused:
        with pytest.raises(InputError, match=said.replace("$", r"\$")):
            parser_named("qwen3_coder").grammar([Tool("f", schema)], parallel=False, one_of=["f"], added_tokens={})


def test_invalid_schemas_are_refused():
    invalid = (
        {"properties": [1]},
        {"properties": {"a": 1}, "required": "a"},
        {"required": [["a"]]},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "string", "minLength": "0}/"}}},
        {"properties": {"a": {"type": "string", "maxLength": True}}},
        {"properties": {"a": {"type": "string", "pattern": 3}}},
        {"properties": {"a": {"type": "string", "format": {}}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "not": {}},
        {"$ref": 3},
    )
    for schema in invalid:
        with pytest.raises(InputError):
            parser_named("glm47").grammar([Tool("f", schema)], parallel=False, one_of=["f"], added_tokens={})


def test_a_schema_with_exponentially_many_paths_gives_a_small_grammar():
    levels = {f"n{level}": {"anyOf": [{"$ref": f"#/$defs/n{level + 1}"}] * 20} for level in range(14)}
    tool = Tool("f", {"properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": {**levels, "n14": {"type": "integer"}}})
    for name in ("qwen3_coder", "gemma4"):
        grammar = parser_named(name).grammar([tool], parallel=False, one_of=["f"], added_tokens={})
        assert len(grammar) < 100_000
    text = "<function=f>\n<parameter=a>\n5\n</parameter>\n</function>"
    assert calls_of(answer_of(parser_named("qwen3_coder")([tool]), [text])) == [{"name": "f", "arguments": {"a": 5}}]


def test_text_may_surround_calls_that_begin_with_a_token():
    for name in ("hermes", "mistral", "kimi_k2", "deepseek_v31", "glm47", "gemma4", "granite", "lfm2"):
        plain, marked = vocabularies(name)
        sample = next(sample for sample in SAMPLES if name_of(sample) == name)
        arguments = {"parallel": True, "one_of": ["crop_image", "read_text"], "with_text": True}
        grammar = parser_named(name).grammar(TOOLS, added_tokens=marked.added_tokens, **arguments)
        call = FORCED.get(name, str)(sample["one"]).removeprefix("I crop it.").lstrip()
        for text in (call, f"I crop it.\n{call}", f"{call} Done.", "No call.", ""):
            assert marked.accepts(grammar, text), (name, text)
        assert not marked.accepts(grammar, f"I crop it. {call.replace('90]', '90, 1]')}"), name
        with pytest.raises(InputError, match="tool calls after text"):
            parser_named(name).grammar(TOOLS, added_tokens=plain.added_tokens, **arguments)


def test_names_that_a_format_cannot_write_are_refused():
    odd = {"qwen3_coder": ("a>b", " a", "a\n"), "gemma4": ("a:b", "{a}", ""), "pythonic": ("$a", "a b", "a=")}
    for name, properties in odd.items():
        for prop in (*properties, "x" * 1000):
            tool = Tool("f", {"properties": {prop: {"type": "integer"}}})
            with pytest.raises(InputError, match="which this tool-call format cannot write"):
                parser_named(name).grammar([tool], parallel=False, one_of=["f"], added_tokens={})
    for name in FORMATS.keys() - {*JSON_CALLS}:
        for odd_name in ("a b", 'a"', "a\n", "", "x" * 257):
            with pytest.raises(InputError, match="has a name that this tool-call format cannot write"):
                parser_named(name).grammar([Tool(odd_name)], parallel=False, one_of=[odd_name], added_tokens={})
    for name, value in {"glm45": "</arg_value>", "gemma4": '<|"|>'}.items():
        tool = Tool("f", {"properties": {"a": {"enum": ["x", f"a{value}b"]}}})
        with pytest.raises(InputError, match="the value"):
            parser_named(name).grammar([tool], parallel=False, one_of=["f"], added_tokens={})


def test_names_with_spaces_and_signs_are_written_if_the_format_allows_them():
    properties = {"key with space": {"type": "string", "maxLength": 5}, "$filter[x]": {"enum": ["a", 1]}, "é": {}}
    for name in FORMATS:
        written = {key: schema or {"type": "boolean"} for key, schema in properties.items()}
        if name in {"gemma4", "functiongemma", "pythonic", "lfm2"}:
            del written["$filter[x]"]
        if name in {"pythonic", "lfm2"}:
            del written["key with space"]
        tool = Tool("f-1_x", {"properties": written, "required": list(written), "additionalProperties": False})
        grammar = parser_named(name).grammar([tool], parallel=False, one_of=[tool.name], added_tokens={})
        text = vocabularies(name)[0].random_answer(grammar, 5)
        assert text is not None
        (call,) = calls_of(answer_of(parser_named(name)([tool]), [text]))
        jsonschema.validate(call["arguments"], tool.schema)


def test_a_tool_that_is_not_offered_cannot_be_forced():
    with pytest.raises(InputError, match="none of the offered tools is named 'fly'"):
        parser_named("hermes").grammar(TOOLS, parallel=False, one_of=["fly"], added_tokens={})


def test_special_characters_in_names_and_properties_are_literal():
    odd = Tool(
        'a"b\\c/<[5]>%json', {"properties": {'p"\n{}': {"type": "integer", "enum": [1]}}, "required": ['p"\n{}']}
    )
    vocabulary = Vocabulary()
    for name in JSON_CALLS:
        vocabulary.matcher(parser_named(name).grammar([odd], parallel=True, one_of=[odd.name], added_tokens={}))
    grammar = parser_named("hermes").grammar([odd], parallel=False, one_of=[odd.name], added_tokens={})
    call = json.dumps({"name": odd.name, "arguments": {'p"\n{}': 1}})
    assert vocabulary.accepts(grammar, f"<tool_call>\n{call}\n</tool_call>")


def test_the_order_and_the_choice_of_tools_do_not_change_the_calls():
    vocabulary = Vocabulary()
    sample = next(sample for sample in SAMPLES if sample["format"] == "hermes")
    for tools in ([READ, CROP], [NOW, CROP, READ]):
        grammar = parser_named("hermes").grammar(
            tools, parallel=True, one_of=["read_text", "crop_image"], added_tokens=vocabulary.added_tokens
        )
        assert vocabulary.accepts(grammar, sample["two"])
