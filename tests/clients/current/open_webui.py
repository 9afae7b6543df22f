"""Copies of the requests of Open WebUI 0.12 for knowledge bases and dictation. Its chats are in tests/service."""

from __future__ import annotations

import httpx2
from scenarios import AUDIO_FILE, BASE_URL, HELLO, KEY, MODEL, WHAT, report

HEADERS = {"Authorization": f"Bearer {KEY}", "X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-User-Role": "user"}
CLIENT = httpx2.Client(headers=HEADERS, timeout=60)


def embeddings() -> None:
    sent = {"input": [HELLO, WHAT], "model": MODEL}
    data = CLIENT.post(f"{BASE_URL}/embeddings", json=sent).raise_for_status().json()["data"]
    assert [len(one["embedding"]) > 1 for one in data] == [True, True]


def rerank() -> None:
    sent = {"model": MODEL, "query": HELLO, "documents": [WHAT, HELLO], "top_n": 2}
    results = CLIENT.post(f"{BASE_URL}/rerank", json=sent).raise_for_status().json()["results"]
    scores = {result["index"]: result["relevance_score"] for result in results}
    assert scores[1] > scores[0]


def dictation() -> None:
    for language in ({"language": "en"}, {}):
        files = {"file": ("recording.wav", AUDIO_FILE.read_bytes(), "audio/wav")}
        answer = CLIENT.post(f"{BASE_URL}/audio/transcriptions", files=files, data={"model": MODEL, **language})
        assert answer.raise_for_status().json()["text"]


def responses() -> None:
    """A chat of a connection whose API type is Responses."""
    turn = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]}
    sent = {"model": MODEL, "input": [turn], "stream": True}
    events = CLIENT.post(f"{BASE_URL}/responses", json=sent).raise_for_status().text
    assert "event: response.completed" in events


report(globals())
