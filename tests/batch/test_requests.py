"""Tests for rows that state how they are answered, and lines of OpenAI's Batch API, which contain whole requests."""

from __future__ import annotations

import json
import math
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import openai.types
import pytest
from click.testing import CliRunner
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from transformers import AutoTokenizer

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.conversations import CONVERSATION_KEYS
from mindie_mm.batch.input.record import MEDIA_KEYS
from mindie_mm.batch.input.request import SAMPLING, prompt_of, request_of
from mindie_mm.batch.input.row import parse
from mindie_mm.batch.input.row_id import row_id
from mindie_mm.cli import main
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import Text
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.worker.answer_file import Requests
from service.schemas.body import IGNORED_FIELDS
from service.schemas.openai_types import ChatBody, CompletionBody
from service.schemas.structured_outputs import StructureFields
from tests import warm
from tests.batch.conftest import CLI, run_in_process, settings, written
from tests.batch.test_forms import tabled
from tests.media_samples import encoded, photograph

COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": COLOURS}}]
PAINT = {"type": "function", "function": {"name": "paint"}}
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{# an earlier answer: {{ message.content.split('</think>')[-1] }} #}"
)
"""A template with which an answer begins inside the reasoning."""


def batch_line(custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


@pytest.mark.usefixtures("copied_workers")
def test_generate_answers_batch_lines_and_rows_with_their_own_sampling(tmp_path: Path) -> None:
    """Rows that do not state sampling parameters use those of the command."""
    (tmp_path / "a.png").write_bytes(encoded(photograph(size=(60, 40))))
    said = [{"role": "user", "content": "Hello!"}]
    rows = [
        batch_line("one", {"messages": MESSAGES, "max_completion_tokens": 3, "temperature": 0}),
        batch_line("two", {"prompt": "Hello!", "max_tokens": 2, "ignore_eos": True}, "/v1/completions"),
        batch_line("three", {"messages": said, "n": 2}),
        batch_line("four", {"messages": said, "temperature": "hot"}),
        {"id": "five", "text": "Hello!", "max_tokens": 4, "ignore_eos": True, "top_k": -1},
        {"text": "Hello!", "ignore_eos": True, "stop": None},
        {"text": "Hello!", "max_tokens": -1},
        batch_line("eight", {"messages": said, "response_format": {"type": "json_object"}, "max_tokens": 40}),
        batch_line("nine", {"messages": said, "tools": TOOLS, "tool_choice": PAINT, "max_tokens": 120}),
        batch_line("ten", {"messages": said, "tools": TOOLS, "tool_choice": "none", "max_tokens": 3}),
        batch_line("eleven", {"messages": said, "tools": TOOLS, "tool_choice": "sometimes"}),
        batch_line("twelve", {"messages": said, "audio": {"voice": "alloy", "format": "wav"}}),
        batch_line("thirteen", {"messages": said, "images": ["a.png"]}),
        batch_line("fourteen", {"messages": said, "image": "a.png", "mystery": 3, "max_tokens": 2, "ignore_eos": True}),
    ]
    run_in_process(settings(written(tmp_path / "rows.jsonl", rows)), tmp_path / "run")
    output = tmp_path / "out.jsonl"
    arguments = ["generate", "--tokenized", str(tmp_path / "run"), "--output", str(output), "--max-tokens", "5"]
    done = warm.run([CLI, *arguments], timeout=300)
    assert (done.returncode, done.stdout) == (1, f"14 rows in {output}; 6 rows failed\n"), done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen = lines
    assert [line["custom_id"] for line in (one, two, three, four, eight)] == ["one", "two", "three", "four", "eight"]
    assert [line["id"] for line in (one, two)] == ["batch_req_0", "batch_req_1"]
    chat = ChatCompletion.model_validate(one["response"]["body"])
    assert (one["response"]["status_code"], one["error"], chat.model) == (200, None, "m")
    assert chat.usage is not None
    assert 1 <= chat.usage.completion_tokens <= 3
    completion = openai.types.Completion.model_validate(two["response"]["body"])
    assert completion.usage is not None
    assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (2, "length")
    chatted = Dataset(tmp_path / "run")[4].ids
    assert completion.usage.prompt_tokens < len(chatted), "a completion has no chat template"
    assert (three["response"], three["error"]["code"]) == (None, "InputError")
    assert three["error"]["message"] == "the row's body has n, which is not supported in a batch. Remove this field"
    assert "temperature: Input should be a valid number" in four["error"]["message"]
    assert (five["id"], len(five["token_ids"]), len(six["token_ids"])) == ("five", 4, 5)
    assert "max_tokens: " in seven["error"]
    json.loads(eight["response"]["body"]["choices"][0]["message"]["content"])
    called = ChatCompletion.model_validate(nine["response"]["body"]).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.content is None
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert (call.type, call.function.name) == ("function", "paint")
    assert json.loads(call.function.arguments) in ({"colour": "red"}, {"colour": "blue"})
    lengths = [line["response"]["body"]["usage"]["prompt_tokens"] for line in (eight, nine, ten)]
    assert lengths[0] == lengths[2] < lengths[1], "the tools are part of the prompt, unless they must not be called"
    assert "tool_choice='sometimes' must be 'none', 'auto', 'required'" in eleven["error"]["message"]
    assert twelve["error"]["message"] == "audio is not supported", "as in the service"
    assert thirteen["error"]["message"] == "images is not supported; use image_url parts in messages"
    assert fourteen["response"]["body"]["usage"]["completion_tokens"] == 2
    for name in ("image", "mystery"):
        assert f"ignoring the unknown key '{name}' of a request" in done.stderr
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"id"')
    assert CliRunner().invoke(main, [*arguments, "--limit", "3"]).exit_code == 1, "the answers are continued"
    assert output.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])


