"""A model of hosts and clusters that are larger than one can measure here, fed by measured stage times.

    python -m bench.scale.stages                                       # measure the stage times first
    python -m bench.scale.model                                        # the three tables
    python -m bench.scale.model --parts senders                        # one part; the results keep the others
    python -m bench.scale.model --validate bench/results/replicas.json # only compare with the points of a file
    python -m bench.scale.model --quick                                # at most 100 replicas

`bench.scale.validation.compare` describes the file for --validate. The status is 1 if a prediction differs by more than
20%.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.scale import hit_rates, limits, validation
from bench.scale.hit_rates import POLICIES, Replicas, Traffic
from bench.scale.stage_times import RESULTS, StageTimes, full_size

ACCELERATOR_MS = (2, 5, 10, 20, 50, 100)
"""Assumed times that an accelerator needs per image: tower, prefill and the image's share of the decode steps."""
REPLICAS = (10, 100, 1000)
EXPONENTS = (0.8, 1.0)
IMAGE_TOKENS = 2703
"""Tokens of an image of 1920x1080 pixels, as Qwen2-VL counts them."""
TEXT_TOKENS = 100
CACHE_TOKENS = 256 * 2**20 // (3584 * 2)
"""Features of Qwen2-VL-7B in bfloat16 that the encoder cache holds by default."""
MEDIA = 13_000
"""Number of different media: as many as the caches of 1,000 replicas hold."""
LOAD = 0.7
SURPLUS_TOKENS = 2048
INGRESS_REQUEST_S = 0.007
INGRESS_TOKEN_S = 0.001
ENGINES = (1, 2, 4, 8, 16)
STREAM = limits.Stream()
PARTS = "decoders,senders,hit_rates"
ASSUMPTIONS = {
    "image_tokens": IMAGE_TOKENS,
    "text_tokens": TEXT_TOKENS,
    "cache_tokens": CACHE_TOKENS,
    "media": MEDIA,
    "load": LOAD,
    "surplus_tokens": SURPLUS_TOKENS,
    "ingress_request_s": INGRESS_REQUEST_S,
    "ingress_token_s": INGRESS_TOKEN_S,
    "stream": asdict(STREAM),
}


def decoder_table() -> list[dict[str, Any]]:
    """Return, by size of the images and the accelerator's time per image, how many decoders keep it busy."""
    rows = []
    for size, times in full_size().items():
        for accelerator_ms in ACCELERATOR_MS:
            found = limits.decoders(times, accelerator_ms / 1000)
            rows.append({"size": size, "accelerator_ms": accelerator_ms, **asdict(found)})
    return rows


