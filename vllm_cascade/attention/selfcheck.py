# SPDX-License-Identifier: Apache-2.0
"""Compares a device's attention and eviction with the PyTorch reference, on this very machine.

One layer of a shape runs a stream under a policy: a prompt in strides, also beside a request that
decodes, then single tokens. Every step is compared with ``attention/torch``, which runs on the CPU:
outputs, the tokens that are kept, their rows and their scores. The reference's pages are then
copied to the device, so that each step is checked by itself. On a GPU a decode step is captured as
a CUDA graph and replayed. Steps that write pages run several times and must give the same bytes,
also where C repeats the launches of the run before (``kernels/triton/repeat.py``).
With speculative decoding, rows with drafts run, too, and pages are compared again without these.

A layer with a window gets the positions that the policy makes. With recall, the judge's evidence is
compared, evicted units are compared and copied, too, and queries are drawn again until no selection
is too close to call.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cpu.backend import CPUKVPolicyBackend
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.selfcheck_drafts import EveryDraft
from vllm_cascade.attention.selfcheck_kept import CLOSE as CLOSE_SCORES
from vllm_cascade.attention.selfcheck_kept import (
    Kept,
    error_of,
    kept_units,
    num_differing,
    rows_and_scores,
    same_units,
)
from vllm_cascade.attention.selfcheck_layer import LayerShape, Reference, Rows, Side, Step
from vllm_cascade.attention.selfcheck_stores import Selection, closest, judged
from vllm_cascade.cache.kinds import kinds_of, window_policy, window_slots
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels.columns import LENGTH
from vllm_cascade.models.rotary import rotate
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, compared
from vllm_cascade.step.inputs import Undone

TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error by dtype, relative to the largest number of the reference."""
STEP = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 14, torch.float8_e5m2: 1 / 7}
"""Largest difference of neighbouring codes, relative to the largest number."""
SUSPECTS = {
    "decode": {
        "step rows": "schedule",
        "positions": "schedule",
        "output": "attend, attend_units, merge or merge_scored",
        "kept tokens": "insert or assign",
        "rows": "insert",
        "scores": "merge_scored, update, assign or insert",
        "bytes of another run": "attend, attend_units, merge, merge_scored, update or insert",
    },
    "prompt": {
        "positions": "none, the step's plan",
        "output": "gather_strides, gather_chunks, attend_strides or, of a stride before, "
        "insert_strides or write_chunks",
        "kept tokens": "gather_strides, column_sums, insert_strides or write_chunks",
        "rows": "insert_strides or write_chunks",
        "scores": "column_sums, gather_strides, attend_strides or insert_strides",
        "bytes of another run": "gather_strides, attend_strides, column_sums, insert_strides "
        "or, of chunks, gather_chunks and write_chunks",
    },
}
"""Kernels that may be at fault, by what was run and what differs."""
RECALLS = {
    "evidence": "ask, judge or weigh",
    "recalled and kept tokens": "ask, judge, weigh, choose, bring or insertion",
    "recalled and kept rows": "choose, bring or insertion",
    "stored units": "remember, list_gone or store_units",
}
"""The same for policies with recall, whatever was run."""
SUSPECTS["drafts"] = SUSPECTS["decode"] | {
    "tokens without drafts": "save_versions, insert or undo",
    "rows without drafts": "insert or undo",
    "scores without drafts": "save_versions or undo",
}
CLOSE = 2e-3
"""Relative difference of two units' evidence below which rounding may decide."""
EVIDENCE = 6e-2
"""Largest error of evidence, relative to the most. Rounding may change a code of a query by 1."""
SUSPECTS["mixed"] = {
    compared: f"{kernels}; or {SUSPECTS['decode'][compared]}"
    for compared, kernels in SUSPECTS["prompt"].items()
}


@dataclass(frozen=True)
class Row:
    """One comparison. ``error`` is relative; ``failure`` is empty if it is within bounds."""

    what: str
    compared: str
    error: float
    failure: str = ""


class Mismatch(Exception):
    """A step differs from the reference; the message names kernels, shape and error."""


