"""Tests that each call is whole or is text, whatever the model writes and wherever its answer ends."""

from __future__ import annotations

import json

import pytest

from mindie_mm.tool_calls.registry import FORMATS, parser_named
from mindie_mm.tool_calls.schemas import Tool
from tests.tool_calls.assembling import TOOLS, answer_of, seen, texts_of_all_formats

STRING = Tool("f", {"properties": {"s": {"type": "string"}}})
UNION = Tool("f", {"properties": {"s": {"type": ["string", "integer"]}}})
LOOKALIKE = "a < b\n</par </arg\n</parameter> </tool_call> <b>\n\n"
"""A value with texts that look like the end of a value in some formats."""

ENDINGS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>s</arg_key><arg_value>{value}</arg_value></tool_call>",
    "minicpm5": '<function name="f"><param name="s">{value}</param></function>',
    **{
        name: (
            f'<{dsml}{section}>\n<{dsml}invoke name="f">\n<{dsml}parameter name="s" string="true">{{value}}'
            f"</{dsml}parameter>\n</{dsml}invoke>\n</{dsml}{section}>"
        )
        for name, dsml, section in (
            ("deepseek_v32", "｜DSML｜", "function_calls"),
            ("deepseek_v4", "｜DSML｜", "tool_calls"),
            ("deepseek_v41", "｜DSML｜ ", "calls"),
        )
    },
    "gemma4": '<|tool_call>call:f{{s:<|"|>{value}<|"|>}}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{{s:<escape>{value}<escape>}}<end_function_call>",
    "pythonic": "[f(s='''{value}''')]",
    "lfm2": "<|tool_call_start|>[f(s='{value}')]<|tool_call_end|>",
}
"""A call of each format with unquoted strings or Python literals, with a place for the value of the argument `s`."""


def texts() -> list[tuple[str, str, tuple[Tool, ...]]]:
    found = [(name, text, TOOLS) for name, text in texts_of_all_formats()]
    for tool in (STRING, UNION):
        found += [(name, text.format(value="ab"), (tool,)) for name, text in ENDINGS.items()]
        found += [(name, text.format(value=LOOKALIKE), (tool,)) for name, text in ENDINGS.items() if "_" in name]
    return found


def test_all_formats_are_tested() -> None:
    assert {name for name, _, _ in texts()} == set(FORMATS)
    assert set(ENDINGS) >= {name for name in FORMATS if hasattr(FORMATS[name], "excluded")}


@pytest.mark.parametrize(("name", "text", "tools"), texts(), ids=[name for name, _, _ in texts()])
def test_arguments_that_are_cut_off_are_a_prefix(name: str, text: str, tools: tuple[Tool, ...]) -> None:
    whole = answer_of(parser_named(name)(tools), [text], whole=True)
    assert whole.calls
    for length in range(len(text)):
        for pieces in ([text[:length]], list(text[:length])):
            cut = answer_of(parser_named(name)(tools), pieces)
            for call, complete in zip(cut.calls, whole.calls, strict=False):
                assert complete.arguments.startswith(call.arguments), (text[:length], call.arguments)
                assert call.arguments == complete.arguments or not call.complete, text[:length]


@pytest.mark.parametrize(("name", "text", "tools"), texts(), ids=[name for name, _, _ in texts()])
def test_calls_are_complete_or_text_wherever_the_model_ends_its_answer(
    name: str, text: str, tools: tuple[Tool, ...]
) -> None:
    for length in range(len(text) + 1):
        written = text[:length]
        whole = answer_of(parser_named(name)(tools), [written], whole=True)
        assert seen(answer_of(parser_named(name)(tools), list(written), whole=True)) == seen(whole), written
        assert all(call.complete for call in whole.calls), written
        if not whole.calls:
            assert whole.content == written


def json_call(name: str, arguments: str) -> str | None:
    """Return a call with these arguments in a format whose arguments are JSON, or None for other formats."""
    match name:
        case "mistral":
            return f"[TOOL_CALLS]f[ARGS]{arguments}"
        case "kimi_k2":
            call = f"<|tool_call_begin|>f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
        case "deepseek_v3" | "deepseek_v31":
            parser = parser_named(name)
            before, after = parser.call_tags  # type: ignore[attr-defined]
            return parser.around[0] + before.replace("{name}", "f") + arguments + after + parser.around[2]
    if not (parser := parser_named(name)).written("f", "{}") or name in ("pythonic", "lfm2"):
        return None
    return parser.around[0] + str(parser.written("f", arguments)) + parser.around[2]


JSON_FORMATS = [name for name in FORMATS if json_call(name, "{}")]

