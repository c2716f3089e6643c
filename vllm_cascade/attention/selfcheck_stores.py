# SPDX-License-Identifier: Apache-2.0
"""Evicted units in a device's store, read and written for its comparison with another device's.

``LogUnits`` are those of the CPU's logs, ``RingUnits`` those of rings. Both stores hold one layer.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_cascade.attention.cpu.builder import CPUMetadata
from vllm_cascade.attention.cpu.recall import LayerRecall
from vllm_cascade.attention.torch import recall as evidence
from vllm_cascade.kernels.columns import BEGIN, END, HOW, JUDGED, RING
from vllm_cascade.policies.random import BITS, drawn
from vllm_cascade.recall.log import Log, Part
from vllm_cascade.recall.rings import Rings
from vllm_cascade.recall.stores import Stores, UnitStores
from vllm_cascade.step.recall import RecallStride
from vllm_cascade.step.requests import Requests

if TYPE_CHECKING:
    from vllm_cascade.attention.cuda.recall import LayerRings


class Named(Requests):
    """Rows of two requests that never change. Host scores are drawn, as there is no text."""

    NAMES = ("a", "b")

    def __init__(self) -> None:
        self.is_known = True

    def names(self, common: CommonAttentionMetadata) -> list[str | None]:
        return list(self.NAMES[: common.num_reqs]) if self.is_known else []

    def token_scores(
        self, common: CommonAttentionMetadata, row: int, begin: int, end: int, lag: int
    ) -> np.ndarray:
        # 16 bits, so that a unit's sum is exact in fp32 in every order.
        return drawn(0, begin - lag, end - lag) // (1 << BITS - 16)


class Units(NamedTuple):
    """Consecutive units: rows as in the pages, codes ``[H, n, unit, D]``, and their words.

    ``row_scale`` is None if rows have no scales of their own.
    """

    rows: torch.Tensor
    row_scale: torch.Tensor | None
    codes: torch.Tensor
    scale: torch.Tensor
    born: torch.Tensor
    token: torch.Tensor


class LogUnits:
    """Units of two requests in logs."""

    def __init__(self, stores: Stores, first_pages: Sequence[int]) -> None:
        self._stores, self._pages = stores, first_pages

    def span(self, request: int) -> tuple[int, int]:
        """Numbers of the request's first unit, and of the next one."""
        log = self._stores.logs[self._pages[request]]
        return log.begin, log.end

    def request_of(self, log: Log) -> int:
        return next(i for i, page in enumerate(self._pages) if self._stores.logs[page] is log)

    def _part(self, request: int, begin: int, end: int) -> Part:
        return self._stores.logs[self._pages[request]].part(begin, end)

    def read(self, request: int, begin: int, end: int) -> Units:
        pieces = [
            (
                chunk.rows[0, :, which],
                chunk.row_scale[0, :, which],
                evidence.by_keys(chunk.codes[0, :, which]),
                *(x[0, :, which] for x in (chunk.scale, chunk.born, chunk.token)),
            )
            for chunk, which, _ in self._part(request, begin, end).pieces()
        ]
        units = Units(*(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)))
        return units if self._stores.shape.row_scales else units._replace(row_scale=None)

    def write(self, request: int, begin: int, units: Units) -> None:
        part = self._part(request, begin, begin + units.born.shape[1])
        for chunk, to, place in part.pieces():
            chunk.rows[0, :, to] = units.rows[:, place]
            if units.row_scale is not None:
                chunk.row_scale[0, :, to] = units.row_scale[:, place]
            evidence.write_keys(chunk, 0, to, units.codes[:, place], units.scale[:, place])
            chunk.born[0, :, to], chunk.token[0, :, to] = (
                units.born[:, place],
                units.token[:, place],
            )

    def tensors(self) -> list[torch.Tensor]:
        """All that a step may change."""
        logs = [self._stores.logs[page] for page in self._pages]
        chunks = [chunk for log in logs for chunk in log.chunks]
        return [x for chunk in chunks for x in chunk.tensors] + [log.tokens for log in logs]

    def note(self) -> None:
        """Nothing: the CPU's judge keeps no evidence."""

    def evidence(self) -> dict[int, torch.Tensor]:
        """No evidence, see ``note``."""
        return {}


