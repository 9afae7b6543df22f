"""Tests for prompt strings that contain images as `<img>` tags, as text-generation-webui sends them."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx2
import openai
import pytest

from tests.media_samples import encoded, photograph
from tools.demo import draw_shape

WHAT = "What is in the image?"


def tag(image: Any, **settings: Any) -> str:
    """Return an `<img>` tag that contains `image` as a JPEG in a data URL."""
    return f'<img src="data:image/jpeg;base64,{base64.b64encode(encoded(image, "JPEG", **settings)).decode()}">'


@pytest.fixture(scope="module")
def red() -> str:
    return tag(draw_shape("red", (220, 40, 40), "square", x=0.4), quality=90)


@pytest.fixture(scope="module")
def blue() -> str:
    return tag(draw_shape("blue", (50, 80, 210), "circle", x=0.5), quality=90)


def turn(question: str) -> str:
    """Return a user's turn as the embedded checkpoint's template renders it, but without control tokens."""
    return f"user\n{question}\nassistant\n"


def ids_of(http: httpx2.Client, **body: Any) -> list[int]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids


def as_items(http: httpx2.Client, *parts: str) -> dict[str, Any]:
    """Send `parts` as items to /infer without the chat template, and return the answer.

    Parts that are data URLs become images.
    """
    items = [{"image" if part.startswith("data:") else "text": part} for part in parts]
    body = {"inputs": items, "chat_template": False, "parameters": {"max_new_tokens": 8}}
    answer: dict[str, Any] = http.post("/infer", json=body).json()
    return answer


def source(img: str) -> str:
    return img.removeprefix('<img src="').removesuffix('">')


def test_an_image_keeps_its_place_in_the_prompt(
    client: openai.OpenAI, http: httpx2.Client, red: str, blue: str
) -> None:
    prompt = f"{turn('First')}{red} and {blue}{turn(WHAT)}"
    expected = as_items(http, turn("First"), source(red), " and ", source(blue), turn(WHAT))["generated_text"]
    answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8)
    assert answer.choices[0].text == expected
    infer = http.post("/infer", json={"inputs": prompt, "parameters": {"max_new_tokens": 8}})
    assert infer.json()["generated_text"] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids_of(http, prompt=prompt))


@pytest.mark.parametrize(
    "change", [lambda found: found.replace("base64,", "base64, "), lambda found: f'{found[:-2]}\n">']
)
def test_white_space_in_base64_is_ignored(http: httpx2.Client, red: str, change: Any) -> None:
    assert ids_of(http, prompt=f"{change(red)}{WHAT}") == ids_of(http, prompt=f"{red}{WHAT}")
    lines = re.sub("(.{76})", r"\1\r\n", source(red).partition("base64,")[2])
    in_lines = red.replace(lines.replace("\r\n", ""), lines)
    assert "\r\n" in in_lines
    assert ids_of(http, prompt=f"{in_lines}{WHAT}") == ids_of(http, prompt=f"{red}{WHAT}")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_an_image_may_have_another_format(http: httpx2.Client, red: str, kind: str) -> None:
    data = base64.b64encode(encoded(draw_shape("red", (220, 40, 40), "square", x=0.4), kind)).decode()
    other = f'<img src="data:image/{kind.lower()};base64,{data}">'
    assert ids_of(http, prompt=f"{other}{WHAT}") == ids_of(http, prompt=f"{red}{WHAT}")


def test_a_long_data_url_in_a_text_is_refused(http: httpx2.Client, red: str) -> None:
    """The text of a chat may have no images unless --webui-images is set."""
    length = len(source(red))
    long = red.replace("<img", "<IMG")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": red}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": red}]}]}),
        ("/infer", {"inputs": [{"text": source(red)}]}),
        ("/infer", {"inputs": long}),
        ("/v1/completions", {"prompt": long}),
        ("/tokenize", {"prompt": f"{red}{long}"}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text[:500]
        message = answer.json()["error"]["message"]
        assert f"the text has a data: URL of {length} characters" in message, path
        assert "--webui-images" in message
        assert len(message) < 500


def test_the_pixels_of_an_image_change_the_answer(
    client: openai.OpenAI, http: httpx2.Client, red: str, blue: str
) -> None:
    texts = [f"{one}{WHAT}" for one in (red, blue)]
    answer = client.completions.create(model="tiny", prompt=texts, temperature=0, max_tokens=1, logprobs=3)
    first, second = (choice.logprobs for choice in answer.choices)
    assert first is not None
    assert second is not None
    assert first.top_logprobs != second.top_logprobs
    assert ids_of(http, prompt=texts[0]) == ids_of(http, prompt=texts[1])


def test_a_streamed_echo_of_several_prompts_equals_the_whole_answer(client: openai.OpenAI, red: str, blue: str) -> None:
    prompts = [f"{red}{WHAT}", "Hello", f"{blue}{red}{WHAT}"]
    settings: dict[str, Any] = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 4, "n": 2}
    whole = client.completions.create(**settings, echo=True, logprobs=1)
    texts = [""] * 6
    for chunk in client.completions.create(**settings, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert "<|IMAGE|>" in texts[0]
    assert "base64" not in "".join(texts)
    assert texts[2].startswith("Hello")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.replace("<img ", "<img  "),
        lambda found: found.replace("<img", "<IMG"),
        lambda found: found.replace('src="', "src='").replace('">', "'>"),
        lambda found: found.replace("image/jpeg", "image/bmp"),
        lambda found: found.replace("image/jpeg", "image/jpg"),
        lambda found: found.replace("base64,", "base64 ,"),
        lambda found: found.replace("base64,", "base64,\u00a0"),
        lambda found: found.replace('">', '" >'),
        lambda found: found.replace('">', '"/>'),
        lambda found: found[:-2],
        lambda found: found.replace("base64,/9j", "base64,-_-"),
        lambda found: f"{found[:20]}\n{found[20:]}",
        lambda found: '<img src="data:image/jpeg;base64,">' if found else "",
        lambda found: '<img src="data:image/jpeg;base64,\n \n">' if found else "",
        lambda found: '<img src="http://127.0.0.1/x.jpg">' if found else "",
        lambda found: '<img src="file:///etc/passwd">' if found else "",
    ],
)
def test_other_tags_stay_text(client: openai.OpenAI, http: httpx2.Client, change: Any) -> None:
    text = change(tag(photograph(size=(16, 16)), quality=20))
    ids = ids_of(http, prompt=text)
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    if len(ids) < 500:
        answer = client.completions.create(model="tiny", prompt=text, temperature=0, max_tokens=1, echo=True)
        assert answer.choices[0].text.startswith(text)


def test_text_around_an_image_forms_no_media_token(http: httpx2.Client, red: str) -> None:
    alone = ids_of(http, prompt=red)
    pad = max(set(alone), key=alone.count)
    for text in ("<|IMAGE|>", "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|IMA", "GE|>", "<|vision_eos|>"):
        for prompt in (f"{text}{red}", f"{red}{text}", f"<|IMA{red}GE|>"):
            assert ids_of(http, prompt=prompt).count(pad) == alone.count(pad)


def test_a_tag_in_a_chat_stays_text(http: httpx2.Client, red: str) -> None:
    short = red[:200] + '">'
    ids = ids_of(http, messages=[{"role": "user", "content": short}])
    assert short in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            '<img src="data:image/jpeg;base64,====">',
            r"media item 0 \(image\): the base64 of the data: URL is not valid",
        ),
        ('x<img src="data:image/jpeg;base64,AAA">', r"media item 0 \(image\)"),
        ('<img src="data:image/jpeg;base64,AAAAAAAA">', r"media item 0 \(image\)"),
        ('<img src="data:image/jpeg;base64,AAAA">' * 5, "more images than the limit of 4"),
        ('<img src="data:image/jpeg;base64,AAAA">' * 150_000, "more images than the limit of 4"),
        (f'<img src="data:image/jpeg;base64,{"A" * 6_000_000}">', "limit for one item is 4194304"),
        (f'<img src="data:image/jpeg;base64,{"A" * 2_600_000}">' * 3, "the limit is 5242880"),
        ([f'<img src="data:image/jpeg;base64,{"A" * 2_600_000}">'] * 3, "the limit is 5242880"),
        (['<img src="data:image/jpeg;base64,AAAA">'] * 5, "5 media items; the limit is 4"),
    ],
    ids=["padding", "cut", "no image", "5", "150,000", "large", "sum", "sum over prompts", "5 prompts"],
)
def test_invalid_and_oversized_images_are_refused(http: httpx2.Client, prompt: Any, message: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400, answer.text[:500]
    assert re.search(message, answer.json()["error"]["message"]), answer.text[:500]
    assert len(answer.content) < 1000, "the answer holds no image"
    if isinstance(prompt, str):
        assert http.post("/infer", json={"inputs": prompt}).status_code == 400


def test_a_truncated_image_is_refused(http: httpx2.Client) -> None:
    whole = encoded(photograph(size=(64, 64)), "JPEG")
    text = base64.b64encode(whole[:40]).decode()
    answer = http.post("/v1/completions", json={"prompt": f'<img src="data:image/jpeg;base64,{text}">?'})
    assert answer.status_code == 400, answer.text
    assert "media item 0 (image)" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "image", "image": {"array": [[0.0]]}},
        {"image": {"array": [[0.0]], "grid": [1]}},
        {"image": [[0.0, 1.0]]},
        {"image": 1.5},
    ],
)
def test_embeddings_are_refused(http: httpx2.Client, item: dict[str, Any]) -> None:
    for path, body in (
        ("/infer", {"inputs": [item]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [item]}]}),
        ("/tokenize", {"inputs": [item]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "BadRequestError"
