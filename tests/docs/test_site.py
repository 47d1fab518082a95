"""The pages that the site makes from the code are complete, and links on the site lead to pages and headings that exist."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from docs.site import build, commands, docstrings, reference
from headrace import checkpoint, dataio, loaders
from headrace.checkpoint import dcp
from headrace.dataio.cli import COMMANDS
from headrace.dataio.core import errors, metrics
from headrace.dataio.sidecar import settings
from headrace.loaders import AudioLoader
from tests.support.browser import Browser, needs_browser

pytestmark = pytest.mark.slow
ROOT = build.ROOT
PACKAGES = ("dataio", "loaders", "checkpoint")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build.stage(tmp_path_factory.mktemp("site") / "source")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_the_command_line_has_every_option_of_a_command(name: str, pages: dict[str, str]) -> None:
    page = pages["reference/commands.md"]
    for parser in commands.parsers(name, COMMANDS[name][0]):
        assert f" `{parser.prog}`\n" in page
        section = page.partition(f" `{parser.prog}`\n")[2].split("\n#")[0]
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        for option in (option for action in shown for option in action.option_strings):
            assert option in section or option in ("-h", "--help"), f"{parser.prog} {option}"


def test_every_public_name_is_documented() -> None:
    documented = {name.rpartition(".")[2] for name in reference.documented()}
    public = {*headrace.__all__, *dataio.__all__, *loaders.__all__, *checkpoint.__all__, *dcp.__all__}
    assert public <= documented


def test_settings_have_every_setting_and_every_variable_that_the_code_reads(pages: dict[str, str]) -> None:
    page = pages["reference/settings.md"]
    assert all(f"| `{setting.name}` |" in page for setting in settings.SETTINGS)
    code = "".join(path.read_text() for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py"))
    for_tests = {"HEADRACE_CRASH", "HEADRACE_CRASH_MARK", "HEADRACE_HOLD", "HEADRACE_OPTIONS"}
    read = set(re.findall(r'"(HEADRACE_[A-Z0-9_]*[A-Z0-9])"', code)) - for_tests
    read |= {f"{settings.PREFIX}CONFIG"}
    assert read == set(reference.VARIABLES)


def test_metrics_have_every_metric_that_the_code_declares(pages: dict[str, str]) -> None:
    page = pages["reference/metrics.md"]
    declared = {family.name for family in metrics.REGISTRY.collect()}
    code = (ROOT / "dataio" / "sidecar" / "metrics.py").read_text()
    declared |= set(re.findall(r'"(headrace_[a-z_]+[a-z])"', code))
    assert declared
    assert [name for name in sorted(declared) if f"`{name}" not in page] == []


def test_errors_have_every_class(pages: dict[str, str]) -> None:
    kinds = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert all(f"| `{kind.__name__}` |" in pages["reference/errors.md"] for kind in kinds)


def test_a_loader_has_its_own_arguments_and_the_shared_ones() -> None:
    lines = docstrings.for_sphinx((inspect.getdoc(AudioLoader) or "").split("\n"), AudioLoader)
    text = "\n".join(lines)
    assert all(f"\n    {name} (" in text for name in ("window", "batch_size", "num_threads", "storage_options"))
    assert "help(AudioLoader" not in text
    assert "``batch_size``" in text or "``packing``" in text


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}


def broken(pages: dict[str, str]) -> list[str]:
    """Links between pages of the site that lead nowhere."""
    known = {name: anchors(text) for name, text in pages.items()}
    found = list[str]()
    for name, text in pages.items():
        for part in build._BLOCK.split(text):
            for image, _, target, anchor in build._LINK.findall("" if part.startswith("```") else part):
                if image or "://" in target:
                    continue
                page = os.path.normpath(Path(name).parent / target) if target else name
                if page not in known or (anchor and anchor[1:] not in known[page]):
                    found.append(f"{name}: {target}{anchor}")
    return found


def test_links_between_pages_lead_to_pages_and_headings(pages: dict[str, str]) -> None:
    assert broken(pages) == []


def test_a_broken_link_is_found() -> None:
    pages = {
        "a.md": "# A\n\n[b](b.md) [c](c.md) [d](b.md#d) [e](b.md#the-end-of-b)\n",
        "b.md": "# B\n\n## The end of `b`\n",
    }
    assert broken(pages) == ["a.md: c.md", "a.md: b.md#d"]


def test_every_page_is_in_a_table_of_contents(pages: dict[str, str]) -> None:
    listed = {"index.md"}
    for name, text in pages.items():
        for entries in re.findall(r"^:::\{toctree\}\n(.*?)^:::", text, re.DOTALL | re.MULTILINE):
            for entry in (line for line in entries.splitlines() if line and not line.startswith(":")):
                found = re.search(r"<(.+)>", entry)  # `Title <page>`, or the page alone
                path = os.path.normpath(Path(name).parent / (found[1] if found else entry))
                listed |= {known for known in pages if Path(known).match(f"{path}.md")}
    assert sorted(set(pages) - listed) == []


def test_a_picture_for_one_theme_is_shown_in_that_theme_only(pages: dict[str, str]) -> None:
    page = pages["reference/sidecar.md"]
    assert "(../pictures/status-light.png){.only-light}" in page
    assert "(../pictures/status-dark.png){.only-dark}" in page
    assert "cache.svg){" not in pages["explanation/cache.md"]


def test_a_build_begins_with_an_empty_folder_and_removes_only_a_site(tmp_path: Path) -> None:
    site, other = tmp_path / "site", tmp_path / "other"
    for folder, marker in ((site, ".buildinfo"), (other, "notes.txt")):
        (folder / "howto").mkdir(parents=True)
        (folder / "howto" / "migrate.html").write_text("a page that nothing lists")
        (folder / marker).write_text("")
    build.make_empty(site)
    assert not site.exists()
    build.make_empty(site)
    with pytest.raises(ValueError, match="has files that are not a site"):
        build.build(other)
    assert (other / "howto" / "migrate.html").exists()


def test_the_texts_for_language_models_name_every_page(pages: dict[str, str], tmp_path: Path) -> None:
    build.write_texts(pages, tmp_path)
    listing, whole = (tmp_path / "llms.txt").read_text(), (tmp_path / "llms-full.txt").read_text()
    assert all(listing.count(f"({name.removesuffix('.md')}.html)") == 1 for name in pages if name != "index.md")
    headings = [line for line in listing.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    first = listing.partition(headings[0])[2].partition(headings[1])[0]
    assert all(f"({page}.html)" in first for page in ("start", "howto/install", "reference/features"))
    assert listing.index("(start.html)") < listing.index("(tutorials/index.html)") < listing.index("(howto/index.html)")
    assert build.title(pages["start.md"]) in whole


@needs_browser
def test_the_search_finds_pages_from_a_file_url_the_glossary_first(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    shutil.copy(build.DOCS / "site" / "conf.py", source)
    shutil.copytree(build.DOCS / "_static", source / "_static")
    (source / "design").mkdir()
    for name in ("index", "a", "glossary", "design/0001-a"):
        (source / f"{name}.md").write_text(f"---\norphan:\n---\n# The page {name}\n\nA tombstone.\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(source), str(site := tmp_path / "site")]
    subprocess.run(command, check=True, cwd=ROOT)
    results = "[...document.querySelectorAll('#search-results li a')].map(link => link.getAttribute('href'))"
    with Browser(tmp_path / "profile") as browser:
        browser.look(f"{(site / 'search.html').as_uri()}?q=tombstone", 1280, 900, "light")
        browser.wait_until(f"{results}.length == 4")
        assert browser.evaluate(results) == ["glossary.html", "a.html", "index.html", "design/0001-a.html"]
        assert browser.errors == []
