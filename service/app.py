"""The FastAPI application that serves a worker."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from mindie_mm.errors import InputError, SharedMemoryError, os_errors_as
from mindie_mm.media.fetch.http_url import encoded_domain
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from mindie_mm.processes.restarts import logged
from mindie_mm.settings.config import ServiceConfig, require_media_dir
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm import arenas_of, collect, make_spool, require_spool
from mindie_mm.shm.spool import require_locks
from mindie_mm.worker.worker import Worker
from service.audio.answer import TranscriptEvent
from service.batches.batches import Batches
from service.batches.call import calling
from service.batches.requests import Limits
from service.batches.run import Means
from service.batches.store import BatchStore
from service.files.store import FileStore
from service.http import errors, page
from service.http.access import Access, OwnForms, OwnHost, is_loopback
from service.http.clients import Clients
from service.messages.answer import MessageEvent
from service.messages.front import MessagesFront
from service.middleware import Middleware
from service.render.plans import Alone, Report, Shared
from service.request.admission import Admission
from service.request.chat_dialect import ChatDialect, require_formats
from service.request.fingerprint import fingerprint
from service.request.kept_media import KeptMedia
from service.request.media import MediaPolicy
from service.request.quota import SpoolProbe
from service.request.response_store import ResponseStore
from service.request.spool_folders import PlanFolder
from service.request.state import Service
from service.request.token_text import TokenTexts
from service.request.tokenizer_info import tokenizer_info
from service.responses.answer import ResponseEvent
from service.routes import (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    generate,
    health,
    infer,
    inference,
    loras,
    messages,
    models,
    render,
    rerank,
    responses,
    tokens,
    transcriptions,
)
from service.routes.generate import GenerateEvent
from service.routes.infer import InferEvent
from service.routes.inference import TokenChunk
from service.schemas.description import describe
from service.schemas.openai_answers import ChatCompletionChunk, Completion
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import Tracer

_log = logging.getLogger(__name__)

_ANY_PORT = ":*"
_EVENTS = (
    *(ChatCompletionChunk, Completion, ResponseEvent, MessageEvent, InferEvent, GenerateEvent),
    *(TranscriptEvent, TokenChunk),
)
_NO_TIMEOUT_S = 10.0**7


def create_app(
    worker: Worker,
    config: ServiceConfig,
    tracer: Tracer | None = None,
    *,
    replica: str = "",
    shared: Shared | None = None,
) -> FastAPI:
    """Create the application. The caller must start and close `worker` and `tracer`.

    Call `require_places` first. It creates the spool and checks the folders.

    Args:
        worker: The worker.
        config: Settings of the service.
        tracer: Records traces, or None.
        replica: Name of this worker among several. A later request uses it to find the responses that this worker
            stores.
        shared: What the workers of a port share. None for a port with one worker.

    """
    model_names = tuple(dict.fromkeys(config.served_model_name)) or (checkpoint_name(worker.config.model or EMBEDDED),)
    for name in model_names:
        if name in worker.loras:
            raise InputError(f"the LoRA adapter {name!r} has the name of the served model; give it another name")
    held = config.max_held_logprobs, config.max_held_bytes
    admission = Admission(config.max_concurrent_requests, config.request_timeout_s, *held)
    metrics = Metrics(model_names[0])
    chat_dialect = ChatDialect.of(worker, config)
    clients = Clients(config)
    metrics.watch_clients(lambda: clients.named)
    metrics.watch(lambda: [engine.stats for engine in worker.engine.engines])
    metrics.watch_processes(worker)
    metrics.watch_arenas(lambda: arenas_of(worker.tokenizer_stage.pids))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        spool = config.spool or default_spool()
        file_store = None if config.files_path is None else FileStore(config.files_path, config)
        spools = [spool] if file_store is None else [spool, file_store.uploads]
        async with reclaiming(spools, config.reclaim_interval_s), AsyncExitStack() as folders:
            plan_folder = PlanFolder(spool)
            folders.callback(plan_folder.close)
            service = Service(
                worker=worker,
                config=config,
                model_names=model_names,
                spool=spool,
                plan_folder=plan_folder,
                media=MediaPolicy(config),
                kept=KeptMedia(config.media_uuid_bytes),
                responses=ResponseStore(
                    config.stored_response_bytes, config.response_store_age_s, has_keys=config.has_keys
                ),
                file_store=file_store,
                spool_probe=SpoolProbe(spool),
                clients=clients,
                admission=admission,
                metrics=metrics,
                tokens=TokenTexts(worker.tokenizer),
                chat_dialect=chat_dialect,
                tokenizer_info=tokenizer_info(worker.config.model),
                fingerprint=fingerprint(worker, model_names[0]),
                created=int(time.time()),
                replica=replica,
                model_id=config.model_id or str(worker.config.model or EMBEDDED.name),
                shared=shared or Alone(config),
            )
            async with AsyncExitStack() as running:
                if file_store is not None:
                    runner = Batches(BatchStore(file_store, config.max_files_per_key), _means(service, tracer))
                    service = replace(service, batch_runner=runner)
                    await running.enter_async_context(runner.running(config.reclaim_interval_s))
                app.state.service = service
                service.shared.watch(lambda: Report(metrics.text(), len(admission)))
                yield
            await admission.stop(grace_s=0)

    app = FastAPI(
        title="mindie_mm",
        version=version("mindie_mm"),
        lifespan=lifespan,
        openapi_url=None,  # `describe` adds /openapi.json. FastAPI's documentation pages load scripts from another host
        redirect_slashes=False,  # behind a TLS proxy, a redirect would make clients repeat the body over http
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the service has its own
    )
    add_front(app, config, clients, admission, metrics, tracer, is_outer=not replica)
    modules = (
        (render, tokens, models, health)
        if worker.only_plans
        else (
            *(chat, completions, responses, messages, embeddings, rerank, files, batches, transcriptions),
            *(infer, generate, models, loras, tokens, health, admin, render, inference),
        )
    )
    errors.install(app, (route for one in modules for route in one.router.routes if isinstance(route, APIRoute)))
    for module in modules:
        app.include_router(module.router, responses=errors.RESPONSES)
    if config.web_page:
        app.include_router(page.router)
    describe(app, _EVENTS, keys=config.has_keys)
    return app


def _means(service: Service, tracer: Tracer | None) -> Means:
    """Return what batches need to run their requests.

    Their requests use the same routes as other requests, without keys, and with their own limit.

    They may take as long as their batch, because they yield to other requests.
    """
    config, files = service.config, service.files
    admission = Admission(config.max_concurrent_batch_requests, _NO_TIMEOUT_S, config.max_held_logprobs)
    app = FastAPI(openapi_url=None)
    errors.install(app)
    for module in (chat, completions, embeddings, responses):
        app.include_router(module.router)
    app.state.service = replace(service, admission=admission)
    front = Middleware(
        app,
        config=config,
        clients=service.clients,
        admission=admission,
        metrics=service.metrics,
        tracer=tracer,
    )
    return Means(
        files=files,
        answer=calling(front),
        is_ready=lambda: service.worker.engine.num_alive > 0 and not service.admission.stopping,
        slots=asyncio.Semaphore(config.max_concurrent_batch_requests),
        limits=Limits(requests=config.max_batch_requests, line_bytes=config.max_request_bytes),
        model_names=service.model_names,
    )


def add_front(
    app: FastAPI,
    config: ServiceConfig,
    clients: Clients,
    admission: Admission,
    metrics: Metrics,
    tracer: Tracer | None = None,
    *,
    is_outer: bool = True,
) -> None:
    """Add the middleware that every request passes before it reaches a route: limits, access control and CORS.

    `is_outer` is false for a worker behind an ingress, which has checked the origin.
    """
    # The middleware that is added last is the outermost. CORS must be outside Access, because a preflight has no key.
    if clients:
        app.add_middleware(Access, clients=clients)
    elif is_outer:
        app.add_middleware(OwnForms, allows=_allows(config.cors_origin))
        if is_loopback(config.host):
            app.add_middleware(OwnHost)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in config.cors_origin if not origin.endswith(_ANY_PORT)],
            allow_origin_regex=_any_port(config.cors_origin),
            allow_private_network=True,  # the operator has listed the origin
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Middleware, config=config, clients=clients, admission=admission, metrics=metrics, tracer=tracer)
    app.add_middleware(MessagesFront)


@asynccontextmanager
async def reclaiming(spools: Sequence[Path], interval_s: float) -> AsyncIterator[None]:
    """Reclaim the memory of dead processes on entry, and then every `interval_s` seconds.

    This removes the arenas of dead owners, and the request folders that dead services left in `spools`.
    """
    await _collect(spools)
    task = asyncio.create_task(_repeat(spools, interval_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _repeat(spools: Sequence[Path], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _collect(spools)


async def _collect(spools: Sequence[Path]) -> None:
    with logged("shared memory cannot be reclaimed"):  # serving goes on, and a later attempt may succeed
        collected = await asyncio.to_thread(collect, spools)
        if collected.reclaimed:
            _log.warning(
                "reclaimed %d bytes of shared memory from dead processes: %s", collected.num_bytes, collected.counts
            )


def _allows(origins: Sequence[str]) -> Callable[[str], bool]:
    """Return the function that says whether `origins` allow an origin."""
    any_port = _any_port(origins)
    return lambda origin: (
        "*" in origins or origin in origins or (any_port is not None and re.fullmatch(any_port, origin) is not None)
    )


def _any_port(origins: Sequence[str]) -> str | None:
    """Return a regular expression for the `origins` that allow any port, or None if no origin does.

    The regular expression also matches an origin without a port, because browsers omit the scheme's default port.
    """
    names = [re.escape(origin.removesuffix(_ANY_PORT)) for origin in origins if origin.endswith(_ANY_PORT)]
    return rf"(?:{'|'.join(names)})(?::\d+)?" if names else None


def require_places(config: ServiceConfig) -> None:
    """Create the spool and the folder of files if they are missing, and check other settings.

    These are the API keys, the media folder, the media domains and the formats.

    Raises:
        SharedMemoryError: The spool cannot be used.
        InputError: The spool's name, the file of API keys, the media folder, a media domain or the name of a format is
            not valid.

    """
    spool = config.spool or default_spool()
    try:
        str(spool).encode()
    except UnicodeEncodeError:
        raise InputError(f"the spool's name, {os.fsencode(spool)!r}, is not UTF-8; choose another folder") from None
    _require_spool(spool)
    if config.files_path is not None:
        make_spool(config.files_path)
        _require_spool(config.files_path / "uploads")
    Clients(config)
    require_media_dir(config)
    require_formats(config)
    for domain in config.allowed_media_domains:
        encoded_domain(domain)


def _require_spool(spool: Path) -> None:
    make_spool(spool)
    require_spool(spool)
    with os_errors_as(SharedMemoryError, f"spool {spool} cannot be written"):
        tempfile.TemporaryDirectory(dir=spool).cleanup()
        require_locks(spool)
