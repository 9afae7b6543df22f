"""The service that all clients ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import running_service
from tools.demo import picture
from tools.serving import RunningService


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with running_service({}, folder / "log") as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


@pytest.fixture(scope="session")
def red_square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a picture."""
    file = tmp_path_factory.mktemp("picture") / "red_square.png"
    picture("red", (220, 40, 40), "square", x=0.4).save(file)
    return file
