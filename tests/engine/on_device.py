# SPDX-License-Identifier: Apache-2.0
"""Engines of tiny random models beside the oracle, on whatever device there is.

``benchmarks.gpu_engine`` runs these on a card, ``tests/engine/runner_v2.py`` without one. Each
needs a process of its own.
"""

import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.running.environment import ROOT

Row = dict[str, Any]
MODEL = ROOT / "benchmarks/inputs/models/books-5m"
SHARE = 0.15
"""Of the GPU's memory for a tiny model's engine."""
MAX_ERROR = 5e-4
"""Largest difference of a log-probability from the oracle's, in fp32."""
CLOSER = 5
"""With rows in 8 bits, the mean difference from an oracle that quantises must be this many times
smaller than from one that does not. Values at rounding boundaries may quantise differently."""
TURNS = 3
"""Turns of the chat in ``sessions``."""
OTHER = {"kv_policy": "sink", "kv_budget": 32}
"""What the fourth request of the comparison asks for."""


def other_settings(policy: dict[str, Any]) -> dict[str, Any]:
    """What ``OTHER`` means on a server that runs ``policy``, to the oracle."""
    per_head = "per_kv_head" if policy["name"] == "beehive" else "homogeneous"
    return {
        "name": "sink",
        "budget": 32,
        "prefill_stride": policy["prefill_stride"],
        "head_policy": policy.get("head_policy", per_head),
        "overflow": 1 if policy["name"] == "lazy" else policy.get("overflow", 1),
        **{key: policy[key] for key in ("unit", "recall", "recall_store") if key in policy},
    }


def start(tiny: bool, **arguments: Any) -> dict[str, Any]:
    """Memory and graphs of an engine: on a GPU as by default."""
    if tiny:
        return {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, **arguments}
    return {"gpu_memory_utilization": SHARE, **arguments}


