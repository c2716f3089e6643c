# SPDX-License-Identifier: Apache-2.0
"""Decode as a captured CUDA graph: the same kernels again, with the same arguments.

A graph keeps launches with their grids, pointers and numbers; Python does not run again. So the
launches of one step are recorded, on block tables of nothing but the null block, as vLLM captures.
Every later step only rewrites the buffers that those launches read, and launches them again: what
a step needs must all be in there, lengths, policies, scores and positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from tests.attention.test_cuda import common
from tests.attention.test_drafts import Streams, run_to_the_end
from tests.attention.test_paged import (
    BEEHIVE,
    CASES,
    DGC,
    ENGINE,
    OWN,
    Asked,
    PagedLayer,
    Shape,
    judged,
    oracle_for,
)
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.step.builder import step_of

pytestmark = pytest.mark.usefixtures("triton")

MAKES_NOTHING = ("aten.empty", "aten.new_empty", "aten.slice", "aten.select", "aten.view",
                 "aten.as_strided", "aten.detach", "aten.alias")  # fmt: skip


class OnlyKernels(TorchDispatchMode):
    """What a replay would leave out is an error: work by PyTorch between the kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(func).startswith(MAKES_NOTHING), f"{func} is not part of the recording"
        return func(*args, **(kwargs or {}))


