# SPDX-License-Identifier: Apache-2.0
"""One call of each of decode's launchers, for a layer that is described by the rest."""

from typing import Any

import torch

from vllm_cascade.kernels.triton.attend import DecodeAttention
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.drafts import Saved
from vllm_cascade.kernels.triton.insert import Insertion
from vllm_cascade.kernels.triton.merge import Merge, ScoredMerge
from vllm_cascade.kernels.triton.singles import Singles
from vllm_cascade.kernels.triton.strides import Tokens


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    logit_scale: torch.Tensor | None,
    splits: int,
    keep_logits: bool,
    positions: torch.Tensor | None = None,
    **layer: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One call of ``DecodeAttention`` for a ``CachedLayer`` that is described by the rest.

    Args:
        query: ``[B, H * G, D]``, rotated at position ``cached``; fp16, bf16 or fp32.
        key, value: ``[B, H, D]`` of the new token, keys rotated at position ``cached``.
        table: int32 ``[>= B, P]`` block numbers.
        steps: int32 ``[B, STEP_COLUMNS]`` step rows (``tiles``).
        logit_scale: fp32 ``[B]``, factors on the logits, or None.
        positions: int64 positions of all tokens of the step, in layers with a window; None: queries
            and keys are at ``cached``. Requires units of one token.

    Returns:
        Four fp32 tensors. Padding rows are not written.

        - Partial outputs ``[B, H * G, splits, D]``, of the values' D.
        - Their log-sum-exps ``[B, H * G, splits]``.
        - Logits ``[B, H * G, N]`` by slot: -inf for empty slots, not written beyond ``old_slots``.
          With units, log-sum-exps ``[B, H * G, masses_of(N, unit)]`` of units or parts of units.
          Empty without ``keep_logits``.
        - The new token's own logits ``[B, H * G]``. Empty without ``keep_logits``.
    """
    told = CachedLayer(**layer, num_queries=query.shape[1], dtype=query.dtype)
    launch = DecodeAttention(told, keep_logits)
    shapes = launch.shapes(len(steps), table.shape[1], splits)
    made = {name: query.new_empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    assert len(query) == len(steps), query.shape
    tokens = Tokens(query, key, value)
    launch(tokens, Singles(steps, table, logit_scale=logit_scale, positions=positions, **made))
    return made["partial"], made["partial_lse"], made["logits"], made["own"]


def merge(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    steps: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call of ``Merge``.

    Args:
        partial: fp32 ``[B, Hq, splits, D]``; splits are ``MAX_SPLITS`` at most.
        partial_lse: fp32 ``[B, Hq, splits]``.
        steps: int32 ``[B, STEP_COLUMNS]``.
        output: ``[B, Hq, D]``, written; zeros in rows that are padding.

    Returns:
        fp32 ``[B, Hq]`` log-sum-exps over all keys and sinks; anything in rows that are padding.
    """
    num_rows, num_queries, _, value_size = partial.shape
    assert output.shape == (num_rows, num_queries, value_size), output.shape
    lse = partial_lse.new_empty(num_rows, num_queries)
    made = {"partial": partial, "partial_lse": partial_lse, "lse": lse}
    singles = Singles(steps, steps, **made)  # no block table is read
    tokens = Tokens(None, output, output=output)  # no keys either
    Merge(num_queries, value_size, sinks)(tokens, singles)
    return lse


def merge_scored(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    logits: torch.Tensor,
    own: torch.Tensor,
    rank: torch.Tensor,
    score: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    output: torch.Tensor,
    reduction: str,
    sinks: torch.Tensor | None = None,
    unit: int = 1,
) -> torch.Tensor:
    """One call of ``ScoredMerge``: ``merge``, then ``update``, in one launch.

    Args:
        partial, partial_lse, output, sinks: as for ``merge``.
        logits, own, rank, score, table, steps, reduction, unit: as for ``update``.

    Returns:
        What ``update`` returns.
    """
    num_rows, num_queries, _, value_size = partial.shape
    assert output.shape == (num_rows, num_queries, value_size), output.shape
    new_score = partial_lse.new_empty(num_rows, rank.shape[1])
    made = {"partial": partial, "partial_lse": partial_lse, "logits": logits, "own": own}
    singles = Singles(steps, table, **made, new_score=new_score)
    words: dict[str, Any] = {"rank": rank, "score": score, "reduction": reduction, "unit": unit}
    launch = ScoredMerge(num_queries, value_size, sinks, **words)
    launch(Tokens(None, output, output=output), singles)
    return new_score


def insert(
    key: torch.Tensor,
    value: torch.Tensor,
    new_score: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    rules: torch.Tensor,
    positions: torch.Tensor | None = None,
    saves: torch.Tensor | None = None,
    *,
    has_cells: bool,
    saved: Saved | None = None,
    **layer: Any,
) -> None:
    """One call of ``Insertion`` for a ``CachedLayer`` that is described by the rest.

    Args:
        key, value: ``[B, H, D]``, keys rotated at position ``cached``.
        new_score: fp32 ``[B, S]``, scores of the new tokens, or of the units they open.
        table: int32 ``[>= B, P]``.
        steps: int32 ``[B, STEP_COLUMNS]``; rows with ``STREAM`` -1 are padding and write nothing.
        rules: int32 ``[n, RULE_COLUMNS]``, the rules after each row's first.
        positions: int64 key positions of all tokens of the step, in layers with a window; None:
            keys are at ``cached``.
        saves: int32 ``[>= B]``, places of drafts, -1 for other tokens; None: there are no drafts.
    """
    launch = Insertion(CachedLayer(**layer, dtype=key.dtype), has_cells, saved)
    tokens = Tokens(None, key, value)
    assert len(key) == len(steps) and new_score.shape == (len(steps), layer["rank"].shape[1])
    shapes = launch.shapes(len(steps), table.shape[1])
    made = {name: layer["score"].new_empty(shape) for name, shape in shapes.items()}
    made["new_score"] = new_score
    told = {"rules": rules, "positions": positions, "saves": saves}
    launch(tokens, Singles(steps, table, **told, **made))