class RingUnits:
    """Units of two requests in rings."""

    def __init__(self, rings: Rings, recall: "LayerRings") -> None:
        self._rings, self._recall = rings, recall

    def _all(self) -> list[torch.Tensor | None]:
        rings = self._rings
        if rings.device.type == "cuda":  # kernels access the host's memory
            torch.cuda.synchronize()
        return [
            rings.rows, rings.row_scales, rings.codes, rings.scales, rings.born, rings.token,
        ]  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        """All that a planned step may change, and what it may read."""
        rings, most = self._rings, self._rings.shape.most_units
        used = [
            slice(number * most, number * most + min(int(rings.end[number]), most))
            for number in rings.rings.values()
        ]
        return [x[0][:, places] for x in self._all() if x is not None for places in used]

    def _places(self, request: int, begin: int, end: int) -> torch.Tensor:
        most = self._rings.shape.most_units
        first = self._rings.rings[Named.NAMES[request]] * most
        return first + torch.arange(begin, end) % most

    def read(self, request: int, begin: int, end: int) -> Units:
        places = self._places(request, begin, end)
        parts: list[Any] = [
            None if x is None else x[0][:, places.to(x.device)].cpu() for x in self._all()
        ]
        return Units(*parts)

    def write(self, request: int, begin: int, units: Units) -> None:
        places = self._places(request, begin, begin + units.born.shape[1])
        for x, now in zip(self._all(), units, strict=True):
            if x is not None and now is not None:
                x[0][:, places.to(x.device)] = now.to(x.device)

    def note(self) -> None:
        """Let the kernels' evidence be kept from now on."""
        self._recall.judged = []

    def evidence(self) -> dict[int, torch.Tensor]:
        """What the kernels wrote since ``note`` for the first stride of each request that they
        judged, fp32 ``[S, n]``."""
        noted, self._recall.judged = self._recall.judged or [], None
        found: dict[int, torch.Tensor] = {}
        names = {number: name for name, number in self._rings.rings.items()}
        for rows, worth in noted:
            for row, columns in enumerate(rows.recall.tolist()):
                if columns[HOW] == JUDGED:
                    name = names[columns[RING] // self._rings.shape.most_units]
                    judged = worth[row, :, : columns[END] - columns[BEGIN]]
                    found.setdefault(Named.NAMES.index(name), judged.cpu())
        return found


def opened(stores: UnitStores, first_pages: Sequence[int], recall: Any) -> LogUnits | RingUnits:
    """Let two requests begin.

    Args:
        recall: the layer's part of the store, of the device's own class.
    """
    new = [
        SimpleNamespace(req_id=name, block_ids=([page],), num_computed_tokens=0)
        for name, page in zip(Named.NAMES, first_pages, strict=True)
    ]
    none: Any = SimpleNamespace(
        req_ids=[], resumed_req_ids=(), new_block_ids=[], num_computed_tokens=[]
    )
    output: Any = SimpleNamespace(
        finished_req_ids=(),
        preempted_req_ids=(),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=none,
        kv_cache_block_copies=(),
    )
    stores.note(output)
    if isinstance(stores, Rings):
        return RingUnits(stores, recall)
    assert isinstance(stores, Stores)
    return LogUnits(stores, first_pages)


class Selection(NamedTuple):
    """What a request selects from.

    Attributes:
        now: units that are selected.
        evidence: of all units, fp32 ``[S, n]``.
        worth: the evidence, of which a part is handed on to the next unit.
    """

    now: int
    evidence: torch.Tensor
    worth: torch.Tensor


def judged(
    units: LogUnits,
    recall: LayerRecall,
    metadata: CPUMetadata,
    query: torch.Tensor,
    most_queries: int,
) -> dict[int, Selection]:
    """What each request of a step selects from; those that take all units or none are left out.

    Args:
        metadata: of a step in which only the first stride of a request may select; before it runs.
        query: ``[num_tokens, H * G, D]``, rotated.
        most_queries: of a stride, that select.
    """
    wave, layer, found = metadata.waves[0], recall.layer, {}
    asking: list[tuple[RecallStride | None, torch.Tensor, torch.Tensor]] = [
        (stride.recall, stride.pages, stride.start + torch.from_numpy(
            evidence.asking(stride.num_tokens, most_queries)
        ))
        for stride in wave.strides
    ]  # fmt: skip
    if (singles := wave.singles) is not None:
        asking += zip(singles.recall, singles.table, singles.places.unsqueeze(1), strict=True)
    for plan, pages, tokens in asking:
        if plan is None or not plan.selects or plan.now == len(plan.candidates):
            continue
        at = torch.full((len(tokens), query.shape[1]), plan.middle * plan.log.shape.unit)
        plain = evidence.unrotated(layer, query[tokens], at) * layer.scale
        sinks = evidence.to_sinks(layer, query[tokens], recall.sink_keys(pages, plan.sinks))
        asked = evidence.asked(layer, 0, plan.candidates, plain, sinks)
        over_heads = evidence.over_heads(layer, asked)
        worth = evidence.with_next(0, plan.candidates, over_heads.numpy())
        found[units.request_of(plan.log)] = Selection(plan.now, over_heads, torch.from_numpy(worth))
    return found


def closest(selections: Iterable[Selection]) -> float:
    """Least difference, relative, between the last unit that is selected and the next one.

    Rounding may decide between units that are closer. Infinite where nothing is selected.
    """
    least = float("inf")
    for now, _, worth in selections:
        order = worth.sort(dim=-1, descending=True).values
        last, following = order[:, now - 1], order[:, now]
        least = min(least, float(((last - following) / last).min()))
    return least
