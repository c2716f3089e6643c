# SPDX-License-Identifier: Apache-2.0
"""The C++ library by itself: any victim rules, on small poisoned pools, against literal lists."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention import literal_pages as literal
from tests.attention.literal_pages import Pool, Request, Rule, Scoring, Shape, random_lines
from tests.cpp_library import symbols
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.cpp import library as native
from vllm_cascade.kernels.cpp.library import load

DECOY = 0
"""A block that must be neither read nor written; block tables end with it."""
JUNK = (0, 1, 1, 0)
"""A rule that nobody may apply."""


def test_columns_have_the_same_numbers() -> None:
    header = (Path(native.__file__).parent / "step.h").read_text()
    found = {name: int(number) for name, number in re.findall(r"\b([A-Z_]+) = (\d+)", header)}
    named = {name: value for name, value in vars(columns).items() if name.isupper()}
    of_recall = list(named)[list(named).index("RULE_COLUMNS") + 1 :]  # rows that only kernels read
    assert found == {name: named[name] for name in named if name not in of_recall}
    assert of_recall[0] == "HOW" and of_recall[-1] == "MOST_RULES"


# --- drawing layers, caches and rules -------------------------------------------------------------


@st.composite
def rules_of(draw: st.DrawFn, length: int, compares: bool) -> tuple[list[Rule], int]:
    """Up to four rules for a line of ``length`` tokens, and the tokens they leave."""
    rules: list[Rule] = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        if length == 0:
            break
        lo = draw(st.integers(0, length - 1))
        hi = draw(st.integers(lo + 1, length))
        kind = draw(st.sampled_from(["all", "lowest", "cells", "comb"]))
        size, cell = hi - lo, draw(st.integers(1, 4))
        if kind == "lowest" and compares:
            rule = lo, hi, 1, 0
        elif kind == "cells" and compares:
            rule = lo, hi, size - -(-size // cell), cell
        elif kind == "comb":
            rule = lo, hi, size - -(-size // cell), -cell
        else:
            rule = lo, hi, size if size < 4 else 0, 0
        rules.append(rule)
        length -= rule[2]
    return rules, length


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        num_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3])),
        head_size=draw(st.sampled_from([20, 32])),
        block_size=draw(st.sampled_from([4, 7, 16])),
        per_head=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        rotary=draw(st.booleans()),
        is_neox=draw(st.booleans()),
        alibi=draw(st.integers(0, 4)) == 0,
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        reduction=draw(st.sampled_from(["mean", "max", "median"])),
        uses_scores=draw(st.integers(0, 4)) > 0,
    )


@st.composite
def requests(draw: st.DrawFn, shape: Shape, num_tokens: int) -> Request:
    """A request whose scores are made by attention, or by the host, or stay as they are."""
    source = draw(st.sampled_from(["attention", "attention", "text", "nobody"]))
    attention = shape.uses_scores and source == "attention"
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    cached = draw(st.integers(0, 40))
    old_slots = cached + (draw(st.sampled_from([0, 0, 1, 9])) if cached else 0)
    lines = random_lines(shape, rng, cached, old_slots)
    rules, length = [], cached
    for _ in range(num_tokens):
        todo, length = draw(rules_of(length + 1, shape.uses_scores))
        rules.append(todo)
    new_slots = max(old_slots, length) + draw(st.sampled_from([0, 0, 3]))
    stream = 3 * cached + draw(st.integers(0, 50))
    scoring = Scoring(
        newest_stays=draw(st.booleans()),
        per_age=shape.uses_scores and draw(st.booleans()),
        decay=draw(st.sampled_from([1.0, 0.75])) if attention else 1.0,
        weight=draw(st.sampled_from([1.0, 0.37])) if attention else 0.0,
    )
    request = Request(lines, old_slots, new_slots, stream, rules, scoring)
    if shape.uses_scores and source == "text":
        request.scored = cached - draw(st.integers(1, 5))
        request.given = [rng.randrange(8) / 8 for _ in range(num_tokens)]
    if draw(st.booleans()):
        request.logit_scale = [rng.uniform(0.5, 1.5) for _ in range(num_tokens)]
    return request


# --- calls of the library -------------------------------------------------------------------------


class Call:
    """A pool with the caches of some requests, and new tokens for them; ``flat``: all queries 0."""

    def __init__(self, shape: Shape, requests: Sequence[Request], flat: bool) -> None:
        self.shape, self.requests = shape, requests
        most = max(literal.pages_for(request.new_slots, shape) for request in requests)
        self.pool = Pool(shape, 1 + len(requests) * most)
        blocks = torch.randperm(len(requests) * most).int() + 1
        self.table = blocks.view(len(requests), most)
        self.rows = []
        place = 2  # the step's first tokens belong to others
        for i, request in enumerate(requests):
            request.start = place
            place += request.num_tokens + 1
            pages = self.table[i].tolist()
            for head_set, line in enumerate(request.lines):
                self.pool.write(pages, head_set, line, request.old_slots)
            self.table[i, literal.pages_for(request.new_slots, shape) :] = DECOY
        heads = shape.num_heads
        self.query = torch.randn(place, heads * shape.group, shape.head_size).to(shape.dtype)
        if flat:
            self.query.zero_()
        fused = torch.randn(place, 2 * heads + 1, shape.head_size).to(shape.dtype)
        self.key, self.value = fused[:, :heads], fused[:, heads : 2 * heads]
        self.output = torch.full_like(self.query, torch.nan)
        self.rotation = literal.rotation_table(shape)

    def steps(self, more: Sequence[int]) -> np.ndarray:
        """Step rows; ``more``: where each row's further rules begin."""
        rows = np.full((len(self.requests), columns.STEP_COLUMNS), -9, dtype=np.int32)
        for row, request, at in zip(rows, self.requests, more, strict=True):
            row[: columns.LO] = (
                *(request.stream, request.cached, request.old_slots, request.new_slots),
                *(request.start, request.num_tokens),
            )
            rules = request.rules[0] if request.num_tokens == 1 else []
            row[columns.LO : columns.MORE] = rules[0] if rules else (0, 0, 0, 0)
            row[columns.MORE], row[columns.NUM_MORE] = at, max(len(rules) - 1, 0)
            scoring = request.scoring
            row[columns.PER_AGE], row[columns.NEWEST_STAYS] = scoring.per_age, scoring.newest_stays
            bits = np.asarray([scoring.decay, scoring.weight], dtype=np.float32)
            row[columns.DECAY :] = bits.view(np.int32)
        return rows

    def layer(self) -> native.Layer:
        shape, words = self.shape, self.pool.words
        self.slopes = shape.slopes
        return native.Layer(
            kv=self.pool.kv.data_ptr(),
            **{name: word.data_ptr() for name, word in words.items()},
            slopes=None if self.slopes is None else self.slopes.data_ptr(),
            rotation=None if self.rotation is None else self.rotation.data_ptr(),
            page_bytes=self.pool.bytes.shape[1],
            page_words=self.pool.bytes.shape[1] // 4,
            num_heads=shape.num_heads,
            group=shape.group,
            head_size=shape.head_size,
            value_size=shape.head_size,
            value_at=shape.head_size,
            row_size=2 * shape.head_size,
            num_sets=shape.num_sets,
            block_size=shape.block_size,
            unit=1,
            page_units=shape.block_size,
            half=shape.head_size // 2 if shape.rotary else 0,
            is_neox=shape.is_neox,
            dtype=native.DTYPES[shape.dtype],
            stored=native.DTYPES[shape.dtype],
            stored_bytes=shape.dtype.itemsize,
            uses_scores=shape.uses_scores,
            attends=1,
            inserts=1,
            reduction=native.REDUCTIONS[shape.reduction],
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def token_rows(self) -> native.Rows:
        rows = self.query, self.key, self.value, self.output
        return native.Rows(*(r.data_ptr() for r in rows), *(r.stride(0) for r in rows))

    def run_singles(self) -> None:
        table = [JUNK]
        more = []
        for request in self.requests:
            more.append(len(table))
            table += [*request.rules[0][1:], JUNK]
        steps, rules = self.steps(more), np.asarray(table, dtype=np.int32)
        text = any(request.given for request in self.requests)
        given = np.asarray([sum(request.given[:1]) for request in self.requests], dtype=np.float32)
        scored = np.asarray([request.scored for request in self.requests], dtype=np.int32)
        scales = [(request.logit_scale or [1.0])[0] for request in self.requests]
        scale = np.asarray(scales, dtype=np.float32)
        batch = native.Tokens(
            count=len(steps),
            num_pages=self.table.shape[1],
            steps=steps.ctypes.data,
            pages=self.table.data_ptr(),
            logit_scale=scale.ctypes.data if scales != [1.0] * len(scales) else None,
            given=given.ctypes.data if text else None,
            scored=scored.ctypes.data if text else None,
            rules=rules.ctypes.data,
            moved=1,
        )
        load().attend_and_insert_tokens(self.layer(), native.Batches(batch), self.token_rows())

    def run_stride(self, transient: int, period: int) -> None:
        """The only request; rows of the schedule that its tokens do not have are junk."""
        (request,) = self.requests
        table: list[Sequence[Rule]] = [[JUNK]] * (transient + period)
        for t, rules in enumerate(request.rules):
            at = request.stream + t
            table[at if at < transient else transient + (at - transient) % period] = rules
        first = np.cumsum([0, *map(len, table)], dtype=np.int32)
        rules = np.asarray([rule for row in table for rule in row], dtype=np.int32)
        steps = self.steps([-9])
        given = np.asarray(request.given, dtype=np.float32)
        scale = np.asarray(request.logit_scale, dtype=np.float32)
        stride = native.Stride(
            step=steps.ctypes.data,
            pages=self.table.data_ptr(),
            moved=1,
            logit_scale=scale.ctypes.data if len(scale) else None,
            given=given.ctypes.data if len(given) else None,
            scored=request.scored,
            rules=rules.ctypes.data,
            first=first.ctypes.data,
            transient=transient,
            period=period,
        )
        load().attend_and_insert_stride(self.layer(), stride, self.token_rows())

    def check(self, before: Pool, tolerance: float = 2e-5, strides: bool = False) -> None:
        """Outputs, scores and every other byte of the pool after a call; ``strides``: of those."""
        shape, expected = self.shape, before.copy()
        rounded = strides and shape.dtype == torch.bfloat16 and symbols().multiplies_bf16()
        # Two precisions that turn a key may round it to neighbouring numbers.
        tolerance = 2e-3 if rounded else tolerance
        written = torch.zeros(len(self.output), dtype=torch.bool)
        for request, table in zip(self.requests, self.table.tolist(), strict=True):
            rows = slice(request.start, request.start + request.num_tokens)
            written[rows] = True
            new = torch.cat([self.key[rows], self.value[rows]], dim=-1)
            output, added = literal.attend(shape, request, self.query[rows], new, rounded)
            coarse = 1e-2 if shape.dtype == torch.bfloat16 else tolerance
            assert literal.close(self.output[rows], output, coarse)
            for head_set in range(shape.num_sets):
                line = literal.insert(shape, request, head_set, new, added[head_set % len(added)])
                expected.write(table, head_set, line, request.new_slots)
                at = [self.pool.place(table, head_set, token.slot) for token in line]
                if shape.uses_scores and line:
                    index = tuple(torch.tensor(at).T)
                    scores = torch.tensor([token.score for token in line])
                    assert literal.close(self.pool.words["score"][index], scores, tolerance)
                for slot in range(request.new_slots if shape.uses_scores else 0):
                    place = self.pool.place(table, head_set, slot)  # an empty one's means nothing
                    expected.words["score"][place] = self.pool.words["score"][place]
        assert self.output[~written].isnan().all()
        for name, word in expected.words.items():
            assert torch.equal(word.view(torch.int32), self.pool.words[name].view(torch.int32)), (
                name
            )
        assert torch.equal(expected.bytes, self.pool.bytes)


# --- tests ----------------------------------------------------------------------------------------


@given(data=st.data(), shape=shapes(), count=st.integers(1, 4), flat=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_single_tokens(data: st.DataObject, shape: Shape, count: int, flat: bool) -> None:
    """Any rules of several requests at once; all cached tokens may tie, where queries are 0."""
    call = Call(shape, [data.draw(requests(shape, 1)) for _ in range(count)], flat)
    before = call.pool.copy()
    call.run_singles()
    call.check(before)


@given(data=st.data(), shape=shapes(), num_tokens=st.integers(1, 12), flat=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_strides(data: st.DataObject, shape: Shape, num_tokens: int, flat: bool) -> None:
    """Any rules of every token, in the transient of a schedule, in its period, and at its end."""
    request = data.draw(requests(shape, num_tokens))
    transient = data.draw(st.sampled_from([0, 1, request.stream, request.stream + 5]))
    period = num_tokens + data.draw(st.integers(0, 3))
    call = Call(shape, [request], flat)
    before = call.pool.copy()
    call.run_stride(transient, period)
    call.check(before, strides=True)


@pytest.mark.parametrize("newest_stays", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("lo, newer", [(4, 0), (4, 60), (250, 3), (0, 200)])
def test_long_ranges(newest_stays: bool, per_head: bool, lo: int, newer: int) -> None:
    """Hundreds of ranks, of which each token drives out the lowest, with ties in every block."""
    rng = random.Random(lo)
    shape = Shape(per_head=per_head, block_size=48, group=1)
    cached, num_tokens = 300, 40
    rules = [(lo, cached + 1 - newer, 1, 0)]
    lines = random_lines(shape, rng, cached, cached + 2)
    request = Request(lines, cached + 2, cached + 2, 3 * cached, [rules] * num_tokens)
    request.scoring = Scoring(newest_stays=newest_stays)
    for one_by_one in (False, True):
        if one_by_one:
            request.rules = [rules]
        call = Call(shape, [replace(request)], flat=False)
        before = call.pool.copy()
        if one_by_one:
            call.run_singles()
        else:
            call.run_stride(0, 1)
        call.check(before)
        request.lines = random_lines(shape, rng, cached, cached + 2)


def test_padding_rows_write_nothing() -> None:
    shape = Shape()
    lines = random_lines(shape, random.Random(0), 9, 9)
    call = Call(shape, [Request(lines, 9, 10, 30, [[]], Scoring(weight=1.0))], flat=False)
    call.requests[0].stream = -1
    before = call.pool.copy()
    call.run_singles()
    assert torch.equal(before.bytes, call.pool.bytes) and call.output.isnan().all()
