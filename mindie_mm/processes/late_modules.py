"""Modules that are imported when code first uses one of their names.

transformers imports PyTorch's compiler, its distributed tensors, accelerate and SciPy when it imports any model. An
engine with one process needs none of them. Together, they take 1.6 s of processor time and 100 MiB.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

NAMES: Mapping[str, frozenset[str]] = {
    "accelerate": frozenset({"PartialState", "dispatch_model"}),
    "accelerate.hooks": frozenset({"AlignDevicesHook", "add_hook_to_module"}),
    "accelerate.utils": frozenset(
        {"extract_model_from_parallel", "get_balanced_memory", "get_max_memory", "infer_auto_device_map", "reduce"}
    ),
    "accelerate.utils.modeling": frozenset({"clean_device_map", "get_max_layer_size"}),
    "scipy": frozenset(),
    "scipy.optimize": frozenset({"linear_sum_assignment"}),
    "torch._dynamo": frozenset(),
    "torch._dynamo._trace_wrapped_higher_order_op": frozenset({"TransformGetItemToIndex"}),
    "torch.distributed._composable": frozenset(),
    "torch.distributed._composable.fsdp": frozenset({"fully_shard"}),
    "torch.distributed.checkpoint": frozenset(),
    "torch.distributed.checkpoint.hf_storage": frozenset({"HuggingFaceStorageReader", "HuggingFaceStorageWriter"}),
    "torch.distributed.fsdp": frozenset({"CPUOffloadPolicy", "MixedPrecisionPolicy"}),
    "torch.distributed.tensor": frozenset({"DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"}),
    "torch.distributed.tensor._utils": frozenset({"compute_local_shape_and_global_offset"}),
    "torch.distributed.tensor.placement_types": frozenset({"Placement", "Shard", "_StridedShard"}),
    "transformers.distributed.expert_parallel": frozenset({"apply_expert_parallelism"}),
    "transformers.distributed.tensor_parallel": frozenset(
        {"apply_tensor_parallelism", "gather_state_dict_for_save", "get_kv_heads_per_rank", "verify_tp_plan"}
    ),
}
"""Late modules, with the names that transformers imports from them and uses only in functions. Any other name imports
the module at once."""
_ROOTS = (
    "accelerate",
    "scipy",
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.distributed.expert_parallel",
    "transformers.distributed.tensor_parallel",
)
"""Modules that are imported with all modules below them."""
_PASSED = {"torch._dynamo": frozenset({"allow_in_graph", "assume_constant_result", "disable"})}
"""Decorators that only concern compiled code. An engine compiles nothing, so they return the function as it is."""


_MODELS = "transformers.models"


class LateName:
    """A class or function of a late module.

    Each use imports the module, except isinstance and issubclass: before the import, nothing can be an instance of it.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def _real(self) -> Any:
        return getattr(_imported(self._module), self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: object) -> bool:
        return self._is_imported() and isinstance(instance, self._real())

    def __subclasscheck__(self, cls: type) -> bool:
        return self._is_imported() and issubclass(cls, self._real())

    def __or__(self, _: object) -> LateName:  # in an annotation
        return self

    __ror__ = __or__

    def _is_imported(self) -> bool:
        return not isinstance(sys.modules.get(_root(self._module)), _LateModule)


class _LateModule(ModuleType):
    """A module of `NAMES` that has not been imported."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name in NAMES[module]:
            return LateName(module, name)
        if name in _PASSED.get(module, ()):
            return _passed
        if name.startswith("__"):  # code that looks at all modules asks for these
            raise AttributeError(name)
        return getattr(_imported(module), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, _LateModule):
            super().__setattr__(name, value)
        else:
            setattr(_imported(self.__name__), name, value)


def _passed(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _passed if function is None else function


class _LateFinder(MetaPathFinder, Loader):
    """Finder of the late modules below `roots`."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname == _MODELS:
            _read_names_once()
        root = _root(fullname)
        if root not in self.roots:
            return None
        if fullname not in NAMES:
            _imported(root)
            return None
        real = PathFinder.find_spec(fullname, path)
        if real is None:
            return None
        late = ModuleSpec(fullname, self, origin=real.origin)
        late.submodule_search_locations = real.submodule_search_locations
        return late

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__file__ = module.__spec__.origin


_finder = _LateFinder()
_importing = RLock()


def import_late() -> None:
    """Import the modules of `NAMES` late in this process, except those that are imported already."""
    if _finder not in sys.meta_path:
        _finder.roots = {root for root in _ROOTS if root not in sys.modules}
        sys.meta_path.insert(0, _finder)


def import_at_once() -> None:
    """Undo `import_late`, before any late module is found.

    Distributed models need the modules. Some modules register themselves when they are imported.
    """
    assert not any(isinstance(module, _LateModule) for module in sys.modules.values())
    sys.meta_path.remove(_finder)


def _read_names_once() -> None:
    """Let `transformers.models` take the names of all models from transformers, which has read them from 2,000 files.

    transformers' own cache forgets them meanwhile, because it has fewer places than there are models.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if (read := getattr(utils, "create_import_structure_from_path", None)) is None:
        return  # a version that reads them in another way
    models = Path(utils.__file__).parents[1] / "models"  # the key of the cache's last place
    own = str(models / "__init__.py")
    utils.create_import_structure_from_path = lambda path: read(models if path == own else path)


def _root(module: str) -> str:
    return next((root for root in _ROOTS if module == root or module.startswith(f"{root}.")), "")


def _imported(module: str) -> ModuleType:
    """Import the real module, and return it."""
    root = _root(module)
    with _importing:
        if root in _finder.roots:
            _finder.roots.discard(root)
            for name, one in [*sys.modules.items()]:
                if isinstance(one, _LateModule) and _root(name) == root:
                    del sys.modules[name]
        return importlib.import_module(module)
