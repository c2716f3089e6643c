# SPDX-License-Identifier: Apache-2.0
"""The other policies, and ``overflow`` with any, against the oracle on the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.conftest import MODEL
from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import CASCADE, Case, compare, in_time, run_case

BEEHIVE = {"name": "beehive", "budget": 100, "window": 20, "stride": 5, "threshold": 80}
DGC = {"name": "dgc", "budget": 100, "prefill_stride": 64}
CASES = {
    "dgc-64": Case(DGC, 300),
    "dgc-sklearn-256": Case(
        {**DGC, "importance": "tfidf_sklearn", "order": "importance", "prefill_stride": 256}, 300
    ),
    "dgc-attention-1": Case(
        {
            **DGC,
            "budget": 80,
            "importance": "attention",
            "head_policy": "per_kv_head",
            "prefill_stride": 1,
        },
        300,
    ),
    "dgc-attention-overflow-256": Case(
        {
            **DGC,
            "budget": 110,
            "importance": "attention",
            "overflow": 8,
            "prefill_stride": 256,
        },
        512,
    ),
    "cascade-overflow-64": Case({**CASCADE, "prefill_stride": 64, "overflow": 24}, 200),
    "sink-overflow-256": Case(
        {"name": "sink", "budget": 100, "prefill_stride": 256, "overflow": 7}, 300
    ),
    "lazy-1": Case(
        {"name": "lazy", "budget": 80, "prefill_stride": 1, "overflow": 20, "slack": 15}, 300
    ),
    "lazy-64": Case({"name": "lazy", "budget": 80, "prefill_stride": 64}, 300),
    "h2o-1": Case({"name": "h2o", "budget": 96, "prefill_stride": 1}, 200),
    "h2o-64": Case(
        {"name": "h2o", "budget": 96, "prefill_stride": 64, "head_policy": "per_kv_head"}, 300
    ),
    "h2o-normalise-256": Case(
        {"name": "h2o", "budget": 90, "window": 30, "prefill_stride": 256, "normalise": True}, 512
    ),
    "h2o-overflow-64": Case(
        {"name": "h2o", "budget": 90, "window": 30, "prefill_stride": 64, "overflow": 5}, 512
    ),
    "random-64": Case(
        {"name": "random", "budget": 96, "prefill_stride": 64, "head_policy": "per_kv_head"}, 300
    ),
    "random-overflow-256": Case(
        {
            "name": "random",
            "budget": 90,
            "window": 20,
            "prefill_stride": 256,
            "overflow": 5,
            "seed": 3,
        },
        512,
    ),
    "beehive-1": Case({**BEEHIVE, "prefill_stride": 1, "head_policy": "homogeneous"}, 300),
    "beehive-64": Case({**BEEHIVE, "prefill_stride": 64, "log_n": True}, 300),
    "beehive-new-256": Case(
        {**BEEHIVE, "budget": 140, "prefill_stride": 256, "threshold_counts": "new"}, 300
    ),
}


SLOW = {
    *("dgc-sklearn-256", "sink-overflow-256", "lazy-1", "h2o-1", "beehive-1", "h2o-overflow-64"),
    "dgc-attention-1",
    "random-overflow-256",
}
"""Cases whose parts others have, too."""


@pytest.mark.parametrize("name", in_time(CASES, SLOW))
def test_books_5m(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    run_case(CASES[name], engine_pool, book_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"global_size": 40, "prefill_stride": 64},
        {"head_policy": "per_kv_head", "prefill_stride": 100},
        pytest.param({"head_policy": "per_kv_head", "prefill_stride": 1}, marks=pytest.mark.slow),
    ],
)
def test_clusters(settings: dict[str, Any], engine_pool: EnginePool) -> None:
    """A short stream of tokens that are all different.

    The first layer's keys are equal for equal tokens, and in a long stream two centres are equally
    near up to rounding, sooner or later.
    """
    tokens = np.random.default_rng(2).permutation(4000)[:400].tolist()
    policy = {**DGC, "importance": "cluster", **settings}
    llm = engine_pool.get({**policy, "trace": True}, max_model_len=4096)
    compare(llm, policy, tokens)
    (counters,) = llm.collective_rpc("kv_policy_counters")
    assert counters["evicted_tokens"] == 400 - 104


@pytest.mark.slow
def test_dgc_with_a_table(engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path) -> None:
    """Document frequencies of a corpus that the command has counted."""
    from vllm_cascade.cli import main

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.decode(book_tokens[5000:9000])
    corpus, table = tmp_path / "corpus.txt", tmp_path / "idf.safetensors"
    corpus.write_text(text)
    main(["idf", "--tokenizer", str(MODEL), "--corpus", str(corpus), "--out", str(table)])
    case = Case({**DGC, "idf": str(table), "prefill_stride": 1}, 200)
    run_case(case, engine_pool, book_tokens, tokenizer.encode(text, add_special_tokens=False))
