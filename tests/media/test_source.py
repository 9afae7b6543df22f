"""Tests for media sources: paths, URLs, base64, pipes and objects."""

import base64
import io
import os
import socket
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm.errors import InputError, LimitExceeded, MediaError, RequestAborted
from mindie_mm.inputs import Media
from mindie_mm.media.fetch import http as fetch
from mindie_mm.media.guard import cancellation
from mindie_mm.media.source import FETCH_TIMEOUT_S, read_source, source_path
from tests.media_samples import encoded, photograph

DATA = encoded(photograph(size=(40, 30)))
BASE64 = base64.b64encode(DATA).decode()


def test_every_kind_of_source_gives_the_same_bytes(tmp_path):
    file = tmp_path / "an image.jpg"
    file.write_bytes(DATA)
    for source in (
        str(file),
        file.as_uri(),
        DATA,
        f"data:image/jpeg;base64,{BASE64}",
        f"DATA:;base64,{BASE64}",
        BASE64,
    ):
        assert read_source(Media("image", source)) == DATA


def in_lines(text: str, width: int, end: str) -> str:
    return "".join(text[at : at + width] + end for at in range(0, len(text), width))


@pytest.mark.parametrize(
    "spaced",
    [
        BASE64 + "\n",
        in_lines(BASE64, 76, "\n"),
        in_lines(BASE64, 64, "\r\n"),
        in_lines(BASE64, 3, " \t\f\v"),
        " \n" + BASE64[:-1] + " " + BASE64[-1],
        BASE64[:1] + " " * 500 + BASE64[1:],
    ],
    ids=["trailing newline", "MIME", "PEM", "everywhere", "before and in the padding", "long runs"],
)
@pytest.mark.parametrize("before", ["", "data:image/jpeg;base64,"])
def test_white_space_in_base64_is_ignored(before, spaced, monkeypatch):
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", len(DATA))
    source = before + spaced
    assert read_source(Media("image", source)) == DATA
    assert source_path(Media("image", source)) is None
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", len(DATA) - 1)
    with pytest.raises(LimitExceeded, match=f"has {len(DATA)} bytes; the limit is {len(DATA) - 1}"):
        read_source(Media("image", source))


def test_source_path_returns_the_path_of_a_local_file(tmp_path):
    file = tmp_path / "a b.jpg"
    assert source_path(Media("image", str(file))) == file
    assert source_path(Media("image", file.as_uri())) == file
    for source in (DATA, BASE64, f"data:;base64,{BASE64}", "https://host/a.jpg", photograph()):
        assert source_path(Media("image", source)) is None


def test_pixels_are_returned_as_arrays():
    image = photograph(size=(20, 10))
    array = np.asarray(image)
    for source in (image, array, torch.from_numpy(array.copy())):
        assert np.array_equal(read_source(Media("image", source)), array)
    frames = np.zeros((4, 10, 20, 3), np.uint8)
    assert np.array_equal(read_source(Media("video", frames)), frames)


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("image", np.zeros((10, 20, 3), np.int64)),
        ("image", np.zeros((10, 20, 4), np.uint8)),
        ("image", np.zeros((10, 3, 20), np.uint8)),
        ("image", np.zeros(10, np.uint8)),
        ("image", np.zeros((0, 20, 3), np.uint8)),
        ("video", np.zeros((10, 20, 3), np.uint8)),
    ],
)
def test_pixels_of_another_shape_or_dtype_are_refused(kind, array):
    with pytest.raises(InputError, match=r"must be uint8 values, or floats from 0 to 1, of shape \["):
        read_source(Media(kind, array))


