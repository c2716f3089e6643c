# SPDX-License-Identifier: Apache-2.0
"""Which variants of kernels a GPU would compile while it serves: none after the warm-up.

Triton compiles a kernel again for every new set of constants and argument types, and, unless told
not to, for numbers that are 1 or multiples of 16 and for pointers that are not aligned. Kernels are
not run here; their launches are looked at.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from vllm.config import CompilationConfig, CompilationMode, ObservabilityConfig
from vllm.utils import jit_monitor
from vllm.v1.worker import gpu_worker as vllm_worker

from tests.attention import test_windows
from tests.attention.conftest import use_triton
from tests.attention.test_cuda import AtOnce
from tests.attention.test_paged import PagedLayer, Shape
from tests.attention.test_rings import rings_of
from tests.attention.test_windows import WindowLayer, random_streams
from tests.policies.test_per_request import OTHERS
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.warm_up import _schedules, warm_up
from vllm_cascade.cache.states import StateSpec
from vllm_cascade.engine import gpu_worker
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies import registry
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.drafts import Drafted, Drafts

STRIDE = 256
POLICIES: dict[str, dict[str, Any]] = {
    "cascade": {"name": "cascade", "budget": 260, "num_subcaches": 2},
    "units": {"name": "h2o", "budget": 272, "unit": 16, "num_sinks": 16},
    "heads": {"name": "h2o", "budget": 260, "head_policy": "per_kv_head"},
    "sink": {"name": "sink", "budget": 260},
    "beehive": {"name": "beehive", "budget": 260},
    "scaled": {"name": "beehive", "budget": 260, "log_n": True},
    "random": {"name": "random", "budget": 260},
    "dgc": {"name": "dgc", "budget": 260, "importance": "tfidf"},
}
RECALL = {"unit": 16, "num_sinks": 16, "budget": 256, "recall": 2, "recall_store": 512}
RECALLING: dict[str, dict[str, Any]] = {
    "cascade": {**RECALL, "name": "cascade", "num_subcaches": 2, "recall_queries": 4},
    "sink": {**RECALL, "name": "sink"},
    "heads": {**RECALL, "name": "h2o", "head_policy": "per_kv_head", "recall_store": 16 * 19},
}
OF_RECALL = {"ask", "_judge", "_weigh", "_choose", "_bring", "_remember"}
OF_RECALL |= {"_keep_of_strides", "_list_gone", "_store_units"}
Variant = tuple[Any, ...]


def variant_of(kernel: InterpretedFunction, values: dict[str, Any]) -> Variant:
    """What a compiled kernel is kept under: its name and what is special about each argument."""
    plain = kernel.kwargs.get("do_not_specialize") or ()
    anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    found: list[Any] = [kernel.fn.__name__]
    for name, value in values.items():
        if name not in kernel.arg_names or kernel.fn.__annotations__.get(name) is tl.constexpr:
            found.append((name, value))
        elif isinstance(value, torch.Tensor):
            found.append((name, value.dtype, name in anywhere or value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in plain:
            found.append((name, value == 1, value % 16 == 0, value >= 2**31))
        else:
            found.append((name, type(value)))
    return tuple(found)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Variant]]:
    """Every variant that was launched so far; nothing runs."""
    seen: set[Variant] = set()

    def note(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        seen.add(variant_of(self, values))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    use_triton(monkeypatch)
    yield seen


PLAIN = Shape(dtype=torch.float16)
ODD = Shape(num_kv_heads=1, group=2, head_size=24, rotary_dim=24, dtype=torch.float16)
LATENT = Shape(
    num_kv_heads=1, group=5, head_size=48, rotary_dim=16, latent=True, dtype=torch.float16
)
IN_8_BITS = Shape(dtype=torch.float16, cache_dtype="fp8_per_token_head")


class Served:
    """Prompts as a scheduler would send them, next to a request that decodes.

    ``copied``: whether queries and keys are copies, and values are not.

    Block tables of 40 pages begin at multiples of 16 bytes, and those of 41 do not.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        shape: Shape = PLAIN,
        drafts: int = 0,
        pages: int = 40,
        drafting: bool = False,
        copied: bool = False,
    ) -> None:
        self.copied = copied
        self.shape, self.drafts, self.pages = shape, drafts, pages
        settings = settings | {"prefill_stride": STRIDE}
        self.layer = PagedLayer(self.shape, settings, 4 * pages + 1, drafts, drafting)
        if drafts:
            self.layer.impl.keep_drafts(8)
            self.layer.builder.drafts = Drafts(8, drafts)
        self.table = torch.arange(1, 4 * pages + 1).view(4, -1).int()
        self.rings = None
        if self.layer.policy.recall:
            self.rings = rings_of(self.layer, 8)
            self.rings.rings = {name: number for number, name in enumerate("abcd")}
            self.layer.builder.requests.names = lambda common: list("abcd")[: common.num_reqs]

    def evict(self, firsts: list[int]) -> None:
        """Let rings hold what requests of so many tokens have evicted."""
        assert self.rings is not None
        schedules = self.layer.builder.requests.schedules(None) or [self.layer.spec.schedule]
        for number, first in enumerate(firsts):
            schedule: Schedule = schedules[number % len(schedules)]
            self.rings.end[number] = int(schedule.evicted(np.asarray(first)))

    def run(self, lengths: list[int], firsts: list[int], prefilling: list[bool]) -> None:
        if self.rings is not None:
            self.evict(firsts)
        shape, table = self.shape, self.table[: len(lengths)]
        metadata = self.layer.builder.build(0, step_of(firsts, lengths, prefilling, table))
        query, key, value = self.rows(sum(lengths))
        output = query.new_zeros(*query.shape[:2], shape.value_size)
        layer = SimpleNamespace(layer_name="layer")
        self.layer.impl.forward(layer, query, key, value, self.layer.pool, metadata, output)

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as vLLM passes them: values are always views of the projection
        of all three, queries and keys are unless they were copied, as by a norm."""
        shape = self.shape
        heads, size = shape.num_kv_heads, shape.head_size
        queries = heads * shape.group
        if shape.latent:
            query, key = (torch.zeros(tokens, n, size, dtype=shape.dtype) for n in (queries, heads))
            return query, key, shape.value_of(key)
        fused = torch.zeros(tokens, (queries + 2 * heads) * size, dtype=shape.dtype)
        sizes = [n * size for n in (queries, heads, heads)]
        query, key, value = (part.unflatten(1, (-1, size)) for part in fused.split(sizes, dim=1))
        if self.copied:
            query, key = query.contiguous(), key.contiguous()
        return query, key, value

    def profile(self) -> None:
        """vLLM's profiling run, which has no metadata."""
        query, key, value = self.rows(7)
        output, layer = query.clone(), SimpleNamespace(layer_name="layer")
        self.layer.impl.forward(layer, query, key, value, self.layer.pool, None, output)

    def prompt(self, tokens: int, beside: bool) -> None:
        """A prompt in chunks of 4,096 at most, then its first own token."""
        for begin in range(0, tokens, 4096 - STRIDE):
            length = min(4096 - STRIDE, tokens - begin)
            if beside:
                self.run([1, length], [700, begin], [False, True])
            else:
                self.run([length], [begin], [True])
        self.run([1, 1], [700, tokens], [False, False])
        for first in range(1, self.drafts + 1):
            self.generate([1 + first], [700])
            self.generate([1 + first, 1 + first], [700, tokens])
            self.generate([1 + first, 1], [700, tokens])

    def prompts(self, lengths: list[int], first: int) -> None:
        """Parts of several prompts in one step, which begin alike."""
        self.run(lengths, [first] * len(lengths), [True] * len(lengths))

    def generate(self, lengths: list[int], firsts: list[int]) -> None:
        """Rows of a known token and drafts, all of which are rejected."""
        builder, names = self.layer.builder, ["a", "b"][: len(lengths)]
        builder.requests.names = lambda _: names
        builder.requests.schedule_of = lambda _: self.layer.spec.schedule
        rows = list(zip(names, lengths, firsts, strict=True))
        builder.drafts._drafted = {
            name: Drafted(name, first + 1, length - 1, self.drafts * (name == "b"))
            for name, length, first in rows
            if length > 1
        }
        self.run(lengths, firsts, [False] * len(lengths))
        builder.drafts._drafted.clear()
        rejected = [Drafted(n, f + 1, num - 1, 0) for n, num, f in rows if num > 1]
        pages = [list(range(1, 2 + first % self.pages)) for first in firsts]
        undone = builder.undone(rejected, pages[: len(rejected)])
        self.layer.impl.undo(undone)


