"""Rendering of messages with a checkpoint's chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jinja2
import msgspec

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import KINDS, PROMPT, ROLES, Message, Text
from mindie_mm.inputs.unknown_keys import warn_once
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import ContentFormat
from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tokenize.text.spelling import ControlSpelling, Rendered, strings, unused_character

_log = logging.getLogger(__name__)

_REMEMBERED = 256
"""Number of conversations whose prompts are cached, because requests or rows often repeat them."""
_REMEMBERED_BYTES = 4096
_VOLATILE = re.compile(r"\b(?:strftime_now|random|lipsum)\b")
"""Names of functions that return the time or a random value. Prompts of a template that contains such a name are not
cached. A name that is composed at run time, such as `map('ran' ~ 'dom')`, is not detected."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag before the part of a template that writes what the assistant generates."""
_RESERVED_KWARGS = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "padding", "truncation", "max_length"}
    | {"tokenize", "tokenizer_kwargs", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"sanitize_control_tokens", "conversations", "self", "continue_final_message", "documents"}
)
_SHOWN_PROMPT = "Final message to continue"
"""Words that precede the whole prompt in transformers' error about a message that cannot be continued."""
_LEXER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).lexer  # noqa: S701 - splits sources; renders nothing
"""Lexer with the whitespace settings of transformers."""
_PLACED = ("tools", "tool_calls", "function_call")
"""Variables and keys of messages that are refused unless the template uses them."""
_PROBE = "a text"
_PAIR_ROLES = ("query", "document")
"""Roles of the two parts of a pair in the templates of rerankers, as in sentence-transformers and vLLM."""
_NO_ROLE = "norole0"
"""Custom role for which no template has a special case."""
_CALL = {"id": "call00000", "type": "function", "function": {"name": "a_name", "arguments": {}}}
_ASKED = (Message("user", "another"), Message("assistant", "another", {"tool_calls": [_CALL]}))
_TOOL = {"type": "function", "function": {"name": "a_name", "description": "", "parameters": {"type": "object"}}}
_NAMED = {"name": "a_name", "tool_call_id": "call00000"}
_TRIED: Mapping[str, Sequence[Message]] = {
    "system": (Message("system", _PROBE), Message("user", "another")),
    "tool": (*_ASKED, Message("tool", _PROBE, _NAMED)),
    "function": (*_ASKED, Message("function", _PROBE, _NAMED)),
}
"""Conversations that test whether a template skips a role. The keys are the roles that some templates skip."""


