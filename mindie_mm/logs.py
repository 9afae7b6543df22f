"""Logging of all processes of a service to standard error, as text or JSON, with one record per line.

Records contain nothing that a client has sent, except paths that no route has, names of unknown keys, and numbers and
words that the reason of a refusal quotes, unless logging of prompts is on. A traceback therefore shows the frames and
the class of an exception. It shows the message only if the exception comes from this package or the operating system,
because exceptions of other libraries may quote their input.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from contextvars import ContextVar
from types import TracebackType
from typing import TextIO

import msgspec

from mindie_mm.errors import MindieMMError

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request on which the current task works."""

OURS = ("mindie_mm", "service")
_ROOT_LEVEL = {"debug": "info"}
"""Levels of the root logger that differ from the configured level. Debug records of other libraries are not logged,
because they quote their input, such as texts in an image or header."""


class LogSettings(msgspec.Struct, frozen=True):
    """Settings of logging, which each worker process inherits."""

    format: str = "text"
    """Format of records: text or json."""
    level: str = "info"
    """Lowest level that is logged: debug, info, warning or error."""


_current = LogSettings()


def current() -> LogSettings:
    """Return the settings from the last call to `configure`, which new worker processes inherit."""
    return _current


def configure(settings: LogSettings, process: str, stream: TextIO | None = None) -> None:
    """Send this process's records to `stream`, by default standard error. `process` is its name in the records."""
    global _current  # noqa: PLW0603 - logging is global, and so are its settings
    _current = settings
    handler = logging.StreamHandler(stream)
    handler.setLevel(settings.level.upper())  # some loggers of libraries have their own level
    handler.setFormatter(_Json(process) if settings.format == "json" else _Text(process))
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=_ROOT_LEVEL.get(settings.level, settings.level).upper(), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(settings.level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def adopt() -> None:
    """Remove the log handlers of imported libraries, so that their records go to the root logger."""
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
        logger.propagate = True


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("mindie_mm").critical("uncaught exception: the process exits", exc_info=(kind, error, trace))


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a line or control the terminal."""
_CONTROLS_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(control: re.Match[str]) -> str:
    return repr(control[0])[1:-1]


class _Text(logging.Formatter):
    """A formatter of lines such as `2026-11-21T15:50:13.123Z INFO api[17] service.access: message`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}[{os.getpid()}] %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return _utc(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        # A record takes one line, unless it has a traceback.
        text = (_CONTROLS if record.exc_info is None else _CONTROLS_IN_LINES).sub(_escaped, text)
        given = getattr(record, "request_id", None)
        return f"{text} [{given}]" if given and given not in text else text

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        assert isinstance(ei, tuple)
        return _trace(ei[1])


class _Json(logging.Formatter):
    """A formatter of JSON objects, one per line.

    If a record has `fields` (passed as `extra={"fields": {...}}`), its keys become keys of the object.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if given := getattr(record, "request_id", None):
            line["request_id"] = given
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["trace"] = _trace(record.exc_info[1])
        try:
            return msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # a lone surrogate, for example in a file name
            return msgspec.json.encode({key: ascii(value) for key, value in line.items()}).decode()


def _utc(record: logging.LogRecord) -> str:
    """Return the time of a record in RFC 3339, with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _trace(error: BaseException | None) -> str:
    """Return the frames and classes of an exception and its causes, beginning with the first cause.

    The message of an exception is included only if it cannot quote a client's input.
    """
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        message = isinstance(error, MindieMMError | OSError) and str(error)
        parts.append(
            "".join(traceback.format_tb(error.__traceback__))
            + type(error).__qualname__
            + (f": {message}" if message else "")
        )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(reversed(parts))
