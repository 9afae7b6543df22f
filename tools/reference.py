"""Script that writes docs/settings.md and docs/errors.md: `python -m tools.reference`.

With --check it writes nothing, and exits with 1 if a page is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from mindie_mm import errors
from mindie_mm.cli.serve import command
from mindie_mm.settings.config import EngineConfig, GiB, MediaCaps, MiB, ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import PARTS
from service.http.errors import TABLE

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = """\
# Settings

Every setting is a flag of `mindie-mm serve`, an environment variable and a key of a TOML file: `--max-images 4`,
`MINDIE_MM_MAX_IMAGES=4` or `max_images = 4`. [Serve](serve.md#configuration) describes the order of precedence and
shows a file. In Python, the first three groups are the fields of `WorkerConfig`, `EngineConfig` and `MediaCaps`.

`python -m tools.reference` generates this page from the code.
"""
GROUPS = {
    "Model and tokenizer": WorkerConfig,
    "Engine": EngineConfig,
    "Limits on decoding media": MediaCaps,
    "HTTP service": ServiceConfig,
}
ERRORS = """\
# Errors

All exceptions that mindie_mm raises on purpose derive from `MindieMMError` and are defined in `mindie_mm.errors`. Each
arrow in the table is one level of inheritance. The service answers with the HTTP status of the class, and the [HTTP
API](api.md#errors) describes the body. An `InputError` is the caller's mistake. After an `OperationalError`, the same
call may work later, or on another machine.

`python -m tools.reference` generates this page from the code.

| class | HTTP status | meaning |
|---|---|---|
"""


def shown(name: str, default: object) -> str:
    """Return a default value as a user writes it. Sizes in bytes are converted to MiB or GiB."""
    if default is None or default is dataclasses.MISSING or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if name.endswith("_bytes") and isinstance(default, int) and default >= MiB:
        return f"{default // GiB} GiB" if default >= GiB else f"{default // MiB} MiB"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def settings_page() -> str:
    """Return docs/settings.md."""
    options = {parameter.name: parameter for parameter in command.params}
    page = SETTINGS
    for title, group in GROUPS.items():
        page += f"\n## {title}\n\n| setting | default | meaning |\n|---|---|---|\n"
        for field in dataclasses.fields(group):
            if field.name in PARTS:
                continue
            option = options.get(field.name)  # none for the model, which is the argument of serve
            flag = option.opts[0] if option else field.name
            text = str(
                getattr(option, "help", "Checkpoint directory, the argument of serve. [default: the embedded one]")
            )
            text = " ".join(text.split()).replace("|", r"\|")
            text, _, stated = text.removesuffix("]").partition(" [default: ")
            page += f"| `{flag}` | {shown(field.name, field.default) or stated} | {text} |\n"
    return page


def tree(kind: type[BaseException], depth: int = 0) -> Iterator[tuple[int, type[BaseException]]]:
    """Yield a class and the classes derived from it in `mindie_mm.errors`, each with its depth."""
    yield depth, kind
    for derived in kind.__subclasses__():
        if derived.__module__ == errors.__name__:
            yield from tree(derived, depth + 1)


def errors_page() -> str:
    """Return docs/errors.md."""
    page = ERRORS
    for depth, kind in tree(errors.MindieMMError):
        status = next(TABLE[base] for base in kind.__mro__ if base in TABLE)
        text = " ".join((inspect.getdoc(kind) or "").split())
        page += f"| {'→ ' * depth}`{kind.__name__}` | {status} | {text} |\n"
    return page


PAGES = {"settings.md": settings_page, "errors.md": errors_page}


def main() -> int:
    """Write or check the pages, and return the exit status."""
    outdated = 0
    for name, make in PAGES.items():
        path, wanted = DOCS / name, make()
        if "--check" in sys.argv[1:]:
            outdated |= int(not path.is_file() or path.read_text(encoding="utf-8") != wanted)
        else:
            path.write_text(wanted, encoding="utf-8")
    return outdated


if __name__ == "__main__":
    sys.exit(main())
