"""Tests that names of models and devices appear only in their own files.

Import-linter checks the imports: see pyproject.toml and `make lint`.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "mindie_mm").rglob("*.py"), *(ROOT / "service").rglob("*.py")])


@cache
def identifiers(file: Path) -> str:
    """Return a file's code without comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


FAMILIES = sorted(path.stem for path in (ROOT / "mindie_mm" / "models").glob("*.py") if path.stem[0] != "_")


def test_there_are_families():
    assert FAMILIES


def test_no_model_name_appears_outside_its_files():
    """A private module of models/ whose name begins with a family, such as _molmo_network.py, belongs to the family."""
    found = {}
    for file in FILES:
        in_models = file.parent.name == "models"
        # Formats of tool calls have the names that vLLM gives them, and some of these are names of models.
        # demo.py names a checkpoint that users can serve instead of the embedded one.
        if (in_models and file.stem in FAMILIES) or "tool_calls" in file.parts or file.name == "demo.py":
            continue
        code = identifiers(file)
        letters = re.sub("[_-]", "", code).lower()
        others = [
            name
            for name in FAMILIES
            if name.replace("_", "") in letters and not (in_models and file.stem.startswith(f"_{name}_"))
        ]
        if not others:
            continue
        # At the start of a word of an identifier, because "variable" is not the name of a model.
        start = "(?:(?<![A-Za-z])|(?<![A-Z])(?=[A-Z]))"
        named = re.compile(f"{start}(?i:{'|'.join(name.replace('_', '[_-]?') for name in others)})")
        if match := named.search(code):
            found[file] = match[0]
    assert found == {}


def test_no_family_imports_another():
    """Families share code through private modules of models/."""
    imported = re.compile(rf"mindie_mm\.models(?:\.| import .*)\b({'|'.join(FAMILIES)})\b")
    code = {name: identifiers(ROOT / "mindie_mm" / "models" / f"{name}.py") for name in FAMILIES}
    assert {name: found[0] for name, text in code.items() if (found := imported.search(text))} == {}


def test_no_device_name_appears_outside_the_device_package():
    code = {file: identifiers(file) for file in FILES if "device" not in file.relative_to(ROOT).parts}
    named = re.compile(r"torch_npu|torch\.(npu|cuda)\b|['\"](npu|cuda)['\"]")
    assert {file: found[0] for file, text in code.items() if (found := named.search(text))} == {}


def test_one_module_reads_the_environment():
    readers = [file for file in FILES if re.search(r"\benviron\b|\bgetenv\b", identifiers(file))]
    assert [file.name for file in readers] == ["environment.py"]