@pytest.mark.parametrize("pages", [40, 41])
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_compiled_after_the_warm_up(
    name: str, pages: int, variants: set[Variant]
) -> None:
    everything_is_warm(Served(POLICIES[name], pages=pages), variants)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("name", ["cascade", "sink"])
def test_nothing_is_compiled_for_views_of_a_projection(
    name: str, group: int, copied: bool, variants: set[Variant]
) -> None:
    """Heads of 24 channels: from token to token is a multiple of 16 with an even number of heads in
    all. Contiguous queries and keys have other numbers of heads."""
    served = Served(POLICIES[name], replace(ODD, group=group), copied=copied)
    served.profile()
    everything_is_warm(served, variants)


@pytest.mark.parametrize("cls", [cls for cls, _ in OTHERS], ids=lambda cls: cls.__name__)
def test_installed_policies_do_not_stop_the_warm_up(
    cls: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for every policy, also one whose defaults the engine cannot have."""
    engine = compiled(resolve(POLICIES["cascade"]))
    before = _schedules(engine)
    monkeypatch.setitem(registry.POLICIES, "other", cls)
    assert _schedules(engine) == before


@pytest.mark.parametrize("name", ["cascade", "sink", "units"])
def test_a_layer_without_rotation_is_a_variant_of_its_own(
    name: str, variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM3 has such layers beside rotated ones: a worker warms both up."""
    served = Served(POLICIES[name])
    layer = served.layer
    view = layer.impl._pages
    assert view is not None
    parts = (served.shape.num_kv_heads, None, None, "auto")
    heads, size = served.shape.num_kv_heads * served.shape.group, served.shape.head_size
    plain = TritonKVPolicyImpl(heads, size, size**-0.5, *parts)
    plain.prepare(layer.spec, view.kv, None, 1, served.shape.dtype)
    assert plain.variant != layer.impl.variant
    worker = gpu_worker.GPUKVPolicyWorker.__new__(gpu_worker.GPUKVPolicyWorker)
    worker.use_v2_model_runner = True
    tables = SimpleNamespace(input_block_tables=[torch.zeros(4, served.pages)])
    worker.model_runner = SimpleNamespace(block_tables=tables)
    layers = {
        name: SimpleNamespace(impl=impl, kv_cache=layer.pool)
        for name, impl in (("a", layer.impl), ("b", plain), ("c", layer.impl))
    }
    monkeypatch.setattr(layer.builder, "layer_names", list(layers))
    monkeypatch.setattr(worker, "_builders", lambda: [layer.builder])
    monkeypatch.setattr(worker, "_all_layers", lambda: layers)
    monkeypatch.setattr(worker, "_token_groups", lambda: [0])
    worker._warm_up()
    warm = set(variants)
    for impl in (layer.impl, plain):
        layer.impl = impl
        served.prompt(3000, beside=True)
        served.prompt(300, beside=False)
    fresh = variants - warm
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


@pytest.mark.parametrize("name", ["cascade", "sink", "units"])
def test_nothing_is_compiled_for_shared_caches(name: str, variants: set[Variant]) -> None:
    """The warm-up of their owner runs what the layers run that attend to its cache."""
    served = Served(POLICIES[name])
    layer, size = served.layer, served.shape.head_size
    owner, pages = layer.impl, layer.impl._pages
    assert pages is not None
    heads = served.shape.num_kv_heads * served.shape.group
    sharer = TritonKVPolicyImpl(
        heads, size, size**-0.5, served.shape.num_kv_heads, None, None, "auto"
    )
    rotary = Rotary(layer.inv_freq, is_neox=True)
    where = pages.kv, rotary, 1, served.shape.dtype, (1.0, 1.0), ("sharer", 0)
    sharer.prepare(layer.spec, *where)
    alone = owner.variant
    sharer.attend_to(owner)
    assert owner.variant != alone, "a worker warms owners up beside other layers"
    warm_up(layer.builder, owner, layer.pool, served.pages)
    assert owner.waiting is None
    warm = set(variants)
    forward = owner.forward

    def both(one: Any, query: Any, key: Any, value: Any, *rest: Any) -> torch.Tensor:
        forward(one, query, key, value, *rest)
        other = SimpleNamespace(layer_name="sharer")
        return sharer.forward(other, query, None, None, *rest)

    owner.forward = both
    for first in (0, STRIDE, 12 * STRIDE):
        for length in (2, 15, 17, STRIDE):
            served.run([length], [first], [True])
            served.run([1, length, 3], [700, first, first], [False, True, True])
        served.run([1, 1], [700, first + 1], [False, False])
    assert owner.waiting is None
    fresh = variants - warm
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


@pytest.mark.parametrize("name", ["cascade", "sink"])
def test_nothing_is_compiled_for_latent_rows_after_the_warm_up(
    name: str, variants: set[Variant]
) -> None:
    everything_is_warm(Served(POLICIES[name], LATENT), variants)


@pytest.mark.parametrize("name", ["units", "sink", pytest.param("heads", marks=pytest.mark.slow)])
def test_nothing_is_compiled_for_drafts_after_the_warm_up(
    name: str, variants: set[Variant]
) -> None:
    """Heads of 24 channels: how rows of a step are aligned depends on the number of drafts."""
    everything_is_warm(Served(POLICIES[name], ODD, drafts=3), variants)
    assert {"_save_versions", "_undo"} <= names_of(variants)


@pytest.mark.parametrize("name", ["cascade", "units", "sink"])
def test_nothing_is_compiled_for_a_drafting_model(name: str, variants: set[Variant]) -> None:
    """Its steps are planned on the host, and a row's first token may be one that is undone."""
    served = Served(POLICIES[name], ODD, drafts=4, drafting=True)
    layer = served.layer
    builder = layer.builder
    warm_up(builder, layer.impl, layer.pool, served.pages)
    warm = set(variants)
    builder.requests.names = lambda common: list("abcd")[: common.num_reqs]
    builder.requests.schedule_of = lambda _: layer.spec.schedule
    for first in (0, 12 * STRIDE):
        for length in (2, 17, STRIDE, 3 * STRIDE + 5):
            begin = {"a": 701, "b": first + length}  # what is undone later
            builder.drafts._drafted = {
                name: Drafted(name, at, 0, 4 * row) for row, (name, at) in enumerate(begin.items())
            }
            served.run([1, length], [700, first], [False, True])
            served.run([2, 1], [700, first + length], [False, False])
            served.run([3, 2], [700, first + length - 1], [False, False])
            served.run([0, 1], [700, first + length], [False, False])
            served.run([1, 0], [702, first + length], [False, False])
            served.run([1, 1], [703, first + length + 2], [False, False])
            rejected = [Drafted("a", 701, 3, 0), Drafted("b", first + length, 3, 4)]
            pages = [list(range(1, 2 + one.begin % served.pages)) for one in rejected]
            layer.impl.undo(builder.undone(rejected, pages))
    chunked = layer.spec.schedule.keeps_newest is not None
    prefill = "_write_chunks" if chunked else "_insert_strides"
    assert {"_save_versions", "_undo", prefill} <= names_of(variants)
    assert "_schedule" not in names_of(variants)
    fresh = variants - warm
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


@pytest.mark.parametrize("pages", [40, 41])
@pytest.mark.parametrize("name", RECALLING)
def test_nothing_is_compiled_for_recall_after_the_warm_up(
    name: str, pages: int, variants: set[Variant]
) -> None:
    """Rows of evidence begin at multiples of 16 bytes where stores have 32 units, not with 19."""
    everything_is_warm(Served(RECALLING[name], pages=pages), variants)


@pytest.mark.parametrize("name", ["sink", "cascade"])
def test_nothing_is_compiled_for_recall_in_another_layer(
    name: str, variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer is warmed up for all. With 5 stores of 19 units, a store's numbers of units begin
    at a multiple of 16 bytes in the first layer only."""
    served = Served({**RECALLING[name], "recall_store": 16 * 19})
    layer, names = served.layer, served.rings.rings
    served.rings = rings = rings_of(layer, 5)
    rings.rings = names
    assert rings.born[0].data_ptr() % 16 == 0 != rings.born[1].data_ptr() % 16
    queries, plain = layer.policy.recall_queries, warm_up

    def in_the_first_layer(*arguments: Any) -> None:
        layer.impl.recall_from(rings, 0, queries)
        plain(*arguments)
        layer.impl.recall_from(rings, 1, queries)

    monkeypatch.setitem(globals(), "warm_up", in_the_first_layer)
    everything_is_warm(served, variants)


@pytest.mark.parametrize("shape", [LATENT, IN_8_BITS], ids=["latent", "8 bits"])
def test_nothing_is_compiled_for_recall_of_other_rows_after_the_warm_up(
    shape: Shape, variants: set[Variant]
) -> None:
    everything_is_warm(Served(RECALLING["cascade"], shape), variants)


def test_nothing_is_compiled_for_drafts_beside_recall_after_the_warm_up(
    variants: set[Variant],
) -> None:
    everything_is_warm(Served(RECALLING["sink"], ODD, drafts=3), variants)
    assert {"_save_versions", "_undo"} <= names_of(variants)


def test_nothing_is_compiled_where_strides_are_split(
    variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonKVPolicyImpl, "least_part", 64)
    served = Served(POLICIES["cascade"])
    everything_is_warm(served, variants)
    assert served.layer.impl._made.strides.attention.split.splits == 4


def names_of(variants: set[Variant]) -> set[str]:
    return {variant[0] for variant in variants}


def everything_is_warm(served: Served, variants: set[Variant]) -> None:
    """``variants`` are those of serving in the end."""
    layer, recalls = served.layer, served.rings is not None
    warm_up(layer.builder, layer.impl, layer.pool, served.pages)
    assert layer.builder.counters.tokens == 0, "a warm-up is nobody's tokens"
    assert served.rings is None or not served.rings.end.any(), "nor its units"
    warm = set(variants)
    variants.clear()
    chunked = layer.spec.schedule.keeps_newest is not None
    prefill = {"_write_chunks"} if chunked else {"_insert_strides"}
    needed = {"_schedule"} | prefill | (OF_RECALL if recalls else set())
    assert needed <= names_of(warm)
    rng = np.random.default_rng(0)
    lengths = [2, 15, 16, 17, STRIDE, STRIDE + 1, 2 * STRIDE, 5000, *rng.integers(1, 5000, 24)]
    for length in map(int, lengths):
        served.prompt(length, beside=bool(length % 2))
    for decoding in (1, 2, 3):  # the last token of a prompt stands at any place of a step
        firsts = [*[700] * decoding, 0]
        served.run([*[1] * decoding, STRIDE + 1], firsts, [False] * decoding + [True])
    for first in (0, 4 * STRIDE):
        for parts in ([17] * 2, [STRIDE, 3, 600], [2 * STRIDE + 1, 1, 33, STRIDE + 1]):
            served.prompts(parts, first)
    served.run([1, 1, 17, 1], [700, 700, 0, 700], [False, False, True, False])  # gathered rows
    own = PerRequest(layer.spec.schedule)
    asked: list[dict[str, Any]] = [{"kv_policy": "sink"}, {"kv_budget": 256}]
    if recalls:
        asked += [{"kv_policy": "sink", "kv_recall": 0}, {"kv_recall": 1}]
    for settings in asked:
        schedule = own.schedule(settings)
        layer.builder.requests.schedules = lambda common, schedule=schedule: (
            [schedule] * (common.num_reqs if common is not None else 1)
        )
        for length in (17, STRIDE + 1, 3000):
            served.prompt(length, beside=True)
    assert needed <= names_of(variants), "else this shows nothing"
    fresh = variants - warm
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


def test_nothing_is_compiled_for_a_window_after_the_warm_up(
    variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_triton(monkeypatch, AtOnce, test_windows)
    shape = Shape(dtype=torch.float16, sinks=True)
    settings = POLICIES["cascade"] | {"prefill_stride": STRIDE}
    layer = WindowLayer(shape, 100, settings)
    table = torch.arange(1, 1 + 2 * layer.spec.most_pages).view(2, -1).int()
    for builder in (layer.others, layer.builder):
        warm_up(builder, layer.impl, layer.pool, table.shape[1])
    assert layer.builder.counters.tokens == 0, "a warm-up is nobody's tokens"
    warm = set(variants)
    assert {"_write_chunks", "_attend", "_insert"} <= names_of(warm)
    rows = random_streams(shape, [5002, 5002])
    for length in (2, 15, 16, 17, STRIDE, STRIDE + 1, 4000):
        layer.step(rows, [700, 0], [1, length], [False, True], table)
        layer.step(rows, [0, 0], [length, 2], [True, True], table)
        layer.step(rows, [700, length], [1, 1], [False, False], table)
    fresh = variants - warm
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


@pytest.mark.parametrize("v2", [False, True])
def test_a_gpu_worker_warms_each_kind_up(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a drafting model. Before vLLM watches for late compilation, with tables as wide
    as the runner's."""
    calls: list[Any] = []
    monkeypatch.setattr(jit_monitor, "activate", lambda **settings: calls.append(settings["mode"]))
    monkeypatch.setattr(gpu_worker, "warm_up", lambda *arguments: calls.append(arguments))
    table = torch.zeros(3, 7, dtype=torch.int32)
    blocks = SimpleNamespace(block_table=SimpleNamespace(gpu=table))
    states = SimpleNamespace(kv_cache_spec=StateSpec.__new__(StateSpec))
    first = SimpleNamespace(block_tables=[None, blocks])
    worker = gpu_worker.GPUKVPolicyWorker.__new__(gpu_worker.GPUKVPolicyWorker)
    worker.use_v2_model_runner = v2
    worker.vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=True))
    worker.observability_config = ObservabilityConfig(jit_monitor_mode="error")
    worker.model_runner = SimpleNamespace(
        attn_groups=[[states], [SimpleNamespace(kv_cache_spec=None)]],  # each with its own tables
        block_tables=SimpleNamespace(input_block_tables=[None, table]),
        input_batch=SimpleNamespace(block_table=first),
    )
    builders = [CUDABuilder.__new__(CUDABuilder) for _ in range(3)]
    builders[0].layer_names, builders[1].layer_names = ["b", "a", "d"], ["c"]
    impls = {
        name: SimpleNamespace(variant=variant)
        for name, variant in zip("abcde", "xyzyz", strict=True)
    }
    layers = {n: SimpleNamespace(impl=impls[n], kv_cache=f"{n}.pool") for n in impls}
    drafting = builders.pop()
    drafting.layer_names = ["e"]
    worker._drafter = SimpleNamespace(builders=[drafting], drafts=SimpleNamespace())
    monkeypatch.setattr(worker, "_builders", lambda: builders)
    monkeypatch.setattr(worker, "_all_layers", lambda: layers)
    finish_warm_up(worker, monkeypatch)
    first, second = builders
    expected = [(first, "b"), (first, "a"), (second, "c"), (drafting, "e")]
    *warmed, mode = calls
    assert mode == "error" and sorted(warmed, key=str) == sorted(
        ((builder, impls[n], f"{n}.pool", 7) for builder, n in expected), key=str
    )


