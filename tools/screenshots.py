"""`make screenshots`: take the screenshots in docs/web-page.md, of a busy service with the embedded checkpoint."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from tools.arguments import parser
from tools.demo import data_url, draw_shape, write_audio, write_video
from tools.serving import RunningService, running_service

FOLDER = Path("docs/images")
ARENA_BYTES = 2**20
COPIES = (1, 4, 2, 3)
WIDTH = 1320
HEIGHT = 900
PHONE: ViewportSize = {"width": 390, "height": 780}
SECONDS = 15


def main() -> None:
    """Write web-page.png, web-page-dark.png and web-page-phone.png."""
    browser_path = next(
        path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))
    )
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mindie_mm-images-") as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        media = write_media(folder)
        settings = {"spool": folder / "spool", "arena_bytes": ARENA_BYTES, "decoders": 2}
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        with running_service(settings, folder / "log", start_timeout_s=240) as service:
            page.goto(service.url)
            converse(page, media)
            with load(service):
                page.wait_for_timeout(SECONDS * 1000)
                engine = engine_of(service)
                engine.suspend()  # requests that the engine has not started keep their blocks
                with load(service):
                    try:
                        photograph(page)
                    finally:
                        engine.resume()
            page.emulate_media(color_scheme="light")
            page.set_viewport_size(PHONE)
            page.get_by_role("button", name="Close the diagrams").click()
            page.mouse.move(0, 0)
            page.screenshot(path=FOLDER / "web-page-phone.png")
        browser.close()


def engine_of(service: RunningService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if any(part.startswith("mindie_mm.engine.") for part in child.cmdline()))


def photograph(page: Page) -> None:
    """Write the images of the wide page, when shared memory has the blocks of all requests."""
    page.get_by_text("Blocks as a table").click()
    expect(page.locator("#block-rows tr")).to_have_count(sum(COPIES), timeout=30_000)
    page.screenshot(path=FOLDER / "web-page.png")
    page.emulate_media(color_scheme="dark")
    page.get_by_role("combobox", name="Colors").select_option("by request")
    page.screenshot(path=FOLDER / "web-page-dark.png")


def write_media(folder: Path) -> list[Path]:
    """Write an image, a video and an audio clip to `folder`, and return their paths."""
    paths = [folder / name for name in ("scene.png", "right.mp4", "beeps.ogg")]
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(paths[0])
    write_video(
        paths[1], [draw_shape("orange", (255, 140, 0), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)]
    )
    write_audio(paths[2], "beeps", hertz=880.0, spans=[(0.1 + 0.35 * i, 0.13) for i in range(3)], seconds=1.2)
    return paths


def converse(page: Page, media: list[Path]) -> None:
    """Ask two questions on the page, and wait for the answers."""
    for question, paths in (("What is in the image?", media[:1]), ("What do you see and hear?", media)):
        page.set_input_files("#files", paths)
        page.fill("#question", question)
        page.press("#question", "Enter")
        expect(page.locator("#status")).to_contain_text("Answered in", timeout=30_000)
    page.get_by_role("button", name="Time and tokens").last.click()
    page.get_by_role("button", name="Service diagrams").click()


@contextmanager
def load(service: RunningService) -> Iterator[None]:
    """Send requests as other clients would, until exit. `COPIES` contains their numbers of images."""
    done = threading.Event()
    bodies = [json.dumps(question(copies)).encode() for copies in COPIES]

    def ask(body: bytes) -> None:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{service.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        while not done.is_set():
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
                while not done.is_set() and answer.readline():
                    pass

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def question(copies: int) -> dict[str, Any]:
    url = data_url(draw_shape("green", (40, 160, 60), "star", x=0.5))
    content = [*({"image": url} for _ in range(copies)), {"text": "What is in the image?"}]
    long = {"ignore_eos": True, "max_tokens": 200 * copies, "stream": True}
    return {"messages": [{"role": "user", "content": content}]} | long


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
