# SPDX-License-Identifier: Apache-2.0
"""Every example runs: as a process of its own, the clients against one server of a small model."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks.running.serving import free_port
from tests.conftest import BOOK, MODEL, ROOT
from tests.engine.server import FORKED_VLLM, Server
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.rings import RingMemory

EXAMPLES = ROOT / "examples"
FLAGS = ["--kv-policy", "sink", "--kv-budget", "384", "--kv-recall", "8"]
FLAGS += ["--max-model-len", "100000", "--kv-cache-memory-bytes", str(256 << 20)]
FLAGS += ["--max-num-seqs", "4", "--enforce-eager"]
FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
FLAGS += ["--kv-sessions", "--enable-prompt-tokens-details"]
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
KNOWN = re.compile(r"\[?([\d,]+) tokens, ([\d,]+) of them known\]?")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("examples") / "log"
    server = Server(log, FLAGS, FORKED_VLLM, STORE, real_model)
    yield server.wait()
    server.stop()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """8,000 characters of a book, about 2,000 tokens."""
    path = tmp_path / "book.txt"
    path.write_text(BOOK.read_text()[5000:13000])
    return path


def run(name: str, *arguments: object, stdin: str | None = None) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, input=stdin
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def url(server: Server) -> list[str]:
    return ["--url", f"http://127.0.0.1:{server.port}/v1"]


def test_offline_batch(text: Path) -> None:
    shown = run("offline_batch.py", "--model", MODEL, "--budget", 256, "--cache-gib", 0.1, text)
    (evicted,) = re.findall(r"^tokens evicted: ([\d,]+)$", shown, re.MULTILINE)
    (tokens,) = re.findall(r"^book.txt, ([\d,]+) tokens: ", shown, re.MULTILINE)
    read = int(tokens.replace(",", "")) + 31  # the last answered token is not attended
    assert int(evicted.replace(",", "")) == (read - 16 - 256) // 16 * 16  # in units


def test_per_request_budgets(server: Server, text: Path) -> None:
    text.write_text(text.read_text()[:3000])
    small, whole, large = run(
        "per_request_budgets.py", *url(server), "--budgets", 64, 384, 512, "--", text
    ).splitlines()
    assert small.startswith("   64: '") and whole.startswith("  384: '") and small != whole
    assert "refused: kv_budget 512 is more than the server's --kv-budget 384" in large


def test_recall(server: Server, text: Path) -> None:
    found, lost = run("recall.py", *url(server), text).splitlines()
    assert found.startswith("with recall: 71432")
    assert lost.startswith("without recall: ") and "71432" not in lost


@pytest.mark.slow
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


def known(shown: str) -> list[tuple[int, int]]:
    """Tokens of each turn's prompt, and those that were not read."""
    return [
        (int(all_of.replace(",", "")), int(old.replace(",", "")))
        for all_of, old in KNOWN.findall(shown)
    ]


@pytest.mark.slow
def test_endless_chat(server: Server, text: Path, tmp_path: Path) -> None:
    """Two clients, one after the other; only the first turn reads the text."""
    hits = server.metric('vllm:kv_session_hits_total(?={[^}]*tier="memory")')
    chat = tmp_path / "chat.json"
    options = [*url(server), "--max-tokens", 24, chat]
    first = f"Remember this text: {' '.join(text.read_text().split())[:4000]}\n"
    shown = run("endless_chat.py", *options, stdin=f"{first}Who is Sir Walter?\n")
    shown += run("endless_chat.py", *options, stdin="What is his title?\n")
    turns = known(shown)
    assert len(turns) == 3 and len(json.loads(chat.read_text())["messages"]) == 6
    assert turns[0][0] > 800 and turns[0][1] < 100
    assert all(tokens - old < 100 for tokens, old in turns[1:]), turns
    assert server.metric('vllm:kv_session_hits_total(?={[^}]*tier="memory")') > hits


def test_responses_continue_a_session(server: Server, text: Path) -> None:
    """``previous_response_id`` sends the chat again inside the server, where its session is."""
    create = server.client.responses.create
    about = text.read_text()[:4000]
    common = {"model": server.model, "temperature": 0, "max_output_tokens": 16}
    first = create(input=f"Remember this text: {about}", truncation="auto", **common)
    second = create(input="Who is Sir Walter?", previous_response_id=first.id, **common)
    assert second.output_text
    usage = second.usage
    assert first.usage.input_tokens > 800
    assert 0 < usage.input_tokens - usage.input_tokens_details.cached_tokens < 100


