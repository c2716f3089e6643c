# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, presets, and one clear error for everything that cannot work."""

import difflib
import json
import pickle
import re
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cascade.policies import cascade, registry
from vllm_cascade.policies.arguments import CONFIG, FLAGS, Source, parse
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import CHOICES, POLICIES, discover, resolve
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.policies.settings import KVPolicyError, did_you_mean, shown
from vllm_cascade.policies.simulate import simulate

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"name": "cascad"}, "did you mean 'cascade'"),
    "policy of the wrong type": (
        {"name": 3},
        "choose from full, window, sink, cascade, beehive, lazy, dgc, h2o, random",
    ),
    "unknown key": (
        {"name": "cascade", "subcaches": 4},
        "policy.subcaches: unknown key for.*did you mean 'num_subcaches'",
    ),
    "another policy's key": (
        {"name": "sink", "num_subcaches": 4},
        "num_subcaches: unknown key for policy 'sink'",
    ),
    "budget zero": ({"name": "sink", "budget": 0}, "budget = 0: .*greater than or equal to 1"),
    "budget text": ({"name": "sink", "budget": "2k"}, "budget = '2k': .*valid integer"),
    "budget fraction": ({"name": "sink", "budget": 1.5}, "budget = 1.5: .*valid integer"),
    "sinks without end": ({"name": "sink", "num_sinks": 10**12}, "; lower num_sinks$"),
    "overflow without end": ({"name": "sink", "overflow": 10**9}, "; lower overflow$"),
    "base without end": (
        {"name": "cascade", "cascade_base": 10**9},
        "with cascade_base 1000000000 a budget must be a multiple of .*; lower cascade_base, or",
    ),
    "name without end": ({"name": "x" * 100_000}, r"unknown policy 'x{76}\.\.\., choose"),
    "budget true": ({"name": "sink", "budget": True}, "budget = True"),
    "negative sinks": ({"name": "sink", "num_sinks": -1}, "num_sinks = -1"),
    "window with sinks": ({"name": "window", "num_sinks": 4}, "num_sinks = 4"),
    "stride zero": ({"name": "sink", "prefill_stride": 0}, "prefill_stride = 0"),
    "head policy": ({"name": "sink", "head_policy": "each"}, "head_policy = 'each'.*per_kv_head"),
    "reduction": ({"name": "cascade", "head_reduction": "sum"}, "head_reduction = 'sum'.*median"),
    "gamma one": ({"name": "cascade", "ema_gamma": 1.0}, "ema_gamma = 1.0.*less than 1"),
    "gamma zero": ({"name": "cascade", "ema_gamma": 0.0}, "ema_gamma = 0.0.*greater than 0"),
    "tie": ({"name": "cascade", "tie": "newest"}, "tie = 'newest'.*incoming"),
    "tie null": ({"name": "cascade", "tie": None}, "tie = None.*incoming"),
    "preset": ({"name": "cascade", "preset": "best"}, "preset = 'best'.*paper"),
    "a list of presets": ({"name": "cascade", "preset": ["paper"]}, "preset = .*'paper'.*paper"),
    "endless memory": (
        {"name": "sink", "recall": 8, "recall_memory": float("inf")},
        "recall_memory = inf: .*finite",
    ),
    "memory without end": (
        {"name": "sink", "recall": 8, "recall_memory": 1e300},
        r"recall_memory = 1e\+300: .*less than or equal to 1048576",
    ),
    "no sub-caches": ({"name": "cascade", "num_subcaches": 0}, "num_subcaches = 0"),
    "base one": ({"name": "cascade", "cascade_base": 1}, "cascade_base = 1"),
    "eager as text": ({"name": "cascade", "eager_fill": "no"}, "eager_fill = 'no'"),
    "trace as text": ({"name": "cascade", "trace": "yes"}, "trace = 'yes'"),
    "budget not divisible": (
        {"name": "cascade", "budget": 1000},
        r"budget 1000 .*multiple of .* = 32; set it to 736$",
    ),
    "budget below one step": (
        {"name": "cascade", "budget": 20},
        r"multiple of .* = 32; set it to 32$",
    ),
    "positions": (
        {"name": "sink", "budget": 1000, "prefill_stride": 64},
        "num_sinks 4 .* budget 1000 .* prefill_stride 64 = 1068 positions, but the model has 1024"
        "; set it to at most 956",
    ),
    "positions, divisible": (
        {"name": "cascade", "budget": 1024, "prefill_stride": 64},
        "set it to at most 928",
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
        "prefill_stride 600 is larger than the 512 tokens of a prompt that a .*at most 512",
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
    assert parse({}) is parse({"other": 1}) is parse({"kv_policy": "full"}) is None
    assert parse({"kv_policy": {"name": "full"}}) is None
    assert parse({"kv_policy": "sink"}) == {"name": "sink"}
    chosen = {"name": "cascade", "budget": 512, "num_subcaches": 2}
    more = {"num_subcaches": 2}
    for written in (
        {"kv_policy": chosen},
        {"kv_policy": "cascade", "kv_budget": 512, "kv_policy_config": more},
        {"kv_policy": {"name": "cascade"}, "kv_policy_config": {"budget": 512, **more}},
        {"kv_policy": {"name": "cascade", "num_subcaches": 2}, "kv_budget": 512, "other": 1},
    ):
        assert parse(written) == chosen
    flags = {"kv_policy": "cascade", "kv_budget": 512, "kv_policy_config": more}
    found = parse(flags, FLAGS)
    assert found == chosen and found is not None
    copy = pickle.loads(pickle.dumps(found))
    assert copy == chosen and json.loads(json.dumps(found)) == chosen
    assert parse({"kv_policy": copy}).name("budget") == "--kv-budget"  # type: ignore[union-attr]


WRITTEN: list[tuple[Source, dict[str, Any], str]] = [
    (FLAGS, {"kv_policy": "sink", "kv_budget": 0}, "--kv-budget = 0: Input should be greater"),
    (
        FLAGS,
        {"kv_policy": "cascade", "kv_budget": 1000, "kv_policy_config": {"unit": 16}},
        "--kv-budget 1000 is not a whole number of units of 16 tokens; set it to 704, or change",
    ),
    (
        FLAGS,
        {"kv_policy": "h2o", "kv_budget": 2000, "kv_policy_config": {"window": 1500}},
        "--kv-budget 2000 is too large: .* model has 1024; set --kv-budget to 764 and "
        "--kv-policy-config.window to 764$",
    ),
    (FLAGS, {"kv_policy": "sink", "kv_policy_config": {"tie": 3}}, "--kv-policy-config.tie = 3: "),
    (
        CONFIG,
        {"kv_policy": {"name": "cascade", "budget": 1000}},
        r'^additional_config\["kv_policy"\]\["budget"\] 1000 does not fit .*; set it to 736$',
    ),
    (
        CONFIG,
        {"kv_policy": "cascade", "kv_budget": 1000},
        r'^additional_config\["kv_budget"\] 1000 does not fit',
    ),
    (
        CONFIG,
        {"kv_policy": "cascade", "kv_policy_config": {"base": 3}},
        r'^additional_config\["kv_policy_config"\]\["base"\]: unknown key for policy .cascade',
    ),
    (CONFIG, {"kv_policy": 7}, r'\["kv_policy"\] = 7: it must be the name of a policy or an obj'),
    (CONFIG, {"kv_policy": {"name": 7}}, r'\["kv_policy"\]\["name"\]: unknown policy 7, choose'),
    (CONFIG, {"kv_policy": {"budget": 7}}, r"no policy is named for .*; add additional_config"),
    (CONFIG, {"kv_policy": {"name": "full", "budget": 7}}, r"full.*takes no.*\[.budget.\]"),
]


@pytest.mark.parametrize(("source", "values", "message"), WRITTEN)
def test_settings_are_named_as_they_were_written(
    source: Source, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(KVPolicyError, match=message):
        given = parse(values, source)
        assert given is not None
        resolve(given, max_position=1024)


@pytest.mark.parametrize("given", [{}, {"kv_budget": 1}])
def test_a_default_that_does_not_fit_is_called_one(given: dict[str, int]) -> None:
    """In a model with four positions there is none that does."""
    written = parse({"kv_policy": "dgc", **given}, FLAGS)
    assert written is not None
    whose = "" if given else "the default "
    with pytest.raises(KVPolicyError, match=f"^{whose}--kv-budget 1 leaves no room for a global"):
        resolve(written, max_position=4)


NESTED: Any = []
for _ in range(990):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("value", "begins"),
    [
        ("x" * 4_000_000, "'xxxxx"),
        (10**4000, "10000"),
        (10**5000, "an integer of 16610 bits"),
        (NESTED, "[[["),
        ({"a": NESTED, "b": ["x" * 1000] * 1000}, "{'a': [["),
        (["short", 1, None, True, 1.5], "['short', 1, None, True, 1.5]"),
    ],
    ids=["text", "digits", "more digits", "nested", "object", "short"],
)
def test_a_message_shows_the_beginning_of_a_value(value: Any, begins: str) -> None:
    """Clients choose values; ``name`` and ``budget`` are those that they send."""
    assert shown(value).startswith(begins) and len(shown(value)) <= 80
    for key in ("kv_policy", "kv_budget"):
        with pytest.raises(KVPolicyError) as error:
            PerRequest(compiled(resolve({"name": "sink"}))).schedule({key: value})
        assert len(str(error.value)) < 300
    with pytest.raises(KVPolicyError) as error:
        resolve({"name": value})
    assert len(str(error.value)) < 300


def test_long_words_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with 4 MB took 0.6 s and 164 MB."""
    monkeypatch.setattr(difflib, "get_close_matches", None)
    assert did_you_mean("kv_budge" + "t" * 4_000_000, ["kv_budget"]) == ""
    monkeypatch.undo()
    assert did_you_mean("kv_buget", ["kv_budget"]) == "; did you mean 'kv_budget'?"


# --------------------------------------------------------------------- units of several tokens

NUMBER = "set it to a number of tokens, at least 1, or to 'page'"
DGC = {"name": "dgc", "unit": 16}
BEEHIVE = {"name": "beehive", "unit": 16, "budget": 160}
BAD_UNITS: dict[str, tuple[dict[str, Any], str]] = {
    "unit zero": ({"unit": 0}, f"unit = 0: {NUMBER}"),
    "unit negative": ({"unit": -16}, f"unit = -16: {NUMBER}"),
    "unit text": ({"unit": "block"}, f"unit = 'block': {NUMBER}"),
    "unit number as text": ({"unit": "16"}, f"unit = '16': {NUMBER}"),
    "unit fraction": ({"unit": 1.5}, f"unit = 1.5: {NUMBER}"),
    "unit true": ({"unit": True}, f"unit = True: {NUMBER}"),
    "a page, without an engine": (
        {"unit": "page"},
        "unit = 'page': only an engine has pages; here, set a number of tokens",
    ),
    "budget": (
        {"unit": 16, "budget": 100},
        "budget 100 is not a whole number of units of 16 tokens; set it to 96 or 112, or change",
    ),
    "budget below one unit": ({"unit": 16, "budget": 9}, "budget 9 is not .* set it to 16, or"),
    "sinks": ({"unit": 16, "num_sinks": 4}, "num_sinks 4 is not a whole .* set it to 16, or"),
    "stride": (
        {"unit": 16, "prefill_stride": 100},
        "prefill_stride 100 is not a whole number of units of 16 tokens; set it to 96 or 112",
    ),
    "stride of a token": ({"unit": 16, "prefill_stride": 1}, "prefill_stride 1 .*set it to 16,"),
    "overflow": ({"unit": 16, "overflow": 24}, "overflow 24 is not .* set it to 16 or 32, or"),
    "h2o's window": ({"name": "h2o", "unit": 16, "window": 40}, "window 40 is .* 32 or 48"),
    "lazy's slack": ({"name": "lazy", "unit": 16, "slack": 20}, "slack 20 is .* 16 or 32"),
    "lazy's max_drop": ({"name": "lazy", "unit": 16, "max_drop": 8}, "max_drop 8 is .* 16, or"),
    "dgc's clusters": (
        {**DGC, "importance": "cluster"},
        "importance cluster moves single tokens, .*; set it to tfidf, or set .*unit to 1",
    ),
    "dgc's order": (
        {**DGC, "order": "importance"},
        "order importance moves .*; set it to chronological, or set .*unit to 1",
    ),
    "dgc's global part": ({**DGC, "global_size": 40}, "global_size 40 is not .* 32 or 48, or"),
    "dgc of one unit": (
        {**DGC, "budget": 16},
        "leaves no room for .* recent unit; set it to at least 32",
    ),
    "beehive's window": ({**BEEHIVE, "window": 40}, "window 40 is not .* set it to 32 or 48"),
    "beehive without a middle": (
        {**BEEHIVE, "window": 160},
        "window 160 leaves nothing of the budget 160 for the middle; set it to at most 144",
    ),
    "cascade's budget": (
        {"name": "cascade", "unit": 16, "budget": 96},
        r"budget 96 does not fit 4 sub-caches .*multiple of .* and of num_subcaches \* unit 16: 64"
        "; set it to 64 or 128",
    ),
    "cascade's base": (
        {"name": "cascade", "unit": 8, "num_subcaches": 3, "cascade_base": 3, "budget": 24},
        ": 216; set it to 216$",  # the multiple of 3 * 3 * 3 and of 3 * 8
    ),
    "paper preset": (
        {"name": "cascade", "preset": "paper", "unit": 16},
        "num_sinks 4 is not a whole number of units of 16 tokens",
    ),
    "positions": (
        {"unit": 16, "budget": 1024},
        "num_sinks 16 .* budget 1024 .* prefill_stride 256 = 1296 positions, but the model has "
        "1024; set it to at most 752",
    ),
    "positions, overflow": (
        {"unit": 16, "budget": 1024, "overflow": 32},
        r"prefill_stride 256 \+ overflow 32 - 16 = 1312 positions.* at most 736",
    ),
    "positions, one batch": (
        {"unit": 16, "budget": 1024, "overflow": 16},
        r"prefill_stride 256 = 1296 positions",
    ),
}


@pytest.mark.parametrize("name", BAD_UNITS)
def test_bad_units(name: str) -> None:
    settings, message = BAD_UNITS[name]
    with pytest.raises(KVPolicyError, match=message):
        resolve({"name": "sink", **settings}, max_position=1024, max_num_batched_tokens=512)


LIMITS = {"max_position": 1024, "max_num_batched_tokens": 512, "block_size": 48}


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    budget=st.one_of(st.integers(1, 200), st.integers(1, 3000)),
    unit=st.sampled_from([1, 1, 16, 24, 32]),
    sizes=st.fixed_dictionaries(
        {},
        optional={
            "prefill_stride": st.integers(1, 700),
            "overflow": st.integers(1, 100),
            "recall": st.integers(0, 4),
            "recall_store": st.integers(1, 100),
            "window": st.integers(1, 900),
            "threshold": st.integers(1, 900),
            "threshold_counts": st.sampled_from(["middle", "new"]),
            "stride": st.integers(1, 5),
            "global_size": st.integers(1, 900),
            "importance": st.sampled_from(["tfidf", "attention", "cluster"]),
            "order": st.just("importance"),
            "idf": st.just("table"),
            "num_subcaches": st.integers(1, 5),
        },
    ),
)
def test_what_is_offered_is_accepted(
    name: str, budget: int, unit: int, sizes: dict[str, Any]
) -> None:
    """Every value that a message names as a fix passes every check, the model's among them."""
    own = {key: value for key, value in sizes.items() if key in POLICIES[name].model_fields}
    raw = {"name": name, "budget": budget, "unit": unit, **own}
    try:
        resolve(raw, **LIMITS)
    except KVPolicyError as error:
        fix = str(error).rpartition("; ")[2]
        numbers = {int(number) for number in re.findall(r"\b\d+\b", fix)}
        offered = {value for change in error.offers for value in change.values()}
        assert numbers == {value for value in offered if isinstance(value, int)}, str(error)
        for change in error.offers:
            resolve({**raw, **change}, **LIMITS)


@pytest.mark.parametrize(
    ("raw", "limits", "fix"),
    [
        ({"name": "cascade", "unit": 16, "budget": 96}, {}, "set it to 64 or 128"),
        ({"name": "cascade", "budget": 9000, "recall": 8}, {"max_position": 8192}, "7744, or ch"),
        ({"name": "sink", "unit": 16, "budget": 752, "overflow": 32}, LIMITS, "at most 736"),
        ({"name": "beehive", "budget": 64, "window": 64, "threshold": 8}, {}, ".*budget to 72"),
        ({"name": "sink", "unit": 24, "prefill_stride": 600}, LIMITS, "at most 504, or raise"),
        ({"name": "sink", "unit": 32, "budget": 64}, LIMITS, "unit to page and .*budget to 48, "),
    ],
)
def test_offers_of_several_checks(raw: dict[str, Any], limits: dict[str, Any], fix: str) -> None:
    """A value that a later check would refuse is replaced by one that it accepts."""
    limits = {key: limits[key] for key in limits if key != "block_size" or raw["unit"] == 32}
    with pytest.raises(KVPolicyError, match=fix) as caught:
        resolve(raw, **limits)
    assert caught.value.offers
    for change in caught.value.offers:
        resolve({**raw, **change}, **limits)


def test_a_unit_and_a_page() -> None:
    page = resolve({"name": "sink", "unit": "page"}, block_size=32)
    assert page == resolve({"name": "sink", "unit": 32}, block_size=32)
    assert resolve({"name": "sink", "unit": 16}, block_size=48).unit == 16
    for unit in (32, 96):
        with pytest.raises(KVPolicyError, match=f"unit {unit} does not divide a page of 48 tok"):
            resolve({"name": "sink", "unit": unit, "prefill_stride": 96}, block_size=48)


@pytest.mark.parametrize("unit", [2, 8, 16, 24, 32, 128, 512])
@pytest.mark.parametrize("name", POLICIES)
def test_defaults_of_units(name: str, unit: int) -> None:
    """Whole units of everything; lazy pruning in its own proportions; up to a unit more slots."""
    for limits in ({}, {"max_position": 8192, "max_num_batched_tokens": 2048}):
        policy = resolve({"name": name, "unit": unit}, **limits)
        assert policy.num_sinks == (0 if name == "window" else unit)
        assert policy.budget % unit == policy.prefill_stride % unit == 0
        assert 2048 - 4 * unit < policy.budget <= 2048
        assert 256 - unit < policy.prefill_stride <= 256 or policy.prefill_stride == unit
        waiting = 0
        if name == "lazy":
            drop = max(8, unit)
            sizes = (policy.max_drop, policy.slack, policy.overflow)
            assert sizes == (drop, 3 * drop, 4 * drop)
            waiting = 4 * drop - unit
        assert policy.capacity == policy.budget + policy.num_sinks + waiting + unit
        assert policy.max_position == policy.capacity - unit + policy.prefill_stride
        assert compiled(policy).peak_at(10**9) == policy.capacity
        assert policy.remarks() == []
        copy = pickle.loads(pickle.dumps(policy))
        assert copy == policy == resolve({"name": name, **policy.model_dump()}, **limits)
        assert policy.in_units.unit == 1 and policy.in_units.budget * unit == policy.budget


def test_defaults_of_units_fit_a_short_model() -> None:
    short = resolve({"name": "sink", "unit": 16}, max_position=128, max_num_batched_tokens=2048)
    assert (short.prefill_stride, short.budget, short.max_position) == (32, 80, 128)
    small = resolve({"name": "cascade", "unit": 16}, max_position=1024)
    assert small.budget == (1024 - 16 - 256) // 64 * 64
    assert resolve({"name": "sink", "unit": 24}, max_num_batched_tokens=100).prefill_stride == 48


def test_presets_and_units() -> None:
    assert resolve({"name": "cascade", "preset": "paper"}).unit == 1
    assert resolve({"name": "cascade"}).unit == 1
    one = resolve({"name": "sink", "unit": 16, "overflow": 1})
    assert one.in_units.overflow == 1 and one.waiting == 0, "one unit at a time"
    lazy = resolve({"name": "lazy", "unit": 16, "overflow": 1})
    assert "drops overflow = 16 tokens" in " ".join(lazy.remarks())


def test_units_of_one_requests_own() -> None:
    def own(policy: Policy, **asked: Any) -> Policy:
        return PerRequest(compiled(policy)).schedule(asked).policy

    cascade = resolve({"name": "cascade", "unit": 16, "budget": 256, "prefill_stride": 64})
    assert own(cascade, kv_budget=128) == cascade.model_copy(update={"budget": 128})
    sink = own(cascade, kv_policy="sink")
    assert (sink.unit, sink.num_sinks, sink.budget, sink.prefill_stride) == (16, 16, 256, 64)
    lazy = own(cascade, kv_policy="lazy")
    assert (lazy.unit, lazy.max_drop, lazy.budget) == (16, 16, 256 - 48)
    assert lazy.capacity == cascade.capacity
    window = own(resolve({"name": "window", "unit": 8, "budget": 64}), kv_policy="sink")
    assert (window.num_sinks, window.budget) == (8, 56)
    with pytest.raises(
        KVPolicyError, match=r"kv_budget 100 is not .* units of 16 .*; set it to 96 or 112$"
    ):
        own(cascade, kv_policy="sink", kv_budget=100)
    with pytest.raises(KVPolicyError, match=r"kv_budget 96 does not fit .*; set it to 64 or 128$"):
        own(cascade, kv_budget=96)
    with pytest.raises(KVPolicyError, match=r"kv_budget 256 .* needs up to 336 .* at most 208"):
        own(cascade, kv_policy="lazy", kv_budget=256)


def test_recall_in_settings() -> None:
    """Recalled units take slots and positions besides the budget."""
    plain = resolve({"name": "sink", "unit": 16, "budget": 256, "prefill_stride": 64})
    policy = resolve({"name": "sink", "budget": 256, "prefill_stride": 64, "recall": 4})
    assert policy.unit == 16, "units are the default"
    assert policy.capacity == plain.capacity + 64
    assert policy.max_position == plain.max_position + 64
    assert policy.keeps_ages and not plain.keeps_ages
    fitted = resolve({"name": "sink", "recall": 4, "prefill_stride": 64}, max_position=512)
    assert fitted.budget == 512 - 16 - 64 - 64


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"recall": 8, "unit": 1},
            "recall 8 needs units of .*; set it to 0, or set .*unit to 16",
        ),
        ({"recall": 8, "recall_store": 64}, "no room for 8 recalled units of 16 .* at least 128"),
        ({"recall": 30, "budget": 16}, "recall 30 x unit 16 = .*; lower recall"),
        ({"recall": -1}, "recall = -1"),
        ({"recall": True}, "recall = True"),
    ],
)
def test_recall_that_cannot_be(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        resolve({"name": "sink", "budget": 128, "prefill_stride": 64, **raw}, max_position=512)


def test_a_request_recalls_no_more_than_the_server() -> None:
    def own(**asked: Any) -> Policy:
        return PerRequest(compiled(engine)).schedule(asked).policy

    engine = resolve({"name": "cascade", "unit": 16, "budget": 256, "prefill_stride": 64})
    with pytest.raises(KVPolicyError, match=r"kv_recall 1 is more than the server's --kv-recall 0"):
        own(kv_recall=1)
    assert own(kv_recall=0) == engine
    engine = resolve({**engine.model_dump(), "name": "cascade", "recall": 3})
    assert own(kv_recall=2).recall == 2 and own(kv_budget=128).recall == 3
    sink = own(kv_policy="sink")
    assert (sink.recall, sink.budget, sink.capacity) == (3, 256, engine.capacity)
    with pytest.raises(
        KVPolicyError, match=r"kv_recall 4 is more than .* --kv-recall 3; set it to at most 3"
    ):
        own(kv_recall=4)


def test_every_policy_is_documented() -> None:
    assert ("full", *POLICIES) == CHOICES
    for cls in POLICIES.values():
        assert cls.__doc__ and cls.paper
        assert all(field.description for field in cls.model_fields.values())


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        ({"kv_budget": 512}, 'additional_config["kv_budget"]; add additional_config["kv_policy"] '),
        ({"kv-policy": "cascade"}, "[\"kv-policy\"] has no effect; did you mean 'kv_policy'"),
        ({"KV_POLICY": "cascade"}, "did you mean 'kv_policy'"),
        ({"kv_polcy": "cascade"}, "did you mean 'kv_policy'"),
        ({"kv_policy": "sink", "kv_budgets": 8}, "did you mean 'kv_budget'"),
        (
            {"kv_policy": {"name": "sink"}, "budget": 512},
            '["budget"] has no effect; write {"kv_policy": {"name": ..., "budget": ...}}',
        ),
        (
            {"kv_policy": "cascade", "num_subcaches": 2},
            '["num_subcaches"] has no effect; write {"kv_policy"',
        ),
        (
            {"kv_policy": {"name": "sink", "budget": 4}, "kv_budget": 4},
            'additional_config["kv_policy"]["budget"] and additional_config["kv_budget"] are the',
        ),
        (
            {"kv_policy": "sink", "kv_budget": 4, "kv_policy_config": {"budget": 4}},
            'additional_config["kv_policy_config"]["budget"] are the same',
        ),
        ({"kv_policy": "sink", "kv_policy_config": {"name": "sink"}}, '["name"] are the same'),
        (
            {"kv_policy": "sink", "kv_policy_config": [1]},
            '_config"] = [1]: Input should be a valid',
        ),
        ({"kv_policy": "full", "kv_budget": 4}, "full is stock vLLM and takes no settings"),
    ],
)
def test_settings_in_the_wrong_place(additional_config: dict[str, Any], message: str) -> None:
    """Each of them once ran silently: with other settings, or as stock vLLM."""
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        parse(additional_config)


