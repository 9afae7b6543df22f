"""Stand-ins for torch and for transformers' index of classes, which let a process import the families quickly.

The file of a family contains its processor and its model. Its processor reads settings and plans media without torch,
but the model needs torch when the file is imported. Importing torch takes more than a second of processor time, and
building transformers' index of its classes half a second. transformers' configuration classes are the real ones.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

from mindie_mm.processes.stand_in_modules import StandIn, StandInFinder

_REPLACED = (
    *("torch", "timm", "transformers.integrations.hub_kernels", "av", "jinja2"),
    *("huggingface_hub.hf_api", "httpx", "httpx2", "httpcore", "httpcore2"),
)
"""Modules that are replaced, together with all modules below them.

Without media, templates and downloads, the others than torch are not needed either, and their imports are slow, too.
"""


class _Package(ModuleType):
    """A package of transformers whose `__init__.py`, which builds the index, was not run."""

    def __getattr__(self, name: str) -> Any:
        """Return a configuration class, the mapping of all of them, or a stand-in for the class of a model."""
        if name.startswith("__"):
            raise AttributeError(name)
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        if name == "CONFIG_MAPPING":
            return auto.CONFIG_MAPPING
        types = {own: model_type for model_type, own in reversed(auto.CONFIG_MAPPING_NAMES.items())}
        if name in types:
            return auto.CONFIG_MAPPING[types[name]]
        # The name of a model's class begins as that of its configuration: LlavaForConditionalGeneration, LlavaConfig.
        begun = [own for own in types if name.startswith(own.removesuffix("Config"))]
        if not begun:
            raise AttributeError(f"{self.__name__} has no attribute {name} without its index")
        return type(name, (StandIn,), {"config_class": auto.CONFIG_MAPPING[types[max(begun, key=len)]]})


def install() -> None:
    """Install the stand-ins for the rest of this process, which can then load no model.

    Do nothing if torch or transformers was imported before.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    gc.disable()  # because what an import creates is not garbage
    sys.meta_path.insert(0, StandInFinder(_REPLACED))
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
