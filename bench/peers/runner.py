"""Run OpenVINO GenAI: python runner.py MODEL THREADS f32|int8.

This script runs in the virtual environment that `bench.peers.install` creates. Each line of its input is a job, a JSON
object with `images` (paths), `question`, `tokens` and `clients`. For each job, the script writes the times of each
request and the duration of all requests together, in seconds. For one client, the script uses VLMPipeline, and for
several clients ContinuousBatchingPipeline. Only VLMPipeline reports the time of each token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image


def main() -> None:
    """Load the model and answer jobs until the input ends."""
    model, threads, precision = sys.argv[1:]
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(threads), "PERFORMANCE_HINT": "LATENCY"}
    if precision != "int8":
        settings |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    single = genai.VLMPipeline(model, "CPU", **settings)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    several = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = answer_one if job["clients"] == 1 else answer_several
        begun = time.perf_counter()
        answers = answer(single if job["clients"] == 1 else several, job)
        print(json.dumps({"answers": answers, "total_s": time.perf_counter() - begun}), flush=True)


def read(path: str) -> ov.Tensor:
    """Return an image as uint8 [1, height, width, 3]."""
    return ov.Tensor(np.asarray(Image.open(path).convert("RGB"))[None])


def config(tokens: int) -> genai.GenerationConfig:
    """Return settings for exactly `tokens` greedy tokens."""
    settings = genai.GenerationConfig()
    settings.max_new_tokens = tokens
    settings.ignore_eos = True
    settings.do_sample = False
    return settings


class TokenTimes(genai.StreamerBase):
    """A receiver of tokens that records the time of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def write(self, tokens: int | list[int]) -> genai.StreamingStatus:
        """Record the time of one or several tokens."""
        self.times_s += [time.perf_counter()] * (len(tokens) if isinstance(tokens, list) else 1)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing, because all tokens have been recorded."""


def answer_one(pipeline: genai.VLMPipeline, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer the requests one after another."""
    answers = []
    for path in job["images"]:
        times = TokenTimes()
        begun = time.perf_counter()
        pipeline.generate(job["question"], images=[read(path)], generation_config=config(job["tokens"]), streamer=times)
        answers.append({"begun": begun, "ended": time.perf_counter(), "token_s": times.times_s})
    return answers


def answer_several(pipeline: genai.ContinuousBatchingPipeline, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Keep as many requests running as there are clients."""
    waiting = list(enumerate(job["images"]))
    running: dict[int, tuple[Any, float]] = {}
    answers = []
    while waiting or running:
        while waiting and len(running) < job["clients"]:
            number, path = waiting.pop(0)
            begun = time.perf_counter()
            handle = pipeline.add_request(
                number, job["question"], images=[read(path)], generation_config=config(job["tokens"])
            )
            running[number] = (handle, begun)
        pipeline.step()
        for number, (handle, begun) in [*running.items()]:
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                answers.append({"begun": begun, "ended": time.perf_counter(), "token_s": []})
                del running[number]
    return answers


if __name__ == "__main__":
    main()
