"""The settings and the input of a run, which determine its output. Both are recorded before any row is written."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from mindie_mm.batch.input.file_state import FileState
from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.input.gather import (
    are_rows,
    called,
    gathered_path,
    is_folder,
    is_gathered,
    is_stream,
    require_streams_once,
)
from mindie_mm.batch.input.kept import types_of
from mindie_mm.batch.input.media_folder import is_list
from mindie_mm.batch.input.remote import RemoteFile, file_at, reading_run
from mindie_mm.batch.input.source import MEDIA_MARK, NOT_JSON, JSONLines, Source, Tar, open_source
from mindie_mm.batch.same_run import differences, first_difference, model_digest, versions
from mindie_mm.errors import CorruptReference, InputError, os_errors_as
from mindie_mm.msgspec_errors import in_words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import MediaCaps, MiB, Switch
from mindie_mm.settings.limits import PromptLimits, python_number
from mindie_mm.settings.paths import is_url

FORMAT = 4
"""Version of the output's layout. Output of other versions cannot be read."""
RUN_FILE = "run.json"

MAX_SHARD_BYTES = 2**40
_GO_ON = "Choose another folder for --output, or restore the earlier settings, files and versions to continue this run"

LOCATIONS = frozenset({"model", "inputs", "stdin_folder"})
"""Settings that are paths. Instead of the paths, the digests of the files at these paths are compared."""
_PIECE_BYTES = 1 << 20
_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that affect the content of a run."""

    model: str
    """Absolute path of the checkpoint directory, or empty for the embedded checkpoint."""
    family: str = ""
    """Same as `WorkerConfig.family`. If it is empty, the checkpoint determines the family."""
    inputs: tuple[str, ...]
    """Absolute paths of files of rows, pipes with JSON lines and media folders. "-" is standard input. Rows of a
    program have a name."""
    stdin_folder: str = ""
    """Absolute path of the base folder for relative paths in rows from standard input and pipes."""
    columns: tuple[str, ...] = ()
    """Columns of Parquet files and keys of JSON objects to read. If empty, all columns and keys are read."""
    keep_columns: Mapping[str, str] = {}
    """Columns of the input that the output has, too, with their types. If a type is empty, the rows determine it."""
    template: str = ""
    """Prompt for the media of rows from a folder or tar. The media replace `{media}`. If the template does not contain
    `{media}`, the media precede the text."""
    chat: bool = True
    """True if rows of items are formatted as one user turn when the checkpoint has a chat template."""
    parse_special: Switch = "on"
    """`on` if texts without a template may contain control tokens, except those of media items. A row may set this
    itself."""
    max_tokens: int = 0
    """Maximum number of tokens of a row, or 0 for no limit. A row with more tokens fails."""
    truncate: bool = False
    """True if a row with more than `max_tokens` tokens is shortened instead of failing. Its oldest text and whole media
    items are removed."""
    limit: int | None = None
    """Maximum number of rows to tokenize, or None for all rows."""
    shard_bytes: int = 256 * MiB
    """Total size of the arrays in bytes at which a shard ends."""
    shard_rows: int = 128
    """Maximum number of rows of a shard. A chunk, which is repeated if its process dies, has the same number of
    rows."""
    whole_conversations: bool = False
    """True if conversations keep their answers, for training. Otherwise a data set's conversation ends before its first
    answer."""
    assistant_spans: bool = False
    """True if the ranges of the assistant's turns are recorded, for training. A conversation whose turns cannot be
    located fails."""
    plan: bool = False
    """True if media are only planned from their headers. The run then has no arrays."""
    webui_images: bool = False
    """True if texts may contain images in the format of text-generation-webui."""
    limit_mm_per_prompt: PromptLimits = {}
    """Maximum number of media items in a row, by kind. A row with more items fails."""
    media: MediaCaps = MediaCaps()
    """Limits on media. A row with an item above a limit fails. `max_decode_bytes` does not apply."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("shard_bytes", 1, MAX_SHARD_BYTES),
            ("shard_rows", 1, 2**31),
            ("max_tokens", 0, 2**31),
        ):
            msgspec.structs.force_setattr(self, name, python_number(getattr(self, name)))
            if not least <= getattr(self, name) <= most:
                raise InputError(f"{name}={getattr(self, name)} must be from {least} to {most}")
        require_streams_once(self.inputs)
        for name, values in (("model", [self.model]), ("stdin_folder", [self.stdin_folder]), ("inputs", self.inputs)):
            for value in values:
                if not _is_utf8(value):
                    raise InputError(
                        f"{name} has {value!r}, which is not UTF-8 and cannot be written to the run's file. Rename "
                        "this file or folder"
                    )
        if (marks := self.template.count(MEDIA_MARK)) > 1:
            raise InputError(f"template contains {MEDIA_MARK} {marks} times; it may contain this mark only once")
        if self.truncate and not self.max_tokens:
            raise InputError("truncate requires max_tokens, because without max_tokens no row is too long")
        if self.truncate and self.assistant_spans:
            raise InputError("truncate and assistant_spans are both set, but turns of truncated rows are not located")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit={self.limit} must be at least 1")

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint. Raise UnsupportedCheckpoint if this fails."""
        return Checkpoint.open(self.model or None)

    def media_folder(self, index: int) -> Path | str:
        """Return the base folder for relative paths in the input with this index. It is a URL if the input is one."""
        given = self.inputs[index]
        if is_url(given):
            return given.rpartition("/")[0]
        if is_stream(given):
            return Path(self.stdin_folder)
        return Path(given) if is_folder(given) else Path(given).parent

    def sources(self, folder: Path, states: Sequence[FileState] = (), digests: Sequence[str] = ()) -> list[Source]:
        """Open the files of rows.

        Args:
            folder: Folder of the run.
            states: States that the files must have. The default is their current states.
            digests: Fingerprints of the files, if known.

        Raises:
            InputError: A file cannot be read.
            StorageError: A file is not in the given state.

        """
        sources = []
        for index, given in enumerate(self.inputs):
            gathered = is_gathered(given)
            columns = (*self.columns, *self.keep_columns) if self.columns else ()
            path = gathered_path(folder, index, given) if gathered else file_at(given)
            # All columns are needed in the rows that `gather` wrote for media files.
            columns = () if is_folder(given) and is_list(gathered_path(folder, index)) else columns
            state = states[index] if states else None
            digest = digests[index] if digests else ""
            sources.append(open_source(path, columns, called(given), state, digest))
        return sources


class RunFormat(msgspec.Struct, frozen=True):
    """The part of a `Run` that every version of the package can read."""

    format: int


def require_format(run: RunFormat, folder: Path | RemoteFile | str) -> None:
    """Raise InputError if another version of the package wrote the run in `folder`, and its format was different."""
    if run.format != FORMAT:
        raise InputError(
            f"{folder} was written in format {run.format}; only format {FORMAT} is supported. Tokenize the input "
            "again, with another folder for --output, or use the version of mindie_mm that wrote the folder"
        )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run, and fingerprints of the checkpoint and the input when the run began."""

    format: int = FORMAT
    settings: Settings
    model_digest: str
    """Digest of the checkpoint's files that tokenization reads."""
    input_digests: tuple[str, ...]
    """`Source.fingerprint` of each file of rows. Media files that rows refer to are not covered."""
    columns: Mapping[str, str] = {}
    """Types of the columns that are kept, by name."""
    part: str = ""
    """Part of the rows that the folder has, such as "2/4", or empty for all rows. It does not affect the shards."""
    versions: Mapping[str, str] = {}
    """Versions of the packages that affect ids and arrays. Empty if an older release wrote the run."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        folder: Path,
        sources: Sequence[Source] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> Run:
        """Compute the fingerprints of the checkpoint and the input.

        Args:
            settings: Settings of the run.
            folder: Folder of the run.
            sources: Opened files of rows. If None, the files in `settings` are opened.
            columns: Types of the columns that are kept, if known. If None, all rows are read to find them.

        Raises:
            InputError: An input or the checkpoint cannot be read, or the settings do not fit the input.
            StorageError: An input changes while it is being read.

        """
        sources = settings.sources(folder) if sources is None else sources
        if settings.template and not any(map(_takes_template, settings.inputs, sources)):
            raise InputError(
                "template applies only to folders of media and tar files; the rows of other files have their own text"
            )
        for source in sources:
            if isinstance(source, JSONLines):
                _require_named(source)
        digests = tuple(source.fingerprint() for source in sources)
        columns = types_of(settings.keep_columns, sources) if columns is None else columns
        digest = model_digest(settings.checkpoint())
        return cls(settings=settings, model_digest=digest, input_digests=digests, columns=columns, versions=versions())

    def parts(self) -> dict[str, Any]:
        """Return the values that determine the output of the run, as a dict without paths.

        If the values of a later call differ, the call is refused with an error that lists the differences.
        """
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["part"]
        return {
            **{name: value for name, value in values.pop("settings").items() if name not in LOCATIONS},
            **values,
        }

    @property
    def digest(self) -> str:
        """Identifier of the run. Each shard of the run records it."""
        return blake3(msgspec.json.encode(self.parts())).hexdigest(16)

    def require_here(self, folder: Path) -> list[FileState]:
        """Return the states of the input's files on this machine.

        Raises:
            InputError: The checkpoint, the input or a version on this machine differs from the start of the run.

        """
        sources = self.settings.sources(folder)
        here = msgspec.structs.replace(Run.of(self.settings, folder, sources, self.columns), part=self.part)
        if differing := _differences(self, here):
            raise InputError(
                f"{socket.gethostname()} has files that differ from the files of the run: {'; '.join(differing)}"
            )
        return [source.state for source in sources]

    def require_model(self, checkpoint: Checkpoint) -> None:
        """Raise InputError unless the rows were tokenized with `checkpoint`, which may have been at another path."""
        if (actual := model_digest(checkpoint)) != self.model_digest:
            raise InputError(
                f"{checkpoint.path} is not the checkpoint that tokenized the rows: the digest of its tokenizer "
                f"files is {actual}, not {self.model_digest}"
            )

    def begin(self, folder: Path, called: str = "") -> None:
        """Write the run's file into `folder`, unless the folder already contains this file.

        If inputs or the checkpoint have moved, update their paths in the file. Messages call the folder `called`, for
        example by its URL.

        Raises:
            InputError: The folder contains another run. The message lists the differences.
            StorageError: The file cannot be written.

        """
        file, called = folder / RUN_FILE, called or str(folder)
        if file.is_file():
            content = file.read_bytes()
            try:
                require_format(msgspec.json.decode(content, type=RunFormat), called)
                earlier = msgspec.json.decode(content, type=Run)
            except NOT_JSON as error:
                raise InputError(
                    f"{called}/{RUN_FILE} does not describe a run of this version: {in_words(error)}. Remove this "
                    "file, and run the command again. It keeps the shards if the settings and the input are the same"
                ) from None
            if differing := _differences(earlier, self):
                raise InputError(f"{called} contains another run: {'; '.join(differing)}. {_GO_ON}")
            if earlier == self:
                return
        self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the run's file into `folder`. Raise StorageError if this fails."""
        with replacing(folder / RUN_FILE) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def read(cls, file: Path | RemoteFile) -> Run:
        """Read a run's file. Raise CorruptReference if it is missing or damaged, or StorageError if its store fails."""
        with reading_run(file):
            content = file.read_bytes()
        try:
            return msgspec.json.decode(content, type=cls)
        except NOT_JSON as error:
            raise CorruptReference(f"{file} is damaged: {in_words(error)}") from None


