"""Install the simulated operators as soon as a process with the simulated NPU imports torch_npu."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Installing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import cuda_build  # imports torch, which is loaded already

        with cuda_build.hidden():
            self._loader.exec_module(module)
        # The engine's child processes have another working directory, so the project may not be in sys.path.
        if (root := str(Path(__file__).parents[3])) not in sys.path:
            sys.path.append(root)
        from tests.ascend.operators import install

        install()


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch_npu" or self._asking:
            return None
        self._asking = True  # the spec comes from the other finders in sys.meta_path
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
