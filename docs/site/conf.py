"""Settings of Sphinx for the documentation site. `docs/site/build.py` makes the pages and calls Sphinx."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

from docs.site.docstrings import for_sphinx

project = "Headrace"
author = "the Headrace authors"
copyright = "the Headrace authors"
release = version = version_of("headrace")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # shortened examples (with "…") are not complete programs
highlight_language = "text"
smartquotes = False  # `--` is the start of an option
default_role = "literal"  # docstrings write `name`, as Markdown does

autodoc_typehints = "none"  # the docstrings give the types
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "Headrace"
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_use_index = True
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "search.js")
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def setup(app: Sphinx) -> None:
    """Let Sphinx read the docstrings as they are written in this repository."""

    def process(_app: Sphinx, _what: str, _name: str, value: object, _options: object, lines: list[str]) -> None:
        lines[:] = for_sphinx(list(lines), value)

    app.connect("autodoc-process-docstring", process, priority=100)  # before napoleon
