# SPDX-License-Identifier: Apache-2.0
"""Every figure in the documents' prose is one that a result's JSON, or a formula, gives today."""

import re
from math import ceil

import pytest

from benchmarks.reporting import results
from tests.conftest import ROOT
from vllm_cascade.engine.sessions import MOST_WAITED, SLOWEST_READ
from vllm_cascade.sessions.index import REST_SECONDS

DOCUMENTS = (
    *("README.md", "benchmarks/README.md", "benchmarks/results/README.md", "docs/RESULTS.md"),
    *(f"docs/{page}.md" for page in ("POLICIES", "RECALL", "OPERATING", "MEMORY", "INTERNALS")),
    *(f"docs/{page}.md" for page in ("ALGORITHMS", "EXTENDING", "GPU", "SESSIONS", "MODELS")),
    "docs/SETTINGS.md",
)
GENERATED = re.compile(r"<!-- (result|demo).*?<!-- (end|/demo) -->|```.*?```|`[^`]*`", re.DOTALL)
FIGURE = re.compile(
    r"\d[\d.,]*[ -]?(?:%|(?:s|us|ms|x|seconds?|minutes?|hours?|times|tokens a second)\b|nats"
    r"|[KMG]i?B\b)|perplexity of \d|\d+ of \d+|found \d"
)
"""A number with a unit, or a count of what was found."""
ELSEWHERE = (
    "Intervals** are 95 %",  # stats.CONFIDENCE
    "guessing gives 10 %",
    "10 + 52 of 1024",  # layers of Gemma-3-27B
    "12 + 12 of 128",
    "the tables are best with 60 to 160 of 510 tokens",  # DGC's paper
    "at most 5 and 35 % of global bytes",  # tests/kernels/test_machine_code.py
    "fewer than 15 of 16 multiprocessors",  # kernels/triton/configs.py
    "an earlier lease, with slower kernels, gave 2,809 tokens a second",  # of a named commit
)
"""Figures that no result gives: settings, a paper's, and those that other tests hold."""


def row_of(name: str, arm: str, table: int = 1) -> dict[str, str]:
    """A row of a kept result's table, by column."""
    found = results.load(name)["tables"][table - 1]
    (row,) = [row for row in found["rows"] if row[0] == arm]
    return dict(zip(found["columns"], row, strict=True))


def keys_found(name: str, arm: str, columns: slice = slice(None)) -> int:
    """Pass keys that an arm has answered, over some columns."""
    samples = results.load(name)["settings"]["samples"]
    cells = list(row_of(name, arm).values())[1:][columns]
    return sum(round(samples * float(cell.split(" / ")[1].rstrip("%")) / 100) for cell in cells)


def less(name: str, column: str) -> float:
    """Percent by which a cascade's perplexity is lower than sink's."""
    cascade, sink = (float(row_of(name, arm)[column]) for arm in ("cascade", "sink"))
    return 100 - 100 * cascade / sink


def distances(name: str, columns: slice, digits: int) -> list[int]:
    """Rounded tokens between a key and the prompt's end, the nearest first."""
    settings = results.load(name)["settings"]
    (length,) = settings["lengths"]
    depths = settings["depths"][columns]
    return sorted(round(round(length * (1 - depth)), digits) for depth in depths)


def speed() -> list[str]:
    token, prompt = (row_of("token-time", "16,384", table)["faster"] for table in (1, 2))
    last = float(row_of("token-time", "65,536")["over 2,048 tokens"].rstrip("%"))
    (cost,) = [r[1] for r in results.load("token-time")["tables"][2]["rows"] if "(512)" in r[0]]
    ratio = [f"{float(one.rstrip('x')):.1f} times" for one in (prompt, token)]
    return [
        f"reads a prompt of 16,384 tokens {ratio[0]} as fast as stock vLLM and then decodes "
        f"{ratio[1]} as fast. A token after 65,536 takes as long as after 2,048, to within "
        f"{ceil(abs(last))}%. Where nothing is evicted, a token takes {float(cost[:-1]):.2f} times "
        "stock's time",
    ]


