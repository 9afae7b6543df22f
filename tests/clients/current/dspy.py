"""Scenarios of DSPy: predictions over chat completions and over the Responses API, with media, tools and embeddings."""

from __future__ import annotations

import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not download the map

import dspy
from scenarios import BASE_URL, HELLO, HELLO_BACK, IMAGE, KEY, MODEL, RED_SQUARE, WHAT, report

KINDS = ("chat", "responses")


class Describe(dspy.Signature):
    """Name the color."""

    question: str = dspy.InputField()
    color: Literal["red", "blue"] = dspy.OutputField()


def _lm(**given: Any) -> dspy.LM:
    settings: dict[str, Any] = {"cache": False, "num_retries": 0, "temperature": 0, "max_tokens": 300} | given
    return dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, **settings)


def answers() -> None:
    for kind in KINDS:
        (answer,) = _lm(model_type=kind)(HELLO)
        assert (answer["text"] if isinstance(answer, dict) else answer) == HELLO_BACK


async def answers_async() -> None:
    for kind in KINDS:
        (answer,) = await _lm(model_type=kind).acall(HELLO)
        assert (answer["text"] if isinstance(answer, dict) else answer) == HELLO_BACK


def image() -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": WHAT}]
    (answer,) = _lm()(messages=[{"role": "user", "content": parts}])
    assert (answer["text"] if isinstance(answer, dict) else answer) == RED_SQUARE


def prediction() -> None:
    """DSPy does not know that the model follows schemas, so the schema is given."""
    schema = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
    form = {"type": "json_schema", "json_schema": {"name": "describe", "schema": schema}}
    with dspy.context(lm=_lm(response_format=form), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Describe)(question=WHAT).color in {"red", "blue"}


def embeddings() -> None:
    embed = dspy.Embedder(f"openai/{MODEL}", caching=False, api_base=BASE_URL, api_key=KEY)
    assert embed([HELLO, WHAT]).shape[0] == 2


report(globals())
