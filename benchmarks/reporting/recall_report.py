# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``benchmarks.recall`` say, a column a cell: a length and a depth.

Full attention is the judge of a cell: where it cannot do what is asked, nobody can be compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.inputs.pass_keys import DIGITS, Hidden, digits_right, is_exact
from benchmarks.reporting import stats
from benchmarks.reporting.tables import Table, failure_rows

Cell = tuple[int, float]

FULL = "full"
ABLE = 0.5
"""Share of a pass key's digits that full attention must find in a cell, on average."""
WORTH = 0.05
"""Share of a value's loss that must be gained before a model counts as able to recall it."""
UNABLE, UNJUDGED = "†", "‡"


def columns(cells: Sequence[Cell], able: Mapping[Cell, bool | None]) -> tuple[str, ...]:
    """The table's heads; a cell that full attention cannot do, or has not done, has a mark."""
    marks = {True: "", False: f" {UNABLE}", None: f" {UNJUDGED}"}
    return (
        "policy",
        *(f"{cell[0]:,} tokens, depth {cell[1]:g}{marks[able[cell]]}" for cell in cells),
    )


def verdict(able: Mapping[Cell, bool | None], needs: str) -> str:
    """What the marks mean, where there are any."""
    judged = [one for one in able.values() if one is not None]
    said = []
    if judged and not any(judged):
        said.append("This model cannot do the task: the table says nothing about the policies.")
    if False in able.values():
        said.append(f"{UNABLE}: full attention itself {needs}, so the cell compares nothing.")
    if None in able.values():
        said.append(f"{UNJUDGED}: not judged, full attention has no result there.")
    return " ".join(said) or "Full attention can do every cell, so the arms can be compared."


# --- pass keys ----------------------------------------------------------------------------------


def shares(
    answers: Mapping[str, Sequence[str]], prompts: Mapping[str, Sequence[Hidden]]
) -> dict[str, dict[Cell, tuple[float, float]]]:
    """By arm and cell: share of digits that are right, and of answers that are."""
    found: dict[str, dict[Cell, tuple[float, float]]] = {}
    for arm, given in answers.items():
        marks: dict[Cell, list[tuple[float, float]]] = {}
        for answer, asked in zip(given, prompts[arm], strict=True):
            mark = digits_right(answer, asked.key), float(is_exact(answer, asked.key))
            marks.setdefault((asked.length, asked.depth), []).append(mark)
        found[arm] = {
            cell: (float(np.mean([d for d, _ in some])), float(np.mean([e for _, e in some])))
            for cell, some in marks.items()
        }
    return found


def pass_keys(
    found: Mapping[str, Mapping[Cell, tuple[float, float]]],
    cells: Sequence[Cell],
    samples: int,
    failed: Mapping[str, str],
) -> Table:
    """Digits and exact answers, by arm and cell."""
    full = found.get(FULL, {})
    able = {cell: full[cell][0] >= ABLE if cell in full else None for cell in cells}
    rows = [
        (arm, *(_two(by_cell[cell]) if cell in by_cell else "-" for cell in cells))
        for arm, by_cell in found.items()
    ]
    note = (
        f"Digits of a {DIGITS}-digit number that are right / answers that are right as a whole; "
        f"{samples} prompts a cell; guessing gives 10 % of the digits. "
        + verdict(able, f"finds less than {ABLE:.0%} of the digits")
    )
    heads = columns(cells, able)
    return Table("Pass key", heads, (*rows, *failure_rows(failed, len(heads))), note)


def _two(share: tuple[float, float]) -> str:
    return f"{share[0]:.0%} / {share[1]:.0%}"


# --- a key and a value --------------------------------------------------------------------------


def associative(
    gains: Mapping[str, Mapping[Cell, np.ndarray]],
    cells: Sequence[Cell],
    untold: float,
    samples: int,
    failed: Mapping[str, str],
) -> Table:
    """Nats that a value is easier to predict where it was told.

    Args:
        gains: by arm and cell, a number a prompt.
        untold: nats a token of a value that was not told.
    """
    found = {
        arm: {cell: _interval(values) for cell, values in by_cell.items()}
        for arm, by_cell in gains.items()
    }
    full = found.get(FULL, {})
    able = {cell: full[cell].low > WORTH * untold if cell in full else None for cell in cells}
    rows = [
        (arm, *(str(by_cell[cell]) if cell in by_cell else "-" for cell in cells))
        for arm, by_cell in found.items()
    ]
    note = (
        f"Nats a token that the value is easier to predict, with 95 % intervals; {samples} "
        f"prompts a cell. A value that was not told costs {untold:.2f}. "
        + verdict(able, f"gains less than {WORTH:.0%} of that")
    )
    heads = columns(cells, able)
    title = "Recall of a value by its key"
    return Table(title, heads, (*rows, *failure_rows(failed, len(heads))), note)


def _interval(values: np.ndarray) -> stats.Difference:
    return stats.paired_difference([values], [np.zeros_like(values)], block=1)


def by_cell(values: Sequence[Any], of: Sequence[Cell]) -> dict[Cell, list[Any]]:
    """Values put together that belong to the same cell."""
    made: dict[Cell, list[Any]] = {}
    for value, cell in zip(values, of, strict=True):
        made.setdefault(cell, []).append(value)
    return made