def quality() -> list[str]:
    near, far = distances("recall-passkey", slice(1, None), -1)
    old, *_, new = distances("recall-passkey-2048", slice(None), -2)
    found = [keys_found("recall-passkey-2048", arm) for arm in ("sink, recall 8", "full")]
    sink, cascade = (keys_found("recall-passkey", a, slice(1, None)) for a in ("sink", "cascade"))
    recalled, alone, whole = (
        row_of("ruler-held-out", arm)["mean (95 % interval)"].split()[0]
        for arm in ("sink, recall 8", "sink", "full")
    )
    return [
        "documents of 4,096 tokens, a quarter attended, SmolLM2-135M scores "
        f"{recalled} % with recall, {alone} % without, and {whole} % with full attention",
        f"have {less('perplexity-books-516', 'perplexity'):.1f} % less perplexity with 516 cached",
        f"numbers {near} to {far} tokens back, with 516 cached, sink found {sink} of 16 and "
        f"cascade {cascade} ",
        f"of 60 numbers {old} to {new:,} tokens back, with 516 attended, {found[0]} were found, "
        f"and {found[1]} by the whole cache",
    ]


def recall() -> list[str]:
    old, *_, new = distances("recall-passkey-2048", slice(None), -2)
    # At the first depth of 6,000 tokens the whole cache fails: the table says it compares nothing.
    fair = (
        "pass keys in prompts of 6,000 tokens, at the four depths where the whole cache finds most"
    )
    rows = [
        (
            f"pass keys {old} to {new:,} tokens back, 516 attended",
            *("recall-passkey-2048", 60, slice(None)),
        ),
        (fair, "recall-passkey-6000", 16, slice(1, None)),
    ]
    again = [
        float(row_of("study-recall-rewind", arm)["second reading"])
        for arm in ("sink, recall 8", "full", "sink")
    ]
    arms = (
        ("ruler-8k-eighth", "sink, recall 8"),
        ("ruler-8k", "full"),
        ("ruler-16k", "sink, recall 8"),
    )
    near, full, past = (row_of(*arm)["mean (95 % interval)"].split()[0] for arm in arms)
    held_out = (
        row_of("ruler-held-out", arm)["mean (95 % interval)"].split()[0]
        for arm in ("sink, recall 8", "full", "sink")
    )
    costs = [
        (num, row_of(name, num))
        for name, num in (("recall-cost", "131,072"), ("recall-cost-1m", "1,048,576"))
    ]
    return [
        *(f"| {num} | {row['a prompt token']} | {row['a token']} |" for num, row in costs),
        "| mean of RULER at 4,096 tokens, a quarter attended, held-out documents | "
        + " | ".join(f"{one} %" for one in held_out),
        f"| mean of RULER at 8,192 tokens, an eighth attended | {near} % | {full} % |",
        "| mean of RULER at 16,384 tokens, past the model's positions, a sixteenth attended | "
        f"{past} % | |",
        *(
            f"| {name} | {keys_found(result, 'sink, recall 8', columns)} of {total} | "
            f"{keys_found(result, 'full', columns)} | |"
            for name, result, total, columns in rows
        ),
        "| perplexity of a novel read again from 2,048 tokens back | "
        + " | ".join(f"{one:.1f}" for one in again),
    ]


def policies() -> list[str]:
    first, *_, last = results.load("chat")["data"]["turns"]
    times = [
        f"{turn[f'ttft_ms_{w}']:.0f} ms" for turn in (last, first) for w in ("with", "without")
    ]
    assert last["turn"] == 10
    return [
        f"the last prompt has {last['prompt_tokens']:,} tokens; its first token comes after "
        f"{times[0]} instead of {times[1]}",
        f"takes {times[2]} instead of {times[3]}",
    ]


def page(kv_heads: int, size: int, num: int = 2, scales: int = 0, sets: int = 1) -> int:
    """Bytes of 16 slots of a layer, as MEMORY.md says."""
    return ceil(16 * (kv_heads * (2 * size * num + scales) + sets * 12) / 64) * 64


