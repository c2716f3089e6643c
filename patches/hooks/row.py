# SPDX-License-Identifier: Apache-2.0
"""A row of the table, and a short way to write one."""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = {
    "replaced": "something of ours stands in its place, and mostly calls it",
    "overridden": "a subclass of ours has its own",
    "called": "we call it",
    "attribute": "we read it or set it",
    "class": "we subclass it, or are given one",
}

Expected = str | Mapping[str, str | None]

CHECKED = {"vllm": "0.32", "torch": "2.13", "triton": "3.7"}
"""The versions that the table began with; a later row says its own."""


@dataclass(frozen=True)
class Hook:
    """One name of vLLM (torch, Triton) that we use and that nobody has promised to keep.

    Attributes:
        target: its dotted name, from the package on.
        kind: one of ``KINDS``.
        used: files that use it, from the repository's root; each mentions the name's last part.
        why: what for.
        since: the first version of the package that it was checked against.
        expected: what the package's own source must say about it: a function's parameters, as
            ``(self, request, num_tokens=, *, key, **kwargs)``, where ``=`` stands for any default
            and ``...`` for any other parameters; an attribute's annotation or a property's type,
            empty where the source has none; empty for a class. Where versions differ, a mapping
            from the version in which each began; None: it is gone, and not used.
    """

    target: str
    kind: str
    used: tuple[str, ...]
    why: str
    since: str
    expected: Expected

    @property
    def package(self) -> str:
        return self.target.split(".")[0]

    @property
    def versions(self) -> str:
        """``0.32``, or ``0.32, other in 0.33``, or ``0.32, gone in 0.33``."""
        if isinstance(self.expected, str):
            return self.since
        first, *later = sorted(self.expected, key=number)
        words = [f"{'gone' if self.expected[v] is None else 'other'} in {v}" for v in later]
        return ", ".join([first, *words])

    def expected_in(self, version: str) -> str | None:
        """What is expected of a version, by the newest entry up to it; None: nothing."""
        entries = {self.since: self.expected} if isinstance(self.expected, str) else self.expected
        known = [begin for begin in entries if number(begin) <= number(version)]
        return entries[max(known, key=number)] if known else None


def number(version: str) -> tuple[int, int]:
    """``0.32.1+cpu`` is (0, 32): what the table is about does not change in patch releases."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Use:
    """A row without its name."""

    kind: str
    why: str
    expected: Expected
    used: tuple[str, ...]


def replaced(why: str, expected: Expected, *used: str) -> Use:
    return Use("replaced", why, expected, used)


def overridden(why: str, expected: Expected, *used: str) -> Use:
    return Use("overridden", why, expected, used)


def called(why: str, expected: Expected, *used: str) -> Use:
    return Use("called", why, expected, used)


def read(why: str, expected: Expected, *used: str) -> Use:
    return Use("attribute", why, expected, used)


def given(why: str, *used: str) -> Use:
    return Use("class", why, "", used)


def rows(owner: str, since: str | None = None, /, **uses: Use) -> tuple[Hook, ...]:
    """The rows of one module or class.

    Args:
        owner: its dotted name.
        since: a version of its package; None: the one that the table began with.
        uses: by the name's last part.
    """
    since = since or CHECKED[owner.split(".")[0]]
    return tuple(
        Hook(f"{owner}.{name}", use.kind, use.used, use.why, since, use.expected)
        for name, use in uses.items()
    )
