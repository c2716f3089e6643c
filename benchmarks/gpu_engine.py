# SPDX-License-Identifier: Apache-2.0
"""The real vLLM on a GPU with every policy: right tokens, and output tokens a second.

    python -m benchmarks.gpu_engine --out results/

First, in fp32 and with full CUDA graphs, what each policy generates from a tiny random model is
given to the oracle (``tests/oracle``), which must find the same log-probabilities: of three
requests, of one beside them that runs under another policy, and of one that starts from another's
snapshot. So must small models with windows, recurrent layers or latent rows, and engines with
drafts or rows in 8 bits. A chat that continues sessions must equal one that was never interrupted.
These engines are told no bytes of cache, only a share of the GPU's memory, so that vLLM measures
what CUDA graphs need. Then Llama 1B and 8B configurations with dummy weights decode at 2k, 8k and
32k of context, beside stock vLLM with the same bytes of KV cache, and read one prompt of up to 128k
tokens. Each engine has a process of its own; its output is kept in ``OUT/logs``. With ``--at-once
N`` the comparisons run N at a time, with a fixed number of cache bytes: vLLM's measurement of
memory expects no other process on the card. N engines whose speed is measured then start at once,
if the card has room for them, and one measures at a time. ``--engine JSON`` overrides engine
arguments. ``--tiny`` runs the same code with toy sizes, also on a CPU.
"""

import argparse
import fcntl
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reporting.tables import show, table_of_json
from benchmarks.running.children import Failure, outcomes
from benchmarks.running.environment import ROOT, fingerprint, start
from tests.engine.on_device import identity, of_family, recurrent, sessions

Row = dict[str, Any]
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
    "random": {"name": "random"},
    "cascade in units": {"name": "cascade", "unit": 16},
    "sink with recall": {"name": "sink", "unit": 16, "recall": 2, "recall_store": 4096},
    "cascade with recall": {"name": "cascade", "unit": 16, "recall": 8},
}
STOCK = "stock"
CONFIGS = ROOT / "benchmarks/inputs/configs"
LLAMAS = ("1B", "8B")
TINY = "125m"
CONTEXTS = (2048, 8192, 32768)
ALONE = (130_000,)  # with the tokens to come, within Llama's positions
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
NGRAM |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
ITSELF = {"method": "draft_model", "num_speculative_tokens": 3}
"""The model that is compared is its own draft model."""


@dataclass(frozen=True)
class Compared:
    """A further engine to compare, besides one for each policy.

    Attributes:
        kind: key of ``KINDS``.
        policy: key of ``POLICIES``.
        family: a model family of ``tests/oracle``; empty for a tiny Llama.
        runner: ``V1``, or vLLM's default.
        engine: further engine arguments.
    """

    kind: str
    policy: str = "cascade"
    family: str = ""
    runner: str = ""
    engine: Row = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = [self.family or self.policy, self.engine.get("kv_cache_dtype", "")]
        if drafter := self.engine.get("speculative_config"):
            parts.append("drafting for itself" if drafter == ITSELF else "drafting by n-grams")
        parts.append(self.runner)
        return " ".join(part for part in parts if part)


