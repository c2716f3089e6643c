# SPDX-License-Identifier: Apache-2.0
"""The papers' tables as data: their rows, the values they print, and our settings for each row.

A row's settings are a policy without its budget; the budget is that of the column. ``None`` is
stock attention recomputed over a sliding window of that length, which the papers call vanilla or
full. A row that nobody can run here (another method) has no settings at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RECOMPUTED = "recomputed window"
NOT_OURS = "not part of this project"
Settings = Mapping[str, Any] | Literal["recomputed window", "not part of this project"]


@dataclass(frozen=True)
class Row:
    """One row of a paper's table.

    Attributes:
        paper: the values it prints, a column each; ``-`` where it has none.
        policy: our settings.
    """

    name: str
    paper: tuple[str, ...]
    policy: Settings


@dataclass(frozen=True)
class PaperTable:
    """A paper's table.

    Attributes:
        measure: how a cell of ours is made: by streaming perplexity, the harness, ROUGE, the speed
            of the caching operation, or a timed stream.
        columns: the paper's columns.
        budgets: the paper's cache sizes, to be asked for with ``--budgets``.
        data: the paper's text, for ``--data``.
    """

    key: str
    title: str
    measure: Literal["perplexity", "harness", "rouge", "caching", "timing"]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    budgets: tuple[int, ...] = (2048,)
    data: str = "pg19"
    note: str = ""
    shared: Mapping[str, Any] = field(default_factory=dict)


PAPER_CASCADE = {"name": "cascade", "eager_fill": False, "tie": "resident"}
SINK = {"name": "sink"}


def cascade(**changed: Any) -> dict[str, Any]:
    """The cascade paper's setting, with some keys changed."""
    return {**PAPER_CASCADE, **changed}


LLAMA = ("Llama2-7B, 2,048",)
MODELS = ("Qwen 7B", "Qwen 14B", "Llama2 7B", "Llama2 13B")
CASCADE = (
    PaperTable(
        "cascade-1",
        "Cascade, Table 1: PG19 perplexity",
        "perplexity",
        tuple(f"{model}, {size}" for size in ("2,048", "4,096") for model in MODELS),
        (
            Row("vanilla", ("9.11", "8.50", "6.67", "6.18", *"----"), RECOMPUTED),
            Row(
                "HyperAttention (all layers)",
                ("16.27", "10.63", "980.08", "349.35", *"----"),
                NOT_OURS,
            ),
            Row(
                "HyperAttention (3/4 of the layers)",
                ("19.58", "10.50", "223.35", "22.26", *"----"),
                NOT_OURS,
            ),
            Row("sink", ("9.70", "9.07", "7.05", "6.32", "9.44", "8.82", "6.90", "6.19"), SINK),
            Row(
                "cascade",
                ("9.52", "8.87", "6.97", "6.29", "9.33", "8.69", "6.84", "6.18"),
                cascade(),
            ),
        ),
        budgets=(2048, 4096),
        note="The paper's vanilla row has one set of values, over another set of tokens.",
    ),
    PaperTable(
        "cascade-2",
        "Cascade, Table 2: MMLU STEM, 20-shot, |C| = 1,024, N = 2",
        "harness",
        ("Llama2 7B", "Qwen 7B"),
        (
            Row("sink", ("36.02", "52.13"), SINK),
            Row("cascade", ("36.20", "52.49"), cascade(num_subcaches=2)),
        ),
        budgets=(1024,),
        data="mmlu-stem",
    ),
    PaperTable(
        "cascade-3",
        "Cascade, Table 3: token selection, PG19 perplexity",
        "perplexity",
        ("Llama2 7B, 2,048", "Qwen 7B, 2,048", "Llama2 7B, 4,096", "Qwen 7B, 4,096"),
        (
            Row("sink", ("7.05", "9.70", "6.90", "9.44"), SINK),
            Row(
                "cascade without selection",
                ("7.06", "9.71", "6.91", "9.45"),
                {"name": "cascade_unselected", "eager_fill": False},
            ),
            Row("cascade", ("6.97", "9.52", "6.84", "9.33"), cascade()),
        ),
        budgets=(2048, 4096),
        note="Without selection: a contest's resident always stays, the natural reading.",
    ),
    PaperTable(
        "cascade-4",
        "Cascade, Table 4: the caching operation, ms a token",
        "caching",
        ("batch 8, 32 heads of 128, |C| = 1,024, fp32, on a GPU",),
        (
            Row("concatenation", ("1.33",), RECOMPUTED),
            Row("1 sub-cache", ("0.54",), cascade(num_subcaches=1)),
            Row("4 sub-caches", ("0.64",), cascade()),
        ),
        budgets=(1024,),
        data="",
    ),
    PaperTable(
        "cascade-5",
        "Cascade, Table 5: acceptance, head reduction and number of sub-caches, PG19 perplexity",
        "perplexity",
        LLAMA,
        (
            Row("f = 2^i", ("6.97",), cascade()),
            Row("f = 3^i", ("7.03",), cascade(cascade_base=3)),
            Row("f = 4^i", ("7.10",), cascade(cascade_base=4)),
            Row("mean", ("6.97",), cascade()),
            Row("median", ("7.01",), cascade(head_reduction="median")),
            Row("max", ("6.95",), cascade(head_reduction="max")),
            Row("N = 1", ("7.05",), cascade(num_subcaches=1)),
            Row("N = 2", ("6.99",), cascade(num_subcaches=2)),
            Row("N = 4", ("6.97",), cascade()),
            Row("N = 8", ("7.18",), cascade(num_subcaches=8)),
        ),
        note="A budget that does not divide is lowered to the next one that does.",
    ),
    PaperTable(
        "cascade-7",
        "Cascade, Table 7: decay of the attention average, PG19 perplexity",
        "perplexity",
        LLAMA,
        tuple(
            Row(f"γ = exp(-ln {base} / W)", (value,), cascade(ema_gamma=base))
            for base, value in ((10, "6.975"), (100, "6.971"), (1000, "6.970"))
        ),
    ),
    PaperTable(
        "cascade-9",
        "Cascade, Table 9: one kept set for all heads, or one a head, PG19 perplexity",
        "perplexity",
        LLAMA,
        (
            Row("homogeneous heads", ("6.97",), cascade()),
            Row("independent heads", ("10.95",), cascade(head_policy="per_kv_head")),
        ),
        note="The paper's independent heads shared positions that were right for none of them; "
        "here every head has its own.",
    ),
)

