# SPDX-License-Identifier: Apache-2.0
"""A request's own budget and policy: what it gets, and what cannot be had.

How the front-end refuses: ``tests/engine/test_admission.py``; pages and snapshots of such requests:
``tests/cache/test_own_policies.py``.
"""

import weakref
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cascade.policies import per_request as module
from vllm_cascade.policies import remembered, schedule
from vllm_cascade.policies.h2o import H2O
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import Arithmetic, compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.sink import Sink

CASCADE = resolve({"name": "cascade", "budget": 1024, "prefill_stride": 64, "num_sinks": 8})
SINK = resolve({"name": "sink", "budget": 1000, "prefill_stride": 64})


PLACES = {"name": "kv_policy", "budget": "kv_budget", "recall": "kv_recall"}


def own(policy: Policy, **asked: Any) -> Policy:
    """The policy of one request of an engine."""
    return PerRequest(compiled(policy)).schedule(asked).policy


def test_a_request_that_asks_for_nothing_has_the_engines_schedule() -> None:
    requests = PerRequest(compiled(CASCADE))
    nothing: list[Any] = [None, {}, {"forced": [1]}, {"kv_transfer_params": {}}]
    nothing += [{"kv_budget": None}, {"kv_policy": None, "kv_budget": None}]
    for extra_args in nothing:
        assert requests.schedule(extra_args) is requests.engine is compiled(CASCADE)


def test_the_same_values_are_the_same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are told apart by identity: a request's is made once, the engine's never again."""
    requests = PerRequest(compiled(CASCADE))
    asked = {"kv_policy": "sink", "kv_budget": 100}
    small = requests.schedule(asked)
    assert requests.schedule({**asked, "forced": [1]}) is small is not requests.engine
    assert requests.schedule({"kv_policy": "sink", "kv_budget": 101}) is not small
    assert PerRequest(compiled(CASCADE)).schedule(asked) is small, "as in another part of vLLM"
    schedule._remembered.clear()  # what was not asked for in a long time is forgotten
    monkeypatch.setattr(module, "compiled", lambda _: pytest.fail("compiled again"))
    assert requests.schedule(asked) is small
    for values in ({"kv_policy": "cascade"}, {"kv_budget": 1024}):
        assert requests.schedule(values) is requests.engine
    assert requests.schedule({"kv_policy": "cascade", "kv_budget": 1024}) is requests.engine


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MAX_SCHEDULES", 5)
    requests = PerRequest(compiled(SINK))
    for budget in range(1, 30):
        assert requests.schedule({"kv_budget": budget}).policy.budget == budget
        assert len(requests._known) <= 5


@pytest.mark.usefixtures("no_collections")
def test_their_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length of a short prompt has a table, which may be long; one in use stays the same."""
    monkeypatch.setattr(schedule, "_remembered", remembered.Remembered())
    engine = compiled(resolve({"name": "cascade", "budget": 512, "keep_prompt": 64}))
    requests = PerRequest(engine)
    first = requests.schedule(None, 1)
    monkeypatch.setattr(remembered, "MAX_ROWS", 3 * first.num_rows + 300)
    for length in range(2, 40):
        assert requests.schedule(None, length).policy.keep_prompt == length
        assert len(requests._known) <= 3 and len(schedule._remembered) <= 3
    same = requests.schedule(None, 1) is first and compiled(engine.policy) is engine
    assert same
    gone = weakref.ref(first)
    del first
    for length in range(2, 10):
        requests.schedule(None, length)
    assert gone() is None, "its memory is free"
    monkeypatch.setattr(remembered, "MAX_ROWS", 1)
    own = requests.schedule(None, 50)
    assert requests.schedule(None, 50) is own and len(requests._known) == 1


def test_tables_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a schedule whose rules are its policy's own, and of one that several values mean."""
    kept = {"name": "sink", "budget": 100, "keep_prompt": 50}
    one = compiled(resolve(kept))  # 100 + 50 tokens fill the cache; one more rule repeats
    batched = compiled(resolve({**kept, "overflow": 8}))
    assert (one.num_rows, batched.num_rows) == (151, 151 + 150 + 8 + 8)
    units = {"name": "sink", "budget": 96, "keep_prompt": 48, "unit": 16, "recall": 8}
    recalling = compiled(resolve(units))
    assert recalling.num_rows == 10 + (10 + 8), "until 8 units have been evicted"
    monkeypatch.setattr(remembered, "MAX_ROWS", 151 + 106)
    requests = PerRequest(one)
    for length in range(1, 40):  # all without a kept prompt
        own = requests.schedule({"kv_keep_prompt": 0}, length)
        assert own.num_rows == 105
    assert len(requests._known) == 39, "they are one schedule"
    requests.schedule({"kv_keep_prompt": 0, "kv_budget": 99})
    assert len(requests._known) == 40
    requests.schedule({"kv_keep_prompt": 0, "kv_budget": 98})
    assert len(requests._known) == 2, "the first has gone, under all of its names"


