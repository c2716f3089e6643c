# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on the Triton kernels, interpreted, against the oracle.

Whole engines whose CPU backend is given the CUDA backend's code, as in ``test_triton_families.py``,
which runs these families, too.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.v1.attention.backends.mla.prefill import selector

from tests.engine import graph_profile
from tests.engine.pool import EnginePool
from tests.engine.stored_rows import StoredRows
from tests.engine.test_against_oracle import MAX_ERROR, assert_like
from tests.engine.test_batching import ForceTokens
from tests.engine.test_families import POLICIES, compare, random_tokens
from tests.engine.test_full_attention import experts_in_one_group
from tests.engine.test_recall import read
from tests.engine.test_recall_families import POLICIES as RECALLING
from tests.engine.test_recall_families import check_replayed
from tests.engine.test_recall_families import compare as compare_recall
from tests.engine.test_triton_families import (
    agrees,
    check_company,
    check_decoding,
    engine,
)
from tests.engine.test_triton_processes import check as in_processes
from tests.engine.test_units import kept_sets
from tests.oracle.families import run_family, shallow, write_family
from tests.oracle.full_attention import LATENT, OWN_MODULES
from tests.oracle.quantised import Quantiser
from vllm_cascade.attention.latent import OwnPrefill
from vllm_cascade.engine.devices import CPU, DEVICES
from vllm_cascade.policies.policy import Policy
from vllm_cascade.recall.rings import Rings

__all__ = ["experts_in_one_group"]  # a fixture
pytestmark = pytest.mark.usefixtures("triton_backend")