# --- policies of other packages -------------------------------------------------------------------


def test_entry_points_must_name_policies_of_their_own() -> None:
    """Not a function, not another name, not a name that is taken; the errors say which."""
    group = "vllm_cascade.policies"
    values = {
        "sink": "vllm_cascade.policies.sink:Sink",
        "other": "vllm_cascade.policies.sink:Sink",
        "thing": "json:dumps",
        "gone": "no_such_module:Policy",
    }
    entries = [EntryPoint(name, value, group) for name, value in values.items()]
    found, errors = discover(entries, POLICIES)
    assert found == {} and set(errors) == set(values)
    assert "'sink' is taken" in errors["sink"]
    assert "'sink', not 'other'" in errors["other"] and "subclass" in errors["thing"]
    assert "no_such_module" in errors["gone"]
    found, errors = discover(entries[:1], {})
    assert found == {"sink": POLICIES["sink"]} and not errors


TIE = "resident"
PER_HEAD = {"head_policy": "per_kv_head", "head_reduction": "max"}
COMPARED = {**PER_HEAD, "tie": TIE, "normalise": True}
"""Settings about scores, none as by default."""


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"name": "sink", "recall_every": 2, "tie": "resident"}, {"recall_every", "tie"}),
        ({"name": "sink", "recall": 4, "recall_every": 2}, set()),
        ({"name": "h2o", "keep_prompt": 4}, {"keep_prompt"}),
        ({"name": "h2o", "keep_prompt": 5}, set()),
        (
            {"name": "cascade", "num_subcaches": 1, "cascade_base": 3, "head_reduction": "max"},
            {"cascade_base", "head_reduction"},
        ),
        ({"name": "cascade", "cascade_base": 3, "budget": 540, "tie": "resident"}, set()),
        ({"name": "window", "head_policy": "per_kv_head"}, {"head_policy"}),
        ({"name": "lazy", "head_policy": "per_kv_head"}, {"head_policy"}),
        ({"name": "sink", "head_policy": "per_kv_head"}, {"head_policy"}),
        ({"name": "sink", "head_policy": "per_kv_head", "recall": 4}, set()),
        ({"name": "dgc", "head_policy": "per_kv_head"}, {"head_policy"}),
        ({"name": "dgc", "head_policy": "per_kv_head", "recall": 4}, set()),
        ({"name": "dgc", "head_policy": "per_kv_head", "importance": "cluster"}, set()),
        ({"name": "dgc", "head_policy": "per_kv_head", "importance": "attention"}, set()),
        ({"name": "random", "head_policy": "per_kv_head"}, set()),
        ({"name": "beehive", "head_policy": "homogeneous"}, set()),
        ({"name": "cascade", "head_policy": "per_kv_head"}, set()),
        (
            {"name": "cascade", "num_subcaches": 1, "head_policy": "per_kv_head", "recall": 4},
            set(),
        ),
        ({"name": "cascade", "num_subcaches": 1, "head_policy": "per_kv_head"}, {"head_policy"}),
        ({"name": "h2o", "window": 511, **COMPARED}, set()),
        ({"name": "h2o", "window": 512, **COMPARED}, {*COMPARED}),
        ({"name": "h2o", "window": 512, "unit": 16, **COMPARED}, {*COMPARED}),
        (
            {"name": "h2o", "window": 512, "recall": 4, "head_policy": "per_kv_head", "tie": TIE},
            {"tie"},
        ),
        ({"name": "h2o", "budget": 1, "window": 1, **COMPARED}, {*COMPARED, "window"}),
        ({"name": "h2o", "budget": 16, "window": 16, "unit": 16}, {"window"}),
        ({"name": "h2o", "budget": 32, "unit": 16, **COMPARED}, set()),
        ({"name": "random", "window": 511, "seed": 3, "tie": TIE}, set()),
        ({"name": "random", "window": 512, "seed": 3, "tie": TIE}, {"seed", "tie"}),
        ({"name": "random", "budget": 1, "seed": 3}, {"seed"}),
        ({"name": "sink", "unit": 16, "overflow": 16}, {"overflow"}),
        ({"name": "h2o", "recall": 4, "overflow": 16}, {"overflow"}),
        ({"name": "h2o", "unit": 16, "overflow": 32}, set()),
        ({"name": "h2o", "unit": 16, "overflow": 1}, set()),
        ({"name": "h2o", "overflow": 1}, set()),
        ({"name": "lazy", "unit": 16, "overflow": 16}, set()),
        ({"name": "beehive", "log_n_counts": "seen"}, {"log_n_counts"}),
        ({"name": "beehive", "log_n_counts": "seen", "log_n": True}, set()),
    ],
)
def test_settings_without_effect(raw: dict[str, Any], expected: set[str]) -> None:
    policy = resolve({"budget": 512, **raw})
    assert policy.without_effect() & set(raw) == expected
    if not policy.recall:  # then the rules are those of the defaults, too
        others = {key: value for key, value in raw.items() if key not in expected}
        own, default = compiled(policy), compiled(resolve({"budget": 512, **others}))
        assert all(own.rules_at(t) == default.rules_at(t) for t in range(2000))


