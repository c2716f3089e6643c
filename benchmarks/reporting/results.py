# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, one file a run, and the two pages that are written from them.

``python -m benchmarks.reporting.results`` fills ``docs/RESULTS.md`` (what a user asks) and
``benchmarks/results/README.md`` (everything else). ``<!-- result NAME -->`` ... ``<!-- end -->``
holds the tables of ``benchmarks/results/NAME.json``; numbers behind the name choose some of them,
counted from 1. The words around are written by hand. Tests compare pages and files.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.tables import Table, show
from benchmarks.running import arms
from benchmarks.running.environment import ROOT, fingerprint, start
from benchmarks.running.parts import Parts, code

FOLDER = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/RESULTS.md"
OLDER = FOLDER / "README.md"
_MARKER = re.compile(r"(<!-- result ([\w.-]+)((?: \d+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FLAT = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
_DIGEST = re.compile(r"-[0-9a-f]{8}$")
PLACES = ("out", "parts")
"""Settings that say where files go, not what was run."""
_STARTED = time.perf_counter()


# --- options of every command -------------------------------------------------------------------


def parser_of(
    name: str, doc: str | None, *, parts: bool = False, engines: bool = False
) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``, with the options that commands share.

    From here on the run's time, commit and code are settled, whatever changes while it measures.

    Args:
        parts: also ``--parts`` and ``--any-code``.
        engines: also these, ``--dtype`` and ``--engines``.
    """
    start()
    if parts or engines:
        code()
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, out = parser.add_argument, ROOT / f"results/{name.replace('_', '-')}.json"
    add("--out", type=Path, default=out, help="the JSON (default: %(default)s)")
    if parts or engines:
        add("--parts", type=Path, help="folder for finished items, which the next run reuses "
            "(default: --out with the ending .parts)")  # fmt: skip
        add("--any-code", action="store_true", help="reuse items that other code or another "
            "processor has made, the newest ones")  # fmt: skip
    if engines:
        add("--dtype", default="auto", help="default: bfloat16 if the model is stored so and the "
            "machine has instructions for it, else float32")  # fmt: skip
        add("--engines", type=int, default=1, help="engines at a time")
    return parser


def run_arms(
    work: Callable[[arms.AnyJob], arms.Result],
    jobs: Sequence[arms.AnyJob],
    args: argparse.Namespace,
    at_a_time: int | None = None,
) -> arms.Outcome[arms.Result]:
    """``arms.run_all`` by the shared options; finished items are kept in ``--parts``."""
    kept_in = Parts(args.parts or args.out.with_suffix(".parts"), args.any_code)
    return arms.run_all(work, jobs, at_a_time or args.engines, kept_in)


# --- the JSON -----------------------------------------------------------------------------------


def finish(
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    tables: Sequence[Table],
    data: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
    *,
    printed: bool = False,
) -> None:
    """Print the tables, then write them with the command, the settings and the environment.

    Args:
        data: what the tables do not say: medians and intervals, no raw series.
        failed: arms without a result, and why; the JSON has them, too.
        printed: the tables have been printed already.

    Raises:
        SystemExit: an arm has failed; the message repeats every reason.
    """
    if not printed:
        show(tables)
    failed = failed or {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {**arms.ITEMS, "commits": dict(arms.COMMITS)}
    content = {
        "command": command(argv),
        "seconds": round(time.perf_counter() - _STARTED, 1),
        **({"items": kept} if arms.ITEMS["taken up"] else {}),
        "environment": fingerprint(),
        "settings": {key: _plain(value) for key, value in vars(args).items() if key not in PLACES},
        "tables": [table.as_json() for table in tables],
        "data": {**(data or {}), **{label: {"failed": why} for label, why in failed.items()}},
    }
    args.out.write_text(as_text(content), encoding="utf-8")
    print(f"Wrote {args.out}.")
    if failed:
        reasons = "\n".join(f"  {label}: {reason}" for label, reason in failed.items())
        raise SystemExit(
            f"{len(failed)} of the arms failed:\n{reasons}\n"
            "The same command runs them again, and only them."
        )


def as_text(content: dict[str, Any]) -> str:
    """JSON with a list of plain values on one line."""
    text = json.dumps(content, indent=1, default=float, ensure_ascii=False)
    return _FLAT.sub(lambda match: "[" + re.sub(r"\n\s*", " ", match[1]) + "]", text) + "\n"


def _plain(value: Any) -> Any:
    """A setting as JSON: paths relative to the repository, or the name alone of one elsewhere."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    text = str(value)
    if text.startswith(str(ROOT) + "/"):
        return text.removeprefix(str(ROOT) + "/")
    if text.startswith("/"):
        return name_of(text)
    return text if isinstance(value, Path) else value


def name_of(model: str) -> str:
    """A model's name in tables: its folder's, without the digest of ``benchmarks.models``."""
    return _DIGEST.sub("", Path(model).name)


def command(argv: Sequence[str] | None = None) -> str:
    """The command line of this run, without the places of files."""
    path = Path(sys.argv[0])
    module = f"benchmarks.{path.stem}" if path.suffix == ".py" else path.name
    words = [str(_plain(word)) for word in (sys.argv[1:] if argv is None else argv)]
    for place in (f"--{name}" for name in PLACES):
        if place in words:
            at = words.index(place)
            del words[at : at + 2]
    return shlex.join(["python", "-m", module, *words])


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """A kept result; None if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# --- the pages ----------------------------------------------------------------------------------


def section(result: dict[str, Any], chosen: Sequence[int] = ()) -> str:
    """Markdown of one result: the command, where it ran, and its tables.

    Args:
        chosen: numbers of the tables to show, from 1; none: all.
    """
    where = result["environment"]
    machine = where.get("gpu") or f"{where['cores']} cores of {where['cpu']}"
    commit = _short((where.get("git_commit") or "unknown") + "+" * bool(where.get("git_dirty")))
    items = result.get("items")
    spent = "" if result["seconds"] is None else f"; {result['seconds']:,.0f} s"
    kept = f", {items['taken up']} of {items['asked']} items kept from before" if items else ""
    if items and (commits := items.get("commits")):
        kept += f" ({', '.join(map(_short, commits))})"
    lines = [
        f"`{result['command']}`<br>",
        f"{machine}; torch {where['torch']}, vLLM {where['vllm']}, commit {commit}, "
        f"{where['time'][:10]}{spent}{kept}.",
    ]
    for number, table in enumerate(result["tables"], 1):
        if not chosen or number in chosen:
            lines += ["", Table.from_json(table).markdown()]
    return "\n".join(lines) + "\n"


def _short(commit: str) -> str:
    """Ten digits, and the ``+`` of a checkout that differed."""
    return commit.rstrip("+")[:10] + "+" * commit.endswith("+")


def fill(text: str, folder: Path = FOLDER) -> str:
    """A page with every marked part made from its JSON."""

    def replace(match: re.Match[str]) -> str:
        result = load(match[2], folder)
        body = section(result, _numbers(match[3])) if result else "Not measured yet.\n"
        return f"{match[1]}{body}{match[5]}"

    return _MARKER.sub(replace, text)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def shown(text: str) -> list[tuple[str, list[int]]]:
    """The results on a page, and the tables of each (empty: all)."""
    return [(match[2], _numbers(match[3])) for match in _MARKER.finditer(text)]


def main() -> None:
    """Write both pages."""
    for page in (PAGE, OLDER):
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text), encoding="utf-8")
        print(f"Wrote {page.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
