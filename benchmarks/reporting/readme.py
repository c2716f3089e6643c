# SPDX-License-Identifier: Apache-2.0
"""The README's picture and table, from the demo's JSON.

``python -m benchmarks.reporting.readme`` draws ``docs/demo.png`` and writes what stands between
``<!-- demo -->`` and ``<!-- /demo -->``, both from ``benchmarks/results/demo.json``. A test
compares all three.
"""

import re
from typing import Any

from benchmarks.reporting import demo_pictures, results
from benchmarks.reporting.demo_report import CASCADE, RECALL, STOCK, keeps, knows, memory
from benchmarks.reporting.tables import number
from benchmarks.running.environment import ROOT

README = ROOT / "README.md"
PICTURE = ROOT / "docs/demo.png"
_MARKERS = re.compile(r"(<!-- demo -->\n)(.*?)(<!-- /demo -->)", re.DOTALL)


def block(result: dict[str, Any]) -> str:
    """Markdown between the markers: the picture, the table, and how they were made."""
    novel, chat = result["data"]["novel"], result["data"]["chat"]
    lines = [
        f"![perplexity while a novel goes past the model's positions]({PICTURE.relative_to(ROOT)})",
        "",
        f"| | keeps | tokens read | perplexity to {novel['head']:,} | after that "
        "| finds the note | KV cache | ms per token read / written |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(row(label, arm, novel) for label, arm in novel["arms"].items()),
        "",
        " ".join(filter(None, [sentence(result, novel, chat), result.get("note")])),
    ]
    return "\n".join(lines) + "\n"


def row(label: str, arm: dict[str, Any], novel: dict[str, Any]) -> str:
    """One arm."""
    policy, units = ("sink", novel["recall"]["units"]) if label == RECALL else (label, 0)
    flags = f"{policy} --kv-recall {units}"
    name = label if label == STOCK else f"`--kv-policy {flags}`"
    tokens = f"{arm['tokens']:,}" + (", then stops" if arm["refusal"] else "")
    grows = " and growing" if label == STOCK else ""
    times = f"{arm['read_ms']:.1f} / {arm['write_ms']:.0f}"
    cells = [name, keeps(label, novel), tokens, number(arm["perplexity_head"], 1)]
    cells += [number(arm["perplexity_beyond"], 1), knows(arm), memory(arm) + grows, times]
    return f"| {' | '.join(cells)} |"


def sentence(result: dict[str, Any], novel: dict[str, Any], chat: dict[str, Any]) -> str:
    """What was run on what, and what came of the chat."""
    where, ours = result["environment"], chat["arms"][CASCADE]["turns"]
    refused = chat["arms"][STOCK]["refused"]
    at = chat["arms"][STOCK]["turns"][-1]["context"]
    stops = f"stock vLLM answers {refused['status']} after {at:,} tokens and " if refused else ""
    return (
        f"`make demo`: {novel['model']} reads *{title(novel['book'])}*, in "
        f"{result['settings']['dtype']} on {where['cores']} cores of {where['cpu']}, "
        f"{novel['engines']} engines at a time. Finally it is asked about a note "
        f"{novel['note']['ago']:,} tokens back. Then it chats: {stops}"
        f"`--kv-policy cascade` reaches {ours[-1]['context']:,} tokens in {len(ours)} turns, with "
        f"{ours[-1]['pages']} pages since turn {constant_since(ours)} "
        "([all numbers](docs/RESULTS.md#the-demo))."
    )


def title(book: str) -> str:
    return book.rsplit(".", 1)[0].replace("_", " ").replace("-", " ").title()


def constant_since(turns: list[dict[str, Any]]) -> int:
    """The first turn, from 1, after which the number of pages no longer changes."""
    pages = [turn["pages"] for turn in turns]
    since = len(pages)
    while since > 1 and pages[since - 2] == pages[-1]:
        since -= 1
    return since


def fill(text: str, result: dict[str, Any]) -> str:
    """The README with its block made from a result.

    Raises:
        ValueError: the markers are not there.
    """
    new, found = _MARKERS.subn(lambda match: match[1] + block(result) + match[3], text)
    if found != 1:
        raise ValueError(f"{README} needs <!-- demo --> and <!-- /demo --> once; found {found}")
    return new


def main() -> None:
    """Bring README and picture into step with the JSON."""
    result = results.load("demo")
    if result is None:
        raise SystemExit("benchmarks/results/demo.json is missing: run the demo with --out")
    demo_pictures.draw(result["data"]["novel"], PICTURE)
    README.write_text(fill(README.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(f"Wrote {README.name} and {PICTURE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
