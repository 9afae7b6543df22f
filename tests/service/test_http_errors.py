"""Tests that each kind of error has the right status and an error object in OpenAI's format."""

import asyncio
import base64
import gzip
import json
import os
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from mindie_mm import errors
from service.http.errors import TABLE, error_body, error_object, status_of
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
JPEG = f"/9j/{'A' * 90}"
"""Text of 94 characters that may be the beginning of a JPEG in base64."""
HELLO = [{"role": "user", "content": "Hello!"}]
TOOLS = [{"type": "function", "function": {"name": "a"}}]


def check(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    assert len(error["message"]) < 1000
    return error


def with_image(url: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is in the image?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/infer", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b"\xff\xfe", b'{"messages": ', b"[" * 100_000])
def test_a_body_that_is_not_an_object_is_400(http: Any, path: str, body: bytes) -> None:
    check(http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"stop": [1]}, "stop"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(http: Any, change: dict[str, Any], param: str) -> None:
    assert check(http.post(CHAT, json={"messages": HELLO} | change), 400)["param"] == param


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"chat_template": "{{ messages }}"},
        {"documents": [{"title": "x", "text": "y"}]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"repetition_detection": {"max_pattern_size": 4}},
        {"guided_whitespace_pattern": " "},
        {"format": "json"},
        {"grammar_string": 'root ::= "a"'},
        {"lora_path": "x"},
        {"watermarking": True},
        {"options": {"num_ctx": 4096}},
        {"extra_body": {"top_k": 1}},
        {"parameters": {"max_new_tokens": 4}},
        {"stop_sequences": ["a"]},
        {"custom_token_bans": "570"},
        {"ban_eos_token": True},
    ],
)
def test_unsupported_fields_that_would_change_the_answer_are_refused(http: Any, path: str, field: Any) -> None:
    body = {"messages": HELLO, "prompt": "Hello!", "max_tokens": 2} | field
    (name,) = field
    error = check(http.post(path, json=body), 400)
    assert f"{name} is not supported" in error["message"]
    assert error["param"] == name
    for off in (None, False, [], {}):
        assert http.post(path, json=body | {name: off}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "harmless"),
    [
        (CHAT, {"best_of": 3}, "1 and the value of n are supported"),
        (CHAT, {"detokenize": False}, "not supported, except true"),
        (CHAT, {"modalities": ["text", "audio"]}, 'not supported, except ["text"]'),
        ("/v1/completions", {"function_call": {"name": "weigh"}}, 'not supported, except "none" or "auto"'),
        (CHAT, {"web_search_options": {}}, "not supported"),
        (CHAT, {"guidance_scale": 3}, "not supported, except 1"),
        (CHAT, {"mirostat_mode": 2}, "not supported"),
        (CHAT, {"grammar_string": 'root ::= "a"'}, "not supported; use grammar"),
        (CHAT, {"repeat_penalty": 1.3}, "not supported, except 1; use repetition_penalty"),
        (CHAT, {"n_predict": 5}, "not supported; use max_tokens"),
        (CHAT, {"n_predict": -1}, "not supported; use max_tokens"),
        (CHAT, {"enable_thinking": False}, "not supported; use chat_template_kwargs"),
        (CHAT, {"thinking": {"type": "enabled"}}, "not supported; use chat_template_kwargs"),
        (CHAT, {"format": "json"}, "not supported; use response_format"),
        (CHAT, {"system": "Be brief."}, "not supported; use a message with the role system"),
        (CHAT, {"top_n_tokens": 3}, "not supported; use logprobs"),
        (CHAT, {"truncate": 3}, "not supported; use truncate_prompt_tokens"),
        (CHAT, {"num_beams": 4}, "not supported, except 1; use use_beam_search and n"),
        ("/v1/completions", {"repeat_penalty": 1.3}, "not supported, except 1; use repetition_penalty"),
        ("/v1/completions", {"n_predict": 5}, "not supported; use max_tokens"),
        ("/v1/completions", {"raw": True}, "not supported"),
        (CHAT, {"typical_p": 0.1}, "not supported, except 1"),
        ("/v1/completions", {"do_sample": False}, "not supported, except true; use temperature 0"),
        ("/v1/completions", {"dry_multiplier": 0.8}, "not supported"),
        ("/v1/completions", {"suffix": "x"}, "not supported"),
        (
            "/v1/completions",
            {"tools": [{"type": "function"}]},
            "tools is not supported; use /v1/chat/completions, which has this field",
        ),
        ("/infer", {"guided_choice": ["a"]}, "not supported; use /v1/chat/completions with response_format"),
        ("/generate", {"max_tokens": 4}, "max_tokens is not supported; use max_new_tokens inside parameters"),
    ],
)
def test_a_refusal_states_the_accepted_value_or_field(http: Any, path: str, field: Any, harmless: str) -> None:
    body = {"inputs": "Hello!"} if path in ("/infer", "/generate") else {"messages": HELLO, "prompt": "Hello!"}
    (name,) = field
    message = check(http.post(path, json=body | field), 400)["message"]
    assert message.startswith(name)
    assert message.endswith(harmless)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"truncate_prompt_tokens": -1},
        {"stream_options": None},
        {"stream_options": {}},
        {"skip_special_tokens": True, "modalities": ["text"], "function_call": "auto", "best_of": 1, "audio": None},
        {"n": 2, "best_of": 2},
        {
            "guidance_scale": 1,
            "typical_p": 1.0,
            "mirostat_mode": 0,
            "mirostat_tau": 5,
            "dry_multiplier": 0.0,
            "top_a": 0,
        },
        {"grammar_string": "", "ban_eos_token": False, "do_sample": True, "max_new_tokens": None, "regex": None},
        {"reasoning_effort": "none"},
        {"model": ""},
        {
            "repeat_penalty": 1.0,
            "repeat_last_n": 64,
            "min_new_tokens": 0,
            "mirostat": 0,
            "n_probs": 0,
            "top_n_sigma": -1,
        },
        {"grammar": "", "n_predict": None, "watermark": False, "options": {}, "adapter_id": "None", "num_beams": 1},
    ],
)
def test_unsupported_fields_with_neutral_values_are_accepted(http: Any, path: str, field: Any) -> None:
    body = {"messages": HELLO, "prompt": "Hello!", "max_tokens": 8, "temperature": 0}
    plain, given = (http.post(path, json=one).json() for one in (body, body | field))
    assert given["choices"][0] == plain["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_number_outside_its_range_is_named_with_its_limit(http: Any, stream: bool) -> None:
    for change, message in (
        ({"temperature": 1000.5}, "temperature: Input should be less than or equal to 100, not 1000.5"),
        ({"n": 65}, "n: Input should be less than or equal to 64, not 65"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, not 0"),
    ):
        body = {"messages": HELLO, "stream": stream} | change
        assert check(http.post(CHAT, json=body), 400)["message"] == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "a pirate", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]}, "content"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "17 stop strings"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [10**8]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop": "x" * 1025}, "1025 characters"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice='always' must be"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": 10**30}}, "64 bits"),
    ],
)
def test_values_outside_their_limits_are_refused(http: Any, change: dict[str, Any], message: str) -> None:
    assert message in check(http.post(CHAT, json={"messages": HELLO} | change), 400)["message"]
    assert message in check(http.post(CHAT, json={"messages": HELLO, "stream": True} | change), 400)["message"]


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {"type": "string"}}}}
NAMELESS = {"type": "function", "function": {"parameters": {}}}


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'; keys must be token ids"),
        (CHAT, {"logit_bias": {"1": 1, "x": 1, "-2": 1}}, "logit_bias", "logit_bias has the keys 'x', '-2'; keys must"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias", "logit_bias=101"),
        (CHAT, {"stop": ["a", ""]}, "stop", "stop string 1 of 2 is empty"),
        (CHAT, {"stop_token_ids": [10**8]}, "stop_token_ids", "stop_token_ids has token id 100000000"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2"),
        (CHAT, {"best_of": 3}, "best_of", "best_of is 3"),
        (CHAT, {"response_format": NO_SCHEMA}, "response_format", "not"),
        (CHAT, {"stop_token_ids": [2**64]}, "stop_token_ids", f"has token id {2**64}; it must be in [0, "),
        (CHAT, {"logit_bias": {str(2**64): 1}}, "logit_bias", f"has token id {2**64}; it must be in [0, "),
        (CHAT, {"logit_bias": {"1" * 50: 1}}, "logit_bias", "each below 2147483648"),
        (CHAT, {"logit_bias": {"1": 10**400}}, "logit_bias", "logit_bias"),
        (CHAT, {"seed": 2**64}, "seed", f"not {2**64}"),
        (CHAT, {"max_tokens": 2**64}, "max_tokens", "less than or equal to 2147483647"),
        (CHAT, {"max_tokens": 9e18}, "max_tokens", "less than or equal to 2147483647"),
        (CHAT, {"max_tokens": 1e300}, "max_tokens", "not 1e+300"),
        (CHAT, {"min_tokens": 10**4000}, "min_tokens", "less than or equal to 2147483647"),
        (CHAT, {"temperature": 10**400}, "temperature", "temperature"),
        ("/v1/completions", {"prompt": [2**64]}, "prompt", f"token id {2**64} is outside the vocabulary"),
        ("/detokenize", {"tokens": [2**64]}, "tokens", f"token id {2**64} is outside the vocabulary"),
        ("/infer", {"inputs": "a", "parameters": {"seed": 2**64}}, "parameters", f"not {2**64}"),
        ("/infer", {"inputs": "a", "parameters": {"timeout": 2**64}}, "parameters", "less than or equal to 3600"),
        (
            "/generate",
            {"inputs": "a", "parameters": {"truncate": -(2**64)}},
            "parameters",
            "greater than or equal to 1",
        ),
        ("/infer", {"inputs": [{"image": "a", "max_pixels": 2**64}]}, "inputs", f"max_pixels={2**64} must be"),
        ("/v1/completions", {"prompt": [10**8]}, "prompt", "token id 100000000 is outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "token id -1 is outside the vocabulary"),
        (CHAT, {"min_tokens": 5, "max_tokens": 2}, "min_tokens", "min_tokens=5"),
        (CHAT, {"temperature": True}, "temperature", "temperature: Input should be a valid number, not true"),
        (CHAT, {"seed": "5"}, "seed", 'seed: Input should be a valid integer, not "5"'),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools", "tools[0].type='web_search'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools[0].function is missing"),
        (CHAT, {"tools": [NAMELESS]}, "tools", "tools[0].function.name is missing"),
        ("/tokenize", {"tools": [NAMELESS]}, "tools", "tools[0].function.name is missing"),
        (CHAT, {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "must not contain 'tokenize'"),
        (CHAT, {"messages": [{"role": "me!", "content": ""}]}, "messages", "messages[0].role='me!'"),
        ("/generate", {"inputs": "a", "stream": True}, "stream", "use /generate_stream"),
        ("/generate", {"inputs": [{"image": "a", "fps": 2}]}, "inputs", "unknown key 'fps'"),
        ("/infer", {"inputs": "a", "parameters": {"stop": [""]}}, "parameters", "stop string 0 of 1 is empty"),
        (
            "/generate",
            {"inputs": [{"text": "a"}], "parameters": {"return_full_text": True}},
            "parameters",
            "return_full_text=true needs a string as inputs",
        ),
        ("/infer", {"inputs": "a", "parameters": {"logprobs": True}}, "parameters", "logprobs is not supported"),
        ("/infer", {"inputs": "a", "parameters": {"grammar": "a"}}, "parameters", "grammar is not supported"),
        ("/infer", {"inputs": "a", "parameters": {"truncate": 5}}, "parameters", "truncate is not supported"),
        (
            "/generate",
            {"inputs": "a", "parameters": {"repeat_penalty": 2}},
            "parameters",
            "repeat_penalty is not supported",
        ),
        ("/generate", {"inputs": "a", "repeat_penalty": 2}, "repeat_penalty", "repeat_penalty is not supported"),
        ("/tokenize", {"prompt": "a", "n_predict": 2}, "n_predict", "n_predict is not supported"),
    ],
)
def test_errors_name_the_field_and_the_value(http: Any, path: str, change: Any, param: str, message: str) -> None:
    error = check(http.post(path, json={"messages": HELLO} | change), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_an_unreadable_image_is_an_error_of_messages(http: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = check(http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]}), 400)
    assert error["param"] == "messages"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/infer", "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_without_a_json_content_type_is_refused(http: Any, path: str, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    error = check(http.post(path, content=json.dumps({"messages": HELLO}).encode(), headers=headers), 400)
    assert error["message"] == "the request must have the header Content-Type: application/json"


@pytest.mark.parametrize("name", ["Content-Encoding", "Transfer-Encoding"])
def test_a_compressed_body_is_415(service: RunningService, name: str) -> None:
    address = urlsplit(service.url)
    packed = gzip.compress(json.dumps({"messages": HELLO}).encode())
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    if name == "Content-Encoding":
        head += b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    else:
        head += b"Transfer-Encoding: gzip, chunked\r\n\r\n%x\r\n" % len(packed) + packed + b"\r\n0\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=300) as connection:
        connection.sendall(head)
        with connection.makefile("rb") as file:
            answer = file.read()
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"accept-encoding: identity\r\n" in answer.lower()
    assert f"the request body has {name}: gzip" in answer.decode()


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"self": 1}, "chat_template_kwargs must not contain 'self'"),
        ({"continue_final_message": True}, "chat_template_kwargs must not contain 'continue_final_message'"),
        ({"documents": [{"text": "a"}]}, "chat_template_kwargs must not contain 'documents'"),
        ({"conversations": 1}, "chat_template_kwargs must not contain 'conversations'"),
        ({"a": json.loads("[" * 900 + "]" * 900)}, "nest"),
    ],
)
def test_invalid_chat_template_kwargs_are_refused(http: Any, kwargs: dict[str, Any], reason: str) -> None:
    message = check(http.post(CHAT, json={"messages": HELLO, "chat_template_kwargs": kwargs}), 400)["message"]
    assert reason in message
    assert "recursion" not in message


