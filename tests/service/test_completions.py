"""Tests for /v1/completions with the openai client."""

import json
from typing import Any

import openai
import pytest

HELLO = [{"role": "user", "content": "Hello!"}]
HITS = "mindie_mm:prefix_cache_hits_total"


def complete(client: openai.OpenAI, prompt: Any, **changes: Any) -> openai.types.Completion:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 5} | changes
    return client.completions.create(model="tiny", prompt=prompt, **settings)


def ids_of(http: Any, prompt: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    return ids


def test_a_text_is_completed(client: openai.OpenAI) -> None:
    answer = complete(client, "What colour")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 5


def test_a_prompt_may_be_text_or_token_ids(client: openai.OpenAI, http: Any) -> None:
    prompts = ["What colour", "Hello"]
    texts = complete(client, prompts)
    ids = complete(client, [ids_of(http, prompt) for prompt in prompts])
    assert [choice.text for choice in texts.choices] == [choice.text for choice in ids.choices]
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert complete(client, ids_of(http, prompts[0])).choices[0].text == texts.choices[0].text


def test_choices_are_ordered_by_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, ["What colour", "Hello"], n=2)
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_streamed_answer_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = complete(client, ["What colour", "Hello"], echo=True)
    texts = ["", ""]
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=["What colour", "Hello"],
            temperature=0,
            max_tokens=5,
            echo=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_text_of_the_caller(client: openai.OpenAI, stream: bool) -> None:
    """The tokenizer normalizes the first text, and the second one is cut before the model reads it."""
    texts = ["cafe\u0301 \u212b", "What colour is the star?"]
    answer = complete(client, texts, echo=True, stream=stream, extra_body={"truncate_prompt_tokens": 2})
    found = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:  # type: ignore[attr-defined]
            found[choice.index] += choice.text
    assert [text[: len(given)] for text, given in zip(found, texts, strict=True)] == texts


