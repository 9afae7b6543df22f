"""Tests for OpenAI's Responses API."""

import base64
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mindie_mm.errors import InputError, LimitExceeded, NotStored
from mindie_mm.settings.config import ServiceConfig
from service.request.response_store import MAX_CHAIN, ResponseStore
from service.request.translated import Translated, text_part
from service.responses.answer import ResponseEvents, begun
from service.responses.body import ResponsesBody
from tests.audio_samples import encode_audio, tone
from tests.service.test_files import pdf_of
from tests.service.test_messages_api import parsed
from tests.service.test_tool_calls import WEATHER
from tests.warm import running_service
from tools.demo import draw_shape

TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
RUN = {"type": "custom", "name": "run", "description": "Runs code."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 20_000}}, "required": ["a"]}
LONG: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
USED = {
    "prompt_tokens": 5,
    "completion_tokens": 9,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def ranged(expression: str, syntax: str = "regex") -> dict[str, Any]:
    """Return a custom tool whose input matches a regular expression."""
    return RUN | {"format": {"type": "grammar", "syntax": syntax, "definition": expression}}


def ask(http: httpx2.Client, **changes: Any) -> dict[str, Any]:
    given = {"model": "tiny", "max_output_tokens": 30, "input": "Hello!", "temperature": 0} | changes
    answer = http.post("/v1/responses", json=given)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(http: httpx2.Client, **changes: Any) -> list[dict[str, Any]]:
    given = {"model": "tiny", "max_output_tokens": 30, "input": "Hello!", "temperature": 0, "stream": True} | changes
    answer = http.post("/v1/responses", json=given)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return parsed(answer.text)


PARTS = {"content_part": "content", "reasoning_summary_part": "summary"}
TEXTS = {"output_text": "content", "reasoning_text": "content", "reasoning_summary_text": "summary"}
CALLS = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}


def assembled(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output of a stream, made from the events of its items alone."""
    output: list[dict[str, Any]] = []
    for number, event in enumerate(stream):
        assert event["sequence_number"] == number
        what, _, step = event["type"].removeprefix("response.").partition(".")
        if (what, step) == ("output_item", "added"):
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif (what, step) == ("output_item", "done"):
            output[-1]["status"] = event["item"]["status"]
            assert output[-1] == event["item"]
        elif step:
            assert event["item_id"] == output[event["output_index"]]["id"] == output[-1]["id"]
            add(output[-1], what, step, event)
    return output


def add(item: dict[str, Any], what: str, step: str, event: dict[str, Any]) -> None:
    if what in PARTS and step == "added":
        item[PARTS[what]].append(event["part"])
    elif what in CALLS:
        item[CALLS[what]] += event["delta"] if step == "delta" else ""
    elif what in TEXTS:
        part = item[TEXTS[what]][event[f"{TEXTS[what]}_index"]]
        if step == "done":
            assert part["text"] == event["text"]
            return
        part["text"] += event["delta"]
        if "logprobs" in event:
            part["logprobs"] = [*part["logprobs"], *event["logprobs"]]


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without ids and without log-probabilities, which differ in the last bits.

    Of the most likely tokens, only the number is kept, because tokens with nearly equal numbers may change places.
    """
    kept = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]

    def without_tops(value: dict[str, Any]) -> dict[str, Any]:
        return value | {"top_logprobs": len(value["top_logprobs"])} if "top_logprobs" in value else value

    return list(json.loads(json.dumps(kept), parse_float=lambda _: 0.0, object_hook=without_tops))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"instructions": "Answer.", "top_logprobs": 2},
        {"max_output_tokens": 4, "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200},
        {"tools": [TOOL, RUN], "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 200},
        {"tools": [RUN], "tool_choice": {"type": "custom", "name": "run"}, "max_output_tokens": 60},
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}, "max_output_tokens": 200},
        {"metadata": {"a": "b"}, "store": False, "truncation": "auto", "user": "u", "reasoning": None},
    ],
)
def test_a_stream_is_the_response_in_pieces(http: httpx2.Client, changes: dict[str, Any]) -> None:
    stream = events(http, **changes)
    whole = ask(http, **changes)
    last = stream[-1]["response"]
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1]["type"] == f"response.{whole['status']}"
    assert assembled(stream) == last["output"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    own = ("id", "created_at", "output", "usage")
    assert {name: value for name, value in last.items() if name not in own} == {
        name: value for name, value in whole.items() if name not in own
    }
    assert {item["type"] for item in whole["output"]} == {
        "custom_tool_call" if changes.get("tools") == [RUN] else "function_call" if "tools" in changes else "message"
    }
    if changes.get("max_output_tokens") == 4:
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"][0]["status"] == "incomplete"
    if "include" in changes or "top_logprobs" in changes:
        tokens = whole["output"][0]["content"][0]["logprobs"]
        text = "".join(token["token"] for token in tokens)
        assert text.removesuffix("<|im_end|>") == whole["output"][0]["content"][0]["text"]
        assert {len(token["top_logprobs"]) for token in tokens} == {changes.get("top_logprobs", 0)}


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "run"}])
def test_the_input_of_a_custom_tool_matches_its_regular_expression(http: httpx2.Client, choice: Any) -> None:
    expression = r'[a-c]{2}"\\[0-9]{3}|é{4}'
    (call,) = ask(http, tools=[ranged(expression)], tool_choice=choice, max_output_tokens=60)["output"]
    assert call["type"] == "custom_tool_call"
    assert re.fullmatch(expression, call["input"])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://a"}]}]}, "input"),
        ({"input": "a" * 20_000}, "input"),
    ],
)
def test_errors_name_the_fields_of_the_request(http: httpx2.Client, changes: dict[str, Any], param: str) -> None:
    error = http.post("/v1/responses", json={"input": "Hello!"} | changes).json()["error"]
    assert error["param"] == param
    assert not re.search(r"response_format|\.function\b|messages", error["message"]), error


