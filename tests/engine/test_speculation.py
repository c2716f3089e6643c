# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the same caches and answers as an engine without it gives.

Drafters are scripted (``drafters.py``): always right, always wrong, or random. vLLM's n-gram
drafter runs in a process of its own (``ngram.py``), since it loads numba.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.conftest import ROOT
from tests.engine.chats import Turn, ask, chat, flush, params, says, uninterrupted
from tests.engine.drafters import Scripted, scripted
from tests.engine.pool import EnginePool, generated, pool_usage
from tests.engine.test_families import random_tokens
from tests.engine.test_metrics import metrics
from tests.engine.test_sessions import CASES as SESSION_CASES
from tests.engine.test_sessions import engine as session_engine
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.full_attention import OWN_MODULES

SUFFIX = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="its package is missing")
EACH = {"head_policy": "per_kv_head"}
SMALL = {"prefill_stride": 32, "trace": True}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # Settings, and the number of drafts.
    "window": ({"name": "window", "budget": 64}, 2),
    "sink": ({"name": "sink", "budget": 64}, 1),
    "cascade": ({"name": "cascade", "budget": 64, "num_subcaches": 2}, 4),
    "cascade-heads": ({"name": "cascade", "budget": 64, "num_subcaches": 2, **EACH}, 7),
    "beehive": ({"name": "beehive", "budget": 70, "window": 12, "threshold": 52}, 5),
    "lazy": ({"name": "lazy", "budget": 64}, 6),
    "h2o": ({"name": "h2o", "budget": 64, "normalise": True, "overflow": 5}, 3),
    "random": ({"name": "random", "budget": 64}, 4),
    "dgc": ({"name": "dgc", "budget": 64, "importance": "attention"}, 3),
    "units": ({"name": "cascade", "budget": 128, "num_subcaches": 2, "unit": 8, **EACH}, 5),
    "recall": ({"name": "sink", "budget": 96, "unit": 16, "recall": 3, "recall_store": 256}, 7),
    "keep-prompt": ({"name": "cascade", "budget": 64, "num_subcaches": 2, "keep_prompt": 96}, 4),
}
ASKED: dict[str, list[dict[str, Any]]] = {
    "cascade": [
        {},
        {"kv_budget": 32},
        {"kv_policy": "sink", "kv_budget": 40},
        {"kv_policy": "h2o", "kv_budget": 50},
    ],
    "recall": [{}, {"kv_recall": 0}, {"kv_budget": 64}, {"kv_policy": "window"}],
}
LENGTHS = (300, 40, 7, 129)
ANSWER = 90
COUNTED = "tokens", "evicted_tokens", "strides", "recalled_units"
METERED = "evicted_tokens", "strides"


def engine(pool: EnginePool, policy: dict[str, Any], drafts: int, **kwargs: Any) -> Any:
    """An engine, with scripted drafts unless ``drafts`` is 0."""
    if drafts:
        kwargs["speculative_config"] = scripted(drafts)
    return pool.get({**SMALL, **policy}, **{"max_model_len": 4096, **kwargs})


def texts(tokens: list[int]) -> list[list[int]]:
    return [tokens[2000 * i : 2000 * i + n] for i, n in enumerate(LENGTHS)]


def answers(
    llm: Any,
    prompts: list[list[int]],
    asked: Sequence[dict[str, Any]] | None = None,
    num: int = ANSWER,
    **kwargs: Any,
) -> list[Turn]:
    """Greedy tokens and their log-probabilities."""
    own = [params(num, extra_args=one, **kwargs) for one in asked or [{}] * len(prompts)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], own, use_tqdm=False)
    assert pool_usage(llm) == 0.0
    return [generated(output) for output in outputs]


def script(prompts: list[list[int]], truth: list[Turn], right: float) -> None:
    Scripted.answers = [p + t for p, (t, _) in zip(prompts, truth, strict=True)]
    Scripted.right, Scripted.proposed = right, 0


def compare(found: list[Turn], truth: list[Turn], error: float = 1e-4) -> None:
    for (tokens, logprobs), (expected, their) in zip(found, truth, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, their, atol=error)


def counters(llm: Any) -> dict[str, int]:
    flush(llm)  # a step in which workers hear of the last drafts
    (found,) = llm.collective_rpc("kv_policy_counters")
    return found


def grown(before: dict[str, Any], after: dict[str, Any], *names: str) -> list[float]:
    return [after[name] - before[name] for name in names]


