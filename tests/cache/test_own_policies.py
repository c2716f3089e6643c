# SPDX-License-Identifier: Apache-2.0
"""Requests with policies of their own: their pages, their room in the pool, their snapshots."""

import gc
import weakref

import pytest

from tests.cache.test_snapshots import Worker, drain, request
from tests.engine.test_scheduler import make_scheduler
from vllm_cascade.engine.scheduler import AsyncKVPolicyScheduler, KVPolicyScheduler
from vllm_cascade.policies import schedule
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import Schedule


def test_pages_are_counted_per_request() -> None:
    """Budget 64 and 4 sinks are five pages of 16; budget 32 is three, a window of 16 one."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 60))
    manager = worker.scheduler._manager
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
    """Asked for by the engine's own values, the engine's snapshot serves."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 60))
    prompt = list(range(1, 101))
    small, spelled = {"kv_budget": 32}, {"kv_policy": "cascade", "kv_budget": 64}
    asked = [("a", {}), ("b", small), ("c", small), ("d", {}), ("e", {"x": 1}), ("f", spelled)]
    for name, extra_args in asked:
        worker.scheduler.add_request(request(name, prompt, extra_args=extra_args))
        worker.keys = KeyBySchedule(worker)
        drain(worker)
    assert worker.started == {"a": 0, "b": 0, "c": 96, "d": 96, "e": 96, "f": 96}


def test_a_snapshot_outlives_its_schedule() -> None:
    """A schedule may be forgotten between two requests; it is compiled again to the same states."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 60))
    scheduler, asked = worker.scheduler, {"kv_budget": 32}
    for name in ("a", "b"):
        scheduler.add_request(request(name, list(range(1, 101)), extra_args=asked))
        drain(worker)
        gone = weakref.ref(scheduler._requests.schedule(asked))
        scheduler._requests._known.clear()
        schedule._remembered.clear()
        gc.collect()
        assert gone() is None
    assert worker.started == {"a": 0, "b": 96}


KEEPS = {"prefill_stride": 16, "keep_prompt": 64}


def test_a_snapshot_serves_prompts_of_other_lengths() -> None:
    """What they keep differs later: at the snapshot all tokens are cached."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 200, kv_policy_config=KEEPS))
    prompt, kept = list(range(1, 401)), {"kv_keep_prompt": 10}
    asked = [("a", 60, {}), ("b", 55, {}), ("c", 100, {}), ("d", 400, {}), ("e", 390, {})]
    asked += [("f", 400, kept), ("g", 400, kept)]
    for name, length, extra_args in asked:
        worker.scheduler.add_request(request(name, prompt[:length], extra_args=extra_args))
        worker.keys = OneKey()
        drain(worker)
    # Those that keep 10 tokens have evicted at 96, and go on from the first 48.
    starts = {"a": 0, "b": 48, "c": 48, "d": 96, "e": 384, "f": 48, "g": 384}
    assert worker.started == starts


@pytest.mark.parametrize("first", [{}, {"kv_keep_prompt": 0}], ids=["whole", "evicted"])
def test_a_snapshot_serves_no_prompt_that_has_evicted(first: dict[str, int]) -> None:
    """Of two equal prompts, one keeps its first 64 tokens at 96, and the other only the sinks."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 200, kv_policy_config=KEEPS))
    asked = [first, {} if first else {"kv_keep_prompt": 0}]
    for name, extra_args in zip("ab", asked, strict=True):
        worker.scheduler.add_request(request(name, list(range(1, 111)), extra_args=extra_args))
        worker.keys = OneKey()
        drain(worker)
    stored = {snapshot.num_tokens for snapshot in worker.scheduler._snapshots._by_key.values()}
    assert stored == {64, 96} and worker.started == {"a": 0, "b": 0}
    schedules = [worker.scheduler._requests.schedule(one, 110) for one in asked]
    assert len({schedule.history(96) for schedule in schedules}) == 2
    assert len({schedule.history(20) for schedule in schedules}) == 1


def test_a_prompt_that_goes_on_keeps_its_first_part() -> None:
    """Streaming input: pages are reserved for the first part's kept tokens."""
    worker = Worker(make_scheduler(KVPolicyScheduler, 60, kv_policy_config=KEEPS))
    scheduler = worker.scheduler
    manager = scheduler._manager
    for part in (range(1, 31), range(100, 300)):
        scheduler.add_request(request("a", list(part), 1, resumable=True))
        for _ in range(8):
            output = scheduler.schedule()
            scheduler.update_from_output(output, worker.run(output))
        session = scheduler.requests["a"]
        assert scheduler._schedule_of(session).policy.keep_prompt == 30
    assert session.num_prompt_tokens == 230
    assert len(manager.req_to_blocks["a"]) == 6 < manager.kv_cache_spec.most_pages == 8
    assert len(scheduler._schedules) == 1


class OneKey(dict):
    """All states after the same tokens are equal."""

    def __getitem__(self, name: str) -> None:
        return None


class KeyBySchedule(dict):
    """The simulated worker's idea of whose state a page holds: the schedule, not its spelling."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def __getitem__(self, name: str) -> Schedule:
        return self.worker.scheduler._schedule_of(self.worker.scheduler.requests[name])


@pytest.mark.parametrize("cls", [KVPolicyScheduler, AsyncKVPolicyScheduler])
def test_no_step_hashes_settings(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's schedule is found by the two values it asks for, and carried from then on."""
    asked = [{}, {"kv_budget": 32}, {"kv_policy": "window"}, {"kv_policy": "h2o", "kv_budget": 20}]
    worker = Worker(make_scheduler(cls, 90, max_num_batched_tokens=600))
    scheduler = worker.scheduler

    def add(kind: int, max_tokens: int) -> None:
        for i, extra_args in enumerate(asked):
            name = f"r{len(scheduler.requests)}-{kind}-{i}"
            tokens = [kind] * 100 + [i] * 40
            scheduler.add_request(request(name, tokens, max_tokens, extra_args=extra_args))

    add(1, max_tokens=100)
    output = scheduler.schedule()
    scheduler.update_from_output(output, worker.run(output))
    assert len(scheduler.running) == len(asked)
    hashed: list[str] = []
    for policy in POLICIES.values():
        monkeypatch.setattr(policy, "__hash__", lambda own: hashed.append(own.name) or 0)
    assert hash(resolve({"name": "h2o"})) == 0 and hashed.pop() == "h2o", "it would be seen"
    add(2, max_tokens=20)
    add(1, max_tokens=20)  # from the first ones' snapshots
    drain(worker)
    counters = scheduler.snapshot_counters
    assert min(counters.hits, counters.stored) > 0 and worker.reported["hits"] > 0
    assert hashed == []
