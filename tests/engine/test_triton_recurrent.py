# SPDX-License-Identifier: Apache-2.0
"""Attention beside recurrent layers on the Triton kernels, interpreted, against the oracle.

The recurrent layers are those of vLLM's CPU platform; pages hold both kinds' caches. Log-
probabilities and kept tokens of 900 tokens and 60 more; alone, in a batch and from a snapshot.
"""

from typing import Any

import pytest

from tests.engine.pool import EnginePool
from tests.engine.test_families import POLICIES
from tests.engine.test_recurrent import IN_FP32, check, engine, model_of, recurrent_models
from tests.engine.test_triton_families import check_company, triton_backend

__all__ = ["model_of", "recurrent_models", "triton_backend"]  # fixtures


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_FP32)
def test_family(family: str, engine_pool: EnginePool, model_of: Any) -> None:
    path, settings = model_of(family), POLICIES["cascade-heads"] | {"prefill_stride": 64}
    engine_pool.close()  # the pool's others use the CPU's paths
    llm = engine(engine_pool, path, family, settings, {})
    check(llm, path, family, settings, native=False)
    check_company(llm)
    engine_pool.close()
