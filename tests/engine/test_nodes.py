# SPDX-License-Identifier: Apache-2.0
"""Nodes of a deployment whose flags differ do not start, and the message names the flags."""

import dataclasses
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import MPClient
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.running.serving import free_port
from tests.conftest import MODEL
from tests.engine.server import Server
from tests.engine.test_faults import FLAGS as SERVER_FLAGS
from tests.engine.test_pipeline_parallel import cores
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.nodes import Own, check_same, check_workers, compare_ranks, shared_settings
from vllm_cascade.engine.recall_memory import unit_shape
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.patches import ready_response
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.memory import GIB
from vllm_cascade.recall.rings import RingMemory

FLAGS: dict[str, Any] = {"kv_policy": "cascade", "kv_budget": 128, "kv_recall": 0}
OTHERS = [
    ({"kv_policy": "sink"}, "--kv-policy is cascade HERE, but sink THERE. All nodes must"),
    ({"kv_budget": 64}, "--kv-budget is 128 HERE, but 64 THERE. All nodes must have the same"),
    ({"kv_recall": 2}, "--kv-recall is 0 HERE, but 2 THERE. All nodes .* since its default"),
    (
        {"kv_policy_config": {"prefill_stride": 64}},
        "--kv-policy-config.prefill_stride is 256 HERE, but 64 THERE.",
    ),
    ({"kv_sessions": True}, "--kv-sessions is not given HERE, but given THERE."),
    (None, "--kv-policy is cascade HERE, but full THERE."),
]


def config_of(**flags: Any) -> Any:
    return EngineArgs(model=str(MODEL), max_model_len=2000, **flags).create_engine_config()


def settings_of(change: dict[str, Any] | None) -> str:
    """The settings of a node with other flags; None: of stock vLLM."""
    flags = {} if change is None else {**FLAGS, **change}
    return shared_settings(config_of(**flags).additional_config if flags else {})


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=lambda value: str(value)[:40])
def test_what_differs_is_named(change: dict[str, Any] | None, message: str) -> None:
    own, other = settings_of({}), settings_of(change)
    check_same(own, own, ("HERE", "THERE"))
    with pytest.raises(KVPolicyError, match=f"^kv_policy: {message}"):
        check_same(own, other, ("HERE", "THERE"))


def test_each_node_may_have_its_own_memory_and_paths(tmp_path: Path) -> None:
    def of(gib: float, folder: str) -> str:
        flags = {"kv_recall": 2, "kv_sessions": True, "kv_sessions_dir": str(tmp_path / folder)}
        return settings_of({**flags, "kv_policy_config": {"recall_memory": gib}})

    assert of(0.5, "a") == of(0.25, "b") != settings_of({"kv_recall": 2, "kv_sessions": True})


@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}], ids=str)
def test_api_servers_that_are_configured_again_agree(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside engines that have taken the host's memory meanwhile."""
    flags = ["--model", str(MODEL), "--max-model-len", "2000", "--kv-policy", "cascade"]
    flags += ["--kv-policy-config", json.dumps(settings)] if settings else []
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    first = EngineArgs.from_cli_args(args).create_engine_config().additional_config
    monkeypatch.setattr("vllm_cascade.engine.recall_memory.available_bytes", lambda: 100_000)
    again = EngineArgs.from_cli_args(args).create_engine_config().additional_config
    assert shared_settings(first) == shared_settings(again) != "{}"


def outcomes(settings: list[str | None], patience: float) -> list[str]:
    """What each rank with these settings says; None: a rank of stock vLLM, which says nothing."""
    store, most = dist.HashStore(), timedelta(seconds=patience)

    def run(rank: int, own: str) -> str:
        try:
            compare_ranks(store, rank, len(settings), Own(own), most)
        except KVPolicyError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(settings)) as pool:
        ranks = {n: pool.submit(run, n, own) for n, own in enumerate(settings) if own is not None}
        return [ranks[n].result(30) if n in ranks else "" for n in range(len(settings))]


