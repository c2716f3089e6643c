# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade sessions``, also on a machine without vLLM."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.sessions.test_files import pin
from vllm_cascade.cli import main
from vllm_cascade.sessions.files import FOREIGN, SUFFIX, file_name, write
from vllm_cascade.sessions.session import Session


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for num in (5, 70000, 9):
        one = Session("context", f"tokens{num}", num, 100)
        header = {**dict.fromkeys(FOREIGN, "this"), **one.header, "model_name": "a-model"}
        header["rank"] = "0of1"
        write(
            tmp_path / file_name(one.id, 0, 1),
            header,
            {"a": torch.zeros(1 << 20, dtype=torch.int8)},
        )
        if num == 70000:
            pin(tmp_path, {"scope mine": one.id})
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