COMPARED = (
    Compared("windows", family="gemma3"),
    Compared("windows", family="gpt-oss"),
    Compared("windows", family="llama4"),  # chunks of the stream
    Compared("windows", family="gemma3n"),  # shared caches
    Compared("latent", family="deepseek-v2"),
    Compared("latent", family="deepseek-v2", engine={"kv_cache_dtype": "fp8"}),
    Compared("recurrent", family="lfm2"),
    Compared("recurrent", family="granite4"),
    Compared("drafts", engine={"speculative_config": NGRAM}),
    Compared("drafts", "sink with recall", engine={"speculative_config": NGRAM}),
    Compared("drafts", engine={"speculative_config": ITSELF}),
    Compared("drafts", runner="V1", engine={"speculative_config": ITSELF}),
    Compared("8 bits", "cascade per KV head", engine={"kv_cache_dtype": "int8_per_token_head"}),
    Compared("8 bits", "cascade in units", engine={"kv_cache_dtype": "fp8"}),
    Compared("8 bits", "sink with recall", engine={"kv_cache_dtype": "fp8_per_token_head"}),
    Compared("sessions", "cascade"),
    Compared("sessions", "sink with recall"),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for gpu_engine.json")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, also on a CPU")
    names = [STOCK, *POLICIES]
    parser.add_argument("--policies", nargs="*", default=names, choices=names)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--models", nargs="*", default=list(LLAMAS), choices=LLAMAS)
    parser.add_argument("--contexts", nargs="*", type=int, help="prompt lengths of speed")
    parser.add_argument("--alone", nargs="*", type=int, help="of one request at a time only")
    parser.add_argument("--requests", type=int, default=64, help="requests at once of speed")
    parser.add_argument("--at-once", type=int, default=1, help="engines compared at a time")
    parser.add_argument("--seconds", type=float, default=540.0, help="most of one engine")
    parser.add_argument("--engine", type=json.loads, default={}, help="engine arguments, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options, begin = parse_args(argv), time.monotonic()
    start()
    logs = Path(tempfile.mkdtemp()) if options.out is None else options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    wanted = jobs(options.tiny, options.policies, options.kinds, options.models)
    for job in wanted:
        name = "-".join([job["kind"], job["label"], job.get("model", "")]).replace(" ", "-")
        job |= {"log": str(logs / f"{name}.log"), "limit": options.seconds}
        job["engine"] = {**job.get("engine", {}), **options.engine}
        if job["kind"] == "speed" and not options.tiny:
            job |= {"requests": options.requests, "contexts": options.contexts or CONTEXTS}
            job["alone"] = ALONE if options.alone is None else options.alone
            job["turn"] = str(logs / "turn")
            if options.at_once > 1:  # else vLLM expects most of the memory to be free
                job["engine"].setdefault("gpu_memory_utilization", 0.9 / options.at_once)
        elif options.at_once > 1 and job["kind"] in ORACLE:
            job["engine"]["kv_cache_memory_bytes"] = 1 << 28
    # References run on the CPU: threads of several processes must not compete for its cores.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.at_once))
    rows: list[Row] = []
    for timed in (False, True):  # no engine is timed beside one that is compared
        group = [job for job in wanted if (job["kind"] == "speed") == timed]
        found = dict(outcomes(run_job, group, options.at_once))
        rows += [row for place, job in enumerate(group) for row in rows_of(job, found[place])]
    result = {"tiny": options.tiny, "environment": fingerprint(), "rows": rows}
    result["seconds"] = round(time.monotonic() - begin, 1)
    if options.out is not None:
        name = "gpu_engine_tiny.json" if options.tiny else "gpu_engine.json"
        (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    kinds = dict.fromkeys(row["what"] for row in rows)
    show([table_of_json(kind, [row for row in rows if row["what"] == kind]) for kind in kinds])
    return 0 if all("error" not in row and row.get("equal", True) for row in rows) else 1


def jobs(tiny: bool, policies: list[str], kinds: list[str], models: list[str]) -> list[Row]:
    """Every engine to run, as keyword arguments."""
    found: list[Row] = []
    for kind in [kind for kind in ("identity", "check") if kind in kinds]:
        ours = [name for name in policies if name != STOCK]
        found += [{"kind": kind, "policy": POLICIES[name], "label": name} for name in ours]
    for one in [one for one in COMPARED if one.kind in kinds]:
        job = {"kind": one.kind, "policy": POLICIES[one.policy], "label": one.label}
        if one.family:
            job["family"] = one.family
        found.append(job | {"engine": one.engine, "runner": one.runner})
    for model in ["tiny"] if tiny else models:
        for name in policies if "speed" in kinds else []:
            job = {"kind": "speed", "policy": POLICIES.get(name), "label": name}
            found.append(job | {"model": model})
    return [job | {"tiny": tiny} for job in found]


def run_job(job: Row) -> list[Row]:
    """One engine, in this (child) process, which the kernel ends after the job's seconds."""
    print(f"{job['kind']} {job['label']} {job.get('model', '')}", flush=True)
    with open(job.pop("log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.setitimer(signal.ITIMER_REAL, job.pop("limit"))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process
    if job.pop("runner", "") == "V1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    begin, name, engine = time.monotonic(), job.pop("kind"), job.pop("engine")
    if name in ORACLE:
        # vLLM's kernels for experts multiply fp32 in TF32, whose rounding would decide which tokens
        # are kept. Ours name their precision.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    found = KINDS[name](**job, **engine)
    return [row | {"seconds": round(time.monotonic() - begin, 1)} for row in found]


def rows_of(job: Row, found: list[Row] | Failure) -> list[Row]:
    """A job's rows: what was measured, or why not."""
    if isinstance(found, Failure):
        found = [{"error": f"{found.reason}; see {job['log']}"}]
    head = {"what": job["kind"], "policy": job["label"]}
    head |= {key: job[key] for key in ("model",) if key in job}
    return [head | row for row in found]


def check(policy: dict[str, Any], label: str, tiny: bool, **_: Any) -> list[Row]:
    """The check of the first start for layers of Llama 8B, without an engine."""
    import torch

    from vllm_cascade.attention.selfcheck_layer import LayerShape
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


def stopwatch(
    policy: dict[str, Any] | None, model: str, tiny: bool, **arguments: Any
) -> Callable[[int, int, int], float]:
    """An engine with dummy weights; seconds of some requests, by their number, context and output.

    Args:
        arguments: of ``LLM``.
    """
    import numpy as np
    from vllm import LLM, SamplingParams

    path = CONFIGS / f"llama-{TINY if tiny else model.lower()}"
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    if policy is not None:
        policy = {"budget": 64 if tiny else 2048, "recall": 0, **policy}
        if policy["name"] == "dgc" and "importance" not in policy:
            policy["idf"] = write_idf(vocab)
        if tiny:
            policy["prefill_stride"] = 16
    if tiny:
        arguments |= {"kv_cache_memory_bytes": 16 << 20, "hf_overrides": {"num_hidden_layers": 1}}
    llm = LLM(
        str(path),
        dtype="float32" if tiny else "bfloat16",
        enforce_eager=tiny,
        load_format="dummy",
        skip_tokenizer_init=True,
        additional_config={} if policy is None else {"kv_policy": policy},
        enable_prefix_caching=False,
        **arguments,
    )
    rng = np.random.default_rng(0)

    def seconds(requests: int, context: int, max_tokens: int) -> float:
        prompts = rng.integers(1, vocab - 1, (requests, context)).tolist()
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    return seconds


def speed(
    policy: dict[str, Any] | None,
    label: str,
    model: str,
    tiny: bool,
    requests: int = 2,
    contexts: Sequence[int] = (40,),
    alone: Sequence[int] = (60,),
    turn: str | None = None,
    **engine: Any,
) -> list[Row]:
    """What ``requests`` at once and one request decode and read, with prompts of each length.

    Engines with the same file ``turn`` wait for each other when they have started, until the one
    before has ended: a process that frees its memory would slow the next.

    The time to read the prompts, which is that of the same requests with one token, is taken off
    the time of all. A single request's first token is the median of three.
    """
    num_tokens = 5 if tiny else 257
    sizes = {"max_model_len": max([*contexts, *alone]) + num_tokens, "max_num_seqs": requests}
    shape = TINY if tiny else model
    memory = {"kv_cache_memory_bytes": pool_bytes(shape, sizes["max_model_len"])}
    seconds = stopwatch(policy, model, tiny, **memory | sizes | engine)
    if turn is not None:  # the file stays open, and so locked, until the process ends
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # waiting is not the engine's time
        fcntl.flock(os.open(turn, os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, left)
    return measured(seconds, requests, contexts, alone, num_tokens)


def pool_bytes(model: str, num_tokens: int) -> int:
    """KV cache bytes of every engine: 8 GiB, or more if stock vLLM needs it for one request.

    Two pages of up to 64 tokens are spare: the request's last page and vLLM's null block.

    Args:
        model: suffix of a folder in ``CONFIGS``. Its rows have 16 bits.
        num_tokens: of the longest request.
    """
    config = json.loads((CONFIGS / f"llama-{model.lower()}" / "config.json").read_text())
    row = 2 * 2 * config["head_dim"] * config["num_key_value_heads"]
    return max(8 << 30, (num_tokens + 2 * 64) * row * config["num_hidden_layers"])


def measured(
    seconds: Callable[[int, int, int], float],
    requests: int,
    contexts: Sequence[int],
    alone: Sequence[int],
    num_tokens: int,
) -> list[Row]:
    """Rows of ``speed``, a prompt length each."""
    found: list[Row] = []
    seconds(requests, min(contexts), 2)  # warm up
    for context in (*contexts, *alone):
        first = statistics.median(seconds(1, context, 1) for _ in range(3))
        row: Row = {"context": context, "first_token_s": first}
        if context in contexts:
            prefill = seconds(requests, context, 1)
            whole = seconds(requests, context, num_tokens)
            total = requests * (num_tokens - 1)
            row["prompt_tokens_per_s"] = requests * context / prefill
            row["output_tokens_per_s"] = total / max(whole - prefill, 1e-9)
            row |= {"requests": requests, "total_s": whole}
        found.append(row)
    return found


KINDS = {
    "check": check,
    "identity": identity,
    "windows": of_family,
    "latent": of_family,
    "recurrent": recurrent,
    "drafts": identity,
    "8 bits": identity,
    "sessions": sessions,
    "speed": speed,
}
ORACLE = {"identity", *(one.kind for one in COMPARED)}
"""Kinds that compare tokens, in fp32."""


def write_idf(vocab: int) -> str:
    """A table of document frequencies for a model without a tokenizer; its file."""
    import numpy as np

    from vllm_cascade.policies.text_importance import IdfTable

    path = Path(tempfile.gettempdir()) / f"idf-{vocab}.safetensors"  # always the same content
    counts = np.arange(vocab) % 97 + 1
    IdfTable(1000, counts, counts, np.arange(vocab) % 20 == 0, "none").save(path)
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
