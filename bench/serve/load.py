"""A load on an OpenAI-compatible server. Each client sends its next request as soon as it has an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import aiohttp
import numpy as np

from bench.serve.images import Size, data_url

TIMEOUT_S = 900.0
QUESTION = "What is in the image?"


@dataclass(frozen=True, slots=True)
class Server:
    """The server that receives the requests."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    """The number and content of the requests."""

    size: Size
    concurrent: int
    requests: int
    repeated: float = 0.0
    """Share of the requests whose image another request also has, in [0, 1)."""
    max_tokens: int = 16

    def images(self, seeds: Iterator[int]) -> list[str]:
        """Return a data: URL per request. Each distinct image has its own seed, and the images repeat in a cycle."""
        different = [
            data_url(next(seeds), self.size) for _ in range(max(1, round(self.requests * (1 - self.repeated))))
        ]
        return [different[index % len(different)] for index in range(self.requests)]


@dataclass(slots=True)
class Answer:
    """The result of one request. Times are from `time.perf_counter`."""

    begun: float
    """Time at which the request was sent."""
    ended: float = 0.0
    shown: list[tuple[float, int]] = field(default_factory=list)
    """Time of each piece of text, and the number of tokens up to it."""
    drawn: list[tuple[float, int]] = field(default_factory=list)
    """Time of each event with new tokens, and the number of tokens up to it."""
    fault: str | None = None
    """Description of the answer's fault, or None."""
    timings: dict[str, float] | None = None
    """The server's own `timings`, if it reports them."""

    def tokens_per_s(self) -> float:
        """Return the rate from the first event with tokens to the last one. An event may have several tokens.

        llama-server sends no events for tokens without text, which random weights generate, but it states its rate.

        Raise RuntimeError if the answer has tokens in fewer than two events.
        """
        if self.timings and "predicted_per_second" in self.timings:
            return self.timings["predicted_per_second"]
        if len(self.drawn) < 2:
            raise RuntimeError(
                f"{len(self.drawn)} events of the answer state their tokens; at least 2 are needed. Ask for more tokens"
            )
        (first_s, first), (last_s, last) = self.drawn[0], self.drawn[-1]
        return (last - first) / (last_s - first_s)


@dataclass(slots=True)
class Outcome:
    """The answers to the requests of a load, and their total duration."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.answers + other.answers, self.seconds + other.seconds)

    def figures(self) -> dict[str, Any]:
        """Return requests per second, latencies in milliseconds, and errors. Failed requests count only as errors."""
        whole = [answer for answer in self.answers if answer.fault is None]
        # Random weights can generate tokens without text or with a part of a character. Their times are unknown.
        first = [answer.shown[0][0] - answer.begun for answer in whole if answer.shown and answer.shown[0][1] == 1]
        between = [
            (later - earlier) / (tokens - before)
            for answer in whole
            for (earlier, before), (later, tokens) in pairwise(answer.shown)
            if tokens > before
        ]
        faults = [answer.fault for answer in self.answers if answer.fault is not None]
        return {
            "requests": len(self.answers),
            "requests_per_s": round(len(whole) / self.seconds, 3),
            "ttft_ms_p50": _ms(first, 50),
            "ttft_ms_p99": _ms(first, 99),
            "inter_token_ms_p50": _ms(between, 50),
            "inter_token_ms_p99": _ms(between, 99),
            "e2e_ms_p50": _ms([answer.ended - answer.begun for answer in whole], 50),
            "errors": len(faults),
            **({"first_error": faults[0]} if faults else {}),
        }


def _ms(seconds: Sequence[float], percentile: float) -> float | None:
    return round(float(np.percentile(seconds, percentile)) * 1000, 2) if seconds else None


def seeds() -> Iterator[int]:
    """Return seeds that no earlier run has used, because a server may cache images."""
    return count(time.time_ns() // 1_000_000)


def session() -> aiohttp.ClientSession:
    """Return a session for any number of clients."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
    )


async def drive(http: aiohttp.ClientSession, server: Server, load: Load, images: Sequence[str]) -> Outcome:
    """Send the requests of the load to the server. `images` are from `Load.images`."""
    outcome = Outcome()
    waiting = iter(images)

    async def client() -> None:
        for image in waiting:
            outcome.answers.append(await ask(http, server, image, load.max_tokens))

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.concurrent)))
    outcome.seconds = time.perf_counter() - begun
    return outcome


async def ask(
    http: aiohttp.ClientSession, server: Server, image: str, max_tokens: int, *, timings: bool = False
) -> Answer:
    """Send a streaming request for exactly `max_tokens` tokens. A failure is recorded in the answer."""
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"timings": True} if timings else {}),
    }
    data = json.dumps(body).encode()
    answer = Answer(time.perf_counter())
    tokens = 0
    reason = None
    done = False
    try:
        async with http.post(
            f"{server.url}/v1/chat/completions", data=data, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                answer.fault = f"status {response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                answer.timings = event.get("timings", answer.timings)
                if (usage := event.get("usage")) and usage["completion_tokens"] > tokens:
                    tokens = usage["completion_tokens"]
                    answer.drawn.append((now, tokens))
                for choice in event.get("choices", ()):
                    if choice["delta"].get("content"):
                        answer.shown.append((now, tokens))
                    reason = choice.get("finish_reason") or reason
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
        return answer
    answer.ended = time.perf_counter()
    if not (done and reason == "length" and tokens == max_tokens):
        answer.fault = f"[DONE] {done}, finish_reason {reason}, {tokens} tokens"
    return answer
