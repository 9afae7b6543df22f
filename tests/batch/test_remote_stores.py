"""Tests for inputs, media and runs in Google Cloud Storage and Azure Blob Storage, on emulators of their servers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import fsspec
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.remote import RemoteFile
from mindie_mm.batch.output.store import Store
from tests.batch.conftest import tokenize, written
from tests.media_samples import encoded, photograph

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]  # of aiohttp, about large bodies

AZURITE = Path(__file__).parents[2] / "build/stores/node_modules/azurite/dist/src/blob/main.js"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Key of every Azurite server, which is not a secret."""


@pytest.fixture(params=["gs", "az"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty bucket on a server, whose address is in the environment."""
    server = {"gs": google_server, "az": azure_server}[request.param]
    with server(monkeypatch):
        fsspec.get_filesystem_class(request.param).clear_instance_cache()
        fsspec.filesystem(request.param).mkdir("bucket")
        yield f"{request.param}://bucket"
    fsspec.get_filesystem_class(request.param).clear_instance_cache()


@contextmanager
def google_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server").create_server("127.0.0.1", port := free_port(), True)
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # gcsfs would wait for credentials of Compute Engine
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # gcsfs would ask for the bucket's type by gRPC
    yield
    server.stop()


@contextmanager
def azure_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("adlfs")
    if not AZURITE.exists():
        pytest.skip("Azurite is not installed. `make test-stores` installs it")
    options = ("--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck")
    command = ["node", AZURITE, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port := free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        wait_for(f"http://127.0.0.1:{port}/")
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};",
        )
        yield
        server.kill()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(url: str, seconds: float = 30) -> None:
    """Wait until a server answers, also with an error."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urlopen(url).close()
        except HTTPError:
            return
        except URLError:
            time.sleep(0.05)  # the server does not say when it listens
        else:
            return
    raise AssertionError(f"{url} did not answer in {seconds} s")


def test_files_are_created_once_replaced_listed_and_removed(bucket: str, tmp_path: Path) -> None:
    store = Store(f"{bucket}/a run")
    assert store.create("lease", b"1")
    if not bucket.startswith("gs"):  # its emulator ignores ifGenerationMatch, which gcsfs sends
        assert not store.create("lease", b"2")
    store.write("data/table", b"x" * 100)
    store.write("data/table", b"y" * 10)
    assert (store.sizes(), store.sizes("data"), store.sizes("none")) == ({"lease": 1}, {"table": 10}, {})
    (tmp_path / "large").write_bytes(large := bytes(range(256)) * (5 << 12))
    store.put(tmp_path / "large", "large")
    store.get(["large", "lease"], tmp_path)
    assert ((tmp_path / "large").read_bytes(), (tmp_path / "lease").read_bytes()) == (large, b"1")
    store.remove("lease")
    store.remove("lease")
    assert (store.read("lease"), store.read("data/table")) == (b"", b"y" * 10)


def test_the_state_of_a_file_changes_with_its_content(bucket: str) -> None:
    store, file = Store(bucket), RemoteFile(f"{bucket}/rows")
    store.write("rows", b"1")
    before = file.state()
    assert file.state() == before
    store.write("rows", b"2")
    assert file.state() != before


def test_the_command_reads_media_and_writes_runs_like_local_ones(bucket: str, tmp_path: Path) -> None:
    """A second call to the run changes nothing. After an input was replaced, a call is refused."""
    rows = [{"image": "0.png", "text": "What?"}, {"text": "Just words."}, {"image": "gone.png", "text": "What?"}]
    lines = written(tmp_path / "rows.jsonl", rows)
    (tmp_path / "0.png").write_bytes(encoded(photograph(size=(60, 40))))
    inputs = Store(f"{bucket}/data")
    for path in (lines, tmp_path / "0.png"):
        inputs.put(path, path.name)
    command = (f"{bucket}/data/rows.jsonl", "--output", f"{bucket}/run", "--workers", 1)
    for given in (command, command, (lines, "--output", tmp_path / "run", "--workers", 1)):
        done = tokenize(*given)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    remote, local = Dataset(f"{bucket}/run"), Dataset(tmp_path / "run")
    assert len(remote) == len(local) == 3
    for one, other in zip(remote, local, strict=True):
        assert (one.error is None, one.spans) == (other.error is None, other.spans)
        if one.error is None:
            assert [array.tolist() for array in one.model_inputs().values()] == [
                array.tolist() for array in other.model_inputs().values()
            ]
    inputs.write("rows.jsonl", b'{"text": "b"}\n')
    refused = tokenize(*command)
    assert (refused.returncode, f"the content of {bucket}/data/rows.jsonl" in refused.stderr) == (2, True)
