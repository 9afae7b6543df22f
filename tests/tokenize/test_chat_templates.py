"""Tests for chat templates that accept only strings as content, and tokenizers with several templates."""

import json
import shutil
from collections.abc import Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import read_media
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.chat_template import TemplateSources
from mindie_mm.worker.llm import LLM

pytestmark = pytest.mark.usefixtures("copied_workers")

ADDS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
"""A template that fails if the content is a list."""
WRITES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""A template that writes a list as Python's `str` does."""
SKIPS = "{% for m in messages %}{% if m.content is string %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
STRIPS = "{% for m in messages %}{{ m.role }}: {{ m.content.strip() }}\n{% endfor %}"
STRING_TEMPLATES = {"adds": ADDS, "writes": WRITES, "skips": SKIPS, "strips": STRIPS}


@pytest.fixture(scope="module")
def copy(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strings") / "checkpoint"
    shutil.copytree(checkpoint_path, folder, symlinks=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture
def reference(checkpoint_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path)


def with_templates(folder: Path, templates: Any) -> Path:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    return folder


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


@pytest.mark.parametrize("name", STRING_TEMPLATES)
def test_text_parts_become_lines_of_a_string(copy: Path, reference: Any, name: str) -> None:
    with Tokenizer.from_pretrained(with_templates(copy, STRING_TEMPLATES[name])) as tokenizer:
        messages = [
            {"role": "system", "content": text("Be brief.")},
            {"role": "user", "content": text("What is", "in it?")},
            {"role": "assistant", "content": text("Nothing.")},
            {"role": "user", "content": "And now?"},
        ]
        expected = "system: Be brief.\nuser: What is\nin it?\nassistant: Nothing.\nuser: And now?\n"
        assert reference.decode(tokenizer.tokenize_chat(messages)) == expected


@pytest.mark.parametrize("name", STRING_TEMPLATES)
def test_media_become_placeholders_before_the_text(copy: Path, tmp_path: Path, name: str) -> None:
    image = tmp_path / "red.png"
    Image.new("RGB", (64, 48), (220, 40, 40)).save(image)
    item = {"type": "image", "image": str(image)}
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(with_templates(copy, STRING_TEMPLATES[name])) as tokenizer:
        parts = [{"role": "user", "content": [*text("What?"), item, item, *text("<|image_pad|>")]}]
        ids = tokenizer.tokenize_chat(parts, path_file)
        pad = {"image": str(image)}
        flat = tokenizer.tokenize(
            [{"text": "user: "}, pad, {"text": "\n"}, pad, {"text": "\nWhat?\n<|image_pad|>\n"}], path_file
        )
        assert len(ids) == len(flat)
        assert (ids != flat).sum() <= 2 * 2, "only the handle words of the two images may differ"


MEDIA_FIRST = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content if c.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% endfor %}{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endfor %}"
)
"""A template like LLaVA's, which writes images before texts in any order of the parts."""
MEDIA_LAST = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
    "{% for c in m.content if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endfor %}{% endfor %}"
)
IN_ORDER = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("name", [*STRING_TEMPLATES, "media first", "media last", "in order"])
def test_embeddings_of_tokens_keep_their_place_or_are_refused(
    copy: Path, reference: Any, tmp_path: Path, name: str
) -> None:
    """An item's features must not take the place of another item, even though all items have one placeholder."""
    file = tmp_path / "red.png"
    Image.new("RGB", (64, 48), (220, 40, 40)).save(file)
    templates = {**STRING_TEMPLATES, "media first": MEDIA_FIRST, "media last": MEDIA_LAST, "in order": IN_ORDER}
    width = Checkpoint.open(copy).config["text_config"]["hidden_size"]
    forms = {"image": {"image": str(file)}, "prompt": {"prompt_embeds": np.ones((3, width), np.float32)}}
    forms["text"] = {"text": "What?"}
    frame = reference.convert_tokens_to_ids("<|vision_start|>")
    with Tokenizer.from_pretrained(with_templates(copy, templates[name])) as tokenizer:
        for order in set(permutations(["image", "prompt", "prompt", "text"])):
            message = {"role": "user", "content": [forms[kind] for kind in order]}
            given = [kind for kind in order if kind != "text"]
            where = "after" if name == "media last" else "before"
            if given[-1 if where == "after" else 0] == "prompt" and name != "in order":
                with pytest.raises(InputError, match=f"writes media {where} text; put the media {where} prompt_embeds"):
                    tokenizer.tokenize_chat([message], tmp_path / "shm_name.txt")
                continue
            ids = tokenizer.tokenize_chat([message], tmp_path / "shm_name.txt")
            found = {item.start: item.shape.kind for item in read_media(ids.numpy(), MediaShape.of)}
            assert [*found.values()] == given
            assert [start for start, kind in found.items() if kind == "image"] == [ids.tolist().index(frame) + 1]


