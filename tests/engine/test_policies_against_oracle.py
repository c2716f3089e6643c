# SPDX-License-Identifier: Apache-2.0
"""The other policies, and ``overflow`` with any, against the oracle on the engine."""

import pytest

from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import CASCADE, Case, run_case

BEEHIVE = {"name": "beehive", "budget": 100, "window": 20, "stride": 5, "threshold": 80}
CASES = {
    "cascade-overflow-64": Case({**CASCADE, "prefill_stride": 64, "overflow": 24}, 200),
    "sink-overflow-256": Case(
        {"name": "sink", "budget": 100, "prefill_stride": 256, "overflow": 7}, 300
    ),
    "lazy-1": Case(
        {"name": "lazy", "budget": 80, "prefill_stride": 1, "overflow": 20, "slack": 15}, 300
    ),
    "lazy-64": Case({"name": "lazy", "budget": 80, "prefill_stride": 64}, 300),
    "h2o-64": Case(
        {"name": "h2o", "budget": 96, "prefill_stride": 64, "head_policy": "per_kv_head"}, 300
    ),
    "h2o-normalise-256": Case(
        {"name": "h2o", "budget": 90, "window": 30, "prefill_stride": 256, "normalise": True}, 512
    ),
    "h2o-overflow-64": Case(
        {"name": "h2o", "budget": 90, "window": 30, "prefill_stride": 64, "overflow": 5}, 512
    ),
    "beehive-1": Case({**BEEHIVE, "prefill_stride": 1, "head_policy": "homogeneous"}, 300),
    "beehive-64": Case({**BEEHIVE, "prefill_stride": 64, "log_n": True}, 300),
    "beehive-new-256": Case(
        {**BEEHIVE, "budget": 140, "prefill_stride": 256, "threshold_counts": "new"}, 300
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_books_5m(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    run_case(CASES[name], engine_pool, book_tokens)
