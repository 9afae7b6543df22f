"""What an engine's side asks of whatever makes its prompts."""

from __future__ import annotations

from typing import Protocol

from mindie_mm.processes.restarts import Restarts
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest


class TokenizerStage(Protocol):
    """Where prompts are made: a tokenizer process, or the caller's own."""

    shown_tokens: list[str]
    """As `Tokenizer.shown_tokens`."""

    @property
    def pids(self) -> list[int]:
        """Processes that tokenise at this moment."""

    @property
    def restarts(self) -> Restarts:
        """How often processes were started in place of dead ones."""

    def check(self) -> None:
        """ProcessDied while none does."""

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The request's prompt, its media in shared memory."""

    async def close(self) -> None:
        """Ends it; its arenas go with it."""