RGB = np.asarray(photograph(size=(20, 10)))
GREY = np.asarray(photograph(size=(20, 10)).convert("L"))
THREE_GREYS = np.stack([GREY] * 3, axis=-1)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB.transpose(2, 0, 1), RGB),
        (GREY, THREE_GREYS),
        (GREY[..., None], THREE_GREYS),
        (GREY[None], THREE_GREYS),
        (RGB / 255, RGB),
        ((RGB / 255).astype(np.float32), RGB),
        (torch.from_numpy((RGB / np.float32(255)).transpose(2, 0, 1)), RGB),
        ((GREY / 255).astype(np.float16), THREE_GREYS),
        (RGB[:, :3], RGB[:, :3]),  # both ends could be the channels, which are last by default
        (RGB.transpose(2, 0, 1)[:, :, :3], RGB.transpose(2, 0, 1)[:, :, :3]),
    ],
    ids=["CHW", "gray", "HW1", "1HW", "float64", "float32", "CHW tensor", "float16", "10x3x3", "3x10x3"],
)
def test_pixels_may_be_gray_channels_first_or_floats(array, expected):
    """The values are those of torchvision's `to_dtype` and `to_pil_image`, and of diffusers' `numpy_to_pil`."""
    assert np.array_equal(read_source(Media("image", array)), expected)
    frames = np.stack([array, array]) if isinstance(array, np.ndarray) else None
    if frames is not None:
        assert np.array_equal(read_source(Media("video", frames)), np.stack([expected, expected]))


@pytest.mark.parametrize("factor", [1.01, -0.1, 255, np.nan])
def test_floats_above_1_are_refused(factor):
    array = np.full((10, 20, 3), factor, np.float32)
    with pytest.raises(InputError, match=f"image pixels are floats from {array[0, 0, 0]:g} to .* must be from 0 to 1"):
        read_source(Media("image", array))


def cut_image(close=False):
    image = Image.open(io.BytesIO(DATA[:-100]))
    if close:
        image.close()
    return image


class Unreadable:
    def __array__(self, *_args, **_kwargs):
        raise RuntimeError("a lazy array's file is gone" + "!" * 1000)


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (cut_image(), "the JpegImageFile cannot be read: OSError: image file is truncated"),
        (cut_image(close=True), "the JpegImageFile cannot be read: ValueError: Operation on closed image"),
        (torch.zeros(4, 4, 3, dtype=torch.bfloat16), "the Tensor cannot be read: TypeError: .*BFloat16"),
        (torch.zeros(4, 4, 3, requires_grad=True), "the Tensor cannot be read: RuntimeError: .*requires grad"),
        (Unreadable(), "the Unreadable cannot be read: RuntimeError: a lazy array's file is gone"),
    ],
    ids=["truncated", "closed", "bfloat16", "grad", "lazy"],
)
def test_an_unreadable_object_is_refused(kind, source, message):
    with pytest.raises(MediaError, match=message) as caught:
        read_source(Media(kind, source))
    assert len(str(caught.value)) < 300
    with pytest.raises(MediaError, match=f"frame 1: {message}"):
        read_source(Media("video", (DATA, source)))


def test_a_memory_error_is_passed_on():
    class Large:
        def __array__(self, *_args, **_kwargs):
            raise MemoryError

    with pytest.raises(MemoryError):
        read_source(Media("image", Large()))


async def test_urls_are_checked_inside_an_event_loop_too():
    """The address is loopback, which is never public, so the check refuses it."""
    with pytest.raises(MediaError, match=r"not public|public address"):
        read_source(Media("image", "http://127.0.0.1:9/a.jpg"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/file.jpg", "there is no file /no/such/file.jpg"),
        ("/", "cannot be read: Is a directory"),
        ("a\0b", "cannot be read: not a valid path"),
        ("x." * 2500, "File name too long"),
        ("data:image/png;base64", "must have the form"),
        ("data:,a%20b%00", "must have the form"),
        (f"data:{300 * ';'}base64,QUJD", "must have the form"),
        ("data:image/png;base64,####", "base64 of the data: URL is not valid"),
        ("data:image/png;base64,QUJ", "base64 of the data: URL is not valid"),
        ("data:image/png;base64,", "empty"),
        ("file://elsewhere/a.png", "the file: URL has the host 'elsewhere'"),
        ("file://[elsewhere/a.png", "the file: URL is not valid"),
    ],
)
def test_a_bad_source_is_refused(source, message):
    with pytest.raises(InputError, match=message) as caught:
        read_source(Media("image", source))
    assert len(str(caught.value)) < 400


