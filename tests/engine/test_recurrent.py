# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers beside a policy's: Mamba-2, gated delta nets, short convolutions.

Tiny random models of the real architectures, against transformers' modules (tests/oracle/
recurrent.py): a prompt in strides and greedy tokens, past the budget and the model's positions.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.delta_rule import delta_rule_in_fp32
from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH
from tests.engine.test_families import POLICIES, cases, check_company, compare, random_tokens
from tests.engine.test_metrics import metrics
from tests.engine.test_prefix_caching import ask, counters
from tests.engine.test_units import replay
from tests.oracle.recurrent import RECURRENT, run_recurrent, write_recurrent
from vllm_cascade.policies.settings import KVPolicyError

IN_FP32 = [name for name, family in RECURRENT.items() if family.dtype == "float32"]
FAST = [("lfm2", "cascade", {})]
SLOW = [
    *((family, "cascade", {}) for family in IN_FP32 if family != "lfm2"),
    *((family, "sink-heads", dict(PYTORCH)) for family in IN_FP32),
    ("granite4-rope", "units", {}),
    ("granite4", "h2o", {}),
    ("lfm2", "cascade-heads", dict(PYTORCH)),
]
DELTA_NETS = [name for name, family in RECURRENT.items() if family.dtype == "bfloat16"]
BFLOAT16_ERROR = 0.4
"""Largest difference of a log-probability where an engine computes in bfloat16, alone or not."""


@pytest.fixture(scope="session")
def recurrent_models() -> dict[str, Path]:
    """Folders of the models that a test has asked for."""
    return {}


@pytest.fixture
def model_of(recurrent_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def folder(family: str) -> Path:
        if family not in recurrent_models:
            path = tmp_path_factory.mktemp(family)
            recurrent_models[family] = write_recurrent(path, family)
        return recurrent_models[family]

    return folder


def engine(
    pool: EnginePool,
    path: Path,
    family: str,
    policy: dict[str, Any] | None,
    env: dict[str, str],
    **more: Any,
) -> Any:
    settings = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 100,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "dtype": RECURRENT[family].dtype,
        **RECURRENT[family].engine,
        **more,
    }
    traced = None if policy is None else {**policy, "trace": True}
    return pool.get(traced, path, env=env, **settings)


def check(llm: Any, path: Path, family: str, policy: dict[str, Any], native: bool) -> None:
    """Log-probabilities and kept tokens of 1,000 tokens and 60 more."""
    error, grown = compare(
        llm,
        family,
        lambda tokens: run_recurrent(path, family, tokens, 1000, policy),
        prompt_len=1000,
        kept_at_most=policy["budget"] + 8 + policy.get("unit", 1) - 1,  # one is not complete
    )
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert grown["evicted_tokens"] > 0
    assert (grown["native_calls"] > 0) == native


@pytest.mark.parametrize(("family", "policy", "env"), cases(FAST, SLOW))
def test_family(
    family: str, policy: str, env: dict[str, str], engine_pool: EnginePool, model_of: Any
) -> None:
    path, settings = model_of(family), POLICIES[policy]
    llm = engine(engine_pool, path, family, settings, env)
    check(llm, path, family, settings, native=not env)
    check_company(llm, settings["prefill_stride"])


