"""Random checkpoints, written once a session."""

import pytest

from tools.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory):
    """A tiny Qwen2-VL with random weights; pictures of up to 200,000 pixels keep their size."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "tiny", max_pixels=200_000)
