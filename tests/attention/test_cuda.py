# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's builder and implementation, on the CPU with interpreted kernels.

``tests/engine/test_triton_backend.py`` runs whole engines on them; here is what engines on a CPU
do not do: capture with empty block tables, padded batches, buffers that must stay where they are.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.attention import test_paged
from tests.attention.test_paged import CASES, PagedLayer, Shape, oracle_for
from vllm_cascade.attention.cuda import CUDAKVPolicyBackend, TritonKVPolicyImpl
from vllm_cascade.attention.cuda_metadata import TritonMetadataBuilder, device_schedule
from vllm_cascade.gpu_worker import GPUKVPolicyWorker
from vllm_cascade.policies import resolve
from vllm_cascade.policies.base import step_tables

CASCADE = {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 2}
ONE_RULE: dict[str, dict[str, Any]] = {
    "window": {"name": "window", "budget": 9},
    "sink": {"name": "sink", "budget": 9},
    "cascade": CASCADE,
    "h2o": {"name": "h2o", "budget": 14},
    "sink-overflow": {"name": "sink", "budget": 9, "overflow": 4},
    "lazy": {"name": "lazy", "budget": 12, "overflow": 6, "slack": 5, "max_drop": 2},
}
BATCHES: dict[str, dict[str, Any]] = {
    "beehive": {"name": "beehive", "budget": 20, "window": 4, "stride": 3, "threshold": 13},
    "cascade-overflow": {**CASCADE, "overflow": 3},
    "h2o-overflow": {"name": "h2o", "budget": 14, "overflow": 2},
}


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_paged, "CPUKVPolicyImpl", TritonKVPolicyImpl)
    monkeypatch.setattr(test_paged, "KVPolicyMetadataBuilder", TritonMetadataBuilder)


def common(
    seq_lens: list[int], table: torch.Tensor, num_tokens: int | None = None
) -> CommonAttentionMetadata:
    """A decode batch as a runner describes it; a length of 0 is a padded row."""
    real = sum(length > 0 for length in seq_lens)
    offsets = torch.tensor([0, *np.cumsum([length > 0 for length in seq_lens])], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens or real,
        max_query_len=1,
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(0),
        is_prefilling=None,
    )


@pytest.mark.parametrize("name", ONE_RULE)
def test_decode_rows_are_the_policys(name: str) -> None:
    """Every step of a long stream: position, slots and victims, from sequence lengths alone."""
    layer = PagedLayer(Shape(), {**ONE_RULE[name], "prefill_stride": 4}, 3)
    policy, builder = layer.policy, layer.builder
    t = np.arange(200)
    lengths = [int(n) for n in t + 1]
    table = torch.ones(200, 2, dtype=torch.int32)
    tokens = builder.build(0, common(lengths, table)).waves[0].tokens
    lo, hi = policy.victims(t)
    evicts = (hi > lo).astype(int)
    for i in np.flatnonzero(policy.batches(t)):
        keep = policy.keep(torch.zeros(1, policy.count(int(i)) + 1), policy.plan(int(i), 1))[0]
        gone = (~keep).nonzero().flatten().tolist()
        lo[i], hi[i], evicts[i] = gone[0], gone[-1] + 1, len(gone)
    columns = [t, policy.counts(t), policy.peaks(t), policy.peaks(t + 1), lo, hi, evicts]
    assert torch.equal(tokens.steps, torch.from_numpy(np.stack(columns, 1)).int())
    assert torch.equal(builder.positions.buffer[:200], torch.from_numpy(policy.counts(t)))
    assert builder.counters.tokens == 200
    assert builder.counters.evicted_tokens == sum(policy.counts(t) + 1 - policy.counts(t + 1))


@pytest.mark.parametrize("name", [*ONE_RULE, *BATCHES])
def test_full_graphs_where_every_step_is_one_rule(name: str) -> None:
    settings = {**ONE_RULE, **BATCHES}[name]
    layer = PagedLayer(Shape(), {**settings, "prefill_stride": 4}, 3)
    support = TritonMetadataBuilder.get_cudagraph_support(None, layer.spec)
    one_rule = name in ONE_RULE
    expected = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if one_rule else (AttentionCGSupport.NEVER)
    )
    assert support == expected
    assert (device_schedule(layer.policy, torch.device("cpu")) is not None) == one_rule
    assert (layer.builder.schedule is not None) == one_rule
    if not one_rule:
        assert step_tables(layer.policy).batch.any()


