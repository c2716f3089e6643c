# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) as attention with one KV head.

A token's cached row is ``[k_pe, latent]``: ``rope`` rotated channels that all heads share, then
``kv_lora_rank`` channels without positions. The row is the key, and its latent part is the value.
Each query goes through the layer's ``W_UK`` to become a query of such rows, and each output, a mean
of latents, through ``W_UV``. So a head's logit is ``q_pe . k_pe + (q_nope W_UK) . latent``, the
same as with keys and values for every head.

vLLM orders a row ``[latent, k_pe]``. Ours begins with the rotated channels, as the keys of other
models do.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.layer import NewTokens
from vllm_cascade.cache.spec import KVPolicySpec


class LatentImpl(KVPolicyImpl):
    """One MLA layer, as vLLM's ``MLAAttention`` calls it; mixed into a device's implementation.

    The device's metadata counts all tokens as a prompt's, so ``forward_mha`` gets them all.

    Attributes:
        layer: the layer, which ``connect`` sets.
    """

    layer: Any = None

    def __init__(
        self, *, kv_lora_rank: int, qk_nope_head_dim: int, v_head_dim: int, **others: Any
    ) -> None:
        for name in ("q_lora_rank", "qk_rope_head_dim", "qk_head_dim", "kv_b_proj", "indexer"):
            others.pop(name, None)
        super().__init__(**others)
        self.latent = kv_lora_rank
        self._unrotated, self._value_size = qk_nope_head_dim, v_head_dim

    def prepare(
        self, spec: KVPolicySpec, kv_cache: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """As for other layers; ``kv_cache`` has no axis of heads."""
        super().prepare(spec, kv_cache.unsqueeze(1), *args, **kwargs)

    def reserve(self, query: torch.Tensor) -> None:
        """As for other layers, and a step's queries and outputs of latent rows."""
        assert self.latent is not None, "set by __init__"
        made = query.new_empty(*query.shape[:2], 2 * self.latent)
        super().reserve(query.new_empty(*query.shape[:2], self.head_size))
        del made

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend from all tokens of a step, and update the cache.

        Args:
            q: ``[num_tokens, num_heads, qk_nope_head_dim + rope]``, the last channels rotated.
            kv_c_normed: ``[num_tokens, kv_lora_rank]``.
            k_pe: ``[num_tokens, 1, rope]``, rotated.
            output: ``[num_tokens, num_heads * v_head_dim]``, written here.
        """
        layer = self.layer
        assert self.latent is not None and layer is not None, "set by __init__ and connect"
        plain, rotated = q[..., : self._unrotated], q[..., self._unrotated :]
        absorbed = torch.bmm(plain.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        key = torch.cat([k_pe, kv_c_normed.unsqueeze(1)], dim=-1)
        attended = q.new_empty(*q.shape[:2], self.latent)
        new = NewTokens(
            query=torch.cat([rotated, absorbed], dim=-1),
            key=key,
            value=key[..., k_pe.shape[-1] :],
            output=attended,
        )
        self.run(self.name, attn_metadata, new, kv_c_and_k_pe_cache.unsqueeze(1))
        heads = output.view(-1, self.num_heads, self._value_size).transpose(0, 1)
        torch.bmm(attended.transpose(0, 1), layer.W_UV, out=heads)

    def do_kv_cache_update(self, *args: Any) -> None:
        """Do nothing: ``run`` writes the rows that survive."""


class OwnPrefill(MLAPrefillBackend):
    """What vLLM's MLA layers have for prompts: nothing, since ``forward_mha`` attends from them.

    On GPUs vLLM selects such a backend for every layer, and raises an error where it has none: for
    other types than 16 bits, other sizes of heads than DeepSeek's, and some cards. This one is for
    all that our kernels run, and holds no memory, unlike some of vLLM's.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = KVPolicyBackend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: only vLLM's own implementations of layers call it."""
        raise NotImplementedError("with a policy, LatentImpl.forward_mha attends from prompts")

    run_prefill_context_chunk = run_prefill_new_tokens


def connect(layer: Any) -> None:
    """Let an ``MLAAttention``'s implementation know it, and be asked in vLLM's profiling runs.

    vLLM does not call the implementation there. It allocates what its own prefill would need, which
    ours does not use.
    """
    stock, impl = layer.forward_impl, layer.impl
    impl.layer = layer

    def forward_impl(
        q: torch.Tensor,
        latents: Any,
        k_pe: Any,
        cache: Any,
        metadata: Any,
        output: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        impl.check_one_call(layer.layer_name)
        if metadata is None:
            impl.reserve(q)
            return output.fill_(0)
        return stock(q, latents, k_pe, cache, metadata, output=output, **others)

    layer.forward_impl = forward_impl
