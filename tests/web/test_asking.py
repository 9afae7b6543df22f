"""Tests that ask questions on the page, with the mouse and with the keyboard."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.web.conftest import Noted, ask, attach
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

WHAT = "What is in the image?"
TAG = re.compile(r'<img src="data:image/jpeg;base64,([A-Za-z0-9+/=]+)">')


def drop_or_paste(page: Page, path: Path, kind: str, way: str) -> None:
    """Drop a file on the page, as a user does with the mouse, or paste the file."""
    data = page.evaluate_handle(
        """([name, type, text]) => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {type}));
            return transfer;
        }""",
        [path.name, kind, base64.b64encode(path.read_bytes()).decode()],
    )
    if way == "drop":
        page.locator("main").dispatch_event("dragover", {"dataTransfer": data})
        page.locator("main").dispatch_event("drop", {"dataTransfer": data})
    else:
        pasted = (
            "(data) => document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))"
        )
        page.evaluate(pasted, data)
    expect(page.locator("#items li")).to_have_count(1)


def test_a_streamed_answer_grows_on_the_page(page: Page) -> None:
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => window.seen.push(document.querySelector(".answer")?.textContent ?? ""))
            .observe(document.getElementById("turns"), {childList: true, subtree: true, characterData: true});
    }""")
    turn = ask(page, "Hello!")
    expect(turn.locator(".answer")).to_have_text(CHAT_ANSWERS["hello"])
    lengths = {len(text) for text in page.evaluate("window.seen")}
    assert len(lengths) > 3
    assert max(lengths) == len(CHAT_ANSWERS["hello"])


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_dropped_or_pasted_picture_is_attached(page: Page, files: Path, way: str) -> None:
    drop_or_paste(page, files / "scene.png", "image/png", way)
    turn = ask(page, WHAT)
    expect(turn.locator(".answer")).to_have_text("red square")
    expect(turn.get_by_role("img", name="scene.png")).to_be_visible()
    expect(page.locator("#items li")).to_have_count(0)


def test_chosen_files_of_each_kind_are_answered_together(page: Page, files: Path) -> None:
    attach(page, files / "star.jpg", files / "right.mp4", files / "beeps.wav")
    turn = ask(page, "What do you see and hear?")
    expect(turn.locator(".answer")).to_have_text("green star, right, 3 beeps")
    expect(turn.locator("video")).to_have_js_property("error", None)
    expect(turn.locator("audio")).to_have_js_property("error", None)
    expect(turn.get_by_text("video right.mp4")).to_be_visible()


# Texts that the clipboard contains beside a picture after a user has copied cells of a spreadsheet, a picture on a web
# page, or a file in a file manager.
COPIES = {
    "cells": {"text/plain": "a\tb", "text/html": "<table><tr><td>a</td><td>b</td></tr></table>"},
    "picture": {"text/html": "<img src='scene.png'>"},
    "file": {"text/plain": "image.png"},
}


@pytest.mark.parametrize("copied", sorted(COPIES))
@pytest.mark.parametrize("field", ["Question", None])
def test_only_cells_pasted_into_a_text_field_stay_text(page: Page, files: Path, copied: str, field: str | None) -> None:
    """In all other cases, the picture is attached. The test uses the browser's real clipboard and keyboard events."""
    page.evaluate(
        """([texts, picture]) => {
            const bytes = Uint8Array.from(atob(picture), (one) => one.charCodeAt(0));
            const copied = {"image/png": new Blob([bytes], {type: "image/png"})};
            for (const [type, text] of Object.entries(texts)) copied[type] = new Blob([text], {type});
            return navigator.clipboard.write([new ClipboardItem(copied)]);
        }""",
        [COPIES[copied], base64.b64encode((files / "scene.png").read_bytes()).decode()],
    )
    question = page.get_by_label("Question", exact=True)
    if field:
        question.focus()
    page.keyboard.press("Control+V")
    if field and copied == "cells":
        expect(question).to_have_value("a\tb")
        expect(page.locator("#items li")).to_have_count(0)
    else:
        expect(page.locator("#items li")).to_contain_text("image.png")
        expect(question).to_have_value("")
        expect(question).to_be_focused()


