# SPDX-License-Identifier: Apache-2.0
"""``ChunkAttention`` against a list of tokens a request, stride by stride, in fp64."""

import random
from dataclasses import dataclass, replace

import torch

from tests.kernels.random_pool import (
    TOLERANCE,
    Cache,
    Case,
    chronological,
    close,
    make_cache,
    members,
    new_tokens,
    on,
    real_rows,
    rows_of,
    same,
    table_of,
)
from tests.kernels.references import attend_strides_reference, rotate_reference
from tests.kernels.stride_checks import insert_literally
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.rotation_table import decode_dtype
from vllm_cascade.kernels.triton import stride_columns
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.chunk import ChunkAttention
from vllm_cascade.kernels.triton.strides import Chunks, Tokens

SINKS = 2
"""Units that are never deleted."""


@dataclass
class Line:
    """A request's cached tokens, oldest first.

    Attributes:
        kv: ``[n, H, 2 * D]`` as written.
        born: ``[n, H]``, the positions that keys were rotated to.
        unit: ``[n]``, their units: of the cached ones, then the chunk's.
        seen: units so far.
    """

    kv: torch.Tensor
    born: torch.Tensor
    unit: torch.Tensor
    seen: int

    def at_ranks(self, case: Case, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated to where they stand, and values: fp64 ``[H, n, D]``."""
        size, rank = case.head_size, torch.arange(len(self.kv))[:, None]
        away = self.born - rank - shift
        keys = rotate_reference(self.kv[..., :size], away, case.inv_freq, case.interleaved)
        return keys.transpose(0, 1), self.kv[..., -case.value_size :].double().transpose(0, 1)

    def append(self, kv: torch.Tensor, first_position: int, unit: int) -> None:
        """New tokens, the first of which opens a unit."""
        born = first_position + torch.arange(len(kv))
        self.kv = torch.cat([self.kv, kv])
        self.born = torch.cat([self.born, born[:, None].expand(-1, kv.shape[1])])
        self.unit = torch.cat([self.unit, self.seen + torch.arange(len(kv)) // unit])
        self.seen += -(-len(kv) // unit)

    def delete(self, num_units: int, unit: int) -> None:
        """The oldest units behind the sinks."""
        first, last = SINKS * unit, (SINKS + num_units) * unit
        for name in ("kv", "born", "unit"):
            held = getattr(self, name)
            setattr(self, name, torch.cat([held[:first], held[last:]]))


def _line(cache: Cache, row: int, step: list[int]) -> Line:
    """What a request has cached before the chunk."""
    case, blocks = cache.case, cache.table[row].long()
    order = chronological(cache, row, step)[0]
    slots = members(order, case.unit)
    heads = slots.expand(case.num_heads, -1)
    block, offset = blocks[heads // case.block_size], heads % case.block_size
    kv = cache.decoded[block, torch.arange(case.num_heads)[:, None], offset].transpose(0, 1)
    births = cache.words("born", row).gather(1, order)[..., None] + torch.arange(case.unit)
    born = births.flatten(1).expand(case.num_heads, -1).T
    return Line(kv, born, torch.arange(len(kv)) // case.unit, order.shape[1])


def check_chunks(case: Case, device: torch.device | str, num_strides: int = 4) -> dict[str, float]:
    """``ChunkAttention``: outputs of every stride, and the whole pool afterwards."""
    room = num_strides * max(case.strides) + num_strides * case.unit
    cache, steps = make_cache(replace(case, strides=(room,)))
    rng, unit, place = random.Random(case.seed), case.unit, 3
    rows, drops, shifts = [], {}, {}
    chunks = torch.zeros_like(steps)
    chunks[:, columns.STREAM] = -1
    for row in real_rows(case):
        step = chunks[row] = steps[row]
        cached = int(step[columns.CACHED])
        if cached < SINKS * unit:
            step[columns.STREAM] = cached
        chunks[row], begin, drops[row] = step, place, []
        shifts[row] = [case.shifts[row]]
        stream = int(step[columns.STREAM])
        for number in range(num_strides):
            length = case.strides[(row + number) % len(case.strides)]
            if number < num_strides - 1:  # the next one begins with a unit
                length = -(-length // unit) * unit
            own = steps[row].clone()
            own[columns.STREAM], own[columns.CACHED] = stream, cached
            own[columns.START], own[columns.LENGTH] = place, length
            own[stride_columns.CHUNK] = row
            rows.append(own)
            spare = (cached + length) // unit - SINKS
            drops[row].append(rng.randrange(spare + 1) if spare > 0 else 0)
            # Other layers drop as many tokens, or more: what is never deleted moves back, too.
            more = rng.randrange(2 * length) if case.window else 0
            shifts[row].append(shifts[row][-1] - more)
            cached += length - drops[row][-1] * unit
            stream, place = stream + length, place + length
        chunks[row, columns.START], chunks[row, columns.LENGTH] = begin, place - begin
        most = max(cache.slots[row], -(-cached // unit) * unit)
        chunks[row, columns.NEW_SLOTS] = most
        chunks[row, stride_columns.SINKS] = SINKS * unit
        chunks[row, stride_columns.LEFT] = cached
        place += 2
    strides = torch.stack(rows) if rows else steps[:0]
    query, key, value = new_tokens(case, place)
    factors = torch.rand(place) + 0.5 if case.logit_scale else torch.ones(place)
    positions = torch.full((place,), 999999)
    strides_shifts = {row: iter(those) for row, those in shifts.items()}
    for own in strides.tolist():
        first, length = own[columns.START], own[columns.LENGTH]
        at = own[columns.CACHED] + next(strides_shifts[own[stride_columns.CHUNK]])
        positions[first : first + length] = at + torch.arange(length)
    # Strides may drop all that is cached, which moves the other tokens by as much.
    longest = max(int(chunks[row, columns.CACHED]) for row in real_rows(case)) if rows else 0
    ours = cache.to(device)
    far = replace(case, max_distance=case.max_distance + 3 * place + 600 + longest)
    dq, dk, dv, dsteps, dchunks = on(device, query, key, value, strides, chunks)
    dpositions, slopes, sinks = on(device, positions, case.slopes, case.sink_logits)
    (dfactors,) = on(device, factors if case.logit_scale else None)
    output = dq.new_full((*dq.shape[:2], case.value_size), torch.nan)
    finished = dsteps.new_zeros(len(chunks), case.num_sets)
    most = int(strides[:, columns.CACHED].max()) if rows else 0
    gathered = dq.new_full((2, case.num_heads, most, case.row_size), torch.nan)
    layer = CachedLayer(
        **ours.views(),
        rotation=table_of(far, device, decode_dtype(case.dtype)),
        interleaved=case.interleaved,
        slopes=slopes,
        scale=case.head_size**-0.5,
        softcap=case.softcap,
        latent=case.latent,
        stored=ours.codes,
        num_queries=dq.shape[1],
        dtype=dq.dtype,
    )
    launch = ChunkAttention(layer, table_of(far, device), sinks, case.window, case.chunked)
    told = Chunks(
        dsteps,
        dchunks,
        ours.table,
        dpositions,
        finished,
        max_length=max(case.strides) + unit,
        max_slots=max(cache.slots),
        max_cached=most,
    )
    launch(Tokens(dq, dk, dv, output, dfactors), told, told.parts(gathered))
    same("counters", finished, torch.zeros_like(finished, device="cpu"))
    after, error = ours.to("cpu"), 0.0
    for row in real_rows(case):
        first = chunks[row].tolist()
        line, old_units = _line(cache, row, first), first[columns.CACHED] // unit
        own = [step for step in strides.tolist() if step[stride_columns.CHUNK] == row]
        moves = zip(own, drops[row], shifts[row][:-1], strict=True)
        for step, gone, shift in moves:
            part = slice(step[columns.START], step[columns.START] + step[columns.LENGTH])
            old_keys, old_values = line.at_ranks(case, shift)
            expected, _, _ = attend_strides_reference(
                query=query[part],
                key=key[part],
                value=value[part],
                old_keys=old_keys,
                old_values=old_values,
                scale=case.head_size**-0.5,
                slopes=case.slopes,
                logit_scale=factors[part],
                softcap=case.softcap,
                sinks=case.sink_logits,
                window=case.window,
                chunked=case.chunked,
            )
            error = max(error, close("output", output[part], expected, TOLERANCE[case.dtype]))
            new = rows_of(case, key[part], value[part])
            line.append(case.read(new), step[columns.CACHED] + shift, unit)
            line.delete(gone, unit)
        whole = slice(first[columns.START], first[columns.START] + first[columns.LENGTH])
        new = rows_of(case, key[whole], value[whole])
        kept, born = line.unit[::unit].tolist(), line.born[::unit, 0].tolist()
        scores = torch.zeros(old_units + -(-len(new) // unit))
        for head_set in range(case.num_sets):
            scores[:old_units] = chronological(cache, row, first)[1][head_set]
            insert_literally(cache, after, row, head_set, first, kept, new, scores, born)
    same("pool", after.pool, cache.pool)
    return {"output": error}
