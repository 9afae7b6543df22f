"""The names of the LoRA adapters that a worker serves, and the requests that use them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindie_mm.errors import InputError, ModelNotFound
from mindie_mm.settings.config import lora_name


class LoraEngine(Protocol):
    """The part of an engine's client that loads adapters."""

    async def load_lora(self, folder: Path) -> str:
        """Load an adapter, and return its key."""

    def keep_loras(self, keys: Collection[str]) -> None:
        """Forget all adapters except those with `keys`."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter that requests may use."""

    name: str
    folder: Path
    key: str
    """Digest of its files. The engine keeps the adapter under this key."""


class LoraNames:
    """The adapters by name. An adapter that is unloaded stays in the engine until its requests have ended."""

    def __init__(self, engine: LoraEngine, loaded: Mapping[str, Lora]) -> None:
        """Take the adapters that `engine` has loaded at its start, by name."""
        self._engine = engine
        self._by_name = dict(loaded)
        self._uses: Counter[str] = Counter()
        """Number of requests by key."""
        self._changing = asyncio.Lock()

    def __iter__(self) -> Iterator[Lora]:
        return iter([*self._by_name.values()])

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Lora:
        """Return an adapter. Raise ModelNotFound if there is none of this name."""
        if (found := self._by_name.get(name)) is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise ModelNotFound(f"the LoRA adapter {name!r} does not exist; those loaded are {known}", param="model")
        return found

    async def load(self, name: str, folder: Path, *, replaces: bool = False) -> None:
        """Load an adapter.

        Args:
            name: Name that requests use to select the adapter.
            folder: Folder of the adapter.
            replaces: Whether to replace an adapter of the same name. Its running requests finish with the old one.

        Raises:
            InputError: The name is invalid or exists, or the adapter is not served (`read_adapter`).
            ProcessDied, NoProcess: The engine cannot load it.

        """
        lora_name(name)
        try:
            async with self._changing:
                if name in self._by_name and not replaces:
                    raise InputError(
                        f"The lora adapter '{name}' has already been loaded; unload it first, or choose another name",
                        param="lora_name",
                    )
                self._by_name[name] = Lora(name, folder, await self._engine.load_lora(folder))
        finally:
            self._forget_unused()

    async def unload(self, name: str) -> None:
        """Remove an adapter. Its running requests finish. Raise ModelNotFound if there is none of this name."""
        async with self._changing:
            self.get(name)
            del self._by_name[name]
        self._forget_unused()

    @contextmanager
    def use(self, name: str | None) -> Iterator[str | None]:
        """Keep an adapter loaded inside the context. Yield its key, or None for no adapter.

        Raises:
            ModelNotFound: There is no adapter of this name.

        """
        if name is None:
            yield None
            return
        key = self.get(name).key
        self._uses[key] += 1
        try:
            yield key
        finally:
            self._uses[key] -= 1
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Let the engine forget the adapters that have no name and no requests."""
        if not self._changing.locked():  # an adapter that is being loaded may have the same key
            self._uses = +self._uses  # without zeros
            self._engine.keep_loras({*self._uses, *(one.key for one in self)})