def test_timings_and_tokens_are_those_of_the_answer(page: Page, service: RunningService, files: Path) -> None:
    attach(page, files / "scene.png", files / "beeps.wav")
    with page.expect_response("**/v1/chat/completions") as caught:
        turn = ask(page, "What do you see and hear?")
    chunks = [json.loads(line[6:]) for line in caught.value.text().splitlines() if line.startswith("data: {")]
    timings = next(chunk["timings"] for chunk in chunks if "timings" in chunk)
    usage = next(chunk["usage"] for chunk in chunks if "usage" in chunk)
    time, tokens = turn.locator("figure").nth(0), turn.locator("figure").nth(1)

    expect(time.locator("figcaption")).to_contain_text(f"Time: {timings['total_s'] * 1000:.3g}"[:9])
    widths = {
        str(rect.get_attribute("class")).removeprefix("stage-"): float(str(rect.get_attribute("width")))
        for rect in time.locator("rect").all()
    }
    shown = {name: width / 1000 for name, width in widths.items()}
    assert shown["decode"] == pytest.approx(timings["decode_s"] / timings["total_s"], abs=0.005)
    assert shown["tower"] == pytest.approx(timings["tower_s"] / timings["total_s"], abs=0.005)
    assert sum(shown.values()) == pytest.approx(1, abs=0.01)

    # Compute the positions of the placeholders from the token ids.
    body = caught.value.request.post_data_json
    ids = httpx2.post(f"{service.url}/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    assert usage["prompt_tokens"] == len(ids)
    expect(tokens.locator("figcaption")).to_contain_text(f"{len(ids)} in the prompt")
    for kind, name in (("image", "scene.png"), ("audio", "beeps.wav")):
        pad = max(set(ids), key=ids.count) if kind == "audio" else next(i for i in ids if 5 < ids.count(i) < 20)
        start, count = ids.index(pad), ids.count(pad)
        assert ids[start : start + count] == [pad] * count
        row = tokens.locator("li", has_text=f"{kind} {name}")
        expect(row).to_contain_text(f"at {start} to {start + count - 1}, {count} features, block mindie_mm-")
        rect = tokens.locator(f"rect.tokens-{kind}")
        whole = usage["total_tokens"]
        assert float(str(rect.get_attribute("x"))) == pytest.approx(start / whole * 1000, abs=0.1)
        assert float(str(rect.get_attribute("width"))) == pytest.approx(count / whole * 1000, abs=0.1)


def test_the_copied_history_is_a_valid_prompt_with_its_pictures(
    page: Page, service: RunningService, files: Path
) -> None:
    attach(page, files / "scene.png")
    ask(page, WHAT)
    attach(page, files / "star.jpg")
    ask(page, "Which shape is it?")
    page.get_by_role("button", name="Copy history").click()
    expect(page.locator("#status")).to_contain_text("The history is copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    pictures = [base64.b64decode(data) for data in TAG.findall(text)]
    assert TAG.sub("*", text) == (
        f"### Human: *{WHAT}\n### Assistant: red square\n### Human: *Which shape is it?\n### Assistant: star\n"
    )
    assert pictures[1] == (files / "star.jpg").read_bytes()
    with Image.open(io.BytesIO(pictures[0])) as jpeg, Image.open(files / "scene.png") as original:
        assert jpeg.format == "JPEG"
        assert jpeg.size == original.size
        assert jpeg.getpixel((64, 64)) == pytest.approx((220, 40, 40), abs=12)
    answer = httpx2.post(f"{service.url}/v1/completions", json={"prompt": text, "max_tokens": 4}).json()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 24


def test_screen_readers_skip_the_figures(page: Page) -> None:
    """Screen readers read out new text in a log, so the figures in the log have `aria-live` set to `off`."""
    turn = ask(page, "Hello!")
    region = "(one) => one.closest('[aria-live], [role=log]').getAttribute('aria-live')"
    assert [figure.evaluate(region) for figure in turn.locator("figure").all()] == ["off", "off"]
    assert turn.locator(".answer").evaluate(region) is None  # the log itself


POLICY = {"Content-Type": "text/html", "Permissions-Policy": "clipboard-write=()"}


@pytest.mark.parametrize("barred", ["missing", "refused"])
def test_the_history_is_shown_when_the_clipboard_is_unavailable(page: Page, noted: Noted, barred: str) -> None:
    """Over plain HTTP, the browser does not offer a clipboard. A permissions policy may also refuse access."""
    if barred == "missing":
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    else:
        page.route(page.url, lambda route: route.fulfill(response=route.fetch(), headers=POLICY))
        page.reload()
    ask(page, "Hello!")
    page.get_by_role("button", name="Copy history").click()
    expect(page.get_by_role("dialog", name="The history")).to_be_visible()
    shown = page.locator("#copy-text")
    expect(shown).to_have_value(f"### Human: Hello!\n### Assistant: {CHAT_ANSWERS['hello']}\n")
    expect(shown).to_be_focused()
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
    assert all("Clipboard API has been blocked" in text for text in noted.complaints)
    noted.complaints.clear()


def test_the_conversation_is_sent_only_on_request(page: Page) -> None:
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.method == "POST" else None)
    ask(page, "Hello!")
    ask(page, "What is your name?")
    page.get_by_text("Options").click()
    page.get_by_label("Send the conversation so far").check()
    page.get_by_label("Answer token limit").fill("3")
    turn = ask(page, "Hello!")
    expect(turn).to_contain_text("The answer ended at the maximum number of tokens.")
    assert [len(body["messages"]) for body in sent] == [1, 1, 5]
    assert sent[2]["messages"][1] == {"role": "assistant", "content": CHAT_ANSWERS["hello"]}
    assert sent[2]["max_tokens"] == 3


def test_the_page_is_usable_with_the_keyboard_alone(page: Page, files: Path) -> None:
    """The test uses only Tab, Space, Enter and letters, and checks that the focus is visible."""
    keys = page.keyboard
    page.on("filechooser", lambda _: None)  # keeps the browser from opening a file dialog
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    keys.press("Enter")
    keys.press("Tab")
    if page.evaluate("document.activeElement.id") == "question":  # following the link may not move the focus
        keys.press("Tab")
    expect(page.get_by_label("Attach files")).to_be_focused()
    outline = page.locator("label[for=files]").evaluate("(one) => getComputedStyle(one).outlineStyle")
    assert outline == "solid"
    with page.expect_file_chooser() as caught:
        keys.press("Enter")
    caught.value.set_files([files / "scene.png", files / "beeps.wav"])
    expect(page.locator("#items li")).to_have_count(2)
    page.get_by_role("button", name="Remove beeps.wav").focus()
    keys.press("Space")
    expect(page.get_by_role("button", name="Remove scene.png")).to_be_focused()
    while page.evaluate("document.activeElement.id") != "question":
        keys.press("Tab")
    keys.type(WHAT)
    keys.press("Enter")
    expect(page.locator("#status")).to_contain_text("Answered in")
    expect(page.locator(".answer")).to_have_text("red square")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    while page.evaluate("document.activeElement.id") != "copy":
        keys.press("Tab")
    keys.press("Enter")
    expect(page.locator("#status")).to_contain_text("The history is copied")


def test_errors_are_shown_in_words(page: Page, files: Path) -> None:
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#status")).to_contain_text("nothing to ask yet")
    page.get_by_label("Attach files").set_input_files(files / "notes.txt")
    expect(page.locator("#status")).to_have_text("Not a picture, video or sound: notes.txt.")
    attach(page, files / "broken.jpg")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("alert")).to_contain_text("media item 0 (image)")
    page.get_by_role("button", name="Remove broken.jpg").click()
    page.context.set_offline(True)
    page.get_by_label("Question", exact=True).fill("Hello!")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("alert").last).to_have_text("The service cannot be reached.")
    expect(page.locator("#health")).to_have_text("No answer")
    page.context.set_offline(False)
    expect(page.locator("#health")).to_have_text("Ready")
    turn = ask(page, "Hello!")
    expect(turn.locator(".answer")).to_have_text(CHAT_ANSWERS["hello"])


