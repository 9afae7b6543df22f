"""A soak test: rounds of mixed requests, and a measurement of the resources in use after each round."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.soak.clients import alike, ask, leave, leave_uploading, oversized, read_slowly
from tests.soak.mix import SETTINGS, Case, asking, chat, endless, right, wrong
from tests.soak.watch import Sample, sample
from tools.demo import image
from tools.serving import RunningService, running_service

SHARES = {"right": 66, "wrong": 12, "cancelled": 12, "cancelled while sending": 2, "oversized": 4, "slow": 3, "late": 1}
TIMEOUT_S = 300.0
KEPT = 20
"""Number of wrong answers that the report contains."""


@dataclass(slots=True)
class Report:
    """The results of a soak test."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Number of requests of each kind."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from the answer to the same request when no other request runs."""
    kills: int = 0
    """Number of decoder processes that were killed."""
    samples: list[Sample] = field(default_factory=list)
    exit_status: int | None = None

    @property
    def first(self) -> Sample:
        """The first measurement. Later measurements are compared with it."""
        return self.samples[0]

    def figures(self) -> dict[str, Any]:
        """Return the figures that are written to the report, and from which `findings` finds faults."""
        last = self.samples[-1]
        return {
            "requests": dict(self.kinds),
            "wrong_answers": len(self.wrong),
            "wrong": self.wrong[:KEPT],
            "leaked_blocks": max(one.blocks for one in self.samples),
            "leaked_request_directories": max(one.spooled for one in self.samples),
            "descriptors_gained": last.descriptors - self.first.descriptors,
            "threads_gained": last.threads - self.first.threads,
            "memory_growth": round(last.memory_bytes / self.first.memory_bytes - 1, 4),
            "kills_of_decoders": self.kills,
            "measured_from": self.first.requests,
            "exit_status": self.exit_status,
            "samples": [asdict(one) for one in self.samples],
        }


def soak(
    requests: int,
    warm: int,
    every: int,
    clients: int,
    images: int,
    seed: int = 1,
    say: Callable[[str], object] = print,
    *,
    arena_bytes: int | None = None,
    kill_every_s: float = 0.0,
    seconds: float = math.inf,
) -> Report:
    """Send mixed requests to a service on two cores, and measure the resources in use after each round.

    Args:
        requests: Number of requests.
        warm: Number of requests before the first measurement that counts.
        every: Number of requests per round.
        clients: Number of clients.
        images: Number of different images.
        seed: Seed of the random choices.
        say: Function that prints a line about each round.
        arena_bytes: Size of the arena. The default is the size in `SETTINGS`.
        kill_every_s: Time in seconds between kills of decoder processes. 0 disables kills.
        seconds: Time in seconds after which no further round begins.
    """
    with tempfile.TemporaryDirectory(prefix="mindie_mm-soak-") as name:
        folder = Path(name)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[:2])
        media = folder / "media"
        media.mkdir()
        # The limit is below the number of clients, so the service is often full.
        own: dict[str, object] = {
            "spool": folder / "spool",
            "allowed_media_dir": media,
            "max_concurrent_requests": clients - 2,
        }
        if arena_bytes is not None:
            own["arena_bytes"] = arena_bytes
        report = Report()
        try:
            with running_service(SETTINGS | own, folder / "log") as service:
                cases = [*right(media, images), *wrong(media)]
                running = _Soak(service, cases, report, random.Random(seed), say)
                asyncio.run(running.run(requests, warm, every, clients, kill_every_s, seconds))
                report.exit_status = service.stop()
        finally:
            os.sched_setaffinity(0, cores)
        return report


class _Soak:
    """A soak test of one running service."""

    def __init__(
        self,
        service: RunningService,
        cases: list[Case],
        report: Report,
        draw: random.Random,
        say: Callable[[str], object],
    ) -> None:
        self._service = service
        self._long_answers: list[tuple[Case, Any]] = []
        self._answers: dict[str, list[tuple[Case, Any]]] = {"right": [], "wrong": []}
        self._cases = cases
        self._report = report
        self._draw = draw
        self._say = say
        first = next(case for case in cases if case.name == "image")
        raw = first.body["messages"][0]["content"][0]["image_url"]["url"]
        self._endless = [endless(raw, stream=stream) for stream in (True, False)]
        self._late = Case(
            "late",
            "/infer",
            {"inputs": "x", "parameters": {"max_new_tokens": 1500, "temperature": 20.0, "timeout": 1}},
        )
        # The answer does not fit into the buffers of the sockets.
        self._long = chat("long", asking(image(raw)), max_tokens=150, ignore_eos=True, logprobs=True, top_logprobs=20)
        self._http: aiohttp.ClientSession

    async def run(
        self, requests: int, warm: int, every: int, clients: int, kill_every_s: float, seconds: float
    ) -> None:
        began = time.monotonic()
        descriptors: int | None = None
        done = 0
        async with self._session() as self._http:
            await self._ask_alone()
        self._say(f"{len(self._cases)} requests were answered alone in {time.monotonic() - began:.0f} s")
        root = psutil.Process(self._service.process.pid)
        while done < requests and time.monotonic() - began < seconds:
            count = min(every, requests - done)
            async with self._session() as self._http:
                numbers = iter(range(count))
                killing = asyncio.create_task(self._kill_decoders(root, kill_every_s))
                await asyncio.gather(*(self._client(numbers) for _ in range(clients)))
                killing.cancel()
            done += count
            found = await asyncio.to_thread(
                sample, self._service, self._service.log.parent / "spool", done, began, descriptors
            )
            if done >= min(warm, requests):
                self._report.samples.append(found)
                descriptors = self._report.first.descriptors
            assert root.is_running()
            self._say(
                f"{done} requests, {found.at_s:.0f} s: {len(self._report.wrong)} wrong, {found.blocks} blocks, "
                f"{found.descriptors} descriptors, {found.threads} threads, {found.memory_bytes / 1e6:.1f} MB "
                + str({role: round(size / 1e6, 1) for role, size in found.processes.items()})
            )

    async def _kill_decoders(self, root: psutil.Process, every_s: float) -> None:
        """Kill a random decoder process every `every_s` seconds."""
        while every_s:
            await asyncio.sleep(every_s)
            with contextlib.suppress(psutil.NoSuchProcess):
                children = root.children(recursive=True)
                nurseries = {one.pid for one in children if "mindie_mm.decode.nursery" in one.cmdline()}
                decoders = [one for one in children if one.ppid() in nurseries]
                self._draw.choice(decoders).kill()
                self._report.kills += 1

    def _session(self) -> aiohttp.ClientSession:
        """Return an HTTP session for one round. Its connections are closed at the end of the round."""
        return aiohttp.ClientSession(
            self._service.url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def _ask_alone(self) -> None:
        """Store the answer to each request when no other request runs.

        Fail if a status differs from the expected one.
        """
        for case in self._cases:
            status, answer = await ask(self._http, case)
            assert status == case.status, (case.name, status, answer)
            assert case.status != 200 or "error" not in answer, (case.name, answer)
            self._answers["right" if status == 200 else "wrong"].append((case, answer))
        for stream in (True, False):
            case = Case(self._long.name, self._long.path, self._long.body | {"stream": stream})
            self._long_answers.append((case, (await ask(self._http, case))[1]))

    async def _client(self, numbers: Any) -> None:
        for _ in numbers:
            kind = self._draw.choices(list(SHARES), list(SHARES.values()))[0]
            self._report.kinds[kind] += 1
            try:
                if (fault := await self._one(kind)) is not None:
                    self._report.wrong.append(f"{kind}: {fault}")
            except Exception as error:  # noqa: BLE001 - an exception of any type is a finding
                self._report.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    async def _one(self, kind: str) -> str | None:
        """Send a request of the given kind. Return what is wrong with the answer, or None."""
        draw, url = self._draw, self._service.url
        match kind:
            case "right" | "wrong":
                case, expected = draw.choice(self._answers[kind])
                status, answer = await ask(self._http, case)
                return _difference(case, status, answer, expected)
            case "slow":
                case, expected = draw.choice([*self._long_answers, draw.choice(self._answers["right"])])
                async with asyncio.timeout(TIMEOUT_S):
                    status, answer = await read_slowly(url, case, draw)
                return _difference(case, status, answer, expected)
            case "cancelled":
                choices = [*self._endless, draw.choice(self._answers["right"])[0]]
                await leave(self._http, draw.choice(choices), draw)
            case "cancelled while sending":
                await leave_uploading(url, draw.choice(self._endless), draw)
            case "oversized":
                async with asyncio.timeout(TIMEOUT_S):
                    status = await oversized(url, draw)
                return None if status == 413 else f"status {status}"
            case "late":
                status, answer = await ask(self._http, self._late)
                if not (status == 504 or (status == 200 and answer["generated_text"] is not None)):
                    return f"status {status}: {answer}"
        return None


def _difference(case: Case, status: int, answer: Any, expected: Any) -> str | None:
    if status == case.status and alike(answer, expected):
        return None
    return f"{case.name}: status {status}, {str(answer)[:600]}, not {str(expected)[:600]}"