def test_the_answer_is_that_of_a_chat(client: openai.OpenAI, red_square: str) -> None:
    parts: list[Any] = [
        {"type": "input_image", "image_url": red_square, "detail": "auto"},
        {"type": "input_text", "text": "What is shown?"},
    ]
    given: list[Any] = [{"role": "user", "content": parts}]
    answer = client.responses.create(model="tiny", input=given, temperature=0, max_output_tokens=9)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": red_square}},
                    {"type": "text", "text": "What is shown?"},
                ],
            }
        ],
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    with client.responses.stream(model="tiny", input=given, temperature=0) as stream:
        assert stream.get_final_response().output_text == answer.output_text


def test_audio_and_a_file_at_a_url_are_those_of_a_chat(http: httpx2.Client) -> None:
    audio = base64.b64encode(encode_audio(tone(1), 16_000)).decode()
    heard = {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}}
    pdf = pdf_of(draw_shape("red", (220, 40, 40), "square", x=0.4))
    page = f"data:application/pdf;base64,{base64.b64encode(pdf).decode()}"
    parts = [heard, {"type": "input_file", "file_url": page, "filename": "a.pdf"}]
    used = ask(http, input=[{"role": "user", "content": parts}], max_output_tokens=1)["usage"]
    ours = [heard, {"type": "document", "document": page}]
    counted = http.post("/tokenize", json={"messages": [{"role": "user", "content": ours}]}).json()
    assert used["input_tokens"] == counted["count"]


def test_max_output_tokens_is_reduced_to_the_context(http: httpx2.Client) -> None:
    assert ask(http, max_output_tokens=128_000)["status"] == "completed"


