"""The exceptions that mindie_mm raises on purpose.

    MindieMMError
    |-- InputError                  a mistake by the caller, who has to change the call
    |   |-- MediaError              media cannot be read, fetched or decoded
    |   |   `-- Miscounted          a video or an audio clip has another length than its packets indicate
    |   |-- LimitExceeded           a number, size or length above a limit
    |   |   `-- ContextLengthExceeded   prompt and max_tokens do not fit the model's context
    |   |-- TokenOutOfRange         a token id outside [0, vocabulary)
    |   |-- ModelNotFound           a request asks for a model that the service does not run
    |   |-- NotStored               a request refers to a response, an item, a file or a batch that is not stored
    |   `-- UnsupportedCheckpoint   no family supports this checkpoint, or its family does not support an option
    `-- OperationalError            a failure that is not the caller's mistake; the call may work later or elsewhere
        |-- BadReference            handle words that do not refer to data; one request fails
        |   |-- CorruptReference    a damaged handle word
        |   |-- StaleReference      the block was freed, or freed and used again
        |   `-- SegmentMissing      the arena or segment is gone, truncated or replaced
        |-- FeatureCountMismatch    a tower returned too many or too few features
        |-- ArenaFull               no space for a block within the deadline
        |-- SpoolFull               no space for a request's media files
        |-- SharedMemoryError       shared memory could not be reserved or used
        |-- StorageError            a file of a batch run cannot be written or read, or the disk is full
        |-- TooManyErrors           more rows of a batch run failed than the caller allows
        |-- DeviceError             the accelerator is absent, or has failed
        |-- QueueFull               the maximum number of requests is in progress
        |   `-- QuotaExceeded       the API key has used its quota; a request may succeed later
        |-- RequestTimeout          the request did not finish before its deadline
        |-- RequestAborted          the request was aborted before it finished
        |-- ServiceStopping         the service is stopping
        |-- ProcessDied             a process died or is closed; a request may be retried once
        |   `-- EngineReloaded      an engine was replaced on purpose; a request may be retried
        |       `-- WeightsChanged  the new engine has other weights, so an output that has begun cannot continue
        `-- NoProcess               no process accepts requests, and none was restarted in time

Messages state the value and the limit. The service maps each error to an HTTP status by the nearest class in a table
(service/http/errors.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class MindieMMError(Exception):
    """Base class of all errors of this package."""


class InputError(MindieMMError):
    """A mistake by the caller."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Create an error. `param` is the name of the invalid field of the request, or None if it is unknown."""
        super().__init__(message)
        self.param = param


class MediaError(InputError):
    """Media cannot be read, fetched or decoded."""


class Miscounted(MediaError):
    """A video or an audio clip has another length than its packets indicate. It has to be planned again."""


class LimitExceeded(InputError):
    """A number, size or length is above a limit. The message states the value and the limit."""


class ContextLengthExceeded(LimitExceeded):
    """The prompt and the requested tokens do not fit the model's context."""

    @classmethod
    def of(cls, max_model_len: int, detail: str) -> Self:
        """Return the error with the wording of vLLM and OpenAI, which clients recognize."""
        return cls(f"This model's maximum context length is {max_model_len} tokens; {detail}")


class TokenOutOfRange(InputError):
    """A token id is outside [0, vocabulary)."""


class ModelNotFound(InputError):
    """A request asks for a model that the service does not run."""


class NotStored(InputError):
    """A request refers to a response, an item, a file or a batch that the service does not store."""


class UnsupportedCheckpoint(InputError):
    """No family supports this checkpoint, or the checkpoint uses an option that its family does not support."""


class OperationalError(MindieMMError):
    """A failure that is not the caller's mistake."""


WorldError = OperationalError
"""Deprecated alias of OperationalError. It will be removed in a later release."""


class BadReference(OperationalError):
    """Handle words do not refer to data, or the data have been freed."""


class CorruptReference(BadReference):
    """The checksum of a handle word is wrong, or another program wrote the handle word."""


class StaleReference(BadReference):
    """The block that the handle words refer to was freed, or freed and used again."""


class SegmentMissing(BadReference):
    """The arena or segment that the handle words refer to is gone, truncated or replaced."""


class FeatureCountMismatch(OperationalError):
    """A tower returned more or fewer features than the item has placeholders."""


class ArenaFull(OperationalError):
    """The arena had no space for a block within the deadline."""


class SpoolFull(OperationalError):
    """The spool has no space for the media files of a request, or cannot be used."""


class SharedMemoryError(OperationalError):
    """Shared memory could not be reserved or used."""


class StorageError(OperationalError):
    """A file of a batch run cannot be written or read, or the disk is full."""


class TooManyErrors(OperationalError):
    """More rows of a batch run failed than the caller allows."""


class DeviceError(OperationalError):
    """The accelerator is absent, or has failed."""


class QueueFull(OperationalError):
    """The maximum number of requests is already in progress."""


class QuotaExceeded(QueueFull):
    """The API key of the request has used its quota."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        """Create an error. `retry_after_s` is the time in seconds after which a request may succeed."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(OperationalError):
    """The request did not finish before its deadline."""


class RequestAborted(OperationalError):
    """The request was aborted before it finished."""


class ServiceStopping(OperationalError):
    """The service is stopping. It refuses new requests, and aborts requests that exceed the grace time."""


class ProcessDied(OperationalError):
    """A tokenizer, decoder or engine process has died, or has been closed."""


class EngineReloaded(ProcessDied):
    """An engine process was replaced on purpose before the request was complete."""


class WeightsChanged(EngineReloaded):
    """An output that has begun cannot continue, because the weights were replaced."""


class NoProcess(OperationalError):
    """No process accepts requests, and none was restarted while the request waited."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add the prefix `what` to the message of an InputError that the block raises."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{what}: {error}", param=error.param) from error


@contextmanager
def blaming(param: str | None) -> Iterator[None]:
    """Set `param` of an InputError that the block raises, unless it is set already."""
    try:
        yield
    except InputError as error:
        error.param = error.param or param
        raise


@contextmanager
def os_errors_as(kind: type[MindieMMError], what: str) -> Iterator[None]:
    """Turn an OSError that the block raises into an error of `kind`. The message is `what` and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


@contextmanager
def panics_as(kind: type[MindieMMError], what: str) -> Iterator[None]:
    """Turn a panic of a library written in Rust into an error of `kind`. The message is `what` and the panic's message.

    A panic is a BaseException, so that `except Exception` does not catch it. Every extension module has its own class
    of panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(f"{what}: {error}") from error


def without_frames(error: MindieMMError) -> MindieMMError:
    """Return an error that was caught, without the frames in which it and its causes were raised.

    A frame keeps its variables alive. If a variable refers to the error, only the garbage collector frees both.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def error_name(error: MindieMMError) -> str:
    """Return the name under which the error can be sent to another process: its nearest class in this module."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def error_named(name: str, message: str, param: str | None = None) -> MindieMMError:
    """Recreate an error that another process has sent."""
    kind = globals()[name]
    assert issubclass(kind, MindieMMError), kind
    error: MindieMMError = kind(message)
    if isinstance(error, InputError):
        error.param = param
    return error
