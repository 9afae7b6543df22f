"""Fixtures for tests for the web page in headless Chromium, with a real service."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

import mindie_mm
from tests.warm import running_service
from tools.demo import draw_shape, write_audio, write_video
from tools.serving import RunningService

MiB = 2**20
TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
SETTINGS: dict[str, object] = {"arena_bytes": 16 * MiB, "kv_cache_bytes": 64 * MiB, "grace_s": 0.2}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # containers run the tests as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
TIMEOUT_MS = 60_000
START_TIMEOUT_S = 300.0
"""Limit for a service that hangs. On a busy machine, a start takes tens of seconds."""


@pytest.fixture(scope="session")
def settings() -> dict[str, object]:
    return dict(SETTINGS)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("web")
    with running_service(
        settings | {"spool": folder / "spool"}, folder / "log", TINY, start_timeout_s=START_TIMEOUT_S
    ) as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two images, a video, an audio clip, a truncated image, a text file, a PDF and other data."""
    folder = tmp_path_factory.mktemp("files")
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(folder / "scene.png")
    draw_shape("green", (40, 160, 60), "star", x=0.5).save(folder / "star.jpg", quality=90)
    frames = [draw_shape("orange", (255, 140, 0), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)]
    write_video(folder / "right.mp4", frames)
    spans = [(0.1 + 0.35 * i, 0.13) for i in range(3)]
    write_audio(folder / "beeps.wav", "beeps", hertz=880.0, spans=spans, seconds=1.2)
    (folder / "broken.jpg").write_bytes((folder / "star.jpg").read_bytes()[:40])
    (folder / "notes.ts").write_text("const one = 1;")
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(folder / "page.pdf")
    (folder / "data.bin").write_bytes(b"\0data")
    return folder


# Each module has its own browser, because this thread cannot run coroutine tests while sync_playwright runs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@dataclass(frozen=True, slots=True)
class Noted:
    """Requests and errors of a page, as `opened` records them."""

    requests: list[str] = field(default_factory=list)
    """URLs of the requests."""
    complaints: list[str] = field(default_factory=list)
    """Uncaught exceptions, and errors and warnings in the console. Failed requests are not included."""


def opened(browser: Browser, url: str, noted: Noted, **context: object) -> Page:
    """Open the page at `url` in its own context, and record its requests and errors in `noted`."""

    def on_request(request: Request) -> None:
        noted.requests.append(request.url)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            noted.complaints.append(message.text)

    own_context = browser.new_context(**context)  # type: ignore[arg-type]
    own_context.set_default_timeout(TIMEOUT_MS)
    own_context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    page = own_context.new_page()
    page.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: noted.complaints.append(str(error)))
    page.goto(url)
    return page


COMPLETIONS = "**/v1/chat/completions"


def submit(page: Page, question: str) -> None:
    """Ask a question, and return at once."""
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_label("Question", exact=True).press("Enter")


def ask(page: Page, question: str) -> Locator:
    """Ask a question, wait for the end of the answer, and return the turn with the question and the answer."""
    submit(page, question)
    expect(page.locator("#status")).to_have_text(re.compile("^Answered"))
    return page.locator("article").last


def answer_with(page: Page, *chunks: dict[str, Any], end: str = "\n\n") -> None:
    """Answer the next question with `chunks` instead of the service's answer. `end` terminates each event."""
    events = [f"data: {json.dumps(chunk)}" for chunk in chunks]
    body = "".join(event + end for event in [*events, "data: [DONE]"])
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)


def chunk_of(reason: str | None = "stop", /, **delta: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def attach(page: Page, *paths: Path) -> None:
    page.get_by_label("Attach files").set_input_files(paths)
    expect(page.locator("#items li")).to_have_count(len(paths))


def set_in_settings(page: Page, values: dict[str, str]) -> None:
    """Fill fields of the settings, which are named by their labels."""
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("dialog").get_by_role("button", name="Close").click()


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def page(browser: Browser, service: RunningService, noted: Noted) -> Iterator[Page]:
    """Yield the page when it is ready. After the test, assert that it contacted no other host and logged no error."""
    page = opened(browser, service.url, noted)
    expect(page.locator("#health")).to_have_text("Ready")
    yield page
    page.context.close()
    strangers = [url for url in noted.requests if not url.startswith((f"{service.url}/", "blob:", "data:"))]
    assert not strangers
    assert not noted.complaints
