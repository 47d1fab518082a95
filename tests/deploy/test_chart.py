"""The Helm chart: what it renders is valid for Kubernetes, says what the daemon understands, and was rendered by Helm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar import settings
from headrace.dataio.sidecar.settings import PREFIX, SETTINGS
from tests.dataio.sidecar.conftest import wait_for
from tests.support import helm_chart

CHART, ROOT = helm_chart.CHART, helm_chart.ROOT
NAMES = [path.name.removesuffix("-values.yaml") for path in helm_chart.CASES]
needs_helm = pytest.mark.skipif(
    not helm_chart.AVAILABLE, reason="no helm here: neither the command nor the package helm-python-sdk"
)
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = required | (optional or {})
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def _resource(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object({"name": {"type": "string"}, "labels": LABELS})
    return _object({"apiVersion": {"const": version}, "kind": {"type": "string"}, "metadata": metadata, "spec": spec})


TEXTS = {"type": "array", "items": {"type": "string"}}
# the part of these resources that the chart uses; Kubernetes' own schemas do not have them
CUSTOM = {
    "Certificate": _resource(
        "cert-manager.io/v1",
        _object(
            {
                "secretName": {"type": "string"},
                "issuerRef": _object({"name": {"minLength": 1}}, {"kind": {}, "group": {}}),
            },
            {
                "duration": {"pattern": "^[0-9]+h$"},
                "renewBefore": {"pattern": "^[0-9]+h$"},
                "dnsNames": TEXTS,
                "ipAddresses": TEXTS,
                "usages": {"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
                "privateKey": _object(
                    {"algorithm": {"const": "ECDSA"}, "size": {"const": 256}, "rotationPolicy": {"const": "Always"}}
                ),
            },
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        _object(
            {
                "selector": _object({"matchLabels": LABELS}),
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": _object(
                        {"port": {"type": "string"}, "path": {"const": "/metrics"}},
                        {"interval": {"pattern": "^[0-9]+s$"}, "honorLabels": {"const": True}},
                    ),
                },
            },
            {"jobLabel": {"type": "string"}},
        ),
    ),
}


def recorded(name: str) -> list[dict[str, Any]]:
    return helm_chart.objects((helm_chart.RENDERED / f"{name}.yaml").read_text())


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The templates of pods."""
    for found in objects:
        if "template" in found.get("spec", {}):
            yield found["spec"]["template"]


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for pod in pods(objects):
        for container in pod["spec"]["initContainers"] + pod["spec"]["containers"]:
            yield pod["spec"], container


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [found for found in objects if found["kind"] == kind]
    return found


def test_the_recorded_objects_are_those_of_this_chart() -> None:
    found = (helm_chart.RENDERED / "chart.sha256").read_text().strip()
    assert found == helm_chart.chart_digest(), "the chart was changed: run python -m tests.support.helm_chart"
    assert {path.stem for path in helm_chart.RENDERED.glob("*.yaml")} == set(NAMES)


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_helm_renders_what_is_recorded(name: str) -> None:
    assert helm_chart.rendered(CHART / "ci" / f"{name}-values.yaml") == recorded(name)


