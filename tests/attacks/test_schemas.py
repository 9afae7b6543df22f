"""Attacks with short JSON schemas whose compilation takes seconds or minutes."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from mindie_mm.structured.schema_check import COMPILE_S
from tests.attacks.conftest import CHAT, Attacked
from tests.processor_time import processor_s

LONG = [
    {"type": "integer", "multipleOf": 99991},
    {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1000003}}, "required": ["a"]},
    {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}|.*b.{{{i + 3}}})$"} for i in range(60)]},
]


def asking(schema: dict[str, Any], n: int = 1) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": n, "response_format": form}


@pytest.mark.parametrize("schema", LONG)
def test_a_schema_that_compiles_too_long_is_refused(attacked: Attacked, schema: dict[str, Any]) -> None:
    attacked.http.post(CHAT, json=asking({"type": "boolean"}))  # starts the compiler process
    before = processor_s(attacked.service.process.pid)
    answer = attacked.http.post(CHAT, json=asking(schema, n=64))
    assert answer.status_code == 400
    assert f"more processor time than the limit of {COMPILE_S} s" in answer.json()["error"]["message"]
    assert processor_s(attacked.service.process.pid) - before < 0.5
    attacked.is_right()


def test_clients_that_leave_do_not_occupy_the_compiler(attacked: Attacked) -> None:
    attacked.http.post(CHAT, json=asking({"type": "boolean"}))
    before = processor_s(attacked.service.process.pid)
    sockets = []
    for i in range(40):
        body = json.dumps(asking({"type": "integer", "multipleOf": 1000003 + i})).encode()
        sockets.append(one := socket.create_connection((attacked.http.base_url.host, attacked.http.base_url.port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for one in sockets:
        one.close()
    assert attacked.http.get("/health").status_code == 200
    attacked.is_right()
    assert processor_s(attacked.service.process.pid) - before < 40 * COMPILE_S, (
        "schemas of disconnected clients must not be compiled"
    )
