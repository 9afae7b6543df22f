"""Stored chats and vLLM's answers to them, so that tests need no vLLM.

`chats.json` has the bodies of requests, whose images are files in `media`. A file in `answers` has the answers for the
small checkpoint that the tests for a family write.
"""

from __future__ import annotations

import base64
import json
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEDIA, CHATS, ANSWERS = HERE / "media", HERE / "chats.json", HERE / "answers"
VIDEO_FAMILIES = frozenset({"qwen2vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"})
"""Families that take videos in vLLM. Only they have answers to videos."""
_MARK = "file:"
_PREFIX = "data:image/x;base64,"


def store(name: str, body: Any) -> Any:
    """Return a body whose data URLs are written to files, and replaced with the names of the files."""
    files = 0

    def walk(value: Any) -> Any:
        nonlocal files
        if isinstance(value, dict):
            return {key: walk(part) for key, part in value.items()}
        if isinstance(value, list):
            return [walk(part) for part in value]
        if isinstance(value, str) and value.startswith(_PREFIX):
            data = base64.b64decode(value.removeprefix(_PREFIX))
            same = next((path for path in MEDIA.iterdir() if path.read_bytes() == data), None)
            path = same or MEDIA / f"{name.replace(' ', '_').replace(';', '')}{f'-{files}' if files else ''}"
            files += 1
            path.write_bytes(data)
            return _MARK + path.name
        return value

    return walk(body)


def stored_chats() -> dict[str, Any]:
    """Return the body of each chat by name, with data URLs."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(part) for key, part in value.items()}
        if isinstance(value, list):
            return [walk(part) for part in value]
        if isinstance(value, str) and value.startswith(_MARK):
            data = (MEDIA / value.removeprefix(_MARK)).read_bytes()
            return _PREFIX + base64.b64encode(data).decode()
        return value

    chats: dict[str, Any] = walk(json.loads(CHATS.read_text()))
    return chats


def has_video(body: dict[str, Any]) -> bool:
    """Return whether a chat has a video."""
    return '"video_url"' in json.dumps(body)


def runs(ids: list[int]) -> list[int | list[int]]:
    """Return token ids in which each run of equal ids is [id, length]. Single ids stay as they are."""
    lengths = [(token, len([*run])) for token, run in groupby(ids)]
    return [token if length == 1 else [token, length] for token, length in lengths]


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that routers use: ids, hashes and ranges, or the status of a refusal."""
    if "token_ids" not in answer:
        return {"status": answer["status"]}
    features = answer["features"]
    kept = features and {name: features[name] for name in ("mm_hashes", "mm_placeholders")}
    return {"token_ids": runs(answer["token_ids"]), "features": kept}
