"""`python -m tests.soak.render`: a soak test of `mindie-mm render` with hostile files and headers, and leaving clients.

Clients send chats at the same time. Between rounds of some seconds, no request runs, and the memory and the descriptors
of all processes are measured. The plans that came before are limited to a small size, so that they are complete soon.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from PIL import Image

from tests.attacks import images
from tests.soak.clients import leave, leave_uploading
from tests.soak.mix import Case
from tests.soak.watch import Sample, sample
from tools.serving import RunningService, running_service

ROUTE = "/v1/chat/completions/render"
MiB = 2**20
SETTINGS: dict[str, object] = {
    "decoders": 1,
    "max_model_len": 4096,
    "max_item_bytes": 4 * MiB,
    "max_request_bytes": 8 * MiB,
    "plan_cache_bytes": MiB,
    "reclaim_interval_s": 5.0,
    "max_decode_s": 2.0,
}
SHARES = {"right": 30, "new": 20, "hostile": 15, "truncated": 10, "headers": 5, "leaving": 15, "leaving early": 5}
"""Kinds of requests by frequency."""
HOSTILE = (images.BOMBS, images.BROKEN, images.INFLATED, images.OTHER_FORMATS)
WARM_SHARE = 1 / 3
"""Share of the time before the first measurement that counts."""
GROWTH = 0.05
"""Largest accepted growth of memory after that, as a fraction."""
DESCRIPTORS = 16
"""Largest accepted growth of the number of descriptors. A decoder that is being replaced has fewer than these."""
MAX_HOSTILE_BYTES = MiB
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Soak:
    """What a soak test found."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What is left in /dev/shm and in the spool after the end."""

    @property
    def counted(self) -> list[Sample]:
        """Measurements after the warm-up."""
        end_s = self.samples[-1].at_s
        return [one for one in self.samples if one.at_s >= end_s * WARM_SHARE]

    @property
    def growth(self) -> float:
        """Growth of memory after the warm-up, as a fraction."""
        first, last = self._ends([one.memory_bytes for one in self.counted])
        return last / first - 1

    @property
    def descriptors_gained(self) -> int:
        """Growth of the number of open descriptors after the warm-up."""
        first, last = self._ends([one.descriptors for one in self.counted])
        return last - first

    @staticmethod
    def _ends(found: Sequence[int]) -> tuple[int, int]:
        """Return the least value of the first and of the last third, because a connection may still be closing."""
        third = max(1, len(found) // 3)
        return min(found[:third]), min(found[-third:])

    @property
    def findings(self) -> dict[str, Any]:
        """Faults by kind."""
        found = {
            "wrong answers": self.wrong[:10],
            "left behind": self.left,
            "memory growth": self.growth if self.growth > GROWTH else 0,
            "request directories": max(one.spooled for one in self.counted),
            "descriptors gained": self.descriptors_gained if self.descriptors_gained > DESCRIPTORS else 0,
        }
        return {name: one for name, one in found.items() if one}


def chat(data: bytes) -> Case:
    """Return a request to render a chat about a file."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return Case("chat", ROUTE, {"mm_payload": "none", "messages": [{"role": "user", "content": content}]})


def image(seed: int) -> bytes:
    """Return a JPEG or PNG file of a size that depends on `seed`."""
    draw, file = random.Random(seed), io.BytesIO()
    size = draw.randrange(32, 320), draw.randrange(32, 320)
    Image.effect_noise(size, 40).convert("RGB").save(file, ("JPEG", "PNG")[seed % 2])
    return file.getvalue()


def renewed(data: bytes, number: int) -> bytes:
    """Return the file of an image with another content, but the same size."""
    return data + b"%d" % number


class Clients:
    """Clients that send requests of all kinds."""

    def __init__(self, url: str, http: aiohttp.ClientSession, report: Soak, seed: int) -> None:
        self._url, self._http, self._report = url, http, report
        self._draw = random.Random(seed)
        self._number = 0
        self._right = [image(seed) for seed in range(24)]
        self._hostile = [data for make in HOSTILE for one in make.values() if len(data := one()) < MAX_HOSTILE_BYTES]
        self._expected: dict[bytes, tuple[int, Any]] = {}

    async def learn(self) -> None:
        """Record the answer to each file before the load."""
        for data in (*self._right, *self._hostile):
            self._expected[data] = await self._ask(chat(data))
        assert all(self._expected[data][0] == 200 for data in self._right)
        assert Counter(self._expected[data][0] for data in self._hostile)[400] > len(self._hostile) / 2

    async def until(self, end_s: float) -> None:
        """Send requests until the monotonic time `end_s`."""
        while time.monotonic() < end_s:
            kind = self._draw.choices([*SHARES], [*SHARES.values()])[0]
            self._report.requests[kind] += 1
            self._number += 1
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    fault = await self._one(kind, self._number)
            except Exception as error:  # noqa: BLE001 - an exception of any type is a finding
                fault = f"{type(error).__name__}: {error}"
            if fault:
                self._report.wrong.append(f"{kind}: {fault}")

    async def _one(self, kind: str, number: int) -> str:
        """Send one request. Return what is wrong with the answer, or an empty text."""
        draw = self._draw
        known = draw.choice(self._right)
        match kind:
            case "right" | "hostile":
                data = known if kind == "right" else draw.choice(self._hostile)
                answer = await self._ask(chat(data))
                return "" if answer == self._expected[data] else f"{answer}, not {self._expected[data]}"[:600]
            case "new":
                status, (ids, features) = await self._ask(chat(renewed(known, number)))
                expected_ids, expected = self._expected[known][1]
                is_right = ids == expected_ids and features["mm_hashes"] != expected["mm_hashes"]
                return "" if is_right and features["mm_placeholders"] == expected["mm_placeholders"] else f"{status}"
            case "truncated":
                status, _ = await self._ask(chat(known[: draw.randrange(1, len(known))]))
                return "" if status in (200, 400) else f"status {status}"
            case "headers":
                return await self._send_headers(draw.choice(HEADS))
            case "leaving":
                await leave(self._http, chat(renewed(known, number)), draw)
            case "leaving early":
                await leave_uploading(self._url, chat(known), draw)
        return ""

    async def _ask(self, case: Case) -> tuple[int, Any]:
        """Return the status, and the ids and features or the message of the error."""
        while True:
            async with self._http.post(case.path, json=case.body) as response:
                answer = await response.json()
                self._report.statuses[response.status] += 1
                if response.status == 429:
                    await asyncio.sleep(0.05)
                    continue
                if response.status != 200:
                    return response.status, answer["error"]["message"]
                return 200, (answer["token_ids"], answer["features"])

    async def _send_headers(self, make: Callable[[], bytes]) -> str:
        """Send a malformed or oversized head. It must be refused, or the connection be closed."""
        parts = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(make())
                await writer.drain()
                line = await reader.readline()
                return "" if not line or line.split()[1][:1] == b"4" else line.decode()
            return ""
        finally:
            writer.close()


def _head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST " + ROUTE.encode() + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""])


HEADS: tuple[Callable[[], bytes], ...] = (
    lambda: _head(b"X-Long: " + b"a" * 2**18),
    lambda: _head(*(b"X-%d: a" % number for number in range(20_000))),
    lambda: _head(b"Content-Length: -1"),
    lambda: _head(b"Content-Length: 99999999999999999999"),
    lambda: _head(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"zz\r\n",
    lambda: _head(b"Content-Type: application/json", b"Content-Encoding: gzip", b"Content-Length: 4") + b"\x1f\x8b\0\0",
    lambda: _head(b"Name\0: value"),
    lambda: b"\x16\x03\x01" + bytes(300) + b"\r\n\r\n",
)
"""Heads of requests that no service may accept."""


async def _rounds(service: RunningService, spool: Path, report: Soak, seconds: float, clients: int, seed: int) -> None:
    began = time.monotonic()
    every_s = max(5.0, seconds / 12)
    async with aiohttp.ClientSession(service.url, connector=aiohttp.TCPConnector(limit=0)) as http:
        sending = Clients(service.url, http, report, seed)
        await sending.learn()
        while (now := time.monotonic()) < began + seconds:
            await asyncio.gather(*(sending.until(now + every_s) for _ in range(clients)))
            num_requests = report.requests.total()
            found = await asyncio.to_thread(sample, service, spool, num_requests, began, None)
            report.samples.append(found)
            print(f"{found.at_s:.0f} s: {num_requests} requests, {found.memory_bytes / MiB:.1f} MiB, "
                  f"{found.descriptors} descriptors", flush=True)  # fmt: skip


def soak(seconds: float, clients: int = 64, workers: int = 1, seed: int = 1) -> Soak:
    """Send requests for `seconds`, and return what was found."""
    report, before = Soak(), {*Path("/dev/shm").iterdir()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = SETTINGS | {"workers": workers, "spool": folder / "spool"}
        with running_service(settings, folder / "log", command="render") as service:
            asyncio.run(_rounds(service, folder / "spool", report, seconds, clients, seed))
            if status := service.stop():
                report.wrong.append(f"exit status {status}")
        lines = (folder / "log").read_text().splitlines()
        report.wrong += ["\n".join(lines[index : index + 20]) for index, line in enumerate(lines) if " ERROR " in line]
        report.left = [str(path) for path in ({*Path("/dev/shm").iterdir()} - before)]
        report.left += [path.name for path in (folder / "spool").iterdir()]
    return report


def main() -> int:
    """Run the command. Return the number of kinds of faults that were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.render", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    report = soak(**vars(parser.parse_args()))
    shown = {"requests": report.requests, "statuses": report.statuses, "growth": f"{report.growth:.1%}"}
    print(json.dumps({**shown, "found": report.findings}, indent=1))
    return len(report.findings)


if __name__ == "__main__":
    sys.exit(main())
