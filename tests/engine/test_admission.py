# SPDX-License-Identifier: Apache-2.0
"""How large a request may be, and whose pool may be too small for the longest one.

The 400 of a live server: ``tests/engine/test_faults.py``.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.conftest import MODEL
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.engine.admission import check_request, longest_stream, usable_pages
from vllm_cascade.engine.lookup import policy_of
from vllm_cascade.policies import POLICIES, resolve

POLICY = {"name": "sink", "budget": 64, "prefill_stride": 16}


@settings(deadline=None)
@given(name=st.sampled_from(sorted(POLICIES)), slots=st.integers(0, 90), limit=st.integers(0, 200))
def test_longest_stream(name: str, slots: int, limit: int) -> None:
    policy = resolve({"name": name, "budget": 64, "prefill_stride": 16})
    needed = np.maximum.accumulate([policy.count(t) for t in range(limit + 1)])
    assert longest_stream(policy, slots, limit) == np.flatnonzero(needed <= slots)[-1]


def config(policy: dict[str, Any] | None = POLICY, **kwargs: Any) -> Any:
    sizes = {"max_model_len": 1000, "block_size": 16, **kwargs}
    additional = {} if policy is None else {"kv_policy": policy}
    made = EngineArgs(model=str(MODEL), additional_config=additional, **sizes)
    return made.create_engine_config()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (40, 8, None),
        (
            40,
            9,
            r"needs 4 KV cache pages of 16 tokens, but the pool has 3.*max_tokens to at most 8",
        ),
        (40, None, r"prompt 40 \+ max_tokens 960, at most max_model_len 1000.*at most 8"),
        (48, 1, "may have 48 tokens, and these are 49 .*shorten the prompt"),
        (990, 500, "needs 5 KV cache pages .*these are 1000 "),
    ],
)
def test_check_request(prompt: int, max_tokens: int | None, message: str | None) -> None:
    engine = config()
    engine.cache_config.num_gpu_blocks = 4
    params = SamplingParams(max_tokens=max_tokens)
    if message is None:
        check_request(engine, prompt, params)
        return
    with pytest.raises(VLLMValidationError, match=message):
        check_request(engine, prompt, params)


def test_without_a_policy_nothing_is_checked() -> None:
    engine = config(None)
    engine.cache_config.num_gpu_blocks = 4
    check_request(engine, 990, SamplingParams(max_tokens=500))


@pytest.mark.parametrize(
    ("size", "local", "local_only", "pages"),
    [(1, 1, False, 99), (4, 1, False, 24), (4, 2, True, 49), (4, 0, True, 24)],
)
def test_pages_of_one_of_many_engines(size: int, local: int, local_only: bool, pages: int) -> None:
    """vLLM tells a front-end the sum of the pools of the engines it talks to."""
    parallel = SimpleNamespace(
        data_parallel_size=size, data_parallel_size_local=local, local_engines_only=local_only
    )
    cache = SimpleNamespace(num_gpu_blocks=100)
    assert usable_pages(SimpleNamespace(parallel_config=parallel, cache_config=cache)) == pages


def test_only_engines_with_a_policy_may_have_a_small_pool() -> None:
    def configs(engine: Any, num_pages: int) -> Any:
        engine.cache_config.kv_cache_layout = "LBHNC"
        spec: Any = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=8, dtype=engine.model_config.dtype
        )
        policy = policy_of(engine)
        if policy is not None:
            spec = KVPolicySpec.from_full(spec, policy)
        return get_kv_cache_configs(engine, [{"a": spec}], [(num_pages + 1) * spec.page_size_bytes])

    with pytest.raises(ValueError, match="To serve at least one request"):
        configs(config(None), 62)
    assert configs(config(None), 63)[0].num_blocks == 64
    assert configs(config(), 2)[0].num_blocks == 3
    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        configs(config(), 0)
