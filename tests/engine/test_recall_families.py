# SPDX-License-Identifier: Apache-2.0
"""Recall beside sliding windows and recurrent layers: against the oracle, and in any company.

Tiny random models of the real architectures, as in ``test_families.py`` and ``test_recurrent.py``.
The text is random: in greedy text units repeat, and rounding would choose among equal ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpp_library import CALLS
from tests.engine import test_recurrent
from tests.engine.cuda_backend import use_cuda_backend
from tests.engine.delta_rule import delta_rule_in_fp32
from tests.engine.pool import EnginePool, counters, pool_usage
from tests.engine.stored_rows import StoredRows
from tests.engine.test_against_oracle import PYTORCH, assert_like
from tests.engine.test_batching import ForceTokens
from tests.engine.test_families import (
    apart,
    cases,
    check_company,
    engine,
    model_of,
    random_tokens,
    written,
)
from tests.engine.test_metrics import metrics
from tests.engine.test_prefix_caching import ask
from tests.engine.test_quantised import assert_all_rows_were_compared
from tests.engine.test_recall import read
from tests.engine.test_recurrent import IN_FP32, recurrent_models
from tests.engine.test_triton_families import shallow
from tests.engine.test_units import kept_sets, replay
from tests.oracle.families import FAMILIES, run_family, write_family
from tests.oracle.quantised import Quantiser
from tests.oracle.recurrent import run_recurrent, write_recurrent

__all__ = ["model_of", "recurrent_models", "written"]  # fixtures
RECALL = {"unit": 8, "recall": 3, "recall_store": 512}
POLICIES: dict[str, dict[str, Any]] = {
    "sink": {"name": "sink", "budget": 64, "prefill_stride": 32, **RECALL},
    # A budget below the window; what comes back is more than what stays.
    "sink-small": {"name": "sink", "budget": 24, "prefill_stride": 64, **RECALL, "recall": 6},
    "cascade-heads": {
        "name": "cascade",
        "num_subcaches": 2,
        "budget": 64,
        "prefill_stride": 24,
        "head_policy": "per_kv_head",
        **RECALL,
    },
    "h2o-every": {"name": "h2o", "budget": 64, "prefill_stride": 16, "recall_every": 1, **RECALL},
}
WINDOWS = [name for name, family in FAMILIES.items() if None in family.windows]
FAST = [("gemma3", "sink", {}), ("gpt-oss", "cascade-heads", dict(PYTORCH))]
SLOW = [
    *((family, "cascade-heads", {}) for family in WINDOWS if family != "phi3"),
    *((family, "sink-small", dict(PYTORCH)) for family in WINDOWS if family != "phi3"),
    ("gemma2", "h2o-every", {}),
    ("phi3", "sink", {}),
    ("smollm3", "h2o-every", dict(PYTORCH)),
]
PROMPT, TOTAL = 701, 760  # a prompt that ends inside a unit


def compare(
    llm: Any,
    name: str,
    truth_of: Callable[[list[int], dict[int, Any]], Any],
    settings: dict[str, Any],
    native: bool,
    prompt: int = PROMPT,
    total: int = TOTAL,
) -> None:
    """Log-probabilities and kept tokens of a text, and recalled ones, at every end of a stride."""
    before, calls = counters(llm), sum(CALLS.values())
    llm.collective_rpc("kv_policy_trace", args=(1,))
    text = random_tokens(0, total + 1)
    logprobs = read(llm, text, prompt)
    kept = kept_sets(llm)
    calls = sum(CALLS.values()) - calls
    truth = truth_of(text[:total], kept)
    assert_like(truth, logprobs[:-1], kept, name, closest=1e-7)
    choices, near = truth.recalls
    assert choices > 10 and near <= 0.05 * choices
    assert counters(llm)["recalled_units"] - before["recalled_units"] > settings["recall"]
    assert (calls > 0) == native
    assert pool_usage(llm) == 0.0


def check_replayed(llm: Any) -> None:
    """A request that is preempted twice gives what it gives alone."""
    prompt = random_tokens(9, 333)
    llm.reset_prefix_cache()
    ((_, *whole),) = ask(llm, [prompt], 60)
    llm.reset_prefix_cache()
    again = replay(llm, prompt)
    assert again[0] == whole[0]
    np.testing.assert_allclose(again[1], whole[1], atol=1e-4)


def check_preempted(llm: Any) -> None:
    """``check_replayed``, and no unit is left behind."""
    check_replayed(llm)
    ask(llm, [[5]], 1)  # workers learn of a request's end with the next step
    assert metrics(llm)["recall_memory_bytes"] == counters(llm)["store_bytes"] > 0
    llm.reset_prefix_cache()
    ask(llm, [[5]], 1)
    assert counters(llm)["stored_units"] == 0
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize(("family", "policy", "env"), cases(FAST, SLOW))
def test_windows(
    family: str, policy: str, env: dict[str, str], engine_pool: EnginePool, model_of: Any
) -> None:
    path, settings = model_of(family), POLICIES[policy]
    llm = engine(engine_pool, path, settings, env, logits_processors=[ForceTokens])

    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return apart(run_family, path, FAMILIES[family], tokens, PROMPT, settings, kept)

    compare(llm, family, truth_of, settings, native=not env)
    check_company(llm, settings["prefill_stride"])
    check_preempted(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy", "cache_dtype", "env"),
    [
        ("gemma3", "sink", "int8_per_token_head", {}),
        ("gemma3", "cascade-heads", "fp8_per_token_head", dict(PYTORCH)),
    ],
    ids=["int8", "fp8-pytorch"],
)
def test_quantised_rows(
    family: str,
    policy: str,
    cache_dtype: str,
    env: dict[str, str],
    engine_pool: EnginePool,
    model_of: Any,
) -> None:
    """Every code that is written, in layers with windows too, and units that come back as such."""
    path, settings = model_of(family), POLICIES[policy]
    forced = {"logits_processors": [ForceTokens], "kv_cache_dtype": cache_dtype}
    llm = engine(engine_pool, path, settings, env, **forced)
    llm.collective_rpc("kv_policy_trace", args=(1,))
    text = random_tokens(0, TOTAL + 1)
    with StoredRows(llm, len(text)) as rows:
        logprobs = read(llm, text, PROMPT)
    kept = kept_sets(llm)
    quantised = {"quantiser": Quantiser.of(cache_dtype), "stored": rows.layers}
    truth = run_family(path, FAMILIES[family], text[:-1], PROMPT, settings, kept, **quantised)
    assert_like(truth, logprobs[:-1], kept, closest=None)
    assert_all_rows_were_compared(rows.layers, kept)
    choices, near = truth.recalls
    assert choices > 10 and near <= 0.1 * choices


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "cohere2", "llama4", "gemma3n"])
def test_windows_on_triton(
    family: str, engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA backend's kernels, interpreted, with rings: a builder for each kind of layers."""
    use_cuda_backend(monkeypatch.setattr)
    two_layers, prompt, total = shallow(FAMILIES[family]), 133, 180
    path = write_family(tmp_path, two_layers)
    settings = {**POLICIES["sink"], "budget": 32, "prefill_stride": 16, "recall_every": 4}
    settings |= {"recall_store": 128}
    engine_pool.close()  # others of the same settings use the CPU's paths
    limits = {"enable_prefix_caching": False, "max_num_seqs": 4}
    llm = engine(engine_pool, path, settings, {}, logits_processors=[ForceTokens], **limits)

    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return run_family(path, two_layers, tokens, prompt, settings, kept)

    compare(llm, family, truth_of, settings, native=False, prompt=prompt, total=total)
    prompts = [random_tokens(seed, num) for seed, num in ((1, 130), (2, 1), (3, 99))]
    alone = [ask(llm, [prompt], 6)[0] for prompt in prompts]
    for one, other in zip(alone, ask(llm, prompts, 6), strict=True):
        assert one[:2] == other[:2]
        np.testing.assert_allclose(one[2], other[2], atol=1e-4)
    engine_pool.close()


