"""Tests for the conversation, as the page shows it and sends it in requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.conftest import COMPLETIONS, TIMEOUT_MS, answer_with, ask, attach, chunk_of, submit
from tools.demo import draw_shape

HELLO = "Hello!"
LONG = {"ignore_eos": True, "max_tokens": 3900}
LENGTH = "document.querySelector('.answer').textContent.length >"
TOP = "document.getElementById('log').scrollTop"
BELOW = "((log) => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))"


def ask_at_length(page: Page, question: str) -> Locator:
    """Ask a question whose answer takes many seconds, wait until its text starts, and return the answer."""
    page.route(
        COMPLETIONS, lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | LONG)), times=1
    )
    submit(page, question)
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


@pytest.mark.slow
def test_the_conversation_contains_stopped_answers(page: Page) -> None:
    partial = ask_at_length(page, "two")
    stop(page)
    answer = partial.text_content()
    assert answer
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, HELLO)
    messages = [
        (one["role"], one["content"] if isinstance(one["content"], str) else one["content"][0]["text"])
        for one in caught.value.post_data_json["messages"]
    ]
    assert [role for role, _ in messages] == ["user", "assistant", "user"]
    assert messages[1][1].split() == answer.split()


@pytest.mark.slow
def test_the_page_follows_the_answer_only_while_scrolled_to_the_end(page: Page) -> None:
    """If a reader of a phone scrolls up, the page stays there. The form and Stop stay visible below."""
    page.set_viewport_size({"width": 390, "height": 664})
    expect(page.locator("#note")).to_have_text(re.compile("^demo model"))
    assert page.locator("header").bounding_box()["height"] < 160  # type: ignore[index]
    answer = ask_at_length(page, HELLO)
    form, button = page.locator("#composer"), page.get_by_role("button", name="Stop", exact=True)
    log = page.locator("#log")
    for _ in range(2):
        high = page.evaluate(TOP)
        wait_until(page, f"{TOP} >", high + 100)
        wait_until(page, f"-{BELOW} >", -60)
        expect(form).to_be_in_viewport(ratio=1)
        log.hover()
        page.mouse.wheel(0, -10_000)
        wait_until(page, f"{TOP} <", 100)  # the page may have followed the answer once more
        wait_until(page, LENGTH, len(str(answer.text_content())) + 100)
        left_at = page.evaluate(TOP)
        wait_until(page, LENGTH, len(str(answer.text_content())) + 200)
        assert page.evaluate(TOP) == left_at < 100
        expect(button).to_be_in_viewport(ratio=1)
        for _ in range(20):  # the answer may grow out of view before the page handles the scroll event
            log.evaluate("(one) => (one.scrollTop = one.scrollHeight)")
            page.wait_for_timeout(100)
            if page.evaluate(BELOW) < 60:
                break
    log.evaluate("(one) => (one.scrollTop = 0)")
    stop(page)
    assert page.evaluate(TOP) == 0


@pytest.mark.slow
def test_an_attached_file_keeps_its_content(page: Page, files: Path, tmp_path: Path) -> None:
    """Even if the file is overwritten and then removed, the page sends and shows the attached content."""
    path = tmp_path / "edit.png"
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(path)
    attach(page, path)
    draw_shape("green", (40, 160, 60), "star", x=0.5).save(path)
    turn = ask(page, "What is in the image?")
    expect(turn.locator(".answer")).to_have_text("red square")
    path.unlink()
    expect(ask(page, "What color is it?").locator(".answer")).to_have_text("red")
    page.evaluate(
        "() => void (Blob.prototype.arrayBuffer = () => Promise.reject(new DOMException('gone', 'NotReadableError')))"
    )
    page.get_by_label("Attach files").set_input_files(files / "scene.png")
    expect(page.locator("#status")).to_have_text("Cannot be read: scene.png.")
    expect(page.locator("#items li")).to_have_count(0)


@pytest.mark.slow
def test_streams_of_other_forms_are_shown(page: Page, files: Path) -> None:
    """An answer may have no timings, and lines may end with CRLF. The page lists only items that are not dropped."""
    answer_with(page, chunk_of(None, content="as "), chunk_of(content="asked"), end="\r\n\r\n")
    ask(page, HELLO)
    expect(page.locator(".answer")).to_have_text("as asked")
    expect(page.locator("#status")).to_have_text("Answered.")
    attach(page, files / "scene.png", files / "star.jpg")
    span = {"type": "image", "start": 2, "stop": 14, "features": 12, "block": "mindie_mm-1f2a:0"}
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}  # type: ignore[dict-item]
    answer_with(page, chunk_of(content="star") | {"media_spans": [span]}, {"choices": [], "usage": usage})
    turn = ask(page, "Which shape is it?")
    turn.get_by_role("button", name="Time and tokens").click()
    tokens = turn.locator("figure")
    expect(tokens.locator("figcaption")).to_have_text("Tokens: 20 in the prompt, 1 in the answer; 1 item dropped")
    expect(tokens.locator("li").first).to_contain_text("image star.jpg at 2 to 13")