def test_items_of_a_turn_become_one_message(http: httpx2.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": None},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}", "status": None},
        {"type": "function_call_output", "call_id": "call_1", "output": "c"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": 'print("é")'},
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "d"}],
        },
    ]
    run = {"name": "run", "arguments": json.dumps({"input": 'print("é")'}, ensure_ascii=False)}
    messages = [
        {"role": "system", "content": "Answer.\n\nBe brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_2", "type": "function", "function": run}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "d"},
    ]
    used = ask(http, input=items, instructions="Answer.", max_output_tokens=1)["usage"]
    counted = http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert used["input_tokens"] == counted


@pytest.mark.parametrize("summarizes", [False, True])
def test_reasoning_is_an_item_of_its_own(summarizes: bool) -> None:
    body = ResponsesBody.model_validate({"input": "a", "reasoning": {"summary": "auto"} if summarizes else None})
    sent: list[dict[str, Any]] = []
    made = ResponseEvents(begun(body, "resp_1", 1, "m", stored=False), body.summarizes, [])
    made.send = lambda event: sent.append(json.loads(json.dumps(event)))
    function = {"name": "now", "arguments": ""}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "a", "reasoning_content": "a"},
        {"reasoning": "b", "reasoning_content": "b"},
        {"content": "c"},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "function": function}]},
        {},
    ]
    for delta in deltas:
        end = {"finish_reason": None if delta else "tool_calls", "logprobs": None}
        made.add({"choices": [{"delta": delta, **end}]})
    made.add({"choices": [], "usage": USED})
    made.finish()
    output = assembled(sent)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    if summarizes:
        assert output[0]["summary"] == [{"type": "summary_text", "text": "ab"}]
    else:
        assert (output[0]["summary"], output[0]["content"]) == ([], [{"type": "reasoning_text", "text": "ab"}])
    assert sent[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_a_conversation_continues_from_stored_responses(client: openai.OpenAI, red_square: str) -> None:
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": red_square}]}
    first = client.responses.create(model="tiny", input=[image], temperature=0, max_output_tokens=9)
    second = client.responses.create(
        model="tiny", input="What is shown?", previous_response_id=first.id, temperature=0, max_output_tokens=9
    )
    items: list[Any] = [
        image,
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "What is shown?"},
    ]
    whole = client.responses.create(model="tiny", input=items, temperature=0, max_output_tokens=9, store=False)
    assert second.output_text == whole.output_text
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in listed] == ["message"] * 3
    assert client.responses.retrieve(second.id).output == second.output
    references: list[Any] = [image, {"type": "item_reference", "id": first.output[0].id}, items[-1]]
    by_id = client.responses.create(model="tiny", input=references, temperature=0, max_output_tokens=9)
    assert by_id.output_text == whole.output_text
    for gone in (whole.id, "resp_0"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    client.responses.delete(first.id)
    for forgotten in (first.id, second.id):
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            client.responses.create(model="tiny", input="a", previous_response_id=forgotten)


def test_a_running_response_can_be_cancelled(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="tiny", input="Hello!", stream=True, text=LONG, max_output_tokens=3000)
    response_id = next(iter(stream)).response.id  # type: ignore[union-attr]
    assert client.responses.cancel(response_id).status == "cancelled"
    *_, last = stream
    assert last.type in ("response.incomplete", "response.completed")
    assert {item.status for item in last.response.output} <= {"completed", "incomplete"}  # type: ignore[union-attr]
    assert last.response.status in ("cancelled", "completed")  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="only a response that is being streamed"):
        client.responses.cancel(response_id)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"input": []}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, 400, "role"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, 400, "must be an item of the type message"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, 404, "input[0] refers to the item 'msg_0'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "filename": "a"}]}]}, 400, "input[0]"),
        ({"previous_response_id": "resp_0"}, 404, "'resp_0'"),
        ({"background": True}, 400, "background"),
        ({"conversation": "conv_0"}, 400, "conversation"),
        ({"tools": [{"type": "web_search"}]}, 400, "'web_search'"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, 400, "format"),
        ({"tools": [ranged("start: /a/", "lark")]}, 400, "tools.0.custom.format.grammar.syntax"),
        ({"tools": [ranged("(")], "tool_choice": "required"}, 400, "the parameters of a tool are not supported"),
        ({"tools": [TOOL | {"name": ""}]}, 400, "tools[0].name has 0 characters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, '{"type": "function", "name": ...}'),
        ({"tool_choice": "required"}, 400, "tools"),
        ({"text": {"format": {"type": "yaml"}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "requires text.format.schema"),
        ({"input": [{"type": "reasoning"}] * 5000}, 400, "5000 items; the limit is 4096"),
        ({"tools": [{**TOOL, "parameters": {"properties": {"\ud800": {}}}}]}, 400, "surrogate"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"model": "gpt"}, 404, "'gpt'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://a/b"}]}]}, 400, "ftp"),
    ],
)
def test_bad_input_is_refused(http: httpx2.Client, changes: dict[str, Any], status: int, words: str) -> None:
    for stream in (False, True):
        body = json.dumps({"model": "tiny", "input": "Hello!", "stream": stream} | changes)
        answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.slow
