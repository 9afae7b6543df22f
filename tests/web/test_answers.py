"""Tests for how the page shows answers: Markdown, reasoning and tool calls."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import COMPLETIONS, Noted, answer_with, ask, chunk_of, set_in_settings

ANSWER = """# Title

Some **bold** text
and [a link](https://example.org/page).

| a | b |
|---|--:|
| 1 | 2 |

- [x] done
- [ ] open

```python
def one():
    return "<b>1</b>"
```

<img src="https://example.org/one.png" onerror="alert(1)"><script>alert(2)</script>
![picture](https://example.org/two.png) [bad](javascript:alert(3)) <think> `<p>`
"""
TOOL = {"type": "function", "function": {"name": "report", "parameters": {"type": "object", "properties": {}}}}


def test_markdown_is_shown_without_active_content(page: Page, noted: Noted) -> None:
    """Markup and remote images in an answer are shown as text and links, and code is colored and can be copied."""
    answer_with(page, *(chunk_of(None, content=ANSWER[at : at + 40]) for at in range(0, len(ANSWER), 40)), chunk_of())
    turn = ask(page, "What?")
    answer = turn.locator(".answer")
    expect(answer.get_by_role("heading", name="Title")).to_be_visible()
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("p br").first).to_be_attached()
    link = answer.get_by_role("link", name="a link")
    expect(link).to_have_attribute("href", "https://example.org/page")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(answer.get_by_role("cell")).to_have_text(["1", "2"])
    expect(answer.get_by_role("listitem")).to_have_text(["☑ done", "☐ open"])
    expect(answer.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(answer).to_contain_text(
        '<img src="https://example.org/one.png" onerror="alert(1)"><script>alert(2)</script>'
    )
    expect(answer).to_contain_text("<think> <p>")
    expect(answer.get_by_role("link", name="picture")).to_have_attribute("href", "https://example.org/two.png")
    expect(answer.locator("img, script, [onerror], [href^=javascript]")).to_have_count(0)
    answer.get_by_role("button", name="Copy code").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == 'def one():\n    return "<b>1</b>"\n'
    turn.get_by_role("button", name="Copy answer").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER
    turn.get_by_role("button", name="Edit answer").click()
    page.get_by_label("Answer", exact=True).fill("`short`")
    page.get_by_role("button", name="Save").click()
    expect(answer.locator("code")).to_have_text("short")


@pytest.mark.slow
def test_reasoning_and_tool_calls_are_folded(page: Page) -> None:
    """The user writes the results of the tools, and the page sends them with the calls."""
    started = {"index": 0, "id": "call_1", "function": {"name": "report", "arguments": ""}}
    answer_with(
        page,
        chunk_of(None, reasoning_content="First, *think*."),
        chunk_of(None, content="Calling.", tool_calls=[started]),
        chunk_of(None, tool_calls=[{"index": 0, "function": {"arguments": '{"color":'}}]),
        chunk_of("tool_calls", tool_calls=[{"index": 0, "function": {"arguments": ' "red"}'}}]),
    )
    set_in_settings(page, {"Other fields of the request": json.dumps({"tools": [TOOL]})})
    turn = ask(page, "What?")
    expect(turn.locator("em")).to_be_hidden()
    turn.get_by_text("Reasoning").click()
    expect(turn.locator("em")).to_have_text("think")
    turn.get_by_text("Tool call: report").click()
    expect(turn.locator(".calls pre")).to_have_text('{\n  "color": "red"\n}')
    turn.get_by_label("Result of report").fill("reported")
    with page.expect_request(COMPLETIONS) as caught:
        turn.get_by_role("button", name="Send results").click()
    sent = caught.value.post_data_json
    assert sent["tools"] == [TOOL]
    call = {"id": "call_1", "type": "function", "function": {"name": "report", "arguments": '{"color": "red"}'}}
    assert sent["messages"][1:] == [
        {"role": "assistant", "content": "Calling.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "reported"},
    ]
    expect(page.locator("#status")).to_contain_text("Answered in")
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("article").last.get_by_text("Result of report")).to_be_visible()
