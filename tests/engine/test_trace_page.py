# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade trace --html``: the data against written-out windows, the page in Chromium."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BOOK, MODEL, ROOT
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
    (line,) = re.findall(r"^const DATA = (.*);$", page, re.MULTILINE)
    return json.loads(line)


def test_frames_are_the_windows(data: dict[str, Any]) -> None:
    """The first tokens and the last 64 after every stride; recalled units lie between them."""
    tokens = data["tokens"]
    assert "".join(tokens) == BOOK.read_text()[:4000]
    for run, sinks, stride, recalled in zip(data["runs"], (4, 16), (32, 64), (0, 32), strict=True):
        assert [end for end, _ in run["frames"]] == list(range(stride, len(tokens) + 1, stride))
        assert len(run["logprobs"]) == len(tokens) - 1
        for end, runs in run["frames"]:
            found: dict[str, list[int]] = {}
            at = 0
            for gap, length, region in zip(*(iter(runs),) * 3, strict=True):
                found.setdefault(run["regions"][region], []).extend(
                    range(at + gap, at + gap + length)
                )
                at += gap + length
            assert found["sink"] == list(range(min(sinks, end)))
            assert found.get("window", []) == list(range(max(sinks, end - 64), end))
            assert len(found.get("recalled", [])) == min(
                recalled, max(end - stride - sinks - 64, 0)
            )
    assert len(json.dumps(data)) / len(tokens) < 100, "2 MB for 10,000 tokens are 200 a token"


def test_there_is_room_for_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character may be several tokens."""
    made: dict[str, Any] = {}

    def stop(model: str, **kwargs: Any) -> None:
        made.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr(trace_page, "LLM", stop)
    with pytest.raises(InterruptedError):
        trace_page.run("\u1230\u120b\u121d" * 10, "none", {"name": "sink"}, None)
    assert made["max_model_len"] > 3 * 30


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
