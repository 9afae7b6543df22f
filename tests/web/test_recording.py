"""Tests that record audio and video with Chromium's fake microphone and camera."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import ask, attach, submit
from tools.demo import write_audio

# Script that makes the browser grant the microphone only when `window.allow` is called, and collects all streams in
# `window.streams`.
ASKED_FIRST = """() => {
    const real = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    const asked = new Promise((resolve) => (window.allow = resolve));
    window.streams = [];
    window.asked = 0;
    navigator.mediaDevices.getUserMedia = async (wanted) => {
        window.asked += 1;
        await asked;
        const stream = await real(wanted);
        window.streams.push(stream);
        return stream;
    };
}"""
TRACKS = "window.streams.flatMap((stream) => stream.getTracks()).map((track) => track.readyState)"


@pytest.mark.slow
def test_recordings_are_attached_and_answered(page: Page) -> None:
    questions = {"audio": "How many beeps do you hear?", "video": "Which way does the shape move?"}
    for number, (kind, name) in enumerate((("audio", "Record audio"), ("video", "Record video"))):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#status")).to_contain_text("Recording")
        stop = page.get_by_role("button", name="Stop recording")
        expect(stop).to_contain_text("1 s")
        stop.click()
        expect(page.locator("#items li")).to_contain_text("recording 1.webm")
        turn = ask(page, questions[kind])
        expect(turn.locator(".answer")).not_to_be_empty()
        turn.get_by_role("button", name="Time and tokens").click()
        expect(turn.get_by_text(f"{kind} recording 1.webm")).to_be_visible()
        expect(page.locator("article")).to_have_count(number + 1)
    page.get_by_role("button", name="Take photo").click()
    page.get_by_role("button", name="Take photo now").click()
    expect(page.locator("#items li")).to_contain_text("photo 1.jpg")
    assert page.locator("#camera video").evaluate("(one) => one.srcObject") is None
    expect(page.locator("#items img")).not_to_have_js_property("naturalWidth", 0)


@pytest.mark.slow
def test_a_second_press_starts_no_second_recording(page: Page) -> None:
    """A second press is ignored while the browser asks for permission. Asking ends and attaches a recording."""
    page.evaluate(ASKED_FIRST)
    page.get_by_role("button", name="Record audio").dblclick()
    expect(page.locator("#status")).to_have_text("The browser asks whether this page may use the microphone.")
    assert page.evaluate("window.asked") == 1
    page.evaluate("window.allow()")
    expect(page.locator("#status")).to_have_text("Recording audio.")
    assert page.evaluate(TRACKS) == ["live"]
    expect(page.get_by_role("button", name="Stop recording")).to_contain_text("1 s")
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.locator("audio")).to_have_count(1)
    expect(page.get_by_role("button", name="Record audio")).to_be_visible()
    assert page.evaluate(TRACKS) == ["ended"]


@pytest.mark.slow
def test_a_recorder_that_fails_leaves_the_microphone_off(page: Page) -> None:
    """Without any of the formats that the page prefers, it uses the browser's default format."""
    page.evaluate(ASKED_FIRST)
    page.evaluate("window.allow()")
    button = page.get_by_role("button", name="Record audio")
    for number, step in enumerate(("constructor", "start"), 1):
        page.evaluate(
            """(step) => {
                const real = window.MediaRecorder;
                const fail = () => { throw new DOMException("no encoder", "NotSupportedError"); };
                window.MediaRecorder = class extends real {
                    constructor(...given) {
                        if (step === "constructor") fail();
                        super(...given);
                    }
                    start() { fail(); }
                };
                window.mend = () => (window.MediaRecorder = real);
            }""",
            step,
        )
        page.evaluate("document.getElementById('status').textContent = ''")
        button.click()
        expect(page.locator("#status")).to_have_text("The microphone cannot be used: no encoder")
        assert page.evaluate(TRACKS) == ["ended"] * number
        page.evaluate("void window.mend()")
    page.evaluate("MediaRecorder.isTypeSupported = () => false")
    button.click()
    expect(page.locator("#status")).to_have_text("Recording audio.")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_contain_text("recording 1.webm audio")


@pytest.mark.slow
def test_a_video_may_be_attached_as_audio(page: Page, tmp_path: Path) -> None:
    """The file has the extension of a video but contains only audio."""
    write_audio(tmp_path / "beeps.wav", "beeps", hertz=880.0, spans=[(0.1, 0.13), (0.45, 0.13)], seconds=1.2)
    with av.open(tmp_path / "beeps.wav") as source, av.open(tmp_path / "voice.mp4", "w") as clip:
        stream = clip.add_stream("aac", rate=16000)
        for frame in source.decode(audio=0):
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode(None))
    attach(page, tmp_path / "voice.mp4")
    submit(page, "How many beeps do you hear?")
    expect(page.get_by_role("alert")).to_contain_text("the file has no video stream")
    page.get_by_label("Send only the audio").check()
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.locator("audio")).to_have_count(1)
    expect(turn.locator(".answer")).to_have_text("2")
