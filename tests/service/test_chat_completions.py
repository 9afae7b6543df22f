"""Tests for /v1/chat/completions with the openai client."""

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tools.demo import draw_shape, encode
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

WHAT = "What is in the image?"
HELLO: Any = {"role": "user", "content": "Hello!"}


def ask(client: openai.OpenAI, content: Any, **changes: Any) -> ChatCompletion:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 32} | changes
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **settings)


def image(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def text(of: ChatCompletion) -> str:
    return of.choices[0].message.content or ""


def test_a_text_prompt_is_answered(client: openai.OpenAI) -> None:
    answer = ask(client, "Hello!", max_tokens=64)
    assert text(answer) == CHAT_ANSWERS["hello"]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_an_image_may_be_a_data_url(client: openai.OpenAI, red_square: str) -> None:
    assert text(ask(client, [image(red_square), {"type": "text", "text": WHAT}])) == "red square"


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_an_image_may_be_a_file_path_or_url(client: openai.OpenAI, media_dir: Path, form: str) -> None:
    url = form.format(media_dir / "green_star.jpg")
    assert text(ask(client, [image(url), {"type": "text", "text": WHAT}])) == "green star"


def test_a_file_url_is_unquoted(client: openai.OpenAI, media_dir: Path) -> None:
    url = f"file://{media_dir}/green%20star.jpg"
    assert text(ask(client, [image(url), {"type": "text", "text": WHAT}])) == "green star"


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
def test_an_image_may_be_raw_base64(client: openai.OpenAI, format_name: str) -> None:
    drawn = draw_shape("yellow", (255, 255, 0), "triangle", x=0.5)
    raw = base64.b64encode(encode(drawn, format_name)).decode()
    assert text(ask(client, [image(raw), {"type": "text", "text": WHAT}])) == "yellow triangle"


def test_two_images_keep_their_order(client: openai.OpenAI, red_square: str, media_dir: Path) -> None:
    content = [image(red_square), image(str(media_dir / "green_star.jpg"))]
    answer = ask(client, [*content, {"type": "text", "text": "Do both pictures show the same colour?"}])
    assert text(answer) == "red and green, so no"
    again = ask(client, [image(red_square)] * 2 + [{"type": "text", "text": "Do both pictures show the same colour?"}])
    assert text(again) == "red and red, so yes"


def test_a_video_is_answered(client: openai.OpenAI, media_dir: Path) -> None:
    part = {"type": "video_url", "video_url": {"url": str(media_dir / "right.mp4")}}
    assert text(ask(client, [part, {"type": "text", "text": "Which way does the shape move?"}])) == "right"


def test_a_streamed_answer_equals_the_whole_answer(client: openai.OpenAI, red_square: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [image(red_square), {"type": "text", "text": WHAT}]}],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    whole = ask(client, [image(red_square), {"type": "text", "text": WHAT}])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text(whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [
        *[None] * (len(chunks) - 2),
        whole.choices[0].finish_reason,
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_streams_carry_headers_against_proxy_buffering(http: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [HELLO], "max_tokens": 2, "stream": True})
    assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")


def test_a_stream_carries_no_usage_by_default(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=3, stream=True
        )
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_greedy_choices_are_equal_whole_and_streamed(client: openai.OpenAI, red_square: str) -> None:
    content = [image(red_square), {"type": "text", "text": WHAT}]
    alone = text(ask(client, content))
    answer = ask(client, content, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [alone] * 3
    chunks = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], n=3, temperature=0, max_tokens=32, stream=True
    )
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [alone] * 3


def test_a_stop_string_cuts_the_text_and_is_reported(client: openai.OpenAI, red_square: str) -> None:
    content = [image(red_square), {"type": "text", "text": WHAT}]
    whole = text(ask(client, content))
    stop = whole[3:6]
    answer = ask(client, content, stop=["nothing", stop])
    assert text(answer) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop  # type: ignore[attr-defined]


