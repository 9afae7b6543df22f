"""Tests for parsing items and messages."""

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import (
    MAX_LISTED_FRAMES,
    Media,
    MediaOptions,
    Message,
    Text,
    parse_inputs,
    parse_messages,
    unknown_keys,
)
from mindie_mm.inputs.chat_messages import MAX_ARGUMENT_VALUES
from mindie_mm.inputs.webui import long_data_url
from mindie_mm.tokenize import TokenizeRequest
from tests.media_samples import photograph

BASE64 = "A" * 1000


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (f"see data:image/png;base64,{BASE64} here", 1022),
        (f"url(data:font/woff2;charset=utf-8;base64,{BASE64})", 1038),
        (f"data:;base64,{BASE64}", 1013),
        ("data:image/png;base64," + f"\r\n{BASE64[:76]}" * 20, 1582),
        ("data:image/svg+xml," + "%3Csvg" * 200, 1219),
        ("data:image/png;base64," + "A" * 978, None),
        ("data:image/png;base64, is how such a URL begins " + "and more words " * 200, None),
        (f"metadata:image/png;base64,{BASE64}", None),
        (f"data: {BASE64}", None),
        ("{data:[1,2" + ",3" * 999, None),
        ("data:" * 10_000 + f"data:image/png;base64,{BASE64}", None),
    ],
)
def test_a_long_data_url_is_found_in_plain_text(text, length):
    for prompt in ([Text("x"), Text(text)], [Message("user", text)], [Message("tool", (Text(text),))]):
        found = long_data_url(prompt)
        assert found is None if length is None else f"of {length} characters" in found


def test_items_keep_their_order():
    image = photograph(size=(10, 10))
    inputs = [
        {"image": "/a/b.jpg"},
        {"text": "and"},
        {"video": b"bytes", "fps": 1, "max_frames": 8},
        {"audio": "https://host/audio.wav"},
        {"image": image, "min_pixels": 100, "max_pixels": 200},
        {"image": Path("/a/c.jpg")},
    ]
    assert parse_inputs(inputs) == [
        Media("image", "/a/b.jpg"),
        Text("and"),
        Media("video", b"bytes", MediaOptions(fps=1.0, max_frames=8)),
        Media("audio", "https://host/audio.wav"),
        Media("image", image, MediaOptions(min_pixels=100, max_pixels=200)),
        Media("image", "/a/c.jpg"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"image": "a.jpg", "max_pixels": 9, "detail": "low"},
        {"type": "image", "image": "a.jpg", "max_pixels": 9, "detail": "low"},
        {"type": "image", "url": "a.jpg", "max_pixels": 9, "detail": "low"},
        {"type": "image", "path": "a.jpg", "max_pixels": 9, "detail": "low"},
        {"type": "image_url", "image_url": "a.jpg", "max_pixels": 9, "detail": "low"},
        {"type": "image_url", "image_url": {"url": "a.jpg", "detail": "low"}, "max_pixels": 9},
        {"image_url": {"url": "a.jpg", "detail": "low", "max_pixels": 9, "min_pixels": None}},
    ],
)
def test_all_spellings_of_an_image_are_equal(part):
    assert parse_inputs([part]) == [Media("image", "a.jpg", MediaOptions(max_pixels=9, detail="low"))]


def test_a_parsed_prompt_is_the_same_in_another_process():
    """Three items cover all options, because some options exclude each other."""
    options = (
        MediaOptions(min_pixels=1, max_pixels=2, min_frames=3, num_frames=4, max_frames=5, detail="low"),
        MediaOptions(fps=0.5, sample_fps=3.0, use_audio_in_video=True),
        MediaOptions(sampling_rate=8000),
    )
    assert all(any(getattr(one, name) is not None for one in options) for name in MediaOptions.__slots__)
    media = [Media(kind, "/a", one) for kind, one in zip(("video", "video", "audio"), options, strict=True)]
    items = [Text("x"), *media, Media("image", b"a", is_document=True), Media("video", ("/a", b"b"))]
    items.append(Media("image", ("/a", "/b"), is_embeddings=True))
    messages = [Message("user", tuple(items), {"name": "n"}), Message("assistant", None), Message("tool", "y")]
    for request in (TokenizeRequest(items=items, chat=False), TokenizeRequest(messages=messages)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=TokenizeRequest) == request


