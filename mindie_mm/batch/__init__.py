"""Offline tokenization of rows of prompts. It writes shards of token ids and arrays, for a worker or for training.

Modules for the input: gather (converts folders and pipes to files of rows), source (cuts files of rows into chunks),
record, row (converts a record to a prompt), file_state (detects changed files).

Modules for the output: shard (a table and a file of blocks), manifest (settings and final counts), dataset (reads a
finished run).

Modules that decide whether a call may continue an earlier one: settings (values that affect the output), versions,
checkpoint_digest, differences (describes why a call is refused).

Modules for the processes: run (does all steps, from the settings to the manifest), tally (counts finished rows),
progress, workers (starts processes on this machine and detects their deaths), on_ray (starts actors on a cluster),
batch_process (a worker process), cursor (the worker's current row), stage (tokenizes a chunk and writes its shards).
"""

from mindie_mm.errors import InputError

try:
    from mindie_mm.batch.output.dataset import Dataset, Sample
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise InputError("batches need pyarrow, which is not installed: pip install 'mindie_mm[batch]'") from error

__all__ = ["Dataset", "Sample"]
