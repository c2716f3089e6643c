# SPDX-License-Identifier: Apache-2.0
"""What all layers of a step share on CUDA: its waves, single tokens and longer strides apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadata

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels.triton.strides import Strides
from vllm_cascade.policies.rules import Scoring
from vllm_cascade.step.inputs import Stride
from vllm_cascade.step.rows import StrideRows


@dataclass(frozen=True)
class DecodeRows:
    """Single tokens of ``B`` requests, on the device.

    Attributes:
        index: int64 ``[B]``, the tokens' places in the step; None: they are its first ``B``.
        steps: int32 ``[B, STEP_COLUMNS]``.
        table: int32 ``[B, P]`` block numbers.
        logit_scale: fp32 ``[B]``, or None.
        no_scores: fp32 ``[B, num_sets]`` zeros, the new scores of a policy that computes none.
        scored: int32 ``[B]``, ranks of the units that get a token's score from the host; negative:
            none.
        given: fp32 ``[B]``, these scores; None where the host gives none.
        recall: int32 ``[B, RECALL_COLUMNS]``; None where no evicted units come back.
    """

    index: torch.Tensor | None
    steps: torch.Tensor
    table: torch.Tensor
    logit_scale: torch.Tensor | None
    no_scores: torch.Tensor
    scored: torch.Tensor | None = None
    given: torch.Tensor | None = None
    recall: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillRows:
    """Strides of ``R`` requests whose scores are made and compared alike.

    Attributes:
        steps: int32 ``[R, STEP_COLUMNS]`` (``kernels/triton/stride_columns.py``).
        table: int32 ``[R, P]``.
        plans: int32, what the rows point into.
        scoring: how scores are made and compared.
        decays: fp32 ``[prefill_stride]``: ``weight * decay ** i``.
        given: fp32 ``[num_tokens]`` of the whole step, scores by the host, or None.
        max_length, max_slots: the longest stride, and the most slots in use before.
        width: of the longest line, or of the most slots afterwards, in units.
        recall: int32 ``[R, RECALL_COLUMNS]``; None where no evicted units come back.
        strides: these rows and what their kernels leave each other, as launches read it, by the
            layer's query heads and their size; the first layer makes it for all.
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
    strides: dict[tuple[int, int], Strides] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkRows:
    """Strides of ``M`` requests for whom nobody is compared, all of them at once.

    Attributes:
        steps: int32 ``[K, STEP_COLUMNS]``, strides.
        chunks: int32 ``[M, STEP_COLUMNS]``, what all of a request's strides are together.
        table: int32 ``[M, P]``.
        positions: int64 ``[num_tokens]``, the tokens' positions.
        finished: int32 zeros, where programs count who is done.
        max_length: the longest stride.
    """

    steps: torch.Tensor
    chunks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    finished: torch.Tensor
    max_length: int


@dataclass(frozen=True)
class DeviceWave:
    """One stride of each request: single tokens, longer ones, and those for PyTorch.

    Attributes:
        rows: None where the host does not know them.
        others: strides for PyTorch, each with its int32 ``[RECALL_COLUMNS]`` if units are recalled.
        chunks: strides of requests for whom nobody is compared, in the first wave all of them.
    """

    rows: StrideRows | None
    decode: DecodeRows | None = None
    prefill: Sequence[PrefillRows] = ()
    others: Sequence[tuple[Stride, np.ndarray | None]] = ()
    chunks: ChunkRows | None = None


@dataclass
class TritonMetadata(AttentionMetadata):
    """What every layer of this step shares.

    Attributes:
        table: int32 ``[B, P]``, the batch's block table.
        rules: int32 ``[n, 4]``, what steps have beyond their first victim rule.
        logit_scale: fp32 ``[num_tokens]`` over the step, or None.
        positions: int64, the tokens' positions, in layers with a window; None: they follow what
            is cached.
    """

    spec: KVPolicySpec
    waves: list[DeviceWave]
    table: torch.Tensor
    rules: torch.Tensor
    logit_scale: torch.Tensor | None = None
    positions: torch.Tensor | None = None