@pytest.mark.slow
def test_the_message_of_a_batch_line_has_the_reasoning_in_fields_of_its_own(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED, checkpoint)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 6, "ignore_eos": True}
    rows = [batch_line("one", body), batch_line("two", body | {"include_reasoning": False})]
    source = written(tmp_path / "rows.jsonl", rows)
    run_in_process(msgspec.structs.replace(settings(source), model=str(checkpoint)), tmp_path / "run")
    arguments = ["--tokenized", str(tmp_path / "run"), "--output", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(main, ["generate", *arguments])
    assert done.exit_code == 0, (tmp_path / "out.jsonl").read_text()
    answers = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    first, second = (answer["choices"][0]["message"] for answer in answers)
    assert first["reasoning"] == first["reasoning_content"] != ""
    assert [message["content"] for message in (first, second)] == ["", ""], "the reasoning did not end"
    assert second["reasoning"] is None
    assert [answer["usage"]["completion_tokens_details"] for answer in answers] == [{"reasoning_tokens": 6}] * 2


def test_the_reasoning_effort_turns_thinking_off_as_in_the_service(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED, checkpoint)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ 'on' if enable_thinking is not defined else enable_thinking }}{{ messages | length }}"
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    said = {"messages": [{"role": "user", "content": "Hello!"}]}
    rows = [said, said | {"reasoning_effort": "none"}, batch_line("a", said | {"reasoning_effort": "low"})]
    source = written(tmp_path / "rows.jsonl", rows)
    run_in_process(msgspec.structs.replace(settings(source), model=str(checkpoint)), tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = [tokenizer.decode(sample.ids) for sample in Dataset(tmp_path / "run")]
    assert found == ["on1", "False1", "True1"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (batch_line("a", {"messages": MESSAGES}, "/v1/embeddings"), "the url '/v1/embeddings'; it must be POST"),
        (batch_line("a", {"messages": MESSAGES, "tools": [{"type": "function"}]}), r"tools\[0\]\.function is missing"),
        (
            batch_line("a", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
            "the row's tool_choice is allowed_tools, which is not supported in a batch. Leave the other tools out",
        ),
        (batch_line("a", {"messages": MESSAGES, "logprobs": True}), "has logprobs, which is not supported in a batch"),
        (batch_line("a", {"prompt": "a", "tools": TOOLS}, "/v1/completions"), "has tools, which is not supported"),
        (
            batch_line("a", {"prompt": ["a", "b"]}, "/v1/completions"),
            "has a prompt of type list; it must have a prompt",
        ),
        (batch_line("a", {"text": "a"}, "/v1/completions"), "has no prompt; it must have a prompt that is a string"),
        (batch_line("a", {"inputs": [{"text": "a"}]}), "has no messages; it must have a list of messages"),
        (batch_line("a", {"messages": "[]"}), "has messages of type str; it must have a list of messages"),
        (batch_line("a", {}) | {"body": "x"}, "the row's body is str; it must be an object"),
        (batch_line("a", {}) | {"custom_id": ["a"]}, "the row's custom_id is list; it must be a string"),
        ({"custom_id": "a", "url": "/v1/chat/completions"}, "and the url /v1/chat/completions, but no body. Put the"),
        (
            batch_line("a", {}) | {"body": None, "messages": MESSAGES},
            "but no body. Put the fields of the request there",
        ),
    ],
)
def test_a_batch_line_that_cannot_be_answered_as_stated_fails(line: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        parse(json.dumps(line).encode(), tmp_path, "")


def test_only_the_fields_of_a_chat_or_a_completion_are_part_of_its_prompt(tmp_path: Path) -> None:
    """In other rows, the other keys are media, or prompts of other formats."""
    others = dict.fromkeys({*MEDIA_KEYS, *CONVERSATION_KEYS, "inputs", "text", "prompt", "id"}, "x")
    chat = {"messages": [{"role": "user", "content": "Hello!"}]}
    for body, url in ((chat, "/v1/chat/completions"), ({"prompt": "Hello!"}, "/v1/completions")):
        row = parse(json.dumps(batch_line("a", {**others, **body}, url)).encode(), tmp_path, "")
        assert row == parse(json.dumps(batch_line("a", body, url)).encode(), tmp_path, "")


@pytest.mark.parametrize(("body", "url"), [(ChatBody, "/v1/chat/completions"), (CompletionBody, "/v1/completions")])
def test_each_field_of_the_service_is_refused_or_has_its_effect(body: type[BaseModel], url: str) -> None:
    prompt = {"messages": MESSAGES, "prompt": "a"}
    effective = {*SamplingParams.__struct_fields__, *StructureFields.model_fields, *SAMPLING, *IGNORED_FIELDS, *prompt}
    effective |= {"min_new_tokens", "max_new_tokens", "include_reasoning", "separate_reasoning", "length_penalty"}
    effective |= {"model", "thinking_token_budget", "chat_template_kwargs", "reasoning_effort", "parse_special"}
    without_effect = {"truncation_side", "return_tokens_as_token_ids", "stream_reasoning"}  # they need other fields
    for name in {*body.model_fields} - effective - without_effect:
        if body is ChatBody and name in ("tools", "tool_choice", "add_generation_prompt"):
            continue
        with pytest.raises(InputError, match=rf"the row's body has {name}, which is not supported"):
            prompt_of(batch_line("a", {**prompt, name: "x"}, url))


@pytest.mark.parametrize(
    "row",
    [
        {"custom_id": 7, "url": "https://host/a.jpg", "text": "a", "temperature": 0.5},
        {"custom_id": "c", "url": None, "body": "the text of an email", "text": "a", "temperature": 0.5},
    ],
)
def test_rows_with_columns_of_the_same_names_are_no_batch_lines(row: dict[str, Any], tmp_path: Path) -> None:
    record = json.dumps(row).encode()
    assert parse(record, tmp_path, "").items == (Text("a"),)
    assert row_id(record) == row_id(row) == str(row["custom_id"])
    assert json.loads(str(request_of(record))) == {"body": {"temperature": 0.5}}


def test_a_request_contains_everything_but_the_prompt() -> None:
    line = batch_line("a", {"messages": MESSAGES, "top_p": 0.5})
    for record in (line, json.dumps(line).encode()):
        assert row_id(record) == "a"
        request = json.loads(str(request_of(record)))
        assert request == {"custom_id": "a", "url": line["url"], "body": {"model": "m", "top_p": 0.5}}
    assert request_of(b'{"text": "a", "stop": ["x"], "seed": null, "label": 3}') == '{"body":{"stop":["x"]}}'
    assert [request_of(record) for record in (b'{"text": "a"}', b"[]", b"{", {"text": "a", "seed": None})] == [None] * 4


def test_values_that_cannot_be_read_are_left_out_of_a_request() -> None:
    """The rows fail, and other rows are answered."""
    line = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "user": 1e999}}'
    assert json.loads(str(request_of(line))) == {"custom_id": "a", "url": "/v1/completions", "body": {}}
    nameless = line.replace(b'"a", "url"', b'null, "url"')
    assert json.loads(str(request_of(nameless)))["custom_id"] is None, "the row gets a line in OpenAI's format"
    for value in (b"1e999", b'"\xff"', b"[" * 5000 + b"]" * 5000):
        assert request_of(b'{"text": "a", "stop": ' + value + b"}") is None


