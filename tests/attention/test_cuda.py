# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's builder and implementation, on the CPU with interpreted kernels.

``tests/engine/test_triton_backend.py`` runs whole engines on them; here is what engines on a CPU
do not do: capture with empty block tables, padded batches, buffers that must stay where they are.
"""

import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from tests.attention import test_paged, test_quantised
from tests.attention.test_paged import (
    CASES,
    ENGINE,
    IN_UNITS,
    OWN,
    UNIT_CASES,
    PagedLayer,
    Shape,
    oracle_for,
)
from tests.attention.test_step import literal_rules
from vllm_cascade.attention.cuda import mail, rule_room, workspace
from vllm_cascade.attention.cuda.backend import CUDAKVPolicyBackend, CUDALatentBackend
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.mail import DeviceTables
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.cache.transfer import sent
from vllm_cascade.engine.gpu_worker import GPUKVPolicyWorker
from vllm_cascade.kernels import columns
from vllm_cascade.kernels.triton.prefill import StrideAttention
from vllm_cascade.kernels.triton.schedule import HEAD_COLUMNS, TABLE_COLUMNS
from vllm_cascade.kernels.triton.strides import Strides, Tokens
from vllm_cascade.policies import remembered
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.rules import Insertions, Rule
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.policies.simulate import simulate
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.plan import describe
from vllm_cascade.step.requests import RunnerV2Requests
from vllm_cascade.step.rows import RequestTokens

pytestmark = pytest.mark.usefixtures("triton")

CASCADE = {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 2}
RULES: dict[str, dict[str, Any]] = {
    "window": {"name": "window", "budget": 9},
    "sink": {"name": "sink", "budget": 9},
    "cascade": CASCADE,
    "h2o": {"name": "h2o", "budget": 14},
    "sink-overflow": {"name": "sink", "budget": 9, "overflow": 4},
    "lazy": {"name": "lazy", "budget": 12, "overflow": 6, "slack": 5, "max_drop": 2},
    "dgc": {"name": "dgc", "budget": 12},
    "beehive": {"name": "beehive", "budget": 20, "window": 4, "stride": 3, "threshold": 13},
    "cascade-overflow": {**CASCADE, "overflow": 3},
    "h2o-overflow": {"name": "h2o", "budget": 14, "overflow": 2, "normalise": True},
    # Most tokens are cached only late in the first period.
    "beehive-new": {"name": "beehive", "budget": 64, "window": 20, "stride": 5, "threshold": 30,
                    "threshold_counts": "new"},
    "lazy-cascade-overflow": {"name": "cascade", "budget": 48, "num_subcaches": 3, "overflow": 5,
                              "eager_fill": False},
}  # fmt: skip
NO_RULES: dict[str, dict[str, Any]] = {
    "clusters": {"name": "dgc", "budget": 12, "importance": "cluster"},
    "out-of-order": {"name": "dgc", "budget": 12, "order": "importance"},
}


def common(
    seq_lens: list[int], table: torch.Tensor, num_tokens: int | None = None
) -> CommonAttentionMetadata:
    """A decode batch as a runner describes it; a length of 0 is a padded row."""
    firsts, lengths = [max(n - 1, 0) for n in seq_lens], [int(n > 0) for n in seq_lens]
    step = step_of(firsts, lengths, [False] * len(lengths), table)
    num_tokens = num_tokens or sum(lengths)
    return step.replace(is_prefilling=None, num_actual_tokens=num_tokens, max_query_len=1)


def rules_in(step: list[int], more: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """The rules that a step row names."""
    first = step[columns.LO : columns.MORE]
    begin, num = step[columns.MORE : columns.PER_AGE]
    rules = [first, *more[begin : begin + num].tolist()] if first[2] else []
    return tuple(tuple(rule) for rule in rules)


@pytest.mark.parametrize("name", RULES)
def test_decode_rows_are_the_policys(name: str) -> None:
    """Every step of a long stream: position, slots and victims, from sequence lengths alone."""
    layer = PagedLayer(Shape(), {**RULES[name], "prefill_stride": 4}, 3)
    schedule, builder = layer.spec.schedule, layer.builder
    t = np.arange(200)
    lengths = [int(n) for n in t + 1]
    table = torch.ones(200, 2, dtype=torch.int32)
    metadata = builder.build(0, common(lengths, table))
    steps = metadata.waves[0].decode.steps
    counts = schedule.counts(t)
    expected = np.stack([t, counts, schedule.peaks(t), schedule.peaks(t + 1), t, t * 0 + 1], 1)
    assert torch.equal(steps[:, : columns.LENGTH + 1], torch.from_numpy(expected).int())
    for i in range(200):
        assert rules_in(steps[i].tolist(), metadata.rules) == literal_rules(schedule, i), i
    scoring = schedule.scoring
    assert (steps[:, columns.PER_AGE] == scoring.per_age).all()
    assert (steps[:, columns.NEWEST_STAYS] == (layer.policy.tie == "incoming")).all()
    average = steps[:, columns.DECAY :].contiguous().view(torch.float32)
    made = [scoring.decay, scoring.weight] if scoring.source == "attention" else [1.0, 0.0]
    assert torch.equal(average, torch.tensor([made]).expand(200, 2))
    assert torch.equal(builder.positions.buffer[:200], torch.from_numpy(counts).long())
    assert builder.counters.tokens == 200
    assert builder.counters.evicted_tokens == sum(counts + 1 - schedule.counts(t + 1))


def test_decode_rows_in_units() -> None:
    """A unit of 4 sinks and four more, by hand: slots with the first token, rules with the last."""
    settings = {"name": "sink", "budget": 16, "unit": 4, "prefill_stride": 4}
    layer = PagedLayer(Shape(), settings, 3)
    lengths = list(range(1, 101))
    decode = layer.builder.build(0, common(lengths, torch.ones(100, 2, dtype=torch.int32)))
    rows = decode.waves[0].decode.steps[:, : columns.MORE].tolist()
    for t, row in enumerate(rows):
        units, offset = divmod(t, 4)
        cached = 4 * min(units, 5) + offset
        old = 4 * min((t - 1) // 4, 5) + 4 if t else 0
        rules = [1, 2, 1, 0] if offset == 3 and units >= 5 else [0] * 4
        assert row == [t, cached, old, 4 * min(units, 5) + 4, t, 1, *rules], t
    cached = [row[columns.CACHED] for row in rows]
    assert layer.builder.positions.buffer[:100].tolist() == cached


def test_recalled_units_count_among_cached_tokens() -> None:
    """Factors of logits count all that a query sees, as in a step that the host plans."""
    settings = {"name": "beehive", "budget": 40, "unit": 4, "recall": 2, "prefill_stride": 4}
    layer = PagedLayer(Shape(), {**settings, "log_n": True, "log_n_counts": "cached"}, 3)
    t, ones = np.arange(100, 140), np.ones(40, dtype=np.int64)
    table = torch.ones(40, 5, dtype=torch.int32)
    decode = layer.builder.build(0, common((t + 1).tolist(), table)).waves[0].decode
    schedule = layer.spec.schedule
    assert (schedule.recalled(t) == 2).all()
    seen = schedule.counts(t) + 2 * 4 + 1
    expected = torch.from_numpy(np.log(seen) / np.log(512)).float()
    torch.testing.assert_close(decode.logit_scale, expected)
    tokens = RequestTokens([schedule] * 40, t, ones, np.arange(40), ones < 1)
    planned = describe(tokens, 4, lambda _: 0)
    assert decode.logit_scale.tolist() == planned.logit_scale.tolist()
    evicted = t + 1 - schedule.counts(t + 1) - (t - schedule.counts(t))
    assert layer.builder.counters.evicted_tokens == evicted.sum() > 0


@pytest.mark.parametrize("name", [*RULES, *NO_RULES])
def test_full_graphs_wherever_there_are_rules(name: str) -> None:
    settings = {**RULES, **NO_RULES}[name]
    layer = PagedLayer(Shape(), {**settings, "prefill_stride": 4}, 3)
    support = CUDABuilder.get_cudagraph_support(None, layer.spec)
    has_rules = name in RULES
    expected = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if has_rules else AttentionCGSupport.NEVER
    )
    assert support == expected
    assert layer.spec.schedule.moves_tokens != has_rules
    drafting = PagedLayer(Shape(), {**settings, "prefill_stride": 4}, 3, drafts=2)
    support = CUDABuilder.get_cudagraph_support(None, drafting.spec)
    assert support == (AttentionCGSupport.UNIFORM_BATCH if has_rules else support.NEVER)


@pytest.mark.parametrize(
    ("lengths", "prompts", "waves"),
    [
        ([3, 3, 0], [False] * 3, 3),
        ([2, 2], [False] * 2, 2),  # fewer drafts than there may be
        ([3, 2], [False] * 2, None),  # not equally many
        ([3, 3], [False, True], None),  # a prompt's stride of three
        ([4, 4], [False] * 2, None),  # more than a row has with drafts
    ],
)
def test_rows_of_equally_many_tokens_are_planned_on_the_device(
    lengths: list[int], prompts: list[bool], waves: int | None
) -> None:
    layer = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 40, drafts=2)
    table = torch.ones(len(lengths), 9, dtype=torch.int32)
    firsts = [n and 8 * n for n in lengths]
    metadata = layer.builder.build(0, step_of(firsts, lengths, prompts, table))
    on_device = [wave.rows is None for wave in metadata.waves]
    assert on_device == [waves is not None] * max(lengths) if waves else not any(on_device)
    if waves:
        assert [wave.decode.index for wave in metadata.waves] == [
            slice(wave, waves * len(lengths), waves) for wave in range(waves)
        ]
    counts = [layer.spec.schedule.count_at(f + i) for f, n in zip(firsts, lengths, strict=True)
              for i in range(n)]  # fmt: skip
    if not any(prompts):
        assert layer.builder.positions.buffer[: sum(lengths)].tolist() == counts


def test_profiling_takes_the_memory_of_drafts() -> None:
    """What layers keep beside the pool is counted before vLLM sizes it."""
    layer = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 3, drafts=3)
    impl = layer.impl
    impl._config = SimpleNamespace(
        additional_config={"kv_policy": {"recall": 0, **CASCADE}},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=5),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        use_v2_model_runner=True,
        model_config=SimpleNamespace(hf_text_config=None),
        speculative_config="ngram",
        num_speculative_tokens=3,
    )
    impl.reserve(torch.zeros(64, 4, 16))
    assert impl._held is not None
    taken = impl._held.nbytes
    impl.keep_drafts(5)
    assert impl._held is None and impl._saved is not None
    kept = impl._saved.rows.nbytes + impl._saved.words.nbytes
    assert kept <= taken <= 1.2 * kept
    impl.reserve(torch.zeros(64, 4, 16))
    assert impl._held is None, "later dummy runs take nothing more"


class Allocations(TorchDispatchMode):
    """Bytes of what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.sizes.append(made.nbytes)
        return made