def test_nan_is_refused(http: Any) -> None:
    body = json.dumps({"messages": HELLO, "temperature": float("nan")})
    check(http.post(CHAT, content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("field", [b"content", b"name"])
def test_a_lone_surrogate_is_refused(http: Any, field: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "x", "%s": "\\ud800"}]}' % field
    check(http.post(CHAT, content=body, headers={"Content-Type": "application/json"}), 400)


def test_another_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    assert caught.value.param == "model"
    assert "'gpt-5'" in caught.value.message


def test_every_route_answers_404_for_another_model(http: Any) -> None:
    """The test sends the same body to all routes for requests, because routes ignore unknown fields."""
    paths = http.get("/openapi.json").json()["paths"]
    routes = [path for path, operations in paths.items() if "post" in operations and "{" not in path]
    # These have tests for their own.
    own = re.compile(
        "/admin/reload|/inference/.*|.*load_lora_adapter|.*/(messages|responses|rerank|score|files|batches|audio/.*|render)"
    )
    routes = [path for path in routes if not own.match(path)]
    assert len(routes) > 6
    body = {"messages": HELLO, "prompt": "x", "inputs": [{"text": "x"}], "tokens": [1], "model": "gpt-5"}
    for route in routes:
        assert check(http.post(route, json=body), 404)["param"] == "model", route


