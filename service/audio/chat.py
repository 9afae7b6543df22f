"""Translates a transcription or a translation of one clip into a chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.nn.speech import SpeechTraits
from service.audio.body import Task, TranscriptionBody
from service.request.media import SpooledFile
from service.request.translated import chat_body_of, text_part
from service.schemas.openai_types import ChatBody

_SAME = ("model", "stream", "seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_ITEM = "media item 0 (audio): "
"""Beginning of an error about the clip. A form has only one file."""


def chat_body(body: TranscriptionBody, task: Task, traits: SpeechTraits, clip: Path) -> ChatBody:
    """Return the body of the chat completion about a file in the spool.

    Raises:
        InputError: A field is not valid.

    """
    wants_times, language = body.wants_times(traits), body.language_of(traits)
    context = traits.with_prompt.format(prompt=body.prompt) if body.prompt else ""
    what = traits.transcribe if task == "transcribe" else traits.translate or ""
    opening = spoken = ""
    if language is not None:
        opening = traits.opening.format(language=language[1])
        spoken = "" if opening else traits.in_language.format(language=language[1])
    text = what + spoken + (traits.with_times if wants_times else "")
    messages: list[dict[str, Any]] = []
    if traits.prompt_role == "user":
        text = context + text
    elif context:
        messages.append({"role": "system", "content": context})
    parts = [{"type": "audio", "audio": SpooledFile(clip)}, *([text_part(text)] if text else ())]
    messages.append({"role": "user", "content": parts})
    if opening:
        messages.append({"role": "assistant", "content": opening})
    fields = {name: getattr(body, name) for name in _SAME} | {
        "messages": messages,
        "continue_final_message": bool(opening) or None,
        "add_generation_prompt": False if opening else None,
        "temperature": body.temperature or 0.0,
        "max_tokens": body.max_completion_tokens,
        "repetition_penalty": body.repetition_penalty,
        "stream_options": {"include_usage": True} if body.stream else None,
        "return_token_ids": wants_times or None,
        "logprobs": wants_times or None,
    }
    return chat_body_of(fields, {"max_tokens": "max_completion_tokens"})


@contextmanager
def naming_file() -> Iterator[None]:
    """Name the form's file in an InputError about the chat's clip."""
    try:
        yield
    except InputError as error:
        error.args = (str(error).removeprefix(_ITEM),)
        if error.param == "messages":
            error.param = "file"
        raise
