# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers in one model: those that see the whole stream, and those with a sliding window.

The policy bounds the former. A layer with a window of ``W`` tokens sees a query's own token and
``W - 1`` before it, and no more is kept for it: its cache is under our own ``window`` policy. All
kinds share a request's pages and block table; a page has as many slots of a kind as it takes for
the kind's tokens to fit on the pages that the policy needs anyway.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec, replace_as

from vllm_cascade.cache.spec import Kind, KVPolicySpec
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.window import Window


def window_policy(policy: Policy, window: int) -> Policy:
    """What layers with a window run under beside others under ``policy``.

    Token by token, whatever the policy's unit, and with one set of tokens for all heads: which
    tokens a window has is the same for all.

    Raises:
        KVPolicyError: a window in which a token sees nothing but itself.
    """
    if window < 2:
        raise KVPolicyError(
            f"kv_policy: the model has layers with a window of {window} token, which need no "
            "cache; use --kv-policy full"
        )
    return Window(budget=window - 1, prefill_stride=policy.prefill_stride, trace=policy.trace)


def window_slots(policy: Policy, window: int, block_size: int) -> int:
    """Slots of a page, so that a window fits on the pages that the policy ever needs."""
    return cdiv(window - 1, cdiv(policy.capacity, block_size))


def bounded(
    specs: Mapping[str, KVCacheSpec],
    policy: Policy,
    block_size: int,
    max_position: int | None = None,
) -> dict[str, KVCacheSpec]:
    """Every layer's cache, where some layers have windows; the others are bounded already.

    Args:
        specs: by layer; those without windows are ``KVPolicySpec``.
        block_size: tokens of a page of the policy's.
        max_position: positions that the model knows (None: any number). A window that is not
            smaller never hid a token from it, so the layer is one of the policy's.

    Raises:
        KVPolicyError: a layer with another kind of cache, or recall beside windows.
    """
    for name, spec in specs.items():
        if not isinstance(spec, KVPolicySpec | SlidingWindowSpec):
            raise KVPolicyError(
                f"kv_policy: {name} has a cache of its own kind ({type(spec).__name__}), which no "
                "policy bounds; use --kv-policy full for this model"
            )
    if not any(isinstance(spec, SlidingWindowSpec) for spec in specs.values()):
        return dict(specs)
    if policy.recall:
        raise KVPolicyError(
            "kv_policy: the model has layers with sliding windows, and recall moves positions in a "
            "way that these do not follow; set recall to 0 for this model"
        )
    bounded_specs: dict[str, KVPolicySpec] = {}
    for name, spec in specs.items():
        if isinstance(spec, SlidingWindowSpec):
            own: dict[str, Any] = {"policy": policy}
            window = spec.sliding_window
            if max_position is None or window < max_position:
                own = {
                    "policy": window_policy(policy, window),
                    "slots": window_slots(policy, window, block_size),
                    "window": window,
                }
            spec = replace_as(
                spec,
                KVPolicySpec,
                drop=("sliding_window", "extra_retained_tokens"),
                block_size=block_size,
                page_size_padded=None,
                **own,
            )
        bounded_specs[name] = spec
    if all(spec.window is None for spec in bounded_specs.values()):
        return bounded_specs
    kinds = kinds_of(bounded_specs.values(), policy, block_size)
    return {name: replace(spec, kinds=kinds) for name, spec in bounded_specs.items()}


def kinds_of(specs: Iterable[KVPolicySpec], policy: Policy, block_size: int) -> tuple[Kind, ...]:
    """All kinds of some layers; the first one is the policy's, whether or not it has any."""
    kinds = {None: Kind(policy, block_size)}
    for spec in specs:
        kind = kinds.setdefault(spec.window, Kind(spec.policy, spec.page_slots, spec.window))
        kinds[spec.window] = replace(
            kind,
            token_bytes=kind.token_bytes + spec.row_bytes // spec.page_slots,
            page_bytes=kind.page_bytes + spec.page_size_bytes,
        )
    return tuple(kinds.values())
