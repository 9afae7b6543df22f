"""Tests for structured outputs that follow a reasoning section of limited length."""

from typing import Any

import pytest

from mindie_mm.errors import InputError
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from tests.structured.conftest import Takes

START, END = "<|audio_bos|>", "<|audio_eos|>"  # tokens of the embedded vocabulary that mark the reasoning
CHOICE: dict[str, Any] = {"choice": ("yes", "no"), "after": END}


def test_the_model_may_begin_with_the_output_if_the_reasoning_is_optional(takes: Takes) -> None:
    assert takes(f"a plan{END}yes", **CHOICE)
    assert not takes("yes", **CHOICE)
    for text, is_taken in ((f"{START}a plan{END}yes", True), ("yes", True), (f"a plan{END}yes", False)):
        assert takes(text, opening=START, **CHOICE) is is_taken
    both = CHOICE | {"opening": f"{START}thought "}
    assert takes(f"{START}thought a plan{END}yes", **both)
    assert not takes(f"{START}a plan{END}yes", **both)
    assert takes("<think>a plan</think>yes", opening="<think>", **CHOICE | {"after": "</think>"})


def test_the_reasoning_ends_when_its_budget_is_used_up(takes: Takes) -> None:
    one = "red"  # this is one token
    assert takes(f"{one}{END}yes", reasoning_tokens=1, **CHOICE)
    assert takes(f"{END}yes", reasoning_tokens=1, **CHOICE)
    assert not takes(f"{one}{one}{END}yes", reasoning_tokens=1, **CHOICE)
    assert takes(f"{one}{one}{END}yes", reasoning_tokens=2, **CHOICE)
    assert takes(f"{END}yes", reasoning_tokens=0, **CHOICE)
    assert not takes(f"{one}{END}yes", reasoning_tokens=0, **CHOICE)
    assert takes(f"{START}{one}{END}no", reasoning_tokens=1, opening=START, **CHOICE)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (CHOICE | {"after": "</think>", "reasoning_tokens": 3}, "no token </think>, which ends it"),
        (CHOICE | {"after": None, "reasoning_tokens": 3}, "require the field `after`"),
        (CHOICE | {"after": None, "opening": START}, "require the field `after`"),
        (CHOICE | {"reasoning_tokens": -1}, "at least 0"),
        (CHOICE | {"opening": ""}, "None or a non-empty string"),
    ],
)
def test_a_limit_on_reasoning_that_cannot_be_enforced_is_refused(
    grammars: Grammars, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        grammars.constraint(StructuredOutputs(**wanted))