def test_a_response_whose_stream_fails_is_stored_as_failed(settings: dict[str, object], tmp_path: Path) -> None:
    given = settings | {"spool": tmp_path / "spool", "request_timeout_s": 0.5}
    body = {"input": "Hello!", "stream": True, "text": LONG, "max_output_tokens": 3000}
    with running_service(given, tmp_path / "log") as running, httpx2.Client(base_url=running.url, timeout=300) as http:
        while (answer := http.post("/v1/responses", json=body)).status_code == 504:  # the first event took too long
            assert http.get("/health").status_code == 200
        *stream, last = parsed(answer.text)
        response = last["response"]
        assert (last["type"], last["sequence_number"]) == ("response.failed", len(stream))
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert "took longer than" in response["error"]["message"]
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert response["output"][0]["content"][0]["text"]
        assert http.get(f"/v1/responses/{response['id']}").json() == response
        assert http.delete(f"/v1/responses/{response['id']}").status_code == 200


def test_nothing_follows_the_end_of_a_cancelled_response(client: openai.OpenAI, http: httpx2.Client) -> None:
    for _ in range(8):
        stream = client.responses.create(
            model="tiny", input="Hello!", stream=True, extra_body={"temperature": 2.0}, max_output_tokens=3000
        )
        events = iter(stream)
        name = next(events).response.id  # type: ignore[union-attr]
        next(events)
        with suppress(openai.BadRequestError):  # the stream has ended already
            client.responses.cancel(name)
        *_, last = events
        assert last.response.status in ("cancelled", "completed")  # type: ignore[union-attr]
        stored = http.get(f"/v1/responses/{name}").json()  # unless it is larger than the store
        assert all(item["status"] != "in_progress" for item in stored.get("output", ()))


