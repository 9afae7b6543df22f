"""Tests for the request fields that vLLM adds to OpenAI's API."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from service.schemas.body import Settings
from service.schemas.extra_fields import ExtraFields
from tests.service.conftest import SETTINGS, TINY
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text()
HELLO: Any = [{"role": "user", "content": "Hello!"}]
GREETING = CHAT_ANSWERS["hello"]
VOCABULARY = 792
END = 779


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def chat(client: openai.OpenAI, messages: Any = HELLO, **changes: Any) -> Any:
    known = {name: changes.pop(name) for name in ("stop", "logprobs", "top_logprobs", "n", "stream") if name in changes}
    settings = {"temperature": 0, "max_tokens": 64, **known}
    return client.chat.completions.create(model="tiny", messages=messages, **settings, extra_body=changes)


def streamed(client: openai.OpenAI, messages: Any = HELLO, **changes: Any) -> list[Any]:
    return [*chat(client, messages, **changes, stream=True)]


def text(answer: Any) -> str:
    found: str = answer.choices[0].message.content
    return found


def texts(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def refusal(http: Any, route: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if route.endswith("chat/completions") else {"prompt": "Hello"}
    answer = http.post(route, json={"max_tokens": 4, "temperature": 0, **given, **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert len(error["message"]) < 300
    return error


# --- text


def test_the_stop_string_is_included_whole_and_streamed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The bytes of the log-probabilities end where the text ends, even if that is inside a token."""
    for size in (1, 2, 3):
        stop = GREETING[3 : 3 + size]
        expected = GREETING[: GREETING.index(stop) + size]
        changes = {"stop": stop, "include_stop_str_in_output": True, "logprobs": True}
        answer = chat(client, **changes)
        assert text(answer) == expected
        assert answer.choices[0].stop_reason == stop
        chunks = streamed(client, **changes)
        assert texts(chunks) == expected
        spelled = [answer.choices[0].logprobs.content]
        spelled.append([one for chunk in chunks if (own := chunk.choices[0].logprobs) for one in own.content])
        for positions in spelled:
            assert bytes(byte for one in positions for byte in one.bytes).decode() == expected


def test_special_tokens_are_shown_on_request(client: openai.OpenAI) -> None:
    """Only with `include_stop_str_in_output` does the text include the special token that ends the answer."""
    shown = {"skip_special_tokens": False}
    forced = {"allowed_token_ids": [778, 780], "logit_bias": {"778": 50}, "max_tokens": 2}
    assert text(chat(client, **shown)) == GREETING
    assert text(chat(client, **shown, include_stop_str_in_output=True)) == f"{GREETING}<|im_end|>"
    assert text(chat(client, include_stop_str_in_output=True)) == GREETING
    assert text(chat(client, **forced)) == ""
    for spaces in (False, True):
        answer = chat(client, **forced, **shown, spaces_between_special_tokens=spaces)
        assert text(answer) == "<|im_start|><|im_start|>"
    ended = chat(client, **shown, stop="zzz", logprobs=True).choices[0]
    assert ended.logprobs.content[-1].token == "<|im_end|>"
    assert texts(streamed(client, **shown, include_stop_str_in_output=True)) == f"{GREETING}<|im_end|>"


# --- token ids


