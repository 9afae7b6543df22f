"""Tests that a sandboxed process decodes all media to the same arrays as any other process."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.lockdown import support
from tests.audio_samples import speech
from tests.lockdown.decoding import digest_of
from tests.lockdown.samples import Sample, samples
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models.contract import FamilyContract

pytestmark = pytest.mark.slow  # each process imports every decoder anew


@pytest.fixture(scope="module")
def media() -> list[Sample]:
    found = samples()
    assert len({sample[:2] for sample in found}) == len(found), "two samples have the same kind and name"
    return found


def run(module: str, given: object, *arguments: object) -> Any:
    """Run a module in a process with the environment of a decoder, and return its result."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, input=pickle.dumps(given), stdout=subprocess.PIPE, check=True, env=environment)
    return pickle.loads(done.stdout)


@pytest.fixture(scope="module")
def locked(media):
    """Return digests of the media, and observations about the sandboxed process that decoded them."""
    return run("tests.lockdown.decoding", media)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a folder with a small checkpoint for each family test class."""
    folder = tmp_path_factory.mktemp("families")
    for path in sorted((Path(__file__).parents[1] / "models").glob("test_*.py")):
        module = importlib.import_module(f"tests.models.{path.stem}")
        for name, contract in vars(module).items():
            is_own = isinstance(contract, type) and contract.__module__ == module.__name__
            if is_own and name.startswith("Test") and issubclass(contract, FamilyContract):
                (folder / name).mkdir()
                contract.write_checkpoint(folder / name)
    return folder


@pytest.mark.slow
def test_a_warm_process_has_one_thread_and_imports_nothing_late(locked):
    _, noticed = locked
    assert noticed == {"threads": 1, "locks": str(support()), "imported late": set()}


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_decode_to_the_same_arrays_as_without_locks(media, locked, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about malicious images
        expected = {name: digest_of(kind, data) for one, name, data in media if one == kind}
    found = {name: digest for (one, name, _), digest in zip(media, locked[0], strict=True) if one == kind}
    assert found == expected
    assert sum(len(digest) == 64 for digest in found.values()) > 30, "most files must be decoded, not refused"


@pytest.mark.slow
def test_each_familys_processor_gives_the_same_arrays_as_without_locks(checkpoints):
    given = {"image": encoded(photograph()), "video": encode_video(moving_frames(12)), "audio": speech(2)}
    found, noticed, expected = run("tests.lockdown.families", given, checkpoints)
    assert found == expected
    assert {kind for _, kind in found} == set(given)
    assert (noticed["threads"], noticed["imported late"]) == (1, set())
