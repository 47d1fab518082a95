"""Renders the Helm chart with the `helm` command or the package helm-python-sdk (Helm's own code), and records the result.

    python -m tests.support.helm_chart          record what the chart renders for every file in its folder ci/
    python -m tests.support.helm_chart FILE     print what it renders for one file of values, as a YAML stream
    python -m tests.support.helm_chart --lint   lint the chart with each of the files

Invariant: `tests/deploy/rendered` holds the objects for each file of values, and the digest of the chart that rendered
them. So a machine without Helm still checks the objects, and notices a chart that was changed without rendering again.
The package runs in a process of its own, because its library brings a runtime with signal handlers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
CASES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "headrace", "training"
HELM = shutil.which("helm")
AVAILABLE = HELM is not None or importlib.util.find_spec("helm_python") is not None


def chart_digest() -> str:
    """The SHA-256 of the chart's templates, values and metadata. The linked files have tests of their own."""
    digest = hashlib.sha256()
    files = [path for path in CHART.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(files):
        digest.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def objects(text: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of a YAML stream, by kind and name."""
    found = [document for document in yaml.safe_load_all(text) if document]
    return sorted(found, key=lambda document: (document["kind"], document["metadata"]["name"]))


def rendered(values: Path) -> list[dict[str, Any]]:
    """What the chart renders, by a process of its own. `RuntimeError` has Helm's message."""
    done = _run(str(values))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return objects(done.stdout)


def lint() -> subprocess.CompletedProcess[str]:
    return _run("--lint")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.helm_chart", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def _render(values: Path) -> str:
    if HELM is not None:
        command = [HELM, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(values)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=100).stdout
    helm: Any = importlib.import_module("helm_python")
    given = yaml.safe_load(values.read_text())
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(given)
        texts = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    return "\n---\n".join(text for name, text in texts.items() if name.endswith(".yaml"))


def _lint() -> list[str]:
    """The problems that `helm lint --strict` finds."""
    problems = []
    for values in CASES:
        if HELM is not None:
            command = [HELM, "lint", "--strict", str(CHART), "--values", str(values)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            problems += [done.stdout] if done.returncode else []
        else:
            helm: Any = importlib.import_module("helm_python")
            report = helm.lint(CHART, yaml.safe_load(values.read_text()), strict=True)
            problems += [str(found) for found in report["messages"] if found["severity"] > 1] + report["errors"]
    return problems


def _record() -> None:
    RENDERED.mkdir(exist_ok=True)
    for values in CASES:
        text = yaml.safe_dump_all(objects(_render(values)), sort_keys=True, width=120)
        (RENDERED / values.name.replace("-values", "")).write_text(text)
    (RENDERED / "chart.sha256").write_text(chart_digest() + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--lint"]:
        found = _lint()
        print(*found, sep="\n")
        sys.exit(bool(found))
    elif sys.argv[1:]:
        print(_render(Path(sys.argv[1])))
    else:
        _record()
