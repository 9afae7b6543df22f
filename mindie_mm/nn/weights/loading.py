"""Progress of loading weights. transformers and `build` report it to transformers' progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_DESCRIPTION = "Loading weights"
"""Description of the progress bar that transformers draws while it loads weights."""


def counted(weights: Iterable[T], total: int) -> Iterable[T]:
    """Return `weights` with a progress bar, as transformers draws it. `total` is the expected number of weights."""
    from transformers.utils.logging import tqdm  # imported late, because the import takes seconds

    bar: Iterable[T] = tqdm(weights, desc=_DESCRIPTION, total=total)
    return bar


@contextmanager
def loading_reported(report: Callable[[float], None]) -> Iterator[None]:
    """Call `report` for each weight that the block loads, with the loaded share, from 0 to 1. Draw no progress bar."""
    from transformers.utils.logging import EmptyTqdm, set_tqdm_hook  # imported late, as above

    class Counted(EmptyTqdm):  # type: ignore[misc]  # an untyped library
        def __init__(self, weights: Any, *arguments: Any, total: int | None = None, **options: Any) -> None:
            super().__init__(weights, *arguments, **options)
            self._total = len(weights) if total is None else total

        def __iter__(self) -> Iterator[Any]:
            for number, weight in enumerate(self._iterator):
                report(min(number / max(self._total, 1), 1.0))
                yield weight

    def bar(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        counts = arguments and options.get("desc") == _DESCRIPTION
        return (Counted if counts else factory)(*arguments, **options)

    before = set_tqdm_hook(bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)
