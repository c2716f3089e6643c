# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks that decide together whom to keep, here in the CUDA path.

The other rank's heads are copies of this one's, so that both keep what one alone would: layers
that exchange scores have to equal the same oracle.
"""

import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed
from vllm import envs
from vllm.distributed.device_communicators import flashinfer_all_reduce
from vllm.distributed.device_communicators.flashinfer_all_reduce import FlashInferAllReduce
from vllm.utils.network_utils import get_open_port

from tests.attention import test_paged
from tests.attention.test_paged import RANDOM, Shape
from tests.oracle.draws import scrambled
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.layer import over_ranks


@pytest.mark.parametrize("reduction", ["mean", "max", "median"])
def test_two_ranks_with_the_same_heads(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[str, str]] = Counter()
    reading: list[str] = []

    def over_ranks(mass: torch.Tensor, how: str) -> torch.Tensor:
        asked[how, reading[-1]] += 1
        both = torch.stack([mass, mass])
        return both.sum(0) / 2 if how == "mean" else both.amax(0)

    def all_gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        asked["gather", reading[-1]] += 1
        return torch.cat([tensor, tensor], dim)

    class OfTwo(TritonKVPolicyImpl):
        def prepare(self, *args: Any, **kwargs: Any) -> None:
            super().prepare(*args, **kwargs)
            exchange = {"gather_heads": lambda mass: all_gather(mass, -3), "over_ranks": over_ranks}
            self._layer = replace(self._layer, **exchange)

        def _prefill(self, *args: Any) -> None:
            reading.append("prompt")
            super()._prefill(*args)

        def _decode(self, *args: Any) -> None:
            reading.append("token")
            super()._decode(*args)

    monkeypatch.setattr(vllm.distributed, "tensor_model_parallel_all_gather", all_gather)
    monkeypatch.setattr(test_paged, "CPUKVPolicyImpl", OfTwo)
    monkeypatch.setattr(test_paged, "CPUBuilder", CUDABuilder)
    settings = {"name": "h2o", "budget": 12, "head_reduction": reduction, "prefill_stride": 8}
    test_paged.run_mixed_requests(None, Shape(group=2), settings, [1, 23], [6, 30], 5)
    how = "gather" if reduction == "median" else reduction
    assert asked[how, "prompt"] == reading.count("prompt") > 1, "once a stride"
    assert asked[how, "token"] >= reading.count("token") > 1
    assert {kind for kind, _ in asked} == {how}


@pytest.mark.parametrize(
    ("latent", "head_policy", "apart"),
    [(False, "per_kv_head", True), (False, "homogeneous", False), (True, "per_kv_head", False)],
    ids=["own heads", "shared decisions", "replicated rows"],
)
def test_ranks_of_one_kv_head_draw_apart(latent: bool, head_policy: str, apart: bool) -> None:
    """Only ranks that keep different tokens may have different numbers."""
    latents: dict[str, Any] = {"latent": True, "group": 4, "rotary_dim": 8} if latent else {}
    shape = Shape(num_kv_heads=1, **latents)
    served = test_paged.PagedLayer(shape, {**RANDOM, "head_policy": head_policy}, 4)
    salts: list[int] = []
    for head in (0, 1):
        served.impl.prepare(served.spec, served.pages.kv, None, 2, shape.dtype, place=("l", head))
        salts += served.impl._layer.salts.view(torch.uint32).tolist()
    heads = (0, 1) if apart else (0, 0)
    assert salts == [scrambled(scrambled(head) ^ zlib.crc32(b"l")) for head in heads]


@pytest.mark.slow
def test_three_ranks_on_cpus_have_the_same_bits() -> None:
    """vLLM's own sum of three differs from rank to rank in the last bit."""
    command = [sys.executable, "-m", "tests.attention.three_ranks"]
    port = str(get_open_port())
    ranks = [
        subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    found = [rank.communicate(timeout=300)[0].split()[-1] for rank in ranks]
    assert len(set(found)) == 1


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_reduction_over_cards_goes_through_what_graphs_capture(
    how: str, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another communicator would take memory that vLLM has not measured, or add in another order.

    vLLM's own ``all_reduce`` of the group is not asked at all: the stand-in has none.
    """
    asked: list[str] = []

    def own(mass: torch.Tensor, op: Any) -> torch.Tensor:
        asked.append(f"nccl {op}")
        return mass + 4

    def other(mass: torch.Tensor, op: Any, group: Any) -> None:
        asked.append(f"torch {op}")
        mass += 8

    nccl = SimpleNamespace(disabled=disabled, all_reduce=own)
    group = SimpleNamespace(
        device_communicator=SimpleNamespace(pynccl_comm=nccl), device_group=None, world_size=2
    )
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", other)
    found = over_ranks(OnCard(torch.zeros(2, 5)), how)
    operation = {"mean": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}[how]
    assert asked == [f"{'torch' if disabled else 'nccl'} {operation}"]
    assert found.tolist() == [[(8 if disabled else 4) / (2 if how == "mean" else 1)] * 5] * 2


class OnCard(torch.Tensor):
    """A tensor that says it is on a card."""

    is_cpu = False
    is_cuda = True


@pytest.mark.parametrize(
    ("shape", "accepted"), [((40, 2053), True), ((40, 2049), True), ((3, 1, 2304), False)]
)
def test_why_masses_do_not_go_through_vllms_sum(
    shape: tuple[int, ...], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks FlashInfer first, which takes masses of decode, ``[B, N + 1]``, but not the sums of
    strides, ``[R, 1, n]``.

    Its kernel for NVSwitch then raises an error, as ``N + 1`` is not divisible by 4, and FlashInfer
    adds in no fixed order. If vLLM's gate rejects masses one day, ``over_ranks`` may use its sum.
    """
    enough = SimpleNamespace(is_buffer_size_sufficient=lambda **_: True)
    monkeypatch.setattr(flashinfer_all_reduce, "get_fi_ar_workspace", lambda **_: enough)
    gate = FlashInferAllReduce.__new__(FlashInferAllReduce)
    gate.disabled, gate.group, gate.world_size, gate.rank = False, None, 2, 0
    gate.max_workspace_size, gate.max_num_tokens = 64 << 20, 0
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER, "vLLM's default"
    assert gate.should_use_fi_ar(OnCard(torch.zeros(shape))) == accepted
