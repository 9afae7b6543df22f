"""Reads the files of /v1/files that the items of a conversation refer to."""

from __future__ import annotations

from collections.abc import Sequence

from mindie_mm.errors import naming
from service.request.incoming import Incoming
from service.request.stored_files import stored_file
from service.responses.body import CustomOutputItem, FilePart, FunctionOutputItem, InputItem, MessageItem, Part


async def with_stored_files(
    items: Sequence[tuple[InputItem, str]], incoming: Incoming
) -> Sequence[tuple[InputItem, str]]:
    """Return items with the content of their files in place of `file_id`. The contents count as part of the body.

    Raises:
        NotStored: The API key of the request has no such file.
        HTTPException: The body is too long with these contents, or the bodies of all requests are.

    """
    return [(await _filled(item, where, incoming), where) for item, where in items]


async def _filled(item: InputItem, where: str, incoming: Incoming) -> InputItem:
    match item:
        case MessageItem(content=parts) if any(map(_refers, parts)):
            return item.model_copy(update={"content": await _read(parts, where, incoming)})
        case FunctionOutputItem(output=parts) | CustomOutputItem(output=parts) if any(map(_refers, parts)):
            return item.model_copy(update={"output": await _read(parts, where, incoming)})
    return item


def _refers(part: Part) -> bool:
    return isinstance(part, FilePart) and part.file_id is not None


async def _read(parts: Sequence[Part], where: str, incoming: Incoming) -> list[Part]:
    read: list[Part] = []
    for part in parts:
        if isinstance(part, FilePart) and part.file_id is not None:
            with naming(where):
                file = await stored_file(part.file_id, incoming)
            named = {"file_id": None, **file, "filename": part.filename or file["filename"]}
            part = part.model_copy(update=named)  # noqa: PLW2901 - the part with its content
        read.append(part)
    return read
