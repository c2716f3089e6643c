# SPDX-License-Identifier: Apache-2.0
"""Files of sessions: one safetensors file for each session and rank, in a folder of one server.

A file is written under a temporary name, synced and renamed, so that a crash leaves either the
whole file or none. Its header holds a checksum of everything else in the file, and what the state
depends on: model, policy, layout, versions. A file is used only if all of that is as here.
Evicted units are in files of their own, which sessions share (``pieces.py``). A session's header
names these and their checksums. One more file holds the names under which sessions are pinned.
Nothing is unpickled. The folder and its files are readable by their owner only.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.session import Session

FORMAT = "5"
"""Another one for every change of how files or chunks of evicted units (``recall/log.py``) look."""
SUFFIX, PIECE_SUFFIX = ".session", ".units"
DAMAGED, MOST_DAMAGED = "damaged", 1 << 30
"""Folder in the sessions' folder to which damaged files are moved, and bytes that stay there."""
LOCK, NAMES = "lock", "names.json"
FOREIGN = ("format", "plugin", "vllm", "model", "dtype", "policy", "parallelism", "layout")
"""Header entries that must be equal here and in a file, in the order in which they are compared."""
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""Names in safetensors of the types of tensors in files."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Unusable(Exception):
    """A file that no session can be read from.

    Attributes:
        reason: ``damaged``, ``incomplete``, ``missing``, ``foreign`` or ``io``, as it is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Entry:
    """A session in a folder.

    Attributes:
        id: the session's.
        header: of the first rank's file.
        num_bytes: of all files, with those that it shares.
        used: seconds since the epoch at which it was last written or read.
        files: names of its files, one a rank.
        pieces: names and checksums of the files that it may share with others.
    """

    id: str
    header: dict[str, str]
    num_bytes: int
    used: float
    files: tuple[str, ...]
    pieces: tuple[tuple[str, str], ...] = ()


class Bad(NamedTuple):
    """A file that no session can be read from.

    Attributes:
        reason: that of ``Unusable``, or ``incomplete``: a file of another rank is missing.
    """

    name: str
    problem: str
    reason: str


def file_name(session: str, rank: int, world: int) -> str:
    return f"{session}.{rank}of{world}{SUFFIX}"


def parts_of(name: str) -> tuple[str, int, int]:
    """Session or piece, rank and number of ranks of a file's name.

    Raises:
        ValueError: not the name of a session's file.
    """
    suffix = PIECE_SUFFIX if name.endswith(PIECE_SUFFIX) else SUFFIX
    session, ranks = name.removesuffix(suffix).split(".")
    rank, world = (int(part) for part in ranks.split("of"))
    if name != f"{session}.{rank}of{world}{suffix}" or not 0 <= rank < world:
        raise ValueError(name)
    return session, rank, world


def session_of(header: Mapping[str, str]) -> str | None:
    """Identifier of the session that a header describes; None if it describes none."""
    try:
        return Session.of(header, used=0.0).id
    except (KeyError, ValueError):
        return None


def pieces_of(header: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and checksums of the files of evicted units that a session's header lists.

    Raises:
        Unusable: the list cannot be read.
    """
    try:
        return [(str(name), str(checksum)) for name, checksum in json.loads(header["pieces"])]
    except KeyError:
        return []
    except (ValueError, TypeError) as error:
        raise Unusable("damaged", f"the list of evicted units: {error}") from error