AS_WRITTEN = [
    '{"x": NaN, "y": 2}',
    '{"x": undefined, "y": [1, }',
    "{'x': 1}",
    '{"x": 1,}',
    '{"x": }',
    '{"x" 1}',
    '{x: 1, "b": "}"}',
    '{"x": [1}',
    '{"a": "say "hi" now"}',
    '{"a": "\\d \\\' \\u12"}',
    "{ }",
    '{"x": 5], "y": 2}',
    '{"x": [1, 2}, "y": 3}',
    '{"x": [{"a": 1}}, {"b": 2}]}',
    '{"x": {"a": 1]}, "y": [{"b": 2}}]}',
    '{"a": 1 /* } */, "b": 2}',
    '{"a": 1 /* }}} */, "b": {"c": {}}}',
    '{"a": 1 // }\n, "b": [2]}',
    '{"a": 1 /* } */, "b": [2}',
    '{"code": "print("}")", "y": 1}',
]
"""Arguments that are not valid JSON. Each of them ends with its last bracket."""


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_invalid_arguments_are_passed_on_as_the_model_wrote_them(name: str) -> None:
    for arguments in AS_WRITTEN:
        text = json_call(name, arguments)
        assert text is not None
        for pieces in ([text], list(text)):
            answer = answer_of(parser_named(name)([Tool("f")]), pieces, whole=True)
            assert seen(answer) == ("", [("f", arguments, True)]), text


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_after_misplaced_brackets_is_a_call_of_its_own(name: str) -> None:
    arguments = '{"x": [1, 2}, "y": 3}'
    text = json_call(name, arguments)
    assert text is not None
    before, after = text.split(arguments)
    opening, closing = (parser_named(name).around[at] for at in (0, 2))
    between = parser_named(name).around[1]
    second = before.removeprefix(opening) + "{}" + after.removesuffix(closing)
    text = before + arguments + after.removesuffix(closing) + between + second + closing
    for pieces in ([text], list(text)):
        answer = answer_of(parser_named(name)([Tool("f")]), pieces, whole=True)
        assert seen(answer) == ("", [("f", arguments, True), ("f", "{}", True)]), text


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_misplaced_brackets_that_are_cut_off_do_not_complete_a_call(name: str) -> None:
    text = json_call(name, '{"x": [1, 2}, "y": 3}')
    assert text is not None
    for length in range(text.index(" 3}")):
        cut = answer_of(parser_named(name)([Tool("f")]), list(text[:length]))
        assert not any(call.complete for call in cut.calls), text[:length]


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_control_characters_in_strings_are_escaped(name: str) -> None:
    given = '{\n\t"co\tde": "line 1\nline 2\r\n\\\n\x00\\" \\\\", "b": ["\x1f"]}'
    expected = {"co\tde": 'line 1\nline 2\r\n\\\n\0" \\', "b": ["\x1f"]}
    text = json_call(name, given)
    assert text is not None
    for pieces in ([text], list(text)):
        (call,) = answer_of(parser_named(name)([Tool("f")]), pieces, whole=True).calls
        assert call.arguments.startswith('{\n\t"co\\tde": "line 1\\nline 2')
        assert json.loads(call.arguments) == expected


def test_control_characters_in_arguments_that_are_a_string_or_precede_the_name_are_escaped() -> None:
    held = json.dumps('{"a": "x\ny"}').replace("\\n", "\n")
    for arguments in ('{"a": "x\ny"}', held, json.dumps('{"a": "x\ny"}')):
        text = f'<tool_call>\n{{"arguments": {arguments}, "name": "f"}}\n</tool_call>'
        for whole in (True, False):
            assert seen(answer_of(parser_named("hermes")(), list(text), whole=whole)) == (
                "",
                [("f", '{"a": "x\\ny"}', True)],
            )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 5}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 5}'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 5}}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 5}"\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 5}, "x": y}\n</tool_call>'),
        ("internlm", '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 5}<|action_end|>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 5}'),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 5}]'),
        ("phi4", 'functools[{"name": "f", "arguments": {"a": 5}]'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 5}]'),
        ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {"a": 5}'),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>5</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value>I think.</tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n5\n</function>"),
        ("minicpm5", '<function name="f"><param name="a">5</param>'),
        ("gemma4", "<|tool_call>call:f{a:5"),
        ("pythonic", "[f(a=5)"),
        ("pythonic", "[f(a=5"),
        ("lfm2", "<|tool_call_start|>f(a=5"),
    ],
)
def test_a_call_is_complete_even_if_its_last_brackets_or_tags_are_missing(name: str, text: str) -> None:
    tool = Tool("f", {"properties": {"a": {"type": "integer"}}})
    for pieces in ([text], list(text)):
        answer = answer_of(parser_named(name)([tool]), pieces, whole=True)
        assert seen(answer) == ("", [("f", '{"a": 5}', True)])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}\n</tool_call>', '{"a": {"b": 1}\n'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1[TOOL_CALLS]f[ARGS]{"b": 2}', '{"a": 1'),
        ("gemma4", "<|tool_call>call:f{a:one two,b:{c:d},e:1}<tool_call|>", '{"a": one two,b:{c:d},e:1}'),
        ("gemma4", "<|tool_call>call:f{a:{b:[x]},c:2}<tool_call|>", '{"a": {"b": [x]},c:2}'),
        ("pythonic", "[f(a=g(1, [2]), b=3)]", '{"a": g(1, [2]), b=3}'),
        ("pythonic", "[f(1, 2)]", "{1, 2}"),
        ("lfm2", "<|tool_call_start|>[f(a=b c)]<|tool_call_end|>", '{"a": b c}'),
    ],
)
def test_the_rest_of_broken_arguments_is_passed_on(name: str, text: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(parser_named(name)([Tool("f")]), pieces, whole=True)
        assert (answer.content, answer.calls[0].arguments) == ("", arguments)
        assert all(call.complete for call in answer.calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n[1, 2]\n</tool_call> or so"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "a city"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "argu'),
        ("qwen3_coder", "<tool_call>\nf(a=1)\n</tool_call>"),
        ("gemma4", "<|tool_call>f{a:1}<tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>5<|tool_call_end|>"),
    ],
)
def test_text_that_never_becomes_a_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert seen(answer_of(parser_named(name)([Tool("f")]), pieces, whole=True)) == (text, [])


