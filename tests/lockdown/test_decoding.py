"""A process that has warmed up and is locked in decodes everything to the same arrays as any other."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings

import pytest

from mindie_mm.lockdown import support
from tests.lockdown.decoding import digest_of
from tests.lockdown.samples import Sample, samples


@pytest.fixture(scope="module")
def media() -> list[Sample]:
    return samples()


@pytest.fixture(scope="module")
def locked(media):
    """Number of threads before the fork, the locks, the digests, and the modules that were imported late."""
    command = [sys.executable, "-m", "tests.lockdown.decoding"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, input=pickle.dumps(media), stdout=subprocess.PIPE, check=True, env=environment)
    return pickle.loads(done.stdout)


def test_a_warm_process_has_one_thread_and_imports_nothing_late(locked):
    num_threads, locks, _, imported = locked
    assert (num_threads, locks, imported) == (1, str(support()), set())


@pytest.mark.parametrize("kind", ["picture", "video", "sound"])
def test_media_decode_to_the_same_arrays_as_outside(media, locked, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's about hostile pictures
        expected = {name: digest_of(kind, data) for one, name, data in media if one == kind}
    found = {name: digest for (one, name, _), digest in zip(media, locked[2], strict=True) if one == kind}
    assert found == expected
    assert sum(len(digest) == 64 for digest in found.values()) > 30, "most are decoded, not refused"
