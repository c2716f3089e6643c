# SPDX-License-Identifier: Apache-2.0
"""Files of sessions: one safetensors file for each session and rank, in a folder of one server.

A file is written under a temporary name, synced and renamed, so that a crash leaves either the
whole file or none. Its header holds a checksum of everything else in the file, and what the state
depends on: model, policy, layout, versions. A file is used only if all of that is as here.
Evicted units are in files of their own, which sessions share (``pieces.py``). A session's header
names these and their checksums. Nothing is unpickled. The folder (``folder.py``) and its files are
readable by their owner only.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch
import xxhash

from vllm_cascade.sessions.session import Session

FORMAT = "6"
"""Bump when the layout of files or chunks (``recall/log.py``) changes, or the scale of scores."""
SUFFIX, PIECE_SUFFIX = ".session", ".units"
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
MOST_BUFFERED = 1 << 18
"""Bytes read at a time of a file that is checked before it is mapped."""


class Unusable(Exception):
    """A file that no session can be read from.

    Attributes:
        reason: ``damaged``, ``incomplete``, ``missing``, ``foreign`` or ``io``, as it is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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


def _checksum(header: Mapping[str, str], parts: Mapping[str, tuple[str, list[int], str]]) -> str:
    """Digest of a header without its checksum, and of all tensors.

    Args:
        parts: type, shape and XXH3 of each tensor.
    """
    digest = hashlib.blake2b(digest_size=16)
    plain = {key: value for key, value in header.items() if key != "checksum"}
    digest.update(json.dumps(plain, sort_keys=True).encode())
    for name, part in sorted(parts.items()):
        digest.update(json.dumps([name, *part]).encode())
    return digest.hexdigest()


def _part(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """What a checksum takes of a tensor. XXH3 is computed as fast as memory is read."""
    return DTYPES[tensor.dtype], list(tensor.shape), xxhash.xxh3_128_hexdigest(_raw(tensor))


def _part_of_file(file: BufferedReader, entry: Mapping[str, Any]) -> tuple[str, list[int], str]:
    """What a checksum takes of the next tensor in a file, read through a small buffer.

    In a mapping a read error, or a file that was cut short, would end the process by SIGBUS.

    Raises:
        OSError: the file cannot be read.
        ValueError: it ends too early.
    """
    begin, end = entry["data_offsets"]
    digest, left, buffer = xxhash.xxh3_128(), end - begin, memoryview(bytearray(MOST_BUFFERED))
    while left > 0:
        num = file.readinto(buffer[:left])
        if not num:
            raise ValueError("a tensor is cut short")
        digest.update(buffer[:num])
        left -= num
    return entry["dtype"], entry["shape"], digest.hexdigest()


def write(path: Path, header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a file so that it is complete or absent after a crash at any time.

    Returns:
        Its checksum.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    parts = {name: _part(tensor) for name, tensor in tensors.items()}
    metadata = {**header, "checksum": _checksum(header, parts)}
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
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in sorted(tensors.items()):
            file.write(_raw(tensor))
    return metadata["checksum"]


@contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """Open a file that is under its name, synced, only if what is done inside succeeds.

    Other processes, of other machines too, may write the same file at the same time.
    """
    left = temporary = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        left = temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
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


def _mapping(file: BufferedReader, begin: int) -> torch.Tensor:
    """What a file has from ``begin`` to where it stands, in memory that it fills on first use.

    Unlike ``mmap``, PyTorch keeps no file descriptor, of which a process often has 1,024.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: it is not as long any more.
    """
    size = file.tell()
    if os.fstat(file.fileno()).st_size != size:
        raise ValueError("the file was cut short while it was read")
    try:
        content = torch.from_file(file.name, False, size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{file.name} cannot be mapped: {error}") from error
    return content[begin:]


def _tensor(
    file: BufferedReader, entry: Mapping[str, Any], mapping: torch.Tensor | None = None
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
    with opened(path) as file:
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
    with opened(path) as file:
        description = _description(file)
        header = dict(description.pop("__metadata__"))
        order = sorted(description.items(), key=lambda item: item[1]["data_offsets"])
        begin, tensors = file.tell(), {}
        if mapped:
            parts = {name: _part_of_file(file, entry) for name, entry in order}
        else:
            tensors = {name: _tensor(file, entry) for name, entry in order}
            parts = {name: _part(tensor) for name, tensor in tensors.items()}
        if _checksum(header, parts) != header.get("checksum"):
            raise ValueError("the checksum is wrong")
        if mapped and order:
            mapping = _mapping(file, begin)
            tensors = {name: _tensor(file, entry, mapping) for name, entry in order}
    wrong = [key for key, value in (expected or {}).items() if header.get(key) != value]
    if wrong:
        reason = "foreign" if set(wrong) & set(FOREIGN) else "damaged"
        raise Unusable(reason, f"{path.name}: another {', '.join(wrong)}")
    return header, tensors


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading; what goes wrong inside becomes ``Unusable``."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise Unusable("missing", str(error)) from error
    except (OSError, MemoryError) as error:
        raise Unusable("io", str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        reason = "io" if lacks_resources(error) else "damaged"
        raise Unusable(reason, f"{path.name}: {error}") from error


def lacks_resources(error: Exception) -> bool:
    """Whether an error is a lack of memory or threads, and not the fault of a file.

    PyTorch and ``threading`` raise plain ``RuntimeError``.
    """
    short = any(words in str(error) for words in ("memory", "start new thread"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and short)


def first_difference(header: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first of ``FOREIGN`` that differs between a file's header and this engine's."""
    return next((key for key in FOREIGN if header.get(key) != here.get(key)), None)
