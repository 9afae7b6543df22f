"""A tool that the model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the object that contains the arguments, or None for a function without arguments."""

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments. It is always the schema of an object."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}
