"""Tests that no field of a request is dropped in silence: it is honoured, refused, or known not to change the answer.

test_logs.py tests unknown fields, with and without `--strict`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import service
from mindie_mm.engine.requests.sampling_params import SamplingParams
from service.routes.generate import GenerateBody, GenerateParameters
from service.routes.infer import InferBody, InferParameters
from service.routes.tokens import DetokenizeBody, TokenizeBody
from service.schemas.body import Fields
from service.schemas.openai_types import ChatBody, CompletionBody, StreamOptions
from service.schemas.structured_outputs import StructureFields

HELLO = [{"role": "user", "content": "Hello!"}]
DOORS: dict[str, tuple[type[Fields], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 1}),
    "/v1/completions": (CompletionBody, {"prompt": "Hello!", "max_tokens": 1}),
    "/infer": (InferBody, {"inputs": "Hello!"}),
    "/generate": (GenerateBody, {"inputs": "Hello!"}),
    "/generate_stream": (GenerateBody, {"inputs": "Hello!"}),
    "/tokenize": (TokenizeBody, {"prompt": "Hello!"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}
"""Class and smallest body of the requests to each route."""
OBJECTS: dict[str, tuple[str, type[Fields], dict[str, Any]]] = {
    "/infer": ("parameters", InferParameters, {}),
    "/generate": ("parameters", GenerateParameters, {}),
    "/generate_stream": ("parameters", GenerateParameters, {}),
    "/v1/chat/completions": ("stream_options", StreamOptions, {"stream": True}),
    "/v1/completions": ("stream_options", StreamOptions, {"stream": True}),
}
"""Name and class of an object in the body, and the fields that it requires."""
WRONG = [[{}]]
"""A value that no field accepts."""
IGNORED = {"user"}
"""Fields that are declared, but ignored."""


@pytest.mark.parametrize("path", DOORS)
def test_each_field_refuses_a_value_that_it_does_not_support(http: Any, path: str) -> None:
    kind, body = DOORS[path]
    for name in {field.alias or name for name, field in kind.model_fields.items()}:
        answer = http.post(path, json=body | {name: WRONG})
        assert answer.status_code == 400, (name, answer.text[:300])
    if path in OBJECTS:
        outer, kind, more = OBJECTS[path]
        for name in kind.model_fields:
            answer = http.post(path, json=body | more | {outer: {name: WRONG}})
            assert answer.status_code == 400, (name, answer.text[:300])
            assert answer.json()["error"]["param"] == outer


@pytest.mark.parametrize("path", DOORS)
def test_each_field_of_another_server_that_would_change_the_answer_is_refused(http: Any, path: str) -> None:
    kind, body = DOORS[path]
    for name in kind.not_served.keys() - kind.model_fields.keys():
        answer = http.post(path, json=body | {name: ["x"]})
        assert answer.status_code == 400, (name, answer.text[:300])
        assert name in answer.json()["error"]["message"]
    if path in OBJECTS:
        outer, kind, more = OBJECTS[path]
        for name in kind.not_served.keys() - kind.model_fields.keys():
            assert http.post(path, json=body | more | {outer: {name: ["x"]}}).status_code == 400, name


def test_each_declared_field_is_read() -> None:
    """A field either has the name of a sampling parameter, to which `Settings.params` copies it, or code reads it."""
    read: set[str] = set()
    for file in Path(service.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "same":
                read |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    kinds = {kind for kind, _ in DOORS.values()} | {kind for _, kind, _ in OBJECTS.values()}
    declared = {name for kind in kinds for name in kind.model_fields}
    # `StructureFields` reads its own fields by name.
    assert declared - read - {*SamplingParams.__struct_fields__, *StructureFields.model_fields} == IGNORED


@pytest.mark.parametrize("name", StructureFields.model_fields)
def test_each_field_of_a_structured_output_is_honoured(name: str) -> None:
    values: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "guided_choice": ["a"],
        "guided_json": {"type": "integer"},
        "json_schema": {"type": "integer"},
        "structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}},
        "timings": None,
    }
    body = ChatBody.model_validate({"messages": HELLO, name: values.get(name, "a")})
    assert (body.structure(close=True) is None) == (name == "timings")


CHOSEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "seed": 3,
    "stop": "a",
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 1,
    "min_new_tokens": 1,
    "max_tokens": 2,
    "max_new_tokens": 2,
    "cache_salt": "a",
    "max_completion_tokens": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "bad_words": ["a"],
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [5],
    "prompt_logprobs": 1,
    "priority": 1,
    "do_sample": True,
}
"""A value for each field that is a sampling parameter, or another name of one."""


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, InferParameters, GenerateParameters])
def test_each_sampling_parameter_of_a_request_reaches_the_engine(kind: Any) -> None:
    required = {"messages": HELLO} if kind is ChatBody else {}
    default = SamplingParams()
    neutral = kind.model_validate(required | {"seed": 1}).sampling_params(default)
    names = kind.model_fields.keys() & (CHOSEN.keys() | {*SamplingParams.__struct_fields__})
    assert len(names) > 5
    for name in names - {"json_schema", "structured_outputs", "logprobs", "logprob_token_ids"}:  # tested elsewhere
        given = kind.model_validate(required | {"seed": 1} | {name: CHOSEN[name]})
        assert given.sampling_params(default) != neutral, name


def test_fields_that_would_change_the_tokens_are_refused(http: Any) -> None:
    for name, value in (("truncate_prompt_tokens", 1), ("prompt_embeds", "x")):
        answer = http.post("/tokenize", json={"prompt": "Hello!", name: value})
        assert answer.status_code == 400
        assert f"{name} is not supported" in answer.json()["error"]["message"]


def test_detokenize_leaves_special_tokens_out_on_request(http: Any) -> None:
    ids = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    shown, plain = (
        http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": skip}).json()["prompt"]
        for skip in (False, True)
    )
    assert shown == http.post("/detokenize", json={"tokens": ids}).json()["prompt"] != plain
    assert "Hello!" in plain
