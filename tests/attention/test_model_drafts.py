# SPDX-License-Identifier: Apache-2.0
"""Layers of a drafting model: what they ran behind the target's tokens leaves nothing behind.

As in ``test_drafts.py``, but every row also has the sampled token and the model's own drafts, all
of which the next step undoes.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.attention.test_drafts import BREAKAGES, CASES, MOST_REQUESTS, Streams, path, run
from vllm_cascade.step.drafts import ModelDrafts

__all__ = ["path"]  # a fixture


class ModelStreams(Streams):
    """Requests in a layer of a drafting model, which drafts up to ``most`` tokens."""

    def __init__(self, case: str, most: int, totals: list[int], seed: int) -> None:
        super().__init__(case, ModelDrafts.saved(most), totals, seed)
        self.num = most
        self.drafts = self.drafting.builder.drafts = ModelDrafts(MOST_REQUESTS, most)

    def step(self, right: float) -> None:
        row = self.some_requests()
        tokens, lengths, drafted = [], {}, {}
        for r in row:
            first = self.done[r]
            if first < self.prompts[r]:
                tokens.append((r, first, self.prompts[r] - first))
                lengths[str(r)] = tokens[-1][2]
                continue
            drafts = int(self.rng.integers(0, self.num + 1))
            right_ones = int(np.cumprod(self.rng.random(drafts) < right).sum())
            tokens.append((r, first, 1 + min(right_ones, self.totals[r] - first - 1)))
            lengths[str(r)] = 1 + drafts
            drafted |= {str(r): [0] * drafts} if drafts else {}
        self.note(row, lengths, drafted)
        # The sampled tokens run beside the accepted ones, if no prompt is among these.
        beside = all(first >= self.prompts[r] for r, first, _ in tokens)
        outputs = self.run(self.drafting, row, [(one, int(beside)) for one in tokens])
        ends = {}
        for (r, first, num), found in zip(tokens, outputs, strict=True):
            self.same(found[:num], self.alone(r, first, num), (r, first, num))
            self.done[r] += num
            self.accepted += num - 1 if first >= self.prompts[r] else 0
            ends[r] = self.done[r] + beside
        for _ in range(self.num - beside):
            runs = [r for r in row if self.rng.random() < 0.9]  # others have no room
            if runs:
                self.run(self.drafting, runs, [((r, ends[r], 0), 1) for r in runs])
            ends |= {r: ends[r] + 1 for r in runs}
        for r in row:
            self.drafts.ran(str(r), ends[r])
            self.rejected += ends[r] - self.done[r]


QUICK = ("cascade-heads", "cascade-overflow", "h2o", "units", "int8", "latent")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in CASES]
)
def test_nothing_is_left_of_what_was_drafted(path: str, case: str) -> None:
    streams = run(case, most=4, right=0.6, seed=1, kind=ModelStreams)
    assert streams.accepted > 50 and streams.rejected > 200


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_any_number_of_drafts(path: str, most: int, right: float) -> None:
    streams = run("cascade-heads", most, right, seed=2, kind=ModelStreams)
    assert (streams.accepted == 0) == (right == 0.0)


@pytest.fixture(scope="module")
def unbroken() -> None:
    """The streams of every breakage, which pass without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CASCADE_CPU", "pytorch")
        run("small-window", 7, 0.5, seed=5, kind=ModelStreams)


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_part_is_caught(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CASCADE_CPU", "pytorch")
    breakage(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # a slot that was not saved is any number
        run("small-window", 7, 0.5, seed=5, kind=ModelStreams)


def test_half_the_versions_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CASCADE_CPU", "pytorch")
    monkeypatch.setattr(ModelDrafts, "saved", staticmethod(lambda most: most))
    with pytest.raises((AssertionError, IndexError)):
        run("small-window", 7, 0.9, seed=5, kind=ModelStreams)


# --- the host's part ------------------------------------------------------------------------------


def step_of(begin: int, num: int, drafts: int, ended: int | None = None) -> SchedulerOutput:
    """A step with one request's row of ``num`` tokens, the last of them drafts."""
    output = SchedulerOutput.make_empty()
    if ended is not None:
        output.ended, output.finished_req_ids = {"a": ended}, {"a"}
        return output
    cached = replace(output.scheduled_cached_reqs, req_ids=["a"], num_computed_tokens=[begin])
    spec = {"a": [1] * drafts} if drafts else {}
    return replace(
        output,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": num},
        scheduled_spec_decode_tokens=spec,
    )


def test_a_drafting_models_rows_go_on_behind_the_targets() -> None:
    """Three drafts: a prompt of ten tokens, a row of which one draft is right, and an end."""
    drafts = ModelDrafts(2, 3)
    assert drafts.most == ModelDrafts.saved(3) == 6
    assert drafts.note(step_of(0, 10, 0)) == []
    drafts.ran("a", 13)  # the sampled token, and two drafts
    # All of these run again, known token, accepted draft and rejected ones.
    (undone,) = drafts.note(step_of(10, 4, 3))
    assert (undone.begin, undone.num, undone.place % 6) == (10, 3, 0)
    saved = drafts.saves(["a"], np.zeros(6, dtype=int), np.arange(10, 16))
    assert (saved % 6).tolist() == [5, 0, 1, 2, 3, 4]  # -1: not saved; token 10 is known
    drafts.ran("a", 15)
    # The target has accepted one draft, 11, but the answer ended before it.
    (undone,) = drafts.note(step_of(0, 0, 0, ended=11))
    assert (undone.begin, undone.num, undone.place % 6) == (11, 4, 0)
    assert sorted(drafts._free) == [0, 1]


def test_a_drafting_models_row_is_undone_up_to_what_ran() -> None:
    drafts = ModelDrafts(1, 2)
    drafts.note(step_of(0, 5, 0))
    drafts.ran("a", 5)  # no room for another token
    assert drafts.note(step_of(5, 1, 0)) == []
    drafts.ran("a", 7)
    (undone,) = drafts.note(step_of(6, 1, 0))
    assert (undone.begin, undone.num) == (6, 1)
