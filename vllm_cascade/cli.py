# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade``: what policies there are, and which tokens of a text they keep."""

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_cascade.policies import POLICIES


def show_policies() -> None:
    """Print every policy with its own settings, their defaults and its source."""
    table = Table(title="KV policies of vllm_cascade", show_lines=True)
    for header in ("policy", "what it keeps", "settings of its own", "source"):
        table.add_column(header, overflow="fold")
    shared = set(POLICIES["sink"].model_fields)
    for name, cls in POLICIES.items():
        own = [
            f"{key} ({field.default}): {field.description}"
            for key, field in cls.model_fields.items()
            if key not in shared
        ]
        table.add_row(name, (cls.__doc__ or "").split("\n")[0], "\n".join(own), cls.paper)
    Console().print(table)
    sink = POLICIES["sink"].model_fields.items()
    lines = [f"  {key}: {field.description}" for key, field in sink]
    Console().print("Every policy:\n" + "\n".join(lines))


def trace(args: argparse.Namespace) -> None:
    """Stream a text through a real engine and print which of its tokens are still cached."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        kv_policy=args.kv_policy,
        kv_budget=args.kv_budget,
        kv_policy_config={**(args.kv_policy_config or {}), "trace": True},
        max_model_len=args.max_model_len,
        enforce_eager=True,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
    )
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer(Path(args.text).read_text())["input_ids"][: args.max_model_len - 1]
    llm.collective_rpc("kv_policy_trace", args=(len(tokens),))
    llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1))
    (snapshots,) = llm.collective_rpc("kv_policy_snapshots")
    wanted = snapshots[args.layer]
    for head, kept in enumerate(wanted["tokens"]):
        who = "all heads" if len(wanted["tokens"]) == 1 else f"KV head {head}"
        print(f"{wanted['layer']}, {who}: {len(kept)} of {len(tokens)} tokens kept")
        print("  stream indices:", runs(kept))
        print("  text:", tokenizer.decode(kept).replace("\n", " "))


def runs(indices: list[int]) -> str:
    """``[0, 1, 2, 5, 9, 10]`` as ``0-2, 5, 9-10``."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_cascade.patches.engine_args import add_flags

    main_parser = FlexibleArgumentParser(prog="vllm-cascade", description=__doc__)
    commands: Any = main_parser.add_subparsers(dest="command", required=True)
    commands.add_parser("policies", help="list the policies, their settings and sources")
    tracer = commands.add_parser("trace", help="show which tokens of a text a policy keeps")
    tracer.add_argument("model", help="a model vLLM can serve: a folder or a name")
    tracer.add_argument("--text", required=True, help="a text file to stream")
    tracer.add_argument("--layer", type=int, default=0, help="which attention layer to show")
    tracer.add_argument("--max-model-len", type=int, default=8192, help="longest stream, in tokens")
    add_flags(tracer)
    tracer.set_defaults(kv_policy="cascade")
    return main_parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.command == "policies":
        show_policies()
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    trace(args)


if __name__ == "__main__":
    main()
