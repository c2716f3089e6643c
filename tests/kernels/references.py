# SPDX-License-Identifier: Apache-2.0
"""References of the kernels: one request at a time, in fp64 PyTorch or literal lists."""

import torch

from tests.policies.literal import Numbers, insert
from vllm_cascade.kernels.columns import CACHED, OLD_SLOTS, STEP_COLUMNS
from vllm_cascade.kernels.triton.schedule import TABLE_COLUMNS


def rotate_reference(
    x: torch.Tensor, distance: torch.Tensor, inv_freq: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """fp64 ``[..., D]`` rotated back by ``distance [...]``; channels past the rotary ones pass."""
    x = x.double().clone()
    if inv_freq is None:
        return x
    half = inv_freq.numel()
    angle = -distance.double()[..., None] * inv_freq.double()
    turn = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = torch.complex(x[..., first], x[..., second]) * turn
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def gather_reference(
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    blocks: torch.Tensor,
    step: list[int],
    inv_freq: torch.Tensor | None,
    interleaved: bool,
    shift: int = 0,
    latent: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request: fp64 keys and values ``[H, n, D]``, its units' scores and places ``[S, u]``.

    ``shift``: by how much positions are beyond ranks. ``latent``: channels of a latent row's value,
    which is the end of its key.
    """
    cached, old_slots, unit = (
        step[CACHED],
        step[OLD_SLOTS],
        kv.shape[2] // rank.shape[2],
    )
    num_heads, count = kv.shape[1], -(-cached // unit)
    head_size = kv.shape[3] // 2 if latent is None else kv.shape[3]
    ranks = rank[blocks.long()].transpose(0, 1).flatten(1)[:, : old_slots // unit]
    units = ranks.masked_fill(ranks < 0, 2**31 - 1).argsort(dim=1)[:, :count]
    assert (ranks.gather(1, units) == torch.arange(count)).all(), "not a cache of this many tokens"
    slots = (units[..., None] * unit + torch.arange(unit)).flatten(1)[:, :cached]
    rows = kv[blocks.long()].transpose(0, 1).flatten(1, 2)  # [H, N, 2D]
    index = slots.expand(num_heads, -1)
    rows = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2])).double()
    births = born[blocks.long()].transpose(0, 1).flatten(1).gather(1, units)
    moved = (births - torch.arange(count) * unit - shift).repeat_interleave(unit, dim=1)
    distance = moved[:, :cached].expand(num_heads, -1)
    keys = rotate_reference(rows[..., :head_size], distance, inv_freq, interleaved)
    scores = score[blocks.long()].transpose(0, 1).flatten(1).gather(1, units)
    return keys, rows[..., -(latent or head_size) :], scores.double(), units


def attend_strides_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    *,
    scale: float,
    slopes: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    chunked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One stride in fp64, as one softmax over all keys.

    Args:
        query: ``[T, H * G, D]``; key, value: ``[T, H, D]``; old_keys, old_values: ``[H, n, D]``.
        logit_scale: ``[T]`` or None.
        sinks: ``[H * G]``, logits of nothing, or None.
        window: tokens that a query sees, its own included; None: all.
        chunked: whether it sees those of its own chunk of ``window`` tokens instead.

    Returns:
        output ``[T, H * G, D]``, lse ``[T, H * G]``, probabilities ``[H * G, T, n + T]``.
    """
    num_tokens, group = query.shape[0], query.shape[1] // key.shape[1]
    keys = torch.cat([old_keys.double(), key.double().transpose(0, 1)], 1)
    values = torch.cat([old_values.double(), value.double().transpose(0, 1)], 1)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = torch.einsum("thd,hnd->htn", query.double(), keys) * scale
    if logit_scale is not None:
        logits = logits * logit_scale.double()[:, None]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    cached = old_keys.shape[1]
    distance = torch.arange(cached + num_tokens) - (cached + torch.arange(num_tokens))[:, None]
    if slopes is not None:
        logits = logits + slopes.double()[:, None, None] * distance
    logits = logits.masked_fill(distance > 0, -torch.inf)
    if chunked and window is not None:
        chunk = torch.arange(cached + num_tokens) // window
        logits = logits.masked_fill(chunk != chunk[cached:, None], -torch.inf)
    elif window is not None:
        logits = logits.masked_fill(distance <= -window, -torch.inf)
    if sinks is not None:
        nothing = sinks.double()[:, None, None].expand(-1, num_tokens, 1)
        logits = torch.cat([logits, nothing], -1)
    probs = logits.softmax(-1)[..., : keys.shape[1]]
    output = torch.einsum("htn,hnd->thd", probs, values)
    return output, logits.logsumexp(-1).transpose(0, 1), probs


def in_units(mass: torch.Tensor, unit: int) -> torch.Tensor:
    """``[..., n]`` of tokens, from the first of a unit on, to ``[..., ceil(n / unit)]`` sums."""
    padded_mass = torch.nn.functional.pad(mass, (0, -mass.shape[-1] % unit))
    return padded_mass.unflatten(-1, (-1, unit)).sum(-1)


def reduce_reference(mass: torch.Tensor, num_sets: int, reduction: str) -> torch.Tensor:
    """``[Hq, n]`` masses to ``[S, n]``."""
    mass = mass.unflatten(0, (num_sets, -1))
    if reduction == "mean":
        return mass.mean(1)
    return mass.amax(1) if reduction == "max" else mass.median(1).values


def update_reference(
    probs: torch.Tensor, old: torch.Tensor, decay: float, weight: float, reduction: str
) -> torch.Tensor:
    """One request in fp64: probabilities ``[Hq, n + 1]``, scores ``[S, n]`` to ``[S, n + 1]``.

    Chronological, the new token's last. Of units, one that the token joins is the last.
    """
    mass = reduce_reference(probs, old.shape[0], reduction) * weight
    mass[:, : old.shape[1]] += decay * old.double()
    return mass


def column_sums_reference(probs: torch.Tensor, decay: float, weight: float) -> torch.Tensor:
    """``[Hq, n + T]``: ``weight * sum_q decay ** (T - 1 - q) * probs[:, q]``."""
    power = torch.arange(probs.shape[1] - 1, -1, -1, dtype=torch.float64)
    return torch.einsum("htn,t->hn", probs.double(), weight * decay**power)


def salted(given: float, salt: int | None, unit: int) -> float:
    """A set's own score: a 32-bit hash (Wellons, "lowbias32") of the given one and its salt.

    As many of its bits, 24 at most, as leave a unit's sum at most 2**24.
    """
    if salt is None:
        return given
    x = int(given) ^ salt
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % (1 << 32)
    dropped = next(bits for bits in range(8, 32) if unit << (32 - bits) <= 1 << 24)
    return float((x ^ (x >> 16)) >> dropped)


def as_int32(numbers: list[int]) -> torch.Tensor:
    """Unsigned 32-bit numbers as int32 with the same bits."""
    return torch.tensor([n - (1 << 32) if n >> 31 else n for n in numbers], dtype=torch.int32)


def assign_reference(
    given: list[float], wanted: int, ranks: torch.Tensor, scores: torch.Tensor, unit: int = 1
) -> torch.Tensor:
    """One request: scores ``[S, N]`` by slot; ``wanted`` of ``ranks [S, N]`` gets ``given``."""
    own = torch.tensor(given)[:, None]
    there = own.expand_as(scores) if unit == 1 else scores + own
    return torch.where((ranks == wanted) & (ranks >= 0), there, scores)


def survivors_reference(
    cached: int, rules: list[list[int]], compared: torch.Tensor, newest_stays: bool
) -> list[list[int]]:
    """Ranks among ``cached + 1`` that stay, per head set, from literal lists.

    Args:
        rules: lo, hi, evicts and cell of each.
        compared: fp64 ``[S, cached + 1]``, what is compared, chronological.
    """
    own = [Numbers(*numbers) for numbers in rules if numbers[2]]
    return [insert(range(cached), [own], row, newest_stays) for row in compared.tolist()]


def schedule_reference(
    seq_lens: list[int],
    first_blocks: list[int],
    rows: list[list[int]],
    heads: list[list[int]],
    schedule_of: list[int],
    unit: int = 1,
) -> list[list[int]]:
    """The same, row by row; ``rows`` and ``heads`` are those of ``ScheduleTables``."""
    result = []
    for row, (length, block) in enumerate(zip(seq_lens, first_blocks, strict=True)):
        if length == 0 or block == 0:
            result.append([-1] + [0] * (STEP_COLUMNS - 1))
            continue
        first, transient, period, *scores, most = heads[schedule_of[row]]
        own = rows[first : first + transient + period]
        done, offset = divmod(length - 1, unit)
        *rules, _, peak = _at(own, transient, done)
        *_, left, _ = _at(own, transient, done)
        *_, cached, old_peak = _at(own, transient, done - 1)
        slots, old_slots = peak, old_peak
        if unit > 1:
            recalled = min(done - cached, most)
            soon = min(done + 1 - left, most) if offset == unit - 1 else recalled
            slots = (old_peak + soon + 1) * unit
            then = _at(own, transient, (length - 2) // unit - 1)[-1]
            old_slots = (then + recalled + 1) * unit if length > 1 else 0
            rules = rules if offset == unit - 1 else [0] * len(rules)
            cached += recalled
        cached = cached * unit + offset
        result.append([length - 1, cached, old_slots, slots, row, 1, *rules, *scores])
    return result


def _at(rows: list[list[int]], transient: int, t: int) -> list[int]:
    """The row of inserting unit ``t``; of zeros before the first."""
    if t < 0:
        return [0] * TABLE_COLUMNS
    period = len(rows) - transient
    return rows[t if t < transient else transient + (t - transient) % period]


def asking_reference(length: int, most: int) -> list[int]:
    """Indices of a stride's judging tokens: all, or evenly spaced with the last one."""
    return (
        list(range(length))
        if length <= most
        else [(i + 1) * length // most - 1 for i in range(most)]
    )


def evidence_reference(
    queries: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor, num_sets: int
) -> torch.Tensor:
    """One request's evidence in fp64, ``[S, n]``.

    Args:
        queries: ``[asking, H * G, D]``, rotated back by the position at which keys are judged,
            times the scale of logits.
        keys: ``[H, n, unit, D]`` before rotation, after rounding.
        sinks: ``[asking, H * G, sinks]``, logits of the sinks.
    """
    num_heads, num_units, unit, size = keys.shape
    queries, keys = queries.double(), keys.double()
    step = queries.abs().amax(-1, keepdim=True) / 127
    queries = torch.where(step > 0, (queries / step).round() * step, 0.0)
    asked = torch.zeros(queries.shape[1], num_units, dtype=torch.float64)
    for head in range(queries.shape[1]):
        rows = keys[head * num_heads // queries.shape[1]].reshape(-1, size)
        pairs = zip(queries[:, head], sinks[:, head].double(), strict=True)
        for nth, (query, others) in enumerate(pairs):
            both = torch.cat((rows @ query, others)).softmax(0)[: len(rows)]
            share = both.view(num_units, unit).sum(1)
            asked[head] += share.square() * (8 if nth == len(queries) - 1 else 1)
    return asked.view(num_sets, -1, num_units).amax(1)


def chosen_reference(evidence: list[float], tokens: list[int], unit: int, now: int) -> list[int]:
    """Places of the largest evidence; ties go to the first.

    Args:
        tokens: the units' first ones. If they follow those of the unit before, a unit has at least
            an eighth of that one's evidence.
    """
    worth = list(evidence)
    for place in range(1, len(worth)):
        if tokens[place] == tokens[place - 1] + unit:
            worth[place] = max(worth[place], evidence[place - 1] / 8)
    order = sorted(range(len(worth)), key=lambda place: (-worth[place], place))
    return sorted(order[:now])
