"""The runbook: a section for each alert, which the alert links to, and nothing in it that does not exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from headrace.dataio.sidecar.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "runbook.md").read_text()
FILE = ROOT / "deploy" / "prometheus" / "rules.yml"
RULES = yaml.safe_load(FILE.read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    sections = re.findall(r"(?m)^## (.*)$", PAGE)
    assert sections == [rule["alert"] for rule in ALERTS]


def test_each_section_says_what_it_means_where_to_look_and_what_to_do() -> None:
    for section in PAGE.split("\n## ")[1:]:
        assert re.findall(r"(?m)^\*\*(\w+)\.\*\*", section) == ["Meaning", "Look", "Do"], section.splitlines()[0]


def test_each_alert_links_to_its_section() -> None:
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"howto/runbook.html#{rule['alert'].lower()}"
    for target in re.findall(r"\(#(\w+)\)", PAGE):
        assert target in {rule["alert"].lower() for rule in ALERTS}


def test_the_command_in_the_rules_and_on_the_page_writes_the_address_of_the_documentation() -> None:
    (command,) = re.findall(r"(?m)^#   (sed .*) rules.yml > ", FILE.read_text())
    assert command in PAGE
    written = subprocess.run(["sh", "-c", f"{command} {FILE}"], check=True, capture_output=True, text=True).stdout
    links = re.findall(r"(?m)^ +runbook_url: (.*)$", written)
    assert links == [f"https://docs.mysite.org/headrace/howto/runbook.html#{rule['alert'].lower()}" for rule in ALERTS]


def test_each_setting_that_it_advises_exists() -> None:
    known = {setting.name for setting in SETTINGS} | {"num_threads", "runbook_url"}
    named = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE) if not name.startswith("headrace_")}
    assert named
    assert named <= known


def test_each_metric_that_it_names_is_one_that_the_daemon_shows() -> None:
    code = "".join(path.read_text() for path in (ROOT / "dataio" / "sidecar").glob("*.py"))
    for name in re.findall(r"`headrace_(\w+?)(?:_total)?`", PAGE):
        assert f"headrace_{name}" in code or f'"{name.removeprefix("staged_")}"' in code, name
