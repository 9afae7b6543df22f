"""Offline tokenisation: from rows of prompts to shards of ids and arrays, for a worker or for training.

Input: gather (conversion of folders and pipes to files of rows), source (files of rows, cut into chunks), record, row
(conversion of a record to a prompt), file_state (detection of changed files).

Output: shard (a table and a file of blocks), manifest (settings and final counts), dataset (reading of a run).

Continuation: settings (the values that decide the bytes), versions, checkpoint_digest, differences (reasons to refuse a
call).

Processes: run (all steps from settings to the manifest), tally (counts of finished rows), progress, workers (processes
on this machine and their deaths), on_ray (actors on a cluster), batch_process (a worker process), cursor (its current
row), stage (tokenisation of a chunk to shards).
"""

from mindie_mm.errors import InputError

try:
    from mindie_mm.batch.output.dataset import Dataset, Sample
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise InputError("batches need pyarrow, which is not installed: pip install 'mindie_mm[batch]'") from error

__all__ = ["Dataset", "Sample"]
