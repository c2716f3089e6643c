# SPDX-License-Identifier: Apache-2.0
"""A policy beside stock vLLM, at the same KV bytes: ``python -m benchmarks.throughput``.

Starts one ``vllm serve`` per arm (stock with default features, stock without prefix caching, and
the policies), all with the same ``--kv-cache-memory-bytes``, and sends each in turn the same load
with ``vllm bench serve`` while the others are paused; or, with ``--harness throughput``, runs
``vllm bench throughput``. A trial goes through all contexts and arms, the next one the other way
round, after a warm-up of each; the table shows medians and ranges. Ratios of single tokens' times
are steadier in ``benchmarks.token_time``.

The sweep is context length x concurrency x pool. A pool of ``2x`` holds two requests of the
longest context in stock vLLM. ``--preset goals``, ``long`` and ``many`` are the settings in which
the project states its goals, ``--preset quick`` takes minutes.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.reporting import results, speed_report
from benchmarks.reporting.goals import STOCK, goals
from benchmarks.running.engines import MODEL, native_positions
from benchmarks.running.environment import ROOT
from benchmarks.running.serving import (
    Load,
    Server,
    ServerError,
    bench_serve,
    bench_throughput,
    plain_words,
)

STOCK_ARMS = {STOCK: [], f"{STOCK}-no-prefix": ["--no-enable-prefix-caching"]}
SHAPES = {
    f"llama-{size}": ROOT / f"benchmarks/inputs/configs/llama-{size}"
    for size in ("125m", "1b", "8b")
}
WARM_UP = -1  # its number among the trials
WARM_UP_CONTEXT, WARM_UP_OUTPUT = 512, 32
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "model": "books-5m",
        "policies": ["sink", "cascade"],
        "budget": 256,
        "contexts": [128, 2048],
        "concurrency": [4],
        "pools": ["1x", "4x"],
        "output_len": 32,
        "prompts": 4,
        "trials": 3,
    },
    "goals": {
        "model": "llama-125m",
        "policies": ["cascade"],
        "budget": 1024,
        "contexts": [512, 2048, 4096, 16384, 32768],
        "concurrency": [1],
        "pools": ["1x"],
        "output_len": 64,
        "prompts": 1,
        "trials": 3,
        "stock_longest": 16384,
    },
    "long": {
        "model": "llama-125m",
        "policies": ["cascade"],
        "budget": 1024,
        "contexts": [16384],
        "concurrency": [4],
        "pools": ["1x"],
        "output_len": 512,
        "prompts": 4,
        "trials": 1,
    },
    "many": {
        "model": "llama-125m",
        "policies": ["cascade"],
        "budget": 1024,
        "contexts": [6144],
        "concurrency": [16],
        "pools": ["1x"],
        "output_len": 2048,
        "prompts": 16,
        "trials": 1,
    },
}


@dataclass(frozen=True)
class Cell:
    """One point of the sweep.

    Attributes:
        pool: bytes of KV cache, the same for every arm.
    """

    context: int
    output_len: int
    concurrency: int
    num_prompts: int
    pool: int

    def load(self, trial: int, prefix_len: int = 0) -> Load:
        # vLLM's random prompts of one seed begin alike, whatever their length: with the same seed
        # in every cell, a prefix cache would know the next cell's prompts.
        seed = zlib.crc32(repr((trial, self.context, self.concurrency)).encode())
        return Load(
            input_len=self.context,
            output_len=self.output_len,
            concurrency=self.concurrency,
            num_prompts=self.num_prompts,
            seed=seed,
            prefix_len=prefix_len,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; a preset's values are defaults that any flag replaces."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--model", help=f"books-5m, {', '.join(SHAPES)}, or a model's path or name")
    parser.add_argument("--tokenizer", help="default: the model's, or the shipped one for a shape")
    parser.add_argument("--policies", nargs="+", help="policy names of the arms beside stock")
    parser.add_argument("--policy-config", type=json.loads, default={}, help="their settings, JSON")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--contexts", type=int, nargs="+", help="prompt tokens of a request")
    parser.add_argument("--output-len", type=int, help="tokens generated for a request")
    parser.add_argument("--concurrency", type=int, nargs="+", help="requests in flight")
    parser.add_argument("--prompts", type=int, help="requests in a trial (at least --concurrency)")
    parser.add_argument("--pools", nargs="+", help="2x: requests of the longest context; or 64M")
    parser.add_argument("--block-size", type=int, default=128, help="of every arm; 16 on a GPU")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens all prompts share")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--harness", choices=("serve", "throughput"), default="serve")
    parser.add_argument(
        "--stock-longest", type=int, help="no stock arm above this context, where it takes too long"
    )
    parser.add_argument(
        "--stock",
        nargs="*",
        choices=list(STOCK_ARMS),
        default=list(STOCK_ARMS),
        help="stock arms, default and without prefix caching; nothing after it: none",
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="one server at a time, for large models; trials then do not alternate",
    )
    parser.add_argument(
        "--server-args",
        default="",
        help='more arguments for every arm, for example "--enforce-eager"',
    )
    results.add_arguments(parser, "throughput")
    args = parser.parse_args(argv)
    for key, value in PRESETS[args.preset].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if min(args.trials, args.prompts, *args.contexts, *args.concurrency) < 1:
        parser.error("--trials, --prompts, --contexts and --concurrency must be at least 1")
    if args.shared_prefix >= min(args.contexts):
        parser.error("--shared-prefix must be shorter than every context")
    return args


def model_arguments(args: argparse.Namespace) -> tuple[str, str, list[str]]:
    """The model's path, its tokenizer's, and the flags that both need."""
    model, tokenizer, flags = args.model, args.tokenizer, []
    if model == "books-5m":
        model = str(MODEL)
    elif model in SHAPES:
        model, tokenizer = str(SHAPES[model]), tokenizer or str(MODEL)
        flags += ["--load-format", "dummy", "--tokenizer", tokenizer]
    longest = max(args.contexts) + args.output_len
    if longest > native_positions(model):
        # What is generated is not looked at, so the stock arm may run past trained positions.
        flags += ["--hf-overrides", json.dumps({"max_position_embeddings": longest})]
    return model, tokenizer or model, flags


def kv_bytes_per_token(model: str) -> int:
    """Bytes of keys and values that stock vLLM stores for a token, all layers."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype.itemsize


