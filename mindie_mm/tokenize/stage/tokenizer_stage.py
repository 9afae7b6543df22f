"""The interface of tokenizers that produce prompts for an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from mindie_mm.inputs import Media
from mindie_mm.processes.restarts import Restarts
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.prompt import PlannedPrompt, Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.tokenizer_traits import TokenizerTraits


class TokenizerStage(ABC):
    """A tokenizer for the prompts of requests, which runs in a separate process or in the caller's process."""

    traits: TokenizerTraits
    """Properties of the checkpoint."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the tokenizers that accept requests."""

    @property
    @abstractmethod
    def restarts(self) -> Restarts:
        """How often the tokenizer was restarted, and how often a restart failed."""

    @abstractmethod
    def check(self) -> None:
        """Raise ProcessDied if the tokenizer does not accept requests."""

    @abstractmethod
    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        """Return the prompts of `requests`. Blocks for all their media are allocated together.

        All requests must have the same path file. If the call is canceled, its blocks are freed.

        Raises:
            InputError: A request is invalid.
            ArenaFull: Not enough memory for the media became free in time.
            ProcessDied: The process died, or the tokenizer is closed.
            NoProcess: No process was ready in time.

        """

    @abstractmethod
    async def plan(self, requests: Sequence[TokenizeRequest], *, fill: bool = False) -> list[PlannedPrompt]:
        """Return the prompts of `requests` without preprocessing their media, and without using the arena.

        With `fill`, the media are preprocessed as in `tokenize_together`.

        Raises:
            InputError: A request is invalid.
            ArenaFull: Not enough memory for the media became free in time.
            ProcessDied: The process died, or the tokenizer is closed.
            NoProcess: No process was ready in time.

        """

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """Return the prompt of one request. `tokenize_together` describes the errors."""
        (prompt,) = await self.tokenize_together([request])
        return prompt

    @abstractmethod
    async def cut(
        self, speech: Media, folder: Path, max_bytes: int, domain: tuple[bytes, str], *, always: bool
    ) -> Clips:
        """Cut speech into clips. `MediaStage.cut` describes the arguments and errors.

        Raises:
            ProcessDied: The process died, or the tokenizer is closed.
            NoProcess: No process was ready in time.

        """

    @abstractmethod
    async def close(self) -> None:
        """End the stage and remove its arena."""
