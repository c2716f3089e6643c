# SPDX-License-Identifier: Apache-2.0
"""A stride's attention by xformers, to compare with: two partial attentions, merged by their
log-sum-exps.

It takes keys that are rotated and gathered already, which the project's own kernels do while they
attend.
"""

import torch


def has_xformers() -> bool:
    """Whether xformers and its CUDA operators can be used."""
    if not torch.cuda.is_available():
        return False
    try:
        from xformers.ops import fmha
    except ImportError:
        return False
    return any(op.is_available() for op in fmha.ALL_FW_OPS)


def attend_with_xformers(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One stride over its request's cache and itself.

    Args:
        query: ``[T, H * G, D]``; key, value: ``[T, H, D]``; fp16 or bf16.
        old_keys, old_values: ``[H, cached, D]``, at least one token.

    Returns:
        output ``[T, H * G, D]`` and fp32 log-sum-exps ``[T, H * G]``.
    """
    from xformers.ops import fmha

    num_tokens, num_queries, head_size = query.shape
    num_heads = key.shape[1]
    group = num_queries // num_heads

    def heads(x: torch.Tensor) -> torch.Tensor:
        """``[1, tokens, H, G, D]``; keys and values are expanded over the group, not copied."""
        return x[None, :, :, None].expand(1, -1, -1, group, -1)

    queries = query.view(1, num_tokens, num_heads, group, head_size)
    causal = fmha.attn_bias.LowerTriangularMask()
    old = [heads(x.transpose(0, 1)) for x in (old_keys, old_values)]
    new = [heads(x) for x in (key, value)]
    parts = [
        fmha.memory_efficient_attention_partial(queries, *old, scale=scale),
        fmha.memory_efficient_attention_partial(queries, *new, attn_bias=causal, scale=scale),
    ]
    outputs, norms = zip(*parts, strict=True)
    output, lse = fmha.merge_attentions(list(outputs), list(norms))
    lse = lse.reshape(num_queries, -1)[:, :num_tokens].transpose(0, 1)
    return output.reshape(query.shape).to(query.dtype), lse