@pytest.mark.parametrize("shares", [False, True])
def test_profiling_takes_the_memory_of_rows_that_wait(shares: bool) -> None:
    """Those of two owners of shared caches, with and without windows."""
    impl = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 3).impl
    own = {"num_kv_shared_layers": 2} if shares else {}
    impl._config = SimpleNamespace(
        additional_config={"kv_policy": {"recall": 0, **CASCADE}},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=5),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        use_v2_model_runner=True,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**own)),
        speculative_config=None,
    )
    query = torch.zeros(64, 4, 16)
    with Allocations() as made:
        impl.reserve(query)
    key = 64 * impl.num_kv_heads * 16 * 4
    waiting = 2 * (2 * query.nbytes + 2 * key)  # queries, outputs, keys and values
    assert (waiting in made.sizes) == shares


def test_buffers_stay_where_a_graph_found_them() -> None:
    layer = PagedLayer(Shape(), {**RULES["cascade"], "prefill_stride": 4}, 4)
    table = torch.tensor([[1], [2], [0], [0]], dtype=torch.int32)
    captured = layer.builder.build_for_cudagraph_capture(common([1, 1, 1, 1], table))
    tokens = captured.waves[0].decode
    assert tokens.steps[:, 0].tolist() == [0, 0, -1, -1]
    later = layer.builder.build(0, common([7, 31, 0, 0], table)).waves[0].decode
    assert tokens.steps.data_ptr() == later.steps.data_ptr() and tokens.index == slice(0, 4, 1)
    assert tokens.steps[:, 0].tolist() == [6, 30, -1, -1], "the captured rows are the new ones"
    assert layer.builder.positions.buffer[:4].tolist() == [6, 18, 0, 0]


