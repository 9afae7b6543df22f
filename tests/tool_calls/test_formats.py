"""Tests for the content and the calls that each tool-call format reads from a text."""

from __future__ import annotations

import json

import pytest

from mindie_mm.tool_calls.events import Answer
from mindie_mm.tool_calls.reasoning import ReasoningParser, reasoning_named
from mindie_mm.tool_calls.registry import FORMATS, parser_named
from mindie_mm.tool_calls.schemas import Tool
from mindie_mm.tool_calls.typed_text import json_of, types_of
from tests.tool_calls.assembling import SAMPLES, TOOLS, answer_of, calls_of, name_of, reasoned, seen


def parse(name: str, text: str, *tools: Tool) -> Answer:
    return answer_of(parser_named(name)(tools or TOOLS), [text])


def test_one_and_two_calls_are_read_in_every_format():
    assert {name_of(sample) for sample in SAMPLES} | {"deepseek_v4", "deepseek_v41", "functiongemma"} == set(FORMATS)
    for sample in SAMPLES:
        for key in ("one", "two"):
            answer = parse(name_of(sample), sample[key])
            assert calls_of(answer) == sample[f"calls_{key}"], sample["format"]
            assert answer.content == ("I crop it." if sample[key].startswith("I crop") else "")


def test_variants_of_a_format_read_the_same_calls():
    dsml = next(sample["two"] for sample in SAMPLES if sample["format"] == "deepseek_v32")
    gemma = next(sample["two"] for sample in SAMPLES if sample["format"] == "gemma4")
    expected = SAMPLES[0]["calls_two"]
    v41 = dsml.replace("｜DSML｜function_calls", "｜DSML｜ calls")
    v41 = v41.replace("｜DSML｜invoke", "｜DSML｜ invoke").replace("｜DSML｜parameter", "｜DSML｜ parameter")
    function_gemma = gemma.replace("<|tool_call>", "<start_function_call>").replace('<|"|>', "<escape>")
    variants = {
        "deepseek_v4": dsml.replace("function_calls", "tool_calls"),
        "deepseek_v41": v41,
        "functiongemma": function_gemma.replace("<tool_call|>", "<end_function_call>"),
        "deepseek_v31": next(sample["two"] for sample in SAMPLES if sample["format"] == "deepseek_v3"),
        "mistral": next(sample["two"] for sample in SAMPLES if sample["format"] == "mistral_v3"),
        "mistral_v3": next(sample["two"] for sample in SAMPLES if sample["format"] == "mistral_v11"),
        "glm45": next(sample["two"] for sample in SAMPLES if sample["format"] == "glm47"),
    }
    for name, text in variants.items():
        assert calls_of(parse(name, text)) == expected, name


def test_text_without_calls_becomes_unchanged_content():
    texts = (
        "",
        " \n",
        "no call",
        '{"a": 1} is a dict',
        '{"name": "Bob", "parameters": {"age": 3}}',
        "[1, 2, 3]",
        "[see](https://a.example)",
        "a < b, <tool, <|tool, [TOOL, functool",
        "<tool_call> begins a call, <function= too\n",
        "<｜tool▁calls▁begin｜> and [TOOL_CALLS] are markers",
    )
    for name in FORMATS:
        for text in texts:
            answer = parse(name, text)
            assert seen(answer) == (text, []), name


def test_arguments_are_sent_as_the_model_writes_them():
    arguments = '{ "a":1.0,"b" : "\\u00e9\\/</tool_call>é", "c":[ ],"a":-0, "d":12345678901234567890123 }'
    for name, text in {
        "hermes": f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "mistral_v3": f'[TOOL_CALLS][{{"arguments": {arguments}, "name": "f"}}]',
        "kimi_k2": (
            f"<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
    }.items():
        assert seen(parse(name, text, Tool("f"))) == ("", [("f", arguments, True)])


WITHOUT_ARGUMENTS = {
    "hermes": [
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
    ],
    "mistral_v3": ['[TOOL_CALLS] [{"name": "now"}]', '[TOOL_CALLS] [{"name": "now", "arguments": "{}"}]'],
    "llama3_json": ['{"name": "now", "parameters": null}'],
    "glm47": ["<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>"],
    "qwen3_coder": ["<tool_call>\n<function=now>\n</function>\n</tool_call>", "<function=now></function>"],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
            "<|tool_call_end|><|tool_calls_section_end|>"
        )
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>"
        )
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "pythonic": ["[now()]"],
    "granite": ['<|tool_call|> [{"name": "now"}]', '<tool_call>[{"name": "now", "arguments": {}}]'],
    "granite-20b-fc": ['<function_call> {"name": "now", "arguments": {}}'],
    "lfm2": [
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        "<|tool_call_start|>now()<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>',
    ],
    "gemma4": ["<|tool_call>call:now{}<tool_call|>"],
}


