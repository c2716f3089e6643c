# SPDX-License-Identifier: Apache-2.0
"""KV cache spec of a bounded cache: bytes per page and pages per request."""

from dataclasses import dataclass
from functools import cached_property

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    replace_as,
)
from vllm.v1.worker.block_table import get_block_table_width

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, compiled

UNIT_WORDS = ("rank", "born", "score")
TRACE_WORDS = (*UNIT_WORDS, "token")
WORD_BYTES = 4
PAGE_ALIGNMENT = 64
"""Page sizes are a multiple of this many bytes.

A GPU kernel reads 16 bytes at once only if every row is known to start at a multiple of 16 bytes.
Triton infers this from strides divisible by 16, and our strides may count 4-byte words.
"""
LATENT_FIELDS = (
    "cache_dtype_str",
    "alignment",
    "model_version",
    "cache_role",
    "topk_buffer_width",
    "is_index_group_leader",
    "non_causal_multi_token_decode",
)
"""Fields of vLLM's specs for latent rows that mean nothing for a bounded cache."""
VERSIONED = ("rank", "score")
"""Words of all of a request's units that inserting a token may change."""
ROW_SCALES = 2
"""Scales per slot and KV head in caches with scales for each row: key scale, value scale."""


@dataclass(frozen=True)
class Kind:
    """Layers of one kind: full attention, or one sliding-window size.

    Attributes:
        policy: Policy of these layers.
        slots: Tokens per page.
        window: Tokens that a query attends to, its own included; None: all that the policy keeps.
        chunked: Whether these are the tokens of its chunk of ``window`` tokens.
        drafting: Whether these layers belong to a drafting model.
        token_bytes: Bytes of one token's keys, values and scales, summed over the layers.
        page_bytes: Bytes of one page, its tail included, summed over the layers.
        num_layers: Layers of this kind in the whole model.
        num_kv_heads: KV heads of the last of these layers.
        head_size: Channels of its heads.
    """

    policy: Policy
    slots: int
    window: int | None = None
    chunked: bool = False
    drafting: bool = False
    token_bytes: int = 0
    page_bytes: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_size: int = 0

    @property
    def most_pages(self) -> int:
        """Most pages of a request of any length."""
        return cdiv(self.policy.capacity, self.slots)

    def stock_bytes(self, num_tokens: int, block_size: int) -> int:
        """Bytes that vLLM without a policy holds after ``num_tokens`` tokens, in whole blocks."""
        blocks = cdiv(num_tokens, block_size)
        if self.chunked and self.window is not None:
            blocks -= num_tokens // self.window * self.window // block_size
        elif self.window is not None:  # only blocks that a query can still attend to
            blocks = min(blocks, cdiv(self.window - 1, block_size) + 1)
        return blocks * block_size * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class KVPolicySpec(AttentionSpec):
    """KV cache spec of one layer under a policy.

    Its pages are bounded in number and private to a request. The attention backend computes slot
    addresses itself.
    """

    policy: Policy
    """This layer's policy: the engine's, or ``window`` or ``chunk`` if the model bounds it."""
    slots: int | None = None
    """Tokens per page of this layer; None: ``block_size``, which all layers share."""
    window: int | None = None
    """Tokens that a query attends to, its own included; None: all that the policy keeps."""
    chunked: bool = False
    """Whether ``window`` is the size of chunks of the stream, and queries attend within one."""
    least_page_bytes: int = 0
    """Minimum page size in bytes, to match the pages of other layers."""
    kinds: tuple[Kind, ...] = ()
    """All kinds of layers in the model, the engine's policy first; empty if there is only one."""
    num_layers: int | None = None
    """Cached layers in the whole model; set if a worker runs only some of them."""
    drafts: int = 0
    """Most tokens of a request in a step that may be undone (speculative decoding). Pages hold a
    version of the ranks and scores before each."""
    drafting: bool = False
    """Whether the layer belongs to a drafting model. Such layers recall nothing."""

    # vLLM must not share pages that a later token overwrites, and our backend finds its own slots.
    prefix_cacheable = uses_slot_mapping = False  # pyright: ignore

    def __post_init__(self) -> None:
        super().__post_init__()
        aligned = cdiv(self.own_bytes, PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        object.__setattr__(self, "page_size_padded", max(aligned, self.least_page_bytes))

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, policy: Policy, drafts: int = 0) -> "KVPolicySpec":
        """Create the bounded counterpart of a full-attention layer's spec."""
        others = LATENT_FIELDS if isinstance(spec, MLAAttentionSpec) else ()
        return replace_as(
            spec,
            cls,
            drop=("sliding_window", "attention_chunk_size", "non_causal", *others),
            policy=policy,
            drafts=drafts,
            page_size_padded=None,
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The compiled policy of this layer; all layers of a kind share it."""
        return compiled(self.policy)

    @cached_property
    def engine_schedule(self) -> Schedule:
        """The engine's compiled policy. It sets token positions for all kinds of layers."""
        return compiled(self.kinds[0].policy) if self.kinds else self.schedule

    @cached_property
    def windows(self) -> tuple[tuple[Schedule, int], ...]:
        """Schedule and slots per page of each kind of window."""
        kinds = (kind for kind in self.kinds if kind.window is not None)
        return tuple((compiled(kind.policy), kind.slots) for kind in kinds)

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens to whose multiple vLLM rounds up the width of its block tables; None: it does not.

        Our kernels read tables of any width, and wider ones take more working memory. But with
        drafts vLLM's warm-up gives a request pages for a few tokens per draft, whatever its bound.
        """
        return super().block_table_token_alignment if self.drafts else None

    @property
    def page_slots(self) -> int:
        """Tokens per page of this layer."""
        return self.block_size if self.slots is None else self.slots

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """Tokens per page, for vLLM's interface. Pages are never split into kernel blocks."""
        assert kernel_block_size == self.block_size, kernel_block_size
        return self.page_slots

    @property
    def max_distance(self) -> int:
        """Largest distance in positions that a cached key can move after it is written.

        A sliding-window layer uses the positions of the engine's policy. While a key is in the
        window, these positions shift by at most the tokens that arrive in that time plus the tokens
        that the policy can evict at once. Recall changes nothing: a unit that is evicted while
        fewer than ``recall`` units are recalled comes back at once, so positions do not shift.
        """
        if self.window is None:
            return self.policy.max_position
        engine = self.kinds[0].policy
        return engine.capacity + engine.prefill_stride + self.window

    @property
    def num_sets(self) -> int:
        """Head sets per layer. The KV heads of a set keep the same tokens."""
        return self.num_kv_heads if self.policy.head_policy == "per_kv_head" else 1

    @property
    def row_size(self) -> int:
        """Channels of a stored row."""
        return self.head_size + self.head_size_v

    @property
    def latent(self) -> bool:
        """Whether a row's value is part of its key (``attention/latent.py``)."""
        return self.head_size_v == 0

    @property
    def scale_bytes(self) -> int:
        """Bytes per page of row scales; 0 if rows have no scales of their own."""
        if not self.kv_quant_mode.is_per_token_head:
            return 0
        return self.num_kv_heads * self.page_slots * ROW_SCALES * WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes per page of keys, values and row scales, as in vLLM without a policy."""
        return self.unpadded_page_size_bytes + self.scale_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes per page before it is rounded up, in proportion to ``page_slots``."""
        units = self.num_sets * (self.page_slots // self.policy.unit)
        return self.row_bytes + units * self.num_words * WORD_BYTES

    @property
    def words(self) -> tuple[str, ...]:
        return TRACE_WORDS if self.policy.keeps_ages else UNIT_WORDS

    @property
    def num_words(self) -> int:
        """Words per unit and head set, with the versions that drafts need."""
        return len(self.words) + len(VERSIONED) * self.drafts

    def num_pages(self, num_tokens: int, schedule: Schedule | None = None) -> int:
        """Pages of a request after ``num_tokens`` tokens.

        Args:
            schedule: Compiled policy of the request; None: the engine's.
        """
        slots = self.kinds[0].slots if self.kinds else self.page_slots
        own = cdiv((schedule or self.engine_schedule).peak_at(num_tokens), slots)
        windows = (cdiv(window.peak_at(num_tokens), slots) for window, slots in self.windows)
        return max(own, *windows) if self.windows else own

    @property
    def most_pages(self) -> int:
        """Most pages of a request of any length."""
        if self.kinds:
            return max(kind.most_pages for kind in self.kinds)
        return cdiv(self.policy.capacity, self.page_slots)

    def table_slots(self, vllm_config: VllmConfig) -> int:
        """Slots of the pages that a row of vLLM's block tables has room for."""
        pages, size, alignment = self.most_pages, self.block_size, self.block_table_token_alignment
        if vllm_config.use_v2_model_runner:
            width = get_block_table_width(pages, size, token_alignment=alignment)
        else:
            width = get_block_table_width(pages, size)
        return width * self.page_slots

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Pages of any request of ``max_len`` tokens, whatever policy it sets.

        Its policy may fill up sooner than the engine's, or evict sooner and recall. Recalled units
        have slots beside the most that were cached at any time.
        """
        kinds = (kind.slots for kind in self.kinds)
        slots, policy = min(kinds, default=self.page_slots), self.engine_schedule.policy
        return min(cdiv(max_len + policy.recalled + policy.unit, slots), self.most_pages)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.num_pages(vllm_config.model_config.max_model_len) * self.page_size_bytes
