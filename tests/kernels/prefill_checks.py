# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt's strides, and the scores it makes, against fp64; also split over keys."""

from dataclasses import replace

import torch

from tests.kernels.random_pool import (
    TOLERANCE,
    Case,
    chronological,
    close,
    make_cache,
    new_tokens,
    on,
    real_rows,
    same,
    stride_steps,
    table_of,
)
from tests.kernels.references import (
    attend_strides_reference,
    column_sums_reference,
    gather_reference,
    in_units,
)
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import decode_dtype
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.column_sums import ColumnSums, num_sums, reduced
from vllm_cascade.kernels.triton.configs import WHOLE, Split
from vllm_cascade.kernels.triton.gather import StrideGather
from vllm_cascade.kernels.triton.prefill import StrideAttention
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.strides import LINE_WORDS, Strides, Tokens

DECAY, WEIGHT = 0.97, 0.03


class StrideBatch:
    """A case's strides on a device; ``attend`` and ``sums`` launch into new memory.

    Attributes:
        cache, steps, query, key, value, factors: on the CPU; ``ours``: the pages on the device.
    """

    def __init__(self, case: Case, device: torch.device | str) -> None:
        self.case = case
        self.cache, self.steps = make_cache(case)
        num_tokens, self.longest = stride_steps(case, self.steps), max(case.strides)
        self.query, self.key, self.value = new_tokens(case, num_tokens)
        self.factors = torch.ones(num_tokens)
        if case.logit_scale:
            self.factors = torch.rand(num_tokens) + 0.5
            starts = self.steps[real_rows(case), columns.START].long()
            self.factors[starts] = 0.0  # as the logarithm of one token is
        self.ours = self.cache.to(device)
        self._steps, query, key, value = on(device, self.steps, self.query, self.key, self.value)
        slopes, self._sinks = on(device, case.slopes, case.sink_logits)
        (factors,) = on(device, self.factors if case.logit_scale else None)
        self._tokens = Tokens(query=query, key=key, value=value, logit_scale=factors)
        self._layer = CachedLayer(
            **self.ours.views(),
            rotation=table_of(case, device, decode_dtype(case.dtype)),
            interleaved=case.interleaved,
            slopes=slopes,
            scale=case.head_size**-0.5,
            softcap=case.softcap,
            num_queries=query.shape[1],
            latent=case.latent,
            stored=self.ours.codes,
            dtype=case.dtype,
        )
        self.width = (max(n or 0 for n in case.lengths) + self.longest) // case.unit + 2

    def attend(
        self, split: Split = WHOLE, partial: Partial | None = None, rows: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, log-sum-exps and lines; poison where nothing was written."""
        query, ours = self._tokens.query, self.ours
        lse = query.new_full(query.shape[:2], torch.nan)
        output = query.new_full((*query.shape[:2], self.case.value_size), torch.nan)
        steps = self._steps[rows]
        line = steps.new_full((len(steps), self.case.num_sets, LINE_WORDS, self.width), -9)
        lse = lse.float()
        strides = Strides(
            steps=steps,
            table=ours.table[rows],
            max_length=self.longest,
            max_slots=max(self.cache.slots),
            lse=lse,
            gathered=self.gathered(len(steps)),
            line=line,
            partial=partial,
        )
        StrideGather(self._layer)(strides)
        attention = StrideAttention(self._layer, self._sinks, split)
        attention(replace(self._tokens, output=output), strides)
        return output, lse, line

    def gathered(self, num_rows: int) -> torch.Tensor:
        """Poison for the rows that are gathered."""
        case, most = self.case, max(self.cache.slots)
        shape = num_rows, case.num_heads, most, case.row_size
        return self._tokens.key.new_full(shape, torch.nan)

    def partial(self, split: Split) -> Partial | None:
        """What parts leave each other: poison, and counters at 0."""
        if split == WHOLE:
            return None
        query = self._tokens.query
        shape = *query.shape[:2], split.splits
        output = torch.full((*shape, self.case.value_size), torch.nan, device=query.device)
        marks = torch.full((*shape, MARKS), torch.nan, device=query.device)
        arrived = torch.zeros(query.shape[0] * query.shape[1], dtype=torch.int32)
        return Partial(output, marks, arrived.to(query.device))

    def sums(self, lse: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Column sums, and how many of them a unit has."""
        case = self.case
        decays = (WEIGHT * DECAY ** torch.arange(self.longest, dtype=torch.float64)).float()
        heads, parts = num_sums(self.query, case.num_heads, case.unit, case.reduction)
        sums = lse.new_empty(len(self.steps), heads, self.width * parts)
        strides = Strides(
            steps=self._steps,
            table=self.ours.table,
            max_length=self.longest,
            max_slots=max(self.cache.slots),
            lse=lse,
            gathered=self.gathered(len(self.steps)),
            line=self._steps.new_empty(len(self.steps), case.num_sets, LINE_WORDS, self.width),
            decays=decays.to(lse.device),
            sums=sums,
            parts=parts,
        )
        StrideGather(self._layer)(strides)
        ColumnSums(self._layer, case.reduction)(self._tokens, strides)
        return sums, parts


def check_prefill(case: Case, device: torch.device | str) -> dict[str, float]:
    """``StrideAttention`` and ``ColumnSums``, and what the first leaves for ``StrideInsertion``."""
    batch = StrideBatch(case, device)
    return _compare(batch, *batch.attend())


def _compare(
    batch: StrideBatch, output: torch.Tensor, lse: torch.Tensor, line: torch.Tensor
) -> dict[str, float]:
    """What ``attend`` returned, and column sums with it, with one softmax over all keys."""
    case, cache, steps, ours = batch.case, batch.cache, batch.steps, batch.ours
    query, key, value, factors = batch.query, batch.key, batch.value, batch.factors
    sums, parts = batch.sums(lse)
    same("prefill attention writes no page", ours.pool, cache.pool)
    errors = {"output": 0.0, "lse": 0.0, "sums": 0.0}
    written = torch.zeros(len(query), dtype=torch.bool)
    for row in real_rows(case):
        step = steps[row].tolist()
        start, units = step[columns.START], step[columns.CACHED] // case.unit
        rows = slice(start, start + step[columns.LENGTH])
        written[rows] = True
        old_keys, old_values, *_ = gather_reference(
            kv=cache.decoded,
            **cache.views("rank", "born", "score"),
            blocks=cache.table[row],
            step=step,
            inv_freq=case.inv_freq,
            interleaved=case.interleaved,
            latent=case.latent,
        )
        expected, norm, probs = attend_strides_reference(
            query=query[rows],
            key=key[rows],
            value=value[rows],
            old_keys=old_keys,
            old_values=old_values,
            scale=case.head_size**-0.5,
            slopes=case.slopes,
            logit_scale=factors[rows],
            softcap=case.softcap,
            sinks=case.sink_logits,
        )
        mass = in_units(column_sums_reference(probs, DECAY, WEIGHT), case.unit // parts)
        if reduced(case.reduction, parts) == "mean":
            mass = mass.unflatten(0, (case.num_heads, -1)).sum(1)
        elif reduced(case.reduction, parts) == "max":
            mass = mass.unflatten(0, (case.num_heads, -1)).amax(1)
        slots, scores, tokens = chronological(cache, row, step)
        told = line[row, :, :, :units].cpu()
        same("line", told[:, 0], slots.int())
        same("scores of the line", told[:, 1].view(torch.float32), scores)
        same("tokens of the line", told[:, 2], tokens)
        for name, actual, wanted in (
            ("output", output[rows], expected),
            ("lse", lse[rows], norm),
            ("sums", sums[row, :, : mass.shape[1]], mass),
        ):
            errors[name] = max(errors[name], close(name, actual, wanted, TOLERANCE[case.dtype]))
    assert output[~written.to(output.device)].isnan().all(), "wrote rows of other requests"
    return errors


def check_split(case: Case, device: torch.device | str, split: Split) -> dict[str, float]:
    """``check_prefill`` in parts; and the same bytes again, and for each row alone.

    Parts leave nothing behind that the next launch on the same memory would see.
    """
    batch = StrideBatch(case, device)
    partial = batch.partial(split)
    assert partial is not None, split
    first = batch.attend(split, partial)
    errors = _compare(batch, *first)
    for _ in range(20 if first[0].is_cuda else 1):
        same("counters", partial.arrived, torch.zeros_like(partial.arrived, device="cpu"))
        again = batch.attend(split, partial)
        for name, one, other in zip(("output", "lse", "line"), first, again, strict=True):
            same(f"{name} again", bits(other), bits(one).cpu())
    for row in real_rows(case):
        start, length = batch.steps[row, [columns.START, columns.LENGTH]].tolist()
        tokens = slice(start, start + length)
        output, lse, line = batch.attend(split, partial, slice(row, row + 1))
        same("output alone", bits(output[tokens]), bits(first[0][tokens]).cpu())
        same("lse alone", bits(lse[tokens]), bits(first[1][tokens]).cpu())
        same("line alone", line[0], first[2][row].cpu())
    return errors


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: poison, which is not a number, equals itself."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)
