# SPDX-License-Identifier: Apache-2.0
"""One layer that the self-check runs on a device or in PyTorch, and the steps that it runs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_cascade.attention.backend import KVPolicyBackend
from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
from vllm_cascade.attention.cpu.paths import PyTorchPath
from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.layer import Exchanges
from vllm_cascade.attention.selfcheck_stores import Named, opened
from vllm_cascade.cache.layout import Pages
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.recall import unit_shape

SCALES = (0.25, 0.15)
"""A layer's scales of keys and values in 8 bits, where rows have none of their own.

Scales with a ratio of 2 would give floats of 8 bits the same values.
"""


@dataclass(frozen=True)
class LayerShape:
    """The properties of a model's layer that select kernels, on one tensor-parallel rank.

    Attributes:
        num_heads: query heads.
        block_size: tokens of a page.
        rotary_dim: rotated channels of a head; None: all, but a latent row's value.
        is_neox: whether rotated channels pair in NeoX style.
        slopes: ALiBi slopes of the query heads; None: keys are rotated.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 disables it.
        sinks: whether the layer has learned attention sinks.
        window: tokens that a query sees, itself included; None: all that the policy keeps.
        chunked: whether a query sees its own chunk of ``window`` tokens instead.
        latent: channels of a latent row's value, which is part of its key; None in other layers.
        cache_dtype: ``--kv-cache-dtype`` of rows in 8 bits; ``auto``: they have ``dtype``.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int = 16
    rotary_dim: int | None = None
    is_neox: bool = True
    slopes: tuple[float, ...] | None = None
    softcap: float = 0.0
    sinks: bool = False
    window: int | None = None
    chunked: bool = False
    latent: int | None = None
    cache_dtype: str = "auto"

    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        kind = "chunks" if self.chunked else "window"
        window = "" if self.window is None else f", {kind} of {self.window}"
        turning = "" if self.is_neox or self.rotary is None else ", neighbours rotated"
        if self.rotary is None and self.slopes is None:
            turning = ", nothing rotated"
        latent = "" if self.latent is None else f", latents of {self.latent}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        stored = "" if self.cache_dtype == "auto" else f", {self.cache_dtype} cache"
        return f"{heads}, {name}{turning}{window}{latent}{stored}"

    @property
    def rotary(self) -> Rotary | None:
        dim = self.head_size - (self.latent or 0) if self.rotary_dim is None else self.rotary_dim
        if self.slopes is not None or dim == 0:
            return None
        exponent = torch.arange(0, dim, 2) / dim
        return Rotary(1.0 / 10000.0**exponent, self.is_neox)

    def output_of(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_full((*query.shape[:2], self.latent or self.head_size), torch.nan)


@dataclass(frozen=True)
class Step:
    """Tokens of up to two requests: those seen before, and new ones."""

    firsts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: torch.Tensor
    drafts: bool = False
    """Whether all new tokens but the first are drafts."""

    @property
    def what(self) -> str:
        if self.drafts:
            return "drafts"
        if max(self.lengths) == 1:
            return "decode"
        return "mixed" if min(self.lengths) == 1 else "prompt"

    def common(self, device: torch.device) -> CommonAttentionMetadata:
        prefilling = [n > 1 and not self.drafts for n in self.lengths]
        table = self.table[: len(self.firsts)].to(device)
        return step_of(self.firsts, self.lengths, prefilling, table)


@dataclass(frozen=True)
class Rows:
    """Queries, keys and values of a step, rotated at the step's cache positions."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Reference(CPUKVPolicyImpl):
    """The CPU's implementation in plain PyTorch, whatever library there is."""

    def prepare(self, spec: KVPolicySpec, *args: Any, **kwargs: Any) -> None:
        KVPolicyImpl.prepare(self, spec, *args, **kwargs)
        self.path = PyTorchPath(self.layer_config, self.pages)


def with_copies(num_ranks: int) -> Exchanges:
    """Exchanges with ranks whose heads are copies of this one's.

    No rank waits for another, which may keep a verdict and check nothing.
    """
    return Exchanges(lambda mass: torch.cat([mass] * num_ranks, dim=-3), lambda mass, _: mass)


class Side:
    """One layer with its builder and pages on a device.

    Args:
        spec, full: of the layer, and of one without a window.
        backend: the device's; ``impl`` is its implementation, or another.
        num_ranks: tensor-parallel ranks, the others simulated by ``with_copies``.
    """

    def __init__(
        self,
        shape: LayerShape,
        spec: KVPolicySpec,
        full: KVPolicySpec,
        backend: type[KVPolicyBackend],
        impl: type[KVPolicyImpl],
        num_pages: int,
        most_tokens: int,
        device: torch.device,
        num_ranks: int,
    ) -> None:
        builder = backend.get_builder_cls()
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=most_tokens, max_num_seqs=2),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
        )
        self.shape, self.spec, self.device = shape, spec, device
        # 0xFF: NaN keys and values, and ranks that no slot has.
        self.pool = torch.full(
            (num_pages, spec.page_size_bytes), 0xFF, dtype=torch.uint8, device=device
        )
        heads, slots, width = shape.num_kv_heads, spec.page_slots, spec.row_size
        size = spec.dtype.itemsize
        self.cache = torch.as_strided(
            self.pool.view(spec.dtype),
            (num_pages, heads, slots, width),
            (spec.page_size_bytes // size, slots * width, width, 1),
        )
        generator = torch.Generator().manual_seed(7)
        sinks = torch.randn(shape.num_heads, generator=generator).to(device)
        self.impl = impl(
            *(shape.num_heads, shape.head_size, shape.head_size**-0.5, heads),
            *(None if shape.slopes is None else list(shape.slopes), shape.window, "auto"),
            shape.softcap or None,
            sinks=sinks if shape.sinks else None,
        )
        self.impl.latent, self.impl.kv_cache_dtype = shape.latent, shape.cache_dtype
        self.impl.exchanges = with_copies(num_ranks)
        rotary = shape.rotary
        if rotary is not None:
            rotary = Rotary(rotary.inv_freq.to(device), rotary.is_neox)
        self.impl.prepare(spec, self.cache, rotary, num_ranks, shape.dtype, SCALES)
        assert self.impl._pages is not None, "prepare() sets it"
        self.pages: Pages = self.impl._pages
        self.builder = builder(spec, ["layer"], config, device)
        self.builder.requests = Named()
        self.others = None
        if spec.window is not None:
            self.others = builder(full, ["other"], config, device)
            self.builder.follow(self.others)
        self.units: Any = None
        if spec.policy.recall:
            self._store(backend, config)

    def _store(self, backend: type[KVPolicyBackend], config: Any) -> None:
        """Let two requests have a store, of which the first page is the state's name."""
        spec = self.spec
        units = replace(unit_shape(spec, 1), in_8_bits=False)  # rows are compared as in the pages
        memory = backend.count_stores(units, spec.schedule, 1 << 40, config)
        stores = self.builder.stores = backend.make_stores(units, memory, self.device)
        self.impl.recall_from(stores, 0, spec.policy.recall_queries)
        self.units = opened(stores, (1, 1 + (len(self.pool) - 1) // 2), self.impl.recall)

    def plan(self, step: Step) -> Any:
        metadata = self.builder.build(0, step.common(self.device))
        if self.others is not None:  # publishes the positions
            self.others.build(0, step.common(self.device))
        return metadata

    def run(self, metadata: Any, rows: Rows) -> torch.Tensor:
        query, key, value = (x.to(self.device) for x in (rows.query, rows.key, rows.value))
        output = self.shape.output_of(query)
        layer = SimpleNamespace(layer_name="layer")
        return self.impl.forward(layer, query, key, value, self.cache, metadata, output)
