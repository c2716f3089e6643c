# SPDX-License-Identifier: Apache-2.0
"""A device written from its contract alone: an engine on it, against the oracle.

``Plain`` runs every token as a stride of its own in PyTorch. Its classes have only what their base
classes declare, so an engine that used anything else of a device would fail here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.conftest import MODEL
from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import compare
from tests.oracle.random_models import write_llama
from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.layer import NewTokens
from vllm_cascade.attention.torch.strides import attend_and_insert
from vllm_cascade.engine.devices import DEVICES, Device
from vllm_cascade.engine.refusals import Refusal
from vllm_cascade.engine.worker import KVPolicyWorker
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.inputs import Stride, strides_of
from vllm_cascade.step.rows import StrideRows

TOKENS = np.random.default_rng(2).integers(1, 500, 150).tolist()


@dataclass
class PlainMetadata(AttentionMetadata):
    """A step's waves, and the batch's block table."""

    waves: list[tuple[StrideRows, list[Stride]]]
    table: torch.Tensor


class PlainBuilder(StepBuilder[PlainMetadata]):
    """Single tokens are strides, too, so no rule table is needed."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def make_tables(self, limits: SchedulerConfig) -> None:
        pass

    def rules_at(self, schedule: Schedule) -> int:
        return 0

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PlainMetadata:
        table, size = common_attn_metadata.block_table_tensor, self.kv_cache_spec.page_slots
        step = self.plan(common_attn_metadata)
        waves = [(rows, strides_of(rows, step, table, size)) for rows in step.waves]
        return PlainMetadata(waves, table)


class PlainImpl(KVPolicyImpl):
    """One stride after the other."""

    runs = 0

    def run(
        self, name: str, metadata: PlainMetadata, new: NewTokens, kv_cache: torch.Tensor
    ) -> None:
        type(self).runs += 1
        for rows, strides in metadata.waves:
            for stride in strides:
                tokens = new.at(stride.rows)
                new.output[stride.rows] = attend_and_insert(
                    self.layer_config, self.pages, stride, *tokens
                )
            if self.recorder is not None:
                self.recorder.record(name, self.pages, rows, metadata.table)


class PlainBackend(KVPolicyBackend):
    """Names the two classes."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[PlainImpl]:
        return PlainImpl

    @staticmethod
    def get_builder_cls() -> type[PlainBuilder]:
        return PlainBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class Plain(Device):
    """Takes the CPU's place in these tests."""

    name = "plain"
    stock_worker = "vllm.v1.worker.cpu_worker.CPUWorker"
    worker = f"{__name__}.PlainWorker"
    slot = AttentionBackendEnum.CPU_ATTN
    backend = f"{__name__}.PlainBackend"
    own_refusals = (
        Refusal("recall", lambda _, policy: policy.recall > 0, "recall is not built; set it to 0"),
    )

    def is_current(self) -> bool:
        return True


class PlainWorker(KVPolicyWorker, CPUWorker):
    """vLLM's worker on this device."""

    device_entry = Plain()


def test_an_engine_uses_nothing_but_the_contract(
    engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", PlainWorker.device_entry)
    model = write_llama(tmp_path, num_layers=2, tokenizer_from=MODEL, head_dim=16)
    policy = {"name": "cascade", "budget": 32, "num_subcaches": 2, "prefill_stride": 16}
    engine_pool.close()
    llm = engine_pool.get(
        {**policy, "trace": True}, model, max_model_len=1024, max_num_batched_tokens=50
    )
    compare(llm, policy, TOKENS, model)
    (counters,) = llm.collective_rpc("kv_policy_counters")
    assert PlainImpl.runs > 0 and counters["evicted_tokens"] > 100
    engine_pool.close()


def test_its_refusals_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", PlainWorker.device_entry)
    policy = {"name": "sink", "budget": 64, "recall": 4}
    engine = EngineArgs(model=str(MODEL), additional_config={"kv_policy": policy}, block_size=16)
    with pytest.raises(KVPolicyError, match="recall is not built"):
        engine.create_engine_config()


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_says_everything(name: str) -> None:
    """No attribute of the contract is left out, and none is of one device alone."""
    device, contract = DEVICES[name], set(Device.__annotations__)
    assert all(hasattr(device, attribute) for attribute in contract)
    public = {attribute for attribute in dir(device) if not attribute.startswith("_")}
    methods = {"refusals", "is_current", "memory_bytes", "facts", "prepare", "configure"}
    methods |= {"backends", "restore"}
    assert public == contract | methods
