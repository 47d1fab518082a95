"""One self-contained HTML page: a title, a subtitle, a body and its style.

Invariant: the page has no scripts and needs no network. Its Content-Security-Policy allows neither, so text that was not
escaped by mistake cannot run. Colours follow the browser's light or dark mode.
Failure behaviour: none.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, where: str, body: str, style: str, made_by: str) -> str:
    """The page.

    Args:
        title (str): The heading, as text.
        where (str): The line below it, as text, such as a URL.
        body (str): HTML.
        style (str): CSS in addition to `base.css`.
        made_by (str): The command, for the last line.

    Returns:
        str: The HTML.
    """
    base = resources.files("headrace.checkpoint.pages").joinpath("base.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{base}{style}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="quiet">{escape(where)}</p>\n'
        f"{body}<footer>made by {escape(made_by)}</footer>\n</body>\n</html>\n"
    )


def style_of(package: str, name: str) -> str:
    """The text of a style sheet of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def write(path: Path, page: str) -> None:
    """Write the page. Characters that UTF-8 cannot express become `?`."""
    path.write_bytes(page.encode(errors="replace"))
