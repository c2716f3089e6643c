# SPDX-License-Identifier: Apache-2.0
"""Whose rows a step has, by the tables that vLLM's model runners really keep."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.states import RequestState

from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.text_importance import TokenImportance
from vllm_cascade.step.builder import step_of
from vllm_cascade.step.requests import (
    Requests,
    RunnerRequests,
    RunnerV1Requests,
    RunnerV2Requests,
)

SCHEDULE = compiled(resolve({"name": "dgc", "budget": 10, "global_size": 7}))
LAG = SCHEDULE.lag
ENDS = np.zeros(50, dtype=bool)
ENDS[7] = True


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


def judge() -> TokenImportance:
    return TokenImportance("tfidf", ENDS, None)


def expected(tokens: list[int]) -> list[float]:
    """What a stream of these tokens is worth, judged at once."""
    return judge().advance("all", np.asarray(tokens), 0, len(tokens), LAG).tolist()


def new(name: str, tokens: list[int], prompt_len: int, **extra: Any) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=tokens[:prompt_len],
        mm_features=[],
        sampling_params=SamplingParams(extra_args=extra or None),
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=tokens,
    )


def output(*added: NewRequestData, finished: tuple[str, ...] = ()) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = list(added)
    made.finished_req_ids = set(finished)
    return made


class Runner:
    """As much of Model Runner V2 as holds the requests: vLLM's own table of them."""

    def __init__(self) -> None:
        self.req_states = RequestState(4, 64, 64, 0, 50, torch.device("cpu"))

    def add(self, request: NewRequestData) -> None:
        tokens = request.prefill_token_ids
        self.req_states.add_request(request.req_id, request.prompt_len, tokens, 0, 9)

    def rows(self, names: list[str], firsts: list[int], lengths: list[int]) -> Any:
        common = step_of(firsts, lengths, [True] * len(names), torch.zeros(4, 1))
        index = [self.req_states.req_id_to_index[name] for name in names]
        return common.replace(req_idx=np.asarray(index))

    def sample(self, name: str, token: int) -> None:
        """In new memory, as what the host has read of a device's is a copy."""
        states = self.req_states
        states.last_sampled_tokens = states.last_sampled_tokens.clone()
        states.last_sampled_tokens[states.req_id_to_index[name], 0] = token


def test_the_pages_of_a_request() -> None:
    """As the scheduler sends them; one that is preempted is sent again."""
    batch = RunnerV2Requests(Runner(), SCHEDULE, None)
    batch.note(output(new("a", [3, 4], 2), new("b", [5], 1)))
    grown = output()
    grown.scheduled_cached_reqs.req_ids = ["a", "b"]
    grown.scheduled_cached_reqs.new_block_ids = [([7, 9],), None]
    batch.note(grown)
    assert batch.blocks("a") == [1, 7, 9] and batch.blocks("b") == [1]
    grown = output()
    grown.preempted_req_ids = {"a"}
    batch.note(grown)
    batch.note(output(new("a", [3, 4], 2)))
    assert batch.blocks("a") == [1]
    states = SimpleNamespace(requests={"c": SimpleNamespace(block_ids=([4, 2],))})
    assert RunnerV1Requests(states, SCHEDULE, None).blocks("c") == [4, 2]
    with pytest.raises(KeyError):
        Requests().blocks("c")


