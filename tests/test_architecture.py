"""The rules of the tree: imports point one way, names of models and devices stay in their place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"errors", "faults", "interrupts", "standard_streams", "tasks", "cgroup", "msgspec_errors"},
    {"environment", "paths"},
    {"limits", "loop_thread"},
    {"inputs", "config", "logs", "salt"},
    {"ipc", "restarts", "sources"},
    {"device", "shm", "child", "media", "lockdown"},
    {"nn"},
    {"models"},
    {"decode"},
    {"tokenize"},
    {"engine", "batch", "doctor"},
    {"service"},
    {"cli"},
    {"__main__"},
]
FILES = sorted([*(ROOT / "mindie_mm").rglob("*.py"), *(ROOT / "service").rglob("*.py")])


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def imports(file: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, TYPE_CHECKING blocks and function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module or "" for name in names]
        else:
            continue
        found.update(name for name in names if name in MODULES)
    return found - {module_of(file)}


def layer(module: str) -> int:
    parts = module.split(".")
    if module == "mindie_mm":
        return len(LAYERS)  # the front door may lead anywhere
    name = "service" if parts[0] == "service" else parts[1]
    return next(i for i, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "mindie_mm"])
def test_imports_point_one_way(module):
    """A module imports its own package, or a lower layer; packages of one layer do not import one another."""
    package = module.split(".")[:2]
    for imported in imports(MODULES[module]):
        own = imported.split(".")[:2] == package or (module.startswith("service") and imported.startswith("service"))
        assert own or layer(imported) < layer(module), f"{module} imports {imported}"


def test_no_import_cycle():
    graph = {module: imports(file) for module, file in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for imported in graph[module]:
                visit(imported, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def identifiers(file: Path) -> str:
    """A file's code without comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


FAMILIES = sorted(path.stem for path in (ROOT / "mindie_mm" / "models").glob("*.py") if path.stem != "__init__")


def test_there_are_families():
    assert FAMILIES


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_model_name_outside_its_file(file):
    if file.parent.name == "models" and file.stem in FAMILIES:  # a family may be another with changes
        return
    code = identifiers(file)
    for family in FAMILIES:
        name = family.replace("_", "[_-]?")
        assert not re.search(name, code, re.IGNORECASE), f"{family} is named in {file}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_device_name_outside_device(file):
    if "device" in file.relative_to(ROOT).parts:
        return
    code = identifiers(file)
    assert not re.search(r"torch_npu|torch\.(npu|cuda)\b|['\"](npu|cuda)['\"]", code), file


def test_one_module_reads_the_environment():
    readers = [file for file in FILES if re.search(r"\benviron\b|\bgetenv\b", identifiers(file))]
    assert [file.name for file in readers] == ["environment.py"]
