"""Sound and video recorded by the page, with Chromium's own beeping microphone and its camera."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import ask, attach
from tools.demo import write_sound

# Leave to use the microphone is given when `allow` is called; every stream that was handed out is kept.
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


@pytest.mark.parametrize(("button", "kind"), [("Record sound", "audio"), ("Record video", "video")])
def test_what_is_recorded_is_taken(page: Page, button: str, kind: str) -> None:
    page.get_by_role("button", name=button).click()
    expect(page.locator("#status")).to_contain_text("Recording")
    stop = page.get_by_role("button", name="Stop recording")
    expect(stop).to_contain_text("1 s")
    stop.click()
    expect(page.locator("#items li")).to_contain_text("recording 1.webm")
    turn = ask(page, "How many beeps do you hear?" if kind == "audio" else "Which way does the shape move?")
    expect(turn.locator(".answer")).not_to_be_empty()
    expect(turn.get_by_text(f"{kind} recording 1.webm")).to_be_visible()


@pytest.mark.parametrize("way", ["double click", "Enter twice"])
def test_a_second_press_starts_no_second_recording(page: Page, way: str) -> None:
    """One that is pressed while the browser asks for leave; the microphone is off once the recording is stopped."""
    page.evaluate(ASKED_FIRST)
    button = page.get_by_role("button", name="Record sound")
    if way == "double click":
        button.dblclick()
    else:
        button.press("Enter")
        button.press("Enter")
    expect(page.locator("#status")).to_have_text("The browser asks whether this page may use the microphone.")
    assert page.evaluate("window.asked") == 1
    page.evaluate("window.allow()")
    expect(page.locator("#status")).to_have_text("Recording sound.")
    assert page.evaluate(TRACKS) == ["live"]
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_have_count(1)
    assert page.evaluate(TRACKS) == ["ended"]


@pytest.mark.parametrize("step", ["constructor", "start"])
def test_a_recorder_that_fails_leaves_the_microphone_off(page: Page, step: str) -> None:
    page.evaluate(ASKED_FIRST)
    page.evaluate("window.allow()")
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
    button = page.get_by_role("button", name="Record sound")
    button.click()
    expect(page.locator("#status")).to_have_text("The microphone cannot be used: no encoder")
    assert page.evaluate(TRACKS) == ["ended"]
    page.evaluate("void window.mend()")
    button.click()
    expect(page.locator("#status")).to_have_text("Recording sound.")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_contain_text("recording 1.webm")


def test_a_browser_that_records_in_a_form_of_its_own(page: Page) -> None:
    """None of those that the page would ask for."""
    page.evaluate("MediaRecorder.isTypeSupported = () => false")
    page.get_by_role("button", name="Record sound").click()
    expect(page.locator("#status")).to_have_text("Recording sound.")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.locator("#items li")).to_contain_text("recording 1.webm audio")


def test_a_recording_that_runs_is_asked_about(page: Page) -> None:
    page.evaluate(ASKED_FIRST)
    page.evaluate("window.allow()")
    page.get_by_role("button", name="Record sound").click()
    expect(page.get_by_role("button", name="Stop recording")).to_contain_text("1 s")
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.get_by_text("audio recording 1.webm")).to_be_visible()
    expect(page.get_by_role("button", name="Record sound")).to_be_visible()
    assert page.evaluate(TRACKS) == ["ended"]


def test_a_video_is_taken_for_its_sound(page: Page, tmp_path: Path) -> None:
    """As a clip without pictures has to be whose ending is a video's."""
    write_sound(tmp_path / "beeps.wav", "beeps", hertz=880.0, spans=[(0.1, 0.13), (0.45, 0.13)], seconds=1.2)
    with av.open(tmp_path / "beeps.wav") as source, av.open(tmp_path / "voice.mp4", "w") as made:
        stream = made.add_stream("aac", rate=16000)
        for frame in source.decode(audio=0):
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))
    attach(page, tmp_path / "voice.mp4")
    page.get_by_label("Question", exact=True).fill("How many beeps do you hear?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the file has no video stream")
    page.get_by_label("Sound alone").check()
    turn = ask(page, "How many beeps do you hear?")
    expect(turn.get_by_text("audio voice.mp4")).to_be_visible()
    expect(turn.locator(".answer")).to_have_text("2")
