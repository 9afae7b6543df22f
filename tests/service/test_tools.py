"""Tests for tools over HTTP, with a model whose chat template renders tools."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.service.chat_assembling import Assembled, assembled, whole
from tests.service.conftest import TINY
from tests.tokenize.test_tools import TEMPLATE
from tests.warm import running_service
from tools.serving import RunningService

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weigh", "description": "Weighs a thing.", "parameters": {}}}
]
MARKERS = {"<tool_call>": 787, "</tool_call>": 788, "<think>": 789, "</think>": 790}
THINKING = (
    "{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{# <tool_call> #}"
)
NAMED: Any = {"type": "function", "function": {"name": "weigh"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def handy(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    """Run the embedded checkpoint with two changes.

    The markers of tool calls and reasoning are special tokens, and the chat template renders tools and reasoning.
    """
    folder = tmp_path_factory.mktemp("handy")
    shutil.copytree(TINY, folder / "tiny")
    tokenizer_config = json.loads((folder / "tiny/tokenizer_config.json").read_text())
    (folder / "tiny/tokenizer_config.json").write_text(
        json.dumps(tokenizer_config | {"chat_template": TEMPLATE + THINKING})
    )
    vocabulary = json.loads((folder / "tiny/tokenizer.json").read_text())
    last = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [
        last | {"id": token_id, "content": text, "normalized": False, "special": True}
        for text, token_id in MARKERS.items()
    ]
    (folder / "tiny/tokenizer.json").write_text(json.dumps(vocabulary))
    with running_service(settings | {"spool": folder / "spool"}, folder / "log", folder / "tiny") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def handy_http(handy: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=handy.url, timeout=300) as client:
        yield client


def prompt_tokens(handy: RunningService, **changes: Any) -> int:
    with openai.OpenAI(base_url=f"{handy.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=handy.model, messages=MESSAGES, max_tokens=4, **changes)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tools_reach_the_prompt(handy: RunningService, handy_http: httpx2.Client, choice: Any) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"tools": TOOLS}}
    tokens = handy_http.post("/tokenize", json=body).json()["tokens"]
    prompt = handy_http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.startswith("weigh: Weighs a thing.\n")
    assert prompt_tokens(handy, tools=TOOLS, **choice) == len(tokens)
    counted = handy_http.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS} | choice).json()
    assert counted["tokens"] == tokens


@pytest.mark.parametrize("given", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": None, "tool_choice": "none"}])
def test_tool_choice_none_leaves_tools_out(handy: RunningService, handy_http: httpx2.Client, given: Any) -> None:
    assert prompt_tokens(handy, **given) == prompt_tokens(handy)
    counted = handy_http.post("/tokenize", json={"messages": MESSAGES} | given).json()["count"]
    assert counted == prompt_tokens(handy)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_choice_without_tools_is_refused_only_if_it_requires_one(handy_http: httpx2.Client, path: str) -> None:
    for given in ({"tool_choice": "auto"}, {"tools": []}, {"tools": [], "tool_choice": "none"}, {"tools": None}):
        assert handy_http.post(path, json={"messages": MESSAGES} | given).status_code == 200, given
    for choice in ("required", NAMED):
        answer = handy_http.post(path, json={"messages": MESSAGES, "tools": [], "tool_choice": choice})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tool_choice"), error
        assert "there are no tools" in error["message"]


def test_the_reasoning_effort_reaches_the_template(handy: RunningService, handy_http: httpx2.Client) -> None:
    body = {"messages": MESSAGES, "reasoning_effort": "low"}
    tokens = handy_http.post("/tokenize", json=body).json()["tokens"]
    prompt = handy_http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.startswith("effort: low\n")
    assert prompt_tokens(handy, reasoning_effort="low") == len(tokens) > prompt_tokens(handy)
    assert handy_http.post("/v1/chat/completions", json=body | {"reasoning_effort": 3}).status_code == 400


def ask(handy: RunningService, **changes: Any) -> Assembled:
    """Return the first choice of an answer. The answer is streamed if `changes` contains `stream=True`."""
    with openai.OpenAI(base_url=f"{handy.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": handy.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 64} | changes
        if given.get("stream"):
            return assembled(client.chat.completions.create(**given, stream_options={"include_usage": True}))
        return whole(client.chat.completions.create(**given))


UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_frame_calls_and_are_never_shown(handy: RunningService, stream: bool) -> None:
    plain: dict[str, Any] = {"tools": TOOLS, "stream": stream, "extra_body": UNTHINKING}
    answer = ask(handy, tool_choice=NAMED, logprobs=True, **plain)
    assert (answer.calls, answer.content, answer.finish_reason) == ([("weigh", "{}")], "", "tool_calls")
    assert answer.tokens[0] == "<tool_call>"
    assert "</tool_call>" in answer.tokens
    assert len(answer.tokens) == answer.usage.completion_tokens
    # A marker that does not begin a call is not shown as text either.
    stray = ask(handy, logit_bias={"788": 100}, max_tokens=5, **plain)
    assert (stray.content, stray.finish_reason, stray.usage.completion_tokens) == ("", "length", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_that_are_not_markers_are_shown_on_request(handy: RunningService, stream: bool) -> None:
    for spaces in (False, True):
        shown = UNTHINKING | {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        plain: dict[str, Any] = {"tools": TOOLS, "stream": stream, "extra_body": shown}
        called = ask(handy, tool_choice=NAMED, logprobs=True, stop=["zzz"], **plain)
        assert (called.calls, called.content, called.finish_reason) == ([("weigh", "{}")], "", "tool_calls")
        assert len(called.tokens) == called.usage.completion_tokens
        for token, text in (("778", "<|im_start|>" * 3), ("788", "")):
            answer = ask(handy, logit_bias={token: 100}, max_tokens=3, **plain)
            assert (answer.content, answer.calls, answer.usage.completion_tokens) == (text, [], 3)


@pytest.mark.parametrize("stream", [False, True])
def test_strict_tools_get_valid_arguments_where_the_model_decides(handy: RunningService, stream: bool) -> None:
    parameters = {"type": "object", "properties": {"kg": {"enum": [7]}}, "required": ["kg"]}
    tool = {"type": "function", "function": {"name": "lift", "parameters": parameters, "strict": True}}
    plain: dict[str, Any] = {"tools": [tool], "stream": stream, "extra_body": UNTHINKING}
    text = ask(handy, **plain)
    assert (text.calls, bool(text.content)) == ([], True)
    called = ask(handy, logit_bias={"787": 100}, parallel_tool_calls=False, **plain)
    assert called.calls == [("lift", '{"kg": 7}')]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_beside_the_content(handy: RunningService, stream: bool) -> None:
    def think(budget: int, **extra: Any) -> Assembled:
        given = {"thinking_token_budget": budget, "chat_template_kwargs": {"enable_thinking": True}} | extra
        return ask(handy, stream=stream, max_tokens=24, extra_body=given)

    unlimited = think(-1)
    assert (bool(unlimited.reasoning), unlimited.content) == (True, "")
    used = unlimited.usage
    assert used.completion_tokens_details.reasoning_tokens == used.completion_tokens > 5
    limited = think(5)
    assert unlimited.reasoning.startswith(limited.reasoning)
    assert limited.content
    assert limited.usage.completion_tokens_details.reasoning_tokens == 5
    if stream:
        assert limited.kinds == ["reasoning", "content"]
    hidden = think(5, include_reasoning=False)
    assert (hidden.reasoning, hidden.content) == ("", limited.content)
    joined = think(5, separate_reasoning=False)
    assert joined.reasoning == ""
    assert re.fullmatch(rf"\s*{re.escape(limited.reasoning)}\s*</think>\s*{re.escape(limited.content)}", joined.content)
    assert joined.usage.completion_tokens_details.reasoning_tokens == 5
    at_once = think(5, stream_reasoning=False)
    assert (at_once.reasoning, at_once.content) == (limited.reasoning, limited.content)
    for without in (think(5, **UNTHINKING), think(0)):
        assert without.reasoning == ""
        assert without.content
        assert without.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_structured_outputs_begin_after_the_reasoning(handy: RunningService, stream: bool) -> None:
    for thinks in (True, False):
        extra = {"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": thinks}}
        one = {"tool_choice": "required", "parallel_tool_calls": False}
        called = ask(handy, tools=TOOLS, stream=stream, extra_body=extra, **one)
        assert (called.calls, bool(called.reasoning)) == ([("weigh", "{}")], thinks)
        shaped = ask(handy, stream=stream, extra_body=extra | {"structured_outputs": {"choice": ["yes", "no"]}})
        assert (shaped.content in ("yes", "no"), bool(shaped.reasoning)) == (True, thinks)
    # If the prompt does not decide whether to reason, the model may reason first or answer at once.
    for bias in ({"789": 100}, {"789": -100}):
        extra = {"thinking_token_budget": 5, "structured_outputs": {"choice": ["yes", "no"]}}
        shaped = ask(handy, stream=stream, extra_body=extra, logit_bias=bias)
        assert (shaped.content in ("yes", "no"), shaped.usage.completion_tokens > 5) == (True, bias["789"] > 0)
        free = ask(handy, stream=stream, extra_body={"thinking_token_budget": 5}, logit_bias=bias, max_tokens=9)
        assert free.usage.completion_tokens_details.reasoning_tokens == (6 if bias["789"] > 0 else 0), "with its start"
    begun = ask(handy, tools=TOOLS, logit_bias={"789": 100}, stream=stream, max_tokens=6)
    assert (begun.content, begun.calls) == ("", [])
    assert begun.usage.completion_tokens_details.reasoning_tokens == 6


def test_deltas_of_a_model_that_reasons_say_where_they_have_no_reasoning(handy_http: httpx2.Client) -> None:
    """Clients read `delta.reasoning_content` without checking whether it exists."""
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 16, "thinking_token_budget": 4, "temperature": 0}
    for changes, keys in (({}, {"reasoning", "reasoning_content"}), ({"include_reasoning": False}, set())):
        asked = body | {"chat_template_kwargs": {"enable_thinking": True}} | changes
        events = handy_http.post("/v1/chat/completions", json=asked).text.split("\n\n")
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event[6:7] == "{"]
        assert all({"reasoning", "reasoning_content"} & delta.keys() == keys for delta in deltas)
        assert any(delta.get("content") and delta.get("reasoning_content") is None for delta in deltas)
    asked = body | {"chat_template_kwargs": {"enable_thinking": True}, "stream_reasoning": False}
    events = handy_http.post("/v1/chat/completions", json=asked).text.split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event[6:7] == "{"]
    assert [bool(delta["reasoning"]) for delta in deltas].count(True) == 1


def test_a_budget_is_a_whole_number(handy_http: httpx2.Client) -> None:
    for budget in (-2, 1.5, "5"):
        answer = handy_http.post("/v1/chat/completions", json={"messages": MESSAGES, "thinking_token_budget": budget})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
