# SPDX-License-Identifier: Apache-2.0
"""Fifty streaming clients, pages for a third of them: every answer is the one given alone.

Under vLLM's ordinary scheduling and, made possible on a CPU by ``async_cpu.py``, the asynchronous
one, where step N + 1 is prepared before the tokens of step N are known.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm import SamplingParams

from tests.engine.pool import EnginePool
from tests.engine.server import ASYNC_VLLM, FORKED_VLLM, Server
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.schedule import compiled

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64}
BLOCK = 32
CLIENTS = 50
Ask = tuple[list[int], int]


@pytest.fixture(scope="module")
def asks(book_tokens: list[int]) -> list[Ask]:
    """Prompts and answer lengths: one token, a stride and its neighbours, far beyond 1,024."""
    rng = random.Random(5)
    special = [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 3000, 5000]
    lengths = special + [int(2 ** rng.uniform(3, 10)) for _ in range(CLIENTS - len(special))]
    rng.shuffle(lengths)
    starts = [rng.randrange(len(book_tokens) - length) for length in lengths]
    return [
        (book_tokens[start : start + length], rng.randint(8, 24))
        for start, length in zip(starts, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def shared(book_tokens: list[int]) -> list[Ask]:
    """One beginning of five strides, six ends."""
    return [(book_tokens[:330] + book_tokens[1000 * i :][:30], 16) for i in range(1, 7)]


@pytest.fixture(scope="module")
def alone(engine_pool: EnginePool, asks: list[Ask], shared: list[Ask]) -> list[list[int]]:
    """Each request's answer from an engine that has nothing else to do."""
    llm = engine_pool.get(POLICY, max_model_len=8192)
    answers = []
    for prompt, max_tokens in asks + shared:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answer = output.outputs[0]
        for entry in answer.logprobs:
            best, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
            assert best - second > 1e-4, "a tie that rounding decides: choose another seed"
        answers.append(list(answer.token_ids))
    engine_pool.close()
    return answers


def pages(asks: list[Ask]) -> list[int]:
    """Pages that each request needs at its end."""
    schedule = compiled(resolve(POLICY))
    return [-(-schedule.peak_at(len(prompt) + max_tokens) // BLOCK) for prompt, max_tokens in asks]


@pytest.fixture(
    scope="module",
    params=[FORKED_VLLM, pytest.param(ASYNC_VLLM, marks=pytest.mark.slow)],
    ids=["sync", "async"],
)
def server(
    request: pytest.FixtureRequest,
    asks: list[Ask],
    alone: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    flags = ["--kv-policy", "cascade", "--kv-budget", "128", "--block-size", str(BLOCK)]
    flags += ["--kv-policy-config", '{"prefill_stride": 64}', "--max-model-len", "8192"]
    flags += [
        "--kv-recall",
        "0",
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "512",
        "--enforce-eager",
    ]
    flags += ["--kv-cache-memory-bytes", str(64 << 20)]
    flags += ["--num-gpu-blocks-override", str(sum(pages(asks)) // 3 + 1)]
    server = Server(tmp_path_factory.mktemp("many") / "log", flags, request.param)
    yield server.wait()
    server.stop()


def test_answers_do_not_depend_on_the_others(
    server: Server, asks: list[Ask], alone: list[list[int]], request: pytest.FixtureRequest
) -> None:
    is_async = "AsyncKVPolicyScheduler" in server.log.read_text()
    assert is_async == ("async" in request.node.name)
    waiting, held = [], []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.complete_all, asks, CLIENTS)
        while not answers.done():
            waiting.append(server.metric("vllm:num_requests_waiting"))
            held.append(server.metric("vllm:kv_policy_pages"))
    wrong = [i for i, answer in enumerate(answers.result()) if answer != alone[i]]
    assert not wrong, f"{len(wrong)} answers differ, first {wrong[0]}"
    # They did queue for pages, and nobody was preempted for one.
    assert max(waiting) > CLIENTS / 3 and 0 < max(held) <= sum(pages(asks)) // 3
    assert server.metric("vllm:num_preemptions_total") == 0.0
    server.wait_until("vllm:kv_cache_usage_perc", 0.0)
    server.wait_until("vllm:kv_policy_pages", 0.0)


def test_counters_are_those_of_the_requests_sent(server: Server, asks: list[Ask]) -> None:
    """Runs after the test above: what left the caches is known from the lengths alone."""
    # The token sampled last is never attended. A cascade that fills eagerly holds 4 + 128 tokens.
    lengths = [len(prompt) + max_tokens - 1 for prompt, max_tokens in asks]
    strides = [-(-len(prompt) // 64) + max_tokens - 1 for prompt, max_tokens in asks]
    evicted = sum(max(n - (4 + 128), 0) for n in lengths)
    assert evicted > 0.5 * sum(lengths)
    assert server.metric("vllm:kv_policy_evicted_tokens_total") == evicted
    assert server.metric("vllm:kv_policy_strides_total") == sum(strides)


def test_a_shared_prefix_is_not_shared_memory(
    server: Server, shared: list[Ask], alone: list[list[int]]
) -> None:
    """Pages change in place, so a page in two requests would be two requests' ruin."""
    answers = server.complete_all(shared * 3, 3 * len(shared))
    assert answers == alone[CLIENTS:] * 3
