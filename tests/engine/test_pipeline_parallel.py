# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, also of two tensor-parallel ranks each, beside one process and the oracle.

vLLM keeps as many steps on the way as there are stages, so prompts' chunks and decoded tokens of
several requests pass through the stages at the same time here.
"""

import json
import os
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool, pool_usage
from tests.engine.server import Server
from tests.engine.test_against_oracle import compare
from tests.engine.test_families import random_tokens
from tests.engine.test_faults import FLAGS
from tests.engine.test_metrics import BLOCK, FULL_PAGE, LAYERS, metrics, moved
from tests.engine.test_prefix_caching import Turn, ask
from tests.oracle.families import FAMILIES, write_family

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64, "trace": True}
CAPACITY = 4 + 128
TWO_STAGES, FOUR_RANKS = {"stages": 2}, {"stages": 2, "ranks": 2}
SIZES = [
    pytest.param(TWO_STAGES, id="2 stages", marks=pytest.mark.slow),
    pytest.param(FOUR_RANKS, id="2 stages of 2 ranks", marks=pytest.mark.slow),
]


def cores(num: int) -> dict[str, str]:
    """vLLM wants a NUMA node for each process, or to be told which cores are whose."""
    available = sorted(os.sched_getaffinity(0))
    mask = "|".join(str(available[i % min(len(available), 2)]) for i in range(num))
    return {"VLLM_CPU_OMP_THREADS_BIND": mask}


def engine(
    pool: EnginePool, policy: dict[str, Any], stages: int = 1, ranks: int = 1, **kwargs: Any
) -> Any:
    """An engine of ``stages`` times ``ranks`` processes; of one, in this process."""
    if stages * ranks > 1:
        kwargs["distributed_executor_backend"] = "mp"
        kwargs["env"] = cores(stages * ranks)
    return pool.get(
        policy,
        max_model_len=4096,
        max_num_batched_tokens=256,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        **kwargs,
    )


def prompts_of(tokens: list[int]) -> list[list[int]]:
    return [
        tokens[700 * i : 700 * i + length] for i, length in enumerate((1, 40, 64, 300, 900, 1500))
    ]


@pytest.fixture(scope="module")
def alone(engine_pool: EnginePool, book_tokens: list[int]) -> list[Turn]:
    """What one process answers, to one prompt after the other."""
    llm = engine(engine_pool, POLICY)
    return [ask(llm, [prompt])[0] for prompt in prompts_of(book_tokens)]


def check_turns(turns: list[Turn], wanted: list[Turn], cached: list[int]) -> None:
    assert [turn[0] for turn in turns] == cached
    for turn, expected in zip(turns, wanted, strict=True):
        assert turn[1] == expected[1]
        np.testing.assert_allclose(turn[2], expected[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_same_as_one_process(
    sizes: dict[str, int], alone: list[Turn], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Together, each alone, and from snapshots; and the oracle's tokens in every layer."""
    llm = engine(engine_pool, POLICY, **sizes)
    prompts = prompts_of(book_tokens)
    none = [0] * len(prompts)
    check_turns(ask(llm, prompts), alone, none)
    snapshots = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    check_turns(ask(llm, prompts), alone, snapshots)
    llm.reset_prefix_cache()
    check_turns([ask(llm, [prompt])[0] for prompt in prompts], alone, none)
    compare(llm, POLICY, book_tokens[:1500])


