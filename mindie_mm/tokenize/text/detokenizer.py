"""Incremental decoding of token ids to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenizers import Tokenizer

from mindie_mm.errors import UnsupportedCheckpoint, panics_as
from mindie_mm.nn.checkpoint.directory import Checkpoint

_UNFINISHED = 64
"""Maximum number of pending tokens that have not produced text. A character has at most 4 bytes."""


class TextStream:
    """An incremental decoder. Text that was returned does not change later.

    A token is decoded together with the ids of the piece before it, because its text may depend on them: decoders drop
    a space at the beginning of the text, and several bytes may form one character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        silent: Collection[int] | None = None,
    ) -> None:
        """Create a decoder for one text.

        `silent` contains the ids of the tokens that produce no text. If it is None, `skip_special_tokens` determines
        these tokens. The other arguments have the same meaning as in `SamplingParams`.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and silent is None
        self._silent = silent or ()
        joined = not (skip_special_tokens or spaces_between_special_tokens)
        self._joined = tokenizer.get_added_tokens_decoder() if joined else {}  # added tokens without spaces in between
        self._after_added = False
        self._last: list[int] = []  # the ids of the last piece
        self._last_text = ""  # text of the last piece
        self._behind: list[int] = []  # ids that have not produced text yet

    def push(self, token_id: int) -> str:
        """Decode another token, and return new text that cannot change.

        The text is empty for a special token and for an incomplete character.
        """
        self._behind.append(token_id)
        if self._joined:
            after_added, self._after_added = self._after_added, token_id in self._joined
            if after_added and self._after_added:
                return self._spell(token_id)
        text = self._decoded([*self._last, *self._behind])
        # If the list could grow without limit, the whole list would be decoded again for each further token.
        if len(self._behind) <= _UNFINISHED and (len(text) <= len(self._last_text) or text.endswith("\ufffd")):
            return ""
        return self._tell(text)

    def _spell(self, token_id: int) -> str:
        """Return the text of an added token that directly follows another one."""
        self._last, self._behind = self._behind, []
        self._last_text = self._decoded(self._last)
        text: str = self._joined[token_id].content
        return text

    def flush(self) -> str:
        """Return the remaining text.

        Incomplete characters become U+FFFD, as if all ids were decoded at once.
        """
        return self._tell(self._decoded([*self._last, *self._behind]))

    def _tell(self, text: str) -> str:
        """Return the new part of `text`, which normally begins with the text of the last piece."""
        # If it does not, a new byte has changed a character that was already returned.
        piece = text[len(self._last_text) :] if text.startswith(self._last_text) else self._decoded(self._behind)
        if piece:
            self._last = self._behind
            self._last_text = self._decoded(self._last)
        self._behind = []
        return piece

    def _decoded(self, token_ids: list[int]) -> str:
        if self._silent:
            token_ids = [token_id for token_id in token_ids if token_id not in self._silent]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
        return text


def is_skipped(tokenizer: Tokenizer, token_id: int) -> bool:
    """Return whether a token is left out of the text if `skip_special_tokens` is set."""
    return not tokenizer.decode([token_id], skip_special_tokens=True) and bool(
        tokenizer.decode([token_id], skip_special_tokens=False)
    )


@dataclass(frozen=True, slots=True)
class StopScope:
    """The part of an output in which stop strings have an effect: after the reasoning and before the first tool call.

    A stop string in reasoning would leave no content, and one in a call would leave half a call.
    """

    reasoning: tuple[str, str] | None = None
    """Texts that start and end the reasoning, or None if the model does not reason. An output that begins with other
    text has no reasoning."""
    opened: bool = False
    """True if the prompt already contains the start of the reasoning."""
    openings: tuple[str, ...] = ()
    """Texts that begin tool calls."""
    starts: tuple[str, ...] = ()
    """Texts that begin the content if it consists of calls without an opening."""

    def begin_in(self, text: str) -> int | None:
        """Return the index in `text` after the reasoning, or None if more text is needed to decide this."""
        if self.reasoning is None:
            return 0
        start, end = self.reasoning[0].rstrip(), self.reasoning[1]
        head = text.lstrip()
        if self.opened or head.startswith(start):
            at = text.find(end, 0 if self.opened else text.index(start) + len(start))
            return at + len(end) if at >= 0 else None
        return None if start.startswith(head) else 0

    def end_in(self, text: str, begin: int, searched: int) -> int | None:
        """Return the index in `text` at which the first call begins, or None if there is none.

        Args:
            text: Text of the output.
            begin: Index at which the content begins.
            searched: Index before which no opening ends.

        """
        if self.starts and (content := text[begin:].lstrip()).startswith(self.starts):
            return len(text) - len(content)
        found = (text.find(opening, max(begin, searched - len(opening))) for opening in self.openings)
        return min((at for at in found if at >= 0), default=None)

    def is_in_reasoning(self, text: str) -> bool:
        """Return whether reasoning has begun in `text`. The reasoning must not have ended."""
        return self.opened or (self.reasoning is not None and self.reasoning[0].rstrip() in text)


class Detokenizer:
    """The output of one request as text. Text that may be the beginning of a stop string is held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        silent: Collection[int] | None = None,
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        scope: StopScope | None = None,
    ) -> None:
        """Create a detokenizer. `TextStream` and `SamplingParams` describe the other arguments.

        `scope` is the part of the output in which stop strings have an effect. None means the whole output.
        """
        self._stream = TextStream(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            silent=silent,
        )
        self._min_tokens = min_tokens
        self._stop = stop
        self._includes_stop = include_stop_str_in_output
        self._scope = StopScope() if scope is None else scope
        self._begin: int | None = None
        """Index at which the scope begins. None until it is known."""
        self._end: int | None = None
        """Index at which the scope ends. None until it is known."""
        self._num_tokens = 0
        self._text = ""
        self._emitted = 0
        self.stopped_by: str | None = None
        """The stop string that ended the text."""
        self.num_dropped = 0
        """Number of tokens that were pushed after the token that completed the stop string."""

    def push(self, token_ids: list[int]) -> str:
        """Decode more tokens, and return new text that cannot change, or an empty string after a stop string."""
        if not self._stop:
            return "".join([self._stream.push(token_id) for token_id in token_ids])
        for index, token_id in enumerate(token_ids):
            if self.stopped_by is not None:
                self.num_dropped += len(token_ids) - index
                break
            self._num_tokens += 1
            if piece := self._stream.push(token_id):
                self._append(piece)
        return self._emit(self._certain())

    def flush(self) -> str:
        """Return the remaining text."""
        rest = self._stream.flush()
        if not self._stop:
            return rest
        self._append(rest)
        return self._emit(len(self._text))

    def _append(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        before = len(self._text)
        self._text += piece
        if self._begin is None:
            self._begin = self._scope.begin_in(self._text)
            if self._begin is None:
                return
            before = self._begin
        if self._end is None:
            self._end = self._scope.end_in(self._text, self._begin, before)
        # Only stop strings that end in this piece count. An earlier stop string, before `min_tokens`, is ignored.
        places = ((self._text.find(text, max(self._begin, before - len(text) + 1)), text) for text in self._stop)
        hits = [(at, text) for at, text in places if 0 <= at <= self._last_start()]
        if hits and self._num_tokens >= self._min_tokens:
            at, self.stopped_by = min(hits)
            self._text = self._text[: at + len(self.stopped_by) if self._includes_stop else at]

    def _last_start(self) -> int:
        """Return the last index at which a stop string may begin."""
        return len(self._text) - 1 if self._end is None else self._end

    def _certain(self) -> int:
        """Return the index at which an incomplete stop string may begin, or the length of the text if there is none."""
        text = self._text
        if self._begin is None:
            return len(text) if self._scope.is_in_reasoning(text) else 0
        if self.stopped_by is None and not self._includes_stop:
            # An index that was ruled out stays ruled out, so the search begins where the returned text ends.
            for start in range(max(self._emitted, self._begin), self._last_start() + 1):
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stop):
                    return start
        return len(text)

    def _emit(self, stop: int) -> str:
        text = self._text[self._emitted : stop]
        self._emitted = max(self._emitted, stop)
        return text


def load_tokenizer(checkpoint: Checkpoint, family: str | None = None, shown_tokens: Collection[str] = ()) -> Tokenizer:
    """Return the checkpoint's tokenizer, for decoding.

    Args:
        checkpoint: Checkpoint of the tokenizer.
        family: Same as in `family_of`.
        shown_tokens: Special tokens that are shown in answers.

    Raises:
        UnsupportedCheckpoint: The checkpoint is not supported.

    """
    file = checkpoint.path / "tokenizer.json"
    if file.is_file():
        if not shown_tokens:
            with panics_as(UnsupportedCheckpoint, f"{file} cannot be read"):
                return Tokenizer.from_file(str(file))
        stated = {token["content"] for token in checkpoint.json("tokenizer.json").get("added_tokens", ())}
        if stated.issuperset(shown_tokens):
            return checkpoint.tokenizer(lambda token: token["special"] and token["content"] not in shown_tokens)
    # Import this late, because only checkpoints whose tokenizer.json lacks tokens need torch and a conversion.
    from mindie_mm.models import family_of

    converted: Tokenizer = family_of(checkpoint, family).tokenizer(checkpoint).backend_tokenizer
    return converted
