"""Tests for runs whose output is in an object store: a folder behind fsspec's `local://`, and a real S3 server."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import fsspec
import msgspec
import pytest
from click.testing import CliRunner

from mindie_mm import generate_dataset, tokenize_dataset
from mindie_mm.batch import Dataset, stage
from mindie_mm.batch import run as run_module
from mindie_mm.batch.batch_messages import Step
from mindie_mm.batch.input.file_state import InputStates
from mindie_mm.batch.input.remote import RemoteFile
from mindie_mm.batch.input.source import Chunk
from mindie_mm.batch.output import array_file, lease
from mindie_mm.batch.output.array_file import file_bytes
from mindie_mm.batch.output.lease import Holder, Lease
from mindie_mm.batch.output.run_folder import RunFolder, StagedFolder, staging_path
from mindie_mm.batch.output.shard import read_info
from mindie_mm.batch.output.store import Store, output_at
from mindie_mm.batch.run import run_batch
from mindie_mm.batch.settings import Settings
from mindie_mm.batch.tally import Tally
from mindie_mm.cli import main
from mindie_mm.errors import CorruptReference, InputError, StorageError
from mindie_mm.processes import faults
from tests.batch.conftest import CLI, content, run_in_process, settings, written
from tests.batch.gate import Gate
from tests.media_samples import encoded, photograph

POINTS = (
    pytest.param("written run.json", marks=pytest.mark.slow),
    "row 5",
    pytest.param("finished shard-000000000.safetensors", marks=pytest.mark.slow),
    "written shard-000000000.parquet",
    pytest.param("named shard-000000000.parquet", marks=pytest.mark.slow),
    "written manifest.json",
)


NO_RENAMING = ("https", "memory", "smb", "webhdfs", "hdfs", "ftp", "dbfs", "github", "dropbox")
"""Protocols of file systems in which a run could be visible in part."""


class Here:
    """Processes the chunks in this process, because starting a worker takes longer."""

    def __init__(self, folder: RunFolder, chunks: Iterator[Chunk], tally: Tally, *, sandbox: bool) -> None:
        assert not sandbox
        self._folder, self._chunks, self._tally = folder, chunks, tally

    async def run(self, _: int | None) -> None:
        run = msgspec.json.decode((self._folder.path / "run.json").read_bytes(), type=run_module.Run)
        folder = RunFolder.at(self._folder.address)
        here = stage.Stage(run, folder.path, InputStates.read(folder.path).now, folder)
        for chunk in self._chunks:
            if not self._tally.is_done(chunk):
                for report in here.run(chunk, {}):
                    if isinstance(report, Step):
                        self._tally.add_step(chunk, report)


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "s3" not in request.fixturenames:
        monkeypatch.setattr(run_module, "Workers", Here)
        monkeypatch.setattr(array_file, "SAVE_INTERVAL_S", -1.0)


@pytest.fixture(scope="module")
def few(media: Path) -> Path:
    """Return a file of eight rows, which is processed in two chunks. One row is invalid."""
    rows = [{"inputs": [{"image": f"{i}.jpg"}, {"text": "What?"}]} for i in range(7)]
    return written(media / "few to a store.jsonl", [*rows[:3], {"text": 5}, *rows[4:], {"text": "the last"}])


@pytest.fixture(scope="module")
def whole(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_in_process(settings(few), folder)
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"local://{tmp_path}/store/run"


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the numbers of rows are appended when they are tokenized."""
    rows: list[int] = []
    begin_row = stage._ShardStore.begin_row

    def counted(store: stage._ShardStore, row: int, file: array_file.ArrayFile) -> None:
        rows.append(row)
        begin_row(store, row, file)

    monkeypatch.setattr(stage._ShardStore, "begin_row", counted)
    return rows


def run(given: Settings, url: str, staging: Path, **options: Any) -> Any:
    return run_batch(given, url, staging=staging, **options)[0]


def stored(url: str) -> dict[str, bytes]:
    """Return the content of every file in the store that must be the same in equal runs."""
    return {path.name: path.read_bytes() for path in files_of(url) if path.name != "timings.jsonl"}


def files_of(url: str) -> list[Path]:
    return [path for path in Path(url.removeprefix("local://")).iterdir() if path.is_file()]


