# SPDX-License-Identifier: Apache-2.0
"""Recall in one layer: selects units, copies them to free slots, and stores evicted units.

Attention treats recalled units as ordinary units with the ranks after the sinks. A unit keeps the
position at which its keys were rotated, so its rows are copied unchanged.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_cascade.attention.cpu.native_recall import NativeRecall
from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig, NewTokens
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.columns import NEW_SLOTS, OLD_SLOTS, START
from vllm_cascade.kernels.cpp.library import row_addresses
from vllm_cascade.recall.log import CHUNK_UNITS, Chunk, Part
from vllm_cascade.step.inputs import Singles, Stride
from vllm_cascade.step.recall import RecallStride


class _Line:
    """One request's units in one layer's pages, as numpy arrays.

    Attributes:
        rank: int32 ``[sets, units]``, a copy.
    """

    def __init__(self, pages: Pages, blocks: np.ndarray, slots: int) -> None:
        self._pages, self._blocks = pages, blocks
        self._per_page = pages.rank.shape[2]
        self.unit = pages.unit
        self.rank = self.read(pages.rank)[:, : slots // pages.unit]

    def read(self, words: torch.Tensor) -> np.ndarray:
        return words.numpy()[self._blocks].transpose(1, 0, 2).reshape(words.shape[1], -1)

    def write(self, words: torch.Tensor, head_set: int, places: np.ndarray, values: object) -> None:
        block = self._blocks[places // self._per_page]
        words.numpy()[block, head_set, places % self._per_page] = values

    def rows(
        self, heads: slice, places: np.ndarray
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Views of units' rows, ``[heads, unit, 2 D]``, and of their scales, if any."""
        views, scale = [], self._pages.scale
        for place in places.tolist():
            page, at = int(self._blocks[place // self._per_page]), place % self._per_page
            where = page, heads, slice(at * self.unit, (at + 1) * self.unit)
            views.append((self._pages.kv[where], None if scale is None else scale[where]))
        return views


class LayerRecall:
    """Selects, places and stores the units of one layer.

    Args:
        index: the layer's index in the logs.
        most_queries: queries of a stride that select units, at most.
        native: selects and moves units in C++; None does so in PyTorch, the reference.
        in_8_bits: whether the logs store rows in 8 bits (``UnitShape``).

    Attributes:
        judges_all: as in ``KVPolicyImpl``; only without ``native``.
    """

    judges_all = False

    def __init__(
        self,
        layer: LayerConfig,
        pages: Pages,
        index: int,
        most_queries: int,
        native: NativeRecall | None = None,
        in_8_bits: bool = False,
    ) -> None:
        self.layer, self._pages, self._index = layer, pages, index
        self._most_queries, self._native, self._in_8_bits = most_queries, native, in_8_bits
        self.exchanged = 0
        """Units copied back into pages so far."""

    def _heads(self, head_set: int) -> slice:
        return slice(None) if self.layer.num_sets == 1 else slice(head_set, head_set + 1)

    # --- before attention ---------------------------------------------------------------------

    def select_for_stride(self, stride: Stride, new: NewTokens) -> None:
        """Recall the units that the stride's queries select."""
        plan = stride.recall
        if plan is None or not plan.selects:
            return
        place = stride.kept.get("asking")
        if place is None:  # the same in all layers
            place = stride.start + evidence.asking(stride.num_tokens, self._most_queries)
            stride.kept["asking"] = place
        if self._native is not None:
            self.exchanged += self._native.select_for_stride(stride, place, row_addresses(new))
            return
        chosen = self._choose(plan, new, place, stride.pages)
        self._place_all(plan, chosen, stride.pages, stride.old_slots)

    def select_for_tokens(self, singles: Singles, new: NewTokens) -> None:
        """Recall the units that single tokens' queries select."""
        if self._native is not None:
            self.exchanged += self._native.select_for_tokens(singles, row_addresses(new))
            return
        for i, plan in enumerate(singles.recall):
            if plan is None or not plan.selects:
                continue
            step = singles.steps[i].tolist()
            chosen = self._choose(plan, new, np.asarray([step[START]]), singles.table[i])
            self._place_all(plan, chosen, singles.table[i], step[OLD_SLOTS])

    def _line(self, pages: torch.Tensor, slots: int) -> _Line:
        blocks = pages.numpy()[: -(-slots // self._pages.block_size)]
        return _Line(self._pages, blocks, slots)

    def _choose(
        self,
        plan: RecallStride,
        new: NewTokens,
        place: np.ndarray,
        pages: torch.Tensor,
    ) -> Sequence[np.ndarray]:
        """Select units for each head set, ascending int64; indices count from the first candidate.

        Args:
            place: int64 ``[queries]``, the selecting tokens' places in the step.
            pages: int32, the request's block numbers.
        """
        layer, units = self.layer, plan.candidates
        position = np.full(len(place), plan.middle * self._pages.unit)
        if plan.now == len(units):
            return [np.arange(plan.now)] * layer.num_sets
        queries = new.query[torch.from_numpy(place)]
        at = torch.from_numpy(position)[:, None].expand(-1, queries.shape[1])
        plain = evidence.unrotated(layer, queries, at) * layer.scale
        sinks = evidence.to_sinks(layer, queries, self.sink_keys(pages, plan.sinks))
        most = len(units) if self.judges_all else None
        return evidence.choose(layer, self._index, units, plain, sinks, plan.now, most)

    def sink_keys(self, pages: torch.Tensor, num: int) -> torch.Tensor:
        """Keys of the sinks ``[H, num * unit, D]``. They take the first places and never leave."""
        layer, unit = self.layer, self._pages.unit
        if num == 0:
            return torch.empty(layer.num_kv_heads, 0, layer.head_size)
        line = self._line(pages, num * unit)
        assert (line.rank == np.arange(num)).all(), "sinks are not in the first places"
        blocks = pages[: -(-num * unit // self._pages.block_size)].long()
        rows = self._pages.rows(blocks).transpose(0, 1).flatten(1, 2)
        return rows[:, : num * unit, : layer.head_size]

    def _place_all(
        self,
        plan: RecallStride,
        chosen: Sequence[np.ndarray],
        pages: torch.Tensor,
        slots: int,
    ) -> None:
        """Copy the chosen units into the pages, for head sets whose recalled units change.

        Args:
            pages: int32, the request's block numbers.
            slots: slots in use, or free among them.
        """
        line = None
        for head_set, units in enumerate(chosen):
            numbers = units + plan.candidates.begin
            token = self._first_tokens(plan.candidates, head_set, numbers)
            order = np.argsort(token)
            numbers, wanted = numbers[order], token[order]
            shown = plan.log.tokens[self._index, head_set].numpy()
            if plan.before == plan.now and np.array_equal(shown[: plan.now], wanted):
                continue
            line = self._line(pages, slots) if line is None else line
            self._place(plan, head_set, numbers, wanted, shown, line)

    def _first_tokens(self, units: Part, head_set: int, numbers: np.ndarray) -> np.ndarray:
        """int32: the stream index of each unit's first token."""
        chunks, at = numbers // CHUNK_UNITS, numbers % CHUNK_UNITS
        words = [
            units.chunks[chunk].token[self._index, head_set, place]
            for chunk, place in zip(chunks.tolist(), at.tolist(), strict=True)
        ]
        return np.asarray(words, dtype=np.int32)

    def _place(
        self,
        plan: RecallStride,
        head_set: int,
        numbers: np.ndarray,
        wanted: np.ndarray,
        shown: np.ndarray,
        line: _Line,
    ) -> None:
        """Replace one head set's recalled units, which have the ranks after the sinks.

        Args:
            numbers: the new units' numbers in the candidates' chunks.
            wanted: the new units' first tokens, ascending.
            shown: first tokens of the units recalled so far; updated in place.
        """
        had = shown[: plan.before].copy()
        rank, sinks = line.rank[head_set], plan.sinks
        place_of = np.empty(plan.before, dtype=np.int64)
        is_had = (rank >= sinks) & (rank < sinks + plan.before)
        assert is_had.sum() == plan.before, "recalled units are missing"
        place_of[rank[is_had] - sinks] = np.flatnonzero(is_had)
        rank[rank >= sinks + plan.before] += plan.now - plan.before
        at = np.minimum(np.searchsorted(wanted, had), plan.now - 1)
        stays = wanted[at] == had
        rank[place_of] = np.where(stays, sinks + at, -1)
        comes = np.flatnonzero(~np.isin(wanted, had[stays]))
        places = np.flatnonzero(rank < 0)[: len(comes)]
        assert len(places) == len(comes), "no room for recalled units"
        rank[places] = sinks + comes
        line.write(self._pages.rank, head_set, np.arange(len(rank)), rank)
        shown[: plan.now] = wanted
        self._fill(plan.candidates, head_set, numbers[comes], places, line)
        self.exchanged += len(comes)

    def _fill(
        self, units: Part, head_set: int, numbers: np.ndarray, places: np.ndarray, line: _Line
    ) -> None:
        """Copy units from the log into free slots."""
        pages, heads = self._pages, self._heads(head_set)
        for i, (rows, scale) in enumerate(line.rows(heads, places)):
            number = int(numbers[i])
            chunk, at = units.chunks[number // CHUNK_UNITS], number % CHUNK_UNITS
            if self._in_8_bits:
                rows.copy_(self._decoded(chunk, head_set, at))
            else:
                rows.copy_(chunk.rows[self._index, heads, at])
            if scale is not None:
                scale.copy_(chunk.row_scale[self._index, heads, at])
            for name in ("born", "token"):
                word = getattr(chunk, name)[self._index, head_set, at].item()
                line.write(getattr(pages, name), head_set, places[i : i + 1], word)
        line.write(pages.score, head_set, places, 0.0)

    def _decoded(self, chunk: Chunk, head_set: int, at: int) -> torch.Tensor:
        """Rows of a unit that is stored in 8 bits, fp32 ``[H, unit, 2 D]``."""
        index, heads = self._index, self._heads(head_set)
        keys = evidence.by_keys(chunk.codes[index, heads, at]).float()
        keys *= chunk.scale[index, heads, at].unsqueeze(-1)
        position = chunk.born[index, head_set, at] + torch.arange(self._pages.unit)
        keys = evidence.rotated(self.layer, keys, position)
        values = chunk.rows[index, heads, at].float() * chunk.row_scale[index, heads, at]
        return torch.cat([keys, values], dim=-1)

    def room(self, part: Part) -> Evicted:
        """Allocate memory for the units that a stride evicts."""
        return Evicted.room(self.layer, self._pages, len(part))

    # --- after attention ----------------------------------------------------------------------

    def ranks_before(self, singles: Singles) -> list[np.ndarray | None]:
        """Each request's ranks before attention; None if its token evicts nothing, or the library
        keeps them."""
        if self._native is not None:
            self._native.note_ranks(singles)
            return []
        return [
            None
            if plan is None or not len(plan.stored)
            else self._line(singles.table[i], int(singles.steps[i, OLD_SLOTS])).rank
            for i, plan in enumerate(singles.recall)
        ]

    def store_of_tokens(self, singles: Singles, before: list[np.ndarray | None]) -> None:
        """Store the units that single tokens evicted; their freed slots still hold the rows."""
        assert self._pages.token is not None, "recall keeps units' indices"
        if self._native is not None:
            self._native.store_of_tokens(singles)
            return
        for i, old in enumerate(before):
            if old is None:
                continue
            plan = singles.recall[i]
            assert plan is not None
            line = self._line(singles.table[i], int(singles.steps[i, NEW_SLOTS]))
            gone = self.room(plan.stored)
            born, token = line.read(self._pages.born), line.read(self._pages.token)
            for head_set, was in enumerate(old):
                places = np.flatnonzero((was >= 0) & (line.rank[head_set][: len(was)] < 0))
                places = places[np.argsort(was[places])]
                assert len(places) == len(plan.stored), (len(places), len(plan.stored))
                gone.born[head_set] = torch.from_numpy(born[head_set][places])
                gone.token[head_set] = torch.from_numpy(token[head_set][places])
                heads = self._heads(head_set)
                for n, (rows, scale) in enumerate(line.rows(heads, places)):
                    gone.rows[heads, n] = rows
                    if gone.scale is not None and scale is not None:
                        gone.scale[heads, n] = scale
            self.store(plan, gone)

    def store(self, plan: RecallStride, gone: Evicted) -> None:
        """Write evicted units and their 8-bit keys to a log's memory."""
        if self._native is not None:
            self._native.store(plan, gone)
            return
        layer, index = self.layer, self._index
        unit = self._pages.unit
        sets = torch.arange(layer.num_kv_heads) if layer.num_sets > 1 else [0] * layer.num_kv_heads
        position = gone.born[sets].unsqueeze(-1) + torch.arange(unit)
        rows = self._pages.read(gone.rows, gone.scale)
        keys = evidence.unrotated(layer, rows[..., : layer.head_size], position)
        codes, scale = evidence.encode(keys)
        stored, stored_scale = gone.rows, gone.scale
        if self._in_8_bits:
            stored, of_row = evidence.encode(rows[..., layer.head_size :].float())
            stored_scale = of_row.unsqueeze(-1)
        for chunk, to, place in plan.stored.pieces():
            chunk.rows[index, :, to] = stored[:, place]
            if stored_scale is not None:
                chunk.row_scale[index, :, to] = stored_scale[:, place]
            evidence.write_keys(chunk, index, to, codes[:, place], scale[:, place])
            chunk.born[index, :, to] = gone.born[:, place]
            chunk.token[index, :, to] = gone.token[:, place]
