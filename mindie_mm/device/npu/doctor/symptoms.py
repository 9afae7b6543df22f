"""Error texts of torch_npu, CANN and its driver, and what they mean: the table in symptoms.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that is known."""

    pattern: str
    """Regular expression that finds it."""
    meaning: str
    advice: str


_TABLE = files(__package__).joinpath("symptoms.toml").read_text(encoding="utf-8")
SYMPTOMS = tuple(Symptom(**entry) for entry in tomllib.loads(_TABLE)["symptoms"])
"""In order: of several in a text, the first one counts."""


def explain(text: str) -> Symptom | None:
    """The first symptom that is in `text`."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text)), None)
