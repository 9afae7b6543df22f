"""Tables and plots of the load test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.report import RESULTS

COLUMNS = {
    "requests_per_s": "requests/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "TTFT p99",
    "inter_token_ms_p50": "inter-token p50",
    "inter_token_ms_p99": "inter-token p99",
    "e2e_ms_p50": "end to end p50",
    "errors": "errors",
}
KEYS = ("checkpoint", "image", "repeated", "concurrent")


def write_table(
    name: str,
    points: Sequence[dict[str, Any]],
    overheads: Sequence[dict[str, Any]],
    busy: Sequence[dict[str, Any]],
    note: str,
) -> None:
    """Write bench/results/<name>.md with a row per point. If there is a peer, add its figures and the ratios."""
    peer = any("peer" in point for point in points)
    heads = ["checkpoint", "image", "repeated", "concurrent", *COLUMNS.values()]
    if peer:
        heads += ["peer's requests/s", "times the peer's", "peer's TTFT p50", "share of the peer's TTFT"]
    lines = [note, "", "Times in milliseconds.", "", _row(heads), _row(["---"] * len(heads))]
    for point in points:
        cells = [point["checkpoint"], point["image"], f"{point['repeated']:.0%}", point["concurrent"]]
        cells += [point["ours"][column] for column in COLUMNS]
        if peer:
            ratios = point.get("ratios", {})
            theirs = point.get("peer", {})
            cells += [theirs.get("requests_per_s"), ratios.get("requests_per_s")]
            cells += [theirs.get("ttft_ms_p50"), ratios.get("ttft_ms_p50")]
        lines.append(_row(cells))
    if busy:
        lines += ["", *_busy_rows(busy)]
    for row in overheads:
        lines += [
            "",
            _sentence(row),
            "",
            _row(["part", "ms"]),
            _row(["---", "---"]),
            *(_row([part, value]) for part, value in row["parts_ms"].items()),
            *(_row([f"model: {part}", value]) for part, value in row["model_ms"].items()),
        ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _busy_rows(busy: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with the request rates without and with busy loops."""
    yield f"Busy neighbors: requests per second with 640x480 images, alone and beside {busy[0]['loops']} busy loops."
    yield ""
    yield _row(["checkpoint", "server", "clients", "alone", "busy neighbors", "share kept", "errors"])
    yield _row(["---"] * 7)
    for row in busy:
        for server in ("ours", "peer"):
            if one := row.get(server):
                rates = [one[name]["requests_per_s"] for name in ("alone", "busy")]
                errors = one["alone"]["errors"] + one["busy"]["errors"]
                yield _row([row["checkpoint"], server, row["concurrent"], *rates, one["kept"], errors])


def _sentence(row: dict[str, Any]) -> str:
    return (
        f"Overhead of a {row['image']} JPEG, {row['checkpoint']}, one client, {row['tokens']} tokens: "
        f"{row['outside_model_ms']} ms of {row['e2e_ms']} ms are spent outside the model's tower, prefill and "
        f"decode. Without decoding and resizing the image, these are {row['without_decoding_ms']} ms, of which the "
        f"server spends {row['in_the_server_ms']} ms. Medians of {row['requests']} requests:"
    )


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def write_plot(name: str, points: Sequence[dict[str, Any]]) -> None:
    """Write bench/results/<name>.png, with a column per checkpoint.

    The rows plot requests per second, TTFT and inter-token latency over the number of clients.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    checkpoints = list(dict.fromkeys(point["checkpoint"] for point in points))
    rows = {"requests_per_s": "requests/s", "ttft_ms_p50": "TTFT p50, ms", "inter_token_ms_p50": "inter-token p50, ms"}
    figure, grid = plt.subplots(
        len(rows),
        len(checkpoints),
        figsize=(5.5 * len(checkpoints), 9),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for column, checkpoint in enumerate(checkpoints):
        for axes, (figure_name, label) in zip(grid[:, column], rows.items(), strict=True):
            _curves(axes, [point for point in points if point["checkpoint"] == checkpoint], figure_name)
            axes.set_ylabel(label)
        grid[0, column].set_title(checkpoint)
        grid[0, column].legend(fontsize="small")
        grid[-1, column].set_xlabel("concurrent requests")
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


def _curves(axes: Any, points: Sequence[dict[str, Any]], figure: str) -> None:
    """Plot a line per image size and share of repeated images. Lines of the peer are dashed."""
    series = dict.fromkeys((point["image"], point["repeated"]) for point in points)
    for number, (image, repeated) in enumerate(series):
        own = [point for point in points if (point["image"], point["repeated"]) == (image, repeated)]
        label = image + (f", {repeated:.0%} repeated" if repeated else "")
        clients = [point["concurrent"] for point in own]
        axes.plot(clients, [point["ours"][figure] for point in own], marker="o", color=f"C{number}", label=label)
        if theirs := [(point["concurrent"], point["peer"][figure]) for point in own if "peer" in point]:
            axes.plot(
                *zip(*theirs, strict=True), marker="x", linestyle="--", color=f"C{number}", label=f"{label}: peer"
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.grid(visible=True, which="both", alpha=0.3)
