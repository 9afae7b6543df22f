"""/v1/batches, OpenAI's Batch API."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from mindie_mm.errors import InputError, blaming
from mindie_mm.processes.tasks import in_thread
from service.batches.record import Batch, BatchObject, Endpoint
from service.batches.store import new_id
from service.files.store import BATCH_FILES_S
from service.http.json_response import JSONResponse
from service.request.incoming import IncomingDep
from service.request.paging import Page, page_of
from service.schemas.body import WHOLE, Fields, pass_over_fields
from service.schemas.description import answered

router = APIRouter()

_MAX_METADATA = 16
_WINDOW = r"^[1-9][0-9]{0,5}[smhd]$"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def _few(given: Any) -> Any:
    """Refuse metadata with too many entries before each of them is checked."""
    if isinstance(given, dict) and len(given) > _MAX_METADATA:
        raise PydanticCustomError("too_many", "has more entries than the limit of {limit}", {"limit": _MAX_METADATA})
    return given


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_MAX_METADATA),
    BeforeValidator(_few),
]


class OutputExpiry(Fields):
    """Time after which the files of the output are removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=BATCH_FILES_S), WHOLE]


class BatchBody(Fields):
    """POST /v1/batches."""

    input_file_id: str
    """Id of a file with the purpose `batch`."""
    endpoint: Endpoint
    """Endpoint of all requests in the file."""
    completion_window: Annotated[str, Field(pattern=_WINDOW)]
    """Time after which requests without an answer are given up: 24h, or another time such as 90m, up to 30d."""
    metadata: Metadata | None = None
    """Returned with the batch."""
    output_expires_after: OutputExpiry | None = None


@router.post("/v1/batches", responses=answered(BatchObject))
async def create(body: BatchBody, incoming: IncomingDep) -> Response:
    """Run the requests of a file below all other requests. The answers are in files when the batch has ended."""
    service, owner = incoming.service, incoming.file_owner
    pass_over_fields(body.unknown, strict=service.config.strict)
    now = time.time()
    batch = Batch(
        id=new_id(),
        endpoint=body.endpoint,
        model=service.model_name,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created=now,
        expires_at=int(now) + _window_s(body.completion_window),
        metadata=body.metadata,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else BATCH_FILES_S,
    )
    try:
        msgspec.json.encode(batch)
    except UnicodeEncodeError as error:
        raise InputError("the request contains a lone surrogate") from error
    with blaming("input_file_id"):
        purpose = (await in_thread(lambda: service.files.get(owner, body.input_file_id))).purpose
        if purpose != "batch":
            raise InputError(f"the file has the purpose {purpose}; upload it with the purpose batch")
        await in_thread(lambda: service.batches.store.create(owner, batch))
    service.batches.start(owner, batch)
    return JSONResponse(batch.described())


def _window_s(window: str) -> int:
    """Return the length of a completion window in seconds."""
    assert re.match(_WINDOW, window)
    window_s = int(window[:-1]) * _UNITS_S[window[-1]]
    if window_s > BATCH_FILES_S:
        raise InputError(f"completion_window={window} must be at most 30d", param="completion_window")
    return window_s


@router.get("/v1/batches", responses=answered(Page[BatchObject]))
async def batches(
    incoming: IncomingDep, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """Return the batches of the API key, page by page. The newest come first."""
    store, owner = incoming.service.batches.store, incoming.file_owner
    found = (await in_thread(lambda: store.batches(owner)))[::-1]
    return JSONResponse(page_of([batch.described() for batch in found], after, limit))


@router.get("/v1/batches/{batch_id}", responses=answered(BatchObject))
async def retrieve(batch_id: str, incoming: IncomingDep) -> Response:
    """Return a batch."""
    store, owner = incoming.service.batches.store, incoming.file_owner
    _, batch = await in_thread(lambda: store.get(owner, batch_id))
    return JSONResponse(batch.described())


@router.post("/v1/batches/{batch_id}/cancel", responses=answered(BatchObject))
async def cancel(batch_id: str, incoming: IncomingDep) -> Response:
    """Cancel a batch. Answers so far are in the files of its output."""
    running, owner = incoming.service.batches, incoming.file_owner
    folder, batch = await in_thread(lambda: running.store.get(owner, batch_id))
    if batch.has_ended:
        raise InputError(f"the batch is {batch.status}; only a batch in progress can be cancelled")
    await in_thread(folder.cancel)
    running.cancel(owner, batch)
    _, batch = await in_thread(lambda: running.store.get(owner, batch_id))
    return JSONResponse(batch.described())