def test_paths_are_accepted_without_their_version(http: Any) -> None:
    for path in ("/chat/completions", "/completions", "/responses"):
        assert check(http.post(path, json={"model": 5}), 400)["param"]
    assert http.get("/models").json() == http.get("/v1/models").json()


@pytest.mark.parametrize(("path", "methods"), [("/v1/files", "GET, POST"), ("/v1/files/a", "DELETE, GET")])
def test_a_refused_method_names_all_methods_of_the_path(http: Any, path: str, methods: str) -> None:
    answer = http.put(path, json={})
    assert answer.headers["allow"] == methods
    assert methods.replace(", ", " or ") in check(answer, 405)["message"]


def test_unknown_routes_are_404_and_unknown_methods_405(http: Any) -> None:
    check(http.get("/v1/nothing"), 404)
    nearest = check(http.post("/chat/completion", json={}), 404)["message"]
    assert nearest == f"there is no path /chat/completion; did you mean {CHAT}?"
    assert check(http.post("/api/chat", json={}), 404)["message"].endswith(
        "use /v1/chat/completions in place of Ollama's API"
    )
    assert check(http.get("/x" * 200), 404)["message"].endswith("...; /openapi.json lists the paths")
    assert check(http.get(CHAT), 405)["message"] == f"{CHAT} does not accept GET; use POST"
    assert http.head(CHAT).status_code == 405
    assert http.head("/v1/nothing").status_code == 404


