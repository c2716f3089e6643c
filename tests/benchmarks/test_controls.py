# SPDX-License-Identifier: Apache-2.0
"""Benchmark-only policies: the ablated variants do what they say."""

import numpy as np
import pytest
import torch

from benchmarks import perplexity
from benchmarks.inputs.texts import Stream
from benchmarks.perplexity import parse_args, policies
from benchmarks.running import controls
from benchmarks.running.controls import (
    BeehiveIntervals,
    BeehiveSwapped,
    CascadeWithoutSelection,
)
from benchmarks.running.scoring import cached, equal_policy
from tests.conftest import ROOT
from vllm_cascade import KVPolicyError
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.simulate import simulate


@pytest.fixture(autouse=True)
def registered():
    """The controls, for one test: other tests go through the product's registry."""
    controls.register()


def streamed(policy: Policy, num_tokens: int, stride: int) -> torch.Tensor:
    """Token indices kept after a stream, ``[1, count]``."""
    kept = torch.zeros(1, 0, dtype=torch.int64)
    for begin in range(0, num_tokens, stride):
        size = min(stride, num_tokens - begin)
        line = torch.cat([kept, torch.arange(begin, begin + size)[None]], dim=1)
        schedule = compiled(policy)
        mask = schedule.survivors(torch.zeros(line.shape), schedule.plan(begin, size))
        kept = line[mask][None]
    return kept


def test_cascade_without_selection_ignores_scores() -> None:
    shared = {"budget": 12, "num_sinks": 1, "num_subcaches": 3, "eager_fill": False}
    plain = CascadeWithoutSelection(**shared, prefill_stride=1)
    probs = np.random.default_rng(0).random((60, 60))
    *_, last = simulate(plain, 41, probs)
    # The keep-resident vector of an independent simulation (p = 40, S = 1, W = 4, N = 3).
    assert last.kept == [0, 13, 17, 21, 25, 29, 31, 33, 35, 37, 38, 39, 40]
    assert plain.scoring.source == "none", "the engine computes no scores for it"
    strided = CascadeWithoutSelection(**shared, prefill_stride=8)
    assert streamed(strided, 41, 8).tolist() == [last.kept]
    *_, other = simulate(POLICIES["cascade"](**shared, prefill_stride=1), 41, probs)
    assert other.kept != last.kept, "scores decide in the product's policy"


def test_beehive_variants() -> None:
    shared = {"budget": 12, "num_sinks": 1, "window": 3, "threshold": 9, "stride": 3}
    scores = torch.arange(14.0).unsqueeze(0)

    # 14 tokens: the sink, ten new ones in the middle, the window of three.
    def after(cls: type[Policy]) -> list[int]:
        policy = cls(**shared, prefill_stride=14)
        schedule = compiled(policy)
        stays = schedule.survivors(scores, schedule.plan(0, 14))
        return stays[0].nonzero().flatten().tolist()

    assert after(POLICIES["beehive"]) == [0, 3, 6, 9, 10, 11, 12, 13]
    assert after(BeehiveIntervals) == [0, 1, 4, 7, 10, 11, 12, 13]
    assert after(BeehiveSwapped) == [0, 2, 4, 6, 8, 10, 11, 12, 13]
    swapped = BeehiveSwapped(**shared, prefill_stride=1)
    assert max(compiled(swapped).counts(np.arange(400))) <= swapped.capacity
    counts = compiled(swapped).counts(np.arange(401))
    assert (counts[:-1] + 1 - counts[1:] >= 2).sum() > 20, "it evicts in batches"


@pytest.mark.parametrize("capacity", [100, 260, 516])
def test_equal_capacity_for_every_policy(capacity: int) -> None:
    peaks = {}
    for name in POLICIES:
        policy = resolve(equal_policy(name, capacity, num_sinks=4, prefill_stride=8))
        peaks[name] = int(compiled(policy).counts(np.arange(5000)).max())
        least, mean, most = cached(policy, 5000)
        assert least <= mean <= most == peaks[name] <= capacity
    step = POLICIES["cascade"].budget_step({})
    for name, peak in peaks.items():
        assert peak > capacity - (step if "cascade" in name else 1), name


def test_equal_capacity_in_units() -> None:
    """By hand: 16 sinks, 16 slots of the unit that is being filled, a budget of four units."""
    for capacity, budget in ((576, 512), (544, 512), (543, 448)):
        chosen = equal_policy("cascade", capacity, num_sinks=16, unit=16, prefill_stride=16)
        assert chosen["budget"] == budget
    for capacity, budget in ((200, 160), (207, 160), (208, 168)):  # less 8, 32 - 8 and 8
        lazy = equal_policy("lazy", capacity, unit=8, num_sinks=8, overflow=32, prefill_stride=8)
        assert lazy["budget"] == budget
    recall = equal_policy("sink", 516, num_sinks=16, unit=16, recall=8, prefill_stride=128)
    assert recall["budget"] == 352, "with 16 sinks, 16 slots to fill, 128 recalled tokens"


def test_equal_policy_refuses_what_cannot_be() -> None:
    with pytest.raises(KVPolicyError, match="no budget of cascade fits 20"):
        equal_policy("cascade", 20, num_sinks=4)
    with pytest.raises(KVPolicyError, match="unknown key"):
        resolve(equal_policy("sink", 100, num_subcaches=2))


def test_arms_are_the_registry() -> None:
    arms = policies(parse_args(["--capacity", "260"]), 64)
    assert set(arms) == set(POLICIES) - set(controls.CONTROLS)
    chosen = policies(parse_args(["--policies", "cascade", "--base", "window"]), 64)
    assert list(chosen) == ["cascade", "window"]


def test_arms_with_a_capacity_and_a_cache_type_of_their_own() -> None:
    study = str(ROOT / "benchmarks/inputs/studies/quantised.json")
    options = ["--no-full", "--reference-stride", "0", "--dtype", "float32"]
    args = parse_args(["--arms", study, "--base", "16 bits", *options])
    text = Stream("text", list(range(2000)), np.ones(1999, dtype=bool))
    made = {job.label: job.engine for job in perplexity.jobs(args, [text])}
    plain, twice = made["16 bits"], made["fp8, per token and head, twice the budget"]
    assert "kv_cache_dtype" not in plain.arguments | plain.policy
    assert twice.arguments["kv_cache_dtype"] == "fp8_per_token_head"
    assert (plain.policy["budget"], twice.policy["budget"]) == (512, 1024)
    held = perplexity.request_sizes(args, perplexity.jobs(args, [text]))
    assert list(held) == list(made)
    assert held["16 bits"]["pages"] * 2 - 1 == held["16 bits, twice the budget"]["pages"] == 33
    assert held["fp8, per tensor"]["bytes"] < held["16 bits"]["bytes"] / 3, "of 32 bits, here"
    assert (
        perplexity.request_sizes(parse_args(["--tokens", "9"]), perplexity.jobs(args, [text])[:1])
        == {}
    )
    every = parse_args(["--policies", "sink", "--kv-cache-dtype", "fp8", *options])
    (job, *_) = perplexity.jobs(every, [text])
    assert job.engine.arguments["kv_cache_dtype"] == "fp8"
