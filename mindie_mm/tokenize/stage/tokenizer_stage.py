"""The interface of the tokenizers that make the prompts of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mindie_mm.processes.restarts import Restarts
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.tokenize.text.chat_traits import ChatTraits


class TokenizerStage(ABC):
    """A tokenizer for prompts of many requests, in a process of its own or in the caller's."""

    shown_tokens: list[str]
    """As `Prompts.shown_tokens`."""
    chat_traits: ChatTraits
    """As `Prompts.chat_traits`."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Ids of the processes that accept requests."""

    @property
    @abstractmethod
    def restarts(self) -> Restarts:
        """Counts of restarts and of failed attempts."""

    @abstractmethod
    def check(self) -> None:
        """Raise ProcessDied if no requests are accepted."""

    @abstractmethod
    async def tokenize_together(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        """Return the prompt of each of `requests`. Their media get room in shared memory together.

        The blocks of a cancelled call are freed. All requests have the same path file.

        Raises:
            InputError: A request is wrong.
            ArenaFull: There was no room for the media in time.
            ProcessDied: The process died, or the tokenizer is closed.
            NoProcess: No process came up in time.

        """

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """Return the prompt of one request. Errors are those of `tokenize_together`."""
        (prompt,) = await self.tokenize_together([request])
        return prompt

    @abstractmethod
    async def close(self) -> None:
        """End the stage and remove its arena."""