def test_a_trailing_slash_is_404_without_a_redirect(http: Any) -> None:
    """A redirect would lead to the host in the Host header. Clients would send the body there over plain HTTP."""
    check(http.get("/health/", headers={"Host": "127.0.0.1"}), 404)
    check(http.post(f"{CHAT}/", json={"messages": HELLO}), 404)


def test_an_error_about_a_union_is_one_sentence(http: Any) -> None:
    message = "prompt: must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    for prompt in (1, ["a", 1], [[1], "a"], [1.5]):
        error = check(http.post("/v1/completions", json={"prompt": prompt}), 400)
        assert (error["message"].removesuffix(f", not {prompt}"), error["param"]) == (message, "prompt")
    error = check(http.post(CHAT, json={"messages": HELLO, "stop": ["a", 1]}), 400)
    assert (error["message"], error["param"]) == ("stop: must be a string or a list of strings", "stop")
    error = check(http.post("/infer", json={"inputs": [1, 2]}), 400)
    assert (error["message"], error["param"]) == (
        "inputs: must be a string, or a list of dicts with one item each",
        "inputs",
    )


def test_a_prompt_too_long_has_its_own_error_code(client: openai.OpenAI, http: Any) -> None:
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    hello = [{"role": "user", "content": "Hello!"}]
    for path, body, part in (
        (
            CHAT,
            {"messages": [{"role": "user", "content": "red square " * limit}]},
            "the request needs 1 output tokens, and the prompt does not",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "q" * 10**6}]}, "the prompt has 1000015 characters"),
        ("/tokenize", {"prompt": "q" * 10**6}, "tokens; the prompt has 1000000 characters"),
        (CHAT, {"messages": hello, "max_tokens": limit - 4}, f"{limit - 4} output tokens, and the prompt does not fit"),
        (
            "/v1/completions",
            {"prompt": "red", "max_tokens": limit},
            f"{limit} output tokens, which leaves no room for a prompt",
        ),
        (
            "/v1/completions",
            {"prompt": [1] * (limit + 1), "max_tokens": 1},
            f"the prompt has {limit + 1} tokens and the request needs 1 output",
        ),
        (
            "/v1/completions",
            {"prompt": [1] * (limit - 4), "max_tokens": 5},
            f"the prompt has {limit - 4} tokens and the request needs 5 output",
        ),
        ("/infer", {"inputs": "red", "parameters": {"max_new_tokens": limit}}, f"{limit} output tokens"),
    ):
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(f"This model's maximum context length is {limit} tokens; ")
        assert part in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * limit}])
    assert caught.value.code == "context_length_exceeded"


