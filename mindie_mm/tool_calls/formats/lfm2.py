"""The format of LFM2 and LFM2.5."""

from __future__ import annotations

import sys
from collections.abc import Collection

from mindie_mm.tool_calls.formats.pythonic import PythonicParser
from mindie_mm.tool_calls.json_calls import JsonCallParser
from mindie_mm.tool_calls.scanner import NAME, Ended, Step

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Parser(PythonicParser, JsonCallParser):
    """A parser of `<|tool_call_start|>[f(a=1, s='x'), g()]<|tool_call_end|>`, whose values are Python literals.

    The brackets may be missing around a single call. A call may also be a JSON object, because a system message can ask
    for JSON. The chat templates do not escape quotes, so a quote within a string ends it only if the call can continue
    after the quote. vLLM and SGLang call this format `lfm2`.
    """

    markers = (_START, _END)
    openings = (_START,)
    closings = (_END,)
    starts = ()
    tool_names = NAME
    around = (f"{_START}[", ", ", f"]{_END}")

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether the template contains the marker, or lists the tools as templates of LFM2 do."""
        return _START in template or ("List of tools: " in template and _START in vocabulary)

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, or a list of calls."""
        yield from self.space()
        is_list = bool((yield from self.accept("[")))
        yield from self.space()
        is_over = is_list and bool((yield from self.accept("]")))
        while not is_over:
            yield from self.space()
            if (yield from self.follows("{")):
                yield from self.call_object()
            else:
                yield from self.python_call()
            yield from self.space()
            is_over = not is_list or (yield from self.expect(",", "]")) == "]"
        self.taken()
        if (yield from self.close(_END)):
            yield from self._drop_repetitions()

    def ends_string(self, quote: str) -> Step[bool]:
        """If `quote` follows and ends the string, read it. Return whether it ended the string."""
        start = self._at - self._kept
        if not (yield from super().ends_string(quote)):
            return False
        stop = self._at - self._kept
        ends = yield from self._continues()
        self._at = self._kept + (stop if ends else start)
        return ends

    def _continues(self) -> Step[bool]:
        yield from self.space()
        if (yield from self.surely_at_end()):
            return True
        following = yield from self.peek()
        if following != ")":
            return following in ",:]}"
        self._at += 1
        yield from self.space()
        return (yield from self.surely_at_end()) or bool((yield from self.surely_follows(",", "]", _END)))

    def _drop_repetitions(self) -> Step[None]:
        """Drop lists of calls without a start marker. The models sometimes repeat a list after its end marker."""
        yield from self.space()
        while (yield from self.follows("[")):
            try:
                yield from self.until(_START, _END, at_most=sys.maxsize)
            except Ended:
                break
            if not (yield from self.accept(_END)):
                break
            self.taken()
            yield from self.space()
        self._at = self._kept
