"""Tests that a prompt contains all files, texts and template variables of its row, or the row fails with a reason."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mindie_mm
from mindie_mm.batch import Dataset
from mindie_mm.batch.input.row import Row, parse
from mindie_mm.batch.input.row_id import row_id
from mindie_mm.batch.input.source import open_source
from mindie_mm.batch.settings import Run
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF, PROMPT_FIELDS, Media, MediaOptions, Message, Text
from mindie_mm.tokenize import Tokenizer
from tests.batch.conftest import run_in_process, settings, written
from tests.batch.test_forms import packed, tabled
from tests.media_samples import encoded, photograph

TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
IMAGE = encoded(photograph(size=(60, 40)))
TEMPLATE = (
    "{% if tools %}{{ tools|tojson }}\n{% endif %}{{ tone }}{% for message in messages %}{{ message.role }}: "
    "{{ message.content[0].text }}{{ message.tool_calls|tojson if message.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template that prints tools as JSON, to show that nulls in a tool and a property named `path` stay unchanged."""
PROPERTIES = {"path": {"type": "string", "default": None}}
TOOLS: Sequence[dict[str, Any]] = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": PROPERTIES}}}
]
MESSAGES: Sequence[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
CALL = {"type": "function", "function": {"name": "read", "arguments": {"path": "a.txt", "bytes": None}}}


def rows_of(path: Path) -> list[tuple[str | None, Row]]:
    """Return the id and the parsed row for each row of a tar."""
    source = open_source(path, ())
    ((_, start, stop),) = source.cut(1000)
    return [(row_id(record), parse(record, path.parent, "")) for record in source.records(start, stop)]


def packed_json(path: Path, key: str, described: Any, *others: tuple[str, bytes]) -> Path:
    return packed(path, [(f"{key}.json", json.dumps(described).encode()), (f"{key}.jpg", IMAGE), *others])


def test_a_path_that_could_be_base64_is_read_from_the_inputs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the input's folder, not to the working directory."""
    here, elsewhere = tmp_path / "rows", tmp_path / "elsewhere"
    names = [hashlib.sha256(name).hexdigest() for name in (b"here", b"elsewhere")]
    for folder, name in zip((here, elsewhere), names, strict=True):
        folder.mkdir()
        (folder / name).write_bytes(IMAGE)
    encoded_image = base64.b64encode(IMAGE).decode()
    rows = [{"image": source, "text": "What?"} for source in (*names, encoded_image)]
    settled = settings(written(here / "rows.jsonl", rows))
    for folder in (elsewhere, here):
        monkeypatch.chdir(folder)
        run_in_process(settled, tmp_path / f"from {folder.name}")
    found = Dataset(tmp_path / "from elsewhere")
    assert [sample.error is None for sample in found] == [True, False, True]
    assert found[0].ids.tolist() == found[2].ids.tolist()
    shards = [sorted((tmp_path / f"from {name}").glob("shard-*")) for name in ("rows", "elsewhere")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_each_frame_path_is_resolved_against_the_inputs_folder(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(IMAGE)
    url = "https://host/3.jpg"
    item = {"type": "video", "video": ["1.jpg", "/elsewhere/2.jpg", url], "sample_fps": 1.0}
    placed = Media("video", (f"{tmp_path}/1.jpg", "/elsewhere/2.jpg", url), MediaOptions(sample_fps=1.0))
    bare = msgspec.structs.replace(placed, options=MediaOptions())
    frames: Sequence[Any] = item["video"]
    for row, expected in (
        ({"inputs": [item]}, Row((placed,))),
        ({"messages": [{"role": "user", "content": [item]}]}, Row(messages=[Message("user", (placed,))])),
        ({"videos": [frames, "4.mp4"]}, Row((bare, Media("video", f"{tmp_path}/4.mp4")))),
        ({"video": [frames]}, Row((bare,))),
    ):
        assert parse(json.dumps(row).encode(), tmp_path, "") == expected
        assert parse(row, tmp_path, "") == expected
    for row in ({"inputs": [{"video": ["1.jpg", None]}]}, {"videos": [["1.jpg", None], None]}):
        with pytest.raises(InputError, match=r"\[1\] is missing"):
            parse(row, tmp_path, "")
    (found,) = rows_of(packed_json(tmp_path / "t.tar", "7", {"videos": [["7.jpg", "7.jpg", url]]}))
    assert found == ("7", Row((Media("video", (IMAGE, IMAGE, url)),)))


def test_only_media_fields_of_a_row_refer_to_files_of_the_tar(tmp_path: Path) -> None:
    described = {"id": "d/1.jpg", "image": "1.jpg", "prompt": "d/1.jpg"}
    ((name, row),) = rows_of(packed_json(tmp_path / "t.tar", "d/1", described))
    assert (name, row) == ("d/1.jpg", Row((Media("image", IMAGE), Text("d/1.jpg"))))
    part = {"type": "image_url", "image_url": {"url": "d/1.jpg"}}
    messages = [{"role": "system", "content": "1.jpg"}, {"role": "user", "content": [part], "name": "1.jpg"}]
    ((_, row),) = rows_of(packed_json(tmp_path / "m.tar", "d/1", {"messages": messages}))
    expected = [Message("system", "1.jpg"), Message("user", (Media("image", IMAGE),), {"name": "1.jpg"})]
    assert row == Row(messages=expected)


def test_a_json_file_of_a_tar_may_be_a_list_or_text_only(tmp_path: Path) -> None:
    listed = [{"image": "2.jpg"}, {"text": "Describe"}]
    ((_, row),) = rows_of(packed_json(tmp_path / "l.tar", "2", listed))
    assert row == Row((Media("image", IMAGE), Text("Describe")))
    rows = rows_of(packed(tmp_path / "t.tar", [("5.json", b'{"text": "{media}a"}'), ("6.JSON", b'{"prompt": "b"}')]))
    assert rows == [("5", Row((Text("{media}a"),))), ("6", Row((Text("b"),)))]
    described = {"text": "{media}a", "image": None, "prompt": None, "add_generation_prompt": False}
    ((_, row),) = rows_of(packed_json(tmp_path / "o.tar", "7", described))
    expected = Row([Media("image", IMAGE), Text("a")], add_generation_prompt=False, template_kwargs={})
    assert row == expected


def test_a_tar_row_prefers_the_json_and_text_files_of_its_own_name(tmp_path: Path) -> None:
    others = [("3.meta.json", b'{"text": "no", "image": "gone.jpg"}'), ("3.old.txt", b"no"), ("3.txt", b"no")]
    ((_, row),) = rows_of(packed_json(tmp_path / "j.tar", "3", {"text": "yes"}, *others))
    assert row == Row([Media("image", IMAGE), Text("yes")])
    ((name, row),) = rows_of(packed(tmp_path / "t.tar", [("/4.jpg", IMAGE), *[("/4.txt", b"yes")], ("/4.z.txt", b"")]))
    assert (name, row) == ("/4", Row([Media("image", IMAGE), Text("yes")]))
    ((_, row),) = rows_of(packed(tmp_path / "c.tar", [("5.caption.txt", b"yes"), ("5.jpg", IMAGE)]))
    assert row == Row([Media("image", IMAGE), Text("yes")])


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"1.json": b'{"text": ["a"]}', "1.jpg": IMAGE}, "the text in 1.json is list; it must be a string"),
        ({"1.json": b'{"text": "a", "prompt": "b"}', "1.jpg": IMAGE}, "1.json has both text and prompt"),
        (
            {"1.json": b'{"text": "a", "documents": [1]}', "1.jpg": IMAGE},
            "the row has the key documents, which is not",
        ),
        ({"1.json": b'"a"', "1.jpg": IMAGE}, "the row is str; it must be an object or a list"),
        ({"1.json": b"null", "1.jpg": IMAGE}, "the row is NoneType"),
        ({"1.json": b"[", "1.jpg": IMAGE}, "1.json is not JSON"),
        (
            {"1.a.txt": b"a", "1.b.txt": b"b", "1.jpg": IMAGE},
            r"1 has the text files \['1.a.txt', '1.b.txt'\]; rename one of",
        ),
        ({"1.txt": b"{media} {media}", "1.jpg": IMAGE}, "the text of the row 1 contains {media} 2 times; it may"),
        ({"1.meta.json": b'{"text": "a"}'}, r"the row 1 has no media file; its files have the extensions \['.json'\]"),
    ],
)
def test_tar_files_that_form_no_valid_row_are_refused(members: dict[str, bytes], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        rows_of(packed(tmp_path / "t.tar", [*members.items()]))


def test_repeated_names_in_a_tar_are_refused(tmp_path: Path) -> None:
    members = [("same.jpg", IMAGE), ("same.txt", b"a"), ("same.jpg", IMAGE), ("same.txt", b"b")]
    with pytest.raises(InputError, match=r"same has several files named same\.txt"):
        rows_of(packed(tmp_path / "t.tar", members))


def test_hidden_files_of_a_tar_are_ignored(tmp_path: Path) -> None:
    """Hidden files are `._*` and `.DS_Store`, which macOS adds. Paths that begin with `./` are not hidden."""
    members = [("._4.jpg", b"x"), ("4.jpg", IMAGE), ("._4.txt", b"x"), ("4.txt", b"a"), (".DS_Store", b"x")]
    rows = rows_of(packed(tmp_path / "t.tar", [("./.DS_Store", b"x"), *members, ("./5.jpg", IMAGE)]))
    assert rows == [("4", Row([Media("image", IMAGE), Text("a")])), ("./5", Row([Media("image", IMAGE)]))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_url", "a.jpg"),
        ("image_url", {"url": "a.jpg", "detail": "low"}),
        ("image_urls", ["a.jpg", {"url": "b.jpg"}]),
        ("video_url", "a.mp4"),
        ("audio_url", "a.wav"),
        ("input_audio", {"data": "AAAA", "format": "wav"}),
    ],
)
def test_a_flat_row_accepts_the_same_media_as_a_list(key: str, value: Any, tmp_path: Path) -> None:
    values = value if isinstance(value, list) else [value]
    listed = [*({key.removesuffix("s"): one} for one in values), {"text": "what"}]
    flat, as_list = (parse(json.dumps(row).encode(), tmp_path, "") for row in ({key: value, "text": "what"}, listed))
    assert flat == as_list
    assert flat.items is not None
    assert isinstance(flat.items[0], Media)


