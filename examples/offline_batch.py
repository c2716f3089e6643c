# SPDX-License-Identifier: Apache-2.0
"""Offline batch: summarise files of any length with a bounded KV cache.

Run it with:

    python examples/offline_batch.py --model MODEL FILE...
"""

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams

import vllm_cascade  # noqa: F401  LLM takes kv_policy and kv_budget after this import


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--budget", type=int, default=512, help="cached tokens per file")
    parser.add_argument("--cache-gib", type=float, default=1.0, help="memory of the KV cache")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        kv_policy="sink",
        kv_budget=args.budget,
        max_model_len=1_000_000,
        kv_cache_memory_bytes=int(args.cache_gib * 2**30),
        enforce_eager=True,
        disable_log_stats=False,
    )
    prompts = [f"{path.read_text()}\n\nIn one sentence:" for path in args.files]
    params = SamplingParams(max_tokens=32, temperature=0)
    for path, output in zip(args.files, llm.generate(prompts, params), strict=True):
        tokens = len(output.prompt_token_ids)
        print(f"{path.name}, {tokens:,} tokens: {output.outputs[0].text.strip()}")
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if "kv_p" in metric.name}
    print(f"tokens evicted: {metrics['vllm:kv_policy_evicted_tokens']:,}")


if __name__ == "__main__":
    main()
