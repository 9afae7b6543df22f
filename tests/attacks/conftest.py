"""Fixtures for the attacks: one service with default limits, whose CPU time and memory are measured from outside."""

from __future__ import annotations

import base64
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mindie_mm.settings.config import ServiceConfig
from service.messages.front import is_messages
from tests.attacks.watched import Watched
from tests.warm import running_service
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

MiB = 2**20
CHAT = "/v1/chat/completions"
MAX_PROCESSOR_S = 3.0
"""Maximum CPU time in seconds that one attack may cost, summed over all processes of the service.

Refusing a body with the most JSON values takes 0.2 s on an idle core; 1.1 s were measured on shared cores. A list of
errors, one for each value, would exceed the limit of memory: it takes 289 MiB."""
MAX_FURTHER_BYTES = 64 * MiB
LIBRARY = re.compile(r"root:|SECRET|Traceback|0x[0-9a-f]{10}|PIL\.|av\.error|Errno")
"""Pattern that matches file contents, memory addresses and library internals. No error message may match it."""


@dataclass(frozen=True, slots=True)
class Attacked:
    """A service under attack, with a valid request and its expected answer."""

    service: RunningService
    http: httpx2.Client
    watched: Watched
    media: Path
    """Folder from which the service may read files."""
    good: dict[str, Any]
    answer: str

    def refused(self, body: dict[str, Any], part: str = "", path: str = CHAT, status: int = 400) -> str:
        """Post `body` and return the error message, which must contain `part`.

        The response must have the status `status`. The request must stay within the limits of CPU time and memory, and
        a valid request must succeed afterwards.
        """
        answer, used_s, further = self.watched.during(lambda: self.http.post(path, json=body))
        assert answer.status_code == status, answer.text[:2000]
        assert used_s < MAX_PROCESSOR_S
        assert further < MAX_FURTHER_BYTES, f"{further / MiB:.1f} MiB"
        error = answer.json()["error"]
        assert set(error) == ({"message", "type"} if is_messages(path) else {"message", "type", "param", "code"})
        message: str = error["message"]
        assert part in message
        assert len(message) < 1000
        assert not LIBRARY.search(message)
        self.is_right()
        return message

    def is_right(self) -> None:
        """Assert that the valid request gets the same answer as before the attacks."""
        answer = self.http.post(CHAT, json=self.good)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == self.answer


def asking(kind: str, url: Any) -> dict[str, Any]:
    """Return the body of a chat about one media item."""
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url} if isinstance(url, str) else url}
    content = [part, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}


def with_bytes(kind: str, data: bytes) -> dict[str, Any]:
    """Return the body of a chat about one media item, which is sent as a data URL."""
    return asking(kind, f"data:;base64,{base64.b64encode(data).decode()}")


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    media = folder / "media"
    _fill(media, folder)
    # Memory sizes are set to keep the service small. All limits on requests and media have their defaults.
    settings = {
        "arena_bytes": 64 * MiB,
        "kv_cache_bytes": 64 * MiB,
        "encoder_cache_bytes": 16 * MiB,
        "spool": folder / "spool",
        "files_path": folder / "files",
        "max_file_bytes": ServiceConfig().max_item_bytes,  # the default would make attacks on the size slow
        "allowed_media_dir": media,
        "reclaim_interval_s": 3600.0,
        "pooling": "last",
        "enable_scale_out": True,
    }
    good = asking("image", data_url(draw_shape("red", (220, 40, 40), "square", x=0.4)))
    with (
        running_service(settings, folder / "log") as service,
        httpx2.Client(base_url=service.url, timeout=300) as http,
    ):
        _wait_until_populated(service)
        answers = {http.post(CHAT, json=good).json()["choices"][0]["message"]["content"] for _ in range(2)}
        assert len(answers) == 1
        watched = Watched(service.process.pid, with_children=True)
        yield Attacked(service, http, watched, media, good, answers.pop())
        shm = service.wait_until_free()
        assert shm["blocks"] == 0, shm
        assert service.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir()), "request directories remain in the spool"


def _fill(media: Path, outside: Path) -> None:
    """Fill the media folder with a valid image and with files that the service must not read.

    Create secret files outside the media folder.
    """
    media.mkdir()
    draw_shape("green", (40, 160, 60), "star", x=0.5).save(media / "star.png")
    (outside / "secret.png").write_bytes((media / "star.png").read_bytes())
    (outside / "secret.txt").write_text("SECRET")
    (media / "folder.png").mkdir()
    (media / "empty.png").touch()
    (media / "unreadable.png").write_bytes(b"")
    (media / "text.png").write_text("SECRET")
    os.mkfifo(media / "pipe.png")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(media / "socket.png"))
    (media / "out.png").symlink_to(outside / "secret.png")
    (media / "relative.png").symlink_to("../secret.png")
    (media / "chain.png").symlink_to("out.png")
    (media / "loop.png").symlink_to("loop.png")
    (media / "up").symlink_to("..")
    (media / "proc").symlink_to("/proc")
    (media / "null.png").symlink_to("/dev/null")
    (media / "zero.png").symlink_to("/dev/zero")
    (media / "hole.png").touch()
    os.truncate(media / "hole.png", 2**40)


def _wait_until_populated(service: RunningService) -> None:
    """Wait until all pages of the arenas are in memory. Otherwise, they would count as memory that an attack uses."""
    deadline = time.monotonic() + 60
    while service.get("/health")["shared_memory"]["populated"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