@pytest.mark.parametrize("name", ["cascade", "beehive", "dgc", *NO_RULES, "in-units", "latent"])
def test_capture_and_warm_up_write_nothing(name: str) -> None:
    """Block tables of nothing but the null block, decode and prompt: not a byte changes."""
    settings = {**RULES, **NO_RULES, "in-units": IN_UNITS, "latent": CASCADE}[name]
    shape, heads = Shape(), 2
    if name == "latent":
        heads = 1
        shape = Shape(num_kv_heads=1, group=4, head_size=16, rotary_dim=4, latent=True)
    layer = PagedLayer(shape, {**settings, "prefill_stride": 4}, 3)
    before = layer.pool.clone()
    table = torch.zeros(3, 2, dtype=torch.int32)
    same = lambda x, _: x  # noqa: E731
    for lengths, prefilling in (([1, 1, 1], [False] * 3), ([9, 2, 1], [True] * 3)):
        total = sum(lengths)
        layer.step(
            *(lengths, [50, 0, 7], prefilling, table, torch.randn(total, 4, 16)),
            *(torch.randn(total, heads, 16), torch.randn(total, heads, 16), same),
        )
    assert torch.equal(layer.pool, before)


def test_padded_rows_beside_real_ones() -> None:
    """Two real requests in a batch of four: right outputs, zeros for padding, null block whole."""
    shape, settings = Shape(), {**CASCADE, "prefill_stride": 1}
    layer = PagedLayer(shape, settings, 5)
    table = torch.tensor([[3, 1], [4, 2], [0, 0], [0, 0]], dtype=torch.int32)
    null = layer.pool[0].clone()
    literal = [oracle_for(settings, shape, layer) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for t in range(30):
        query = torch.randn(4, 4, 16, generator=generator)
        key, value = torch.randn(2, 4, 2, 16, generator=generator)
        metadata = layer.builder.build(0, common([t + 1, t + 1, 0, 0], table, num_tokens=4))
        position = int(layer.builder.positions.buffer[0])
        turned = (
            literal[0].rotate(query, position).float(),
            literal[0].rotate(key, position).float(),
        )
        output = torch.full_like(query, torch.nan)
        layer.impl.forward(
            SimpleNamespace(layer_name="layer"), *turned, value, layer.pool, metadata, output
        )
        for row in range(2):
            expected = literal[row].step(
                query[row : row + 1], key[row : row + 1], value[row : row + 1]
            )
            torch.testing.assert_close(output[row].double(), expected[0], atol=2e-5, rtol=2e-5)
        assert (output[2:] == 0).all()
    assert torch.equal(layer.pool[0], null)
    assert layer.builder.counters.evicted_tokens == 2 * (30 - layer.spec.schedule.count_at(30))


class Comb(Policy):
    """Every second of the tokens behind the sinks stays, and no score decides."""

    name: ClassVar[str] = "comb"
    paper: ClassVar[str] = "none"
    cell: int = -2

    def insertions(self) -> Insertions:
        size, half = self.base_capacity, self.budget // 2
        rule = Rule(self.num_sinks, size, half, self.cell)
        return Insertions([()] * size + [(rule,)] + [()] * (half - 1), half)

    def regions(self, t: int, count: int) -> list[str]:
        return ["comb"] * count


@pytest.mark.parametrize("cell", [-2, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_cells_of_score_free_policies(
    cell: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of another package: the engine's own, or one that a request asks for."""
    monkeypatch.setitem(POLICIES, "comb", Comb)
    settings = {"name": "comb", "budget": 12, "num_sinks": 2, "prefill_stride": 4, "cell": cell}
    policy = resolve(settings)
    layer = PagedLayer(Shape(), RULES["sink"] if asked else settings, 3)
    if asked:
        layer.builder.requests.schedules = lambda common: [compiled(policy)]
    table, same = torch.tensor([[1, 2]], dtype=torch.int32), lambda x, _: x
    for step in simulate(policy, 60):
        rows = torch.randn(1, 4, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)
        layer.step([1], [step.t - 1], [False], table, *rows, same)
        slots = compiled(policy).peak_at(step.t)
        assert kept_tokens(layer.pages, table[0].long(), slots, step.t) == [step.kept], step.t
    assert len(step.kept) < 14 and layer.builder.counters.evicted_tokens == 60 - len(step.kept)


MIXED = [
    *("heads-max", "partial-interleaved", "alibi", "soft-cap", "lazy-1", "h2o-normalise-1"),
    *("sinks", "sinks-heads-1"),
    *("beehive", "beehive-log-n", "beehive-overflow", "heads-overflow-1"),
    *("dgc", "dgc-heads-overflow", "dgc-attention"),
    *("dgc-by-importance-overflow", "dgc-by-attention", "dgc-cluster-heads"),
]
LONG = (
    *("dgc", "dgc-attention", "dgc-heads-overflow", "heads-overflow-1", "sinks-heads-1"),
    *(
        "beehive",
        "h2o-normalise-1",
        "beehive-overflow",
        "partial-interleaved",
        "alibi",
        "sinks",
        "soft-cap",
    ),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in MIXED],
)
def test_mixed_requests(name: str) -> None:
    """The PyTorch path's own test of mixed batches, on the kernels."""
    shape, settings = CASES[name]
    prompts, totals = [1, 5, 23, 32, 48], [24, 5, 25, 32, 50]
    test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))


@pytest.mark.parametrize("name", ["random-heads", pytest.param("random-4", marks=pytest.mark.slow)])
def test_stored_numbers_are_those_drawn(name: str) -> None:
    test_paged.check_stored_numbers(None, *CASES[name])


FEW_UNITS = ["cascade-16-gqa8", "cascade-4-heads"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW_UNITS else pytest.mark.slow) for n in UNIT_CASES],
)
def test_mixed_requests_in_units(name: str) -> None:
    """Prompts that end inside a unit, one that fills the budget, decode on across units' ends."""
    shape, settings = UNIT_CASES[name]
    more = settings["budget"]
    prompts, totals = [1, 23, 40 + more], [6, 35, 60 + more]
    test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))