class LateKernels(logging.Handler):
    """Our kernels that vLLM's monitor saw compiled while the engine served.

    vLLM's own are not counted: it compiles the one for log-probabilities when it is asked for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[str] = set()
        logging.getLogger("vllm.utils.jit_monitor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) > 2:
            self.compiled.add(str(record.args[2]))

    def names(self) -> list[str]:
        prefix = "vllm_cascade.kernels.triton."
        modules = [module for name, module in sys.modules.items() if name.startswith(prefix)]
        return sorted(self.compiled & {name for module in modules for name in vars(module)})


def alike(errors: list[Any], without: list[Any]) -> bool:
    """Whether an engine's log-probabilities agree with the oracle's.

    Args:
        errors: arrays of absolute differences from the oracle's log-probabilities.
        without: the same from an oracle that does not quantise; empty if the engine does not.
    """
    import numpy as np

    if not without:
        return max(float(error.max()) for error in errors) < MAX_ERROR
    return bool(CLOSER * np.concatenate(errors).mean() < np.concatenate(without).mean())


def identity(policy: dict[str, Any], label: str, tiny: bool, **engine: Any) -> list[Row]:
    """Generate greedily with three requests at once; ask the oracle about every token.

    A draft model without a path is the model itself, whose drafts are all right.
    """
    import numpy as np
    from vllm import LLM, SamplingParams

    from tests.oracle.dgc import sentence_ends
    from tests.oracle.model import load_model, stream
    from tests.oracle.quantised import Quantiser
    from tests.oracle.random_models import write_llama
    from tests.oracle.settings import oracle_settings, token_scores
    from vllm_cascade.policies.arguments import CHECK

    # The smallest settings that wrap the cache often.
    policy = {**policy, "budget": 64, "prefill_stride": 16}
    if policy["name"] == "beehive":
        policy |= {"window": 12, "stride": 5, "threshold": 40}
    if policy["name"] == "lazy":
        policy["overflow"] = 8
        policy |= {"slack": 6, "max_drop": 3}
    late, cache_dtype = LateKernels(), engine.get("kv_cache_dtype", "auto")
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(folder, head_dim=64, tokenizer_from=MODEL)
        drafting = dict(engine.get("speculative_config", {}))
        if itself := drafting.get("method") == "draft_model":
            engine["speculative_config"] = {**drafting, "model": str(path)}
        llm = LLM(
            str(path),
            dtype="float32",
            additional_config={"kv_policy": {"recall": 0, **policy}, CHECK: "off"},
            max_model_len=1024,
            max_num_seqs=8,
            disable_log_stats=False,
            **start(tiny, **engine),
        )
        ends = sentence_ends(llm.get_tokenizer())
        oracle, quantiser = load_model(path, bloom_gelu="none"), Quantiser.of(cache_dtype)
        errors: list[Any] = []
        without: list[Any] = []
        texts: list[list[int]] = []
        tokens = np.random.default_rng(0).integers(1, 500, 400).tolist()
        prompts = [tokens[:5], tokens[5:120], tokens[120:337], tokens[200:290]]
        if tiny:
            prompts = [tokens[:5], tokens[5:75], tokens[120:260], tokens[200:260]]
        length = (60 if "speculative_config" in engine else 24) if tiny else 300

        def ask(numbers: list[int]) -> int:
            """Generate, and compare with the oracle; prompt tokens that were in a snapshot."""
            params = [
                SamplingParams(
                    max_tokens=length,
                    temperature=0.0,
                    logprobs=0,
                    ignore_eos=True,
                    extra_args=OTHER if number == 3 else None,
                )
                for number in numbers
            ]
            inputs = [{"prompt_token_ids": prompts[number]} for number in numbers]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            for number, output in zip(numbers, outputs, strict=True):
                (choice,) = output.outputs
                found = [next(iter(entry.values())).logprob for entry in choice.logprobs]
                text = prompts[number] + list(choice.token_ids)
                texts.append(text)
                settings = other_settings(policy) if number == 3 else policy
                for codes, gaps in ((quantiser, errors), (None, without)):
                    if gaps is without and quantiser is None:
                        continue
                    truth = stream(
                        *(oracle, text),
                        prompt_len=len(prompts[number]),
                        token_scores=token_scores(settings, text, ends.__getitem__),
                        quantiser=codes,
                        **oracle_settings(settings),
                    )
                    expected = np.asarray(truth.logprobs[len(prompts[number]) - 1 :])
                    gaps.append(np.abs(np.asarray(found) - expected))
            return sum(output.num_cached_tokens or 0 for output in outputs)

        config = llm.llm_engine.vllm_config
        first = ask([0, 1, 2, 3])
        predicted = drafting.get("method") == "ngram" and config.use_v2_model_runner
        if predicted:
            often_right(texts)
        reused = ask([2])
        counters, *_ = llm.collective_rpc("kv_policy_counters")
        drafts, accepted = drafted(llm)
    right = alike(errors, without) and counters["evicted_tokens"] > 0 and not late.names()
    right = right and (drafts > 0) == ("speculative_config" in engine)
    right = right and (accepted > 0 or not predicted)
    # Rounding may let the draft model prefer another token, now and then.
    right = right and (accepted > 0.9 * drafts or not itself)
    found = {
        "equal": right and first == 0 and reused > 0,
        "max_error": max(float(error.max()) for error in errors),
        "evicted": counters["evicted_tokens"],
        "reused": reused,
        "late": " ".join(late.names()),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": bool(config.scheduler_config.async_scheduling),
        "drafts": drafts,
        "accepted": accepted,
    }
    return [found]


def often_right(texts: list[list[int]]) -> None:
    """Patch vLLM's n-gram drafter: after a prefix of one of ``texts``, 70 % of drafts are right.

    The drafter itself still runs. A random model's text does not repeat, so its own drafts are
    almost always wrong.
    """
    import random

    import torch
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    stock, rng = NgramGPUSpeculator.propose, random.Random(0)

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = stock(self, input_batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        states, most = self.req_states, drafts.shape[1]
        for row, index in enumerate(input_batch.idx_mapping.tolist()):
            known = states.all_token_ids.gpu[index, : states.total_len.gpu[index]].tolist()
            for text in texts:
                following = text[len(known) :][:most]
                if text[: len(known)] == known and len(following) == most:
                    found = [t if rng.random() < 0.7 else t ^ 1 for t in following]
                    drafts[row] = torch.tensor(found)
        return drafts

    NgramGPUSpeculator.propose = propose


def drafted(llm: Any) -> tuple[int, int]:
    """An engine's numbers of draft tokens and of accepted ones, from its metrics."""
    counts = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    names = (f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
    drafts, accepted = (int(counts.get(name, 0)) for name in names)
    return drafts, accepted


def sessions(policy: dict[str, Any], label: str, tiny: bool, **engine: Any) -> list[Row]:
    """A chat with one request per turn; the last turn runs on a new engine.

    The reference is the same chat as one streaming request, which uses no sessions.
    """
    import gc
    import time

    import numpy as np
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.engine import chats
    from tests.oracle.random_models import write_llama

    policy, late = {**policy, "budget": 64, "prefill_stride": 16}, LateKernels()
    tokens = np.random.default_rng(8).integers(1, 500, 3000).tolist()
    memory = {"kv_cache_memory_bytes": 64 << 20}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kept:
        path = write_llama(folder, head_dim=64, tokenizer_from=MODEL)

        def begin() -> Any:
            config = {"kv_policy": {"recall": 0, **policy}, "kv_sessions": True}
            return LLM(
                str(path),
                dtype="float32",
                additional_config=config | {"kv_sessions_dir": kept},
                max_model_len=1024,
                max_num_seqs=4,
                disable_log_stats=False,
                **{**start(tiny), **memory, **engine},
            )

        llm = begin()
        truth = chats.uninterrupted(llm, tokens, TURNS)
        answers = chats.chat(llm, tokens, TURNS - 1, between=lambda: time.sleep(0.2))
        chats.flush(llm)
        hits = dict(chats.index_of(llm).counters.hits)
        chats.wait_for_files(Path(kept), TURNS - 1)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        llm = begin()
        history = [t for n in range(TURNS - 1) for t in chats.says(tokens, n) + answers[n][0]]
        reused, last = chats.ask(llm, history + chats.says(tokens, TURNS - 1))
        hits |= chats.index_of(llm).counters.hits
        (counters,) = llm.collective_rpc("kv_policy_counters")
        config = llm.llm_engine.vllm_config
    pairs = list(zip([*answers, last], truth, strict=True))
    same = all(ids == expected for (ids, _), (expected, _) in pairs)
    gaps = [float(np.abs(np.subtract(a, b)).max()) for (_, a), (_, b) in pairs]
    right = same and max(gaps) < MAX_ERROR and hits == {"memory": TURNS - 2, "disk": 1}
    return [
        {
            "equal": right and counters["evicted_tokens"] > 0 and not late.names(),
            "max_error": max(gaps),
            "evicted": counters["evicted_tokens"],
            "reused": reused,
            "hits": hits,
            "late": " ".join(late.names()),
            "runner": "V2" if config.use_v2_model_runner else "V1",
        }
    ]


def of_family(
    policy: dict[str, Any], label: str, tiny: bool, family: str, **engine: Any
) -> list[Row]:
    """Two layers of a family, one of each kind: a prompt and generated tokens."""
    from tests.oracle.families import FAMILIES, run_family, shallow, write_family
    from tests.oracle.full_attention import OWN_MODULES

    shape = shallow((FAMILIES | OWN_MODULES)[family])
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder), shape)
        return beside_reference(policy, path, partial(run_family, path, shape), tiny, **engine)


