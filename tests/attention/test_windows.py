# SPDX-License-Identifier: Apache-2.0
"""Layers with a sliding window beside a policy's: against a window over the stream itself, in fp64.

The reference knows no cache: a query sees the last tokens of its stream, at their true positions.
The layer is given queries and keys at the positions that the policy of other layers makes, which
are others and stop growing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

from tests.attention.test_paged import Shape
from tests.oracle.quantised import Quantiser
from vllm_cascade.attention.cpu.builder import CPUBuilder
from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import CHOICES, SWITCH
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.cache.kinds import bounded
from vllm_cascade.cache.layout import page_views
from vllm_cascade.cache.quantised import Quantised
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary, rotate
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.registry import resolve
from vllm_cascade.step.builder import step_of

SINK = {"name": "sink", "budget": 13, "num_sinks": 3}
CASES: dict[str, tuple[Shape, int, dict[str, Any]]] = {
    # shape, window, the policy of other layers
    "plain": (Shape(), 9, {**SINK, "prefill_stride": 8}),
    "token by token": (Shape(group=3), 12, {**SINK, "prefill_stride": 1}),
    "stride beyond the window": (Shape(), 7, {**SINK, "prefill_stride": 20}),
    "window beyond the budget": (Shape(sinks=True), 45, {**SINK, "prefill_stride": 8}),
    "interleaved, soft cap": (
        Shape(is_neox=False, softcap=2.0, head_size=20, rotary_dim=8),
        10,
        {**SINK, "prefill_stride": 6},
    ),
    "alibi": (Shape(alibi=True), 9, {**SINK, "prefill_stride": 8}),
    "batches": (Shape(), 11, {"name": "lazy", "budget": 12, "overflow": 6, "prefill_stride": 8}),
    "units": (
        Shape(block_size=12),
        10,
        {"name": "sink", "budget": 12, "num_sinks": 3, "unit": 3, "prefill_stride": 6},
    ),
    # Recalled units come between; as many as there are, and more than the policy itself keeps.
    "recall": (
        Shape(block_size=12),
        10,
        {"name": "sink", "budget": 12, "num_sinks": 3, "unit": 3, "prefill_stride": 6, "recall": 2},
    ),
    "recall beyond the budget": (
        Shape(block_size=12, sinks=True),
        45,
        {"name": "lazy", "budget": 12, "overflow": 6, "unit": 3, "prefill_stride": 9, "recall": 9},
    ),
    "int8, recall": (
        Shape(block_size=12, cache_dtype="int8_per_token_head"),
        23,
        {"name": "sink", "budget": 12, "unit": 3, "prefill_stride": 9, "recall": 5},
    ),
    "many": (
        Shape(head_size=64, rotary_dim=64, group=4, sinks=True),
        120,
        {"name": "cascade", "budget": 64, "prefill_stride": 50},
    ),
    "int8": (Shape(cache_dtype="int8_per_token_head"), 9, {**SINK, "prefill_stride": 8}),
    "fp8": (
        Shape(cache_dtype="fp8", scales=(0.25, 0.75), head_size=64, rotary_dim=64, sinks=True),
        21,
        {**SINK, "prefill_stride": 8},
    ),
}


def specs_of(
    shape: Shape, window: int, settings: dict[str, Any]
) -> tuple[KVPolicySpec, KVPolicySpec]:
    """Of a layer under the policy, and of one with a window."""
    same = {
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.stored_dtype,
        "kv_quant_mode": get_kv_quant_mode(shape.cache_dtype),
    }
    policy = resolve({**settings, "trace": True})
    full = KVPolicySpec.from_full(FullAttentionSpec(block_size=shape.block_size, **same), policy)
    other = SlidingWindowSpec(block_size=1, sliding_window=window, **same)
    both = bounded({"full": full, "window": other}, policy, shape.block_size)
    return both["full"], both["window"]


class WindowLayer:
    """The layer over a poisoned pool, and its stream's rows, unrotated."""

    def __init__(self, shape: Shape, window: int, settings: dict[str, Any]) -> None:
        self.shape, self.window = shape, window
        full, spec = specs_of(shape, window, settings)
        self.spec = spec
        self.num_pages = 1 + 3 * spec.most_pages
        self.pool = torch.full((self.num_pages, spec.page_size_bytes), 0xFF, dtype=torch.uint8)
        self.pool[0] = 0x11
        rows = shape.num_kv_heads, spec.page_slots, 2 * shape.head_size
        strides = rows[1] * rows[2], rows[2], 1
        item = shape.stored_dtype.itemsize
        view = torch.as_strided(
            self.pool.view(shape.stored_dtype),
            (self.num_pages, *rows),
            (spec.page_size_bytes // item, *strides),
        )
        num_heads = shape.num_kv_heads * shape.group
        self.slopes = [2.0 ** -(i + 1) for i in range(num_heads)] if shape.alibi else None
        self.impl = CPUKVPolicyImpl(
            num_heads,
            shape.head_size,
            shape.head_size**-0.5,
            shape.num_kv_heads,
            self.slopes,
            window,
            shape.cache_dtype,
            shape.softcap,
            sinks=shape.sink_logits,
        )
        exponent = torch.arange(0, shape.rotary_dim, 2) / shape.rotary_dim
        self.rotary = None if shape.alibi else Rotary(1.0 / 100.0**exponent, shape.is_neox)
        self.impl.prepare(spec, view, self.rotary, 1, shape.dtype, shape.scales)
        self.pages = page_views(view, spec, Quantised.of(shape.cache_dtype, shape.scales))
        scheduler = SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=8)
        config = SimpleNamespace(scheduler_config=scheduler)
        self.builder = CPUBuilder(spec, ["window"], config, torch.device("cpu"))
        self.others = CPUBuilder(full, ["full"], config, torch.device("cpu"))
        self.builder.follow(self.others)

    def turned(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[T, heads, D]`` in fp64, rotated at ``[T]`` positions."""
        if self.rotary is None:
            return rows.double()
        angle = positions.double()[:, None] * self.rotary.inv_freq.double()
        table = torch.stack([angle.cos(), angle.sin()], dim=1)[:, None]
        return rotate(rows.double(), table, self.rotary.is_neox)

    def stored(
        self, rows: dict[str, torch.Tensor], begin: int, positions: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What tokens from ``begin`` on, written at positions, are read as; keys unrotated."""
        quantiser = Quantiser.of(self.shape.cache_dtype, self.shape.scales)
        key, value = (rows[name][begin : begin + len(positions)] for name in ("key", "value"))
        if quantiser is None:
            return {"key": key, "value": value}
        key = quantiser.read(self.turned(key, positions).float(), 0)
        return {"key": self.turned(key, -positions).float(), "value": quantiser.read(value, 1)}

    def expected(self, rows: dict[str, torch.Tensor], t: int) -> torch.Tensor:
        """fp64 output ``[heads, D]`` of a stream's token ``t``."""
        shape, first = self.shape, max(t - self.window + 1, 0)
        seen = torch.arange(first, t + 1)
        keys = self.turned(rows["key"][first : t + 1], seen)
        query = self.turned(rows["query"][t : t + 1], torch.tensor([t]))[0]
        query = query.unflatten(0, (shape.num_kv_heads, -1))
        logits = torch.einsum("hgd,nhd->hgn", query, keys) * shape.head_size**-0.5
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        if self.slopes is not None:
            slopes = torch.tensor(self.slopes).double().view(shape.num_kv_heads, -1, 1)
            logits = logits + slopes * (seen - t)
        weights = logits.exp()
        total = weights.sum(-1, keepdim=True)
        if shape.sink_logits is not None:
            total += shape.sink_logits.double().view(shape.num_kv_heads, -1, 1).exp()
        values = rows["value"][first : t + 1].double()
        return torch.einsum("hgn,nhd->hgd", weights / total, values).flatten(0, 1)

    def step(
        self,
        rows: list[dict[str, torch.Tensor]],
        firsts: list[int],
        lengths: list[int],
        prefilling: list[bool],
        table: torch.Tensor,
    ) -> torch.Tensor:
        """Output of the next ``lengths`` tokens of every stream."""
        metadata = self.builder.build(0, step_of(firsts, lengths, prefilling, table))
        self.others.build(0, step_of(firsts, lengths, prefilling, table))
        positions = self.others.positions.buffer[: sum(lengths)]
        new = {
            name: torch.cat(
                [s[name][f : f + n] for s, f, n in zip(rows, firsts, lengths, strict=True)]
            )
            for name in ("query", "key", "value")
        }
        for name in ("query", "key"):
            new[name] = self.turned(new[name], positions)
        given = [new[name].to(self.shape.dtype) for name in ("query", "key", "value")]
        output = torch.full_like(given[0], torch.nan)
        self.positions = positions
        layer = SimpleNamespace(layer_name="window")
        return self.impl.forward(layer, *given, self.pool, metadata, output)


@pytest.fixture(params=CHOICES)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SWITCH, request.param)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_a_window_is_a_window(name: str, path: str) -> None:
    layer = WindowLayer(*CASES[name])
    assert (type(layer.impl.path) is NativePath) == (path == "native")
    run_streams(layer, CASES[name][2]["prefill_stride"])


