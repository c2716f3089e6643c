# SPDX-License-Identifier: Apache-2.0
"""Merges deleted tokens into kept ones by clustering the KV cache.

The paper's sketch (DGC, Algorithms 3 and 4) clusters the features of the last layer and attends to
means of *embeddings*. A KV cache has only keys and values, so this differs:

- A cluster is a slot. Its centre is the running mean of its members' values and unrotated keys.
- The score field counts the members of a cluster. The mean weighs at most so many that a member may
  still change it (``most_members``), so in 16 bits it follows a cluster's recent members.
- The number of centres is fixed. They start as the first tokens in their slots, not by k-means++.
- A stride's tokens are assigned to the centres as of the stride's start. Scores are frozen during a
  stride in the same way.

Shapes: as in ``strides.py``; ``C`` centres, ``M`` tokens to merge.
"""

import torch

from vllm_cascade.attention.layer import LayerConfig
from vllm_cascade.cache.layout import Pages
from vllm_cascade.models.rotary import rotate
from vllm_cascade.step.inputs import Stride


def most_members(dtype: torch.dtype) -> float:
    """Members that a mean counts at most: 64 in bfloat16, 512 in float16.

    With more, a member as far from the mean as the mean from 0 would change it by less than the
    type's precision. The mean would be rounded to what it was, and would never change again.
    """
    return 0.5 / torch.finfo(dtype).eps


def merge_deleted(
    layer: LayerConfig,
    pages: Pages,
    stride: Stride,
    order: torch.Tensor,
    keep: torch.Tensor,
    scores: torch.Tensor,
    new_kv: torch.Tensor,
) -> torch.Tensor:
    """Merge every token that ``keep`` deletes into its nearest centre.

    Args:
        order: int64 ``[S, n]``, slots in chronological order of their tokens.
        keep: bool ``[S, n + T]``; all head sets delete the same ranks.
        scores: fp32 ``[S, n + T]``, tokens merged into each centre; updated in place.
        new_kv: ``[T, H, row_size]``, the stride's rows.

    Returns:
        ``new_kv``, updated where a token of this stride is a centre.
    """
    assert pages.quantised is None, "means would be rounded again and again"
    deleted = (~keep[0]).nonzero().squeeze(1)
    if len(deleted) == 0:
        return new_kv
    centres = stride.schedule.units.merge_into
    assert centres is not None, "the policy merges"
    lo, hi = centres
    stored = pages.kv[stride.blocks].transpose(0, 1).flatten(1, 2)  # [H, N, row_size]
    slots = order.expand(layer.num_kv_heads, -1)
    old = stored.gather(1, slots.unsqueeze(-1).expand(-1, -1, stored.shape[-1]))
    kv = torch.cat([old.float(), new_kv.float().transpose(0, 1)], dim=1)  # [H, n + T, row_size]
    turn = _turns(layer, pages, stride, order)
    plain = _rotated(layer, kv, turn)
    nearest = _nearest(layer, plain[:, lo:hi], plain[:, deleted])  # [S, M]
    members = torch.zeros(layer.num_sets, hi - lo).scatter_add_(
        1, nearest, torch.ones(nearest.shape)
    )
    weight = (1 + scores[:, lo:hi]).clamp(max=most_members(pages.kv.dtype))
    sums = plain[:, lo:hi] * weight.unsqueeze(-1)
    index = nearest.expand(layer.num_kv_heads, -1).unsqueeze(-1).expand(-1, -1, kv.shape[-1])
    sums = sums.scatter_add(1, index, plain[:, deleted])
    scores[:, lo:hi] += members
    mean = sums / (weight + members).unsqueeze(-1)
    if turn is not None:
        back = turn[:, lo:hi] * torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
        mean = _rotated(layer, mean, back)
    merged = torch.where((members > 0).unsqueeze(-1), mean, kv[:, lo:hi])
    return _write_centres(layer, pages, stride, slots[:, lo:hi], merged, new_kv)


def _turns(
    layer: LayerConfig, pages: Pages, stride: Stride, order: torch.Tensor
) -> torch.Tensor | None:
    """cos and sin that undo each key's rotation, ``[S, n + T, 2, d]``; None without rotation."""
    if layer.rotation is None:
        return None
    born = pages.born[stride.blocks].transpose(0, 1).flatten(1).gather(1, order).long()
    own = stride.cached + torch.arange(stride.num_tokens)
    return layer.rotation[torch.cat([born, own.expand(len(born), -1)], dim=1)]


def _rotated(layer: LayerConfig, rows: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
    """Rotate the keys of rows; a key's rotary channels are a row's first ones."""
    return rows if turn is None else rotate(rows, turn, layer.is_neox)


def _nearest(layer: LayerConfig, centres: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Centre with the highest key cosine for each token, over a set's heads: int64 ``[S, M]``."""

    def features(rows: torch.Tensor) -> torch.Tensor:
        keys = rows[..., : layer.head_size]
        if layer.num_sets == 1:
            keys = keys.transpose(0, 1).flatten(1).unsqueeze(0)
        return torch.nn.functional.normalize(keys, dim=-1)

    similarity = features(tokens) @ features(centres).transpose(1, 2)  # [S, M, C]
    best = similarity == similarity.amax(-1, keepdim=True)
    return best.int().argmax(-1)


def _write_centres(
    layer: LayerConfig,
    pages: Pages,
    stride: Stride,
    slots: torch.Tensor,
    merged: torch.Tensor,
    new_kv: torch.Tensor,
) -> torch.Tensor:
    """Write cached centres to their slots, and the other centres to ``new_kv``."""
    num_old = slots.shape[1]
    block, offset = stride.blocks[slots // pages.block_size], slots % pages.block_size
    head = torch.arange(layer.num_kv_heads).unsqueeze(1)
    pages.kv[block, head, offset] = merged[:, :num_old].to(pages.kv.dtype)
    if num_old == merged.shape[1]:
        return new_kv
    new_kv = new_kv.clone()
    centres = stride.schedule.units.merge_into
    assert centres is not None, "the policy merges"
    first = centres[0] + num_old - stride.cached
    own = merged[:, num_old:].transpose(0, 1).to(new_kv.dtype)
    new_kv[first : first + len(own)] = own
    return new_kv
