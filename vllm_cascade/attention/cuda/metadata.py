# SPDX-License-Identifier: Apache-2.0
"""Step metadata on CUDA, shared by all layers: waves of single tokens and longer strides."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadata

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels.triton.recall_rows import RecallRows
from vllm_cascade.kernels.triton.repeat import Launches
from vllm_cascade.kernels.triton.singles import Singles
from vllm_cascade.kernels.triton.strides import Chunks, Strides
from vllm_cascade.policies.rules import Scoring
from vllm_cascade.step.inputs import Stride
from vllm_cascade.step.rows import StrideRows


class Recalls(NamedTuple):
    """What a group of strides does with evicted units; unneeded launches are skipped.

    Attributes:
        selects: whether any selects units; ``judges``: by their evidence.
        stores: whether any evicts units.
    """

    selects: bool = True
    judges: bool = True
    stores: bool = True


EVERYTHING = Recalls()


@dataclass(frozen=True)
class DecodeRows:
    """Single tokens of ``B`` requests.

    Attributes:
        index: int64 ``[B]``, the tokens' places in the step, or a slice of the step.
        steps: int32 ``[B, STEP_COLUMNS]``.
        table: int32 ``[B, P]`` block numbers.
        logit_scale: fp32 ``[B]``, factors on the logits, or None.
        no_scores: fp32 ``[B, num_sets]`` zeros, the new tokens' scores under score-free policies.
        scored: int32 ``[B]``, ranks of the units that receive a score from the host; negative
            for none.
        given: fp32 ``[B]``, the host's scores, or None.
        recall: int32 ``[B, RECALL_COLUMNS]``; None without recall.
        saves: int32 ``[B]``, places of draft tokens, -1 for others; None: there are no drafts.
        leads: whether the tokens are the first of the step, in order.
        recalls: what rows do by ``recall``. A captured graph has all launches, for later steps.
        singles, recalling: launch arguments and the kernels' shared memory, by number and size of
            the layer's query heads. The first layer builds them for all layers.
    """

    index: torch.Tensor | slice
    steps: torch.Tensor
    table: torch.Tensor
    logit_scale: torch.Tensor | None
    no_scores: torch.Tensor
    scored: torch.Tensor | None = None
    given: torch.Tensor | None = None
    recall: torch.Tensor | None = None
    saves: torch.Tensor | None = None
    recalls: Recalls = EVERYTHING
    singles: dict[tuple[int, int], Singles] = field(default_factory=dict)
    recalling: dict[tuple[int, int], RecallRows] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        return isinstance(self.index, slice) and self.index == slice(0, len(self.steps), 1)


@dataclass(frozen=True)
class PrefillRows:
    """Strides of ``R`` requests that share one scoring.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]`` (``kernels/triton/stride_columns.py``).
        table: int32 ``[R, P]`` block numbers.
        plans: int32, the plans' table, into which the rows point (``mail.Plans``).
        scoring: how scores are computed and compared.
        decays: fp32 ``[prefill_stride]``: ``weight * decay ** i``.
        given: fp32 ``[num_tokens]``, the host's scores of the whole step, or None.
        max_length: tokens of the longest stride.
        max_slots: most slots in use before a stride.
        width: units of the longest line (cached and new tokens), or of the most slots afterwards if
            that is more.
        recall: int32 ``[R, RECALL_COLUMNS]``; None without recall.
        recalls: what the strides do by ``recall``.
        judged: bool ``[R]`` on the host, which of them select units by evidence; None: any may.
        strides, recalling: launch arguments and the kernels' shared memory, by number and size of
            the layer's query heads. The first layer builds them for all layers.
        together: ``strides`` with the sums of all tensor-parallel ranks, if those decide together.
    """

    steps: torch.Tensor
    table: torch.Tensor
    plans: torch.Tensor
    scoring: Scoring
    decays: torch.Tensor
    given: torch.Tensor | None
    max_length: int
    max_slots: int
    width: int
    recall: torch.Tensor | None = None
    recalls: Recalls = EVERYTHING
    judged: np.ndarray | None = None
    strides: dict[tuple[int, int], Strides] = field(default_factory=dict)
    together: dict[tuple[int, int], Strides] = field(default_factory=dict)
    recalling: dict[tuple[int, int], RecallRows] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceWave:
    """One stride per request, grouped by implementation.

    Attributes:
        rows: the wave's rows on the host; None if the host does not know them.
        decode: single tokens.
        prefill: longer strides, grouped by scoring.
        others: strides that run in PyTorch, each with its int32 ``[RECALL_COLUMNS]`` if units are
            recalled.
        chunks: strides of score-free policies. The first wave holds all strides of a request,
            unless the policy is traced.
    """

    rows: StrideRows | None
    decode: DecodeRows | None = None
    prefill: Sequence[PrefillRows] = ()
    others: Sequence[tuple[Stride, np.ndarray | None]] = ()
    chunks: Chunks | None = None


@dataclass
class TritonMetadata(AttentionMetadata):
    """A step's metadata, shared by all layers.

    Attributes:
        table: int32 ``[B, P]``, the batch's block table.
        rules: int32 ``[n, 4]``, victim rules of steps after the first rule.
        logit_scale: fp32 ``[num_tokens]``, factors on the logits, or None.
        positions: int64, the tokens' positions in layers with a window; None if positions follow
            from the number of cached tokens.
        launched: what the first layer launched, by number and size of its query heads and variant
            of its rows; other layers repeat it.

    The last five are for vLLM's layers of multi-head latent attention.
    """

    spec: KVPolicySpec
    waves: list[DeviceWave]
    table: torch.Tensor
    rules: torch.Tensor
    logit_scale: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    launched: dict[tuple[Any, ...], Launches] = field(default_factory=dict)
    num_actual_tokens: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: None = None