@pytest.fixture(scope="module")
def handy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint whose chat template uses the variables `tools` and `tone`."""
    folder = tmp_path_factory.mktemp("handy") / "tiny"
    shutil.copytree(TINY, folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": TEMPLATE}))
    return str(folder)


def test_template_variables_have_the_same_effect_as_on_the_online_path(handy: str, tmp_path: Path) -> None:
    called = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    given: Sequence[dict[str, Any]] = [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"},
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"},
        {"messages": MESSAGES, "tools": [], "chat_template_kwargs": {}, "continue_final_message": False},
        {"messages": MESSAGES, "chat_template_kwargs": {"tone": "Softly. ", "tools": TOOLS}},
        {"messages": MESSAGES, "add_generation_prompt": False},
        {"messages": called, "tools": TOOLS},
        {"inputs": [{"text": "Hello!"}], "tools": TOOLS},
        {"text": "Hello!", "chat_template_kwargs": {"tone": "Softly. "}, "add_generation_prompt": False},
    ]
    soft = {"tone": "Softly. "}
    online: Sequence[tuple[Sequence[dict[str, Any]], dict[str, Any]]] = [
        (MESSAGES, {}),
        (MESSAGES, {"tools": TOOLS}),
        (MESSAGES, {}),
        (MESSAGES, {}),
        (MESSAGES, soft | {"tools": TOOLS}),
        (MESSAGES, {"add_generation_prompt": False}),
        (called, {"tools": TOOLS}),
        (MESSAGES, {"tools": TOOLS}),
        (MESSAGES, soft | {"add_generation_prompt": False}),
    ]
    rows = msgspec.structs.replace(settings(written(tmp_path / "rows.jsonl", given)), model=handy)
    run_in_process(rows, tmp_path / "run")
    with Tokenizer.from_pretrained(handy) as tokenizer:
        expected = [tokenizer.tokenize_chat(messages, **kwargs).tolist() for messages, kwargs in online]
    found = [sample.ids.tolist() for sample in Dataset(tmp_path / "run") if sample.error is None]
    assert found == expected
    assert len({*map(tuple, expected)}) == 6


def test_tools_of_a_table_are_the_same_without_nulls(handy: str, tmp_path: Path) -> None:
    """Tools may be JSON text or a struct column. In a struct column, each tool has the keys of all tools."""
    bare = json.loads(json.dumps(TOOLS), object_hook=lambda one: {k: v for k, v in one.items() if v is not None})
    function = {"name": "dig", "parameters": {"type": "object", "properties": {"depth": {"type": "integer"}}}}
    both = [*bare, {"type": "function", "function": function}]
    inputs = (
        tabled(tmp_path / "structs.parquet", [{"messages": MESSAGES, "tools": tools} for tools in (both, None)]),
        tabled(tmp_path / "path.parquet", [{"messages": MESSAGES, "tools": bare}]),
        tabled(tmp_path / "texts.parquet", [{"messages": MESSAGES, "tools": json.dumps(TOOLS)}]),
    )
    run_in_process(msgspec.structs.replace(settings(*inputs), model=handy), tmp_path / "run")
    with Tokenizer.from_pretrained(handy) as tokenizer:
        expected = [tokenizer.tokenize_chat(MESSAGES, tools=tools).tolist() for tools in (both, bare, TOOLS)]
        expected.insert(1, tokenizer.tokenize_chat(MESSAGES).tolist())
    assert [sample.ids.tolist() for sample in Dataset(tmp_path / "run") if sample.error is None] == expected


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"tools": TOOLS}, "not supported: the model's chat template does not use tools"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice='required' must be 'auto' or 'none'"),
    ({"tools": 5}, "the row's tools: the value must be a list"),
    ({"tools": ["weigh"]}, "the row's tools: [0] must be an object"),
    ({"tools": "weigh"}, "the row's tools is not JSON"),
    ({"add_generation_prompt": 1}, "the row's add_generation_prompt: the value must be true or false"),
    ({"chat_template_kwargs": []}, "the row's chat_template_kwargs: the value must be an object"),
    ({"chat_template_kwargs": {"conversation": 1}}, "chat_template_kwargs must not contain 'conversation'"),
    ({"continue_final_message": True}, "the row has the key continue_final_message, which is not supported"),
    ({"functions": TOOLS}, "the row has the key functions, which is not supported"),
]


def test_texts_may_have_images_as_in_text_generation_webui(tmp_path: Path) -> None:
    url = f"data:image/jpeg;base64,{base64.b64encode(IMAGE).decode()}"
    tag, items = f'<img src="{url}">What?', [{"image": url}, {"text": "What?"}]
    chats = [{"messages": [{"role": "user", "content": content}]} for content in (tag, items)]
    rows = written(tmp_path / "rows.jsonl", [{"text": tag}, {"inputs": items}, *chats])
    run_in_process(settings(rows, webui_images=True), tmp_path / "run")
    samples = [*Dataset(tmp_path / "run")]
    assert [sample.error for sample in samples] == [None] * 4
    first, *others = [[int(one) for one in sample.ids if one >= 0] for sample in samples]
    assert others == [first] * 3
    assert all(len(sample.spans) == 1 for sample in samples)


def test_variables_that_a_prompt_cannot_use_are_refused(tmp_path: Path) -> None:
    rows = [{"messages": MESSAGES} | variables for variables, _ in REFUSED]
    run_in_process(settings(written(tmp_path / "rows.jsonl", rows)), tmp_path / "run")
    for sample, (variables, why) in zip(Dataset(tmp_path / "run"), REFUSED, strict=True):
        assert why in (sample.error or ""), variables
    rows = [{"text": "a", "add_generation_prompt": False}, {"text": "a", "add_generation_prompt": True}]
    run_in_process(settings(written(tmp_path / "bare.jsonl", rows), chat=False), tmp_path / "bare")
    errors = [sample.error for sample in Dataset(tmp_path / "bare")]
    assert errors == [
        "InputError: chat template variables were given, but the prompt does not use a chat template; leave them out",
        None,
    ]


def test_control_tokens_of_raw_rows_are_parsed_unless_they_are_refused(tmp_path: Path) -> None:
    raw = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    chat = written(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    rows = written(tmp_path / "rows.jsonl", [{"text": raw}, {"text": raw, "parse_special": False}])

    def counts(name: str, path: Path, **others: Any) -> list[int]:
        run_in_process(settings(path, **others), tmp_path / name)
        return [len(sample.ids) for sample in Dataset(tmp_path / name)]

    (expected,) = counts("chat", chat)
    parsed, escaped = counts("on", rows, chat=False)
    assert parsed == expected < escaped
    assert counts("off", rows, chat=False, parse_special="off") == [escaped, escaped]


def parsed(row: Any) -> Row:
    """Encode `row` as JSON, and return the parsed row."""
    return parse(json.dumps(row).encode(), Path("/"), "")


@pytest.mark.parametrize(("name", "harmless"), [*PROMPT_FIELDS.items(), ("add_special_tokens", OFF)])
def test_fields_that_would_change_the_prompt_are_refused(name: str, harmless: tuple[Any, ...]) -> None:
    rows: Sequence[dict[str, Any]] = ({"messages": MESSAGES}, {"inputs": [{"text": "a"}]}, {"prompt": "a"})
    for row in rows:
        for off in harmless:
            assert parsed(row | {name: off}) == parsed(row)
        with pytest.raises(InputError, match=f"the row has the key {name}, which is not supported"):
            parsed(row | {name: {"a": 1}})


def test_a_row_with_several_sources_of_a_prompt_is_refused() -> None:
    for row in ({"prompt": "Q?", "text": "A."}, {"prompt": "Q?", "messages": MESSAGES}, {"inputs": [], "images": []}):
        with pytest.raises(
            InputError,
            match=r"the row has .*, which conflict; give inputs, or messages, or .*Choose one of them with --select",
        ):
            parsed(row)
    assert parsed({"prompt": "Q?", "text": None}) == parsed({"text": "Q?"})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *((7, "7"), ("seven", "seven"), ("007", "007"), (7.0, "7"), (2**64 - 1, "18446744073709551615")),
        *((Decimal(7), "7"), (Decimal("7.00"), "7"), (Decimal("1E+20"), "1" + "0" * 20), (Decimal(-7), "-7")),
        *((Decimal(12345678901234567890123), "12345678901234567890123"), (UUID(int=7), str(UUID(int=7)))),
        *((None, None), (float("nan"), None)),
        *((True, ""), (1.5, ""), (1e16, ""), (Decimal("1.5"), ""), (UUID(int=7).bytes, ""), (date(2026, 1, 1), "")),
    ],
)
def test_ids_become_strings_or_are_refused(value: Any, name: str | None) -> None:
    """Floats and decimals without a fraction count as integers. Other types are refused.

    If a value is missing, pandas turns integers into floats. Databases export integers as decimals. Floats above
    2 ** 53 are refused because they are not exact. UUIDs are refused if the table stores them as plain bytes.
    """
    record = {"id": value, "text": "a"}
    assert row_id(record) == (name or None)
    if name == "":
        with pytest.raises(InputError, match=f"the row's id is {type(value).__name__}; it must be a string or an int"):
            parse(record, Path(), "")
    else:
        assert parse(record, Path(), "") == Row((Text("a"),))


def test_ids_can_come_from_all_column_types(tmp_path: Path) -> None:
    """Other numbers of a row may also be decimals."""
    columns = {
        "decimal": pa.array([Decimal(1), Decimal(2)], pa.decimal128(5, 0)),
        "wide": pa.array([Decimal(10**30), None], pa.decimal256(60, 2)),
        "uint64": pa.array([2**64 - 1, 0], pa.uint64()),
        "float": pa.array([1.0, None], pa.float32()),
        "uuid": pa.array([UUID(int=1).bytes, UUID(int=2).bytes], pa.uuid()),
        "text": pa.array(["1", "02"], pa.large_string()),
    }
    inputs = pa.array([[{"image": "a.jpg", "max_pixels": Decimal(3136)}]] * 2)
    assert pa.types.is_decimal(inputs.type.value_type.field("max_pixels").type)
    found = {}
    for name, column in columns.items():
        pq.write_table(pa.table({"id": column, "inputs": inputs}), tmp_path / "t.parquet")
        records = [*open_source(tmp_path / "t.parquet", ()).records(0, 2)]
        found[name] = [row_id(record) for record in records]
        for record in records:
            media = Media("image", "/a.jpg", MediaOptions(max_pixels=3136))
            assert parse(record, Path("/"), "") == Row((media,))
    assert found == {
        "decimal": ["1", "2"],
        "wide": ["1" + "0" * 30, None],
        "uint64": ["18446744073709551615", "0"],
        "float": ["1", None],
        "uuid": [str(UUID(int=1)), str(UUID(int=2))],
        "text": ["1", "02"],
    }


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"inputs": [{"type": "text", "text": "q", "image": {"bytes": None, "path": None}}]}, {"text": "q"}),
        ({"inputs": [{"image_url": {"url": None, "detail": None}, "text": "q"}]}, {"text": "q"}),
        ({"inputs": [{"image_url": {"url": None}, "image": "a.jpg"}]}, {"image": "a.jpg"}),
        ({"images": [None, "a.jpg", {"bytes": None, "path": None}], "text": "q"}, {"image": "a.jpg", "text": "q"}),
        ({"input_audio": {"data": None, "format": None}, "text": "q"}, {"text": "q"}),
    ],
)
def test_a_media_item_of_nulls_counts_as_missing(row: dict[str, Any], same: dict[str, Any]) -> None:
    """Some tables contain structs whose fields are all null."""
    assert parsed(row) == parse(row, Path("/"), "") == parsed(same)


@pytest.mark.parametrize(
    "row",
    [
        {"image": {"bytes": b"", "path": None}, "text": "q"},
        {"image": {"bytes": None, "path": ""}, "text": "q"},
        {"inputs": [{"image": {"bytes": None, "path": None}}, {"text": "q"}]},
        {"inputs": [None, {"text": "q"}]},
    ],
)
def test_an_empty_media_item_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"is empty|exactly one of|must be a dict"):
        parse(row, Path(), "")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"id": 1, "image": "0.jpg", "conversations": []},
            "conversations is an empty list; .*, or leave it out with --select-columns",
        ),
        (
            {"images": ["0.jpg"], "texts": ["q"]},
            "texts is of type list; .*, or leave it out with --select-columns",
        ),
        (
            {"video": "0.mp4", "id": 1, "question": "q", "answers": []},
            r"media but no text, and its keys \['answers', 'question'\].* video,id to read",
        ),
        ({"image_file": "0.jpg", "text": "q"}, r"text but no media, and its keys \['image_file'\].* text to read"),
        (
            {"prompt": "q", "image_path": "0.jpg", "source": "web"},
            r"no media, and its keys \['image_path'\].* prompt to read",
        ),
    ],
)
def test_half_a_prompt_is_refused_unless_its_columns_are_selected(
    row: dict[str, Any], why: str, tmp_path: Path
) -> None:
    for record in (row, json.dumps(row).encode()):
        with pytest.raises(InputError, match=why):
            parse(record, Path("/"), "")
    own = {key: value for key, value in row.items() if key in ("image", "images", "video", "text", "prompt")}
    rows = written(tmp_path / "rows.jsonl", [row])
    (chosen,) = open_source(rows, tuple(own)).records(0, rows.stat().st_size)
    assert parse(chosen, Path("/"), "") == parsed(own)


def test_extra_fields_beside_a_whole_prompt_are_ignored() -> None:
    whole: Sequence[dict[str, Any]] = (
        {"text": "q", "source": "web"},
        {"image": "0.jpg", "text": "q", "question": "no", "file_name": "0.jpg"},
        {"messages": MESSAGES, "answer": "a"},
        {"image": "0.jpg", "question": None, "id": 3, "add_generation_prompt": True},
    )
    for row in whole:
        kept = {key: value for key, value in row.items() if key in ("image", "text", "messages")}
        assert replace(parsed(row), template_kwargs=None) == parsed(kept)


def test_a_tar_row_whose_json_names_its_text_differently_needs_a_template(tmp_path: Path) -> None:
    path = packed_json(tmp_path / "c.tar", "1", {"caption": "a cat", "width": 4})
    with pytest.raises(InputError, match=r"1 has media but no text, and the keys \['caption', 'width'\] in its \.json"):
        rows_of(path)
    (record,) = open_source(path, ()).records(0, path.stat().st_size)
    assert parse(record, tmp_path, "What?") == Row([Media("image", IMAGE), Text("What?")])
    ((_, row),) = rows_of(packed_json(tmp_path / "t.tar", "1", {"width": 4}, ("1.txt", b"a cat")))
    assert row == Row([Media("image", IMAGE), Text("a cat")])
    (chosen,) = open_source(path, ("id",)).records(0, path.stat().st_size)
    assert parse(chosen, tmp_path, "") == Row([Media("image", IMAGE)])


def test_a_selected_column_that_no_line_has_is_refused(tmp_path: Path) -> None:
    """A table lists its columns. In a file of JSON lines, the run must look for the column in all rows."""
    rows = written(tmp_path / "rows.jsonl", [{"image": "0.jpg"}, {"image": "1.jpg", "text": "q"}])
    written(tmp_path / "none.jsonl", [])
    for columns, wrong in ((("txt", "image"), "txt"), (("text", "img"), "img")):
        with pytest.raises(
            InputError, match=rf"rows.jsonl has no row with the key '{wrong}'\. Correct --select-columns"
        ):
            run_in_process(settings(rows, columns=columns), tmp_path / "refused")
    for path in (rows, tmp_path / "none.jsonl"):
        Run.of(settings(path, columns=("text", "image")), tmp_path)


def test_columns_are_selected_from_every_object(tmp_path: Path) -> None:
    """Rows that are lists and rows of a media folder stay unchanged."""
    rows: Sequence[Any] = ({"id": 3, "prompt": "no", "messages": MESSAGES}, [{"text": "b"}], {"text": "c"})
    media = tmp_path / "media"
    media.mkdir()
    (media / "0.jpg").write_bytes(IMAGE)
    inputs = (
        written(tmp_path / "rows.jsonl", [*rows, b"["]),
        tabled(tmp_path / "t.parquet", [rows[0]]),
        packed_json(tmp_path / "t.tar", "7", {"messages": MESSAGES, "text": "no"}),
        media,
    )
    run_in_process(settings(*inputs, columns=("id", "messages")), tmp_path / "run")
    found = [(sample.id, (sample.error or "")[:20]) for sample in Dataset(tmp_path / "run")]
    bad = [("2", "InputError: the row "), ("3", "InputError: the row ")]
    assert found == [("3", ""), ("1", ""), *bad, ("3", ""), ("7", ""), ("0.jpg", "")]


def test_a_repeated_column_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([["a"], ["b"], [1]], names=["text", "text", "id"]), path)
    for columns in ((), ("text",)):
        with pytest.raises(InputError, match=r"twice\.parquet has several columns named 'text'"):
            run_in_process(settings(path, columns=columns), tmp_path / "run")
    assert [*open_source(path, ("id",)).records(0, 1)] == [{"id": 1}]
