"""Tests of tools over HTTP, with a model whose chat template renders tools."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.service.conftest import TINY
from tests.tokenize.test_tools import TEMPLATE
from tests.warm import running_service
from tools.serving import RunningService

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weigh", "description": "Weighs a thing.", "parameters": {}}}
]
MESSAGES: list[Any] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def handy(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("handy")
    shutil.copytree(TINY, folder / "tiny")
    tokenizer_config = json.loads((folder / "tiny/tokenizer_config.json").read_text())
    (folder / "tiny/tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"chat_template": TEMPLATE}))
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
@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "tool_choice is 'auto', but there are no tools"),
        ({"tool_choice": "auto", "tools": None}, "tool_choice", "tool_choice is 'auto', but there are no tools"),
        ({"tools": []}, "tools", "tools is an empty list"),
        ({"tools": [], "tool_choice": "auto"}, "tools", "tools is an empty list"),
        ({"tools": [], "tool_choice": "none"}, "tools", "tools is an empty list"),
    ],
)
def test_a_tool_choice_without_tools_is_refused(
    handy_http: httpx2.Client, path: str, given: Any, param: str, message: str
) -> None:
    answer = handy_http.post(path, json={"messages": MESSAGES} | given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error


def test_the_reasoning_effort_reaches_the_template(handy: RunningService, handy_http: httpx2.Client) -> None:
    body = {"messages": MESSAGES, "reasoning_effort": "low"}
    tokens = handy_http.post("/tokenize", json=body).json()["tokens"]
    prompt = handy_http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.startswith("effort: low\n")
    assert prompt_tokens(handy, reasoning_effort="low") == len(tokens) > prompt_tokens(handy)
    assert handy_http.post("/v1/chat/completions", json=body | {"reasoning_effort": 3}).status_code == 400


def test_a_tool_choice_that_enforces_a_call_is_refused(handy_http: httpx2.Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weigh"}}):
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = handy_http.post(path, json=body)
            assert answer.status_code == 400
            assert "tool_choice must be 'auto' or 'none'" in answer.json()["error"]["message"]
