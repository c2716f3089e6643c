# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention under every kind of policy, against the oracle.

Tiny random DeepSeek models: the oracle has keys and values for every head (transformers' modules),
and the engine one latent row for all. Other models of this kind are in ``test_full_attention.py``.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.engine.pool import EnginePool, pool_usage, prompt_logprobs
from tests.engine.stored_rows import StoredRows
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH, assert_like
from tests.engine.test_batching import ForceTokens
from tests.engine.test_families import (
    POLICIES,
    check,
    check_company,
    compare,
    engine,
    random_tokens,
)
from tests.engine.test_full_attention import experts_in_one_group
from tests.engine.test_metrics import metrics
from tests.engine.test_recall_families import POLICIES as RECALLING
from tests.engine.test_recall_families import PROMPT, check_preempted
from tests.engine.test_recall_families import compare as compare_recall
from tests.oracle.families import run_family, write_family
from tests.oracle.full_attention import LATENT, OWN_MODULES
from tests.oracle.quantised import Quantiser
from vllm_cascade.attention.cpu.backend import CPULatentBackend
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.engine.cpu_worker import CPUKVPolicyWorker

__all__ = ["experts_in_one_group"]  # a fixture
V2, V3 = OWN_MODULES["deepseek-v2"], OWN_MODULES["deepseek-v3"]
CASCADE = POLICIES["cascade"]
STRIDE = {"prefill_stride": 32}
HOW: dict[str, dict[str, Any]] = {
    **POLICIES,
    "h2o-max": {**POLICIES["h2o"], "head_reduction": "max"},
    "cascade-median": {**CASCADE, "head_reduction": "median", "eager_fill": False},
    "beehive": {"name": "beehive", "budget": 60, "window": 20, "threshold": 36, **STRIDE},
    "lazy": {"name": "lazy", "budget": 60, "overflow": 12, "max_drop": 8, **STRIDE},
}
NATIVE = ["units", "h2o", "beehive", "lazy"]
IN_PYTORCH = ["units", "h2o-max", "cascade-median"]


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("deepseek-v2"), V2)


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("deepseek-v3"), V3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "env"),
    [*((name, {}) for name in NATIVE), *((name, dict(PYTORCH)) for name in IN_PYTORCH)],
)
def test_policies(policy: str, env: dict[str, str], engine_pool: EnginePool, v3: Path) -> None:
    settings = HOW[policy]
    llm = engine(engine_pool, v3, settings, env)
    check(llm, v3, ("deepseek-v3", V3), settings, native=not env)
    check_company(llm, settings["prefill_stride"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "env"), [("sink", {}), ("cascade-heads", dict(PYTORCH)), ("h2o-every", {})]
)
def test_recall(policy: str, env: dict[str, str], engine_pool: EnginePool, v3: Path) -> None:
    settings = RECALLING[policy]
    llm = engine(engine_pool, v3, settings, env, logits_processors=[ForceTokens])

    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return run_family(v3, V3, tokens, PROMPT, settings, kept)

    compare_recall(llm, "deepseek-v3", truth_of, settings, native=not env)
    check_company(llm, settings["prefill_stride"])
    check_preempted(llm)