def require_whole_shards(url: str) -> None:
    """Assert that each table in the store is complete, and that its arrays are in the store."""
    files = {path.name: path for path in files_of(url)}
    for name, path in files.items():
        if name.endswith(".parquet"):
            arrays = files[name.replace(".parquet", ".safetensors")]
            assert arrays.stat().st_size == file_bytes(read_info(path).num_bytes)


def leases_of(url: str) -> list[Path]:
    return [*Path(url.removeprefix("local://"), ".lease").iterdir()]


def kill_at(point: str, given: Settings, url: str, folder: Path) -> None:
    """Begin a run with the staging folder `folder`, and kill it at a point."""
    trigger = folder / f"batch.{point}"
    trigger.touch()
    killed = os.fork()
    if not killed:
        try:
            faults.arm("batch", folder)
            run(given, url, folder)
        finally:
            os._exit(1)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert not trigger.exists()


def expire(url: str) -> None:
    """Let the lease of a killed run expire."""
    (path,) = leases_of(url)
    held = msgspec.json.decode(path.read_bytes(), type=Holder)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(held, expires=time.time() - 1)))


def test_a_run_in_a_store_has_the_bytes_of_a_local_run(
    few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path
) -> None:
    assert run(settings(few), url, tmp_path).num_rows == 8
    assert stored(url) == content(whole)
    assert (leases_of(url), [*tmp_path.glob("mindie_mm-staging-*")]) == ([], [])
    tokenized.clear()
    run(settings(few), url, tmp_path / "another machine")
    assert (tokenized, stored(url)) == ([], content(whole))


