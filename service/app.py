"""The FastAPI application over a worker."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from mindie_mm.errors import InputError, SharedMemoryError, os_errors_as
from mindie_mm.media.fetch.http_url import encoded_domain
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.settings.config import ServiceConfig, require_media_dir
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm import arenas_of, make_spool, require_spool
from mindie_mm.shm.requests.spool import require_locks
from mindie_mm.worker.worker import Worker
from service.http import errors, page
from service.http.access import Access, OwnHost, is_loopback
from service.middleware import Middleware
from service.request.admission import Admission
from service.request.media import MediaPolicy
from service.request.quota import SpoolProbe
from service.request.state import Service
from service.request.token_text import TokenTexts
from service.routes import chat, completions, generate, health, infer, models, tokens
from service.routes.generate import GenerateEvent
from service.routes.infer import InferEvent
from service.schemas.description import describe
from service.schemas.openai_answers import ChatCompletionChunk, Completion
from service.telemetry.metrics import Metrics
from service.telemetry.reclaim import reclaiming
from service.telemetry.tracing import Tracer

_ANY_PORT = ":*"
_CACHED = "models--"
_EVENTS = (ChatCompletionChunk, Completion, InferEvent, GenerateEvent)


def create_app(worker: Worker, config: ServiceConfig, tracer: Tracer | None = None) -> FastAPI:
    """The application; worker and tracer stay the caller's, who starts and closes them.

    The folders that it needs are there: `require_places`.
    """
    model_name = config.served_model_name or checkpoint_name(worker.config.model or EMBEDDED)
    admission = Admission(config.max_concurrent_requests, config.request_timeout_s)
    metrics = Metrics(model_name)
    metrics.watch(lambda: worker.engine.stats)
    metrics.watch_processes(worker)
    metrics.watch_arenas(lambda: arenas_of(worker.tokenizer_stage.pids))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        spool = config.spool or default_spool()
        async with reclaiming(spool, config.reclaim_interval_s):
            app.state.service = Service(
                worker=worker,
                config=config,
                model_name=model_name,
                spool=spool,
                media=MediaPolicy(config),
                spool_probe=SpoolProbe(spool),
                admission=admission,
                metrics=metrics,
                tokens=TokenTexts(worker.tokenizer),
                created=int(time.time()),
            )
            yield
            await admission.stop(grace_s=0)

    app = FastAPI(
        title="mindie_mm",
        version=version("mindie_mm"),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load their scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # to the Host that the client names, and by http: what it posts would go there in clear
    )
    # The last one added is the outermost: a browser's preflight bears no key.
    if config.api_key:
        app.add_middleware(Access, keys=config.api_key)
    elif is_loopback(config.host):
        app.add_middleware(OwnHost)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in config.cors_origin if not origin.endswith(_ANY_PORT)],
            allow_origin_regex=_any_port(config.cors_origin),
            allow_private_network=True,  # the operator has listed the origin
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Middleware, config=config, admission=admission, metrics=metrics, tracer=tracer)
    errors.install(app)
    for module in (chat, completions, infer, generate, models, tokens, health):
        app.include_router(module.router, responses=errors.RESPONSES)
    if config.web_page:
        app.include_router(page.router)
    describe(app, _EVENTS, keys=bool(config.api_key))
    return app


def _any_port(origins: Sequence[str]) -> str | None:
    """Return a regular expression for the `origins` with any port, or None if there are none.

    The port is optional in it, because browsers omit the scheme's default port.
    """
    names = [re.escape(origin.removesuffix(_ANY_PORT)) for origin in origins if origin.endswith(_ANY_PORT)]
    return rf"(?:{'|'.join(names)})(?::\d+)?" if names else None


def require_places(config: ServiceConfig) -> None:
    """Create the spool if it is missing, and check the folder and the domains that media may come from.

    Raises:
        SharedMemoryError: The spool cannot be used.
        InputError: The spool's name, the media folder or a media domain is wrong.

    """
    spool = config.spool or default_spool()
    try:
        str(spool).encode()
    except UnicodeEncodeError:
        raise InputError(f"the spool's name, {os.fsencode(spool)!r}, is not UTF-8; choose another folder") from None
    make_spool(spool)
    require_spool(spool)
    with os_errors_as(SharedMemoryError, f"spool {spool} cannot be written"):
        tempfile.TemporaryDirectory(dir=spool).cleanup()
        require_locks(spool)
    require_media_dir(config)
    for domain in config.allowed_media_domains:
        encoded_domain(domain)


def checkpoint_name(checkpoint: Path) -> str:
    """The name of a checkpoint's folder, or of a link to it; `owner/name` of one in Hugging Face's cache."""
    folder = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - the name of a link is its user's choice
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(_CACHED):
        return repository.removeprefix(_CACHED).replace("--", "/")  # which no repository has in its name
    return folder.name
