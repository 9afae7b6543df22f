"""The answer file of an offline run, and the form of its lines. A later call can continue the file."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from mindie_mm.batch.input.files import creating, locked, replacing
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.batch.output.dataset import Dataset
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.same_run import differences, model_digest, versions, weights_digest
from mindie_mm.device import LIBRARIES
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.msgspec_errors import in_words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import WorkerConfig, kind_of_name
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker

Line = dict[str, Any]
"""An answer as a JSON object, as it is written to the output."""
_BATCH_ID = "batch_req_"
"""Beginning of the `id` of a line in OpenAI's format. The number of the row follows."""
_DECIDING = ("weights", "max_model_len", "vision_device", "vision_bits", "projector_device", "projector_bits")
"""Fields of `EngineConfig` that affect answers. The device and the data type are recorded later, when the engine has
selected them."""
_GO_ON = "Choose another file for --output, or restore the earlier settings, files and versions to continue this file"


class Requests:
    """The requests of rows: the prompt of each row, and the settings of its answer.

    By default, all rows have the same sampling parameters.

    The service derives from this class, because it knows the fields of OpenAI's requests.
    """

    def __init__(self, params: SamplingParams) -> None:
        """Take the sampling parameters of rows that do not state their own. Raise InputError if they are invalid."""
        self.default = params.check(math.inf)

    async def line(self, worker: Worker, row: ShardRow, source: PromptSource) -> Line:
        """Answer a row, and return its line. Raise InputError if the row states a wrong value.

        This method also raises the errors of `Worker.generate`.
        """
        return self.text_line(row, await worker.generate_whole(source, self.default, str(row.row)))

    def text_line(self, row: ShardRow, answer: Answer) -> Line:
        """Return the line of a row whose answer is text."""
        return {
            "row": row.row,
            "id": row.id,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            **_kept(row),
        }

    def error_line(self, row: ShardRow, why: str) -> Line:
        """Return the line of a row that failed. `why` begins with the name of the error."""
        return {"row": row.row, "id": row.id, "error": why, **_kept(row)}


def _kept(row: ShardRow) -> Line:
    return {"columns": row.columns} if row.columns else {}


def batch_id(row: int) -> str:
    """Return the `id` of the line of a row in OpenAI's format."""
    return f"{_BATCH_ID}{row}"


