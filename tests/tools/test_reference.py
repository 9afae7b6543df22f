"""Tests for the generated pages, and the Python reference, which must list all public names."""

import re

import pytest

import mindie_mm
import mindie_mm.shm
from mindie_mm.settings.sources import CLASSES, PARTS
from tools import reference


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_up_to_date(name):
    assert (reference.DOCS / name).read_text() == reference.PAGES[name](), "run `python -m tools.reference`"


def test_every_setting_has_a_row_with_a_text():
    rows = re.findall(r"^\| `(?:--)?([\w-]+)` \| .* \| (\S.*) \|$", reference.settings_page(), re.MULTILINE)
    fields = {name for cls in CLASSES for name in cls.__dataclass_fields__} - PARTS
    assert {name.replace("-", "_") for name, _ in rows} == fields


def test_every_public_name_is_in_the_python_reference():
    page = (reference.DOCS / "python-api.md").read_text()
    named = set(re.findall(r"^\.\. auto\w+:: mindie_mm\.(\S+)$", page, re.MULTILINE)) | set(
        re.findall(r"`(\w+)`", page)
    )
    assert set(mindie_mm.__all__) <= named
    assert {f"shm.{name}" for name in mindie_mm.shm.__all__} <= named