FEW_IN_8_BITS = ["heads"]
IN_8_BITS = {
    name: case
    for name, case in (test_quantised.SMALL | test_quantised.UNITS).items()
    if not case[0].latent and case[0].cache_dtype in CODES
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW_IN_8_BITS else pytest.mark.slow) for n in IN_8_BITS],
)
def test_mixed_requests_in_8_bits(name: str) -> None:
    shape, settings = IN_8_BITS[name]
    more = settings["budget"] if "unit" in settings else 8
    prompts, totals = [1, 23, 40 + more], [6, 27, 46 + more]
    test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))


class AtOnce(CUDABuilder):
    """All strides of a chunk in one launch, as where nobody traces."""

    def make_tables(self, limits: Any) -> None:
        super().make_tables(limits)
        self.whole_chunks = True


AT_ONCE = {
    **{name: CASES[name] for name in ("sink", "window", "sink-overflow", "lazy", "lazy-1")},
    **{f"{name}-units": UNIT_CASES[name] for name in ("sink-2", "window-4", "lazy-4")},
    "heads": (Shape(group=4), {**CASES["sink"][1], "head_policy": "per_kv_head"}),
    "interleaved": (Shape(is_neox=False, head_size=24, rotary_dim=12), CASES["lazy"][1]),
    "soft-cap": (Shape(softcap=2.0), CASES["sink"][1]),
    "sinks": (Shape(sinks=True, group=3), CASES["sink"][1]),
    "units-of-16": (
        Shape(block_size=32),
        {"name": "sink", "budget": 64, "num_sinks": 16, "unit": 16, "prefill_stride": 32},
    ),
}
RARE = ("lazy-1", "interleaved", "soft-cap", "sinks", "sink-2-units", "window-4-units")
"""Cases that are slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in AT_ONCE]
)
def test_strides_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stride of a chunk in one launch gives what one after another gives."""
    monkeypatch.setattr(test_paged, "CPUBuilder", AtOnce)
    shape, settings = AT_ONCE[name]
    more = settings["budget"] if settings.get("unit", 1) > 1 else 0
    prompts, totals = [1, 5, 23, 32, 60 + more], [14, 5, 27, 32, 66 + more]
    layer = test_paged.run_mixed_requests(None, shape, settings, prompts, totals, len(name))
    assert not layer.builder.finished.any(), "the next launch counts from 0"


