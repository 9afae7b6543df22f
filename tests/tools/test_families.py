"""Tests that the table in docs/families.md agrees with the families' own descriptions."""

from mindie_mm.models import family_named
from tools import families


def test_the_table_is_up_to_date():
    page = families.PAGE.read_text()
    assert families.with_table(page) == page, "run `make families`"


def test_every_family_of_the_table_has_a_test():
    tests = families.PAGE.parents[1] / "tests" / "models"
    missing = [name for name in families.names() if not (tests / f"test_{name}.py").is_file()]
    assert not missing


def test_each_family_names_a_published_checkpoint_of_its_own():
    published = {family_named(name).published for name in families.names()} - {""}
    assert len(published) == len(families.names()), "one is missing, or is that of the family that it builds on"


def test_an_outdated_table_is_noticed():
    name = families.names()[0]
    stale = families.PAGE.read_text().replace(f"| `{name}` |", "| `other` |")
    assert families.with_table(stale) != stale
