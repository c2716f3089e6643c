# SPDX-License-Identifier: Apache-2.0
"""A policy beside stock vLLM, at the same KV bytes: ``python -m benchmarks.throughput``.

Starts one ``vllm serve`` per arm (stock with default features, stock without prefix caching, and
the policies), all with the same ``--kv-cache-memory-bytes``, and sends each in turn the same load
with ``vllm bench serve`` while the others are paused. A trial goes through all contexts and arms,
the next one the other way round, after a warm-up of each; the table shows medians and ranges.
Ratios of single tokens' times are steadier in ``benchmarks.token_time``.

The sweep is context length x concurrency x pool. A pool of ``2x`` holds two requests of the
longest context in stock vLLM. ``--preset goals``, ``long`` and ``many`` are the settings in which
the project states its goals, ``--preset quick`` takes minutes.
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, number, spread, times
from benchmarks.running.engines import MODEL, native_positions, text_config
from benchmarks.running.environment import ROOT
from benchmarks.running.serving import Load, Server, ServerError, bench_serve, plain_words

STOCK = "full"
STOCK_ARMS = {STOCK: [], f"{STOCK}-no-prefix": ["--no-enable-prefix-caching"]}
SHAPES = {
    f"llama-{size}": ROOT / f"benchmarks/inputs/configs/llama-{size}"
    for size in ("125m", "1b", "8b")
}
WARM_UP = -1  # its number among the trials
WARM_UP_CONTEXT, WARM_UP_OUTPUT = 512, 32
SHAPE = "--model llama-125m --policies cascade --budget 1024 --pools 1x "
PRESETS = {
    "quick": "--model books-5m --policies sink cascade --budget 256 --pools 1x 4x "
    "--contexts 128 2048 --output-len 32 --concurrency 4 --prompts 4 --trials 3",
    "goals": SHAPE + "--contexts 512 2048 4096 16384 32768 --stock-longest 16384 "
    "--output-len 64 --concurrency 1 --prompts 1 --trials 3",
    "long": SHAPE + "--contexts 16384 --output-len 512 --concurrency 4 --prompts 4 --trials 1",
    "many": SHAPE + "--contexts 6144 --output-len 2048 --concurrency 16 --prompts 16 --trials 1",
}


@dataclass(frozen=True)
class Cell(Load):
    """One point of the sweep.

    Attributes:
        pool: bytes of KV cache, the same for every arm.
    """

    pool: int = 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; a preset's values are defaults that any flag replaces."""
    parser = results.parser_of("throughput", __doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="quick")
    add("--model", help=f"books-5m, {', '.join(SHAPES)}, or a model's path or name")
    add("--tokenizer", help="default: the model's, or the shipped one for a shape")
    add("--policies", nargs="+", help="policy names of the arms beside stock")
    add("--policy-config", type=json.loads, default={}, help="their settings, JSON")
    add("--budget", type=int)
    add("--contexts", type=int, nargs="+", help="prompt tokens of a request")
    add("--output-len", type=int, help="tokens generated for a request")
    add("--concurrency", type=int, nargs="+", help="requests in flight")
    add("--prompts", type=int, help="requests in a trial (at least --concurrency)")
    add("--pools", nargs="+", help="2x: requests of the longest context; or 64M")
    add("--block-size", type=int, default=128, help="of every arm; 16 on a GPU")
    add("--trials", type=int)
    add("--stock-longest", type=int, help="no stock arm above this context")
    add("--stock", nargs="*", choices=list(STOCK_ARMS), default=list(STOCK_ARMS), help="stock "
        "arms, default and without prefix caching; nothing after it: none")  # fmt: skip
    add("--one-at-a-time", action="store_true", help="one server at a time, for large models; "
        "trials then do not alternate")  # fmt: skip
    add("--sessions", action="store_true", help="one arm more for each policy, which keeps "
        "sessions in memory and in a folder")  # fmt: skip
    add("--server-args", type=shlex.split, default=[],
        help='more arguments for every arm, quoted as in a shell: "--enforce-eager"')  # fmt: skip
    words = list(sys.argv[1:] if argv is None else argv)
    preset = PRESETS[parser.parse_args(words).preset]
    args = parser.parse_args([*preset.split(), *words])
    if min(args.trials, args.prompts, *args.contexts, *args.concurrency) < 1:
        parser.error("--trials, --prompts, --contexts and --concurrency must be at least 1")
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


