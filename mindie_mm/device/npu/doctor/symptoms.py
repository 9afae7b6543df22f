"""Known error texts of torch_npu, CANN and the driver, with their meanings, from symptoms.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known error text."""

    pattern: str
    """Regular expression that finds the text."""
    meaning: str
    advice: str


_TABLE = files(__package__).joinpath("symptoms.toml").read_text(encoding="utf-8")
SYMPTOMS = tuple(Symptom(**entry) for entry in tomllib.loads(_TABLE)["symptoms"])
"""All symptoms, in order of precedence."""


def explain(text: str) -> Symptom | None:
    """Return the first symptom that `text` contains, or None."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text)), None)