def has_failed(line: Mapping[str, Any]) -> bool:
    """Return whether a line has an error instead of an answer."""
    return line.get("error") is not None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and settings that determine the answers in a file. They are stored in the origin file beside it."""

    run: str
    """`Manifest.digest` of the rows."""
    model: str
    """Directory of the checkpoint, for information only. The digests identify the checkpoint."""
    model_digest: str
    """`model_digest` of the checkpoint. It covers generation_config.json, too."""
    weights_digest: str = ""
    """`weights_digest` of the checkpoint."""
    sampling: SamplingParams
    """Sampling settings, with every default resolved."""
    settings: Mapping[str, Any] = {}
    """Settings of the engine that affect answers. Batch sizes, cache sizes and numbers of threads are not included."""
    versions: Mapping[str, str] = {}
    device: str = ""
    """Kind of device that computed the answers. Empty until the engine has started."""
    dtype: str = ""
    """Data type of the model. Until the engine has started and resolved it, this is the data type that the call states,
    or an empty string."""

    @classmethod
    def of(cls, dataset: Dataset, config: WorkerConfig, sampling: SamplingParams) -> Self:
        """Return the origin of answers to the rows of `dataset` on this machine.

        Raises:
            UnsupportedCheckpoint: The checkpoint cannot be read.

        """
        checkpoint = Checkpoint.open(config.model)
        model = "" if config.model is None else str(config.model.absolute())
        return cls(
            run=dataset.manifest.digest,
            model=os.fsencode(model).decode(errors="backslashreplace"),
            model_digest=model_digest(checkpoint),
            weights_digest=weights_digest(checkpoint),
            sampling=sampling,
            settings=_deciding(config),
            versions=versions(LIBRARIES),
            dtype="" if config.engine.dtype == "auto" else config.engine.dtype,
        )

    def parts(self) -> dict[str, Any]:
        """Return the settings that determine the answers, as a dict, without `model`.

        The device and the data type are left out, too, because the engine resolves them when it starts.
        """
        values: dict[str, Any] = msgspec.to_builtins(self)
        sampling = values.pop("sampling")
        return {name: value for name, value in (values | sampling).items() if name not in {"model", "device", "dtype"}}

    @staticmethod
    def path(output: Path) -> Path:
        """Return the path of the origin file of `output`."""
        return output.with_name(output.name + ".origin.json")

    def begin(self, output: Path) -> None:
        """Write the origin file of `output`. Raise StorageError if this fails."""
        with replacing(self.path(output)) as unfinished:
            unfinished.write_bytes(msgspec.json.encode(self) + b"\n")

    def require(self, output: Path) -> None:
        """Raise InputError unless the answers in `output` have this origin. The message lists the differences."""
        earlier = self._read(output)
        changes = differences(earlier.parts(), self.parts())
        if self.dtype and earlier.device:
            changes |= differences({"dtype": earlier.dtype}, {"dtype": self.dtype})
        if changes:
            raise InputError(f"{output} has answers of another run: {'; '.join(changes.values())}. {_GO_ON}")

    def require_engine(self, output: Path, device: str, dtype: str) -> None:
        """Record the device of the started engine and the data type that it has resolved.

        Raises:
            InputError: Another kind of device, or another data type, computed the answers in `output`.
            StorageError: The values cannot be recorded.

        """
        earlier, actual = self._read(output), {"device": device.partition(":")[0], "dtype": dtype}
        if not earlier.device:
            msgspec.structs.replace(self, **actual).begin(output)
        elif changes := differences({name: getattr(earlier, name) for name in actual}, actual):
            raise InputError(f"{output} has answers of another run: {'; '.join(changes.values())}. {_GO_ON}")

    def _read(self, output: Path) -> Origin:
        file = self.path(output)
        try:
            return msgspec.json.decode(file.read_bytes(), type=Origin)
        except FileNotFoundError:
            raise InputError(f"{output} was not written by an earlier call: there is no {file}") from None
        except NOT_JSON as error:
            raise InputError(
                f"{file} was not written by an earlier call, or was changed since: {in_words(error)}"
            ) from None


def _deciding(config: WorkerConfig) -> dict[str, Any]:
    """Return the settings of the engine that affect answers."""
    engine = config.engine
    deciding = {name: getattr(engine, name) for name in _DECIDING}
    deciding = {name: kind_of_name(value) if isinstance(value, str) else value for name, value in deciding.items()}
    return {"family": config.family or ""} | deciding


class EarlierAnswers:
    """The lines of an answer file whose failed rows are asked again. They are beside the file until it is complete."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.earlier")

    def lines(self, row: int) -> Iterator[Line]:
        """Yield the lines from a row on."""
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from map(msgspec.json.decode, islice(file, row, None))

    def num_rows(self) -> int:
        """Return the number of lines."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            return sum(1 for _ in file)

    def take(self, file: BinaryIO) -> None:
        """Move all lines of an answer file here. If a killed call has already copied them, only empty the file."""
        if not self.path.exists():
            file.seek(0)
            with replacing(self.path) as unfinished, unfinished.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        if self.path.stat().st_size == file.seek(0, os.SEEK_END):
            file.truncate(0)


@contextmanager
def continued(
    output: Path, origin: Origin, stop: int | None = None, *, retry_errors: bool = False
) -> Iterator[tuple[Callable[[bytes], None], int, int, str | None]]:
    """Open an answer file to append lines to it. With `retry_errors`, a file with errors becomes `EarlierAnswers`.

    `stop` is the number of rows to answer, or None for any number.

    Yields:
        A function that appends a line, the number of answers in the file, the number of errors among the answers, and
        the id of the last answer.

    Raises:
        InputError: The answers have another origin, the file is invalid, or another process is writing to the file.
        StorageError: The file cannot be written. The yielded function also raises this error.

    """
    with creating(output, "Choose a file in a folder that you may write to"):
        file = output.open("a+b")

    def append(line: bytes) -> None:
        with _writing(output):
            file.write(line)
            file.flush()

    try:
        with _writing(output):
            _require_lock(file, output)
            earlier = EarlierAnswers(output)
            if file.tell() or earlier.path.exists():
                origin.require(output)
            else:
                origin.begin(output)
            begun = _begun(file, output)
            if begun[0] == stop:  # left by a call that was killed after its last answer
                earlier.path.unlink(missing_ok=True)
            most = max(begun[0], earlier.num_rows())
            _require_few(output, most, stop)
            if retry_errors and begun[1]:
                earlier.take(file)
                begun = _begun(file, output)
        yield append, *begun
    except BaseException:
        with suppress(OSError):  # closing would retry the failed write
            file.close()
        raise
    with _writing(output):
        file.close()


def _require_few(output: Path, num_rows: int, stop: int | None) -> None:
    if stop is not None and num_rows > stop:
        raise InputError(f"{output} has {num_rows} rows, but only {stop} were requested")


def _writing(output: Path) -> AbstractContextManager[None]:
    return os_errors_as(StorageError, f"{output} cannot be written")


def _require_lock(file: BinaryIO, output: Path) -> None:
    if not locked(file.fileno(), output):
        raise InputError(f"another process is writing {output}")


def _begun(file: BinaryIO, output: Path) -> tuple[int, int, str | None]:
    """Return the number of answers, the number of errors among them, and the last id. Truncate an incomplete line."""
    rows = errors = whole = 0
    last_id = None
    file.seek(0)
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            answer = msgspec.json.decode(line)
        except (*NOT_JSON, RecursionError):
            answer = None
        if not isinstance(answer, dict) or (answer.get("row") != rows and answer.get("id") != batch_id(rows)):
            raise InputError(
                f"{output} was not written by an earlier call, or was changed since: line {rows + 1} "
                f"is not the answer to row {rows}"
            )
        rows, errors, whole = rows + 1, errors + has_failed(answer), whole + len(line)
        last_id = answer.get("custom_id", answer.get("id"))
    file.truncate(whole)
    return rows, errors, last_id
