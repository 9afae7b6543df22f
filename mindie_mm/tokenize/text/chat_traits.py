"""Properties of chat templates that the service needs."""

from __future__ import annotations

import re

import msgspec


class ChatTraits(msgspec.Struct, frozen=True):
    """Properties of a checkpoint's chat template that determine how the service handles tools and reasoning."""

    template: str = ""
    """Jinja source for conversations with tools. Empty if the checkpoint has no template."""
    takes_system: bool = False
    """Whether the template writes system messages."""

    def names(self, variable: str) -> bool:
        """Return whether the template contains the name of a variable or of a key of messages."""
        return re.search(rf"\b{variable}\b", self.template) is not None
