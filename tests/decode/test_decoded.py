"""Tests that prompts are the same whether decoder processes or the tokenizer's own process decode their media."""

from __future__ import annotations

import base64
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindie_mm.decode import decoders
from mindie_mm.errors import InputError, LimitExceeded, MediaError, Miscounted
from mindie_mm.inputs import Embeddings
from mindie_mm.media.video.encoded_video import EncodedVideo
from mindie_mm.settings.config import MediaCaps
from mindie_mm.shm import Arena, attach, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.requests import request_of_items
from tests.audio_samples import encode_audio, tone
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models.test_qwen2_audio import TestQwen2Audio as _Qwen2Audio
from tests.warm import SUBPROCESS

CAT, COFFEE = photograph("chelsea.png", (150, 120)), photograph("coffee.png", (112, 84))
CLIP = encode_video(moving_frames(12))


class Pair:
    """Two tokenizers: `alone` decodes in its own process, and `decoded` has two decoder processes."""

    def __init__(self, alone: Tokenizer, decoded: Tokenizer, arena: Arena, path_file: Path) -> None:
        self.alone = alone
        self.decoded = decoded
        self.arena = arena
        self.path_file = path_file

    def assert_same(self, *items: dict[str, Any]) -> None:
        """Assert that both tokenizers give the same ids, spans, arrays and digests."""
        expected, found = self.prompt(self.alone, *items), self.prompt(self.decoded, *items)
        assert found[0] == expected[0]
        assert len(found[1]) == len(expected[1]) > 0
        for (digest, arrays), (right_digest, right) in zip(found[1], expected[1], strict=True):
            assert digest == right_digest
            assert arrays.keys() == right.keys()
            assert all(np.array_equal(arrays[name], right[name]) for name in right)

    def prompt(self, tokenizer: Tokenizer, *items: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return the ids and spans of a prompt, and the digest and arrays of each of its blocks. Free the blocks."""
        request = request_of_items([{"text": "What?"}, *items], chat=False, path_file=str(self.path_file))
        prompt = tokenizer.answer(request)
        blocks = []
        for ref in prompt.refs():
            with attach(ref) as view:
                blocks.append((view.digest, {name: np.array(array) for name, array in view.items()}))
        release(self.path_file)
        return (prompt.plain_ids.tolist(), prompt.spans), blocks

    def errors(self, *items: dict[str, Any]) -> tuple[InputError, InputError]:
        """Return the error of each tokenizer for invalid items. Assert that no block stays allocated."""
        caught = []
        for tokenizer in (self.alone, self.decoded):
            with pytest.raises(InputError) as error:
                self.prompt(tokenizer, *items)
            caught.append(error.value)
            assert self.arena.num_blocks == 0
        assert type(caught[0]) is type(caught[1])
        return caught[0], caught[1]


def _pair(checkpoint: Path, path_file: Path, caps: MediaCaps | None = None) -> Iterator[Pair]:
    with (
        pytest.MonkeyPatch.context() as patch,
        Arena.create(64 * 2**20) as arena,
        Tokenizer.from_pretrained(checkpoint, arena=arena, caps=caps) as alone,
    ):
        patch.setattr("mindie_mm.processes.ipc.subprocess", SUBPROCESS)
        with Tokenizer.from_pretrained(checkpoint, arena=arena, caps=caps, decoders=2) as decoded:
            yield Pair(alone, decoded, arena, path_file)
        assert arena.num_blocks == 0


@pytest.fixture(scope="module")
def pair(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from _pair(random_checkpoint, tmp_path_factory.mktemp("pair") / "shm_name.txt")


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(data)
    return path


def _url(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    "form",
    [
        lambda data, folder: str(_file(folder, data)),
        lambda data, folder: _file(folder, data).as_uri(),
        lambda data, _: data,
        lambda data, _: _url(data),
        lambda data, _: base64.b64encode(data).decode(),
        lambda data, _: _opened(data),
        lambda data, _: np.asarray(_opened(data)),
        lambda data, _: np.asarray(_opened(data))[::-1, :, ::-1],
    ],
    ids=["path", "file URL", "bytes", "data URL", "base64", "PIL", "array", "view of an array"],
)
def test_an_image_gives_the_same_prompt_in_every_form(pair: Pair, tmp_path: Path, form: Any) -> None:
    pair.assert_same({"image": form(encoded(CAT), tmp_path)})


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: str(_file(folder, CLIP)),
        lambda _: CLIP,
        lambda _: moving_frames(6),
        lambda folder: [str(_file(folder, encoded(CAT))), encoded(CAT, "PNG"), np.asarray(CAT), CAT],
    ],
    ids=["path", "bytes", "array", "frames"],
)
def test_a_video_gives_the_same_prompt_in_every_form(pair: Pair, tmp_path: Path, form: Any) -> None:
    pair.assert_same({"video": form(tmp_path)})


def test_items_of_many_kinds_keep_their_order(pair: Pair, tmp_path: Path) -> None:
    video = {"video": str(_file(tmp_path, CLIP)), "num_frames": 4}
    pair.assert_same({"image": encoded(CAT)}, video, {"text": "or"}, {"image": COFFEE, "max_pixels": 5000})


def test_embeddings_can_stand_beside_images(pair: Pair) -> None:
    width = pair.alone.prompts._processor.feature_width
    embeddings = Embeddings(np.ones((4, width), np.float32), (1, 4, 4))
    pair.assert_same({"image": encoded(CAT)}, {"image": embeddings})


def test_a_prompt_may_have_more_items_than_decoders(pair: Pair) -> None:
    pair.assert_same(*({"image": encoded(photograph("coffee.png", (56 + 28 * index, 56)))} for index in range(9)))


def test_an_audio_clip_gives_the_same_prompt_in_every_form(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    checkpoint = tmp_path_factory.mktemp("hears")
    _Qwen2Audio.write_checkpoint(checkpoint)
    for pair in _pair(checkpoint, tmp_path / "shm_name.txt"):
        data = encode_audio(tone(0.5), 16_000)
        pair.assert_same({"audio": data}, {"audio": str(_file(tmp_path, data))}, {"audio": tone(0.3)})


def test_a_pipe_is_read_once(pair: Pair, tmp_path: Path) -> None:
    pipe, data = tmp_path / "pipe", encoded(CAT)
    os.mkfifo(pipe)
    expected = pair.prompt(pair.alone, {"image": data})
    writer = threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True)
    writer.start()
    found = pair.prompt(pair.decoded, {"image": str(pipe)})
    writer.join(60)
    assert not writer.is_alive()
    assert found[0] == expected[0]
    assert [digest for digest, _ in found[1]] == [digest for digest, _ in expected[1]]


def test_videos_with_a_wrong_packet_count_are_planned_again(pair: Pair) -> None:
    whole = encode_video(moving_frames(40), fps=10, container="mpegts")

    def miscounted(data: bytes) -> bool:
        try:
            return not list(EncodedVideo.open(data).decode([0]))
        except Miscounted:
            return True

    data = next(filter(miscounted, (whole[:-size] + bytes(size) for size in range(50, 1500, 50))))
    pair.assert_same({"image": encoded(CAT)}, {"video": data}, {"video": data, "num_frames": 2})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"image": "/no/such.jpg"}, "media item 1 (image): there is no file /no/such.jpg"),
        ({"image": b"junk"}, "media item 1 (image): the 4 bytes cannot be read as an image"),
        ({"image": encoded(CAT)[:3000]}, "media item 1 (image): the JPEG image of 150x120 pixels is broken"),
        ({"image": encoded(photograph(size=(401, 2)))}, "media item 1 (image): the image or video has 401x2 pixels"),
        ({"video": [encoded(CAT), b"junk"]}, "media item 1 (video): frame 1: the 4 bytes cannot be read as an image"),
        ({"audio": b"audio"}, "does not accept audio"),
        ({"image": encoded(CAT), "num_frames": 3}, ""),
    ],
    ids=str,
)
def test_the_errors_are_the_same(pair: Pair, bad: dict[str, Any], message: str) -> None:
    alone, decoded = pair.errors({"image": encoded(COFFEE)}, bad)
    assert str(decoded) == str(alone)
    assert message in str(decoded)


@pytest.mark.parametrize("number", [2, 3])
def test_pixels_are_limited_over_a_whole_request(random_checkpoint: Path, tmp_path: Path, number: int) -> None:
    pixels = CAT.width * CAT.height
    for pair in _pair(random_checkpoint, tmp_path / "shm_name.txt", MediaCaps(max_request_pixels=number * pixels)):
        pair.assert_same(*[{"image": encoded(CAT)}] * number)
        alone, decoded = pair.errors(*[{"image": encoded(CAT)}] * (number + 1))
        assert isinstance(decoded, LimitExceeded)
        assert str(decoded) == str(alone)
        assert (
            f"media item {number} (image): the request's images and frames have at least {(number + 1) * pixels} "
            "pixels" in str(decoded)
        )


def test_a_file_truncated_after_it_was_opened_is_a_media_error(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pack_file = _file(tmp_path, encoded(CAT)), decoders.pack_file

    def truncated(*given: Any) -> Any:
        parcel = pack_file(*given)
        os.truncate(path, 100)
        return parcel

    monkeypatch.setattr(decoders, "pack_file", truncated)
    with pytest.raises(MediaError, match=r"media item 0 \(image\): the file cannot be read or has changed"):
        pair.prompt(pair.decoded, {"image": str(path)})
    assert pair.arena.num_blocks == 0
