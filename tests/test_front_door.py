"""Tests for the names that `import mindie_mm` offers."""

import subprocess
import sys

import mindie_mm
import mindie_mm.tokenize


def test_dir_lists_exactly_the_public_names():
    assert {*dir(mindie_mm)} == {*mindie_mm.__all__, "__version__"}
    assert dir(mindie_mm.tokenize) == mindie_mm.tokenize.__all__
    for module in (mindie_mm, mindie_mm.tokenize):
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
    assert not hasattr(mindie_mm, "Nothing")
    assert not hasattr(mindie_mm.tokenize, "Nothing")


def test_settings_and_errors_do_not_import_torch():
    script = (
        "import sys; from mindie_mm import MindieMMError, SamplingParams, WorkerConfig; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
