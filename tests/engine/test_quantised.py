# SPDX-License-Identifier: Apache-2.0
"""Keys and values in 8 bits on the real engine: against an oracle that quantises them for itself.

A number in the middle of two codes goes one way or the other with the last bit of what made it, and
one such number can change a later log-probability by 0.01: the oracle differs as much from itself,
if rows are disturbed by 2e-7. So every row that the engine writes is compared with the oracle's,
and where rounding decides the oracle takes the engine's code.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.conftest import MODEL
from tests.cpp_library import CALLS
from tests.engine.pool import EnginePool, generated, pool_usage, prompt_logprobs
from tests.engine.stored_rows import StoredRows
from tests.engine.test_against_oracle import PYTORCH, run_oracle
from tests.engine.test_batching import ForceTokens, forced
from tests.engine.test_units import in_any_company, kept_sets
from tests.oracle.quantised import Stored
from vllm_cascade.cache.quantised import CODES

MAX_ERROR, MEAN_ERROR = 1e-4, 1e-5
ROUNDED = 2e-3
"""Where two runs may choose other codes: their products of matrices round differently."""
OTHER_CODES = 1e-3
"""Of all that were written: those that rounding decides."""
Asked = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""What a request asks for, and what that means to the oracle."""


@dataclass(frozen=True)
class Case:
    """An engine, and requests that share it."""

    cache_dtype: str
    policy: dict[str, Any]
    asked: Asked
    env: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> torch.dtype:
        """Of what is stored; of 8 bits as such."""
        return torch.uint8 if self.cache_dtype in CODES else getattr(torch, self.cache_dtype)


CASCADE = {
    "name": "cascade",
    "budget": 128,
    "num_subcaches": 4,
    "prefill_stride": 64,
    "head_policy": "homogeneous",
}
EACH = {**CASCADE, "head_policy": "per_kv_head"}
UNITS = {**CASCADE, "num_subcaches": 2, "unit": 16}
OVERFLOWS = {**CASCADE, "overflow": 24}
OWN: Asked = {
    "the engine's": ({}, {}),
    "sink": ({"kv_policy": "sink", "kv_budget": 100}, {"name": "sink", "budget": 100}),
    "h2o": ({"kv_policy": "h2o", "kv_budget": 96}, {"name": "h2o", "budget": 96, "window": 48}),
    "beehive": (
        {"kv_policy": "beehive", "kv_budget": 96},
        {"name": "beehive", "budget": 96, "window": 18, "threshold": 78},
    ),
}
OWN_IN_UNITS: Asked = {
    "the engine's": ({}, {}),
    "sink": ({"kv_policy": "sink", "kv_budget": 80}, {"name": "sink", "budget": 80}),
    "h2o": ({"kv_policy": "h2o", "kv_budget": 96}, {"name": "h2o", "budget": 96, "window": 48}),
}
ALONE: Asked = {"the engine's": ({}, {})}
CASES = {
    "fp8-rows": Case("fp8_per_token_head", EACH, OWN),
    "int8-rows-units": Case("int8_per_token_head", UNITS, OWN_IN_UNITS),
    "fp8-overflow": Case("fp8", OVERFLOWS, ALONE),
    "fp8-rows-all": Case("fp8_per_token_head", CASCADE, OWN),
    "fp8-rows-units-each": Case(
        "fp8_per_token_head", {**UNITS, "head_policy": "per_kv_head"}, OWN_IN_UNITS
    ),
    "fp8-rows-pytorch": Case("fp8_per_token_head", EACH, OWN, dict(PYTORCH)),
    "int8-rows": Case("int8_per_token_head", EACH, OWN),
    "int8-rows-units-pytorch": Case("int8_per_token_head", UNITS, OWN_IN_UNITS, dict(PYTORCH)),
    "fp8": Case("fp8", EACH, OWN),
    "fp8-units": Case("fp8", UNITS, OWN_IN_UNITS),
    "e5m2": Case("fp8_e5m2", EACH, OWN),
    "bfloat16": Case("bfloat16", EACH, OWN),
}
BEGINS = (0, 9000, 6000, 15000)
"""Where the texts of a case begin."""
FAST = ("fp8-overflow",)


