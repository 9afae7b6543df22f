"""Tests for what the page keeps in the browser: conversations, their branches and media."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import COMPLETIONS, ask, attach, submit
from tests.web.test_asking_again import LOADED, hold

pytestmark = pytest.mark.slow  # each test takes seconds


def test_conversations_are_listed_renamed_exported_and_deleted(page: Page, files: Path) -> None:
    """They survive a reload with their media, and media are sent again with the next question."""
    rows = page.locator("#chats li")
    attach(page, files / "scene.png", files / "beeps.wav")
    ask(page, "What is in the image?")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#status")).to_be_empty()
    ask(page, "Hello!")
    expect(rows).to_have_text(["Hello!", "What is in the image?"])
    page.get_by_role("link", name="What is in the image?").click()
    expect(page.get_by_role("link", name="What is in the image?")).to_have_attribute("aria-current", "page")
    page.reload()
    turn = page.locator("article")
    expect(turn.locator(".answer")).to_have_text(re.compile("red square"))
    expect(turn.get_by_role("img", name="scene.png")).to_have_js_property("naturalWidth", 160)
    assert turn.locator("audio").evaluate(LOADED)
    turn.get_by_role("button", name="Time and tokens").click()
    expect(turn.locator("figure")).to_have_count(2)
    expect(ask(page, "What color is it?").locator(".answer")).to_have_text("red")

    page.get_by_role("button", name="Rename What is in the image?").click()
    page.get_by_label("Title", exact=True).fill("Red")
    page.keyboard.press("Enter")
    expect(rows).to_have_text(["Red", "Hello!"])
    page.get_by_label("Search titles").fill("re")
    expect(rows).to_have_text(["Red"])
    with page.expect_download() as caught:
        page.get_by_role("button", name="Export Red").click()
    assert caught.value.suggested_filename == "Red.json"
    messages = json.loads(Path(caught.value.path()).read_text(encoding="utf-8"))["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Red").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_text("No conversations.")).to_be_visible()
    page.get_by_label("Search titles").fill("")
    expect(rows).to_have_text(["Hello!"])


def test_edited_and_regenerated_turns_are_versions(page: Page, files: Path) -> None:
    """Each version has the turns that followed it. An edited answer is sent as it is shown."""
    attach(page, files / "scene.png")
    ask(page, "What is in the image?")
    ask(page, "What color is it?")
    first = page.locator("article").first
    first.get_by_role("button", name="Edit question").click()
    page.get_by_label("Question to ask instead").fill("Which shape is it?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_text(["square"])
    expect(first.get_by_text("2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".answer")).to_have_text(["red square", "red"])
    page.get_by_role("button", name="Regenerate answer").last.click()
    expect(page.locator("article").last.get_by_text("2 of 2")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("The answer is the same as before.")  # without a temperature
    expect(page.locator(".answer")).to_have_text(["red square", "red"])
    first.get_by_role("button", name="Edit answer").click()
    page.get_by_label("Answer", exact=True).fill("blue square")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#status")).to_have_text("Saved.")
    page.reload()
    expect(page.locator(".answer")).to_have_text(["blue square", "red"])
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, "Hello!")
    assert caught.value.post_data_json["messages"][1]["content"] == "blue square"


def test_a_turn_that_could_not_be_kept_is_kept_with_the_next_one(page: Page) -> None:
    page.evaluate(
        """() => {
          window.transaction = IDBDatabase.prototype.transaction;
          IDBDatabase.prototype.transaction = function (names, mode) {
            if (mode === "readwrite") throw new DOMException("no room", "QuotaExceededError");
            return window.transaction.call(this, names, mode);
          };
        }"""
    )
    submit(page, "Hello!")
    expect(page.get_by_role("button", name="Regenerate answer")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("does not keep this conversation")
    page.evaluate("() => { IDBDatabase.prototype.transaction = window.transaction; }")
    ask(page, "Hello again!")
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("link", name="Skip to the question").press("Enter")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    expect(page.locator("article")).to_have_count(2)


def test_a_question_survives_if_the_page_is_closed_during_its_answer(page: Page, files: Path) -> None:
    """A question without an answer goes back to the form, and is not kept."""
    hold(page)
    attach(page, files / "scene.png")
    with page.expect_request(COMPLETIONS):
        submit(page, "Which shape is it?")
    rows = page.locator("#chats li")
    expect(rows).to_have_text(["Which shape is it?"])
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("the page was closed before it was complete")
    with page.expect_request(COMPLETIONS):
        page.get_by_role("button", name="Regenerate answer").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    page.unroute(COMPLETIONS)
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.locator(".answer")).to_have_text("square")
    page.reload()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(page.get_by_role("img", name="scene.png")).to_have_js_property("naturalWidth", 160)
    page.get_by_role("button", name="New chat").click()
    hold(page)
    with page.expect_request(COMPLETIONS):
        submit(page, "And now?")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(rows).to_have_text(["Which shape is it?"])


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page: Page) -> None:
    ask(page, "Hello!")
    held = hold(page)
    submit(page, "And now?")
    expect(page.locator("#stop")).to_be_visible()
    composing = "new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true})"
    page.locator("#question").evaluate(f"(field) => field.dispatchEvent({composing})")  # as in Chinese input
    expect(page.locator("#stop")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Hello!").click()
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.get_by_text("No conversations.")).to_be_visible()
    expect(page.locator("article")).to_have_count(0)
    assert len(held) == 1


def test_a_conversation_keeps_its_system_prompt_while_another_one_is_shown(page: Page) -> None:
    """An answer arrives in the background, and its conversation is opened again."""
    prompt = page.locator("#system")
    ask(page, "Hello!")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Settings").click()
    prompt.fill("Answer briefly.")
    page.keyboard.press("Escape")
    ask(page, "What can you do?")
    held = hold(page)
    submit(page, "And now?")
    expect(page.locator("#stop")).to_be_visible()
    page.get_by_role("link", name="Hello!").click()
    expect(prompt).to_have_value("")
    page.get_by_role("link", name="What can you do?").click()
    expect(prompt).to_have_value("Answer briefly.")
    page.locator("#stop").click()
    assert held[0].request.post_data_json["messages"][0] == {"role": "system", "content": "Answer briefly."}


def test_text_that_is_nested_too_deeply_is_shown_as_it_is(page: Page) -> None:
    chunk = {"choices": [{"delta": {"content": ">" * 3000}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    answer = ask(page, "Hello!").locator(".answer")
    expect(answer).to_have_text(">" * 3000)


def test_the_page_works_without_a_place_to_keep_conversations(page: Page) -> None:
    """Browsers may refuse IndexedDB and the clipboard, for example on pages from other machines."""
    page.evaluate("""() => {
        IDBDatabase.prototype.transaction = () => { throw new DOMException("no room", "QuotaExceededError"); };
        Object.defineProperty(navigator, "clipboard", {value: undefined});
    }""")
    page.get_by_label("Question", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("The browser does not keep this conversation")
    turn = page.locator("article")
    turn.get_by_role("button", name="Copy answer").click()
    shown = page.locator("#copy-text")
    expect(shown).to_be_focused()
    expect(shown).to_have_value(turn.locator(".answer").inner_text())
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
