"""A worker process of a run, started with FOLDER: it reads the run there, and does one chunk after another."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mindie_mm.batch.messages import Failed, Job, Ready
from mindie_mm.batch.settings import RUN_FILE, Run
from mindie_mm.batch.stage import Stage
from mindie_mm.errors import MindieMMError
from mindie_mm.ipc import ChildChannel, Lifeline


def main(channel: ChildChannel, lifeline: Lifeline, folder: str) -> None:
    """Does jobs until the channel closes."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Job)
    try:
        run = msgspec.json.decode((Path(folder) / RUN_FILE).read_bytes(), type=Run)
        stage = Stage(run, Path(folder))
        channel.send(encoder.encode(Ready()))
        while True:
            job = decoder.decode(channel.recv())
            for report in stage.run(job.chunk, job.doomed):
                channel.send(encoder.encode(report))
    except EOFError:
        return
    except MindieMMError as error:
        channel.send(encoder.encode(Failed.of(error)))
