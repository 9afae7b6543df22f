"""Tests that ask questions on the page, with the mouse and with the keyboard."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import COMPLETIONS, Noted, ask, attach, set_in_settings, submit
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

WHAT = "What is in the image?"
MARKUP = '<img src=x onerror="alert(1)"><b>bold</b>'
LONG = {"ignore_eos": True, "max_tokens": 3000}


def transferred(page: Page, path: Path, kind: str) -> Any:
    """Return the file as the data of a drop or of a paste."""
    return page.evaluate_handle(
        """([name, type, text]) => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {type}));
            return transfer;
        }""",
        [path.name, kind, base64.b64encode(path.read_bytes()).decode()],
    )


def test_the_conversation_is_sent(page: Page, files: Path, noted: Noted) -> None:
    """Markup in a question stays text. A setting sends each question alone."""
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.method == "POST" else None)
    turn = ask(page, "Hello!")
    expect(turn.locator(".answer")).to_have_text(CHAT_ANSWERS["hello"])
    attach(page, files / "scene.png")
    ask(page, WHAT)
    expect(ask(page, "What color is it?").locator(".answer")).to_have_text("red")
    assert [one["role"] for one in sent[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert sent[2]["messages"][1] == {"role": "assistant", "content": CHAT_ANSWERS["hello"]}
    assert [part["type"] for part in sent[2]["messages"][2]["content"]] == ["image_url", "text"]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Send the conversation so far").uncheck()
    page.get_by_label("System prompt").fill("Answer briefly.")
    page.get_by_label("Answer token limit").fill("1")
    page.keyboard.press("Escape")
    turn = ask(page, MARKUP)
    expect(turn).to_contain_text("The answer ended at the maximum number of tokens.")
    assert [one["role"] for one in sent[3]["messages"]] == ["system", "user"]
    assert sent[3]["max_tokens"] == 1
    expect(turn.locator(".question")).to_have_text(MARKUP)
    expect(turn.locator(".question *")).to_have_count(0)
    assert not any(url.endswith("/x") for url in noted.requests)


@pytest.mark.slow
def test_dropped_and_pasted_images_are_attached(page: Page, files: Path) -> None:
    drop = transferred(page, files / "scene.png", "image/png")
    page.locator("main").dispatch_event("dragover", {"dataTransfer": drop})
    page.locator("main").dispatch_event("drop", {"dataTransfer": drop})
    expect(page.locator("#items li")).to_have_count(1)
    turn = ask(page, WHAT)
    expect(turn.locator(".answer")).to_have_text("red square")
    expect(turn.get_by_role("img", name="scene.png")).to_be_visible()
    expect(page.locator("#items li")).to_have_count(0)
    page.evaluate(
        "(data) => document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))",
        transferred(page, files / "star.jpg", "image/jpeg"),
    )
    expect(page.locator("#items li")).to_contain_text("star.jpg")


# Texts that the clipboard contains beside an image after a user has copied cells of a spreadsheet, an image on a web
# page, or a file in a file manager.
COPIES = {
    "cells": {"text/plain": "a\tb", "text/html": "<table><tr><td>a</td><td>b</td></tr></table>"},
    "image": {"text/html": "<img src='scene.png'>"},
    "file": {"text/plain": "image.png"},
}


@pytest.mark.slow
def test_only_cells_pasted_into_a_text_field_stay_text(page: Page, files: Path) -> None:
    """In all other cases, the image is attached. The test uses the browser's real clipboard and keyboard events."""
    question = page.get_by_label("Question", exact=True)
    for copied, texts in COPIES.items():
        page.evaluate(
            """([texts, image]) => {
                const bytes = Uint8Array.from(atob(image), (one) => one.charCodeAt(0));
                const copied = {"image/png": new Blob([bytes], {type: "image/png"})};
                for (const [type, text] of Object.entries(texts)) copied[type] = new Blob([text], {type});
                return navigator.clipboard.write([new ClipboardItem(copied)]);
            }""",
            [texts, base64.b64encode((files / "scene.png").read_bytes()).decode()],
        )
        for in_field in (True, False):
            if in_field:
                question.focus()
            else:
                page.evaluate("document.activeElement.blur()")
            page.keyboard.press("Control+V")
            if in_field and copied == "cells":
                expect(question).to_have_value("a\tb")
                expect(page.locator("#items li")).to_have_count(0)
                question.fill("")
            else:
                expect(page.locator("#items li")).to_contain_text("image.png")
                expect(question).to_have_value("")
                expect(question).to_be_focused()
                page.get_by_role("button", name="Remove image.png").click()


@pytest.mark.slow
def test_documents_are_sent_as_files(page: Page, files: Path) -> None:
    """The extension .ts belongs to a video or to TypeScript, so the content decides."""
    page.get_by_label("Attach files").set_input_files([files / "notes.ts", files / "page.pdf", files / "data.bin"])
    expect(page.locator("#status")).to_have_text(
        "Attached: notes.ts, page.pdf. Not an image, video, audio, PDF or text file: data.bin."
    )
    with page.expect_request(COMPLETIONS) as caught:
        turn = ask(page, WHAT)
    parts = [part["file"] for part in caught.value.post_data_json["messages"][0]["content"][:2]]
    assert [part["filename"] for part in parts] == ["notes.ts", "page.pdf"]
    assert parts[0]["file_data"] == f"data:text/plain;base64,{base64.b64encode(b'const one = 1;').decode()}"
    assert parts[1]["file_data"].startswith("data:application/pdf;base64,")
    expect(turn.locator(".answer")).to_contain_text("red")
    turn.get_by_role("button", name="Time and tokens").click()
    expect(turn.locator("figure li").filter(has_text="image at")).to_have_count(1)
    with page.expect_download() as saved:
        turn.get_by_role("link", name="notes.ts").click()
    assert saved.value.suggested_filename == "notes.ts"