OTHER: dict[str, Any] = {"normalise": True, "seed": 7, "tie": "resident", "window": 16}


@pytest.mark.parametrize(
    "raw",
    [
        {"name": "h2o", "budget": 48, "window": 48},
        {"name": "h2o", "budget": 48, "window": 47},
        {"name": "h2o", "budget": 16, "unit": 16},
        {"name": "random", "budget": 48, "window": 48},
        {"name": "random", "budget": 48, "window": 47},
        {"name": "sink", "budget": 48},
    ],
    ids=str,
)
def test_what_is_kept_with_other_values(raw: dict[str, Any]) -> None:
    """The same exactly for settings without effect; ``sink``'s for a policy that has only those."""
    policy = resolve(raw)
    probs = np.random.default_rng(0).integers(0, 3, (300, 300)) / 2  # many are equal
    scores = None if raw["name"] == "random" else probs

    def kept(policy: Policy) -> list[list[int]]:
        return [step.kept for step in simulate(policy, 300, scores)]

    found = kept(policy)
    inert = policy.without_effect()
    for key in OTHER.keys() & type(policy).model_fields.keys():
        same = kept(policy.model_copy(update={key: OTHER[key]})) == found
        assert same or key not in inert, key
        assert not same or key in inert or key == "tie", key
    sink = {key: value for key, value in raw.items() if key != "window"} | {"name": "sink"}
    assert (kept(resolve(sink)) == found) == ("head_reduction" in inert and "tie" in inert)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("more", [{}, {"recall": 8}, {"unit": 16}, {"overflow": 32}], ids=str)
