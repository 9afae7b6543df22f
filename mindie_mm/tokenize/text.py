"""Text to ids, such that text can never make a control token.

A prompt is rendered to one string: by the checkpoint's chat template, or item after item. Control tokens that the
template, or a media item, puts there are meant. One that a caller's text spells out, or that the pieces of several
texts would join to, is text. So before rendering, the first character of any such spelling is replaced by a
private-use character that occurs nowhere else; afterwards the string is cut at its control tokens, which now are the
meant ones, and what lies between is restored and encoded with their recognition off. A prompt that spells out none,
which is nearly every one, is encoded whole, exactly as transformers does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Item, Message, Text
from mindie_mm.nn.checkpoint import Checkpoint

_FIRST_PRIVATE_USE = 0xE000
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "padding", "truncation", "max_length"}
    | {"tokenize", "tokenizer_kwargs", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"sanitize_control_tokens"}
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as one string, control tokens spelled out."""

    text: str
    restore: Mapping[int, str]
    """For str.translate: private-use characters to those that they stand for; empty where nothing was replaced."""


class TextEncoder:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Any,
        placeholder_ids: Iterable[int],
        chat_template: str | None = None,
        control_pieces: Iterable[int] = (),
    ) -> None:
        """`tokenizer` is transformers' fast one, `chat_template` for a checkpoint that has none.

        `placeholder_ids` are control tokens, whatever the file says, and so are `control_pieces`, which are no added
        tokens but of the vocabulary.
        """
        self._tokenizer = tokenizer
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = _chat_template(checkpoint, tokenizer) or chat_template
        added = tokenizer.added_tokens_decoder
        missing = sorted(set(placeholder_ids) - added.keys())
        if missing:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: the tokenizer has no added tokens of the media ids {missing}"
            )
        self._control_ids = {
            token.content: index for index, token in added.items() if token.special or index in set(placeholder_ids)
        }
        pieces = set(control_pieces) - added.keys()
        self._control_ids |= {tokenizer.convert_ids_to_tokens(index): index for index in pieces}
        # What no piece of the vocabulary spells is the unknown token, which is text.
        self._never_text = {*self._control_ids.values()} - {tokenizer.unk_token_id}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._spelling = _spelling_pattern(longest_first)
        self._prefix, self._suffix = self._frame()
        self._bos: str | None = tokenizer.bos_token

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._template is not None

    def spell(self, ids: Sequence[int]) -> str:
        """Control tokens as they stand in a rendered prompt."""
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def render_items(self, items: Sequence[Item | str]) -> Rendered:
        """One after another, no template; a str is taken as it is, control tokens and all."""
        escapes = self._escapes(item.text for item in items if isinstance(item, Text))
        pieces = [self._escape(item.text, escapes) if isinstance(item, Text) else item for item in items]
        return Rendered("".join(str(piece) for piece in pieces), _inverse(escapes))

    def render_messages(
        self, messages: Sequence[Message], add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> Rendered:
        """Through the chat template. InputError where there is none, or where it refuses the messages."""
        if self._template is None:
            raise InputError("the checkpoint has no chat template; give a list of items or a text")
        if reserved := _RESERVED_TEMPLATE_KWARGS & template_kwargs.keys():
            raise InputError(f"chat_template_kwargs cannot hold {min(reserved)!r}")
        conversation = [_as_dict(message) for message in messages]
        escapes = self._escapes([*_strings(conversation), *_strings(template_kwargs)])
        if escapes:
            conversation = self._escape(conversation, escapes)
            template_kwargs = self._escape(dict(template_kwargs), escapes)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise InputError(f"the chat template refuses these messages: {error}") from error
        return Rendered(text, _inverse(escapes))

    def replace_markers(self, rendered: Rendered, markers: Sequence[str], texts: Sequence[str]) -> Rendered:
        """`rendered` with the k-th of all `markers` in it, each an item's, replaced by the k-th of `texts`.

        InputError where it has others, or as many others: a template can drop an item.
        """
        longest_first = sorted(set(markers), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", rendered.text)
        if pieces[1::2] != list(markers):
            raise InputError(
                f"the prompt has {len(pieces) // 2} media placeholders for {len(markers)} media items, or in another "
                "order: the chat template does not take these messages"
            )
        pieces[1::2] = texts
        return Rendered("".join(pieces), rendered.restore)

    def replace_marker_ids(self, ids: Sequence[int], markers: Sequence[str], texts: Sequence[str]) -> list[int]:
        """The same of a prompt that is encoded already. A text is encoded apart from its neighbours."""
        remaining = list(ids)
        replaced: list[int] = []
        for marker, text in zip(markers, texts, strict=True):
            if marker == text:
                continue
            marker_ids = self._encode(marker, plain=False)
            if (place := self._find(remaining, marker_ids)) is None:
                raise InputError(f"the prompt's ids have no placeholder {marker} for one of {len(markers)} media items")
            replaced += [*remaining[:place], *self._encode(text, plain=False)]
            remaining = remaining[place + len(marker_ids) :]
        for marker in {marker for marker, text in zip(markers, texts, strict=True) if marker != text}:
            if self._find(remaining, self._encode(marker, plain=False)) is not None:
                raise InputError(
                    f"the prompt's ids have more placeholders {marker} than the {len(markers)} media items"
                )
        return [*replaced, *remaining]

    def count_marker(self, ids: Sequence[int], marker: str) -> int:
        """How often `marker` stands in a prompt that is encoded already."""
        wanted = self._encode(marker, plain=False)
        size = len(wanted)
        return sum(list(ids[i : i + size]) == wanted for i in range(len(ids) - size + 1))

    @staticmethod
    def _find(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
        """Where `wanted` first stands in `ids`."""
        size = len(wanted)
        return next((i for i in range(len(ids) - size + 1) if list(ids[i : i + size]) == list(wanted)), None)

    def encode(self, rendered: Rendered) -> list[int]:
        """Ids, between what the tokenizer puts around a text, such as a BOS, unless the text begins with it."""
        ids = self._encode_pieces(rendered) if rendered.restore else self._encode(rendered.text, plain=False)
        return ids if self._bos and rendered.text.startswith(self._bos) else [*self._prefix, *ids, *self._suffix]

    def _encode_pieces(self, rendered: Rendered) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._control.split(rendered.text)):
            if index % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                ids += self._encode_plain(piece.translate(rendered.restore))
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text that may spell control tokens, without one.

        A Unigram model has them among its pieces, and finds them although they are not to be recognised: there a
        spelling is cut behind its first character. InputError where a character alone makes one.
        """
        ids = self._encode(text, plain=True)
        if self._never_text.isdisjoint(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        ids = [index for start, stop in pairwise(cuts) for index in self._encode(text[start:stop], plain=True)]
        if made := self._never_text.intersection(ids):
            raise InputError(f"the text makes the control token {self.spell(sorted(made)[:1])}")
        return ids

    def _encode(self, text: str, plain: bool) -> list[int]:
        """Ids of `text`; if `plain`, none of its special tokens is recognised."""
        self._backend.encode_special_tokens = plain
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        framed = self._tokenizer.encode("a")
        start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[:start], framed[start + len(bare) :]

    def _escapes(self, texts: Iterable[str]) -> dict[str, str]:
        """For each character that begins a spelling in `texts`, one that occurs in none of them; mostly empty."""
        texts = list(texts)
        spelled = {match[0] for text in texts for match in self._spelling.finditer(text)}
        if not spelled:
            return {}
        taken = set().union(*texts, self._template or "")
        free = (chr(code) for code in count(_FIRST_PRIVATE_USE) if chr(code) not in taken)
        return dict(zip(sorted(spelled), free, strict=False))

    def _escape(self, value: Any, escapes: Mapping[str, str]) -> Any:
        """`value`, in all its strings, with `escapes` applied where a spelling begins."""
        if not escapes:
            return value
        if isinstance(value, str):
            return self._spelling.sub(lambda match: escapes[match[0]], value)
        if isinstance(value, Mapping):
            return {self._escape(key, escapes): self._escape(entry, escapes) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escape(entry, escapes) for entry in value]
        return value


def _chat_template(checkpoint: Checkpoint, tokenizer: Any) -> str | None:
    """chat_template.jinja and tokenizer_config.json are the tokenizer's, chat_template.json is the processor's."""
    if not (checkpoint.path / "chat_template.jinja").is_file():
        template = checkpoint.json("chat_template.json").get("chat_template")
        if isinstance(template, str):
            return template
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _spelling_pattern(control: Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of each control token in a text, and of what its end may begin.

    The latter, with any blanks behind it that a template may strip, would become a token if the template put the
    right text behind it.
    """
    prefixes = {token[:size] for token in control for size in range(1, len(token))}
    ends = "|".join(map(re.escape, sorted(prefixes, key=len, reverse=True)))
    tokens = "|".join(map(re.escape, control))
    first = "".join({re.escape(token[0]) for token in control})
    return re.compile(rf"(?=(?:{tokens})|(?:{ends or '(?!)'})\s*\Z)[{first}]")


def _as_dict(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            {"type": "text", "text": item.text} if isinstance(item, Text) else {"type": item.kind} for item in content
        ]
    return {"role": message.role, "content": content, **message.extra}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _strings(entry)


def _inverse(escapes: Mapping[str, str]) -> dict[int, str]:
    return {ord(replacement): original for original, replacement in escapes.items()}
