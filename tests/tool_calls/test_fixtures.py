"""Tests with outputs of real models from the package canitoolcall, which also contains the expected calls."""

from __future__ import annotations

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import parse_strategies, split_text
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from mindie_mm.tool_calls.reasoning import ReasoningParser, reasoning_named
from mindie_mm.tool_calls.registry import parser_named
from mindie_mm.tool_calls.schemas import Tool
from tests.tool_calls.assembling import answer_of, reasoned

# Split the text into characters instead of tokens. Every split of a tokenizer is also a split between characters.
STRATEGIES = parse_strategies(["token", "rand:1:8", "rand:2:40"])

NOT_SERVED = {
    "gpt-oss": "harmony, which is not served",
    "x-kimi-k3": "XTML of Kimi K3, which is not served",
}

DIFFERENCES = {
    "deepseek/vllm-v3-malformed-missing-brace": "the call has begun where the mistake shows, so it is passed on",
    "llama/l4-truncated-missing-close-bracket": "the first of two calls is complete and kept, as in the other families",
}


FAMILIES = load_families()


def test_every_fixture_of_a_supported_format_passes_whole_and_streamed():
    failed = {}
    num_passed = 0
    for fixture in load_fixtures():
        if NOT_SERVED.keys() & {fixture.family, *fixture.tags}:
            continue
        parses = {strategy.id: parsed(fixture, split_text(fixture.raw_output, strategy)) for strategy in STRATEGIES}
        observation = Observation(parsed(fixture, [fixture.raw_output]), parses)
        rows = run_checks(fixture, FAMILIES[fixture.family], observation)
        if case_status(rows) in {Status.PASS, Status.SOFT_PASS}:
            num_passed += 1
        else:
            failed[fixture.id] = [row for row in rows if row.status not in {Status.PASS, Status.SOFT_PASS}]
    assert failed.keys() == DIFFERENCES.keys(), failed
    assert num_passed > 350


def parsed(fixture: Fixture, pieces: list[str]) -> ParseResult:
    """Parse an output, and leave out calls that do not end. Clients see such calls only if the output is truncated."""
    name, reasoning_name = formats_of(fixture)
    tools = [Tool(tool["function"]["name"], tool["function"].get("parameters")) for tool in fixture.tools]
    parser = parser_named(name)(tools)
    if reasoning_name:
        known = reasoning_named(reasoning_name)
        opened = known.is_opened_by(prompt_of(fixture))
        reasoning = ReasoningParser(known, opened=opened, parser=parser_named(name))
        text, answer = reasoned(reasoning, parser, pieces, whole=not fixture.truncated)
    else:
        text, answer = "", answer_of(parser, pieces, whole=not fixture.truncated)
    calls = tuple(ParsedToolCall(call.name, call.arguments) for call in answer.calls if call.complete)
    return ParseResult(answer.content or None, text or None, calls)


def formats_of(fixture: Fixture) -> tuple[str, str]:
    """Return the names of the tool call format and the reasoning format. The latter is "" if there is no reasoning."""
    model = fixture.models[0]
    match fixture.family:
        case "qwen3-hermes":
            return "hermes", "qwen3"
        case "qwen3-xml":
            return "qwen3_coder", "qwen3"
        case "glm":
            return "glm45" if "4.5" in model else "glm47", "qwen3"
        case "deepseek":
            version = next(tag for tag in fixture.tags if tag.startswith("x-deepseek-v"))
            return version.removeprefix("x-").replace("-", "_"), "qwen3"
        case "kimi":
            return "kimi_k2", "qwen3"
        case "llama":
            return "llama3_json" if "x-llama-json" in fixture.tags else "pythonic", ""
        case "mistral":
            return "mistral_v3" if "v0.3" in model else "mistral", "qwen3" if "Small-2506" in model else "mistral"
    return fixture.family, fixture.family


def prompt_of(fixture: Fixture) -> str:
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    reference = FAMILIES[fixture.family].reference_for(fixture.models[0])
    return (reference and reference.default_generation_prompt) or ""
