"""Each setting of the sampler can be asked for over HTTP, under its own name, and reaches it."""

from typing import Any

import pytest

from mindie_mm.engine.sampling_params import SamplingParams
from service.infer import InferParameters
from service.openai_types import ChatBody, CompletionBody

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
    "cache_salt": "s",
}
MADE = {"logit_bias": {3: -2.0}, "stop": ("a", "b"), "stop_token_ids": (4, 5)}
ELSEWHERE = {
    "logprobs": "in each body in its own way",
    "prompt_logprobs": "of an echoed prompt",
    "json_schema": "in response_format",
}


def test_every_setting_is_given_here() -> None:
    assert {*SamplingParams.__struct_fields__} == GIVEN.keys() | ELSEWHERE.keys()


def test_chat_and_completions() -> None:
    expected = SamplingParams(**GIVEN | MADE)
    assert ChatBody(messages=[], **GIVEN).sampling_params() == expected
    assert CompletionBody(prompt="x", **GIVEN).sampling_params() == expected
    nothing = dict.fromkeys(GIVEN)
    assert ChatBody(messages=[], **nothing).sampling_params() == SamplingParams()


def test_infer() -> None:
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop", "cache_salt")
    given = {name: GIVEN[name] for name in names}
    expected = SamplingParams(max_tokens=5, **given | {"stop": ("a", "b")})
    assert InferParameters(max_new_tokens=5, **given).sampling_params() == expected
    assert InferParameters(max_new_tokens=5, do_sample=False, temperature=0.5).sampling_params().temperature == 0


@pytest.mark.parametrize(("stop", "strings"), [("a", ("a",)), (["a"], ("a",)), ([], ()), (None, ())])
def test_stop_strings_come_alone_or_in_a_list(stop: Any, strings: tuple[str, ...]) -> None:
    assert ChatBody(messages=[], stop=stop).sampling_params().stop == strings
    assert InferParameters(stop=stop).sampling_params().stop == strings
