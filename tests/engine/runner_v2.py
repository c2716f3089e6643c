# SPDX-License-Identifier: Apache-2.0
"""One policy on vLLM's second model runner and the CUDA backend's code, without a GPU.

    python -m tests.engine.runner_v2 '{"name": "cascade"}'
    python -m tests.engine.runner_v2 '{"name": "cascade"}' gemma3
    python -m tests.engine.runner_v2 '{"name": "cascade"}' sessions
    python -m tests.engine.runner_v2 '{"name": "cascade"}' drafts
    python -m tests.engine.runner_v2 '{"name": "cascade"}' model_drafts eagle

The second runner, the default on GPUs, needs Triton, and vLLM looks for a Triton that has a backend
for CPUs. Where kernels are interpreted none is needed, so a stand-in is put there before vLLM is
imported. Scheduling is asynchronous, as on a GPU. ``on_device.py`` compares with the oracle, as
``benchmarks.gpu_engine`` does on a card; then a request that is preempted is compared with one that
is not. With a family's name, two layers of it are compared instead; with ``sessions``, a second
engine continues a chat; with ``drafts``, there are answers with and without n-gram drafts; with
``model_drafts``, those of a drafting model, which are compared with the oracle's. Every engine
measures CUDA graphs' memory and warms kernels up as on a GPU, less the capture
(``graph_profile.py``).
"""

import os

os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm import LLM, SamplingParams

from tests.conftest import MODEL
from tests.engine import async_cpu, graph_profile
from tests.engine.cuda_backend import use_cuda_backend
from tests.engine.on_device import identity, of_family, often_right
from tests.oracle.random_models import write_llama
from vllm_cascade.engine.devices import CPU

profiled: list[list[set[str]]] = []
"""Names of the builders that engines were profiled with, once ``like_a_gpu`` was called."""
warmed: list[list[int]] = []
"""Steps of the warm-up of each engine, likewise."""


def like_a_gpu() -> None:
    """Every engine of this process from here on."""
    async_cpu.turn_on()
    profiled.append(graph_profile.turn_on())
    warmed.append(graph_profile.warm_kernels_up())
    use_cuda_backend()
    CPU.own_refusals = tuple(
        entry for entry in CPU.own_refusals if entry.name != "Model Runner V2 on the CPU"
    )


def small_engine(folder: str, policy: dict[str, Any], **settings: Any) -> LLM:
    """A random model of one layer, whose cache is full after 36 tokens."""
    model = write_llama(folder, head_dim=16, num_layers=1, tokenizer_from=MODEL)
    return engine_of(model, policy, **settings)


def engine_of(model: Path, policy: dict[str, Any], **settings: Any) -> LLM:
    """An engine whose cache is full after 36 tokens."""
    return LLM(
        str(model),
        dtype="float32",
        additional_config={
            "kv_policy": {"recall": 0, **policy, "budget": 32, "prefill_stride": 16}
        },
        max_model_len=1024,
        kv_cache_memory_bytes=16 << 20,
        max_num_seqs=4,
        enforce_eager=True,
        **{"enable_prefix_caching": False, **settings},
    )


def preempted(llm: LLM) -> float:
    """Largest difference of a log-probability that being preempted twice makes.

    What was generated is read again token by token, not in a prompt's strides.
    """
    params = SamplingParams(max_tokens=45, logprobs=0, temperature=0.0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(3, 40))}
    answers = []
    for preempt_at in ((), (25, 40)):
        llm.llm_engine.add_request(str(preempt_at), prompt, params)
        outputs: list[Any] = []
        for step in range(1, 1000):
            outputs += llm.llm_engine.step()
            if step in preempt_at:
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            if not llm.llm_engine.has_unfinished_requests():
                break
        (choice,) = outputs[-1].outputs
        answers.append([next(iter(entry.values())).logprob for entry in choice.logprobs])
    return max(abs(a - b) for a, b in zip(*answers, strict=True))


