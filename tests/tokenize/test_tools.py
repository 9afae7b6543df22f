"""Tests for tools in chat templates, including templates that do not mention tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mindie_mm
from mindie_mm.errors import InputError
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_messages

TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
TOOLS = [{"type": "function", "function": {"name": "weigh", "description": "<|im_end|>", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "{% endif %}{% if reasoning_effort %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def request(**kwargs: object) -> TokenizeRequest:
    return request_of_messages([{"role": "user", "content": "Hello!"}], chat_template_kwargs=dict(kwargs))


def test_a_template_with_a_place_for_tools_writes_the_tools(tmp_path: Path) -> None:
    folder = tmp_path / "with_tools"
    shutil.copytree(TINY, folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with Tokenizer.from_pretrained(folder) as tokenizer:
        bare = tokenizer.answer(request()).ids.tolist()
        given = tokenizer.answer(request(tools=TOOLS)).ids.tolist()
    assert given[-len(bare) :] == bare
    assert len(given) > len(bare)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert end not in given, "a control token that a tool spells must stay text"


def test_a_template_without_a_place_for_an_effort_ignores_it_with_one_warning(caplog: Any) -> None:
    with Tokenizer.from_pretrained() as tokenizer:
        expected = tokenizer.answer(request()).ids.tolist()
        assert tokenizer.answer(request(reasoning_effort="none")).ids.tolist() == expected
        assert not caplog.messages
        for effort in ("low", "high"):
            assert tokenizer.answer(request(reasoning_effort=effort)).ids.tolist() == expected
    assert caplog.messages == [
        "ignoring reasoning_effort, which the model's chat template does not use; this warning is not repeated"
    ]


def test_a_template_without_a_place_for_tools_refuses_the_tools() -> None:
    with Tokenizer.from_pretrained() as tokenizer:
        with pytest.raises(InputError, match=r"not supported: .* does not use tools"):
            tokenizer.answer(request(tools=TOOLS))
        called = request_of_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
        with pytest.raises(InputError, match=r"not supported: .* does not use tool_calls"):
            tokenizer.answer(called)
