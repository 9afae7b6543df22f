"""The versions of the packages that affect ids and arrays. All calls of a run must use the same versions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "mindie_mm",
    "transformers",
    "tokenizers",
    "jinja2",
    "torch",
    "numpy",
    "pillow",
    "simplejpeg",
    "av",
    "soxr",
)


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the installed versions of this package, of the packages that decode and tokenize, and of `more`.

    Packages that are not installed are left out. FFmpeg's libraries are listed separately, because PyAV may use the
    libraries of the system.
    """
    import av  # imported late, because listing and checking a run's files do not need a decoder

    versions = {}
    for name in (*_PACKAGES, *more):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    libraries = sorted(av.library_versions.items())
    return versions | {name: ".".join(map(str, numbers)) for name, numbers in libraries}
