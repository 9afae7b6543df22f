"""Checks that a gRPC server, as of a Ray head node, answers at an address."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

TIMEOUT_S = 3.0
"""Time limit in seconds to resolve a name, and to get an answer from each of its addresses."""
TOTAL_S = 6.0
"""Time limit in seconds for all addresses of a name together."""
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""An empty SETTINGS frame of HTTP/2 (RFC 9113, section 6.5)."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""First bytes of an HTTP/2 connection from a client (RFC 9113, section 3.4)."""
_FRAME_TYPE = 3
"""Index of the type in the header of a frame."""


def require_grpc(host: str, port: int, *, tls: bool = False) -> None:
    """Raise ConnectionError unless a gRPC server answers at one of the addresses of `host`.

    Ray itself would wait longer for an address without a cluster, and can only be limited before it is imported.

    Args:
        host: Name or IP address, without brackets.
        port: TCP port.
        tls: Whether the server expects TLS. The connection is then opened, but no answer is awaited.

    Raises:
        ConnectionError: No address answers as a gRPC server. The message lists the addresses with their reasons.

    """
    stop = time.monotonic() + TOTAL_S
    tried = []
    for family, address in _resolved(host, port):
        if (left_s := min(TIMEOUT_S, stop - time.monotonic())) <= 0:
            break
        if (reason := _refusal(family, address, left_s, tls)) is None:
            return
        shown = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        tried.append(f"{shown}:{address[1]} {reason}")
    raise ConnectionError(f"Failed to connect: {', '.join(tried)}")


def _resolved(host: str, port: int) -> list[tuple[int, Any]]:
    """Return the family and the socket address of each address of `host`."""
    found: queue.SimpleQueue[list[tuple[int, Any]] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.put([(family, address) for family, _, _, _, address in infos])
        except (OSError, UnicodeError) as error:  # UnicodeError: no host name
            found.put(OSError(error.strerror if isinstance(error, OSError) else "not a host name"))

    # getaddrinfo has no time limit. The end of the process does not wait for a daemon thread.
    threading.Thread(target=resolve, daemon=True).start()
    try:
        answer = found.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise ConnectionError(f"Failed to connect: {host} was not resolved within {TIMEOUT_S:g} s") from None
    if isinstance(answer, OSError):
        raise ConnectionError(f"Failed to connect: {host} cannot be resolved ({answer})") from answer
    return answer


def _refusal(family: int, address: Any, timeout_s: float, tls: bool) -> str | None:
    """Return why no gRPC server answers at `address`, or None if one answers."""
    stop = time.monotonic() + timeout_s
    received = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address)
            if tls:
                return None
            sock.sendall(_PREFACE)
            while len(received) < len(_SETTINGS):
                sock.settimeout(max(stop - time.monotonic(), 0.001))
                if not (part := sock.recv(len(_SETTINGS) - len(received))):
                    return "closed the connection" if not received else "is not a gRPC server"
                received += part
    except TimeoutError:
        return f"did not answer within {timeout_s:.2g} s"
    except OSError as error:
        return f"failed ({error.strerror or error})"
    return None if received[_FRAME_TYPE] == _SETTINGS[_FRAME_TYPE] else "is not a gRPC server"
