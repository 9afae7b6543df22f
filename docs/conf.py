"""Configuration of the documentation site. `make docs` builds it below build/docs; every warning is an error."""

from __future__ import annotations

from pathlib import Path

project = "mindie_mm"
author = "the authors of mindie_mm"
html_theme = "furo"
html_title = "mindie_mm"
html_show_copyright = False
html_favicon = "../service/static/icon.svg"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_search_scorer = str(Path(__file__).parent / "site/scorer.js")
templates_path = ["site"]
# The home page is docs/index.html, because the source folder is the root of the repository.
html_additional_pages = {"index": "redirect.html"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The root of the repository is the source folder, so that README.md and results of measurements are pages, too.
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md", "bench/results/*.md", "examples/*/README.md"]
root_doc = "docs/index"

myst_heading_anchors = 4  # GitHub's anchors, so that a link works there and here

default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_numpy_docstring = False
# Pygments has no lexer for some blocks, and results of measurements are reached by links alone.
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]
