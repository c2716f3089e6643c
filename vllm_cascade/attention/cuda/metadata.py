# SPDX-License-Identifier: Apache-2.0
"""What all layers of a step share on CUDA: its waves, single tokens and longer strides apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionMetadata

from vllm_cascade.attention.cuda.strides import ChunkRows, PrefillRows
from vllm_cascade.attention.inputs import Stride
from vllm_cascade.attention.step import StrideRows
from vllm_cascade.cache.manager import KVPolicySpec


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
class DeviceWave:
    """One stride of each request: single tokens, longer ones, and those for PyTorch.

    Attributes:
        rows: None where the host does not know them.
        chunks: strides of requests for whom nobody is compared, in the first wave all of them.
    """

    rows: StrideRows | None
    decode: DecodeRows | None = None
    prefill: Sequence[PrefillRows] = ()
    others: Sequence[Stride] = ()
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
