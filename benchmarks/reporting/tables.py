# SPDX-License-Identifier: Apache-2.0
"""A result table: printed, kept in the run's JSON, and written into docs/RESULTS.md from there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from typing import Any

MIN_WIDTH = 132
"""Width on a narrower console (a pipe, a log), which would break numbers in two."""


@dataclass(frozen=True)
class Table:
    """Rows of cells that are already text; the first column names the row.

    Attributes:
        note: one or two sentences under the table: how to read it, what is missing from it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        assert not wrong, f"{self.title}: {len(self.columns)} columns, but a row is {wrong[0]}"

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, str]],
        note: str = "",
        failed: Mapping[str, str] | None = None,
    ) -> "Table":
        """A table of rows that name their columns, all the same ones.

        Args:
            failed: arms without a result, and why; a row each, with the reason in column two.
        """
        columns = tuple(rows[0]) if rows else ("", "result")
        spare = [""] * (len(columns) - 2)
        ends = [(label, f"failed: {why}", *spare) for label, why in (failed or {}).items()]
        return cls(title, columns, (*(tuple(row.values()) for row in rows), *ends), note)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Table":
        rows = tuple(tuple(row) for row in data["rows"])
        return cls(data["title"], tuple(data["columns"]), rows, data.get("note", ""))

    def markdown(self) -> str:
        """A GitHub table; ``|`` in a cell is escaped."""
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        body = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        ]
        title = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*title, *body, *(["", self.note] if self.note else [])])


def table_of_json(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a column for whatever the rows say but ``what`` they are; floats: 4 digits."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "what"]
    cells = [[row.get(column, "") for column in columns] for row in rows]
    shown = [tuple(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) for row in cells]
    return Table(title, tuple(columns), tuple(shown))


def console() -> Any:
    """Standard output, wide enough for a table."""
    from rich.console import Console

    plain = Console()
    return plain if plain.width >= MIN_WIDTH else Console(width=MIN_WIDTH)


def say(text: str) -> None:
    """Print text as it is, as wide as tables are."""
    console().print(text, highlight=False, markup=False)


def show(tables: Sequence[Table]) -> None:
    """Print tables."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as Grid

    screen = console()
    for table in tables:
        grid = Grid(title=escape(table.title) or None, box=box.SIMPLE_HEAD, title_justify="left")
        for place, column in enumerate(table.columns):
            grid.add_column(escape(column), justify="right" if place else "left", overflow="fold")
        for row in table.rows:
            grid.add_row(*map(escape, row))
        screen.print(grid)
        if table.note:
            say(table.note)


def number(value: float | None, digits: int = 2) -> str:
    """``-`` for what was not measured; thousands are separated."""
    return "-" if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """``1.50x``, or ``-`` for what was not measured."""
    return "-" if value is None else f"{value:.2f}x"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range of some trials: ``12.3 (11.9-12.8)``; one trial has no range."""
    if len(values) < 2:
        return number(values[0], digits) if values else "-"
    low, high = number(min(values), digits), number(max(values), digits)
    return f"{number(median(values), digits)} ({low}-{high})"


def mean_std(values: Sequence[float], digits: int = 2) -> str:
    """Mean and sample standard deviation of some trials: ``12.3 ± 0.4``."""
    if len(values) < 2:
        return number(values[0], digits) if values else "-"
    return f"{number(mean(values), digits)} ± {number(stdev(values), digits)}"


Goal = tuple[str, float | None, tuple[float, float], str]
"""What is to hold, what was measured (None: nothing), its least and most, and how to say it."""


def table_of_goals(goals: Sequence[Goal]) -> Table:
    """The project's goals, as far as they were measured."""
    rows = [
        (goal, said.format(value), "yes" if least <= value <= most else "no")
        for goal, value, (least, most), said in goals
        if value is not None
    ]
    return Table("Goals", ("goal", "measured", "holds"), tuple(rows))
