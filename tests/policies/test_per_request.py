# SPDX-License-Identifier: Apache-2.0
"""A request's own budget and policy: what is allowed, what is refused and how."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.test_scheduler import make_scheduler
from tests.test_snapshots import Worker, drain, request
from vllm_cascade.attention.metadata import arithmetic
from vllm_cascade.engine.scheduler import KVPolicyScheduler
from vllm_cascade.policies import POLICIES, Policy, resolve
from vllm_cascade.policies.per_request import check_arguments, request_policy
from vllm_cascade.policies.settings import KVPolicyError

CASCADE = resolve({"name": "cascade", "budget": 1024, "prefill_stride": 64, "num_sinks": 8})
SINK = resolve({"name": "sink", "budget": 1000, "prefill_stride": 64})


def check(policy: Policy | None, **extra_args: Any) -> str:
    """The message of the refusal; empty where there is none."""
    try:
        check_arguments(policy, SamplingParams(extra_args=extra_args))
    except VLLMValidationError as error:
        assert error.parameter in extra_args
        return str(error)
    return ""


def test_a_request_that_asks_for_nothing_has_the_engines_policy() -> None:
    for extra_args in (None, {}, {"forced": [1]}, {"kv_transfer_params": {}}):
        assert request_policy(CASCADE, extra_args) is CASCADE
        assert check(CASCADE, **(extra_args or {})) == ""


def test_a_budget_of_ones_own() -> None:
    own = request_policy(CASCADE, {"kv_budget": 512})
    assert own == CASCADE.model_copy(update={"budget": 512})
    assert own.window == 128 and own.decay != CASCADE.decay


def test_another_policy_inherits_what_means_the_same() -> None:
    sink = request_policy(CASCADE, {"kv_policy": "sink", "kv_budget": 100})
    assert (sink.name, sink.budget, sink.num_sinks, sink.prefill_stride) == ("sink", 100, 8, 64)
    window = request_policy(CASCADE, {"kv_policy": "window"})
    assert (window.name, window.budget, window.num_sinks) == ("window", 1024, 0)
    beehive = request_policy(CASCADE, {"kv_policy": "beehive"})
    assert (beehive.tie, beehive.head_policy) == ("resident", "homogeneous")
    heads = resolve({"name": "cascade", "budget": 64, "head_policy": "per_kv_head"})
    assert request_policy(heads, {"kv_policy": "h2o"}).head_policy == "per_kv_head"
    # Without a budget, the largest that fits: lazy pruning needs slots over its budget.
    lazy = request_policy(CASCADE, {"kv_policy": "lazy"})
    assert lazy.capacity == CASCADE.capacity and lazy.budget == 1024 - 31
    wide = resolve({"name": "window", "budget": 100})
    assert request_policy(wide, {"kv_policy": "sink"}).num_sinks == 4
    assert request_policy(wide, {"kv_policy": "sink"}).budget == 96


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    own=st.sampled_from(sorted(POLICIES)),
    budget=st.one_of(st.none(), st.integers(1, 300)),
    heads=st.sampled_from(["homogeneous", "per_kv_head"]),
    overflow=st.integers(1, 40),
)
def test_whatever_is_allowed_fits_the_engines_tables(
    name: str, own: str, budget: int | None, heads: str, overflow: int
) -> None:
    engine = resolve(
        {
            "name": name,
            "budget": 256,
            "prefill_stride": 32,
            "head_policy": heads,
            "overflow": overflow,
        }
    )
    try:
        policy = request_policy(engine, {"kv_policy": own, "kv_budget": budget})
    except KVPolicyError:
        assert check(engine, kv_policy=own, kv_budget=budget)
        return
    assert policy.name == own and policy.budget <= 256
    assert budget is None or policy.budget == budget
    assert policy.capacity <= engine.capacity and policy.max_position <= engine.max_position
    assert policy.head_policy == heads and policy.prefill_stride == 32
    assert engine.uses_scores or not policy.uses_scores
    assert check(engine, kv_policy=own, kv_budget=budget) == ""


@pytest.mark.parametrize(
    ("policy", "extra_args", "message"),
    [
        (CASCADE, {"kv_budget": 2048}, "kv_budget 2048 is not within .* ask for 1 to 1024"),
        (CASCADE, {"kv_budget": 0}, "kv_budget 0 is not within"),
        (CASCADE, {"kv_budget": "512"}, "kv_budget must be an integer number of tokens, not '512'"),
        (CASCADE, {"kv_budget": True}, "kv_budget must be an integer"),
        (CASCADE, {"kv_budget": 512.0}, "kv_budget must be an integer"),
        (CASCADE, {"kv_budget": 500}, "kv_budget 500 .*multiple of .* = 32; nearest .* 480 or 512"),
        (CASCADE, {"kv_policy": 3}, "kv_policy must be the name of a policy, not 3"),
        (CASCADE, {"kv_policy": "casc"}, "unknown policy 'casc'.*did you mean 'cascade'"),
        (CASCADE, {"kv_policy": "full"}, "full cannot be chosen for one request.*choose from"),
        (CASCADE, {"kv_bugdet": 5}, "unknown argument 'kv_bugdet'.*did you mean 'kv_budget'"),
        (CASCADE, {"kv_policy_config": {}}, "unknown argument 'kv_policy_config', choose from"),
        (
            CASCADE,
            {"kv_policy": "lazy", "kv_budget": 1024},
            "1063.*1032; .*kv_budget of at most 993",
        ),
        (SINK, {"kv_policy": "cascade"}, "needs attention scores.*computes none.*--kv-policy"),
        (CASCADE, {"kv_policy": "dgc"}, "dgc needs scores of token ids.*choose from window, sink,"),
        (SINK, {"kv_policy": "h2o"}, "choose from window, sink, lazy,"),
        (None, {"kv_budget": 5}, "this server runs no KV policy; start it with --kv-policy"),
        (None, {"kv_policy": "sink"}, "this server runs no KV policy"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    policy: Policy | None, extra_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        check_arguments(policy, SamplingParams(extra_args=extra_args))
    assert caught.value.parameter in extra_args


def test_settings_that_bind_a_budget_are_named() -> None:
    beehive = resolve({"name": "beehive", "budget": 100, "window": 20, "threshold": 80})
    assert "more than the budget 90" in check(beehive, kv_budget=90)


def test_stock_engines_pass_what_is_not_ours() -> None:
    assert check(None, kv_something=1, forced=2, kv_policy="full") == ""
    assert check(None) == ""


def test_batches_split_only_where_arithmetic_differs() -> None:
    sink, lazy, small = (
        request_policy(SINK, asked)
        for asked in ({"kv_budget": 50}, {"kv_policy": "lazy"}, {"kv_budget": 7})
    )
    assert len({arithmetic(policy) for policy in (SINK, sink, lazy, small)}) == 1
    half = request_policy(CASCADE, {"kv_budget": 512})
    h2o = request_policy(CASCADE, {"kv_policy": "h2o"})
    assert len({arithmetic(policy) for policy in (CASCADE, half, h2o, SINK)}) == 4
    assert arithmetic(h2o) == arithmetic(
        request_policy(CASCADE, {"kv_policy": "h2o", "kv_budget": 9})
    )


def test_pages_are_counted_per_request() -> None:
    """Budget 64 and 4 sinks are five pages of 16; budget 32 is three, a window of 16 one."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 60))
    (manager,) = worker.scheduler._managers
    asked = {"all": {}, "half": {"kv_budget": 32}, "one": {"kv_policy": "window", "kv_budget": 16}}
    for i, (name, extra_args) in enumerate(asked.items()):
        tokens = [i + 1] * 90
        worker.scheduler.add_request(request(name, tokens, 50, extra_args=extra_args))
    for _ in range(8):
        output = worker.scheduler.schedule()
        worker.scheduler.update_from_output(output, worker.run(output))
    assert {name: len(manager.req_to_blocks[name]) for name in asked} == {
        "all": 5,
        "half": 3,
        "one": 1,
    }
    drain(worker)


