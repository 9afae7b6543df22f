"""Exit statuses of the commands that continue where an earlier call stopped."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from mindie_mm.errors import BadReference, InputError, MindieMMError, SharedMemoryError
from mindie_mm.processes.interrupts import INTERRUPTED

ROWS_FAILED = 1
"""The run is finished, and some rows have an error in place of a result."""
UNFINISHED = 3
"""The run is not finished."""
_AGAIN = "run the same command again to continue"


class _Unfinished(click.ClickException):
    exit_code = UNFINISHED


@contextmanager
def resuming() -> Iterator[None]:
    """Turn each exception of the decorated command into one of these exit statuses.

    Mistakes of the caller pass through. The group of commands has a status for them.
    """
    try:
        yield
    except (InputError, SharedMemoryError, click.ClickException):
        raise
    except BadReference as error:  # calling again does not help: the shard has to be made anew
        raise _Unfinished(str(error)) from error
    except MindieMMError as error:
        raise _Unfinished(f"{error}. Fix that, then {_AGAIN}") from error
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {_AGAIN}", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception:  # noqa: BLE001 - Python would exit with 1, which means finished
        traceback.print_exc()
        raise SystemExit(UNFINISHED) from None
