# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade sessions``: lists, verifies and removes the sessions in a folder.

It needs no vLLM and no server. A running server counts a removed session as a miss.
"""

import time
from contextlib import suppress
from pathlib import Path

from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.files import Bad, Entry, Folder, Unusable, parts_of, read


def run(path: Path, action: str, names: list[str]) -> None:
    """Execute the command.

    Args:
        action: ``list``, ``verify`` or ``remove``.
        names: of sessions to remove.

    Raises:
        ValueError: there is no such folder or session, or a file is damaged.
        OSError: a file cannot be removed.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if (action == "remove") != bool(names):
        raise ValueError("remove takes the names or ids of sessions, list and verify take none")
    folder = Folder(path)
    entries, bad = folder.entries()
    pinned = _pinned(folder)
    if action == "remove":
        for entry in [_chosen(entries, pinned, name) for name in names]:
            folder.remove(entry.files)
            print(f"removed {entry.id}")
        with suppress(KVPolicyError):  # a running server removes evicted units itself
            folder.open()
            folder.remove_unused()
            folder.close()
    elif action == "verify":
        _verify(folder, entries, bad)
    else:
        _list(folder, entries, bad, pinned)


def _pinned(folder: Folder) -> dict[str, str]:
    """What clients called the pinned sessions, by id; several may have chosen the same name."""
    try:
        return {id_: key.partition(" ")[2] for key, id_ in folder.names().items()}
    except Unusable as error:
        print(f"unusable: {error}")
        return {}


def _list(folder: Folder, entries: list[Entry], bad: list[Bad], pinned: dict[str, str]) -> None:
    print(f"{'id':32}  {'tokens':>9}  {'MiB':>9}  {'unused for':>10}  model, name")
    for entry in entries:
        header, age = entry.header, _age(time.time() - entry.used)
        tokens, mib = int(header["num_tokens"]), entry.num_bytes / 2**20
        label = ", ".join(filter(None, [header.get("model_name"), pinned.get(entry.id)]))
        print(f"{entry.id}  {tokens:9,}  {mib:9,.1f}  {age:>10}  {label}")
    names = {name for entry in entries for name in _names(entry)}
    total = sum(map(folder.size, names)) / 2**20
    print(f"{len(entries)} sessions, {total:,.1f} MiB; {len(bad)} unusable files")
    for name, problem, _ in bad:
        print(f"unusable: {name}: {problem}")


def _names(entry: Entry) -> list[str]:
    """A session's files, with those that it shares."""
    return [*entry.files, *(name for name, _ in entry.pieces)]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _verify(folder: Folder, entries: list[Entry], bad: list[Bad]) -> None:
    problems = [(name, problem) for name, problem, _ in bad]
    checksums = {name: {"checksum": own} for entry in entries for name, own in entry.pieces}
    for name in sorted({name for entry in entries for name in _names(entry)}):
        try:
            _, rank, world = parts_of(name)
            read(folder.path / name, {"rank": f"{rank}of{world}", **checksums.get(name, {})})
        except Unusable as error:
            problems.append((name, str(error)))
    for name, problem in problems:
        print(f"damaged: {name}: {problem}")
    if problems:
        raise ValueError(f"{len(problems)} of the files in {folder.path} are damaged; remove them")
    print(f"{len(entries)} sessions, all files are whole")


def _chosen(entries: list[Entry], pinned: dict[str, str], name: str) -> Entry:
    named = [entry for entry in entries if pinned.get(entry.id) == name]
    found = named or [entry for entry in entries if entry.id.startswith(name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sessions are called {name!r}; `list` shows names and ids")
    return found[0]
