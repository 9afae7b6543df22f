"""The steps from the route to the response that all requests to the model share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from mindie_mm.engine.requests.sampling_params import LEAST_URGENT, SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.worker.beam_search import check_beams
from service.http.access import key_digest
from service.http.clients import Client
from service.http.errors import error_object
from service.request.admitted import DONE, EventStream, SendEvent, WholeAnswer
from service.request.call import Call
from service.request.meter import Meter
from service.request.state import Service, ServiceDep
from service.schemas.body import Body, Settings, pass_over_fields
from service.schemas.choices import Clock


@dataclass(frozen=True, slots=True)
class Responder(ABC):
    """One request, and the format of the answer."""

    call: Call

    @abstractmethod
    async def answer(self) -> Mapping[str, object]:
        """Return the answer of a request that does not stream."""

    @abstractmethod
    async def stream(self, send: SendEvent) -> None:
        """Send the events of a streamed answer."""

    def failed(self, error: Exception) -> Mapping[str, object]:
        """Return the event that reports an error after a streamed answer has begun."""
        return error_object(error)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request before its body has been interpreted."""

    service: Service
    id: str
    clock: Clock
    owner: bytes
    """Digest of the API key that the request carries."""
    client: Client | None
    """Client whose API key the request carries, if the service has keys."""
    accepts_handles: bool
    """See `Call.accepts_handles`."""
    hold: Callable[[int], None]
    """Function that counts bytes as if they were in the request's body. It raises HTTPException at a limit."""
    of_batch: bool = False
    """True if the request belongs to a batch. It is then less urgent than all others."""

    @property
    def file_owner(self) -> str:
        """Name of the API key in the store of files. Raise NotStored if the service stores no files."""
        return self.service.files.owner_name(self.owner)

    def accept(self, body: Body) -> None:
        """Check the model and the fields of a request.

        Raises:
            ModelNotFound: The model is not the served model.
            InputError: The body has an unknown field, and the service is strict.

        """
        self.service.check_model(body.model)
        pass_over_fields(body.unknown, strict=self.service.config.strict)

    def call(
        self,
        body: Body,
        settings: Settings,
        *,
        prefix: str = "",
        n: int = 1,
        length_penalty: float | None = None,
    ) -> Call:
        """Return the call to the engine for this request.

        Args:
            body: Body of the request.
            settings: The request's settings: the body, or an object in it.
            prefix: Text in front of the request's id in the answer's id.
            n: Number of choices per prompt.
            length_penalty: Length penalty of a beam search, or None to draw tokens.

        Raises:
            ModelNotFound: The model is not the served model.
            InputError: A setting is not valid, or a field is unknown and the service is strict.

        """
        self.accept(body)
        try:
            worker = self.service.worker
            params = settings.sampling_params(worker.default_sampling)
            structure = settings.structure(close=self.service.config.json_additional_properties == "close")
            if structure is not None:
                params = msgspec.structs.replace(params, structured_outputs=structure.wanted)
            self._require_order(params)
            if self.of_batch:
                params = msgspec.structs.replace(params, priority=LEAST_URGENT)
            params = msgspec.structs.replace(params, lora=self.service.lora_of(body.model))
            params = worker.spelled(params.check(worker.engine.info.vocab_size))
            if length_penalty is not None:
                check_beams(n, length_penalty, params.max_tokens, name="n")
        except InputError as error:
            error.param = settings.field or error.param
            raise
        meter = Meter(self.service.metrics, self.clock.arrived, self.client, params.lora)
        field = structure.field if structure is not None else None
        timed = bool(settings.timings)
        return Call(
            service=self.service,
            params=params,
            n=n,
            id=prefix + self.id,
            fingerprint=self.service.fingerprint_of(params.lora),
            clock=self.clock,
            timed=timed,
            meter=meter,
            owner=self.owner,
            structure_field=field,
            length_penalty=length_penalty,
            accepts_handles=self.accepts_handles,
        )

    def _require_order(self, params: SamplingParams) -> None:
        """Raise InputError if the request sets a priority although the scheduling policy ignores priorities."""
        if params.priority and self.service.config.scheduling_policy != "priority":
            message = f"priority={params.priority} must be 0 unless --scheduling-policy priority is set"
            raise InputError(message, param="priority")

    def answered(
        self,
        responder: Responder,
        *,
        stream: bool | None = False,
        last: str | None = DONE,
        named: bool = False,
        timeout_s: float | None = None,
    ) -> Response:
        """Return the response for `responder`: a stream of events, or the whole answer.

        Args:
            responder: The request, and the format of its answer.
            stream: Whether to stream the answer.
            last: Data after the last event, or None.
            named: Whether each event has a line with its `type`.
            timeout_s: Maximum time in seconds for the answer, or None for the service's limit.

        """
        admission = self.service.admission
        if stream:
            return EventStream(responder.stream, responder.failed, admission, last, timeout_s, named=named)
        return WholeAnswer(responder.answer, admission, timeout_s)


async def _incoming(request: Request, service: ServiceDep) -> Incoming:
    state = request.state
    of_batch: bytes | None = getattr(state, "batch_owner", None)
    return Incoming(
        service,
        state.request_id,
        Clock(state.arrived),
        key_digest(request.headers) if of_batch is None else of_batch,
        getattr(state, "client", None),
        accepts_handles=service.config.accept_handles and getattr(state, "unix_socket", False) is True,
        hold=state.hold_bytes,
        of_batch=of_batch is not None,
    )


IncomingDep = Annotated[Incoming, Depends(_incoming)]
