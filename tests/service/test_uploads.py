"""Tests for the limits of uploads on time and on the spool, and what a killed service leaves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.audio_samples import encode_audio, tone
from tests.service.conftest import KiB, MiB
from tests.service.test_transcriptions import PATH, transcribe
from tests.warm import running_service
from tools.serving import RunningService

TIMEOUT_S = 2.0
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=edge\r\n" % PATH.encode()
FILE = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


@pytest.fixture(scope="module")
def limited(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("limited")
    limits = {"max_item_bytes": 3 * MiB, "max_media_bytes": 3 * MiB, "max_spool_bytes": 4 * MiB}
    given = settings | limits | {"request_timeout_s": TIMEOUT_S, "spool": folder / "spool"}
    with running_service(given, folder / "log") as running:
        yield running
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert list((folder / "spool").iterdir()) == []


@contextlib.contextmanager
def uploading(service: RunningService, num_bytes: int) -> Iterator[socket.socket]:
    """Yield a connection on which the first bytes of a file have been sent, and have arrived in the spool."""
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (3 * MiB) + FILE + bytes(num_bytes))
        wait_for(lambda: any(file.stat().st_size >= num_bytes - 512 * KiB for file in files(service)))
        yield sock


def files(service: RunningService) -> list[Path]:
    return [*service.log.with_name("spool").glob("*/audio/*")]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 30
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_upload_that_takes_too_long_is_408(limited: RunningService) -> None:
    with uploading(limited, MiB) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")
    wait_for(lambda: not files(limited))


def test_uploads_that_fill_the_spool_are_refused(limited: RunningService) -> None:
    audio = encode_audio(tone(60), 16_000)
    with uploading(limited, 5 * MiB // 2), httpx2.Client(base_url=limited.url, timeout=60) as http:
        answer = transcribe(http, audio)
        assert answer.status_code == 503
        assert "the media of all requests in progress" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    wait_for(lambda: not files(limited))
    with httpx2.Client(base_url=limited.url, timeout=60) as http:
        answer = transcribe(http, audio)  # the decoded clips do not fit beside the file
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "file")
        assert "the request's media would total 3" in error["message"]
        assert transcribe(http, encode_audio(tone(20), 16_000)).status_code == 200
    wait_for(lambda: not files(limited))


def test_speech_that_finds_no_room_is_refused_before_it_is_decoded(limited: RunningService) -> None:
    """The file lacks its end, so that the error would be another one if it were decoded."""
    broken = encode_audio(tone(45), 16_000, "FLAC")[:-200_000]
    with httpx2.Client(base_url=limited.url, timeout=60) as http:
        assert "the audio clip is broken" in transcribe(http, broken).json()["error"]["message"]
        with uploading(limited, 5 * MiB // 2):
            assert transcribe(http, broken).status_code == 503
    wait_for(lambda: not files(limited))


def test_the_files_of_speech_stay_within_the_limit_of_the_spool(limited: RunningService) -> None:
    audio = encode_audio(tone(45), 16_000, "FLAC")
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                most = max(most, sum(512 * file.stat().st_blocks for file in files(limited)))

    with httpx2.Client(base_url=limited.url, timeout=60) as http, ThreadPoolExecutor(5) as pool:
        watching = pool.submit(watch)
        answers = [*pool.map(lambda _: transcribe(http, audio, max_completion_tokens="1"), range(4))]
        done.set()
        watching.result()
    assert {answer.status_code for answer in answers} == {200, 503}
    assert 2 * MiB < most <= 4 * MiB
    wait_for(lambda: not files(limited))


@pytest.mark.slow
def test_a_killed_service_leaves_what_the_next_start_removes(settings: dict[str, object], tmp_path: Path) -> None:
    given = settings | {"spool": tmp_path / "spool"}
    with running_service(given, tmp_path / "log") as service, uploading(service, 2 * MiB):
        service.process.kill()
        service.process.wait(60)
    assert len([*(tmp_path / "spool").glob("*/audio/.upload-*")]) == 1
    with running_service(given, tmp_path / "log"):
        assert list((tmp_path / "spool").iterdir()) == []
