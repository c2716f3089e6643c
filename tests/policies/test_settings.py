# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, presets, and one clear error for everything that cannot work."""

import json
import pickle
from typing import Any

import pytest

from vllm_cascade.policies import CHOICES, POLICIES, compiled, resolve
from vllm_cascade.policies.settings import KVPolicyError, raw_settings

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"name": "cascad"}, "did you mean 'cascade'"),
    "policy of the wrong type": (
        {"name": 3},
        "choose from full, window, sink, cascade, beehive, lazy, dgc, h2o",
    ),
    "unknown key": ({"name": "cascade", "subcaches": 4}, "unknown key 'subcaches'.*num_subcaches"),
    "another policy's key": ({"name": "sink", "num_subcaches": 4}, "unknown key 'num_subcaches'"),
    "budget zero": ({"name": "sink", "budget": 0}, "budget = 0: .*greater than or equal to 1"),
    "budget text": ({"name": "sink", "budget": "2k"}, "budget = '2k': .*valid integer"),
    "budget fraction": ({"name": "sink", "budget": 1.5}, "budget = 1.5: .*valid integer"),
    "budget true": ({"name": "sink", "budget": True}, "budget = True"),
    "negative sinks": ({"name": "sink", "num_sinks": -1}, "num_sinks = -1"),
    "window with sinks": ({"name": "window", "num_sinks": 4}, "num_sinks = 4"),
    "stride zero": ({"name": "sink", "prefill_stride": 0}, "prefill_stride = 0"),
    "head policy": ({"name": "sink", "head_policy": "each"}, "head_policy = 'each'.*per_kv_head"),
    "reduction": ({"name": "cascade", "head_reduction": "sum"}, "head_reduction = 'sum'.*median"),
    "gamma one": ({"name": "cascade", "ema_gamma": 1.0}, "ema_gamma = 1.0.*less than 1"),
    "gamma zero": ({"name": "cascade", "ema_gamma": 0.0}, "ema_gamma = 0.0.*greater than 0"),
    "tie": ({"name": "cascade", "tie": "newest"}, "tie = 'newest'.*incoming"),
    "preset": ({"name": "cascade", "preset": "best"}, "preset = 'best'.*paper"),
    "no sub-caches": ({"name": "cascade", "num_subcaches": 0}, "num_subcaches = 0"),
    "base one": ({"name": "cascade", "cascade_base": 1}, "cascade_base = 1"),
    "eager as text": ({"name": "cascade", "eager_fill": "no"}, "eager_fill = 'no'"),
    "trace as text": ({"name": "cascade", "trace": "yes"}, "trace = 'yes'"),
    "budget not divisible": (
        {"name": "cascade", "budget": 1000},
        r"budget 1000 .*multiple of .* = 32; nearest good values: 992 or 1024",
    ),
    "budget below one step": (
        {"name": "cascade", "budget": 20},
        r"multiple of .* = 32; nearest good values: 32$",
    ),
    "positions": (
        {"name": "sink", "budget": 1000, "prefill_stride": 64},
        "num_sinks 4 .* budget 1000 .* prefill_stride 64 = 1068 positions, but the model has 1024"
        "; lower the budget to at most 956",
    ),
    "positions, divisible": (
        {"name": "cascade", "budget": 1024, "prefill_stride": 64},
        "lower the budget to at most 928",
    ),
    "positions, stride": (
        {"name": "sink", "budget": 64, "prefill_stride": 1024},
        "lower prefill_stride and the budget",
    ),
    "positions, overflow": (
        {"name": "lazy", "budget": 1000, "prefill_stride": 64},
        r"prefill_stride 64 \+ overflow 32 - 1 = 1099 positions.*at most 925",
    ),
    "stride above the step": (
        {"name": "sink", "budget": 64, "prefill_stride": 600},
        "prefill_stride 600 is larger than max_num_batched_tokens 512.*at most 512",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name: str) -> None:
    settings, message = BAD[name]
    with pytest.raises(KVPolicyError, match=message):
        resolve(settings, max_position=1024, max_num_batched_tokens=512)


@pytest.mark.parametrize("name", POLICIES)
def test_defaults(name: str) -> None:
    policy = resolve({"name": name}, max_position=8192, max_num_batched_tokens=2048)
    heads = "per_kv_head" if name == "beehive" else "homogeneous"
    assert (policy.budget, policy.prefill_stride, policy.head_policy) == (2048, 256, heads)
    assert policy.num_sinks == (0 if name == "window" else 4)
    assert policy.overflow == (32 if name == "lazy" else 1)
    assert policy.capacity == policy.budget + policy.num_sinks + policy.overflow - 1
    assert compiled(policy).peak_at(10**9) == policy.capacity
    assert policy.remarks() == []


def test_default_budget_is_the_largest_that_fits() -> None:
    small = resolve({"name": "cascade"}, max_position=1024, max_num_batched_tokens=2048)
    assert small.prefill_stride == 256
    assert small.budget == (1024 - 4 - 256) // 32 * 32
    wide = resolve({"name": "cascade", "num_subcaches": 5}, max_position=1024)
    assert wide.budget == (1024 - 4 - 256) // 80 * 80
    tiny = resolve({"name": "sink"}, max_position=128, max_num_batched_tokens=2048)
    assert (tiny.prefill_stride, tiny.budget) == (32, 92)
    assert resolve({"name": "sink"}, max_num_batched_tokens=100).prefill_stride == 64
    assert resolve({"name": "sink"}, max_position=None).budget == 2048


def test_paper_preset() -> None:
    paper = resolve({"name": "cascade", "preset": "paper", "budget": 2048})
    assert (paper.num_sinks, paper.num_subcaches, paper.cascade_base) == (4, 4, 2)
    assert not paper.eager_fill
    assert (paper.tie, paper.prefill_stride, paper.head_reduction) == ("resident", 1, "mean")
    assert paper.gamma == pytest.approx(0.01 ** (1 / 512))
    assert resolve({"name": "cascade", "preset": "paper", "tie": "incoming"}).tie == "incoming"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_travels(name: str) -> None:
    """It is pickled to workers, hashed as a cache key and written as JSON into the config."""
    policy = resolve({"name": name, "budget": 64})
    copy = pickle.loads(pickle.dumps(policy))
    assert copy == policy and hash(copy) == hash(policy)
    settings = json.loads(json.dumps({"name": policy.name, **policy.model_dump()}))
    assert resolve(settings) == policy
    with pytest.raises(Exception, match="frozen"):
        policy.budget = 1


def test_where_settings_come_from() -> None:
    assert raw_settings({}) is None
    assert raw_settings({"other": 1}) is None
    assert raw_settings({"kv_policy": "sink"}) == {"name": "sink"}
    assert raw_settings({"kv_policy": "full"}) is None
    assert raw_settings({"kv_policy": {"name": "full"}}) is None
    with pytest.raises(KVPolicyError, match="policy name or an object"):
        raw_settings({"kv_policy": 7})
    with pytest.raises(KVPolicyError, match='has no "name"'):
        raw_settings({"kv_policy": {"budget": 7}})
    with pytest.raises(KVPolicyError, match=r"full.*takes no"):
        raw_settings({"kv_policy": {"name": "full", "budget": 7}})


def test_every_policy_is_documented() -> None:
    assert ("full", *POLICIES) == CHOICES
    for cls in POLICIES.values():
        assert cls.__doc__ and cls.paper
        assert all(field.description for field in cls.model_fields.values())