def test_bytes_are_capped(tmp_path, monkeypatch):
    file = tmp_path / "a.jpg"
    file.write_bytes(DATA)
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", 100)
    for named in (str(file), DATA, f"data:;base64,{BASE64}", BASE64):
        with pytest.raises(LimitExceeded, match="the limit is 100"):
            read_source(Media("image", named))
    file.write_bytes(b"")
    with pytest.raises(MediaError, match="empty"):
        read_source(Media("image", str(file)))


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_is_read_to_its_end(pipe):
    writer = threading.Thread(target=pipe.write_bytes, args=(DATA * 100,))  # more bytes than a pipe can buffer
    writer.start()
    assert read_source(Media("image", str(pipe))) == DATA * 100
    writer.join()


@pytest.fixture
def silent_url():
    """Yield a URL whose server accepts a connection but sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/image.png"


@pytest.mark.parametrize("kind", ["pipe", "url"])
def test_reading_a_silent_source_stops_when_its_request_is_aborted(kind, pipe, silent_url, monkeypatch):
    monkeypatch.setattr(fetch, "is_public", lambda _: True)
    given_up, began = threading.Event(), time.monotonic()
    timer = threading.Timer(0.2, given_up.set)
    timer.start()
    with pipe.open("r+b", buffering=0), cancellation.until(given_up), pytest.raises(RequestAborted):
        read_source(Media("image", str(pipe) if kind == "pipe" else silent_url))
    assert given_up.is_set()
    assert time.monotonic() - began < FETCH_TIMEOUT_S / 3
    timer.join()


def test_reading_a_stalled_pipe_stops_at_the_timeout(pipe, monkeypatch):
    monkeypatch.setattr("mindie_mm.media.source.FETCH_TIMEOUT_S", 0.1)
    with pytest.raises(MediaError, match=f"{pipe} is a pipe or a device that did not end within 0.1 s"):
        read_source(Media("image", str(pipe)))
    with pipe.open("r+b", buffering=0) as writer:
        writer.write(DATA)
        with pytest.raises(MediaError, match="did not end within"):
            read_source(Media("image", str(pipe)))


def test_an_endless_device_is_capped(monkeypatch):
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", 100)
    with pytest.raises(LimitExceeded, match="the limit is 100"):
        read_source(Media("image", "/dev/zero"))


def test_each_frame_is_read_as_an_image(tmp_path):
    (tmp_path / "video").mkdir()
    file, array = tmp_path / "video" / "1.jpg", np.zeros((30, 40, 3), np.uint8)
    file.write_bytes(DATA)
    media = Media("video", (DATA, array, str(file), file.as_uri(), BASE64, f"data:;base64,{BASE64}"))
    first, pixels, *others = read_source(media)
    assert first == DATA
    assert np.array_equal(pixels, array)
    assert others == [DATA] * 4
    assert source_path(media) == file
    assert source_path(Media("video", (DATA, array))) is None


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("/no/such/file.jpg", "frame 1: there is no file /no/such/file.jpg"),
        ("http://127.0.0.1:9/a.jpg", "frame 1: .*not public"),
        (np.zeros((30, 40), np.int8), r"frame 1: image pixels have dtype int8 and shape \(30, 40\)"),
        ("data:image/jpeg;base64,", "frame 1: the source is empty"),
    ],
    ids=str,
)
def test_the_error_says_which_frame_is_bad(frame, message):
    with pytest.raises(InputError, match=message):
        read_source(Media("video", (DATA, frame)))


def test_the_bytes_of_all_frames_are_capped_together(monkeypatch):
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", 3 * len(DATA))
    assert len(read_source(Media("video", (DATA,) * 3))) == 3
    with pytest.raises(LimitExceeded, match=f"the video's frames have more bytes than the limit of {3 * len(DATA)}"):
        read_source(Media("video", (DATA,) * 4))
