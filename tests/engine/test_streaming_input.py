# SPDX-License-Identifier: Apache-2.0
"""vLLM's streaming input: a request whose prompt goes on after each answer (``resumable``)."""

import time
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.cache.test_snapshots import Worker, request
from tests.engine import async_cpu
from tests.engine.pool import EnginePool
from tests.engine.test_scheduler import make_scheduler
from vllm_cascade.engine.scheduler import AsyncKVPolicyScheduler, KVPolicyScheduler

SCHEDULERS = [KVPolicyScheduler, AsyncKVPolicyScheduler]
SAMPLED = 7
"""The only token that ``Worker`` samples."""


class Engine:
    """A scheduler and a worker that checks what pages hold; asynchronous ones run a step ahead."""

    def __init__(self, cls: type, num_pages: int, **kwargs: Any) -> None:
        self.scheduler = make_scheduler(cls, num_pages, **kwargs)
        self._ahead = int(cls is AsyncKVPolicyScheduler)
        self._worker = Worker(self.scheduler)
        self._in_flight: list[Any] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.scheduler.schedule()
            self._in_flight.append((output, self._worker.run(output)))
            if len(self._in_flight) > self._ahead:
                self.scheduler.update_from_output(*self._in_flight.pop(0))

    def add(self, name: str, tokens: range, max_tokens: int = 4, stops: bool = False) -> Request:
        """A part of a streaming-input request; ``stops``: its answer ends with its first token."""
        part = request(name, list(tokens), max_tokens, resumable=True)
        if stops:
            part.sampling_params.stop_token_ids = [SAMPLED]
        self.scheduler.add_request(part)
        return self.scheduler.requests[name]

    def end(self, name: str) -> None:
        self.scheduler.add_request(request(name, [0]))


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize("stops", [False, True])
def test_the_next_part_continues_the_state(cls: type, stops: bool) -> None:
    """The worker fails if a page holds a token that the scheduler takes back."""
    engine = Engine(cls, 60)
    beside = request("beside", list(range(1, 30)), max_tokens=60)
    engine.scheduler.add_request(beside)
    for part in range(3):
        stream = engine.add("a", range(50 * part, 50 * part + 37), max_tokens=5, stops=stops)
        engine.step(16)
        assert stream.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        assert stream.num_computed_tokens == stream.num_tokens - 1
    engine.step(16)
    assert beside.status == RequestStatus.FINISHED_LENGTH_CAPPED, "it runs in every step"
    engine.end("a")
    engine.step(2)
    assert not engine.scheduler.requests


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_parts_that_wait_for_an_answer_follow_it(cls: type) -> None:
    engine = Engine(cls, 60)
    for part in range(3):
        stream = engine.add("a", range(50 * part, 50 * part + 37), max_tokens=500, stops=True)
    engine.end("a")
    engine.step(20)
    assert stream.is_finished() and stream.num_prompt_tokens == 3 * 37
    assert not engine.scheduler.requests


