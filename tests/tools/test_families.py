"""Tests that the tables of families in docs/ agree with the families' own descriptions."""

import pytest

from mindie_mm.models import family_named
from tools import families


@pytest.mark.parametrize("path", families.PAGES, ids=lambda path: path.name)
def test_the_table_is_up_to_date(path):
    page = path.read_text()
    assert families.with_table(page, families.PAGES[path]) == page, "run `make families`"


def test_every_family_of_the_table_has_a_test():
    tests = families.DOCS.parent / "tests" / "models"
    missing = [name for name in families.names() if not (tests / f"test_{name}.py").is_file()]
    assert not missing


def test_each_family_names_a_published_checkpoint_of_its_own():
    published = {family_named(name).published for name in families.names()} - {""}
    assert len(published) == len(families.names()), "one is missing, or is that of the family that it builds on"


def test_an_outdated_table_is_noticed():
    name = families.names()[0]
    stale = (families.DOCS / "families.md").read_text().replace(f"| `{name}` |", "| `other` |")
    assert families.with_table(stale, families.table) != stale