def test_a_call_without_arguments_has_an_empty_object():
    for name, variants in WITHOUT_ARGUMENTS.items():
        for text in variants:
            assert seen(parse(name, text)) == ("", [("now", "{}", True)]), (name, text)


def test_a_truncated_output_does_not_complete_its_last_call():
    for sample in SAMPLES:
        name, text = name_of(sample), sample["two"]
        for length in range(len(text)):
            answer = parse(name, text[:length])
            complete = calls_of(answer)
            assert complete == sample["calls_two"][: len(complete)], (name, text[:length])
            assert len(answer.calls) <= len(complete) + 1
            for marker in parser_named(name).openings:
                assert marker not in answer.content, (name, text[:length])


def test_a_truncated_call_without_arguments_leaves_no_marker_in_the_content():
    for name, variants in WITHOUT_ARGUMENTS.items():
        for text in variants:
            for length in range(len(text)):
                answer = parse(name, text[:length])
                assert all(opening not in answer.content for opening in parser_named(name).openings), text[:length]


def test_deep_nesting_causes_no_recursion():
    depth = 20_000
    deep = f'{{"a": {"[" * depth}{"]" * depth}}}'
    answer = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>')
    assert seen(answer) == ("", [("f", deep, True)])
    literals = {
        "pythonic": f"[now(a={'[' * depth}",
        "gemma4": f"<|tool_call>call:now{{a:{'[' * depth}",
        "qwen3_coder": f"<function=now>\n<parameter=a>\n{'[' * depth}\n</parameter>\n</function>",
    }
    for name, text in literals.items():
        answer = parse(name, text)
        assert len(answer.calls) == 1, name


def test_ids_have_the_form_that_the_templates_require():
    assert parse("hermes", '<tool_call>{"name": "now"}</tool_call>').calls[0].id.startswith("call_")
    ids = {call.id for call in parse("hermes", '<tool_call>{"name": "now"}</tool_call>' * 50).calls}
    assert len(ids) == 50
    for text, expected in (
        ("[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", "abcDEF123"),
        ("[TOOL_CALLS]now[CALL_ID]call_1[ARGS]{}", None),
        ('[TOOL_CALLS] [{"name": "now", "id": "x"}]', None),
    ):
        (call,) = parse("mistral", text).calls
        assert call.id.isalnum()
        assert len(call.id) == 9
        assert expected in {None, call.id}