def test_token_ids_of_prompt_and_answer_are_returned(client: openai.OpenAI, http: Any, tokenizer: Tokenizer) -> None:
    prompt = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    whole = chat(client, return_token_ids=True, stop="zzz")
    assert whole.prompt_token_ids == prompt
    assert tokenizer.decode(whole.choices[0].token_ids) == GREETING
    assert whole.choices[0].token_ids[-1] == END
    chunks = streamed(client, return_token_ids=True, stop="zzz")
    assert chunks[0].prompt_token_ids == prompt
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    found = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", ())]
    assert found == whole.choices[0].token_ids
    body = {"prompt": ["Hello", "a red"], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [one["prompt_token_ids"] for one in choices] == [tokenizer.encode(one).ids for one in body["prompt"]]
    assert all(len(one["token_ids"]) <= 3 for one in choices)


def test_fields_that_a_request_does_not_ask_for_are_null_in_whole_answers(client: openai.OpenAI, http: Any) -> None:
    """Clients of vLLM read these fields without checking whether they exist."""
    whole = chat(client)
    assert (whole.prompt_logprobs, whole.prompt_token_ids, whole.choices[0].token_ids) == (None, None, None)
    assert (whole.choices[0].message.reasoning, whole.choices[0].message.reasoning_content) == (None, None)
    body = {"prompt": "Hello", "max_tokens": 1, "return_token_ids": False}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"], choice["token_ids"]) == (None, None, None)


def test_tokens_may_be_written_as_ids(client: openai.OpenAI, http: Any) -> None:
    changes = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = chat(client, **changes).choices
    assert [one.token for one in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    assert all(one.top_logprobs[0].token == one.token for one in choice.logprobs.content)
    assert bytes(byte for one in choice.logprobs.content[:-1] for byte in one.bytes).decode() == GREETING
    body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    (found,) = http.post("/v1/completions", json=body | {"return_tokens_as_token_ids": True}).json()["choices"]
    assert found["logprobs"]["tokens"] == [f"token_id:{token}" for token in found["token_ids"]]
    assert all(
        token in top for token, top in zip(found["logprobs"]["tokens"], found["logprobs"]["top_logprobs"], strict=True)
    )


# --- which tokens are generated


def test_bad_words_are_not_generated(client: openai.OpenAI) -> None:
    """Words of one token and of several tokens are banned, at the beginning of the answer and later."""
    for word in GREETING.split():
        answer = text(chat(client, bad_words=[word]))
        assert word not in answer.split()
    for n in (1, 3):
        drawn = chat(client, bad_words=["Hello", "e"], temperature=1.5, n=n, max_tokens=8)
        assert not any("Hello" in choice.message.content for choice in drawn.choices)


def test_only_allowed_tokens_are_generated(client: openai.OpenAI) -> None:
    allowed = [64, 65, 64, END]
    for settings in ({}, {"temperature": 2.0, "seed": 3}):
        answer = chat(client, allowed_token_ids=allowed, min_tokens=6, max_tokens=8, return_token_ids=True, **settings)
        tokens = answer.choices[0].token_ids
        assert len(tokens) >= 6
        assert {*tokens} <= {*allowed}
    assert text(chat(client)) == GREETING, "other requests are not affected"


def test_a_request_that_leaves_no_token_fails_alone(client: openai.OpenAI, http: Any) -> None:
    for none_left in ({"allowed_token_ids": [END], "min_tokens": 2}, {"allowed_token_ids": [64], "bad_words": ["a"]}):
        assert "exclude every token" in refusal(http, **none_left)["message"]
    assert text(chat(client)) == GREETING


# --- log-probabilities


def test_log_probabilities_of_the_whole_vocabulary(client: openai.OpenAI, http: Any) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=-1, max_tokens=2).choices
    for position in choice.logprobs.content:
        assert len(position.top_logprobs) == VOCABULARY
        assert sum(math.exp(one.logprob) for one in position.top_logprobs) == pytest.approx(1, abs=1e-3)
    body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "logprobs": -1, "return_tokens_as_token_ids": True}
    (found,) = http.post("/v1/completions", json=body).json()["choices"]
    assert len(found["logprobs"]["top_logprobs"][0]) == VOCABULARY
    assert "log probabilities" in refusal(http, logprobs=True, top_logprobs=-1, max_tokens=3000)["message"]


def test_log_probabilities_of_named_tokens(client: openai.OpenAI) -> None:
    """The sampled token is first. The requested tokens follow in order. Their values are as in `top_logprobs`."""
    (every,) = chat(client, logprobs=True, top_logprobs=-1, return_tokens_as_token_ids=True, max_tokens=3).choices
    expected = [{one.token: one.logprob for one in position.top_logprobs} for position in every.logprobs.content]
    for ids in ([5, 700, 3], [64]):
        changes = {"logprobs": True, "logprob_token_ids": ids, "return_tokens_as_token_ids": True, "max_tokens": 3}
        (choice,) = chat(client, **changes).choices
        for position, own in zip(choice.logprobs.content, expected, strict=True):
            names = [*dict.fromkeys([position.token, *(f"token_id:{token}" for token in ids)])]
            assert [one.token for one in position.top_logprobs] == names
            for one in position.top_logprobs:
                assert one.logprob == pytest.approx(own[one.token], abs=1e-4)