def test_defaults_and_presets_never_warn(name: str, more: dict[str, Any]) -> None:
    """Nor units and batches of the usual sizes."""
    presets = getattr(POLICIES[name], "presets", {})
    for raw in ({"name": name, **more}, *({"name": name, "preset": preset} for preset in presets)):
        policy = resolve(raw)
        assert policy.remarks() == [] and not policy.without_effect() & set(raw)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_subcaches": 11, "budget": 11264, "eager_fill": False},
            r"eager_fill False .* only after 2097152 units: .*; set it to True, or lower num_sub",
        ),
        (
            {"num_subcaches": 3, "cascade_base": 1100, "budget": 3_630_000},
            r"num_subcaches 3 makes rules .* 4840000 units: .*; lower num_subcaches, cascade_base",
        ),
    ],
)
def test_tables_of_rules_are_bounded(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        resolve({"name": "cascade", **changed})


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({"name": "beehive", "budget": 8192, "overflow": 2039}, 2016),
        ({"name": "cascade", "budget": 49152, "num_subcaches": 12, "overflow": 2039}, 2032),
        ({"name": "beehive", "budget": 8192, "unit": 4, "overflow": 8004}, 8000),
    ],
)
def test_tables_of_batches_are_bounded(changed: dict[str, Any], fits: int) -> None:
    """Rules repeat after the least common multiple of the policy's period and the batch."""
    message = (
        rf"overflow {changed['overflow']} makes rules .* only after \d+ units: .*it to {fits}$"
    )
    with pytest.raises(KVPolicyError, match=message):
        resolve(changed)
    resolve({**changed, "overflow": fits})


