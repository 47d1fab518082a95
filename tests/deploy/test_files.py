"""What is in deploy/ is accepted by the tools that read it, and names nothing that does not exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import systemd
from headrace.dataio.sidecar.metrics import TierMetrics
from headrace.dataio.sidecar.settings import PREFIX, SETTINGS
from headrace.dataio.sidecar.status import StatusView

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "headrace-sidecar@.service"
PROMTOOL = shutil.which("promtool")
ANALYZE = shutil.which("systemd-analyze")
TIER: dict[str, Any] = {
    "budget_bytes": 1,
    "used_bytes": 1,
    "kept": [],
    "trouble": "",
    "buddy": {"trouble": "", "waiting": 0, "sent_bytes": 0, "copies": [{"run": "exp", "age_seconds": 1.0}]},
    "recalled": {"found": 0},
    "guests": {"peers": 0, "received_bytes": 0, "refused": {"tls": 0}},
}
"""What a daemon with a tier and buddies says."""
POLICY = DEPLOY / "kubernetes" / "networkpolicy.yaml"
MANIFESTS = sorted({*(DEPLOY / "kubernetes").glob("*.yaml")} - {POLICY})


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names of all series that a daemon with a job and a save shows."""
    cache = {"budget_bytes": 1, "in_flight_bytes": 0, "waiting": 0, "paused": False, "fetched_bytes": 0}
    view, tier = StatusView(lambda: (cache, ())), TierMetrics(lambda: TIER)
    view.start()
    REGISTRY.register(tier)
    try:
        view.job_stats.report(1, 1, m.Report(1, "g", "exp", wall=1.0, steps=1, step=3, committed=time.time()))
        view.saves.room = lambda: {"retrying": 0, "retry_limit_seconds": 3600.0}
        view.tick()
        view.job_stats.report(1, 1, m.Report(1, "g", "exp", wall=2.0, steps=2, step=3, committed=time.time()))
        text = generate_latest(REGISTRY).decode()
    finally:
        REGISTRY.unregister(tier)
        view.close()
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")} | {"up"}


def _named(expression: str) -> set[str]:
    return set(re.findall(r"\bheadrace_[a-z0-9_]+", expression))


def test_every_query_of_the_dashboard_names_a_metric_that_exists(metrics: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) >= 14
    for query in queries:
        assert _named(query), query
        assert _named(query) <= metrics, query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package: prometheus)")
def test_the_dashboards_queries_are_promql(tmp_path: Path) -> None:
    board = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"q:{n}", "expr": query.replace("$__rate_interval", "5m").replace("$job", ".*")}
        for n, query in enumerate(queries)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": rules}]}))
    _promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_every_rule_names_a_metric_that_exists(metrics: set[str]) -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert _named(rule["expr"]) - {"headrace_goodput"} <= metrics, rule
    assert sum("alert" in rule for rule in rules) == 9


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package: prometheus)")
def test_promtool_accepts_the_scrape_and_the_rules_and_the_alerts_fire_as_they_should() -> None:
    folder = DEPLOY / "prometheus"
    _promtool("check", "config", str(folder / "agent.yml"))
    _promtool("test", "rules", str(folder / "rules.test.yml"))


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian's package: prometheus)")
def test_the_metrics_follow_prometheus_conventions(metrics: set[str]) -> None:
    cache = {"fetched_bytes": 0, "budget_bytes": 1, "in_flight_bytes": 0, "waiting": 0, "paused": False}
    view = StatusView(lambda: (cache, ()))
    view.start()
    try:
        view.job_stats.report(1, 1, m.Report(1, "g", 'exp"\n\\', wall=1.0, steps=1))
        view.tick()
        _promtool("check", "metrics", text=generate_latest(REGISTRY))
    finally:
        view.close()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_schemas_accept_the_manifests(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not here")
    manifest = yaml.safe_load(path.read_text())
    for version in ("1.30", "1.34"):
        validate.validate(manifest, version, strict=True)
    manifest["spec"]["template"]["spec"]["initContainers"][0]["imagee"] = "x"  # and would refuse a wrong one
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest, "1.34", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_say_what_the_daemon_understands(path: Path) -> None:
    pod = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]
    containers = pod["initContainers"] + pod["containers"]
    (sidecar,) = [c for c in containers if c["name"] == "sidecar"]
    given = {entry["name"]: entry["value"] for entry in sidecar["env"]}
    known = {f"{PREFIX}{setting.name.upper()}": setting for setting in SETTINGS}
    for name, value in given.items():
        known[name].parse(value)
    mounts = [mount["mountPath"] for mount in sidecar["volumeMounts"]]
    assert all(
        any(value.startswith(f"{mount}/") or value == mount for mount in mounts)
        for value in given.values()
        if value[0] == "/"
    )
    assert pod["securityContext"]["runAsNonRoot"]
    for container in containers:
        locked = container["securityContext"]
        assert locked["readOnlyRootFilesystem"]
        assert not locked["allowPrivilegeEscalation"]
        assert locked["capabilities"]["drop"] == ["ALL"]
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"]), "a tag can be moved"