def finish_warm_up(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ``compile_or_warm_up_model``, of a worker that neither compiles nor captures."""
    monkeypatch.setattr(vllm_worker, "kernel_warmup", lambda worker: None)
    monkeypatch.setattr(vllm_worker, "warmup_kernels", lambda *arguments: None)
    monkeypatch.setattr(vllm_worker, "set_random_seed", lambda *arguments: None)
    monkeypatch.setattr(vllm_worker, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(vllm_worker, "enable_gpu_sync_check", lambda: None)
    monkeypatch.setattr(vllm_worker, "get_pp_group", lambda: SimpleNamespace(is_last_rank=False))
    compilation = CompilationConfig(mode=CompilationMode.NONE)
    worker.vllm_config.compilation_config = worker.compilation_config = compilation
    worker.model_runner.maybe_remove_all_loras = lambda config: None
    worker.model_runner.lora_config = None
    worker.model_config = SimpleNamespace(enforce_eager=True, seed=0)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=1)
    worker.parallel_config = SimpleNamespace(data_parallel_index=0)
    worker.execute_model = worker.sample_tokens = None
    worker.compile_or_warm_up_model()


def test_the_warm_up_runs_as_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's profile allocates what kernels write in place, and runs in inference mode."""
    seen: list[bool] = []
    with torch.inference_mode():
        buffer = torch.zeros(2)
    worker = gpu_worker.GPUKVPolicyWorker.__new__(gpu_worker.GPUKVPolicyWorker)
    monkeypatch.setattr(worker, "_token_groups", lambda: (0,))

    def writes(*_: Any) -> None:
        seen.append(torch.is_inference_mode_enabled())
        buffer.copy_(torch.ones(2))

    builder = CUDABuilder.__new__(CUDABuilder)
    builder.layer_names = ["a"]
    layer = SimpleNamespace(impl=SimpleNamespace(variant="x"), kv_cache=None)
    monkeypatch.setattr(worker, "_all_layers", lambda: {"a": layer})
    monkeypatch.setattr(worker, "_builders", lambda: [builder])
    monkeypatch.setattr(gpu_worker, "owners_of", lambda _: {})
    monkeypatch.setattr(gpu_worker, "warm_up", writes)
    worker._drafter, worker.use_v2_model_runner = None, True
    tables = SimpleNamespace(input_block_tables=[torch.zeros(1, 2)])
    worker.model_runner = SimpleNamespace(block_tables=tables)
    worker._warm_up()
    assert seen == [True] and buffer.tolist() == [1, 1]
