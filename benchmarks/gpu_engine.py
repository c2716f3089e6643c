# SPDX-License-Identifier: Apache-2.0
"""The real vLLM on a GPU with every policy: right tokens, and output tokens a second.

    python -m benchmarks.gpu_engine --out results/

First, in fp32 and with full CUDA graphs, what each policy generates from a tiny random model is
given to the oracle (``tests/oracle``), which must find the same log-probabilities: of three
requests, of one beside them that runs under another policy, and of one that starts from another's
snapshot. So must two layers of models with windows. These engines are told no bytes of cache, only
a share of the GPU's memory, so that vLLM measures what CUDA graphs need. Then Llama 1B and 8B
configurations with dummy weights decode at 2k, 8k and 32k of context, beside stock vLLM with the
same bytes of KV cache, and read one prompt of up to 128k tokens. Each engine has a process of its
own; its output is kept in ``OUT/logs``. With ``--at-once N`` the comparisons run N at a time, with
a fixed number of cache bytes: vLLM's measurement of memory expects no other process on the card.
``--engine JSON`` overrides engine arguments. ``--tiny`` runs the same code with toy sizes, also on
a CPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.running import leash

ROOT = Path(__file__).resolve().parent.parent
POLICIES: dict[str, dict[str, Any]] = {
    "window": {"name": "window"},
    "sink": {"name": "sink"},
    "cascade": {"name": "cascade"},
    "cascade per KV head": {"name": "cascade", "head_policy": "per_kv_head"},
    "beehive": {"name": "beehive"},
    "lazy": {"name": "lazy"},
    "h2o": {"name": "h2o"},
    "h2o in batches": {"name": "h2o", "overflow": 8},
    "dgc": {"name": "dgc"},
    "dgc in clusters": {"name": "dgc", "importance": "cluster"},
    "cascade in units": {"name": "cascade", "unit": 16},
    "sink with recall": {"name": "sink", "unit": 16, "recall": 2, "recall_store": 4096},
}
LLAMAS: dict[str, dict[str, int]] = {
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv": 8, "inner": 8192, "vocab": 128256},
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv": 8, "inner": 14336, "vocab": 128256},
}
TINY = {"hidden": 128, "layers": 1, "heads": 4, "kv": 2, "inner": 64, "vocab": 512}
CONTEXTS = (2048, 8192, 32768)
FIRST_TOKEN_CONTEXTS = (8192, 32768, 131072)
FAMILIES = ("gemma3", "gpt-oss")
"""Models with windows, of ``tests/oracle/families.py``."""
SHARE = 0.15
"""Of the GPU's memory for a tiny model's engine."""
MAX_ERROR = 5e-4
"""Largest difference of a log-probability from the oracle's, in fp32."""
OVERRIDES: dict[str, Any] = {}
"""Engine arguments of ``--engine``, in an engine's own process."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for gpu_engine.json")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, also on a CPU")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--models", nargs="*", default=list(LLAMAS), choices=list(LLAMAS))
    parser.add_argument("--contexts", nargs="*", type=int, help="prompt lengths of speed")
    parser.add_argument("--requests", type=int, default=64, help="requests at once of speed")
    parser.add_argument("--at-once", type=int, default=1, help="engines compared at a time")
    parser.add_argument("--seconds", type=float, default=540.0, help="most of one engine")
    parser.add_argument("--engine", type=json.loads, default={}, help="engine arguments, as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        job = json.loads(options.job)
        OVERRIDES.update(job.pop("engine"))
        print("RESULT " + json.dumps(KINDS[job.pop("kind")](**job)))
        return 0
    from benchmarks.gpu_check import fingerprint

    wanted = jobs(options.tiny, options.policies, options.kinds, options.models)
    for job in wanted:
        job["engine"] = dict(options.engine)
        if job["kind"] == "speed" and not options.tiny:
            job |= {"requests": options.requests, "contexts": options.contexts or CONTEXTS}
        elif job["kind"] == "first token" and not options.tiny:
            job["contexts"] = options.contexts or FIRST_TOKEN_CONTEXTS
        elif options.at_once > 1 and job["kind"] in ("identity", "windows"):
            job["engine"]["kv_cache_memory_bytes"] = 1 << 28
    logs = Path(tempfile.mkdtemp()) if options.out is None else options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # References run on the CPU: threads of several processes must not compete for its cores.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.at_once))
    run = partial(run_job, logs=logs, seconds=options.seconds)
    with ThreadPoolExecutor(options.at_once) as pool:
        rows = [row for found in pool.map(run, wanted) for row in found]
    result = {"tiny": options.tiny, "environment": fingerprint(), "rows": rows}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "gpu_engine_tiny.json" if options.tiny else "gpu_engine.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    return 0 if all("error" not in row and row.get("equal", True) for row in rows) else 1


def jobs(
    tiny: bool, policies: list[str], kinds: list[str], models: list[str]
) -> list[dict[str, Any]]:
    """Every engine to run, as keyword arguments."""
    found: list[dict[str, Any]] = []
    if "identity" in kinds:
        for name in policies:
            found.append({"kind": "identity", "policy": POLICIES[name], "label": name})
    if "check" in kinds:
        found += [{"kind": "check", "policy": POLICIES[name], "label": name} for name in policies]
    if "windows" in kinds:
        policy = POLICIES["cascade"]
        found += [{"kind": "windows", "policy": policy, "label": name} for name in FAMILIES]
    for kind in [kind for kind in ("speed", "first token") if kind in kinds]:
        for model in ["tiny"] if tiny else models:
            for name in ["stock", *policies]:
                job = {"kind": kind, "policy": POLICIES.get(name), "label": name}
                found.append(job | {"model": model})
    return [job | {"tiny": tiny} for job in found]


def run_job(job: dict[str, Any], logs: Path, seconds: float) -> list[dict[str, Any]]:
    """Run one engine in a process of its own; its results, or the last line of its error.

    Args:
        logs: folder for the engine's output.
        seconds: after which it is ended.
    """
    print(f"{job['kind']} {job['label']} {job.get('model', '')}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_engine", "--job", json.dumps(job)]
    name = "-".join([job["kind"], job["label"], job.get("model", "")]).replace(" ", "-")
    log = logs / f"{name}.log"
    begin = time.monotonic()
    with log.open("w") as out:
        done = leash.run(["timeout", str(seconds), *command], cwd=ROOT, stdout=out, stderr=out)
    row = {"what": job["kind"], "policy": job["label"]}
    row |= {key: job[key] for key in ("model",) if key in job}
    lines = log.read_text().splitlines() or ["no output"]
    results = [line for line in lines if line.startswith("RESULT ")]
    if done.returncode == 0 and results:
        found = json.loads(results[-1].removeprefix("RESULT "))
    else:
        errors = [line for line in lines if "Error" in line] or lines
        found = [{"error": f"exit {done.returncode}: {errors[0][:300]}"}]
    elapsed = round(time.monotonic() - begin, 1)
    return [row | one | {"seconds": elapsed} for one in found]


def identity(policy: dict[str, Any], label: str, tiny: bool) -> list[dict[str, Any]]:
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
    model_books = ROOT / "benchmarks/inputs/models/books-5m"
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(folder, head_dim=64, tokenizer_from=model_books)
        llm = LLM(
            str(path),
            dtype="float32",
            additional_config={"kv_policy": {"recall": 0, **policy}, CHECK: "off"},
            max_model_len=1024,
            max_num_seqs=8,
            **start(tiny),
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
        (counters,) = llm.collective_rpc("kv_policy_counters")
        config = llm.llm_engine.vllm_config
    right = max(errors) < MAX_ERROR and counters["evicted_tokens"] > 0
    found = {
        "equal": right and first == 0 and (reused > 0 or bool(policy.get("recall"))),
        "max_error": max(errors),
        "evicted": counters["evicted_tokens"],
        "reused": reused,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": bool(config.scheduler_config.async_scheduling),
    }
    return [found]


def check(policy: dict[str, Any], label: str, tiny: bool) -> list[dict[str, Any]]:
    """The check of the first start for layers of Llama 8B, without a model."""
    import torch

    from vllm_cascade.attention.selfcheck import LayerShape
    from vllm_cascade.engine.certify import certify
    from vllm_cascade.engine.devices import this_device
    from vllm_cascade.policies.registry import resolve

    shape = LayerShape(4, 2, 16, torch.float32) if tiny else LayerShape(32, 8, 128, torch.bfloat16)
    resolved = resolve({"budget": 2048, **policy}, block_size=shape.block_size)
    entry, begin = this_device(), time.perf_counter()
    rows = certify(resolved, (shape,), entry, torch.device(entry.name), "always")
    return [
        {
            "comparisons": len(rows),
            "largest_error": max(row.error for row in rows),
            "check_s": time.perf_counter() - begin,
        }
    ]


def start(tiny: bool) -> dict[str, Any]:
    """Memory and graphs of an engine: on a GPU as by default, and nothing is compiled later."""
    if tiny:
        return {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    return {"gpu_memory_utilization": SHARE, "jit_monitor_mode": "error", **OVERRIDES}


def windows(policy: dict[str, Any], label: str, tiny: bool) -> list[dict[str, Any]]:
    """Two layers of the family ``label``, one with a window: a prompt and generated tokens."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tests.oracle.families import FAMILIES, run_family, shallow, write_family

    policy = {**policy, "budget": 32, "prefill_stride": 32}
    family, length = shallow(FAMILIES[label]), 6 if tiny else 300
    prompt = np.random.default_rng(0).integers(1, 500, 130).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder), family)
        llm = LLM(
            str(path),
            dtype="float32",
            additional_config={"kv_policy": {"recall": 0, **policy}},
            max_model_len=2048,
            max_num_batched_tokens=100,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            **start(tiny),
        )
        params = SamplingParams(
            max_tokens=length, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False
        )
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        (counters,) = llm.collective_rpc("kv_policy_counters")
        config = llm.llm_engine.vllm_config
        (choice,) = output.outputs
        found = [next(iter(entry.values())).logprob for entry in choice.logprobs]
        text = prompt + list(choice.token_ids)
        truth = run_family(path, family, text, len(prompt), policy)
    expected = np.asarray(truth.logprobs[len(prompt) - 1 :])
    error = float(np.abs(np.asarray(found) - expected).max())
    return [
        {
            "equal": error < MAX_ERROR and counters["evicted_tokens"] > 0,
            "max_error": error,
            "evicted": counters["evicted_tokens"],
            "reused": 0,
            "runner": "V2" if config.use_v2_model_runner else "V1",
        }
    ]


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