def test_a_body_too_large_is_413(service: RunningService, client: openai.OpenAI, http: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * (9 << 20)}])
    assert caught.value.status_code == 413
    assert "the limit is 8388608" in caught.value.message
    assert http.get("/health").status_code == 200


def test_a_chunked_body_that_grows_too_large_is_413(service: RunningService) -> None:
    host = urlsplit(service.url)
    assert host.hostname is not None
    with socket.create_connection((host.hostname, host.port or 80), timeout=300) as connection:
        connection.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(9):
            connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/etc/passwd", "there is no such file in the allowed media folder"),
        ("file:///etc/passwd", "there is no such file in the allowed media folder"),
        ("file:///proc/self/environ", "no such file in"),
        ("file://host/x.png", "the file: URL has the host"),
        ("{media}/../../etc/passwd", "no such file in"),
        ("{media}/missing.png", "no such file in"),
        ("{media}/link.png", "no such file in"),
        ("{media}", "no such file in"),
        ("{media}/pipe", "not a regular file"),
        ("{media}/large.png", "limit for one item is 4194304"),
        ("relative.png", "the source is not a path, a URL or valid base64"),
        (f"{JPEG}A=", ": the 71 bytes cannot be read as an image"),
        (f"{JPEG}A", "or valid base64. Look for missing padding (=)"),
        (f"{JPEG}\nA=", ": the 71 bytes cannot be read as an image"),
        (f"{JPEG}.jpg", "there is no such file in the allowed media folder"),
        ("http://127.0.0.1:1/x.png", "not public"),
        ("http://localhost/x.png", "not public"),
        ("http://169.254.169.254/latest", "not public"),
        ("ftp://example.org/x.png", "scheme 'ftp'"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("data:image/png,abc", "data:"),
        ("data:image/png;base64,####", "the base64 of the data: URL is not valid"),
        ("data:image/png;base64,abc", "the base64 of the data: URL is not valid"),
        ("data:image/png;base64,QUJD\n", "the 3 bytes cannot be read as an image"),
        ("data:image/png;base64,", "media item 0 (image)"),
        ("data:image/png;base64,aGVsbG8gd29ybGQ=", "media item 0 (image)"),
        ("data:image/png;base64,\ud800", "lone surrogate at character 22"),
        ("http://127.0.0.1:1/\ud800.png", "lone surrogate"),
        ("{media}/\ud800.png", "lone surrogate"),
        ("file:///\ud800.png", "lone surrogate"),
        ("", "image_url"),
        ({"url": 5}, "image_url.url"),
        ({"url": "x", "detail": "huge"}, "detail"),
        (None, "image_url"),
    ],
)
def test_media_that_cannot_be_read_are_refused_with_the_reason(
    http: Any, media_dir: Path, url: Any, reason: str
) -> None:
    (media_dir / "link.png").unlink(missing_ok=True)
    (media_dir / "link.png").symlink_to("/etc/passwd")
    if not (media_dir / "pipe").exists():
        os.mkfifo(media_dir / "pipe")
    (media_dir / "large.png").write_bytes(bytes((4 << 20) + 1))
    if isinstance(url, str):
        url = url.format(media=media_dir)
    body = json.dumps(with_image(url))  # escapes all non-ASCII characters, including lone surrogates
    message = check(http.post(CHAT, content=body, headers={"Content-Type": "application/json"}), 400)["message"]
    assert reason in message
    assert "root:" not in message