@pytest.mark.slow
def test_examples_are_answered(page: Page) -> None:
    answers = {"What is in the image": "red square", "Which way does the shape": "right", "How many beeps": "3"}
    for question, answer in answers.items():
        page.get_by_role("button", name=question).click()
        expect(page.locator(".answer")).to_have_text(answer)
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)


@pytest.mark.slow
def test_timings_and_tokens_are_those_of_the_answer(page: Page, service: RunningService, files: Path) -> None:
    """Files of each kind are answered together. A button shows the figures, which screen readers do not read out."""
    attach(page, files / "star.jpg", files / "right.mp4", files / "beeps.wav")
    with page.expect_response(COMPLETIONS) as caught:
        turn = ask(page, "What do you see and hear?")
    expect(turn.locator(".answer")).to_have_text("green star, right, 3 beeps")
    expect(turn.locator("video")).to_have_js_property("error", None)
    expect(turn.locator("audio")).to_have_js_property("error", None)
    expect(turn.locator("figure")).to_have_count(0)
    turn.get_by_role("button", name="Time and tokens").click()
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
    for kind, name in (("image", "star.jpg"), ("audio", "beeps.wav")):
        pad = max(set(ids), key=ids.count) if kind == "audio" else next(i for i in ids if 5 < ids.count(i) < 18)
        start, count = ids.index(pad), ids.count(pad)
        assert ids[start : start + count] == [pad] * count
        row = tokens.locator("li", has_text=f"{kind} {name}")
        expect(row).to_contain_text(f"at {start} to {start + count - 1}, {count} features, block mindie_mm-")
        rect = tokens.locator(f"rect.tokens-{kind}")
        whole = usage["total_tokens"]
        assert float(str(rect.get_attribute("x"))) == pytest.approx(start / whole * 1000, abs=0.1)
        assert float(str(rect.get_attribute("width"))) == pytest.approx(count / whole * 1000, abs=0.1)
    region = "(one) => one.closest('[aria-live], [role=log]').getAttribute('aria-live')"
    assert [figure.evaluate(region) for figure in turn.locator("figure").all()] == ["off", "off"]
    assert turn.locator(".answer").evaluate(region) is None  # the log itself


def test_the_page_is_usable_with_the_keyboard_alone(page: Page, files: Path) -> None:
    """The test uses only Tab, Space, Enter, Escape, shortcuts and letters, and checks that the focus is visible."""
    keys = page.keyboard
    question = page.get_by_label("Question", exact=True)
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
    expect(question).to_be_focused()
    while page.evaluate("document.activeElement.ariaLabel") != "Copy answer":
        keys.press("Shift+Tab")
    keys.press("Enter")
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "red square"
    keys.press("Control+Shift+O")
    expect(page.locator("article")).to_have_count(0)
    expect(question).to_be_focused()


def test_errors_are_shown_in_words(page: Page, files: Path) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#status")).to_contain_text("nothing to ask yet")
    attach(page, files / "broken.jpg")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("media item 0 (image)")
    page.get_by_role("button", name="Remove broken.jpg").click()
    page.context.set_offline(True)
    submit(page, "Hello!")
    expect(page.get_by_role("alert").last).to_have_text("The service cannot be reached.")
    expect(page.locator("#health")).to_have_text("No answer")
    page.context.set_offline(False)
    expect(page.locator("#health")).to_have_text("Ready")
    turn = ask(page, "Hello!")
    expect(turn.locator(".answer")).to_have_text(CHAT_ANSWERS["hello"])
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.get_by_text("2 of 2")).to_be_visible()


@pytest.mark.slow
def test_settings_are_checked_sent_and_kept(page: Page) -> None:
    """An invalid setting is shown when the user asks. The settings survive a reload, and Reset clears them."""
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("Temperature")
    field.fill("2.5")
    page.keyboard.press("Escape")
    submit(page, "Hello!")
    expect(field).to_be_focused()
    expect(page.locator("article")).to_have_count(0)
    field.fill("0.755")
    other = page.get_by_label("Other fields of the request")
    other.fill("[]")
    assert "JSON object" in other.evaluate("(one) => one.validationMessage")
    other.fill('{"logprobs": true}')
    page.get_by_label("Top k").fill("5")
    page.get_by_label("Stop strings").fill("one\ntwo")
    page.get_by_label("Theme").select_option("dark")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    page.reload()
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, "Hello!")
    sent = caught.value.post_data_json
    wanted = {"temperature": 0.755, "top_k": 5, "stop": ["one", "two"], "logprobs": True}
    assert {name: sent[name] for name in wanted} == wanted
    assert "top_p" not in sent
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    expect(field).to_have_value("")
    page.wait_for_function("getComputedStyle(document.body).backgroundColor == 'rgb(244, 246, 248)'")
    assert page.evaluate("localStorage.getItem('mindie_mm.settings')") == "{}"
    page.keyboard.press("Escape")
    with page.expect_request(COMPLETIONS) as caught:
        ask(page, "Hello!")
    assert not wanted.keys() & caught.value.post_data_json.keys()


def test_stop_ends_the_answer_and_frees_its_memory(page: Page, service: RunningService, files: Path) -> None:
    attach(page, files / "scene.png")
    set_in_settings(page, {"Other fields of the request": json.dumps(LONG)})
    submit(page, WHAT)
    expect(page.locator(".answer")).to_have_text(re.compile("."))
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("article")).to_contain_text("Stopped.")
    assert service.wait_until_free()["blocks"] == 0