BUZZ_BUDGETS = ("60 %", "50 %", "40 %", "30 %", "20 %", "10 %")
SINK_4 = {"name": "sink", "num_sinks": 4}
LOG_N = {"name": "beehive", "log_n": True}
WINDOW = {"name": "window"}
H2O = {"name": "h2o"}
BEEHIVE = {"name": "beehive"}
BUZZ = (
    PaperTable(
        "buzz-2",
        "BUZZ, Table 2: geometric mean of ROUGE-1, 2 and L (XSUM), by cache size",
        "rouge",
        BUZZ_BUDGETS,
        (
            Row("BUZZ", ("11.9", "12.1", "12.3", "11.9", "11.3", "10.9"), BEEHIVE),
            Row("BUZZ, log n", ("12.3", "12.0", "12.0", "11.6", "11.6", "10.4"), LOG_N),
            Row("H2O", ("11.5", "11.4", "11.6", "11.4", "11.8", "10.2"), H2O),
            Row("StreamingLLM", ("11.9", "11.1", "11.2", "10.8", "10.0", "3.8"), SINK_4),
            Row("local", ("7.6", "4.4", "2.9", "1.8", "1.4", "0.1"), WINDOW),
        ),
        budgets=(60, 50, 40, 30, 20, 10),
        data="xsum",
        note="Budgets are percent of the median prompt.",
    ),
    PaperTable(
        "buzz-3",
        "BUZZ, Table 3: WikiText-2 perplexity, by cache size",
        "perplexity",
        ("50", "100"),
        (
            Row("full", ("7.382", "7.382"), RECOMPUTED),
            Row("BUZZ", ("9.394", "8.037"), BEEHIVE),
            Row("BUZZ, log n", ("12.322", "10.318"), LOG_N),
            Row("H2O", ("9.987", "8.881"), H2O),
            Row("StreamingLLM", ("11.722", "9.330"), SINK_4),
            Row("local", ("194.803", "35.979"), WINDOW),
        ),
        budgets=(50, 100),
        data="wikitext2",
        note="The paper does not define cache size; here: the most tokens cached, sinks apart. "
        "Its full row attends to everything, ours to a recomputed window of the size.",
    ),
    PaperTable(
        "buzz-a",
        "BUZZ, Table A: ROUGE-1 by T / w (s = 5, size about 200)",
        "rouge",
        ("ROUGE-1",),
        tuple(
            Row(f"T / w = {ratio}", (value,), {"name": "beehive", "stride": 5, "ratio": ratio})
            for ratio, value in (
                (1.5, "25.38"),
                (2.5, "25.82"),
                (3.5, "26.83"),
                (4.5, "26.92"),
                (5.5, "26.06"),
                (6.5, "25.64"),
            )
        ),
        budgets=(200,),
        data="xsum",
        note="The theorem predicts the best ratio at 4.33. Budget: tokens.",
    ),
    PaperTable(
        "buzz-8",
        "BUZZ, Figure 8: what each part is worth, geometric mean of ROUGE-1, 2 and L",
        "rouge",
        ("against BUZZ",),
        (
            Row("BUZZ", ("",), BEEHIVE),
            Row("no sampling (StreamingLLM)", ("-17 %",), SINK_4),
            Row("top-k in place of segments (H2O)", ("-4 %",), H2O),
            Row("strides exchanged", ("worse",), {"name": "beehive_swapped"}),
            Row("intervals in place of maxima", ("worse",), {"name": "beehive_intervals"}),
        ),
        budgets=(40,),
        data="xsum",
        note="Budgets are percent of the median prompt.",
    ),
)


