# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: what a page holds is followed through random schedules, copies and evictions.

The simulated worker writes into every page whose state it is (its stream's tokens, its policy), so
a page that two requests wrote, a copy made too late, or a snapshot of something else is seen at the
next read.
"""

import queue
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import vllm_cascade.cache.snapshots
import vllm_cascade.engine.scheduler
from tests.engine.test_scheduler import make_scheduler
from vllm_cascade.cache.snapshots import SnapshotStore
from vllm_cascade.engine.scheduler import AsyncKVPolicyScheduler, KVPolicyScheduler
from vllm_cascade.patches import weight_updates
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.recall.rings import RingMemory
from vllm_cascade.step.recall import unit_shape

HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
HASHER = get_request_block_hasher(16, HASH)


def request(name: str, tokens: list[int], max_tokens: int = 4, **kwargs: Any) -> Request:
    extra = kwargs.pop("extra_args", None)
    skip = kwargs.pop("skip", None)
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args=extra, skip_reading_prefix_cache=skip
    )
    params.update_from_generation_config({}, 0)
    return Request(name, tokens, params, None, block_hasher=HASHER, **kwargs)


class Worker:
    """Pages as the tuples of tokens whose state they hold."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.content: dict[int, Any] = {}
        self.pages: dict[str, list[int]] = {}
        self.streams: dict[str, list[int]] = {}
        self.keys: dict[str, Any] = {}
        self.started: dict[str, int] = {}
        self.reported: Counter[str] = Counter()

    def run(self, output: Any) -> ModelRunnerOutput:
        """One step: copies, then every request reads its own state and writes the next."""
        copies = output.kv_cache_block_copies or []
        targets = [copy.dst_block_id for copy in copies]
        assert len(set(targets)) == len(targets), "a page is the target of two copies"
        assert 0 not in targets, "the null block is written"
        old = dict(self.content)
        self.content.update((c.dst_block_id, old.get(c.src_block_id)) for c in copies)
        for new in output.scheduled_new_reqs:
            self.pages[new.req_id] = list(new.block_ids[0])
            self.streams[new.req_id] = list(new.prompt_token_ids)
            params = new.sampling_params.extra_args or {}
            self.keys[new.req_id] = (new.lora_request and new.lora_request.lora_name, str(params))
            self.started[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.pages[name] = []
                self.started[name] = start
            self.pages[name] += list(blocks[0]) if blocks else []
            starts[name] = start
        written: Counter[int] = Counter()
        sampled = []
        for name, num in output.num_scheduled_tokens.items():
            sampled.append(self._step(name, starts[name], num))
            written.update(self.pages[name])
        assert not written or max(written.values()) == 1, "two requests share a page"
        assert 0 not in written
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _step(self, name: str, start: int, num: int) -> list[int]:
        stream, pages = self.streams[name], self.pages[name]
        manager = self.scheduler._manager
        assert len(pages) == manager.num_pages(name, start + num)
        for page in pages[: manager.num_pages(name, start)]:
            assert self.content.get(page) == (self.keys[name], tuple(stream[:start])), (
                f"{name} at {start}: page {page} holds another state"
            )
        end = start + num
        if end == len(stream):
            stream.append(7)
            token = [7]
        else:
            token = []
        for page in pages:
            self.content[page] = (self.keys[name], tuple(stream[:end]))
        return token


class Machine(RuleBasedStateMachine):
    """Random arrivals, finishes, aborts and resets; few pages, prompts with shared beginnings."""

    cls: type = KVPolicyScheduler

    @initialize(num_pages=st.integers(5, 40))
    def start(self, num_pages: int) -> None:
        self.scheduler = make_scheduler(self.cls, num_pages)
        self.worker = Worker(self.scheduler)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.in_flight: list[Any] = []
        self.count = 0

    @rule(
        common=st.integers(0, 200),
        own=st.integers(1, 60),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 6),
        lora=st.sampled_from([None, None, None, "a"]),
        skip=st.sampled_from([None, None, None, True]),
        asked=st.sampled_from([None, None, {"kv_budget": 32}, {"kv_policy": "window"}]),
        steps=st.integers(0, 8),
    )
    def add(self, common, own, family, max_tokens, lora, skip, asked, steps) -> None:
        self.count += 1
        tokens = [family] * common + [100 + self.count] * own
        adapter = lora and LoRARequest(lora, 1, "/nowhere")
        name, kwargs = f"r{self.count}", {"lora_request": adapter, "extra_args": asked}
        self.scheduler.add_request(request(name, tokens, max_tokens, skip=skip, **kwargs))
        self.step(steps)

    @rule()
    def again(self) -> None:
        """A request whose prompt is a finished one's stream and more, as in a chat."""
        done = sorted(set(self.worker.streams) - set(self.scheduler.requests))
        if done:
            self.count += 1
            stream = self.worker.streams[done[-1]]
            self.scheduler.add_request(request(f"r{self.count}", [*stream[:600], 5, 6]))

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            output = self.scheduler.schedule()
            self.in_flight.append((output, self.worker.run(output)))
            if len(self.in_flight) > (self.cls is AsyncKVPolicyScheduler):
                self.scheduler.update_from_output(*self.in_flight.pop(0))

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        names = sorted(self.scheduler.requests)
        if names:
            name = names[index % len(names)]
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert len(self.store) == 0

    @precondition(lambda self: not self.in_flight)
    @rule()
    def reset_and_preempt(self) -> None:
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    @property
    def store(self) -> SnapshotStore:
        return self.scheduler._snapshots

    @invariant()
    def pages_add_up(self) -> None:
        """free (snapshots among them) + held = pool; no page in two places."""
        if not hasattr(self, "scheduler"):
            return
        manager = self.scheduler._manager
        free = self.pool.free_block_queue.get_all_free_blocks()
        held = [block for blocks in manager.req_to_blocks.values() for block in blocks]
        kept = [block for snap in self.store._by_key.values() for block in snap.blocks]
        assert len(free) == self.pool.get_num_free_blocks()
        ids = [block.block_id for block in [*free, *held]]
        assert sorted(ids) == list(range(1, self.pool.num_gpu_blocks))
        assert {block.block_id for block in kept} <= {block.block_id for block in free}
        assert len({block.block_id for block in kept}) == len(kept) == len(self.store._by_block)
        assert all(block.ref_cnt == 1 for block in held)
        assert all(block.ref_cnt == 0 for block in free)
        assert manager.reserved_pages() <= len(free), "a promised page is gone"
        for snapshot in self.store._by_key.values():
            states = {self.worker.content.get(block.block_id) for block in snapshot.blocks}
            assert len(states) == 1
            (state,) = states
            assert state is not None and len(state[1]) == snapshot.num_tokens

    @invariant()
    def lookups_are_current(self) -> None:
        """What was remembered of a waiting request is what a search finds now."""
        if not hasattr(self, "scheduler"):
            return
        for waiting in self.scheduler.waiting:
            asked = waiting.sampling_params.extra_args
            schedule = self.scheduler._requests.schedule(asked, waiting.num_prompt_tokens)
            where = schedule, waiting.block_hashes, waiting.num_prompt_tokens - 1
            found = self.store.find(*where)
            known = found.num_tokens if found else 0
            assert self.store.lookup(*where) == (found, self.store.junction(*where, known))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step(1)
        assert not self.scheduler.has_unfinished_requests(), "somebody waits for ever"
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(r.num_preemptions == 0 for r in self.scheduler.requests.values())


class AsyncMachine(Machine):
    cls = AsyncKVPolicyScheduler


machine_settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSync = Machine.TestCase
TestSync.settings = machine_settings
TestAsync = AsyncMachine.TestCase
TestAsync.settings = machine_settings


def drain(worker: Worker) -> None:
    scheduler = worker.scheduler
    for _ in range(1000):
        if not scheduler.has_unfinished_requests():
            return
        output = scheduler.schedule()
        for out in scheduler.update_from_output(output, worker.run(output)).values():
            seen = out.scheduler_stats.prefix_cache_stats
            worker.reported.update(requests=seen.requests, queries=seen.queries, hits=seen.hits)
    raise AssertionError("somebody waits for ever")


def serve(worker: Worker, *requests: Request) -> dict[str, int]:
    """Run requests one after the other; the number of tokens each began with."""
    worker.started.clear()
    for item in requests:
        worker.scheduler.add_request(item)
        drain(worker)
    return dict(worker.started)


def worker(num_pages: int = 60, **kwargs: Any) -> Worker:
    return Worker(make_scheduler(KVPolicyScheduler, num_pages, **kwargs))


def stats(w: Worker) -> Counter[str]:
    return Counter(vars(w.scheduler.snapshot_counters))


def test_a_chat_starts_where_its_last_prompt_ended() -> None:
    w = worker()
    first = list(range(1, 101))
    second = [*first, 7, 7, 7, 7, *range(500, 560)]
    started = serve(w, request("a", first), request("b", second), request("c", second))
    assert started == {"a": 0, "b": 96, "c": 160}
    assert stats(w) == Counter(hits=2, hit_tokens=256, stored=2, evicted=0, skipped=0)
    assert w.reported == Counter(requests=3, queries=100 + 164 + 164, hits=96 + 160)


def test_snapshots_are_taken_in_order_of_admission() -> None:
    """So page numbers repeat from run to run: they do not depend on hashes of request names."""
    w = worker(max_num_batched_tokens=512)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        w.scheduler.add_request(request(name, [100 + i] * 40))
    copies: list[Any] = []
    while not copies:
        output = w.scheduler.schedule()
        copies = output.kv_cache_block_copies or []
        w.scheduler.update_from_output(output, w.run(output))
    first = [w.pages[name][0] for name in names]
    assert [copy.src_block_id for copy in copies if copy.src_block_id in first] == first


def test_the_last_token_is_always_computed() -> None:
    """A prompt that ends on a boundary, sent again, still has a state to start from."""
    prompt = list(range(1, 97))
    assert serve(worker(), request("a", prompt), request("b", prompt)) == {"a": 0, "b": 80}
    longer = [*prompt, 5, 6]  # leaves a state at 96, after the whole of the shorter one
    assert serve(worker(), request("a", longer), request("b", prompt)) == {"a": 0, "b": 0}


def test_a_shared_beginning_is_found_by_the_second_and_used_by_the_third() -> None:
    system = list(range(1, 101))
    prompts = [[*system, *[1000 + i] * 150] for i in range(4)]
    started = serve(worker(), *(request(f"r{i}", p) for i, p in enumerate(prompts)))
    assert started == {"r0": 0, "r1": 0, "r2": 96, "r3": 96}


def test_a_prompt_that_waits_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks in every step; a prompt of a million tokens has thousands of prefixes."""
    w, searched = worker(num_pages=9), []
    monkeypatch.setattr(
        SnapshotStore, "junction", lambda self, _, hashes, *rest: searched.append(len(hashes)) or 0
    )
    w.scheduler.add_request(request("a", list(range(100)), 40))
    for _ in range(8):  # the prompt, with its snapshots, and some tokens
        output = w.scheduler.schedule()
        w.scheduler.update_from_output(output, w.run(output))
    searched.clear()
    w.scheduler.add_request(request("b", list(range(500, 820)), 4))
    for _ in range(10):
        output = w.scheduler.schedule()
        w.scheduler.update_from_output(output, w.run(output))
    assert w.scheduler.waiting and searched == [20]
    monkeypatch.setattr(vllm_cascade.cache.snapshots, "MAX_FOUND", 3)
    store, hashes = w.scheduler._snapshots, w.scheduler.requests["b"].block_hashes
    for longest in range(64, 74):
        store.lookup(w.scheduler._manager.kv_cache_spec.engine_schedule, hashes, longest)
    assert len(store._found) <= 3


def test_only_the_latest_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: an old beginning, shared again, has to be seen twice again."""
    monkeypatch.setattr(vllm_cascade.cache.snapshots, "MAX_SEEN", 20)
    system = list(range(1, 101))
    others = [request(f"o{i}", [5000 + i] * 200) for i in range(4)]
    first, *rest = (request(f"r{i}", [*system, *[1000 + i] * 150]) for i in range(4))
    w = worker()
    started = serve(w, first, *others, *rest)
    assert [started[f"r{i}"] for i in range(4)] == [0, 0, 0, 96]
    assert len(w.scheduler._snapshots._seen) == 20


def test_other_adapters_and_salts_do_not_match() -> None:
    prompt = list(range(1, 101))
    adapters = [LoRARequest("a", 1, "/nowhere"), LoRARequest("b", 2, "/nowhere")]
    started = serve(
        worker(),
        request("plain", prompt),
        request("lora-a", prompt, lora_request=adapters[0]),
        request("lora-b", prompt, lora_request=adapters[1]),
        request("salt", prompt, cache_salt="x"),
        request("lora-a-again", prompt, lora_request=adapters[0]),
        request("salt-again", prompt, cache_salt="x"),
    )
    assert {name for name, start in started.items() if start} == {"lora-a-again", "salt-again"}


def test_a_request_that_skips_reading_still_leaves_a_snapshot() -> None:
    w = worker()
    prompt = list(range(1, 101))
    requests = [request(name, prompt, skip=name != "c") for name in "abc"]
    assert serve(w, *requests) == {"a": 0, "b": 0, "c": 96}
    assert stats(w)["stored"] == 1


def test_a_session_leaves_no_snapshot() -> None:
    """What it decoded became a part of its prompt, but not in strides."""
    w = worker()
    prompt = list(range(1, 101))
    w.scheduler.add_request(request("a", prompt, resumable=True))
    for _ in range(20):
        output = w.scheduler.schedule()
        w.scheduler.update_from_output(output, w.run(output))
    assert stats(w)["stored"] == 0


def test_where_pages_are_short_the_snapshot_itself_is_used() -> None:
    """A request needs five pages: with ten, nothing is to spare beside two."""
    w = worker(10)
    prompt = list(range(1, 201))
    serve(w, request("a", prompt))
    assert stats(w) == Counter(hits=0, hit_tokens=0, stored=1, evicted=0, skipped=0)
    w.scheduler.add_request(request("other", [9] * 180, max_tokens=50))
    output = w.scheduler.schedule()
    w.scheduler.update_from_output(output, w.run(output))
    assert serve(w, request("b", prompt)) == {"b": 192}
    # Neither the other request nor b, whose state is in its own pages now, leaves a snapshot.
    assert stats(w) == Counter(hits=1, hit_tokens=192, stored=1, evicted=0, skipped=2)
    assert len(w.scheduler._snapshots) == 0, "its pages became b's"


def test_promised_pages_are_not_used() -> None:
    """Two requests may come to need the whole pool: what they have not taken yet is not free."""
    w = worker(10)
    for i in (1, 2):
        w.scheduler.add_request(request(f"r{i}", [i] * 40, max_tokens=60))
    drain(w)
    assert stats(w) == Counter(hits=0, hit_tokens=0, stored=0, evicted=0, skipped=2)


def test_the_least_recently_used_snapshot_goes_first() -> None:
    w = worker(15)  # a request's five and two snapshots
    prompts = {name: [i] * 200 for i, name in enumerate("abc", 1)}
    serve(w, request("a1", prompts["a"]), request("b1", prompts["b"]))
    started = serve(w, request("a2", prompts["a"]), request("c1", prompts["c"]))
    assert started == {"a2": 192, "c1": 0}
    assert stats(w)["evicted"] == 1
    assert serve(w, request("a3", prompts["a"])) == {"a3": 192}
    assert serve(w, request("b2", prompts["b"])) == {"b2": 0}


RECALLING = {
    "kv_policy": "sink",
    "kv_recall": 2,
    "kv_budget": 64,
    "kv_policy_config": {"unit": 16, "prefill_stride": 16},
}


@pytest.mark.parametrize("rings", [False, True])
def test_snapshots_without_evicted_units_stay_if_recall_memory_is_full(rings: bool) -> None:
    """Dropping them would free none of it. Chunks of 16 units; 400 tokens evict 20."""
    w = worker(200, **RECALLING)
    memory = w.scheduler._memory
    if rings:
        shape = unit_shape(w.scheduler._manager.kv_cache_spec, 1)
        memory = RingMemory(memory._schedule, shape, 0, 8, keeps_snapshots=True)
        memory.capacity, memory.num_chunks = 1, 5
        w.scheduler._memory = w.scheduler._manager.memory = memory
    else:
        memory.capacity = 5
    assert serve(w, request("a1", [1] * 50)) == {"a1": 0}
    serve(w, *(request(f"b{i}", [i] * 400) for i in range(2, 9)))
    assert stats(w)["evicted"] >= 4, "of the long prompts'"
    started = serve(w, request("a2", [1] * 50), request("c8", [8] * 400), request("c2", [2] * 400))
    assert started == {"a2": 48, "c8": 384, "c2": 0}


def test_only_snapshots_that_free_recall_memory_are_dropped_for_it() -> None:
    """Neither those whose chunks a running request holds, too."""
    settings = {"name": "sink", "budget": 64, "unit": 16, "recall": 2, "prefill_stride": 16}
    schedule = compiled(resolve(settings))
    memory = RecallMemory(schedule, 2 * 10, 10, 64)
    pool = BlockPool(20, enable_caching=True, hash_block_size=16)
    snapshots = SnapshotStore(pool, 16, 16)

    def grow(name: str, units: int) -> None:
        memory.grow([(name, schedule, (5 + units) * 16)], snapshots)

    def take(name: str) -> None:
        log = memory.fork(name, 0)
        hashes = [BlockHash(f"{name} {log.end}".encode())]
        snapshots.take(schedule, hashes, 16, pool.get_new_blocks(1), 0, log)
        snapshots.end_of_step()

    def left() -> list[bytes]:
        return [digest for _, digest in snapshots._by_key]

    memory.admit("a", 2)
    take("a")
    grow("a", 16)
    take("a")
    memory.admit("b", 2)
    grow("b", 16)
    take("b")
    memory.release("b")
    assert left() == [b"a 0", b"a 16", b"b 16"] and memory.used_bytes == 20
    grow("a", 32)
    assert left() == [b"a 0", b"a 16"] and snapshots.counters.evicted == 1
    memory.release("a")
    assert memory.used_bytes == 10
    memory.admit("c", 2)
    grow("c", 32)
    assert left() == [b"a 0"], "no request holds its chunks any more"
    assert memory.used_bytes == 20


def test_snapshots_never_keep_a_request_out() -> None:
    """A pool full of snapshots admits as many requests as an empty one, in the same step."""
    admitted = []
    for warm in (False, True):
        w = worker(20, max_num_batched_tokens=512)
        if warm:
            serve(w, *(request(f"w{i}", [i] * 200) for i in range(1, 8)))
            assert len(w.scheduler._snapshots._by_block) > 10
        for i in range(8):
            w.scheduler.add_request(request(f"r{i}", [50 + i] * 100))
        admitted.append(len(w.scheduler.schedule().num_scheduled_tokens))
    assert admitted[0] == admitted[1] == 4


def test_a_reset_drops_snapshots_even_while_requests_run() -> None:
    w = worker()
    prompt = list(range(1, 101))
    serve(w, request("a", prompt))
    w.scheduler.add_request(request("running", [9] * 50, max_tokens=50))
    w.scheduler.schedule()
    assert not w.scheduler.reset_prefix_cache(), "vLLM's own answer while requests hold pages"
    w.scheduler.finish_requests(["running"], RequestStatus.FINISHED_ABORTED)
    assert serve(w, request("b", prompt)) == {"b": 0}
    assert stats(w)["evicted"] == 0


def test_a_reset_wakes_an_idle_engine_with_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers free the evicted units of dropped snapshots in a step; then the engine is idle."""
    # An earlier engine of this process may have replaced it.
    monkeypatch.setattr(EngineCore, "reset_prefix_cache", weight_updates._reset)
    w = worker(200, **RECALLING)
    scheduler, core = w.scheduler, EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler, core.input_queue = scheduler, queue.Queue()
    serve(w, request("a", [1] * 400))
    scheduler.update_from_output(output := scheduler.schedule(), w.run(output))
    (snapshot,) = scheduler._snapshots._by_key.values()
    assert len(snapshot.log.chunks) > 0 and not scheduler.has_requests()
    assert core.reset_prefix_cache() and scheduler.has_requests()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    output = scheduler.schedule()
    assert output.dropped_snapshots == (snapshot.blocks[0].block_id,)
    scheduler.update_from_output(output, w.run(output))
    assert not scheduler.has_requests()
    assert core.reset_prefix_cache() and core.input_queue.empty(), "nothing is left to drop"


def test_a_reset_without_recall_leaves_an_engine_idle() -> None:
    """Workers hold nothing of snapshots but their pages."""
    w = worker()
    serve(w, request("a", [1] * 400))
    w.scheduler.update_from_output(output := w.scheduler.schedule(), w.run(output))
    assert len(w.scheduler._snapshots) == 1
    assert w.scheduler.reset_prefix_cache() and not w.scheduler.has_requests()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_engines_switch(enabled: bool) -> None:
    w = worker(enable_prefix_caching=enabled)
    prompt = list(range(1, 101))
    started = serve(w, request("a", prompt), request("b", prompt))
    assert started["b"] == (96 if enabled else 0)
    assert stats(w)["stored"] == enabled


def test_intervals_are_where_strides_and_blocks_end() -> None:
    pool = BlockPool(10, enable_caching=True, hash_block_size=16)
    for stride, block, interval in (
        (16, 16, 16),
        (64, 16, 64),
        (8, 16, 16),
        (24, 16, 48),
        (1, 16, 16),
    ):
        store = SnapshotStore(pool, block, stride)
        assert store.interval == interval
        for length in range(1, 200):
            last = store.last_boundary(length)
            assert last % interval == 0 and length - interval <= last < length


def test_an_unhelpful_interval_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda *_: None, warning=lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(vllm_cascade.engine.scheduler, "logger", log)
    make_scheduler(KVPolicyScheduler, 60)
    assert not lines
    make_scheduler(KVPolicyScheduler, 60, kv_policy_config={"prefill_stride": 24})
    assert "only at multiples of 48 tokens" in lines[0]