def test_ranks_with_other_flags_all_stop() -> None:
    own, other = settings_of({}), settings_of({"kv_budget": 64})
    assert outcomes([own] * 3, 20) == ["", "", ""]
    for said in outcomes([own, own, other], 20):
        assert "--kv-budget is 128 on rank 0, but 64 on rank 2. All nodes" in said


def agreed(memories: Sequence[float | None], engines: Sequence[int], **flags: Any) -> list[Policy]:
    """The policies of an engine's workers that have measured or set these ``recall_memory``."""
    place, store = threading.local(), dist.HashStore()
    configs = [config_of(**{**FLAGS, **flags}) for _ in memories]

    def start(rank: int) -> Policy:
        place.rank, config = rank, configs[rank]
        config.additional_config["kv_policy"]["recall_memory"] = None
        config.additional_config["kv_policy"].measured = {"recall_memory": memories[rank]}
        config.parallel_config.data_parallel_index = engines[rank]
        check_workers(config)
        policy = policy_of(config.additional_config)
        assert policy is not None
        return policy

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: len(memories))
        patch.setattr(dist, "get_rank", lambda: place.rank)
        patch.setattr("vllm_cascade.engine.nodes._get_default_store", lambda: store)
        return [one.result(60) for one in [pool.submit(start, n) for n in range(len(memories))]]


def test_the_workers_of_an_engine_take_the_smallest_memory() -> None:
    """Nodes of one engine, and processes of an external launcher, measure it themselves."""
    found = agreed([0.5, 0.25, 0.125, 1.0], [0, 0, 1, 1], kv_recall=2)
    assert [policy.recall_memory for policy in found] == [0.25, 0.25, 0.125, 0.125]
    assert {policy.recall for policy in found} == {2}
    found = agreed([None, None], [0, 0])
    assert [policy.recall_memory for policy in found] == [None, None]


def test_every_rank_has_the_rings_that_the_scheduler_counts() -> None:
    """The scheduler counts by the spec of one rank, and each rank allocates by its own."""
    full: Any = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=16, dtype=torch.float16)
    found = []
    for policy in agreed([0.5, 0.25], [0, 0], kv_recall=2):
        spec = KVPolicySpec.from_full(full, policy)
        assert spec.policy.recall_memory is not None
        room, shape = int(spec.policy.recall_memory * GIB), unit_shape(spec, 1)
        memory = RingMemory(spec.engine_schedule, shape, room, 1000, keeps_snapshots=True)
        found.append((memory.capacity, memory.num_chunks))
    assert found[0] == found[1] and min(found[0]) > 0


def test_a_rank_without_a_policy_stops_the_others() -> None:
    first, second, stock = outcomes([settings_of({})] * 2 + [None], 0.5)
    assert "another node of this engine runs without a KV policy" in first == second
    assert stock == ""


def test_engines_of_one_process_do_not_read_what_earlier_ones_said() -> None:
    """As with ``external_launcher``, whose processes keep their group."""
    store, patience = dist.HashStore(), timedelta(seconds=20)
    for budget, memory in ((128, 0.5), (64, 0.25)):
        own = Own(settings_of({"kv_budget": budget}), memory)
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(compare_ranks, store, n, 2, own, patience) for n in range(2)]
            assert [rank.result(30) for rank in ranks] == [memory, memory]
    other = Own(settings_of({"kv_budget": 32}))
    with pytest.raises(KVPolicyError, match="runs without a KV policy, or has stopped"):
        compare_ranks(store, 0, 2, other, timedelta(seconds=0.5))  # rank 1 has not started again


def first_message(additional_config: dict[str, Any], rank: int = 1) -> bytes:
    """What an engine sends to its front-ends, with the fields of vLLM's that the test needs."""
    required = [
        field.name
        for field in dataclasses.fields(EngineCoreReadyResponse)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    values: dict[str, Any] = dict.fromkeys(required) | {"data_parallel_rank": rank}
    response = EngineCoreReadyResponse(**values)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional_config))
    return msgspec.msgpack.encode(ready_response._wrap_make(lambda _: response)(engine))


