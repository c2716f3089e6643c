# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we override, replace, call or read without its makers' promise.

vLLM promises little: entry points, class paths in its configuration, ``register_backend``. All else
is here, with the reason, the files that use it and what is expected of it. ``tests/patches`` holds
the installed vLLM against the table, so that a new release fails there first and by name, and our
code against it, so that no use is left out. How a row is written is in ``row.py``.

    python -m vllm_cascade.patches.hooks

writes the table for people, ``patches/hooks.md``. Nothing here imports vLLM, nor vllm_cascade: the
table can be read beside a vLLM that the plugin refuses.
"""

from collections.abc import Iterable

from . import apart, front, interpreter, running, scheduling
from .row import KINDS, Hook

USED = {
    "Arguments and versions": front.ARGUMENTS,
    "Configuration": front.CONFIGURATION,
    "Requests and statistics": front.REQUESTS + front.STATISTICS,
    "Scheduler": scheduling.STEPS,
    "Pages": scheduling.PAGES + scheduling.SPECS,
    "Workers and model runners": running.WORKERS,
    "Attention": running.ATTENTION,
    "Rotary positions": running.ROTATIONS,
    "Kernels": running.KERNELS,
}
"""What the package, its kernels and its patches use, by heading."""

APART = {
    "Engines": apart.ENGINES,
    "Parts of one": apart.PARTS,
    "Stock vLLM": apart.STOCK,
    "Triton's interpreter and torch": interpreter.INTERPRETER,
}
"""What only tests and benchmarks use."""

HOOKS: tuple[Hook, ...] = tuple(hook for part in USED.values() for hook in part)
HOOKS_APART: tuple[Hook, ...] = tuple(hook for part in APART.values() for hook in part)


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# What we use of vLLM without its promise",
        "",
        "Written by `python -m vllm_cascade.patches.hooks` from `patches/hooks/`, which also says",
        "what is expected of each name; `tests/patches/test_hooks.py` checks it.",
        "",
        *(f"- **{kind}**: {meaning}" for kind, meaning in KINDS.items()),
    ]
    for title, sections in (("", USED), ("Tests and benchmarks: ", APART)):
        for heading, part in sections.items():
            lines += ["", f"## {title}{heading}", ""]
            lines += [
                "| Name | How | Used in | Why | Versions |",
                "| --- | --- | --- | --- | --- |",
            ]
            lines += [_line(alike) for alike in _alike(part)]
    return "\n".join(lines) + "\n"


def _alike(part: Iterable[Hook]) -> list[list[Hook]]:
    """Names of one owner that are used in the same places for the same reason share a line."""
    groups: dict[tuple[object, ...], list[Hook]] = {}
    for hook in part:
        key = hook.target.rpartition(".")[0], hook.kind, hook.used, hook.why, hook.versions
        groups.setdefault(key, []).append(hook)
    return list(groups.values())


def _line(alike: list[Hook]) -> str:
    first, *others = alike
    names = [first.target, *(f".{hook.target.rpartition('.')[2]}" for hook in others)]
    columns = (
        ", ".join(f"`{name}`" for name in names),
        first.kind,
        ", ".join(f"`{file}`" for file in first.used),
        first.why,
        first.versions,
    )
    return f"| {' | '.join(columns)} |"