def shared_flags(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Flags of every arm, with those that the model needs."""
    shared = [*flags, "--max-model-len", str(max(args.contexts) + args.output_len)]
    return [*shared, "--block-size", str(args.block_size), *args.server_args]


def kv_bytes_per_token(model: str, dtype: str = "auto") -> int:
    """Bytes of keys and values that stock vLLM stores for a token, all layers.

    Args:
        dtype: of the engine; ``auto``: as the model is stored.
    """
    import torch

    config = text_config(model)
    stored = dtype if dtype != "auto" else config.dtype
    kind = stored if isinstance(stored, torch.dtype) else getattr(torch, stored or "bfloat16")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * kind.itemsize


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


def arms(args: argparse.Namespace, folder: str) -> dict[str, list[str]]:
    """Flags of every arm; ``folder``: for sessions."""
    config = {"recall": 0, "budget": args.budget, **args.policy_config}
    made: dict[str, dict[str, Any]] = {
        name: {"kv_policy": {"name": name, **config}} for name in args.policies
    }
    for name in args.policies if args.sessions else ():
        keeps = {"kv_sessions": True, "kv_sessions_dir": os.path.join(folder, name)}
        made[f"{name}-sessions"] = {**made[name], **keeps, "kv_sessions_disk": 4.0}
    policies = {name: ["--additional-config", json.dumps(one)] for name, one in made.items()}
    return {**{name: STOCK_ARMS[name] for name in args.stock}, **policies}


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


def alone(server: Server, *load: Any) -> dict[str, Any]:
    """``bench_serve`` on a server that is paused otherwise, so that arms do not disturb others."""
    server.resume()
    try:
        return bench_serve(server, *load)
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
                        alone(servers[name], warm_up(cell), WARM_UP, token, allowed)
            for trial, cell, name in rounds(args, sweep, up):
                record = alone(servers[name], cell, trial, token, allowed)
                yield {**asdict(cell), "arm": name, "trial": trial, **record}


Record = dict[str, Any]
Metric = tuple[str, int]
COLUMNS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("output tok/s", (("output_throughput", 1),)),
    ("req/s", (("request_throughput", 3),)),
    ("TTFT ms: p50 / p99", (("median_ttft_ms", 0), ("p99_ttft_ms", 0))),
    ("TPOT ms: mean / p50 / p99", (("mean_tpot_ms", 1), ("median_tpot_ms", 1), ("p99_tpot_ms", 1))),
    ("ITL ms: mean / p50 / p99", (("mean_itl_ms", 1), ("median_itl_ms", 1), ("p99_itl_ms", 1))),
    ("running", (("peak_running", 0),)),
    ("preempted", (("preemptions", 0),)),
    ("pages: peak / pool", (("peak_pages", 0), ("num_pages", 0))),
)
NOTE = (
    "Medians of the trials; of tokens/s also their range, where there are several. The last three "
    "columns are the server's own, sampled five times a second."
)


def line(record: Record) -> str:
    """One trial, as it ends."""
    head = f"{record['arm']:>16} context {record['context']:,}, {record['concurrency']} at once"
    head += f", pool {record['pool'] / 2**20:,.0f} MiB"
    if "refused" in record:
        return f"{head}: refused: {record['refused'].splitlines()[-1][:200]}"
    text = f"{head}: {record['output_throughput']:,.1f} tok/s"
    if "mean_tpot_ms" in record:
        text += f", TPOT {record['mean_tpot_ms']:,.1f} ms, TTFT {record['median_ttft_ms']:,.0f} ms"
    return text


def _key(record: Record) -> tuple[int, int, int]:
    return record["pool"], record["concurrency"], record["context"]


def values(records: Iterable[Record], key: str, **match: Any) -> list[float]:
    """A metric of the trials that match."""
    return [
        record[key]
        for record in records
        if key in record and all(record[name] == value for name, value in match.items())
    ]


def tables(records: Sequence[Record]) -> list[Table]:
    """A table a pool and concurrency: a row an arm and context."""
    keys = {key for record in records for key in record}
    shown = {name: metrics for name, metrics in COLUMNS if metrics[0][0] in keys}
    shown = shown or dict(COLUMNS[:1])  # no arm has started
    made = []
    for pool, at_once in dict.fromkeys(_key(record)[:2] for record in records):
        part = [r for r in records if (r["pool"], r["concurrency"]) == (pool, at_once)]
        contexts, names = (dict.fromkeys(r[key] for r in part) for key in ("context", "arm"))
        rows = []
        for context, arm in itertools.product(contexts, names):
            trials = [r for r in part if (r["arm"], r["context"]) == (arm, context)]
            cells = {name: _cell(trials, metrics) for name, metrics in shown.items()}
            if not trials or "refused" in trials[0]:
                cells = dict.fromkeys(shown, "")
                cells[next(iter(shown))] = "does not start" if trials else "not run"
            rows.append({"context, arm": f"{context:,} {arm}", **cells})
        title = f"KV pool {pool / 2**20:,.1f} MiB, {at_once} requests in flight"
        made.append(Table.of(title, rows, NOTE))
    return made


def _cell(trials: Sequence[Record], metrics: tuple[Metric, ...]) -> str:
    """A metric and its range, or the medians of several."""
    found = [(values(trials, key), digits) for key, digits in metrics]
    if len(found) == 1:
        return spread(*found[0])
    return " / ".join(number(median(some) if some else None, digits) for some, digits in found)


def beside_stock(records: Sequence[Record]) -> list[Table]:
    """A row a policy and setting: its medians beside the better of the stock arms.

    Latencies are compared only with one request in flight: with several, a token's time includes
    parts of the others' prompts, and a prompt's time includes waiting.
    """
    done, rows = [record for record in records if "refused" not in record], []
    for pool, at_once, context in dict.fromkeys(map(_key, done)):
        here = [record for record in done if _key(record) == (pool, at_once, context)]
        names = list(dict.fromkeys(record["arm"] for record in here))
        stock = [name for name in names if name.startswith(STOCK)]

        ratio = partial(_ratio, here, stock)
        for arm in names if stock else []:
            if arm not in stock:
                where = f"{arm}, {context:,} tokens, {at_once} at once, {pool / 2**20:,.0f} MiB"
                alone = at_once == 1
                row = {"": where, "output tok/s": ratio(arm, "output_throughput", more=True)}
                row["time per token"] = ratio(arm, "mean_tpot_ms") if alone else "-"
                row["time to first token"] = ratio(arm, "median_ttft_ms") if alone else "-"
                rows.append(row)
    note = "How many times better than the better of the stock arms: ratios of medians."
    return [Table.of("Beside stock vLLM", rows, note)] if rows else []


def _ratio(
    here: Sequence[Record], stock: Sequence[str], arm: str, metric: str, more: bool = False
) -> str:
    """``more``: a higher value is better."""
    found = {name: values(here, metric, arm=name) for name in (arm, *stock)}
    medians = {name: median(some) for name, some in found.items() if some}
    others = [medians[name] for name in stock if name in medians]
    if arm not in medians or not others:
        return "-"
    return times(medians[arm] / max(others) if more else min(others) / medians[arm])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep."""
    args = parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers must not outlive this
    model, tokenizer, flags = model_arguments(args)
    shared = shared_flags(args, flags)
    sweep = cells(args, kv_bytes_per_token(model), args.block_size)
    records = []
    for pool, part in itertools.groupby(sweep, key=lambda cell: cell.pool):
        with tempfile.TemporaryDirectory() as folder:
            of_pool = {
                name: [*shared, "--kv-cache-memory-bytes", str(pool), *extra]
                for name, extra in arms(args, folder).items()
            }
            for record in measure_pool(args, list(part), of_pool, model, tokenizer):
                print(line(record), file=sys.stderr, flush=True)
                records.append(record)
    results.finish(args, argv, [*tables(records), *beside_stock(records)])


if __name__ == "__main__":
    main()
