"""Tests for choosing a tool call format for a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.parsers.json_objects import HermesParser
from mindie_mm.tool_calls.reasoning import reasoning_for, reasoning_named
from mindie_mm.tool_calls.registry import FORMATS, GROUP, OTHER_NAMES, format_names, parser_for, parser_named
from tests.tool_calls.assembling import TOOLS, answer_of, calls_of

HUB = Path(__file__).parents[3] / "shared" / "hub"

# Lines of published chat templates that write a call.
TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}',
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name }}",
    "glm45": "{{ '\\n<tool_call>' + tc.name }}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>",
    "glm47": "{{- '<tool_call>' + tc.name -}}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>",
    "deepseek_v3": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] "
        "+ '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}"
    ),
    "deepseek_v31": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' "
        "+ tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}"
    ),
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ name }}">',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ name }}">',
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="{{ name }}">',
    "kimi_k2": "<|tool_calls_section_begin|>{% for tool_call in message['tool_calls'] %}<|tool_call_begin|>{{ id }}",
    "mistral_v3": '{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}{{ tool_call.function|tojson }}',
    "llama3_json": '{{- "<|python_tag|>" + tool_call.name + ".call(" }}{{- \'{"name": "\' + tool_call.name }}',
    "pythonic": "{{- '<|python_start|>' }}{{- message.content | trim + '<|python_end|>' }}",
    "internlm": "{{ '<|action_start|><|plugin|>\\n' + tool_call|tojson + '<|action_end|>' }}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "functiongemma": "{{ '<start_function_call>call:' + function['name'] + '{' }}",
    "phi4": "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "granite": "{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message['content'] }}",
    "granite-20b-fc": "{{- '<function_call> ' + {'name': tc.name, 'arguments': tc.arguments}|tojson  }}",
    "lfm2": "{{- '<|tool_call_start|>[' + (tool_calls_ns.tool_calls | join(', ')) + ']<|tool_call_end|>' -}}",
    "minicpm5": "{{- '<function name=\"' ~ tool_call.name ~ '\">' }}{{- '<param name=\"' ~ key ~ '\">' }}",
}

WEATHER_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<<",
            "close": ">>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{content.f}", "arguments": "{content.a}"}},
        },
    },
    "start_anchor": "assistant",
}


def test_the_template_determines_the_format():
    for name, template in TEMPLATES.items():
        assert parser_for(template, set()) is FORMATS[name], name
    assert parser_for(TEMPLATES["mistral_v3"], {"[TOOL_CALLS]", "[ARGS]"}) is FORMATS["mistral"]
    assert parser_for("Use exact format: [func_name1(param1=value1), func_name2(...)]", set()) is FORMATS["pythonic"]
    assert parser_for('a single JSON list formatted as functools[{"name": ...}]', set()) is FORMATS["phi4"]
    assert parser_for("List of tools: [{{ tools | tojson }}]", {"<|tool_call_start|>"}) is FORMATS["lfm2"]
    assert {*TEMPLATES, "mistral"} == set(FORMATS)


def test_names_of_other_servers_name_the_same_formats():
    assert not OTHER_NAMES.keys() & FORMATS.keys()
    for name, known in OTHER_NAMES.items():
        assert parser_named(name) is FORMATS[known]


def test_the_vocabulary_alone_does_not_determine_a_format():
    assert parser_for("{{ message.content }}", {"<tool_call>", "[ARGS]", "<|python_tag|>"}) is None


@pytest.mark.skipif(not HUB.is_dir(), reason="the configurations of published checkpoints are not here")
def test_published_templates_determine_their_formats():
    shown = {"qwen3_vl_8b_lora": "hermes", "qwen3_vl_cosmos2": "hermes", "qwen25_vl_7b": None, "llava15": None}
    for folder, name in shown.items():
        text = "".join(path.read_text() for path in sorted((HUB / folder).glob("chat_template.*")))
        assert parser_for(text, set()) is (name and FORMATS[name]), folder


def test_the_error_for_an_unknown_name_lists_the_known_names():
    with pytest.raises(InputError, match=r"there is no tool-call format named 'herms'; the formats are .*hermes"):
        parser_named("herms")
    with pytest.raises(InputError, match=r"there is no reasoning format named 'qwen'; the formats are .*qwen3"):
        reasoning_named("qwen")


OTHER = """
from mindie_mm.tool_calls.parsers.json_objects import HermesParser