@pytest.mark.parametrize(
    ("label", "value", "words"),
    [
        ("Temperature", "2.5", "Temperature must be a number from 0 to 2, not 2.5."),
        pytest.param("Temperature", "", None, marks=pytest.mark.slow),
        pytest.param(
            "Answer token limit",
            "0",
            "Answer token limit must be a whole number of at least 1, not 0.",
            marks=pytest.mark.slow,
        ),
        (
            "Answer token limit",
            "1.5",
            "Answer token limit must be a whole number of at least 1, not 1.5.",
        ),
    ],
)
def test_an_invalid_option_is_named_and_unfolded(page: Page, label: str, value: str, words: str | None) -> None:
    """The page unfolds the options and focuses the invalid field. If the field contains `e`, its value is empty."""
    page.get_by_text("Options").click()
    field = page.get_by_label(label)
    field.fill(value)
    if words is None:
        field.press("e")
        words = "Temperature must be a number from 0 to 2."
    page.get_by_text("Options").click()
    expect(field).to_be_hidden()
    question = page.get_by_label("Question", exact=True)
    question.fill("Hello!")
    question.press("Enter")
    expect(page.locator("#status")).to_have_text(words)
    expect(field).to_be_visible()
    expect(field).to_be_focused()
    expect(page.locator("article")).to_have_count(0)
    expect(question).to_have_value("Hello!")
    field.fill("1")
    field.press("Enter")
    expect(page.locator("#status")).to_contain_text("Answered in")


def test_a_temperature_may_have_any_digits(page: Page) -> None:
    page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0.755")
    page.get_by_text("Options").click()
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "Hello!")
    assert caught.value.post_data_json["temperature"] == 0.755


def test_markup_in_a_question_stays_text(page: Page, noted: Noted) -> None:
    markup = '<img src=x onerror="alert(1)"><b>bold</b>'
    turn = ask(page, markup)
    expect(turn.locator(".question")).to_have_text(markup)
    expect(turn.locator(".question *")).to_have_count(0)
    assert not any(url.endswith("/x") for url in noted.requests)


def test_stop_ends_the_answer_and_frees_its_memory(page: Page, service: RunningService, files: Path) -> None:
    attach(page, files / "scene.png")
    # The embedded checkpoint ends an answer quickly, so the request is changed to a long one.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | LONG)),
    )
    page.get_by_label("Question", exact=True).fill(WHAT)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".answer")).not_to_be_empty()
    # Playwright delays a click until the button has not moved for two frames. On a busy machine, the answer could end
    # before that, so the test presses Enter.
    page.get_by_role("button", name="Stop", exact=True).press("Enter")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("article")).to_contain_text("Stopped.")
    assert service.wait_until_free()["blocks"] == 0


LONG = {"ignore_eos": True, "max_tokens": 3000}