def test_a_stream_through_the_second_runner() -> None:
    """Prompt in two chunks, then decoded tokens, beside another request that leaves."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, 30).tolist()
    runner = Runner()
    batch = RunnerV2Requests(runner, SCHEDULE, judge())
    requests = new("other", [3, 4, 5], 3), new("mine", tokens[:20], 20)
    batch.note(output(*requests))
    for request in requests:
        runner.add(request)
    found = []
    for begin, end in ((0, 11), (11, 20)):
        common = runner.rows(["other", "mine"], [0, begin], [3, end - begin])
        found += batch.token_scores(common, 1, begin, end, LAG).tolist()
    batch.note(output(finished=("other",)))
    runner.req_states.remove_request("other")
    for t in range(20, 30):
        runner.sample("mine", tokens[t])
        batch.note(output())
        common = runner.rows(["mine"], [t], [1])
        found += batch.token_scores(common, 0, t, t + 1, LAG).tolist()
    assert found == expected(tokens) and any(found)
    assert list(batch._requests) == ["mine"]


def test_a_resumed_request_is_read_again() -> None:
    """It is sent anew, its generated tokens with it; those are not part of its prompt."""
    tokens = np.random.default_rng(1).integers(0, 12, 20).tolist()
    runner = Runner()
    batch = RunnerV2Requests(runner, SCHEDULE, judge())
    batch.note(output(new("mine", tokens[:8], 8)))
    runner.add(new("mine", tokens[:8], 8))
    batch.token_scores(runner.rows(["mine"], [0], [8]), 0, 0, 8, LAG)
    runner.req_states.remove_request("mine")
    resumed = new("mine", tokens, 8)
    resumed.prompt_token_ids = tokens[:8]
    batch.note(output(resumed))
    runner.add(resumed)
    found = batch.token_scores(runner.rows(["mine"], [0], [8]), 0, 0, 8, LAG).tolist()
    replayed = runner.rows(["mine"], [8], [12])
    assert replayed.is_prefilling.tolist() == [True] and not batch.prefilling(replayed)[0]
    assert batch.prefilling(runner.rows(["mine"], [0], [8])).tolist() == [True]
    found += batch.token_scores(replayed, 0, 8, 20, LAG).tolist()
    assert found == expected(tokens)


@pytest.mark.parametrize("is_padded", [False, True], ids=["as runners do", "recurrent layers"])
def test_rows_that_pad_a_full_graph(is_padded: bool) -> None:
    """The second runner pads ends and lengths; of ``is_prefilling`` only with recurrent layers."""
    runner = Runner()
    batch = RunnerV2Requests(runner, SCHEDULE, judge())
    requests = [new(name, [1, 2, 3], 3) for name in "abc"]
    batch.note(output(*requests))
    for request in requests:
        runner.add(request)
    common = runner.rows(["a", "b", "c"], [3, 0, 7], [5, 3, 5])
    offsets = torch.tensor([0, 5, 8, 13, 13], dtype=torch.int32)
    padded = common.replace(
        num_reqs=4,
        query_start_loc_cpu=offsets,
        seq_lens_cpu_upper_bound=torch.tensor([8, 3, 12, 0, 0], dtype=torch.int32),
    )
    if is_padded:
        padded = padded.replace(is_prefilling=torch.tensor([True, True, True, False]))
    assert batch.prefilling(padded)[:3].tolist() == [False, True, False]
    assert not batch.prefilling(padded)[3:].any()


def test_policies_of_rows_in_the_second_runner() -> None:
    runner = Runner()
    engine = compiled(resolve({"name": "cascade", "budget": 128}))
    batch = RunnerV2Requests(runner, engine, None)
    requests = new("a", [1, 2], 2), new("b", [1], 1, kv_budget=64)
    batch.note(output(*requests))
    for request in requests:
        runner.add(request)
    assert [s.policy.budget for s in batch.schedules(runner.rows(["b", "a"], [0, 0], [1, 2]))] == [
        64,
        128,
    ]
    assert batch.schedules(runner.rows(["a"], [2], [1])) == [engine]
    assert len(batch._requests["a"].tokens) == 0, "token ids are kept for policies that read them"
    batch.note(output(finished=("a", "b")))
    assert not batch._requests


def test_rows_of_a_model_with_recurrent_layers() -> None:
    """Of which vLLM's metadata has no indices: they are those of the batch it was made from."""
    runner = Runner()
    batch, prepared = RunnerV2Requests(runner, SCHEDULE, None), []
    state = SimpleNamespace(prepare_attn=lambda *given, **named: prepared.append((given, named)))
    batch.watch(state)
    requests = new("a", [1, 2], 2), new("b", [1], 1)
    batch.note(output(*requests))
    for request in requests:
        runner.add(request)
    common = runner.rows(["b", "a"], [0, 0], [1, 2])
    indices, common.req_idx = common.req_idx, None
    assert batch.names(common) == [] and batch.all_dummies(common)
    rows = SimpleNamespace(idx_mapping_np=indices)
    state.prepare_attn(rows, 7, for_capture=False)
    assert prepared == [((rows, 7), {"for_capture": False})]
    assert batch.names(common) == ["b", "a"] and not batch.all_dummies(common)


