"""Run OpenVINO GenAI: python runner.py MODEL THREADS f32|int8.

This script runs in the virtual environment that `bench.peers.install` creates. Each line of its input is a job, a JSON
object with `pictures` (paths), `question`, `tokens` and `clients`. For each job, the script writes the duration of each
request and of all requests together, in seconds. For one client, the script uses VLMPipeline, and for several clients
ContinuousBatchingPipeline.
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
    if precision == "f32":
        settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    single = genai.VLMPipeline(model, "CPU", **settings)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    several = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = answer_one if job["clients"] == 1 else answer_several
        begun = time.perf_counter()
        each_s = answer(single if job["clients"] == 1 else several, job)
        print(json.dumps({"each_s": each_s, "total_s": time.perf_counter() - begun}), flush=True)


def read(path: str) -> ov.Tensor:
    """Return a picture as uint8 [1, height, width, 3]."""
    return ov.Tensor(np.asarray(Image.open(path).convert("RGB"))[None])


def config(tokens: int) -> genai.GenerationConfig:
    """Return settings for exactly `tokens` greedy tokens."""
    settings = genai.GenerationConfig()
    settings.max_new_tokens = tokens
    settings.ignore_eos = True
    settings.do_sample = False
    return settings


def answer_one(pipeline: genai.VLMPipeline, job: dict[str, Any]) -> list[float]:
    """Answer the requests one after another."""
    each_s = []
    for path in job["pictures"]:
        begun = time.perf_counter()
        pipeline.generate(job["question"], images=[read(path)], generation_config=config(job["tokens"]))
        each_s.append(time.perf_counter() - begun)
    return each_s


def answer_several(pipeline: genai.ContinuousBatchingPipeline, job: dict[str, Any]) -> list[float]:
    """Keep as many requests running as there are clients."""
    waiting = list(enumerate(job["pictures"]))
    running: dict[int, tuple[Any, float]] = {}
    each_s = []
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
                each_s.append(time.perf_counter() - begun)
                del running[number]
    return each_s


if __name__ == "__main__":
    main()