def test_the_command_takes_a_url_and_a_staging_folder(few: Path, whole: Path, url: str, tmp_path: Path) -> None:
    """A part of a run is a run of its own."""
    command = ["tokenize", str(few), "--output", f"{url}/", "--shard-rows", "7", "--staging", str(tmp_path / "staging")]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout.endswith(f"in {url}; 1 row failed, see {url}/errors.jsonl\n")) == (1, True)
    assert (stored(url), [*(tmp_path / "staging").iterdir()]) == (content(whole), [])
    parts = [f"{url}-{number}" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        done = CliRunner().invoke(main, [*command[:3], part, *command[4:], "--part", f"{number}/2"])
        assert done.exit_code < 2, done.output
    tables = [name for part in parts for name in sorted(stored(part)) if name.endswith(".parquet")]
    assert tables == ["shard-000000000.parquet", "shard-000000007.parquet"]


def in_parts(few: Path, folders: Sequence[str]) -> None:
    for number, folder in enumerate(folders, 1):
        command = ["tokenize", str(few), "--output", folder, "--shard-rows", "7"]
        done = CliRunner().invoke(main, [*command, "--part", f"{number}/{len(folders)}"])
        assert done.exit_code < 2, done.output


@pytest.mark.parametrize("places", ["remote, remote, remote", "remote, local, local", "local, remote, remote"])
def test_parts_in_stores_are_merged(
    places: str, few: Path, whole: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call copies only what is missing."""
    names = [f"{url}-{number}" for number in range(3)]
    folders = [
        name if place == "remote" else name.removeprefix("local://")
        for name, place in zip(names, places.split(", "), strict=True)
    ]
    output = folders.pop()
    in_parts(few, folders)
    command = ["merge", *folders, "--output", output]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout.startswith("8 rows, 1 failed,")) == (1, True), done.output
    merged = {name: data for name, data in stored(names[2]).items() if name != ".lock"}
    assert merged == content(whole)
    at = Path(names[2].removeprefix("local://"))
    (at / "manifest.json").unlink()
    (at / "shard-000000007.parquet").unlink()
    (at / "input-merge").mkdir()  # left by a call that was killed, if the output is local
    copied = list[str]()
    put_shard = StagedFolder.put_shard

    def counted(folder: StagedFolder, arrays: Path, table: Path, name: str) -> None:
        copied.append(name)
        put_shard(folder, arrays, table, name)

    monkeypatch.setattr(StagedFolder, "put_shard", counted)
    assert CliRunner().invoke(main, command).exit_code == 1
    assert {name: data for name, data in stored(names[2]).items() if name != ".lock"} == content(whole)
    assert copied == (["shard-000000007.parquet"] if output in names else [])
    assert (at / "input-merge").exists() == (output in names)


def test_a_damaged_part_in_a_store_is_named_by_its_url(few: Path, url: str, tmp_path: Path) -> None:
    folders = [f"{url}-{number}" for number in range(2)]
    in_parts(few, folders)
    for name in ("shard-000000007.safetensors", "shard-000000007.parquet", "manifest.json"):
        path = Path(folders[1].removeprefix("local://"), name)
        path.write_bytes(path.read_bytes()[:-9])
        damaged = CliRunner().invoke(main, ["merge", *folders, "--output", str(tmp_path / "merged")])
        assert (damaged.exit_code, f"Error: {folders[1]}/{name} " in damaged.stderr) == (3, True), damaged.output
        assert not [*(tmp_path / "merged").glob("input-*")]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_continues_on_the_same_machine(
    point: str, few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path
) -> None:
    """It need not wait for its lease. Rows in the journal are kept."""
    kill_at(point, settings(few), url, tmp_path)
    require_whole_shards(url)
    run(settings(few), url, tmp_path)
    assert stored(url) == content(whole)
    assert len(tokenized) <= (8 if point == "written run.json" else 3)
    assert leases_of(url) == []


def test_another_machine_waits_for_the_lease_and_repeats_open_shards(
    few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path
) -> None:
    kill_at("row 7", settings(few), url, tmp_path)
    elsewhere = tmp_path / "another machine"
    who = rf"another run is using {url}: process \d+ on {os.uname().nodename}, since .* its lease expires at .* UTC, in"
    with pytest.raises(InputError, match=who):
        run(settings(few), url, elsewhere)
    assert [*elsewhere.iterdir()] == []
    expire(url)
    run(settings(few), url, elsewhere)
    assert (tokenized, stored(url)) == ([7], content(whole))
    assert leases_of(url) == []


def test_the_second_of_two_runs_is_refused(few: Path, url: str, tmp_path: Path) -> None:
    store = Store(url)
    with Lease.take(store, "another machine").kept():
        with pytest.raises(InputError, match=rf"another run is using {url}: process {os.getpid()} on"):
            run(settings(few), url, tmp_path)
        assert store.sizes() == {}
    with (
        run_module.opened_folder(url, tmp_path),
        pytest.raises(InputError, match=rf"another run is using {url}: process"),
    ):
        run(settings(few), url, tmp_path)


def test_only_one_run_takes_an_expired_lease(url: str) -> None:
    stores = [Store(url) for _ in range(4)]
    Lease.take(stores[0], "dead")
    expire(url)
    taken, refused = list[Lease](), list[InputError]()

    def take(index: int) -> None:
        try:
            taken.append(Lease.take(stores[index], str(index)))
        except InputError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 3)
    taken[0].require()


def test_a_lease_is_renewed_also_after_a_failure_of_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 0.005)
    store, failed, renewed = Store(url), threading.Event(), threading.Event()
    write = store.write

    def fail_once(name: str, content: bytes) -> None:
        if not failed.is_set():
            failed.set()
            raise StorageError("the store cannot be reached")
        write(name, content)
        renewed.set()

    monkeypatch.setattr(store, "write", fail_once)
    taken = Lease.take(store, "here")
    first = lease.holder_of(store)
    with taken.kept():
        assert renewed.wait(60)
        now = lease.holder_of(store)
        assert first is not None
        assert now is not None
        assert now.expires > first.expires
    assert leases_of(url) == []


def test_a_run_that_has_lost_its_lease_writes_nothing_more(few: Path, url: str, tmp_path: Path) -> None:
    before: dict[str, bytes] = {}

    def lose(done: Any, *_: Any) -> None:
        if done.rows == 7 and not before:
            expire(url)
            Lease.take(Store(url), "another machine")
            before.update(stored(url))

    with pytest.raises(
        StorageError, match=rf"this run has lost its lease on {url}: process {os.getpid()} on .* has it"
    ):
        run(settings(few), url, tmp_path, show=lose)
    assert stored(url) == before
    assert [path.name for path in leases_of(url)] == ["000001"]


def test_an_interrupted_run_removes_its_lease(few: Path, url: str, tmp_path: Path) -> None:
    def interrupt(done: Any, *_: Any) -> None:
        if done.rows == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings(few), url, tmp_path, show=interrupt)
    assert leases_of(url) == []


def test_a_changed_input_is_refused_on_another_machine(url: str, tmp_path: Path) -> None:
    lines = written(tmp_path / "rows.jsonl", [{"text": f"word {i}"} for i in range(9)])
    kill_at("row 7", settings(lines), url, tmp_path)
    expire(url)
    lines.write_bytes(lines.read_bytes().replace(b"word 4", b"word 5"))
    with pytest.raises(InputError, match=rf"{url} contains another run: input_digests\[0\] was .* Choose another"):
        run(settings(lines), url, tmp_path / "another machine")


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_a_shard_without_one_of_its_files_is_written_again(
    suffix: str, few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path
) -> None:
    run(settings(few), url, tmp_path)
    tokenized.clear()
    Path(url.removeprefix("local://"), f"shard-000000007.{suffix}").unlink()
    run(settings(few), url, tmp_path)
    assert (tokenized, stored(url)) == ([7], content(whole))


def test_failed_rows_are_tried_again_and_other_shards_are_kept(
    few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path
) -> None:
    run(settings(few), url, tmp_path)
    tokenized.clear()
    run(settings(few), url, tmp_path / "another machine", retry_errors=True)
    assert (tokenized, stored(url)) == ([*range(7)], content(whole))


def test_only_open_shards_need_local_disk(few: Path, url: str, tmp_path: Path) -> None:
    kill_at("written errors.jsonl", settings(few), url, tmp_path)
    staged = staging_path(url, tmp_path)
    arrays = staged / "shard-000000000.safetensors"
    in_store = Path(url.removeprefix("local://"), arrays.name)
    assert arrays.stat().st_size == in_store.stat().st_size > 0
    assert arrays.stat().st_blocks == 0


def test_a_store_that_fails_ends_the_run_and_a_second_call_continues(
    few: Path, whole: Path, url: str, tokenized: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = fsspec.implementations.local.LocalFileSystem.put_file

    def full(system: Any, path: str, target: str, **options: Any) -> None:
        if "shard-000000007.parquet" in target:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        put(system, path, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.implementations.local.LocalFileSystem, "put_file", full)
        with pytest.raises(
            StorageError, match=rf"{url}/shard-000000007\.parquet cannot be written: Disk quota exceeded\. Check that"
        ):
            run(settings(few), url, tmp_path)
    require_whole_shards(url)
    assert leases_of(url) == []
    tokenized.clear()
    run(settings(few), url, tmp_path)
    assert (tokenized, stored(url)) == ([], content(whole))


def test_a_full_local_disk_ends_the_run(
    few: Path, whole: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(array_file, "write_all", full)
        path = staging_path(url, tmp_path)
        with pytest.raises(
            StorageError, match=rf"{path}/shard-000000000\.safetensors cannot be written: No space left"
        ):
            run(settings(few), url, tmp_path)
    run(settings(few), url, tmp_path)
    assert stored(url) == content(whole)


def test_every_argument_refuses_a_url_that_lost_a_slash(few: Path, tmp_path: Path) -> None:
    broken, run = Path("s3://bucket/run"), tmp_path / "run"
    calls: dict[str, Callable[[], object]] = {
        "output": lambda: tokenize_dataset(few, broken),
        "an input": lambda: tokenize_dataset([few, broken], run),
        "model": lambda: tokenize_dataset(few, run, model=broken),
        "staging": lambda: tokenize_dataset(few, run, staging=broken),
        "the given file or folder": lambda: Dataset(broken),
        "tokenized": lambda: generate_dataset(broken, tmp_path / "answers.jsonl"),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=f"^{name} is s3:/bucket/run, which looks like a URL but is not one"):
            call()
    refused = CliRunner().invoke(main, ["verify", "s3:/bucket/run"])
    assert (refused.exit_code, "which looks like a URL but is not one" in refused.stderr) == (2, True)
    assert not run.exists()


def test_outputs_that_cannot_have_a_run_are_refused(few: Path, url: str, tmp_path: Path) -> None:
    for given, why in (
        *((f"{protocol}://host/run", f"a run cannot be written to {protocol}://") for protocol in NO_RENAMING),
        (Path("s3://bucket/run"), r"s3:/bucket/run, which looks like a URL but is not one\. Give a URL as a string"),
        ("simplecache::s3://bucket/run", "looks like a URL but is not one"),
    ):
        with pytest.raises(InputError, match=why):
            output_at(given)
    with pytest.raises(InputError, match="nothing://run cannot be written: ValueError: Protocol not known"):
        Store("nothing://run")
    refused = CliRunner().invoke(main, ["tokenize", str(few), "--output", "nothing://run"])
    assert (refused.exit_code, "a run cannot be written to nothing://" in refused.stderr) == (2, True)
    with pytest.raises(InputError, match=r"/store/run/rows\.jsonl is inside the output folder"):
        run(Settings(model="", inputs=(f"{url}/rows.jsonl",)), url, tmp_path)
    local = f"{tmp_path}/store/run/rows.jsonl"
    for given, output in ((local, url), (f"local://{local}", Path(local).parent), (f"local://{local}", f"{url}/a/..")):
        with pytest.raises(InputError, match=r"/store/run/rows\.jsonl is inside the output folder"):
            run_batch(Settings(model="", inputs=(given,)), output)
    (tmp_path / "store/run").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store/run/notes.txt").touch()
    with pytest.raises(InputError, match=rf"{url} does not contain a run, but has other files, such as notes\.txt"):
        run(settings(few), url, tmp_path)
    refused = CliRunner().invoke(main, ["tokenize", str(few), "--output", url, "--no-resume"])
    assert (refused.exit_code, f"{url} is not empty" in refused.stderr) == (2, True)
    (tmp_path / "elsewhere").mkdir()
    link = staging_path(url, tmp_path)
    link.rmdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"is not a folder of this user\. Give another folder with --staging"):
        run(settings(few), url, tmp_path)


class S3:
    """A real S3 server, and commands that write to it."""

    def __init__(self, folder: Path, server: Callable[..., Any], lines: Path, gate: Path) -> None:
        self._new_server = server
        self.server = server("127.0.0.1", port=0)
        self.server.start()
        self.host, self.port = self.server.get_host_and_port()
        self.folder, self.lines, self.gate = folder, lines, gate
        self.command: subprocess.Popen[str] | None = None

    def start(self, staging: str = "staging") -> subprocess.Popen[str]:
        command = [CLI, "tokenize", self.lines, "--output", "s3://bucket/run/", "--shard-rows", "7", "--workers", "1"]
        command += ["--staging", self.folder / staging]
        pipe = subprocess.PIPE
        return subprocess.Popen([*map(str, command)], stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(self, staging: str = "staging") -> tuple[int, str]:
        command = self.start(staging)
        _, errors = command.communicate(timeout=300)
        return command.returncode, errors

    def run_until_the_gate(self, act: Callable[[], object]) -> tuple[int, str]:
        """Run the command, and call `act` while the worker waits in the second shard."""
        self.gate.unlink()
        gate = Gate(self.gate, act)
        self.command = self.start()
        _, errors = self.command.communicate(timeout=300)
        gate.close()
        return self.command.returncode, errors

    def signal(self, number: int) -> None:
        assert self.command is not None
        self.command.send_signal(number)
        self.command.wait(60)

    def stop_server(self) -> None:
        self.server.stop()

    def start_server(self) -> None:
        self.server = self._new_server("127.0.0.1", port=self.port)
        self.server.start()

    def files(self) -> dict[str, int]:
        store = Store("s3://bucket/run")
        return {**store.sizes(), **{f".lease/{name}": size for name, size in store.sizes(".lease").items()}}

    def stored(self) -> dict[str, bytes]:
        store = Store("s3://bucket/run")
        return {name: store.read(name) for name in sorted(self.files()) if name != "timings.jsonl"}


@pytest.fixture
def s3(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()  # fsspec keeps connections to the server of another test
    server = pytest.importorskip("moto.server").ThreadedMotoServer
    gate = few.parent / f"{tmp_path.name}.jpg"
    gate.write_bytes(encoded(photograph(size=(80, 60))))
    rows = [*few.read_bytes().splitlines(), {"inputs": [{"image": gate.name}, {"text": "What?"}]}]
    s3 = S3(tmp_path, server, written(few.parent / f"{tmp_path.name}.jsonl", rows), gate)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{s3.host}:{s3.port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    urlopen(f"http://{s3.host}:{s3.port}/moto-api/reset", data=b"").close()  # the servers of a process share buckets
    fsspec.filesystem("s3").mkdir("bucket")
    yield s3
    fsspec.filesystem("s3").rm("bucket", recursive=True)
    s3.stop_server()


def watch(s3: S3, ended: threading.Event, seen: list[dict[str, int]]) -> None:
    """Assert at each moment that the arrays of each visible table are in the store, whole."""
    while not ended.is_set():
        before = s3.files()
        for name in [name for name in before if name.endswith(".parquet")]:
            with RemoteFile(f"s3://bucket/run/{name}").open() as file:
                info = read_info_of(file.read())
            assert before[name.replace(".parquet", ".safetensors")] == file_bytes(info.num_bytes)
        seen.append(before)


def read_info_of(content: bytes) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        file.write(content)
        file.flush()
        return read_info(Path(file.name))


@pytest.mark.slow
def test_the_command_writes_the_bytes_of_a_local_run_to_s3(s3: S3, tmp_path: Path) -> None:
    """At no time is a shard visible in part."""
    ended, seen = threading.Event(), list[dict[str, int]]()
    with ThreadPoolExecutor() as threads:
        watching = threads.submit(watch, s3, ended, seen)
        assert s3.run()[0] == 1
        ended.set()
        watching.result()
    run_in_process(settings(s3.lines), tmp_path / "local")
    assert s3.stored() == content(tmp_path / "local")
    assert any(0 < len(files) < len(s3.files()) for files in seen)
    assert [*(tmp_path / "staging").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["staging", "another machine"])
def test_a_command_that_was_killed_continues(s3: S3, staging: str, tmp_path: Path) -> None:
    status, _ = s3.run_until_the_gate(lambda: s3.signal(signal.SIGKILL))
    assert status == -signal.SIGKILL
    assert ("shard-000000000.parquet" in s3.files(), "shard-000000007.parquet" in s3.files()) == (True, False)
    if staging != "staging":
        status, errors = s3.run(staging)
        assert (status, "another run is using s3://bucket/run: process" in errors) == (2, True), errors
        store = Store("s3://bucket/run")
        held = msgspec.json.decode(store.read(".lease/000000"), type=Holder)
        store.write(".lease/000000", msgspec.json.encode(msgspec.structs.replace(held, expires=0.0)))
    status, errors = s3.run(staging)
    assert status == 1, errors
    run_in_process(settings(s3.lines), tmp_path / "local")
    assert s3.stored() == content(tmp_path / "local")


@pytest.mark.slow
def test_a_second_command_is_refused_and_an_interrupted_one_leaves_no_lease(s3: S3, tmp_path: Path) -> None:
    refused = list[tuple[int, str]]()

    def act() -> None:
        refused.extend([s3.run(), s3.run("another machine")])
        s3.signal(signal.SIGINT)

    status, errors = s3.run_until_the_gate(act)
    assert (status, "run the same command again to continue" in errors) == (130, True), errors
    for code, message in refused:
        assert (code, f"another run is using s3://bucket/run: process {s3.command.pid} on" in message) == (2, True)
    assert not any(name.startswith(".lease") for name in s3.files())
    assert s3.run("another machine")[0] == 1
    run_in_process(settings(s3.lines), tmp_path / "local")
    assert s3.stored() == content(tmp_path / "local")


@pytest.mark.slow
def test_a_server_that_stops_ends_the_command_and_a_second_call_continues(s3: S3, tmp_path: Path) -> None:
    status, errors = s3.run_until_the_gate(s3.stop_server)
    assert status == 3, errors
    assert "s3://bucket/run" in errors
    assert "Check that the store can be reached" in errors
    s3.start_server()
    status, errors = s3.run()
    assert status == 1, errors
    run_in_process(settings(s3.lines), tmp_path / "local")
    assert s3.stored() == content(tmp_path / "local")


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_refused(s3: S3, tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["tokenize", str(s3.lines), "--output", "s3://missing/run"])
    assert refused.exit_code == 2, refused.output
    assert "s3://missing/run/.lease/000000 cannot be written" in refused.stderr
    assert "Check that the bucket exists" in refused.stderr


def test_a_lease_whose_number_was_given_to_another_run_is_lost(url: str) -> None:
    store = Store(url)
    suspended = Lease.take(store, "a")
    store.remove(f".lease/{suspended.number:06d}")  # as another run does that took the lease and has ended
    other = Lease.take(store, "b")
    assert other.number == suspended.number
    with pytest.raises(StorageError, match="has lost its lease"):
        suspended.require()
    other.require()


def test_files_of_users_are_kept(few: Path, url: str, tmp_path: Path) -> None:
    """The usual names in WebDataset format begin like those of shards."""
    folder = Path(url.removeprefix("local://"))
    folder.mkdir(parents=True)
    (folder / "shard-000000.tar").touch()
    with pytest.raises(InputError, match=r"shard-000000\.tar"):
        run(settings(few), url, tmp_path)
    (folder / "shard-000000.tar").unlink()
    run(settings(few), url, tmp_path)
    (folder / "shard-000001.tar").touch()
    run(settings(few), url, tmp_path)
    assert (folder / "shard-000001.tar").exists()


def test_a_chain_of_urls_is_refused() -> None:
    with pytest.raises(InputError, match=r"output is s3://bucket/a::b, a chain of URLs\. Give the URL of one folder"):
        output_at("s3://bucket/a::b")


def test_damage_is_reported_with_the_url(few: Path, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The local copies are removed. A damaged run.json is written again."""
    run(settings(few), url, tmp_path)
    folder, staging = Path(url.removeprefix("local://")), str(tmp_path / "mindie_mm")
    before = (folder / "run.json").read_bytes()
    (folder / "run.json").write_bytes(b"{")
    run(settings(few), url, tmp_path)
    assert (folder / "run.json").read_bytes() == before
    assert f"{url}/run.json is damaged" in caplog.text
    (folder / "manifest.json").write_bytes(b"{")
    with pytest.raises(CorruptReference, match=f"^{url}/manifest.json ") as refused:
        run(settings(few), url, tmp_path)
    (folder / "manifest.json").unlink()
    (folder / "run.json").write_bytes(b"{")
    with pytest.raises(InputError, match=f"^{url}/run.json does not describe a run") as unfinished:
        run(settings(few), url, tmp_path)
    assert staging not in f"{caplog.text} {refused.value} {unfinished.value}"
    assert [*tmp_path.glob("mindie_mm-staging-*")] == []


def test_a_damaged_table_in_a_store_is_written_again(few: Path, url: str, tmp_path: Path) -> None:
    run(settings(few), url, tmp_path)
    folder = Path(url.removeprefix("local://"))
    table, manifest = folder / "shard-000000000.parquet", folder / "manifest.json"
    before = (table.read_bytes(), manifest.read_bytes())
    manifest.unlink()
    data = table.read_bytes()
    table.write_bytes(data[:4] + bytes(300) + data[304:])
    run(settings(few), url, tmp_path)
    assert (table.read_bytes(), manifest.read_bytes()) == before


def test_a_refused_call_leaves_no_tables(few: Path, url: str, tmp_path: Path) -> None:
    """If an earlier call was killed, its open shard is kept."""
    run(settings(few), url, tmp_path)
    with pytest.raises(InputError, match="contains another run"):
        run(settings(few, max_tokens=1), url, tmp_path)
    assert [*tmp_path.glob("mindie_mm-staging-*")] == []
    Path(url.removeprefix("local://"), "shard-000000007.parquet").unlink()
    kill_at("row 7", settings(few), url, tmp_path)
    with pytest.raises(InputError, match="contains another run"):
        run(settings(few, max_tokens=1), url, tmp_path)
    (staged,) = tmp_path.glob("mindie_mm-staging-*")
    assert {path.suffix for path in staged.glob("shard-*")} == {".journal", ".safetensors"}
