"""Attacks with multipart uploads: sizes, parts, headers, names, and clients that leave."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mindie_mm.settings.config import ServiceConfig
from service.http.connection import MAX_DROPPED_BYTES
from tests.attacks.conftest import MAX_PROCESSOR_S, Attacked, MiB
from tests.audio_samples import encode_audio, tone

PATHS = AUDIO, FILES = "/v1/audio/transcriptions", "/v1/files"
BOUNDARY = b"edge"
MOST = ServiceConfig().max_item_bytes
MAX_HELD_BYTES = 16 * MiB
"""Maximum growth of the service's memory during an upload of 60 MiB, which would be larger if it were held."""
NAMES = [b"../../../../tmp/stolen", b"/etc/cron.d/stolen", b"a\x00b", b"..", b"shm_name.txt", b"%2e%2e/a", b"a" * 3000]
CLIP = encode_audio(tone(0.5), 16_000)


def part(name: str, data: bytes, more: bytes = b"") -> bytes:
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (BOUNDARY, name.encode(), more)
    return head + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--%s--\r\n" % BOUNDARY


def file(data: bytes = CLIP, name: bytes = b"a.wav") -> bytes:
    return part("file", data, b'; filename="%s"' % name)


def spooled(attacked: Attacked) -> list[Path]:
    """Return what is left of uploads. No file may have been stored."""
    files = attacked.service.log.with_name("files")
    assert not [*files.rglob("file-*")]
    return [*attacked.service.log.with_name("spool").iterdir(), *(files / "uploads").iterdir()]


def wait_until_spool_is_empty(attacked: Attacked) -> None:
    deadline = time.monotonic() + 30
    while spooled(attacked):
        assert time.monotonic() < deadline, spooled(attacked)
        time.sleep(0.01)


def refused(
    attacked: Attacked, path: str, body: bytes, status: int, words: str, kind: bytes = b"multipart/form-data"
) -> None:
    """Post a body, and check the error, the costs, the spool and a valid request."""
    headers = {"Content-Type": kind + b"; boundary=" + BOUNDARY if kind.endswith(b"form-data") else kind}
    answer, used_s, further = attacked.watched.during(
        lambda: attacked.http.post(path, content=body, headers=headers)  # type: ignore[arg-type]
    )
    assert answer.status_code == status, answer.text[:500]
    assert words in answer.json()["error"]["message"]
    assert used_s < MAX_PROCESSOR_S
    assert further < MAX_HELD_BYTES, f"{further / MiB:.1f} MiB"
    assert spooled(attacked) == []
    attacked.is_right()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (lambda: form(file(bytes(MOST + 1))), 413, f"the limit is {MOST} (--max-"),
        (lambda: form(file(bytes(MOST + 2 * MiB))), 413, "the limit is"),
        (lambda: form(part("prompt", b"a" * 60 * MiB), file()), 413, "more than 262144 bytes"),
        (lambda: form(*(part(f"x{index}", b"1") for index in range(10_000)), file()), 413, "more than 64 fields"),
        (lambda: form(file(), file()), 400, "several fields named file"),
        (lambda: form(part("model", b"tiny")), 400, "no field file"),
        (form, 400, "no field file"),
        (lambda: b"", 400, "not complete"),
        (file, 400, "not complete"),
        (lambda: b"x" * 1000 + form(file()), 400, "form is not valid"),
        (lambda: b"--edge\r\n" + b"X-A: " + b"a" * MiB + b"\r\n\r\n\r\n--edge--\r\n", 400, "form is not valid"),
        (lambda: b"--edge\r\n" + b"X-A: a\r\n" * 1000 + b"\r\n\r\n--edge--\r\n", 400, "form is not valid"),
        (lambda: b"--edge\r\n\r\nno name\r\n--edge--\r\n", 400, "with a name"),
        (lambda: form(part("prompt", b"\xff\xfe"), file()), 400, "not UTF-8"),
        (lambda: form(part("n" * 7000, b"1"), file()), 400, "form is not valid"),
    ],
)
def test_a_bad_form_is_refused(
    attacked: Attacked, path: str, body: Callable[[], bytes], status: int, words: str
) -> None:
    refused(attacked, path, body(), status, words)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (AUDIO, lambda: form(file(os.urandom(60 * MiB))), 400, "cannot be read as audio"),
        (AUDIO, lambda: form(file(b"")), 400, "file is empty"),
        (AUDIO, lambda: form(part("temperature", b"[1]"), file()), 400, "temperature"),
        (AUDIO, lambda: form(part("n" * 3000, b"1"), part("model", b"\x00"), file()), 404, "does not exist"),
        (AUDIO, lambda: form(part("language", b"../../../etc/passwd"), file()), 400, "does not know"),
        (AUDIO, lambda: form(part("file", b"/etc/passwd")), 400, "cannot be read as audio"),
        (FILES, lambda: form(file(os.urandom(60 * MiB))), 400, "purpose is missing"),
        (FILES, lambda: form(part("purpose", b"a" * 200_000), file()), 400, "purpose="),
        (FILES, lambda: form(part("purpose", b"batch\x00"), file()), 400, "purpose="),
        (FILES, lambda: form(part("purpose", b"batch"), part("purpose", b"batch"), file()), 400, "2 fields purpose"),
        (
            FILES,
            lambda: form(part("purpose", b"batch"), part("expires_after[seconds]", b"9" * 9999), file()),
            400,
            "anchor",
        ),
    ],
)
def test_a_bad_field_is_refused(
    attacked: Attacked, path: str, body: Callable[[], bytes], status: int, words: str
) -> None:
    refused(attacked, path, body(), status, words)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [b"application/json", b"text/plain", b"multipart/mixed; boundary=edge", b""])
