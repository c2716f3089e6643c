# SPDX-License-Identifier: Apache-2.0
"""The engine against the oracle: log-probabilities of every token, kept tokens of every layer.

Budgets are small, so that 3,000 tokens wrap the cache many times and go far beyond the shipped
model's 1,024 positions. Token budgets are odd on purpose: chunks end where they must, not where
they are told.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.conftest import MODEL
from tests.cpp_library import CALLS
from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.oracle.dgc import sentence_ends, sentences_of
from tests.oracle.full_attention import LLAMA3
from tests.oracle.model import OracleResult, load_model, stream
from tests.oracle.quantised import Quantiser, Stored
from tests.oracle.random_models import write_bloom, write_llama
from tests.oracle.settings import oracle_settings, token_scores
from vllm_cascade.attention.cpu.paths import SWITCH

NUM_TOKENS = 3000
MAX_ERROR, MEAN_ERROR = 2e-4, 1e-5


@dataclass(frozen=True)
class Case:
    """Policy settings as a user writes them, the step size vLLM is given, the environment."""

    policy: dict[str, Any]
    token_budget: int
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


PYTORCH = {SWITCH: "pytorch"}.items()
CASCADE = {"name": "cascade", "budget": 128, "num_subcaches": 4}
CASES = {
    "window": Case({"name": "window", "budget": 100, "prefill_stride": 64}, 100),
    "sink": Case({"name": "sink", "budget": 100, "prefill_stride": 64}, 150),
    "sink-heads-1": Case(
        {"name": "sink", "budget": 97, "prefill_stride": 1, "head_policy": "per_kv_head"}, 77
    ),
    "cascade-eager-1": Case({**CASCADE, "prefill_stride": 1}, 512),
    "cascade-eager-64": Case({**CASCADE, "prefill_stride": 64, "head_reduction": "max"}, 100),
    "cascade-eager-256": Case({**CASCADE, "prefill_stride": 256, "tie": "resident"}, 600),
    "cascade-paper-64": Case({**CASCADE, "prefill_stride": 64, "preset": "paper"}, 300),
    "cascade-paper-256-median": Case(
        {**CASCADE, "prefill_stride": 256, "eager_fill": False, "head_reduction": "median"}, 256
    ),
    "cascade-heads-eager-64": Case(
        {**CASCADE, "prefill_stride": 64, "head_policy": "per_kv_head"}, 1000
    ),
    "cascade-heads-eager-256": Case(
        {**CASCADE, "prefill_stride": 256, "head_policy": "per_kv_head", "head_reduction": "max"},
        256,
    ),
    "cascade-heads-paper-1": Case(
        {**CASCADE, "prefill_stride": 1, "eager_fill": False, "head_policy": "per_kv_head"}, 33
    ),
    "cascade-base-3": Case(
        {
            "name": "cascade",
            "budget": 108,
            "num_subcaches": 3,
            "cascade_base": 3,
            "ema_gamma": 0.9,
            "prefill_stride": 64,
        },
        200,
    ),
    "cascade-eager-64-pytorch": Case({**CASCADE, "prefill_stride": 64}, 100, env=dict(PYTORCH)),
    "cascade-heads-1-pytorch": Case(
        {**CASCADE, "prefill_stride": 1, "head_policy": "per_kv_head"}, 512, env=dict(PYTORCH)
    ),
    "cascade-compiled": Case({**CASCADE, "prefill_stride": 64}, 100, {"enforce_eager": False}),
}


SLOW = {
    *("sink-heads-1", "cascade-eager-64", "cascade-paper-256-median", "cascade-heads-eager-256"),
    *("cascade-base-3", "cascade-heads-1-pytorch", "cascade-eager-1", "cascade-heads-paper-1"),
    "cascade-compiled",
}
"""Cases whose parts others have, too."""


def in_time(cases: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Parameters of a test, some of them marked slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in cases]


@lru_cache(maxsize=4)
def oracle_model(path: Path) -> Any:
    return load_model(path, bloom_gelu="none")  # vLLM's Bloom uses the exact GELU


@lru_cache(maxsize=1)
def book_ends() -> list[bool]:
    """Which token ids of the shipped model end a sentence."""
    return sentence_ends(AutoTokenizer.from_pretrained(MODEL))


def run_oracle(
    policy: dict[str, Any],
    tokens: list[int],
    model: Path = MODEL,
    prompt_len: int | None = None,
    corpus: list[int] | None = None,
    chosen: dict[int, list[list[list[int]]]] | None = None,
    cache_dtype: str = "auto",
    stored: list[Stored] | None = None,
) -> OracleResult:
    """What the oracle says about ``tokens``, of which the first ``prompt_len`` are a prompt.

    ``corpus`` is counted where the policy reads a table of document frequencies. ``chosen`` is what
    the engine kept, for choices of recalled units that rounding decides. ``cache_dtype`` is
    ``--kv-cache-dtype``, and ``stored`` what the engine wrote, for codes that rounding decides.
    """
    ends = book_ends().__getitem__
    sentences = None if corpus is None else sentences_of(corpus, ends)
    return stream(
        oracle_model(model),
        tokens,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        token_scores=token_scores(policy, tokens, ends, sentences),
        chosen=chosen,
        quantiser=Quantiser.of(cache_dtype),
        stored=stored,
        **oracle_settings(policy),
    )


def assert_like(
    truth: OracleResult,
    logprobs: Sequence[float] | np.ndarray,
    kept: dict[int, list[list[list[int]]]] | None = None,
    name: str = "",
    closest: float | None = 1e-6,
    mean_error: float = MEAN_ERROR,
) -> None:
    """Compare an engine's log-probabilities and kept tokens with an oracle's.

    Args:
        kept: kept tokens as in ``OracleResult``; None: they are not compared.
        closest: the closest contest must exceed this; None: it may be any.
        mean_error: bound of the mean error; ``MAX_ERROR`` leaves only the largest error's.
    """
    error = np.abs(np.asarray(logprobs) - np.asarray(truth.logprobs))
    print(
        f"{name}: max {error.max():.2e}, mean {error.mean():.2e}, "
        f"closest {truth.closest_contest:.1e}, choices and those by rounding {truth.recalls}"
    )
    unequal = closest is None or truth.closest_contest > closest
    assert unequal, f"{name}: a tie that rounding decides: choose another text or seed"
    if kept is not None:
        assert list(kept) == list(truth.kept)
        wrong = [end for end in kept if kept[end] != truth.kept[end]]
        assert not wrong, f"kept sets differ at {len(wrong)} of {len(kept)} ends, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < mean_error, name


def run_engine(
    llm: Any, tokens: list[int], per_head: bool
) -> tuple[list[float], dict[tuple[int, str], Any]]:
    """Log-probabilities, and kept tokens by (stride end, layer name)."""
    llm.collective_rpc("kv_policy_trace", args=(1,))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    ranks = llm.collective_rpc("kv_policy_kept")
    kept: dict[tuple[int, str], Any] = {}
    for snapshots in ranks:
        for s in snapshots:
            # Homogeneous: every rank keeps the same; per KV head: each rank has heads of its own.
            sets = kept.setdefault((s["end"], s["layer"]), [])
            if per_head or not sets:
                sets += s["tokens"]
            assert per_head or sets == s["tokens"]
    return prompt_logprobs(output), kept


def compare(
    llm: Any,
    policy: dict[str, Any],
    tokens: list[int],
    model: Path = MODEL,
    corpus: list[int] | None = None,
) -> None:
    per_head = oracle_settings(policy)["head_policy"] == "per_kv_head"
    logprobs, kept = run_engine(llm, tokens, per_head)
    layers = sorted({layer for _, layer in kept}, key=lambda name: int(name.split(".")[2]))
    ends = {end for end, _ in kept}
    chosen = {end: [kept[end, layer] for layer in layers] for end in ends}
    truth = run_oracle(policy, tokens, model, corpus=corpus, chosen=chosen)
    assert truth.recalls[1] <= 0.05 * truth.recalls[0]
    error = np.abs(np.asarray(logprobs) - np.asarray(truth.logprobs))
    assert {end for end, _ in kept} == set(truth.kept)
    wrong = [
        (end, layer)
        for end, expected in truth.kept.items()
        for index, layer in enumerate(layers)
        if kept[end, layer] != expected[index]
    ]
    print(f"max {error.max():.2e}, mean {error.mean():.2e}, closest {truth.closest_contest:.1e}")
    if wrong:
        assert truth.closest_contest > 1e-6, "a tie that rounding decides: choose another seed"
    assert not wrong, f"{len(wrong)} of {len(kept)} kept sets differ, first {wrong[0]}"
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert pool_usage(llm) == 0.0


def run_case(
    case: Case, engine_pool: EnginePool, book_tokens: list[int], corpus: list[int] | None = None
) -> None:
    """3,000 tokens of the book; the counters must show that the policy really evicted."""
    llm = engine_pool.get(
        {**case.policy, "trace": True},
        max_model_len=4096,
        max_num_batched_tokens=case.token_budget,
        env=case.env,
        **case.engine,
    )
    (before,) = llm.collective_rpc("kv_policy_counters")
    calls = sum(CALLS.values())
    compare(llm, case.policy, book_tokens[:NUM_TOKENS], corpus=corpus)
    (after,) = llm.collective_rpc("kv_policy_counters")
    num_layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
    own_path = case.policy.get("order") == "importance"  # what C++ does not know
    strides = 0 if own_path or PYTORCH & case.env.items() else after["strides"] - before["strides"]
    assert sum(CALLS.values()) - calls == strides * num_layers
    kept = case.policy["budget"] + 4 + case.policy.get("overflow", 32)
    assert after["tokens"] - before["tokens"] == NUM_TOKENS
    assert after["evicted_tokens"] - before["evicted_tokens"] >= NUM_TOKENS - kept


@pytest.mark.parametrize("name", in_time(CASES, SLOW))
def test_books_5m(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    run_case(CASES[name], engine_pool, book_tokens)


RANDOM_MODELS: dict[str, Callable[[Path], Path]] = {
    "partial-rotary": lambda path: write_llama(
        path, partial_rotary_factor=0.5, tokenizer_from=MODEL
    ),
    "llama3": lambda path: write_llama(path, rope_parameters=LLAMA3, tokenizer_from=MODEL),
    "yarn": lambda path: write_llama(
        path,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        tokenizer_from=MODEL,
    ),
    "alibi": lambda path: write_bloom(path, tokenizer_from=MODEL),
}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_random_model(
    name: str, engine_pool: EnginePool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = RANDOM_MODELS[name](tmp_path_factory.mktemp(name))
    policy = {**CASCADE, "budget": 64, "prefill_stride": 32, "head_policy": "per_kv_head"}
    llm = engine_pool.get(
        {**policy, "trace": True}, path, max_model_len=2048, max_num_batched_tokens=100
    )
    tokens = np.random.default_rng(0).integers(1, 500, 1500).tolist()
    compare(llm, policy, tokens, path)
