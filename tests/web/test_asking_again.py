"""Tests for questions without a whole answer: refused, stopped, or answered in part."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.web.conftest import COMPLETIONS, Noted, ask, attach, submit

pytestmark = pytest.mark.slow  # each test takes seconds

WHAT = "What do you see and hear?"
BACK = "The question is back in the form."
LOADED = """(audio) => new Promise((resolve) => {
    audio.onloadeddata = () => resolve(true);
    audio.onerror = () => resolve(false);
    audio.load();
})"""


def hold(page: Page) -> list[Route]:
    """Intercept all further questions, and return the list that collects them."""
    held: list[Route] = []

    def take(route: Route) -> None:
        held.append(route)

    page.route(COMPLETIONS, take)
    return held


def test_a_refused_question_returns_to_the_form(page: Page, files: Path) -> None:
    attach(page, files / "scene.png", files / "beeps.wav")
    question = page.get_by_label("Question", exact=True)
    for status in (400, 429, 401):
        refusal = {"error": {"message": f"refused with {status}", "code": status}}
        page.route(COMPLETIONS, partial(Route.fulfill, status=status, json=refusal), times=1)
        submit(page, WHAT)
        expect(page.get_by_role("alert")).to_have_text(f"refused with {status}")
        expect(page.locator("#status")).to_have_text(BACK)
        expect(question).to_have_value(WHAT)
        expect(page.locator("#items li")).to_contain_text(["scene.png", "beeps.wav"])
        expect(page.locator("#key") if status == 401 else question).to_be_focused()
    with page.expect_request(COMPLETIONS) as caught:
        question.press("Enter")
    assert len(caught.value.post_data_json["messages"]) == 1  # failed questions are not sent
    expect(page.locator(".answer")).to_have_text("red square, 3 beeps")
    expect(page.locator("article")).to_have_count(1)
    expect(page.locator("#items li")).to_have_count(0)
    expect(question).to_have_value("")


def test_a_recording_survives_a_lost_connection(page: Page) -> None:
    """The recording is put back into the form, and stays there even if the user opens another conversation."""
    page.get_by_role("button", name="Record audio").click()
    expect(page.locator("#status")).to_have_text("Recording audio.")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_have_count(1)
    page.context.set_offline(True)
    submit(page, "")
    expect(page.get_by_role("alert")).to_have_text("The service cannot be reached.")
    page.get_by_role("button", name="New chat").click()
    page.context.set_offline(False)
    assert page.locator("#items audio").evaluate(LOADED)
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.locator(".answer")).not_to_be_empty()


def test_a_failed_question_returns_before_later_text_and_files(page: Page, files: Path) -> None:
    """Until then, another question has to wait."""
    for question in (WHAT, ""):
        held = hold(page)
        attach(page, files / "scene.png")
        with page.expect_request(COMPLETIONS):
            submit(page, question)
        attach(page, files / "star.jpg")
        submit(page, "And then?")
        expect(page.locator("#status")).to_have_text("The previous answer is not finished. Press Stop to end it.")
        expect(page.locator("article")).to_have_count(1)
        field = page.get_by_label("Question", exact=True)
        field.press("ArrowLeft")
        held[0].abort()
        expect(page.locator("#status")).to_have_text(BACK)
        expect(page.locator("#items li")).to_contain_text(["scene.png", "star.jpg"])
        page.keyboard.type("!")  # the text cursor has kept its place
        expect(field).to_have_value(f"{question}\nAnd then!?".strip())
        page.get_by_role("button", name="Remove scene.png").click()
        page.unroute(COMPLETIONS)
        ask(page, "Which shape is it?")
        expect(page.locator(".answer")).to_have_text("star")
        page.get_by_role("button", name="New chat").click()


def test_a_broken_answer_is_kept_as_far_as_it_arrived(page: Page) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "red"}, "finish_reason": None}]}
    body = f"data: {json.dumps(chunk)}\n\n"
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
    submit(page, WHAT)
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer was complete")
    expect(page.locator(".answer")).to_have_text("red")
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, "Hello!")
    assert caught.value.post_data_json["messages"][1] == {"role": "assistant", "content": "red"}
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer was complete")


def test_a_question_stopped_before_its_answer_returns_to_the_form(page: Page, files: Path) -> None:
    hold(page)
    attach(page, files / "scene.png")
    with page.expect_request(COMPLETIONS):
        submit(page, WHAT)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#status")).to_have_text(f"Stopped. {BACK}")
    expect(page.get_by_label("Question", exact=True)).to_have_value(WHAT)
    expect(page.locator("#items li")).to_contain_text(["scene.png"])
    page.unroute(COMPLETIONS)


def test_a_failed_regeneration_shows_the_answer_again(page: Page, noted: Noted) -> None:
    ask(page, "Hello!")
    page.route(COMPLETIONS, lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}), times=1)
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.locator("#status")).to_have_text("full")
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator(".answer")).not_to_be_empty()
    expect(page.get_by_role("button", name="Regenerate answer")).to_be_visible()


def test_a_failed_regeneration_keeps_the_selected_version(page: Page) -> None:
    ask(page, "Hello!")
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous version").click()
    page.route(COMPLETIONS, lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}), times=1)
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.locator("#status")).to_have_text("full")
    expect(page.get_by_text("1 of 2")).to_be_visible()
    page.reload()
    expect(page.get_by_text("1 of 2")).to_be_visible()