def memory() -> list[str]:
    """Streams of 128,000 tokens, a budget of 4,096 and 4 sinks, pages of 16."""
    length, pages = 128_000, ceil(4100 / 16)
    kinds = {
        "192 = 65,728": page(8, 128),
        "1,536 = 67,072": page(8, 128, sets=8),
        "192 = 32,960": page(8, 128, num=1),
        "1,024 + 192 = 33,984": page(8, 128, num=1, scales=8),
    }
    said = [f"{sum_} | {32 * pages * size / 1e6:.0f} MB |" for sum_, size in kinds.items()]
    full = 32 * length * 8 * 2 * 128 * 2
    said += [f"{full / 1e9:.1f} GB", "(541 MB in the example)"]
    said.append(f"So 20 GB of cache hold one such stream with full attention, and "
                f"{20e9 // (32 * pages * page(8, 128)):.0f} with the cascade")  # fmt: skip
    # DeepSeek V3: 61 layers, rows of 576 numbers, pages of 128 tokens with 12 bytes each.
    rows = 128 * 576 * 2
    said += [f"| 1,000 | {rows:,} | {61 * 1000 * rows / 1e9:.1f} GB |"]
    for held in (rows, rows // 2, rows // 2 + 128 * 8):  # 8 bits, and two scales of a row
        said += [f"{held + 128 * 12:,} | {61 * 33 * (held + 128 * 12) / 1e6:.0f} MB |"]
    for layers, windows, width, heads, size in ((10, 52, 1024, 16, 128), (12, 12, 128, 8, 64)):
        row = heads * 2 * size * 2
        slots = ceil((width - 1) / pages)
        inside = windows * pages * ceil(slots * (row + 12) / 64) * 64
        bounded = layers * pages * page(heads, size) + inside
        whole = (layers * length + windows * (width + 16)) * row
        said.append(f"| {whole / 1e6:,.0f} MB | {bounded / 1e6:.0f} MB | {inside / 1e6:.0f} MB |")
    # Granite 4.0 H Small: 128 heads of 64 with states of 128 numbers, and 3 rows of 8,448.
    state = 2 * (128 * 64 * 128 + 3 * (8192 + 2 * 128))
    slots = 16 * ceil(state / page(8, 128))
    large = slots // 16 * page(8, 128)
    whole = 4 * length * 8 * 2 * 128 * 2 + 36 * state
    bounded = 4 * (ceil(4100 / slots) + 9) * large
    said.append(
        f"| {state / 1e6:.2f} MB | {slots} | {whole / 1e6:,.0f} MB | {bounded / 1e6:.0f} MB | "
        f"{36 * large / 1e6:.0f} MB |"
    )
    return said


CACHE = 9663676416
"""Bytes of the H200's engines, as their command says."""


def engines_on_a_card() -> dict[tuple[str, str, str], list[str]]:
    """Seconds of the first token and output tokens a second, by policy, prompt and requests."""
    result = results.load("gpu-speed-h200")
    assert f"kv_cache_memory_bytes {CACHE}" in result["command"]
    rows = result["tables"][-1]["rows"]
    return {(policy, prompt, num): [first, rate] for _, policy, prompt, first, num, rate in rows}


def room() -> int:
    """Requests of 32,000 tokens of Llama 8B that the cache of the H200's engines holds."""
    return CACHE // (32_000 * 32 * 8 * 2 * 128 * 2)


def card() -> list[str]:
    """What the README says of an H200."""
    found = {
        key: [float(x.replace(",", "") or 0) for x in both]
        for key, both in engines_on_a_card().items()
    }
    long, many = (("130,000", ""), ("32,000", "16"))
    faster = found["stock", *long][0] / found["cascade", *long][0]
    assert abs(found["cascade", *many][0] / found["stock", *many][0] - 1) < 0.05, "as fast"
    more = found["cascade", *many][1] / found["stock", *many][1]
    assert 9 < more < 12, "about ten times: the rate is rough"
    return [
        f"reads 130,000 tokens {faster:.1f} times as fast as stock vLLM",
        f"In the same {CACHE / 2**30:.0f} GiB of cache 16 requests of 32,000 tokens decode about "
        f"ten times as many tokens a second, because stock has room for {room()} at a time",
    ]


def leases() -> list[str]:
    """What 16 requests of 32,000 tokens took on the H200: their prompts, and 256 further tokens."""
    first, rate = engines_on_a_card()["cascade", "32,000", "16"]
    decoding = 16 * 256 / float(rate.replace(",", ""))
    return [f"it is {decoding:.1f} s of {16 * float(first) + decoding:.0f} for "]


def waits() -> list[str]:
    """What a request waits for a session's file, and how long a file rests after an error."""
    assert SLOWEST_READ == 10_000_000
    return [
        f"waits for its file at most {MOST_WAITED} seconds, and one more for each ten megabytes",
        f"is read again after {REST_SECONDS} seconds",
    ]


def devices() -> list[str]:
    """Llama 8B's recall rings, what 8 parts leave of Llama 70B's 8 query heads, and cards."""
    keys, rows = (4096 * 32 * 8 * one / 2**30 for one in (128 + 4 + 1 / 16, 2 * 128 * 2))
    left = 8 * 8 * (128 + 2) * 4
    (prompts,) = (one["rows"] for one in results.load("gpu-check-h200")["tables"])
    kernels, decode, _ = (one["rows"] for one in results.load("gpu-decode-h200")["tables"])
    most, some, single = (
        next(row for row in decode if row[:3] == ["32/8", "2,048", number])
        for number in ("256", "64", "1")
    )
    ((passed, checks, _),) = kernels
    assert passed == "passed"
    compared, first = (one["rows"] for one in results.load("gpu-engine-h200")["tables"])
    again = results.load("gpu-speed-h200")["tables"][0]["rows"]
    num_latent = sum("deepseek" in row[0] for row in again)
    compared = compared + again
    in_fp32 = [float(row[3]) for row in compared if "8 bits" not in row[1] and "fp8" not in row[0]]
    assert {row[2] for row in compared} == {"yes"} and max(in_fp32) < 1e-4
    comparisons, seconds = (sorted(int(row[at]) for row in first) for at in (1, 3))
    strides = [row for row in prompts if row[0] == "512"]
    full = {row[1]: row[3] for row in strides}
    card = engines_on_a_card()
    recalling = [card[f"cascade {how}", "32,000", "4"] for how in ("in units", "with recall")]
    assert len({row[2] for row in strides}) == 1
    return [
        *(
            f"| {card['cascade', *key][0]} s | {card['stock', *key][0]} s |"
            for key in (("32,000", "16"), ("130,000", ""))
        ),
        f"in {CACHE / 2**30:.0f} GiB of cache | {card['cascade', '32,000', '16'][1]} | "
        f"{card['stock', '32,000', '16'][1]}; it has room for {room()} |",
        *(
            f"{card['cascade', '1,024', num][1]} | {card['stock', '1,024', num][1]} |"
            for num in ("16", "1")
        ),
        f"comes after {recalling[1][0]} s instead of {recalling[0][0]} s, and 4 requests decode "
        f"{recalling[1][1]} tokens a second instead of {recalling[0][1]}",
        f"{len(again) - num_latent} policies and DeepSeek V2 ran again",
        f"{checks} of {checks} checks",
        f"{comparisons[0]} to {comparisons[-1]} comparisons; {seconds[0]} to {seconds[-1]} s",
        f"in {strides[0][2]} us, however long the prompt is; full attention takes {full['4,096']} "
        f"us at 4,096 tokens, {full['32,768']} at 32,768 and {full['131,072']} at 131,072",
        f"{most[4]} of a copy's bandwidth with 256 requests of 2,048 tokens, {most[5]} the time",
        f"{some[4]} with 64. With 1 request {single[5]}",
        f"that is {keys:.2f} GiB and {rows:.1f} GiB a request",
        f"{ceil(left / 2**10)} KiB, so {left * 8192 / 2**30:.2f} GiB for 8,192",
    ]


HELD = {
    "README.md": lambda: speed() + quality() + card(),
    "docs/POLICIES.md": policies,
    "docs/RECALL.md": recall,
    "docs/MEMORY.md": memory,
    "docs/GPU.md": devices,
    "docs/SESSIONS.md": waits,
    "benchmarks/results/README.md": leases,
}
"""By document: its sentences with figures, as results and formulas give them."""


def prose(name: str) -> str:
    """A document without code and generated blocks, on one line."""
    return " ".join(GENERATED.sub("", (ROOT / name).read_text(encoding="utf-8")).split())


@pytest.mark.parametrize("name", HELD)
def test_the_prose_says_what_was_measured(name: str) -> None:
    text = prose(name)
    for sentence in HELD[name]():
        assert sentence in text, sentence


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_other_figure_is_in_the_prose(name: str) -> None:
    text = prose(name)
    for sentence in (*HELD.get(name, list)(), *ELSEWHERE):
        text = text.replace(sentence, "")
    assert FIGURE.findall(text) == []
