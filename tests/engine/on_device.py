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


def identity(policy: dict[str, Any], label: str, tiny: bool, **engine: Any) -> list[Row]:
    """Generate greedily with three requests at once; ask the oracle about every token."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tests.oracle.model import load_model, stream
    from tests.oracle.random_models import write_llama
    from tests.oracle.settings import oracle_settings, token_scores
    from vllm_cascade.policies.arguments import CHECK
    from vllm_cascade.policies.idf import sentence_ends

    # The smallest settings that wrap the cache often.
    policy = {**policy, "budget": 64, "prefill_stride": 16}
    if policy["name"] == "beehive":
        policy |= {"window": 12, "stride": 5, "threshold": 40}
    if policy["name"] == "lazy":
        policy["overflow"] = 8
        policy |= {"slack": 6, "max_drop": 3}
    late = LateKernels()
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(folder, head_dim=64, tokenizer_from=MODEL)
        llm = LLM(
            str(path),
            dtype="float32",
            additional_config={"kv_policy": {"recall": 0, **policy}, CHECK: "off"},
            max_model_len=1024,
            max_num_seqs=8,
            **start(tiny, **engine),
            **({"enable_prefix_caching": False} if policy.get("recall") else {}),
        )
        ends = sentence_ends(llm.get_tokenizer()).tolist()
        oracle, errors = load_model(path, bloom_gelu="none"), []
        tokens = np.random.default_rng(0).integers(1, 500, 400).tolist()
        prompts = [tokens[:5], tokens[5:120], tokens[120:337], tokens[200:290]]
        if tiny:
            prompts = [tokens[:5], tokens[5:75], tokens[120:260], tokens[200:260]]
        length = 24 if tiny else 300

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
                settings = other_settings(policy) if number == 3 else policy
                truth = stream(
                    *(oracle, text),
                    prompt_len=len(prompts[number]),
                    token_scores=token_scores(settings, text, ends.__getitem__),
                    **oracle_settings(settings),
                )
                expected = np.asarray(truth.logprobs[len(prompts[number]) - 1 :])
                errors.append(float(np.abs(np.asarray(found) - expected).max()))
            return sum(output.num_cached_tokens or 0 for output in outputs)

        first, reused = ask([0, 1, 2, 3]), ask([2])
        counters, *_ = llm.collective_rpc("kv_policy_counters")
        config = llm.llm_engine.vllm_config
    right = max(errors) < MAX_ERROR and counters["evicted_tokens"] > 0 and not late.names()
    found = {
        "equal": right and first == 0 and (reused > 0 or bool(policy.get("recall"))),
        "max_error": max(errors),
        "evicted": counters["evicted_tokens"],
        "reused": reused,
        "late": " ".join(late.names()),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": bool(config.scheduler_config.async_scheduling),
    }
    return [found]


def of_family(policy: dict[str, Any], label: str, tiny: bool, **engine: Any) -> list[Row]:
    """Two layers of the family ``label``, one of each kind: a prompt and generated tokens."""
    from tests.oracle.families import FAMILIES, run_family, shallow, write_family
    from tests.oracle.full_attention import OWN_MODULES

    family = shallow((FAMILIES | OWN_MODULES)[label])
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder), family)
        return beside_reference(policy, path, partial(run_family, path, family), tiny, **engine)


def recurrent(policy: dict[str, Any], label: str, tiny: bool, **engine: Any) -> list[Row]:
    """The same of the family ``label``, some of whose layers are recurrent."""
    from tests.oracle.recurrent import RECURRENT, run_recurrent, write_recurrent

    with tempfile.TemporaryDirectory() as folder:
        path = write_recurrent(Path(folder), label)
        engine = {**RECURRENT[label].engine, **engine}
        return beside_reference(policy, path, partial(run_recurrent, path, label), tiny, **engine)


def beside_reference(
    policy: dict[str, Any], path: Path, reference: Callable[..., Any], tiny: bool, **engine: Any
) -> list[Row]:
    """A prompt and generated tokens of a model, and what a reference finds of their text."""
    import numpy as np
    from vllm import LLM, SamplingParams

    policy, late = {**policy, "budget": 32, "prefill_stride": 32}, LateKernels()
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
    truth = reference(prompt + list(choice.token_ids), len(prompt), policy)
    expected = np.asarray(truth.logprobs[len(prompt) - 1 :])
    error = float(np.abs(np.asarray(found) - expected).max())
    return [
        {
            "equal": error < MAX_ERROR and counters["evicted_tokens"] > 0 and not late.names(),
            "max_error": error,
            "evicted": counters["evicted_tokens"],
            "reused": 0,
            "late": " ".join(late.names()),
            "runner": "V2" if config.use_v2_model_runner else "V1",
        }
    ]
