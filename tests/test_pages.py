"""Tests for the documentation: the README, links, decision records, and the code and files that pages refer to."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.families import names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
GUIDES = (
    "quickstart",
    "serve",
    "python",
    "batch",
    "deploy",
    "operate",
    "scale",
    "monitoring",
    "loras",
    "render",
    "adding-a-model",
    "migrate",
    "structured-outputs",
)
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("bench/**/*.md")]
)


def prose(page: Path) -> str:
    """Return the text of `page` without its code blocks. Code in backticks stays."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(
        r"^    .*$|`[^`\n]*`", lambda code: code[0] if code[0].startswith("`") else "", text, flags=re.MULTILINE
    )


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of `page`."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return {slug if number == 0 else f"{slug}-{number}" for slug, count in found.items() for number in range(count)}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each relative link of `page` as the link's target, the path of the linked file, and the anchor."""
    for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link, file, anchor in links(page):
        assert file.exists(), f"{page.name}: there is no file for the link {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: there is no heading for the link {link}"


def test_links_are_found() -> None:
    assert ("docs/api.md#formats", ROOT / "docs/api.md", "formats") in list(links(ROOT / "README.md"))
    assert {"get-health", "media", "keys-origins-ids"} <= anchors(ROOT / "docs/api.md")
    assert "etcmindie_mmsettingstoml" not in anchors(ROOT / "docs/serve.md"), "a comment in a code block"


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the code of each fenced block of `page`."""
    return re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_fenced_with_a_language_and_fits_into_the_column_of_the_site(page: Path) -> None:
    fenced = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"\n\n    \S", fenced), "an indented block has no language: fence it"
    assert not re.search(r"^[|\s]+\n\|-", fenced, re.MULTILINE), "a table has no header"
    for language, code in blocks(page):
        assert language, code
        assert max(map(len, code.splitlines()), default=0) <= 85, code


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_eight_blocks_of_code_per_thousand_words(guide: str) -> None:
    page = ROOT / f"docs/{guide}.md"
    words = len(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).split())
    assert len(blocks(page)) >= 8 * words / 1000


def test_the_readme_is_short_and_has_one_image() -> None:
    assert len(README.split()) <= 700
    assert len(re.findall(r"!\[|<img|<picture|<svg", README)) == 1


def test_the_readme_counts_the_families() -> None:
    assert f"{len(names())} [families]" in README


def test_the_readme_shows_what_is_served_in_six_rows() -> None:
    table = README.partition("## What is served")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| \w", table.partition("|---|")[2], re.MULTILINE)) == 6


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [file for _, file, _ in links(page) if file.suffix == ".md"]
    assert {*ROOT.glob("docs/**/*.md"), ROOT / "SECURITY.md"} <= reached


def defined(file: Path) -> set[str]:
    """Return the names of a module's functions, classes and methods. A method's name is `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_code_that_the_architecture_names_exists() -> None:
    named = re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", ARCHITECTURE)
    assert len(named) >= 20
    for name, path in named:
        file = ROOT / path
        assert name == file.name or name in defined(file), f"{path} does not define {name}"


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^\| (?!term)(\w[^|]*) \|", (ROOT / "docs/concepts.md").read_text(), re.MULTILINE)
    assert 10 <= len(terms) <= 15
    assert len(set(terms)) == len(terms)


def test_files_and_folders_named_in_the_architecture_exist() -> None:
    for path in re.findall(r"(?<!\[)`([\w/]+\.py)`", ARCHITECTURE):
        assert (ROOT / path).is_file() or (ROOT / "mindie_mm" / path).is_file(), path
    for folder in re.findall(r"^\| `(\S+)/` \|", ARCHITECTURE, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_the_architecture_has_a_row_for_every_package_and_top_level_folder() -> None:
    packages = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("mindie_mm/*/__init__.py")}
    ignored = (ROOT / ".gitignore").read_text().split()
    top_level = {
        folder.name
        for folder in ROOT.glob("[!.]*/")
        if not any(fnmatch(f"{folder.name}/", pattern) for pattern in ignored)
    }
    assert {"mindie_mm", "tests"} <= top_level
    rows = {*re.findall(r"^\| `(\S+)/` \|", ARCHITECTURE, re.MULTILINE)}
    assert packages | top_level <= rows


def test_the_architecture_fits_on_a_page() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 120
    assert max(map(len, ARCHITECTURE.splitlines())) <= 120


def test_decision_records_are_numbered_without_a_gap() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_decision_record_has_its_sections_and_at_most_350_words(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(record.name[:4])}. ")
    _, *parts = re.split("^## ", text, flags=re.MULTILINE)
    sections = dict(part.split("\n", 1) for part in parts)
    assert [*sections] == ["Context", "Alternatives", "Decision", "Consequences"]
    assert "?" in sections["Context"], "the context ends with the question"
    assert "because" in sections["Decision"]
    assert len(text.split()) <= 350


def test_the_index_of_decisions_has_every_title() -> None:
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    titles = {
        record.name: record.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for record in RECORDS
    }
    assert [f"[{title}]({name})" for name, title in titles.items()] == re.findall(r"^- (.*)$", index, re.MULTILINE)


@pytest.mark.parametrize(
    "page", [*RECORDS, ROOT / "docs/lab-notes.md", ROOT / "SECURITY.md"], ids=lambda page: page.name
)
def test_paths_named_in_decisions_exist(page: Path) -> None:
    for path in re.findall(r"`((?:mindie_mm|service|tests|tools)/[\w/.]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name}: there is no {path}"


def test_the_guide_for_families_quotes_the_examples() -> None:
    guide = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    example = ROOT / "examples/minigpt4"
    modules = [*example.glob("mindie_mm_*.py"), *ROOT.glob("examples/llava_v1/mindie_mm_*.py")]
    code = [module.read_text(encoding="utf-8") for module in modules]
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        assert any(block in module for module in code), block
    (entry,) = re.findall(r"^```toml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert entry in (example / "pyproject.toml").read_text(encoding="utf-8")
