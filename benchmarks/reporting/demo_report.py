# SPDX-License-Identifier: Apache-2.0
"""What the demo prints and keeps, for readers who are new to the topic."""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.reporting import stats
from benchmarks.reporting.demo_pictures import block_means
from benchmarks.reporting.tables import Table, number, say
from benchmarks.running.conversation import Turn
from benchmarks.running.novel import Read

STOCK, CASCADE, RECALL = "stock vLLM", "cascade", "sink, recall"
KEEPS = {
    STOCK: "all tokens",
    "window": "the last {budget:,}",
    "sink": "the first {sinks} and the last {budget:,}",
    CASCADE: "the first {sinks}, plus {budget:,} that thin with age",
    RECALL: "the first {recall[sinks]}, the last {recall[budget]:,}, plus {recall[units]} recalled "
    "units of {recall[unit]}",
}

NOVEL = """\
1. A novel. {model} is a language model for at most {positions:,} tokens (a token is about three \
quarters of a word). It reads the first {tokens:,} tokens of {book} and predicts each one. \
Perplexity measures its uncertainty: 40 means as unsure as between 40 equally likely tokens; \
lower is better. Stock vLLM caches every token. Three policies of this plugin cache about \
{budget:,} tokens and forget the others. The last row adds recall, which keeps the others in host \
memory. One engine each, {engines} at a time:
"""

NOTE = """\
The novel contained a note, {ago:,} tokens before the end of the text:

   {said}

It was asked for at the end. Stock vLLM had stopped before that. "{asked} ..."
"""

CHAT = """\
2. A chat with two servers, {engines} at a time:

   {stock}
   {ours}

The user pastes the novel part by part and asks each time what it is about; every turn sends the \
whole conversation so far. A page holds {block} tokens. "Until first" is the time from the \
question to the answer's first token, "a token" the time of each token after it. Each turn's line \
has for both: tokens / pages / until first / a token.
"""

EVICTS = """\
The cascade's server goes on because it evicts. Evicted tokens wait in host memory, and each \
answer recalls those that its question attends to most. It knows nothing of the others."""


def numbers(read: Read, head: int) -> dict[str, Any]:
    """What is kept of an arm that read the novel, as JSON values.

    Args:
        head: tokens that every arm read: perplexity is reported up to there and after, without
            the question.
    """
    result, (nll,) = read.result, read.result.nll
    tokens = len(nll) + 1 - read.asked
    scored = nll[: tokens - 1]  # of tokens 1, 2, ...
    return {
        "refusal": read.refusal,
        "tokens": tokens,
        "tokens_cached": read.cached,
        "perplexity_head": stats.perplexity([scored[: head - 1]]),
        "perplexity_beyond": stats.perplexity([scored[head - 1 :]]) if tokens > head else None,
        "pages_peak": result.pages_peak,
        "page_bytes": read.page_bytes,
        "peak_kv_bytes": result.pages_peak * read.page_bytes,
        "host_bytes": result.counters.get("store_bytes", 0),
        "read_ms": 1e3 * result.seconds / (len(nll) + 1),
        "write_ms": 1e3 * median(result.token_seconds),
        "mean_nll_per_block": block_means(scored),
    }


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def knows(arm: Mapping[str, Any]) -> str:
    """Whether an arm answered the question about the note."""
    return {True: "yes", False: "no"}.get(arm.get("right"), "-")


def memory(arm: Mapping[str, Any]) -> str:
    """Bytes of the KV cache, and of recall's store."""
    host = f" + {mib(arm['host_bytes'])} in host memory" if arm["host_bytes"] else ""
    return mib(arm["peak_kv_bytes"]) + host


def keeps(label: str, novel: Mapping[str, Any]) -> str:
    """What an arm keeps, in words."""
    return KEEPS[label].format(**novel)


def novel_table(novel: Mapping[str, Any]) -> Table:
    """A row an arm."""
    head = novel["head"]
    rows = [
        {
            "": label,
            "keeps": keeps(label, novel),
            "tokens read": f"{arm['tokens']:,}" + (", stops" if arm["refusal"] else ""),
            f"perplexity of the first {head:,}": number(arm["perplexity_head"]),
            "of those after": number(arm["perplexity_beyond"]),
            "cache": memory(arm),
            "ms a token read": number(arm["read_ms"]),
            "ms a token written": number(arm["write_ms"], 1),
            "knows the note": knows(arm),
        }
        for label, arm in novel["arms"].items()
    ]
    return Table.of(
        f"The first {novel['tokens']:,} tokens of a novel, {novel['model']}",
        rows,
        f"Written: {novel['new_tokens']} tokens after what was read, their median; with those "
        f"stock vLLM has used all {novel['positions']:,} positions. The note stood "
        f"{novel['note']['ago']:,} tokens before the end. Engines at a time, on a core each: "
        f"{novel['engines']}.",
    )


