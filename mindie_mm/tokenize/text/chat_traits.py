"""Properties of chat templates that the service needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec


class ChatTraits(msgspec.Struct, frozen=True):
    """Properties of a checkpoint's chat template that determine how the service handles tools and reasoning."""

    template: str = ""
    """Jinja source for conversations with tools. Empty if the checkpoint has no template."""
    takes_system: bool = False
    """True if the template writes system messages."""
    takes_late_system: bool = False
    """True if the template writes system messages that follow other messages."""

    def names(self, variable: str) -> bool:
        """Return whether the template contains the name of a variable or of a key of messages."""
        # Most templates lack most names, and `in` notices this much faster than the search.
        return variable in self.template and re.search(rf"\b{variable}\b", self.template) is not None

    def with_effort(
        self, variables: Mapping[str, Any] | None, reasoning_effort: str | None
    ) -> tuple[dict[str, Any], str | None]:
        """Return the variables and the reasoning effort for the template.

        If the template has only `enable_thinking`, the effort turns thinking on or off.
        """
        given = dict(variables or {})
        if reasoning_effort and not self.names("reasoning_effort") and self.names("enable_thinking"):
            given.setdefault("enable_thinking", reasoning_effort != "none")
            reasoning_effort = None
        return given, reasoning_effort
