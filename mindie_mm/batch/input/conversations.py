"""Converts rows of common data sets of conversations to rows with `messages`.

The formats are LLaVA and ShareGPT (`conversations`), the_cauldron and FineVision (`texts`), TRL (`prompt` and
`completion`), and media next to a table of file names, as in `datasets`' imagefolder (`file_name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.inputs import KINDS
from mindie_mm.media.endings import kind_of

CONVERSATIONS = ("conversations", "texts")
CONVERSATION_KEYS = (*CONVERSATIONS, "completion", "system", "file_name", "file_names")
_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "assistant"), "assistant"),
}
"""Role in a chat of each speaker in `from`."""
_MARK = re.compile(rf"\n?<({'|'.join(KINDS)})>\n?")
"""Mark of a media item in the question of a LLaVA row, with the line break that separates the item from the text."""
_OTHER_PROMPTS = frozenset({"text", "prompt", "inputs", "messages"})
_TURNS = ("system", "user", "assistant")
"""Keys of a round in `texts`, in the order of their turns."""


def as_chat(record: Mapping[str, Any], *, whole: bool, chat: bool = True) -> dict[str, Any]:
    """Return a row with `messages` and media instead of a conversation in another format. Other rows are unchanged.

    Args:
        record: Row without nulls.
        whole: Whether to keep all turns. If False, a conversation ends before its first answer.
        chat: Whether a prompt and a completion that are strings become a chat. If False, they are unchanged.

    Raises:
        InputError: The row has several conversations, a conversation without a turn or without a question before its
            first answer, or a turn that is not valid.

    """
    row = dict(record)
    forms = [form for form in CONVERSATIONS if _is_list_of_objects(row.get(form))]
    if _is_list_of_objects(row.get("prompt")):
        forms.append("prompt")
    if not forms and whole and chat and is_completed(row):
        question, answer = row.pop("prompt"), row.pop("completion")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return row | {"messages": turns}
    if not forms:
        _require_turns(row)
        return row
    if len(forms) > 1 or "messages" in row or "inputs" in row:
        named = [*forms, *(key for key in ("messages", "inputs") if key in row)]
        raise InputError(f"the row has the keys {named}, which conflict. Choose one of them with --select-columns")
    (form,) = forms
    turns = row.pop(form)
    if form == "conversations":
        turns = [_marked(turn) for turn in turns] if not any("role" in turn for turn in turns) else turns
        if isinstance(system := row.pop("system", None), str) and system:
            turns = [{"role": "system", "content": system}, *turns]
    elif form == "texts":
        turns = [turn for number, one in enumerate(turns) for turn in _turns_of(one, number)]
    else:
        turns = [*turns, *_completion(row)] if whole else turns
    if not whole:
        answers = [number for number, turn in enumerate(turns) if turn.get("role") == "assistant"]
        turns = turns if form == "prompt" else turns[: answers[0] if answers else None]
        if not turns:
            raise InputError(
                f"the row's {form} begin with an answer, so that no question comes before the first answer. Remove "
                "this turn, or use --whole-conversations to keep all turns"
            )
    return row | {"messages": turns}


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def is_completed(record: Mapping[str, Any]) -> bool:
    """Return whether a row has a prompt and a completion without roles."""
    return isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str)


def _require_turns(record: Mapping[str, Any]) -> None:
    """Raise InputError if the only prompt of a row is a conversation without turns, or of another type."""
    if not _OTHER_PROMPTS.isdisjoint(record) and record.get("prompt") != []:
        return
    for form in (*CONVERSATIONS, "prompt"):
        if form in record:
            found = record[form]
            found = "an empty list" if found == [] else f"of type {type(found).__name__}"
            raise InputError(
                f"the row's {form} is {found}; it must be a list of objects with at least one turn. Remove this key, "
                "or leave it out with --select-columns"
            )


def with_named_files(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with media in place of `file_name` and `file_names`.

    Raises:
        InputError: A name is not that of a media file.

    """
    row = dict(record)
    for key in ("file_name", "file_names"):
        names = row.pop(key, None)
        for name in names if isinstance(names, list) else [] if names is None else [names]:
            if not isinstance(name, str) or (kind := kind_of(name)) is None:
                raise InputError(f"the row's {key}={name!r} must be the name of a media file, such as 1.jpg")
            row.setdefault(f"{kind}s", [])
            row[f"{kind}s"] = [*row[f"{kind}s"], name]
    return row


def _marked(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a turn with `from` and `value`. Marks such as `<image>` in a question become places of media."""
    speaker, text = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(text, str):
        raise InputError(
            f"a turn in the row's conversations is from {speaker!r} and has a value of type {type(text).__name__}; it "
            f"must be from one of {', '.join(_ROLES)}, and its value must be a string"
        )
    if (role := _ROLES[speaker]) != "user" or not _MARK.search(text):
        return {"role": role, "content": text}
    pieces = _MARK.split(text)  # texts and kinds of media take turns
    parts = [{"type": piece} if at % 2 else {"type": "text", "text": piece} for at, piece in enumerate(pieces)]
    return {"role": role, "content": [part for part in parts if part.get("text") != ""]}


def _turns_of(round_: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": round_[role]} for role in _TURNS if role in round_]
    if not turns or not all(isinstance(turn["content"], str) for turn in turns):
        raise InputError(
            f"the row's texts[{number}] has the keys {sorted(round_)}; it must have strings under user and assistant"
        )
    return turns


def _completion(row: Mapping[str, Any]) -> list[Any]:
    completion = row.get("completion")
    if not isinstance(completion, list) or not _is_list_of_objects(completion):
        raise InputError(
            "the row has a prompt of messages, but no completion of messages, so that its conversation is not whole. "
            "If it has chosen and rejected, rename one of them to completion"
        )
    return completion