def test_a_truncated_image_is_refused(http: Any, media_dir: Path) -> None:
    whole = (media_dir / "green_star.jpg").read_bytes()
    raw = base64.b64encode(whole[: len(whole) // 3]).decode()
    assert "image" in check(http.post(CHAT, json=with_image(raw)), 400)["message"]


def test_too_many_items_or_bytes_are_refused(http: Any, red_square: str) -> None:
    items = [{"image": red_square}] * 5 + [{"text": "?"}]
    assert "5 media items; the limit is 4" in check(http.post("/infer", json={"inputs": items}), 400)["message"]
    big = base64.b64encode(bytes(2_900_000)).decode()
    message = check(http.post("/infer", json={"inputs": [{"image": big}] * 2}), 400)["message"]
    assert "5800000 bytes; the limit is 5242880" in message


def test_audio_is_refused_by_this_family(http: Any) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "UklGRiQAAABXQVZF", "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    assert "audio" in check(http.post(CHAT, json=body), 400)["message"]


async def test_a_broken_image_fails_only_its_request(service: RunningService, red_square: str) -> None:
    broken = f"data:image/png;base64,{base64.b64encode(b'not an image').decode()}"
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(url: str) -> str:
            try:
                answer = await client.chat.completions.create(model="tiny", **with_image({"url": url}))
            except openai.BadRequestError as error:
                return error.type or ""
            return answer.choices[0].message.content or ""

        urls = [broken if index % 4 == 1 else red_square for index in range(12)]
        answers = await asyncio.gather(*map(ask, urls))
        alone = await ask(red_square)
    assert answers == ["BadRequestError" if url == broken else alone for url in urls]
    assert (await asyncio.to_thread(service.wait_until_free))["blocks"] == 0


def test_every_error_class_has_a_status() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(classes) > 15
    for kind in classes:
        status = status_of(kind("x"))
        caller = issubclass(kind, errors.InputError)
        assert (400 <= status < 500) or (not caller and status >= 500)
        message = error_object(kind("said"))["error"]["message"]
        assert (message == "said") is not issubclass(kind, errors.SharedMemoryError), (
            "the message names files of this machine"
        )
    assert status_of(errors.ProcessDied("x")) == status_of(errors.NoProcess("x")) == 503, "a later try may succeed"
    assert error_object(ValueError("secret"))["error"]["message"] == "internal error"
    assert set(TABLE) <= {*classes, Exception}


def test_every_status_has_a_type() -> None:
    """The test includes statuses that no exception class has, but that a route may return."""
    kinds = {status: error_body("x", status)["error"]["type"] for status in (400, 401, 422, 429, 500, 502, 503)}
    assert list(kinds.values()) == [
        "BadRequestError",
        "AuthenticationError",
        "BadRequestError",
        "RateLimitError",
        "InternalServerError",
        "InternalServerError",
        "ServiceUnavailableError",
    ]
