"""/v1/files, OpenAI's Files API."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response
from typing_extensions import TypedDict

from mindie_mm.errors import InputError
from mindie_mm.processes.tasks import in_thread
from mindie_mm.shm import request_directory
from service.files.store import BATCH_FILES_S, FileObject
from service.http.json_response import JSONResponse
from service.request.incoming import IncomingDep
from service.request.paging import Page, page_of
from service.request.quota import room_to_spool
from service.request.upload import Upload, receive_upload
from service.schemas.description import answered, form

router = APIRouter()

PURPOSES = ("batch", "user_data")
MAX_PAGE = 10_000
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 30 * 24 * 3600
_MAX_SHOWN = 40
_FORM = form(
    {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [*PURPOSES]},
        "expires_after[anchor]": {"type": "string", "const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": _MIN_EXPIRY_S, "maximum": _MAX_EXPIRY_S},
    },
    ["file", "purpose"],
)


class DeletedFile(TypedDict):
    """The response of DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"]
    deleted: bool


@router.post("/v1/files", responses=answered(FileObject), openapi_extra=_FORM)
async def upload(request: Request, incoming: IncomingDep) -> Response:
    """Store a file. It is written to disk while it arrives.

    A file with the purpose `batch` is removed after 30 days, unless `expires_after` says otherwise.
    """
    store, owner, max_bytes = incoming.service.files, incoming.file_owner, incoming.service.config.max_file_bytes
    used = await in_thread(lambda: store.require_room(owner))
    with store.receiving(owner, used) as spend, room_to_spool(), request_directory(store.uploads) as directory:
        receiving = receive_upload(request, directory.path, max_bytes, setting="--max-file-bytes", spend=spend)
        async with receiving as received:
            purpose = _purpose(received)
            expires_after_s = _expires_after(received, purpose)
            stored = await in_thread(
                lambda: store.add(
                    owner,
                    received.path,
                    filename=received.filename or "file",
                    purpose=purpose,
                    expires_after_s=expires_after_s,
                )
            )
    return JSONResponse(stored.described())


def _purpose(received: Upload) -> str:
    purpose = received.field("purpose")
    if purpose not in PURPOSES:
        found = "purpose is missing; it" if purpose is None else f"purpose={purpose[:_MAX_SHOWN]!r}"
        raise InputError(f"{found} must be {' or '.join(PURPOSES)}", param="purpose")
    return purpose


def _expires_after(received: Upload, purpose: str) -> int | None:
    """Return the time in seconds after which a file is removed, or None if it stays."""
    anchor, seconds = received.field("expires_after[anchor]"), received.field("expires_after[seconds]")
    if anchor is None and seconds is None:
        return BATCH_FILES_S if purpose == "batch" else None
    if anchor != "created_at":
        raise InputError("expires_after[anchor] must be created_at", param="expires_after")
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise InputError("expires_after[seconds] must be a whole number of seconds", param="expires_after")
    if not _MIN_EXPIRY_S <= int(seconds) <= _MAX_EXPIRY_S:
        raise InputError(
            f"expires_after[seconds]={int(seconds)} must be from {_MIN_EXPIRY_S} to {_MAX_EXPIRY_S}",
            param="expires_after",
        )
    return int(seconds)


@router.get("/v1/files", responses=answered(Page[FileObject]))
async def files(
    incoming: IncomingDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """Return the files of the API key, page by page. The newest come first unless `order` is asc."""
    store = incoming.service.files
    found = await in_thread(lambda: store.files(incoming.file_owner))
    listed = [stored.described() for stored in found if purpose in (None, stored.purpose)]
    if order == "desc":
        listed.reverse()
    return JSONResponse(page_of(listed, after, limit))


@router.get("/v1/files/{file_id}", responses=answered(FileObject))
async def retrieve(file_id: str, incoming: IncomingDep) -> Response:
    """Return the description of a file."""
    store = incoming.service.files
    stored = await in_thread(lambda: store.get(incoming.file_owner, file_id))
    return JSONResponse(stored.described())


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def content(file_id: str, incoming: IncomingDep) -> Response:
    """Return the content of a file. Browsers save it, and never show it as a page of this service."""
    store = incoming.service.files
    stored = await in_thread(lambda: store.get(incoming.file_owner, file_id))
    return FileResponse(
        store.content(stored, incoming.file_owner),
        media_type="application/octet-stream",
        filename=stored.filename,
        headers={"X-Content-Type-Options": "nosniff"},
    )


@router.delete("/v1/files/{file_id}", responses=answered(DeletedFile))
async def delete(file_id: str, incoming: IncomingDep) -> Response:
    """Remove a file. A batch that has begun keeps its input."""
    store = incoming.service.files
    await in_thread(lambda: store.delete(incoming.file_owner, file_id))
    return JSONResponse(DeletedFile(id=file_id, object="file", deleted=True))
