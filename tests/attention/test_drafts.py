# SPDX-License-Identifier: Apache-2.0
"""Draft tokens in one layer: rejected ones leave no trace.

Two layers see the same streams: one a token at a time, the other in rows with drafts, of which some
are other tokens. Outputs of accepted tokens and all that a request's pages hold must be byte-equal.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.attention import test_paged
from tests.attention.conftest import use_triton
from tests.attention.test_paged import (
    BEEHIVE,
    CASCADE,
    DGC,
    H2O,
    HEADS,
    IN_UNITS,
    LATENT,
    LAZY,
    RANDOM,
    PagedLayer,
    Shape,
)
from tests.attention.test_selfcheck import broken
from tests.cpp_library import CALLS
from vllm_cascade.attention.cpu.native import NativePath
from vllm_cascade.attention.cpu.paths import CHOICES, SWITCH
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.kernels.triton import drafts, schedule
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.step.drafts import Drafted, Drafts
from vllm_cascade.step.plan import describe
from vllm_cascade.step.rows import RequestTokens, Step

MOST_REQUESTS = 3
WORDS = ("rank", "born", "score", "token")

ON_CUDA: tuple[str, ...] = ()
"""Cases that run in Triton's interpreter in every run: none, but the kernels' own tests."""
IN_PYTORCH = (
    "h2o-heads",
    "units",
    "latent-int8",
    "cascade",
    "cascade-overflow",
    "fp8",
    "keep-prompt",
)
"""Cases that run in PyTorch in every run; those in C++ all do."""
CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "window": (Shape(group=1), {"name": "window", "budget": 17, "prefill_stride": 16}),
    "sink": (Shape(), {"name": "sink", "budget": 13, "num_sinks": 3, "prefill_stride": 8}),
    "cascade": (Shape(group=4), {**CASCADE, "prefill_stride": 8}),
    "cascade-heads": (Shape(group=3), {**HEADS, "head_reduction": "max", "prefill_stride": 8}),
    "cascade-overflow": (Shape(), {**HEADS, "overflow": 5, "prefill_stride": 8}),
    "cascade-paper": (
        Shape(),
        {**CASCADE, "eager_fill": False, "tie": "resident", "prefill_stride": 1},
    ),
    "alibi": (Shape(alibi=True), {**HEADS, "prefill_stride": 8}),
    "beehive": (Shape(), {**BEEHIVE, "log_n": True, "prefill_stride": 8}),
    "lazy": (Shape(), {**LAZY, "prefill_stride": 8}),
    "h2o": (Shape(), {**H2O, "normalise": True, "prefill_stride": 8}),
    "h2o-heads": (Shape(), {**H2O, "head_policy": "per_kv_head", "prefill_stride": 32}),
    "random": (Shape(), {**RANDOM, "head_policy": "per_kv_head", "prefill_stride": 8}),
    "dgc": (Shape(), {**DGC, "importance": "attention", "prefill_stride": 6}),
    "units": (Shape(group=4), {**IN_UNITS, "prefill_stride": 8}),
    "units-heads": (
        Shape(block_size=12),
        {
            **IN_UNITS,
            "head_policy": "per_kv_head",
            "head_reduction": "median",
            "prefill_stride": 12,
        },
    ),
    "units-of-2": (Shape(), {**H2O, "budget": 16, "window": 8, "num_sinks": 2, "unit": 2}),
    "latent": (LATENT, {**CASCADE, "prefill_stride": 8}),
    "latent-int8": (
        replace(LATENT, cache_dtype="int8_per_token_head"),
        {**H2O, "prefill_stride": 8},
    ),
    "int8": (
        Shape(cache_dtype="int8_per_token_head"),
        {**HEADS, "prefill_stride": 8},
    ),
    "fp8": (
        Shape(cache_dtype="fp8", scales=(0.25, 0.75)),
        {**CASCADE, "unit": 4, "num_sinks": 4, "prefill_stride": 8},
    ),
    "small-window": (Shape(), {**H2O, "window": 1, "prefill_stride": 8}),
    "keep-prompt": (Shape(), {**H2O, "keep_prompt": 8, "prefill_stride": 8}),
}


@pytest.fixture(params=CHOICES)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that layers built in this test get; Triton's is interpreted."""
    if request.param == "triton":
        use_triton(monkeypatch)
    else:
        monkeypatch.setenv(SWITCH, request.param)
    return request.param