def test_rows_without_requests_are_dummies() -> None:
    """vLLM's dummy runs have rows without requests. One row with a request makes the step real."""
    runner = Runner()
    batch = RunnerV2Requests(runner, SCHEDULE, None)
    common = step_of([0, 0], [8, 8], [False, False], torch.zeros(2, 1))
    dummies = common.replace(req_idx=np.arange(2))
    assert batch.all_dummies(dummies) and batch.all_dummies(common)
    request = new("a", [1, 2], 2)
    runner.add(request)
    assert batch.all_dummies(dummies), "the scheduler has not sent it"
    batch.note(output(request))
    index = runner.req_states.req_id_to_index["a"]
    assert not batch.all_dummies(common.replace(req_idx=np.asarray([index, (index + 1) % 4])))
    first = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]), requests={})
    batch = RunnerV1Requests(first, SCHEDULE, None)
    assert batch.all_dummies(common)
    first.input_batch.req_ids.append("a")
    assert not batch.all_dummies(common)
    assert not Requests().all_dummies(common), "our warm-up's rows run kernels"


@pytest.mark.parametrize("index", [None, np.asarray([2, 3])])
def test_warm_up_rows_are_nobodys(index: np.ndarray | None) -> None:
    batch = RunnerV2Requests(Runner(), SCHEDULE, judge())
    common = step_of([4, 0], [1, 1], [False, False], torch.zeros(2, 1)).replace(req_idx=index)
    assert set(batch.schedules(common)) <= {SCHEDULE}
    assert batch.prefilling(common).tolist() == [False, False]
    assert batch.token_scores(common, 1, 0, 1, LAG).tolist() == [0.0]
    assert Requests().schedules(common) == []


def test_rows_of_the_first_runner() -> None:
    tokens = np.random.default_rng(2).integers(0, 12, (2, 16))
    runner = SimpleNamespace(
        requests=dict.fromkeys("ab"),
        input_batch=SimpleNamespace(req_ids=["b", "a"], num_reqs=2, token_ids_cpu=tokens),
    )
    batch = RunnerV1Requests(runner, SCHEDULE, judge())
    batch.note(output(new("a", [1], 1), new("b", [1], 1, kv_budget=8)))
    common = step_of([0, 0], [16, 16], [True, False], torch.zeros(2, 1))
    assert [s.policy.budget for s in batch.schedules(common)] == [8, 10]
    assert batch.prefilling(common).tolist() == [True, False]
    found = batch.token_scores(common, 1, 0, 16, LAG).tolist()
    assert found == expected(tokens[1].tolist()) and any(found)
    assert batch.token_scores(common, 2, 4, 5, LAG).tolist() == [0.0], "a row of a warm-up"


@pytest.mark.parametrize("kind", [RunnerV1Requests, RunnerV2Requests])
def test_a_prompt_that_grows_keeps_its_first_part(kind: type[RunnerRequests]) -> None:
    """Streaming input sends a request again, with a longer prompt, and so does a preemption."""
    runner, tokens = Runner(), list(range(90))
    runner.input_batch = SimpleNamespace(req_ids=["a"])
    batch = kind(runner, compiled(resolve({"name": "sink", "budget": 8, "keep_prompt": 40})), None)

    def kept(request: NewRequestData, *finished: str) -> int:
        batch.note(output(request, finished=finished))
        runner.add(request)
        (schedule,) = batch.schedules(runner.rows(["a"], [0], [1]))
        runner.req_states.remove_request("a")
        return schedule.policy.keep_prompt

    assert kept(new("a", tokens, 25)) == 25
    again = output()
    again.preempted_req_ids = {"a"}
    batch.note(again)
    assert kept(new("a", tokens, 25)) == kept(new("a", tokens, 60)) == 25
    assert kept(new("a", tokens, 60), "a") == 40, "another request of the same name"
    batch.note(output(finished=("a",)))
    assert not batch._schedules


@pytest.mark.parametrize("kind", [RunnerV1Requests, RunnerV2Requests])
@pytest.mark.parametrize("ends", ["finished", "preempted"])
def test_streams_that_ended_are_forgotten(ends: str, kind: type[RunnerRequests]) -> None:
    """A long one takes megabytes. A preempted request may wait for long, and is read again."""
    runner, tokens = Runner(), np.asarray([[1, 2, 3]])
    runner.input_batch = SimpleNamespace(req_ids=["a"], num_reqs=1, token_ids_cpu=tokens)
    batch = kind(runner, SCHEDULE, judge())
    batch.note(output(new("a", [1, 2, 3], 3)))
    runner.add(new("a", [1, 2, 3], 3))
    batch.token_scores(runner.rows(["a"], [0], [3]), 0, 0, 3, LAG)
    assert len(batch._importance) == 1
    batch.note(output())
    assert len(batch._importance) == 1
    step = output(finished=("a",) if ends == "finished" else ())
    if ends == "preempted":
        step.preempted_req_ids = {"a"}
    batch.note(step)
    assert len(batch._importance) == 0
