"""Functions that assemble answers from text that arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindie_mm.tool_calls.events import Answer, Reasoning
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.reasoning import ReasoningParser
from mindie_mm.tool_calls.schemas import Tool

FORMAT_NAMES = {"internlm2": "internlm", "llama4_pythonic": "pythonic", "mistral_v11": "mistral", "phi4_mini": "phi4"}
"""This package's names of formats that have other names in tool-formats.jsonl."""

SAMPLES = [json.loads(line) for line in (Path(__file__).parent / "tool-formats.jsonl").read_text().splitlines()]
"""For each format, a text with one call and a text with two calls, and the calls in each text."""

CROP = Tool(
    "crop_image",
    {
        "type": "object",
        "properties": {
            "page": {"type": "integer", "minimum": 0, "maximum": 99},
            "box": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 4,
                "maxItems": 4,
            },
        },
        "required": ["page", "box"],
        "additionalProperties": False,
    },
)
READ = Tool(
    "read_text",
    {
        "type": "object",
        "properties": {"lang": {"type": "string", "enum": ["de", "en"]}, "note": {"type": "string", "maxLength": 40}},
        "required": ["lang"],
        "additionalProperties": False,
    },
)
NOW = Tool("now")
TOOLS = (CROP, READ, NOW)


def texts_of_all_formats() -> list[tuple[str, str]]:
    """Return a text with one call and a text with two calls for each format, with the format's name."""
    texts = [(name_of(sample), sample[key]) for sample in SAMPLES for key in ("one", "two")]
    for name, text in list(texts):
        if name == "deepseek_v32":
            texts.append(("deepseek_v4", text.replace("function_calls", "tool_calls")))
            texts.append(("deepseek_v41", text.replace("function_calls", "calls").replace("｜DSML｜", "｜DSML｜ ")))
        if name == "gemma4":
            for old, new in (("<|tool_call>", "<start_function_call>"), ("<tool_call|>", "<end_function_call>")):
                text = text.replace(old, new)  # noqa: PLW2901
            texts.append(("functiongemma", text.replace('<|"|>', "<escape>")))
    return texts


def name_of(sample: dict[str, Any]) -> str:
    return FORMAT_NAMES.get(sample["format"], sample["format"])


def answer_of(parser: ToolCallParser, pieces: Iterable[str], *, whole: bool = False) -> Answer:
    """Return the answer in `pieces`. `whole` says whether the model ended the answer itself."""
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish(whole=whole))
    return answer


def reasoned(
    reasoning: ReasoningParser, parser: ToolCallParser, pieces: Iterable[str], *, whole: bool = False
) -> tuple[str, Answer]:
    """Return the reasoning text, and the answer that follows it."""
    text, answer = "", Answer()
    for events in (*(reasoning.push(piece) for piece in pieces), reasoning.finish()):
        for event in events:
            if isinstance(event, Reasoning):
                text += event.text
            else:
                answer.add(parser.push(event.text))
    answer.add(parser.finish(whole=whole))
    return text, answer


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the complete calls of an answer, with decoded arguments."""
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in answer.calls if call.complete]


def seen(answer: Answer) -> tuple[str, list[tuple[str, str, bool]]]:
    """Return everything that must not depend on the pieces. The ids of calls are random, so they are left out."""
    return answer.content, [(call.name, call.arguments, call.complete) for call in answer.calls]


def cut(text: str, stops: Sequence[int]) -> list[str]:
    return [text[start:stop] for start, stop in zip([0, *stops], [*stops, len(text)], strict=True)]
