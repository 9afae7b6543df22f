"""The exceptions that mindie_mm raises on purpose.

    MindieMMError
    |-- InputError                  a mistake of the caller, who has to change the call
    |   |-- MediaError              media that cannot be read, fetched or decoded
    |   |   `-- FramesMiscounted    a video has fewer or more frames than packets
    |   |-- LimitExceeded           a number, size or length above a limit
    |   |   `-- ContextLengthExceeded   prompt and max_tokens do not fit the model's context
    |   |-- TokenOutOfRange         a token id outside [0, vocabulary)
    |   |-- ModelNotFound           a request names another model than the served one
    |   `-- UnsupportedCheckpoint   no family serves this checkpoint, or not this option of it
    `-- OperationalError            a failure outside the call, which may work later or elsewhere
        |-- BadReference            words that no longer refer to data; one request fails
        |   |-- CorruptReference    a damaged word
        |   |-- StaleReference      the block was freed, or freed and used again
        |   `-- SegmentMissing      the arena is gone, truncated or replaced
        |-- FeatureCountMismatch    a tower's features do not fill the item's slots
        |-- ArenaFull               no room for a block within the deadline
        |-- SpoolFull               no room for a request's media as files
        |-- SharedMemoryError       shared memory could not be reserved or used at all
        |-- StorageError            a file of a run cannot be written or read, or the disk is full
        |-- TooManyErrors           more rows of a run failed than the caller allows
        |-- DeviceError             the accelerator is absent, or failed
        |-- QueueFull               more requests wait than the service allows
        |-- RequestTimeout          the request did not finish before its deadline
        |-- RequestAborted          the request was aborted before it finished
        |-- ServiceStopping         the service is stopping
        |-- ProcessDied             a process died or is closed; a request may be retried once
        `-- NoProcess               no process accepts requests, and none came back in time

Messages name the value and the limit. The service maps each error to an HTTP status, by the nearest class in one table
(service/http/errors.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class MindieMMError(Exception):
    """Base class of all errors of this package."""


class InputError(MindieMMError):
    """A mistake of the caller."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Create an error. `param` is the field of the request that is wrong, if it is known."""
        super().__init__(message)
        self.param = param


class MediaError(InputError):
    """Media that cannot be read, fetched or decoded."""


class FramesMiscounted(MediaError):
    """A video has fewer or more frames than packets. Its plan has to be made again."""


class LimitExceeded(InputError):
    """A number, size or length above a limit. The message holds the value and the limit."""


class ContextLengthExceeded(LimitExceeded):
    """The prompt and the requested tokens do not fit the model's context."""

    @classmethod
    def of(cls, max_model_len: int, detail: str) -> Self:
        """Return the error in the words of vLLM and OpenAI, which clients recognise."""
        return cls(f"This model's maximum context length is {max_model_len} tokens; {detail}")


class TokenOutOfRange(InputError):
    """A token id outside [0, vocabulary)."""


class ModelNotFound(InputError):
    """A request names another model than the served one."""


class UnsupportedCheckpoint(InputError):
    """No family serves this checkpoint, or the checkpoint uses an option that the family does not support."""


class OperationalError(MindieMMError):
    """A failure that is not the caller's mistake."""


WorldError = OperationalError
"""Deprecated alias of OperationalError, kept for a release."""


class BadReference(OperationalError):
    """Words that no longer refer to data."""


class CorruptReference(BadReference):
    """A damaged word. Its checksum is wrong, or this package did not write it."""


class StaleReference(BadReference):
    """The block that the words name was freed, or freed and used again."""


class SegmentMissing(BadReference):
    """The arena that the words name is gone, truncated or replaced."""


class FeatureCountMismatch(OperationalError):
    """A tower returned a number of features that differs from the item's slots."""


class ArenaFull(OperationalError):
    """No room for a block within the deadline."""


class SpoolFull(OperationalError):
    """No room for a request's media as files."""


class SharedMemoryError(OperationalError):
    """Shared memory could not be reserved or used."""


class StorageError(OperationalError):
    """A file of a run cannot be written or read, or the disk is full."""


class TooManyErrors(OperationalError):
    """More rows of a run failed than the caller allows."""


class DeviceError(OperationalError):
    """The accelerator is absent, or failed."""


class QueueFull(OperationalError):
    """More requests wait than the service allows."""


class RequestTimeout(OperationalError):
    """The request did not finish before its deadline."""


class RequestAborted(OperationalError):
    """The request was aborted before it finished."""


class ServiceStopping(OperationalError):
    """The service is stopping. It accepts no more requests, and ends those that exceed the grace time."""


class ProcessDied(OperationalError):
    """A tokenizer or engine process is gone."""


class NoProcess(OperationalError):
    """No process accepts requests, and none came back in time. The request has already waited for one."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Prefix the message of an InputError raised inside with `what`."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{what}: {error}", param=error.param) from error


@contextmanager
def blaming(param: str | None) -> Iterator[None]:
    """Set `param` of an InputError raised inside, unless the error has one."""
    try:
        yield
    except InputError as error:
        error.param = error.param or param
        raise


@contextmanager
def os_errors_as(kind: type[MindieMMError], what: str) -> Iterator[None]:
    """Turn an OSError raised inside into an error of `kind`. Its message is `what` and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def error_name(error: MindieMMError) -> str:
    """Return the name of the error's nearest class in this module, for sending the error to another process."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def error_named(name: str, message: str, param: str | None = None) -> MindieMMError:
    """Recreate an error that another process has sent."""
    kind = globals()[name]
    assert issubclass(kind, MindieMMError), kind
    error: MindieMMError = kind(message)
    if isinstance(error, InputError):
        error.param = param
    return error