def dgc_row(global_size: int, *paper: str) -> Row:
    """DGC's split of 510 tokens into a global and a recent part, behind one sink."""
    if global_size == 0:
        return Row("0 / 510", paper, {"name": "sink", "num_sinks": 1})
    settings = {
        "name": "dgc",
        "num_sinks": 1,
        "share": global_size / 510,
        "importance": "tfidf_sklearn",
    }
    return Row(f"{global_size} / {510 - global_size}", paper, settings)


DGC = tuple(
    PaperTable(
        f"dgc-{number}",
        f"DGC, Table {number}: perplexity on {name} by global / recent tokens",
        "perplexity",
        columns,
        tuple(dgc_row(size, *values) for size, *values in rows),
        budgets=(510,),
        data=data,
        note="The paper scores tokens with statistics of the whole text, later parts included; "
        "ours sees the past only. Other budgets are split in the paper's proportions.",
    )
    for number, name, columns, data, rows in (
        (
            1,
            "WikiText",
            ("1,000 samples", "all"),
            "wikitext2",
            (
                (0, "8.44", "7.93"),
                (60, "8.37", "7.89"),
                (110, "8.48", "7.87"),
                (160, "8.61", "8.03"),
                (210, "8.78", "8.05"),
                (255, "8.96", "8.24"),
            ),
        ),
        (
            2,
            "BookCorpus",
            ("1,000 samples", "5,000 samples"),
            "bookcorpus",
            (
                (0, "20.13", "19.50"),
                (60, "19.82", "19.28"),
                (110, "19.61", "19.31"),
                (160, "19.51", "19.32"),
                (210, "19.62", "19.32"),
                (255, "19.97", "19.54"),
            ),
        ),
    )
)

LAZY_SETTINGS = {"name": "lazy", "overflow": 32, "slack": 16, "max_drop": 32}
LAZY_COLUMNS = ("TPOT ms", "perplexity")
LAZY_ROWS = (
    ("StreamingLLM, every token", SINK),
    ("lazy, the paper's example", LAZY_SETTINGS),
    ("lazy, our defaults", {"name": "lazy"}),
)
LAZY = (
    *(
        PaperTable(
            f"lazy-{number}",
            f"Lazy pruning, Table {number}: {text}",
            "timing",
            LAZY_COLUMNS,
            (
                Row("sliding window, recomputed", values, RECOMPUTED),
                *(Row(name, ("-", "-"), policy) for name, policy in LAZY_ROWS),
            ),
            data=data,
            note="The paper left all rows but its baseline's empty.",
        )
        for number, text, data, values in (
            (1, "PG19", "pg19", ("100.53", "19.761")),
            (2, "WikiText-103", "wikitext103", ("98.86", "9.359")),
        )
    ),
    PaperTable(
        "lazy-3",
        "Lazy pruning, Table 3: slack and bounded drops",
        "timing",
        LAZY_COLUMNS,
        (
            Row("full", ("-", "-"), LAZY_SETTINGS),
            Row("without slack", ("-", "-"), {**LAZY_SETTINGS, "slack": 0}),
            Row("without max drop", ("-", "-"), {**LAZY_SETTINGS, "max_drop": 0}),
            Row("full, R 32 σ 24 δ 8", ("-", "-"), {"name": "lazy"}),
            Row("without slack, R 32 δ 8", ("-", "-"), {"name": "lazy", "slack": 0}),
            Row("without max drop, R 32 σ 24", ("-", "-"), {"name": "lazy", "max_drop": 0}),
        ),
        note="The paper left the table empty. With its example (R 32, σ 16, δ 32) the first three "
        "rows have the same schedule, so any difference between them is noise.",
    ),
)

TABLES = {table.key: table for table in (*CASCADE, *BUZZ, *DGC, *LAZY)}