def test_nulls_and_decimals_of_tables_are_read_as_in_prompts() -> None:
    row = {"temperature": Decimal("0.5"), "seed": Decimal(3), "logit_bias": {"5": 1.0, "7": None}, "stop": ["a", None]}
    expected = {"temperature": 0.5, "seed": 3, "logit_bias": {"5": 1.0}, "stop": ["a"]}
    assert json.loads(str(request_of({"text": "a", **row}))) == {"body": expected}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_of_tables_that_json_does_not_have_are_nulls(value: float, tmp_path: Path) -> None:
    """A kept column of doubles has them as they are."""
    row = {"id": value, "text": "a", "image": value, "temperature": value, "score": value, "scores": [value, 1.0]}
    tabled(tmp_path / "rows.parquet", [row])
    given = settings(tmp_path / "rows.parquet", keep_columns={"score": "", "scores": "json"})
    run_in_process(given, tmp_path / "run")
    dataset = Dataset(tmp_path / "run")
    (sample,) = dataset
    assert (sample.id, sample.error, len(sample.spans), sample.columns["scores"]) == ("0", None, 0, "[null,1.0]")
    assert repr(sample.columns["score"]) == repr(value)
    assert dataset.record(0).request is None
    answered = Requests(SamplingParams()).error_line(dataset.record(0), "")
    assert b'"score":null' in msgspec.json.encode(answered)


def test_the_id_of_a_batch_line_is_its_custom_id() -> None:
    line = batch_line("b", {"messages": MESSAGES}) | {"id": "other"}
    assert (row_id(line), row_id(json.dumps(line).encode())) == ("b", "b")
    row = {"id": "own", "custom_id": "b", "text": "not a batch line"}
    assert row_id(row) == "own"


def test_a_request_does_not_depend_on_the_process() -> None:
    """Python orders sets of strings differently in each process."""
    record = json.dumps({"text": "a", **dict.fromkeys(sorted(SAMPLING, reverse=True), 1)}).encode()
    assert list(json.loads(str(request_of(record)))["body"]) == sorted(SAMPLING)