def test_the_network_policy_is_that_of_the_training_pods_and_leaves_the_metadata_service_out() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not here")
    text = POLICY.read_text()
    policy = yaml.safe_load(text)
    every_cluster = yaml.safe_load(re.sub(r"(?m)^#(?=    )", "", text))
    for version in ("1.30", "1.34"):
        validate.validate(policy, version, strict=True)
        validate.validate(every_cluster, version, strict=True)
    job = yaml.safe_load((POLICY.parent / "native-sidecar.yaml").read_text())
    assert job["spec"]["template"]["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    dns, metadata = {"169.254.20.10/32": {53}}, {"169.254.169.254/32": {80}, "169.254.170.23/32": {80}}
    assert _ports(policy) == {**dns, "0.0.0.0/0": {443}}
    assert _ports(every_cluster) == {**dns, **metadata, "0.0.0.0/0": {443}}
    assert [to["ipBlock"]["except"] for to in policy["spec"]["egress"][-1]["to"]] == [["169.254.0.0/16"]]


def _ports(policy: Any) -> dict[str, set[int]]:
    """The ports that pods may reach, by block of addresses."""
    return {
        to["ipBlock"]["cidr"]: {port["port"] for port in rule["ports"]}
        for rule in policy["spec"]["egress"]
        for to in rule["to"]
        if "ipBlock" in to
    }


def _unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and line[0] not in "#[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_gives_the_daemon_time_to_drain_and_says_what_it_understands() -> None:
    unit = _unit()
    known = {f"{PREFIX}{setting.name.upper()}": setting for setting in SETTINGS}
    for entry in unit["Environment"]:
        name, _, value = entry.partition("=")
        known[name].parse(value)
    drain = known[f"{PREFIX}DRAIN_SECONDS"].default
    assert drain is not None
    assert int(unit["TimeoutStopSec"][0]) > float(drain)
    assert unit["Type"] == ["notify"]


def test_the_socket_unit_makes_the_socket_that_the_service_and_trainers_are_told_of() -> None:
    text = UNIT.with_suffix(".socket").read_text()
    path = re.search(r"^ListenStream=(.*)$", text, re.M)
    assert path is not None
    assert _unit()["Environment"][0] == f"{PREFIX}SOCKET={path[1]}"
    assert re.search(rf"^FileDescriptorName={systemd.NAME}$", text, re.M)


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    copy = tmp_path / "headrace-sidecar@root.service"
    copy.write_text(UNIT.read_text().replace("/opt/headrace/bin/headrace", "/bin/true"))
    socket = tmp_path / "headrace-sidecar@root.socket"
    socket.write_text(UNIT.with_suffix(".socket").read_text())
    verified = subprocess.run(
        [str(ANALYZE), "verify", str(copy), str(socket)], capture_output=True, text=True, timeout=150
    )
    assert "headrace" not in verified.stdout + verified.stderr
    command = [str(ANALYZE), "security", "--offline=true", "--threshold=25", str(copy)]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if "unrecognized option" in judged.stderr:
        pytest.skip("this systemd-analyze judges no units offline")
    assert judged.returncode == 0, judged.stdout[-2000:]
    assert "Overall exposure level" in judged.stdout


def test_the_image_installs_exact_versions_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert "--constraint constraints.txt" in text
    assert re.search(r"^USER 1000:1000$", text, re.M)
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}"}, "the base image is given with its digest"
    assert re.search(r"^ARG BASE$", text, re.M)
    assert (DEPLOY.parent / "constraints.txt").exists()


def test_the_image_is_built_from_what_is_installed_and_nothing_else() -> None:
    """A virtual environment, the repository's history or somebody's data beside the code would all be sent to the builder."""
    root = DEPLOY.parent
    nothing, *but = [line for line in (root / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (package,) = (name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"])
    packages = [package, *(path.name for path in (root / package).iterdir() if path.is_symlink())]
    files = ["pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]]
    assert nothing == "*"
    assert {line.removeprefix("!") for line in but if line[0] == "!"} == {*packages, *files}
    assert all((root / name).exists() for name in [*packages, *files])


def test_the_image_reads_s3_by_the_quick_client_and_runs_the_quick_loop() -> None:
    (extras,) = re.findall(r"'\.\[(.*)\]'", (DEPLOY / "docker" / "Dockerfile").read_text())
    assert {"s3", "sidecar"} <= set(extras.split(","))


def test_make_image_wants_a_base_image_with_its_digest() -> None:
    for base in ("", "BASE=python:3.11-slim-bookworm"):
        done = subprocess.run(
            ["make", "-s", "image", *filter(None, [base])], cwd=DEPLOY.parent, capture_output=True, text=True
        )
        assert done.returncode != 0
        assert "give the base image with its digest" in done.stdout
    base = f"BASE=python@sha256:{'1' * 64}"
    said = subprocess.run(["make", "-n", "image", base, "IMAGE=x/y"], cwd=DEPLOY.parent, capture_output=True, text=True)
    assert f"docker build -f deploy/docker/Dockerfile -t x/y --build-arg {base} ." in said.stdout


def _promtool(*arguments: str, text: bytes | None = None) -> Any:
    done = subprocess.run([str(PROMTOOL), *arguments], input=text, capture_output=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