def test_the_content_format_can_be_chosen(copy: Path, reference: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    folder = with_templates(copy, "{% for m in messages %}{{ m.content is string }}{% endfor %}")
    for content_format, expected in (("auto", "True"), ("string", "True"), ("openai", "False")):
        with Tokenizer.from_pretrained(folder, content_format=content_format) as tokenizer:
            assert reference.decode(tokenizer.tokenize_chat(messages)) == expected


@pytest.mark.parametrize("content_format", [pytest.param("string", marks=pytest.mark.slow), "openai"])
def test_a_worker_takes_the_content_format_from_its_settings(copy: Path, content_format: Any) -> None:
    template = "{% for m in messages %}{% if m.content is string %}a{% else %}{{ 'a 1 ' * 5 }}{% endif %}{% endfor %}"
    config = WorkerConfig(model=with_templates(copy, template), chat_template_content_format=content_format)
    with LLM(config=config) as llm:
        output = llm.chat(
            [{"role": "user", "content": text("a", "b")}], SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
        assert (len(output.prompt_logprobs or ()) >= 8) == (content_format == "openai")


def test_a_template_that_loses_media_is_refused(copy: Path, tmp_path: Path) -> None:
    image = tmp_path / "red.png"
    Image.new("RGB", (64, 48), (220, 40, 40)).save(image)
    cut = "{% for m in messages %}{{ m.role + ': ' + m.content[1:] + '\n' }}{% endfor %}"
    with Tokenizer.from_pretrained(with_templates(copy, cut), content_format="string") as tokenizer:
        messages = [{"role": "user", "content": [{"type": "image", "image": str(image)}, *text("What?")]}]
        with pytest.raises(InputError, match="the chat template renders 0 of 1 media items"):
            tokenizer.tokenize_chat(messages, tmp_path / "shm_name.txt")


NAMED = [
    {"name": "default", "template": "default{% for m in messages %} {{ m.content }}{% endfor %}"},
    {"name": "tool_use", "template": "tool_use{{ tools | length }}{% for m in messages %} {{ m.content }}{% endfor %}"},
]
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}


def test_the_tool_template_is_used_with_tools(copy: Path, reference: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    with Tokenizer.from_pretrained(with_templates(copy, NAMED)) as tokenizer:
        assert reference.decode(tokenizer.tokenize_chat(messages)) == "default a"
        with_tools = tokenizer.tokenize_chat(messages, tools=[TOOL])
        assert reference.decode(with_tools) == "tool_use1 a"


def test_the_tool_template_gets_the_content_format_that_it_reads(copy: Path, reference: Any) -> None:
    for_tools = "{% for t in tools %}{{ t.function.name }};{% endfor %}" + ADDS
    named = [NAMED[0], {"name": "tool_use", "template": for_tools}]
    with Tokenizer.from_pretrained(with_templates(copy, named)) as tokenizer:
        ids = tokenizer.tokenize_chat([{"role": "user", "content": text("a", "b")}], tools=[TOOL])
        assert reference.decode(ids) == "weigh;user: a\nb\n"


def test_a_template_that_requires_a_system_message_gets_strings(copy: Path, reference: Any) -> None:
    requires = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    with Tokenizer.from_pretrained(with_templates(copy, requires + WRITES)) as tokenizer:
        messages = [{"role": "system", "content": text("Be brief.")}, {"role": "user", "content": text("a", "b")}]
        assert reference.decode(tokenizer.tokenize_chat(messages)) == "system: Be brief.\nuser: a\nb\n"


@pytest.mark.parametrize("templates", [["x"], [{"name": "default"}], 7, {"default": 7}])
def test_an_invalid_template_is_ignored(copy: Path, tmp_path: Path, templates: Any) -> None:
    folder = shutil.copytree(copy, tmp_path / "copy")
    with_templates(folder, None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    with Tokenizer.from_pretrained(folder) as tokenizer:
        assert not tokenizer.has_template


def test_templates_are_read_from_the_folder_of_additional_templates(copy: Path, reference: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(copy, folder)
    with_templates(folder, None)
    (folder / "chat_template.jinja").write_text(NAMED[0]["template"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(NAMED[1]["template"])
    messages = [{"role": "user", "content": "a"}]
    with Tokenizer.from_pretrained(folder) as tokenizer:
        assert reference.decode(tokenizer.tokenize_chat(messages)) == "default a"
        with_tools = tokenizer.tokenize_chat(messages, tools=[TOOL])
        assert reference.decode(with_tools) == "tool_use1 a"


def test_several_templates_without_a_default_are_refused(copy: Path) -> None:
    named = [{"name": "rag", "template": "a"}, NAMED[1]]
    with pytest.raises(UnsupportedCheckpoint, match="templates rag, tool_use, but none named default"):
        Tokenizer.from_pretrained(with_templates(copy, named))


PROCESSORS = {
    "processor_config.json": {"chat_template": "processor"},
    "chat_template.json": {"chat_template": "json"},
    "chat_template.jinja": "jinja",
    "tokenizer_config.json": "tokenizer",
}
"""Files that may contain a template, in order of precedence."""


@pytest.mark.parametrize("files", [names for n in range(1, 5) for names in combinations(PROCESSORS, n)])
def test_the_template_is_the_one_that_transformers_uses(copy: Path, tmp_path: Path, files: Sequence[str]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(copy, folder)
    with_templates(folder, PROCESSORS["tokenizer_config.json"] if "tokenizer_config.json" in files else None)
    for name in {*files} - {"tokenizer_config.json"}:
        content = PROCESSORS[name]
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = TemplateSources.of(Checkpoint.open(folder), tokenizer)
    assert sources.processor == ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
    assert sources.tokenizer == tokenizer.chat_template


@pytest.mark.parametrize("templates", [NAMED, {entry["name"]: entry["template"] for entry in NAMED}])
def test_a_processor_may_have_several_templates(copy: Path, reference: Any, tmp_path: Path, templates: Any) -> None:
    """Templates may be a mapping, as in transformers, or a list of entries with a name and a template.

    tokenizer_config.json contains such lists. transformers fails if a processor's template is such a list.
    """
    folder = tmp_path / "copy"
    shutil.copytree(copy, folder)
    with_templates(folder, "tokenizer")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    messages = [{"role": "user", "content": "a"}]
    with Tokenizer.from_pretrained(folder) as tokenizer:
        assert reference.decode(tokenizer.tokenize_chat(messages)) == "default a"
        assert reference.decode(tokenizer.tokenize_chat(messages, tools=[TOOL])) == "tool_use1 a"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": {"rag": "a", "tool_use": "b"}}))
    with pytest.raises(UnsupportedCheckpoint, match="templates rag, tool_use, but none named default"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", STRING_TEMPLATES)
def test_missing_content_becomes_an_empty_string(copy: Path, reference: Any, name: str) -> None:
    with Tokenizer.from_pretrained(with_templates(copy, STRING_TEMPLATES[name])) as tokenizer:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
        assert reference.decode(tokenizer.tokenize_chat(messages)) == "user: a\nassistant: \n"