def _takes_template(given: str, source: Source) -> bool:
    return isinstance(source, Tar) or is_folder(given)


def _require_named(source: JSONLines) -> None:
    """Raise InputError if a selected column does not occur in a JSON file.

    The check finds misspelled names. A name is accepted if it occurs anywhere in the text, even if it is not a key.
    Names that JSON may escape are not checked.
    """
    missing = {
        f'"{column}"'.encode(): column for column in source.columns if column.isascii() and column.isidentifier()
    }
    longest, content = max(map(len, missing), default=0), b""
    with os_errors_as(InputError, f"{source.name} cannot be read"), source.opened() as file:
        while missing and (piece := file.read(_PIECE_BYTES)):
            content = content[-longest:] + piece  # a name may be split between two pieces
            missing = {key: column for key, column in missing.items() if key not in content}
        if missing and content:
            raise InputError(
                f"{source.name} has no row with the key {min(missing.values())!r}. Correct --select-columns"
            )


def _is_utf8(path: str) -> bool:
    """Return whether a path can be written as JSON."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def part_of(part: str, count: int) -> range:
    """Return the numbers of the chunks, out of `count`, that a part such as "2/4" has. An empty part has all chunks.

    Raises:
        InputError: `part` is not of this form.

    """
    if not part:
        return range(count)
    if not (match := _PART.fullmatch(part)) or not 1 <= (number := int(match[1])) <= (parts := int(match[2])):
        raise InputError(f"part={part!r} must be i/n, where i is from 1 to n, such as 2/4")
    return range(count * (number - 1) // parts, count * number // parts)


def _differences(earlier: Run, now: Run) -> list[str]:
    """Describe the values that differ between two runs. If no values differ, describe the inputs that have moved."""
    before, after = ({**run.parts(), "part": run.part or "all rows"} for run in (earlier, now))
    changes = differences(before, after)
    if "input_digests" in changes:
        at = first_difference(before["input_digests"], after["input_digests"])
        if at < len(now.settings.inputs):
            name = called(now.settings.inputs[at])
            changes["input_digests"] += f", because the content of {name} differs from that of the earlier input"
    return [*changes.values()] or _moved(earlier.settings, now.settings)


def _moved(earlier: Settings, now: Settings) -> list[str]:
    """Describe the inputs that have moved. After a move, relative paths in their rows may refer to other media.

    An input has not moved if its path is only spelled differently. If the earlier folder no longer exists, the input
    may be at any path.
    """
    pairs = [*zip(earlier.inputs, now.inputs, strict=True), (earlier.stdin_folder, now.stdin_folder)]
    return [
        f"the input was {called(was)} and is now {called(value)}. Relative paths in its rows may refer to other "
        "media there"
        for was, value in pairs
        if not _is_same_place(was, value)
    ]


def _is_same_place(was: str, now: str) -> bool:
    """Return whether relative paths in two inputs have the same base folder, or the earlier folder no longer exists."""
    if was == now:
        return True
    if are_rows(was) or are_rows(now):
        return False
    if is_stream(was) and is_stream(now):
        return True
    if is_url(was) or is_url(now):
        return was.rpartition("/")[0] == now.rpartition("/")[0]
    earlier, present = (given if is_folder(given) else os.path.dirname(given) for given in (was, now))  # noqa: PTH120
    return not os.path.exists(earlier) or _is_same_file(earlier, present)  # noqa: PTH110 - never raises


def _is_same_file(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)  # noqa: PTH121
    except OSError:
        return False
