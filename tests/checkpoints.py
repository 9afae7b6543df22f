"""Random checkpoints, written once per session."""

import pytest


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory):
    """Return the path of a tiny Qwen2-VL with random weights. It shrinks only images of more than 200,000 pixels."""
    # The process that distributes tests loads this module, too, and transformers would delay its start by 3 s.
    from tools.random_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "tiny", max_pixels=200_000)
