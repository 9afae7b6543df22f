"""Fixtures: the service that all clients use, and media for the requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import running_service
from tools.demo import draw_shape, write_audio
from tools.serving import RunningService


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    given = {"response_store_bytes": 2**24, "pooling": "last", "files_path": folder / "files"}
    with running_service(given, folder / "log") as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an image, a PDF and an audio clip."""
    folder = tmp_path_factory.mktemp("media")
    red_square = draw_shape("red", (220, 40, 40), "square", x=0.4)
    red_square.save(folder / "red_square.png")
    red_square.save(folder / "red_square.pdf")
    beeps = [(0.1 + 0.35 * number, 0.13) for number in range(3)]
    write_audio(folder / "three_beeps.wav", "beeps", hertz=880.0, spans=beeps, seconds=1.2)
    return folder
