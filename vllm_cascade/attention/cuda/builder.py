# SPDX-License-Identifier: Apache-2.0
"""A step for the Triton kernels: the plan's rows on the device.

A batch of single tokens is described by persistent buffers that the kernel ``schedule`` rewrites
from the sequence lengths, so that a captured CUDA graph finds the next step in the same memory and
the host reads nothing back. So is a batch in which every request has a known token and equally many
drafts (speculative decoding): as waves, each with one token of every request. A step with a prompt
in it is planned on the host as for any device (``step/plan.py``), wave by wave, and runs outside
full graphs; so does every step of a policy that merges or reorders tokens, which PyTorch runs on
the device.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from vllm_cascade.attention.cuda.mail import DeviceTables, Mail, Plans
from vllm_cascade.attention.cuda.metadata import (
    EVERYTHING,
    DecodeRows,
    DeviceWave,
    PrefillRows,
    Recalls,
    TritonMetadata,
)
from vllm_cascade.attention.cuda.rows import ChunkDraft, mail_chunks, plan_of, stride_rows, widest
from vllm_cascade.attention.cuda.workspace import rows_at_once
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.transfer import sent
from vllm_cascade.kernels.columns import (
    CACHED,
    HOW,
    JUDGED,
    LENGTH,
    OLD_SLOTS,
    RECALL_COLUMNS,
    START,
    STEP_COLUMNS,
    STORED,
    STREAM,
)
from vllm_cascade.kernels.triton.schedule import schedule as write_steps
from vllm_cascade.kernels.triton.strides import Chunks
from vllm_cascade.policies.execute import Plan
from vllm_cascade.policies.schedule import Arithmetic, Schedule, by_schedule
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.inputs import NO_RANK, scored_ranks, strides_of
from vllm_cascade.step.recall import plan_rings
from vllm_cascade.step.rows import Step, StrideRows, split

ALIGNED = 16
"""Rows of a wave's buffers are a multiple of this. A pointer's alignment selects a variant."""


class CUDABuilder(StepBuilder[TritonMetadata]):
    """Plans a step for the Triton kernels and publishes its cache positions."""

    stores: Rings | None = None

    def make_tables(self, limits: SchedulerConfig) -> None:
        device, waves = self.device, 1 + self.kv_cache_spec.drafts
        most = -(-len(self.positions.buffer) // ALIGNED) * ALIGNED  # each wave's rows are aligned
        self.tables = DeviceTables(self.schedule, device, limits.max_num_seqs)
        self.frames = self.tables  # whose counts give positions
        if self.windowed:
            engine, most_requests = self.engine_schedule, limits.max_num_seqs
            self.frames = DeviceTables(engine, device, most_requests, with_rules=False)
            self.frame_steps = torch.empty(
                waves, most, STEP_COLUMNS, dtype=torch.int32, device=device
            )
        self.steps = torch.full((waves, most, STEP_COLUMNS), -1, dtype=torch.int32, device=device)
        self.engine_rows = torch.zeros(most, dtype=torch.int32, device=device)
        self.no_scores = torch.zeros(most, self.kv_cache_spec.num_sets, device=device)
        self.scale = torch.ones(waves, most, device=device)
        self.scored = torch.full((waves, most), NO_RANK, dtype=torch.int32, device=device)
        self.given = torch.zeros(waves, most, device=device)
        self.recall = torch.zeros(waves, most, RECALL_COLUMNS, dtype=torch.int32, device=device)
        self.saves = torch.full((waves, most), -1, dtype=torch.int32, device=device)
        sets = self.kv_cache_spec.num_sets
        self.finished = torch.zeros(most, sets, dtype=torch.int32, device=device)
        self.plans = Plans(device)
        self.whole_chunks = not self.schedule.policy.trace  # a trace records every stride
        # Weak keys: clients choose budgets, and with them any number of decays.
        self._decays: WeakKeyDictionary[Arithmetic, torch.Tensor] = WeakKeyDictionary()

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Full graphs for decode, also with drafts, unless the policy merges or reorders tokens.

        Where layers are of several kinds, vLLM brings the specs of all of them.
        """
        specs = [kv_cache_spec]
        if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
            specs = list(kv_cache_spec.kv_cache_specs.values())
        if any(isinstance(s, KVPolicySpec) and s.schedule.moves_tokens for s in specs):
            return AttentionCGSupport.NEVER
        if all(isinstance(s, KVPolicySpec) and s.drafts for s in specs):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @property
    def windowed(self) -> bool:
        """Whether its layers have a window: then their counts do not give positions."""
        return self.kv_cache_spec.window is not None

    def rules_at(self, schedule: Schedule) -> int:
        return self.tables.begin(schedule)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        common, table = common_attn_metadata, common_attn_metadata.block_table_tensor
        for tables in {self.tables, self.frames}:
            tables.prune()
        scale, waves = None, []
        dummies = self.requests.all_dummies(common)  # of which vLLM says that none is prefilling
        if dummies:
            common = _as_padding(common)
        if self._is_decode(common):
            waves = self._decode(common)
        elif not dummies:
            if common.is_prefilling is None:
                none = torch.zeros(common.num_reqs, dtype=torch.bool)
                common = common.replace(is_prefilling=none)
            step = self.plan(common)
            if step.logit_scale is not None:
                scale = self._sent(step.logit_scale)
            recall: list[np.ndarray | None] = [None] * len(step.waves)
            names = self.requests.names(common)
            if self.stores is not None:
                recall = [self._plan_recall(rows, names, common.num_reqs) for rows in step.waves]
            waves = self._waves(step, scale, table, recall, names)
        positions = self.positions.buffer if self.windowed else None
        return TritonMetadata(
            self.kv_cache_spec,
            waves,
            table,
            self.tables.rules,
            scale,
            positions,
            num_actual_tokens=common.num_actual_tokens,
            num_prefills=common.num_reqs,
        )

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(array), self.device)

    # --- a batch of single tokens, nothing of which the host has to know -------------------------

    def _is_decode(self, common: CommonAttentionMetadata) -> bool:
        """Whether every row is a single token, or a token and as many drafts as all others have.

        A full graph replays the launches of such a batch.
        """
        width = common.max_query_len
        if self.schedule.moves_tokens or width > len(self.steps):
            return False
        if self.kv_cache_spec.drafting:  # rows may be empty, and begin with a draft
            return False
        if width == 1:
            return True
        lengths = np.diff(common.query_start_loc_cpu.numpy())
        if not np.isin(lengths, (0, width)).all():  # 0: rows of padding
            return False
        if common.is_prefilling is None or self.requests.all_dummies(common):
            return True
        return not self.requests.prefilling(common).any()

    def _decode(self, common: CommonAttentionMetadata) -> list[DeviceWave]:
        num_rows, width = common.num_reqs, common.max_query_len
        frames = schedules = self.requests.schedules(common)[:num_rows]
        schedules += [self.engine_schedule] * (num_rows - len(schedules))
        positions = self.positions.buffer if self.publishes else None
        if self.windowed:
            schedules = [self.schedule] * num_rows
            if self.publishes:
                self._write_steps(common, self.frames, frames, self.frame_steps, positions)
                positions = None
        self._write_steps(common, self.tables, schedules, self.steps, positions)
        assert common.seq_lens_cpu_upper_bound is not None, "runners set it"
        ends = common.seq_lens_cpu_upper_bound.numpy()[:num_rows].astype(np.int64)
        names = []
        if self.stores is not None or self.drafts is not None:
            names = self.requests.names(common)
        self.counters.steps += 1
        waves = []
        for wave in range(width):
            stream = np.where(ends > 0, ends - width + wave, -1)
            rows = self._decode_wave(common, wave, schedules, names, stream)
            waves.append(DeviceWave(None, rows))
        return waves

    def _decode_wave(
        self,
        common: CommonAttentionMetadata,
        wave: int,
        schedules: list[Schedule],
        names: list[str | None],
        stream: np.ndarray,
    ) -> DecodeRows:
        """One token of each request; ``stream``: their stream indices, -1 in rows of padding."""
        num_rows, width = common.num_reqs, common.max_query_len
        own = wave, slice(0, num_rows)
        self._count(schedules, wave, stream)
        judged = self._judge(common, schedules, wave, stream)
        if self.stores is not None:
            rows = plan_rings(self.stores, names, schedules, stream, np.ones_like(stream))
            self.recall[own].copy_(self._sent(rows), non_blocking=True)
        if wave:  # a row begins with a token that is known
            self.saves[own].copy_(self._sent(self._saves(names, stream)), non_blocking=True)
        return DecodeRows(
            index=slice(wave, num_rows * width, width),
            steps=self.steps[own],
            table=common.block_table_tensor[:num_rows],
            logit_scale=self.scale[own] if self.schedule.scales_logits else None,
            no_scores=self.no_scores[:num_rows],
            scored=self.scored[own] if judged else None,
            given=self.given[own] if judged else None,
            recall=None if self.stores is None else self.recall[own],
            saves=self.saves[own] if wave else None,
        )

    def _saves(self, names: list[str | None], stream: np.ndarray) -> np.ndarray:
        """int32 ``[B]``, places of draft tokens of all rows; -1: no draft."""
        if self.drafts is None:
            return np.full(len(stream), -1, dtype=np.int32)
        return self.drafts.saves(names, np.arange(len(stream)), stream)

    def _write_steps(
        self,
        common: CommonAttentionMetadata,
        tables: DeviceTables,
        schedules: list[Schedule],
        steps: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> None:
        """Rows of a batch under some schedules, and what these say of positions."""
        schedule_of = self.engine_rows
        if any(schedule is not tables.engine for schedule in schedules):
            schedule_of = self._sent(tables.numbers(schedules))
        write_steps(
            seq_lens=common.seq_lens[: common.num_reqs],
            blocks=common.block_table_tensor,
            tables=tables.schedules,
            schedule_of=schedule_of,
            steps=steps[: common.max_query_len],
            positions=positions,
        )

    def _count(self, schedules: list[Schedule], wave: int, stream: np.ndarray) -> None:
        """Count a wave, and scale its logits where a policy does."""
        counters = self.counters
        scale = np.ones(len(stream), dtype=np.float32)
        for schedule, rows in by_schedule(schedules):
            rows = np.arange(len(stream))[rows]
            rows = rows[stream[rows] >= 0]
            t = stream[rows]
            cached = schedule.counts(t)
            counters.tokens += len(rows)
            counters.strides += len(rows)
            counters.evicted_tokens += int((cached + 1 - schedule.counts(t + 1)).sum())
            if schedule.scales_logits:
                seen = schedule.positions(t) + 1  # with recalled tokens
                scale[rows] = schedule.policy.logit_scale(t, seen)
        if self.schedule.scales_logits:
            self.scale[wave, : len(scale)].copy_(self._sent(scale), non_blocking=True)

    def _judge(
        self,
        common: CommonAttentionMetadata,
        schedules: list[Schedule],
        wave: int,
        stream: np.ndarray,
    ) -> bool:
        """Host scores into the buffers that a graph reads; False: the engine has none."""
        if not self.schedule.scoring.from_host:
            return False
        given = np.zeros(len(stream), dtype=np.float32)
        cached = np.full(len(stream), -1, dtype=np.int64)
        for row in np.flatnonzero(stream >= 0).tolist():
            schedule, t = schedules[row], int(stream[row])
            if schedule.scoring.from_host:
                (given[row],) = self.host_scores(common, row, schedule, t, t + 1)
                cached[row] = schedule.positions(stream[row])
        scored = scored_ranks(schedules, cached)
        self.given[wave, : len(given)].copy_(self._sent(given), non_blocking=True)
        self.scored[wave, : len(scored)].copy_(self._sent(scored), non_blocking=True)
        return True

    # --- a step planned on the host ---------------------------------------------------------------

    def _plan_recall(
        self, rows: StrideRows, names: list[str | None], num_requests: int
    ) -> np.ndarray:
        """int32 ``[B, RECALL_COLUMNS]``: what a wave does with evicted units, by batch row.

        Waves must be planned in order, because each one advances the rings.
        """
        assert self.stores is not None
        requests = [names[row] if row < len(names) else None for row in rows.request.tolist()]
        stream, length = rows.steps[:, [STREAM, LENGTH]].astype(np.int64).T
        by_row = np.zeros((num_requests, RECALL_COLUMNS), dtype=np.int32)
        by_row[rows.request] = plan_rings(self.stores, requests, rows.schedules, stream, length)
        return by_row

    def _recall_of(
        self, rows: StrideRows, recall: np.ndarray | None
    ) -> tuple[torch.Tensor | None, Recalls]:
        """int32 ``[R, RECALL_COLUMNS]`` of some strides, on the device; and what these do."""
        if recall is None:
            return None, EVERYTHING
        own = recall[rows.request]
        how, stores = own[:, HOW], bool(own[:, STORED].any())
        return self._sent(own), Recalls(bool(how.any()), bool((how == JUDGED).any()), stores)

    def _waves(
        self,
        step: Step,
        scale: torch.Tensor | None,
        table: torch.Tensor,
        recall: Sequence[np.ndarray | None],
        names: Sequence[str | None],
    ) -> list[DeviceWave]:
        """Send all rows of the step in one copy, and make each wave's metadata.

        Args:
            recall: int32 ``[B, RECALL_COLUMNS]`` a wave; None where no units are recalled.
            names: request ids by row in the batch.
        """
        mail, given = Mail(), None if step.given is None else self._sent(step.given)
        at_once, rest = self._at_once(step.waves, names)
        kinds = [self._kinds(rows) for rows in rest]
        plans = [plan for *_, longer in kinds for _, those in longer for plan in those]
        places = iter(self.plans.places(plans))
        drafts = []
        for now, (single, others, longer) in zip(at_once, kinds, strict=True):
            strides = []
            for rows, those in longer:
                steps = stride_rows(rows, those, [next(places) for _ in those])
                strides.append((mail.add(steps, rows.request), rows))
            chunks = mail_chunks(mail, now) if now else None
            tokens = mail.add(single.steps, single.request), single
            drafts.append((tokens, others, strides, chunks))
        mail.send(table)
        waves = []
        for rows, draft, own in zip(step.waves, drafts, recall, strict=True):
            (at, singles), others, strides, chunks = draft
            in_pytorch = strides_of(others, step, table, self.kv_cache_spec.page_slots)
            in_rows = [None if own is None else own[row] for row in others.request.tolist()]
            wave = DeviceWave(
                rows,
                decode=self._singles(at, singles, mail, given, scale, own, names)
                if len(singles)
                else None,
                prefill=[self._strides(place, rows, mail, given, own) for place, rows in strides],
                others=[
                    (stride, row)
                    for stride, row in zip(in_pytorch, in_rows, strict=True)
                    if int(stride.pages[0]) != 0  # the null block: a warm-up's
                ],
                chunks=None if chunks is None else self._chunks(chunks, mail),
            )
            if wave.decode or wave.prefill or wave.others or wave.chunks:
                waves.append(wave)
        return waves

    def _kinds(
        self, rows: StrideRows
    ) -> tuple[StrideRows, StrideRows, list[tuple[StrideRows, list[Plan | None]]]]:
        """A wave's single tokens, its strides for PyTorch, and the others, by launch.

        Strides of one scoring share a launch, as many as may gather what they have cached.
        """
        single, longer = split(rows)
        others, alike = [], {}
        for i, schedule in enumerate(longer.schedules):
            plan = None
            if not schedule.moves_tokens:
                plan = plan_of(schedule, longer.steps[i].tolist())
            if schedule.moves_tokens or (plan and plan.rules):
                others.append(i)
            else:
                alike.setdefault(schedule.arithmetic, []).append((i, plan))
        spec, most = self.kv_cache_spec, int(longer.steps[:, OLD_SLOTS].max(initial=0))
        num = rows_at_once(spec.num_kv_heads * spec.row_size * most)
        groups = [
            (longer.select(np.asarray([i for i, _ in some])), [plan for _, plan in some])
            for same in alike.values()
            for some in (same[begin : begin + num] for begin in range(0, len(same), num))
        ]
        return single, longer.select(np.asarray(others, dtype=np.int64)), groups

    def _singles(
        self,
        at: slice,
        rows: StrideRows,
        mail: Mail,
        given: torch.Tensor | None,
        scale: torch.Tensor | None,
        recall: np.ndarray | None,
        names: Sequence[str | None],
    ) -> DecodeRows:
        index = _places(rows.steps[:, START])
        if index is None:
            index = mail.steps[at, START].long()
        scored = saves = None
        if self.drafts is not None:
            places = self.drafts.saves(names, rows.request, rows.steps[:, STREAM])
            saves = self._sent(places) if (places >= 0).any() else None
        if given is not None:
            scored = self._sent(scored_ranks(rows.schedules, rows.steps[:, CACHED]))
        recalled, recalls = self._recall_of(rows, recall)
        return DecodeRows(
            index=index,
            steps=mail.steps[at],
            table=mail.table[at],
            logit_scale=_aligned(scale, index),
            no_scores=self.no_scores[: len(rows)],
            scored=scored,
            given=_aligned(given, index),
            recall=recalled,
            saves=saves,
            recalls=recalls,
        )

    def _strides(
        self,
        at: slice,
        rows: StrideRows,
        mail: Mail,
        given: torch.Tensor | None,
        recall: np.ndarray | None,
    ) -> PrefillRows:
        schedule, most = rows.schedules[0], rows.steps.max(axis=0)
        recalled, recalls = self._recall_of(rows, recall)
        return PrefillRows(
            steps=mail.steps[at],
            table=mail.table[at],
            plans=self.plans.table,
            scoring=schedule.scoring,
            decays=self._decays_of(schedule),
            given=given if schedule.scoring.from_host else None,
            max_length=int(most[LENGTH]),
            max_slots=int(most[OLD_SLOTS]),
            width=widest(rows.steps, schedule.unit),
            recall=recalled,
            recalls=recalls,
            judged=None if recall is None else recall[rows.request, HOW] == JUDGED,
        )

    # --- strides without scores, which need not wait for those before ----------------------------

    def _at_once(
        self, waves: Sequence[StrideRows], names: Sequence[str | None]
    ) -> tuple[list[list[StrideRows]], list[StrideRows]]:
        """Split each wave: strides that need not wait for earlier waves, and the rest.

        The first wave takes all of a request's strides, unless the policy is traced.
        Drafts wait for each other: each of them saves what it changes.
        """
        fits = [self._score_free(rows) for rows in waves]
        if self.drafts is not None:
            waits = self.drafts.drafting(names, _ends(waves))
            fits = [
                fit & ~np.isin(rows.request, waits) for rows, fit in zip(waves, fits, strict=True)
            ]
        if not any(fit.any() for fit in fits):
            return [[] for _ in waves], list(waves)
        if self.whole_chunks:
            num = 1 + max(int(rows.request.max(initial=0)) for rows in waves)
            tokens, waits = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=bool)
            for rows, fit in zip(waves, fits, strict=True):
                tokens[rows.request] += rows.steps[:, LENGTH]
                waits[rows.request[~fit]] = True
            fits = [(tokens > 1)[rows.request] & ~waits[rows.request] for rows in waves]
        else:
            pairs = zip(waves, fits, strict=True)
            fits = [fit & (rows.steps[:, LENGTH] > 1) for rows, fit in pairs]
        both = list(zip(waves, fits, strict=True))
        chosen = [rows.select(np.flatnonzero(fit)) for rows, fit in both]
        rest = [rows.select(np.flatnonzero(~fit)) for rows, fit in both]
        if self.whole_chunks:
            return [[rows for rows in chosen if len(rows)], *([] for _ in waves[1:])], rest
        return [[rows] if len(rows) else [] for rows in chosen], rest

    def _score_free(self, rows: StrideRows) -> np.ndarray:
        """bool ``[B]``: strides that begin with a unit, and evict the oldest tokens only."""
        plain = np.asarray([one.keeps_newest is not None for one in rows.schedules], dtype=bool)
        return plain & (rows.steps[:, STREAM] % self.schedule.unit == 0)

    def _chunks(self, chunks: ChunkDraft, mail: Mail) -> Chunks:
        return Chunks(
            steps=mail.others[chunks.steps],
            chunks=mail.steps[chunks.chunks],
            table=mail.table[chunks.chunks],
            positions=self.positions.buffer,
            finished=self.finished,
            max_length=chunks.max_length,
            max_slots=chunks.max_slots,
            max_cached=chunks.max_cached,
        )

    def _decays_of(self, schedule: Schedule) -> torch.Tensor:
        if schedule.arithmetic not in self._decays:
            power = torch.arange(self.schedule.policy.prefill_stride, dtype=torch.float64)
            decays = schedule.scoring.weight * schedule.scoring.decay**power
            self._decays[schedule.arithmetic] = sent(decays.float(), self.device)
        return self._decays[schedule.arithmetic]


