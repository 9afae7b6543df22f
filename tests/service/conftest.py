"""Fixtures for the tests in this folder, including one service, in its own process, that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

import mindie_mm
from tests.warm import running_service
from tools import serving
from tools.demo import data_url, draw_shape, write_video
from tools.serving import RunningService

KiB, MiB = 2**10, 2**20
MEDIA_UUID_BYTES = 64 * KiB
TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
SETTINGS = {
    "arena_bytes": 64 * MiB,
    "kv_cache_bytes": 64 * MiB,
    "max_request_bytes": 8 * MiB,
    "max_item_bytes": 4 * MiB,
    "max_media_bytes": 5 * MiB,
    "max_media_items": 4,
    "limit_mm_per_prompt": '{"audio": 2}',
    "media_uuid_bytes": MEDIA_UUID_BYTES,
    "response_store_bytes": 64 * KiB,
    "max_held_logprobs": 2**17,
    "pooling": "last",
    "grace_s": 0.2,
    "reclaim_interval_s": 3600.0,  # a periodic reclaim must not remove the leftovers that tests look for
}


@pytest.fixture(scope="session")
def settings(device: str) -> dict[str, object]:
    """Return settings with the device under test, and with limits that are small enough for tests to reach."""
    return SETTINGS | {"device": device}


@pytest.fixture(scope="session")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder from which the service may read files."""
    folder = tmp_path_factory.mktemp("media")
    star = draw_shape("green", (40, 160, 60), "star", x=0.5)
    star.save(folder / "green_star.jpg", quality=90)
    star.save(folder / "green star.jpg", quality=90)
    write_video(
        folder / "right.mp4",
        [draw_shape("red", (220, 40, 40), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)],
    )
    return folder


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, object],
    media_dir: Path,
    request: pytest.FixtureRequest,
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    given = settings | {"spool": folder / "spool", "allowed_media_dir": media_dir, "files_path": folder / "files"}
    if request.config.getoption("--front") == "ray":
        given |= {"ray": "local", "replicas": 2}
        starting = serving.running_service(given, folder / "log", TINY, start_timeout_s=1200)
    else:
        given |= {"uds": folder / "socket", "accept_handles": True}
        starting = running_service(given, folder / "log", TINY)
    with starting as running:
        yield running
        shm = running.wait_until_free()
        assert shm["blocks"] == 0, shm
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not [arena for arena in shm["arenas"] if Path("/dev/shm", arena["name"]).exists()]
    assert not list((folder / "spool").iterdir()), "request directories are left"
    assert not list((folder / "files/uploads").iterdir()), "uploads are left"
    assert not (folder / "socket").exists()


@pytest.fixture(scope="session")
def client(service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=300) as openai_client:
        yield openai_client


@pytest.fixture(scope="session")
def http(service: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=service.url, timeout=300) as http_client:
        yield http_client


@pytest.fixture(scope="session")
def unix_http(service: RunningService) -> Iterator[httpx2.Client]:
    """Yield a client of the service's Unix socket."""
    if not (socket := service.log.with_name("socket")).exists():
        pytest.skip("Ray Serve has no Unix socket")
    with httpx2.Client(
        transport=httpx2.HTTPTransport(uds=str(socket)), base_url="http://localhost", timeout=300
    ) as http_client:
        yield http_client


@pytest.fixture(scope="session")
def red_square() -> str:
    """Return an image of a red square as a data URL."""
    return data_url(draw_shape("red", (220, 40, 40), "square", x=0.4))
