"""Settings that rows have for their answers, and lines of OpenAI's Batch API, which contain whole requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from mindie_mm.batch.input.record import Files, Record, number_of
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF, PROMPT_FIELDS, refused_fields, require_tools

SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        *("response_format", "structured_outputs"),
    }
)
"""Keys of a row that state how `generate` answers it."""
REQUEST = "request"
"""Column of the output that contains `request_of` each row."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_PROMPT = frozenset({"messages", "prompt"})
_VARIABLES = ("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "parse_special")
"""Further fields of a chat that determine its prompt."""
_NOT_ANSWERED: Mapping[str, tuple[Any, ...]] = {
    **PROMPT_FIELDS,
    **dict.fromkeys(("add_special_tokens", "timings"), OFF),
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(("stream", "logprobs", "echo", "use_beam_search", "return_token_ids", "media_spans"), OFF),
    **dict.fromkeys(("top_logprobs", "priority"), (None, 0)),
    "prompt_logprobs": (None,),
}
"""Fields of a chat that `generate` does not support, each with the values that do not change the answer."""
_NOT_COMPLETED = {
    **_NOT_ANSWERED,
    **dict.fromkeys(("tools", "prompt_embeds"), OFF),
    "add_special_tokens": (None, True),
}
"""The same for text completions."""
_DECODING = (*NOT_JSON, RecursionError)

Adapt = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
"""Function that returns the messages and tools of a chat in the form that the chat template expects."""


_NULL = msgspec.Raw(b"null")


_Stated = msgspec.defstruct(
    "_Stated",
    [
        ("custom_id", Any, msgspec.UNSET),
        ("url", Any, None),
        *((name, msgspec.Raw, _NULL) for name in ("body", *sorted(SAMPLING))),
    ],
)
"""Keys of a record that concern its answer. Their values are not decoded."""


def is_batch_line(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a line of OpenAI's Batch API. Other data sets have columns of the same names."""
    return "custom_id" in row and (isinstance(row.get("body"), Mapping) or is_route(row.get("url")))


def is_route(url: Any) -> bool:
    """Return whether the `url` of a row is that of a request, such as /v1/embeddings."""
    return isinstance(url, str) and url.startswith("/")


def prompt_of(line: Mapping[str, Any], adapt: Adapt | None = None) -> dict[str, Any]:
    """Return the row with the prompt of a line of OpenAI's Batch API: `messages`, or a `text` for completions.

    Args:
        line: The line.
        adapt: Function that adapts a chat to the chat template. None leaves the chat as it is.

    Raises:
        InputError: The request is not a chat or a completion, or a field of it is not supported.

    """
    url, method, body = line.get("url"), line.get("method", "POST"), line.get("body")
    if not isinstance(line["custom_id"], str):
        raise InputError(f"the row's custom_id is {type(line['custom_id']).__name__}; it must be a string")
    if body is None:
        raise InputError(f"the row has a custom_id and the url {url}, but no body. Put the fields of the request there")
    if not isinstance(body, Mapping):
        raise InputError(f"the row's body is {type(body).__name__}; it must be an object")
    if method != "POST" or url not in (CHAT, COMPLETION):
        raise InputError(
            f"the row has the method {method!r} and the url {url!r}; it must be POST {CHAT} or {COMPLETION}"
        )
    if refused := refused_fields(body, _NOT_ANSWERED if url == CHAT else _NOT_COMPLETED):
        raise InputError(f"the row's body has {refused[0]}, which is not supported in a batch. Remove this field")
    if url == CHAT:
        return _chat_of(body, adapt)
    if not isinstance(prompt := body.get("prompt"), str):
        found = "no prompt" if prompt is None else f"a prompt of type {type(prompt).__name__}"
        raise InputError(f"the row's body has {found}; it must have a prompt that is a string")
    return {"text": prompt, "parse_special": body.get("parse_special")}


def _chat_of(body: Mapping[str, Any], adapt: Adapt | None) -> dict[str, Any]:
    """Return the fields of a chat that determine its prompt.

    `generate` judges all other fields, as the service does, and enforces `tool_choice`.
    """
    if not isinstance(messages := body.get("messages"), list):
        found = "no messages" if messages is None else f"messages of type {type(messages).__name__}"
        raise InputError(f"the row's body has {found}; it must have a list of messages")
    chat: dict[str, Any] = {name: body[name] for name in _VARIABLES if name in body}
    tools, choice = body.get("tools"), body.get("tool_choice")
    require_tools(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        raise InputError(
            "the row's tool_choice is allowed_tools, which is not supported in a batch. Leave the other tools out"
        )
    offered: Sequence[Any] = [] if choice == "none" else tools or []
    if adapt is not None:
        messages, offered = adapt(messages, offered)
    return chat | {"messages": messages} | ({"tools": offered} if offered else {})


def request_of(record: Record) -> str | None:
    """Return the fields of a record that concern its answer, as JSON text, or None if it has no such fields.

    The text is an object with `body`: the sampling parameters, or all fields of a request but its prompt. For a line of
    OpenAI's Batch API, it also has `custom_id` and `url`. Fields that cannot be read are left out, because their row
    fails anyway.
    """
    text = record.own(".json") if isinstance(record, Files) else record
    if text is None:
        return None
    try:
        if isinstance(text, Mapping):
            stated = {key: _without_nulls(text[key]) for key in text if key in _READ}
            text = msgspec.json.encode(stated, enc_hook=str)
        given = msgspec.structs.asdict(msgspec.json.decode(text, type=_Stated))
    except _DECODING:
        return None
    custom_id, url, body = (given.pop(name) for name in ("custom_id", "url", "body"))
    stated = {name: value for name, value in given.items() if bytes(value) != b"null"}
    is_line = custom_id is not msgspec.UNSET and (is_route(url) or bytes(body).startswith(b"{"))
    own = {"custom_id": custom_id, "url": url} if is_line else {}
    try:
        if is_line:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            stated = {name: value for name, value in fields.items() if name not in _PROMPT}
        encoded = msgspec.json.encode({**own, "body": stated})
        msgspec.json.decode(encoded)  # numbers and text were not decoded yet
    except _DECODING:
        encoded, stated = msgspec.json.encode({**own, "body": {}}), {}
    return encoded.decode() if own or stated else None


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without nulls, which Arrow adds to structs, and with numbers in place of decimals.

    NaN and infinities become null.
    """
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value if one is not None]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return number_of(value)
    return value


_READ = SAMPLING.union(["custom_id", "url", "body"])