def speed(
    policy: dict[str, Any] | None,
    label: str,
    model: str,
    tiny: bool,
    requests: int = 2,
    contexts: Sequence[int] = (40,),
) -> list[dict[str, Any]]:
    """Output tokens a second of ``requests`` with prompts of each length in ``contexts``.

    The time to read the prompts and sample one token is measured alone and taken off.
    """
    import numpy as np
    from vllm import LLM, SamplingParams

    size = TINY if tiny else LLAMAS[model]
    num_requests, num_tokens = requests, 5 if tiny else 257
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            folder,
            dtype="float32" if tiny else "bfloat16",
            **dummy_model(Path(folder), policy, size, tiny),
            max_model_len=contexts[-1] + num_tokens,
            kv_cache_memory_bytes=(16 << 20) if tiny else (8 << 30),
            max_num_seqs=num_requests,
            enforce_eager=tiny,
            **OVERRIDES,
        )
        rng = np.random.default_rng(0)

        def seconds(context: int, max_tokens: int) -> float:
            prompts = rng.integers(1, size["vocab"] - 1, (num_requests, context)).tolist()
            params = SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return time.perf_counter() - begin

        seconds(contexts[0], 2)  # warm up
        found = []
        for context in contexts:
            prefill, whole = seconds(context, 1), seconds(context, num_tokens)
            total = num_requests * (num_tokens - 1)
            found.append(
                {
                    "context": context,
                    "prompt_tokens_per_s": num_requests * context / prefill,
                    "output_tokens_per_s": total / max(whole - prefill, 1e-9),
                    "total_s": whole,
                }
            )
        return found


