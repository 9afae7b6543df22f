"""`python -m tests.soak` or `make soak`: send thousands of mixed requests, and check that no resources stay in use."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from typing import Any

from bench.report import RESULTS, plot, write
from tests.soak.run import Report, soak

GROWTH = 0.02
"""Largest accepted growth of memory from the first measurement to the last, as a fraction."""


def main() -> int:
    """Run the command. Return the number of kinds of faults that were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm", type=int, default=2_000, help="requests before the first measurement that counts")
    parser.add_argument("--every", type=int, default=500, help="requests between two measurements")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=150, help="number of different images")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arena-bytes", type=int, help="size of the arena; by default 64 MiB")
    parser.add_argument("--kill-decoders", type=float, default=0.0, metavar="SECONDS", help="kill one that often")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no further round begins")
    parser.add_argument("--results", default="soak", help="name of the files under bench/results")
    options = parser.parse_args()
    say = partial(print, flush=True)
    report = soak(
        options.requests,
        options.warm,
        options.every,
        options.clients,
        options.images,
        options.seed,
        say,
        arena_bytes=options.arena_bytes,
        kill_every_s=options.kill_decoders,
        seconds=options.seconds,
    )
    figures = report.figures()
    write(options.results, figures)
    plot(options.results, lambda axes: _draw(axes, report))
    found = [name for name, bad in findings(figures).items() if bad]
    text = _table(figures, found)
    (RESULTS / f"{options.results}.md").write_text(text)
    say(text)
    return len(found)


def findings(figures: dict[str, Any]) -> dict[str, bool]:
    """Return, for each kind of fault, whether the soak test found any."""
    return {
        "wrong_answers": figures["wrong_answers"] != 0,
        "leaked_blocks": figures["leaked_blocks"] != 0,
        "leaked_request_directories": figures["leaked_request_directories"] != 0,
        "descriptors_gained": figures["descriptors_gained"] > 0,
        "memory_growth": figures["memory_growth"] > GROWTH,
        "exit_status": figures["exit_status"] != 0,
    }


def _table(figures: dict[str, Any], found: list[str]) -> str:
    requests = figures["requests"]
    rows = [f"| {kind} | {count} |" for kind, count in requests.items()]
    measured = [f"| {name} | {figures[name]} |" for name in (*findings(figures), "threads_gained", "kills_of_decoders")]
    return "\n".join(
        [
            f"{sum(requests.values())} mixed requests on two cores: "
            + (f"**found: {', '.join(found)}**" if found else "nothing found")
            + ".",
            f"Growth and gains count from the measurement after {figures['measured_from']} requests.",
            "",
            "| requests | |",
            "| --- | --- |",
            *rows,
            "",
            "| found | |",
            "| --- | --- |",
            *measured,
            "",
        ]
    )


def _draw(axes: Any, report: Report) -> None:
    requests = [one.requests for one in report.samples]
    roles = dict.fromkeys(role for one in report.samples for role in one.processes)
    axes.plot(requests, [one.memory_bytes / 1e6 for one in report.samples], label="all processes")
    for role in roles:
        axes.plot(requests, [one.processes.get(role, 0) / 1e6 for one in report.samples], label=role)
    axes.set_ylim(0)
    axes.set_xlabel("requests")
    axes.set_ylabel("MB")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
