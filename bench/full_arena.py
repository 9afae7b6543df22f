"""Benchmark of requests during four long answers about images, with an arena that has room for only four images.

It measures the time in seconds of a text request alone, of a text request during the four answers, and of a request
with two further images during the four answers.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from bench.report import median, write
from tests.media_samples import photograph
from tools.arguments import parser
from tools.demo import data_url, image
from tools.serving import RunningService, running_service

SETTINGS = {"arena_bytes": 4 * 40960, "kv_cache_bytes": 256 * 2**20, "decoders": 2}
SIDE = 448
"""Side of an image in pixels. The embedded model downscales it, so that its block takes 40,960 bytes."""
NUM_ANSWERS, NUM_TEXTS = 4, 20


def ask(service: RunningService, *media: dict[str, Any], max_tokens: int = 1) -> tuple[int, float]:
    """Return the status of an answer and its time in seconds."""
    content = [*media, {"type": "text", "text": "What is in the image?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True}
    start = time.perf_counter()
    answer = httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
    return answer.status_code, time.perf_counter() - start


def measure(service: RunningService) -> dict[str, Any]:
    """Return all figures."""
    parts = [image(data_url(photograph(size=(SIDE, SIDE + 28 * n)))) for n in range(NUM_ANSWERS + 2)]
    ask(service, parts[0])
    idle = [ask(service)[1] for _ in range(NUM_TEXTS)]
    context = service.get("/v1/models")["data"][0]["max_model_len"]
    with ThreadPoolExecutor(NUM_ANSWERS + 2) as threads:
        long = [threads.submit(ask, service, part, max_tokens=context // 2) for part in parts[:NUM_ANSWERS]]
        time.sleep(0.1)
        further = [threads.submit(ask, service, part) for part in parts[NUM_ANSWERS:]]
        beside = []
        while len(beside) < NUM_TEXTS and not all(answer.done() for answer in long):
            beside.append(ask(service)[1])
        answered = [answer.result() for answer in further]
        still_running = sum(not answer.done() for answer in long)
    return {
        "text_idle_s": round(median(idle), 4),
        "text_beside_s": round(median(beside), 4),
        "ratio": round(median(beside) / median(idle), 2),
        "further_images": [(status, round(seconds, 3)) for status, seconds in answered],
        "long_answers_still_running_then": still_running,
        "long_answers_s": [round(answer.result()[1], 2) for answer in long],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {"spool": Path(folder) / "spool"}
        with running_service(settings, Path(folder) / "log") as service:
            figures = measure(service)
            service.stop()
    write("full_arena", figures)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
