"""Batches on a disk that is full, for `test_batch_runs`. Prints a JSON object with the end of each batch.

    python -m tests.service.full_disk FOLDER

FOLDER is a small file system of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from service.batches import run
from tests.service.batch_place import Place

PAGE = 4096
NUM_REQUESTS = 60


class Disk:
    """A disk with a place for batches, and a file that fills it."""

    def __init__(self, root: Path) -> None:
        self.place = Place(root / "files")
        self._filler = root / "filler"

    def fill(self, num_free_pages: int) -> None:
        """Fill the disk up to `num_free_pages` pages."""
        status = os.statvfs(self._filler.parent)
        with self._filler.open("ab") as file:
            file.write(bytes(PAGE * (status.f_bavail * status.f_frsize // PAGE - num_free_pages)))

    def empty(self) -> None:
        self._filler.unlink()

    async def end(self, num_free_pages: int, *, is_emptied: bool = False, **fields: Any) -> dict[str, Any]:
        """Run a batch on a full disk, and return its end. `is_emptied` frees the disk while the batch waits for it."""
        place, waits = self.place, asyncio.Event()
        folder = place.create(NUM_REQUESTS, **fields)
        self.fill(num_free_pages)
        handler = logging.Handler()
        handler.emit = lambda record: waits.set() if "waits for room" in record.getMessage() else None  # type: ignore[method-assign]
        logging.getLogger(run.__name__).addHandler(handler)
        running = asyncio.create_task(place.run(folder))
        if is_emptied:
            await waits.wait()
            self.empty()
        batch = await running
        if not is_emptied:
            self.empty()
        asked, place.model.asked = place.model.asked, []
        lines = [*place.lines(batch.output_file_id), *place.lines(batch.error_file_id)]
        return {
            "status": batch.status,
            "codes": [mistake["code"] for mistake in batch.mistakes],
            "counted": batch.completed + batch.failed,
            "lines": len(lines),
            "asked": len(asked),
            "unfinished": len([*place.store.unfinished()]),
            "left": sorted(path.name for path in folder.path.iterdir()),
        }


async def main(root: Path) -> dict[str, Any]:
    run._FULL_PAUSE_S = 0.02
    disk = Disk(root)
    found = {"emptied": await disk.end(2, is_emptied=True)}
    run._FULL_S = 0.1
    found["full later"] = await disk.end(2)
    found["full from the beginning"] = await disk.end(0)
    found["expired"] = await disk.end(1, expires_at=0)
    return found


if __name__ == "__main__":
    json.dump(asyncio.run(main(Path(sys.argv[1]))), sys.stdout)