class OtherParser(HermesParser):
    openings = ("<call>",)
    closings = ("</call>",)

    @classmethod
    def detects(cls, template, vocabulary):
        return "<call>" in template

NO_PARSER = 3
"""


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """Return a function that installs a package. Its entry point `other` refers to an attribute of its module."""

    def install(attribute: str) -> None:
        info = tmp_path / "other_format-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_format\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nother = other_format:{attribute}\n")
        (tmp_path / "other_format.py").write_text(OTHER)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("other_format", None)


def test_other_packages_add_formats(other_package):
    other_package("OtherParser")
    assert "other" in format_names()
    parser = parser_named("other")
    assert parser_for("<call> <tool_call>", set()) is parser
    assert parser_for("<tool_call>", set()) is HermesParser
    answer = answer_of(parser(), ['<call>{"name": "f"}</call>'])
    assert calls_of(answer) == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize(
    ("attribute", "said"),
    [("missing", "cannot be loaded: AttributeError"), ("NO_PARSER", "is not a subclass of ToolCallParser")],
)
def test_a_format_that_cannot_be_loaded_is_reported_and_does_not_affect_other_formats(
    other_package, caplog, attribute, said
):
    other_package(attribute)
    with pytest.raises(InputError, match=f"'other' .other_format:{attribute}. {said}"):
        parser_named("other")
    assert parser_for("<tool_call>", set()) is HermesParser
    assert said in caplog.text


def test_a_response_template_reads_the_calls():
    parser = parser_for("<tool_call>", set(), WEATHER_TEMPLATE)
    assert parser is not None
    text = 'Now: <<{"f": "now", "a": {"x": "<"}}>> and <<{"f": "now", "a": {}}>>.'
    for pieces in ([text], list(text), [text[:9], text[9:30], text[30:]]):
        answer = answer_of(parser(TOOLS), pieces)
        assert answer.content == "Now:  and ."
        assert calls_of(answer) == [{"name": "now", "arguments": {"x": "<"}}, {"name": "now", "arguments": {}}]
    for invalid in ('<<{"f": "now"', '<<{"f": 1}>> x', "<<>>", '<<{"f": "now", "a": {}}', '<<{"f": "now", "a": {}}>'):
        assert not answer_of(parser(TOOLS), list(f"a{invalid}")).calls, invalid
        assert answer_of(parser(TOOLS), [f"a{invalid}"]).content.startswith("a")


def test_a_response_template_uses_the_grammar_of_the_chat_template():
    arguments = {"parallel": False, "one_of": ["now"], "added_tokens": {}}
    known = parser_for("<tool_call>", set(), WEATHER_TEMPLATE)
    assert known is not None
    assert known.grammar(TOOLS, **arguments) == HermesParser.grammar(TOOLS, **arguments)
    assert known.markers == HermesParser.markers
    unknown = parser_for("", set(), WEATHER_TEMPLATE)
    assert unknown is not None
    with pytest.raises(InputError, match="calls cannot be required"):
        unknown.grammar(TOOLS, **arguments)
    with pytest.raises(InputError, match="the response_template of the tokenizer cannot be read"):
        parser_for("", set(), {"fields": json.loads("[]")})


THINKING = r"""{%- if message.reasoning_content is string %}
{%- set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
"""Parts of the chat template of Qwen3-VL-30B-A3B-Thinking."""


def test_a_thinking_template_has_reasoning_and_tool_calls():
    assert reasoning_for(THINKING) == reasoning_named("qwen3")
    assert parser_for(THINKING, set()) is FORMATS["hermes"]


def test_the_template_determines_the_reasoning_format():
    shown = {
        "{{ '<think>' + reasoning + '</think>' }}": "qwen3",
        "[THINK]{{ reasoning }}[/THINK]": "mistral",
        "<|channel>thought\n{{ reasoning }}<channel|>": "gemma4",
        "◁think▷{{ reasoning }}◁/think▷": "kimi",
    }
    for template, name in shown.items():
        assert reasoning_for(template) == reasoning_named(name)
    assert reasoning_for("{{ content }}") is None