def test_a_budget_of_ones_own() -> None:
    half = own(CASCADE, kv_budget=512)
    assert half == CASCADE.model_copy(update={"budget": 512})
    assert half.window == 128 and half.scoring.decay != CASCADE.scoring.decay


def test_another_policy_inherits_what_means_the_same() -> None:
    sink = own(CASCADE, kv_policy="sink", kv_budget=100)
    assert (sink.name, sink.budget, sink.num_sinks, sink.prefill_stride) == ("sink", 100, 8, 64)
    window = own(CASCADE, kv_policy="window")
    assert (window.name, window.budget, window.num_sinks) == ("window", 1024, 0)
    beehive = own(CASCADE, kv_policy="beehive")
    assert (beehive.tie, beehive.head_policy) == ("resident", "homogeneous")
    heads = resolve({"name": "cascade", "budget": 64, "head_policy": "per_kv_head"})
    assert own(heads, kv_policy="h2o").head_policy == "per_kv_head"
    # Without a budget, the largest that fits: lazy pruning needs slots over its budget.
    lazy = own(CASCADE, kv_policy="lazy")
    assert lazy.capacity == CASCADE.capacity and lazy.budget == 1024 - 31
    wide = resolve({"name": "window", "budget": 100})
    assert own(wide, kv_policy="sink").num_sinks == 4
    assert own(wide, kv_policy="sink").budget == 96


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    asked=st.sampled_from(sorted(POLICIES)),
    budget=st.one_of(st.none(), st.integers(1, 300)),
    heads=st.sampled_from(["homogeneous", "per_kv_head"]),
    overflow=st.integers(1, 40),
)
def test_whatever_is_allowed_fits_the_engines_tables(
    name: str, asked: str, budget: int | None, heads: str, overflow: int
) -> None:
    sizes = {"budget": 256, "prefill_stride": 32, "overflow": overflow}
    engine = resolve({"name": name, "head_policy": heads, **sizes})
    try:
        policy = own(engine, kv_policy=asked, kv_budget=budget)
    except KVPolicyError as error:
        assert str(error).startswith(("kv_policy", "kv_budget"))
        for change in error.offers:
            own(engine, **{"kv_policy": asked, **{PLACES[key]: v for key, v in change.items()}})
        return
    assert policy.name == asked and policy.budget <= 256
    assert budget is None or policy.budget == budget
    assert policy.capacity <= engine.capacity and policy.max_position <= engine.max_position
    assert compiled(policy).peak_at(10**9) <= compiled(engine).policy.capacity
    assert policy.head_policy == heads and policy.prefill_stride == 32
    assert engine.uses_attention or not policy.uses_attention
    assert engine.keeps_ages or not policy.keeps_ages


UNMET: list[tuple[Policy, dict[str, Any], str]] = [
    (
        CASCADE,
        {"kv_budget": 2048},
        "kv_budget 2048 is more than .* --kv-budget 1024; set it to at most 1024",
    ),
    *(
        (
            resolve({"name": name, "budget": 128, "prefill_stride": 64, **own}),
            {"kv_budget": 64},
            f"the server's .*{' '.join(map(str, *own.items()))} .*; set kv_budget to {fit}",
        )
        for name, own, fit in (
            ("h2o", {"window": 96}, 96),
            ("random", {"window": 96}, 96),
            ("beehive", {"window": 96}, 97),
            ("dgc", {"global_size": 96}, 97),
        )
    ),
    (CASCADE, {"kv_budget": 0}, "kv_budget = 0: Input should be greater than or equal to 1"),
    (CASCADE, {"kv_budget": "512"}, "kv_budget = '512': Input should be a valid integer"),
    (CASCADE, {"kv_budget": True}, "kv_budget = True: Input should be a valid integer"),
    (CASCADE, {"kv_budget": 512.0}, "kv_budget = 512.0: Input should be a valid integer"),
    (CASCADE, {"kv_budget": 500}, "kv_budget 500 .*multiple of .* = 32; set it to 480 or 512"),
    (CASCADE, {"kv_recall": -1}, "kv_recall = -1: Input should be greater than or equal to 0"),
    (CASCADE, {"kv_recall": True}, "kv_recall = True: Input should be a valid integer"),
    (CASCADE, {"kv_policy": 3}, "kv_policy = 3: it must be the name of a policy"),
    (CASCADE, {"kv_policy": "casc"}, "unknown policy 'casc'.*did you mean 'cascade'"),
    (CASCADE, {"kv_policy": "full"}, "full cannot be chosen for one request.*choose from"),
    (CASCADE, {"kv_policy": "lazy", "kv_budget": 1024}, "1063.*1032; set it to at most 993"),
    (SINK, {"kv_policy": "cascade"}, "needs attention scores.*computes none.*--kv-policy"),
    (CASCADE, {"kv_policy": "dgc"}, "dgc needs scores of token ids.*choose from window, sink,"),
    (CASCADE, {"kv_budget": 1030}, "kv_budget 1030 is more than .*; set it to at most 1024"),
    (CASCADE, {"kv_policy": "lazy", "kv_budget": 2000}, "; set it to at most 993"),
    (CASCADE, {"kv_policy": {"name": "sink"}}, "kv_policy = .* it must be the name of a policy"),
    (SINK, {"kv_policy": "h2o"}, "choose from window, sink, lazy,"),
    (SINK, {"kv_policy": "random"}, "random needs drawn numbers.*or start .*--kv-policy random"),
    (CASCADE, {"kv_policy": "random"}, "random needs .*choose from window, sink, cascade, beehive"),
    (
        resolve({"name": "dgc", "budget": 64, "prefill_stride": 64}),
        {"kv_policy": "random"},
        "random needs drawn numbers, and this server's dgc draws none",
    ),
]


