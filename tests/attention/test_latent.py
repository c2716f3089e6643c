# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-head latent attention between vLLM and the Triton kernels.

Whole engines are in ``tests/engine/test_latent.py`` and ``test_triton_latent.py``.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import PassConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.attention.test_cuda import refused
from vllm_cascade.attention.cuda import workspace
from vllm_cascade.attention.cuda.backend import CUDALatentBackend
from vllm_cascade.attention.cuda.impl import TritonLatentImpl
from vllm_cascade.attention.latent import OwnPrefill, connect
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.policies.registry import resolve

BY_DEVICE = {
    "cpu": (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA),
    "cuda": (AttentionBackendEnum.CUSTOM,),
}


@pytest.mark.parametrize("device", BY_DEVICE)
def test_only_models_with_latents_get_the_backend(device: str) -> None:
    found = {}
    for use_mla in (True, False):
        config: Any = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
        backends = DEVICES[device].backends(config)
        found[use_mla] = {slot for slot, name in backends.items() if "Latent" in name}
        assert DEVICES[device].slot in backends
    assert found == {True: set(BY_DEVICE[device]), False: set()}


@pytest.mark.parametrize("use_mla", [True, False])
def test_vllm_writes_no_latents_itself(use_mla: bool) -> None:
    """Where a compiler pass would fuse rotation with the write to vLLM's own slots.

    Nor does it attend from a prompt.
    """
    passes = PassConfig(fuse_rope_kvcache_cat_mla=None)
    passes.fuse_rope_kvcache_cat_mla = True
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(backend=None, mla_prefill_backend=None),
        compilation_config=SimpleNamespace(pass_config=passes),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    DEVICES["cuda"].configure(config, resolve({"name": "cascade"}))
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert passes.fuse_rope_kvcache_cat_mla is not use_mla
    prefill = MLAPrefillBackendEnum.CUSTOM if use_mla else None
    assert config.attention_config.mla_prefill_backend is prefill


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prompts_are_ours_for_all_types_and_sizes(dtype: torch.dtype) -> None:
    """On any card: vLLM would ask one of its own, and has none for most."""
    sizes = MLADimensions(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
    for card in (None, DeviceCapability(8, 0), DeviceCapability(12, 0)):
        asked = MLAPrefillSelectorConfig(dtype, sizes)
        assert OwnPrefill.validate_configuration(card, asked) == []


@pytest.mark.parametrize(
    ("prefill", "refused"),
    [(None, False), ("CUSTOM", False), ("FLASH_ATTN", True), ("TRTLLM_RAGGED", True)],
)
def test_another_prefill_backend_is_refused(prefill: str | None, refused: bool) -> None:
    """It would have no effect."""
    chosen = None if prefill is None else MLAPrefillBackendEnum[prefill]
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=None, mla_prefill_backend=chosen, backend_per_kind=None
        )
    )
    found = [one for one in DEVICES["cuda"].own_refusals if one.name == "attention backend"]
    assert found[0].applies(config, resolve({"name": "cascade"})) == refused
    assert "mla_prefill_backend" in found[0].message


def test_vllm_accepts_the_backend() -> None:
    """Rows of DeepSeek and Kimi, of other sizes, and of none that we compile."""
    reasons = refused(CUDALatentBackend, (576, 288, 320, 1088))
    assert reasons.pop(1088) == ["head_size not supported"]
    assert not any(reasons.values()), reasons


def test_memory_is_reserved_in_profiling_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks the layer only: ours reserves what strides need, vLLM's own prefill nothing."""
    monkeypatch.setattr(workspace, "_of_devices", {})
    own = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 8}
    impl = TritonLatentImpl(
        num_heads=4, head_size=48, scale=1.0, num_kv_heads=1, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", **own,
    )  # fmt: skip
    policy = {"name": "cascade", "budget": 64, "num_sinks": 4, "prefill_stride": 16}
    impl._config = SimpleNamespace(
        additional_config={"kv_policy": policy},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=3),
        model_config=SimpleNamespace(hf_text_config=None),
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
    )
    full = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=48, dtype=torch.float32)
    impl.spec = KVPolicySpec.from_full(full, resolve(policy))
    impl.least_part = 16  # strides are split, and leave parts of 32 channels
    calls: list[Any] = []
    layer = SimpleNamespace(impl=impl, layer_name="layer")
    layer.forward_impl = lambda *args, **more: calls.append(args)
    connect(layer)
    assert impl.layer is layer
    query, output = torch.zeros(32, 4, 16), torch.ones(32, 32)
    layer.forward_impl(query, None, None, None, None, output=output)
    assert not calls and not output.any()
    memory, limits = workspace.workspace_of(query.device), impl._config.scheduler_config
    one, slots = query.new_empty(1, 4, 48), 128  # of a block table, of which 80 are used
    worst = workspace.worst_shapes(resolve(policy), limits, one, 1, 16, 32, slots)
    chunks = workspace.worst_chunks(32 // 16 + 3, one, 1, slots, 32)
    assert worst["partial"][0][::3] == (32, 32) and worst["partial"][0][2] > 1
    most = max(workspace.size_of(worst), workspace.size_of(chunks))
    reserved = most + 4 * workspace.counters_of(worst)
    assert memory.num_bytes == reserved
    layer.forward_impl(query, None, None, None, SimpleNamespace(), output=output)
    assert len(calls) == 1 and memory.num_bytes == reserved
