# SPDX-License-Identifier: Apache-2.0
"""The spec of a bounded cache: the bytes of a page, and how many pages a request needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    replace_as,
)

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, compiled

UNIT_WORDS = ("rank", "born", "score")
TRACE_WORDS = (*UNIT_WORDS, "token")
WORD_BYTES = 4
PAGE_ALIGNMENT = 64
"""Bytes that a page is a multiple of: a GPU reads 16 at once only where it knows that rows of every
page begin at a multiple of that, and Triton knows it of strides that 16 divides, of words, too."""
ROW_SCALES = 2
"""Of a slot and KV head, where rows have their own: the key's, the value's."""


@dataclass(frozen=True)
class Kind:
    """The caches of all layers of one kind.

    Attributes:
        policy: what they run under.
        slots: tokens of a page.
        window: tokens that a query sees, its own included; None: all that the policy keeps.
        token_bytes: keys and values of a token and their scales, in all layers of the kind.
        page_bytes: a page of them, with what it holds besides keys and values.
    """

    policy: Policy
    slots: int
    window: int | None = None
    token_bytes: int = 0
    page_bytes: int = 0

    @property
    def most_pages(self) -> int:
        """Pages of a stream that has any length."""
        return cdiv(self.policy.capacity, self.slots)

    def stock_bytes(self, num_tokens: int, block_size: int) -> int:
        """What vLLM without a policy holds after ``num_tokens`` tokens: whole blocks."""
        blocks = cdiv(num_tokens, block_size)
        if self.window is not None:  # those that a query still sees, and no others
            blocks = min(blocks, cdiv(self.window - 1, block_size) + 1)
        return blocks * block_size * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class KVPolicySpec(AttentionSpec):
    """One layer's cache under a policy: bounded, private, addressed by the backend itself."""

    policy: Policy
    """What this layer runs under: the engine's policy, or that of its window."""
    slots: int | None = None
    """Tokens of a page, where they are not ``block_size``, which all layers share."""
    window: int | None = None
    """Tokens that a query sees, its own included; None: all that the policy keeps."""
    least_page_bytes: int = 0
    """What a page is padded to, as pages of other layers are as large."""
    kinds: tuple[Kind, ...] = ()
    """All kinds of the model's layers, the engine's policy first; none where there is only one."""
    num_layers: int | None = None
    """Layers of the model that have such a cache, where a worker has only some of them."""

    prefix_cacheable = uses_slot_mapping = False

    def __post_init__(self) -> None:
        super().__post_init__()
        units = self.num_sets * (self.page_slots // self.policy.unit)
        own = self.row_bytes + units * len(self.words) * WORD_BYTES
        aligned = cdiv(own, PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        object.__setattr__(self, "page_size_padded", max(aligned, self.least_page_bytes))

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, policy: Policy) -> "KVPolicySpec":
        """The bounded counterpart of a full-attention layer's spec."""
        return replace_as(
            spec,
            cls,
            drop=("sliding_window", "attention_chunk_size", "non_causal"),
            policy=policy,
            page_size_padded=None,
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The layer's policy, compiled; all layers of a kind share it."""
        return compiled(self.policy)

    @cached_property
    def engine_schedule(self) -> Schedule:
        """The engine's policy, compiled: what requests run under, and whose positions all share."""
        return compiled(self.kinds[0].policy) if self.kinds else self.schedule

    @cached_property
    def _windows(self) -> tuple[tuple[Schedule, int], ...]:
        """Schedule and slots of every kind of window."""
        return tuple((compiled(kind.policy), kind.slots) for kind in self.kinds[1:])

    @property
    def page_slots(self) -> int:
        """Tokens of this layer's page."""
        return self.block_size if self.slots is None else self.slots

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """vLLM's hook: tokens of a page, which is never cut."""
        assert kernel_block_size == self.block_size, kernel_block_size
        return self.page_slots

    @property
    def max_distance(self) -> int:
        """Most positions that a cached key can have moved since it was written.

        In a window, positions fall behind the stream while a key stays: by no more than the tokens
        that come meanwhile and those that the policy may evict at once.
        """
        if self.window is None:
            return self.policy.max_position
        engine = self.kinds[0].policy
        return engine.capacity + engine.prefill_stride + self.window

    @property
    def num_sets(self) -> int:
        """Head sets that keep tokens of their own."""
        return self.num_kv_heads if self.policy.head_policy == "per_kv_head" else 1

    @property
    def scale_bytes(self) -> int:
        """Of a page: the scales of its rows, where every row has its own."""
        if not self.kv_quant_mode.is_per_token_head:
            return 0
        return self.num_kv_heads * self.page_slots * ROW_SCALES * WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Of a page: keys and values with their scales, which vLLM without a policy has, too."""
        return self.unpadded_page_size_bytes + self.scale_bytes

    @property
    def words(self) -> tuple[str, ...]:
        return TRACE_WORDS if self.policy.keeps_ages else UNIT_WORDS

    def num_pages(self, num_tokens: int, schedule: Schedule | None = None) -> int:
        """Pages of a request after ``num_tokens`` tokens, under its own policy if it has one."""
        slots = self.kinds[0].slots if self.kinds else self.page_slots
        own = cdiv((schedule or self.engine_schedule).peak_at(num_tokens), slots)
        windows = (cdiv(window.peak_at(num_tokens), slots) for window, slots in self._windows)
        return max(own, *windows) if self._windows else own

    @property
    def most_pages(self) -> int:
        """Pages of a request of any length."""
        if self.kinds:
            return max(kind.most_pages for kind in self.kinds)
        return cdiv(self.policy.capacity, self.page_slots)

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return self.num_pages(max_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.num_pages(vllm_config.model_config.max_model_len) * self.page_size_bytes


def request_bytes(specs: Mapping[str, "KVPolicySpec"], num_tokens: int) -> int:
    """What a request of ``num_tokens`` tokens holds under a policy, in all of its layers.

    Args:
        specs: by layer, as ``bounded`` makes them.
    """
    pages = next(iter(specs.values())).num_pages(num_tokens)
    return pages * sum(spec.page_size_bytes for spec in specs.values())


def stock_bytes(specs: Mapping[str, "KVPolicySpec"], num_tokens: int) -> int:
    """What vLLM without a policy holds for the same request, its windows cut as it cuts them."""
    spec = next(iter(specs.values()))
    return sum(kind.stock_bytes(num_tokens, spec.block_size) for kind in spec.kinds)
