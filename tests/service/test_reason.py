"""Tests that the access log shows why a request was refused, without quoting the request."""

import json
import re
from typing import Any
from urllib.parse import quote

import pytest

from service.http.reason import MAX_CHARACTERS, loggable
from tests.watching import wait_until
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
FORGED = "1999-01-01T00:00:00Z INFO forged"
SECRET = f'Ozymandias\' password is "swordfish"\r\n{FORGED}\x1b[2K \u4f60\u597d\u4e16\u754c in gro\u00dfer Eile'
PIECE = 12
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
USER = {"role": "user", "content": SECRET}


@pytest.fixture
def reason(service: RunningService, http: Any) -> Any:
    """Return a function that sends a request, and returns its status and its line in the access log."""

    def sent(path: str, body: Any, **more: Any) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        answer = http.request(more.pop("method", "POST"), path, content=data, headers=headers, **more)
        one = answer.headers["x-request-id"]

        def line() -> str | None:
            log = service.log.read_text(encoding="utf-8", errors="replace")
            return next((line for line in log.splitlines() if one in line and "service.access" in line), None)

        wait_until(lambda: line() is not None)
        return answer.status_code, line() or ""

    return sent


def test_the_reason_of_a_refusal_is_in_the_access_line(reason: Any) -> None:
    for path, body, status, expected in (
        (CHAT, HELLO | {"max_tokens": 2**40}, 400, "max_tokens: Input should be less than or equal to 2147483647"),
        (CHAT, HELLO | {"max_tokens": 10**6}, 400, "maximum context length is"),
        (CHAT, HELLO | {"num_beams": 4}, 400, "num_beams is not supported, except 1"),
        (CHAT, HELLO | {"model": "gpt-4o"}, 404, "does not exist; this service serves"),
        ("/detokenize", {"tokens": [-1]}, 400, "token id -1 is outside the vocabulary"),
        ("/infer", {"inputs": ""}, 400, "inputs is empty"),
        (
            "/generate",
            b'{"inputs": "a"',
            400,
            "the body is not valid JSON: Expecting '[...]' delimiter at character 14",
        ),
        (CHAT + "x", {}, 404, "there is no path"),
    ):
        got, line = reason(path, body)
        assert got == status
        assert re.search(rf" {status} \d+\.\d+ s: .*{re.escape(expected)}", line), line
    assert reason(CHAT, HELLO)[1].rstrip("]0123456789abcdef").endswith(" s ["), "a request that succeeds has no reason"


def test_a_foreign_host_is_in_the_access_line(reason: Any) -> None:
    _, line = reason("/v1/models", b"", headers={"Host": "evil.example"})
    assert line.count(": the Host header is neither an IP address nor localhost") == 1


HOSTILE: dict[str, tuple[str, Any]] = {
    **{
        name: (CHAT, HELLO | {name: SECRET})
        for name in (
            *(
                "model",
                "max_tokens",
                "temperature",
                "stop_token_ids",
                "logit_bias",
                "stream",
                "response_format",
                "seed",
            ),
            *("tools", "tool_choice", "chat_template_kwargs", "mm_processor_kwargs", "messages"),
            *("guided_regex", "guided_grammar", "guided_json", "truncation_side", "verbosity", "structural_tag"),
        )
    },
    "role": (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}),
    "a role like a name": (CHAT, {"messages": [{"role": "Ozymandias_password_swordfish!", "content": SECRET}]}),
    "a key of logit_bias": (CHAT, HELLO | {"logit_bias": {SECRET: 1}}),
    "a kind of part": (CHAT, {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]}),
    "a key of a part": ("/infer", {"inputs": [{"text": SECRET, SECRET: 1}]}),
    "a key of the body": ("/infer", {"inputs": SECRET, "parameters": SECRET}),
    "a path": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]},
    ),
    "a URL": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"image": f"http://a:swordfish-2026@127.0.0.1:1/{SECRET}"}]}]},
    ),
    "a tool": (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": SECRET}}]}),
    "a choice of a tool": (
        CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": SECRET}},
        },
    ),
    "a schema": (CHAT, {"messages": [USER], "guided_json": {"type": "string", "pattern": f"({SECRET}"}}),
    "a format": (CHAT, {"messages": [USER], "guided_json": {"type": "string", "format": SECRET}}),
    "a stop string": (CHAT, {"messages": [USER], "stop": [SECRET, ""]}),
    "a file": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "file", "file": {"file_data": SECRET, "filename": SECRET}}]}
            ]
        },
    ),
    "a tokenized prompt": ("/tokenize", {"prompt": SECRET, "messages": [USER]}),
    "a body that is not JSON": (CHAT, b'{"messages": "' + SECRET.encode()),
    "a body that is a text": (CHAT, json.dumps(SECRET).encode()),
    "the path": (f"/{quote(SECRET)}", {}),
    "the query": (f"{CHAT}?q={quote(SECRET)}", HELLO | {"n": 0}),
}


