"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mindie_mm.errors import InputError, blaming
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.processes.tasks import gather, in_thread
from mindie_mm.tokenize.clips import Clips, keep_rest
from service.audio.answer import DELTA, Transcript, TranscriptEvent, VerboseTranscript, answer
from service.audio.answer import DONE as LAST
from service.audio.body import Task, TranscriptionBody
from service.audio.chat import chat_body, first_token_body, naming_fields
from service.audio.heard import Heard, heard, no_speech_prob
from service.audio.stream import ClipText, SpeechText
from service.http.errors import error_object
from service.request.admitted import DONE, EventStream, SendEvent, WholeAnswer
from service.request.incoming import Incoming, IncomingDep
from service.request.quota import room_to_spool
from service.request.spool_folders import spool_directory
from service.request.state import Service
from service.request.upload import Upload, receive_upload
from service.routes.chat import Chat, chat_of
from service.schemas.description import form_of, streamed

router = APIRouter()

_AT_ONCE = 4
"""Maximum number of clips of one request that are transcribed at the same time."""
_MOST_PARTS = 30
"""Maximum number of answers about one clip."""
_LEAST_REST_S = 0.1
"""Minimum length in seconds of the rest of a clip about which the model is asked again."""
_TYPES = {"text": "text/plain; charset=utf-8", "srt": "text/plain; charset=utf-8", "vtt": "text/vtt; charset=utf-8"}
_RESPONSES = streamed(TranscriptEvent, whole=Transcript | VerboseTranscript, last=DONE)
_RESPONSES[200]["content"] |= {kind.partition(";")[0]: {"schema": {"type": "string"}} for kind in _TYPES.values()}
_FORM = form_of(TranscriptionBody, "The speech, as any file that chats accept as audio.")


@router.post("/v1/audio/transcriptions", responses=_RESPONSES, openapi_extra=_FORM)
async def transcriptions(request: Request, incoming: IncomingDep) -> Response:
    """Transcribe speech. Stream the transcript on request."""
    return _receiving(request, incoming, "transcribe")


@router.post("/v1/audio/translations", responses=_RESPONSES, openapi_extra=_FORM)
async def translations(request: Request, incoming: IncomingDep) -> Response:
    """Translate speech into English. Stream the translation on request."""
    return _receiving(request, incoming, "translate")


def _receiving(request: Request, incoming: Incoming, task: Task) -> Response:
    if (traits := incoming.service.worker.tokenizer_stage.traits.speech) is None:
        raise InputError(f"the model {incoming.service.model_name} does not accept audio")
    return _Receiving(request, incoming, lambda upload: _Speech.of(upload, incoming, task, traits).response())


