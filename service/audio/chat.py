"""Translates a transcription or a translation of one clip into a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.nn.speech import SpeechTraits
from service.audio.body import Task, TranscriptionBody
from service.request.media import SpooledFile
from service.request.translated import chat_body_of, text_part
from service.schemas.openai_types import ChatBody

_SAME = ("model", "stream", "seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_MAX_TOKEN_CHARS = 256
"""Number of characters that no token exceeds."""
_ITEM = "media item 0 (audio): "
"""Beginning of an error about the clip. A form has only one file."""


def chat_body(body: TranscriptionBody, task: Task, traits: SpeechTraits, clip: Path) -> ChatBody:
    """Return the body of the chat completion about a file in the spool.

    Raises:
        InputError: A field is not valid.

    """
    wants_tokens = body.wants_times(traits) or body.format == "verbose_json"
    wants_times, language = body.wants_times(traits), body.language_of(traits)
    context = traits.with_prompt.format(prompt=_plain(body.prompt, traits)) if body.prompt else ""
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
        "return_token_ids": wants_tokens or None,
        "logprobs": wants_tokens or None,
    }
    return chat_body_of(fields)


def first_token_body(body: TranscriptionBody, traits: SpeechTraits, clip: Path, ids: Sequence[int]) -> ChatBody:
    """Return the body of the chat completion that asks for the first token about a file, which is one of `ids`."""
    parts = [{"type": "audio", "audio": SpooledFile(clip)}, text_part(traits.detect)]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0.0,
        "max_tokens": 1,
        "allowed_token_ids": [*ids] or None,
        "return_token_ids": True,
        "logprobs": True,
        "logprob_token_ids": [traits.no_speech_id],
    }
    return chat_body_of(fields)


def _plain(prompt: str, traits: SpeechTraits) -> str:
    """Return the part of a prompt that the model reads, without control tokens."""
    if traits.max_prompt_tokens:  # encoding the rest would cost time
        prompt = prompt[-traits.max_prompt_tokens * _MAX_TOKEN_CHARS :]
    start = traits.control_start
    return prompt.replace(start, f"{start[0]} {start[1:]}") if start else prompt


@contextmanager
def naming_fields(prompt: str | None) -> Iterator[None]:
    """Name the form's file in an InputError about the chat's clip, and its prompt if the chat is too long."""
    try:
        yield
    except InputError as error:
        error.args = (str(error).removeprefix(_ITEM),)
        if error.param == "messages":
            error.param = "prompt" if prompt and isinstance(error, ContextLengthExceeded) else "file"
        raise
