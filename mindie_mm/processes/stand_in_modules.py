"""Stand-ins for modules, so that code can be imported that needs these modules only to run."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any


class _Type(ABCMeta):
    """Type of the stand-ins for classes. Every attribute of such a class is a stand-in, too."""

    def __getattr__(cls, name: str) -> type[Any]:
        return _stand_in(cls, name)


class StandIn(metaclass=_Type):
    """Stand-in for a class or function. It can be a base class, an annotation and a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, decorated: Any) -> Any:
        return decorated

    def __bool__(self) -> bool:  # such as torch.distributed.is_available()
        return False


class _Module(ModuleType):
    """Stand-in for a module. Every attribute is a stand-in, too."""

    def __getattr__(self, name: str) -> type[Any]:
        return _stand_in(self, name)


def _stand_in(owner: Any, name: str) -> type[Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    base: Any = RuntimeError if name.endswith("Error") else StandIn  # an `except` clause needs an exception
    value: type[Any] = type(base)(name, (base,), {"__module__": owner.__name__})
    setattr(owner, name, value)
    return value


class StandInFinder(MetaPathFinder, Loader):
    """Finder of stand-ins for the modules `names` and all modules below them. Insert it into `sys.meta_path`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def replaces(self, fullname: str) -> bool:
        """Return whether the module `fullname` has a stand-in."""
        return any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if self.replaces(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":
            module.__dict__["__version__"] = version("torch")
