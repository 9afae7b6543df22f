"""What the conversation is: on the page, in what is sent of it, and in what is copied."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from tests.web.conftest import TIMEOUT_MS, ask, attach
from tools.demo import picture

COMPLETIONS = "**/v1/chat/completions"
HELLO = "Hello!"
LONG = {"ignore_eos": True, "max_tokens": 3900}
LENGTH = "document.querySelector('.answer').textContent.length >"
END = "document.getElementById('clear').getBoundingClientRect().bottom"


def ask_at_length(page: Page, question: str) -> Locator:
    """Asks what is answered for many seconds; the answer, which has begun."""
    page.route(
        COMPLETIONS, lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | LONG)), times=1
    )
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").last
    expect(answer).to_have_text(re.compile("..."))
    return answer


def until(page: Page, comparison: str, number: int) -> None:
    """Waits; the page's policy bars Playwright's own wait."""
    for _ in range(TIMEOUT_MS // 20):
        if page.evaluate(f"{comparison} {number}"):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never: {comparison} {number}")


def stop(page: Page) -> None:
    page.get_by_role("button", name="Stop", exact=True).press("Enter")
    expect(page.locator("#status")).to_contain_text("Stopped.")


def answer_with(page: Page, *chunks: dict[str, Any], end: str = "\n\n") -> None:
    """The next question is answered with these, as a server of another kind might."""
    events = [f"data: {json.dumps(chunk)}" for chunk in chunks]
    body = "".join(event + end for event in [*events, "data: [DONE]"])
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)


def said(text: str, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]} | more


def copied(page: Page) -> str:
    page.get_by_role("button", name="Copy history").click()
    expect(page.locator("#status")).to_contain_text("The history is copied")
    text = page.evaluate("navigator.clipboard.readText()")
    assert isinstance(text, str)
    return text


def test_it_has_stopped_answers_and_no_failed_questions(page: Page) -> None:
    """What was drawn before the stop is sent and copied; a question that came back into the form is neither."""
    expect(page.get_by_role("button", name="Copy history")).to_be_disabled()
    page.route(COMPLETIONS, lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}), times=1)
    question = page.get_by_label("Question", exact=True)
    question.fill("one")
    question.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("full")
    expect(page.get_by_role("button", name="Copy history")).to_be_disabled()
    partial = ask_at_length(page, "two")
    stop(page)
    answer = partial.text_content()
    assert answer
    page.get_by_text("Options").click()
    page.get_by_label("Send the conversation so far").check()
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, HELLO)
    messages = [
        (one["role"], one["content"] if isinstance(one["content"], str) else one["content"][0]["text"])
        for one in caught.value.post_data_json["messages"]
    ]
    assert messages == [("user", "two"), ("assistant", answer), ("user", HELLO)]
    last = page.locator(".answer").last.text_content()
    assert copied(page) == f"### Human: two\n### Assistant: {answer}\n### Human: {HELLO}\n### Assistant: {last}\n"


def test_the_end_is_followed_while_the_reader_is_there(page: Page) -> None:
    """On a small screen; who scrolls up is left in peace, with Stop in reach, and is followed again at the end."""
    page.set_viewport_size({"width": 390, "height": 664})
    answer = ask_at_length(page, HELLO)
    end, button = page.locator("#clear"), page.get_by_role("button", name="Stop", exact=True)
    for _ in range(2):
        high = page.evaluate("scrollY")
        until(page, "scrollY >", high + 100)
        until(page, f"-{END} >=", -665)
        expect(button).to_be_in_viewport(ratio=1)
        page.mouse.wheel(0, -10_000)
        until(page, "scrollY <", 100)  # a step by which it grew meanwhile is added
        until(page, LENGTH, len(str(answer.text_content())) + 100)
        left_at = page.evaluate("scrollY")
        until(page, LENGTH, len(str(answer.text_content())) + 200)
        assert page.evaluate("scrollY") == left_at < 100
        assert page.evaluate(END) > 700
        expect(button).to_be_in_viewport(ratio=1)
        for _ in range(
            20
        ):  # as a reader does: it may have grown out of sight again before the page hears of the scroll
            end.evaluate("(one) => one.scrollIntoView({ block: 'nearest' })")
            page.wait_for_timeout(100)
            if page.evaluate(END) < 700:
                break
    page.evaluate("scrollTo(0, 0)")
    stop(page)
    assert page.evaluate("scrollY") == 0


def test_a_file_is_as_it_was_when_it_was_attached(page: Page, tmp_path: Path) -> None:
    """Saved again and then removed, it goes on being asked about, sent, shown and copied."""
    path = tmp_path / "edit.png"
    picture("red", (220, 40, 40), "square", x=0.35).save(path)
    attach(page, path)
    picture("green", (40, 160, 60), "star", x=0.5).save(path)
    turn = ask(page, "What is in the image?")
    expect(turn.locator(".answer")).to_have_text("red square")
    path.unlink()
    page.get_by_text("Options").click()
    page.get_by_label("Send the conversation so far").check()
    ask(page, HELLO)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert copied(page).startswith('### Human: <img src="data:image/jpeg;base64,/9j/')


def test_a_file_that_cannot_be_read_is_said(page: Page, files: Path) -> None:
    page.evaluate(
        "() => void (Blob.prototype.arrayBuffer = () => Promise.reject(new DOMException('gone', 'NotReadableError')))"
    )
    page.get_by_label("Attach files").set_input_files(files / "scene.png")
    expect(page.locator("#status")).to_have_text("Cannot be read: scene.png.")
    expect(page.locator("#items li")).to_have_count(0)


def test_what_a_copy_cannot_hold_is_named(page: Page, files: Path, tmp_path: Path) -> None:
    """A picture above the size of the browser's canvases; a sound."""
    Image.new("RGB", (70_000, 10)).save(tmp_path / "wide.png")
    attach(page, tmp_path / "wide.png", files / "beeps.wav")
    answer_with(page, said("black"))
    ask_scripted(page, "What?")
    assert copied(page) == "### Human: [image: wide.png][audio: beeps.wav]What?\n### Assistant: black\n"
    expect(page.locator("#status")).to_contain_text(re.compile("Named only: .*wide.png"))


def ask_scripted(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile(r"^Answered"))


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_an_answer_without_timings_and_either_line_end(page: Page, end: str) -> None:
    answer_with(page, said("as "), said("asked"), end=end)
    ask_scripted(page, HELLO)
    expect(page.locator(".answer")).to_have_text("as asked")
    expect(page.locator("#status")).to_have_text("Answered.")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_items_that_were_dropped_are_not_named(page: Page, files: Path) -> None:
    """`--truncate` keeps the last ones."""
    attach(page, files / "scene.png", files / "star.jpg")
    span = {"type": "image", "start": 2, "stop": 14, "features": 12, "block": "mindie_mm-1f2a:0"}
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}  # type: ignore[dict-item]
    answer_with(page, said("star", media_spans=[span]), {"choices": [], "usage": usage})
    ask_scripted(page, "Which shape is it?")
    tokens = page.locator("article figure")
    expect(tokens.locator("figcaption")).to_have_text("Tokens: 20 of prompt, 1 of answer; 1 item dropped")
    expect(tokens.locator("li").first).to_contain_text("image star.jpg at 2 to 13")