def engine(pool: EnginePool, case: Case, **changed: Any) -> Any:
    return pool.get(
        {**case.policy, "trace": True},
        env=case.env,
        max_model_len=24_000,
        max_num_batched_tokens=300,
        kv_cache_dtype=case.cache_dtype,
        logits_processors=[ForceTokens],
        **changed,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES]
)
def test_against_the_oracle(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Prompts that end inside strides and units; the decoded tokens are forced to be the book's."""
    case = CASES[name]
    llm = engine(engine_pool, case)
    if case.cache_dtype != "bfloat16":
        assert_pages_are_as_large_as_computed(llm.llm_engine.vllm_config, case)
    calls = sum(CALLS.values())
    begins = BEGINS[: len(case.asked)]
    for begin, (asked, changed) in zip(begins, case.asked.values(), strict=True):
        compare(llm, book_tokens[begin:][:527], 437, case, asked, {**case.policy, **changed})
    ran = sum(CALLS.values()) > calls
    assert ran != bool(case.env), "the other path"
    assert pool_usage(llm) == 0.0


def compare(
    llm: Any,
    text: list[int],
    length: int,
    case: Case,
    asked: dict[str, Any],
    policy: dict[str, Any],
    model: Path = MODEL,
) -> None:
    """One request, of which so many tokens are the prompt, against the oracle."""
    params = forced(text, length, **asked)
    llm.collective_rpc("kv_policy_trace", args=(1,))
    with StoredRows(llm, len(text), case.code) as rows:
        (output,) = llm.generate([{"prompt_token_ids": text[:length]}], params, use_tqdm=False)
    kept = kept_sets(llm)
    truth = run_oracle(
        policy, text, model, length, cache_dtype=case.cache_dtype, stored=rows.layers
    )
    plain = run_oracle(policy, text, model, length)
    logprobs = np.asarray(prompt_logprobs(output) + generated(output)[1])
    error = np.abs(logprobs - np.asarray(truth.logprobs))
    without = np.abs(logprobs - np.asarray(plain.logprobs))
    print(
        f"{asked}: max {error.max():.1e}, mean {error.mean():.1e}; to an oracle that does not "
        f"quantise {without.max():.1e}, {without.mean():.1e}; closest {truth.closest_contest}"
    )
    wrong = [end for end in kept if kept[end] != truth.kept[end]]
    assert list(kept) == [end for end in truth.kept if end < len(text)]  # the last is not attended
    assert not wrong, f"kept sets differ at {len(wrong)} of {len(kept)} ends, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert without.mean() > 5 * error.mean(), "nothing was quantised"
    assert_all_rows_were_compared(rows.layers, kept)


def assert_all_rows_were_compared(
    stored: list[Stored], kept: dict[int, list[list[list[int]]]]
) -> None:
    """Those of all tokens that were ever kept; and few codes were the engine's own choice."""
    for layer, rows in enumerate(stored):
        heads, _, width = rows.codes.shape
        tokens = [set[int]() for _ in kept[max(kept)][layer]]
        for end in kept.values():
            for kept_of_set, of_set in zip(end[layer], tokens, strict=True):
                of_set.update(kept_of_set)
        assert rows.compared == sum(map(len, tokens)) * heads // len(tokens) * width
    compared, others = (sum(getattr(r, name) for r in stored) for name in ("compared", "others"))
    print(f"{others} of {compared} codes by rounding")
    assert others <= OTHER_CODES * compared


@pytest.mark.parametrize(
    "name",
    [
        "fp8-rows",
        pytest.param("int8-rows-units", marks=pytest.mark.slow),
        pytest.param("fp8-overflow", marks=pytest.mark.slow),
    ],
)
def test_the_same_answer_in_any_company(
    name: str, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Alone and from a snapshot the same bytes; with 16 others and replayed within rounding.

    Products of matrices round differently there, and a code may be the next one.
    """
    in_any_company(engine(engine_pool, CASES[name]), book_tokens, ROUNDED)


def assert_pages_are_as_large_as_computed(config: Any, case: Case) -> None:
    """Per layer, KV head and token 2 D bytes and, of each row, 8 of scales; then the units' numbers
    (four of 4 bytes, as the test's engines trace what is kept); a multiple of 64 bytes."""
    model, parallel, block = config.model_config, config.parallel_config, 32
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    rows = 8 if case.cache_dtype.endswith("per_token_head") else 0
    sets = heads if case.policy.get("head_policy") == "per_kv_head" else 1
    units = block // case.policy.get("unit", 1)
    page = block * heads * (2 * size + rows) + sets * units * 4 * 4
    page = -(-page // 64) * 64
    layers = model.get_num_layers(parallel)
    assert config.cache_config.num_gpu_blocks == (64 << 20) // (layers * page)


RECALL = {**UNITS, "recall": 3, "recall_store": 256}


@pytest.mark.parametrize(
    ("cache_dtype", "env"),
    [
        ("fp8_per_token_head", {}),
        pytest.param("int8_per_token_head", dict(PYTORCH), marks=pytest.mark.slow),
        pytest.param("fp8", {}, marks=pytest.mark.slow),
    ],
)
def test_evicted_units_come_back_as_they_were(
    cache_dtype: str,
    env: dict[str, str],
    engine_pool: EnginePool,
    book_tokens: list[int],
) -> None:
    """With their scales; the prompt ends inside a unit, and the store overflows."""
    case = Case(cache_dtype, RECALL, ALONE, env)
    llm = engine(engine_pool, case)
    choices = compare_recalled(llm, book_tokens[100:737], 517, case)
    assert choices > 20


def compare_recalled(
    llm: Any, text: list[int], length: int, case: Case, model: Path = MODEL
) -> int:
    """One request, of which so many tokens are the prompt; how often units were selected."""
    policy, params = case.policy, forced(text, length)
    llm.collective_rpc("kv_policy_trace", args=(1,))
    with StoredRows(llm, len(text)) as rows:
        (output,) = llm.generate([{"prompt_token_ids": text[:length]}], params, use_tqdm=False)
    kept = kept_sets(llm)
    truth = run_oracle(
        policy,
        text[:-1],
        model,
        length,
        chosen=kept,
        cache_dtype=case.cache_dtype,
        stored=rows.layers,
    )
    logprobs = np.asarray(prompt_logprobs(output) + generated(output)[1])[:-1]
    error = np.abs(logprobs - np.asarray(truth.logprobs))
    choices, near = truth.recalls
    print(
        f"max {error.max():.1e}, mean {error.mean():.1e}; {near} of {choices} choices by rounding"
    )
    assert kept == truth.kept
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert_all_rows_were_compared(rows.layers, kept)
    assert near <= 0.1 * choices
    (found,) = llm.collective_rpc("kv_policy_counters")
    assert found["recalled_units"] > 3
    return choices


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CASCADE, EACH], ids=["all heads", "each"])
def test_two_ranks(policy: dict[str, Any], engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Each with its heads' rows and scales."""
    first, *others = sorted(os.sched_getaffinity(0))  # vLLM wants to know which cores are whose
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{others[0] if others else first}"}
    case = Case("int8_per_token_head", policy, ALONE, env)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    llm = engine(engine_pool, case, **ranks)
    text = book_tokens[:900]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    (output,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    truth = run_oracle(policy, text, cache_dtype=case.cache_dtype)
    error = np.abs(np.asarray(prompt_logprobs(output)) - np.asarray(truth.logprobs))
    print(f"max {error.max():.1e}, mean {error.mean():.1e}")
    assert error.max() < ROUNDED and error.mean() < 1e-4
