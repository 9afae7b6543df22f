"""Reads files of /v1/files that requests refer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pybase64

from mindie_mm.errors import naming
from mindie_mm.processes.tasks import in_thread
from service.request.incoming import Incoming


async def stored_file(file_id: str, incoming: Incoming) -> dict[str, str]:
    """Return name and content of a file as `filename` and `file_data`. The content counts as part of the body.

    Raises:
        NotStored: The API key of the request has no such file.
        HTTPException: The body is too long with this content, or the bodies of all requests are.

    """
    store, owner = incoming.service.files, incoming.file_owner
    stored = await in_thread(lambda: store.get(owner, file_id))
    incoming.hold(stored.bytes * 4 // 3)
    data = await in_thread(lambda: pybase64.b64encode(store.content(stored, owner).read_bytes()).decode())
    return {"filename": stored.filename, "file_data": data}


async def with_stored_files(messages: Sequence[Any], incoming: Incoming) -> list[Any]:
    """Return messages of a chat with the content of their files in place of `file_id`. Raise as `stored_file` does.

    A service that stores no files leaves the messages as they are.
    """
    if incoming.service.file_store is None:
        return [*messages]
    return [await _filled(message, f"messages[{index}]", incoming) for index, message in enumerate(messages)]


async def _filled(message: Any, where: str, incoming: Incoming) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(_file_id, content)):
        return message
    parts = []
    for index, part in enumerate(content):
        if (file_id := _file_id(part)) is not None:
            with naming(f"{where}.content[{index}]"):
                named = {name: value for name, value in part["file"].items() if value and name != "file_id"}
                part = {**part, "file": await stored_file(file_id, incoming) | named}  # noqa: PLW2901 - with its content
        parts.append(part)
    return {**message, "content": parts}


def _file_id(part: Any) -> str | None:
    """Return the id of the stored file in a content part, or None if there is none."""
    file = part.get("file") if isinstance(part, dict) else None
    file_id = file.get("file_id") if isinstance(file, dict) else None
    return file_id if isinstance(file_id, str) else None
