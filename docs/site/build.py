"""Build the documentation site: `make docs`, or `python -m docs.site.build [OUTPUT]`.

The pages of `docs/` and some Markdown files outside it are copied to a folder, with the pages that `reference` and
`commands` make. Sphinx reads that folder. Links between the copied files are rewritten; a link to another file of the
repository becomes its path.

Invariants: `docs/` itself is never written. The site works without a server. `llms.txt` lists all pages, and
`llms-full.txt` has their text. The output has no page of an earlier build: a site that is there is removed first.
Failure behaviour: a warning of Sphinx ends the build with exit code 1, and the site is then incomplete. A folder that
has other files is refused with exit code 2, and stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "overview.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "deploying.md",
    "CHANGELOG.md": "changes.md",
}
"""Files outside `docs/` that are pages of the site → their names there."""
GENERATED = ("reference/commands.md", "reference/settings.md", "reference/metrics.md", "reference/errors.md")
_OF_SPHINX = (".buildinfo", ".doctrees")
"""Files and folders that every build of Sphinx writes first."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def generated_pages() -> dict[str, str]:
    """The pages that are made from the code, by their path below `docs/`."""
    from docs.site import commands, reference

    pages = {f"reference/api/{name}.md": reference.api_page(name) for name in reference.API}
    pages["reference/commands.md"] = commands.command_page()
    pages["reference/settings.md"] = reference.settings_page()
    pages["reference/metrics.md"] = reference.metrics_page()
    pages["reference/errors.md"] = reference.errors_page()
    return pages


def copied_pages() -> dict[str, Path]:
    """The pages that are copied, by their path below `docs/`."""
    pages = {str(path.relative_to(DOCS)): path for path in DOCS.glob("**/*.md") if "site" not in path.parts[-2:-1]}
    return pages | {name: ROOT / path for path, name in OUTSIDE.items()}


def site_text(name: str, path: Path, places: Mapping[Path, str]) -> str:
    """The text of the page `name` for Sphinx.

    Args:
        name: The page's path on the site.
        path: The file that is copied.
        places: Each copied file, with its path on the site.
    """

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if image or not target or "://" in target or target.startswith("mailto:"):
            return match[0] if not image else f"![{words}]({_below(name, path, target)}){_theme(target)}"
        file = Path(os.path.normpath(path.parent / target))
        if file in places:
            return f"[{words}]({os.path.relpath(places[file], Path(name).parent)}{anchor})"
        relative = file.relative_to(ROOT)
        if str(relative).startswith("docs/") and str(relative.relative_to("docs")) in GENERATED:
            return match[0]
        return f"`{relative}`" if words.strip("`") in (str(relative), file.name) else f"{words} (`{relative}`)"

    parts = _BLOCK.split(path.read_text())
    return "".join(_shell(part) if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _theme(image: str) -> str:
    """The class of a picture that is for one theme only: `X-light.png` or `X-dark.png`."""
    found = re.search(r"-(light|dark)\.png$", image)
    return f"{{.only-{found[1]}}}" if found else ""


def _below(name: str, path: Path, target: str) -> str:
    """The path of an image from the page `name`."""
    file = Path(os.path.normpath(path.parent / target))
    return os.path.relpath(file.relative_to(DOCS), Path(name).parent)


def _shell(block: str) -> str:
    """A block of commands without prompts is highlighted as shell commands, not as the output of a console."""
    return block.replace("```console", "```sh", 1) if "\n$ " not in block else block


def stage(folder: Path) -> dict[str, str]:
    """Write all pages, pictures and settings of Sphinx to `folder`, and return the pages' texts by name."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "pictures", folder / "pictures")
    shutil.copytree(DOCS / "_static", folder / "_static")
    shutil.copy(DOCS / "site" / "conf.py", folder)
    copied = copied_pages()
    places = {path: name for name, path in copied.items()}
    pages = {name: site_text(name, path, places) for name, path in copied.items()} | generated_pages()
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return pages


def title(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1].replace("`", "") if found else ""


def write_texts(pages: Mapping[str, str], output: Path) -> None:
    """Write `llms.txt`, the list of pages, and `llms-full.txt`, the text of the site without notes on its design."""
    order = sorted((name for name in pages if name != "index.md"), key=_rank)
    lines = ["# Headrace", "", "> The I/O service of a training cluster: data in, checkpoints out."]
    for heading, names in _sections(order).items():
        links = [f"- [{title(pages[name])}]({name.removesuffix('.md')}.html)" for name in names]
        lines += ["", f"## {heading}", "", *links]
    (output / "llms.txt").write_text("\n".join(lines) + "\n")
    whole = [f"<!-- {name} -->\n\n{pages[name]}" for name in order if not name.startswith(("design/", "changes"))]
    (output / "llms-full.txt").write_text("\n\n".join(whole))


_FIRST = ("start.md", "overview.md", "howto/install.md", "reference/features.md")
_HEADINGS = {"tutorials": "Tutorials", "howto": "How-to", "explanation": "Explanation", "reference": "Reference"}


def _sections(names: Iterable[str]) -> dict[str, list[str]]:
    """The pages below each heading of `llms.txt`. Each page and each heading occurs once."""
    sections: dict[str, list[str]] = {"Start here": [], **{heading: [] for heading in _HEADINGS.values()}}
    sections |= {"Other pages": [], "Design notes": []}
    for name in names:
        folder = name.split("/")[0] if "/" in name else ""
        heading = "Design notes" if folder == "design" else _HEADINGS.get(folder, "Other pages")
        sections["Start here" if name in _FIRST else heading].append(name)
    sections["Start here"].sort(key=_FIRST.index)
    return {heading: found for heading, found in sections.items() if found}


_ORDER = (
    "start",
    "overview",
    "tutorials",
    "examples",
    "howto",
    "explanation",
    "reference",
    "glossary",
    "benchmarks",
    "deploying",
    "contributing",
)


def _rank(name: str) -> tuple[int, str]:
    first = name.split("/")[0].removesuffix(".md")
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER), name)


def make_empty(output: Path) -> None:
    """Remove the site of an earlier build. `ValueError` if the folder has files, but no site."""
    if output.is_dir() and any(output.iterdir()):
        if not any((output / name).exists() for name in _OF_SPHINX):
            raise ValueError(f"{output} has files that are not a site; give an empty folder, or remove it")
        shutil.rmtree(output)


def build(output: Path) -> int:
    """Build the site in `output` and return the exit code of Sphinx. `ValueError` as in `make_empty`."""
    from sphinx.cmd.build import build_main

    make_empty(output)
    source = output.with_name(f"{output.name}-source")
    pages = stage(source)
    code = build_main(["-q", "-W", "--keep-going", "-j", "auto", "-b", "html", str(source), str(output)])
    write_texts(pages, output)
    return int(code)


if __name__ == "__main__":
    chosen = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    try:
        result = build(chosen)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"file://{chosen}/index.html" if result == 0 else "the site has warnings, which are errors; see above")
    sys.exit(result)
