# SPDX-License-Identifier: Apache-2.0
"""Every example runs: as a process of its own, the clients against one server of a small model."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import BOOK, MODEL, ROOT
from tests.engine.server import Server

EXAMPLES = ROOT / "examples"
FLAGS = ["--kv-policy", "sink", "--kv-budget", "384", "--kv-recall", "8"]
FLAGS += ["--max-model-len", "100000", "--kv-cache-memory-bytes", str(256 << 20)]
FLAGS += ["--max-num-seqs", "4", "--enforce-eager"]
FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("examples") / "log"
    server = Server(log, FLAGS, model=real_model)
    yield server.wait()
    server.stop()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """8,000 characters of a book, about 2,000 tokens."""
    path = tmp_path / "book.txt"
    path.write_text(BOOK.read_text()[5000:13000])
    return path


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def url(server: Server) -> list[str]:
    return ["--url", f"http://127.0.0.1:{server.port}/v1"]


def test_offline_batch(text: Path) -> None:
    shown = run("offline_batch.py", "--model", MODEL, "--budget", 256, text)
    (evicted,) = re.findall(r"^tokens evicted: ([\d,]+)$", shown, re.MULTILINE)
    (tokens,) = re.findall(r"^book.txt, ([\d,]+) tokens: ", shown, re.MULTILINE)
    read = int(tokens.replace(",", "")) + 31  # the last answered token is not attended
    assert int(evicted.replace(",", "")) == read - 4 - 256


def test_per_request_budgets(server: Server, text: Path) -> None:
    small, whole, large = run(
        "per_request_budgets.py", *url(server), "--budgets", 64, 384, 512, "--", text
    ).splitlines()
    assert small.startswith("   64: '") and whole.startswith("  384: '") and small != whole
    assert "refused: kv_budget 512 is more than the server's --kv-budget 384" in large


def test_recall(server: Server, text: Path) -> None:
    found, lost = run("recall.py", *url(server), text).splitlines()
    assert found.startswith("with recall: 71432")
    assert lost.startswith("without recall: ") and "71432" not in lost


def test_agent_with_tools(server: Server, text: Path) -> None:
    before = server.metric("vllm:kv_policy_evicted_tokens_total")
    question = "Who is Sir Walter?"
    *read, last = run(
        "agent_with_tools.py", *url(server), "--turns", 3, text, question
    ).splitlines()
    assert read and all(
        re.fullmatch(r"[\d,]+ tokens: read_page {'page': \d}", line) for line in read
    )
    assert re.fullmatch(r"[\d,]+ tokens: finish {'answer': .+}", last)
    assert server.metric("vllm:kv_policy_evicted_tokens_total") > before


def test_the_dashboard_names_metrics_of_the_server(server: Server) -> None:
    server.complete([1, 2, 3], 2)
    exported = set(re.findall(r"^(\w+(?::\w+)*){", server.get("/metrics"), re.MULTILINE))
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    named = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert len(queries) > 10 and len(rules) == 4
    assert named <= exported
    ours = set(re.findall(r"^(vllm:kv_policy_\w+){", server.get("/metrics"), re.MULTILINE))
    assert {name for name in ours if not name.endswith("_created")} <= named


def test_probes_of_the_manifest_are_answered(server: Server) -> None:
    service, deployment = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == container["ports"][0]["name"]
        server.get(get["path"])
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    flags = [argument for argument in container["args"] if argument.startswith("--kv-")]
    assert flags == ["--kv-policy=sink", "--kv-budget=2048", "--kv-recall=8"]
