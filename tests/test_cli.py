# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade``: the policies, and a trace that agrees with what the engine's code keeps."""

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.test_paged import CASES, PagedLayer, Shape, oracle_for
from tests.oracle.settings import make_sim
from tests.oracle.unit_cases import CASES as UNIT_CASES
from vllm_cascade import cli
from vllm_cascade.attention.recorder import kept_tokens
from vllm_cascade.cli import main, runs
from vllm_cascade.engine import recall_memory
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.simulate import Step, simulate


def trace(tmp_path: Path, settings: dict[str, Any], *flags: str) -> dict[str, Any]:
    own = {k: v for k, v in settings.items() if k not in ("name", "budget")}
    out = tmp_path / "trace.json"
    command = ["trace", "--kv-policy", settings["name"], "--kv-budget", str(settings["budget"])]
    main([*command, "--kv-policy-config", json.dumps(own), "--json", str(out), *flags])
    return json.loads(out.read_text())


def test_policies_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    main(["policies"])
    text = capsys.readouterr().out
    for name, cls in POLICIES.items():
        assert name in text
        assert all(key[:8] in text for key in cls.model_fields)


@pytest.mark.parametrize("name", ["sink", "cascade-paper", "lazy-1", "h2o", "beehive-1"])
def test_without_scores_it_is_the_simulation(name: str, tmp_path: Path) -> None:
    settings = {"prefill_stride": 1, "head_policy": "homogeneous", **CASES[name][1]}
    document = trace(tmp_path, settings, "--tokens", "300")
    assert document["policy"]["name"] == settings["name"]
    assert document["policy"]["budget"] == settings["budget"]
    sim = make_sim(settings)
    for token, step in enumerate(document["steps"]):
        sim.insert(token, lambda _: 0.0)
        assert step["t"] == token + 1
        assert step["kept"] == sim.tokens()
        assert len(step["region"]) == len(step["kept"])
        assert step["region"].count("sink") == min(token + 1, settings["num_sinks"])


def test_recall_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the 1 + 4 units that the policy keeps are stored, at most 20; 3 come back."""
    settings = {"name": "sink", "budget": 64, "unit": 16, "recall": 3, "recall_store": 320}
    steps = trace(tmp_path, {**settings, "prefill_stride": 16}, "--tokens", "600")["steps"]
    for t, step in enumerate(steps, start=1):
        evicted = max(t // 16 - 5, 0)
        assert (step["stored"], step["recalled"]) == (16 * min(evicted, 20), 16 * min(evicted, 3))
    assert "recalled    48  besides, of 320 evicted tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["sink-8", "lazy-8", "cascade-8-all", "h2o-8-all", "beehive-8-all"]
)
def test_units_are_the_simulations(name: str, tmp_path: Path) -> None:
    """Every token gets attention from its own query only, so that a sum of it never changes.

    A cascade's average would: to it all are worth the same.
    """
    (case,) = [case for case in UNIT_CASES if case.id == name]
    settings = {**case.settings, "head_policy": "homogeneous"}
    worth = [0.0 if "cascade" in name else float(7 * token % 31) for token in range(700)]
    np.save(tmp_path / "scores.npy", np.diag(worth))
    document = trace(
        tmp_path, settings, "--tokens", "700", "--scores", str(tmp_path / "scores.npy")
    )
    sim = make_sim(settings)
    for token, step in enumerate(document["steps"]):
        sim.insert(token, worth.__getitem__)
        sim.end_stride(worth.__getitem__)
        assert (step["t"], step["kept"]) == (token + 1, sim.tokens())
        assert step["region"].count("filling") == (token + 1) % 8
    assert len(document["steps"][-1]["kept"]) < 200


@pytest.mark.parametrize("name", ["cascade", "cascade-overflow", "h2o", "h2o-normalise", "beehive"])
def test_with_an_engines_probabilities_it_keeps_what_the_engine_keeps(
    name: str, tmp_path: Path
) -> None:
    """The paged layer runs token by token; its probabilities then drive the trace."""
    shape, settings = Shape(), CASES[name][1]
    settings = {**settings, "prefill_stride": 1, "head_policy": "homogeneous"}
    layer = PagedLayer(shape, settings, 8)
    literal = oracle_for(settings, shape, layer)
    torch.manual_seed(3)
    total = 90
    query = torch.randn(total, 4, 16)
    key, value = torch.randn(2, total, 2, 16).unbind(0)
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    kept = []
    for t in range(total):
        row = slice(t, t + 1)
        layer.step(
            [1], [t], [False], table, query[row], key[row], value[row], rotate=literal.rotate
        )
        literal.step(query[row], key[row], value[row])
        slots = layer.spec.schedule.peak_at(t + 1)
        kept.append(kept_tokens(layer.pages, table[0].long(), slots, t + 1)[0])
    probs = np.zeros((2, total, total))
    for t, row in enumerate(literal.probs):
        probs[1, t, list(row)] = list(row.values())
    np.save(tmp_path / "probs.npy", probs)
    flags = ["--tokens", str(total), "--scores", str(tmp_path / "probs.npy"), "--head", "1"]
    steps = trace(tmp_path, settings, *flags)["steps"]
    assert [step["kept"] for step in steps] == kept


def test_every_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "trace.png"
    flags = ["--tokens", "100", "--every", "10", "--png", str(png)]
    document = trace(tmp_path, {"name": "sink", "budget": 8}, *flags)
    assert [step["t"] for step in document["steps"]] == list(range(10, 101, 10))
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "sink after 100 tokens: 12 kept" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_steps_are_not_kept(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long stream's would take gigabytes. The file is the one that all steps at once give."""
    alive = [0, 0]  # now, at most

    def counted(*args: Any) -> Iterator[Step]:
        for step in simulate(*args):
            alive[0] += 1
            alive[1] = max(alive)
            weakref.finalize(step, lambda: alive.__setitem__(0, alive[0] - 1))
            yield step
            del step

    monkeypatch.setattr(cli, "simulate", counted)
    settings = {"name": "sink", "budget": 8}
    policy = resolve(settings)
    if as_json:
        trace(tmp_path, settings, "--tokens", "300", "--every", "2")
        steps = [vars(step) for step in simulate(policy, 300, None, 2)]
        document = {"policy": {"name": "sink", **policy.model_dump()}, "steps": steps}
        assert (tmp_path / "trace.json").read_text() == json.dumps(document)
    else:
        main(["trace", "--kv-policy", "sink", "--kv-budget", "8", "--tokens", "300"])
    assert 1 <= alive[1] <= 2, "the last one and the next"


