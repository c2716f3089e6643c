# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sessions: its table from made-up times, and a short run."""

from pathlib import Path

import pytest

from benchmarks import sessions
from benchmarks.reporting import results
from benchmarks.running.engines import BOOK, MODEL


def answers(read: int, *seconds: float) -> list[sessions.Answer]:
    return [sessions.Answer(1000, read, first) for first in seconds]


def test_ratios_are_of_medians() -> None:
    kinds = {
        sessions.FRESH: answers(60, 0.2, 0.1, 0.9),
        sessions.FULL: answers(60, 0.4),
        sessions.MEMORY: answers(61, 0.25, 0.22, 0.1),
        sessions.DISK: answers(61, 0.5),
    }
    args = sessions.parse_args(["--model", "m", "--new", "60"])
    rows = sessions.table(args, 60, {"cascade": kinds, sessions.STOCK: kinds}).rows
    full = ("2.00", "1.00", "-")
    memory, disk = ("1.10", "0.55", "1.2"), ("2.50", "1.25", "1.5")
    assert [row[4:] for row in rows[:4]] == [("1.00", "0.50", "-"), full, memory, disk]
    assert [row[6] for row in rows[4:]] == ["-"] * 4, "stock has no goal"
    assert rows[2][:3] == ("cascade: from memory", "1,000", "61")


def test_text_is_never_handed_out_twice() -> None:
    text = sessions.Text(str(MODEL), BOOK)
    pieces = [tuple(text.take(5000)) for _ in range(80)]
    assert len(set(pieces)) == 80 and {len(piece) for piece in pieces} == {5000}


def test_sizes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sessions.parse_args(["--trials", "0"])
    assert "--trials" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--turn 1000 and --new 2000 do not fit the model's 1,024"):
        sessions.main(["--model", str(MODEL)])


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """Every token but the new ones is known, also to a server that starts after SIGKILL."""
    out = tmp_path / "sessions.json"
    options = ["--model", str(MODEL), "--budget", "256", "--tokens", "1500", "--turn", "150"]
    options += ["--answer", "8", "--new", "60", "90", "--trials", "2", "--restarts", "1"]
    sessions.main([*options, "--pool-mib", "64", "--policies", "cascade", "--out", str(out)])
    kept = results.load("sessions", tmp_path)
    ours, stock = (kept["data"]["60"][name] for name in ("cascade", sessions.STOCK))
    assert [len(ours[kind]) for kind in ours] == [4, 4, 2, 1, 1]
    assert [len(kinds) for kinds in kept["data"]["90"]["cascade"].values()] == [4, 4, 2, 1, 0]
    for kind in (sessions.MEMORY, sessions.DISK):
        assert {one["read"] for one in ours[kind]} == {61}
    assert ours[sessions.AGAIN][0]["read"] == ours[sessions.AGAIN][0]["prompt"] > 1500
    assert {one["read"] for one in ours[sessions.FRESH]} == {60}
    assert all(one["read"] < 100 for one in stock[sessions.MEMORY])
    assert [len(table["rows"]) for table in kept["tables"]] == [8, 7]
