"""Locking of decoders: a process that runs the code of media decoders gives up all else that it could do.

A decoder reads hostile files with large libraries in C. `lock_in` makes sure that one that was taken over can do no
more than send a wrong answer. Landlock takes the file system, TCP and signals from it, a seccomp filter takes all
system calls that decoding does not need, and resource limits bound its memory and its processor time.
"""

from mindie_mm.lockdown.lock import Locks, lock_in, support
from mindie_mm.lockdown.resource_limits import limit_processor_time

__all__ = ["Locks", "limit_processor_time", "lock_in", "support"]