def test_the_last_step_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Of those at multiples of ``--every``."""
    main(["trace", "--kv-policy", "sink", "--kv-budget", "8", "--tokens", "99", "--every", "10"])
    shown = capsys.readouterr().out
    assert "sink after 90 tokens: 12 kept" in shown and "82-89" in shown


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "cascade"),
        (["--kv-policy-config", '{"name": "h2o"}'], "h2o"),
        (["--kv-policy-config.name", "sink"], "sink"),
    ],
)
def test_a_policy_is_named_anywhere(
    flags: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``vllm serve`` takes it; without a name it is a cascade."""
    main(["trace", "--tokens", "9", *flags])
    assert f"{name} after 9 tokens" in capsys.readouterr().out


def test_wrong_scores_leave_a_file_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.zeros((4, 4)))
    (tmp_path / "old.json").write_text("as it was")
    flags = ["--tokens", "9", "--scores", str(tmp_path / "small.npy")]
    with pytest.raises(SystemExit):
        main(["trace", *flags, "--json", str(tmp_path / "old.json")])
    assert (tmp_path / "old.json").read_text() == "as it was"


def test_the_default_policy_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    assert "stock vLLM. (default: cascade)" in " ".join(capsys.readouterr().out.split())


PAGE = ["--text", __file__, "--model", "none"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-policy", "full"], "full keeps every token"),
        (["--kv-budget", "33"], "--kv-budget 33 does not fit .*; set it to 32 or 64"),
        (["--tokens", "5", "--every", "6"], "--every 6 is more than --tokens 5"),
        (["--every", "0"], "--every 0: it must be at least 1"),
        (["--tokens", "0"], "--tokens 0: it must be at least 1"),
        (["--kv-policy-check", "off"], "unrecognized arguments"),
        (["--tokens", "9", "--scores", "SMALL"], "scores must be an array"),
        (["--tokens", "3", "--scores", "HEADS", "--head", "2"], "--head 2: .* has 2 heads"),
        (["--scores", "missing.npy"], "missing.npy"),
        (["--scores", "SEVERAL"], "several.npz: .* one array"),
        (["--json", "FOLDER/none/a.json"], "--json .*/a.json: there is no folder .*none"),
        (["--png", "FOLDER/none/a.png"], "--png .*/a.png: there is no folder .*none"),
        (["--png", "FOLDER"], "--png .*: it is a folder"),
        ([*PAGE, "--html", "FOLDER/none/a.html"], "--html .*/a.html: there is no folder .*none"),
        ([*PAGE, "--html", "a.html", "--json", "a.json"], "--json has no effect with --html"),
        ([*PAGE, "--html", "a.html", "--tokens", "1000"], "--tokens has no effect with --html"),
        ([*PAGE, "--html", "a.html", "--beside", "h2o", "windw"], "--beside windw: .* 'windw'"),
        ([*PAGE, "--html", "a.html", "--beside", "full"], "--beside full: .* keeps every token"),
        ([*PAGE, "--html", "a.html", "--beside", '{"name": "full"}'], "full.* keeps every token"),
        ([*PAGE, "--html", "a.html", "--beside", '{"name"'], "--beside {.name.: "),
        ([*PAGE, "--html", "a.html", "--kv-budget", "33"], "--kv-budget 33 does not fit"),
        (["--model", "m", "--html", "a.html", "--text", "none.txt"], "none.txt"),
        (["--layer", "0"], "--layer has no effect without --html"),
        (["--beside", "h2o"], "--beside has no effect without --html"),
    ],
)
def test_errors(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "small.npy", np.zeros((4, 4)))
    np.save(tmp_path / "heads.npy", np.zeros((2, 4, 4)))
    np.savez(tmp_path / "several.npz", a=np.zeros((4, 4)))
    files = {"SMALL": "small.npy", "HEADS": "heads.npy", "SEVERAL": "several.npz"}
    places = {name: str(tmp_path / file) for name, file in files.items()}
    with pytest.raises(SystemExit):
        main(["trace", *(places.get(f, f.replace("FOLDER", str(tmp_path))) for f in flags)])
    assert re.search(message, capsys.readouterr().err)