def test_log_probabilities_of_the_prompt_have_vllms_form(client: openai.OpenAI, http: Any) -> None:
    answer = chat(client, prompt_logprobs=2, return_token_ids=True, max_tokens=1)
    first, *others = answer.prompt_logprobs
    assert first is None
    assert len(others) == len(answer.prompt_token_ids) - 1
    for token, entries in zip(answer.prompt_token_ids[1:], others, strict=True):
        own, *top = entries.values()
        assert own is entries[str(token)]
        assert own["rank"] >= 1
        ranked = sorted(entries.values(), key=lambda one: one["rank"])
        assert [one["logprob"] for one in ranked] == sorted((one["logprob"] for one in ranked), reverse=True)
        assert {one["rank"] for one in ranked} >= {1, 2}
        assert len(top) == (1 if own["rank"] <= 2 else 2)
    body = {"prompt": "What color is it?", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 3}
    apart, echoed = (
        http.post("/v1/completions", json=body | more).json()["choices"][0]
        for more in ({}, {"echo": True, "logprobs": 1})
    )
    assert apart["prompt_logprobs"] == echoed["prompt_logprobs"]
    assert {len(entries) for entries in apart["prompt_logprobs"][1:]} <= {3, 4}
    assert len(apart["prompt_logprobs"]) > 3
    assert all(len(top) <= 2 for top in echoed["logprobs"]["top_logprobs"][1:]), "logprobs counts those of echo"
    assert apart["logprobs"] is None


def test_all_answers_together_have_a_limit_on_log_probabilities(http: Any) -> None:
    """A request above the limit is accepted alone, and refused while another one is in progress."""
    limit = SETTINGS["max_held_logprobs"]
    body = {"prompt": [64] * 150, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": -1}

    def post(further: dict[str, Any]) -> Any:
        return http.post("/v1/completions", json=body | further)

    above = {"prompt": [64] * 200}
    alone = post(above).raise_for_status().json()["choices"][0]["logprobs"]
    assert len(alone["tokens"]) * (VOCABULARY + 1) > limit
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(post, [{}, {"echo": False}, above] * 4)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) > len(refused) > 0
    for answer in refused:
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert f"the limit is {limit} (--max-held-logprobs)" in answer.json()["error"]["message"]
    assert post(above).raise_for_status().json()["choices"][0]["logprobs"] == alone


# --- prompts


def test_a_final_message_is_continued(client: openai.OpenAI, http: Any) -> None:
    """Given the first half of an answer, as a string or as parts, the model generates the second half."""
    half = GREETING[: len(GREETING) // 2].rstrip()
    for content in (half, [{"type": "text", "text": half}]):
        messages = [*HELLO, {"role": "assistant", "content": content}]
        going_on = {"continue_final_message": True}
        answer = chat(client, messages, **going_on, add_generation_prompt=False)
        assert half + text(answer) == GREETING
        assert text(chat(client, messages, **going_on, echo=True)) == GREETING
        assert texts(streamed(client, messages, **going_on, echo=True)) == GREETING
        assert answer.choices[0].message.role == "assistant"
        tokens = http.post("/tokenize", json={"messages": messages, **going_on}).json()["tokens"]
        assert answer.usage.prompt_tokens == len(tokens)
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith(f"assistant\n{half}")


def test_echo_repeats_only_a_message_of_the_same_role(client: openai.OpenAI) -> None:
    assert text(chat(client, echo=True)) == GREETING
    closed = chat(client, echo=True, add_generation_prompt=False, max_tokens=1)
    assert text(closed).startswith("Hello!")
    assert closed.choices[0].message.role == "user"


def test_prompts_are_cut_exactly(client: openai.OpenAI, http: Any, tokenizer: Tokenizer, red_square: str) -> None:
    """A prompt can be truncated at either end, whether it is a text, a chat or token ids. Images cannot be cut."""
    words = "one two three four five six seven"
    ids = tokenizer.encode(words).ids
    body = {"max_tokens": 1, "temperature": 0, "return_token_ids": True, "truncate_prompt_tokens": 4}
    for prompt in (words, ids):
        for side, expected in ((None, ids[-4:]), ("left", ids[-4:]), ("right", ids[:4])):
            found = http.post("/v1/completions", json=body | {"prompt": prompt, "truncation_side": side}).json()
            assert found["choices"][0]["prompt_token_ids"] == expected
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    for prompt in ("a " * 3 * limit, [64] * 3 * limit):
        found = http.post("/v1/completions", json=body | {"prompt": prompt, "truncate_prompt_tokens": -1}).json()
        assert found["usage"]["prompt_tokens"] == limit - 1
    seen: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": red_square}}]},
        {"role": "user", "content": "What is in the image?"},
    ]
    whole = http.post("/tokenize", json={"messages": seen}).json()["tokens"]
    for size in (12, len(whole) - 2, len(whole)):
        answer = chat(client, seen, truncate_prompt_tokens=size, return_token_ids=True, max_tokens=1)
        assert answer.prompt_token_ids == whole[-size:]
    first = whole.index(784)
    inside = {"truncate_prompt_tokens": first + 2, "truncation_side": "right"}
    for change in (inside, {"truncate_prompt_tokens": len(whole) - first - 2}):
        assert "media item 0 (image)" in refusal(http, messages=seen, **change)["message"]
    answer = chat(client, seen, truncate_prompt_tokens=len(whole) - 1, truncation_side="right", return_token_ids=True)
    assert answer.prompt_token_ids == whole[:-1]


