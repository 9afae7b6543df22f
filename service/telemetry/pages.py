"""One page of metrics for several workers."""

from __future__ import annotations

from collections.abc import Mapping


def merged(pages: Mapping[str, str], label: str) -> str:
    """Return one page with the samples of several `pages` in the text format of Prometheus.

    Args:
        pages: Page of each worker, by the worker's name.
        label: Name of the label that each sample gets, with the name of its worker as the value. There are no sums,
            because a sum of counters would decrease when a worker restarts.

    """
    families: dict[str, list[str]] = {}
    described: set[str] = set()
    for name, page in pages.items():
        family: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if line.startswith("#"):
                if line not in described:
                    described.add(line)
                    family.append(line)
            elif line:
                family.append(_labeled(line, label, name))
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labeled(sample: str, label: str, name: str) -> str:
    """Return a sample with the label after its other labels."""
    labels, brace, value = sample.rpartition("} ")
    if brace:
        return f'{labels},{label}="{name}"}} {value}'
    metric, _, value = sample.partition(" ")
    return f'{metric}{{{label}="{name}"}} {value}'
