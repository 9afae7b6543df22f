"""Tests that /openapi.json describes the service correctly."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from tools.serving import RunningService

ROUTES = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/v1/models",
    "/v1/models/{name}",
    "/infer",
    "/inference/v1/generate",
    "/generate",
    "/generate_stream",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/health/live",
    "/v2/health/ready",
    "/v2/health/live",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/shm",
}


ELSEWHERE = {"n", "best_of", "length_penalty", "thinking_token_budget", "truncate_prompt_tokens"}
"""Numeric fields that are not sampling parameters."""
NAMES = {
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Sampling parameters whose request fields have other names, by the name of the field."""


def test_every_route_is_described(http: Any) -> None:
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) >= ROUTES
    for operations in described["paths"].values():
        for operation in operations.values():
            assert operation["description"]
            assert "422" not in operation["responses"]


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
def test_numbers_have_the_ranges_of_the_sampler(http: Any, body: str) -> None:
    """`SamplingParams` accepts the extreme values that the schema allows, and refuses the values just outside."""
    properties = http.get("/openapi.json").json()["components"]["schemas"][body]["properties"]
    numbers = {name: number for name, described in properties.items() for number in numeric(described)}
    assert len(numbers) > 11
    for name in numbers.keys() - ELSEWHERE:
        number = numbers[name]
        for side, outward in (("inimum", -1), ("aximum", 1)):
            kind, step = (int, outward) if number["type"] == "integer" else (float, outward * 1e-6)
            if f"exclusiveM{side}" in number:
                outside = kind(number[f"exclusiveM{side}"])
                last = outside - step
            else:
                last = kind(number[f"m{side}"])
                outside = last + step
            # Skip the bounds that differ. A top_k of -1 means all tokens, as in vLLM, and the sampler gets 0. The
            # schema requires a maximum of at least one token, but the sampler accepts 0 to score a prompt. The sampler
            # accepts prompt_logprobs of -1 for the field echo.
            if (name, last) in {
                ("top_k", -1),
                ("prompt_logprobs", 0),
                *((one, 1) for one in NAMES if NAMES[one] == "max_tokens"),
                ("max_tokens", 1),
            }:
                continue
            setting = NAMES.get(name, name)
            SamplingParams(**{setting: last}).check(vocab_size=100)
            with pytest.raises(InputError, match=setting):
                SamplingParams(**{setting: outside}).check(vocab_size=100)