def test_small_requests_leave_room_for_more() -> None:
    """A pool of ten pages holds two requests with the engine's budget, and ten small ones."""
    running = []
    for extra_args in ({}, {"kv_policy": "window", "kv_budget": 16}):
        scheduler = make_scheduler(KVPolicyScheduler, 10, max_num_seqs=16)
        for i in range(12):
            scheduler.add_request(request(f"r{i}", [i] * 8, 500, extra_args=extra_args))
        running.append(len(scheduler.schedule().num_scheduled_tokens))
    assert running == [2, 10]


def test_a_snapshot_belongs_to_one_policy_and_budget() -> None:
    worker = Worker(make_scheduler(KVPolicyScheduler, 60))
    prompt = list(range(1, 101))
    small = {"kv_budget": 32}
    for name, extra_args in (("a", {}), ("b", small), ("c", small), ("d", {}), ("e", {"x": 1})):
        worker.scheduler.add_request(request(name, prompt, extra_args=extra_args))
        worker.keys = KeyByPolicy(worker)
        drain(worker)
    assert worker.started == {"a": 0, "b": 0, "c": 96, "d": 96, "e": 96}


class KeyByPolicy(dict):
    """The simulated worker's idea of whose state a page holds: the policy, not its spelling."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def __getitem__(self, name: str) -> Policy:
        return self.worker.scheduler._policy(self.worker.scheduler.requests[name])


def test_a_policy_with_too_many_rules_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thinning cascade that evicts in batches while it fills: a rule for nearly every token."""
    from vllm_cascade.policies import per_request as requests

    settings = {"name": "cascade", "budget": 2048, "eager_fill": False, "overflow": 8}
    policy = resolve(settings)
    asked = SamplingParams(extra_args={"kv_budget": 1024})
    check_arguments(policy, asked)
    monkeypatch.setattr(requests.current_platform, "is_cuda", lambda: True)
    with pytest.raises(VLLMValidationError, match=r"kv_budget: cascade with overflow 8 .* rules"):
        check_arguments(policy, asked)
    check_arguments(policy, SamplingParams(extra_args={"kv_budget": 128}))
    check_arguments(resolve({"name": "cascade"}), asked)