@pytest.mark.parametrize("empty", ['""', '" "', "null", '"null"', "{}", '"{}"'])
@pytest.mark.parametrize("name", ["hermes", "internlm", "llama3_json", "mistral_v3", "phi4", "granite"])
def test_empty_arguments_are_an_empty_object(name: str, empty: str) -> None:
    text = json_call(name, empty)
    assert text is not None
    assert seen(answer_of(parser_named(name)([Tool("f")]), list(text), whole=True)) == ("", [("f", "{}", True)])


@pytest.mark.parametrize(
    ("name", "before", "between", "after"),
    [
        ("hermes", "<tool_call>\n", "\n", "\n</tool_call>"),
        ("hermes", "<tool_call>", "", "</tool_call>"),
        ("internlm", "<|action_start|><|plugin|>\n", "\n", "<|action_end|>"),
        ("granite", "<|tool_call|>", " ", ""),
        ("granite-20b-fc", "<function_call> ", "\n", ""),
    ],
)
def test_several_calls_may_follow_one_opening(name: str, before: str, between: str, after: str) -> None:
    first, second = '{"name": "f", "arguments": {"a": 9}}', '{"name": "g", "arguments": {"b": 9}}'
    calls = [("f", '{"a": 9}', True), ("g", '{"b": 9}', True)]
    text = f"{before}{first}{between}{second}{after}"
    for pieces in ([text], list(text)):
        assert seen(answer_of(parser_named(name)(), pieces, whole=True)) == ("", calls)
    for others in (f"{first},{second}", f"{first},\n{second}", f"[{first}, {second}]", f"[{first}\n,{second}\n]"):
        for pieces in ([before + others + after], list(before + others + after)):
            assert seen(answer_of(parser_named(name)(), pieces, whole=True)) == ("", calls), others


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}', "\n</tool_call>"),
        ("internlm", '<|action_start|><|plugin|>\n{"name": "f", "parameters": {}}', "<|action_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>", "\n</tool_call>"),
        ("gemma4", "<|tool_call>call:f{}", "<tool_call|>"),
        ("functiongemma", "<start_function_call>call:f{}", "<end_function_call>"),
        ("lfm2", "<|tool_call_start|>[f()]", "<|tool_call_end|>"),
        *(
            (name, before + "{}" + after.removesuffix(closing), closing)
            for name in ("kimi_k2", "deepseek_v3", "deepseek_v31")
            for before, _, after in [str(json_call(name, "{}")).partition("{}")]
            for closing in parser_named(name).closings
        ),
    ],
)
def test_the_closing_tag_never_becomes_content(name: str, before: str, after: str) -> None:
    calls = [("f", "{}", True)]
    for others in ("\nDone.", '\n{"note": 1}', "\n" + "Many words. " * 50):
        for pieces in ([before + others + after + "More"], list(before + others + after + "More")):
            content, found = seen(answer_of(parser_named(name)(), pieces, whole=True))
            assert (content, found) in ((others.rstrip() + "More", calls), ("More", calls)), others


def test_qwens_and_gemmas_blocks_may_hold_several_calls() -> None:
    for name, text in (
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>"),
        ("gemma4", "<|tool_call>call:f{}call:g{}<tool_call|>"),
    ):
        for pieces in ([text], list(text)):
            answer = answer_of(parser_named(name)(), pieces, whole=True)
            assert seen(answer) == ("", [("f", "{}", True), ("g", "{}", True)])
