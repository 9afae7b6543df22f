"""How a command ends that goes on where it was stopped: its exit status says whether it is finished."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from mindie_mm.errors import BadReference, InputError, MindieMMError, SharedMemoryError

ROWS_FAILED = 1
"""Finished; errors stand in the place of some rows."""
UNFINISHED = 3
INTERRUPTED = 130
"""As a shell has it for SIGINT."""
_AGAIN = "the same command goes on"


class _Unfinished(click.ClickException):
    exit_code = UNFINISHED


@contextmanager
def resuming() -> Iterator[None]:
    """Ends the process with one of these statuses for whatever comes out of the command that it is around.

    What the caller has to mend goes through: the group of commands has a status for it.
    """
    try:
        yield
    except (InputError, SharedMemoryError, click.ClickException):
        raise
    except BadReference as error:  # stays as it is until somebody makes the shard anew
        raise _Unfinished(str(error)) from error
    except MindieMMError as error:
        raise _Unfinished(f"{error}. Once that is mended, {_AGAIN}") from error
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {_AGAIN}", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception:  # noqa: BLE001 - Python's own status for it is 1
        traceback.print_exc()
        raise SystemExit(UNFINISHED) from None
