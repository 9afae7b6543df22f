import base64

import numpy as np
import pytest
import torch

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.source import read_source, source_path
from tests.media_samples import encoded, photograph

DATA = encoded(photograph(size=(40, 30)))
BASE64 = base64.b64encode(DATA).decode()


def test_every_way_to_name_the_same_bytes(tmp_path):
    file = tmp_path / "a picture.jpg"
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


def test_source_path(tmp_path):
    file = tmp_path / "a b.jpg"
    assert source_path(Media("image", str(file))) == file
    assert source_path(Media("image", file.as_uri())) == file
    for source in (DATA, BASE64, f"data:;base64,{BASE64}", "https://host/a.jpg", photograph()):
        assert source_path(Media("image", source)) is None


def test_pixels():
    image = photograph(size=(20, 10))
    array = np.asarray(image)
    for source in (image, array, torch.from_numpy(array.copy())):
        assert np.array_equal(read_source(Media("image", source)), array)
    frames = np.zeros((4, 10, 20, 3), np.uint8)
    assert np.array_equal(read_source(Media("video", frames)), frames)


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("image", np.zeros((10, 20, 3), np.float32)),
        ("image", np.zeros((3, 10, 20), np.uint8)),
        ("image", np.zeros((10, 20), np.uint8)),
        ("image", np.zeros((0, 20, 3), np.uint8)),
        ("video", np.zeros((10, 20, 3), np.uint8)),
    ],
)
def test_other_pixels_are_refused(kind, array):
    with pytest.raises(InputError, match=r"must be uint8 \["):
        read_source(Media(kind, array))


async def test_urls_are_fetched_behind_the_fence_even_inside_an_event_loop():
    """Loopback is never public, so what comes back is the fence's own refusal."""
    with pytest.raises(MediaError, match=r"not public|public address"):
        read_source(Media("image", "http://127.0.0.1:9/a.jpg"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/file.jpg", "there is no file /no/such/file.jpg"),
        ("/", "cannot be read: Is a directory"),
        ("a\0b", "cannot be read: not a valid path"),
        ("x." * 2500, "File name too long"),
        ("data:image/png;base64", "not of the form"),
        ("data:,a%20b%00", "not of the form"),
        (f"data:{300 * ';'}base64,QUJD", "not of the form"),
        ("data:image/png;base64,####", "base64 is not valid"),
        ("data:image/png;base64,QUJ", "base64 is not valid"),
        ("data:image/png;base64,", "empty"),
        ("file://elsewhere/a.png", "a file: URL with a host, 'elsewhere'"),
        ("file://[elsewhere/a.png", "a file: URL that is not valid"),
    ],
)
def test_bad_sources(source, message):
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


def test_frames_are_read_each_as_an_image(tmp_path):
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
        (np.zeros((30, 40), np.uint8), r"frame 1: image pixels are uint8 of shape \(30, 40\)"),
        ("data:image/jpeg;base64,", "frame 1: the source is empty"),
    ],
    ids=str,
)
def test_a_bad_frame_is_named(frame, message):
    with pytest.raises(InputError, match=message):
        read_source(Media("video", (DATA, frame)))


def test_bytes_of_frames_are_capped_together(monkeypatch):
    monkeypatch.setattr("mindie_mm.media.source.MAX_SOURCE_BYTES", 3 * len(DATA))
    assert len(read_source(Media("video", (DATA,) * 3))) == 3
    with pytest.raises(LimitExceeded, match=f"the video's frames take more than {3 * len(DATA)} bytes"):
        read_source(Media("video", (DATA,) * 4))