def show_answers(novel: Mapping[str, Any]) -> None:
    """Print the note that stood in the novel, and what each arm says when it is asked for."""
    say(NOTE.format(**novel["note"]))
    for label, arm in novel["arms"].items():
        if "answer" in arm:
            right = "right" if arm["right"] else "wrong"
            say(f"{label + ':':<16}{right:<8}... {arm['answer']}")
    say("")


def turn_numbers(turn: Turn) -> dict[str, Any]:
    """What is kept of a turn."""
    answer = turn.answer + ("" if turn.complete else " ...")
    return {**asdict(turn), "context": turn.context, "answer": answer}


def live_row(arms: Mapping[str, Any], turn: int) -> str:
    """One turn, as it ends."""
    shown = [f"{label} {' / '.join(cells(arm, turn))}" for label, arm in arms.items()]
    return f"turn {turn + 1}: {', '.join(shown)}"


def chat_table(chat: Mapping[str, Any]) -> Table:
    """A row a turn: stock vLLM's numbers, until it refuses, and ours."""
    arms = chat["arms"]
    columns = ["turn"]
    for label in arms:
        columns += [f"{label}: tokens", "pages", "until first", "a token"]
    rows = [
        (str(turn + 1), *(cell for arm in arms.values() for cell in cells(arm, turn)))
        for turn in range(max(len(arm["turns"]) for arm in arms.values()))
    ]
    page = {label: mib(arm["page_bytes"]) for label, arm in arms.items()}
    return Table(
        f"A chat that goes on past {chat['positions']:,} tokens, {chat['model']}",
        tuple(columns),
        tuple(rows),
        f"A page takes {page[STOCK]} in stock vLLM and {page[CASCADE]} under cascade, all layers "
        f"together. Servers asked at a time, on a core each: {chat['engines']}. {stopped(chat)}",
    )


def cells(arm: Mapping[str, Any], turn: int) -> tuple[str, str, str, str]:
    """One server's part of a turn's row."""
    if turn < len(arm["turns"]):
        found = arm["turns"][turn]
        token = "-" if found["token_ms"] is None else f"{found['token_ms']:.0f} ms"
        first = f"{found['first_seconds']:.1f} s"
        return f"{found['context']:,}", f"{found['pages']:,}", first, token
    if arm["refused"] and turn == len(arm["turns"]):
        return f"HTTP {arm['refused']['status']}", "-", "-", "-"
    return "-", "-", "-", "-"


def stopped(chat: Mapping[str, Any]) -> str:
    """Where stock vLLM stopped, in its own words."""
    stock = chat["arms"][STOCK]
    if not stock["refused"]:
        return "Stock vLLM was not brought to its limit."
    return (
        f"Stock vLLM answers turn {len(stock['turns']) + 1} with HTTP "
        f'{stock["refused"]["status"]}: "{stock["refused"]["message"]}"'
    )


def shown(novel: Mapping[str, Any], chat: Mapping[str, Any]) -> list[str]:
    """What the demo has shown, in five lines."""
    arms, (stock, ours) = novel["arms"], (chat["arms"][label] for label in (STOCK, CASCADE))
    full, cascade = arms[STOCK], arms[CASCADE]
    share = 100 * cascade["peak_kv_bytes"] / full["peak_kv_bytes"]
    knowing = [label for label, arm in arms.items() if arm.get("right")] or ["no policy"]
    refused = stock["refused"]
    ended = f"answers HTTP {refused['status']}" if refused else "is not at its limit"
    first, last = (arm["turns"][-1]["first_seconds"] for arm in (stock, ours))
    return [
        f"1. Past the positions: stock vLLM stops after {full['tokens']:,} tokens of the novel "
        f'("{full["refusal"]}"); the policies read all {novel["tokens"]:,}.',
        f"2. Memory: cascade's KV cache takes {mib(cascade['peak_kv_bytes'])}, {share:.0f} % of "
        f"stock's {mib(full['peak_kv_bytes'])}, and no longer grows.",
        f"3. Quality: cascade's perplexity is {_against(cascade, full)} stock's. A plain window's "
        f"is {_against(arms['window'], full)}: it has forgotten the first tokens, on which such "
        "models lean.",
        f"4. Recall: a note {novel['note']['ago']:,} tokens back is known to "
        f"{' and '.join(knowing)}.",
        f"5. A chat: stock vLLM {ended} in turn {len(stock['turns']) + 1}; its last answer began "
        f"after {first:.1f} s, cascade's in turn {len(ours['turns'])} after {last:.1f} s: "
        f"{ours['turns'][-1]['answer']}",
    ]


def _against(arm: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """``1.8 % above``."""
    more = 100 * (arm["perplexity_head"] / other["perplexity_head"] - 1)
    return f"{abs(more):.1f} % {'above' if more >= 0 else 'below'}"