def receive(additional_config: dict[str, Any], payload: bytes) -> list[bytes]:
    """What vLLM's own method gets from a front-end that receives a first message."""
    got: list[bytes] = []
    front_end = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional_config))
    ready_response._wrap_apply(lambda _, message: got.append(message))(front_end, payload)
    return got


def test_a_front_end_stops_if_an_engine_has_other_flags() -> None:
    own = config_of(**FLAGS).additional_config
    other = config_of(**{**FLAGS, "kv_recall": 2}).additional_config
    for config in (own, {}):
        same = first_message(config)
        assert receive(config, same) == [same], "vLLM reads the message, too"
    place = "on the node of data-parallel engine 3"
    with pytest.raises(KVPolicyError, match=f"--kv-recall is 0 on this node, but 2 {place}"):
        receive(own, first_message(other, 3))
    with pytest.raises(
        KVPolicyError, match=f"--kv-policy is cascade on this node, but full {place}"
    ):
        receive(own, first_message({}, 3))
    with pytest.raises(
        KVPolicyError, match=f"--kv-policy is full on this node, but cascade {place}"
    ):
        receive({}, first_message(own, 3))
    assert receive(own, b"") == [b""]


def test_an_engine_without_the_plugin_counts_as_stock() -> None:
    stock = msgspec.msgpack.decode(first_message({}))
    del stock["kv_policy"]
    payload = msgspec.msgpack.encode(stock)
    assert receive({}, payload) == [payload]
    with pytest.raises(KVPolicyError, match="--kv-policy is cascade on this node, but full"):
        receive(config_of(**FLAGS).additional_config, payload)


def test_vllm_sends_and_reads_our_message() -> None:
    for method in (EngineCoreProc._make_ready_response, MPClient._apply_ready_response):
        assert method.__wrapped__.__module__.startswith("vllm.v1.engine")


def end(server: Server) -> None:
    """End a server and its processes; a node may wait for a head that is gone."""
    if server.process.poll() is None:
        for process in psutil.Process(server.process.pid).children(recursive=True):
            process.kill()
        server.process.kill()
    server.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stages", "engines"])
def test_nodes_with_other_flags_do_not_start(kind: str, tmp_path: Path) -> None:
    """Two nodes on one machine, which differ in their budget."""
    port = str(free_port())
    if kind == "stages":
        both = ["--pipeline-parallel-size", "2", "--nnodes", "2"]
        both += ["--master-addr", "127.0.0.1", "--master-port", port]
        own, other, places = ["--node-rank", "0"], ["--node-rank", "1"], ("on rank 0", "on rank 1")
    else:
        both = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
        both += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
        own, other = ["--api-server-count", "1"], ["--data-parallel-start-rank", "1"]
        places = "on this node", "on the node of data-parallel engine 1"
    lower = ["64" if flag == "128" else flag for flag in SERVER_FLAGS]
    head = Server(tmp_path / "head", [*SERVER_FLAGS, *both, *own], environment=cores(1))
    node = Server(tmp_path / "node", [*lower, *both, *other, "--headless"], environment=cores(1))
    try:
        assert head.process.wait(500) != 0
    finally:
        for server in (head, node):
            end(server)
    text = head.log.read_text()
    assert f"--kv-budget is 128 {places[0]}, but 64 {places[1]}. All nodes must have" in text
    if kind == "stages":
        assert f"--kv-budget is 128 {places[0]}, but 64 {places[1]}" in node.log.read_text()


def test_workers_compare_before_they_load_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later collective calls of theirs would hang beside a worker of stock vLLM."""
    asked: list[Any] = []

    def check(config: Any) -> None:
        asked.append(config)
        raise KVPolicyError("other flags")

    monkeypatch.setattr("vllm_cascade.engine.worker.check_workers", check)
    worker: Any = KVPolicyWorker.__new__(KVPolicyWorker)
    worker.vllm_config = SimpleNamespace(additional_config={"a": 1})
    with pytest.raises(KVPolicyError, match="other flags"):
        worker.load_model()
    assert asked == [worker.vllm_config]
