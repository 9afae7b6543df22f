"""Properties of chat templates that the service needs."""

from __future__ import annotations

import re

import msgspec


class ChatTraits(msgspec.Struct, frozen=True):
    """Properties of a checkpoint's chat template that decide how tools and reasoning are served."""

    template: str = ""
    """Jinja source for conversations with tools. Empty: the checkpoint has no template."""
    takes_system: bool = False
    """Whether the template shows a system message."""

    def names(self, variable: str) -> bool:
        """Return whether the template names a variable, or a key of messages."""
        return re.search(rf"\b{variable}\b", self.template) is not None