# --- one file -----------------------------------------------------------------------------------


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of a header without its checksum, and of all tensors with their types and shapes.

    Tensors enter by their XXH3, which is computed as fast as memory is read.
    """
    digest = hashlib.blake2b(digest_size=16)
    plain = {key: value for key, value in header.items() if key != "checksum"}
    digest.update(json.dumps(plain, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        entry = [
            name,
            DTYPES[tensor.dtype],
            list(tensor.shape),
            xxhash.xxh3_128_hexdigest(_raw(tensor)),
        ]
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


def write(path: Path, header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a file so that it is complete or absent after a crash at any time.

    Returns:
        Its checksum.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    metadata = {**header, "checksum": _checksum(header, tensors)}
    description: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in sorted(tensors.items()):
        begin, end = end, end + tensor.nbytes
        description[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(description).encode()
    text += b" " * (-(8 + len(text)) % mmap.PAGESIZE)  # tensors begin with a page
    with _replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in sorted(tensors.items()):
            file.write(_raw(tensor))
    return metadata["checksum"]


@contextmanager
def _replacing(path: Path) -> Iterator[BufferedWriter]:
    """Open a file that is under its name, synced, only if what is done inside succeeds."""
    left = temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        left = temporary.rename(path)
        _sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            left.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _description(file: BufferedReader) -> dict[str, Any]:
    """The header of an open file; ``file`` then stands at the first tensor.

    Raises:
        ValueError: not a safetensors file, or one that is cut short.
    """
    length = int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    if not 0 < length <= size - 8:
        raise ValueError("the header is cut short")
    found = json.loads(file.read(length))
    if not isinstance(found, dict) or not isinstance(found.get("__metadata__"), dict):
        raise ValueError("there is no metadata")
    ends = [entry["data_offsets"][1] for name, entry in found.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        raise ValueError(f"the file has {size} bytes, not as many as its header says")
    return found


def _mapping(file: BufferedReader) -> torch.Tensor:
    """What follows in a file, uint8, in private memory that the file fills on first use.

    Unlike ``mmap``, PyTorch keeps no file descriptor, of which a process often has 1,024.

    Raises:
        OSError: the file cannot be mapped.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        content = torch.from_file(file.name, False, size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{file.name} cannot be mapped: {error}") from error
    return content[file.tell() :]


def _tensor(
    file: BufferedReader, entry: Mapping[str, Any], mapping: torch.Tensor | None
) -> torch.Tensor:
    shape, dtype = entry["shape"], TYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor of another size")
    if mapping is not None:
        content = mapping[begin:end]
    else:
        content = torch.empty(end - begin, dtype=torch.uint8)
        if file.readinto(_raw(content)) != content.nbytes:
            raise ValueError("a tensor is cut short")
    return content.view(dtype).view(shape)


def read_header(path: Path) -> dict[str, str]:
    """A file's header, without its checksum being checked.

    Raises:
        Unusable: no such file, or not one of ours.
    """
    with _opened(path) as file:
        return dict(_description(file)["__metadata__"])


def read(
    path: Path,
    expected: Mapping[str, str] | None = None,
    mapped: bool = False,
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Read a file and check it.

    Args:
        expected: header entries that the file must have.
        mapped: the tensors are views of a private mapping of the file. The file must not be
            modified while they are in use; it can be deleted.

    Returns:
        Its header and its tensors.

    Raises:
        Unusable: there is no such file, its checksum is wrong, or an expected entry differs.
    """
    with _opened(path) as file:
        description = _description(file)
        header = dict(description.pop("__metadata__"))
        order = sorted(description.items(), key=lambda item: item[1]["data_offsets"])
        mapping = _mapping(file) if mapped and order else None
        tensors = {name: _tensor(file, entry, mapping) for name, entry in order}
        if _checksum(header, tensors) != header.get("checksum"):
            raise ValueError("the checksum is wrong")
    wrong = [key for key, value in (expected or {}).items() if header.get(key) != value]
    if wrong:
        reason = "foreign" if set(wrong) & set(FOREIGN) else "damaged"
        raise Unusable(reason, f"{path.name}: another {', '.join(wrong)}")
    return header, tensors


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading; what goes wrong inside becomes ``Unusable``."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise Unusable("missing", str(error)) from error
    except OSError as error:
        raise Unusable("io", str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise Unusable("damaged", f"{path.name}: {error}") from error


# --- a folder -----------------------------------------------------------------------------------


class Folder:
    """The sessions' folder of one server.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._taken: tuple[int, int] | None = None  # device and inode of the lock

    def check(self) -> None:
        """Make sure that the folder is still the one that was opened, or checked first.

        Raises:
            OSError: it was deleted; another server may have made the one that is there now.
        """
        found = (self.path / LOCK).stat()
        taken = found.st_dev, found.st_ino
        if self._taken not in (None, taken):
            raise OSError("the folder was deleted while in use, and another server has made it")
        self._taken = taken

    def open(self) -> None:
        """Create the folder and take it for this server, until ``close`` or the process' end.

        Raises:
            KVPolicyError: it cannot be written, belongs to another user, or another server has it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
            if found.st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            if found.st_mode & 0o077:
                raise PermissionError("others have access; chmod 700 it")
            (self.path / DAMAGED).mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise KVPolicyError(
                f"--kv-sessions-dir {self.path}: cannot be used ({error}); choose a folder that "
                "this user can write to, or remove the flag"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise KVPolicyError(
                f"--kv-sessions-dir {self.path}: another server uses this folder; give each server "
                "a folder of its own"
            ) from error
        self._lock = descriptor
        self._taken = None
        self.check()
        for suffix in (SUFFIX, PIECE_SUFFIX, NAMES):  # of a process that ended while writing
            for leftover in self.path.glob(f".*{suffix}"):
                leftover.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def entries(self) -> tuple[list[Entry], list[Bad]]:
        """All sessions, least recently used first, and bad files.

        Reads headers only. A session with a missing rank or without its evicted units is bad.
        """
        units = {path.name for path in self.path.glob(f"[!.]*{PIECE_SUFFIX}")}
        sizes = {name: self.size(name) for name in units}
        found: dict[tuple[str, int], dict[int, str]] = {}
        entries: list[Entry] = []
        bad: list[Bad] = []
        for file in sorted(self.path.glob(f"[!.]*{SUFFIX}")):
            try:
                session, rank, world = parts_of(file.name)
            except ValueError:
                bad.append(Bad(file.name, "not the name of a session's file", "damaged"))
                continue
            found.setdefault((session, world), {})[rank] = file.name
        for (session, world), files in found.items():
            names = tuple(files[rank] for rank in sorted(files))
            try:
                if missing := sorted(set(range(world)) - set(files)):
                    raise Unusable("incomplete", f"the file of rank {missing[0]} is missing")
                entries.append(self._entry(session, names, sizes))
            except Unusable as error:
                bad += [Bad(name, str(error), error.reason) for name in names]
            except OSError as error:
                bad += [Bad(name, str(error), "io") for name in names]
        return sorted(entries, key=lambda entry: entry.used), bad

    def _entry(self, session: str, names: tuple[str, ...], sizes: Mapping[str, int]) -> Entry:
        """The session in its ranks' files.

        Args:
            sizes: of the files of evicted units that are there.

        Raises:
            Unusable: it cannot be read.
            OSError: a file is not readable.
        """
        headers = [read_header(self.path / name) for name in names]
        pieces = tuple(piece for header in headers for piece in pieces_of(header))
        if lost := [name for name, _ in pieces if name not in sizes]:
            raise Unusable("damaged", f"its evicted units {lost[0]} are missing")
        if any(session_of(header) != session for header in headers):
            raise Unusable("damaged", "the header is another session's")
        if len({header.get("stamp") for header in headers}) > 1:
            raise Unusable("incomplete", "the ranks' files are not of one write")
        stats = [(self.path / name).stat() for name in names]
        size = sum(s.st_size for s in stats) + sum(sizes[name] for name, _ in pieces)
        return Entry(session, headers[0], size, min(s.st_mtime for s in stats), names, pieces)

    def names(self) -> dict[str, str]:
        """Ids of pinned sessions by name; some may be gone.

        Raises:
            Unusable: the file that holds them cannot be read.
        """
        try:
            with _opened(self.path / NAMES) as file:
                found = json.load(file)
                return {str(name): str(session) for name, session in found.items()}
        except Unusable as error:
            if error.reason == "missing":
                return {}
            raise

    def write_names(self, names: Mapping[str, str]) -> None:
        """Replace the names under which sessions are pinned.

        Raises:
            OSError: the file cannot be written.
        """
        self.check()
        with _replacing(self.path / NAMES) as file:
            file.write(json.dumps(dict(names)).encode())

    def move_aside(self, name: str) -> None:
        """Move a damaged file to where no session is looked for, if the folder can be written.

        Of the files there the oldest are deleted, so that they stay within ``MOST_DAMAGED`` bytes.
        """
        with contextlib.suppress(OSError):
            (self.path / name).replace(self.path / DAMAGED / name)
            stats = [(path.stat(), path) for path in (self.path / DAMAGED).iterdir()]
            room = MOST_DAMAGED
            for found, path in sorted(stats, key=lambda one: one[0].st_ctime_ns, reverse=True):
                room -= found.st_size
                if room < 0:
                    path.unlink(missing_ok=True)

    def size(self, name: str) -> int:
        """Bytes of a file; 0 if it is gone."""
        try:
            return (self.path / name).stat().st_size
        except OSError:
            return 0

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_unused(self) -> None:
        """Remove evicted units that no session's file lists. No server may be writing.

        Nothing is removed if a file cannot be read now: it may list any of them.
        """
        used = set()
        for file in self.path.glob(f"[!.]*{SUFFIX}"):
            try:
                used |= {name for name, _ in pieces_of(read_header(file))}
            except Unusable as error:
                if error.reason == "io":
                    return
        files = self.path.glob(f"[!.]*{PIECE_SUFFIX}")
        self.remove([file.name for file in files if file.name not in used])


def first_difference(header: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first of ``FOREIGN`` that differs between a file's header and this engine's."""
    return next((key for key in FOREIGN if header.get(key) != here.get(key)), None)