@pytest.mark.parametrize("name", ["heads-max", "sink"])
def test_one_stride_a_launch_where_memory_is_short(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose gathered rows do not fit together are launched one after another."""
    rows: list[int] = []
    attend = StrideAttention.__call__

    def counted(self: StrideAttention, tokens: Tokens, strides: Strides) -> None:
        rows.append(strides.num_rows)
        attend(self, tokens, strides)

    monkeypatch.setattr(StrideAttention, "__call__", counted)
    monkeypatch.setattr(workspace, "MOST_GATHERED", 1)
    if name == "sink":
        monkeypatch.setattr(test_paged, "CPUBuilder", AtOnce)
    shape, settings = CASES[name]
    prompts, totals = [23, 32, 48], [27, 32, 54]
    test_paged.run_mixed_requests(None, shape, settings, prompts, totals, 5)
    assert rows and set(rows) == {1}


@pytest.mark.slow
def test_some_requests_at_once_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is compared in two of the batch's policies; in the others strides wait."""
    monkeypatch.setattr(test_paged, "CPUBuilder", AtOnce)
    prompts, totals = [1, 23, 52, 48, 60, 67], [70, 60, 60, 90, 66, 70]
    test_paged.run_mixed_requests(None, Shape(), ENGINE, prompts, totals, 3, asked=OWN)


@pytest.mark.slow
def test_requests_with_policies_of_their_own() -> None:
    """All of a batch's policies at once: budgets, victim rules, averages and ties of their own."""
    prompts, totals = [1, 23, 32, 48, 60, 7], [40, 44, 38, 60, 64, 24]
    layer = test_paged.run_mixed_requests(None, Shape(), ENGINE, prompts, totals, 3, asked=OWN)
    assert len(layer.builder.tables._places) == len(OWN)


OWN_IN_UNITS: list[dict[str, Any]] = [
    {},
    {"kv_budget": 16},
    {"kv_policy": "sink", "kv_budget": 12},
    {"kv_policy": "h2o", "kv_budget": 20},
    {"kv_policy": "window", "kv_budget": 8},
]


@pytest.mark.parametrize("unit", [1, 4])
def test_a_step_with_a_prompt_has_every_rows_own_numbers(unit: int) -> None:
    """Planned on the host, decode rows say the same as those that the device makes."""
    engine = ENGINE if unit == 1 else {**ENGINE, "num_sinks": 4, "unit": 4}
    layer = PagedLayer(Shape(), {**engine, "prefill_stride": 8}, 30)
    own = PerRequest(layer.spec.schedule)
    asked = [extra_args for extra_args, _ in OWN] if unit == 1 else OWN_IN_UNITS
    schedules = [own.schedule(extra_args) for extra_args in asked]
    builder, rows = layer.builder, len(asked)
    table = torch.arange(1, 1 + 4 * (rows + 1), dtype=torch.int32).view(rows + 1, 4)
    for t in range(40, 60):
        builder.requests.schedules = lambda _: schedules
        alone = builder.build(0, common([t + 1] * rows, table[:rows])).waves[0].decode
        made = with_rules(alone.steps)
        builder.requests.schedules = lambda _: [*schedules, layer.spec.schedule]
        step = step_of([t] * rows + [0], [1] * rows + [9], [False] * rows + [True], table)
        planned = builder.build(0, step).waves[0].decode
        assert torch.equal(with_rules(planned.steps), made)
        assert planned.index == slice(0, rows, 1)
    averages = made[:, columns.DECAY :].contiguous().view(torch.float32)
    assert len({tuple(row) for row in averages.tolist()}) > 2, "they differ from each other"


def with_rules(steps: torch.Tensor) -> torch.Tensor:
    """A copy; where a row has no further rules, it does not matter where they would begin."""
    steps = steps.clone()
    steps[:, columns.MORE] *= steps[:, columns.NUM_MORE] > 0
    return steps


def test_requests_with_budgets_of_their_own_where_no_rule_helps() -> None:
    """Strides in PyTorch beside single tokens by rules: each under its request's policy."""
    cluster = {**test_paged.CLUSTER, "prefill_stride": 8}
    asked = [
        ({}, cluster),
        ({"kv_budget": 9}, {**cluster, "budget": 9}),
        ({"kv_policy": "sink", "kv_budget": 7}, {"name": "sink", "budget": 7, "num_sinks": 2}),
    ]
    test_paged.run_mixed_requests(
        None, Shape(), cluster, [20, 23, 30], [45, 40, 42], 4, asked=asked
    )


def test_strides_in_pytorch_have_their_own_pages_only() -> None:
    """Beside recurrent layers pages have more slots than a block has tokens.

    What follows a request's pages in its row of the block table may be from an earlier batch.
    """
    slots, page = 64, 1
    layer = PagedLayer(Shape(), {**test_paged.CLUSTER, "prefill_stride": 32}, 4, slots=slots)
    assert layer.shape.block_size < 32 <= layer.spec.page_slots == slots
    table = torch.tensor([[page, 2, 3], [2, page, page]], dtype=torch.int32)
    metadata = layer.builder.build(0, step_of([0, 0], [32, 32], [True, True], table))
    found = [stride.pages.tolist() for wave in metadata.waves for stride, _ in wave.others]
    assert found == [[1], [2]]


def decode_steps(layer: PagedLayer, schedules: list[Schedule], length: int) -> None:
    """A decode batch under some schedules; its steps name their rules and positions."""
    builder = layer.builder
    builder.requests.schedules = lambda _: list(schedules)
    table = torch.ones(len(schedules), 10, dtype=torch.int32)
    metadata = builder.build(0, common([length] * len(schedules), table))
    steps = metadata.waves[0].decode.steps
    for schedule, step in zip(schedules, steps.tolist(), strict=True):
        assert rules_in(step, metadata.rules) == literal_rules(schedule, length - 1)
        assert step[columns.CACHED] == schedule.count_at(length - 1)


@pytest.mark.parametrize(
    ("bound", "most"), [("SPARE_ROWS", 400), ("MAX_SCHEDULES", 12), ("SPARE", 1)]
)
def test_policies_come_and_go(bound: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More policies than the tables hold: those not in the batch make way, rules stay right."""
    monkeypatch.setattr(rule_room if bound == "SPARE" else mail, bound, most)
    if bound == "SPARE":
        monkeypatch.setattr(rule_room, "MOST_RULES", 6)
    layer = PagedLayer(Shape(), {"name": "h2o", "budget": 150, "overflow": 3}, 3)
    tables = layer.builder.tables
    address = tables.rules.data_ptr()
    own = PerRequest(layer.spec.schedule)
    running = [layer.spec.schedule, own.schedule({"kv_budget": 9})]
    rows, schedules = [], []
    for budget in range(10, 40):
        for length in (budget + 4, budget + 5, budget + 6, budget + 7):
            decode_steps(layer, [*running, own.schedule({"kv_budget": budget})], length)
        rows.append(tables.schedules.table.shape[0])
        schedules.append(len(tables._places))
    assert max(schedules) <= 24 and schedules.index(3, 1), "unused schedules were forgotten"
    assert max(rows) <= 2048
    assert tables.rules.data_ptr() == address, "a captured graph has this address"


def test_schedules_of_running_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent once, however little else the tables hold."""
    monkeypatch.setattr(mail, "SPARE_ROWS", 10)
    monkeypatch.setattr(mail, "MAX_SCHEDULES", 1)
    layer = PagedLayer(Shape(), {"name": "h2o", "budget": 150, "overflow": 3}, 3)
    own, loaded = PerRequest(layer.spec.schedule), []
    running = [own.schedule({"kv_budget": budget}) for budget in range(10, 16)]
    append = DeviceTables._append

    def counted(tables: DeviceTables, schedules: list[Schedule]) -> None:
        loaded.extend(schedules)
        append(tables, schedules)

    monkeypatch.setattr(DeviceTables, "_append", counted)
    for length in range(100, 110):
        decode_steps(layer, running, length)
    assert loaded == running


def test_only_rows_of_new_schedules_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``keep_prompt`` each length of a short prompt brings a schedule of its own."""
    engine = compiled(resolve({"name": "sink", "budget": 300, "keep_prompt": 100}))
    tables, own = DeviceTables(engine, torch.device("cpu"), 4), PerRequest(engine)
    numbers: list[int] = []

    def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        numbers.append(tensor.numel())
        return sent(tensor, device)

    monkeypatch.setattr(mail, "sent", counted)
    first = own.schedule(None, 10)
    tables.numbers([first])
    place = tables._places[first.number]
    for kept in range(11, 60):
        new = own.schedule(None, kept)
        tables.numbers([engine, new])
        ours = len(new.leading) * TABLE_COLUMNS + HEAD_COLUMNS + new.further.size
        assert numbers[-1] == ours, "one transfer"
    assert len(numbers) == 50 and tables._places[first.number] == place, "rows stay valid"


def test_tables_keep_no_schedule_alive() -> None:
    engine = compiled(resolve({"name": "sink", "budget": 30}))
    tables = DeviceTables(engine, torch.device("cpu"), 4)
    other = Schedule(resolve({"name": "sink", "budget": 20}))
    tables.numbers([other])
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("raw", [{"name": "h2o", "overflow": 1500}, {"name": "beehive"}])
def test_kept_prompts_of_all_lengths_fit(raw: dict[str, Any]) -> None:
    """Each has as many rules as the engine, which may be more than ``MOST_RULES``."""
    engine = compiled(resolve({"budget": 440, "keep_prompt": 300, **raw}))
    assert len(engine.further) > 1000 or raw["name"] == "beehive"
    tables, own = DeviceTables(engine, torch.device("cpu"), 4), PerRequest(engine)
    address = tables.rules.data_ptr()
    for kept in range(10, 250, 4):
        tables.prune()
        step = [own.schedule(None, kept + i) for i in range(4)]
        numbers, begins = tables.numbers(step), [tables.begin(schedule) for schedule in step]
        assert tables.numbers(step).tolist() == numbers.tolist()
        for number, begin, schedule in zip(numbers, begins, step, strict=True):
            rules = tables.rules[begin : begin + len(schedule.further)]
            assert np.array_equal(rules.numpy(), schedule.further)
            first, transient, period = tables.schedules.heads[number, :3].tolist()
            assert (transient, period) == (schedule.transient, schedule.period)
            rows = tables.schedules.table[first : first + transient + period].numpy()
            assert np.array_equal(rows[:, 6], schedule.count)
            assert np.array_equal(rows[:, 4] - begin, schedule.leading[:, 4])
    assert tables.rules.data_ptr() == address, "a captured graph has this address"


def test_tables_of_counts_hold_no_rules() -> None:
    """As those that say positions of layers with windows, beside the layers' own."""
    settings = {"name": "h2o", "budget": 440, "overflow": 100, "keep_prompt": 300}
    engine = compiled(resolve(settings))
    tables, own = DeviceTables(engine, torch.device("cpu"), 4, with_rules=False), PerRequest(engine)
    for kept in range(10, 290, 7):
        tables.prune()
        schedule = own.schedule(None, kept)
        (number,) = tables.numbers([schedule])
        first, *sizes = tables.schedules.heads[number, :3].tolist()
        rows = tables.schedules.table[first : first + sum(sizes)].numpy()
        assert np.array_equal(rows[:, 6], schedule.count) and len(schedule.further)
    assert len(tables.rules) == 1 and len(DeviceTables(engine, tables.rules.device, 4).rules) > 1024


def test_decays_of_budgets_that_are_gone_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor for each decay, and clients choose decays with their budgets."""
    monkeypatch.setattr(remembered, "MAX_SCHEDULES", 2)
    builder = PagedLayer(Shape(), {**CASCADE, "budget": 256}, 3).builder
    table = torch.ones(1, 40, dtype=torch.int32)
    for budget in range(64, 256, 16):
        own = compiled(resolve({**CASCADE, "budget": budget}))
        builder.requests.schedules = lambda _, own=own: [own]
        (rows,) = builder.build(0, step_of([0], [8], [True], table)).waves[0].prefill
        assert rows.decays[1] == np.float32(own.scoring.weight * own.scoring.decay)
        del own, rows
        builder.requests.schedules = lambda _: []
        gc.collect()
        assert 0 < len(builder._decays) <= 4, "of those in the tables, and remembered"


def test_rules_of_one_step_stay_where_its_rows_point() -> None:
    """More schedules than are remembered come in one step of prompts, one after another."""
    engine = compiled(resolve({"name": "cascade", "budget": 1024, "prefill_stride": 64}))
    own = PerRequest(engine)
    asked = [{"kv_policy": "beehive", "kv_budget": 200 + 8 * i} for i in range(70)]
    schedules = [own.schedule(one) for one in asked]
    tables = DeviceTables(engine, torch.device("cpu"), max_requests=4)
    for step in range(1, len(schedules), 3):
        tables.prune()
        same = [schedules[0], *schedules[step : step + 3]]
        begins = [tables.begin(schedule) for schedule in same]
        for begin, schedule in zip(begins, same, strict=True):
            rules = tables.rules[begin : begin + len(schedule.further)]
            assert len(rules) > 0 and np.array_equal(rules.numpy(), schedule.further), step


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_dummy_run_of_the_second_runner_launches_nothing(num_requests: int) -> None:
    """2,048 tokens of which none is said to be a prompt's would be as many waves in a request."""
    layer = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 3)
    builder, num_tokens = layer.builder, 2048
    builder.positions.buffer = torch.zeros(num_tokens, dtype=torch.int64)
    states = SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={}))
    builder.requests = RunnerV2Requests(states, layer.spec.schedule, None)
    rows = InputBatch.make_dummy(
        num_requests, num_tokens, InputBuffers(num_requests, num_tokens, torch.device("cpu"))
    )
    table = torch.zeros(num_requests, 2, dtype=torch.int32)
    lengths = rows.num_scheduled_tokens.tolist()
    prefilling = rows.is_prefilling_np.tolist()
    step = step_of([0] * num_requests, lengths, prefilling, table)
    metadata = builder.build(0, step.replace(req_idx=rows.idx_mapping_np))
    assert len(metadata.waves) == 0
    query = torch.randn(num_tokens, 4, 8)
    output = torch.full_like(query, torch.nan)
    layer.impl.forward(
        *(SimpleNamespace(layer_name="layer"), query, query[:, :2], query[:, :2], layer.pool),
        *(metadata, output),
    )
    assert not output.any() and builder.counters.tokens == 0


