# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers beside a policy's: Mamba-2, gated delta nets, short convolutions.

Tiny random models of the real architectures, against transformers' modules (tests/oracle/
recurrent.py): a prompt in strides and greedy tokens, past the budget and the model's positions.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.pool import EnginePool, pool_usage
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH
from tests.engine.test_families import POLICIES, check_company, random_tokens
from tests.engine.test_units import decode, kept_sets
from tests.oracle.recurrent import RECURRENT, run_recurrent, write_recurrent
from vllm_cascade.kernels.cpp.library import load

IN_FP32 = [name for name, family in RECURRENT.items() if family.dtype == "float32"]
FAST = [("lfm2", "cascade", {})]
SLOW = [
    *((family, "cascade", {}) for family in IN_FP32 if family != "lfm2"),
    *((family, "sink-heads", dict(PYTORCH)) for family in IN_FP32),
    ("granite4-rope", "units", {}),
    ("granite4", "h2o", {}),
    ("lfm2", "cascade-heads", dict(PYTORCH)),
]
BFLOAT16_ERROR = 0.1
"""Largest difference of a log-probability where an engine computes in bfloat16."""


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
    pool: EnginePool, path: Path, family: str, policy: dict[str, Any], env: dict[str, str], **more
) -> Any:
    settings = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 100,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "dtype": RECURRENT[family].dtype,
        **more,
    }
    return pool.get({**policy, "trace": True}, path, env=env, **settings)


def check(llm: Any, path: Path, family: str, policy: dict[str, Any], native: bool) -> None:
    """Log-probabilities and kept tokens of 900 tokens and 60 more."""
    prompt_len, more = 900, 60
    (before,) = llm.collective_rpc("kv_policy_counters")
    calls = sum(load().calls.values())
    llm.collective_rpc("kv_policy_trace", args=(1,))
    tokens, logprobs = decode(llm, random_tokens(0, prompt_len), more + 1)
    kept = kept_sets(llm)
    (after,) = llm.collective_rpc("kv_policy_counters")
    truth = run_recurrent(path, family, tokens[:-1], prompt_len, policy)
    assert truth.closest_contest > 1e-6, "a tie that rounding decides: choose another seed"
    error = np.abs(np.asarray(logprobs[:-1]) - np.asarray(truth.logprobs))
    print(f"{family}: max {error.max():.2e}, mean {error.mean():.2e}")
    assert kept == truth.kept
    if RECURRENT[family].dtype == "float32":
        assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    else:
        assert error.max() < BFLOAT16_ERROR
    if RECURRENT[family].rotated:
        assert after["moved_reads"] > before["moved_reads"]
    assert (sum(load().calls.values()) > calls) == native
    evicted = after["evicted_tokens"] - before["evicted_tokens"]
    assert evicted >= prompt_len + more - policy["budget"] - 8
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize(
    ("family", "policy", "env"),
    [
        *(pytest.param(*case, id="-".join(case[:2])) for case in FAST),
        *(
            pytest.param(
                *case,
                id="-".join([*case[:2], *(["pytorch"] if case[2] else [])]),
                marks=pytest.mark.slow,
            )
            for case in SLOW
        ),
    ],
)
def test_family(
    family: str, policy: str, env: dict[str, str], engine_pool: EnginePool, model_of: Any
) -> None:
    path, settings = model_of(family), POLICIES[policy]
    llm = engine(engine_pool, path, family, settings, env)
    check(llm, path, family, settings, native=not env)
    check_company(llm, settings["prefill_stride"])
