# SPDX-License-Identifier: Apache-2.0
"""The arms of a benchmark: each in a process of its own, kept when finished, told when failed."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from benchmarks.running.children import Failure, outcomes
from benchmarks.running.engines import EngineSettings
from benchmarks.running.parts import Arm, Parts


@dataclass(frozen=True)
class Job:
    """What an arm's process gets: its items, and what their results depend on.

    Attributes:
        arm: where finished items are kept; None: nowhere.
        bar_line: line of the terminal, for the progress bar of one of several arms at a time.
    """

    label: str
    arm: Arm | None = field(default=None, kw_only=True)
    bar_line: int = field(default=0, kw_only=True)

    @property
    def keys(self) -> list[str]:
        """What stands for each item among the kept ones."""
        raise NotImplementedError

    def determines(self) -> dict[str, Any]:
        """All that a result depends on besides the items."""
        raise NotImplementedError

    def result(self, values: list[Any]) -> Any:
        """The arm's result, from the kept values of its items."""
        return values


@dataclass(frozen=True)
class EngineJob(Job):
    """A job for one engine."""

    engine: EngineSettings

    def determines(self) -> dict[str, Any]:
        return self.engine.determines()


ITEMS = Counter[str]()
"""Of all arms so far in this process: ``asked`` for, and ``taken up`` from what was kept."""
COMMITS = Counter[str]()
"""Items that were taken up, by the commit that made them."""

AnyJob = TypeVar("AnyJob", bound=Job)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """By label, in the jobs' order: results, and why the other arms have none."""

    done: dict[str, Result]
    failed: dict[str, str]


def run_all(
    work: Callable[[AnyJob], Result],
    jobs: Sequence[AnyJob],
    at_a_time: int = 1,
    kept_in: Parts | None = None,
) -> Outcome[Result]:
    """``work(job)`` for every job, whose items are not all kept already."""
    if kept_in is not None:
        jobs = [replace(job, arm=kept_in.arm(job.label, job.determines())) for job in jobs]
    found: dict[str, Result | Failure] = {}
    for job in jobs:
        kept = job.arm.read_with_commits() if job.arm is not None else {}
        here = [key for key in job.keys if key in kept]
        ITEMS.update({"asked": len(job.keys), "taken up": len(here)})
        COMMITS.update(kept[key][1] for key in here)
        if here and job.arm is not None:
            say = f"{job.label}: {len(here)} of {len(job.keys)} taken up from {job.arm.own.parent}"
            print(say, file=sys.stderr, flush=True)
        if here == job.keys:
            found[job.label] = job.result([kept[key][0] for key in here])
    missing = [job for job in jobs if job.label not in found]
    missing = [replace(job, bar_line=at % at_a_time) for at, job in enumerate(missing)]
    for place, outcome in outcomes(work, missing, at_a_time):
        found[missing[place].label] = outcome
    in_order = [(job.label, found[job.label]) for job in jobs]
    return Outcome(
        done={label: one for label, one in in_order if not isinstance(one, Failure)},
        failed={label: one.reason for label, one in in_order if isinstance(one, Failure)},
    )


def fill(job: Job, work: Callable[[list[int]], Iterable[dict[int, Any]]]) -> Any:
    """A job's result, in its process: from kept items, and from ``work`` for the others.

    Args:
        work: gets the places of missing items; yields ``{place: value}`` for those that are
            finished, which are then kept.
    """
    keys, kept = job.keys, job.arm.read() if job.arm is not None else {}
    missing = [place for place, key in enumerate(keys) if key not in kept]
    for finished in work(missing) if missing else ():
        items = {keys[place]: value for place, value in finished.items()}
        if job.arm is not None:
            job.arm.add(items)
        kept |= items
    return job.result([kept[key] for key in keys])
