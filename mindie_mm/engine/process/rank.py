"""One rank of an engine, started by `launcher.py`. Its channel to the launcher only shows when the launcher ends."""

from __future__ import annotations

from mindie_mm import logs
from mindie_mm.processes import late_modules
from mindie_mm.processes.ipc import ChildChannel, Lifeline


def main(
    _: ChildChannel,
    lifeline: Lifeline,
    number: str,
    num_ranks: str,
    device: str,
    first_device: str,
    parent: str,
    store: str,
) -> None:
    """Run the engine until the launcher ends. The launcher ends if its parent closes the channel or a rank dies.

    Args:
        lifeline: Object that ends this process when the launcher ends.
        number: Rank of this process.
        num_ranks: Number of ranks.
        device: Device that the engine runs on.
        first_device: Index of the device of rank 0.
        parent: Inherited descriptor of the channel to the launcher's parent.
        store: Inherited descriptor of the file through which the ranks find each other.

    """
    logs.configure(logs.current(), f"engine.{number}")
    late_modules.import_at_once()
    from mindie_mm.engine.process import engine_process
    from mindie_mm.engine.ranks import join

    logs.adopt()
    with ChildChannel(int(parent)) as channel:
        ranks = join(int(number), int(num_ranks), f"/proc/self/fd/{store}", device, int(first_device))
        engine_process.main(channel, lifeline, ranks)