@pytest.mark.parametrize(("path", "body"), HOSTILE.values(), ids=HOSTILE)
def test_no_piece_of_a_hostile_request_reaches_the_log(
    service: RunningService, reason: Any, path: str, body: Any
) -> None:
    size = service.log.stat().st_size
    status, _ = reason(path, body)
    assert 400 <= status < 500
    with service.log.open("rb") as log:
        log.seek(size)
        lines = log.read().decode("utf-8", "replace")
    for start in range(len(SECRET) - PIECE + 1):
        assert SECRET[start : start + PIECE].casefold() not in lines.casefold(), lines
    assert "swordfish-2026" not in lines
    assert "\x1b" not in lines
    assert not [line for line in lines.splitlines() if line.startswith(FORGED)], "a forged line"


SHORT = {
    "Chinese": "我的密码是一二三",
    "four characters": "密码四七",
    "emoji": "🔑🎉 4711",
    "an accent": "Ünlü 4711é",
    "digits": "my pin 4711",
    "a word": "hunter4711",
    "escapes": "4711\\\"\n'4711",
    "a long text": "请帮我写一封给银行的信 我的账号是六二二二零二 密码是一二三四五六七八九",
    "a text with quotes": 'I\'m "4711"\tand it\'s `4711`\n\u2028é "4711"',
}
"""Secrets without a piece of 12 characters of ASCII."""


def _places(secret: str) -> list[tuple[str, Any]]:
    """Return requests that have `secret` where a refusal may quote it."""
    user: dict[str, Any] = {"role": "user", "content": secret}
    contents: list[Any] = [
        {"text": secret},
        [{"type": secret}],
        [{"type": "text", "text": secret, secret: 1}],
        [{"type": "image_url", "image_url": {"url": "/" + secret}}],
        [{"type": "image_url", "image_url": {"url": secret + "://a/b"}}],
        [{"type": "file", "file": {"filename": secret, "file_data": "data:text/plain;base64,gYCB"}}],
        [{"type": "file", "file": {"file_data": f"data:text/plain;charset={secret};base64,gYCB"}}],
    ]
    chats: list[Any] = [
        secret,
        [secret],
        [{"role": secret, "content": secret}],
        [user, {"role": "tool", "content": secret, "tool_call_id": secret}],
        *([{"role": "user", "content": content}] for content in contents),
    ]
    chat_fields = {
        "max_tokens": secret,
        "model": secret,
        "response_format": {"type": secret},
        "logit_bias": {secret: 1},
        "tool_choice": secret,
        "reasoning_effort": [secret],
        "guided_regex": "(" + secret,
        "guided_grammar": secret,
        "guided_json": {"type": secret},
        "mm_processor_kwargs": {secret: secret},
        "tools": [{"type": "function", "function": {"name": secret, "parameters": {"type": secret}}}],
    }
    return [
        *((CHAT, {"messages": chat}) for chat in chats),
        *((CHAT, {"messages": [user], name: value}) for name, value in chat_fields.items()),
        *(("/v1/completions", {"prompt": prompt}) for prompt in ({"a": secret}, [1, secret], [[secret]])),
        ("/v1/completions", {"prompt": "a", "bad_words": [secret, 3]}),
        ("/tokenize", {"messages": secret}),
        ("/detokenize", {"tokens": [secret]}),
        ("/infer", {"inputs": [secret]}),
        ("/infer", {"inputs": [{"type": "text", "text": "a", secret: 1}]}),
        ("/infer", {"inputs": [{"type": "image_url", "image_url": secret}]}),
        (f"/{quote(secret)}", {}),
    ]