def refused(backend: Any, sizes: Sequence[int], of_windows: bool = False) -> dict[int, list[str]]:
    """vLLM's reasons against a backend, by the size of a layer's heads.

    Args:
        of_windows: layers have a window and learned sinks.
    """
    return {
        size: backend.validate_configuration(
            head_size=size,
            dtype=torch.bfloat16,
            kv_cache_dtype="auto",
            block_size=16,
            use_mla=backend.is_mla(),
            has_sink=of_windows,
            has_sliding_window=of_windows,
            use_sparse=False,
            use_mm_prefix=False,
            use_per_head_quant_scales=False,
            device_capability=DeviceCapability(9, 0),
            attn_type="decoder",
        )
        for size in sizes
    }


def test_vllm_finds_and_accepts_the_backend() -> None:
    device = GPUKVPolicyWorker.device_entry
    register_backend(device.slot, device.backend)
    try:
        assert AttentionBackendEnum.CUSTOM.get_class() is CUDAKVPolicyBackend
    finally:
        device.slot.clear_override()
    reasons = refused(CUDAKVPolicyBackend, (64, 80, 96, 128, 256, 512, 520), of_windows=True)
    assert reasons.pop(520) == ["head_size not supported"]
    assert not any(reasons.values()), reasons
    assert CUDAKVPolicyBackend.get_preferred_block_size(16) == 16


