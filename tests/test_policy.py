"""The files with which the project meets its users are complete and agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.test_docs import help_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def test_the_citation_names_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_each_form_is_valid_and_asks_for_commands_that_exist(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    for command, option in re.findall(r"`headrace (\w+)(?: (--[a-z]+))?", path.read_text()):
        assert option in help_of(command)


def test_a_vulnerability_and_misconduct_are_reported_where_only_maintainers_read() -> None:
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        assert '"Report a vulnerability"' in (ROOT / name).read_text()


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_links_of_the_policies_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
        assert "://" in target or (ROOT / target).exists(), target
