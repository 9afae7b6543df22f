"""README's table of families is what the families say of themselves."""

from mindie_mm.models import family_named
from tools import families


def test_the_readme_is_true():
    readme = families.README.read_text()
    assert families.with_table(readme) == readme, "run `make families`"


def test_what_the_readme_calls_proven_has_a_test():
    tests = families.README.parent / "tests" / "models"
    missing = [name for name in families.names() if not (tests / f"test_{name}.py").is_file()]
    assert not missing


def test_each_is_published_as_its_own():
    published = {family_named(name).published for name in families.names()} - {""}
    assert len(published) == len(families.names()), "one is missing, or is that of the family that it builds on"


def test_a_table_that_is_not_true_is_seen():
    name = families.names()[0]
    stale = families.README.read_text().replace(f"| `{name}` |", "| `other` |")
    assert families.with_table(stale) != stale
