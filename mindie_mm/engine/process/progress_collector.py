"""The collector of progress, which sends the client fewer and larger messages.

Each message costs the service a fixed processor time, whatever the number of its tokens. If a decode step is quicker
than this time, one message per token would slow down the engine, because both processes share the processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from mindie_mm.engine.requests.engine_messages import Progress, Stepped

HOLD_S = 0.01
"""Maximum time in seconds that a token is held. It is a tenth of the time in which people notice a delay."""


class ProgressCollector:
    """Tokens that are held back, so that one message carries the tokens of several steps.

    Only tokens between the first and the last token of a request are held. First tokens, last tokens, errors and news
    of media are sent at once, together with all held tokens. No token is held for longer than `HOLD_S` seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty collector. `clock` returns the time in seconds."""
        self._clock = clock
        self._held: dict[str, list[Progress]] = {}
        """Progress that has not been sent, by the id of its request."""
        self._held_since_s = 0.0
        self._last_step_s = clock()
        """Time of the last step."""

    def add(self, stepped: Stepped) -> Stepped | None:
        """Take the results of a step. Return the message to send, or None if all results are held.

        The duration of the next step is estimated by the duration of this step. The estimate holds if each running
        request has advanced by a token, because the next step then does the same.
        """
        now_s = self._clock()
        step_s, self._last_step_s = now_s - self._last_step_s, now_s
        if not self._held:
            self._held_since_s = now_s
        for progress in stepped.progress:
            self._held.setdefault(progress.request_id, []).append(progress)
        only_decodes = len({progress.request_id for progress in stepped.progress}) == stepped.stats.num_running > 0
        in_time = now_s + step_s <= self._held_since_s + HOLD_S
        if only_decodes and in_time and all(map(_can_wait, stepped.progress)):
            return None
        return Stepped(self.take(), stepped.stats)

    def take(self) -> list[Progress]:
        """Return all held progress, with one Progress for the tokens of each request. The collector is empty then.

        Call this method before work that may take longer than a step.
        """
        held, self._held = self._held, {}
        return [progress for parts in held.values() for progress in _merged(parts)]


def _can_wait(progress: Progress) -> bool:
    """Return whether the progress consists of a token that is neither the first nor the last."""
    ends = progress.finish_reason is not None or progress.error is not None
    return bool(progress.token_ids) and progress.cached_tokens is None and not ends and not progress.media_consumed


def _merged(parts: Sequence[Progress]) -> list[Progress]:
    """Merge the tokens of one request. Progress without tokens, such as an error, follows the tokens."""
    with_tokens = [part for part in parts if part.token_ids]
    if len(with_tokens) < 2:
        return [*parts]
    last = msgspec.structs.replace(
        with_tokens[-1],
        token_ids=[token_id for part in with_tokens for token_id in part.token_ids],
        logprobs=None
        if with_tokens[-1].logprobs is None
        else [one for part in with_tokens for one in part.logprobs or ()],
    )
    return [last, *(part for part in parts if not part.token_ids)]