def test_resolved_policy_is_used() -> None:
    """A guard for this file: the patched classes are the ones that ran."""
    layer = PagedLayer(Shape(), {**CASCADE, "prefill_stride": 4}, 3)
    assert type(layer.impl) is TritonKVPolicyImpl
    assert type(layer.builder) is CUDABuilder
    assert layer.policy == resolve({**CASCADE, "prefill_stride": 4, "trace": True})


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_scales_of_changed_weights(cache_dtype: str) -> None:
    test_quantised.test_scales_of_changed_weights(cache_dtype, "triton")


def test_changed_scales_stay_where_they_are() -> None:
    """Captured graphs read that memory, and so does what runs in PyTorch."""
    layer = PagedLayer(Shape(cache_dtype="fp8", scales=(0.25, 0.75)), CASCADE, 3)
    stored, quantised = layer.impl._stored, layer.impl._pages.quantised
    place = stored.scales.data_ptr()
    assert stored.scales.tolist() == [0.25, 0.75]
    layer.impl.read_scales((0.5, 2.0))
    assert layer.impl._stored is stored and stored.scales.data_ptr() == place
    assert stored.scales.tolist() == quantised.scales.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("cache_dtype", ["auto", *CODES])
@pytest.mark.parametrize("unit", [1, 16])
def test_nan_stays_nan(cache_dtype: str, unit: int) -> None:
    test_quantised.test_nan_stays_nan(cache_dtype, unit, "triton")


@pytest.mark.parametrize("cache_dtype", CODES)
def test_one_nan_is_read_as_pytorch_reads_it(cache_dtype: str) -> None:
    test_quantised.test_one_nan_is_read_as_pytorch_reads_it(cache_dtype, "triton")


@pytest.mark.parametrize("backend", [CUDAKVPolicyBackend, CUDALatentBackend])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_per_token_head"])
def test_checkpoints_with_scales_per_head(
    backend: type[CUDAKVPolicyBackend], cache_dtype: str
) -> None:
    """vLLM asks for every cache type; layers in steps of them are refused when they are set up."""
    latent = backend.is_mla()
    asked = 64, torch.bfloat16, cache_dtype, 16, latent, False, False, False, True
    assert not backend.validate_configuration(*asked, DeviceCapability(9, 0), "decoder")
