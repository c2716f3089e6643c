# SPDX-License-Identifier: Apache-2.0
"""Cache specs for models whose layers have windows or chunks beside full attention.

The engine's policy bounds full-attention layers. In a layer with a window of ``W`` tokens a query
attends to its own token and the ``W - 1`` tokens before it. Such a layer runs under our ``window``
policy, which keeps only these tokens. In a layer with chunks of ``C`` tokens (Llama 4) a query
attends to the tokens of its own chunk. Such a layer runs under our ``chunk`` policy.

The layers of a drafting model run under the same policies, but recall nothing.

All kinds of layers share a request's pages and block table. The number of slots per page differs by
kind: a window's tokens fit on the pages that the engine's policy needs anyway.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)

from vllm_cascade.cache.spec import Kind, KVPolicySpec
from vllm_cascade.policies.chunk import Chunk
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.window import Window

LIMITED = SlidingWindowSpec | ChunkedLocalAttentionSpec
"""vLLM's specs of layers that see a part of the stream."""


@dataclass(frozen=True)
class DraftingLayers:
    """The layers of a drafting model (speculative decoding).

    Attributes:
        names: Their names.
        drafts: Most tokens of a request in a step that may be undone in them.
        max_position: Positions that the model supports; None: unlimited.
    """

    names: Collection[str] = ()
    drafts: int = 0
    max_position: int | None = None


def window_policy(policy: Policy, window: int, chunked: bool = False) -> Policy:
    """Return the policy of layers with windows, or chunks, in a model that runs under ``policy``.

    It evicts single tokens even if ``policy`` evicts units. All heads share one set of tokens,
    because a window or chunk contains the same tokens for every head.

    Raises:
        KVPolicyError: If a token attends only to itself (``window < 2``).
    """
    if window < 2:
        raise KVPolicyError(
            f"kv_policy: the model has layers with a window of {window} token, which need no "
            "cache; use --kv-policy full"
        )
    kind = Chunk if chunked else Window
    shared = {"prefill_stride": policy.prefill_stride, "trace": policy.trace}
    return kind.model_validate({"budget": window - 1, **shared})


def window_slots(policy: Policy, window: int, block_size: int) -> int:
    """Slots per page with which a window fits on the most pages that the policy needs."""
    return cdiv(window - 1, cdiv(policy.capacity, block_size))


def bounded(
    specs: Mapping[str, KVCacheSpec],
    policy: Policy,
    block_size: int,
    max_position: int | None = None,
    drafts: int = 0,
    drafting: DraftingLayers = DraftingLayers(),
) -> dict[str, KVCacheSpec]:
    """Replace the specs of layers with windows or chunks, or of a drafting model, by bounded ones.

    Args:
        specs: Specs by layer name. Full-attention layers already have a ``KVPolicySpec``.
        block_size: Tokens per page under the engine's policy.
        max_position: Positions that the model supports; None: unlimited. A window at least this
            large never masks a token, so its layer runs under the engine's policy.
        drafts: Most draft tokens of a request in a step.
        drafting: The layers of a drafting model.

    Returns:
        Bounded specs by layer name.

    Raises:
        KVPolicyError: If a layer has another kind of cache.
    """
    for name, spec in specs.items():
        if not isinstance(spec, KVPolicySpec | LIMITED):
            raise KVPolicyError(
                f"kv_policy: {name} has a cache of its own kind ({type(spec).__name__}), which no "
                "policy bounds; use --kv-policy full for this model"
            )
    if not drafting.names and not any(isinstance(spec, LIMITED) for spec in specs.values()):
        return dict(specs)
    bounded_specs: dict[str, Any] = {}
    for name, spec in specs.items():
        own: dict[str, Any] = {"policy": policy, "drafts": drafts}
        last = max_position
        if name in drafting.names:
            own = {"policy": policy.without_recall, "drafts": drafting.drafts, "drafting": True}
            last = drafting.max_position
        if isinstance(spec, LIMITED):
            own |= _limits(spec, policy, block_size, last)
            spec = replace_as(
                spec,
                KVPolicySpec,
                drop=("sliding_window", "extra_retained_tokens", "attention_chunk_size"),
                block_size=block_size,
                page_size_padded=None,
                **own,
            )
        else:
            spec = replace(spec, page_size_padded=None, **own)
        bounded_specs[name] = spec
    if all(spec.window is None and not spec.drafting for spec in bounded_specs.values()):
        return bounded_specs
    kinds = kinds_of(bounded_specs.values(), policy, block_size)
    return {name: replace(spec, kinds=kinds) for name, spec in bounded_specs.items()}


def _limits(
    spec: SlidingWindowSpec | ChunkedLocalAttentionSpec,
    policy: Policy,
    block_size: int,
    last: int | None,
) -> dict[str, Any]:
    """Fields of the bounded spec of a layer with a window or chunks; none if it masks no token."""
    chunked = isinstance(spec, ChunkedLocalAttentionSpec)
    window = spec.attention_chunk_size if chunked else spec.sliding_window
    if last is not None and window >= last:
        return {}
    return {
        "policy": window_policy(policy, window, chunked),
        "slots": window_slots(policy, window, block_size),
        "window": window,
        "chunked": chunked,
    }


def kinds_of(specs: Iterable[KVPolicySpec], policy: Policy, block_size: int) -> tuple[Kind, ...]:
    """Kinds of the given layers. The engine's policy comes first, even if no layer has it."""
    kinds: dict[tuple[int | None, bool, bool], Kind] = {}
    kinds[None, False, False] = Kind(policy, block_size)
    for spec in specs:
        key = spec.window, spec.chunked, spec.drafting
        kind = kinds.setdefault(key, Kind(spec.policy, spec.page_slots, *key))
        kinds[key] = replace(
            kind,
            token_bytes=kind.token_bytes + spec.row_bytes // spec.page_slots,
            page_bytes=kind.page_bytes + spec.page_size_bytes,
            num_layers=kind.num_layers + 1,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
        )
    return tuple(kinds.values())