@pytest.mark.slow
def test_restart(text: Path, tmp_path: Path) -> None:
    shown = run(
        *("restart.py", MODEL, text, "--folder", tmp_path / "sessions", "--port", free_port()),
        *("--dtype=float32", "--kv-cache-memory-bytes=33554432", "--enforce-eager"),
    )
    (first, zero), (second, one), (third, two) = known(shown)
    assert (first, zero) == (600, 0) and 800 < second <= 816 and third > second + 200
    # Of each earlier turn, only the last sampled token was never attended.
    assert one == second - 200 - 1 and two == third - 200 - 1
    assert "killed" in shown


def restart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("restart", EXAMPLES / "restart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_restart_that_fails_says_so(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server is dead by then: there is no process group left to end."""
    module, started = restart(), []

    def start(*_: object) -> subprocess.Popen[bytes]:
        if started:
            raise SystemExit("the server did not start")
        started.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module, "turn", lambda client, history, new: [*history, *new])
    monkeypatch.setattr(module, "SETTLE", 0)
    monkeypatch.setattr(sys, "argv", ["restart.py", str(MODEL), str(text)])
    with pytest.raises(SystemExit, match="the server did not start"):
        module.main()
    assert started[0].poll() is not None


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a session of its own, where Ctrl-C does not reach it."""
    module, started = restart(), []

    def sleeping(*_: object, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "100"], **options))
        return started[0]

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=sleeping))
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        module.start("none", free_port(), [])
    try:
        assert started[0].poll() == -signal.SIGKILL
    finally:
        started[0].kill()


def test_the_dashboard_names_metrics_of_the_server(server: Server) -> None:
    server.complete([1, 2, 3], 2)
    exported = set(re.findall(r"^(\w+(?::\w+)*){", server.get("/metrics"), re.MULTILINE))
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    named = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert len(queries) > 10 and len(rules) == 5
    assert named <= exported
    ours = set(re.findall(r"^(vllm:kv_policy_\w+){", server.get("/metrics"), re.MULTILINE))
    assert {name for name in ours if not name.endswith("_created")} <= named
    sessions = {f"vllm:kv_session_{name}" for name in ("hits_total", "misses_total", "bytes")}
    assert sessions | {"vllm:kv_session_lost_total"} <= named


def test_alerts_join_what_one_server_says() -> None:
    """Every server calls its first engine 0: without the instance, another one's number matches."""
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    joins = [join for rule in rules for join in re.findall(r"\band\b(.{0,30})", rule["expr"])]
    assert len(joins) == 3
    assert all(join.startswith(" on (instance, engine) ") for join in joins)


@pytest.mark.parametrize(
    ("pool", "pages", "promised", "running", "is_full"),
    [
        (40, 3, 36, 1, True),  # decodes without a limit and holds few pages at first
        (40, 3, 24, 3, False),
        (255, 7 * 30, 7 * 4, 7, True),  # 17 pages are free, a further request needs 34
        (255, 6 * 30, 6 * 4, 6, False),
        (255, 0, 0, 0, False),
    ],
)
def test_a_pool_that_is_promised_is_full(
    pool: int, pages: int, promised: int, running: int, is_full: bool
) -> None:
    """A further request waits where its pages are held by others, or promised to them."""
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    (expr,) = [rule["expr"] for rule in rules if rule["alert"] == "KVPolicyNeedsMemory"]
    part = expr.partition("and on (instance, engine) ")[2].replace("on (instance, engine) ", "")
    values = {
        "vllm:kv_cache_usage_perc": pages / pool,
        "vllm:kv_policy_promised_pages": promised,
        "vllm:kv_policy_pages": pages,
        "vllm:num_requests_running": running,
    }
    for name, value in values.items():  # as in PromQL, division by zero is no error
        part = part.replace(name, f"np.float64({value})")
    with np.errstate(divide="ignore", invalid="ignore"):
        assert eval(part) == is_full


def test_probes_of_the_manifest_are_answered(server: Server) -> None:
    service, deployment = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == container["ports"][0]["name"]
        server.get(get["path"])
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    flags = [argument for argument in container["args"] if argument.startswith("--kv-")]
    *flags, config = flags
    assert flags == ["--kv-policy=sink", "--kv-budget=2048", "--kv-recall=8"]
    # The pages, an engine and files beside them: the limit is what the kernel ends it at.
    recall_memory = json.loads(config.partition("=")[2])["recall_memory"]
    limit = container["resources"]["limits"]["memory"]
    assert recall_memory < 0.75 * int(limit.removesuffix("Gi"))
    shape = UnitShape(36, 8, 1, 16, 128, torch.bfloat16, 32768 // 16, 8)  # Qwen3-8B's
    policy = {"name": "sink", "recall": 8, "unit": 16, "budget": 2048}
    schedule, room = compiled(resolve(policy)), recall_memory << 30
    rings = RingMemory(schedule, shape, room, 256, keeps_snapshots=True)
    kept = rings.num_chunks * rings.kept_chunk_bytes
    assert rings.capacity == 14 and 0.99 * room / 3 < kept <= room / 3, "as the manifest says"
