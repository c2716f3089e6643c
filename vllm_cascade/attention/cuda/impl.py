# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer by the Triton kernels.

What the kernels do not know (tokens that are merged, or out of chronological order) runs in
PyTorch, on the same pages. Nothing here knows a device: where Triton interprets kernels it runs on
the CPU, and so it is tested.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import SchedulerConfig, get_current_vllm_config_or_none

from vllm_cascade.attention.cuda.layer_kernels import (
    LayerKernels,
    SingleKernels,
    StrideKernels,
    make_kernels,
    stored_of,
    words_of,
)
from vllm_cascade.attention.cuda.metadata import (
    DecodeRows,
    DeviceWave,
    PrefillRows,
    TritonMetadata,
)
from vllm_cascade.attention.cuda.ranks import all_heads, put_together, sums_of_all
from vllm_cascade.attention.cuda.recall import LayerRings
from vllm_cascade.attention.cuda.repeats import make_repeater, only_launches
from vllm_cascade.attention.cuda.workspace import (
    Workspace,
    chunk_shapes,
    counters_of,
    memory_of,
    size_of,
    split_of,
    stride_shapes,
    workspace_of,
    worst_chunks,
    worst_recall,
    worst_shapes,
    worst_singles,
)
from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.latent import LatentImpl
from vllm_cascade.attention.layer import NewTokens, Part
from vllm_cascade.attention.shared import SharingImpl
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.attention.torch.strides import attend_and_insert
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.quantised import Quantised
from vllm_cascade.cache.spec import TRACE_WORDS, KVPolicySpec
from vllm_cascade.kernels.columns import NEW_SLOTS, STREAM
from vllm_cascade.kernels.rotation_table import decode_dtype, rotation_table
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.configs import LEAST_PART, attend_splits, sharing
from vllm_cascade.kernels.triton.drafts import DraftUndo, Saved
from vllm_cascade.kernels.triton.launch import noted
from vllm_cascade.kernels.triton.merge import Merge, ScoredMerge
from vllm_cascade.kernels.triton.recall_rows import RecallRows
from vllm_cascade.kernels.triton.repeat import Launches, Repeater
from vllm_cascade.kernels.triton.scores import update
from vllm_cascade.kernels.triton.singles import Singles
from vllm_cascade.kernels.triton.stored import Codes
from vllm_cascade.kernels.triton.strides import Chunks, Strides, Tokens
from vllm_cascade.models.architectures import shares_caches
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import may_have_cells, policy_of
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.drafts import ModelDrafts, most_drafts
from vllm_cascade.step.inputs import Stride, Undone