def random_streams(shape: Shape, totals: list[int]) -> list[dict[str, torch.Tensor]]:
    """Unrotated rows of streams of so many tokens."""
    torch.manual_seed(0)
    heads = {"query": shape.group, "key": 1, "value": 1}
    return [
        {
            what: torch.randn(total, shape.num_kv_heads * times, shape.head_size)
            for what, times in heads.items()
        }
        for total in totals
    ]


def run_streams(layer: WindowLayer, stride: int, interpreted: bool = False) -> None:
    """Three streams in one batch: prompts in strides, then token by token, several windows long.

    Interpreted kernels are slow, and get a window less.
    """
    shape, window = layer.shape, layer.window
    prompts, totals = [3, 2 * window + 5, 4 * window + 1], [window + 9, 2 * window + 30, 5 * window]
    if interpreted:
        prompts, totals = [3, window + 5, 2 * window + 1], [window + 9, window + 30, 3 * window]
    streams = random_streams(shape, totals)
    most = layer.spec.most_pages
    table = torch.arange(1, 1 + 3 * most, dtype=torch.int32).view(3, most).flip(1).contiguous()
    held = [{what: rows.clone() for what, rows in stream.items()} for stream in streams]
    seen = [0, 0, 0]
    while any(done < total for done, total in zip(seen, totals, strict=True)):
        active = [i for i in range(3) if seen[i] < totals[i]]
        prefilling = [seen[i] < prompts[i] for i in active]
        lengths = [
            min(2 * stride, prompts[i] - seen[i]) if prompt else 1
            for i, prompt in zip(active, prefilling, strict=True)
        ]
        rows, firsts = [streams[i] for i in active], [seen[i] for i in active]
        output = layer.step(rows, firsts, lengths, prefilling, table[active])
        wanted, positions = [], layer.positions.split(lengths)
        for i, n, at in zip(active, lengths, positions, strict=True):
            own = layer.stored(streams[i], seen[i], at)
            for t in range(seen[i], seen[i] + n):
                begin = t // stride * stride if t < prompts[i] else t
                for what in own:  # read as stored but for the stride's own
                    held[i][what][seen[i] : begin] = own[what][: begin - seen[i]]
                wanted.append(layer.expected(held[i], t))
            for what in own:
                held[i][what][seen[i] : seen[i] + n] = own[what]
        torch.testing.assert_close(output.double(), torch.stack(wanted), atol=3e-5, rtol=1e-4)
        for i, n in zip(active, lengths, strict=True):
            seen[i] += n
            kept = kept_tokens(layer.pages, table[i].long(), min(seen[i], window - 1), seen[i])
            assert kept == [list(range(max(seen[i] - window + 1, 0), seen[i]))]
    assert (layer.pool[0] == 0x11).all()


