"""Tests for the fields `usage`, which counts tokens by kind, and `timings`, which lists the time of each stage."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.watching import metric
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

STAGES = {"fetch_s", "preprocess_s", "queue_s", "tower_s", "prefill_s", "decode_s", "total_s"}


def content(*sources: str, kind: str = "image") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": f"{kind}_url", f"{kind}_url": {"url": source}} for source in sources]
    return [*parts, {"type": "text", "text": "What is it?"}]


def ask(client: openai.OpenAI, parts: Any, **changes: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], **{"temperature": 0, "max_tokens": 8} | changes
    )


def test_usage_counts_media_tokens_by_kind(client: openai.OpenAI, http: Any, red_square: str, media_dir: Path) -> None:
    none = ask(client, "Hello!").usage.prompt_tokens_details
    assert (none.image_tokens, none.video_tokens, none.audio_tokens) == (0, 0, 0)
    one = ask(client, content(red_square)).usage
    two = ask(client, content(red_square, red_square)).usage
    details = one.prompt_tokens_details
    assert details.image_tokens > 0
    assert two.prompt_tokens_details.image_tokens == 2 * details.image_tokens
    same = http.post("/tokenize", json={"messages": [{"role": "user", "content": content(red_square)}]}).json()
    placeholder = http.post("/detokenize", json={"tokens": same["tokens"]}).json()["prompt"].count("<|IMAGE|>")
    assert details.image_tokens == placeholder
    video = ask(client, content(str(media_dir / "right.mp4"), kind="video")).usage.prompt_tokens_details
    assert video.video_tokens > 0
    assert video.image_tokens == 0


def test_usage_counts_cached_tokens(client: openai.OpenAI) -> None:
    long = "a red square and a green star, " * 20
    ask(client, long)
    again = ask(client, long).usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_a_cache_salt_separates_cached_prompts(client: openai.OpenAI, http: Any, red_square: str) -> None:
    text = "a blue circle, " * 60  # longer than a KV block on every device
    parts = [*content(red_square), {"type": "text", "text": text}]

    def cached(salt: str) -> bool:
        usage = ask(client, parts, extra_body={"cache_salt": salt}).usage
        return bool(usage.prompt_tokens_details.cached_tokens)

    assert [cached(salt) for salt in ("mine", "yours", "mine")] == [False, False, True]
    prompt = {"model": "tiny", "prompt": text, "max_tokens": 1}
    for salt, cached_tokens in (("mine", False), ("yours", False), ("mine", True)):
        usage = client.completions.create(**prompt, extra_body={"cache_salt": salt}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) is cached_tokens
    for salt in ("", "a" * 1025):
        assert http.post("/v1/completions", json=prompt | {"cache_salt": salt}).status_code == 400
        assert http.post("/tokenize", json={"prompt": text, "cache_salt": salt}).status_code == 400


@pytest.mark.parametrize("path", ["/infer", "/generate", "/generate_stream"])
def test_the_mindie_endpoints_take_a_cache_salt_in_parameters(http: Any, path: str) -> None:
    text = f"{path} a green circle, " * 40
    parameters = {"max_new_tokens": 1, "cache_salt": "mine"}
    assert http.post(path, json={"inputs": text, "parameters": parameters}).status_code == 200
    for salt, cached in ((None, False), ("yours", False), ("mine", True)):
        body = {"prompt": text, "max_tokens": 1, "cache_salt": salt}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) is cached, salt
    misplaced = http.post(path, json={"inputs": text, "cache_salt": "mine"})
    assert misplaced.status_code == 400
    assert "cache_salt must be inside parameters" in misplaced.text


def test_timings_cover_each_stage(client: openai.OpenAI, red_square: str) -> None:
    assert not hasattr(ask(client, "Hello!"), "timings")
    for extra in ({}, {"n": 2}, {"stop": ["s"]}):
        found = ask(client, content(red_square), extra_body={"timings": True}, **extra).timings
        assert set(found) == STAGES
        assert all(seconds >= 0 for seconds in found.values())
        assert min(found["fetch_s"], found["preprocess_s"], found["prefill_s"], found["decode_s"]) > 0
        stages = [seconds for name, seconds in found.items() if name not in ("total_s", "tower_s")]
        # Each stage reports the longest time of all choices. With two choices, one may wait while the other is decoded,
        # so the sum of the stages may exceed the total.
        assert (max(stages) if "n" in extra else sum(stages)) <= found["total_s"] + 0.01
        assert found["tower_s"] <= found["prefill_s"]


def test_an_answer_that_a_stop_string_ends_is_timed(client: openai.OpenAI, service: RunningService) -> None:
    """The engine does not know stop strings, so the service itself ends the answer."""
    before = metric(service, "request_decode_time_seconds_count")
    text = CHAT_ANSWERS["hello"]
    answer = ask(client, "Hello!", max_tokens=64, stop=[text[-2:]], extra_body={"timings": True})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
        "stop",
        text[: text.index(text[-2:])],
    )
    assert answer.timings["decode_s"] > 0
    assert metric(service, "request_decode_time_seconds_count") == before + 1


def test_a_stream_ends_with_its_timings(client: openai.OpenAI) -> None:
    chunks = list(ask(client, "Hello!", max_tokens=64, stream=True, extra_body={"timings": True}))
    assert set(chunks[-1].timings) == STAGES
    assert chunks[-1].choices == []
    assert chunks[-1].usage is None
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == CHAT_ANSWERS["hello"]
    both = list(
        ask(client, "Hello!", stream=True, stream_options={"include_usage": True}, extra_body={"timings": True})
    )
    assert both[-1].usage is not None
    assert set(both[-1].timings) == STAGES


def test_continuous_usage_stats_grow_to_the_final_usage(client: openai.OpenAI) -> None:
    """Each chunk reports the usage of all choices together. The last chunk reports the final usage."""
    options: dict[str, Any] = {"stream": True, "n": 2, "max_tokens": 8}
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    completion: dict[str, Any] = {"model": "tiny", "prompt": "What colour"}
    for chunks in (
        chat := list(ask(client, "Hello!", **options, stream_options=wanted)),
        list(client.completions.create(**completion, **options, stream_options=wanted)),  # type: ignore[call-overload]
    ):
        tokens = [chunk.usage.completion_tokens for chunk in chunks]
        assert tokens == sorted(tokens)
        assert tokens[0] < tokens[-1]
        assert chunks[-2].usage == chunks[-1].usage
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    assert chat[0].choices[0].delta.role == "assistant"
    assert (chat[0].usage.completion_tokens, chat[0].usage.total_tokens) == (0, chat[0].usage.prompt_tokens)
    assert chat[1].usage.completion_tokens > 0
    for without in ({"include_usage": True}, {"continuous_usage_stats": True}):
        assert [chunk.usage for chunk in ask(client, "Hello!", **options, stream_options=without)][:-1].count(None) > 1


def test_a_completion_has_timings(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, "extra_body": {"timings": True}}
    answer: Any = client.completions.create(**options)
    assert set(answer.timings) == STAGES
    assert answer.timings["fetch_s"] == answer.timings["preprocess_s"] == 0
