# SPDX-License-Identifier: Apache-2.0
"""Are two checkouts' log-probabilities the same, byte for byte, for every policy?

    .venv/bin/python tools/compare_checkouts.py OTHER [--arms cascade sink ...] [--dtype bfloat16]

``OTHER`` is another checkout of this repository with a ``.venv`` (``git worktree add``, then
``make setup`` in it, or a link to this one's where both need the same). In each checkout every arm
runs in a process of its own, with that checkout's code: a real vLLM engine with the shipped model,
three requests of different lengths at once, prompts in chunks, and tokens decoded far past the
budget. A refactoring must print ``same`` everywhere; where it does not, the largest difference is
said.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
COMMON = {"budget": 64, "prefill_stride": 32}
ARMS: dict[str, dict[str, Any]] = {
    "window": {"name": "window"},
    "sink": {"name": "sink"},
    "cascade": {"name": "cascade"},
    "cascade-heads": {"name": "cascade", "head_policy": "per_kv_head", "head_reduction": "max"},
    "cascade-paper": {"name": "cascade", "preset": "paper", "prefill_stride": 1},
    "cascade-overflow": {"name": "cascade", "overflow": 5, "tie": "resident"},
    "beehive": {"name": "beehive", "stride": 3},
    "beehive-shared": {"name": "beehive", "head_policy": "homogeneous", "log_n": True},
    "lazy": {"name": "lazy", "overflow": 8, "slack": 6, "max_drop": 3},
    "h2o": {"name": "h2o"},
    "h2o-per-age": {"name": "h2o", "normalise": True, "overflow": 3},
    "dgc": {"name": "dgc"},
    "dgc-attention": {"name": "dgc", "importance": "attention"},
    "dgc-cluster": {"name": "dgc", "importance": "cluster"},
    "dgc-by-importance": {"name": "dgc", "order": "importance"},
    "own": {"name": "cascade"},
    "pytorch": {"name": "cascade", "head_policy": "per_kv_head"},
}
"""``own``: the second and third request have policies of their own. ``pytorch``: without C++."""


def run(settings: dict[str, Any], model: str, book: str, own: bool, dtype: str, out: str) -> None:
    """Write all log-probabilities and tokens of one engine, in this process."""
    import numpy as np
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokens = AutoTokenizer.from_pretrained(model)(Path(book).read_text())["input_ids"]
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config={"kv_policy": {**COMMON, **settings}},
    )
    asked = [None, {"kv_budget": 32}, {"kv_policy": "sink", "kv_budget": 48}]
    prompts = [tokens[:700], tokens[900:1010], tokens[2000:2301]]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=150,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
            extra_args=extra if own else None,
        )
        for extra in asked
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    found: list[float] = []
    for output in outputs:
        done = output.outputs[0]
        pairs = [*(output.prompt_logprobs or [])[1:], *done.logprobs]
        found += [next(iter(pair.values())).logprob for pair in pairs]
        found += done.token_ids
    np.save(out, np.asarray(found, dtype=np.float64))


def numbers_of(checkout: Path, name: str, model: str, book: str, dtype: str) -> Any:
    """One arm with a checkout's code: fp64, log-probabilities and token ids."""
    import numpy as np

    folder = tempfile.TemporaryDirectory()
    out = f"{folder.name}/found.npy"
    job = json.dumps([ARMS[name], model, book, name == "own", dtype, out])
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if name == "pytorch":
        environment["VLLM_CASCADE_CPU"] = "pytorch"
    command = [str(checkout / ".venv/bin/python"), str(Path(__file__).resolve()), "--job", job]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} in {checkout} failed:\n{done.stderr[-3000:]}")
    with folder:
        return np.load(out)


def main() -> int:
    """0 where all arms are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run(*json.loads(args.job))
        return 0
    if args.other is None:
        parser.error("name the other checkout")
    inputs = HERE / "benchmarks/inputs"
    model, book = str(inputs / "models/books-5m"), str(inputs / "books/persuasion.txt")
    differ = 0
    for name in args.arms:
        ours, theirs = (
            numbers_of(path.resolve(), name, model, book, args.dtype) for path in (HERE, args.other)
        )
        same = ours.tobytes() == theirs.tobytes()
        differ += not same
        alike = ours.shape == theirs.shape
        most = f"largest difference {abs(ours - theirs).max():.1e}" if alike else "other lengths"
        print(f"{name}: {'same' if same else 'DIFFERENT, ' + most}", flush=True)
    print(f"{len(args.arms) - differ} of {len(args.arms)} arms are the same")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
