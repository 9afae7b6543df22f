"""Sandbox of media decoders: a decoder process gives up all rights that decoding does not need.

A decoder parses untrusted files with large C libraries. After `lock_in`, a compromised decoder can do no more than send
a wrong answer. Landlock denies access to the file system, TCP connections and signals to other processes. A seccomp
filter blocks all system calls that decoding does not need; `allowed_calls.py` lists the allowed calls. Resource limits
bound memory and CPU time.
"""

from mindie_mm.lockdown.lock import Locks, lock_in, support
from mindie_mm.lockdown.resource_limits import limit_processor_time

__all__ = ["Locks", "limit_processor_time", "lock_in", "support"]