@pytest.mark.parametrize(("policy", "asked", "message"), UNMET)
def test_what_cannot_be_honoured_is_an_error(
    policy: Policy, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(KVPolicyError, match=message):
        own(policy, **asked)


class OneByOne(Sink):
    """Policies of other packages, which may have defaults of their own: a prefill stride."""

    name: ClassVar[str] = "other"
    prefill_stride: int = 1


class Max(Sink):
    name: ClassVar[str] = "other"
    head_reduction: Literal["mean", "max", "median"] = "max"


class Heads(Sink):
    name: ClassVar[str] = "other"
    head_policy: Literal["homogeneous", "per_kv_head"] = "per_kv_head"


class Units(Sink):
    name: ClassVar[str] = "other"
    unit: int = 8
    num_sinks: int = 8


class Aged(H2O):
    name: ClassVar[str] = "other"
    normalise: bool = True


class Needy(Sink):
    name: ClassVar[str] = "other"
    size: int


class Kept(Sink):
    name: ClassVar[str] = "other"
    keep_prompt: int = 24


START = "; choose from window, sink, .*, or start the server with --kv-policy other"
OTHERS: list[tuple[type[Policy], str]] = [
    (OneByOne, "needs prefill_stride 1, and this server has prefill_stride 64" + START),
    (Max, "needs head_reduction max, and this server has head_reduction mean" + START),
    (Units, "needs unit 8, and this server has unit 1" + START),
    (Aged, "needs token indices in the pages, and this server's cascade stores none" + START),
    (Needy, "needs settings that no request can give .*size = .*: Field required.*" + START),
    (Kept, "keep_prompt 24 is more than the server's --kv-keep-prompt 0; set it to at most 0"),
]


@pytest.mark.parametrize(("cls", "message"), OTHERS, ids=lambda one: getattr(one, "__name__", ""))
def test_defaults_of_other_packages_that_the_engine_lacks(
    cls: type[Policy], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused, and such a package changes nothing for requests that do not ask for it."""
    monkeypatch.setitem(POLICIES, "other", cls)
    with pytest.raises(KVPolicyError, match=message):
        own(CASCADE, kv_policy="other")
    assert own(CASCADE, kv_policy="sink").name == "sink"


def test_defaults_of_other_packages_that_the_engine_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "other", OneByOne)
    engine = CASCADE.model_copy(update={"prefill_stride": 1})
    assert own(engine, kv_policy="other", kv_budget=16).prefill_stride == 1
    monkeypatch.setitem(POLICIES, "other", Kept)
    assert own(CASCADE, kv_policy="other", kv_keep_prompt=0).keep_prompt == 0
    monkeypatch.setitem(POLICIES, "other", Heads)
    assert own(CASCADE, kv_policy="other").head_policy == "homogeneous", "the pages' own"


def test_settings_that_bind_a_budget_are_named() -> None:
    beehive = resolve({"name": "beehive", "budget": 100, "window": 20, "threshold": 80})
    with pytest.raises(KVPolicyError, match="more than the budget 90"):
        own(beehive, kv_budget=90)


def test_batches_split_only_where_arithmetic_differs() -> None:
    def arithmetic(policy: Policy, *asked: dict[str, Any]) -> list[Arithmetic]:
        requests = PerRequest(compiled(policy))
        return [requests.schedule(extra_args).arithmetic for extra_args in asked]

    alike = arithmetic(SINK, {}, {"kv_budget": 50}, {"kv_policy": "lazy"}, {"kv_budget": 7})
    assert len(set(alike)) == 1
    h2o = {"kv_policy": "h2o"}
    different = arithmetic(CASCADE, {}, {"kv_budget": 512}, h2o)
    assert len({alike[0], *different}) == 4
    assert different[-1:] == arithmetic(CASCADE, {**h2o, "kv_budget": 9})