def test_values_in_arguments_of_tool_calls_are_limited_before_parsing():
    """The arguments are JSON inside a JSON string, so a count in the encoded request would miss escaped commas."""
    call = {"function": {"name": "add", "arguments": f'{{"a": [{"1," * (MAX_ARGUMENT_VALUES // 2)}1]}}'}}
    half = {"role": "assistant", "tool_calls": [call]}
    assert len(parse_messages([half])[0].extra["tool_calls"][0]["function"]["arguments"]["a"]) > 10**5
    for messages in ([half, half], [{"role": "assistant", "tool_calls": [call, call]}]):
        with pytest.raises(LimitExceeded, match=f"more JSON values than the limit of {MAX_ARGUMENT_VALUES}"):
            parse_messages(messages)


def test_arguments_of_a_tool_call_become_an_object():
    """OpenAI's clients send arguments as a JSON string. A chat template would encode this string a second time."""

    def parsed(calls):
        return parse_messages([{"role": "assistant", "tool_calls": calls}])[0].extra["tool_calls"]

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "x"]}'}}
    whole = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, "x"]}}}
    assert parsed([call]) == parsed([whole]) == [whole]
    for none in ("", "null", None):
        calls = [{"function": {"name": "now", "arguments": none}}]
        assert parsed(calls) == [{"function": {"name": "now", "arguments": {}}}]
    assert parsed([]) == []
    for wrong in (
        "{",
        '{"a": 1,}',
        "[1]",
        '{"a": "\\ud800"}',
        f'{{"a": {10**23}}}',
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    ):
        as_written = [{"function": {"name": "add", "arguments": wrong}}]
        assert parsed(as_written) == as_written, "invalid arguments must stay as the model wrote them"
    with pytest.raises(InputError, match=r"tool_calls\[0\]\.function\.arguments contains a lone surrogate"):
        parsed([{"function": {"name": "add", "arguments": "\ud800"}}])
    for calls in ("x", ["x"]):
        with pytest.raises(InputError, match=r"messages\[0\]\.tool_calls"):
            parsed(calls)


def test_an_empty_content_beside_tool_calls_counts_as_none():
    message = {"role": "assistant", "content": [], "tool_calls": [{"id": "1"}]}
    assert parse_messages([message]) == parse_messages([message | {"content": None}])


@pytest.mark.parametrize("content", [[], ()])
def test_an_assistant_message_with_an_empty_list_has_no_content(content):
    message = {"role": "assistant", "content": content}
    assert parse_messages([message]) == parse_messages([message | {"content": None}])
    for role in ("user", "system", "tool"):
        with pytest.raises(InputError, match="at least one dict"):
            parse_messages([message | {"role": role}])


def test_hints_for_the_caches_of_other_servers_are_ignored():
    hints = {"cache_control": {"type": "ephemeral"}, "uuid": "an image's name"}
    text, image = parse_inputs([{"text": "a"} | hints, {"image_url": {"url": "a.png", "detail": "low"}} | hints])
    assert text == Text("a")
    assert (image.source, image.options) == ("a.png", MediaOptions(detail="low"))


