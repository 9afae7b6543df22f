"""Stand-ins for torch and for transformers' index of classes, which let a process import the families quickly.

The file of a family contains its processor and its model. Its processor reads settings and plans media without torch,
but the model needs torch when the file is imported. Importing torch takes more than a second of processor time, and
building transformers' index of its classes half a second. transformers' configuration classes are the real ones.
"""

from __future__ import annotations

import gc
import importlib
import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

_REPLACED = (
    *("torch", "transformers.integrations.hub_kernels", "av", "jinja2"),
    *("huggingface_hub.hf_api", "httpx", "httpx2", "httpcore", "httpcore2"),
)
"""Modules that are replaced, together with all modules below them.

Without media, templates and downloads, the others than torch are not needed either, and their imports are slow, too.
"""


class _Type(ABCMeta):
    """Type of the stand-ins for classes. Every attribute of such a class is a stand-in, too."""

    def __getattr__(cls, name: str) -> type[Any]:
        return _stand_in(cls, name)


class _Name(metaclass=_Type):
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
    base: Any = RuntimeError if name.endswith("Error") else _Name  # an `except` clause needs an exception
    value: type[Any] = type(base)(name, (base,), {"__module__": owner.__name__})
    setattr(owner, name, value)
    return value


class _Finder(MetaPathFinder, Loader):
    """Finder of the stand-ins."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_replaced = any(fullname == name or fullname.startswith(f"{name}.") for name in _REPLACED)
        return ModuleSpec(fullname, self, is_package=True) if is_replaced else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":
            module.__dict__["__version__"] = version("torch")


class _Package(ModuleType):
    """A package of transformers whose `__init__.py`, which builds the index, was not run."""

    def __getattr__(self, name: str) -> Any:
        """Return a configuration class, or the mapping of all of them. transformers has no others without its index."""
        if name.startswith("__"):
            raise AttributeError(name)
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        if name == "CONFIG_MAPPING":
            return auto.CONFIG_MAPPING
        types = [model_type for model_type, own in auto.CONFIG_MAPPING_NAMES.items() if own == name]
        if not types:
            raise AttributeError(f"{self.__name__} has no attribute {name} without its index")
        return auto.CONFIG_MAPPING[types[0]]


def install() -> None:
    """Install the stand-ins for the rest of this process, which can then load no model.

    Do nothing if torch or transformers was imported before.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    gc.disable()  # because what an import creates is not garbage
    sys.meta_path.insert(0, _Finder())
    whole = _add_package("transformers", None)
    whole.__dict__["__version__"] = version("transformers")
    whole.__dict__["models"] = _add_package("transformers.models", whole.__path__)


def _add_package(name: str, path: Any) -> ModuleType:
    spec = PathFinder.find_spec(name, path)
    assert spec is not None, f"{name} is installed, because this package requires it"
    package = _Package(name)
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules[name] = package
    return package
