"""Offline tokenisation: rows of prompts in, shards of ids and arrays out, which a worker runs or a trainer reads.

What is read       gather (folders and pipes to files of rows), source (files of rows, cut into chunks), record,
                   row (one record to one prompt), file_state (whether a file has changed)
What is made       shard (a table beside a file of blocks), manifest (the settings, and in the end the counts)
What continues it  settings (what decides the bytes), versions, checkpoint_digest, differences (why a call is refused)
Who does it        run (settings to a manifest), tally (what is done of it), workers and on_ray (processes here, actors
                   there, and their deaths), process (a worker), cursor (where it is), stage (one chunk to its shards)
Who sees it        progress, dataset, sheet (the pictures of a row)
"""

from mindie_mm.errors import InputError

try:
    from mindie_mm.batch.output.dataset import Dataset, Sample
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise InputError("batches need pyarrow, which is not installed: pip install 'mindie_mm[batch]'") from error

__all__ = ["Dataset", "Sample"]