def spec_metric(llm: Any, name: str) -> float:
    (found,) = [m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_{name}"]
    return found


def drafted(llm: Any) -> np.ndarray:
    """Drafts that the target has seen, and those that it accepted."""
    return np.asarray([spec_metric(llm, f"num_{kind}_tokens") for kind in ("draft", "accepted")])


def worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def check_released(llm: Any) -> None:
    """No request holds pages, or places for rows that drafts replace."""
    flush(llm)
    assert pool_usage(llm) == 0.0
    drafter = getattr(worker(llm), "_drafter", None)
    for drafts in (worker(llm)._drafts, *([drafter.drafts] if drafter else [])):
        assert len(drafts._free) == llm.llm_engine.vllm_config.scheduler_config.max_num_seqs


def kept_at(llm: Any, prompt: list[int], num: int) -> tuple[dict[Any, Any], list[Turn]]:
    """What each layer keeps after each token of one request, and its answer."""
    llm.collective_rpc("kv_policy_trace", args=(1,))
    answer = answers(llm, [prompt], num=num)
    flush(llm)
    ((found, *_),) = [llm.collective_rpc("kv_policy_kept")]
    kept = {(one["layer"], one["end"]): one["tokens"] for one in found}
    assert len(kept) == len(found), "a token was recorded twice"
    return kept, answer


def agree(
    start: Callable[[int], Any],
    drafts: int,
    prompts: list[list[int]],
    asked: Sequence[dict[str, Any]] | None,
    rights: Sequence[float],
    num: int = ANSWER,
    alone: int = 60,
) -> list[Turn]:
    """Check that an engine does with drafts what one does without: answers, caches and counts.

    Args:
        start: starts an engine with so many drafts, 0: without.
        rights: how often drafts are right, run after run.
        num: tokens of an answer.
        alone: tokens of the answer that is given alone, whose kept tokens are compared.

    Returns:
        The answers.
    """
    plain = start(0)
    before, metered = counters(plain), metrics(plain)
    truth = answers(plain, prompts, asked, num)
    counted = [name for name in COUNTED if name in before]
    expected = grown(before, counters(plain), *counted)
    on_meter = grown(metered, metrics(plain), *METERED)
    kept, one = kept_at(plain, prompts[0], alone)
    llm = start(drafts)
    for right in rights:
        script(prompts, truth, right)
        before, metered, known = counters(llm), metrics(llm), drafted(llm)
        compare(answers(llm, prompts, asked, num), truth)
        seen, accepted = drafted(llm) - known
        print(f"{drafts} drafts, right {right}: {accepted:g} of {seen:g} accepted")
        assert seen > 20 and (accepted == 0) == (right == 0) and (accepted == seen) == (right == 1)
        assert grown(before, counters(llm), *counted) == expected
        assert grown(metered, metrics(llm), *METERED) == on_meter
        script(prompts[:1], one, right)
        found, answer = kept_at(llm, prompts[0], alone)
        assert found == kept
        compare(answer, one)
    check_released(llm)
    return truth


def company(
    llm: Any,
    prompts: list[list[int]],
    asked: Sequence[dict[str, Any]],
    truth: list[Turn],
    aborted: dict[int, int],
    preempted: Sequence[int] = (),
    num: int = 100,
    name: str = "",
) -> None:
    """Check that requests which begin together answer as they did without drafts.

    Args:
        aborted: the steps after which requests are aborted, by the requests' numbers.
        preempted: the steps after which all requests are preempted.
        num: tokens of an answer.
        name: what the requests' ids begin with.
    """
    for i, (prompt, one) in enumerate(zip(prompts, asked, strict=True)):
        request = {"prompt_token_ids": prompt}
        llm.llm_engine.add_request(f"{name}{i}", request, params(num, extra_args=one))
    scheduler, found, step = llm.llm_engine.engine_core.engine_core.scheduler, {}, 0
    while llm.llm_engine.has_unfinished_requests():
        found |= {out.request_id: generated(out) for out in llm.llm_engine.step() if out.finished}
        step += 1
        llm.llm_engine.abort_request([f"{name}{i}" for i, at in aborted.items() if at == step])
        if step in preempted:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
    left = [i for i in range(len(prompts)) if i not in aborted]
    assert set(found) == {f"{name}{i}" for i in left}
    compare([found[f"{name}{i}"] for i in left], [truth[i] for i in left])


def sixteen(tokens: list[int]) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts, and what their requests ask for."""
    rng = np.random.default_rng(0)
    prompts = [tokens[900 * i :][: int(rng.integers(1, 300))] for i in range(16)]
    return prompts, ASKED["cascade"] * 4


def check_case(
    pool: EnginePool, name: str, tokens: list[int], rights: list[float], **kwargs: Any
) -> None:
    policy, drafts = CASES[name]
    own = {"enable_prefix_caching": False, **kwargs}
    agree(lambda n: engine(pool, policy, n, **own), drafts, texts(tokens), ASKED.get(name), rights)


LONG = ("window", "sink", "beehive", "lazy", "random", "dgc", "cascade-heads", "h2o")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in CASES]
)
def test_every_policy(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    check_case(engine_pool, name, book_tokens, [0.7] if name != "cascade" else [0.0, 0.5, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "units"])
def test_in_pytorch(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    check_case(engine_pool, name, book_tokens, [0.6], env={"VLLM_CASCADE_CPU": "pytorch"})


def test_quantised_rows(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    check_case(
        engine_pool, "cascade-heads", book_tokens, [0.6], kv_cache_dtype="int8_per_token_head"
    )


@pytest.fixture(scope="module")
def without(
    engine_pool: EnginePool, book_tokens: list[int]
) -> tuple[dict[Any, Any], list[Turn], list[Turn]]:
    """Without drafts: what is kept in an answer of 2,000 tokens, the answer, and sixteen others."""
    llm = engine(engine_pool, CASES["cascade-heads"][0], 0)
    kept, one = kept_at(llm, book_tokens[:50], 2000)
    return kept, one, answers(llm, *sixteen(book_tokens), num=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "right"), [(1, 0.9), (2, 1.0), (3, 0.2), (4, 0.5), (5, 0.0), (6, 0.7), (7, 0.95)]
)
def test_2_000_tokens(
    drafts: int, right: float, without: Any, engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Twice as many as the model has positions; then sixteen requests, some of them aborted."""
    kept, one, others = without
    llm = engine(engine_pool, CASES["cascade-heads"][0], drafts)
    script([book_tokens[:50]], one, right)
    found, answer = kept_at(llm, book_tokens[:50], 2000)
    compare(answer, one)
    assert found == kept and len({end for _, end in kept}) > 2000
    seen, accepted = drafted(llm)
    print(f"{drafts} drafts, right {right}: {accepted:g} of {seen:g} accepted")
    assert seen > 900 and abs(accepted / seen - rate(right, drafts)) < 0.05
    prompts, asked = sixteen(book_tokens)
    script(prompts, others, right)
    company(llm, prompts, asked, others, {3: 6, 7: 10, 12: 14})
    check_released(llm)


def rate(right: float, drafts: int) -> float:
    """Share of drafts that are accepted if each is right with a probability of ``right``."""
    return sum(right**i for i in range(1, drafts + 1)) / drafts


@pytest.mark.parametrize(
    "architecture",
    [
        "gemma2",
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("llama4", marks=pytest.mark.slow),  # attends within chunks
        pytest.param("deepseek-v2", marks=pytest.mark.slow),  # has latent rows
    ],
)
def test_layers_of_other_kinds(architecture: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    family = (FAMILIES | OWN_MODULES)[architecture]
    model = write_family(tmp_path, family)
    policy = {"name": "cascade", "budget": 32, "num_subcaches": 2, **SMALL}
    prompts = [random_tokens(n, n) for n in (150, 20)]
    settings = {"model": model, "max_model_len": 2048, "skip_tokenizer_init": True}
    truth = answers(engine(engine_pool, policy, 0, **settings), prompts)
    llm = engine(engine_pool, policy, 4, **settings)
    script(prompts, truth, 0.6)
    compare(answers(llm, prompts), truth)
    assert Scripted.proposed > 50


def test_snapshots(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """A second prompt starts from a snapshot that the first left, also while others decode."""
    policy, prompts = CASES["cascade"][0], texts(book_tokens)
    settings = {"max_num_batched_tokens": 64}
    truth = answers(engine(engine_pool, policy, 0, **settings), prompts)
    llm = engine(engine_pool, policy, 4, **settings)
    script(prompts, truth, 0.6)
    compare(answers(llm, prompts), truth)
    hits = metrics(llm)["snapshot_hits"]
    compare(answers(llm, prompts), truth)
    assert metrics(llm)["snapshot_hits"] == hits + 3


def test_sixteen_requests_with_aborts_and_preemptions(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    policy, (prompts, asked) = CASES["cascade"][0], sixteen(book_tokens)
    truth = answers(engine(engine_pool, policy, 0), prompts, asked, num=100)
    llm = engine(engine_pool, policy, 5)
    script(prompts, truth, 0.7)
    company(llm, prompts, asked, truth, {3: 12, 7: 20, 12: 25}, preempted=(15, 22))
    check_released(llm)


def test_a_pool_with_no_page_to_spare(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Drafts never take a page that admission did not count."""
    policy = {"name": "sink", "budget": 252, "num_sinks": 4}
    prompts = [book_tokens[:60], book_tokens[500:570]]
    settings = {"num_gpu_blocks_override": 1 + 2 * 3, "max_model_len": 1024}
    truth = answers(engine(engine_pool, policy, 0, **settings), prompts, num=26)
    llm = engine(engine_pool, policy, 7, **settings)
    script(prompts, truth, 1.0)
    Scripted.answers = [answer + [5] * 9 for answer in Scripted.answers]
    compare(answers(llm, prompts, num=26), truth)
    (preempted,) = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert preempted == 0 and spec_metric(llm, "num_accepted_tokens") > 10


def test_sampled_answers(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Drafts of requests that sample, beside greedy ones: each has its request's settings.

    Sampling from one token is greedy.
    """
    policy, prompts = CASES["cascade"][0], texts(book_tokens)
    truth = answers(engine(engine_pool, policy, 0), prompts)
    llm = engine(engine_pool, policy, 4)
    script(prompts, truth, 0.6)
    given: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 1e-6},
        {"temperature": 2.0, "top_k": 1},
    ]
    params = [SamplingParams(max_tokens=ANSWER, ignore_eos=True, **one) for one in given]
    before = spec_metric(llm, "num_accepted_tokens")
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tokens for tokens, _ in truth]
    assert spec_metric(llm, "num_accepted_tokens") > before + 100


def spoken(tokens: list[int], turns: list[Turn]) -> None:
    """Script the drafts of a chat."""
    history: list[int] = []
    Scripted.answers = []
    for turn, (answer, _) in enumerate(turns):
        history += [*says(tokens, turn), *answer]
        Scripted.answers.append(list(history))
    Scripted.right = 0.7


@pytest.mark.parametrize(
    "name", ["cascade-heads", "recall", pytest.param("units", marks=pytest.mark.slow)]
)
def test_sessions(name: str, engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """A session is the state after the tokens of its answer, and no draft."""
    llm = session_engine(engine_pool, SESSION_CASES[name], speculative_config=scripted(5))
    Scripted.answers = []
    truth = uninterrupted(llm, book_tokens, 4)
    spoken(book_tokens, truth)
    Scripted.proposed = 0
    compare(uninterrupted(llm, book_tokens, 4), truth)
    assert Scripted.proposed > 20
    accepted = spec_metric(llm, "num_accepted_tokens")
    compare(chat(llm, book_tokens, 4), truth)
    assert spec_metric(llm, "num_accepted_tokens") > accepted + 20
    check_released(llm)


def check_a_stop_token(llm: Any, tokens: list[int]) -> None:
    """What was accepted behind it is no part of the session."""
    prompt, Scripted.answers = tokens[:200], []
    truth = answers(llm, [prompt], num=40)
    script([prompt], truth, 1.0)
    own = truth[0][0]
    stop = next(i for i in range(9, 40) if own.index(own[i]) == i and i % 7 not in (0, 6))
    (found,) = answers(llm, [prompt], num=40, stop_token_ids=[own[stop]])
    assert found[0] == own[: stop + 1]
    cached, _ = ask(llm, [*prompt, *found[0], *tokens[500:520]])
    assert cached == len(prompt) + stop


def test_a_stop_token_among_drafts(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    policy = SESSION_CASES["cascade-heads"]
    llm = session_engine(engine_pool, policy, speculative_config=scripted(6))
    check_a_stop_token(llm, book_tokens)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["ngram"], id="ngram", marks=pytest.mark.slow),
        pytest.param(["suffix"], id="suffix", marks=[pytest.mark.slow, SUFFIX]),
        pytest.param(["ngram", "h2o", "2"], id="two ranks exchange scores", marks=pytest.mark.slow),
        pytest.param(["ngram", "heads", "2"], id="two ranks", marks=pytest.mark.slow),
        pytest.param(
            ["draft_model", "h2o", "2"],
            id="a draft model over two ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_vllms_drafters(words: list[str]) -> None:
    """On text that repeats."""
    found = in_a_process("tests.engine.ngram", *words)
    assert found["accepted"] > 20 and not found["async"]


def in_a_process(*words: str) -> dict[str, Any]:
    """What a run of vLLM's own drafters has found, in an interpreter of its own."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert found["same"] and found["difference"] < 1e-4
    return found
