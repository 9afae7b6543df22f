"""Tests that the calls in a text do not depend on the pieces in which the text arrives."""

from __future__ import annotations

import random
from itertools import combinations

from mindie_mm.tool_calls.events import Answer, CallArguments, Content
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.reasoning import ReasoningParser, reasoning_named
from mindie_mm.tool_calls.registry import FORMATS, parser_named
from tests.tool_calls.assembling import SAMPLES, TOOLS, answer_of, cut, name_of, reasoned, seen

ODD = {
    "hermes": (
        'A <tool_call>{"a": 1}</tool_call> b <tool_call>{"name": "now", "arguments": "{\\"x\\": [1]}"}</tool_call>\nc',
        '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call> <tool_call>{\'',
        '<tool_call>{"arguments": {"<tool_call>": "\\\\\\"}"}, "id": 7, "name": "now"}\n \n</tool_call> \n',
    ),
    "llama3_json": ('{"name": "Bob", "age": 3} is a dict', ' {"name": "now", "parameters": {"a": -1e3}};{"b": 1}'),
    "pythonic": (
        '[now(a=\'\\\'\\x41\\"\', b=[(1_000,), {\'k\': None}], c="""x"y""")] end',
        "[1, 2] is a list",
        "[now(a=1",
    ),
    "qwen3_coder": (
        "<tool_call><function=f><parameter=s>a</parameter> b</parameter>\n</function></tool_call>\n\nend",
        "<function=read_text>\n<parameter=note>\n\n<b>\n</parameter></function> <function= <tool_call>x",
    ),
    "glm45": ("<tool_call>read_text\n<arg_key>note</arg_key><arg_value>a</tool_call>b</tool_call> ",),
    "deepseek_v3": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": }<｜tool▁calls▁end｜>x',),
    "phi4": ('functools[{"name": "now", "arguments": {"a": functools[',),
    "mistral": ('[TOOL_CALLS] x [TOOL_CALLS][{"name": "now"}, {}] [TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}',),
    "granite": (
        'A <tool_call> [{"arguments": {"a": [1]}, "name": "now"}, {"name": "now"} ] b <|tool_call|>{"name": "now"}\n',
        '<|tool_call|> is a marker <tool_call>[{"a": 1}] <|tool_call|>[{"name": "now", "arguments": {"a": tru}}] c',
    ),
    "granite-20b-fc": ('A <function_call>{"name": "now"} b\n<function_call> [{"name": "now"}]<function_call> {"a": }',),
    "lfm2": (
        "A <|tool_call_start|>[now(a='sed '1,9p' f', b={'k': true}), g()]<|tool_call_end|>\n[g()]<|tool_call_end|> [1]",
        '<|tool_call_start|>{"name": "now"}<|tool_call_end|><|tool_call_start|>now(a="")<|tool_call_end|>[c',
        "<|tool_call_start|>[now()]<|tool_call_end|>[1] <|tool_call_start|>[ ]<|tool_call_end|>",
        "<|tool_call_start|> begins a call <|tool_call_start|>[now(a='b' c=1)]<|tool_call_end|> d",
    ),
    "gemma4": ('<|tool_call>call:f{a:"x", b c:<|"|>"<|"|>,d:{},e:[]}<tool_call|> <|tool_call>call:g<|tool_call>',),
}


def test_every_split_into_two_pieces_gives_the_same_calls():
    for name, text in texts():
        whole = seen(parse(name, [text]))
        for stop in range(len(text) + 1):
            assert seen(parse(name, cut(text, [stop]))) == whole, (name, text[:stop], text[stop:])


def test_splits_into_three_pieces_give_the_same_calls():
    chosen = random.Random(36)
    for name, text in texts():
        whole = seen(parse(name, [text]))
        splits = list(combinations(range(1, len(text)), 2))
        for stops in chosen.sample(splits, min(len(splits), 100)):
            assert seen(parse(name, cut(text, stops))) == whole, (name, cut(text, stops))


def test_single_characters_give_the_same_calls_wherever_the_output_ends():
    for name, text in texts():
        parser = parser_named(name)(TOOLS)
        streamed = Answer()
        for length in range(len(text) + 1):
            if length:
                streamed.add(parser.push(text[length - 1]))
            whole = parse(name, [text[:length]])
            assert whole.content.startswith(streamed.content), (name, text[:length])
            assert starts(whole).startswith(starts(streamed)), (name, text[:length])
        streamed.add(parser.finish())
        assert seen(streamed) == seen(parse(name, [text])), name


def test_single_characters_give_the_same_calls_in_damaged_text():
    chosen = random.Random(1)
    for name, text in texts():
        markers = [*parser_named(name).openings, *parser_named(name).closings, *'"{}[]()<>:,\\\n']
        for _ in range(12):
            start = chosen.randrange(len(text))
            stop = start + chosen.choice((0, 1, 3, 10))
            damaged = text[:start] + chosen.choice(markers) + text[stop:]
            assert seen(parse(name, list(damaged))) == seen(parse(name, [damaged])), (name, damaged)


def test_arguments_are_sent_while_they_arrive():
    for sample in SAMPLES:
        parser = parser_named(name_of(sample))(TOOLS)
        events = [event for character in sample["two"] for event in parser.push(character)]
        pieces = [event for event in events if isinstance(event, CallArguments) and event.index == 1]
        assert len(pieces) >= 10, sample["format"]


def test_content_is_sent_while_it_arrives():
    for name in FORMATS:
        parser = parser_named(name)(TOOLS)
        events = [event for character in "a < b [c] {d} | e" for event in parser.push(character)]
        assert len(events) >= 8, name
        assert all(isinstance(event, Content) for event in events)
        assert not parser.finish()


def test_every_split_of_reasoning_gives_the_same_answer():
    texts = (
        ("<think>\na\n\nb\n</think>\n\nc <think> d", False),
        (" a </thin </think>  ", True),
        ("a <tool_call>\n<function=now>\n</function>\n</tool_call>\n", True),
        ("a <tool_call> b </think> c <tool_call>\n<function=now></function>", True),
        ("a <tool_call> <function=now> is how calls begin", True),
        ("no reasoning </think>", False),
    )
    known, parser = reasoning_named("qwen3"), parser_named("qwen3_coder")
    for text, opened in texts:

        def parse_pieces(pieces: list[str], opened: bool = opened):
            text, answer = reasoned(ReasoningParser(known, opened=opened, parser=parser), parser(TOOLS), pieces)
            return text, seen(answer)

        whole = parse_pieces([text])
        assert parse_pieces(list(text)) == whole
        for stops in combinations(range(len(text) + 1), 2):
            assert parse_pieces(cut(text, stops)) == whole, cut(text, stops)


def texts() -> list[tuple[str, str]]:
    samples = [(name_of(sample), sample[key]) for sample in SAMPLES for key in ("one", "two")]
    return samples + [(name, text) for name, odd in ODD.items() for text in odd]


def parse(name: str, pieces: list[str]) -> Answer:
    parser: ToolCallParser = parser_named(name)(TOOLS)
    return answer_of(parser, pieces)


def starts(answer: Answer) -> str:
    """Return the calls as one text, which only grows while they are streamed."""
    return "".join(f"\0{call.name}\0{call.arguments}" for call in answer.calls)