@pytest.mark.parametrize("sizes", SIZES)
def test_counters_of_all_layers(
    sizes: dict[str, int], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool, POLICY, **sizes)
    before, counted_before = metrics(llm), llm.collective_rpc("kv_policy_counters")
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    lengths = {"long": 1000, "short": 20, "exact": CAPACITY}
    for name, length in lengths.items():
        prompt = {"prompt_token_ids": book_tokens[-length:]}
        llm.llm_engine.add_request(name, prompt, params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    own_page = FULL_PAGE + sizes.get("ranks", 1) * 16 * BLOCK  # each rank has ranks, scores, ...
    seen = []
    while llm.llm_engine.has_unfinished_requests():
        if not llm.llm_engine.step():  # a step was sent on its way and none came back
            continue
        now = metrics(llm)
        held = [r.num_computed_tokens for r in scheduler.requests.values()]
        pages = sum(-(-min(n, CAPACITY) // BLOCK) for n in held)
        full = sum(-(-n // BLOCK) for n in held)
        assert now["pages"] == pages
        assert now["saved_bytes"] == LAYERS * (full * FULL_PAGE - pages * own_page)
        seen.append(now["saved_bytes"])
    assert len(set(seen)) > 3, seen
    after, counted = metrics(llm), llm.collective_rpc("kv_policy_counters")
    evicted = sum(max(length + 29 - CAPACITY, 0) for length in lengths.values())
    assert moved(before, after, "evicted_tokens") == evicted
    assert len(counted) == sizes["stages"] * sizes.get("ranks", 1)
    for old, new in zip(counted_before, counted, strict=True):
        assert new["evicted_tokens"] - old["evicted_tokens"] == evicted
        assert new["strides"] - old["strides"] == moved(before, after, "strides")
    kept_layers = {layer for _, layer in kept_of(llm, book_tokens[:200])}
    assert len(kept_layers) == LAYERS


def kept_of(llm: Any, tokens: list[int]) -> set[tuple[int, str]]:
    """Ends of strides and layers of which some rank says what it kept."""
    llm.collective_rpc("kv_policy_trace", args=(1,))
    ask(llm, [tokens], 1)
    ranks = llm.collective_rpc("kv_policy_kept")
    return {(kept["end"], kept["layer"]) for rank in ranks for kept in rank}


@pytest.mark.parametrize("sizes", SIZES)
def test_aborts_leave_nothing(
    sizes: dict[str, int], alone: list[Turn], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """In the queue, in prefill and in decode, with steps on the way; the others do not notice."""
    llm = engine(engine_pool, POLICY, **sizes)
    llm.reset_prefix_cache()
    rng, core = random.Random(5), llm.llm_engine
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = prompts_of(book_tokens)
    doomed = [f"doomed-{i}" for i in range(20)]
    for i, name in enumerate(doomed):
        prompt = book_tokens[300 * i : 300 * i + rng.choice([10, 64, 400, 1200])]
        core.add_request(name, {"prompt_token_ids": prompt}, params)
        if i < len(prompts):
            core.add_request(f"stays-{i}", {"prompt_token_ids": prompts[i]}, params)
    answers: dict[str, list[int]] = {}
    aborted = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        left = [name for name in doomed if name not in answers]
        if left and rng.random() < 0.4:
            name = rng.choice(left)
            doomed.remove(name)
            core.abort_request([name])
            aborted += 1
    assert aborted > 5
    assert {f"stays-{i}": turn[1] for i, turn in enumerate(alone)}.items() <= answers.items()
    assert pool_usage(llm) == 0.0
    scheduler = core.engine_core.engine_core.scheduler
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    assert not manager._limits and not any(manager.req_to_blocks.values())


@pytest.mark.slow
def test_heads_with_tokens_of_their_own(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    policy = {**POLICY, "head_policy": "per_kv_head"}
    prompts = prompts_of(book_tokens)[2:5]
    wanted = [ask(engine(engine_pool, policy), [prompt])[0] for prompt in prompts]
    llm = engine(engine_pool, policy, **TWO_STAGES)
    check_turns(ask(llm, prompts), wanted, [0] * len(prompts))


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["homogeneous", "per_kv_head"])
@pytest.mark.parametrize("sizes", [TWO_STAGES, FOUR_RANKS], ids=["2 stages", "2 of 2 ranks"])
def test_recall(
    sizes: dict[str, int], heads: str, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Each rank stores units of its own layers and heads; as one process, and as the oracle says.

    Together, from snapshots whose units all ranks share with them, and each alone.
    """
    policy = {**POLICY, "num_subcaches": 2, "unit": 16, "recall": 3, "recall_store": 256}
    policy["head_policy"] = heads
    prompts = prompts_of(book_tokens)
    llm = engine(engine_pool, policy)
    wanted = [ask(llm, [prompt])[0] for prompt in prompts]
    llm = engine(engine_pool, policy, **sizes)
    none = [0] * len(prompts)
    check_turns(ask(llm, prompts), wanted, none)
    check_turns(ask(llm, prompts), wanted, [(len(p) - 1) // 64 * 64 for p in prompts])
    llm.reset_prefix_cache()
    check_turns([ask(llm, [prompt])[0] for prompt in prompts], wanted, none)
    compare(llm, policy, book_tokens[:1500])
    assert all(found["recalled_units"] > 3 for found in llm.collective_rpc("kv_policy_counters"))
    llm.reset_prefix_cache()
    ask(llm, [[5]], 1)  # workers learn of the last request's end with the next step
    assert [found["stored_units"] for found in llm.collective_rpc("kv_policy_counters")] == [0] * (
        sizes["stages"] * sizes.get("ranks", 1)
    )
    assert pool_usage(llm) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("recall", [0, 3])
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1), (1, 1, 0, 0)])
def test_windows(
    order: tuple[int, ...], recall: int, engine_pool: EnginePool, tmp_path: Path
) -> None:
    """Also where one stage has all layers with windows: slots and pages are the whole model's."""
    kinds = ("sliding_attention", "full_attention")
    path = write_family(tmp_path, FAMILIES["gemma3"])
    config = json.loads((path / "config.json").read_text())
    config["layer_types"] = [kinds[kind] for kind in order]
    (path / "config.json").write_text(json.dumps(config))
    policy = {"name": "cascade", "budget": 64, "prefill_stride": 32}
    if recall:
        policy |= {"num_subcaches": 2, "unit": 8, "recall": recall}
    prompts = [random_tokens(seed, n) for seed, n in ((1, 330), (2, 1), (3, 47), (4, 600))]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers, saved = [], []
    for stages in (1, 2):
        llm = engine(engine_pool, policy, stages, model=path, skip_tokenizer_init=True)
        answers.append([ask(llm, [prompt])[0] for prompt in prompts])
        llm.llm_engine.add_request("r", {"prompt_token_ids": prompts[0]}, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            if values := metrics(llm)["saved_bytes"]:
                saved.append((stages, values))
        assert pool_usage(llm) == 0.0
    check_turns(answers[1], answers[0], [0] * len(prompts))
    one, two = ({value for at, value in saved if at == stages} for stages in (1, 2))
    assert one == two != set()


@pytest.mark.slow
def test_a_killed_stage_stops_the_server(
    tmp_path_factory: pytest.TempPathFactory, book_tokens: list[int]
) -> None:
    """The client that waits hears of it, and no process stays."""
    flags = [*FLAGS, "--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]
    server = Server(tmp_path_factory.mktemp("stages") / "log", flags, environment=cores(2))
    try:
        server.wait(800)
        assert len(server.complete(book_tokens[:300], 5)) == 5
        errors: list[Exception] = []

        def ask_for_much() -> None:
            try:
                server.complete(book_tokens[:100], 15_000)
            except openai.APIError as error:
                errors.append(error)

        client = threading.Thread(target=ask_for_much)
        family = psutil.Process(server.process.pid).children(recursive=True)
        workers = server.workers()
        assert len(workers) == 2
        client.start()
        server.wait_until("vllm:num_requests_running", 1.0)
        workers[0].kill()
        client.join(60)
        assert not client.is_alive() and len(errors) == 1
        assert server.process.wait(60) is not None
        assert re.search(r"Worker proc \S+ died unexpectedly", server.log.read_text())
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    finally:
        server.stop()