def first_token(
    policy: dict[str, Any] | None,
    label: str,
    model: str,
    tiny: bool,
    contexts: Sequence[int] = (40,),
) -> list[dict[str, Any]]:
    """Seconds from a prompt of each length to its first token, median of three, one at a time."""
    import numpy as np
    from vllm import LLM, SamplingParams

    size = TINY if tiny else LLAMAS[model]
    memory = {"kv_cache_memory_bytes": 16 << 20, "enforce_eager": True} if tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            folder,
            dtype="float32" if tiny else "bfloat16",
            **dummy_model(Path(folder), policy, size, tiny),
            max_model_len=max(contexts) + 2,
            max_num_seqs=8,
            **memory,
            **OVERRIDES,
        )
        rng = np.random.default_rng(0)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

        def seconds(context: int) -> float:
            prompt = rng.integers(1, size["vocab"] - 1, context).tolist()
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            return time.perf_counter() - begin

        seconds(min(contexts))  # warm up
        return [
            {"context": c, "first_token_s": statistics.median(seconds(c) for _ in range(3))}
            for c in contexts
        ]


KINDS = {
    "check": check,
    "identity": identity,
    "windows": windows,
    "speed": speed,
    "first token": first_token,
}


def dummy_model(
    folder: Path, policy: dict[str, Any] | None, size: dict[str, int], tiny: bool
) -> dict[str, Any]:
    """Write a Llama's configuration; engine arguments for it with dummy weights and a policy."""
    (folder / "config.json").write_text(json.dumps(llama_config(size)))
    if policy is not None:
        policy = {"budget": 64 if tiny else 2048, "recall": 0, **policy}
        if policy["name"] == "dgc" and "importance" not in policy:
            policy["idf"] = write_idf(folder / "idf.safetensors", size["vocab"])
        if tiny:
            policy["prefill_stride"] = 16
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "additional_config": {} if policy is None else {"kv_policy": policy},
        "enable_prefix_caching": False,
    }