def test_both_names_of_max_tokens_limit_the_answer(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, "Hello!", **({"max_tokens": openai.omit} | {name: 2}))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert answer.choices[0].finish_reason == "length"


def test_the_seed_decides_the_answer(client: openai.OpenAI) -> None:
    settings = {"temperature": 5.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    first, second, other = (text(ask(client, "Hello!", seed=seed, **settings)) for seed in (7, 7, 8))
    assert first == second != other


def test_seeded_choices_differ_and_repeat(client: openai.OpenAI) -> None:
    settings = {"temperature": 5.0, "max_tokens": 12, "n": 2, "seed": 7, "extra_body": {"ignore_eos": True}}
    first, second = (ask(client, "Hello!", **settings) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]


def test_each_token_has_its_logprobs(client: openai.OpenAI, red_square: str) -> None:
    content = [image(red_square), {"type": "text", "text": WHAT}]
    answer = ask(client, content, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    found = answer.choices[0].logprobs.content or []
    assert answer.usage is not None
    assert len(found) == answer.usage.completion_tokens
    for position in found:
        assert len(position.top_logprobs) == 3
        assert position.token == position.top_logprobs[0].token, "greedy draws the likeliest"
        assert position.logprob <= 0
    for position in found:
        assert position.bytes == list(position.token.encode())
    assert ask(client, "Hello!", max_tokens=1).choices[0].logprobs is None


def test_the_bytes_of_logprobs_join_to_the_text_across_split_characters(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["日本 🎉"]}}}
    answer = ask(client, "Hello!", logprobs=True, response_format=form)
    found = answer.choices[0].logprobs
    assert found is not None
    assert any("\ufffd" in position.token for position in found.content or [])
    spelled = b"".join(bytes(position.bytes or []) for position in found.content or [])
    assert text(answer) == '"日本 🎉"'
    assert spelled.decode() == text(answer) + "<|im_end|>"


def spelled(logprobs: Any) -> str:
    return b"".join(bytes(position.bytes or []) for position in logprobs.content or []).decode()


ANSWER = CHAT_ANSWERS["hello"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop",
    [
        ANSWER[5:9],
        ANSWER[-3:],
        ANSWER[1],
        ANSWER[:2],
        ANSWER,
        "nowhere",
        ANSWER[4:5] + "x",
    ],
)
def test_logprobs_end_where_a_stop_string_cuts_the_text(client: openai.OpenAI, stop: str, stream: bool) -> None:
    """The logprobs end exactly where the text ends, even if the cut is inside a token.

    A token that may begin a stop string is held back together with its text.
    """
    answer: Any = ask(client, "Hello!", logprobs=True, top_logprobs=1, max_tokens=64, stop=[stop], stream=stream)
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    texts = [(part.delta if stream else part.message).content for part in parts]
    found = [spelled(part.logprobs) if part.logprobs else "" for part in parts]
    kept = ANSWER.partition(stop)[0]
    assert "".join(texts) == kept
    assert "".join(found) == (kept if stop in ANSWER else f"{kept}<|im_end|>")
    assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize(("stop", "kept"), [("本", '"日'), ("🎉", '"日本 '), ("日", '"'), (" ", '"日本')])
def test_logprobs_end_at_a_cut_within_a_character(client: openai.OpenAI, stop: str, kept: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["日本 🎉"]}}}
    settings: dict[str, Any] = {"logprobs": True, "response_format": form, "stop": stop}
    answer = ask(client, "Hello!", **settings)
    assert (text(answer), spelled(answer.choices[0].logprobs)) == (kept, kept)
    chunks: Any = ask(client, "Hello!", stream=True, **settings)
    bytes_ = b"".join(
        bytes(position.bytes or [])
        for chunk in chunks
        for position in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    )
    assert bytes_.decode() == kept