def recurrent(
    policy: dict[str, Any], label: str, tiny: bool, family: str, **engine: Any
) -> list[Row]:
    """The same of a family some of whose layers are recurrent."""
    from tests.oracle.recurrent import RECURRENT, run_recurrent, write_recurrent

    with tempfile.TemporaryDirectory() as folder:
        path = write_recurrent(Path(folder), family)
        engine = {**RECURRENT[family].engine, **engine}
        return beside_reference(policy, path, partial(run_recurrent, path, family), tiny, **engine)


def beside_reference(
    policy: dict[str, Any], path: Path, reference: Callable[..., Any], tiny: bool, **engine: Any
) -> list[Row]:
    """A prompt and generated tokens of a model, and what a reference finds of their text."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tests.oracle.quantised import Quantiser

    policy, late = {**policy, "budget": 32, "prefill_stride": 32}, LateKernels()
    quantiser = Quantiser.of(engine.get("kv_cache_dtype", "auto"))
    prompt = np.random.default_rng(0).integers(1, 500, 130).tolist()
    llm = LLM(
        str(path),
        dtype="float32",
        additional_config={"kv_policy": {"recall": 0, **policy}},
        max_model_len=2048,
        max_num_batched_tokens=100,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        **start(tiny, **engine),
    )
    params = SamplingParams(
        max_tokens=6 if tiny else 300,
        temperature=0.0,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (counters,) = llm.collective_rpc("kv_policy_counters")
    config = llm.llm_engine.vllm_config
    (choice,) = output.outputs
    found = [next(iter(entry.values())).logprob for entry in choice.logprobs]
    assert np.mean(found) < -0.2, "a model that is certain says the same with any cache"

    def gaps(**rows: Any) -> Any:
        truth = reference(prompt + list(choice.token_ids), len(prompt), policy, **rows)
        return np.abs(np.asarray(found) - np.asarray(truth.logprobs[len(prompt) - 1 :]))

    if quantiser is None:
        error, without = gaps(), []
    else:
        error, without = gaps(quantiser=quantiser), [gaps()]
    right = alike([error], without) and counters["evicted_tokens"] > 0
    return [
        {
            "equal": right and not late.names(),
            "max_error": float(error.max()),
            "evicted": counters["evicted_tokens"],
            "reused": 0,
            "late": " ".join(late.names()),
            "runner": "V2" if config.use_v2_model_runner else "V1",
        }
    ]