def write_idf(path: Path, vocab: int) -> str:
    """A table of document frequencies for a model without a tokenizer."""
    import numpy as np

    from vllm_cascade.policies.text_importance import IdfTable

    counts = np.arange(vocab) % 97 + 1
    IdfTable(1000, counts, counts, np.arange(vocab) % 20 == 0, "none").save(path)
    return str(path)


def llama_config(size: dict[str, int]) -> dict[str, Any]:
    """config.json of a Llama with these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size["hidden"],
        "intermediate_size": size["inner"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "num_hidden_layers": size["layers"],
        "vocab_size": size["vocab"],
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """What was found, as text."""
    lines = []
    for row in rows:
        head = f"{row['what']:<9} {row['policy']:<20}"
        if "error" in row:
            lines.append(f"{head} FAILED: {row['error']}")
        elif "equal" in row:
            verdict = "equal" if row["equal"] else "DIFFERS"
            lines.append(
                f"{head} {verdict}, max error {row['max_error']:.1e}, {row['evicted']} evicted, "
                f"{row['reused']} tokens from a snapshot"
            )
        elif "check_s" in row:
            lines.append(
                f"{head} {row['comparisons']} comparisons in {row['check_s']:.0f} s, "
                f"largest relative error {row['largest_error']:.1e}"
            )
        elif "first_token_s" in row:
            lines.append(
                f"{head} {row['model']:>4} {row['context']:>6} tokens: "
                f"{row['first_token_s']:9.3f} s to the first token"
            )
        else:
            lines.append(
                f"{head} {row['model']:>4} {row['context']:>6} tokens: "
                f"{row['output_tokens_per_s']:9.0f} output tokens/s, "
                f"{row['prompt_tokens_per_s']:9.0f} prompt tokens/s"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