class _Receiving(Response):
    """A response that receives an upload, and removes it when the answer has been sent."""

    def __init__(self, request: Request, incoming: Incoming, respond: Callable[[Upload], Response]) -> None:
        super().__init__()
        self._request = request
        self._incoming = incoming
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response as an ASGI application."""
        async with _spooled(self._request, self._incoming.service) as upload:
            await self._respond(upload)(scope, receive, send)


@asynccontextmanager
async def _spooled(request: Request, service: Service) -> AsyncIterator[Upload]:
    """Receive the form into a folder of its own in the spool. The file counts toward the limits of the spool."""
    with room_to_spool(), spool_directory(service.spool) as directory:
        try:
            (folder := directory.path / "audio").mkdir(mode=0o700)
            limit, spend = service.config.max_item_bytes, partial(service.media.spend, directory.path)
            async with receive_upload(request, folder, limit, setting="--max-item-bytes", spend=spend) as upload:
                if not upload.num_bytes:
                    raise InputError("the file is empty", param="file")
                yield upload
        finally:
            service.media.remove(directory.path)


def _without_times(chat: Chat, traits: SpeechTraits) -> Chat:
    """Return the chat with an answer whose text does not show time stamps. Segments are made from its tokens."""
    if not traits.has_times:
        return chat
    call, dialect = chat.call, chat.call.service.chat_dialect
    times = {index for index in dialect.added_tokens.values() if index >= traits.first_time_id}
    silent = dialect.special if call.silent is None else call.silent
    return replace(chat, call=replace(call, silent=times.union(silent)))


@dataclass(frozen=True, slots=True)
class _Speech:
    """Speech that is to be transcribed or translated."""

    upload: Upload
    incoming: Incoming
    task: Task
    traits: SpeechTraits
    body: TranscriptionBody
    whole: Chat
    """Chat about the whole speech."""

    @classmethod
    def of(cls, upload: Upload, incoming: Incoming, task: Task, traits: SpeechTraits) -> _Speech:
        """Return the speech of a form. Raise InputError or ModelNotFound if a field is not valid."""
        body = TranscriptionBody.of(upload.fields)
        incoming.accept(body)
        body.check(task, traits)
        chat = chat_of(chat_body(body, task, traits, upload.path), incoming, prefix="trsc-", cut_max_tokens=True)
        return cls(upload, incoming, task, traits, body, _without_times(chat, traits))

    def response(self) -> Response:
        """Return the response, which transcribes the speech."""
        admission = self.incoming.service.admission
        if self.body.stream:
            return EventStream(self.stream, error_object, admission, DONE, None)
        return WholeAnswer(self.answer, admission, media_type=_TYPES.get(self.body.format))

    async def answer(self) -> Mapping[str, Any] | str:
        """Return the answer in the format of the request."""
        with naming_fields(self.body.prompt):
            clips, turns = await self._cut(), asyncio.Semaphore(_AT_ONCE)

            async def listen(index: int, times: tuple[float, float]) -> list[Heard]:
                async with turns:
                    return await self._heard(clips, index, times)

            found = await gather([listen(index, times) for index, times in enumerate(clips.times)])
        heard_clips = [one for parts in found for one in parts]
        stated, traits = self.body.language_of(self.traits), self.traits
        only = next(iter(traits.languages)) if len(traits.languages) == 1 else traits.language
        detected = next((one.language for one in heard_clips if one.language), "")
        return answer(
            heard_clips,
            self.body.format,
            task=self.task,
            language=stated[0] if stated else only or detected,
            temperature=self.body.temperature or 0.0,
            duration_s=clips.times[-1][1],
        )

    async def _first_token(self, clip: Path) -> tuple[str, float | None]:
        """Return the code of the language that the model detects in a clip, and the probability that nobody speaks.

        Return an empty string and None if the format does not show them, or if the model does not tell.
        """
        if self.body.format != "verbose_json" or not self.traits.detect:
            return "", None
        tokens = self.incoming.service.chat_dialect.added_tokens
        codes = {tokens[name]: code for code, name in self.traits.languages.items() if name in tokens}
        body = first_token_body(self.body, self.traits, clip, [*codes])
        (choice,) = (await chat_of(body, self.incoming, prefix=f"trsc-first-{clip.stem}-").answer())["choices"]
        return codes.get((choice["token_ids"] or [-1])[0], ""), no_speech_prob(choice)

    async def _heard(self, clips: Clips, index: int, times: tuple[float, float]) -> list[Heard]:
        """Return the answers about a clip. If the model leaves out the end of the clip, ask again about that part."""
        worker, folder = self.incoming.service.worker, self.upload.path.parent
        decode, ends = worker.tokenizer.decode, worker.engine.info.eos_token_ids
        found: list[Heard] = []
        chat, (start_s, stop_s) = self._chat(clips, index), times
        language, silence = await self._first_token(
            clips.file(folder, index) if len(clips.starts) > 1 else self.upload.path
        )
        while True:
            one = heard(await chat.answer(), self.traits, (start_s, stop_s), decode, ends)
            found.append(replace(one, language=language or one.language, no_speech_prob=silence))
            rest_s = found[-1].rest_s
            if rest_s is None or rest_s <= start_s or stop_s - rest_s < _LEAST_REST_S:
                break
            if len(found) == _MOST_PARTS:
                found[-1] = replace(found[-1], is_cut_off=True)
                break
            clip = clips.file(folder, index)
            await in_thread(partial(keep_rest, clip, rest_s - start_s))
            start_s = rest_s
            chat = self._chat_about(clip, f"{index}-{len(found)}")
        return found

    async def stream(self, send: SendEvent) -> None:
        """Send the transcript in pieces, in the order of the speech. Later clips are transcribed meanwhile."""
        speech = SpeechText(lambda text: send({"type": DELTA, "delta": text}))
        with naming_fields(self.body.prompt):
            clips, turns = await self._cut(), asyncio.Semaphore(_AT_ONCE)
            texts = [speech.clip(self.traits.answer_start) for _ in clips.starts]

            async def listen(index: int, text: ClipText) -> None:
                async with turns:
                    await self._chat(clips, index).stream(text.add)
                text.finish()

            await gather([listen(index, text) for index, text in enumerate(texts)])
        send({"type": LAST, "text": speech.text, "usage": speech.usage, **speech.end})

    async def _cut(self) -> Clips:
        """Cut the speech into clips. Their bytes are counted before they are written.

        First, the bytes that follow from the header are counted, so that a full spool refuses speech before it is
        decoded. If the speech turns out to be longer, it is decoded again.
        """
        worker, file, folder = self.incoming.service.worker, self.upload.path, self.upload.path.parent
        wants_files = self.body.wants_times(self.traits)
        cut = partial(worker.cut, file, folder, domain=(self.incoming.owner, ""), always=wants_files)
        spend = partial(self.incoming.service.media.spend, folder.parent)
        counted = 0
        with blaming("file"):
            clips = await cut(0)
            while (needed := clips.num_bytes) > counted:
                spend(needed - counted)
                counted = needed
                clips = await cut(counted)
        spend((needed if wants_files or len(clips.starts) > 1 else 0) - counted)
        return clips

    def _chat(self, clips: Clips, index: int) -> Chat:
        if len(clips.starts) == 1:
            return self.whole
        return self._chat_about(clips.file(self.upload.path.parent, index), str(index))

    def _chat_about(self, clip: Path, name: str) -> Chat:
        body = chat_body(self.body, self.task, self.traits, clip)
        chat = chat_of(body, self.incoming, prefix=f"trsc-{name}-", cut_max_tokens=True)
        return _without_times(chat, self.traits)