class Streams:
    """The same requests in a layer without drafts and in one with up to ``most``."""

    def __init__(self, case: str, most: int, totals: list[int], seed: int) -> None:
        shape, settings = CASES[case]
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.shape, self.most, self.totals = shape, most, totals
        self.settings = {"prefill_stride": 8, **settings}
        slots = 60
        each = -(-slots // shape.block_size)
        num_pages = 1 + each * len(totals)
        self.plain = PagedLayer(shape, self.settings, num_pages)
        self.drafting = PagedLayer(shape, self.settings, num_pages, most)
        self.drafting.impl.keep_drafts(MOST_REQUESTS)
        self.native = isinstance(getattr(self.plain.impl, "path", None), NativePath)
        self.drafts = Drafts(MOST_REQUESTS, most)
        self.drafting.builder.drafts = self.drafts
        self.tables = torch.randperm(num_pages - 1).view(len(totals), -1).int() + 1
        own = PerRequest(self.plain.spec.schedule)
        self.prompts = [int(self.rng.integers(1, total // 3)) for total in totals]
        asked = [{}, {"kv_budget": self.smaller}, {}]
        self.schedules = [own.schedule(a, n) for a, n in zip(asked, self.prompts, strict=False)]
        heads = shape.num_kv_heads * shape.group, shape.num_kv_heads
        self.true = [self.rows(total + most, *heads) for total in totals]
        self.false = self.rows(max(totals) + most, *heads)
        self.done = [0] * len(totals)
        self.state: dict[int, Any] = {}
        self.accepted = self.rejected = 0

    @property
    def smaller(self) -> int:
        """A request's own budget: the smallest that suits the policy."""
        return {"cascade": 16, "beehive": 17}.get(self.settings["name"], self.settings["budget"])

    def rows(self, num: int, num_q: int, num_kv: int) -> list[torch.Tensor]:
        size, made = self.shape.head_size, torch.randn
        return [made(num, num_q, size), made(num, num_kv, size) * 2, made(num, num_kv, size)]

    def rotate(self, row: torch.Tensor, position: int) -> torch.Tensor:
        if self.shape.alibi:
            return row
        rotary = self.shape.rotary_dim
        part = row[..., :rotary]
        angle = position * self.plain.inv_freq
        cos, sin = angle.cos(), angle.sin()
        a, b = part.unflatten(-1, (2, -1)).unbind(-2) if self.shape.is_neox else (None, None)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned, row[..., rotary:]], dim=-1)

    def run(self, layer: PagedLayer, row: list[int], tokens: list[tuple[int, int, int]]) -> Any:
        """One step; ``tokens`` are (request, first, number) of true tokens, false ones behind."""
        requests = layer.builder.requests
        requests.schedules = lambda _: [self.schedules[r] for r in row]
        requests.schedule_of = lambda name: self.schedules[int(name)]
        requests.names = lambda _: [str(r) for r in row]
        parts = []
        for (r, first, num), extra in tokens:
            parts.append(
                [
                    torch.cat([true[first : first + num], false[first + num :][:extra]])
                    for true, false in zip(self.true[r], self.false, strict=True)
                ]
            )
        joined = [torch.cat(column) for column in zip(*parts, strict=True)]
        lengths = [num + extra for (_, _, num), extra in tokens]
        firsts = [first for (_, first, _), _ in tokens]
        prompts = [first < self.prompts[r] for (r, first, _), _ in tokens]
        output = self.run_layer(layer, row, lengths, firsts, prompts, joined)
        return output.split(lengths)

    def run_layer(
        self,
        layer: PagedLayer,
        row: list[int],
        lengths: list[int],
        firsts: list[int],
        prompts: list[bool],
        rows: list[torch.Tensor],
    ) -> torch.Tensor:
        table = self.tables[row]
        return layer.step(lengths, firsts, prompts, table, *rows, rotate=self.rotate)

    def number_of_drafts(self) -> int:
        return int(self.rng.integers(0, self.most + 1))

    def some_requests(self) -> list[int]:
        waiting = [r for r, total in enumerate(self.totals) if self.done[r] < total]
        row = [r for r in self.rng.permutation(waiting).tolist() if self.rng.random() < 0.8]
        return row or waiting[:1]

    def step(self, right: float) -> None:
        """A step of some requests: prompts beside rows with drafts."""
        row = self.some_requests()
        tokens, lengths, drafted = [], {}, {}
        for r in row:
            first = self.done[r]
            if first < self.prompts[r]:
                tokens.append(((r, first, self.prompts[r] - first), 0))
            else:
                drafts = self.number_of_drafts()
                wrong = [i for i in range(drafts) if self.rng.random() >= right]
                good = min(wrong[0] if wrong else drafts, self.totals[r] - first - 1)
                tokens.append(((r, first, 1 + good), drafts - good))
                if drafts:
                    drafted[str(r)] = [0] * drafts
            lengths[str(r)] = tokens[-1][0][2] + tokens[-1][1]
        self.note(row, lengths, drafted)
        outputs = self.run(self.drafting, row, tokens)
        for ((r, first, num), extra), found in zip(tokens, outputs, strict=True):
            self.same(found[:num], self.alone(r, first, num), (r, first, num))
            self.done[r] += num
            self.accepted += num - 1 if first >= self.prompts[r] else 0
            self.rejected += extra

    def alone(self, r: int, first: int, num: int) -> torch.Tensor:
        """What a request's true tokens give in the layer without drafts."""
        ends = [first + num] if first < self.prompts[r] else range(first + 1, first + num + 1)
        expected, begin = [], first
        for end in ends:
            expected += self.run(self.plain, [r], [((r, begin, end - begin), 0)])
            begin = end
        return torch.cat(expected)

    def same(self, mine: torch.Tensor, other: torch.Tensor, where: Any) -> None:
        """Byte-equal; floats are close outside of C++: sums depend on a step's other rows."""
        if mine.is_floating_point() and not self.native:
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5, equal_nan=True)
            return
        mine, other = (x.contiguous().view(torch.uint8) for x in (mine, other))
        assert torch.equal(mine, other), where  # without scores, theirs are whatever memory held

    def note(
        self,
        row: list[int],
        lengths: dict[str, int],
        drafted: dict[str, list[int]],
        ended: dict[str, int] | None = None,
    ) -> None:
        """What a worker does before a step; then the two layers must hold the same."""
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = SimpleNamespace(
            req_ids=[str(r) for r in row], num_computed_tokens=[self.done[r] for r in row]
        )
        output.num_scheduled_tokens = lengths
        output.scheduled_spec_decode_tokens = drafted
        output.ended = ended or {}
        output.finished_req_ids = set(ended or ())
        rejected = self.drafts.note(output)
        if rejected:
            blocks = [self.tables[int(one.name)].tolist() for one in rejected]
            self.drafting.impl.undo(self.drafting.builder.undone(rejected, blocks))
        for r in row:
            self.compare(r)

    def compare(self, r: int) -> None:
        """A request's units, with all words and rows, are byte-equal in both layers."""
        done = self.done[r]
        slots = self.schedules[r].peak_at(done)
        blocks, unit = self.tables[r].long(), self.plain.pages.unit
        found = []
        for layer in (self.plain, self.drafting):
            pages = layer.pages
            words = [
                getattr(pages, word)[blocks].transpose(0, 1).flatten(1)[:, : slots // unit]
                for word in WORDS
            ]
            rank = words[0]
            used = rank >= 0
            ranks = rank.unsqueeze(-1) * unit + torch.arange(unit)
            cached = self.schedules[r].count_at(done)
            there = (used.unsqueeze(-1) & (ranks < cached)).flatten(1)
            assert int(there.sum(1).unique()) == cached if cached else not there.any()
            rows = [
                stored[blocks].transpose(0, 1).flatten(1, 2)[:, :slots]
                for stored in (pages.kv.view(torch.uint8), pages.scale)
                if stored is not None
            ]
            heads = there.expand(len(rows[0]), -1)
            words = [word[used] for word in words[1:]]
            found.append([rank, *words, *(stored[heads] for stored in rows)])
        for mine, other in zip(*found, strict=True):
            self.same(mine, other, (r, done))


def run(case: str, most: int, right: float, seed: int, kind: type[Streams] = Streams) -> Streams:
    """``run_to_the_end`` of new streams."""
    interpreted = test_paged.CPUKVPolicyImpl is TritonKVPolicyImpl  # and slow
    totals = [48, 30] if interpreted else [150, 90, 120]
    return run_to_the_end(kind(case, most, totals, seed), right)


def run_to_the_end(streams: Streams, right: float) -> Streams:
    """Streams to their ends; then nothing of their drafts is left."""
    null_page = streams.drafting.pool[0].clone()
    while any(d < t for d, t in zip(streams.done, streams.totals, strict=True)):
        streams.step(right)
    every = range(len(streams.totals))
    streams.note([], {}, {}, {str(r): streams.done[r] for r in every})
    for r in every:
        streams.compare(r)
    assert torch.equal(streams.drafting.pool[0], null_page), "the null block was written"
    plain, drafting = streams.plain.builder.counters, streams.drafting.builder.counters
    assert (plain.tokens, plain.evicted_tokens, plain.strides) == (
        drafting.tokens,
        drafting.evicted_tokens,
        drafting.strides,
    )
    assert sorted(streams.drafts._free) == list(range(MOST_REQUESTS))
    return streams


@pytest.mark.parametrize(
    ("path", "case"),
    [
        pytest.param(path, case, marks=[pytest.mark.slow] * (case not in always))
        for path, always in (("native", CASES), ("pytorch", IN_PYTORCH), ("triton", ON_CUDA))
        for case in CASES
    ],
    indirect=["path"],
)
def test_nothing_is_left_of_rejected_drafts(path: str, case: str) -> None:
    calls = CALLS["undone"]
    streams = run(case, most=4, right=0.6, seed=1)
    least = 20 if path == "triton" else 50
    assert streams.accepted > least and streams.rejected > least
    native = streams.native
    assert native == (path == "native") and (CALLS["undone"] > calls) == native


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("right", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("case", ["cascade-heads", "units"])
def test_any_number_of_drafts_at_any_acceptance(
    path: str, case: str, most: int, right: float
) -> None:
    streams = run(case, most, right, seed=2)
    assert (streams.accepted == 0) == (right == 0.0)
    assert right < 1.0 or streams.rejected == 0 or streams.rejected < 3 * most  # past the end


def test_a_row_of_drafts_is_one_call() -> None:
    streams = Streams("cascade", 5, [120], seed=6)
    streams.step(0.8)  # the prompt
    while streams.done[0] < streams.totals[0]:
        before, done = CALLS["tokens"], streams.done[0]
        streams.step(0.8)
        assert CALLS["tokens"] - before == 1 + streams.done[0] - done  # and as many without drafts
    assert streams.accepted > 30


def test_bfloat16(path: str) -> None:
    CASES["bfloat16"] = (replace(Shape(), dtype=torch.bfloat16), CASES["cascade"][1])
    run("bfloat16", 3, 0.5, seed=3)


def test_a_preempted_request_undoes_nothing() -> None:
    streams = Streams("cascade", 3, [100, 100, 100], seed=4)
    for _ in range(20):
        streams.step(0.5)
    kept = dict(streams.drafts._drafted)
    assert kept, "no request has drafts"
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = set(kept)
    assert streams.drafts.note(output) == [] and not streams.drafts._drafted
    assert sorted(streams.drafts._free) == list(range(MOST_REQUESTS))


def test_requests_of_a_warm_up_end_without_a_word() -> None:
    """vLLM's own requests have no scheduler that says which drafts stay; others must have one."""
    drafts = Drafts(2, 3)
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"a"}
    drafts._drafted = {"a": Drafted("a", begin=5, num=2, place=3 * drafts._free.pop())}
    with pytest.raises(AssertionError, match="its tokens are not known"):
        drafts.note(output)
    drafts._drafted = {"a": Drafted("a", begin=5, num=2, place=0)}
    drafts._free, drafts.warming_up = [1], True
    assert drafts.note(output) == [] and not drafts._drafted and sorted(drafts._free) == [0, 1]


# --- each part, broken once ---------------------------------------------------------------------


def lost_version(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Journal.save_words
    monkeypatch.setattr(
        Journal,
        "save_words",
        lambda self, place, blocks: save(self, place - place % self.most, blocks),
    )


def row_over_a_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Journal.save_slots

    def without_rows(self: Journal, place: int, blocks: Any, slots: Any) -> None:
        save(self, place, blocks, slots)
        self.rows[place] = 0

    monkeypatch.setattr(Journal, "save_slots", without_rows)


def lost_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Journal.save_slots

    def without_births(self: Journal, place: int, blocks: Any, slots: Any) -> None:
        save(self, place, blocks, slots)
        self.words[place, 1] += 1

    monkeypatch.setattr(Journal, "save_slots", without_births)


def one_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    reject = Drafts._reject

    def less(self: Drafts, name: str, computed: int) -> Any:
        found = reject(self, name, computed)
        if found is None or found.num == 1:
            return None
        return replace(found, begin=computed + 1, num=found.num - 1, place=found.place + 1)

    monkeypatch.setattr(Drafts, "_reject", less)


def oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores rows in the order in which they were written."""
    monkeypatch.setattr("vllm_cascade.attention.torch.drafts.reversed", iter, raising=False)


def first_draft_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Drafts.saves

    def later(self: Drafts, *args: Any) -> np.ndarray:
        places = saves(self, *args)
        return np.where(places % self.most == 0, -1, places)

    monkeypatch.setattr(Drafts, "saves", later)


def positions_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions continue from a row's first token, so they depend on what was accepted before."""

    def plan(tokens: RequestTokens, *args: Any) -> Step:
        step = describe(tokens, *args)
        rows = zip(tokens.place, tokens.length, tokens.prefilling, strict=True)
        for place, length, prompt in rows:
            if not prompt:
                row = slice(place, place + length)
                step.positions[row] = step.positions[place] + np.arange(length)
        return step

    monkeypatch.setattr("vllm_cascade.step.builder.describe", plan)


BREAKAGES = [
    lost_version,
    row_over_a_victim,
    lost_birth,
    one_too_few,
    oldest_first,
    first_draft_not_saved,
    positions_of_rows,
]


@pytest.fixture(scope="module")
def unbroken() -> None:
    """The streams of every breakage, which pass without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CASCADE_CPU", "pytorch")
        run("small-window", 7, 0.5, seed=5)


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_part_is_caught(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CASCADE_CPU", "pytorch")
    breakage(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # a slot that was not saved is any number
        run("small-window", 7, 0.5, seed=5)


def nothing_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKVPolicyImpl, "undo", lambda self, undone: None)


def kernel(function: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A kernel with something else in place of ``old``."""
    module = schedule if function == "_schedule" else drafts

    def breakage(monkeypatch: pytest.MonkeyPatch) -> None:
        broken(module, function, old, new, monkeypatch)

    breakage.__name__ = f"{function}: {new}"
    return breakage


@pytest.mark.slow
@pytest.mark.parametrize(
    "breakage",
    [
        one_too_few,
        positions_of_rows,
        nothing_undone,
        # A version too few, a row over a victim, the oldest first; and positions that continue from
        # a row's first token, so that they depend on what was accepted before.
        kernel("_save_versions", "place % MOST", "0 * place"),
        kernel("_save_versions", "tl.load(score + word", "tl.load(rank + word"),
        kernel("save_slot", "own, ROW, HEADS, ROW,", "own, ROW, HEADS, ROW // 2,"),
        kernel("save_slot", "tl.load(born + word)", "1 + tl.load(born + word)"),
        kernel("_undo", "(num - 1 - i)", "i"),
        kernel("_schedule", "row, cached.to(", "row, (cached + row % WAVES).to("),
    ],
    ids=lambda breakage: breakage.__name__,
)
def test_a_broken_part_is_caught_on_cuda(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_triton(monkeypatch)
    breakage(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run("small-window", 5, 0.5, seed=5)


# --- the host's part ------------------------------------------------------------------------------


def test_places_of_drafts() -> None:
    drafts = Drafts(2, 3)
    drafts._drafted = {"b": Drafted("b", begin=11, num=2, place=3)}
    saves = drafts.saves(
        ["a", "b", None], np.asarray([0, 1, 1, 1, 2]), np.asarray([11, 10, 11, 12, 5])
    )
    assert saves.tolist() == [-1, -1, 3, 4, -1] and saves.dtype == np.int32
