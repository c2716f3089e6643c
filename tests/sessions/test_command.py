# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade sessions``, also on a machine without vLLM."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.sessions.test_files import pin
from vllm_cascade.cli import main
from vllm_cascade.sessions import command
from vllm_cascade.sessions.files import FOREIGN, SUFFIX, file_name, write
from vllm_cascade.sessions.folder import LOCK, Folder
from vllm_cascade.sessions.session import Session


def write_session(
    folder: Path, num_tokens: int, rank: int = 0, world: int = 1, **more: str
) -> Path:
    """Write one rank's file of a session of ``num_tokens`` tokens; returns its path."""
    one = Session("context", f"tokens{num_tokens}", num_tokens, 100)
    header = {**dict.fromkeys(FOREIGN, "this"), **one.header, "model_name": "a-model", **more}
    header["rank"] = f"{rank}of{world}"
    path = folder / file_name(one.id, rank, world)
    write(path, header, {"a": torch.zeros(1 << 20, dtype=torch.int8)})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for num in (5, 70000, 9):
        path = write_session(tmp_path, num)
        if num == 70000:
            pin(tmp_path, {"scope mine": path.name.split(".")[0]})
    return tmp_path


def ids(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[0] for path in folder.glob(f"*{SUFFIX}"))


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sessions", str(folder)])
    text = capsys.readouterr().out
    assert all(one in text for one in ids(folder))
    assert "70,000" in text and "a-model, mine" in text and "1.0" in text
    assert "3 sessions, 3.0 MiB; 0 unusable files" in text


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sessions", str(folder), "verify"])
    assert "3 sessions, all files are whole" in capsys.readouterr().out
    path = next(folder.glob(f"*{SUFFIX}"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["sessions", str(folder), "verify"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and "1 of the files" in err
    assert f"damaged: {path.name}: " in out and "checksum" in out


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_folder_of_another_user(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be listed, which is not to say that all its files are whole."""
    path, user = Path(tempfile.mkdtemp()), os.geteuid()
    try:
        path.chmod(0)
        os.seteuid(user or 65534)  # root may read all folders
        with pytest.raises(SystemExit):
            main(["sessions", str(path), action])
    finally:
        os.seteuid(user)
        path.rmdir()
    out, err = capsys.readouterr()
    assert not out and f"Permission denied: '{path}'" in err


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_folder_that_cannot_be_entered(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sessions are listed but cannot be looked at, so they are not removed ones."""
    path, user = Path(tempfile.mkdtemp()), os.geteuid()
    files = [write_session(path, num) for num in (5, 9)]
    try:
        path.chmod(0o400)
        os.chown(path, user or 65534, -1)
        os.seteuid(user or 65534)  # root may enter all folders
        if action == "verify":
            with pytest.raises(SystemExit) as stopped:
                main(["sessions", str(path), action])
            assert stopped.value.code == 2
        else:
            main(["sessions", str(path), action])
    finally:
        os.seteuid(user)
        path.chmod(0o700)
        shutil.rmtree(path)
    out, err = capsys.readouterr()
    word = "damaged" if action == "verify" else "unusable"
    assert all(f"{word}: {file.name}: [Errno 13]" in out for file in files)
    assert "2 of the files" in err if action == "verify" else "; 2 unusable files" in out


def test_a_disk_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(os, "lstat", fail)
    entries, bad = Folder(folder).entries()
    monkeypatch.undo()
    assert not entries and [one.reason for one in bad] == ["io"] * 3


def during_verify(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` before ``verify`` reads its first file."""
    read = command.read

    def during(*arguments: Any) -> Any:
        monkeypatch.setattr(command, "read", read)
        act()
        return read(*arguments)

    monkeypatch.setattr(command, "read", during)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_written", [True, False])
def test_ranks_write_while_files_are_verified(
    is_first: bool,
    is_written: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 writes its file later than rank 0, its first one or a newer one. No damage so far."""
    write_session(folder, 3, 0, 2, stamp="new")
    if not is_first:
        write_session(folder, 3, 1, 2, stamp="old")
    if is_written:
        during_verify(monkeypatch, lambda: write_session(folder, 3, 1, 2, stamp="new"))
    with open(folder / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(["sessions", str(folder), "verify"])
    assert "3 sessions, all files are whole" in capsys.readouterr().out
    if is_written:
        main(["sessions", str(folder), "verify"])
        assert "4 sessions, all files are whole" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit):
        main(["sessions", str(folder), "verify"])
    out, err = capsys.readouterr()
    problem = "the file of rank 1 is missing" if is_first else "are not of one write"
    assert problem in out and f"{1 if is_first else 2} of the files" in err


def test_a_session_that_was_not_read_is_not_called_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server removes a session and writes one that is damaged while others are verified."""

    def act() -> None:
        max(folder.glob(f"*{SUFFIX}")).unlink()
        path = write_session(folder, 3)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    during_verify(monkeypatch, act)
    main(["sessions", str(folder), "verify"])
    assert "2 sessions, all files are whole" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["sessions", str(folder), "verify"])
    assert "the checksum is wrong" in capsys.readouterr().out


def test_remove(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = ids(folder)
    main(["sessions", str(folder), "remove", "mine", first])
    assert len(ids(folder)) == 1 and first not in ids(folder)
    for wrong in (["remove"], ["remove", "nothing"], ["list", "mine"]):
        with pytest.raises(SystemExit):
            main(["sessions", str(folder), *wrong])
    errors = capsys.readouterr().err
    assert "takes the names or ids" in errors and "0 sessions are called 'nothing'" in errors
    assert len(ids(folder)) == 1


def test_remove_is_exact(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty argument or a letter removes nothing, also where there is one session only."""
    first, *others = ids(folder)
    main(["sessions", str(folder), "remove", *(one[:8] for one in others)])
    for wrong in ("", first[0], first[:7], "min"):
        with pytest.raises(SystemExit):
            main(["sessions", str(folder), "remove", wrong])
    errors = capsys.readouterr().err
    assert "an empty name or id" in errors and f"0 sessions are called '{first[:7]}'" in errors
    assert ids(folder) == [first]


def test_folders_of_other_engines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data-parallel engines have a folder each; the command looks into all of them."""
    other = folder / "engine-1"
    other.mkdir(mode=0o700)
    first, second, _ = ids(folder)
    for path in list(folder.glob(f"{first}*")):
        path.rename(other / path.name)
    main(["sessions", str(folder)])
    text = capsys.readouterr().out
    assert "2 sessions, 2.0 MiB" in text and "1 sessions, 1.0 MiB" in text and str(other) in text
    main(["sessions", str(folder), "verify"])
    assert "2 sessions, all files are whole" in (text := capsys.readouterr().out)
    assert "1 sessions, all files are whole" in text
    path = next(folder.glob(f"*{SUFFIX}"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(SystemExit):
        main(["sessions", str(folder), "verify"])
    assert "1 sessions, all files are whole" in capsys.readouterr().out, "of the other folder"
    path.write_bytes(content)
    main(["sessions", str(folder), "remove", first, second])
    assert not ids(other) and len(ids(folder)) == 1
    with pytest.raises(SystemExit):
        main(["sessions", str(folder), "remove", first])
    assert "0 sessions are called" in capsys.readouterr().err


def test_a_name_cannot_write_to_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names come from clients."""
    one, two, _ = ids(folder)
    pin(folder, {"scope \x1b]0;owned\x07": one, "scope d'où 日本": two})
    main(["sessions", str(folder)])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text
    assert "\\x1b]0;owned\\x07" in text and "d'où 日本" in text


def test_two_files_of_one_session(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As older versions left them after a change of parallel sizes: both are removed."""
    first, *_ = ids(folder)
    (path,) = folder.glob(f"{first}*")
    for rank in range(2):
        shutil.copy(path, folder / file_name(first, rank, 2))
    main(["sessions", str(folder), "remove", first])
    assert first not in ids(folder) and len(ids(folder)) == 2
    assert capsys.readouterr().out.count(f"removed {first}") == 2


def test_it_needs_no_vllm(folder: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules["vllm"] = None
from vllm_cascade.cli import main
main(["sessions", {str(folder)!r}])
assert not [name for name in sys.modules if name.startswith("vllm.")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "3 sessions" in done.stdout, done.stderr
