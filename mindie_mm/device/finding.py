"""The result type of the checks of `mindie-mm doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    status: Literal["ok", "warning", "error"]
    """The status is "error" only if the problem would keep the service from starting."""
    found: str
    """Description of the current state."""
    advice: str = ""
    """Advice for the operator. Empty if nothing needs to be done."""