INTEGERS = [
    (name, key)
    for name, cls in POLICIES.items()
    for key, field in cls.model_fields.items()
    if field.annotation in (int, int | None)
]


@pytest.mark.parametrize(("name", "key"), INTEGERS)
@pytest.mark.parametrize("digits", [18, 4200, 5000])
def test_huge_numbers(name: str, key: str, digits: int) -> None:
    """They are refused in a short line before anything is computed from them."""
    for sign in (1, -1):
        with pytest.raises(KVPolicyError, match=rf"{key} = .*(at most|less than|greater)") as error:
            resolve({"name": name, "unit": 2, "recall": 1, key: sign * 10**digits})
        assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"name": "sink", "overflow": 10**9}, "overflow"),
        ({"name": "lazy", "overflow": 10**9}, "overflow"),
        ({"name": "cascade", "unit": 16, "overflow": 1 << 33}, "overflow"),
        ({"name": "sink", "budget": 10**9}, "budget"),
        ({"name": "h2o", "num_sinks": 10**9, "overflow": 2}, "num_sinks"),
        ({"name": "dgc", "keep_prompt": 10**9, "unit": 2}, "keep_prompt"),
        ({"name": "beehive", "budget": 10**9, "threshold_counts": "new"}, "budget"),
        ({"name": "sink", "recall": 10**9, "recall_store": 10**12}, "recall"),
    ],
)
def test_a_table_is_bounded_before_it_is_built(changed: dict[str, Any], key: str) -> None:
    message = rf"{key} {changed[key]} makes a table of \d+ rows of rules, .*; lower {key}$"
    with pytest.raises(KVPolicyError, match=message):
        resolve(changed)