def test_accepted_drafts_are_strides_though_the_prompt_goes_on() -> None:
    """The answer ends in the step of its drafts; then all tokens so far belong to the prompt."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    scheduler = make_scheduler(KVPolicyScheduler, 60, speculative_config=drafts)
    for part in range(2):
        tokens = list(range(50 * part, 50 * part + 37))
        scheduler.add_request(request("a", tokens, max_tokens=4, resumable=True))
    strides = []
    for sampled, proposed in ([SAMPLED], [SAMPLED] * 2), ([SAMPLED] * 3, []):
        output = scheduler.schedule()
        result = ModelRunnerOutput(["a"], {"a": 0}, [sampled])
        (outputs,) = scheduler.update_from_output(output, result).values()
        scheduler.update_draft_token_ids(DraftTokenIds(["a"], [proposed]))
        strides.append(outputs.scheduler_stats.kv_policy.strides)
    assert scheduler.requests["a"].num_prompt_tokens == 37 + 3 + 37
    assert strides == [3, 3], "strides of 16, 16 and 5; then a token and two drafts"


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_an_abort_in_an_answer_gives_pages_back(cls: type) -> None:
    engine = Engine(cls, 60)
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.add("a", range(37), max_tokens=500)
    engine.step(5)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() == free
    next_one = engine.add("b", range(100, 137), max_tokens=5)
    engine.step(20)
    assert next_one.status == RequestStatus.WAITING_FOR_STREAMING_REQ


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_two_that_grow_share_a_pool_for_one(cls: type) -> None:
    """Each needs five pages of eight in the end: the second starts when the first has ended."""
    engine = Engine(cls, 8)
    first, second = (engine.add(name, range(1, 50)) for name in "ab")
    engine.step(20)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (52, 0)
    for name in "ab":
        engine.add(name, range(100, 200))
    engine.step(20)
    assert first.num_prompt_tokens == 152 and second.num_computed_tokens == 0
    engine.end("a")
    engine.step(40)
    assert second.num_prompt_tokens == 152
    assert second.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert first.num_preemptions == second.num_preemptions == 0


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_the_next_part_takes_no_promised_pages(cls: type) -> None:
    """Beside a short stream nothing starts that would leave no room for its next parts."""
    engine = Engine(cls, 7)
    stream = engine.add("a", range(1, 17), max_tokens=1)
    engine.step(4)
    beside = request("beside", list(range(1, 20)), max_tokens=60)
    engine.scheduler.add_request(beside)
    engine.step(5)
    engine.add("a", range(100, 500))
    engine.step(20)
    assert stream.num_prompt_tokens == 416 and stream.num_preemptions == 0
    engine.end("a")
    engine.step(80)
    assert beside.status == RequestStatus.FINISHED_LENGTH_CAPPED and beside.num_preemptions == 0


def test_a_further_part_is_no_snapshot_hit() -> None:
    """The first part may start from a snapshot; the others start from the request's own pages."""
    engine = Engine(KVPolicyScheduler, 60)
    engine.scheduler.add_request(request("before", list(range(1, 101))))
    engine.step(10)
    for part in range(3):
        engine.add("a", range(1 + 100 * part, 101 + 100 * part))
        engine.step(10)
    counters = engine.scheduler.snapshot_counters
    assert (counters.hits, counters.hit_tokens, counters.stored) == (1, 96, 1)


POLICY = {"name": "cascade", "budget": 64, "prefill_stride": 32, "num_subcaches": 2, "unit": 16}
RECALL = {**POLICY, "recall": 8}


def answer(llm: Any, name: str, tokens: list[int], **kwargs: Any) -> list[tuple[int, float]]:
    """The sampled tokens of a part, and their log-probabilities."""
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, **kwargs)
    params.update_from_generation_config({}, 0)
    part = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=name,  # finds nothing
        data_parallel_rank=None,
        resumable=True,
    )
    core.add_request(*core.preprocess_add_request(part))
    found: list[tuple[int, float]] = []
    for _ in range(200):
        outputs, _ = core.step_fn()
        for output in outputs[0].outputs if outputs and 0 in outputs else ():
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            found += zip(output.new_token_ids, logprobs, strict=True)
        if found and core.scheduler.requests[name].status != RequestStatus.RUNNING:
            return found
    raise AssertionError("the answer does not end")


def talk(llm: Any, tokens: list[int]) -> list[list[tuple[int, float]]]:
    """Two parts, the first of which ends at a stop token in the middle of its answer."""
    first = [token for token, _ in answer(llm, "alone", tokens[:300], max_tokens=12)]
    stop = next(token for token in first[3:] if token not in first[:3])
    parts = [answer(llm, "stream", tokens[:300], max_tokens=40, stop_token_ids=[stop])]
    parts.append(answer(llm, "stream", tokens[1000:1075], max_tokens=12))
    assert parts[0][-1][0] == stop and len(parts[1]) == 12
    llm.llm_engine.engine_core.engine_core.abort_requests(["alone", "stream"])
    llm.llm_engine.engine_core.engine_core.step_fn()
    return parts


@pytest.mark.parametrize("policy", [POLICY, RECALL], ids=["cascade", "recall"])
def test_asynchronous_scheduling_gives_the_same_answers(
    policy: dict[str, Any],
    engine_pool: EnginePool,
    book_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = talk(engine_pool.get(policy, max_model_len=2048), book_tokens)
    engine_pool.close()
    async_cpu.turn_on(monkeypatch.setattr)
    llm = engine_pool.get(policy, max_model_len=2048)
    try:
        core = llm.llm_engine.engine_core.engine_core
        assert core.step_fn == core.step_with_batch_queue
        found = talk(llm, book_tokens)
    finally:
        engine_pool.close()  # the next test's engine must be an ordinary one
    for part, truth in zip(found, expected, strict=True):
        assert [token for token, _ in part] == [token for token, _ in truth]
        assert [p for _, p in part] == pytest.approx([p for _, p in truth], abs=1e-4)
