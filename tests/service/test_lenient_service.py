"""Tests for a service with --truncate, --allow-private-media and other settings that are off by default.

The last tests kill the tokenizer and engine processes of the service.
"""

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import psutil
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.removed_arenas import removed_arenas
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.demo import draw_shape, encode
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
STAR = encode(draw_shape("green", (40, 160, 60), "star", x=0.5), "PNG")


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("lenient")
    options = {
        "truncate": True,
        "allow_private_media": True,
        "json_additional_properties": "allow",
        "scheduling_policy": "priority",
        "webui_images": True,
        "parse_special": "off",
        "enable_force_include_usage": True,
        "return_tokens_as_token_ids": True,
    }
    given = settings | {"spool": folder / "spool", **options}
    names = {"MINDIE_MM_SERVED_MODEL_NAME": "first, second/name", "MINDIE_MM_ANY_MODEL_NAME": "true"}
    with running_service(given, folder / "log", environment=names) as running:
        yield running
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir()), "request directories are left"


@pytest_asyncio.fixture(scope="module")
async def image_url() -> AsyncIterator[str]:
    """Yield the URL of an image on a web server at a loopback address."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=STAR)

    app = web.Application()
    app.router.add_get("/star.png", answer)
    async with TestServer(app, host="127.0.0.1") as running:
        yield f"http://127.0.0.1:{running.port}/star.png"


def chat(media: list[str], text: str, **changes: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in media]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | changes


def post(service: RunningService, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx2.post(service.url + path, json=body, timeout=300)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_priorities_are_accepted(lenient: RunningService, service: RunningService) -> None:
    body = chat([], "Hello!", priority=-5)
    assert post(lenient, CHAT, body)["usage"]["completion_tokens"] == 4
    message = post(service, CHAT, body, 400)["error"]["message"]
    assert message == "priority=-5 must be 0 unless --scheduling-policy priority is set"


def test_json_objects_may_have_other_properties(lenient: RunningService, service: RunningService) -> None:
    """Because of a bias against `}`, the model adds a property if this is allowed. `strict` always forbids this."""
    (brace,) = post(service, "/tokenize", {"prompt": "}"})["tokens"]
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}

    def answer(asked: RunningService, **strict: bool) -> str:
        form = {"type": "json_schema", "json_schema": {"schema": schema, **strict}}
        body = chat([], "Hello!", response_format=form, logit_bias={str(brace): -100}, max_tokens=12, ignore_eos=False)
        return str(post(asked, CHAT, body)["choices"][0]["message"]["content"])

    assert answer(lenient).startswith('{"a": 1, "')
    assert answer(lenient, strict=False).startswith('{"a": 1, "')
    assert answer(lenient, strict=True) == answer(service) == answer(service, strict=False) == '{"a": 1}'


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_all_streams_report_the_usage(lenient: RunningService, options: dict[str, bool] | None) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, prompt in ((CHAT, chat), ("/v1/completions", {"prompt": "Hi"})):
        body = {**prompt, "max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": options}
        answer = httpx2.post(lenient.url + path, json=body).raise_for_status().text
        *chunks, last, done = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        assert all(json.loads(chunk)["usage"]["prompt_tokens"] for chunk in chunks)
        assert (json.loads(last)["choices"], json.loads(last)["usage"]["completion_tokens"]) == ([], 3)


def test_tokens_are_written_as_ids_unless_the_request_refuses(lenient: RunningService) -> None:
    body = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True, "logprobs": 0}
    for asked, expected in ((None, True), (True, True), (False, False)):
        given = body | {"return_tokens_as_token_ids": asked}
        answer = httpx2.post(lenient.url + "/v1/completions", json=given).raise_for_status().json()
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        assert [token.startswith("token_id:") for token in tokens] == [expected] * 2


def test_control_tokens_of_raw_prompts_are_text_unless_the_request_parses_them(lenient: RunningService) -> None:
    def count(**fields: Any) -> int:
        body = {"prompt": "<|im_end|>", **fields}
        found: int = httpx2.post(f"{lenient.url}/tokenize", json=body, timeout=60).json()["count"]
        return found

    assert count() == count(parse_special=False) > 1
    assert count(parse_special=True) == 1


def test_a_model_may_have_several_names_or_any(lenient: RunningService) -> None:
    with openai.OpenAI(base_url=f"{lenient.url}/v1", api_key="none", max_retries=0) as client:
        assert [card.id for card in client.models.list()] == ["first", "second/name"]
        assert client.models.retrieve("second/name").id == "second/name"
        for name in ("first", "second/name", "gpt-3.5-turbo"):
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hello!"}], max_tokens=2
            )
            assert answer.model == "first"
        with pytest.raises(openai.NotFoundError, match="this service serves 'first' or 'second/name'"):
            client.models.retrieve("third")
    assert lenient.model == "first"
    assert 'model_name="first"' in httpx2.get(f"{lenient.url}/metrics").text


def test_truncation_never_cuts_through_an_image(lenient: RunningService, red_square: str) -> None:
    limit = lenient.get("/v1/models")["data"][0]["max_model_len"]
    room = limit - 4
    short, longer = (post(lenient, "/tokenize", chat([red_square], "?" + " a" * n)) for n in (10, 11))
    pad = max(short["tokens"], key=short["tokens"].count)
    start, num_pads = short["tokens"].index(pad), short["tokens"].count(pad)
    per_word = longer["count"] - short["count"]
    # The number of words is chosen so that the cut is inside the image. The truncated prompt then starts after the
    # token that ends the image.
    num_words = 10 + (room + start + num_pads // 2 - short["count"]) // per_word
    whole = short["count"] + (num_words - 10) * per_word
    assert start < whole - room < start + num_pads
    answer = post(lenient, CHAT, chat([red_square], "?" + " a" * num_words))
    assert answer["usage"]["prompt_tokens"] == whole - (start + num_pads + 1)
    assert lenient.wait_until_free()["blocks"] == 0


def test_a_prompt_too_long_is_truncated(service: RunningService, lenient: RunningService, red_square: str) -> None:
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    text = "red square " * limit
    message = post(service, CHAT, chat([red_square], text), 400)["error"]["message"]
    assert message.startswith(
        f"This model's maximum context length is {limit} tokens; the request needs 4 output tokens, and the prompt"
    )
    assert message.endswith(f"the limit is {limit - 4}")
    answer = post(lenient, CHAT, chat([red_square], text))
    assert answer["usage"]["prompt_tokens"] == limit - 4
    assert answer["usage"]["total_tokens"] == limit
    assert answer["choices"] == post(lenient, CHAT, chat([], text))["choices"], "the image was the oldest"
    assert lenient.wait_until_free()["blocks"] == 0


async def test_media_at_a_private_address_need_the_setting(
    service: RunningService, lenient: RunningService, image_url: str
) -> None:
    body = chat([image_url], "What is in the image?")
    answer = await asyncio.to_thread(post, lenient, CHAT, body)
    assert answer["usage"]["completion_tokens"] == 4
    refused = await asyncio.to_thread(post, service, CHAT, body, 400)
    assert refused["error"]["message"].endswith(
        "its address is not public. Send the data instead, or start the service with --allow-private-media"
    )
    inline = chat([base64.b64encode(STAR).decode()], "What is in the image?")
    same = await asyncio.to_thread(post, service, CHAT, inline)
    assert answer["choices"] == same["choices"]
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


def children(service: RunningService, module: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(service.process.pid).children() if module in child.cmdline()]


def test_texts_of_chats_and_items_may_have_images(lenient: RunningService, red_square: str) -> None:
    """This test runs after the tests for schemas.

    They fork the process that checks schemas, and a fork would keep the memory of this test's image mapped.
    """
    tag = f'Look: <img src="{red_square}"> What?'
    image = {"type": "image_url", "image_url": {"url": red_square}}
    parts = [{"type": "text", "text": "Look: "}, image, {"type": "text", "text": " What?"}]
    expected = post(lenient, "/tokenize", {"messages": [{"role": "user", "content": parts}]})["tokens"]
    for content in (tag, [{"type": "text", "text": tag}]):
        assert post(lenient, "/tokenize", {"messages": [{"role": "user", "content": content}]})["tokens"] == expected
    assert post(lenient, "/tokenize", {"inputs": [{"text": tag}]})["tokens"] == expected
    body = {"temperature": 0, "max_tokens": 4}
    one, other = (
        post(lenient, CHAT, {"messages": [{"role": "user", "content": content}], **body})["choices"][0]["message"]
        for content in (tag, parts)
    )
    assert one == other
    message = post(lenient, CHAT, {"messages": [{"role": "user", "content": tag * 3}] * 2}, 400)["error"]["message"]
    assert message == "the prompt has more images than the limit of 4"


def wait_for_health(service: RunningService, status: int) -> httpx2.Response:
    deadline = time.monotonic() + 60
    while (answer := httpx2.get(f"{service.url}/health", timeout=300)).status_code != status:
        assert time.monotonic() < deadline, answer.text
    return answer


def test_the_service_is_unhealthy_until_killed_tokenizers_are_replaced(
    lenient: RunningService, red_square: str
) -> None:
    post(lenient, CHAT, chat([red_square], "What?"))
    for child in children(lenient, "mindie_mm.tokenize.stage.tokenizer_process"):
        child.kill()
    error = wait_for_health(lenient, 503).json()["error"]
    assert "the tokenizer process died" in error["message"]
    assert httpx2.get(f"{lenient.url}/health/live").status_code == 200
    wait_for_health(lenient, 200)
    processes = [lenient.process.pid, *(child.pid for child in psutil.Process(lenient.process.pid).children())]
    assert removed_arenas(processes) == set(), "where /dev/shm is small, the next arena would find no room"
    assert post(lenient, CHAT, chat([red_square], "What?"))["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_a_dead_engine_is_replaced_and_all_answers_continue(lenient: RunningService, red_square: str) -> None:
    limit = lenient.get("/v1/models")["data"][0]["max_model_len"]
    body = chat([red_square], "What?", max_tokens=limit // 2)
    expected = post(lenient, CHAT, chat([red_square], "What?"))["choices"]
    host = urlsplit(lenient.url)
    data = json.dumps(body | {"stream": True}).encode()
    with (
        socket.create_connection((str(host.hostname), host.port or 80), timeout=300) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        started_before = metric(lenient, "time_to_first_token_seconds_count")
        whole = pool.submit(post, lenient, CHAT, body)
        stream.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode())
        stream.sendall(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: metric(lenient, "time_to_first_token_seconds_count") >= started_before + 2)
        (engine,) = children(lenient, "mindie_mm.engine.process.engine_process")
        engine.kill()
        error = wait_for_health(lenient, 503).json()["error"]
        assert error["type"] == "ServiceUnavailableError"
        assert "engine process" in error["message"]
        assert httpx2.get(f"{lenient.url}/health/live").status_code == 200
        assert post(lenient, CHAT, chat([red_square], "What?"))["choices"] == expected, "one that comes meanwhile waits"
        received = b""
        while b"data: [DONE]" not in received:
            received += stream.recv(1 << 16)
        assert b"HTTP/1.1 200" in received
        assert b'"error"' not in received
        assert f'"completion_tokens":{limit // 2}'.encode() in received
        assert whole.result()["usage"]["completion_tokens"] == limit // 2
    wait_for_health(lenient, 200)
    assert lenient.wait_until_free()["blocks"] == 0
