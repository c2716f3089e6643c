# SPDX-License-Identifier: Apache-2.0
"""Runs arms with the code of one checkout and records everything they compute.

``python -P child.py CHECKOUT`` with ``PYTHONPATH`` set to the checkout. It reads one JSON object a
line from stdin: ``arm``, as ``arms.py`` makes it, and ``out``, the file for the result. It answers
each with one line. It imports nothing from this folder. From the checkout it uses only names that
survive a refactoring: the package, its settings, its worker's methods, ``tests.interpreter``, and a
few class names, which it finds wherever they are.

vLLM is imported once. Each arm then runs in a fork, so engines cannot affect each other.
"""

import gc
import importlib
import json
import math
import multiprocessing
import os
import pickle
import re
import sys
import traceback
from hashlib import sha256
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""The results of one arm; see ``run``."""


def class_of(name: str) -> Any:
    """Find a class of the package by its name, in whichever module defines it."""
    root = Path(importlib.import_module("vllm_cascade").__file__ or "").parent
    (path,) = [
        path
        for path in root.rglob("*.py")
        if re.search(rf"^class {name}\b", path.read_text("utf-8"), re.MULTILINE)
    ]
    parts = path.relative_to(root.parent).with_suffix("").parts
    return getattr(importlib.import_module(".".join(parts)), name)


def use_triton() -> None:
    """Give the CPU backend the CUDA implementation; Triton interprets its kernels."""
    from tests.interpreter import quicken

    quicken()
    cpu, cuda = class_of("CPUKVPolicyBackend"), class_of("CUDAKVPolicyBackend")
    for name in ("get_impl_cls", "get_builder_cls", "make_stores", "count_stores"):
        if hasattr(cuda, name):  # older checkouts do not count stores
            setattr(cpu, name, getattr(cuda, name))
    class_of("CPU").memory_bytes = lambda _: 1 << 40  # of a card, which bounds its stores


def page_digests(worker: Any) -> list[list[bytes]]:
    """SHA-256 of every page, by piece of memory; empty where all bytes are 0.

    vLLM allocates zeros, so unused pages and padding compare equal.
    """
    import torch

    pieces: dict[int, tuple[Any, int]] = {}
    for caches in worker.model_runner.kv_caches:
        for cache in caches if isinstance(caches, list | tuple) else [caches]:
            storage, size = cache.untyped_storage(), cache.stride(0) * cache.element_size()
            _, other = pieces.get(storage.data_ptr(), (storage, size))
            pieces[storage.data_ptr()] = storage, min(size, other)
    digests = []
    for storage, size in pieces.values():
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        pages = [raw[begin : begin + size] for begin in range(0, len(raw), size)]
        digests.append([sha256(page).digest() if page.any() else b"" for page in pages])
    return digests


def counters_of(llm: Any) -> dict[str, float]:
    """The worker's counters and the metrics of the scheduler."""
    (counters,) = llm.collective_rpc("kv_policy_counters")
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kv_policy_") and hasattr(metric, "value"):
            counters[metric.name] = metric.value
    return counters


def run(arm: dict[str, Any]) -> Found:
    """Start one engine and send it rounds of requests; those of a round run together.

    Returns:
        ``logprobs``: of every prompt token but the first, and of every generated token.
        ``tokens``: generated token ids. ``cached``: prompt tokens from a snapshot, by request.
        ``kept``: the tokens each layer and head set keeps, at every end of a stride.
        ``pages``: see ``page_digests``. ``counters``: by name.
    """
    from vllm import LLM, SamplingParams

    if arm["triton"]:
        use_triton()
    os.environ.update(arm["env"])
    llm = LLM(**arm["engine"], additional_config={"kv_policy": {"recall": 0, **arm["policy"]}})
    found: Found = {"logprobs": [], "tokens": [], "cached": [], "kept": []}
    for requests in arm["rounds"]:
        if arm["policy"].get("trace"):
            llm.collective_rpc("kv_policy_trace", args=(1,))
        prompts = [{"prompt_token_ids": request.pop("prompt")} for request in requests]
        params = [SamplingParams(ignore_eos=True, logprobs=0, **request) for request in requests]
        for output in llm.generate(prompts, params, use_tqdm=False):
            done = output.outputs[0]
            pairs = [*(output.prompt_logprobs or [])[1:], *done.logprobs]
            found["logprobs"] += [next(iter(pair.values())).logprob for pair in pairs]
            found["tokens"] += done.token_ids
            found["cached"].append(output.num_cached_tokens)
        if arm["policy"].get("trace"):
            (kept,) = llm.collective_rpc("kv_policy_kept")
            found["kept"] += kept
    assert all(map(math.isfinite, found["logprobs"])), "NaN and infinities compare nothing"
    (found["pages"],) = llm.collective_rpc(page_digests)
    found["counters"] = counters_of(llm)
    return found


def in_fork(arm: dict[str, Any], out: Path) -> None:
    """Run an arm in a fork; write its results, or ``error`` with the reason it failed."""
    log = out.with_suffix(".log")

    def main() -> None:
        with log.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        try:
            found = run(arm)
        except BaseException:
            found = {"error": traceback.format_exc(limit=-3)}
        out.write_bytes(pickle.dumps(found))
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join()
    if not out.exists():
        error = f"exit status {process.exitcode}\n{log.read_text(errors='replace')[-3000:]}"
        out.write_bytes(pickle.dumps({"error": error}))


def main(checkout: Path) -> None:
    """Run the arms that stdin names."""
    package = importlib.import_module("vllm_cascade")
    assert Path(package.__file__ or "").is_relative_to(checkout), package.__file__
    for name in ("engine.llm_engine", "worker.cpu_worker"):
        importlib.import_module(f"vllm.v1.{name}")
    # vLLM inspects each architecture in a process of its own, 10 s each; an arm already is one.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        in_fork(job["arm"], Path(job["out"]))
        print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