def test_kimi_counts_the_calls_of_the_chat():
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = call.format("functions.now:7") + call.format("now") + call.format("my.tool:1")
    parser = parser_named("kimi_k2")(TOOLS, 3)
    answer = answer_of(parser, [f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"])
    assert [call.name for call in answer.calls] == ["now", "now", "my.tool"]
    assert [call.id for call in answer.calls] == ["functions.now:7", "functions.now:4", "functions.my.tool:5"]


SENT = {"'\\xZZ'": "\"\\xZZ'", "{1}": "{1}", "1 + 1": "1 + 1"}
"""Arguments of invalid Python literals, from the first mistake on as the model wrote them, if they differ."""


def test_python_literals_become_json():
    literals = {
        "None": None,
        "-1_000": -1000,
        "0x1F": 31,
        ".5": 0.5,
        "1e3": 1000.0,
        "'it\\'s \"\\n\\t\\x41\\u00e9\\U0001F600\\101'": "it's \"\n\tAé😀A",
        '"""a "quoted" line\nb"""': 'a "quoted" line\nb',
        "'\\d'": "\\d",
        "()": [],
        "(1, [True], {'a': (), 2: 'b'},)": [1, [True], {"a": [], "2": "b"}],
        "'\\ud83d\\ude00'": "😀",
    }
    for literal, value in literals.items():
        (call,) = calls_of(parse("pythonic", f"[now(a={literal}, b=1)]"))
        assert call["arguments"] == {"a": value, "b": 1}, literal
    for invalid in ("nan", "1e", "a", "1 + 1", "f()", "'\\xZZ'", "{1}", "b'a'"):
        (call,) = parse("pythonic", f"[now(b=1, a={invalid})]").calls
        assert (call.arguments, call.complete) == ('{"b": 1, "a": ' + SENT.get(invalid, invalid) + "}", True)


def test_strings_of_lfm2_may_contain_unescaped_quotes():
    for text in (
        "sed -n '1,9p' f.py",
        'echo "a"; cat f',
        "a\nb",
        "python3 -c \"print(latex(3*x, s='x'))\"",
        'grep -F "]" log.txt',
    ):
        for other in ("", ", b=[1]"):
            (call,) = calls_of(parse("lfm2", f"<|tool_call_start|>[run(a='{text}'{other})]<|tool_call_end|>"))
            assert call["arguments"]["a"] == text
    (invalid,) = parse("lfm2", "<|tool_call_start|>[run(a='b' c=1)]<|tool_call_end|>").calls
    assert not invalid.complete


def test_calls_that_lfm2_repeats_are_dropped():
    call, end = "<|tool_call_start|>[now()]", "<|tool_call_end|>"
    for text, content in {
        f"{call}{end}[now()]{end}": "",
        f"{call}{end}\n[now()]{end}[now()]{end}\nDone.": "\nDone.",
        f"{call}{end}\n[1] says so.": "\n[1] says so.",
        f"I look.\n{call}{end}": "I look.",
    }.items():
        assert seen(parse("lfm2", text)) == (content, [("now", "{}", True)]), text
    assert seen(parse("lfm2", f"{call}{end}[1] {call}{end}")) == ("[1]", [("now", "{}", True)] * 2)
    assert seen(parse("lfm2", f"<|tool_call_start|>[ ]{end}")) == ("", [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "0042", "0042"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": "integer"}, "12345678901234567890", 12345678901234567890),
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "1e20", 1e20),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": "b"}', {"a": "b"}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nul", "nul"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "02139", "02139"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "2139", 2139),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "text", "text"),
        ({}, "3", 3),
        ({}, "three", "three"),
        (True, "[1]", [1]),
    ],
)
def test_the_schema_determines_the_type_of_raw_text(schema, text, value):
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    types = types_of(schema, root)
    found = json.loads(json_of(text, types)) if types != {"string"} else text
    assert (found, type(found)) == (value, type(value))
    tool = Tool("f", {"properties": {"a": schema}, **root})
    for name, call in {
        "qwen3_coder": f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>",
        "glm47": f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
    }.items():
        (read,) = calls_of(parse(name, call, tool))
        assert json.dumps(read["arguments"]) == json.dumps({"a": value}), name


def test_only_the_first_of_repeated_arguments_is_used():
    for is_string in ("true", "false"):
        parameter = f'<｜DSML｜parameter name="a" string="{is_string}">'
        text = (
            f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{parameter}1</｜DSML｜parameter>'
            f"{parameter}2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>"
        )
        (call,) = parse("deepseek_v32", text).calls
        assert json.loads(call.arguments, object_pairs_hook=list) == [("a", "1" if is_string == "true" else 1)]


def test_calls_within_completed_reasoning_are_part_of_the_reasoning():
    call = '<tool_call>{"name": "now"}</tool_call>'
    reasoning = ReasoningParser(reasoning_named("qwen3"), opened=True)
    text, answer = reasoned(reasoning, parser_named("hermes")(), [f"I try {call}\n</think>\n\n{call}done"])
    assert text == f"I try {call}"
    assert seen(answer) == ("done", [("now", "{}", True)])
    assert reasoning.is_over


def test_reasoning_without_an_end_text_may_end_with_a_call():
    call = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for name, expected in {"qwen3_coder": ("I try", 1), "hermes": (f"I try\n{call}", 0)}.items():
        parser = parser_named(name)
        reasoning = ReasoningParser(reasoning_named("qwen3"), opened=True, parser=parser)
        text, answer = reasoned(reasoning, parser(TOOLS), [f"I try\n{call}"])
        assert (text, len(calls_of(answer))) == expected