def test_units_of_a_page_are_left_to_the_engine() -> None:
    word = '{"name": "sink", "unit": "page"}'
    assert cli._beside(word, {"budget": 256}) == {"budget": 256, **json.loads(word)}
    cli._check_settings({"name": "sink", "unit": "page", "budget": 256})


def test_without_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the wheel was installed."""

    def missing(args: Any) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "check", missing)
    with pytest.raises(SystemExit):
        cli.main(["check"])
    said = " ".join(capsys.readouterr().err.split())
    assert "check needs torch: with a GPU, install vllm-cascade[cuda]; on a CPU, run `make" in said


def test_a_pages_engine_takes_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would want 92 % of the machine's to be free, for a single request."""
    for gibibytes, expected in ((40, "10"), (18, "4"), (2, "1")):
        free = gibibytes << 30
        monkeypatch.setattr(recall_memory, "available_bytes", lambda free=free: free)
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        cli._leave_memory()
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == expected
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    cli._leave_memory()
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7", "what the user says"


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_cascade.cli.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main(["trace", "--png", "a.png"])
    assert "--png needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_a_table_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before a corpus is counted."""
    out = tmp_path / "none" / "idf.safetensors"
    with pytest.raises(SystemExit):
        main(["idf", "--tokenizer", "none", "--corpus", "none", "--out", str(out)])
    assert f"there is no folder {out.parent}" in capsys.readouterr().err


def test_keys_are_merged(tmp_path: Path) -> None:
    settings = {"name": "cascade", "budget": 64, "tie": "resident", "num_sinks": 2}
    policy = trace(tmp_path, settings, "--kv-policy-config.tie", "incoming")["policy"]
    assert (policy["tie"], policy["num_sinks"]) == ("incoming", 2)


@pytest.mark.parametrize(
    "command",
    [
        ["policies"],
        ["trace", "--kv-policy", "h2o", "--kv-budget", "64", "--kv-policy-config.overflow", "8"],
    ],
)
def test_it_answers_without_vllm(command: list[str], tmp_path: Path) -> None:
    """Nor PyTorch, of which either takes seconds to import; the installed script is run."""
    script = str(Path(sys.executable).with_name("vllm-cascade"))
    code = f"""
import runpy, sys, time
sys.argv = {[script, *command]!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
print({{"torch", "vllm"}} & set(sys.modules), time.process_time())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *shown, last = done.stdout.splitlines()
    assert "h2o" in "\n".join(shown) and ("waiting" in "\n".join(shown)) == (command[0] == "trace")
    loaded, seconds = last.rsplit(maxsplit=1)
    assert loaded == "set()" and float(seconds) < 1


def test_runs() -> None:
    assert runs([0, 1, 2, 5, 9, 10]) == "0-2, 5, 9-10"
    assert runs([]) == ""