def hit_rate_table(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return hit rates by number of replicas, exponent of the Zipf distribution, and policy."""
    rows = []
    for number in numbers:
        replicas = Replicas(number, CACHE_TOKENS, LOAD, SURPLUS_TOKENS)
        held = CACHE_TOKENS // IMAGE_TOKENS
        warm_up, requests = max(3 * held * number, 5_000), max(20 * number, 10_000)
        for exponent in EXPONENTS:
            traffic = Traffic(MEDIA, exponent, IMAGE_TOKENS, TEXT_TOKENS)
            for policy in POLICIES:
                rates = hit_rates.simulate(policy, replicas, traffic, requests, warm_up)
                point = {"replicas": number, "exponent": exponent, "policy": policy, "warm_up": warm_up}
                rows.append({**point, "requests": requests, **asdict(rates)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def sender_table(times: StageTimes) -> list[dict[str, Any]]:
    """Return, by number of engines, the lag of a service's tokens, and the number of ingress replicas needed."""
    image = full_size()["1420x720"]
    service = limits.Sender(image.service_s, times.tokens.service_message_s, times.tokens.service_token_s)
    ingress = limits.Sender(INGRESS_REQUEST_S, 0.0, INGRESS_TOKEN_S)
    return [
        {
            "engines": engines,
            "service_lag_s": lag if math.isfinite(lag := limits.lag_s(service, engines, 1, STREAM)) else None,
            "ingress_replicas": limits.processes_needed(ingress, engines, STREAM),
        }
        for engines in ENGINES
    ]


def sender_limits(times: StageTimes) -> dict[str, float]:
    """Return the rates at which a process has no time left."""
    image = full_size()["1420x720"]
    service = limits.Sender(image.service_s, times.tokens.service_message_s, times.tokens.service_token_s)
    return {
        "service_tokens_per_s": limits.tokens_per_s(service, STREAM),
        "ingress_tokens_per_s": limits.tokens_per_s(limits.Sender(INGRESS_REQUEST_S, 0.0, INGRESS_TOKEN_S), STREAM),
        **{f"{name}_requests_per_s": rate for name, rate in limits.requests_per_s(full_size(), "1420x720").items()},
    }


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures of comparisons as a table in Markdown."""
    lines = [
        "| checkpoint | image | engines | clients | requests/s | predicted | predicted / measured | other programs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [str(row[name]) for name in ("checkpoint", "size", "engines", "clients")]
        cells += [f"{row[name]:.1f}" for name in ("requests_per_s", "predicted_requests_per_s")]
        cells += [f"{row['predicted_over_measured']:.2f}", f"{row['others']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(figures: dict[str, Any]) -> str:
    """Return Markdown tables of the parts in `figures`."""
    found = [show(figures) for part, show in SHOWN.items() if figures.get(part)]
    return "\n\n".join(found) + "\n"


def _shown_decoders(figures: dict[str, Any]) -> str:
    rows = figures["decoders"]
    lines = ["Decoders that keep one accelerator busy for 95% of the time, by the accelerator's time per image.", ""]
    lines += ["| image | " + " | ".join(f"{ms} ms" for ms in ACCELERATOR_MS) + " |"]
    lines += ["| --- " * (1 + len(ACCELERATOR_MS)) + "|"]
    for size in dict.fromkeys(row["size"] for row in rows):
        cells = [str(row["number"] or row["limit"]) for row in rows if row["size"] == size]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown_hit_rates(figures: dict[str, Any]) -> str:
    rates = {(row["exponent"], row["replicas"], row["policy"]): row["hit_rate"] for row in figures["hit_rates"]}
    columns = sorted({(exponent, number) for exponent, number, _ in rates})
    lines = ["Share of requests whose image was in the cache of their replica.", ""]
    lines += ["| routing | " + " | ".join(f"{number} replicas, Zipf {exponent}" for exponent, number in columns) + " |"]
    lines += ["| --- " * (len(columns) + 1) + "|"]
    for policy in POLICIES:
        cells = [f"{rates[(*column, policy)]:.0%}" for column in columns]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown_senders(figures: dict[str, Any]) -> str:
    lines = [f"Engines with {STREAM.batch} streams of {STREAM.tokens_per_s:g} tokens/s each.", ""]
    lines += ["| engines | lag of one service's tokens, p99 | ingress replicas |", "| --- | --- | --- |"]
    for row in figures["senders"]:
        lag = "grows" if row["service_lag_s"] is None else f"{1000 * row['service_lag_s']:.0f} ms"
        lines.append(f"| {row['engines']} | {lag} | {row['ingress_replicas'] or 'more than 64'} |")
    limit = figures["limits"]
    return "\n".join([*lines, "", *(f"- {name.replace('_', ' ')}: {round(rate):,}" for name, rate in limit.items())])


SHOWN = {
    "decoders": _shown_decoders,
    "hit_rates": _shown_hit_rates,
    "senders": _shown_senders,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write bench/results/scale_model.json and .md, or compare with a file, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--validate", type=Path, metavar="FILE", help="only compare with the points of this file")
    parser.add_argument("--parts", default=PARTS, help="comma-separated parts. Default: all")
    parser.add_argument("--quick", action="store_true", help="at most 100 replicas")
    options = parser.parse_args(arguments)
    if options.validate:
        comparisons = validation.compare(options.validate)
        print(comparison_table([one.figures() for one in comparisons]))
        return int(not comparisons or not all(one.holds for one in comparisons))
    from bench.report import write

    path = RESULTS / "scale_model.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    figures.pop("machine", None)
    figures["assumptions"] = ASSUMPTIONS
    for part in options.parts.split(","):
        match part:
            case "decoders":
                figures[part] = decoder_table()
            case "senders":
                times = StageTimes.read("tiny")
                figures |= {part: sender_table(times), "limits": sender_limits(times)}
            case "hit_rates":
                figures[part] = hit_rate_table([one for one in REPLICAS if not options.quick or one <= 100])
            case _:
                parser.error(f"unknown part {part!r}: use {PARTS}")
    write("scale_model", figures)
    (RESULTS / "scale_model.md").write_text(tables(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