def _places(places: np.ndarray) -> slice | None:
    """Ascending places in a step as a slice if they follow each other, as where decoding requests
    come first (Model Runner V2). Then no layer has to gather their rows."""
    first = int(places[0])
    if int(places[-1]) - first == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(first, first + len(places), 1)
    return None


def _ends(waves: Sequence[StrideRows]) -> np.ndarray:
    """int64 ``[B]``: where the batch's rows end in their streams; 0 in rows without tokens."""
    ends = np.zeros(1 + max(int(rows.request.max(initial=0)) for rows in waves), dtype=np.int64)
    for rows in waves:
        ends[rows.request] = rows.steps[:, STREAM] + rows.steps[:, LENGTH]
    return ends


def _aligned(values: torch.Tensor | None, index: slice | torch.Tensor) -> torch.Tensor | None:
    """Some tokens' values. Kernels are compiled for those that begin at a multiple of 16 bytes."""
    if values is None:
        return None
    found = values[index]
    return found if found.data_ptr() % 16 == 0 else found.clone()


def _as_padding(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with sequence lengths of 0: kernels treat its rows as padding and touch no page."""
    ends = common.seq_lens_cpu_upper_bound
    assert ends is not None, "runners set it"
    return common.replace(
        seq_lens=torch.zeros_like(common.seq_lens), seq_lens_cpu_upper_bound=torch.zeros_like(ends)
    )
