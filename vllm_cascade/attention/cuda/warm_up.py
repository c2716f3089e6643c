# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel variant before the first request.

vLLM's own warm-up has no prompt that continues a filled cache. Here one layer runs a few steps
whose block tables hold only the null block. All their rows are padding without a request, so no
page and no ring is written. Variants do not depend on lengths, nor on the number of requests
(``tests/attention/test_variants.py``).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.metadata import EVERYTHING, DeviceWave
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import POLICIES
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import CONFIG_KEY, KVPolicyError
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.drafts import Drafts
from vllm_cascade.step.inputs import Undone
from vllm_cascade.step.requests import Requests


def warm_up(
    builder: CUDABuilder, impl: TritonKVPolicyImpl, kv_cache: torch.Tensor, width: int
) -> None:
    """Run one layer on padding rows.

    Args:
        kv_cache: the layer's page pool.
        width: columns of the runner's block tables.
    """
    requests, counters, drafts = builder.requests, builder.counters, builder.drafts
    builder.counters = type(counters)()
    most_drafts = 0 if drafts is None else drafts.most
    if most_drafts:
        nothing = torch.zeros(1, width, dtype=torch.int32, device=kv_cache.device)
        impl.undo(Undone(nothing.new_zeros(1, 4), nothing))
    alike = [builder.engine_schedule]  # windows ignore requests' own policies
    if not builder.windowed:
        alike = _schedules(builder.schedule)
    try:
        for schedule in alike:
            builder.requests = _Alike(schedule)
            for firsts, lengths, prompts in _steps(builder, most_drafts):
                builder.drafts = None if prompts else _AllDrafts(len(lengths), most_drafts)
                prefilling = [prompts and length > 1 for length in lengths]
                table = kv_cache.new_zeros(len(lengths), width, dtype=torch.int32)
                step = step_of(firsts, lengths, prefilling, table)
                metadata = builder.build(0, step)
                metadata.waves = [_launching_all(wave) for wave in metadata.waves]
                num = sum(lengths)
                query, key, value = _rows(impl, num, kv_cache.device)
                output = query.new_empty(num, impl.num_heads, value.shape[2])
                layer = SimpleNamespace(layer_name="warm-up")
                impl.forward(layer, query, key, value, kv_cache, metadata, output)
                if impl.waiting is not None:  # for layers that share its cache
                    impl.end_step(metadata)
    finally:
        builder.requests, builder.counters, builder.drafts = requests, counters, drafts


def _rows(
    impl: TritonKVPolicyImpl, num: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros for queries, keys and values of ``num`` tokens, as far apart as the model's.

    Kernels are compiled again where distances are not multiples of 16. The default are views of one
    projection of all three; latent rows are contiguous.
    """
    heads, own, size = impl.num_heads, impl.num_kv_heads, impl.head_size
    fused = (heads + 2 * own) * size
    strides = impl.token_strides or (fused, fused, fused)
    if impl.latent is not None:
        strides = heads * size, own * size, own * size

    def rows(number: int, stride: int) -> torch.Tensor:
        memory = torch.zeros(num, stride, dtype=impl.row_dtype, device=device)
        return memory[:, : number * size].unflatten(1, (number, size))

    query, key, value = map(rows, (heads, own, own), strides)
    return query, key, value if impl.latent is None else key[..., -impl.latent :]


class _Alike(Requests):
    """Requests that all use one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def schedules(self, common: CommonAttentionMetadata) -> list[Schedule]:
        return [self._schedule] * common.num_reqs


class _AllDrafts(Drafts):
    """Takes every token for a draft."""

    def drafting(self, names: Sequence[str | None], ends: np.ndarray) -> list[int]:
        return self._free

    def saves(
        self, names: Sequence[str | None], rows: np.ndarray, stream: np.ndarray
    ) -> np.ndarray:
        return np.zeros(len(rows), dtype=np.int32)


def _launching_all(wave: DeviceWave) -> DeviceWave:
    """A wave with all launches of recall, which the builder leaves out where no row needs them.

    Rows without a request do nothing by them.
    """
    decode = wave.decode and replace(wave.decode, recalls=EVERYTHING)
    prefill = [replace(rows, recalls=EVERYTHING, judged=None) for rows in wave.prefill]
    return replace(wave, decode=decode, prefill=prefill)


def _schedules(engine: Schedule) -> list[Schedule]:
    """The engine's schedule, and one per-request schedule for each other kind of stride.

    A kind: score source, and whether the policy is score-free. Score-free policies never recall,
    so each policy also runs without recall.
    """
    found = {(engine.scoring.source, engine.keeps_newest is not None): engine}
    own = PerRequest(engine)
    for name in POLICIES:
        with suppress(KVPolicyError):  # this engine cannot run the policy
            theirs = own.schedule({CONFIG_KEY: name})
            for one in (theirs, theirs.without_recall):
                found.setdefault((one.scoring.source, one.keeps_newest is not None), one)
    return list(found.values())


def _steps(builder: CUDABuilder, drafts: int) -> Iterator[tuple[list[int], list[int], bool]]:
    """Tokens seen before, and new tokens, per request of each warm-up step; and whether several
    are a prompt's.

    The steps are a stride on an empty cache, strides on a full one, decode beside a stride, and
    decode alone; and with speculative decoding rows of every number of drafts, and of several.
    """
    policy, most = builder.schedule.policy, len(builder.positions.buffer)
    stride = policy.prefill_stride
    later = -(-(policy.keep_prompt + 2 * policy.budget) // stride) * stride
    yield [0], [min(stride, most)], True
    yield [later], [min(stride, most)], True
    yield [later], [min(2, most)], True
    if most > 2:
        yield [later, later], [1, min(stride, most - 1)], True
    yield [later], [1], True
    for width in range(2, min(1 + drafts, most) + 1):
        yield [later], [width], False
    if drafts and most > 2:
        yield [later, later], [1, 2], False
        yield [later, later], [2, 1], False
