# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.v1.sample.rejection_sampler``.

What: with speculative decoding on a CPU, draft tokens get the temperature, ``top_k`` and ``top_p``
of their requests, and a step may have none. CPU workers with a policy apply it.
Why: vLLM's stand-in for its Triton kernel writes to a copy if a setting is not int64. So drafts of
a batch in which any request samples are judged at temperatures from uninitialised memory, and the
answers of all of its requests are wrong. In a step without drafts ``top_k`` stops the engine: the
largest of no values is an error.
Removed when: vLLM's CPU stand-in returns what it has written, and a step may have no drafts.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

_constrain = rejection_sampler.apply_sampling_constraints


def apply() -> None:
    """Replace the functions; later calls change nothing."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def apply_sampling_constraints(logits: torch.Tensor, *args: Any) -> torch.Tensor:
    """The logits of draft tokens ``[num_tokens, vocab_size]`` under their requests' settings."""
    return _constrain(logits, *args) if len(logits) else logits


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat a setting for each draft token of its request: ``[num_tokens]``.

    Args:
        x: ``[batch_size]``.
        cu_num_tokens: int ``[batch_size]``, draft tokens up to and including each request's.
        replace_from, replace_to: a value of ``x``, and what stands in its place.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.long(), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