def test_a_request_of_its_own_policy_has_its_own_frame() -> None:
    check_own_frames(WindowLayer(*CASES["plain"]))


def check_own_frames(layer: WindowLayer) -> None:
    """Positions follow the request's policy; what a window sees does not."""
    check_frames(layer, {"kv_budget": 4, "kv_policy": "window"}, lambda t: [min(t, 4), min(t, 16)])


def test_a_request_that_recalls_nothing_has_its_own_frame() -> None:
    """Five units of 3 are kept; the others' requests have two more."""
    layer = WindowLayer(*CASES["recall"])
    check_frames(
        layer, {"kv_recall": 0}, lambda t: [3 * min(t // 3, most) + t % 3 for most in (5, 7)]
    )


def check_frames(
    layer: WindowLayer, asked: dict[str, Any], expected: Callable[[int], list[int]]
) -> None:
    """``expected``: positions of a request that asks for its own policy, and of another."""
    own = PerRequest(layer.spec.engine_schedule).schedule(asked)
    layer.builder.requests = layer.others.requests = SimpleNamespace(
        schedules=lambda common: [own, layer.spec.engine_schedule],
        prefilling=lambda common: common.is_prefilling.numpy(),
        all_dummies=lambda common: False,
    )
    (stream,) = random_streams(layer.shape, [60])
    most = layer.spec.most_pages
    table = torch.arange(1, 1 + 2 * most, dtype=torch.int32).view(2, most)
    for t in range(60):
        output = layer.step([stream, stream], [t, t], [1, 1], [False, False], table)
        positions = layer.others.positions.buffer[:2].tolist()
        assert positions == expected(t)
        for row in output:
            torch.testing.assert_close(
                row.double(), layer.expected(stream, t), atol=3e-5, rtol=1e-4
            )