def test_streamed_logprobs_equal_the_whole_ones(client: openai.OpenAI, red_square: str) -> None:
    content = [image(red_square), {"type": "text", "text": WHAT}]
    whole = ask(client, content, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert whole is not None
    assert whole.content
    chunks: Any = ask(client, content, logprobs=True, top_logprobs=2, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    found = [position for part in streamed if part is not None for position in part.content or []]
    assert [position.token for position in found] == [position.token for position in whole.content]
    assert [position.logprob for position in found] == pytest.approx([one.logprob for one in whole.content], abs=1e-4)
    assert all(len(position.top_logprobs) == 2 for position in found)


def test_logit_bias_suppresses_a_token(client: openai.OpenAI, http: Any, red_square: str) -> None:
    content = [image(red_square), {"type": "text", "text": WHAT}]
    plain = ask(client, content, logprobs=True, top_logprobs=2, max_tokens=1)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    drawn = plain.choices[0].logprobs.content[0].token
    token = http.post("/tokenize", json={"prompt": drawn}).json()["tokens"][0]
    biased = ask(client, content, max_tokens=1, logit_bias={str(token): -100})
    assert text(biased) != text(plain)


def test_a_spelled_out_placeholder_stays_text(client: openai.OpenAI, red_square: str) -> None:
    spelled = "<|vision_bos|><|IMAGE|><|vision_eos|>"
    plain = ask(client, [image(red_square), {"type": "text", "text": WHAT}])
    answer = ask(client, [image(red_square), {"type": "text", "text": WHAT + spelled}])
    assert plain.usage is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 3, "the text took more than three tokens"


def test_earlier_turns_are_part_of_the_prompt(client: openai.OpenAI, red_square: str) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [image(red_square), {"type": "text", "text": WHAT}]},
            {"role": "assistant", "content": "red square"},
            {"role": "user", "content": "What colour is it?"},
        ],
        temperature=0,
        max_tokens=32,
    )
    assert "red" in text(answer)


@pytest.mark.parametrize("role", ["tool", "function", "system"])
def test_roles_reach_the_template(client: openai.OpenAI, http: Any, role: str) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": None},
        {"role": role, "content": "7 kg", "tool_call_id": "c1"},
    ]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.endswith(f"<|im_start|>{role}\n7 kg<|im_end|>\n<|im_start|>assistant\n")
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)


def test_a_refusal_of_an_earlier_turn_is_read_as_text(client: openai.OpenAI, http: Any) -> None:
    def turns(answered: Any) -> list[Any]:
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answered}, HELLO]

    refused = turns([{"type": "refusal", "refusal": "No."}])
    tokens, same = (
        http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        for messages in (refused, turns([{"type": "text", "text": "No."}]))
    )
    assert tokens == same
    answer = client.chat.completions.create(model="tiny", messages=refused, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)


def test_original_detail_equals_the_default(client: openai.OpenAI, red_square: str) -> None:
    answer, plain = (
        ask(client, [image(red_square, **detail), {"type": "text", "text": WHAT}])
        for detail in ({"detail": "original"}, {})
    )
    assert answer.usage == plain.usage
    assert text(answer) == text(plain)


def test_an_empty_model_name_means_the_loaded_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="", messages=[HELLO], max_tokens=1)
    assert answer.model == "tiny"


def test_user_and_metadata_change_nothing(client: openai.OpenAI) -> None:
    answer = ask(client, "Hello!", max_tokens=64, metadata={"batch": "7", "of": "tests"}, user="somebody")
    assert text(answer) == CHAT_ANSWERS["hello"]


def test_the_model_may_be_left_out_and_unknown_fields_are_ignored(service: RunningService, http: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "frobnicate": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == service.model


def test_items_are_freed_after_each_answer(service: RunningService, client: openai.OpenAI, red_square: str) -> None:
    ask(client, [image(red_square), {"type": "text", "text": WHAT}])
    assert service.wait_until_free()["blocks"] == 0
