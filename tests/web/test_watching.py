"""Tests for the parts of the page that show shared memory, the queue and the throughput, and the API key form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.warm import running_service
from tests.watching import stopped_engine
from tests.web.conftest import START_TIMEOUT_S, TIMEOUT_MS, TINY, Noted, answer_with, ask, chunk_of, opened
from tests.web.test_answers import ANSWER
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

pytestmark = pytest.mark.slow  # each test takes seconds, and the panel is one of the page's secondary parts

KEY = "a-key-of-the-page"
IMAGE = [{"image": data_url(draw_shape("red", (220, 40, 40), "square", x=0.4))}, {"text": "What colour"}]
LONG = {"ignore_eos": True, "max_tokens": 3900, "stream": True, "media_spans": True}


@pytest.fixture
def busy(service: RunningService) -> Iterator[ExitStack]:
    """Start two long streamed answers about an image, and yield an ExitStack that ends the answers."""
    body = {"messages": [{"role": "user", "content": IMAGE}]} | LONG
    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=service.url, timeout=300))
        for _ in range(2):
            answer = stack.enter_context(client.stream("POST", "/v1/chat/completions", json=body))
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            stack.callback(lines.close)
        yield stack


@pytest.fixture
def held(service: RunningService) -> Iterator[ExitStack]:
    """Stop the engine, send two requests with an image, and yield an ExitStack that resumes the engine."""
    body = {"messages": [{"role": "user", "content": IMAGE}], "max_tokens": 4}
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        stack.enter_context(stopped_engine(service))
        for _ in range(2):
            threads.submit(httpx2.post, f"{service.url}/v1/chat/completions", json=body, timeout=300)
        yield stack


def open_panel(page: Page) -> None:
    page.get_by_role("button", name="Service diagrams").click()
    expect(page.locator("#arenas figure")).to_have_count(1)


def test_shared_memory_is_shown_while_it_is_used(page: Page, service: RunningService, held: ExitStack) -> None:
    open_panel(page)
    page.get_by_text("Blocks as a table").click()
    rows = page.locator("#block-rows tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("published")
    expect(rows.first).to_contain_text("pixel_values uint8")
    expect(page.locator(".arena .block.published")).to_have_count(2)
    shm = service.get("/shm?blocks=true")
    (arena,) = shm["arenas"]
    expect(page.get_by_role("img", name=f"Map of {arena['name']}: 2 blocks")).to_be_visible()
    expect(page.locator("#arenas")).to_contain_text(f"of tokenizer process {arena['pid']}")
    for shown, block in zip(rows.all(), arena["map"], strict=True):
        assert shown.locator("td").all_inner_texts()[0] == block["name"]
        assert shown.locator("td").all_inner_texts()[2] == block["request"][:8]
        ((offset, size),) = block["pieces"]
        assert 0 <= offset < offset + size <= arena["capacity_bytes"]
        assert size == block["bytes"]
    for rect, block in zip(page.locator(".arena .block.published").all(), arena["map"], strict=True):
        line = arena["capacity_bytes"] / 8
        place = block["pieces"][0][0]
        assert float(str(rect.get_attribute("x"))) == pytest.approx(place % line / line * 640, abs=0.1)
        assert float(str(rect.get_attribute("y"))) == place // line * 12
    page.get_by_role("combobox", name="Colors").select_option("by request")
    owners = [block["request"][:8] for block in arena["map"]]
    expect(page.locator("#owners li")).to_have_text(owners)
    looks = [rect.get_attribute("class") for rect in page.locator(".arena .block").all()]
    assert looks == [f"block owner-{int(owner[:6], 16) % 6} " for owner in owners]
    held.close()
    expect(rows).to_have_text(["There are no blocks."])
    expect(page.locator("#owners li")).to_have_count(0)
    expect(page.locator(".arena .block.published")).to_have_count(0)


def test_the_queue_and_the_throughput_are_shown(page: Page, busy: ExitStack) -> None:
    open_panel(page)
    expect(page.locator("#queue .legend")).to_contain_text("Running 2")
    expect(page.get_by_role("img", name="The last two minutes: Running 2")).to_be_visible()
    assert len(str(page.locator("#queue polyline").first.get_attribute("points"))) > 0
    page.locator("#throughput").get_by_text("As a table").click()
    busy.close()
    expect(page.locator("#queue .legend")).to_contain_text("Running 0")
    numbers = page.locator("#throughput td")
    expect(numbers.first).to_be_visible()
    chart = page.locator("#throughput .chart")
    expect(chart).to_have_attribute("aria-label", re.compile(r"Answer tokens \S+, peak [1-9]"))


def test_the_diagrams_are_polled_while_their_panel_is_open(page: Page, noted: Noted) -> None:
    page.wait_for_timeout(1500)
    assert {url.rpartition("/")[2] for url in noted.requests}.isdisjoint({"shm?blocks=true", "metrics"})
    with page.expect_response("**/metrics"):
        open_panel(page)
    page.get_by_role("button", name="Close the diagrams").click()
    expect(page.get_by_role("button", name="Service diagrams")).to_be_focused()
    page.wait_for_timeout(500)  # a request that has already started may still be recorded
    before = len(noted.requests)
    page.wait_for_timeout(1500)
    assert {url.rpartition("/")[2] for url in noted.requests[before:]} <= {"health"}


def test_a_question_triggers_polling_at_once(page: Page) -> None:
    """The page polls before the first token arrives, without its polling timer, which the test disables."""
    open_panel(page)
    page.evaluate("() => void (window.setTimeout = () => 0)")
    page.wait_for_timeout(1500)  # until a timer that is already running has expired
    page.route("**/v1/chat/completions", lambda _: None)
    page.get_by_label("Question", exact=True).fill("Hello!")
    with page.expect_request("**/shm?blocks=true"):
        page.keyboard.press("Enter")


def test_a_part_that_cannot_be_polled_is_marked_stale(page: Page) -> None:
    """Each part is marked separately, and the other parts are still updated. Only /health changes the badge."""
    open_panel(page)
    memory, queue = (page.locator("section", has=page.locator(one)) for one in ("#arenas", "#queue"))
    page.evaluate("""() => {
        window.badges = [];
        const health = document.getElementById("health");
        new MutationObserver(() => window.badges.push(health.textContent)).observe(health, {childList: true});
    }""")
    page.route("**/shm?blocks=true", lambda route: route.fulfill(status=500))
    expect(memory).to_have_class("card stale")
    for path in ("**/health", "**/metrics"):
        with page.expect_response(path):
            pass
    expect(queue).to_have_class("card")
    assert page.evaluate("window.badges") == []
    page.unroute("**/shm?blocks=true")
    page.route("**/metrics", lambda route: route.abort())
    expect(memory).to_have_class("card")
    expect(queue).to_have_class("card stale")


def test_an_unhealthy_service_is_not_polled_more_often(page: Page, noted: Noted) -> None:
    """While a question waits, /health and /metrics are polled at the usual rate, and /shm is polled more often."""
    open_panel(page)
    words = "the engine process died, and another one is being started"
    page.route("**/health", lambda route: route.fulfill(status=503, json={"error": {"message": words}}))
    page.route("**/v1/chat/completions", lambda _: None)
    page.get_by_label("Question", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("#health")).to_have_text(words)
    before = len(noted.requests)
    polled = Counter[str]()
    for _ in range(TIMEOUT_MS // 100):
        page.wait_for_timeout(100)
        polled = Counter(url.rpartition("/")[2] for url in noted.requests[before:])
        if polled["shm?blocks=true"] > polled["health"] >= 2 and polled["metrics"] >= 1:
            break
    assert polled["metrics"] >= 1
    assert polled["shm?blocks=true"] > polled["health"] >= 2


def test_the_model_is_updated_when_a_service_returns(page: Page) -> None:
    expect(page.locator("#model")).to_contain_text("tiny")
    model = {"data": [{"id": "other", "max_model_len": 2048, "note": "demo model"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=model))
    page.route("**/health", lambda route: route.abort())
    expect(page.locator("#health")).to_have_text("No answer")
    page.unroute("**/health")
    expect(page.locator("#model")).to_have_text("other, 2,048 tokens of context")
    expect(page.locator("#note")).to_have_text("demo model")


@pytest.mark.slow  # axe-core sometimes keeps Chromium busy for many minutes
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(
    browser: Browser, service: RunningService, files: Path, noted: Noted, scheme: str
) -> None:
    """axe-core checks the page on a wide and a narrow screen, with an answer and with every section unfolded."""
    page = opened(browser, service.url, noted, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("#health")).to_have_text("Ready")
    axe = Axe()

    def check() -> None:
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            results = axe.run(page, options={"resultTypes": ["violations"]})
            assert not results.violations_count, results.generate_report()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.set_viewport_size({"width": 1280, "height": 800})

    check()
    page.get_by_label("Attach files").set_input_files([files / "scene.png", files / "right.mp4", files / "beeps.wav"])
    ask(page, "What do you see and hear?")
    page.get_by_label("Attach files").set_input_files(files / "star.jpg")
    page.get_by_role("button", name="Regenerate answer").click()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("Answered in")
    page.get_by_role("button", name="Time and tokens").click()
    answer_with(page, chunk_of(None, reasoning_content="*So*"), chunk_of(content=ANSWER))
    expect(ask(page, "What?").locator(".hljs-keyword").first).to_be_visible()
    page.get_by_text("Reasoning").last.click()
    page.get_by_role("button", name="API key", exact=True).click()
    expect(page.locator("#key")).to_be_focused()
    open_panel(page)
    for summary in page.locator("aside summary").all():
        summary.click()
    check()
    page.get_by_role("button", name="Close the diagrams").click()
    page.get_by_role("button", name="Edit question").first.click()
    page.get_by_role("button", name="Settings").click()
    check()
    page.context.close()
    assert not noted.complaints


def test_long_names_fit_a_narrow_screen(page: Page, files: Path, tmp_path: Path) -> None:
    """Long names are wrapped in attachments, refusals, errors and answers. The list of chats covers the page."""
    name = "IMG_20261122_143055_0001_HDR_portrait_edited_and_edited_again"
    for ending in ("png", "mp4"):
        (tmp_path / f"{name}.{ending}").write_bytes(
            (files / ("scene.png" if ending == "png" else "right.mp4")).read_bytes()
        )
    (tmp_path / f"{name}.zip").write_bytes(b"")
    page.set_viewport_size({"width": 390, "height": 640})
    fits = "document.documentElement.scrollWidth <= innerWidth"
    page.get_by_label("Attach files").set_input_files([tmp_path / f"{name}.{one}" for one in ("png", "mp4", "zip")])
    expect(page.locator("#status")).to_contain_text(f"{name}.zip")
    expect(page.get_by_label("Question", exact=True)).to_be_in_viewport()
    assert page.evaluate(fits)
    refusal = {"error": {"message": name * 3, "code": 400}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refusal), times=1)
    page.get_by_label("Question", exact=True).fill("What do you see?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(name * 3)
    assert page.evaluate(fits)
    page.get_by_label("Question", exact=True).press("Enter")
    expect(page.locator("#status")).to_contain_text("Answered in")
    assert page.evaluate(fits)
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_role("link", name="What do you see?").click()  # the list covers the conversation until then
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator(".answer").last).to_be_in_viewport()


def test_an_injected_script_does_not_run(page: Page, noted: Noted) -> None:
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
        }""")
    assert page.evaluate("window.ran") is None
    assert noted.complaints
    noted.complaints.clear()


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object], service: RunningService
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("guarded")
    environment = {"MINDIE_MM_API_KEY": KEY}
    with running_service(
        settings | {"spool": folder / "spool"},
        folder / "log",
        TINY,
        start_timeout_s=START_TIMEOUT_S,
        environment=environment,
    ) as running:
        yield running
        assert running.stop() == 0