class Check:
    """A policy on a layer's shape, on a device and in PyTorch.

    Args:
        backend: the device's backend class.
        device: where it runs.
        repeats: runs of a step that must give the same bytes.
        drafts: most drafts of a row.
        num_ranks: tensor-parallel ranks; the others have copies of this one's heads.

    Attributes:
        close_calls: units that the device kept instead of others with the same score, but for
            rounding.
    """

    def __init__(
        self,
        policy: Policy,
        shape: LayerShape,
        backend: type[KVPolicyBackend],
        device: torch.device,
        repeats: int = 3,
        drafts: int = 0,
        num_ranks: int = 1,
    ) -> None:
        same = {
            "num_kv_heads": shape.num_kv_heads,
            "head_size": shape.head_size,
            "dtype": CODES.get(shape.cache_dtype, shape.dtype),
            "kv_quant_mode": get_kv_quant_mode(shape.cache_dtype),
        }
        if shape.cache_dtype.startswith("fp8"):
            same["dtype"] = torch.uint8
        kind = FullAttentionSpec if shape.latent is None else MLAAttentionSpec
        full = KVPolicySpec.from_full(kind(block_size=shape.block_size, **same), policy, drafts)
        self.spec = full
        if shape.window is not None:
            own = window_policy(policy, shape.window, shape.chunked)
            slots = window_slots(policy, shape.window, shape.block_size)
            limits: dict[str, Any] = {"window": shape.window, "chunked": shape.chunked}
            window = replace(full, policy=own, slots=slots, **limits)
            kinds = kinds_of((full, window), policy, shape.block_size)
            full, self.spec = replace(full, kinds=kinds), replace(window, kinds=kinds)
        self.policy, self.shape, self.repeats = policy, shape, repeats
        self.recalls = self.spec.policy.recall > 0
        self.pages = -(-policy.capacity // shape.block_size)
        self.table = torch.arange(1, 1 + 2 * self.pages, dtype=torch.int32).view(2, -1)
        sizes = 1 + 2 * self.pages, 2 * max(policy.prefill_stride, drafts) + 2
        sides = shape, self.spec, full
        impl = backend.get_impl_cls()
        assert issubclass(impl, KVPolicyImpl)
        self.ours = Side(*sides, backend, impl, *sizes, device, num_ranks)
        cpu = CPUKVPolicyBackend, Reference, *sizes, torch.device("cpu")
        self.plain = Side(*sides, *cpu, num_ranks)
        if isinstance(self.plain.impl.recall, LayerRecall):
            self.plain.impl.recall.judges_all = self.ours.impl.judges_all
        self.num_ranks = num_ranks
        self._generator, self.drafts = torch.Generator().manual_seed(0), drafts
        self._before, self._values = self.ours.pool, torch.empty(0)
        self.close_calls = 0
        self._judged: dict[int, Selection] = {}  # what the step's requests select
        for side in (self.ours, self.plain):
            if drafts:
                side.impl.keep_drafts(2)

    # --- the stream -------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """A prompt until the cache is full and two strides more; then both requests decode."""
        policy, first = self.policy, 0
        stride, most = policy.prefill_stride, max(policy.capacity, self.shape.window or 0)
        # Twice what is recalled must be evicted, so that there is a choice.
        end = most + max(2 * stride, 3 * self.spec.policy.recalled)
        end = -(-end // stride) * stride
        # One stride a step where units are selected, so that what is stored is known before.
        strides = 1 if self.recalls else 2
        while first < end:
            length = min(strides * stride, end - first)
            yield Step((first,), (length,), self.table)
            first += length
        yield Step((first, 0), (1, stride), self.table)
        second = stride
        yield Step((first + 1, second), (1, 2), self.table)
        second += 2
        for index in range(2 + 2 * self.policy.unit + min(self.policy.overflow, 16)):
            yield Step((first + 2 + index, second + index), (1, 1), self.table)

    def steps_with_drafts(self, firsts: tuple[int, ...]) -> Iterator[Step]:
        """Rows of as many drafts each, and of a different number; one token more each time."""
        for lengths in ((1, 1), (1, 0), (1, 1), (0, 1)):
            most = [self._quiet(first, self.drafts) for first in firsts]
            num = min(most) if lengths == (1, 1) else max(most)
            rows = tuple(1 + min(num * n, own) for n, own in zip(lengths, most, strict=True))
            yield Step(firsts, rows, self.table, drafts=True)
            firsts = tuple(first + 1 for first in firsts)

    def _quiet(self, first: int, most: int) -> int:
        """Drafts after token ``first`` that may be undone."""
        return self.spec.schedule.quiet(first + 1, first + 1 + most) - first - 1

    def run(self) -> list[Row]:
        """All comparisons.

        Raises:
            Mismatch: at the first step that differs.
        """
        worst: dict[tuple[str, str], Row] = {}
        graphs = self.ours.device.type == "cuda" and not self.spec.schedule.moves_tokens
        last = self._compare_all(self.steps(), worst)
        replayed = self._replay(last) if graphs else []
        if self.drafts:
            firsts = tuple(first + 1 + len(replayed) for first in last.firsts)
            last = self._compare_all(self.steps_with_drafts(firsts), worst)
            if graphs and not self.recalls:  # else their number depends on the step
                replayed += self._replay(replace(last, lengths=(1 + self.drafts,) * 2))
        return [*worst.values(), *replayed]

    def _compare_all(self, steps: Iterator[Step], worst: dict[tuple[str, str], Row]) -> Step:
        """Compare steps, keep the worst row of each kind, and return the last step."""
        last: Step | None = None
        for step in steps:
            for row in self._compare(step):
                key = row.what, row.compared
                if key not in worst or row.error >= worst[key].error:
                    worst[key] = row
                if row.failure:
                    raise Mismatch(row.failure)
            last = step
        assert last is not None
        return last

    def _rows(self, step: Step, positions: torch.Tensor) -> Rows:
        num, shape = sum(step.lengths), self.shape

        def random(heads: int) -> torch.Tensor:
            return torch.randn(num, heads, shape.head_size, generator=self._generator)

        query = random(shape.num_heads) * 3
        key, value = (random(shape.num_kv_heads) for _ in "kv")
        rotary = shape.rotary
        if rotary is not None:
            angle = positions.double()[:, None] * rotary.inv_freq.double()
            turns = torch.stack([angle.cos(), angle.sin()], dim=1).float()[:, None]
            query, key = (rotate(x, turns, rotary.is_neox) for x in (query, key))
        if shape.latent is not None:
            value = key[..., -shape.latent :]
        return Rows(*(x.to(shape.dtype) for x in (query, key, value)))

    # --- one step ---------------------------------------------------------------------------------

    def _compare(self, step: Step) -> Iterator[Row]:
        num, drafts = sum(step.lengths), self._expect(step)
        metadata, plain = self.ours.plan(step), self.plain.plan(step)
        ours, theirs = (
            side.builder.positions.buffer[:num].cpu() for side in (self.ours, self.plain)
        )
        planned_waves = plain.waves if step.what in ("decode", "drafts") else []
        for wave, planned in zip(metadata.waves, planned_waves, strict=False):
            decode = getattr(wave, "decode", None)
            if decode is not None:
                made, rows = decode.steps.cpu(), torch.from_numpy(planned.rows.steps)
                differ = (made[:, : LENGTH + 1] != rows[:, : LENGTH + 1]).any()
                yield self._row(step, "step rows", float(differ), 0)
        yield self._row(step, "positions", float((ours != theirs).any()), 0)
        rows, state = self._rows(step, theirs), self._state
        while self.recalls and self._close(plain, rows):
            rows = self._rows(step, theirs)
        before = [x.clone() for x in state()]
        self._before, self._values = before[0], rows.value
        expected = self.plain.run(plain, rows)
        runs, found = [], {}
        if self.recalls:
            self.ours.units.note()
        for _ in range(self.repeats):
            for now, was in zip(state(), before, strict=True):
                now.copy_(was)
            output = self.ours.run(metadata, rows)
            runs.append([x.clone() for x in (output, *state())])
            if self.recalls and len(runs) == 1:  # later runs are as in an engine
                found = self.ours.units.evidence()
        differ = [
            not torch.equal(_bits(x), _bits(first))
            for run in runs
            for x, first in zip(run, runs[0], strict=True)
        ]
        yield self._row(step, "bytes of another run", float(any(differ)), 0)
        tolerance = TOLERANCE[self.shape.dtype]
        bounds = {"kept tokens": 0.0, "rows": tolerance + self._step}
        if self.recalls:
            if found:
                error = max(error_of(found[i], self._judged[i].evidence) for i in found)
                yield self._row(step, "evidence", error, EVIDENCE)
            calls, pages = self.close_calls, dict(self._pages(step))
            yield self._row(step, "recalled and kept tokens", pages["kept tokens"], 0)
            yield self._row(step, "recalled and kept rows", pages["rows"], bounds["rows"])
            if self.close_calls == calls:  # else other units were evicted, too
                yield self._row(step, "stored units", self._stored(len(step.firsts)), tolerance)
        yield self._row(step, "output", error_of(runs[0][0], expected), tolerance)
        for name, error in self._pages(step):
            if name == "scores" and not self._has_scores:
                continue
            yield self._row(step, name, error, bounds.get(name, tolerance))
        if drafts is not None:
            yield from self._undo(step, drafts)
        self._copy(len(step.firsts))

    def _expect(self, step: Step) -> EveryDraft | None:
        """Tell both sides of a step's drafts, if it has any."""
        drafts = EveryDraft(self.drafts, step.firsts) if step.drafts else None
        for side in (self.ours, self.plain):
            side.builder.drafts = drafts
        return drafts

    def _undo(self, step: Step, drafts: EveryDraft) -> Iterator[Row]:
        """Undo all drafts of the last step on both sides, and compare what is left."""
        for side in (self.ours, self.plain):
            table = step.table[: len(step.lengths)]
            undone = drafts.rejected(step.lengths, self.spec.schedule, table)
            if undone is not None:
                device = side.device
                side.impl.undo(Undone(undone.rows.to(device), undone.table.to(device)))
        known = replace(step, lengths=(1,) * len(step.lengths))
        for what, error in self._pages(known):
            if what != "scores" or self._has_scores:
                bound = TOLERANCE[self.shape.dtype] + self._step * (what == "rows")
                yield self._row(step, f"{what.removeprefix('kept ')} without drafts", error, bound)

    @property
    def _has_scores(self) -> bool:
        """Whether kernels read scores. If not, they need not write them either.

        Where evicted tokens are merged, a score counts what was merged into its token.
        """
        policy = self.spec.policy
        return policy.scoring.source != "none" or policy.merge_into is not None

    @property
    def _step(self) -> float:
        """By how much rows may differ that are rotated before they become codes."""
        code = CODES.get(self.shape.cache_dtype)
        return 0.0 if code is None or self.policy.unit == 1 else STEP[code]

    def _state(self) -> list[torch.Tensor]:
        """All that a step changes on our side."""
        return [self.ours.pool, *(self.ours.units.tensors() if self.recalls else ())]

    def _close(self, plain: Any, rows: Rows) -> bool:
        """Whether rounding might decide what the step's queries select."""
        recall, most = self.plain.impl.recall, self.policy.recall_queries
        assert isinstance(recall, LayerRecall), "the reference is the CPU's"
        self._judged = judged(self.plain.units, recall, plain, rows.query, most)
        return closest(self._judged.values()) < CLOSE

    def _stored(self, num_requests: int) -> float:
        """Largest relative error of evicted units; 8-bit codes may differ by a step."""
        worst = 0.0
        for request in range(num_requests):
            span = self.plain.units.span(request)
            if span[0] == span[1]:
                continue
            ours, theirs = (side.units.read(request, *span) for side in (self.ours, self.plain))
            words = ("born", "token")
            if not all(torch.equal(getattr(ours, x), getattr(theirs, x)) for x in words):
                return 1.0
            if (ours.codes.int() - theirs.codes.int()).abs().max() > 1:
                return 1.0
            rows = (self.plain.pages.read(x.rows, x.row_scale) for x in (ours, theirs))
            worst = max(worst, error_of(*rows), error_of(ours.scale, theirs.scale))
        return worst

    def _copy(self, num_requests: int) -> None:
        """Let our side go on from the reference's state."""
        self.ours.pool.copy_(self.plain.pool)
        for request in range(num_requests if self.recalls else 0):
            begin, end = self.plain.units.span(request)
            if begin < end:
                self.ours.units.write(request, begin, self.plain.units.read(request, begin, end))

    def _pages(self, step: Step) -> Iterator[tuple[str, float]]:
        """Kept tokens, rows and scores of the step's requests, in the order of ranks."""
        schedule: Schedule = self.spec.schedule
        errors = {"kept tokens": 0.0, "rows": 0.0, "scores": 0.0}
        unit, width = self.spec.policy.unit, self.shape.latent or self.shape.head_size
        by_score = schedule.keeps_newest is None and self.spec.policy.uses_attention
        close = CLOSE_SCORES[self.shape.dtype] if by_score else 0.0
        code = CODES.get(self.shape.cache_dtype)
        rounding = TOLERANCE[self.shape.dtype] + (0.0 if code is None else STEP[code])
        for row, (first, length) in enumerate(zip(step.firsts, step.lengths, strict=True)):
            slots = schedule.peak_at(first + length)
            found, wanted = (
                self._compared(kept_units(side.pages, self.table[row], slots), first + length)
                for side in (self.ours, self.plain)
            )
            for head_set, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
                offered = partial(self._offered, step, row, head_set)
                same = same_units(ours, theirs, width, offered, close, rounding)
                if same is None:
                    num = num_differing(ours, theirs, width)
                    errors["kept tokens"] = max(errors["kept tokens"], num)
                    continue
                self.close_calls += same.num
                now, expected = (
                    rows_and_scores(kept, first + length, unit) for kept in (same.ours, same.theirs)
                )
                for key in now:
                    errors[key] = max(errors[key], error_of(now[key], expected[key]))
        yield from errors.items()

    def _compared(self, kept: list[Kept], seen: int) -> list[Kept]:
        """Units with what the policy compares."""
        scoring, found = self.spec.schedule.scoring, []
        for one in kept:
            age = seen - one["token"] if scoring.per_age else None
            found.append(one | {"compared": compared(scoring, one["score"], age)})
        return found

    def _offered(self, step: Step, row: int, head_set: int) -> torch.Tensor:
        """Values ``[n, width]`` of a set's first head that a step could keep: of old tokens as they
        were before the step, and of new ones."""
        begin, length = sum(step.lengths[:row]), step.lengths[row]
        head = head_set * (self.shape.num_kv_heads // self.spec.num_sets)
        new = self._values[begin : begin + length, head].float()
        now = self.ours.pool.clone()
        self.ours.pool.copy_(self._before)
        slots = self.spec.schedule.peak_at(step.firsts[row])
        old = kept_units(self.ours.pages, self.table[row], slots)[head_set]["kv"]
        self.ours.pool.copy_(now)
        return torch.cat([old[0, :, 0, -new.shape[1] :].float(), new])

    def _row(self, step: Step, compared: str, error: float, tolerance: float) -> Row:
        if error <= tolerance:
            return Row(step.what, compared, error)
        kernels = {**SUSPECTS[step.what], **RECALLS}[compared]
        if self.recalls and compared == "output":
            kernels += "; with recall also choose or bring"
        ranks = f"; {self.num_ranks} tensor-parallel ranks" if self.num_ranks > 1 else ""
        if compared == "bytes of another run":
            kernels += (
                "; or launches that C has repeated, which VLLM_CASCADE_LAUNCHES=python avoids"
            )
        return Row(
            step.what,
            compared,
            error,
            f"{compared} differ in a {step.what} step of {step.lengths} tokens after {step.firsts} "
            f"(policy {self.policy.name}; {self.shape.label()}; pages of {self.shape.block_size}"
            f"{ranks}): "
            f"error {error:.2g}, at most {tolerance:.2g}; kernels: {kernels}",
        )

    def _replay(self, last: Step) -> list[Row]:
        """Capture a decode step on empty block tables, as vLLM does, and replay it on real ones."""
        side, table = self.ours, self.table.to(self.ours.device).clone()
        heads, size, dtype = self.shape.num_kv_heads, self.shape.head_size, self.shape.dtype
        num, made = sum(last.lengths), {"dtype": dtype, "device": side.device}
        query = torch.zeros(num, self.shape.num_heads, size, **made)
        key, value = (torch.zeros(num, heads, size, **made) for _ in "kv")
        value = value[..., -(self.shape.latent or size) :]
        output, layer = self.shape.output_of(query), SimpleNamespace(layer_name="layer")
        empty = replace(last, table=torch.zeros_like(self.table))
        self._expect(last)
        side.builder.requests.is_known = False  # rows of a capture are padding
        metadata = side.plan(empty)
        side.builder.requests.is_known = True
        metadata.waves[0].decode.table.copy_(torch.zeros_like(table))

        def forward() -> None:
            side.impl.forward(layer, query, key, value, side.cache, metadata, output)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        rows_found = []
        for index in range(1, 4):
            step = replace(last, firsts=tuple(first + index for first in last.firsts))
            drafts = self._expect(step)
            plain = self.plain.plan(step)
            side.plan(step)
            metadata.waves[0].decode.table.copy_(table)
            rows = self._rows(step, self.plain.builder.positions.buffer[:num])
            while self.recalls and self._close(plain, rows):
                rows = self._rows(step, self.plain.builder.positions.buffer[:num])
            for buffer, now in ((query, rows.query), (key, rows.key), (value, rows.value)):
                buffer.copy_(now)
            expected = self.plain.run(plain, rows)
            graph.replay()
            error = error_of(output, expected)
            row = self._row(step, "output", error, TOLERANCE[dtype])
            rows_found.append(Row("graph", "output", error, row.failure))
            found = [row] if drafts is None else [row, *self._undo(step, drafts)]
            for row in found:
                if row.failure:
                    raise Mismatch(f"replayed CUDA graph: {row.failure}")
            self._copy(2)
        return rows_found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
