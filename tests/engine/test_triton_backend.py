# SPDX-License-Identifier: Apache-2.0
"""A real engine on the Triton kernels, in the interpreter, against the oracle.

The CUDA backend's implementation and builder know no device, so the CPU backend is given them for
these tests. All of the path but CUDA graphs is what a GPU would run: log-probabilities and kept
tokens of every stride, prompt and decode, and of several requests at once.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.conftest import MODEL
from tests.engine.pool import EnginePool, generated
from tests.engine.test_against_oracle import compare, oracle_model, prompt_logprobs
from tests.oracle.model import stream
from tests.oracle.random_models import write_bloom, write_llama
from tests.oracle.settings import oracle_settings
from vllm_cascade.attention.cuda import SWITCH
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.workspace import _of_devices, workspace_of
from vllm_cascade.kernels.triton.configs import LEAST_PART
from vllm_cascade.kernels.triton.repeat import Repeater

pytestmark = pytest.mark.usefixtures("triton_backend")

TOKENS = np.random.default_rng(1).integers(1, 500, 72).tolist()
CASCADE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 2}
POLICIES: dict[str, dict[str, Any]] = {
    "cascade-1": {**CASCADE, "prefill_stride": 1},
    "cascade-heads-16": {
        **CASCADE,
        "prefill_stride": 16,
        "head_policy": "per_kv_head",
        "head_reduction": "max",
    },
    "sink-overflow-1": {"name": "sink", "budget": 20, "overflow": 4, "prefill_stride": 1},
    "lazy-9": {"name": "lazy", "budget": 20, "overflow": 8, "slack": 6, "max_drop": 3,
               "prefill_stride": 9},
    "h2o-normalise-1": {"name": "h2o", "budget": 24, "normalise": True, "prefill_stride": 1},
    "beehive-log-n-1": {
        "name": "beehive", "budget": 24, "window": 6, "stride": 3, "threshold": 14,
        "log_n": True, "prefill_stride": 1,
    },
    "cascade-overflow-1": {**CASCADE, "overflow": 3, "prefill_stride": 1},
    "cascade-units-4": {**CASCADE, "num_sinks": 4, "unit": 4, "prefill_stride": 16},
    "cascade-heads-units-16": {
        **CASCADE, "num_sinks": 0, "unit": 16, "prefill_stride": 16, "head_policy": "per_kv_head",
    },
    "dgc-8": {"name": "dgc", "budget": 20, "prefill_stride": 8},
    "dgc-cluster-9": {"name": "dgc", "budget": 20, "importance": "cluster", "prefill_stride": 9},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    small = {"num_layers": 1, "tokenizer_from": MODEL}
    return {
        "llama": write_llama(tmp_path_factory.mktemp("llama"), **small, head_dim=16),
        "partial": write_llama(
            tmp_path_factory.mktemp("partial"), **small, partial_rotary_factor=0.5
        ),
        "alibi": write_bloom(tmp_path_factory.mktemp("bloom"), **small),
    }


def engine(pool: EnginePool, policy: dict[str, Any], model: Path, **kwargs: Any) -> Any:
    """An engine of its own: the pool's others use the PyTorch path."""
    pool.close()
    return pool.get(
        {**policy, "trace": True},
        model,
        max_model_len=1024,
        max_num_batched_tokens=64,
        block_size=16,
        **kwargs,
    )


LONG = ("dgc-8", "beehive-log-n-1", "cascade-overflow-1", "sink-overflow-1", "h2o-normalise-1")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in POLICIES]
)
def test_prompt(name: str, engine_pool: EnginePool, models: dict[str, Path]) -> None:
    """Every policy family: one-rule steps, batches, strides; what is kept and how it scores."""
    llm = engine(engine_pool, POLICIES[name], models["llama"])
    compare(llm, POLICIES[name], TOKENS, models["llama"])
    (counters,) = llm.collective_rpc("kv_policy_counters")
    assert counters["evicted_tokens"] > 30
    engine_pool.close()


