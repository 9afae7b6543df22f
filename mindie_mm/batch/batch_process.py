"""A worker process of a run.

Its arguments are the address of the run's folder, the path of its row cursor, and perhaps `SANDBOX`. The process reads
the run's file and processes one chunk after another. It reports finished rows at intervals, because a report for each
row would take 2% more time. Its cursor contains the current row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from mindie_mm.batch.batch_messages import SANDBOX, Finished, Job, Ready, Report, Step, Steps
from mindie_mm.batch.cursor import RowCursor
from mindie_mm.batch.input.file_state import InputStates
from mindie_mm.batch.output.run_folder import Address, RunFolder
from mindie_mm.batch.settings import RUN_FILE, Run
from mindie_mm.batch.stage import Stage
from mindie_mm.errors import MindieMMError
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline

_PAUSE_S = 0.1


def main(channel: ChildChannel, lifeline: Lifeline, address: str, cursor_path: str, *sandbox: str) -> None:
    """Process jobs until the channel closes."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Job)
    try:
        folder = RunFolder.at(msgspec.json.decode(address, type=Address))
        run = msgspec.json.decode((folder.path / RUN_FILE).read_bytes(), type=Run)
        cursor = RowCursor.open(cursor_path)
        states = InputStates.read(folder.path).now
        stage = Stage(run, folder.path, states, folder, sandbox=SANDBOX in sandbox)
        channel.send(encoder.encode(Ready()))
        while True:
            job = decoder.decode(channel.recv())
            for report in _reports(stage, cursor, job):
                channel.send(encoder.encode(report))
    except (EOFError, ConnectionError):  # the run has closed the channel, perhaps during a send
        return
    except MindieMMError as error:
        channel.send(encoder.encode(Failure.of(error)))


def _reports(stage: Stage, cursor: RowCursor, job: Job) -> Iterator[Report]:
    """Process a job and yield its reports. Report failed rows immediately, and other rows at intervals."""
    steps, sent_s = list[Step](), time.monotonic()
    for report in stage.run(job.chunk, job.doomed):
        if isinstance(report, Finished):
            yield Steps(steps)
            yield report
            return
        cursor.move_to(min(report.row + 1, job.chunk.stop_row - 1))
        steps.append(report)
        if report.error is not None or time.monotonic() - sent_s > _PAUSE_S:
            yield Steps(steps)
            steps, sent_s = [], time.monotonic()
