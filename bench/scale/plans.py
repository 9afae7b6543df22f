"""Hit rates of routers that know a request's media from its body, or from its plan: `python -m bench.scale.plans`.

The ingress of Ray names media by their text in the body, and estimates their tokens from the number of bytes. A plan
(`/render`) names them by their content, and states their tokens. The model is that of `bench.scale.hit_rates`, with
images of several sizes. A share of the requests names its image in another form, such as by a URL.
"""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np

from bench.scale.hit_rates import Replicas, Router, Traffic
from mindie_mm.routing import Content, HeldContent

IMAGES = ((391, 312), (391, 600), (1305, 1055), (1305, 3000), (2745, 1500))
"""Images of 640x480, 1420x720 and 1275x1650 pixels: tokens of Qwen2-VL, and the estimate from base64 of usual sizes."""
URL_TOKENS = 256
"""Estimate for an image that is given by a URL."""
TEXT_TOKENS, CACHED_TOKENS = 300, 36 * 1305
MEDIA, EXPONENT, LOAD, SURPLUS_TOKENS = 100_000, 1.0, 0.7, 2048


def hit_rate(*, plans: bool, replicas: int, routers: int, other_forms: float, requests: int, warm_up: int) -> float:
    """Return the share of requests whose image is in the cache of the replica that gets them.

    Args:
        plans: Whether routers know the plans.
        replicas: Number of replicas.
        routers: Number of routers that do not know each other's requests.
        other_forms: Share of the requests that name their image in another form.
        requests: Number of requests that are measured.
        warm_up: Number of requests before them.

    """
    images = [random.Random(medium).choice(IMAGES) for medium in range(MEDIA)]
    mean = round(float(np.mean([num_tokens for num_tokens, _ in images])))
    cluster = Replicas(replicas, CACHED_TOKENS, LOAD, SURPLUS_TOKENS)
    chosen = [Router(cluster, spread=routers == 1) for _ in range(routers)]
    caches = [HeldContent(CACHED_TOKENS) for _ in range(replicas)]
    free_at, now, hits, draw = np.zeros(replicas), 0.0, 0, random.Random(0)
    for number, medium in enumerate(Traffic(MEDIA, EXPONENT, mean, TEXT_TOKENS).draw(warm_up + requests, seed=0)):
        now += draw.expovariate(LOAD * replicas / (mean + TEXT_TOKENS))
        num_tokens, estimate = images[medium]
        content = Content(medium.to_bytes(8), num_tokens)
        seen = content if plans else Content(content.key, estimate)
        if draw.random() < other_forms and not plans:
            seen = Content(b"url" + content.key, URL_TOKENS)
        queued = np.ceil(np.maximum(free_at - now, 0)).astype(np.int64)
        replica = draw.choice(chosen).choose(seen, queued)
        held = caches[replica].num_tokens([content])
        caches[replica].add([content])
        hits += bool(held) and number >= warm_up
        free_at[replica] = max(free_at[replica], now) + TEXT_TOKENS + num_tokens - held
    return hits / requests


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale.plans", description=__doc__)
    parser.add_argument("--requests", type=int, default=6000, help="requests that are measured, after as many others")
    given = parser.parse_args()
    print("| replicas | routers | other forms | from bodies | from plans |\n|---|---|---|---|---|")
    for replicas in (4, 10, 100):
        for routers in (1, 8):
            for other_forms in (0.0, 0.3):
                rates = [
                    hit_rate(
                        plans=plans,
                        replicas=replicas,
                        routers=routers,
                        other_forms=other_forms,
                        requests=given.requests,
                        warm_up=given.requests,
                    )
                    for plans in (False, True)
                ]
                shown = " | ".join(f"{rate:.1%}" for rate in rates)
                print(f"| {replicas} | {routers} | {other_forms:.0%} | {shown} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
