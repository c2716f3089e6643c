# SPDX-License-Identifier: Apache-2.0
"""Keys and values in 8 bits on the Triton kernels, interpreted, against the oracle.

Every row that the engine writes is compared with the oracle's, as in ``test_quantised.py``. As in
``test_triton_backend.py`` the CPU backend is given the CUDA backend's code.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import MODEL
from tests.engine.pool import EnginePool
from tests.engine.test_batching import ForceTokens
from tests.engine.test_families import POLICIES
from tests.engine.test_quantised import ALONE, Case, compare, compare_recalled
from tests.engine.test_triton_backend import CASCADE
from tests.engine.test_triton_families import check_company, check_decoding
from tests.oracle.families import FAMILIES, shallow, write_family
from tests.oracle.random_models import write_llama

pytestmark = pytest.mark.usefixtures("triton_backend")

TOKENS = np.random.default_rng(5).integers(1, 500, 140).tolist()
EACH = {"head_policy": "per_kv_head"}
UNITS = {**CASCADE, "num_sinks": 4, "unit": 4, "prefill_stride": 16}
CASES = {
    "int8-rows": Case("int8_per_token_head", {**CASCADE, **EACH, "prefill_stride": 16}, ALONE),
    "fp8-sink": Case("fp8", {"name": "sink", "budget": 20, "prefill_stride": 16}, ALONE),
    "fp8-rows-units": Case(
        "fp8_per_token_head",
        {**CASCADE, **EACH, "num_sinks": 0, "unit": 16, "prefill_stride": 16},
        ALONE,
    ),
    "int8-rows-small-units": Case("int8_per_token_head", UNITS, ALONE),
    "e5m2-h2o": Case("fp8_e5m2", {"name": "h2o", "budget": 24, "prefill_stride": 1}, ALONE),
}
RECALLING = {**UNITS, "recall": 2, "recall_store": 24, "recall_every": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_llama(folder, head_dim=16, num_layers=1, tokenizer_from=MODEL)


def engine(pool: EnginePool, case: Case, model: Path) -> Any:
    """An engine of its own: the pool's others use the CPU's paths."""
    pool.close()
    return pool.get(
        {**case.policy, "trace": True},
        model,
        max_model_len=1024,
        max_num_batched_tokens=64,
        block_size=16,
        kv_cache_dtype=case.cache_dtype,
        logits_processors=[ForceTokens],
    )


@pytest.mark.parametrize(
    "name", [n if n == "int8-rows" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_against_the_oracle(name: str, engine_pool: EnginePool, model: Path) -> None:
    """A prompt that ends inside a stride, and decoded tokens; then several requests."""
    case = CASES[name]
    llm = engine(engine_pool, case, model)
    compare(llm, TOKENS[:85], 71, case, {}, case.policy, model)
    if name != "int8-rows":
        check_company(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8"])
def test_recall(cache_dtype: str, engine_pool: EnginePool, model: Path) -> None:
    """Units come back from rings as the codes that they were, with their scales."""
    case = Case(cache_dtype, RECALLING, ALONE)
    assert compare_recalled(engine(engine_pool, case, model), TOKENS, 101, case, model) > 10
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("gpt-oss", "cascade"), ("gemma3", "sink"), ("gpt-oss", "units"), ("llama4", "cascade"),
        ("gemma3n", "h2o"),
    ],
)  # fmt: skip
def test_windows(family: str, policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """Layers with windows and learned sinks beside others; all strides of a chunk at once."""
    two_layers = shallow(FAMILIES[family])
    path = write_family(tmp_path, two_layers)
    settings = POLICIES[policy] | {"prefill_stride": 32}
    check_decoding(engine_pool, path, two_layers, settings, 130, 6, "int8_per_token_head")
