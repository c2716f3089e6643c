# SPDX-License-Identifier: Apache-2.0
"""What vLLM tells an attention backend about a scheduling step."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def step_of(
    firsts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool], table: torch.Tensor
) -> CommonAttentionMetadata:
    """``lengths[i]`` tokens of request ``i`` after ``firsts[i]`` earlier ones; ``table``: pages."""
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ends = [first + n for first, n in zip(firsts, lengths, strict=True)]
    ends = torch.tensor(ends, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(0),
        is_prefilling=torch.tensor(prefilling),
    )
