# SPDX-License-Identifier: Apache-2.0
"""Check that two checkouts compute the same bytes.

    .venv/bin/python -m tools.compare OTHER [--arms 'policies/*' families/gemma3] [--jobs 2]

Run it in one checkout; OTHER is the path of another one, which has a ``.venv`` (``git worktree
add``, then a link to this checkout's). Each arm is a policy, a model and an engine. Both checkouts
run it, and every log-probability, generated token, kept token, page of the cache and counter that
both have must be equal. The command prints ``same`` or the differences, arm by arm, then the
counters that only one checkout has, and exits with 1 if any arm differs.

``--baseline FOLDER`` keeps the results of OTHER, by its commit, and reads them the next time.
"""

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from tools.compare.checkouts import HERE, start
from tools.compare.differences import Found, counters_of_one, described, differences


class Checkout:
    """Runs arms with the code of a checkout.

    Args:
        path: the checkout's root.
        scratch: a folder for results.
        baseline: a folder that keeps results between runs; None: keep none.
    """

    def __init__(self, path: Path, scratch: Path, baseline: Path | None = None) -> None:
        self._path, self._scratch = path, scratch
        self._kept = None if baseline is None else baseline / self._commit()
        self._children: dict[bool, subprocess.Popen[str]] = {}

    def _commit(self) -> str:
        git = ["git", "-C", str(self._path)]
        code = ("vllm_cascade", "kernels", "patches", "tests/interpreter.py")
        if subprocess.check_output([*git, "status", "--porcelain", "--", *code]):
            raise SystemExit(f"{self._path} has changes; commit them, or leave out --baseline")
        return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    def run(self, name: str, arm: dict[str, Any]) -> Found:
        """The results of an arm."""
        out = self._scratch / f"{name}.found"
        if self._kept is not None:
            # Models are the same in every run, but their folder is not.
            engine = {**arm["engine"], "model": None}
            key = json.dumps({**arm, "engine": engine}, sort_keys=True)
            out = self._kept / f"{name}-{sha256(key.encode()).hexdigest()[:16]}.found"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            child = self._child(arm["triton"])
            assert child.stdin and child.stdout
            print(json.dumps({"arm": arm, "out": str(out)}), file=child.stdin, flush=True)
            if not child.stdout.readline():
                raise SystemExit(f"{name}: the process of {self._path} ended")
        found = pickle.loads(out.read_bytes())
        if "error" in found:
            out.unlink()
        return found

    def _child(self, triton: bool) -> subprocess.Popen[str]:
        """Start a process for arms with or without Triton's interpreter, once."""
        if triton not in self._children:
            environment = {"TRITON_INTERPRET": "1"} if triton else {}
            self._children[triton] = start(self._path, "child.py", environment=environment)
        return self._children[triton]

    def close(self) -> None:
        """End the processes."""
        for child in self._children.values():
            child.communicate()


def main() -> int:
    """Compare all arms; 0 if they are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--arms", nargs="+", default=["*"], help="patterns of names; default: all")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="2: side by side")
    parser.add_argument("--baseline", type=Path, help="keep the results of OTHER in this folder")
    args = parser.parse_args()

    from tools.compare import arms

    chosen = {
        name: arm
        for name, arm in arms.ARMS.items()
        if any(fnmatch(name, pattern) for pattern in args.arms)
    }
    if not chosen:
        parser.error(f"no arm is called so; the arms are {', '.join(arms.ARMS)}")
    began, differ, of_one = time.monotonic(), 0, set[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        jobs = arms.jobs_of(chosen, Path(folder) / "models")
        ours = Checkout(HERE, Path(folder) / "ours")
        theirs = Checkout(args.other.resolve(), Path(folder) / "theirs", args.baseline)
        try:
            for name, job in jobs.items():
                found = list(pool.map(lambda side, n=name, j=job: side.run(n, j), (ours, theirs)))
                lines = differences(*found)
                differ += bool(lines)
                of_one |= counters_of_one(*found)
                print(f"{name}: {'DIFFERENT' if lines else 'same'}; {described(found[0])}")
                print("".join(f"    {line}\n" for line in lines), end="", flush=True)
        finally:
            ours.close()
            theirs.close()
    if of_one:
        print(f"counters of one checkout only: {', '.join(sorted(of_one))}")
    seconds = time.monotonic() - began
    print(f"{len(chosen) - differ} of {len(chosen)} arms are the same; {seconds:.0f} s")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