def distinct(llm: LLM) -> int:
    """Different tokens among 40 that are sampled beyond the budget.

    The sampler's noise follows from a token's position in its stream; with its position in the
    cache, which stops growing, it would be the same for all of them.
    """
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=7, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    return len(set(output.outputs[0].token_ids[-40:]))


def sessions(policy: dict[str, Any]) -> dict[str, Any]:
    """A chat in turns, the last one on a new engine."""
    from tests.engine import chats, test_sessions
    from tests.engine.pool import EnginePool
    from tests.engine.test_sessions_cuda import TOKENS, TURNS
    from vllm_cascade.engine.devices import CUDA

    CPU.session_copies = CUDA.session_copies
    pool = EnginePool()
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        write_llama(model, head_dim=16, num_layers=2, tokenizer_from=MODEL)
        settings = {"model": Path(model), "max_model_len": 1024, "max_num_batched_tokens": 64}
        settings |= {"max_num_seqs": 4, "block_size": 16, "enable_prefix_caching": True}
        llm = test_sessions.engine(pool, policy, folder, **settings)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        answers = chats.chat(llm, TOKENS, TURNS - 1, between=lambda: time.sleep(0.2))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        history = chats.says(TOKENS, 0)
        for _ in range(2):  # the second one starts from a snapshot of the first one's prompt
            chats.ask(llm, [*history[:70], 9], max_tokens=2)
        chats.flush(llm)
        chats.wait_for_files(Path(folder), TURNS)
        found = {
            "runner": "V2" if worker.use_v2_model_runner else "V1",
            "hits": dict(chats.index_of(llm).counters.hits),
            "reused": scheduler.snapshot_counters.hits,
            "beside": beside_another(llm),
            "misses": dict(chats.index_of(llm).counters.misses),
        }
        pool.close()
        llm = test_sessions.engine(pool, policy, folder, **settings)
        turns = range(TURNS - 1)
        history = [token for n in turns for token in chats.says(TOKENS, n) + answers[n][0]]
        _, last = chats.ask(llm, history + chats.says(TOKENS, TURNS - 1))
        found["hits"] |= chats.index_of(llm).counters.hits
        found["answers"] = [*answers, last]
        pool.close()
    return found


def beside_another(llm: LLM) -> tuple[int | None, int]:
    """Tokens that a chat's second turn did not read, and those it has said before.

    Another request decodes all the time, so that no step is without tokens.
    """
    from tests.engine import chats
    from tests.engine.test_sessions_cuda import TOKENS

    engine, history, known, cached = llm.llm_engine, TOKENS[1100:1150], 0, None
    engine.add_request("long", {"prompt_token_ids": TOKENS[-40:]}, chats.params(900))
    for name in ("first turn", "second turn"):
        engine.add_request(name, {"prompt_token_ids": history}, chats.params(8))
        ended: dict[str, Any] = {}
        while name not in ended:
            ended = {output.request_id: output for output in engine.step() if output.finished}
            assert "long" not in ended
        (answer,), known = ended[name].outputs, len(history)
        history, cached = (
            [*history, *answer.token_ids, *range(3, 20)],
            ended[name].num_cached_tokens,
        )
    engine.abort_request(["long"])
    return cached, known - 17


