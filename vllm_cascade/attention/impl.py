# SPDX-License-Identifier: Apache-2.0
"""Base class of one attention layer under a policy, as vLLM calls it."""

from typing import Any, ClassVar, Protocol
from weakref import ref

import torch
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
)
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_cascade.attention.layer import WITH_OTHERS, Exchanges, LayerConfig, NewTokens
from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.cache.layout import Pages, page_views
from vllm_cascade.cache.quantised import CODES, Quantised
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.models.rotary import alibi_slopes as _slopes
from vllm_cascade.policies.random import salts_of
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.inputs import Undone


class LayerStore(Protocol):
    """One layer's part of the stores of evicted units."""

    @property
    def exchanged(self) -> int:
        """Units copied back into pages so far."""
        ...


class KVPolicyImpl(AttentionImpl[Any]):
    """One attention layer. A device implements ``run`` and ``recall_from``.

    Attributes:
        window: tokens of a query's window or chunk; None: all that the policy keeps.
        recall: the layer's evicted units; None without recall.
        recorder: records the kept tokens of every step while the policy is traced; the worker
            sets it.
        knows_windows: whether the device supports sliding windows.
        knows_sinks: whether the device supports learned sinks.
        knows_codes: whether the device supports quantised rows.
        knows_sharing: whether the device supports layers that attend to another layer's cache.
        judges_all: whether all stored units are judged by all keys and queries, however many.
        name: the layer's name, once prepared.
        token_strides: elements from token to token of the model's queries, keys and values; None
            before vLLM's profiling run, and in layers without keys.
        exchanges: with other tensor-parallel ranks that share the heads of a set.
        latent: channels of a latent row's value (``LayerConfig.latent``); None in other layers.
        spec: the pages that it will have. The worker sets it before vLLM's profiling run.
    """

    knows_windows: ClassVar[bool] = False
    knows_sinks: ClassVar[bool] = False
    knows_codes: ClassVar[bool] = False
    knows_sharing: ClassVar[bool] = False
    judges_all: ClassVar[bool] = False
    recall: LayerStore | None = None
    latent: int | None = None
    exchanges: Exchanges = WITH_OTHERS
    spec: KVPolicySpec | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        chunk_lookback: int = -1,
    ) -> None:
        refused = {
            "sliding windows": sliding_window is not None and not self.knows_windows,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV caches shared between layers": (
                kv_sharing_target_layer_name is not None and not self.knows_sharing
            ),
            "learned attention sinks": sinks is not None and not self.knows_sinks,
            "chunks that see earlier ones": chunk_lookback >= 0,
        }
        for feature, present in refused.items():
            if present:
                raise KVPolicyError(
                    f"kv_policy: the model uses {feature}, which no policy supports on this "
                    "device; use --kv-policy full"
                )
        if kv_cache_dtype in CODES and not self.knows_codes:
            raise KVPolicyError(
                f"kv_policy: --kv-cache-dtype {kv_cache_dtype} is not built for this device; set "
                "it to auto"
            )
        self.window = sliding_window
        self.sinks = sinks  # weights are loaded after this
        self._own_sinks: torch.Tensor | None = None
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = _slopes(alibi_slopes)
        self.drafting = False  # set by the worker once the model is loaded
        self.recorder: Recorder | None = None
        self.name = ""
        self.token_strides: tuple[int, int, int] | None = None
        self._called_in: ref[ForwardContext] | None = None
        self._first_rotary = 0
        self._layer: LayerConfig | None = None
        self._pages: Pages | None = None

    @property
    def layer_config(self) -> LayerConfig:
        """The layer's constants, once prepared."""
        assert self._layer is not None, "prepare() was not called"
        return self._layer

    @property
    def pages(self) -> Pages:
        """The layer's page pool, once prepared."""
        assert self._pages is not None, "prepare() was not called"
        return self._pages

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Copy learned sinks while their parameter is the layer's own.

        Later, vLLM's prefetch offloading may point it at a buffer that layers share.
        """
        self.read_sinks()

    def prepare(
        self,
        spec: KVPolicySpec,
        kv_cache: torch.Tensor,
        rotary: Rotary | None,
        num_ranks: int = 1,
        dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        place: tuple[str, int] = ("", 0),
    ) -> None:
        """Set up the layer's constants; called once the page pool exists.

        Args:
            num_ranks: tensor-parallel ranks that share the model's heads.
            dtype: dtype of new rows; None uses the cache's dtype, which must not be quantised.
            scales: per-tensor quantisation scales of keys and values.
            place: name of the layer, and index of its first KV head among those of all ranks.
        """
        self.name = place[0]
        slopes, device = self.alibi_slopes, kv_cache.device
        if slopes is not None:
            self.alibi_slopes = slopes = slopes.to(device)
            slopes = slopes.view(self.num_kv_heads, -1)
        # All ranks must keep the same tokens if they share the heads of a set.
        shared = spec.policy.head_policy == "homogeneous" or spec.latent
        together = num_ranks > 1 and shared and spec.window is None  # windows compare no scores
        if self._own_sinks is None:
            self.read_sinks()
        if self._own_sinks is not None:
            self._own_sinks = self._own_sinks.to(device)
        sinks, rotation = self._own_sinks, None
        if rotary is not None:
            rotation = rotation_table(
                rotary.inv_freq, spec.max_distance, device, forward=spec.policy.recalled
            )
            self._first_rotary = rotary.begin
        quantised = Quantised.of(self.kv_cache_dtype, scales, self.latent, device)
        self._pages = page_views(kv_cache, spec, quantised)
        self._layer = LayerConfig(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            num_sets=spec.num_sets,
            scale=self.scale,
            softcap=self.softcap,
            slopes=slopes,
            rotation=rotation,
            is_neox=rotary is None or rotary.is_neox,
            uses_attention=spec.policy.uses_attention,
            reduction=spec.policy.head_reduction,
            gather_heads=self.exchanges.gather_heads if together else None,
            over_ranks=self.exchanges.over_ranks if together else None,
            window=spec.window,
            chunked=spec.chunked,
            sinks=None if sinks is None else sinks.view(self.num_kv_heads, -1),
            dtype=dtype,
            salts=self._salts_of(spec, place, device),
            latent=self.latent,
        )

    def _salts_of(
        self, spec: KVPolicySpec, place: tuple[str, int], device: torch.device
    ) -> torch.Tensor | None:
        """``LayerConfig.salts`` of a policy whose scores are drawn."""
        if spec.policy.scoring.source != "random":
            return None
        layer, head = place
        # Ranks that share the heads of a set, or hold the same latent rows, draw the same numbers.
        apart = spec.policy.head_policy == "per_kv_head" and not spec.latent
        salts = salts_of(layer, head if apart else 0, spec.num_sets)
        return torch.from_numpy(salts).to(device)

    def run(self, name: str, metadata: Any, new: NewTokens, kv_cache: torch.Tensor) -> None:
        """Attend and update the cache.

        Args:
            name: the layer's name.
            metadata: the metadata from the device's builder.
            kv_cache: the layer's page pool, for steps that run before ``prepare``.
        """
        raise NotImplementedError

    def read_sinks(self) -> None:
        """Copy learned sinks from the model's weights; later calls write to the same memory."""
        if self.sinks is None:
            return
        if self._own_sinks is None:
            # On the host: what is on the device now may be dropped when the engine sleeps.
            self._own_sinks = self.sinks.detach().to("cpu", torch.float32, copy=True)
        else:
            self._own_sinks.copy_(self.sinks.detach())

    def read_scales(self, scales: tuple[float, float]) -> None:
        """Take new scales of keys and values, in the memory that graphs have read."""
        quantised = None if self._pages is None else self._pages.quantised
        if quantised is not None and quantised.scales is not None:
            quantised.scales.copy_(torch.tensor(scales))

    def attend_to(self, owner: Any) -> None:
        """Attend to another layer's cache; called once, in the order of layers."""
        raise NotImplementedError

    def recall_from(self, stores: Any, index: int, most_queries: int) -> None:
        """Enable recall of evicted units; called once, after ``prepare``.

        Args:
            stores: what the backend's ``make_stores`` returned.
            index: the layer's index in the stores.
            most_queries: queries of a stride that select units, at most.
        """
        raise NotImplementedError

    @property
    def recalled_units(self) -> int:
        """Units copied back into the layer's pages so far; may wait for the device."""
        return 0 if self.recall is None else self.recall.exchanged

    def keep_drafts(self, most_requests: int) -> None:
        """Save what draft tokens change, for ``undo``; called once, after ``prepare``."""
        raise NotImplementedError

    def undo(self, undone: Undone) -> None:
        """Undo rejected drafts; called between steps."""
        raise NotImplementedError

    def _forget(self, undone: Undone) -> None:
        """Drop rejected drafts from the recording, if there is one."""
        if self.recorder is not None:
            ends, first_pages = undone.rows[:, 3].tolist(), undone.table[:, 0].tolist()
            for end, page in zip(ends, first_pages, strict=True):
                self.recorder.forget(self.name, page, end)

    def check_one_call(self, name: str) -> None:
        """Check that the model calls the layer once in a forward pass; called with new keys.

        Every call inserts tokens. A model that runs its layers several times, with one cache, would
        insert each of them several times.

        Raises:
            KVPolicyError: it was called in this forward pass before.
        """
        if not is_forward_context_available():
            return
        context = get_forward_context()
        if self._called_in is not None and self._called_in() is context:
            raise KVPolicyError(
                f"kv_policy: the model calls {name} several times in a step, and every token would "
                "be cached several times; use --kv-policy full for this model"
            )
        self._called_in = ref(context)

    def reserve(self, query: torch.Tensor) -> None:
        """Allocate the worst batch's working memory, so that memory profiling counts it."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer's attention.

        Args:
            key, value: None in a layer that attends to another layer's cache.
            attn_metadata: None in a profiling run, where there is no cache yet.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported")
        if key is not None:
            self.check_one_call(layer.layer_name)
        if attn_metadata is None:
            if key is not None and value is not None:
                self.token_strides = query.stride(0), key.stride(0), value.stride(0)
            self.reserve(query)
            return output.zero_()
        if self._first_rotary:  # a stored key begins with its rotary channels
            query = query.roll(-self._first_rotary, -1)
            key = None if key is None else key.roll(-self._first_rotary, -1)
        # Only a layer with its own cache reads key and value.
        rows: Any = (query, key, value, output)
        self.run(layer.layer_name, attn_metadata, NewTokens(*rows), kv_cache)
        return output