@pytest.mark.parametrize("model", [pytest.param("partial", marks=pytest.mark.slow), "alibi"])
def test_model(model: str, engine_pool: EnginePool, models: dict[str, Path]) -> None:
    policy = {**CASCADE, "prefill_stride": 8, "head_policy": "per_kv_head"}
    compare(engine(engine_pool, policy, models[model]), policy, TOKENS, models[model])
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sink", "cascade"])
def test_layers_repeat_launches(
    name: str, engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three layers repeat what the first one launches, and answer as if all launched."""
    small = {"num_layers": 3, "num_kv_heads": 1, "num_heads": 2, "head_dim": 16}
    model = write_llama(tmp_path, **small, tokenizer_from=MODEL)
    inputs = [{"prompt_token_ids": TOKENS[i : i + 5 + 21 * i]} for i in range(4)]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0)
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 32, "block_size": 16}
    found, repeated = [], []
    for switch in ("", "python"):
        monkeypatch.delenv(SWITCH, raising=False)
        if switch:
            monkeypatch.setenv(SWITCH, switch)
        engine_pool.close()
        llm = engine_pool.get({"name": name, "budget": 32, "prefill_stride": 8}, model, **sizes)
        before = Repeater.number
        answers = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
        repeated.append(Repeater.number - before)
        found.append([(one.token_ids, one.cumulative_logprob) for one in answers])
        (counters,) = llm.collective_rpc("kv_policy_counters")
        assert counters["evicted_tokens"] > 50
    engine_pool.close()
    assert found[0] == found[1]
    assert repeated[0] > 10 and repeated[0] % 2 == 0 and repeated[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("least", [LEAST_PART, 8], ids=["whole", "in-parts"])
def test_the_worst_batch_finds_its_memory(
    least: int, engine_pool: EnginePool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiling run has taken all of it; pages for no more requests than come at once.

    Also what parts leave each other, where strides are split over keys.
    """
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", least)
    engine_pool.close()
    _of_devices.clear()
    policy = {**CASCADE, "prefill_stride": 16}
    prompts = [TOKENS[i : i + 45 + i] for i in range(8)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings = {"max_num_seqs": 8, "num_gpu_blocks_override": 1 + 8 * 4}
    llm = engine(engine_pool, policy, models["llama"], enforce_eager=False, **settings)
    workspace = workspace_of(torch.device("cpu"))
    taken = workspace.num_bytes
    assert taken > 0 and workspace.grown == 1, "when the model was profiled"
    assert (len(workspace._counters) > 0) == (least == 8), "parts count who has come"
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    together = [out.outputs[0].token_ids for out in llm.generate(inputs, params, use_tqdm=False)]
    assert (workspace.num_bytes, workspace.grown) == (taken, 1), "nothing is allocated later"
    alone = [llm.generate([one], params, use_tqdm=False)[0].outputs[0].token_ids for one in inputs]
    assert together == alone
    assert not workspace._counters.any()
    engine_pool.close()


def test_prompts_at_once(engine_pool: EnginePool, models: dict[str, Path]) -> None:
    """A chunk of several strides in one launch a layer, without a trace, equals the oracle."""
    policy = {"name": "sink", "budget": 20, "num_sinks": 2, "prefill_stride": 8}
    engine_pool.close()
    llm = engine_pool.get(
        policy, models["llama"], max_model_len=1024, max_num_batched_tokens=64, block_size=16
    )
    output = llm.generate(
        [{"prompt_token_ids": TOKENS}],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        use_tqdm=False,
    )[0]
    truth = stream(
        oracle_model(models["llama"]), TOKENS, prompt_len=len(TOKENS), **oracle_settings(policy)
    )
    found = prompt_logprobs(output)
    assert np.abs(np.asarray(found) - np.asarray(truth.logprobs)[: len(found)]).max() < 2e-4
    engine_pool.close()


def test_batches_of_no_requests(engine_pool: EnginePool, models: dict[str, Path]) -> None:
    """As vLLM runs them where engines share experts: V1 gives them its requests' block tables."""
    policy = {**CASCADE, "prefill_stride": 8}
    llm = engine(engine_pool, policy, models["llama"])
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    # A full graph's metadata, which a CPU has no graphs for.
    runner._dummy_run = partial(runner._dummy_run, force_attention=True)
    prompts = [TOKENS[:45], TOKENS[3:9]]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
    answers, counted = [], []
    for dummies in (False, True):
        before = worker.kv_policy_counters()
        llm.reset_prefix_cache()
        done: dict[str, Any] = {}
        for number, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            done |= {one.request_id: generated(one) for one in llm.llm_engine.step()}
            if dummies:
                core.execute_dummy_batch()
        answers.append([done[name] for name in sorted(done)])
        after = worker.kv_policy_counters()
        counted.append({name: after[name] - before[name] for name in after if name != "steps"})
    assert answers[0] == answers[1] and counted[0] == counted[1]
    engine_pool.close()


@pytest.mark.slow
def test_with_torch_compile(engine_pool: EnginePool, models: dict[str, Path]) -> None:
    """The operators stay whole in a compiled model."""
    policy = {**CASCADE, "prefill_stride": 8}
    llm = engine(engine_pool, policy, models["llama"], enforce_eager=False)
    assert llm.llm_engine.vllm_config.compilation_config.mode.name != "NONE"
    compare(llm, policy, TOKENS, models["llama"])
    engine_pool.close()


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # what a request asks for, and what that means to the oracle
    ({}, {**CASCADE, "prefill_stride": 8}),
    ({"kv_budget": 16}, {**CASCADE, "budget": 16, "prefill_stride": 8}),
    (
        {"kv_policy": "sink", "kv_budget": 12},
        {"name": "sink", "budget": 12, "num_sinks": 2, "prefill_stride": 8},
    ),
]


def ask(
    llm: Any, prompts: list[list[int]], lengths: list[int]
) -> list[tuple[list[int], list[float]]]:
    """Generated tokens and their log-probabilities, every request under what it asks for."""
    params = [
        SamplingParams(
            max_tokens=n,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            extra_args=asked or None,
        )
        for n, (asked, _) in zip(lengths, ASKED, strict=False)
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [generated(output) for output in outputs]


def test_decode_of_several_requests(engine_pool: EnginePool, models: dict[str, Path]) -> None:
    """Generated tokens go through the device's own schedule; rows come and go.

    Every request has a policy of its own, and a prompt that comes again starts from a snapshot.
    """
    policy = {**CASCADE, "prefill_stride": 8}
    llm = engine(engine_pool, policy, models["llama"])
    prompts = [TOKENS[:45], TOKENS[5:45], TOKENS[40:57]]
    answers = ask(llm, prompts, [16, 7, 20])
    for prompt, (sampled, found), (_, settings) in zip(prompts, answers, ASKED, strict=True):
        model = oracle_model(models["llama"])
        truth = stream(model, prompt + sampled, prompt_len=len(prompt), **oracle_settings(settings))
        expected = truth.logprobs[len(prompt) - 1 :]
        assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 2e-4
    snapshots = llm.llm_engine.engine_core.engine_core.scheduler.snapshot_counters
    assert (snapshots.hits, snapshots.stored) == (0, 3)
    assert ask(llm, prompts[:1], [16]) == answers[:1]
    assert (snapshots.hits, snapshots.hit_tokens) == (1, 32)
    engine_pool.close()