# --- recurrent layers -----------------------------------------------------------------------------

BESIDE_STATES = [("lfm2", "sink", {})]
SLOW_BESIDE_STATES = [
    *((family, "cascade-heads", dict(PYTORCH)) for family in IN_FP32),
    *((family, "h2o-every", {}) for family in IN_FP32),
    ("granite4", "sink-small", {}),
]


def check_states(llm: Any, path: Path, family: str, settings: dict[str, Any], native: bool) -> None:
    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return run_recurrent(path, family, tokens, PROMPT, settings, kept)

    compare(llm, family, truth_of, settings, native)
    check_company(llm, settings["prefill_stride"])
    check_preempted(llm)


@pytest.mark.parametrize(("family", "policy", "env"), cases(BESIDE_STATES, SLOW_BESIDE_STATES))
def test_recurrent_layers(
    family: str,
    policy: str,
    env: dict[str, str],
    engine_pool: EnginePool,
    recurrent_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path, settings = state_model(family, recurrent_models, tmp_path_factory), POLICIES[policy]
    forced = {"logits_processors": [ForceTokens]}
    llm = test_recurrent.engine(engine_pool, path, family, settings, env, **forced)
    check_states(llm, path, family, settings, native=not env)


def state_model(family: str, known: dict[str, Path], made: pytest.TempPathFactory) -> Path:
    if family not in known:
        known[family] = write_recurrent(made.mktemp(family), family)
    return known[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", test_recurrent.DELTA_NETS)
def test_delta_nets_in_fp32(
    family: str,
    engine_pool: EnginePool,
    recurrent_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Qwen3-Next, Qwen 3.5: all but vLLM's kernels for the delta rule, which have no fp32."""
    test_recurrent.skip_without_pictures(family)
    path = state_model(family, recurrent_models, tmp_path_factory)
    settings = POLICIES["cascade-heads"]
    more = {"dtype": "float32", "logits_processors": [ForceTokens]}
    with delta_rule_in_fp32():
        llm = test_recurrent.engine(engine_pool, path, family, settings, {}, **more)
        check_states(llm, path, family, settings, native=True)
        engine_pool.close()  # it is of use in here only
