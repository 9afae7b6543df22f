"""Tests that each sampling parameter of a request reaches the sampler."""

from typing import Any

import pytest
from pydantic import ValidationError

from mindie_mm.engine.requests.sampling_params import SamplingParams
from service.routes.generate import GenerateParameters
from service.routes.infer import InferParameters
from service.routes.tokens import DetokenizeBody
from service.schemas.body import Fields
from service.schemas.openai_types import ChatBody, CompletionBody

GIVEN: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": -2.0},
    "seed": 11,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "priority": -3,
    "cache_salt": "s",
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "bad_words": ["c", "d"],
    "allowed_token_ids": [3, 4, 5],
    "logprob_token_ids": [8, 9],
    "prompt_logprobs": 3,
}
CONVERTED = {
    "logit_bias": {3: -2.0},
    "stop": ("a", "b"),
    "stop_token_ids": (4, 5),
    "bad_words": ("c", "d"),
    "allowed_token_ids": (3, 4, 5),
    "logprob_token_ids": (8, 9),
}
ELSEWHERE = {
    "cut_max_tokens": "off with max_tokens, which it is about",
    "logprobs": "in each body in its own way",
    "bad_token_ids": "the tokens of bad_words",
    "json_schema": "as structured_outputs",
    "lora": "by the name of the model (test_loras.py)",
    "pooling": "for embeddings",
    "structured_outputs": "in many forms (test_structured_forms.py)",
}


def test_these_tests_cover_every_sampling_parameter() -> None:
    assert {*SamplingParams.__struct_fields__} == GIVEN.keys() | ELSEWHERE.keys()


def test_chats_and_completions_set_every_sampling_parameter() -> None:
    expected = SamplingParams(**GIVEN | CONVERTED)
    assert ChatBody(messages=[], **GIVEN).sampling_params(SamplingParams()) == expected
    assert CompletionBody(prompt="x", **GIVEN).sampling_params(SamplingParams()) == expected
    default = SamplingParams(max_tokens=9, cut_max_tokens=True)
    assert ChatBody(messages=[], **GIVEN).sampling_params(default) == expected
    assert ChatBody(messages=[]).sampling_params(default) == default
    nothing = dict.fromkeys(GIVEN)
    assert ChatBody(messages=[], **nothing).sampling_params(SamplingParams()) == SamplingParams()


def test_infer_sets_its_sampling_parameters() -> None:
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop", "cache_salt")
    given = {name: GIVEN[name] for name in names}
    expected = SamplingParams(max_tokens=5, **given | {"stop": ("a", "b")})
    assert InferParameters(max_new_tokens=5, **given).sampling_params(SamplingParams()) == expected
    assert (
        InferParameters(max_new_tokens=5, do_sample=False, temperature=0.5)
        .sampling_params(SamplingParams())
        .temperature
        == 0
    )


BODIES: list[tuple[type[Fields], dict[str, Any]]] = [
    (ChatBody, {"messages": []}),
    (CompletionBody, {"prompt": "x"}),
    (InferParameters, {}),
    (GenerateParameters, {}),
]


@pytest.mark.parametrize(("body", "rest"), BODIES)
def test_an_integer_may_be_written_as_a_float(body: type[Fields], rest: dict[str, Any]) -> None:
    """1.0 is accepted as 1, because some languages only have floats. Fractions, `true` and strings are refused."""
    names = [name for name, field in body.model_fields.items() if "int" in str(field.annotation).split(" | ")[0]]
    integers = [name for name in names if name != "prompt" and not name.endswith("token_ids")]
    assert len(integers) >= 4
    for name in integers:
        value = getattr(body(**rest | {name: 1.0}), name)
        assert (value, type(value)) == (1, int), name
        for wrong in (1.5, True, "1", 1e300, float("inf"), float("nan")):
            with pytest.raises(ValidationError):
                body(**rest | {name: wrong})


def test_token_ids_may_be_written_as_floats() -> None:
    assert ChatBody(messages=[], stop_token_ids=[4.0, 5]).stop_token_ids == (4, 5)
    assert CompletionBody(prompt=[4.0, 5]).prompts() == [[4, 5]]
    assert CompletionBody(prompt=[[4.0], [5]]).prompts() == [[4], [5]]
    assert DetokenizeBody(tokens=[4.0]).tokens == [4]
    for wrong in ([1.5], [True], [1e300]):
        with pytest.raises(ValidationError):
            CompletionBody(prompt=wrong)


@pytest.mark.parametrize(("stop", "strings"), [("a", ("a",)), (["a"], ("a",)), ([], ()), (None, ())])
def test_stop_may_be_a_string_or_a_list(stop: Any, strings: tuple[str, ...]) -> None:
    assert ChatBody(messages=[], stop=stop).sampling_params(SamplingParams()).stop == strings
    assert InferParameters(stop=stop).sampling_params(SamplingParams()).stop == strings