@needs_helm
def test_helm_lint_finds_nothing() -> None:
    done = helm_chart.lint()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_accepts_each_object(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not here")
    for found in recorded(name):
        if found["kind"] in CUSTOM:
            jsonschema.validate(found, CUSTOM[found["kind"]])
            continue
        for version in ("1.30", "1.34"):
            validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_each_variable_is_a_setting_with_a_valid_value_below_a_mount(name: str) -> None:
    known = {f"{PREFIX}{setting.name.upper()}": setting for setting in SETTINGS}
    for _, container in containers(recorded(name)):
        given = {entry["name"]: str(entry.get("value", "")) for entry in container.get("env", [])}
        assert len(given) == len(container.get("env", [])), "a variable is set twice"
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for variable, value in given.items():
            if not variable.startswith(PREFIX):
                continue
            if variable != f"{PREFIX}CONFIG":
                known[variable].parse(value)
            for path in value.split(",") if value.startswith("/") else ():
                assert any(path.startswith(f"{mount}/") or path == mount for mount in mounts), path


@pytest.mark.parametrize("name", NAMES)
def test_no_container_may_do_more_than_it_needs(name: str) -> None:
    for pod, container in containers(recorded(name)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        if container["name"] != "directories":  # makes the daemon's directories, and ends
            assert not security["capabilities"].get("add")
            assert security.get("runAsUser", pod["securityContext"]["runAsUser"]) != 0
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"]), "a tag can be moved"
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_has_more_time_to_end_than_the_daemon_to_drain(name: str) -> None:
    for pod, container in containers(recorded(name)):
        for entry in container.get("env", []):
            if entry["name"] == f"{PREFIX}DRAIN_SECONDS":
                assert pod["terminationGracePeriodSeconds"] > int(entry["value"])


def test_each_node_sends_its_steps_to_the_next_and_its_certificate_has_its_name(tmp_path: Path) -> None:
    objects = recorded("nodes")
    daemonset = one(objects, "DaemonSet")["spec"]["template"]["spec"]
    (sidecar,) = daemonset["containers"]
    given = {entry["name"]: entry["value"] for entry in sidecar["env"] if "value" in entry}
    terms = daemonset["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    buddies = {}
    for file, text in one(objects, "ConfigMap")["data"].items():
        (tmp_path / file).write_text(text)
        environ = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        environ[f"{PREFIX}CONFIG"] = str(tmp_path / file)
        tier = settings.read({}, environ).config.tier
        assert tier is not None
        assert tier.buddy is not None
        assert tier.buddy.host in tier.welcome
        buddies[file.removesuffix(".toml")] = tier.buddy
        assert given[f"{PREFIX}CONFIG"].replace("$(NODE_NAME)", file.removesuffix(".toml")).endswith(file)
    assert {node: str(buddy) for node, buddy in buddies.items()} == {
        "node-a1": "10.0.0.2:9470",
        "node-b1": "[fd00::3]:9470",
        "node-a2": "node-a1:9470",
    }
    assert [term["matchFields"][0]["values"] for term in terms] == [["node-a1"], ["node-b1"], ["node-a2"]]
    certificate = one(objects, "Certificate")["spec"]
    assert {*certificate["dnsNames"], *certificate["ipAddresses"]} == {buddy.host for buddy in buddies.values()}
    (secret,) = [volume["secret"] for volume in daemonset["volumes"] if "secret" in volume]
    assert secret["secretName"] == certificate["secretName"]


@pytest.mark.parametrize("name", ["nodes", "job"])
def test_the_pod_monitor_finds_the_daemons_port_under_the_name_that_the_alerts_use(name: str) -> None:
    objects = recorded(name)
    monitor = one(objects, "PodMonitor")["spec"]
    (pod,) = pods(objects)
    labels = pod["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    rules = (CHART / "files" / "rules.yml").read_text()
    assert f'up{{job="{labels[monitor["jobLabel"]]}"}}' in rules
    ports = [
        port
        for container in pod["spec"]["initContainers"] + pod["spec"]["containers"]
        for port in container.get("ports", [])
    ]
    assert monitor["podMetricsEndpoints"][0]["port"] in {port["name"] for port in ports}


def test_the_network_policy_is_that_of_the_jobs_pods_and_names_the_store() -> None:
    objects = recorded("job")
    policy = one(objects, "NetworkPolicy")["spec"]
    (pod,) = pods(objects)
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"][-1] == {
        "to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}],
        "ports": [{"port": 9000, "protocol": "TCP"}],
    }


def test_the_schema_takes_the_values_that_the_guide_shows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    page = (ROOT / "docs" / "howto" / "deploy-kubernetes.md").read_text()
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    shown = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    values = [each for each in shown if "spec" not in each]  # the rest is a part of a pod
    assert len(values) == 3
    for each in values:
        if "image" in each:
            each["image"]["digest"] = f"sha256:{'1' * 64}"  # the page leaves it out
        jsonschema.validate(_merged(defaults, each), schema)


def _merged(defaults: Any, given: Any) -> Any:
    """Values over the defaults, as Helm merges them: objects by their entries, everything else as a whole."""
    if not (isinstance(defaults, dict) and isinstance(given, dict)):
        return given
    return defaults | {name: _merged(defaults.get(name), value) for name, value in given.items()}


def test_the_schema_takes_the_defaults_and_each_setting_of_the_daemon_once() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(defaults, schema)
    assert set(schema["properties"]) == {*defaults, "global"}
    set_by_templates = {
        name.lower()
        for path in (CHART / "templates").glob("*.yaml")
        for name in re.findall(rf"{PREFIX}([A-Z_]+)", path.read_text())
    } | set(re.findall(r"(?m)^    (buddy\w*) = ", (CHART / "templates" / "buddies.yaml").read_text()))
    free = set(schema["properties"]["settings"]["properties"])
    assert free == {setting.name for setting in SETTINGS} - set_by_templates
    refused: list[dict[str, Any]] = [
        {"settings": {"cache_byte": 1}},
        {"image": {"repository": "r", "digest": "latest"}},
        {"cache": {"tiers": []}},
    ]
    for wrong in refused:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(defaults | wrong, schema)


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "image.digest is not set"),
        ({"buddies": {"enabled": True}}, "needs localTier.enabled"),
        (
            {"localTier": {"enabled": True}, "buddies": {"enabled": True, "nodes": [{"name": "a"}]}},
            "two nodes at least",
        ),
        ({"podMonitor": {"enabled": True}}, "needs metrics.enabled"),
        ({"settings": {"nonsense": 1}}, "nonsense"),
        ({"cache": {"tiers": [{"hostPath": "relative", "size": "1GiB"}]}}, "tiers"),
        ({"job": {"enabled": True}}, "job.image is not set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_with_the_next_step(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"image": {"digest": f"sha256:{'1' * 64}"}} | values if values else {}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(RuntimeError, match=message):
        helm_chart.rendered(tmp_path / "values.yaml")


@needs_helm
@pytest.mark.parametrize("base", ["", "https://wiki.example/x"], ids=["none", "given"])
def test_alerts_and_the_dashboard_are_those_of_the_repository(base: str, tmp_path: Path) -> None:
    more = {
        "prometheusRule": {"enabled": True, "runbookBase": base},
        "dashboard": {"enabled": True},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"image": {"digest": f"sha256:{'1' * 64}"}} | more))
    objects = helm_chart.rendered(tmp_path / "values.yaml")
    text = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    expected = yaml.safe_load(text.replace("runbook_url: ", f"runbook_url: {base}/") if base else text)
    assert one(objects, "PrometheusRule")["spec"] == expected
    board = (ROOT / "deploy" / "grafana" / "headrace.json").read_text()
    assert json.loads(one(objects, "ConfigMap")["data"]["headrace.json"]) == json.loads(board)


@pytest.mark.parametrize("name", ["default", "job"])
def test_a_daemon_starts_with_what_the_chart_gives_it_and_its_probes_answer(name: str, tmp_path: Path) -> None:
    """The daemon's real process, with the pod's paths below a folder, and ports that are free."""
    (container,) = [found for _, found in containers(recorded(name)) if found["name"] == "sidecar"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"].startswith(PREFIX)}
    with tempfile.TemporaryDirectory(prefix="ch-") as folder:
        for mount in container["volumeMounts"]:
            (Path(folder) / mount["mountPath"].lstrip("/")).mkdir(mode=0o700, parents=True)
        given = {key: f"{folder}{value}" if value[0] == "/" else value for key, value in given.items()}
        given[f"{PREFIX}CACHE_DIR"] = given[f"{PREFIX}CACHE_DIR"].replace("500GiB", "64MiB")
        given |= {f"{PREFIX}HTTP_PORT": "0"} | ({f"{PREFIX}METRICS_LISTEN": "127.0.0.1:0"} if name == "job" else {})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")} | given
        command = [sys.executable, "-m", "headrace.dataio.cli"]
        with subprocess.Popen([*command, *container["args"]], env=environment, cwd=ROOT) as daemon:
            try:
                probe = container["startupProbe"].get("exec", {}).get("command", ["headrace", "sidecar", "status"])
                probe = [word.replace("/run/", f"{folder}/run/") for word in probe[1:]]
                asked = environment | {"HEADRACE_SIDECAR": given[f"{PREFIX}SOCKET"]}
                said: dict[str, Any] = {}

                def ready() -> bool:
                    assert daemon.poll() is None
                    done = subprocess.run(
                        [*command, *probe, "--json"], env=asked, cwd=ROOT, capture_output=True, text=True
                    )
                    said.update(json.loads(done.stdout) if done.returncode == 0 else {})
                    return bool(said)

                wait_for(ready)
                for port, path in (
                    (said["http_port"], "readyz"),
                    (said["http_port"], "livez"),
                    (said["metrics_port"], "metrics"),
                ):
                    if port is not None:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
                            assert answer.status == 200
                assert (said["metrics_port"] is not None) == (name == "job")
            finally:
                daemon.terminate()
        assert daemon.returncode == 0


def test_the_charts_version_is_that_of_the_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_a_name_that_is_no_setting_would_be_refused() -> None:
    with pytest.raises(UsageError):
        settings.read({}, {f"{PREFIX}NONSENSE": "1"})
