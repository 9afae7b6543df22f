"""Every exception that mindie_mm raises on purpose.

    MindieMMError
    |-- InputError                  the caller's mistake: mend the call and it works
    |   |-- MediaError              media that cannot be read, fetched or decoded
    |   |   `-- FramesMiscounted    a video's frame count differs from its packets
    |   |-- LimitExceeded           too many, too large, too long
    |   |   `-- ContextLengthExceeded   prompt and max_tokens do not fit the model's context
    |   |-- TokenOutOfRange         a token id outside [0, vocabulary)
    |   |-- ModelNotFound           a request names another model than the served one
    |   `-- UnsupportedCheckpoint   no family serves this checkpoint, or not this option of it
    `-- OperationalError            a failure outside the call: the same call may work later, or elsewhere
        |-- BadReference            words that no longer lead to data; one request fails
        |   |-- CorruptReference    a damaged word
        |   |-- StaleReference      the block was freed, or freed and used again
        |   `-- SegmentMissing      the arena is gone, truncated or replaced
        |-- FeatureCountMismatch    a tower's features do not fill the item's slots
        |-- ArenaFull               no room for a block within the deadline
        |-- SpoolFull               no room for a request's media as files
        |-- SharedMemoryError       shared memory could not be reserved or used at all
        |-- StorageError            a file of a run cannot be written or read, or the disk is full
        |-- TooManyErrors           more rows of a run failed than the caller bears
        |-- DeviceError             the accelerator is absent, or failed
        |-- QueueFull               more requests wait than the service holds
        |-- RequestTimeout          the request outlived its deadline
        |-- RequestAborted          the request was aborted before it finished
        |-- ServiceStopping         the service was asked to stop
        `-- ProcessDied             a tokenizer or engine process is gone
            `-- NoProcess           none takes requests, and none came back in time

Messages name the value and the limit. The service maps each class to one HTTP status, by the nearest class in
one table (service/http/errors.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class MindieMMError(Exception):
    """Base of all of them."""


class InputError(MindieMMError):
    """The caller's mistake."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """`param` is the field of a request that is to blame, where it is known."""
        super().__init__(message)
        self.param = param


class MediaError(InputError):
    """Media that cannot be read, fetched or decoded."""


class FramesMiscounted(MediaError):
    """A video whose decoded frames differ in number from its packets. Its plan has to be made again."""


class LimitExceeded(InputError):
    """Too many, too large or too long; the message holds the value and the limit."""


class ContextLengthExceeded(LimitExceeded):
    """The prompt, with the tokens asked for, does not fit the model's context."""

    @classmethod
    def of(cls, max_model_len: int, detail: str) -> Self:
        """The error in the words of vLLM and OpenAI, by which clients know it."""
        return cls(f"This model's maximum context length is {max_model_len} tokens; {detail}")


class TokenOutOfRange(InputError):
    """A token id outside [0, vocabulary)."""


class ModelNotFound(InputError):
    """A request names another model than the served one."""


class UnsupportedCheckpoint(InputError):
    """No family serves this checkpoint, or it uses an option that the family refuses."""


class OperationalError(MindieMMError):
    """A failure that is not the caller's mistake."""


WorldError = OperationalError
"""Deprecated alias of OperationalError, kept for a release."""


class BadReference(OperationalError):
    """Words that no longer lead to data."""


class CorruptReference(BadReference):
    """A damaged word: its check does not hold, or it is none of ours."""


class StaleReference(BadReference):
    """The block that the words name was freed, or freed and used again."""


class SegmentMissing(BadReference):
    """The arena that the words name is gone, truncated or replaced."""


class FeatureCountMismatch(OperationalError):
    """A tower gave another number of features than the item has slots."""


class ArenaFull(OperationalError):
    """No room for a block within the deadline."""


class SpoolFull(OperationalError):
    """No room for a request's media as files."""


class SharedMemoryError(OperationalError):
    """Shared memory could not be reserved or used."""


class StorageError(OperationalError):
    """A file of a run cannot be written or read, or the disk is full."""


class TooManyErrors(OperationalError):
    """More rows of a run failed than the caller bears."""


class DeviceError(OperationalError):
    """The accelerator is absent, or failed."""


class QueueFull(OperationalError):
    """More requests wait than the service holds."""


class RequestTimeout(OperationalError):
    """The request outlived its deadline."""


class RequestAborted(OperationalError):
    """The request was aborted before it finished."""


class ServiceStopping(OperationalError):
    """The service was asked to stop; it takes no more requests, and ends those that outlive the grace time."""


class ProcessDied(OperationalError):
    """A tokenizer or engine process is gone."""


class NoProcess(ProcessDied):
    """None takes requests, and none came back in time."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Has an InputError from inside begin with what it is about."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{what}: {error}", param=error.param) from error


@contextmanager
def blaming(param: str | None) -> Iterator[None]:
    """Has an InputError from inside blame that field of the request, unless it blames another."""
    try:
        yield
    except InputError as error:
        error.param = error.param or param
        raise


@contextmanager
def os_errors_as(kind: type[MindieMMError], what: str) -> Iterator[None]:
    """Has an OSError from inside be one of that `kind`, which says `what` failed, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def error_name(error: MindieMMError) -> str:
    """The nearest class of this module, by name: how an error crosses to another process."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def error_named(name: str, message: str, param: str | None = None) -> MindieMMError:
    """The error again, on the other side."""
    kind = globals()[name]
    assert issubclass(kind, MindieMMError), kind
    error: MindieMMError = kind(message)
    if isinstance(error, InputError):
        error.param = param
    return error
