"""Tests that a decoder's memory is limited, and that a decoder that dies does not affect other requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import psutil
import pytest
from PIL import Image

from tests.attacks.conftest import CHAT, with_bytes
from tests.audio_samples import encode_audio, tone
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.warm import running_service
from tests.watching import wait_until
from tools.serving import RunningService

MiB = 2**20
LIMIT = 256 * MiB
CAPS = {
    "max_decode_bytes": LIMIT,
    "max_image_pixels": 50_000_000,
    "max_request_pixels": 90_000_000,
    "max_video_frames": 5,
    "max_request_video_pixels": 20_000,
    "max_video_pixels": 4000,
    "max_audio_seconds": 1.0,
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Yield a service with low limits for media."""
    folder = tmp_path_factory.mktemp("limited")
    settings = {"arena_bytes": 64 * MiB, "kv_cache_bytes": 64 * MiB, "spool": folder / "spool", **CAPS}
    with running_service(settings, folder / "log") as service:
        yield service
        assert service.wait_until_free()["blocks"] == 0
        assert service.stop() == 0, (folder / "log").read_text()[-2000:]


def tokenizer(service: RunningService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if "mindie_mm.tokenize.stage.tokenizer_process" in child.cmdline())


def decoders(service: RunningService) -> list[psutil.Process]:
    (nursery,) = tokenizer(service).children()
    return nursery.children()


def answer(service: RunningService, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(service.url + CHAT, json=body, timeout=300)


def ask(service: RunningService, kind: str, data: bytes) -> httpx2.Response:
    return answer(service, with_bytes(kind, data))


def error_of(service: RunningService, kind: str, data: bytes) -> str:
    refused = ask(service, kind, data)
    assert refused.status_code == 400, refused.text
    message: str = refused.json()["error"]["message"]
    return message


def _spooled(service: RunningService) -> int:
    """Return the number of images in the spool."""
    return len(list((service.log.parent / "spool").glob("*/image/*")))


def test_the_limits_of_an_item_are_settings(limited: RunningService) -> None:
    wide = encoded(Image.new("L", (8000, 7000)), "PNG")
    assert "8000x7000 = 56000000 pixels; the limit is 50000000" in error_of(limited, "image", wide)
    assert "112x84 = 9408 pixels; the limit is 4000" in error_of(limited, "video", encode_video(moving_frames(3)))
    small = encode_video(moving_frames(8, 64, 48))
    assert "has 8 frames; the limit is 5" in error_of(limited, "video", small)
    assert "lasts 2.0 s; the limit is 1 s" in error_of(limited, "audio", encode_audio(tone(2.0), 16_000))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "image",
            "media item 1 (image): the request's images and frames have at least 98000000 .* limit is 90000000",
        ),
        ("video", "media item 1 (video): at least 24576 pixels of the request's videos would .*; the limit is 20000"),
    ],
)
def test_the_limits_of_a_request_are_settings(kind: str, message: str, limited: RunningService) -> None:
    image = kind == "image"
    data = encoded(Image.new("1", (7000, 7000)), "PNG") if image else encode_video(moving_frames(4, 64, 48))
    body = with_bytes(kind, data)
    content = body["messages"][0]["content"]
    content.insert(0, content[0])
    refused = answer(limited, body)
    assert refused.status_code == 400, refused.text
    assert re.search(message.replace("(", r"\(", 1).replace(")", r"\)", 1), refused.json()["error"]["message"])


def test_a_decoder_that_exceeds_its_memory_fails_only_its_request(limited: RunningService) -> None:
    good = encoded(photograph(size=(200, 150)), "PNG")
    expected = ask(limited, "image", good).json()["choices"]
    pid = tokenizer(limited).pid
    heavy = encoded(Image.new("RGBA", (7000, 7000)), "PNG")  # 196 MB as RGBA, plus the RGB copy
    assert "needs more memory than the limit allows (--max-decode-bytes)" in error_of(limited, "image", heavy)
    assert tokenizer(limited).pid == pid
    assert ask(limited, "image", good).json()["choices"] == expected


def test_other_requests_are_answered_beside_images_that_exceed_the_memory(limited: RunningService) -> None:
    good, heavy = encoded(photograph(size=(200, 150)), "PNG"), encoded(Image.new("RGBA", (7000, 7000)), "PNG")
    text = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    bodies = [with_bytes("image", heavy), with_bytes("image", good), text] * 3
    expected = [answer(limited, body).json()["choices"] for body in bodies[1:3]]
    number, pid = len(decoders(limited)), tokenizer(limited).pid
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [*pool.map(lambda body: answer(limited, body), bodies)]
    assert [one.status_code for one in answers] == [400, 200, 200] * 3
    for one in answers[::3]:
        message = one.json()["error"]["message"]
        assert "media item 0 (image)" in message
        assert "needs more memory than the limit allows (--max-decode-bytes)" in message
    assert [one.json()["choices"] for one in answers[1::3]] == [expected[0]] * 3
    assert [one.json()["choices"] for one in answers[2::3]] == [expected[1]] * 3
    wait_until(lambda: len(decoders(limited)) == number)
    assert tokenizer(limited).pid == pid
    assert answer(limited, bodies[1]).json()["choices"] == expected[0]


def test_requests_whose_decoders_are_killed_are_answered(limited: RunningService) -> None:
    good = encoded(photograph(size=(200, 150)), "PNG")
    expected = ask(limited, "image", good).json()["choices"]
    before, pid = decoders(limited), tokenizer(limited).pid
    for decoder in before:
        decoder.suspend()
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(ask, limited, "image", good) for _ in range(4)]
        wait_until(lambda: _spooled(limited) == 4)
        for decoder in before:
            decoder.kill()
        answers = [one.result() for one in tasks]
    assert [response.status_code for response in answers] == [200] * 4
    assert all(response.json()["choices"] == expected for response in answers)
    wait_until(lambda: len(decoders(limited)) == len(before))
    assert not set(before) & set(decoders(limited))
    assert tokenizer(limited).pid == pid


def test_clients_with_different_keys_or_salts_have_decoders_of_their_own(limited: RunningService) -> None:
    body = with_bytes("image", encoded(photograph(size=(200, 150)), "PNG"))
    assert answer(limited, body).status_code == 200
    before = len(decoders(limited))
    for key, salt in (("one", ""), ("two", ""), ("two", "pepper"), ("two", "")):
        headers = {"Authorization": f"Bearer {key}"}
        sent = httpx2.post(limited.url + CHAT, json=body | {"cache_salt": salt or None}, headers=headers, timeout=300)
        assert sent.status_code == 200, sent.text
    wait_until(lambda: len(decoders(limited)) in (before + 2, before + 3))
