"""Sandbox of media decoders: a decoder process gives up all rights that decoding does not need.

A decoder parses untrusted files with large C libraries. After `lock_in`, a compromised decoder can only answer wrongly,
read later items of its domain, and use time and memory up to its limits. Landlock denies access to the file system, TCP
connections and signals to other processes. A seccomp filter blocks all system calls that decoding does not need;
`allowed_calls.py` lists the allowed calls. Resource limits bound memory. The tokenizer process ends a decoder that
takes too much time (`mindie_mm.decode.decoders`).
"""

from mindie_mm.lockdown.lock import Locks, lock_in, support

__all__ = ["Locks", "lock_in", "support"]
