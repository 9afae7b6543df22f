"""Tests for the names of contents, which need no cluster."""

from __future__ import annotations

import json
import pickle
import threading
from typing import Any

import pytest

from service.ray.content import Loads, Route, keeper_of, route_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}


def chat(*contents: Any, **more: Any) -> Route:
    messages = [{"role": ("user", "assistant")[index % 2], "content": one} for index, one in enumerate(contents)]
    return route_of(json.dumps({"messages": messages, **more}).encode())


def keys(route: Route) -> set[bytes]:
    return {content.key for content in route.contents}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_an_image_has_the_same_name_in_every_chat():
    one, two = chat([text("what"), IMAGE]), chat("hello", "hi", [IMAGE, text("and this")])
    assert one.first_key == two.first_key
    assert keys(one) & keys(two) == {one.first_key}
    assert chat([text("what"), OTHER]).first_key != one.first_key


def test_an_image_has_the_same_name_in_items():
    items = [{"image": IMAGE["image_url"]["url"]}, {"text": "what"}]
    one, two = (route_of(json.dumps({"inputs": items[:end]}).encode()) for end in (1, 2))
    assert one.first_key == two.first_key == chat([IMAGE]).first_key
    detailed = {"type": "image_url", "image_url": IMAGE["image_url"] | {"detail": "low"}}
    assert chat([detailed]).first_key == one.first_key


def test_the_next_turn_of_a_chat_holds_the_earlier_turns():
    first, next_turn = chat("hello"), chat("hello", "hi", "how are you")
    assert keys(first) < keys(next_turn)
    assert first.first_key == next_turn.first_key
    assert first.num_tokens < next_turn.num_tokens
    assert not keys(first) & keys(chat("hello!", "hi", "how are you"))


def test_tools_are_a_part_of_the_beginning_of_the_prompt():
    assert not keys(chat("hello")) & keys(chat("hello", tools=[{"type": "function"}]))


def test_texts_with_the_same_beginning_share_it():
    common = "word " * 1000
    one, two = (route_of(json.dumps({"prompt": common + end}).encode()) for end in ("one", "two"))
    assert one.first_key == two.first_key
    assert keys(one) != keys(two)
    assert sum(content.num_tokens for content in one.contents if content.key in keys(two)) > 0.8 * one.num_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"input": ["word " * 100]},
        {"input": [[1] * 200]},
        {"messages": [[{"role": "user", "content": "word " * 100}]]},
        {"query": "a", "documents": ["word " * 100]},
        {"text_1": "a", "text_2": "word " * 100},
    ],
)
def test_inputs_of_embeddings_and_scores_count_as_load(body: dict[str, Any]):
    assert 50 < route_of(json.dumps(body).encode()).num_tokens < 500


def test_requests_with_different_salts_share_nothing():
    assert not keys(chat([IMAGE])) & keys(chat([IMAGE], cache_salt="mine"))


def test_a_uuid_names_an_image_with_and_without_its_data():
    """The replica that keeps the data must receive the request without data."""
    body = [{"messages": [{"role": "user", "content": [part]}]} for part in (
        {**IMAGE, "uuid": "a"}, {"type": "image_url", "image_url": {}, "uuid": "a"}
    )]  # fmt: skip
    one, two = (route_of(json.dumps(one).encode(), b"owner").first_key for one in body)
    assert one == two
    assert route_of(json.dumps(body[0]).encode(), b"another owner").first_key != one


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"1", b"{}", b"[" * 100_000, b'{"messages": null}', b'{"messages": "text"}',
     b'{"messages": [1, null]}', b'{"messages": [{"role": [], "content": [[], 1, null, {"image": null}]}]}',
     b'{"prompt": {"a": 1}}', b'{"prompt": [[1, 2], [3]]}', b'{"inputs": [1, 2, 3]}', b'{"messages": [], "prompt": 0}',
     b'{"messages": [{"content": [{"image_url": 5, "uuid": 7}]}], "cache_salt": [1], "tools": "none"}'],
)  # fmt: skip
def test_any_body_has_a_name(body: bytes):
    """The worker reports the mistake, if there is one."""
    assert route_of(body).num_tokens >= 0


@pytest.mark.parametrize("body", [{"messages": [{}] * 50_000}, {"inputs": [{"image": "a"}] * 50_000}])
def test_a_request_of_many_parts_has_a_limited_number_of_contents(body: dict[str, Any]):
    """A router compares each of them with the contents of all replicas."""
    route = route_of(json.dumps(body).encode())
    assert len(route.contents) <= 1024
    assert route.num_tokens >= 50_000


def test_the_load_of_a_request_is_counted_once_and_only_until_its_end():
    loads, route = Loads(), chat("hello")
    route.begin("one", loads)
    assert (loads["one"], route.tried) == (route.num_tokens, ["one"])
    route.begin("two", loads)
    assert (loads["one"], loads["two"]) == (0, route.num_tokens)
    route.end()
    route.begin("three", loads)  # the router may learn late that the client is gone
    assert [loads[name] for name in ("one", "two", "three")] == [0, 0, 0]
    assert not len(loads), "replicas that are gone are forgotten"


def test_a_request_that_ends_while_the_router_counts_it_is_not_counted_forever():
    loads, route = Loads(), chat("hello")
    ending = threading.Thread(target=route.end)

    class Counting(Loads):
        def add(self, name: str, num_tokens: int) -> None:
            if num_tokens > 0:  # the client disconnects now
                ending.start()
                ending.join(0.1)
            loads.add(name, num_tokens)

    route.begin("one", Counting())
    ending.join()
    assert loads["one"] == 0


ID = "ab12_" + "0f" * 12


@pytest.mark.parametrize(
    ("path", "body", "keeper"),
    [
        (f"/v1/responses/resp_{ID}", "", "ab12"),
        (f"/responses/resp_{ID}/cancel", "", "ab12"),
        ("/v1/responses", json.dumps({"input": "a", "previous_response_id": f"resp_{ID}"}), "ab12"),
        ("/v1/responses", json.dumps({"input": [{"type": "item_reference", "id": f"msg_{ID}_0"}]}), "ab12"),
        ("/v1/responses", json.dumps({"input": f"msg_{'0f' * 12}_0"}), None),
        ("/v1/chat/completions", json.dumps({"messages": f"resp_{ID}"}), None),
    ],
)
def test_an_id_names_the_replica_that_stores_the_response(path: str, body: str, keeper: str | None) -> None:
    assert keeper_of(path, body.encode()) == keeper


def test_the_items_of_a_response_are_named_as_the_messages_of_a_chat() -> None:
    parts = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}, {"type": "input_text", "text": "a"}]
    first = route_of(json.dumps({"input": [{"role": "user", "content": parts}]}).encode())
    second = route_of(
        json.dumps({"input": [{"role": "user", "content": parts}, {"role": "user", "content": "b"}]}).encode()
    )
    assert first.first_key == second.first_key != b""
    assert keys(first) <= keys(second)
    other = route_of(json.dumps({"input": [{"role": "user", "content": parts}], "instructions": "c"}).encode())
    assert keys(first) & keys(other) == {first.first_key}


def test_the_worker_does_not_receive_the_content():
    sent = pickle.loads(pickle.dumps(chat("hello")))
    assert sent.contents == ()


def test_requests_with_different_adapters_have_no_content_in_common() -> None:
    bodies = [{"prompt": "word " * 200, "model": name} for name in ("base", "other name", "sql", "charts")]
    keys = [route_of(json.dumps(body).encode(), loras=("sql", "charts")).first_key for body in bodies]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