def test_buffers_stay_where_a_graph_found_them() -> None:
    layer = PagedLayer(Shape(), {**ONE_RULE["cascade"], "prefill_stride": 4}, 4)
    table = torch.tensor([[1], [2], [0], [0]], dtype=torch.int32)
    captured = layer.builder.build_for_cudagraph_capture(common([1, 1, 1, 1], table))
    tokens = captured.waves[0].tokens
    assert tokens.steps[:, 0].tolist() == [0, 0, -1, -1]
    later = layer.builder.build(0, common([7, 31, 0, 0], table)).waves[0].tokens
    assert tokens.steps.data_ptr() == later.steps.data_ptr() and tokens.index is None
    assert tokens.steps[:, 0].tolist() == [6, 30, -1, -1], "the captured rows are the new ones"
    assert layer.builder.positions.buffer[:4].tolist() == [6, 18, 0, 0]


@pytest.mark.parametrize("name", ["cascade", "beehive"])
def test_capture_and_warm_up_write_nothing(name: str) -> None:
    """Block tables of nothing but the null block, decode and prompt: not a byte changes."""
    layer = PagedLayer(Shape(), {**{**ONE_RULE, **BATCHES}[name], "prefill_stride": 4}, 3)
    before = layer.pool.clone()
    table = torch.zeros(3, 2, dtype=torch.int32)
    same = lambda x, _: x  # noqa: E731
    for lengths, prefilling in (([1, 1, 1], [False] * 3), ([9, 2, 1], [True] * 3)):
        total = sum(lengths)
        layer.step(
            *(lengths, [50, 0, 7], prefilling, table, torch.randn(total, 4, 16)),
            *(torch.randn(total, 2, 16), torch.randn(total, 2, 16), same),
        )
    assert torch.equal(layer.pool, before)


def test_padded_rows_beside_real_ones() -> None:
    """Two real requests in a batch of four: right outputs, zeros for padding, null block whole."""
    shape, settings = Shape(), {**CASCADE, "prefill_stride": 1}
    layer = PagedLayer(shape, settings, 5)
    table = torch.tensor([[3, 1], [4, 2], [0, 0], [0, 0]], dtype=torch.int32)
    null = layer.pool[0].clone()
    literal = [oracle_for(settings, shape, layer) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for t in range(30):
        query = torch.randn(4, 4, 16, generator=generator)
        key, value = torch.randn(2, 4, 2, 16, generator=generator)
        metadata = layer.builder.build(0, common([t + 1, t + 1, 0, 0], table, num_tokens=4))
        position = int(layer.builder.positions.buffer[0])
        turned = (
            literal[0].rotate(query, position).float(),
            literal[0].rotate(key, position).float(),
        )
        output = torch.full_like(query, torch.nan)
        layer.impl.forward(
            SimpleNamespace(layer_name="layer"), *turned, value, layer.pool, metadata, output
        )
        for row in range(2):
            expected = literal[row].step(
                query[row : row + 1], key[row : row + 1], value[row : row + 1]
            )
            torch.testing.assert_close(output[row].double(), expected[0], atol=2e-5, rtol=2e-5)
        assert (output[2:] == 0).all()
    assert torch.equal(layer.pool[0], null)
    assert layer.builder.counters.evicted_tokens == 2 * (30 - layer.policy.count(30))


@pytest.mark.parametrize("name", ["heads-max", "partial-interleaved", "beehive-log-n", "lazy-1"])
def test_mixed_requests(name: str) -> None:
    """The PyTorch path's own test of mixed batches, on the kernels."""
    assert name in CASES
    shape, settings = CASES[name]
    prompts, totals = [1, 5, 23, 32, 48], [40, 5, 30, 32, 60]
    test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))


def test_vllm_finds_and_accepts_the_backend() -> None:
    worker = GPUKVPolicyWorker
    register_backend(worker.backend, worker.backend_path)
    try:
        assert AttentionBackendEnum.CUSTOM.get_class() is CUDAKVPolicyBackend
    finally:
        worker.backend.clear_override()
    reasons = {
        size: CUDAKVPolicyBackend.validate_configuration(
            head_size=size,
            dtype=torch.bfloat16,
            kv_cache_dtype="auto",
            block_size=16,
            use_mla=False,
            has_sink=False,
            use_sparse=False,
            use_mm_prefix=False,
            use_per_head_quant_scales=False,
            device_capability=DeviceCapability(9, 0),
            attn_type="decoder",
        )
        for size in (64, 80, 96, 128, 256, 512)
    }
    assert reasons.pop(512) == ["head_size not supported"]
    assert not any(reasons.values()), reasons
    assert CUDAKVPolicyBackend.get_preferred_block_size(16) == 16


def test_resolved_policy_is_used() -> None:
    """A guard for this file: the patched classes are the ones that ran."""
    layer = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 3)
    assert type(layer.impl) is TritonKVPolicyImpl
    assert type(layer.builder) is TritonMetadataBuilder
    assert layer.policy == resolve({**CASCADE, "prefill_stride": 4, "trace": True})