class TritonKVPolicyImpl(SharingImpl):
    """Runs a step's waves: all single tokens by the decode kernels, all strides by prefill's.

    Attributes:
        least_part: cached keys that are worth a program where a stride's attention is split.
    """

    least_part = LEAST_PART
    knows_windows = knows_sinks = knows_codes = judges_all = True
    _decode_rotation: torch.Tensor | None = None
    _made: LayerKernels | None = None
    _stored: Codes | None = None
    recall: LayerRings | None = None
    _saved: Saved | None = None
    _undo: DraftUndo | None = None
    _held: torch.Tensor | None = None
    _repeater: Repeater | None = None
    _workspace: Workspace | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config_or_none()

    def reserve(self, query: torch.Tensor) -> None:
        """Reserve the workspace, and drafts' memory until vLLM has profiled it."""
        config, spec = self._config, self.spec
        policy = None if config is None else policy_of(config.additional_config)
        if config is None or policy is None or spec is None:
            return
        limits, slots = config.scheduler_config, spec.table_slots(config)
        workspace = self._memory_on(query.device)
        alike = policy, limits.max_num_batched_tokens, limits.max_num_seqs, slots, self.least_part
        alike += *query.shape[1:], query.dtype, self.num_kv_heads, self.latent
        if alike not in workspace.reserved_for:
            workspace.reserve(*self._worst(policy, limits, query, slots))
            workspace.reserved_for.add(alike)
        drafts = most_drafts(config)
        if self._saved is None and drafts:
            drafts = ModelDrafts.saved(drafts) if self.drafting else drafts
            row = 2 * self.head_size if self.latent is None else self.head_size
            num_rows = limits.max_num_seqs * drafts * self.num_kv_heads
            num_bytes = num_rows * (row * query.element_size() + 20)
            self._held = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
        if shares_caches(config.model_config.hf_text_config):
            self._reserve_waiting(query)

    def _memory_on(self, device: torch.device) -> Workspace:
        """The shared workspace, which lives as long as any layer that holds it."""
        self._workspace = workspace_of(device)
        return self._workspace

    def _reserve_waiting(self, query: torch.Tensor) -> None:
        """Let the profile count the rows that wait for other layers: those of two owners, with
        windows and without, each with an output that is thrown away."""
        num_rows, heads, size = query.shape
        made = query.new_empty(2, num_rows, 2 * (heads + self.num_kv_heads), size)
        del made

    def _worst(
        self, policy: Policy, limits: SchedulerConfig, query: torch.Tensor, slots: int
    ) -> tuple[int, int]:
        """Bytes and counters that any step of this layer needs; ``slots``: of a request."""
        num, heads, kv_heads = limits.max_num_seqs, self.num_heads, self.num_kv_heads
        worst = worst_shapes(policy, limits, query, kv_heads, self.least_part, self.latent, slots)
        size = self.latent or self.head_size
        sets = kv_heads if policy.head_policy == "per_kv_head" else 1
        scored = slots if policy.uses_attention else 0
        cells = slots if may_have_cells(policy) else 0
        ranks = 1 if self._config is None else self._config.parallel_config.tensor_parallel_size
        # A row's parts are a power of two, so fewer rows can have more parts in all.
        parts = max(
            rows * attend_splits(query.device, rows, self._decode_programs, slots)
            for rows in range(1, num + 1)
        )
        singles = worst_singles(num, heads, -(-parts // num), size, scored, sets, cells, ranks)
        strides = limits.max_num_batched_tokens // policy.prefill_stride + num
        chunks = worst_chunks(strides, query, kv_heads, slots, self.latent)
        recalled = worst_recall(policy, num, heads, sets, self.head_size)
        num_bytes = max(*map(size_of, (singles, worst, chunks)), recalled)
        return num_bytes, counters_of(worst)

    def keep_drafts(self, most_requests: int) -> None:
        self._held = self._made = None  # the profile has counted it
        self._repeater = make_repeater()  # the kernels are made again
        pages, own = self.pages, Journal(self.pages, most_requests)
        self._saved = Saved(own.rows, own.words, own.scale, pages.scale)
        words = words_of(pages, "kv", *TRACE_WORDS, "versions")
        self._undo = DraftUndo(**words, saved=self._saved)

    def undo(self, undone: Undone) -> None:
        assert self._undo is not None, "keep_drafts comes first"
        self._undo(undone.rows, undone.table)
        self._forget(undone)

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().prepare(spec, kv_cache, rotary, *args, **kwargs)
        self._made, self._stored = None, stored_of(self.pages)
        self._repeater = make_repeater()
        if rotary is not None:
            self._decode_rotation = rotation_table(
                rotary.inv_freq,
                spec.max_distance,
                kv_cache.device,
                dtype=decode_dtype(self.row_dtype),
                forward=spec.policy.recalled,
            )

    @property
    def variant(self) -> tuple[Any, ...]:
        """Key of compiled kernels, as far as layers with equal pages differ in it."""
        layer = self.layer_config
        turning = None if layer.rotation is None else layer.rotation.shape[-1]
        kinds = turning, layer.is_neox, layer.softcap > 0, layer.slopes is None, layer.sinks is None
        strides = self.token_strides or ()
        return *kinds, bool(self.last), *(stride % 16 == 0 for stride in strides)

    def recall_from(self, stores: Rings, index: int, most_queries: int) -> None:
        where = self.layer_config, self.pages, self._stored
        config = self._config
        most = stores.num_requests if config is None else config.scheduler_config.max_num_seqs
        self.recall = LayerRings(*where, stores, index, most_queries, most)

    def run(
        self, name: str, metadata: TritonMetadata, new: NewTokens, kv_cache: torch.Tensor
    ) -> None:
        # Before the real pool exists, vLLM measures what graphs need on one that it throws away:
        # its block tables are empty, so every row is padding.
        pages = self._pages or self._thrown_away(kv_cache, metadata.spec)
        # A dummy run, or a layer without keys, which has no owner before there is the real pool.
        if not metadata.waves or (new.key is None and self.owner is None):
            new.output.zero_()
            return
        if self.run_shared(name, metadata, new):
            return
        tokens = Tokens(*new, logit_scale=metadata.logit_scale)
        which = self.num_heads, self.head_size, tokens.variant
        repeater, first = self._repeater_now(new.query.device), metadata.launched.get(which)
        alone = not self._decides_with_others
        if repeater is None or (first is None and not only_launches(metadata, alone)):
            self._run_waves(name, pages, metadata, new, tokens)
            return
        if first is not None and repeater(first, tokens):
            return
        with noted() as launched:
            self._run_waves(name, pages, metadata, new, tokens)
        own = Launches(launched, tokens)
        if first is None:
            metadata.launched[which] = own
        else:
            repeater.learn(own, first)

    def _repeater_now(self, device: torch.device) -> Repeater | None:
        """What repeats other layers' launches, unless this layer does more than launch."""
        recall = self.recall
        if self._pages is None or _is_captured(device):  # the pool, or the launches, are kept
            return None
        watched = self.recorder is not None or (recall is not None and recall.judged is not None)
        return None if watched else self._repeater

    def _run_waves(
        self, name: str, pages: Pages, metadata: TritonMetadata, new: NewTokens, tokens: Tokens
    ) -> None:
        kernels = self._kernels(pages, metadata.spec, tokens)
        for wave in metadata.waves:
            self._run_wave(name, kernels, pages, metadata, wave, new, tokens, selects=True)

    def _run_wave(
        self,
        name: str,
        kernels: LayerKernels,
        pages: Pages,
        metadata: TritonMetadata,
        wave: DeviceWave,
        new: NewTokens,
        tokens: Tokens,
        selects: bool,
    ) -> None:
        """Select units, unless they have been, attend and insert, and store what is evicted."""
        if wave.decode is not None:
            self._decode(kernels.singles, pages, metadata, wave.decode, new, tokens, selects)
        for rows in wave.prefill:
            assert kernels.strides is not None, "layers with a window have no strides"
            self._prefill(kernels.strides, tokens, rows, selects)
        if wave.chunks is not None:
            kernels.chunks(tokens, wave.chunks, self._parts(tokens, wave.chunks))
        for stride, recall in wave.others:
            self._in_pytorch(pages, stride, recall, new, selects)
        if self.recorder is not None:
            self._record(name, pages, metadata, wave)

    # --- shared caches ------------------------------------------------------------------------

    def _select_units(self, metadata: TritonMetadata, wave: DeviceWave, new: NewTokens) -> None:
        if self.recall is None:
            return
        tokens = Tokens(*new, logit_scale=metadata.logit_scale)
        for rows in filter(None, (wave.decode, *wave.prefill)):
            self._recalling(self.recall, tokens, rows, selects=True)
        for stride, row in wave.others:
            if row is not None:
                self.recall.choose_alone(stride, row, new.query)

    def _only_attend(self, metadata: TritonMetadata, wave: DeviceWave, new: NewTokens) -> None:
        tokens, pages = Tokens(*new, logit_scale=metadata.logit_scale), self.pages
        kernels = self._kernels(pages, metadata.spec, tokens)
        if wave.decode is not None:
            merge = kernels.singles.plain_merge
            self._attend_singles(kernels.singles, merge, pages, metadata, wave.decode, new, tokens)
        for rows in wave.prefill:
            assert kernels.strides is not None, "layers with a window have no strides"
            self._attend_strides(kernels.strides, tokens, rows)
        if wave.chunks is not None:
            kernels.chunks.attend(tokens, wave.chunks, self._parts(tokens, wave.chunks))
        for stride, _ in wave.others:
            self._stride_in_pytorch(pages, stride, new, "attend")

    def _end_wave(self, metadata: TritonMetadata, wave: DeviceWave, new: NewTokens) -> None:
        tokens, pages = Tokens(*new, logit_scale=metadata.logit_scale), self.pages
        kernels = self._kernels(pages, metadata.spec, tokens)
        self._run_wave(self.name, kernels, pages, metadata, wave, new, tokens, selects=False)

    # --- kernels --------------------------------------------------------------------------------

    def _kernels(self, pages: Pages, spec: KVPolicySpec, tokens: Tokens) -> LayerKernels:
        """The layer's kernels on its pages; those on a pool that is thrown away are not kept."""
        if self._made is not None and pages is self._pages:
            return self._made
        made = self._make_kernels(pages, spec, tokens)
        if pages is self._pages:
            self._made = made
        return made

    def _make_kernels(self, pages: Pages, spec: KVPolicySpec, tokens: Tokens) -> LayerKernels:
        assert tokens.query is not None, "a layer attends"
        cached = CachedLayer(
            **words_of(pages),
            rotation=self._decode_rotation,
            interleaved=self._layer is not None and not self._layer.is_neox,
            slopes=self.alibi_slopes,
            scale=self.scale,
            softcap=self.softcap,
            num_queries=self.num_heads,
            latent=self.latent,
            stored=self._stored if pages is self._pages else stored_of(pages),
            dtype=tokens.key.dtype,
        )
        split = split_of(spec.policy, tokens.query, self.least_part)
        return make_kernels(cached, pages, spec, self._layer, self._saved, split)

    def _thrown_away(self, kv_cache: torch.Tensor, spec: KVPolicySpec) -> Pages:
        """Views of the temporary pool of vLLM's profiling; codes in it may be typed as floats."""
        quantised = Quantised.of(self.kv_cache_dtype, (1.0, 1.0), self.latent, kv_cache.device)
        return page_views(kv_cache.view(spec.dtype), spec, quantised)

    def _decode(
        self,
        kernels: SingleKernels,
        pages: Pages,
        metadata: TritonMetadata,
        decode: DecodeRows,
        new: NewTokens,
        tokens: Tokens,
        selects: bool,
    ) -> None:
        if kernels.versions is not None and decode.saves is not None:
            kernels.versions(decode.saves, decode.table, decode.steps)
        recalling = None
        if self.recall is not None:
            recalling = self._recalling(self.recall, tokens, decode, selects)
        tokens, singles = self._attend_singles(
            kernels, kernels.merge, pages, metadata, decode, new, tokens
        )
        if metadata.spec.policy.uses_attention:
            if self._decides_with_others:
                singles = self._update(kernels, pages, metadata.spec.policy, singles)
        elif decode.given is not None:
            assert decode.scored is not None, "it comes with given"
            kernels.assignment(decode.given, decode.scored, decode.table, decode.steps)
        if self.recall is not None and recalling is not None:
            self.recall.before(recalling, decode.recalls)
        kernels.insertion(tokens, singles)
        if self.recall is not None and recalling is not None:
            self.recall.store(recalling, decode.recalls)

    def _attend_singles(
        self,
        kernels: SingleKernels,
        merge: Merge | ScoredMerge,
        pages: Pages,
        metadata: TritonMetadata,
        decode: DecodeRows,
        new: NewTokens,
        tokens: Tokens,
    ) -> tuple[Tokens, Singles]:
        """Write the rows' output; return their tokens, and what later kernels find."""
        rows, saves = decode.index, None if self._saved is None else decode.saves
        if not decode.leads:
            place = new.output[rows]
            if isinstance(rows, torch.Tensor):  # a copy
                place = torch.empty_like(place)
            tokens = Tokens(*new.at(rows), place)
        singles = decode.singles.get((self.num_heads, self.head_size))
        if singles is None:
            singles = self._shared_singles(kernels, pages, metadata, decode, saves)
        kernels.attention(tokens, singles)
        merge(tokens, singles)
        if isinstance(rows, torch.Tensor) and tokens.output is not None:
            new.output[rows] = tokens.output
        return tokens, singles

    def _recalling(
        self, recall: LayerRings, tokens: Tokens, rows: DecodeRows | PrefillRows, selects: bool
    ) -> RecallRows | None:
        """What recall's launches are given, if there are any; with ``selects`` units come back."""
        if not any(rows.recalls):
            return None
        columns = rows.width if isinstance(rows, PrefillRows) else None
        recalling = self._recall_rows(recall, rows, columns)
        if selects:
            recall.choose(tokens, recalling, single=columns is None, does=rows.recalls)
        return recalling

    def _recall_rows(
        self, recall: LayerRings, rows: DecodeRows | PrefillRows, columns: int | None = None
    ) -> RecallRows:
        """What recall's launches are given, the first layer's for all."""
        which = self.num_heads, self.head_size
        found = rows.recalling.get(which)
        if found is None:
            assert rows.recall is not None, "the builder has stores, too"
            judged = rows.judged if isinstance(rows, PrefillRows) else None
            own = rows.table, rows.steps, rows.recall
            found = recall.rows(*own, self.num_heads, columns, judged)
            if _is_captured(rows.steps.device):
                self._memory_on(rows.steps.device).keep()
            else:
                rows.recalling[which] = found
        return found

    def _shared_singles(
        self,
        kernels: SingleKernels,
        pages: Pages,
        metadata: TritonMetadata,
        decode: DecodeRows,
        saves: torch.Tensor | None,
    ) -> Singles:
        """These tokens and what their kernels leave each other, the first layer's for all.

        A captured graph keeps the memory that it found, so there every layer allocates its own,
        which becomes the graph's.
        """
        num_rows, num_pages = decode.table.shape
        device, num_slots = decode.steps.device, num_pages * pages.block_size
        splits = attend_splits(device, num_rows, self._decode_programs, num_slots)
        found = {
            **kernels.attention.shapes(num_rows, num_pages, splits),
            "lse": (num_rows, self.num_heads),
            **kernels.insertion.shapes(num_rows, num_pages),
        }
        new_score = {"new_score": decode.no_scores}
        if metadata.spec.policy.uses_attention:
            found["new_score"], new_score = (num_rows, kernels.num_sets), {}
            if kernels.rank_scores is not None:
                found["masses"] = num_rows, num_pages * (pages.block_size // pages.unit) + 1
        shapes = {name: (shape, torch.float32) for name, shape in found.items()}
        captured = _is_captured(device)
        workspace = Workspace(device) if captured else self._memory_on(device)
        made = Singles(
            steps=decode.steps,
            table=decode.table,
            rules=metadata.rules,
            logit_scale=decode.logit_scale,
            positions=metadata.positions,
            saves=saves,
            **workspace.carve(shapes),
            **new_score,
        )
        if not captured:
            decode.singles[self.num_heads, self.head_size] = made
        return made

    @property
    def _decode_programs(self) -> int:
        """Programs of decode attention per row, KV head or more, and split."""
        group = self.num_heads // self.num_kv_heads
        return self.num_kv_heads * sharing(self.head_size, group, self.latent)

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of new tokens' rows."""
        return self.layer_config.dtype or self.pages.kv.dtype

    @property
    def _decides_with_others(self) -> bool:
        """Whether tensor-parallel ranks share the heads of a set."""
        return self._layer is not None and self._layer.over_ranks is not None

    def _update(
        self, kernels: SingleKernels, pages: Pages, policy: Policy, singles: Singles
    ) -> Singles:
        """Scores in the pages, and the new tokens', over all tensor-parallel ranks."""
        layer = self.layer_config
        assert layer.over_ranks is not None, "other ranks decide, too"
        if kernels.rank_scores is not None:
            masses, scores = kernels.rank_scores
            masses(singles)
            assert singles.masses is not None, "they were carved"
            put_together(layer.over_ranks, policy.head_reduction, singles.masses)
            scores(singles)
            return singles
        made, gather = (singles.logits, singles.own, singles.lse), layer.gather_heads
        assert gather is not None, "it comes with over_ranks"
        logits, own, lse = (all_heads(gather, one) for one in made if one is not None)
        new_score = update(
            logits=logits,
            own=own,
            lse=lse,
            **words_of(pages, "rank", "score"),
            table=singles.table,
            steps=singles.steps,
            reduction=policy.head_reduction,
            unit=pages.unit,
        )
        return replace(singles, new_score=new_score)

    def _prefill(
        self, kernels: StrideKernels, tokens: Tokens, rows: PrefillRows, selects: bool
    ) -> None:
        """Gather what is cached, attend, add up what keys received, choose and write."""
        recalling = None
        if self.recall is not None:
            recalling = self._recalling(self.recall, tokens, rows, selects)
        strides = self._attend_strides(kernels, tokens, rows)
        if strides.sums is not None:
            kernels.sums(tokens, strides)
            if self._layer is not None and self._layer.over_ranks is not None:
                which, together = (self.num_heads, self.head_size), rows.together
                strides = together[which] = sums_of_all(strides, together.get(which), self._layer)
        if self.recall is not None and recalling is not None and rows.recalls.stores:
            self.recall.store(recalling, rows.recalls, tokens, kernels.choice(strides))
        kernels.insertion(tokens, strides)

    def _attend_strides(self, kernels: StrideKernels, tokens: Tokens, rows: PrefillRows) -> Strides:
        """Write the rows' output; return what later kernels find."""
        shared = rows.strides.get((self.num_heads, self.head_size))
        strides = shared or self._shared(kernels, tokens, rows)
        kernels.gather(strides)
        kernels.attention(tokens, strides)
        return strides

    def _shared(self, kernels: StrideKernels, tokens: Tokens, rows: PrefillRows) -> Strides:
        """These strides and what their kernels leave each other, the first layer's for all."""
        assert tokens.query is not None, "a stride attends"
        scored = rows.scoring.source == "attention"
        shapes = stride_shapes(
            num_rows=len(rows.steps),
            num_sets=kernels.num_sets,
            width=rows.width,
            num_tokens=len(tokens.query),
            query=tokens.query,
            num_heads=self.num_kv_heads,
            unit=kernels.unit,
            reduction=kernels.reduction if scored else None,
            splits=kernels.attention.split.splits,
            most_slots=rows.max_slots,
            latent=self.latent,
        )
        made = rows.strides[self.num_heads, self.head_size] = Strides(
            steps=rows.steps,
            table=rows.table,
            max_length=rows.max_length,
            max_slots=rows.max_slots,
            decays=rows.decays,
            parts=kernels.sums.parts if scored else 1,
            query_heads=self.num_heads // kernels.num_sets,
            given=rows.given,
            plans=rows.plans,
            recall=rows.recall,
            **memory_of(self._memory_on(rows.steps.device), shapes),
        )
        return made

    def _parts(self, tokens: Tokens, chunks: Chunks) -> tuple[Strides, ...]:
        """A chunk's strides with memory for what they see, the first layer's for all."""
        assert tokens.query is not None, "a chunk attends"
        which = self.num_heads, self.head_size
        found = chunks.gathered.get(which)
        if found is None:
            shapes = chunk_shapes(
                num_rows=len(chunks.steps),
                query=tokens.query,
                num_heads=self.num_kv_heads,
                most_cached=chunks.max_cached,
                latent=self.latent,
            )
            found = chunks.parts(self._memory_on(tokens.query.device).carve(shapes)["gathered"])
            chunks.gathered[which] = found
        return found

    def _in_pytorch(
        self, pages: Pages, stride: Stride, row: np.ndarray | None, new: NewTokens, selects: bool
    ) -> None:
        """One stride in PyTorch; ``row``: int32 ``[RECALL_COLUMNS]``, None without recall."""
        recall, gone = self.recall, None
        if recall is not None and row is not None:
            if selects:
                recall.choose_alone(stride, row, new.query)
            gone = recall.room(row)
        self._stride_in_pytorch(pages, stride, new, "both", gone)
        if recall is not None and row is not None and gone is not None:
            with torch.device(new.query.device):
                recall.store_evicted(row, gone)

    def _stride_in_pytorch(
        self, pages: Pages, stride: Stride, new: NewTokens, part: Part, gone: Evicted | None = None
    ) -> None:
        layer = self.layer_config if part == "both" else replace(self.layer_config, part=part)
        with torch.device(new.query.device):  # where the path makes its index tables
            attended = attend_and_insert(layer, pages, stride, *new.at(stride.rows), gone)
        new.output[stride.rows] = attended.to(new.output.dtype)

    def _record(self, layer: str, pages: Pages, metadata: TritonMetadata, wave: DeviceWave) -> None:
        """Note what the wave left in the cache; reads the device, for inspection only."""
        assert self.recorder is not None
        if wave.rows is not None:
            self.recorder.record(layer, pages, wave.rows, metadata.table)
            return
        assert wave.decode is not None
        for row, step in enumerate(wave.decode.steps.tolist()):
            if step[STREAM] >= 0:
                blocks = wave.decode.table[row].long()
                self.recorder.add(layer, pages, blocks, step[NEW_SLOTS], step[STREAM] + 1)


class TritonLatentImpl(LatentImpl, TritonKVPolicyImpl):
    """One layer of multi-head latent attention."""


def _is_captured(device: torch.device) -> bool:
    """Whether launches are recorded for a CUDA graph, which keeps the memory that they use."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
