# SPDX-License-Identifier: Apache-2.0
"""Workers report about sessions with each step's output, whether it is ready at once or later.

Several workers of an engine agree through a store that does not grow with the outcomes.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_cascade.engine import session_worker
from vllm_cascade.engine.session_worker import SessionWorker, session_ranks
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions import ranks as ranks_module
from vllm_cascade.sessions.ranks import Outcome, Ranks
from vllm_cascade.sessions.session import Report


class Later(AsyncModelRunnerOutput):
    """An output whose tokens arrive later, as both of vLLM's model runners return them."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        self.output.sampled_token_ids = [[7]]
        return self.output

    def get_kv_connector_output(self) -> Any:
        """Asked for by vLLM 0.33 where ``get_output`` fails."""
        return "salvaged"


class Runner:
    """vLLM's worker, which returns one output a step."""

    outputs: list[Any]

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.outputs.pop(0)


class Worker(SessionWorker, Runner):
    """A worker with sessions of which the threads finish something in some steps."""

    def __init__(self, outputs: list[Any], reports: list[Report]) -> None:
        self.outputs = outputs
        self._sessions = SimpleNamespace(take_report=lambda: reports.pop(0))  # type: ignore


@pytest.mark.parametrize("later", [False, True])
def test_each_report_leaves_once_with_its_step(later: bool) -> None:
    """Also where a second step begins before the first one's output is asked for."""
    plain = [ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}) for _ in range(3)]
    reports = [Report(saved=["x"]), Report(), Report(saved=["y"])]
    worker = Worker([Later(one) if later else one for one in plain], reports)
    steps = [worker.sample_tokens(None) for _ in range(3)]
    assert all(isinstance(step, AsyncModelRunnerOutput) is later for step in steps)
    assert not later or {step.get_kv_connector_output() for step in steps} == {"salvaged"}
    done = [step.get_output() if later else step for step in steps]
    assert [one.req_ids for one in done] == [["a"]] * 3
    assert [one.sampled_token_ids for one in done] == [[[7]] if later else []] * 3
    found = [getattr(one, "kv_sessions", None) for one in done]
    assert [one and one.saved for one in found] == [["x"], None, ["y"]]
    assert not any(hasattr(one, "kv_sessions") for one in plain), "vLLM may return one for all"


def group(monkeypatch: pytest.MonkeyPatch, stores: list[Store]) -> list[Ranks]:
    """The ranks of an engine's workers, each of which has one of the stores from vLLM."""
    tensor_parallel: Any = SimpleNamespace(
        world_size=2, tensor_parallel_size=2, data_parallel_index=0
    )
    own = iter(stores)
    monkeypatch.setattr(session_worker, "_get_default_store", lambda: next(own))
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(session_ranks, rank, tensor_parallel) for rank in range(len(stores))]
        return [one.result(60) for one in made]


def turns(ranks: list[Ranks], num: int) -> None:
    """Let each rank post so many outcomes, and the first one collect them."""
    found, deadline = [], time.monotonic() + 60
    for number in range(num):
        for rank in ranks:
            rank.post(Outcome(number, "save", "s" * 32, 0.0, "", "t" * 32))
        found += ranks[0].collect()
    while len(found) < num and time.monotonic() < deadline:
        found += ranks[0].collect()
    assert [one.number for one in found] == list(range(num))


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process accepts connections."""
    own = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in own if one.status == psutil.CONN_LISTEN}


def test_outcomes_of_ranks_on_one_machine_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives such ranks a file that is only ever appended to, in the host's /tmp."""
    path, before = tmp_path / "store", listening()
    # Engines of one process, one by one, whose group may be the same.
    stores = [PrefixStore("default_pg", FileStore(str(path), 2)) for _ in range(2)]
    engines = []
    for _ in range(2):
        engines.append(group(monkeypatch, list(stores)))
        turns(engines[-1], 1000)
        assert path.stat().st_size < 10_000
    added = listening() - before
    assert {ip for ip, _ in added} == {"127.0.0.1"}, "other machines cannot reach it"
    assert len(added) == 2


def test_ranks_of_several_machines_use_the_store_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    before, store = listening(), HashStore()
    turns(group(monkeypatch, [store, store]), 50)
    assert listening() == before and store.num_keys() == 1  # the number posted


def test_a_rank_whose_collector_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "PATIENCE", timedelta(seconds=0.5))
    parallel: Any = SimpleNamespace(world_size=2, tensor_parallel_size=2, data_parallel_index=0)
    store = FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr(session_worker, "_get_default_store", lambda: store)
    with pytest.raises(KVPolicyError, match="--kv-sessions: another rank"):
        session_ranks(1, parallel)