def drafts(policy: dict[str, Any]) -> dict[str, Any]:
    """Requests with drafts and without. Some are aborted.

    A second batch starts from snapshots, and is preempted twice.
    """
    from tests.engine.pool import clean_up

    phrase = [11, 52, 97, 203, 344, 18, 25]
    prompts = [phrase * 6, [*range(30, 50), *phrase * 2], [7] * 5, list(range(60, 93))]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    params = SamplingParams(max_tokens=40, logprobs=0, temperature=0.0, ignore_eos=True)
    names = "answers", "reused", "evicted", "runner", "async"
    found: dict[str, Any] = {name: [] for name in names}
    found["warmed"] = warmed[0]
    with tempfile.TemporaryDirectory() as folder:
        for speculative in (None, config):
            settings = {"speculative_config": speculative, "enable_prefix_caching": True}
            settings |= {"block_size": 16}
            llm = small_engine(folder, policy, disable_log_stats=False, **settings)
            core = llm.llm_engine.engine_core.engine_core
            answers: dict[str, Any] = {}
            for batch in "ab":
                for number, prompt in enumerate(prompts):
                    request = {"prompt_token_ids": prompt}
                    llm.llm_engine.add_request(f"{batch}{number}", request, params)
                step = 0
                while llm.llm_engine.has_unfinished_requests():
                    answers |= {out.request_id: out for out in llm.llm_engine.step()}
                    step += 1
                    if batch == "b" and step in (9, 14):
                        assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
                    if step == 8:
                        llm.llm_engine.abort_request([f"{batch}3"])
            done = [answers[name].outputs[0] for name in sorted(answers) if name[1] != "3"]
            texts = [list(one.token_ids) for one in done]
            logprobs = [[next(iter(x.values())).logprob for x in one.logprobs] for one in done]
            found["answers"].append([texts, logprobs])
            often_right([p + text for p, text in zip(prompts, texts, strict=False)])
            found["reused"].append(core.scheduler.snapshot_counters.hits)
            core.step_fn()  # in which workers hear of the last drafts
            (counters,) = llm.collective_rpc("kv_policy_counters")
            found["evicted"].append(counters["evicted_tokens"])
            config = llm.llm_engine.vllm_config
            found["runner"].append("V2" if config.use_v2_model_runner else "V1")
            found["async"].append(config.scheduler_config.async_scheduling)
            metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
            for name in ("accepted", "draft"):
                found[name] = metrics.get(f"vllm:spec_decode_num_{name}_tokens", 0)
            core.shutdown()
            del llm, core
            clean_up()
    return found