def pool_bytes(spec: str, request_bytes: int) -> int:
    """``1.5x`` (requests of the longest context), ``64M``, ``2G`` or plain bytes.

    Raises:
        ValueError: none of these.
    """
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "x": request_bytes}
    unit = units.get(spec[-1:].lower())
    return int(float(spec[:-1]) * unit) if unit else int(spec)


def cells(args: argparse.Namespace, per_token: int, block_size: int) -> list[Cell]:
    """The sweep, pool by pool."""
    longest = max(args.contexts) + args.output_len
    pages = -(-longest // block_size) + 2  # vLLM's null block, and the page of the next token
    sizes = [pool_bytes(spec, pages * block_size * per_token) for spec in args.pools]
    return [
        Cell(context, args.output_len, at_once, max(args.prompts, at_once), pool)
        for pool, at_once, context in itertools.product(sizes, args.concurrency, args.contexts)
    ]


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """Flags of every arm."""
    stock = {name: STOCK_ARMS[name] for name in args.stock}
    config = {"budget": args.budget, **args.policy_config}
    policies = {
        name: ["--additional-config", json.dumps({"kv_policy": {"name": name, **config}})]
        for name in args.policies
    }
    return {**stock, **policies}


def rounds(
    args: argparse.Namespace, sweep: Sequence[Cell], names: Sequence[str]
) -> Iterator[tuple[int, Cell, str]]:
    """(trial, cell, arm): a trial goes through all cells, and every other one the other way round.

    So drift of the machine hits all arms and contexts alike.
    """
    for trial in range(args.trials):
        way = 1 if trial % 2 == 0 else -1
        for cell in sweep[::way]:
            yield from ((trial, cell, name) for name in names[::way] if runs(args, name, cell))


def warm_up(cell: Cell) -> Cell:
    """A batch of a cell's size, with a part of its context."""
    return replace(
        cell,
        context=min(cell.context, WARM_UP_CONTEXT),
        output_len=min(cell.output_len, WARM_UP_OUTPUT),
        num_prompts=cell.concurrency,
    )


def runs(args: argparse.Namespace, arm: str, cell: Cell) -> bool:
    """Whether an arm takes part in a cell."""
    longest = args.stock_longest
    return longest is None or cell.context <= longest or not arm.startswith(STOCK)


def alone(
    server: Server, load: Load, tokenizer: str, allowed: Sequence[int] = ()
) -> dict[str, Any]:
    """A load on a server that is paused otherwise, so that the arms do not disturb each other."""
    server.resume()
    try:
        return bench_serve(server, load, tokenizer, allowed)
    finally:
        server.pause()


def measure_pool(
    args: argparse.Namespace, sweep: list[Cell], flags: dict[str, list[str]], model: str, token: str
) -> Iterator[dict[str, Any]]:
    """Every trial of every cell of one pool, as records."""
    groups = [[name] for name in flags] if args.one_at_a_time else [list(flags)]
    allowed = plain_words(token) if args.model in SHAPES else ()
    for group in groups:
        with ExitStack() as stack:
            servers, refused = {}, {}
            for name in group:
                servers[name] = Server(model, flags[name])
                stack.callback(servers[name].stop)
                servers[name].start()
            for name in group:
                try:
                    servers[name].wait()
                except ServerError as error:
                    refused[name] = str(error)
            up = [name for name in group if name not in refused]
            for name in up:
                servers[name].pause()
            for cell in sweep:
                yield from ({**asdict(cell), "arm": n, "refused": e} for n, e in refused.items())
                for name in up:
                    if runs(args, name, cell):
                        alone(servers[name], warm_up(cell).load(WARM_UP), token, allowed)
            for trial, cell, name in rounds(args, sweep, up):
                load = cell.load(trial, args.shared_prefix)
                record = alone(servers[name], load, token, allowed)
                yield {**asdict(cell), "arm": name, "trial": trial, **record}


def measure_offline(
    args: argparse.Namespace, sweep: list[Cell], flags: dict[str, list[str]], model: str, token: str
) -> Iterator[dict[str, Any]]:
    """The same with ``vllm bench throughput``, an engine a trial."""
    for trial, cell, name in rounds(args, sweep, list(flags)):
        try:
            load = cell.load(trial, args.shared_prefix)
            record = bench_throughput(model, flags[name], load, token)
        except ServerError as error:
            record = {"refused": str(error)}
        yield {**asdict(cell), "arm": name, "trial": trial, **record}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep."""
    args = parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers must not outlive this
    model, tokenizer, flags = model_arguments(args)
    shared = [*flags, "--max-model-len", str(max(args.contexts) + args.output_len)]
    shared += ["--block-size", str(args.block_size), *args.server_args.split()]
    sweep = cells(args, kv_bytes_per_token(model), args.block_size)
    measure = measure_pool if args.harness == "serve" else measure_offline
    records = []
    for pool, part in itertools.groupby(sweep, key=lambda cell: cell.pool):
        of_pool = {
            name: [*shared, "--kv-cache-memory-bytes", str(pool), *extra]
            for name, extra in arms(args).items()
        }
        for record in measure(args, list(part), of_pool, model, tokenizer):
            print(speed_report.line(record), file=sys.stderr, flush=True)
            records.append(record)
    tables = [*speed_report.tables(records), *goals(records, args.budget)]
    results.save(args.out, tables, {"trials": records}, vars(args), argv)
    speed_report.picture(records, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
