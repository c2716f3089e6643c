# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer by the Triton kernels.

What the kernels do not know (tokens that are merged, or out of chronological order) runs in
PyTorch, on the same pages. Nothing here knows a device: where Triton interprets kernels it runs on
the CPU, and so it is tested.
"""

from typing import Any

import torch

from vllm_cascade.attention.cuda.builder import DecodeRows, DeviceWave, PrefillRows, TritonMetadata
from vllm_cascade.attention.cuda.recall import LayerRings
from vllm_cascade.attention.inputs import Stride
from vllm_cascade.attention.layer import KVPolicyImpl, NewTokens
from vllm_cascade.attention.torch.strides import attend_and_insert
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.positions import Rotary
from vllm_cascade.kernels.columns import NEW_SLOTS, STREAM
from vllm_cascade.kernels.triton.assign import assign
from vllm_cascade.kernels.triton.attend import attend
from vllm_cascade.kernels.triton.column_sums import column_sums, num_sums, stride_scores
from vllm_cascade.kernels.triton.combine import merge, update
from vllm_cascade.kernels.triton.configs import attend_splits
from vllm_cascade.kernels.triton.insert import insert
from vllm_cascade.kernels.triton.insert_stride import insert_strides
from vllm_cascade.kernels.triton.prefill import attend_strides
from vllm_cascade.kernels.triton.rotate import decode_dtype, gather, rotation_table
from vllm_cascade.kernels.triton.xformers_prefill import attend_with_xformers, use_xformers
from vllm_cascade.policies.schedule import compared
from vllm_cascade.recall.rings import Rings


class TritonKVPolicyImpl(KVPolicyImpl):
    """Runs a step's waves: all single tokens by the decode kernels, all strides by prefill's."""

    _decode_rotation: torch.Tensor | None = None
    recall: LayerRings | None = None

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        num_ranks: int = 1,
    ) -> None:
        super().prepare(spec, kv_cache, rotary, num_ranks)
        assert self._pages is not None
        if rotary is not None:
            dtype, forward = decode_dtype(self._pages.kv.dtype), spec.policy.recalled
            turning = rotary.inv_freq, spec.max_distance, kv_cache.device, dtype, forward
            self._decode_rotation = rotation_table(*turning)

    def recall_from(self, stores: Rings, index: int, most_queries: int) -> None:
        """Let evicted units come back; ``index``: of the layer in the stores."""
        self.recall = LayerRings(self._layer, self._pages, stores, index, most_queries)

    def rotation_table(
        self, rotary: Rotary, spec: KVPolicySpec, device: torch.device
    ) -> torch.Tensor:
        forward = spec.policy.recalled
        return rotation_table(rotary.inv_freq, spec.max_distance, device, forward=forward)

    def run(
        self, name: str, metadata: TritonMetadata, new: NewTokens, kv_cache: torch.Tensor
    ) -> None:
        # Before the real pool exists, vLLM measures what graphs need on one that it throws away:
        # its block tables are empty, so every row is padding.
        pages = self._pages or page_views(kv_cache, metadata.spec)
        for wave in metadata.waves:
            if wave.decode is not None:
                self._decode(pages, metadata, wave.decode, new)
            for rows in wave.prefill:
                self._prefill(pages, metadata, rows, new)
            for stride in wave.others:
                self._in_pytorch(pages, stride, new)
            if self.recorder is not None:
                self._record(name, pages, metadata, wave)

    def _decode(
        self, pages: Pages, metadata: TritonMetadata, decode: DecodeRows, new: NewTokens
    ) -> None:
        policy, where = metadata.spec.policy, {"table": decode.table, "steps": decode.steps}
        rows = slice(0, len(decode.steps)) if decode.index is None else decode.index
        recall = {**where, "recall": decode.recall}
        if self.recall is not None:
            self.recall.choose(new.query, **recall, single=True)
        query, key, value = new.at(rows)
        place = new.output[rows] if decode.index is None else torch.empty_like(query)
        num_slots = decode.table.shape[1] * pages.block_size
        parts, parts_lse, logits, own = attend(
            query=query,
            key=key,
            value=value,
            **_words(pages, "kv", "rank", "born"),
            **where,
            slopes=self.alibi_slopes,
            logit_scale=decode.logit_scale,
            scale=self.scale,
            softcap=self.softcap,
            **self._turning | {"rotation": self._decode_rotation},
            splits=attend_splits(query.device, len(query), self.num_kv_heads, num_slots),
            keep_logits=policy.uses_attention,
        )
        lse = merge(partial=parts, partial_lse=parts_lse, steps=decode.steps, output=place)
        if decode.index is not None:
            new.output[rows] = place
        new_score = decode.no_scores
        if policy.uses_attention:
            logits, own, lse = self._all_ranks(logits, own, lse)
            new_score = update(
                logits=logits,
                own=own,
                lse=lse,
                **_words(pages, "rank", "score"),
                **where,
                reduction=policy.head_reduction,
                unit=pages.unit,
            )
        elif decode.given is not None:
            words = _words(pages, "rank", "score")
            assign(given=decode.given, ranks=decode.scored, **words, **where, unit=pages.unit)
        ranks = None if self.recall is None else self.recall.ranks(**recall)
        insert(
            key=key,
            value=value,
            new_score=new_score,
            **_words(pages),
            **where,
            rules=metadata.rules,
            # Only policies with scores have rules of cells, and requests may bring their own.
            has_cells=policy.uses_attention,
        )
        if self.recall is not None:
            self.recall.store(**recall, ranks=ranks)

    @property
    def cache_dtype(self) -> torch.dtype:
        assert self._pages is not None, "prepare comes first"
        return self._pages.kv.dtype

    @property
    def _turning(self) -> dict[str, Any]:
        """How kernels rotate keys as they read them."""
        if self._layer is None:
            return {"rotation": None, "interleaved": False}
        return {"rotation": self._layer.rotation, "interleaved": not self._layer.is_neox}

    def _all_ranks(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``[rows, heads, ...]`` of all tensor-parallel ranks, where those decide together."""
        if self._layer is None or self._layer.gather_heads is None:
            return list(tensors)
        from vllm.distributed import tensor_model_parallel_all_gather

        return [tensor_model_parallel_all_gather(x, dim=1).contiguous() for x in tensors]

    def _prefill(
        self, pages: Pages, metadata: TritonMetadata, rows: PrefillRows, new: NewTokens
    ) -> None:
        policy, where = metadata.spec.policy, {"table": rows.table, "steps": rows.steps}
        scoring, unit = rows.strides[0].schedule.scoring, pages.unit
        recall = {**where, "recall": rows.recall}
        if self.recall is not None:
            self.recall.choose(new.query, **recall, single=False)
        keys, values, old_scores, old_tokens = gather(
            **_words(pages), **where, **self._turning, max_cached=rows.max_cached
        )
        lse = self._attend_strides(metadata, rows, new, keys, values)
        if scoring.source == "attention":
            sums = column_sums(
                query=new.query,
                key=new.key,
                old_keys=keys,
                lse=lse,
                decays=rows.decays,
                steps=rows.steps,
                slopes=self.alibi_slopes,
                logit_scale=metadata.logit_scale,
                scale=self.scale,
                softcap=self.softcap,
                max_length=rows.max_length,
                unit=unit,
            )
            (sums,) = self._all_ranks(sums)
            _, parts = num_sums(new.query, rows.max_cached, rows.max_length, unit)
            scores = stride_scores(
                *(sums, old_scores, rows.fades, rows.steps, policy.head_reduction, unit, parts)
            )
        else:
            scores = _given_scores(rows, old_scores, unit)
        keep = _keep(rows, scores, old_tokens, unit)
        if self.recall is not None:
            self.recall.store(**recall, keep=keep, key=new.key, value=new.value)
        insert_strides(
            key=new.key,
            value=new.value,
            keep=keep,
            scores=scores,
            **_words(pages),
            **recall,
            max_length=rows.max_length,
            **self._turning,
        )

    def _attend_strides(
        self,
        metadata: TritonMetadata,
        rows: PrefillRows,
        new: NewTokens,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Write the strides' outputs; returns log-sum-exps fp32 ``[num_tokens, num_heads]``."""
        query = new.query
        plain = self.alibi_slopes is None and metadata.logit_scale is None
        plain &= self.softcap == 0 and rows.max_cached > 0 and len(rows.strides) == 1
        longest = rows.max_length
        if use_xformers(query.device, query.dtype, self.head_size, longest, plain):
            part = rows.strides[0].rows
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            new.output[part], lse[part] = attend_with_xformers(
                *new.at(part), keys[0], values[0], self.scale
            )
            return lse
        return attend_strides(
            query=query,
            key=new.key,
            value=new.value,
            output=new.output,
            old_keys=keys,
            old_values=values,
            steps=rows.steps,
            slopes=self.alibi_slopes,
            logit_scale=metadata.logit_scale,
            scale=self.scale,
            softcap=self.softcap,
            max_length=longest,
        )

    def _in_pytorch(self, pages: Pages, stride: Stride, new: NewTokens) -> None:
        assert self._layer is not None, "warm-up rows are left out"
        with torch.device(new.query.device):  # where the path makes its index tables
            attended = attend_and_insert(self._layer, pages, stride, *new.at(stride.rows))
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


def _words(pages: Pages, *names: str) -> dict[str, torch.Tensor | None]:
    """Views of the pages by name: these, or all."""
    return {name: getattr(pages, name) for name in names or Pages.__dataclass_fields__}


def _given_scores(rows: PrefillRows, old_scores: torch.Tensor, unit: int) -> torch.Tensor:
    """Scores of units, fp32 ``[R, S, C]``, that attention has no part in: 0, or from the host."""
    columns = rows.max_cached // unit + -(-rows.max_length // unit)
    scores = old_scores.new_zeros(*old_scores.shape[:2], columns)
    for row, stride in enumerate(rows.strides):
        if stride.given is not None:
            skip, cached = max(-stride.scored, 0), stride.cached // unit
            given, first = stride.given[skip:], stride.scored + skip
            scores[row, :, :cached] = old_scores[row, :, :cached]
            if unit == 1:
                scores[row, :, first : first + len(given)] = given
                continue
            places = torch.arange(first, first + len(given), device=scores.device) // unit
            scores[row].index_add_(1, places, given.expand(len(scores[row]), -1))
    return scores


def _keep(
    rows: PrefillRows, scores: torch.Tensor, old_tokens: torch.Tensor, unit: int
) -> torch.Tensor:
    """bool like ``scores``: which units every stride that deletes something leaves.

    A last one that is not complete stays, and so do those that were recalled.
    """
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    for row, (stride, plan) in enumerate(zip(rows.strides, rows.plans, strict=True)):
        if plan is None:
            continue
        schedule, total = stride.schedule, (stride.cached + stride.num_tokens) // unit
        values, age = scores[row, :, :total], None
        if schedule.scoring.per_age:
            ends = stride.end - stride.end % unit
            new = torch.arange(stride.stream, ends, unit, device=scores.device)
            tokens = [old_tokens[row, :, : stride.cached // unit], new.expand(len(values), -1)]
            age = stride.end - torch.cat(tokens, dim=1)
        judged = compared(schedule.scoring, values, age)
        sinks, behind = 0, stride.recalled
        if stride.recalled:
            sinks = schedule.policy.num_sinks // unit
            behind = sinks + stride.recalled
            judged = torch.cat([judged[:, :sinks], judged[:, behind:]], dim=1)
        stays = schedule.survivors(judged, plan)
        keep[row, :, :sinks] = stays[:, :sinks]
        keep[row, :, behind:total] = stays[:, sinks:]
    return keep