def test_other_names_of_the_token_limits(client: openai.OpenAI, http: Any) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_new_tokens": 3, "min_new_tokens": 3}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    text_body = {"prompt": "Hello", "max_new_tokens": 2, "ignore_eos": True}
    assert http.post("/v1/completions", json=text_body).json()["usage"]["completion_tokens"] == 2
    assert "max_new_tokens is 6; give only one" in refusal(http, max_tokens=5, max_new_tokens=6)["message"]


# --- the page and the service


def test_each_example_of_the_page_is_answered(http: Any) -> None:
    examples = [json.loads(body) for body in re.findall(r"\| `(\{.*\})` \|$", PAGE, re.MULTILINE)]
    fields = ExtraFields.model_fields.keys() - Settings.model_fields.keys()
    assert {*chain(*examples)} >= fields | {"continue_final_message", "echo", "add_special_tokens"}
    for example in examples:
        answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4} | limits(example))
        assert answer.status_code == 200, answer.text


def test_the_client_of_the_page_is_answered(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [one for one in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "OpenAI" in one]
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", service.url), "page", "exec"), names)
    names["client"].close()
    assert GREETING in capsys.readouterr().out


def limits(example: dict[str, Any]) -> dict[str, Any]:
    return example | ({"max_tokens": None} if "max_new_tokens" in example else {})


def test_the_fingerprint_is_in_answers_and_chunks(client: openai.OpenAI, http: Any) -> None:
    found = {chat(client).system_fingerprint, *(one.system_fingerprint for one in streamed(client, max_tokens=2))}
    body = {"prompt": "Hello", "max_tokens": 1}
    found.add(http.post("/v1/completions", json=body).json()["system_fingerprint"])
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


def test_the_tokenizers_settings_are_shown(http: Any) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["eos_token"]) == ("Qwen2TokenizerFast", "<|im_end|>")
    assert "add_generation_prompt" in info["chat_template"]
    assert not {"name_or_path", "vocab_file"} & info.keys()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("bad_words", [["a"] * 129, ["a" * 257], [""], "a", [1]]),
        ("allowed_token_ids", [[], [VOCABULARY], [-1], [2**70], [1] * 1000, ["1"], 5]),
        ("logprob_token_ids", [[], [VOCABULARY], [1] * 129, [0.5]]),
        ("prompt_logprobs", [21, -1, -2, "1", True]),
        ("truncate_prompt_tokens", [0, -2, 1.5, 2**40]),
        ("truncation_side", ["middle", 1]),
        ("priority", [1, -1]),
        ("continue_final_message", ["content", 1]),
        ("skip_special_tokens", [0, "no"]),
    ],
)
def test_values_out_of_range_are_refused(http: Any, field: str, values: list[Any]) -> None:
    for value in values:
        more = {"logprobs": True} if field == "logprob_token_ids" else {}
        assert refusal(http, **{field: value}, **more)["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(http: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal(http, **fields)["param"] == param


def test_a_message_without_text_cannot_be_continued(http: Any, red_square: str) -> None:
    for message in (
        {"role": "assistant", "tool_calls": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": red_square}}]},
    ):
        messages = [*HELLO, message]
        assert "continue_final_message" in refusal(http, messages=messages, continue_final_message=True)["message"]
    assert refusal(http, "/v1/completions", priority=3)["param"] == "priority"