@pytest.mark.parametrize(
    "secret",
    [
        # The tests for `loggable` below show the same for single messages.
        pytest.param(secret, id=name, marks=[] if name in ("Chinese", "a text with quotes") else [pytest.mark.slow])
        for name, secret in SHORT.items()
    ],
)
def test_no_short_secret_reaches_the_log(service: RunningService, http: Any, secret: str) -> None:
    """The request bodies have the secret both in UTF-8 and as escapes of JSON."""
    size = service.log.stat().st_size
    places = _places(secret)
    for path, body in places:
        for is_ascii in (False, True):
            data = json.dumps(body, ensure_ascii=is_ascii).encode()
            http.post(path, content=data, headers={"Content-Type": "application/json"})

    def lines() -> str:
        with service.log.open("rb") as log:
            log.seek(size)
            return log.read().decode("utf-8", "replace")

    wait_until(lambda: lines().count("service.access") >= 2 * len(places))
    reasons = [line.partition(" s: ")[2].rpartition(" [")[0] for line in lines().splitlines()]
    assert len([reason for reason in reasons if reason]) > len(places), "most of the requests are refused"
    for reason in reasons:
        assert reason.isascii(), reason
        assert "\\" not in reason, reason
        assert "4711" not in reason, reason


@pytest.mark.parametrize(
    ("message", "sent", "shown"),
    [
        ("max_tokens is 5; the limit is 4", {"prompt": "What is the limit?"}, "max_tokens is 5; the limit is 4"),
        ("role='a pirate of old' must be", {"role": "a pirate of old"}, "role='[...]' must be"),
        ("role='pirate' must be 'user'", {"role": "Pirate"}, "role='[...]' must be 'user'"),
        ("a SHARED prompt, twice: A SHARED PROMPT", ["a shared prompt"], "[...], twice: [...]"),
        (
            r"""it is 'it\'s "x" \n4711', not b"\x00'" or `4711`""",
            ["4711"],
            """it is '[...]', not "[...]" or `[...]`""",
        ),
        ("the models' names are ['a', 'secret'", {"key": "secret"}, "the models' names are ['a', '[...]'"),
        ("the key 'my pin 47", {"my pin 4711": 1}, "the key '[...]'"),
        ("the key 'max_token' is unknown", {"max_token": 1}, "the key 'max_token' is unknown"),
        ("Invalid type: My pin 4711 or text", ["my pin 4711", "text"], "Invalid type: [...] or text"),
        ("a caf\u00e9 by na\u00efve people", {}, "a [...]"),
        ("it has 5 \U0001f389; more", {}, "it has 5 [...]"),
        ("the key 'My secret key' is unknown", {"My secret key": 1}, "the key '[...]' is unknown"),
        ("max_completion_tokens is 0", {"max_completion_tokens": 0}, "max_completion_tokens is 0"),
        ("one\tline\rand  no more\n4711", {}, "one line and no more"),
        ("a" * 400, {}, "a" * MAX_CHARACTERS),
        ("\u0130stanbul is shared here", ["\u0130STANBUL IS SHARED HERE"], "[...]"),
    ],
)
def test_pieces_that_a_message_shares_with_a_request_are_masked(message: str, sent: Any, shown: str) -> None:
    assert loggable(message, sent).strip() == shown


def test_a_request_that_is_too_long_to_compare_has_no_reason() -> None:
    assert "too long" in loggable("a secret sentence", ["a" * 2**16] * 20 + ["a secret sentence"])
    assert loggable("a secret sentence", ["a" * 2**26, "a secret sentence"]) == "[...]"
