"""One page of metrics for all worker replicas."""

from __future__ import annotations

from collections.abc import Mapping


def merged(pages: Mapping[str, str]) -> str:
    """Return one page with the samples of several `pages` in the text format of Prometheus.

    Args:
        pages: Page of each replica, by the replica's name. Each sample gets this name as its label `replica`.

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
                family.append(_labeled(line, name))
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labeled(sample: str, name: str) -> str:
    """Return a sample with a label `replica` after its other labels."""
    labels, brace, value = sample.rpartition("} ")
    if brace:
        return f'{labels},replica="{name}"}} {value}'
    metric, _, value = sample.partition(" ")
    return f'{metric}{{replica="{name}"}} {value}'