FOREIGN = [
    {"type": "text", "text": "a", "id": "msg_1", "annotations": [], "path": "/a", "logprobs": None},
    {
        "type": "image_url",
        "image_url": {"url": "a.png", "format": "image/png", "size": 12},
        "modalities": "multi-images",
    },
    {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav", "transcript": "b"}},
    {"type": "video_url", "video_url": {"url": "a.mp4"}, "name": "c", "id": 5},
]


def test_keys_of_other_servers_are_ignored_with_one_warning_per_key(caplog, monkeypatch):
    monkeypatch.setattr(unknown_keys, "_warned", set())
    plain = [
        {"text": "a"},
        {"image": "a.png"},
        {"input_audio": {"data": "QUJD"}},
        {"video": "a.mp4"},
    ]
    for _ in range(2):
        assert parse_messages([{"role": "user", "content": FOREIGN}])[0].content == tuple(parse_inputs(plain))
    keys = [record.args[0] for record in caplog.records]
    assert keys == ["id", "annotations", "path", "modalities", "format", "size", "transcript", "name"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("part", FOREIGN)
def test_unknown_keys_of_items_and_strict_content_parts_are_refused(part):
    with pytest.raises(InputError, match="has the unknown key"):
        parse_inputs([part])
    with pytest.raises(InputError, match=r"messages\[0\]\.content\[0\] has the unknown key"):
        parse_messages([{"role": "user", "content": [part]}], strict=True)
    hints = {"cache_control": {"type": "ephemeral"}, "uuid": "a"}
    assert parse_inputs([{"text": "a"} | hints]) == [Text("a")]


def test_the_number_of_warnings_about_unknown_keys_is_limited(caplog, monkeypatch):
    monkeypatch.setattr(unknown_keys, "_warned", set())
    parts = [{"text": "a", f"key_{i}": 1, f"{'x' * 10**5}\n{i}": 1} for i in range(1000)]
    parse_messages([{"role": "user", "content": parts}])
    assert len(caplog.records) == 256
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_base64_becomes_a_data_url():
    assert parse_inputs([{"type": "image", "base64": "QUJD"}]) == [Media("image", "data:;base64,QUJD")]
    audio = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
    assert parse_inputs([audio]) == [Media("audio", "data:;base64,QUJD")]


@pytest.mark.parametrize("url", ["data:;base64,QUJD", "DATA:audio/wav;base64,QUJD", "https://a/b.wav", "file:///a.wav"])
def test_a_url_in_place_of_base64_is_read_as_a_url(url):
    """DashScope's clients send a URL in the field for base64 audio."""
    for part in (
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio", "base64": url},
    ):
        assert parse_inputs([part]) == [Media("audio", url)]


def test_a_null_counts_as_a_missing_key():
    """Tables contain nulls, and some clients write every field."""
    nulls = {"type": None, "annotations": None, "detail": None, "fps": None}
    text = {"text": "a", "image_url": None, "refusal": None}
    image = {"image_url": {"url": "a.png", "detail": "low", "format": None, "max_pixels": None}, "text": None}
    assert parse_inputs([text | nulls, image | nulls]) == parse_inputs(
        [{"text": "a"}, {"image_url": {"url": "a.png", "detail": "low"}}]
    )


@pytest.mark.parametrize(
    "part",
    [
        {"video": ["data:image/jpeg;base64,AA==", "data:image/jpeg;base64,BB=="], "sample_fps": 2},
        {"type": "video", "video": ("data:image/jpeg;base64,AA==", "data:image/jpeg;base64,BB=="), "sample_fps": 2},
        {"type": "video", "url": ["data:image/jpeg;base64,AA==", "data:image/jpeg;base64,BB=="], "sample_fps": 2.0},
        {"video_url": {"url": ["data:image/jpeg;base64,AA==", "data:image/jpeg;base64,BB=="], "sample_fps": 2}},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA==,BB=="}, "sample_fps": 2},
        {"video": "DATA:video/JPEG;base64,AA==,BB==", "sample_fps": 2},
    ],
)
def test_all_spellings_of_a_list_of_frames_are_equal(part):
    frames = ("data:image/jpeg;base64,AA==", "data:image/jpeg;base64,BB==")
    assert parse_inputs([part]) == [Media("video", frames, MediaOptions(sample_fps=2.0))]


def test_frames_may_be_of_every_kind():
    image, pixels = photograph(size=(10, 10)), np.zeros((4, 4, 3), np.uint8)
    (item,) = parse_inputs([{"video": [image, pixels, b"bytes", bytearray(b"more"), Path("/a.jpg"), "b.jpg"]}])
    assert item.source == (image, pixels, b"bytes", b"more", "/a.jpg", "b.jpg")
    (item,) = parse_inputs([{"type": "video", "base64": ["QUJD", "REVG"]}])
    assert item.source == ("data:;base64,QUJD", "data:;base64,REVG")


def test_the_frames_of_a_list_are_limited():
    assert len(parse_inputs([{"video": ["a"] * MAX_LISTED_FRAMES}])[0].source) == MAX_LISTED_FRAMES
    for more in (["a"] * (MAX_LISTED_FRAMES + 1), "data:video/jpeg;base64," + "," * 10_000_000):
        with pytest.raises(LimitExceeded, match=r"inputs\[0\].video has more frames than the limit of 2048"):
            parse_inputs([{"video": more}])


def test_the_frames_of_all_lists_of_a_call_are_limited_together():
    video = {"video": "data:video/jpeg;base64," + "," * (MAX_LISTED_FRAMES - 1)}
    assert len(parse_inputs([video.copy() for _ in range(16)])) == 16
    with pytest.raises(
        LimitExceeded, match="the lists of frames in inputs have more frames in total than the limit of 32768"
    ):
        parse_inputs([video.copy() for _ in range(17)])
    with pytest.raises(
        LimitExceeded, match="the lists of frames in messages have more frames in total than the limit of 32768"
    ):
        parse_messages([{"role": "user", "content": [video, video]} for _ in range(9)])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs is an empty list"),
        ({"text": "a"}, "inputs is of type dict; it must be a list"),
        ("text", "inputs is of type str"),
        (["text"], r"inputs\[0\] is of type str; it must be a dict"),
        (
            [{"text": "a"}, {}],
            r"inputs\[1\] must have exactly one of text, image, video, audio; found none of them in \[\]",
        ),
        ([{"text": "a", "image": "b"}], r"inputs\[0\] must have exactly one .* found 'text' and 'image'"),
        ([{"image": "a", "image_url": "b"}], "found 'image' and 'image_url'"),
        ([{"picture": "a"}], r"found none of them in \['picture'\]"),
        (
            [{"type": "image", "source": {"type": "base64", "data": "AA=="}}],
            r"inputs\[0\] has 'source', as in Anthropic's API; send .*image_url",
        ),
        ([{"inline_data": {"data": "AA=="}}], r"inputs\[0\] has 'inline_data', as in Gemini's API; send .*image_url"),
        ([{"type": "input_file", "file_id": "file-1"}], "send the file itself, or its id in a part of the type file"),
        ([{"type": "tool_result", "tool_use_id": "1"}], 'results as messages of role "tool"'),
        ([{"text": 5}], r"inputs\[0\].text is of type int; it must be a string"),
        ([{"text": None}], r"inputs\[0\] must have exactly one .* found none of them in \[\], and null in \['text'\]"),
        ([{"text": "a", "fps": 1}], "unknown key 'fps'; text has no options"),
        ([{"text": "\ud800"}], "lone surrogate at character 0"),
        ([{"image": 5}], r"inputs\[0\].image is of type int; it must be a path, bytes"),
        (
            [{"type": "image", "image": None}],
            r"inputs\[0\] must have exactly one .* none of them in \['type'\], and null in \['image'\]",
        ),
        ([{"image_url": {"url": None}}], r"inputs\[0\].image_url.url is missing"),
        ([{"image": ""}], r"inputs\[0\].image is empty"),
        ([{"image": b""}], r"inputs\[0\].image is empty"),
        ([{"image": ["a", "b"]}], r"inputs\[0\].image is of type list"),
        (
            [{"image": "a", "fps": 2}],
            r"inputs\[0\] has the unknown key 'fps'; .* accepts min_pixels, max_pixels, detail",
        ),
        ([{"video": "a", "nframes": 2}], "unknown key 'nframes'"),
        ([{"video": []}], r"inputs\[0\].video is an empty list; a video must have at least one frame"),
        ([{"video": ["a", ""]}], r"inputs\[0\].video\[1\] is empty"),
        ([{"video": ["a", 5]}], r"inputs\[0\].video\[1\] is of type int; it must be a path"),
        ([{"video": ["a", ["b"]]}], r"inputs\[0\].video\[1\] is of type list; it must be a path"),
        ([{"video": [{"url": "a"}]}], r"inputs\[0\].video\[0\] is of type dict"),
        ([{"video_url": {"url": 5}}], r"inputs\[0\].video_url.url is of type int"),
        ([{"image_url": {"url": ["a"]}}], r"inputs\[0\].image_url.url is of type list; it must be a string"),
        ([{"audio": ["a"]}], r"inputs\[0\].audio is of type list"),
        ([{"video": ["a"], "sample_fps": 0}], "sample_fps=0 must be above 1e-06 and at most 1000"),
        ([{"image": "a", "sample_fps": 1}], "unknown key 'sample_fps'"),
        ([{"audio": "a", "detail": "low"}], "unknown key 'detail'; .* accepts sampling_rate"),
        ([{"audio": "a", "sampling_rate": 0}], "sampling_rate=0 must be from 1 to 768000"),
        ([{"image": "a", "max_pixels": True}], r"inputs\[0\].max_pixels=True must be an integer from 1 to"),
        ([{"image": "a", "max_pixels": "9"}], "max_pixels='9' must be an integer"),
        ([{"image": "a", "max_pixels": 9.5}], "max_pixels=9.5 must be an integer"),
        ([{"image": "a", "max_pixels": 1e300}], "max_pixels=1e\\+300 must be an integer"),
        ([{"image": "a", "max_pixels": 1e18}], "max_pixels=1000000000000000000 must be from 1 to"),
        ([{"image": "a", "max_pixels": 0}], "max_pixels=0 must be from 1 to 2147483648"),
        ([{"image": "a", "max_pixels": 2**40}], "must be from 1 to 2147483648"),
        ([{"image": "a", "min_pixels": 9, "max_pixels": 8}], "min_pixels 9 is above max_pixels 8"),
        ([{"image": "a", "detail": "huge"}], "detail='huge' must be one of auto, low, high"),
        ([{"video": "a", "fps": True}], "fps=True must be a number"),
        ([{"video": "a", "fps": 0}], "fps=0 must be above 1e-06 and at most 1000"),
        ([{"video": "a", "fps": float("nan")}], "fps=nan"),
        ([{"video": "a", "fps": float("inf")}], "fps=inf"),
        ([{"video": "a", "fps": 10**400}], "fps=<integer of 1329 bits> must be above .* and at most 1000"),
        ([{"image": "a", "max_pixels": 10**5000}], "max_pixels=<integer of 16610 bits> must be from 1 to"),
        ([{"video": "a", "fps": 1, "num_frames": 2}], "both fps and num_frames"),
        ([{"video": "a", "min_frames": 5, "max_frames": 4}], "min_frames 5 is above max_frames 4"),
        ([{"video": "a", "min_frames": 5, "num_frames": 4}], "min_frames 5 is above num_frames 4"),
        ([{"video": "a", "num_frames": 5, "max_frames": 4}], "num_frames 5 is above max_frames 4"),
        ([{"type": "image", "text": "a"}], r"inputs\[0\].type is 'image', but the item has the key 'text'"),
        ([{"type": "poem", "text": "a"}], r"inputs\[0\].type='poem' must be one of text, refusal, image, "),
        ([{"type": "input_image", "text": "a"}], r"inputs\[0\].type is 'image_url', but the item has the key 'text'"),
        ([{"type": "text", "image": "a"}], r"inputs\[0\].type is 'text', but the item has the key 'image'"),
        ([{"type": "video", "image": "a"}], r"inputs\[0\].type is 'video', but the item has the key 'image'"),
        ([{"type": ["image"], "image": "a"}], r"inputs\[0\].type is of type list"),
        ([{"type": "image_url", "image_url": {"uri": "a"}}], r"inputs\[0\].image_url.url is missing"),
        ([{"image_url": {"url": "a", "detail": "low"}, "detail": "low"}], "'detail' both next to 'image_url'"),
        (
            [{"image_url": {"url": "a", "max_pixel": 9}}],
            "unknown key 'max_pixel'; did you mean 'max_pixels'.; an item of",
        ),
        ([{"image": "a", "maxPixels": 9}], "unknown key 'maxPixels'; did you mean 'max_pixels'"),
        ([{"image": "a", "detial": "low"}], "unknown key 'detial'; did you mean 'detail'"),
        ([{"video": "a", "num_frame": 9}], "unknown key 'num_frame'; did you mean 'num_frames'"),
        ([{"text": "a", "FPS": 9}], "unknown key 'FPS'; did you mean 'fps'"),
        ([{"audio": "a", "sample_rate": 9}], "unknown key 'sample_rate'; an item of kind audio"),
        ([{"video": "a", "video_metadata": {"fps": 1}}], "unknown key 'video_metadata'"),
        ([{"type": "image", "image": "a", "url": "b"}], "unknown key 'url'"),
        ([{"text": "a", "file_id": "b"}], "unknown key 'file_id'; text has no options"),
    ],
)
def test_the_error_describes_a_mistake_in_an_item(inputs, message):
    with pytest.raises(InputError, match=message):
        parse_inputs(inputs)


