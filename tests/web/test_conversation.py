"""Tests of the conversation, as the page shows it, sends it in requests and copies it as the history."""

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
    """Ask a question whose answer takes many seconds, wait until its text starts, and return the answer."""
    page.route(
        COMPLETIONS, lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | LONG)), times=1
    )
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").last
    expect(answer).to_have_text(re.compile("..."))
    return answer


def wait_until(page: Page, comparison: str, number: int) -> None:
    """Wait until the comparison is true. `wait_for_function` cannot be used, because the page's CSP blocks it."""
    for _ in range(TIMEOUT_MS // 20):
        if page.evaluate(f"{comparison} {number}"):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never: {comparison} {number}")


def stop(page: Page) -> None:
    page.get_by_role("button", name="Stop", exact=True).press("Enter")
    expect(page.locator("#status")).to_contain_text("Stopped.")


def answer_with(page: Page, *chunks: dict[str, Any], end: str = "\n\n") -> None:
    """Answer the next question with `chunks` instead of the service's answer. `end` terminates each event."""
    events = [f"data: {json.dumps(chunk)}" for chunk in chunks]
    body = "".join(event + end for event in [*events, "data: [DONE]"])
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)


def chunk_of(text: str, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]} | more


def copied(page: Page) -> str:
    page.get_by_role("button", name="Copy history").click()
    expect(page.locator("#status")).to_contain_text("The history is copied")
    text = page.evaluate("navigator.clipboard.readText()")
    assert isinstance(text, str)
    return text


def test_the_conversation_contains_stopped_answers_but_no_failed_questions(page: Page) -> None:
    """A stopped answer is sent and copied as far as it was generated.

    A failed question, which is put back into the input form, is not sent or copied.
    """
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


def test_the_page_follows_the_answer_only_while_scrolled_to_the_end(page: Page) -> None:
    """If a reader scrolls up, the page stays there, and Stop stays visible. At the end, the page follows again."""
    page.set_viewport_size({"width": 390, "height": 664})
    answer = ask_at_length(page, HELLO)
    end, button = page.locator("#clear"), page.get_by_role("button", name="Stop", exact=True)
    for _ in range(2):
        high = page.evaluate("scrollY")
        wait_until(page, "scrollY >", high + 100)
        wait_until(page, f"-{END} >=", -665)
        expect(button).to_be_in_viewport(ratio=1)
        page.mouse.wheel(0, -10_000)
        wait_until(page, "scrollY <", 100)  # the page may have followed the answer once more
        wait_until(page, LENGTH, len(str(answer.text_content())) + 100)
        left_at = page.evaluate("scrollY")
        wait_until(page, LENGTH, len(str(answer.text_content())) + 200)
        assert page.evaluate("scrollY") == left_at < 100
        assert page.evaluate(END) > 700
        expect(button).to_be_in_viewport(ratio=1)
        for _ in range(20):  # the answer may grow out of view before the page handles the scroll event
            end.evaluate("(one) => one.scrollIntoView({ block: 'nearest' })")
            page.wait_for_timeout(100)
            if page.evaluate(END) < 700:
                break
    page.evaluate("scrollTo(0, 0)")
    stop(page)
    assert page.evaluate("scrollY") == 0


def test_an_attached_file_keeps_its_content(page: Page, tmp_path: Path) -> None:
    """Even if the file is overwritten and then removed, the page sends, shows and copies the attached content."""
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


def test_an_unreadable_file_is_named(page: Page, files: Path) -> None:
    page.evaluate(
        "() => void (Blob.prototype.arrayBuffer = () => Promise.reject(new DOMException('gone', 'NotReadableError')))"
    )
    page.get_by_label("Attach files").set_input_files(files / "scene.png")
    expect(page.locator("#status")).to_have_text("Cannot be read: scene.png.")
    expect(page.locator("#items li")).to_have_count(0)


def test_media_that_the_history_cannot_contain_are_named(page: Page, files: Path, tmp_path: Path) -> None:
    """The history only names a sound, and a picture that is wider than the browser's canvas allows."""
    Image.new("RGB", (70_000, 10)).save(tmp_path / "wide.png")
    attach(page, tmp_path / "wide.png", files / "beeps.wav")
    answer_with(page, chunk_of("black"))
    ask_scripted(page, "What?")
    assert copied(page) == "### Human: [image: wide.png][audio: beeps.wav]What?\n### Assistant: black\n"
    expect(page.locator("#status")).to_contain_text(re.compile("only the names are copied: .*wide.png"))


def ask_scripted(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile(r"^Answered"))


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_an_answer_without_timings_is_shown_with_either_line_end(page: Page, end: str) -> None:
    answer_with(page, chunk_of("as "), chunk_of("asked"), end=end)
    ask_scripted(page, HELLO)
    expect(page.locator(".answer")).to_have_text("as asked")
    expect(page.locator("#status")).to_have_text("Answered.")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_dropped_items_are_counted_but_not_named(page: Page, files: Path) -> None:
    """With `--truncate`, the service keeps only the last items of a prompt. The page lists only these items."""
    attach(page, files / "scene.png", files / "star.jpg")
    span = {"type": "image", "start": 2, "stop": 14, "features": 12, "block": "mindie_mm-1f2a:0"}
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}  # type: ignore[dict-item]
    answer_with(page, chunk_of("star", media_spans=[span]), {"choices": [], "usage": usage})
    ask_scripted(page, "Which shape is it?")
    tokens = page.locator("article figure")
    expect(tokens.locator("figcaption")).to_have_text("Tokens: 20 in the prompt, 1 in the answer; 1 item dropped")
    expect(tokens.locator("li").first).to_contain_text("image star.jpg at 2 to 13")
