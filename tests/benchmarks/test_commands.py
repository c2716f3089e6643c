# SPDX-License-Identifier: Apache-2.0
"""Every command that the documents and ``make bench`` name is one that its script takes."""

import importlib
import re
import shlex

import pytest

from benchmarks import quick
from benchmarks.running.environment import ROOT

DOCUMENTS = (
    *("README.md", "benchmarks/README.md", "benchmarks/inputs/lm_eval.md"),
    *("docs/RESULTS.md", "docs/POLICIES.md", "docs/GPU.md", "docs/OPERATING.md"),
)


RESULTS = "benchmarks/results/README.md"  # commands as they were run, some by older options


def documented(documents: tuple[str, ...] = DOCUMENTS) -> list[str]:
    """Full command lines in code spans and blocks; a backslash goes on with the next line."""
    found = []
    for name in documents:
        text = (ROOT / name).read_text(encoding="utf-8").replace("\\|", "|")
        text = re.sub(r"\\+\n\s*", " ", text)
        found += re.findall(r"python -m benchmarks\.\w+(?:'[^'\n]*'|[^`\n\"'])*", text)
    return list(dict.fromkeys(line.strip() for line in found))


def parse(module: str, words: list[str]) -> None:
    parse_args = getattr(importlib.import_module(module), "parse_args", None)
    if words:
        assert parse_args is not None, f"{module} has no parse_args, so nothing checks {words}"
        parse_args(words)


@pytest.mark.parametrize("line", documented())
def test_documented_commands_parse(line: str) -> None:
    _, _, module, *words = shlex.split(line, comments=True)
    parse(module, [] if {"NAME", "QUESTION", "TABLE", "TEXT..."} & set(words) else words)


@pytest.mark.parametrize("name", quick.PLAN)
def test_make_bench_commands_parse(name: str) -> None:
    _, _, module, *words = quick.command(name)
    parse(module, words)


def test_what_nothing_parses_fails() -> None:
    """Options of a module without a parser, and options that no module has."""
    with pytest.raises(AssertionError, match="serving has no parse_args"):
        parse("benchmarks.running.serving", ["--port", "1"])
    for name in ("gpu_check", "gpu_engine", "models", "quick", "reporting.gpu"):
        with pytest.raises(SystemExit):
            parse(f"benchmarks.{name}", ["--no-such-option"])


def test_documents_name_every_benchmark() -> None:
    named = {line.split()[2] for line in documented((*DOCUMENTS, RESULTS))}
    needed = "throughput token_time perplexity recall papers harness peers demo cpu_attention "
    needed += "sessions speculation"
    assert {f"benchmarks.{module}" for module in needed.split()} <= named
    assert {f"benchmarks.{options[0]}" for options in quick.PLAN.values()} <= named