class ChatTemplate:
    """A chat template, and the tokenizer that renders it."""

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        control: Sequence[str],
        content_format: ContentFormat = "auto",
        *,
        for_tools: bool = False,
    ) -> None:
        """Detect which content format and which roles the template supports.

        Args:
            source: Jinja source.
            tokenizer: Fast tokenizer of transformers.
            control: Texts of the tokenizer's control tokens, the longest first.
            content_format: Format of the content of messages.
            for_tools: Whether the template is only for conversations with tools.

        """
        self._source = source
        self._tried_with = {"tools": [_TOOL]} if for_tools else {}
        self._tokenizer = tokenizer
        self._control = control
        self._spelling = ControlSpelling(control, {*control, *ROLES, *KINDS, *_words(source)})
        self._content_format: ContentFormat = "auto"
        # Some templates skip content that is a string. Others support only strings: given a list of parts, they fail,
        # skip the list, or write it in Python's notation.
        as_text, as_parts = (self._reads(wraps) for wraps in (False, True))
        if content_format != "auto":
            self._content_format = content_format
        elif as_parts and not as_text:
            self._content_format = "openai"
        elif as_text and not as_parts:
            self._content_format = "string"
        self._wraps_strings = self._content_format == "openai"
        self._placeless = [name for name in _PLACED if not re.search(rf"\b{name}\b", source)]
        self._ignores_effort = re.search(r"\breasoning_effort\b", source) is None
        self._knows_developer = re.search(r"\bdeveloper\b", source) is not None
        shown = {role: self._shows_messages(tried) for role, tried in _TRIED.items()}
        # A template that does not name these roles may write their messages as those of another role.
        names_pairs = all(re.search(rf"\b{role}\b", source) for role in _PAIR_ROLES)
        self._takes_pairs = names_pairs and self._shows_pairs(self._wraps_strings) is True
        self._lost_roles = [role for role, is_shown in shown.items() if is_shown is False]
        late = [Message("user", "another"), Message("system", _PROBE), Message("user", "another")]
        self.traits = ChatTraits(
            source, takes_system=bool(shown["system"]), takes_late_system=bool(self._shows_messages(late))
        )
        """Properties of the template that the service needs."""
        self._takes_role = lru_cache(_REMEMBERED)(self._takes)
        self._is_deterministic = not _VOLATILE.search(source)
        self._remembered = lru_cache(_REMEMBERED)(
            lambda conversation, items, opens, goes_on: self._rendered(
                msgspec.json.decode(conversation), items, opens, {}, goes_on
            )
        )

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        items: Sequence[str] = (),
        *,
        continue_final_message: bool = False,
    ) -> Rendered:
        """Render messages as a prompt.

        Args:
            messages: Messages of the conversation.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's turn.
            template_kwargs: More variables for the template.
            items: Texts that represent the media items of all messages, for a template that supports only strings.
            continue_final_message: Whether the prompt ends with the text of the last message.

        Raises:
            InputError: The template refuses the messages, or would skip a part of them.

        """
        if reserved := _RESERVED_KWARGS & template_kwargs.keys():
            raise InputError(f"chat_template_kwargs must not contain {min(reserved)!r}", param="chat_template_kwargs")
        self._check_placed(template_kwargs)
        self._warn_of_effort(template_kwargs)
        conversation = [self._turn(message) for message in messages]
        if self._is_deterministic and not template_kwargs and not any(message.extra for message in messages):
            key = msgspec.json.encode(conversation)
            if len(key) <= _REMEMBERED_BYTES:
                return self._remembered(key, tuple(items), bool(add_generation_prompt), continue_final_message)
        return self._rendered(conversation, items, add_generation_prompt, template_kwargs, continue_final_message)

    def render_turns(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], items: Sequence[str] = ()
    ) -> list[Rendered]:
        """Return the prompt up to the beginning of each turn of the assistant, and up to its end.

        The template may state its turns by `{% generation %}`. Otherwise, the messages up to each turn are rendered.

        Raises:
            InputError: The template refuses messages that end before or after a turn.

        """
        if _GENERATION.search(self._source):
            conversation = [self._turn(message) for message in messages]
            cuts: list[Rendered] = []
            self._rendered(conversation, items, False, template_kwargs, False, cuts)
            return cuts
        found = []
        for index, message in enumerate(messages):
            if message.role == "assistant":
                before = messages[:index]
                found.append(
                    self.render(before, True, template_kwargs, items) if before else self._before_first(template_kwargs)
                )
                found.append(self.render(messages[: index + 1], False, template_kwargs, items))
        return found

    def _before_first(self, template_kwargs: Mapping[str, Any]) -> Rendered:
        """Return the prompt up to the beginning of an assistant's turn that is the first message.

        The template cannot render the messages before this turn, because there are none. The turn begins after the same
        header as an answer to a question.

        Raises:
            InputError: The template refuses such a turn, or does not begin it with this header.

        """
        text = unused_character([self._source, *strings(template_kwargs)])
        asked = [Message("user", text)]
        opened, closed = (self.render(asked, opens, template_kwargs).text for opens in (True, False))
        whole = self.render([Message("assistant", text)], False, template_kwargs)
        before, *after = whole.text.split(text)
        header = opened.removeprefix(closed)
        if len(after) != 1 or not opened.startswith(closed) or (header and before.count(header) != 1):
            raise InputError(
                "the assistant's turn 1 cannot be located: it is the first message, and the chat template does not "
                "begin it as it begins an answer to a question. Remove this turn, put a question before it, or use a "
                "chat template with {% generation %}"
            )
        return replace(whole, text=before[: before.index(header) + len(header)] if header else before)

    def _rendered(
        self,
        conversation: Any,
        items: Sequence[str],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        continue_final_message: bool,
        cuts: list[Rendered] | None = None,
    ) -> Rendered:
        """Render a conversation. Append the prompt up to each bound of `{% generation %}` to `cuts`."""
        texts = [*strings(conversation), *strings(template_kwargs)]
        kinds = [part["type"] for turn in conversation for part in _parts(turn) if part["type"] != "text"]
        items = [item for kind, item in zip(kinds, items, strict=False) if kind != PROMPT]
        text_mark = unused_character([*texts, self._source]) if PROMPT in kinds else ""
        texts.append(text_mark)
        if text_mark:
            conversation = [_with_texts(turn, text_mark) for turn in conversation]
        is_string = self._content_format == "string"
        mark = unused_character([*texts, self._source]) if is_string and any(items) else ""
        escapes = self._spelling.escapes([*texts, mark], self._source)

        if is_string:
            conversation = [{**turn, "content": _joined(turn["content"], mark)} for turn in conversation]
        run = self._run if cuts is None else self._run_marked
        try:
            text, bounds = run(
                escapes.apply(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{name: escapes.apply(value) for name, value in template_kwargs.items()},
            )
        except RecursionError as error:
            raise InputError("the chat template refuses these messages: they are nested too deeply") from error
        except Exception as error:  # a template is a program and can raise anything
            reason, *_ = str(error).split(_SHOWN_PROMPT)
            raise InputError(f"the chat template refuses these messages: {reason}") from error

        def finished(text: str, items: Sequence[str]) -> Rendered:
            rendered = escapes.rendered(_with_items(text, mark, items) if mark else text)
            return replace(rendered, embeds_mark=text_mark)

        if cuts is not None:
            cuts += [finished(text[:at], items[: text[:at].count(mark)] if mark else ()) for at in bounds]
        return finished(text, items)

    def _turn(self, message: Message) -> dict[str, Any]:
        """Convert a message for the template. Raise InputError if the template would skip a part of the message."""
        turn = as_dict(message, self._wraps_strings)
        if message.role == "developer" and not self._knows_developer:
            turn["role"] = "system"  # OpenAI's name for the system role
        if turn["role"] in self._lost_roles:
            raise InputError(f"the role {message.role} is not supported: the model's chat template ignores it")
        is_of_pair = self._takes_pairs and message.role in _PAIR_ROLES
        if message.role not in ROLES and not is_of_pair and not self._takes_role(message.role):
            raise InputError(
                f"the role {message.role} is not supported: the model's chat template does not write this role's name"
            )
        self._check_placed(message.extra, "messages")
        for key, value in message.extra.items():
            if value and key not in self._source:
                warn_once(key, "a message")
        return turn

    def _takes(self, role: str) -> bool:
        """Return whether the template writes a custom role's name and messages, without extra control tokens."""
        names = (role, _NO_ROLE)
        texts = [self._probed(one) for one in names]
        if not all(text is not None and one.lower() in text.lower() for text, one in zip(texts, names, strict=True)):
            return False
        counts = [[text.count(token) for token in self._control] for text in texts if text is not None]
        return counts[0] == counts[1]

    def _probed(self, role: str) -> str | None:
        """Render a conversation with the probe in a message of `role`.

        Return None if the template refuses the conversation or leaves out the probe.
        """
        tried = [
            as_dict(Message(one, text), self._wraps_strings) for one, text in (("user", "another"), (role, _PROBE))
        ]
        try:
            text, _ = self._run([{**turn, "content": self._formatted(turn["content"])} for turn in tried])
        except Exception:  # noqa: BLE001 - a template is a program and can raise anything
            return None
        return text if _PROBE in text and repr(_PROBE) not in text else None

    def _check_placed(self, given: Mapping[str, Any], field: str | None = None) -> None:
        for name in self._placeless:
            if given.get(name):
                detail = f"not supported: the model's chat template does not use {name}"
                raise InputError(detail, param=field or name)

    def _warn_of_effort(self, given: Mapping[str, Any]) -> None:
        """Log once that a reasoning effort has no effect. Clients send it to every model, as a wish."""
        if self._ignores_effort and given.get("reasoning_effort") not in (None, "", "none"):
            self._ignores_effort = False
            _log.warning(
                "ignoring reasoning_effort, which the model's chat template does not use; this warning is not repeated"
            )

    def _reads(self, wraps_strings: bool) -> bool | None:
        """Return whether the template writes a user's text.

        If the template refuses a conversation without a system message, try a conversation with one. Return None if it
        refuses both.
        """
        user = as_dict(Message("user", _PROBE), wraps_strings)
        system = as_dict(Message("system", "another"), wraps_strings)
        tried = next((shown for tried in ([user], [system, user]) if (shown := self._shows(tried)) is not None), None)
        return tried or self._shows_pairs(wraps_strings) or tried  # the template of a reranker writes no user's text

    def _shows_pairs(self, wraps_strings: bool) -> bool | None:
        """Return whether the template writes both parts of a pair, or None if it refuses pairs."""
        tried = ((_PROBE, "another"), ("another", _PROBE))
        pairs = [[Message(role, text) for role, text in zip(_PAIR_ROLES, texts, strict=True)] for texts in tried]
        shown = [self._shows([as_dict(message, wraps_strings) for message in pair]) for pair in pairs]
        return None if None in shown else all(shown)

    def _shows_messages(self, tried: Sequence[Message]) -> bool | None:
        """Return whether the template writes the probe in the messages `tried`, or None if it refuses the messages."""
        return self._shows([as_dict(message, self._wraps_strings) for message in tried])

    def _shows(self, conversation: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether the template writes the probe into a prompt, or None if it refuses the conversation."""
        try:
            text, _ = self._run(
                [{**turn, "content": self._formatted(turn["content"])} for turn in conversation], **self._tried_with
            )
            return _PROBE in text and repr(_PROBE) not in text
        except Exception:  # noqa: BLE001 - as above
            return None

    def _formatted(self, content: Any) -> Any:
        return _joined(content, "") if self._content_format == "string" else content

    def _run(self, conversation: Any, **kwargs: Any) -> tuple[str, Sequence[int]]:
        """Return the rendered conversation, and no bounds."""
        text: str = self._tokenizer.apply_chat_template(
            conversation, chat_template=self._source, tokenize=False, **kwargs
        )
        return text, ()

    def _run_marked(self, conversation: Any, **kwargs: Any) -> tuple[str, Sequence[int]]:
        """Return the rendered conversation, and the bounds of its parts in `{% generation %}`, in order."""
        from transformers.utils.chat_template_utils import render_jinja_template  # imported late, because it is slow

        (text,), (ranges,) = render_jinja_template(
            [conversation],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **kwargs},
        )
        return text, [bound for bounds in ranges for bound in bounds]


def _words(source: str) -> set[str]:
    """Return the texts and strings in a template, and the keys that the template reads."""
    try:
        lexed = [(token.type, token.value) for token in _LEXER.tokenize(source)]
    except jinja2.TemplateSyntaxError:  # the template will refuse all messages
        return set()
    keys = {key for (before, _), (kind, key) in pairwise(lexed) if (before, kind) == ("dot", "name")}
    return keys | {text for kind, text in lexed if kind in ("data", "string")} - {""}


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """Jinja sources of a checkpoint's chat templates."""

    processor: str | None
    """Template of the processor. It comes from the first of these files that has a template, as in transformers:
    processor_config.json, chat_template.json, chat_template.jinja."""
    tokenizer: str | None
    """Template of the tokenizer, from chat_template.jinja or tokenizer_config.json."""
    tool_use: str | None
    """Template of the tokenizer for conversations with tools."""
    named: Mapping[str, str]
    """All templates by name. Those of the tokenizer precede those of the processor."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokenizer: Any) -> TemplateSources:
        """Find the templates. A processor or a tokenizer may have several named templates.

        Raises:
            UnsupportedCheckpoint: There are several templates, but none is named "default". In this case transformers
                refuses all conversations.

        """
        named = _named(tokenizer.chat_template)
        own: Mapping[str, str] = {}
        for file in ("processor_config.json", "chat_template.json"):
            own = own or _named(checkpoint.json(file).get("chat_template"))
        if not own and (checkpoint.path / "chat_template.jinja").is_file():
            own = named
        for templates in (own, named):
            if templates and not {"default"} & {*templates, *own}:
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path} has the chat templates {', '.join(sorted(templates))}, but none named "
                    "default; rename one of them to default"
                )
        tool_use = named.get("tool_use") or own.get("tool_use")
        return cls(own.get("default"), named.get("default"), tool_use, {**own, **named})


def _named(templates: Any) -> Mapping[str, str]:
    """Return chat templates by name. A file has one template, a list of {"name", "template"}, or a mapping."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, Mapping)}
    if not isinstance(templates, Mapping):
        return {}
    return {name: source for name, source in templates.items() if isinstance(name, str) and isinstance(source, str)}


def _parts(turn: Mapping[str, Any]) -> list[Any]:
    return turn["content"] if isinstance(turn["content"], list) else []


def _with_texts(turn: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Replace each item of text embeddings with the text `mark`, because templates know only text and media."""
    given = {"type": "text", "text": mark}
    parts = [given if part["type"] == PROMPT else part for part in _parts(turn)]
    return {**turn, "content": parts or turn["content"]}


def _joined(content: Any, mark: str) -> Any:
    """Join the parts of a message, with `mark` for each media item.

    As in vLLM's "string" format, media precede the text, and each part is a line.
    """
    if not isinstance(content, list):
        return "" if content is None else content  # for None, a template would fail or write "None"
    media = [mark for part in content if mark and part["type"] != "text"]
    return "\n".join([*media, *(part["text"] for part in content if part["type"] == "text")])


def _with_items(text: str, mark: str, items: Sequence[str]) -> str:
    """Replace each `mark` with the text of its item. Raise InputError if the template lost or repeated a mark."""
    first, *pieces = text.split(mark)
    if len(pieces) != len(items):
        raise InputError(
            f"the chat template renders {len(pieces)} of {len(items)} media items; it must render all of them"
        )
    return first + "".join(item + piece for item, piece in zip(items, pieces, strict=True))


def as_dict(message: Message, wraps_strings: bool = False) -> dict[str, Any]:
    """Convert a message to the format of chat templates, with media as {"type": kind}.

    If `wraps_strings` is set, a string is replaced with a list of one text part.
    """
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            {"type": "text", "text": str(item.text)} if isinstance(item, Text) else {"type": item.kind}
            for item in content
        ]
    elif content is not None:
        content = str(content)  # convert subclasses of str, such as numpy's
        content = [{"type": "text", "text": content}] if wraps_strings else content
    return {"role": str(message.role), "content": content, **message.extra}