def model_drafts(policy: dict[str, Any], method: str) -> dict[str, Any]:
    """Answers without drafts and with those of a drafting model, of which some are made wrong.

    A draft model is the target itself, so all of its own drafts are right; drafts of other layers
    are the oracle's. Requests come and go; the second batch starts from snapshots, and is
    preempted.
    """
    from tests.engine.pool import clean_up
    from tests.engine.test_families import random_tokens
    from tests.oracle.drafting import write_drafting, write_target
    from tests.oracle.settings import oracle_settings

    prompts = [random_tokens(1, 83), random_tokens(2, 9), random_tokens(3, 21), [7] * 40]
    params = SamplingParams(max_tokens=24, logprobs=0, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {"answers": [], "async": [], "reused": []}
    with tempfile.TemporaryDirectory() as folder:
        target, other = Path(folder) / "target", None
        if method == "draft_model":
            write_llama(target, head_dim=16, num_layers=1)
        else:
            write_target(target, method)
        if method in ("eagle", "eagle3"):
            other = write_drafting(Path(folder) / "drafting", method)
        config = {"method": method, "num_speculative_tokens": 4}
        if method != "mtp":
            config["model"] = str(other or target)
        for speculative in (None, config):
            llm = engine_of(
                target,
                policy,
                speculative_config=speculative,
                enable_prefix_caching=True,
                skip_tokenizer_init=True,
                block_size=16,
                max_num_batched_tokens=64,
                disable_log_stats=False,
            )
            core = llm.llm_engine.engine_core.engine_core
            seen = watch(core, found["answers"], prompts) if speculative else []
            found["answers"].append(answer(llm, core, prompts, params))
            found["reused"].append(core.scheduler.snapshot_counters.hits)
            found["async"].append(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
            metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
            core.shutdown()
            del llm, core
            clean_up()
        found["drafts"], found["warmed"] = len(seen), warmed[0]
        for name in ("accepted", "draft"):
            found[name] = metrics[f"vllm:spec_decode_num_{name}_tokens"]
        against = oracle_settings({**policy, "budget": 32, "prefill_stride": 16, "recall": 0})
        found["wrong"] = wrong_drafts(method, target, other, seen, prompts, against)
    return found


def answer(llm: LLM, core: Any, prompts: list[list[int]], params: SamplingParams) -> Any:
    """Tokens and log-probabilities of two batches; one request of each is aborted."""
    answers: dict[str, Any] = {}
    for batch in "ab":
        for number, prompt in enumerate(prompts):
            llm.llm_engine.add_request(f"{batch}{number}", {"prompt_token_ids": prompt}, params)
        step = 0
        while llm.llm_engine.has_unfinished_requests():
            answers |= {out.request_id: out for out in llm.llm_engine.step()}
            step += 1
            if batch == "b" and step == 7:
                assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
            if step == 5:
                llm.llm_engine.abort_request([f"{batch}3"])
    done = [answers[name].outputs[0] for name in sorted(answers) if name[1] != "3"]
    logprobs = [[next(iter(x.values())).logprob for x in one.logprobs] for one in done]
    return [[list(one.token_ids) for one in done], logprobs]


def watch(core: Any, truth: list[Any], prompts: list[list[int]]) -> list[Any]:
    """Record a drafter's drafts, and make some of those wrong that the target sees.

    Returns:
        A list that gets the tokens of requests with the one sampled last, and their drafts.
    """
    runner = core.model_executor.driver_worker.worker.model_runner
    drafter, states, rng = runner.speculator, runner.req_states, random.Random(0)
    texts = [p + t for p, t in zip(prompts, truth[0][0], strict=False)]
    stock, seen = drafter.propose, []

    def propose(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = stock(input_batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        for row, index in enumerate(input_batch.idx_mapping.tolist()):
            known = states.all_token_ids.gpu[index, : states.total_len.gpu[index]].tolist()
            for text in texts:
                following = text[len(known) :][:4]
                if text[: len(known)] == known and len(following) == 4:
                    seen.append((known, drafts[row].tolist()))
                    right = [t if rng.random() < 0.7 else t ^ 1 for t in following]
                    drafts[row] = torch.tensor(right)
        return drafts

    drafter.propose = propose
    return seen


def wrong_drafts(
    method: str,
    target: Path,
    other: Path | None,
    seen: list[Any],
    prompts: list[list[int]],
    against: dict[str, Any],
) -> int:
    """How many of some drafts are not what the drafting layers would draft by the oracle."""
    from tests.oracle.drafting import draft_logits
    from tests.oracle.model import load_model, stream

    wrong = 0
    for text, drafts in seen[:: max(len(seen) // 8, 1)]:
        (prompt,) = [p for p in prompts if text[: len(p)] == p]
        if len(text) == len(prompt):
            continue  # a prompt that goes on
        own = {"prompt_len": len(prompt), **against}
        if method == "draft_model":
            model = load_model(target)
            parts = [text + drafts[:n] for n in range(len(drafts))]
            logits = torch.stack([stream(model, part, **own).logits_last for part in parts])
        else:
            logits = draft_logits(method, target, other, text, drafts, **own)
        wrong += sum(a != b for a, b in zip(drafts, logits.argmax(-1).tolist(), strict=True))
    return wrong


if __name__ == "__main__":
    like_a_gpu()
    settings = json.loads(sys.argv[1])
    if sys.argv[2:] == ["sessions"]:
        print("RESULT " + json.dumps(sessions(settings)))
        sys.exit()
    if sys.argv[2:3] == ["model_drafts"]:
        print("RESULT " + json.dumps(model_drafts(settings, sys.argv[3])))
        sys.exit()
    if sys.argv[2:] == ["drafts"]:
        print("RESULT " + json.dumps(drafts(settings)))
        sys.exit()
    if len(sys.argv) > 2:
        (found,) = of_family(settings, label="", tiny=True, family=sys.argv[2])
        print("RESULT " + json.dumps(found | {"builders": [sorted(x) for x in profiled[0]]}))
        sys.exit()
    (found,) = identity(settings, label="", tiny=True)
    with tempfile.TemporaryDirectory() as folder:
        llm = small_engine(folder, settings)
        found |= {"preempted": preempted(llm), "distinct": distinct(llm)}
    print("RESULT " + json.dumps(found))