def scores(llm: Any, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of a prompt."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return np.asarray(prompt_logprobs(output))


def skip_without_images(family: str) -> None:
    if family.startswith("qwen3.5"):
        pytest.importorskip("torchvision", reason="vLLM's module has the models with images, too")


@pytest.mark.slow
@pytest.mark.parametrize("family", DELTA_NETS)
def test_delta_nets(family: str, engine_pool: EnginePool, model_of: Any) -> None:
    """In bfloat16, which is all that vLLM's kernels compute in, so against stock vLLM's rounding.

    How far stock is from an oracle that keeps everything is what rounding does. A policy that
    evicts nothing is as near, and one that evicts is as near to the oracle of the same policy,
    from which another budget, twice as large or smaller by one token, is told apart. The policy
    compares no scores, so that rounding evicts nothing else.
    """
    skip_without_images(family)
    path, tokens = model_of(family), random_tokens(5, 1000)
    policy, wide = POLICIES["sink"], {**POLICIES["sink"], "budget": 430}
    begin, short = tokens[:400], {"max_model_len": 512}  # what stock vLLM has positions for

    def truth(settings: dict[str, Any], tokens: list[int] = tokens) -> np.ndarray:
        return np.asarray(run_recurrent(path, family, tokens, len(tokens), settings).logprobs)

    def apart(found: np.ndarray, expected: np.ndarray) -> float:
        return float(np.abs(found - expected).mean())

    everything, evicted = truth(wide, begin), truth(policy)
    stock = scores(engine(engine_pool, path, family, None, {}, **short), begin)
    kept = scores(engine(engine_pool, path, family, wide, {}, **short), begin)
    llm = engine(engine_pool, path, family, policy, {})
    found = scores(llm, tokens)
    noise = apart(stock, everything)
    others = [truth({**policy, "budget": budget}) for budget in (2 * policy["budget"], 23)]
    print(f"{family}: stock {noise:.4f}, nothing evicted {apart(kept, everything):.4f},")
    print(f"to stock {apart(kept, stock):.4f}, evicting {apart(found, evicted):.4f},")
    print(f"to others {[round(apart(found, other), 4) for other in others]}")
    assert apart(kept, everything) < 1.25 * noise and apart(kept, stock) < 1.25 * noise
    assert apart(found, evicted) < 1.5 * noise
    assert all(apart(found, other) > 3 * noise for other in others)
    # vLLM's convolution for CPUs stops at a single token in Qwen 3.5, with and without a policy.
    few = 2 if family.startswith("qwen3.5") else 1
    prompts = [random_tokens(seed, num) for seed, num in ((1, 330), (2, few), (3, 47), (4, 600))]
    alone = [ask(llm, [prompt], 1)[0] for prompt in prompts]
    again = [ask(llm, [prompt], 1)[0] for prompt in prompts]
    assert [turn[0] for turn in again] == [320, 0, 0, 576]
    llm.reset_prefix_cache()
    together = ask(llm, prompts, 1)
    for single, *others in zip(alone, again, together, strict=True):
        for other in others:
            assert other[1] == single[1]
            np.testing.assert_allclose(other[2], single[2], atol=BFLOAT16_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "env"),
    [("cascade-heads", {}), ("sink", {}), ("cascade", dict(PYTORCH))],
    ids=["cascade-heads", "sink", "cascade-pytorch"],
)
@pytest.mark.parametrize("family", DELTA_NETS)
def test_delta_nets_in_fp32(
    family: str, policy: str, env: dict[str, str], engine_pool: EnginePool, model_of: Any
) -> None:
    """Everything of these models but vLLM's kernels for the delta rule, which have no fp32."""
    skip_without_images(family)
    path, settings = model_of(family), POLICIES[policy]
    with delta_rule_in_fp32() as calls:
        llm = engine(engine_pool, path, family, settings, env, dtype="float32")
        check(llm, path, family, settings, native=not env)
        assert calls.count(1) >= 2 * 60 and sum(calls) == 2 * 1060
        check_company(llm, settings["prefill_stride"])
        engine_pool.close()  # it is of use in here only


def test_small_pools_are_refused(engine_pool: EnginePool, model_of: Any) -> None:
    """Three pages of tokens, and one of states for each of three layers."""
    settings = POLICIES["cascade"]
    with pytest.raises(KVPolicyError, match="needs 6 pages, also for the model's recurrent states"):
        engine(
            *(engine_pool, model_of("lfm2"), "lfm2", settings, {}),
            num_gpu_blocks_override=6,
        )


def test_pages_and_metrics(engine_pool: EnginePool, model_of: Any) -> None:
    """A request has one page a state; a preempted one starts over with the same result."""
    llm = engine(engine_pool, model_of("lfm2"), "lfm2", POLICIES["cascade"], {})
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler._manager
    slots = manager.kv_cache_spec.page_slots
    assert slots == 32 and len(core.scheduler._states) == 3
    prompt, seen = random_tokens(9, 333), set()
    llm.reset_prefix_cache()
    ((_, *whole),) = ask(llm, [prompt], 60)
    llm.reset_prefix_cache()

    def look(step: int) -> None:
        for name, request in core.scheduler.requests.items():
            seen.update(len(m.req_to_blocks.get(name, ())) for m in core.scheduler._states)
            peak = -(-min(request.num_computed_tokens, 68) // slots)
            assert metrics(llm)["pages"] == peak + 3

    again = replay(llm, prompt, look)
    assert seen <= {0, 1} and 1 in seen
    assert again[0] == whole[0]
    np.testing.assert_allclose(again[1], whole[1], atol=1e-4)
    assert pool_usage(llm) == 0.0


def test_a_snapshot_is_that_of_its_very_token(engine_pool: EnginePool, model_of: Any) -> None:
    """Prompts that part inside what a third has left: each starts where its own beginning ends."""
    llm = engine(engine_pool, model_of("lfm2"), "lfm2", POLICIES["cascade"], {})
    llm.reset_prefix_cache()
    common = random_tokens(20, 300)
    prompts = [[*common, *random_tokens(seed, 90)] for seed in (21, 22, 23)]
    cold = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        cold += ask(llm, [prompt])
    llm.reset_prefix_cache()
    before = counters(llm)["hits"]
    warm = [ask(llm, [prompt])[0] for prompt in prompts]
    assert [turn[0] for turn in warm] == [0, 0, 288]  # the second shows where they part
    again = ask(llm, prompts)
    assert [turn[0] for turn in again] == [384] * 3
    assert counters(llm)["hits"] == before + 4
    for turns in (warm, again):
        for turn, alone in zip(turns, cold, strict=True):
            assert turn[1] == alone[1]
            np.testing.assert_allclose(turn[2], alone[2], atol=1e-4)