@pytest.mark.parametrize(
    ("cache_dtype", "policy", "env"),
    [
        ("int8_per_token_head", "cascade", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fp8_per_token_head", "cascade-median", dict(PYTORCH)),
                ("fp8", "h2o", {}),
                ("fp8_per_token_head", "units", {}),
                ("int8_per_token_head", "units", dict(PYTORCH)),
            )
        ),
    ],
)
def test_rows_in_8_bits(
    cache_dtype: str, policy: str, env: dict[str, str], engine_pool: EnginePool, v2: Path
) -> None:
    """Against an oracle that quantises latents and rotated channels for itself."""
    settings, quantiser = HOW[policy], Quantiser.of(cache_dtype)
    llm = engine(engine_pool, v2, settings, env, kv_cache_dtype=cache_dtype)
    with StoredRows(llm, 1061) as rows:

        def truth_of(tokens: list[int]) -> Any:
            written = {"quantiser": quantiser, "stored": rows.layers}
            return run_family(v2, V2, tokens, 1000, settings, **written)

        error, grown = compare(llm, cache_dtype, truth_of, 1000, settings["budget"] + 16)
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert (grown["native_calls"] > 0) == (not env)
    compared, others = (sum(getattr(r, n) for r in rows.layers) for n in ("compared", "others"))
    print(f"{others} of {compared} codes by rounding")
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert compared > 2 * 800 * width and others < 1e-3 * compared
    row = width + 8 * cache_dtype.endswith("head")  # one byte a channel, two scales
    units = 32 // settings.get("unit", 1)
    page = -(-(32 * row + units * 16) // 64) * 64
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks == (64 << 20) // (2 * page)


@pytest.mark.parametrize("cache_dtype", ["auto", *CODES])
def test_the_backend_decides_about_cache_types(cache_dtype: str) -> None:
    """vLLM 0.33 refuses 8 bits for these models by itself: it does so again for later engines."""
    worker = object.__new__(CPUKVPolicyWorker)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    asked = AttentionSelectorConfig(48, torch.bfloat16, cache_dtype, 32, use_mla=True)
    before = CpuPlatform.get_attn_backend_cls
    with worker._our_backend():
        found = CpuPlatform.get_attn_backend_cls(None, attn_selector_config=asked, num_heads=4)
        assert AttentionBackendEnum.CPU_MLA.get_class() is CPULatentBackend
        assert found == AttentionBackendEnum.CPU_MLA.get_path()
    assert CpuPlatform.get_attn_backend_cls == before


@pytest.mark.slow
def test_layers_without_rotary_positions(
    engine_pool: EnginePool, v2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's only such model, Kimi Linear, needs a GPU: V2 with its rotary modules taken away."""
    init = MultiHeadLatentAttentionWrapper.__init__

    def without(module: Any, *args: Any, **kwargs: Any) -> None:
        init(module, *args, **kwargs)
        module.rotary_emb = None

    monkeypatch.setattr(MultiHeadLatentAttentionWrapper, "__init__", without)
    engine_pool.close()
    settings = POLICIES["sink"]  # equal tokens have equal keys, and so scores
    llm = engine(engine_pool, v2, settings, {})
    check(llm, v2, ("unrotated", replace(V2, rotated=(False, False))), settings)
    engine_pool.close()


@pytest.mark.slow
def test_compiled(engine_pool: EnginePool, v2: Path) -> None:
    """Without ``--enforce-eager``, where vLLM compiles what is around attention."""
    llm = engine(engine_pool, v2, CASCADE, {}, enforce_eager=False)
    check(llm, v2, ("compiled", V2), CASCADE)


@pytest.mark.slow
def test_two_ranks(engine_pool: EnginePool, v2: Path) -> None:
    """Each has the latents of all tokens and half of the heads; both keep the same tokens."""
    first, *others = sorted(os.sched_getaffinity(0))
    settings = {**CASCADE, "head_policy": "per_kv_head"}
    llm = engine_pool.get(
        settings,
        v2,
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{others[0] if others else first}"},
        max_model_len=2048,
        max_num_batched_tokens=100,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    text = random_tokens(3, 700)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": text}], params)
    truth = run_family(v2, V2, text, len(text), settings)
    assert_like(truth, prompt_logprobs(output))
    for counters in llm.collective_rpc("kv_policy_counters"):
        assert counters["evicted_tokens"] == 700 - 68


def test_pages_hold_one_row_of_each_token(engine_pool: EnginePool, v3: Path) -> None:
    """A request's pages and saved bytes, from the sizes of the model."""
    llm = engine(engine_pool, v3, CASCADE, {})
    prompt = {"prompt_token_ids": random_tokens(0, 300)}
    params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("0", prompt, params)
    row = 4 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])
    page = 2 * 32 * (row + 4 * 4)  # two layers; rank, born, score and, for the trace, the token
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        for request in scheduler.requests.values():
            done, now = request.num_computed_tokens, metrics(llm)
            pages = -(-min(done, 68) // 32)
            assert now["pages"] == pages
            assert now["saved_bytes"] == 2 * row * 32 * -(-done // 32) - pages * page
            seen = done
    assert seen > 290
    assert pool_usage(llm) == 0.0


@pytest.mark.parametrize("asked", [{}, {"enable_prefix_caching": False, "block_size": 64}])
def test_vllm_own_kernels_do_not_limit_the_engine(asked: dict[str, Any], v3: Path) -> None:
    """On CPUs vLLM turns off chunks and prefix caching for its own, and takes 16-token pages."""
    config = EngineArgs(
        model=str(v3),
        skip_tokenizer_init=True,
        max_num_batched_tokens=100,
        additional_config={"kv_policy": CASCADE},
        **asked,
    ).create_engine_config()
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 100
    assert config.cache_config.enable_prefix_caching == asked.get("enable_prefix_caching", True)
    assert config.cache_config.block_size == asked.get("block_size", 128)
