# SPDX-License-Identifier: Apache-2.0
"""What the demo prints, and the same numbers as JSON values."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from benchmarks.running.stream import StreamResult

MIN_WIDTH = 112
"""The table's width; narrower consoles (a pipe, a log) would break its numbers in two."""

CAVEAT = """\
[bold]What this shows:[/] vLLM streams a text far longer than the {native_len:,} positions of the \
model through a cache of constant size, and its perplexity does not blow up past them.
[bold]What it does not show:[/] which policy is better. The 5M-parameter model was trained too \
briefly to use distant context (full attention over 1,024 tokens predicts no better than a window \
of 128) or to lean on its first tokens, so neither older tokens nor attention sinks can help it, \
and differences between the rows say nothing about larger models. A bounded cache never lets a \
model attend to more tokens at once than it holds."""


def console() -> Console:
    """Standard output, wide enough for the table."""
    plain = Console()
    return plain if plain.width >= MIN_WIDTH else Console(width=MIN_WIDTH)


def introduce(args: argparse.Namespace, num_tokens: int, native_len: int) -> None:
    """Say what is about to run."""
    console().print(
        f"Streaming [bold]{Path(args.book).name}[/] ({num_tokens:,} tokens) through "
        f"[bold]{Path(args.model).name}[/] ({native_len:,} positions): budget {args.budget}, "
        f"prefill stride {args.stride}, one vLLM engine per policy, "
        f"{args.engines} at a time on a core each.",
        highlight=False,
    )


def numbers(
    results: dict[str, StreamResult], head: int, native_len: int
) -> dict[str, dict[str, Any]]:
    """Every measured number, by policy; ``head``: the tokens that full attention could read."""
    return {label: _numbers(result, head, native_len) for label, result in results.items()}


def _numbers(result: StreamResult, head: int, native_len: int) -> dict[str, Any]:
    total = result.num_tokens
    quarters = [total * part // 4 for part in range(5)]
    blocks = range(0, len(result.nll), native_len)
    return {
        "tokens": total,
        "perplexity": result.perplexity(),
        f"perplexity_first_{head}": result.perplexity(end=head),
        "perplexity_quarters": [
            result.perplexity(*bounds) for bounds in itertools.pairwise(quarters)
        ],
        f"mean_nll_per_{native_len}": [
            round(float(np.mean(result.nll[at : at + native_len])), 5) for at in blocks
        ],
        "tokens_cached": result.cached,
        "tokens_evicted": evicted(result),
        "pages_end": result.pages_end,
        "pages_peak": result.pages_peak,
        "block_size": result.block_size,
        "page_bytes_all_layers": result.page_bytes,
        "peak_kv_bytes": result.peak_bytes,
        "full_attention_kv_bytes": result.full_bytes,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "counters": result.counters,
        "kept_tokens": result.kept,
        "continuation": result.continuation,
        "continuation_tokens": result.num_generated,
    }


def evicted(result: StreamResult) -> int:
    """Tokens of the prompt that the engine dropped, by its own count; stock vLLM drops none."""
    return result.counters.get("evicted_tokens", 0)


def show(
    results: dict[str, StreamResult], head: int, native_len: int, out: Path, seconds: float
) -> None:
    """Print the table, what it means, the continuation and where the files are."""
    screen = console()
    screen.print(table(results, head))
    screen.print(CAVEAT.format(native_len=native_len), highlight=False)
    last = results["cascade"]
    screen.print(
        Panel(
            last.continuation.strip(),
            title=f"cascade goes on after {last.num_tokens:,} tokens "
            f"({last.num_generated} tokens, temperature 0.8)",
            title_align="left",
        ),
        highlight=False,
        markup=False,
    )
    screen.print(
        f"Wrote perplexity.png, kept_tokens.png and demo.json to {out} in {seconds:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )


def table(results: dict[str, StreamResult], head: int) -> Table:
    """One row a policy."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    grid.add_column("policy", no_wrap=True)
    columns = (
        "tokens\nstreamed",
        "perplexity\nwhole book",
        f"perplexity\nfirst {head:,}",
        "tokens\ncached",
        "pages\nheld",
        "peak\nKV",
        "full KV\nwould be",
        "tokens\nevicted",
        "tokens\nper s",
    )
    for column in columns:
        grid.add_column(column, justify="right", no_wrap=True)
    longest = max(result.num_tokens for result in results.values())
    for label, result in results.items():
        whole = result.num_tokens == longest
        grid.add_row(
            label,
            f"{result.num_tokens:,}",
            f"{result.perplexity():.2f}" if whole else "-",
            f"{result.perplexity(end=head):.2f}",
            f"{result.cached:,}",
            f"{result.pages_end:,}",
            size(result.peak_bytes),
            size(result.full_bytes),
            f"{evicted(result):,}",
            f"{result.tokens_per_second:,.0f}",
        )
    return grid


def size(num_bytes: int) -> str:
    """Bytes in a unit that leaves at most four digits."""
    kib = num_bytes / 1024
    return f"{kib:,.0f} KiB" if kib < 10_000 else f"{kib / 1024:,.1f} MiB"