def numeric(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [of for of in described.get("anyOf", ()) if of.get("type") in ("integer", "number")]


IMAGE = "<picture>"
"""Text that `with_image` replaces with the URL of an image."""
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]
SHORT = {"max_tokens": 2, "timings": True}
ALL_OF_CHATS = {"n": 2, "logprobs": True, "top_logprobs": 2, "media_spans": True}
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprob_token_ids": [5, 7]}
ALL_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CALLED = {"messages": SEEN, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
FUNCTION = {"messages": SEEN, "functions": [{"name": "f"}], "function_call": {"name": "f"}}
ANSWERS = [
    ("/v1/embeddings", {"input": ["a", "b"], "timings": True}),
    ("/v1/embeddings", {"messages": SEEN, "encoding_format": "base64", "dimensions": 8}),
    ("/rerank", {"query": "a", "documents": ["b", {"content": SEEN[0]["content"]}], "timings": True}),
    ("/v2/rerank", {"query": {"text": "a"}, "documents": ["b"], "return_documents": False}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "timings": True}),
    ("/v1/chat/completions", {"messages": SEEN, **SHORT}),
    ("/v1/chat/completions", {"messages": SEEN, **SHORT, **ALL_OF_CHATS}),
    ("/v1/chat/completions", {"messages": SEEN, **SHORT, **ALL_OF_CHATS, **TOKENS, "prompt_logprobs": 1}),
    *(("/v1/chat/completions", fields) for fields in (CALLED, FUNCTION)),
    ("/v1/completions", {"prompt": "a", **SHORT}),
    ("/v1/completions", {"prompt": "a", **SHORT, "logprobs": 0, **TOKENS, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": ["a", "b"], **SHORT, "echo": True, "logprobs": 2}),
    ("/infer", {"inputs": "a"}),
    ("/infer", {"inputs": "a", "parameters": {"details": True, "timings": True}}),
    ("/generate", {"inputs": "a"}),
    ("/generate", {"inputs": "a", "parameters": {"decoder_input_details": True, "timings": True}}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": SEEN, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1]}),
]
STREAMS = [
    ("/v1/chat/completions", {"messages": SEEN, **SHORT}),
    ("/v1/chat/completions", {"messages": SEEN, **SHORT, **ALL_OF_CHATS, **ALL_USAGE}),
    ("/v1/chat/completions", {"messages": SEEN, **SHORT, **ALL_OF_CHATS, **TOKENS}),
    *(("/v1/chat/completions", fields) for fields in (CALLED, FUNCTION)),
    ("/v1/completions", {"prompt": "a", **SHORT}),
    ("/v1/completions", {"prompt": "a", **SHORT, "echo": True, "logprobs": 2, **ALL_USAGE}),
    ("/infer", {"inputs": "a"}),
    ("/infer", {"inputs": "a", "parameters": {"details": True, "timings": True}}),
    ("/generate_stream", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a", "parameters": {"details": True, "timings": True}}),
]


@pytest.mark.parametrize(("route", "body"), ANSWERS)
def test_answers_match_the_schema(http: Any, red_square: str, route: str, body: dict[str, Any]) -> None:
    answer = http.post(route, json=with_image(body, red_square)).raise_for_status()
    require(http, described(http, "post", route)["application/json"]["schema"], [answer.json()])


@pytest.mark.parametrize(("route", "body"), STREAMS)
def test_stream_events_match_the_schema(http: Any, red_square: str, route: str, body: dict[str, Any]) -> None:
    answer = http.post(route, json=with_image(body | {"stream": True}, red_square)).raise_for_status()
    data = described(http, "post", route)["text/event-stream"]["itemSchema"]["properties"]["data"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    if "anyOf" in data:
        last, data = data["anyOf"]
        assert events.pop() == last["const"]
    assert len(events) > 1
    (event, _) = data["contentSchema"]["anyOf"]
    require(http, event, [json.loads(one) for one in events])


@pytest.mark.parametrize(
    ("route", "path"),
    [
        *((route, route) for route in ("/v1/models", "/version", "/health", "/ping", "/v2/health/ready", "/shm")),
        ("/v1/models/{name}", "/v1/models/tiny"),
        ("/shm", "/shm?blocks=true"),
    ],
)
def test_answers_to_get_match_the_schema(http: Any, route: str, path: str) -> None:
    answer = http.get(path).raise_for_status()
    require(http, described(http, "get", route)["application/json"]["schema"], [answer.json()])


def with_image(body: dict[str, Any], image: str) -> dict[str, Any]:
    filled: dict[str, Any] = json.loads(json.dumps(body).replace(IMAGE, image))
    return filled


def described(http: Any, method: str, route: str) -> dict[str, Any]:
    """Return the schemas of the route's successful responses, by media type."""
    found: dict[str, Any] = http.get("/openapi.json").json()["paths"][route][method]["responses"]["200"]["content"]
    return found


def require(http: Any, schema: dict[str, Any], answers: list[Any]) -> None:
    """Assert that each answer has exactly the fields of the schema."""
    assert schema, "nothing is said"
    components = http.get("/openapi.json").json()["components"]
    for component in components["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    validator = jsonschema.Draft202012Validator(schema | {"components": components})
    for one in answers:
        validator.validate(one)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_schemathesis_finds_no_violation(service: RunningService, http: Any, tmp_path: Path) -> None:
    """The service refuses invalid requests, never returns 5xx, and its responses match the described schema.

    The check `positive_data_acceptance` is excluded, because the service may refuse a request that fits the schema. The
    schema cannot express the name of the loaded model, which messages and images are valid, the vocabulary, the context
    length, or conditions between fields (`stream_options` and `stream`, `min_tokens` and `max_tokens`).
    """
    schemathesis(f"{service.url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "10", cwd=tmp_path)
    assert http.get("/health").status_code == 200
    assert service.wait_until_free()["blocks"] == 0


def schemathesis(description: str, *options: str, cwd: Path) -> None:
    """Let schemathesis test a service, and assert that it finds nothing."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", description, *options, "--seed", "1"),
            *("--exclude-checks", "positive_data_acceptance", "--request-timeout", "60", "--no-color"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=1180,  # only a hang takes so long
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-1000:]


HELLO = [{"role": "user", "content": "Hello!"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello!", "max_tokens": 2},
    "/tokenize": {"messages": HELLO},
}
"""A valid body for each route."""
BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required"},
    "function_call": {"functions": [{"name": "f"}]},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "length_penalty": {"use_beam_search": True, "n": 2},
}
"""Further fields that a request must have, by the name of the field that requires them."""
INSTEAD = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "prompt": "messages"}
"""Name of the field that a field replaces, by the name of the replacement."""
EXAMPLES: dict[str, Any] = {
    "model": "tiny",
    "seed": 7,
    "stop": ["b"],
    "logit_bias": {"64": 1.5},
    "bad_words": ["picture"],
    "user": "b",
    "metadata": {"b": 1},
    "reasoning_effort": "none",
    "chat_template_kwargs": {"b": 1},
    "mm_processor_kwargs": {"max_pixels": 100352},
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}},
    "structured_outputs": {"choice": ["red", "blue"]},
    "structural_tag": {"format": {"type": "const_string", "value": "a"}},
    "guided_json": {"type": "boolean"},
    "json_schema": {"type": "boolean"},
    **dict.fromkeys(("guided_regex", "regex"), "[a-c]{3}"),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), 'root ::= "a"'),
}
"""Valid values of fields for which random values are almost never valid."""
ELSEWHERE_VALID = {"inputs", "chat_template", "prompt_embeds"}
"""Fields of /tokenize that are valid only in requests with `inputs`, and a field that is refused by default."""


def one_by_one(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description of bodies in which one field has random values, and the other fields are valid.

    There is a body for each field. A body with random values in all fields would always be refused, because at least
    one value would be invalid. For the same reason, an object with many optional properties has only one of them.
    """
    components = described["components"]["schemas"]
    paths = {}
    for path, valid in VALID.items():
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        fields = components[body["schema"]["$ref"].rsplit("/", 1)[1]]["properties"]
        variants = []
        for name, field in fields.items():
            if name in ELSEWHERE_VALID:
                continue
            logprobs = {"logprobs": 1 if path == "/v1/completions" else True} if name == "logprob_token_ids" else {}
            beside = valid | BESIDE.get(name, {}) | logprobs
            known = {key: {"const": value} for key, value in beside.items() if key not in (name, INSTEAD.get(name))}
            taken = {"anyOf": [field, {"const": EXAMPLES[name]}]} if name in EXAMPLES else field
            variants.append(closed_object(known | {name: taken}))
        body["schema"] = {"anyOf": variants}
        paths[path] = {"post": described["paths"][path]["post"]}
    for component in ("Item", "ResponseFormat", "StructuredOutputsBody"):
        properties, required = components[component]["properties"], components[component].get("required", [])
        needed = {name: properties[name] for name in required}
        components[component] = {"anyOf": [closed_object(needed | {name: one}) for name, one in properties.items()]}
    return described | {"paths": paths}


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_field_alone_is_answered_as_described(service: RunningService, http: Any, tmp_path: Path) -> None:
    """Let schemathesis test the bodies of `one_by_one`. At least one value of each field must be accepted."""
    described = http.get("/openapi.json").json()
    names = {
        path: [*described["components"]["schemas"][body]["properties"]]
        for path, body in zip(VALID, ("ChatBody", "CompletionBody", "TokenizeBody"), strict=True)
    }
    (tmp_path / "openapi.json").write_text(json.dumps(one_by_one(described)))
    examples = ("--phases", "coverage,fuzzing", "--max-examples", "50", "--mode", "positive")
    report = ("--report", "har", "--report-har-path", "report.har")
    schemathesis("openapi.json", "--url", service.url, *examples, *report, cwd=tmp_path)
    answered = set()
    for entry in json.loads((tmp_path / "report.har").read_text())["log"]["entries"]:
        if entry["response"]["status"] == 200:
            path = entry["request"]["url"].removeprefix(service.url)
            given = json.loads(entry["request"]["postData"]["text"])
            answered |= {(path, name) for name, one in given.items() if one not in (None, "", [], {})}
    wanted = {(path, name) for path, fields in names.items() for name in fields if name not in ELSEWHERE_VALID}
    assert wanted - answered == set()
    assert service.wait_until_free()["blocks"] == 0