def test_the_api_key_is_requested_and_kept_in_the_tab_only(
    browser: Browser, guarded: RunningService, noted: Noted
) -> None:
    page = opened(browser, guarded.url, noted)
    field = page.locator("#key")
    expect(field).to_be_focused()
    expect(page.locator("#key-why")).to_contain_text("requires an API key")
    field.fill("another")
    page.keyboard.press("Enter")
    expect(page.locator("#key-why")).to_contain_text("does not accept this API key")
    expect(field).to_be_focused()
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#model")).to_contain_text("tiny")
    open_panel(page)
    page.get_by_label("Question", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    page.get_by_label("Question", exact=True).press("Enter")
    expect(page.locator(".answer")).not_to_be_empty()
    # The key is only in the tab's session storage, which the browser deletes when the tab is closed.
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert page.evaluate("Object.values(localStorage)") == ["{}"]  # the settings
    assert page.evaluate("document.cookie") == ""
    assert not any(KEY in url for url in noted.requests)
    page.context.close()
    assert not noted.complaints


def test_a_key_that_is_no_valid_header_value_is_refused(
    browser: Browser, guarded: RunningService, noted: Noted
) -> None:
    """The key contains a zero-width space, which a user may copy from a web page by accident."""
    page = opened(browser, guarded.url, noted)
    field = page.locator("#key")
    expect(field).to_be_focused()
    field.fill(f"{KEY}\u200b")
    page.keyboard.press("Enter")
    expect(field).to_be_focused()
    assert field.evaluate("(one) => one.validity.patternMismatch")
    assert page.evaluate("sessionStorage.length") == 0
    field.fill(f" {KEY} ")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("tiny")
    page.context.close()
    assert not noted.complaints


def test_a_late_request_for_the_key_does_not_move_the_focus(page: Page) -> None:
    """The focus stays in the question that the user is writing."""
    question = page.get_by_label("Question", exact=True)
    open_panel(page)
    question.focus()
    refusal = {"error": {"message": "no key", "code": 401}}
    page.route("**/shm?blocks=true", lambda route: route.fulfill(status=401, json=refusal))
    expect(page.locator("#key")).to_be_visible()
    expect(page.locator("#key-why")).to_contain_text("requires an API key")
    expect(question).to_be_focused()