def test_an_array_is_kept_as_a_source():
    pixels = np.zeros((4, 4, 3), np.uint8)
    (item,) = parse_inputs([{"image": pixels}])
    assert item.source is pixels


def test_messages_are_parsed():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert parse_messages(messages) == [
        Message("system", "Be brief."),
        Message("user", (Media("image", "a"), Text("?"))),
        Message("assistant", None, {"tool_calls": [{"id": "1"}]}),
        Message("tool", "4", {"tool_call_id": "1"}),
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is an empty list"),
        (None, "messages is missing; it must be a list"),
        (["hello"], r"messages\[0\] is of type str"),
        ([{"content": "a"}], r"messages\[0\].role=None must be one of system"),
        ([{"role": "<|image_pad|>", "content": "a"}], r"messages\[0\].role='<|image_pad|>'"),
        ([{"role": "r" * 65, "content": "a"}], "another role that the chat template accepts, with at most 64 letters"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": []}], r"messages\[0\].content is an empty list"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is of type int"),
        ([{"role": "user", "content": "\udfff"}], "lone surrogate"),
        ([{"role": "user", "content": [{"text": "a", "video": "b"}]}], r"messages\[0\].content\[0\] must have exactly"),
    ],
)
def test_the_error_describes_a_mistake_in_a_message(messages, message):
    with pytest.raises(InputError, match=message):
        parse_messages(messages)


def test_bytes_io_is_bytes():
    """The position of the stream has no effect."""
    data = io.BytesIO(b"some bytes")
    data.seek(4)
    assert parse_inputs(
        [{"image": data}, {"document": data}, {"video": [data, data]}, {"audio": data}]
    ) == parse_inputs(
        [
            {"image": b"some bytes"},
            {"document": b"some bytes"},
            {"video": [b"some bytes"] * 2},
            {"audio": b"some bytes"},
        ]
    )
    assert parse_inputs([{"image_embeds": data}]) == parse_inputs([{"image_embeds": b"some bytes"}])
    with pytest.raises(InputError, match="is empty"):
        parse_inputs([{"image": io.BytesIO()}])
