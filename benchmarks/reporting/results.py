# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, one file a question, and docs/RESULTS.md written from them.

``python -m benchmarks.reporting.results`` puts the tables of ``benchmarks/results/*.json`` into the
document, between the comments ``<!-- result NAME -->`` and ``<!-- end -->``; the words around them
are written by hand. A test compares the two, so that no table is there without the run behind it.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.tables import Table, show
from benchmarks.running.arms import ITEMS
from benchmarks.running.environment import ROOT, fingerprint
from benchmarks.running.parts import Parts

FOLDER = ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/RESULTS.md"
_MARKER = re.compile(r"(<!-- result ([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_DIGEST = re.compile(r"-[0-9a-f]{8}$")
PLACES = ("out", "parts")
"""Settings that say where files go, not what was run."""
_STARTED = time.perf_counter()


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """``--out``: where a run's JSON goes; pictures lie beside it."""
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / f"results/{name}.json",
        help="the JSON to write (default: %(default)s); benchmarks/results/ is what the "
        "document shows",
    )

    parser.add_argument(
        "--parts",
        type=Path,
        help="folder for what arms have finished, which a further run takes up (default: beside "
        "--out, with the ending .parts)",
    )
    parser.add_argument(
        "--any-code",
        action="store_true",
        help="take up parts that another version of the code has measured, too",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--dtype`` and ``--engines``."""
    parser.add_argument(
        "--dtype",
        default="auto",
        help="default: bfloat16 where the model is stored so and the machine multiplies it, "
        "else float32",
    )
    parser.add_argument("--engines", type=int, default=1, help="engines at a time")


def parts_of(args: argparse.Namespace) -> Parts:
    """Where a run keeps what its arms have finished."""
    return Parts(args.parts or args.out.with_suffix(".parts"), args.any_code)


def failures(failed: Mapping[str, str]) -> dict[str, Any]:
    """For the JSON: arms without a result, and why."""
    return {label: {"failed": reason} for label, reason in failed.items()}


def end(failed: Mapping[str, str]) -> None:
    """Status 1 where an arm has failed; its reason stands on the screen once more.

    Raises:
        SystemExit: an arm has failed.
    """
    if failed:
        reasons = "\n".join(f"  {label}: {reason}" for label, reason in failed.items())
        raise SystemExit(
            f"{len(failed)} of the arms failed:\n{reasons}\n"
            "The same command runs them again, and only them."
        )


def save(
    out: Path,
    tables: Sequence[Table],
    data: dict[str, Any],
    settings: dict[str, Any],
    argv: Sequence[str] | None = None,
    *,
    printed: bool = False,
) -> None:
    """Print the tables, then write them with all numbers, the command and the environment.

    Args:
        printed: whether the tables have been printed already.
    """
    if not printed:
        show(tables)
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command(argv),
        "seconds": round(time.perf_counter() - _STARTED, 1),
        **({"items": dict(ITEMS)} if ITEMS["taken up"] else {}),
        "environment": fingerprint(),
        "settings": {key: _plain(value) for key, value in settings.items() if key not in PLACES},
        "tables": [table.as_json() for table in tables],
        "data": data,
    }
    out.write_text(json.dumps(content, indent=1, default=float) + "\n", encoding="utf-8")
    print(f"Wrote {out}.")


def _plain(value: Any) -> Any:
    """A setting as JSON. Paths inside the repository are relative to it.

    Of a folder elsewhere only its name is kept, less what tells conversions of a model apart
    (``benchmarks.models``): a result is not about a machine's folders.
    """
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    text = str(value)
    if text.startswith(str(ROOT) + "/"):
        return text.removeprefix(str(ROOT) + "/")
    if text.startswith("/"):
        return name_of(text)
    return text if isinstance(value, Path) else value


def name_of(model: str) -> str:
    """A model as tables call it: its folder's name, less the digest of what it was made from."""
    return _DIGEST.sub("", Path(model).name)


def command(argv: Sequence[str] | None = None) -> str:
    """What to type to get the same run: ``python -m benchmarks.NAME ...``, less where files go."""
    path = Path(sys.argv[0])
    module = f"benchmarks.{path.stem}" if path.suffix == ".py" else path.name
    words = [str(_plain(word)) for word in (sys.argv[1:] if argv is None else argv)]
    for place in (f"--{name}" for name in PLACES):
        if place in words:
            at = words.index(place)
            del words[at : at + 2]
    return shlex.join(["python", "-m", module, *words])


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """A kept result; None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def section(result: dict[str, Any]) -> str:
    """Markdown of one result: the command, where it ran, and its tables."""
    where = result["environment"]
    machine = where.get("gpu") or f"{where['cores']} cores of {where['cpu']}"
    commit = (where.get("git_commit") or "unknown")[:10] + ("+" if where.get("git_dirty") else "")
    items = result.get("items")
    kept = f", {items['taken up']} of {items['asked']} items kept from before" if items else ""
    lines = [
        f"```\n{result['command']}\n```",
        "",
        f"{machine}; torch {where['torch']}, vLLM {where['vllm']}, commit {commit}, "
        f"{where['time'][:10]}; {result['seconds']:,.0f} s{kept}.",
    ]
    for table in result["tables"]:
        lines += ["", Table.from_json(table).markdown()]
    return "\n".join(lines) + "\n"


def fill(text: str, folder: Path = FOLDER) -> str:
    """The document with every marked part made from its JSON, or saying that it was not run."""

    def replace(match: re.Match[str]) -> str:
        result = load(match[2], folder)
        body = section(result) if result else "Not measured yet.\n"
        return f"{match[1]}{body}{match[4]}"

    return _MARKER.sub(replace, text)


def names(text: str) -> list[str]:
    """The results that a document shows."""
    return [match[2] for match in _MARKER.finditer(text)]


def main() -> None:
    """Bring the document into step with the JSON files."""
    text = DOCUMENT.read_text(encoding="utf-8")
    unknown = {path.stem for path in FOLDER.glob("*.json")} - set(names(text))
    if unknown:
        raise SystemExit(f"{DOCUMENT} has no place for {', '.join(sorted(unknown))}")
    new = fill(text)
    if new == text:
        print(f"{DOCUMENT.relative_to(ROOT)} is in step with {FOLDER.relative_to(ROOT)}.")
        return
    DOCUMENT.write_text(new, encoding="utf-8")
    print(f"Wrote {DOCUMENT.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
