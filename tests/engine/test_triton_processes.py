# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's code on several ranks, stages and engines, interpreted, against the oracle.

Each engine's processes run ``triton_cpu.py``.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODEL, ROOT
from tests.engine.pool import EnginePool
from tests.engine.server import Server
from tests.engine.test_data_parallel import (
    answers_as_alone,
    each_answers_as_alone,
    of_engines,
)
from tests.engine.test_pipeline_parallel import cores
from tests.engine.test_prefix_caching import Turn, ask
from tests.oracle.families import shallow, write_family
from tests.oracle.full_attention import OWN_MODULES
from tests.oracle.random_models import TOKENIZER_FILES

pytestmark = pytest.mark.slow

PLAIN = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 4, "unit": 4}
PLAIN |= {"prefill_stride": 16}
RECALL = {**PLAIN, "recall": 2, "recall_store": 64, "recall_every": 3}
EACH = {"head_policy": "per_kv_head"}
RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recall over ranks": (RECALL, RANKS),
    "recall over ranks, per KV head": ({**RECALL, **EACH}, RANKS),
    "recall over stages": (RECALL, STAGES),
    "stages": (PLAIN, STAGES),
}


def check(
    policy: dict[str, Any],
    engine: dict[str, Any],
    family: str | None = None,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    more = {"distributed_executor_backend": "mp", "enable_prefix_caching": True}
    case = json.dumps({"policy": policy, "engine": engine | more, "family": family})
    command = [sys.executable, "-m", "tests.engine.triton_cpu", "check", case]
    env = os.environ | cores(2) | (env or {})
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str) -> None:
    """A text of which the end is decoded; then a prompt twice, the second from a snapshot.

    Where a process has both layers, the second one repeats the first one's launches.
    """
    found = check(*CASES[name])
    assert found["cached"] == [0, 64]
    first, second = found["counters"]
    assert first["evicted_tokens"] == second["evicted_tokens"] > 30
    assert (min(first["repeats"], second["repeats"]) > 20) == (CASES[name][1] is RANKS)
    if "recall" in CASES[name][0]:
        assert first["recalled_units"] > 2 < second["recalled_units"]
        assert first["stored_units"] == second["stored_units"] > 0, "the snapshots' units"
    if name == "recall over ranks":
        assert first["recalled_units"] == second["recalled_units"], "they select together"


def test_stages_on_the_second_runner() -> None:
    """Whose stages hear of sampled tokens as many steps later as there are stages."""
    found = check(PLAIN, STAGES, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert found["runner"] == "V2" and found["equal"] and found["evicted"] > 100, found


LENGTHS = (1, 70)


@pytest.fixture(scope="module", params=["llama", "experts", "drafts", "drafts by V2"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the model; the last two have experts and draft for themselves, with both runners."""
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if kind == "llama":
        return MODEL
    family = shallow(OWN_MODULES["mixtral"])
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    own = {**family.own, "vocab_size": vocabulary}
    folder = write_family(tmp_path_factory.mktemp("experts"), replace(family, own=own))
    for name in TOKENIZER_FILES:
        if (MODEL / name).exists():
            shutil.copyfile(MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(engine_pool: EnginePool, book_tokens: list[int], model: Path) -> list[Turn]:
    """What one process answers on the CPU's own paths."""
    llm = engine_pool.get(PLAIN, model, max_model_len=1024, max_num_batched_tokens=64)
    turns = [ask(llm, [book_tokens[:length]], 8)[0] for length in LENGTHS]
    engine_pool.close()
    return turns


@pytest.fixture(scope="module")
def server(
    alone: list[Turn],
    model: Path,
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    own = {name: PLAIN[name] for name in PLAIN if name not in ("name", "budget")}
    flags = ["--kv-policy", "cascade", "--kv-budget", "32", "--kv-recall", "0"]
    flags += ["--kv-policy-config", json.dumps(own)]
    flags += ["--max-model-len", "1024", "--max-num-batched-tokens", "64", "--block-size", "32"]
    flags += ["--enforce-eager", "--kv-cache-memory-bytes", str(16 << 20)]
    flags += ["--data-parallel-size", "2", "--api-server-count", "1"]
    environment = cores(2)
    if kind == "drafts by V2":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if kind.startswith("drafts"):
        drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
        flags += ["--speculative-config", json.dumps(drafts)]
    command = [sys.executable, str(ROOT / "tests/engine/triton_cpu.py")]
    log = tmp_path_factory.mktemp("two") / "log"
    started = Server(log, flags, command=command, environment=environment, model=model)
    yield started.wait(800)
    started.stop()


def test_two_engines(server: Server, alone: list[Turn], book_tokens: list[int]) -> None:
    """Each answers as one process, also where they share a model's experts.

    Such engines step together: one without requests runs batches of padding.
    """
    each_answers_as_alone(server, zip(LENGTHS, alone, strict=True), book_tokens)


def test_both_at_once(server: Server, alone: list[Turn], kind: str, book_tokens: list[int]) -> None:
    """Prompts of different lengths in both engines; one is still read while the other decodes."""
    turns = list(zip(LENGTHS, alone, strict=True))
    with ThreadPoolExecutor(2) as clients:
        asked = [
            clients.submit(answers_as_alone, server, rank, *turn, book_tokens)
            for rank, turn in enumerate(turns)
        ]
    for answer in asked:
        answer.result()
    if kind.startswith("drafts"):
        assert min(of_engines(server, "vllm:spec_decode_num_accepted_tokens_total")) > 10