def test_another_type_is_415(attacked: Attacked, path: str, kind: bytes) -> None:
    refused(attacked, path, form(file()), 415, "multipart/form-data", kind)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [b"multipart/form-data", b"multipart/form-data; boundary=" + b"e" * 5000])
def test_a_boundary_is_required_and_short(attacked: Attacked, path: str, kind: bytes) -> None:
    answer = attacked.http.post(path, content=form(file()), headers={"Content-Type": kind})  # type: ignore[dict-item]
    assert answer.status_code == 400
    assert "boundary" in answer.json()["error"]["message"].lower()
    assert spooled(attacked) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_has_no_effect(attacked: Attacked, name: bytes) -> None:
    headers: Any = {"Content-Type": b"multipart/form-data; boundary=" + BOUNDARY}
    usual, strange = (
        attacked.http.post(AUDIO, content=form(file(name=one)), headers=headers) for one in (b"a.wav", name)
    )
    assert (strange.status_code, strange.json()) == (200, usual.json())
    assert not Path("/tmp/stolen").exists()
    wait_until_spool_is_empty(attacked)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_stored_file_is_no_path(attacked: Attacked, name: bytes) -> None:
    headers: Any = {"Content-Type": b"multipart/form-data; boundary=" + BOUNDARY}
    body = form(part("purpose", b"user_data"), file(name=name))
    answer = attacked.http.post(FILES, content=body, headers=headers)
    assert answer.status_code == 200
    assert not {"/", "\0"} & set(answer.json()["filename"])
    assert len(answer.json()["filename"]) <= 255
    assert not Path("/tmp/stolen").exists()
    assert attacked.http.delete(f"{FILES}/{answer.json()['id']}").json()["deleted"]
    assert spooled(attacked) == []


@contextlib.contextmanager
def connection(attacked: Attacked, path: str, head: bytes) -> Iterator[socket.socket]:
    """Yield a connection on which the head of an upload has been sent."""
    address = urlsplit(attacked.service.url)
    kind = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n%s\r\n\r\n" % (path.encode(), kind, head))
        yield sock


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_announces_too_much_is_refused_before_it_arrives(attacked: Attacked, path: str) -> None:
    with connection(attacked, path, b"Content-Length: 1000000000000") as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
    assert spooled(attacked) == []


@pytest.mark.parametrize("path", PATHS)
def test_an_upload_that_never_ends_is_refused_at_the_limit(attacked: Attacked, path: str) -> None:
    most = (MOST + MAX_DROPPED_BYTES) // MiB

    def send() -> int:
        count, chunk = 0, b"100000\r\n" + bytes(MiB) + b"\r\n"
        with connection(attacked, path, b"Transfer-Encoding: chunked") as sock:
            head = file(b"")[:-2]
            sock.sendall(b"%x\r\n%s\r\n" % (len(head), head))
            with contextlib.suppress(ConnectionError):
                while count < 2 * most:
                    sock.sendall(chunk)
                    count += 1
        return count

    count, used_s, further = attacked.watched.during(send)
    assert MOST // MiB <= count < most + 16  # the rest is in buffers of the kernel
    assert used_s < MAX_PROCESSOR_S
    assert further < MAX_HELD_BYTES
    wait_until_spool_is_empty(attacked)
    attacked.is_right()


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_during_its_upload_leaves_nothing(attacked: Attacked, path: str) -> None:
    with connection(attacked, path, b"Content-Length: 30000000") as sock:
        sock.sendall(file(bytes(4 * MiB))[:-2])
        while not spooled(attacked):
            time.sleep(0.01)
    wait_until_spool_is_empty(attacked)


def test_a_client_that_leaves_during_its_answer_leaves_nothing(attacked: Attacked) -> None:
    body = form(part("stream", b"true"), file(encode_audio(tone(200), 16_000)))
    with connection(attacked, AUDIO, b"Content-Length: %d" % len(body)) as sock:
        sock.sendall(body)
        assert sock.recv(16).startswith(b"HTTP/1.1 200")
    wait_until_spool_is_empty(attacked)
    assert attacked.service.wait_until_free()["blocks"] == 0
    attacked.is_right()