def test_an_overflow_that_fits_is_soon_found() -> None:
    """Of a million, where the policy's rules repeat after an odd number of units."""
    with pytest.raises(KVPolicyError, match=r"overflow 1000000 makes rules .*; set it to \d+$"):
        resolve({"name": "cascade", "cascade_base": 3, "budget": 1080, "overflow": 1_000_000})


def test_a_requests_table_of_batches_is_bounded() -> None:
    """The server's rules repeat after 2,039 units; those of another policy only much later."""
    requests = PerRequest(compiled(resolve({"name": "h2o", "budget": 8192, "overflow": 2039})))
    with pytest.raises(KVPolicyError, match=r"overflow 2039 makes rules .* after \d{8} units"):
        requests.schedule({"kv_policy": "beehive"})
    assert requests.schedule({"kv_budget": 4000}).policy.budget == 4000


ADDED_ROWS = [
    {"name": "cascade", "budget": 16, "overflow": 5, "num_subcaches": 2, "eager_fill": False},
    {"name": "sink", "budget": 320, "unit": 4, "overflow": 24, "recall": 20},
    {"name": "cascade", "budget": 320, "unit": 4, "overflow": 28, "recall": 8},
]
"""Their tables have more periods: until peaks no longer rise, and until recall is full."""


@pytest.mark.parametrize(
    "raw",
    [
        *ADDED_ROWS,
        *(
            {"name": name, "budget": 320, "overflow": overflow}
            for name in ("cascade", "beehive", "h2o")
            for overflow in (6, 7, 64)
        ),
    ],
    ids=lambda raw: f"{raw['name']}-{raw['overflow']}",
)
def test_rows_of_batches(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts as many rows as there are."""
    is_longer = raw in ADDED_ROWS
    raw = {"recall": 0, "prefill_stride": 16, **raw}
    schedule = Schedule(resolve(raw))
    rows = len(schedule.count)
    assert (rows > len(schedule._batched().rules)) == is_longer
    monkeypatch.setattr(registry, "MOST_INSERTIONS", rows)
    resolve(raw)
    monkeypatch.setattr(registry, "MOST_INSERTIONS", rows - 1)
    with pytest.raises(KVPolicyError, match=f"repeat only after {rows} units") as refused:
        resolve(raw)
    (named,) = re.findall(r"set it to (\d+)", str(refused.value))
    resolve({**raw, "overflow": int(named)})


@pytest.mark.parametrize("eager_fill", [True, False])
@pytest.mark.parametrize(
    "settings_", [{"num_subcaches": 5}, {"num_subcaches": 3, "cascade_base": 3, "unit": 4}]
)
def test_rows_of_a_table_of_rules(
    eager_fill: bool, settings_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound counts as many rows as there are, within a period and the sinks."""
    raw = {"name": "cascade", "budget": 1080 if "unit" in settings_ else 800, **settings_}
    policy = resolve({**raw, "eager_fill": eager_fill}).in_units
    rows = len(policy.insertions().rules)
    period = policy.cascade_base ** (policy.num_subcaches - 1)
    slack = 2 * period + policy.num_sinks
    monkeypatch.setattr(cascade, "MOST_INSERTIONS", rows + slack)
    resolve({**raw, "eager_fill": eager_fill})
    monkeypatch.setattr(cascade, "MOST_INSERTIONS", rows - slack)
    with pytest.raises(KVPolicyError, match="makes rules that repeat only after"):
        resolve({**raw, "eager_fill": eager_fill})
