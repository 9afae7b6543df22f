"""Tests that the text and attachments of a question that was not answered are put back into the input form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.web.conftest import ask, attach

COMPLETIONS = "**/v1/chat/completions"
WHAT = "What do you see and hear?"
BACK = "The question is back in the form."


def submit(page: Page, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def hold(page: Page) -> list[Route]:
    """Intercept all further questions, and return the list that collects them."""
    held: list[Route] = []

    def take(route: Route) -> None:
        held.append(route)

    page.route(COMPLETIONS, take)
    return held


@pytest.mark.parametrize("status", [400, 401, *(pytest.param(one, marks=pytest.mark.slow) for one in (429, 503))])
def test_a_refused_question_returns_to_the_form(page: Page, files: Path, status: int) -> None:
    refusal = {"error": {"message": f"refused with {status}", "code": status}}
    page.route(COMPLETIONS, lambda route: route.fulfill(status=status, json=refusal), times=1)
    attach(page, files / "scene.png", files / "beeps.wav")
    submit(page, WHAT)
    expect(page.get_by_role("alert")).to_have_text(f"refused with {status}")
    expect(page.locator("#status")).to_have_text(BACK)
    question = page.get_by_label("Question", exact=True)
    expect(question).to_have_value(WHAT)
    expect(page.locator("#items li")).to_contain_text(["scene.png", "beeps.wav"])
    expect(page.get_by_label("API key", exact=True) if status == 401 else question).to_be_focused()
    question.press("Enter")
    expect(page.locator(".answer")).to_have_text("red square, 3 beeps")
    expect(page.locator("#items li")).to_have_count(0)
    expect(question).to_have_value("")


def test_a_recording_survives_a_lost_connection(page: Page) -> None:
    """The recording is put back into the form, and stays there even if the conversation is cleared."""
    page.get_by_role("button", name="Record sound").click()
    expect(page.locator("#status")).to_have_text("Recording sound.")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_have_count(1)
    page.context.set_offline(True)
    submit(page, "")
    expect(page.get_by_role("alert")).to_have_text("The service cannot be reached.")
    page.get_by_role("button", name="Clear").click()
    page.context.set_offline(False)
    loaded = """(audio) => new Promise((resolve) => {
        audio.onloadeddata = () => resolve(true);
        audio.onerror = () => resolve(false);
        audio.load();
    })"""
    assert page.locator("#items audio").evaluate(loaded)
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.get_by_text("audio recording 1.webm")).to_be_visible()


@pytest.mark.parametrize("question", [WHAT, ""])
def test_a_failed_question_returns_before_later_text_and_files(page: Page, files: Path, question: str) -> None:
    held = hold(page)
    attach(page, files / "scene.png")
    with page.expect_request(COMPLETIONS):
        submit(page, question)
    attach(page, files / "star.jpg")
    field = page.get_by_label("Question", exact=True)
    field.fill("And then?")
    field.press("ArrowLeft")
    held[0].abort()
    expect(page.locator("#status")).to_have_text(BACK)
    expect(page.locator("#items li")).to_contain_text(["scene.png", "star.jpg"])
    page.keyboard.type("!")  # the text cursor has kept its place
    expect(field).to_have_value(f"{question}\nAnd then!?".strip())
    page.get_by_role("button", name="Remove scene.png").click()
    expect(page.locator("#items li")).to_contain_text(["star.jpg"])
    page.unroute(COMPLETIONS)
    ask(page, "Which shape is it?")
    expect(page.locator(".answer")).to_have_text("star")


def test_a_broken_answer_returns_its_question_to_the_form(page: Page) -> None:
    """The connection is lost before the answer is complete. The page still shows the text that has arrived."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "red"}, "finish_reason": None}]}
    body = f"data: {json.dumps(chunk)}\n\n"
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    submit(page, WHAT)
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer was complete")
    expect(page.locator(".answer")).to_have_text("red")
    expect(page.get_by_label("Question", exact=True)).to_have_value(WHAT)


def test_a_question_stopped_before_its_answer_returns_to_the_form(page: Page, files: Path) -> None:
    hold(page)
    attach(page, files / "scene.png")
    with page.expect_request(COMPLETIONS):
        submit(page, WHAT)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#status")).to_have_text(f"Stopped. {BACK}")
    expect(page.get_by_label("Question", exact=True)).to_have_value(WHAT)
    expect(page.locator("#items li")).to_contain_text(["scene.png"])


def test_another_question_waits_for_the_first(page: Page) -> None:
    hold(page)
    with page.expect_request(COMPLETIONS):
        submit(page, WHAT)
    submit(page, "And then?")
    expect(page.locator("#status")).to_have_text("The previous answer is not finished. Press Stop to end it.")
    expect(page.get_by_label("Question", exact=True)).to_have_value("And then?")
    expect(page.locator("article")).to_have_count(1)
