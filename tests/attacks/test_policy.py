"""Tests that the help and docs/security.md show the default of every limit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindie_mm.cli.serve import command
from mindie_mm.errors import InputError
from mindie_mm.settings.config import GiB, MediaCaps, MiB, ServiceConfig

PAGE = Path(__file__).parents[2] / "docs/security.md"
SERVICE = (
    "allowed_media_domains",
    "allow_private_media",
    "fetch_connect_timeout_s",
    "fetch_read_timeout_s",
    "fetch_timeout_s",
    "max_fetch_redirects",
    "max_concurrent_fetches",
    "allowed_media_dir",
    "max_request_bytes",
    "max_request_values",
    "max_item_bytes",
    "max_media_bytes",
    "max_spool_bytes",
    "max_media_items",
)
DEFAULTS = {field.name: field.default for field in dataclasses.fields(MediaCaps)} | {
    field.name: field.default for field in dataclasses.fields(ServiceConfig) if field.name in SERVICE
}


def documented() -> dict[str, str]:
    """Return the defaults in the page's table, by the name of the setting."""
    section = PAGE.read_text().split("## Media policy")[1].split("\n## ")[0]
    defaults_by_name = {}
    for names, values in re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|", section, re.MULTILINE):
        flags = re.findall(r"`--([a-z-]+)`", names)
        defaults = values.split(", ") if len(flags) > 1 else [values] * len(flags)
        defaults_by_name |= dict(zip((flag.replace("-", "_") for flag in flags), defaults, strict=True))
    return defaults_by_name


def shown(name: str, default: object) -> str:
    """Return a default as the page writes it."""
    if name.endswith("_bytes") and isinstance(default, int):
        return f"{default // GiB} GiB" if default >= GiB else f"{default // MiB} MiB"
    if isinstance(default, tuple) and default:
        return " ".join(map(str, default))
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return {None: "none", False: "no", (): "every host"}[default]  # type: ignore[index]
    return f"{default:.0f}"


def test_the_page_states_the_defaults() -> None:
    found = documented()
    assert {"allowed_media_domains", "allow_private_media", "allowed_media_dir"} <= found.keys()
    assert found == {name: shown(name, DEFAULTS[name]) for name in found}


def test_every_limit_is_in_the_help() -> None:
    help_page = CliRunner().invoke(command, ["--help"], terminal_width=400).output
    for name, default in DEFAULTS.items():
        (line,) = re.findall(rf"^ *--{name.replace('_', '-')}[ /].*(?:\n {{10,}}.*)*", help_page, re.MULTILINE)
        text = {False: "off", True: "on"}[default] if isinstance(default, bool) else str(default)
        text = " ".join(map(str, default)) if isinstance(default, tuple) else text
        assert default in (None, ()) or re.search(rf"\[default: {re.escape(text)}[],]", " ".join(line.split())), line


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (MediaCaps, {"max_image_pixels": 0}),
        (MediaCaps, {"max_image_pixels": 178_956_971}),
        (MediaCaps, {"max_video_frames": -1}),
        (MediaCaps, {"max_video_seconds": 0.0}),
        (MediaCaps, {"max_audio_seconds": float("nan")}),
        (MediaCaps, {"max_decode_bytes": -1}),
        (ServiceConfig, {"max_media_items": -1}),
        (ServiceConfig, {"fetch_read_timeout_s": 0.0}),
    ],
)
def test_limits_outside_their_range_are_refused(settings: type, changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="must be"):
        settings(**changes)
