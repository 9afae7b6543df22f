"""What `mindie-mm doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    subject: str
    status: Literal["ok", "warning", "error"]
    """error: it would keep the service from starting."""
    found: str
    """What is there."""
    advice: str = ""
    """What to do about it; empty where it is fine."""
