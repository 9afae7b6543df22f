"""Tests for requests that were recorded from Open WebUI 0.12 and Continue 1.5. Their texts have been shortened."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

RECORDED = Path(__file__).with_name("recorded_chats")


def requests() -> list[Any]:
    """Return the bodies of all requests. Each file has the client's tools only once, and they are filled in here."""
    made = []
    for file in sorted(RECORDED.glob("*.json")):
        recorded = json.loads(file.read_text(encoding="utf-8"))
        for number, body in enumerate(recorded["requests"]):
            tools = {"tools": recorded["tools"]} if "tools" in body else {}
            made.append(pytest.param(body | tools, id=f"{file.stem}-{number}"))
    return made


@pytest.mark.parametrize("body", requests())
def test_a_recorded_request_is_answered(http: httpx2.Client, red_square: str, body: dict[str, Any]) -> None:
    sent = json.dumps(body).replace("$picture", red_square)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-none"}
    answer = http.post("/v1/chat/completions", content=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"]
        assert choice["finish_reason"] in {"stop", "length"}
        return
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *chunks, usage = map(json.loads, lines)
    assert (usage["choices"], usage["usage"]["total_tokens"] > 0) == ([], True)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2] is None
    assert chunks[-1]["choices"][0]["finish_reason"] in {"stop", "length"}
