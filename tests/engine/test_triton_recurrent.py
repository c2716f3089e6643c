# SPDX-License-Identifier: Apache-2.0
"""Attention beside recurrent layers on the Triton kernels, interpreted, against the oracle.

The recurrent layers are those of vLLM's CPU platform, gated delta nets those of the tests in fp32;
pages hold both kinds' caches. Log-probabilities and kept tokens of 1,000 tokens and 60 more; alone,
in a batch and from a snapshot.
"""

from contextlib import nullcontext
from typing import Any

import pytest

from tests.engine.delta_rule import delta_rule_in_fp32
from tests.engine.pool import EnginePool
from tests.engine.test_families import POLICIES
from tests.engine.test_recurrent import (
    DELTA_NETS,
    check,
    engine,
    model_of,
    recurrent_models,
    skip_without_pictures,
)
from tests.engine.test_triton_families import check_company, triton_backend
from tests.oracle.recurrent import RECURRENT

__all__ = ["model_of", "recurrent_models", "triton_backend"]  # fixtures


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_family(family: str, engine_pool: EnginePool, model_of: Any) -> None:
    skip_without_pictures(family)
    path, settings = model_of(family), POLICIES["cascade-heads"] | {"prefill_stride": 64}
    engine_pool.close()  # the pool's others use the CPU's paths
    with delta_rule_in_fp32() if family in DELTA_NETS else nullcontext():
        llm = engine(engine_pool, path, family, settings, {}, dtype="float32")
        check(llm, path, family, settings, native=False)
        check_company(llm)
        engine_pool.close()