def test_deeply_nested_tools_are_no_failure_of_the_service(http: httpx2.Client) -> None:
    nested: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        nested = {"a": nested}
    for parameters in (nested, {"type": "object", "default": nested}):
        body = {"input": "a", "tools": [{**TOOL, "parameters": parameters}], "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).status_code in (200, 400)


def test_items_of_the_input_are_listed_and_referred_to(client: openai.OpenAI) -> None:
    same: list[Any] = [{"role": "user", "content": text, "id": "msg_a"} for text in ("a", "b", "c")]
    first = client.responses.create(model="tiny", input=same, max_output_tokens=1)
    listed = list(client.responses.input_items.list(first.id, order="asc", limit=1))
    assert len({item.id for item in listed}) == 3
    reference: list[Any] = [{"type": "item_reference", "id": listed[1].id}]
    assert client.responses.create(model="tiny", input=reference, max_output_tokens=1).output
    second = client.responses.create(model="tiny", input="d", previous_response_id=first.id, max_output_tokens=1)
    client.responses.delete(first.id)
    assert len(list(client.responses.input_items.list(second.id))) == 1


def test_developer_and_system_messages_become_one_that_leads(http: httpx2.Client) -> None:
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    used = ask(http, input=items, instructions="a", max_output_tokens=1)["usage"]
    messages = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    assert used["input_tokens"] == http.post("/tokenize", json={"messages": messages}).json()["count"]


def test_a_template_without_late_system_messages_gets_their_text_from_the_user() -> None:
    chat = Translated("messages", {}, takes_late_system=False, joins_turns=True)
    for role, text in (("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("assistant", "e")):
        chat.add({"role": role}, role, [(text_part(text), text)])
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert [part["text"] for part in chat.messages[0]["content"]] == ["a", "b", "c"]
    assert chat.messages[1]["content"] == "de"
    with pytest.raises(InputError, match=r"^c: no") as caught, chat.naming_places():
        raise InputError("messages[0].content[2]: no", param="messages")
    assert caught.value.param == "messages"


def response(name: str, previous: str | None = None, size: int = 10) -> dict[str, Any]:
    item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": "x" * size}
    return {"id": name, "previous_response_id": previous, "output": [item]}


def test_the_store_keeps_keys_apart() -> None:
    store = ResponseStore(10**5, 60.0, has_keys=True)
    store.put(b"a", response("r"), [])
    assert store.get(b"a", "r") is not None
    assert store.item(b"a", "msg_r") is not None
    assert (store.get(b"b", "r"), store.item(b"b", "msg_r"), store.delete(b"b", "r")) == (None, None, False)
    with store.running(b"a", response("s")):
        assert store.cancel(b"b", "s") is None
        with pytest.raises(NotStored):
            store.found(b"b", "s")
    with pytest.raises(NotStored):
        store.conversation(b"b", "r")


def test_the_store_is_bounded_and_a_chain_outlives_its_beginning() -> None:
    store = ResponseStore(10**5, 60.0, has_keys=True)
    store.put(b"a", response("first"), [])
    for number in range(200):
        store.put(b"a", response(f"{number}", "first"), [])
        assert len(store.conversation(b"a", f"{number}")) == 2
    assert store.get(b"a", "0") is None
    store.put(b"a", response("large", size=10**5), [])
    assert store.get(b"a", "large") is None
    assert store.get(b"a", "first") is not None
    aged = ResponseStore(10**5, 0.0, has_keys=True)
    aged.put(b"a", response("r"), [])
    assert aged.get(b"a", "r") is None
    assert not ResponseStore(0, 60.0, has_keys=True).is_on


def test_without_keys_the_store_is_off_unless_it_is_asked_for() -> None:
    assert ServiceConfig().stored_response_bytes == 0
    assert ServiceConfig(response_store_bytes=5).stored_response_bytes == 5
    assert ServiceConfig(api_key=("a",)).stored_response_bytes > 0
    assert ServiceConfig(api_key=("a",), response_store_bytes=0).stored_response_bytes == 0
    with pytest.raises(NotStored, match="this service stores no responses"):
        ResponseStore(0, 60, has_keys=False).require(b"", "resp_0")


def test_without_keys_the_store_is_bounded_for_all_clients_together() -> None:
    store = ResponseStore(10**5, 60.0, has_keys=False)
    for number in range(200):
        store.put(b"%d" % number, response("r"), [])
    assert store.get(b"0", "r") is None
    assert store.get(b"199", "r") is not None
    assert store.get(b"198", "r") is not None


def test_a_chain_has_a_maximum_length() -> None:
    store = ResponseStore(10**8, 60.0, has_keys=True)
    for number in range(MAX_CHAIN + 1):
        store.put(b"a", response(f"{number}", f"{number - 1}" if number else None), [])
    assert len(store.conversation(b"a", f"{MAX_CHAIN - 1}")) == MAX_CHAIN
    with pytest.raises(LimitExceeded, match=str(MAX_CHAIN)):
        store.conversation(b"a", f"{MAX_CHAIN}")