def test_echo_includes_the_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, "What colour", echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith("What colour")
    found = choice.logprobs
    assert found is not None
    assert answer.usage is not None
    assert len(found.tokens or []) == answer.usage.total_tokens
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_match_the_text_whole_and_streamed(client: openai.OpenAI, echo: bool) -> None:
    """The offsets match although a stop string delays text and some tokens add no text."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["日本 und 🎉"]}}}
    settings: dict[str, Any] = {"max_tokens": 64, "logprobs": 2, "stop": ["zzzzzzzz"], "echo": echo}
    settings["extra_body"] = {"response_format": form}
    whole = complete(client, "What 日 colour", **settings).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, "What 日 colour", stream=True, **settings)]  # type: ignore[misc, attr-defined]
    assert whole.logprobs is not None
    tokens, offsets = whole.logprobs.tokens or [], whole.logprobs.text_offset or []
    assert [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset] == offsets
    assert [token for part in parts if part.logprobs for token in part.logprobs.tokens] == tokens
    assert whole.text == ("What 日 colour" if echo else "") + '"日本 und 🎉"'
    assert len(offsets) == len(tokens)
    assert any(token.startswith("bytes:\\x") for token in tokens)
    assert tokens[-1] == "<|im_end|>"
    for token, start, stop in zip(tokens, offsets, [*offsets[1:], len(whole.text)], strict=True):
        if not token.startswith("bytes:"):
            assert whole.text[start:stop] in (token, "")
        else:
            assert stop - start <= 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tokens_after_a_stop_string_are_not_counted(client: openai.OpenAI, http: Any, stream: bool) -> None:
    """The engine does not know stop strings, so it generates more tokens before it is told to end."""
    settings: dict[str, Any] = {
        "max_tokens": 40,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False},
    }
    free: Any = complete(client, "What colour", **settings).choices[0]
    texts = [http.post("/detokenize", json={"tokens": free.token_ids[:n]}).json()["prompt"] for n in range(1, 41)]
    for at in range(0, 30, 4):
        stop = free.text[at : at + 2]
        num_tokens = next(n for n, text in enumerate(texts, 1) if stop in text)
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = complete(client, "What colour", stop=stop, **streamed, **settings)
        parts = [*answer] if stream else [answer]
        choices = [part.choices[0] for part in parts if part.choices]
        assert parts[-1].usage.completion_tokens == num_tokens
        assert [token for choice in choices for token in choice.token_ids] == free.token_ids[:num_tokens]
        assert "".join(choice.text for choice in choices) == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_tokens_end_where_a_stop_string_cuts_the_text(client: openai.OpenAI, at: int, echo: bool) -> None:
    prompt, settings = (
        "What colour",
        {"max_tokens": 16, "logprobs": 1, "echo": echo, "extra_body": {"ignore_eos": True}},
    )
    plain = complete(client, prompt, **settings | {"echo": False}).choices[0].text
    stop = plain[at : at + 3]
    kept = (prompt if echo else "") + plain.partition(stop)[0]
    whole = complete(client, prompt, stop=stop, **settings).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, prompt, stop=stop, stream=True, **settings)]  # type: ignore[misc, attr-defined]
    assert (whole.text, whole.stop_reason) == (kept, stop)  # type: ignore[attr-defined]
    assert whole.logprobs is not None
    tokens = whole.logprobs.tokens or []
    assert "".join(tokens) == kept
    assert [token for part in parts if part.logprobs for token in part.logprobs.tokens] == tokens
    lengths = {len(found or []) for found in (tokens, whole.logprobs.text_offset, whole.logprobs.token_logprobs)}
    assert lengths == {len(tokens)}


def test_response_format_shapes_the_text_and_an_invalid_schema_is_refused(client: openai.OpenAI, http: Any) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = complete(client, ["What colour", "Hello"], max_tokens=64, extra_body={"response_format": form})
    for choice in answer.choices:
        assert all(type(entry) is bool for entry in json.loads(choice.text))
    form["json_schema"] = {"name": "answer", "schema": {"type": "wat"}}
    for stream in (False, True):
        body = {"prompt": "What colour", "response_format": form, "stream": stream}
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "Invalid type" in refused.json()["error"]["message"]


@pytest.mark.parametrize("bad", [-1, 10**9, -(2**62)])
def test_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI, bad: int) -> None:
    with pytest.raises(openai.BadRequestError, match=f"token id {bad} is outside the vocabulary"):
        complete(client, [1, bad])


@pytest.mark.parametrize("bad", ["", [], [[]], [""], [[1], []]])
def test_empty_prompts_are_refused(client: openai.OpenAI, bad: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, bad)


@pytest.mark.parametrize("bad", [[1, "a"], [True], [1.5], 7, {"image": "x"}, None])
def test_prompts_of_other_types_are_refused(client: openai.OpenAI, bad: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, bad)


def test_a_prompt_that_is_json_is_text(client: openai.OpenAI, http: Any) -> None:
    prompt = '[{"image": "/etc/passwd"}]'
    assert complete(client, prompt, echo=True, max_tokens=1).choices[0].text.startswith(prompt)


def test_too_many_choices_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="limit is 64"):
        complete(client, ["a"] * 33, n=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        ("/v1/completions", {"prompt": [5] * 2000, "n": 64, "max_tokens": 1, "echo": True}, 64 * 2001 * 21),
        ("/v1/completions", {"prompt": [[5] * 2000] * 16, "n": 4, "max_tokens": 1, "echo": True}, 64 * 2001 * 21),
        ("/v1/chat/completions", {"messages": HELLO, "n": 64, "max_tokens": 800, "top_logprobs": 20}, 64 * 800 * 21),
    ],
)
def test_too_many_log_probabilities_are_refused(
    http: Any, path: str, body: dict[str, Any], number: int, stream: bool
) -> None:
    answer = http.post(path, json=body | {"logprobs": True if "messages" in body else 20, "stream": stream})
    assert answer.status_code == 400
    assert f"{number} log probabilities" in answer.json()["error"]["message"]
    assert f"the limit is {2**20}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_log_probabilities_are_computed_once(client: openai.OpenAI, http: Any, stream: bool) -> None:
    def hits() -> float:
        (line,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith(HITS)]
        return float(line.split()[-1])

    before, prompt = hits(), [5 + stream, *range(100, 300)]  # longer than a KV block on every device
    answer = complete(client, prompt, echo=True, logprobs=2, n=3, max_tokens=2, stream=stream)
    by_choice: dict[int, list[float | None]] = {0: [], 1: [], 2: []}
    for part in answer if stream else [answer]:
        for choice in part.choices:  # type: ignore[attr-defined]
            by_choice[choice.index] += choice.logprobs.token_logprobs
    assert [len(found) for found in by_choice.values()] == [len(prompt) + 2] * 3
    assert by_choice[0][: len(prompt)] == by_choice[1][: len(prompt)] == by_choice[2][: len(prompt)]
    assert hits() - before > 64, "the further choices need the prompt's keys and values alone"


def tokens(client: openai.OpenAI, **changes: Any) -> list[str]:
    """Return 24 tokens generated by greedy decoding. `changes` adds sampling parameters."""
    extra = {name: changes.pop(name) for name in ("repetition_penalty",) if name in changes} | {"ignore_eos": True}
    answer = complete(client, "What colour", max_tokens=24, logprobs=0, extra_body=extra, **changes)
    assert answer.choices[0].logprobs is not None
    found = answer.choices[0].logprobs.tokens or []
    assert len(found) == 24
    return found


@pytest.mark.parametrize(
    ("name", "off", "more", "fewer"),
    [("frequency_penalty", 0, 2, -2), ("presence_penalty", 0, 2, -2), ("repetition_penalty", 1, 3, 0.1)],
)
def test_penalties_change_how_many_tokens_repeat(
    client: openai.OpenAI, name: str, off: float, more: float, fewer: float
) -> None:
    plain, away, back = (len(set(tokens(client, **{name: value}))) for value in (off, more, fewer))
    assert back < plain < away
    assert tokens(client, **{name: off}) == tokens(client)


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (2, 2), (2, 1), (1, None)])
def test_best_of_up_to_n_is_accepted(client: openai.OpenAI, n: int, best_of: int | None) -> None:
    answer = complete(client, "What colour", n=n, best_of=best_of)
    assert [choice.text for choice in answer.choices] == [complete(client, "What colour").choices[0].text] * n


def test_best_of_above_n_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of is 3; only 1 and the value of n are supported"):
        complete(client, "What colour", n=2, best_of=3)


@pytest.mark.parametrize("count", [0, 2])
def test_top_logprobs_begin_with_the_drawn_token(client: openai.OpenAI, count: int) -> None:
    settings: dict[str, Any] = {"temperature": 20.0, "seed": 1, "echo": True, "max_tokens": 8}
    found = complete(client, "What colour is it?", logprobs=count, **settings).choices[0].logprobs
    assert found is not None
    tops = found.top_logprobs or []
    rows = list(zip(found.tokens or [], found.token_logprobs or [], tops, strict=True))[1:]
    assert [next(iter(top.items())) for *_, top in rows] == [(token, logprob) for token, logprob, _ in rows]
    assert {len(top) for top in tops[1:]} <= {count, count + 1}
    assert count + 1 in map(len, tops[1:])


@pytest.mark.parametrize("prompt", ["What colour is it?", [64, 65, 66]])
def test_max_tokens_0_scores_the_prompt_without_generation(client: openai.OpenAI, prompt: Any) -> None:
    settings: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2}
    whole = complete(client, prompt, max_tokens=1, **settings)
    scored = complete(client, prompt, max_tokens=0, **settings)
    assert scored.usage is not None
    assert whole.usage is not None
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, whole.usage.prompt_tokens)
    for choice, longer in zip(scored.choices, whole.choices, strict=True):
        assert longer.text.startswith(choice.text)
        assert choice.finish_reason == "length"
        found, more = choice.logprobs, longer.logprobs
        assert found is not None
        assert more is not None
        assert (found.tokens or []) == (more.tokens or [])[:-1]
        assert found.token_logprobs == pytest.approx((more.token_logprobs or [])[:-1], abs=1e-4)
    chunks = list(complete(client, prompt, max_tokens=0, stream=True, **settings))  # type: ignore[arg-type]
    texts = ["".join(part.text for chunk in chunks for part in chunk.choices if part.index == i) for i in (0, 1)]  # type: ignore[attr-defined]
    assert texts == [choice.text for choice in scored.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_scored(client: openai.OpenAI, http: Any, stream: bool) -> None:
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = [5 + stream, *[64] * (limit - 1)]
    answer = complete(client, prompt, max_tokens=0, echo=True, logprobs=1, n=2, stream=stream)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for part in answer if stream else [answer]:
        for choice in part.choices:  # type: ignore[attr-defined]
            found[choice.index] += choice.logprobs.token_logprobs
    assert [len(logprobs) for logprobs in found.values()] == [limit] * 2
    assert all(logprob <= 0 for logprob in found[0][1:])
    scored = complete(client, prompt, max_tokens=0, echo=True)
    assert (scored.usage.completion_tokens, scored.usage.total_tokens) == (0, limit)  # type: ignore[union-attr]
    assert scored.choices[0].finish_reason == "length"
    for longer, tokens in ((prompt, 1), ([*prompt, 64], 0)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, longer, max_tokens=tokens, echo=True)
        assert caught.value.code == "context_length_exceeded"


def test_a_text_that_fills_the_context_is_scored(client: openai.OpenAI, http: Any) -> None:
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    (word,) = ids_of(http, "a")
    text = "a" * (limit // 2)
    while (count := len(ids_of(http, text))) < limit:
        text += "a" * (limit - count)
    assert (word, count) == (ids_of(http, "a")[0], limit)
    scored = complete(client, text, max_tokens=0, echo=True, logprobs=0)
    assert scored.usage is not None
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, limit)


def test_max_tokens_0_without_echo_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0, but echo is not true"):
        complete(client, "What colour", max_tokens=0, logprobs=1)