class Graph:
    """Kernel launches, recorded once."""

    def __init__(self) -> None:
        self._launches: list[tuple[Any, Any, Any]] = []

    @contextmanager
    def capture(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        launch = GridExecutor.__call__

        def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self._launches.append((executor, args, kwargs))
            with _disable_current_modes():  # the interpreter copies what it is given
                launch(executor, *args, **kwargs)

        with monkeypatch.context() as patch, OnlyKernels():
            patch.setattr(GridExecutor, "__call__", recorded)
            yield

    def replay(self) -> None:
        for executor, args, kwargs in self._launches:
            executor(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._launches)


def run(
    shape: Shape, settings: dict[str, Any], asked: list[Asked], steps: int, monkeypatch: Any
) -> int:
    """Requests that decode from their first token on, each ``2 * i`` steps after the first.

    Returns:
        Launches of one step.
    """
    settings = {**settings, "prefill_stride": 8}
    rows, pages = len(asked) + 1, -(-(settings["budget"] + 8) // shape.block_size)
    layer = PagedLayer(shape, settings, 1 + rows * pages)
    builder, heads, size = layer.builder, shape.num_kv_heads, shape.head_size
    own = PerRequest(layer.spec.schedule)
    schedules = [own.schedule(extra_args) for extra_args, _ in asked]
    scores = np.random.default_rng(0).integers(0, 9, (rows, steps)).astype(float).tolist()
    source = layer.policy.token_scores
    literal = [
        oracle_for(own, shape, layer, given if source else None)
        for (_, own), given in zip(asked, scores, strict=False)
    ]
    builder.requests.token_scores = lambda _, row, begin, end, lag: judged(
        scores[row], lag, begin, end
    )
    table = torch.zeros(rows, pages, dtype=torch.int32)  # the runner's own, written in place
    seq_lens = torch.ones(rows, dtype=torch.int32)
    query = torch.randn(rows, heads * shape.group, size)
    key, value = torch.randn(2, rows, heads, size)
    output, before = torch.empty_like(query), layer.pool.clone()

    def metadata(lengths: list[int]) -> Any:
        seq_lens.copy_(torch.tensor(lengths))
        return builder.build(0, common(lengths, table).replace(seq_lens=seq_lens))

    graph, captured = Graph(), builder.build_for_cudagraph_capture(common([1] * rows, table))
    with graph.capture(monkeypatch):
        layer.impl.forward(
            *(SimpleNamespace(layer_name="layer"), query, key, value, layer.pool),
            *(captured, output),
        )
    assert torch.equal(layer.pool, before), "capture writes nothing"
    builder.requests.schedules = lambda _: list(schedules)
    table[:-1] = torch.arange(1, 1 + (rows - 1) * pages).view(rows - 1, -1).int()
    null = layer.pool[0].clone()
    for step in range(steps):
        lengths = [max(step + 1 - 2 * row, 0) for row in range(rows - 1)] + [0]
        metadata(lengths)  # of which a replay sees only the buffers
        plain = torch.randn(query.shape), *torch.randn(2, rows, heads, size)
        positions = builder.positions.buffer[:rows].tolist()
        for buffer, rows_now in zip((query, key), plain, strict=False):
            turned = [literal[0].rotate(x, p) for x, p in zip(rows_now, positions, strict=True)]
            buffer.copy_(torch.stack(turned))
        value.copy_(plain[2])
        output.fill_(torch.nan)
        graph.replay()
        for row, length in enumerate(lengths):
            if length == 0:
                assert (output[row] == 0).all()
                continue
            now = slice(row, row + 1)
            expected = literal[row].step(*(part[now] for part in plain))
            torch.testing.assert_close(output[now].double(), expected, atol=2e-5, rtol=2e-5)
            slots = schedules[row].peak_at(length)
            kept = kept_tokens(layer.pages, table[row].long(), slots, length)
            assert kept == [sim.tokens() for sim in literal[row].sims], (row, length)
    assert torch.equal(layer.pool[0], null), "the null block was written"
    return len(graph)


@pytest.mark.slow
def test_policies_of_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording serves them all, though none was known when it was made."""
    assert run(Shape(), ENGINE, OWN, 60, monkeypatch) == 3  # attend, merge_scored, insert


@pytest.mark.parametrize(
    ("settings", "launches"),
    [
        (BEEHIVE, 3),
        ({**BEEHIVE, "log_n": True}, 3),
        (CASES["h2o-normalise-1"][1], 3),
        pytest.param(CASES["heads-overflow-1"][1], 3, marks=pytest.mark.slow),
        (CASES["lazy"][1], 3),
        ({**DGC, "overflow": 4}, 4),
        pytest.param(DGC, 4, marks=pytest.mark.slow),
    ],
    ids=["beehive", "log-n", "h2o-normalise-overflow", "heads-overflow", "lazy", "dgc-overflow",
         "dgc"],
)  # fmt: skip
def test_policy(settings: dict[str, Any], launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that delete several tokens at once, by scores, or by what the host says."""
    asked: list[Asked] = [({}, settings)] * 2
    assert run(Shape(), settings, asked, 30, monkeypatch) == launches


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8"])
def test_rows_in_8_bits(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(cache_dtype=cache_dtype, scales=(0.25, 0.75))
    settings = CASES["heads-overflow-1"][1]
    assert run(shape, settings, [({}, settings)] * 2, 30, monkeypatch) == 3


# --- rows with drafts -------------------------------------------------------------------------


class Replayed(Streams):
    """Rows with drafts by a recording, if all of a step have as many; other steps are planned."""

    def __init__(
        self, case: str, most: int, totals: list[int], seed: int, patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(case, most, totals, seed)
        layer, shape, width = self.drafting, self.shape, 1 + most
        self.table = torch.zeros(len(totals) + 1, self.tables.shape[1], dtype=torch.int32)
        self.seq_lens = torch.zeros(len(self.table), dtype=torch.int32)
        tokens, heads, size = len(self.table) * width, shape.num_kv_heads, shape.head_size
        self.query = torch.randn(tokens, heads * shape.group, size)
        self.key = torch.randn(tokens, heads, size)
        self.value = torch.randn(tokens, heads, size)
        if shape.latent:
            self.value = shape.value_of(self.key)
        self.output = self.query.new_empty(*self.query.shape[:2], shape.value_size)
        none, before, self.graph = [0] * len(self.table), layer.pool.clone(), Graph()
        captured = layer.builder.build_for_cudagraph_capture(
            step_of(none, [width] * len(none), [False] * len(none), self.table)
        )
        with self.graph.capture(patch):
            self.forward(captured)
        assert torch.equal(layer.pool, before), "capture writes nothing"
        layer.builder.counters = type(layer.builder.counters)()
        self.replays = 0

    def forward(self, metadata: Any) -> None:
        name, layer = SimpleNamespace(layer_name="layer"), self.drafting
        rows = self.query, self.key, self.value
        layer.impl.forward(name, *rows, layer.pool, metadata, self.output)

    def number_of_drafts(self) -> int:
        return self.most if self.rng.random() < 0.9 else super().number_of_drafts()

    def run_layer(
        self,
        layer: PagedLayer,
        row: list[int],
        lengths: list[int],
        firsts: list[int],
        prompts: list[bool],
        rows: list[torch.Tensor],
    ) -> torch.Tensor:
        width = 1 + self.most
        if layer is self.plain or any(prompts) or set(lengths) != {width}:
            return super().run_layer(layer, row, lengths, firsts, prompts, rows)
        padding = len(self.table) - len(row)
        self.table.zero_()
        self.table[: len(row)] = self.tables[row]
        step = step_of(
            [*firsts, *[0] * padding],
            [*lengths, *[0] * padding],
            [False] * len(self.table),
            self.table,
        )
        self.seq_lens.copy_(step.seq_lens)
        layer.builder.build(0, step.replace(seq_lens=self.seq_lens))  # a replay sees buffers only
        positions = layer.builder.positions.buffer[: sum(lengths)].tolist()
        for buffer, new in zip((self.query, self.key, self.value), rows, strict=True):
            turned = new
            if buffer is not self.value:
                turned = torch.stack(
                    [self.rotate(x, p) for x, p in zip(new, positions, strict=True)]
                )
            if buffer is not self.value or not self.shape.latent:
                buffer[: len(new)] = turned
        self.output.fill_(torch.nan)
        self.graph.replay()
        self.replays += 1
        assert (self.output[sum(lengths) :] == 0).all()
        return self.output[: sum(lengths)].clone()


LAUNCHES = {"latent": 3, "units": 3, "h2o": 3, "random": 4, "sink": 3}
"""Launches of one token by case, without the one that saves ranks and scores of drafts."""


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("units", 3),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (("latent", 7), ("h2o", 1), ("random", 2), ("sink", 5))
        ),
    ],
)
def test_rows_with_drafts(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording serves all of them, whatever was accepted before."""
    streams = Replayed(case, most, [36, 24], 3, monkeypatch)
    assert len(streams.graph) == LAUNCHES[case] * (1 + most) + most
    run_to_the_end(streams, 0.6)
    assert streams.replays > 8 and streams.accepted > 8 and streams.rejected > 8
