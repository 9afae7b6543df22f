"""Exit statuses of commands that can continue an earlier call."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from mindie_mm.errors import BadReference, InputError, MindieMMError, SharedMemoryError
from mindie_mm.processes.interrupts import INTERRUPTED

ROWS_FAILED = 1
"""The run is finished, but some rows failed."""
UNFINISHED = 3
"""The run is not finished."""
_AGAIN = "run the same command again to continue"
_KEPT = "It keeps the finished rows, and repeats at most the rows in progress and the last 10 s"


class _Unfinished(click.ClickException):
    exit_code = UNFINISHED


@contextmanager
def resuming() -> Iterator[None]:
    """Exit with one of the above statuses if the decorated command raises an exception.

    Errors that the user has to correct are raised unchanged, because the group of commands has a status for them.
    """
    try:
        yield
    except (InputError, SharedMemoryError, click.ClickException):
        raise
    except BadReference as error:  # calling again does not help, because the shard has to be written again
        raise _Unfinished(str(error)) from error
    except MindieMMError as error:
        raise _Unfinished(f"{error}. Fix that, then {_AGAIN}") from error
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {_AGAIN}. {_KEPT}", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception:  # noqa: BLE001 - Python would exit with 1, which means finished
        traceback.print_exc()
        raise SystemExit(UNFINISHED) from None
