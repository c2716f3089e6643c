# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade sessions``: lists, verifies and removes the sessions in a folder.

It needs PyTorch, but no vLLM and no server. A running server goes on with a removed session while
it has it in memory, and counts a miss when it wants to read its file.
"""

import time
from contextlib import suppress
from pathlib import Path

from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.files import Unusable, parts_of, read
from vllm_cascade.sessions.folder import Bad, Entry, Folder
from vllm_cascade.sessions.settings import ENGINE_FOLDER

LEAST_PREFIX = 8
"""Fewest letters of an id that name a session; of fewer, a typo may name another."""


def run(path: Path, action: str, names: list[str]) -> None:
    """Execute the command.

    Args:
        action: ``list``, ``verify`` or ``remove``.
        names: of sessions to remove.

    Raises:
        ValueError: there is no such folder or session, or a file is damaged.
        OSError: a folder cannot be listed, or a file cannot be removed.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    if (action == "remove") != bool(names):
        raise ValueError("remove takes the names or ids of sessions, list and verify take none")
    if "" in names:
        raise ValueError("an empty name or id is that of no session; `list` shows names and ids")
    engines = sorted(path.glob(f"{ENGINE_FOLDER}*"), key=lambda one: (len(one.name), one.name))
    folders = [Folder(one) for one in (path, *engines) if one.is_dir()]
    if action == "remove":
        _remove(folders, names)
        return
    damaged = 0
    for folder in folders:
        if len(folders) > 1:
            print(f"{folder.path}:")
        entries, bad = folder.entries()
        if action == "verify":
            damaged += _verify(folder, entries, bad)
        else:
            _list(folder, entries, bad)
    if damaged:
        raise ValueError(f"{damaged} of the files in {path} are damaged; remove them")


def _remove(folders: list[Folder], names: list[str]) -> None:
    found = [(folder, folder.entries()[0], _pinned(folder)) for folder in folders]
    for chosen in [_chosen(found, name) for name in names]:
        for folder, entry in chosen:
            folder.remove(entry.files)
            print(f"removed {entry.id}")
    for folder in folders:
        with suppress(KVPolicyError):  # a running server removes evicted units itself
            folder.open()
            folder.remove_unused()
            folder.close()


def _pinned(folder: Folder) -> dict[str, list[str]]:
    """What clients called the pinned sessions, by id; several may have chosen the same name."""
    found: dict[str, list[str]] = {}
    try:
        for key, id_ in folder.names().items():
            found.setdefault(id_, []).append(key.partition(" ")[2])
    except Unusable as error:
        print(f"unusable: {error}")
    return found


def _list(folder: Folder, entries: list[Entry], bad: list[Bad]) -> None:
    pinned = _pinned(folder)
    print(f"{'id':32}  {'tokens':>9}  {'MiB':>9}  {'unused for':>10}  model, name")
    for entry in entries:
        header, age = entry.header, _age(time.time() - entry.used)
        tokens, mib = int(header["num_tokens"]), entry.num_bytes / 2**20
        label = ", ".join(filter(None, [header.get("model_name"), *pinned.get(entry.id, ())]))
        label = repr(label)[1:-1]  # clients choose names, which must not control the terminal
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


def _verify(folder: Folder, entries: list[Entry], bad: list[Bad]) -> int:
    """Check all files; returns how many are damaged.

    A running server may delete files during the check. A missing file is damage only if a remaining
    session lists it. The server's ranks write at different times, so a session that lacks ranks is
    damage only if no server runs.
    """
    found: list[Bad] = []
    whole: set[str] = set()
    is_changing = any(one.reason == "incomplete" for one in bad)
    checksums = {name: {"checksum": own} for entry in entries for name, own in entry.pieces}
    for name in sorted({name for entry in entries for name in _names(entry)}):
        try:
            _, rank, world = parts_of(name)
            read(folder.path / name, {"rank": f"{rank}of{world}", **checksums.get(name, {})})
            whole.add(name)
        except Unusable as error:
            if error.reason == "missing":
                is_changing = True
            else:
                found.append(Bad(name, str(error), error.reason))
    if is_changing:
        in_use = folder.in_use()  # asked first: files of a server that ended meanwhile are listed
        entries, bad = folder.entries()
        bad = [one for one in bad if not (in_use and one.reason == "incomplete")]
        entries = [entry for entry in entries if whole.issuperset(_names(entry))]
    found = [*bad, *(one for one in found if one not in bad)]
    for name, problem, _ in found:
        print(f"damaged: {name}: {problem}")
    if not found:
        print(f"{len(entries)} sessions, all files are whole")
    return len(found)


def _chosen(
    found: list[tuple[Folder, list[Entry], dict[str, list[str]]]], name: str
) -> list[tuple[Folder, Entry]]:
    """The one session with a name, or an id of which ``name`` is the beginning.

    It may have files of several engines.
    """
    entries = [(folder, entry) for folder, entries, _ in found for entry in entries]
    pinned = {id_ for _, _, names in found for id_, own in names.items() if name in own}
    chosen = [one for one in entries if one[1].id in pinned]
    if not chosen and len(name) >= LEAST_PREFIX:
        chosen = [one for one in entries if one[1].id.startswith(name)]
    number = len({entry.id for _, entry in chosen})
    if number != 1:
        raise ValueError(
            f"{number} sessions are called {name!r}; `list` shows names and ids, of which "
            f"{LEAST_PREFIX} letters or more are needed"
        )
    return chosen