def test_deepseek(engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of CUDA graphs is profiled first, on a cache of the runner's own specs."""
    found = graph_profile.turn_on(monkeypatch.setattr)
    family = shallow(OWN_MODULES["deepseek-v2"])
    path = write_family(tmp_path, family)
    check_decoding(engine_pool, path, family, POLICIES["cascade"], prompt_len=130, num=6)
    assert found == [{"CUDABuilder"}]


def prefill_on_a_card(config: VllmConfig) -> Any:
    """vLLM's choice of a prefill backend of latents on an H200, made on this platform."""
    card = {
        "is_cpu": lambda _: False,
        "get_device_capability": classmethod(lambda _: DeviceCapability(9, 0)),
        "get_mla_prefill_backend_cls": vars(Platform)["get_mla_prefill_backend_cls"],
    }
    selector._auto_select_mla_prefill_backend.cache_clear()
    with mock.patch.multiple(type(current_platform), **card):
        return selector.get_mla_prefill_backend(config)


def test_vllm_has_no_prefill_backend(
    engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For heads of these sizes, in fp32, vLLM finds none on a card; ours does not need it."""
    found: list[Any] = []

    def choose(config: VllmConfig) -> Any:
        found.append(prefill_on_a_card(config))
        return found[-1]

    def configure(_: CPU, config: VllmConfig, policy: Policy) -> None:
        DEVICES["cuda"].configure(config, policy)
        config.attention_config.backend = None  # the CPU platform knows no other than its own

    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", choose)
    monkeypatch.setattr(CPU, "configure", configure)
    family = shallow(OWN_MODULES["deepseek-v2"])
    path = write_family(tmp_path, family)
    check_decoding(engine_pool, path, family, POLICIES["cascade"], prompt_len=70, num=3)
    assert found == [OwnPrefill, OwnPrefill]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("deepseek-v3", "units"),
        ("deepseek-v2", "h2o"),
        ("deepseek-v2", "sink"),
        ("deepseek-v3", "cascade"),
    ],
)
def test_policies(family: str, policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    path = write_family(tmp_path, OWN_MODULES[family])
    check_company(agrees(engine_pool, path, family, POLICIES[policy], prompt_len=170))
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_dtype", "policy"),
    [
        ("int8_per_token_head", "cascade"),
        ("fp8", "h2o"),
        ("fp8_per_token_head", "units"),
        ("int8_per_token_head", "sink"),
        ("fp8_e5m2", "cascade"),
    ],
)
def test_rows_in_8_bits(
    cache_dtype: str, policy: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    """Against an oracle that quantises for itself and compares every code."""
    family, settings, prompt = OWN_MODULES["deepseek-v2"], POLICIES[policy], 170
    path = write_family(tmp_path, family)
    llm = engine(engine_pool, path, {**settings, "trace": True}, kv_cache_dtype=cache_dtype)
    with StoredRows(llm, prompt + 61) as rows:

        def truth_of(tokens: list[int]) -> Any:
            written = {"quantiser": Quantiser.of(cache_dtype), "stored": rows.layers}
            return run_family(path, family, tokens, prompt, settings, **written)

        error, grown = compare(llm, cache_dtype, truth_of, prompt, settings["budget"] + 16)
    assert error.max() < MAX_ERROR and not grown["native_calls"]
    compared, others = (sum(getattr(r, n) for r in rows.layers) for n in ("compared", "others"))
    print(f"{others} of {compared} codes by rounding")
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert compared > 2 * 100 * width and others < 1e-3 * compared
    check_company(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", "int8_per_token_head"])
def test_chunks_at_once(cache_dtype: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """Without a trace all strides of a chunk are one launch."""
    family = OWN_MODULES["deepseek-v2"]
    path, settings = write_family(tmp_path, family), POLICIES["sink"] | {"prefill_stride": 32}
    check_decoding(engine_pool, path, family, settings, 700, 61, cache_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sink", "cascade-heads"])
def test_recall(policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """Units of latent rows, judged by the whole rows."""
    family, settings, prompt = OWN_MODULES["deepseek-v3"], RECALLING[policy], 301
    path = write_family(tmp_path, family)
    engine_pool.close()
    llm = engine_pool.get(
        {**settings, "trace": True},
        path,
        max_model_len=2048,
        max_num_batched_tokens=100,
        skip_tokenizer_init=True,
        logits_processors=[ForceTokens],
    )
    core = llm.llm_engine.engine_core.engine_core
    assert isinstance(core.model_executor.driver_worker.worker._stores, Rings)

    def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
        return run_family(path, family, tokens, prompt, settings, kept)

    compare_recall(
        llm, "deepseek-v3", truth_of, settings, native=False, prompt=prompt, total=prompt + 45
    )
    check_company(llm)
    check_replayed(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_dtype", "policy"), [("int8_per_token_head", "sink"), ("fp8", "cascade-heads")]
)
def test_recall_in_8_bits(
    cache_dtype: str, policy: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    """Units come back as the codes that they were.

    In V3 transformers orders a key's rotated channels otherwise than vLLM, so these are V2's.
    """
    family, settings, prompt = OWN_MODULES["deepseek-v2"], RECALLING[policy], 301
    path = write_family(tmp_path, family)
    forced = {"logits_processors": [ForceTokens], "kv_cache_dtype": cache_dtype}
    llm = engine(engine_pool, path, {**settings, "trace": True}, **forced)
    llm.collective_rpc("kv_policy_trace", args=(1,))
    text = random_tokens(0, prompt + 46)
    with StoredRows(llm, len(text)) as rows:
        logprobs = read(llm, text, prompt)
    kept = kept_sets(llm)
    quantised = {"quantiser": Quantiser.of(cache_dtype), "stored": rows.layers}
    truth = run_family(path, family, text[:-1], prompt, settings, kept, **quantised)
    assert_like(truth, logprobs[:-1], kept, closest=None, mean_error=MAX_ERROR)
    choices, near = truth.recalls
    assert choices > 10 and near <= 0.1 * choices
    check_company(llm)
    check_replayed(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cascade", "cascade-heads"])
def test_two_ranks(policy: str) -> None:
    """Each has the latents of all tokens and half of the heads; both keep the same tokens."""
    found = in_processes(POLICIES[policy], {"tensor_parallel_size": 2}, "deepseek-v2")
    first, second = found["counters"]
    assert first["evicted_tokens"] == second["evicted_tokens"] > 30
