# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama that uses its whole context: ``python -m benchmarks.train_lm TEXT...``.

The shipped model learned too briefly to look far back, so it cannot tell eviction policies apart.
This script makes one that can: text files in, a tokenizer and a model out, in the form that vLLM
loads. A share of its sequences repeats passages or hides a pass key (``training_data``); the loss
of those tokens is reported apart. It resumes from its last checkpoint by itself.

``--grow-from 256`` begins with sequences of 256 tokens, in which attention costs little, and
doubles them in equal parts of the run; the tokens of a step stay as many.

On one GPU, about 20 minutes (--minutes ends it, whatever is left of --steps)::

    python -m benchmarks.train_lm shared/data/books benchmarks/inputs/books --out results/lm \\
        --hidden 512 --layers 10 --heads 8 --kv-heads 4 --vocab 8192 --length 2048 \\
        --batch 32 --steps 20000 --minutes 20 --held-out persuasion

On a CPU, to see it work: ``--hidden 128 --layers 2 --length 256 --batch 8 --steps 200``.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.inputs.texts import read
from benchmarks.inputs.training_data import Sequences, train_tokenizer
from benchmarks.running.environment import fingerprint

if TYPE_CHECKING:
    import torch

CHECKPOINT = "checkpoint.pt"
EVALUATION_STEP = 1 << 40
"""Far from any training step."""
LARGEST_MODEL = 40 * 10**6


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("texts", nargs="+", help="text files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--held-out", nargs="*", default=[], help="names of texts not trained on")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048, help="positions")
    parser.add_argument("--grow-from", type=int, help="tokens of the first sequences")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, of --length")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="end earlier, with the model of that moment")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--repeat-share", type=float, default=0.3)
    parser.add_argument("--passkey-share", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.hidden % args.heads or args.heads % args.kv_heads:
        parser.error("--hidden must be a multiple of --heads, and that of --kv-heads")
    args.grow_from = args.grow_from or args.length
    doublings = args.length // args.grow_from
    if args.length % args.grow_from or doublings & (doublings - 1):
        parser.error("--length must be --grow-from times a power of two")
    return args


@dataclass
class Losses:
    """Nats a token: of all tokens, of distant repeats and pass keys, and of the rest."""

    everything: float
    distant: float
    ordinary: float

    def __str__(self) -> str:
        return f"loss {self.everything:.3f}, distant {self.distant:.3f}, rest {self.ordinary:.3f}"


def model_of(args: argparse.Namespace, vocab_size: int) -> Any:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=-(-args.hidden * 8 // 3 // 64) * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def rate_at(step: int, args: argparse.Namespace, done: float) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak.

    Args:
        done: share of the run that is over.
    """
    if step < args.warm_up:
        return args.rate * (step + 1) / args.warm_up
    return args.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))


def length_at(done: float, args: argparse.Namespace) -> int:
    """Tokens of a sequence when a share ``done`` of the run is over."""
    doublings = (args.length // args.grow_from).bit_length() - 1
    stage = int(min(max(done, 0.0), 1.0) * (doublings + 1))
    return args.grow_from << min(stage, doublings)


class Trainer:
    """Model, optimizer and data of a run, and where it is."""

    def __init__(
        self,
        args: argparse.Namespace,
        data: Sequences,
        vocab_size: int,
        held_out: Sequences | None = None,
    ) -> None:
        import torch

        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args, self.data, self.step, self.seconds = args, data, 0, 0.0
        self.held_out = held_out or data
        self.log: list[dict[str, float]] = []
        self.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model_of(args, vocab_size).to(self.device)
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        fused = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), fused=fused)
        forward = self._token_losses
        # Static shapes: sequences grow a few times at most, and fixed sizes run faster.
        compiled = not args.no_compile
        self.token_losses = torch.compile(forward, dynamic=False) if compiled else forward

    def _token_losses(self, tokens: "torch.Tensor") -> "torch.Tensor":
        """Loss of every token but the first, fp32 ``[batch, length - 1]``."""
        import torch

        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        return losses.view(tokens.shape[0], -1)

    def _run(
        self, data: Sequences, step: int, length: int
    ) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Token losses of a step's batch, and which of them are distant."""
        import torch

        batch = data.batch(step, self.args.batch * self.args.length // length, length)
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            losses = self.token_losses(tokens)
        return losses, torch.from_numpy(batch.distant[:, 1:]).to(self.device)

    def train_step(self, done: float) -> float:
        """One step, when a share ``done`` of the run is over; returns its loss."""
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, self.args, done)
        self.model.train()
        losses, _ = self._run(self.data, self.step, length_at(done, self.args))
        loss = losses.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def evaluate(self, batches: int = 4) -> Losses:
        """Losses of batches that are the same every time, of held-out texts if there are any."""
        import torch

        self.model.eval()
        with torch.no_grad():
            steps = range(EVALUATION_STEP, EVALUATION_STEP + batches)
            runs = [self._run(self.held_out, step, self.args.length) for step in steps]
        losses = torch.cat([run[0].flatten() for run in runs]).float()
        distant = torch.cat([run[1].flatten() for run in runs])
        return Losses(
            float(losses.mean()),
            float(losses[distant].mean()) if distant.any() else math.nan,
            float(losses[~distant].mean()),
        )

    def save(self, path: Path) -> None:
        """A checkpoint; an interrupted write leaves the old one."""
        import torch

        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        import torch

        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]


def tokens_of(texts: Sequence[str], tokenizer: Any) -> np.ndarray:
    """All texts' tokens, each followed by the end token."""
    parts = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def prepare(args: argparse.Namespace) -> tuple[Sequences, Sequences | None, Any]:
    """Sequences to train on and to be judged by, and the tokenizer (made once, then loaded)."""
    from transformers import AutoTokenizer

    texts: dict[str, str] = {}
    for source in args.texts:
        texts |= read(source)
    missing = set(args.held_out) - set(texts)
    if missing:
        raise SystemExit(f"--held-out {', '.join(missing)}: not among {', '.join(texts)}")
    kept = [text for name, text in texts.items() if name not in args.held_out]
    if (args.out / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(args.out)
    else:
        tokenizer = train_tokenizer(kept, args.vocab, args.out)
    tokenizer.model_max_length = 1 << 60
    shares = (args.repeat_share, args.passkey_share)

    def sequences(some: Sequence[str]) -> Sequences:
        tokens = tokens_of(some, tokenizer)
        return Sequences(tokens, tokenizer, args.length, shares=shares, seed=args.seed)

    unseen = [texts[name] for name in args.held_out]
    return sequences(kept), sequences(unseen) if unseen else None, tokenizer


def export(trainer: Trainer, tokenizer: Any) -> None:
    """The model in bf16, its tokenizer, and how it was made."""
    import torch

    out, args = trainer.args.out, trainer.args
    trainer.model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.model_max_length = args.length
    tokenizer.save_pretrained(out)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    settings = {key: str(value) for key, value in vars(args).items()}
    made = {"settings": settings, "environment": fingerprint(), "log": trainer.log}
    (out / "training.json").write_text(json.dumps(made, indent=1) + "\n")
    note = "" if size <= LARGEST_MODEL else " (more than 40 MB: too large for the repository)"
    print(f"Wrote {out}: {size / 1e6:,.1f} MB{note}.")


def train(trainer: Trainer, checkpoint: Path) -> None:
    """Steps until they, or the minutes, are over."""
    from tqdm import tqdm

    args = trainer.args
    before, start = trainer.seconds, time.perf_counter()
    budget = math.inf if args.minutes is None else 60 * args.minutes
    with tqdm(total=args.steps, initial=trainer.step, unit="step", dynamic_ncols=True) as bar:
        while trainer.step < args.steps and trainer.seconds < budget:
            by_steps = (trainer.step - args.warm_up) / max(args.steps - args.warm_up, 1)
            loss = trainer.train_step(max(by_steps, trainer.seconds / budget))
            trainer.seconds = before + time.perf_counter() - start
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if trainer.step % args.every == 0 or trainer.step == args.steps:
                losses = trainer.evaluate()
                bar.write(f"step {trainer.step:,}: {losses}")
                now = {"step": trainer.step, "seconds": trainer.seconds}
                trainer.log.append({**now, **vars(losses)})
                trainer.save(checkpoint)
    trainer.save(checkpoint)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or go on training."""
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    data, held_out, tokenizer = prepare(args)
    trainer = Trainer(args, data, len(tokenizer), held_out)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:,.1f} M parameters, {len(data.tokens):,} tokens, {trainer.device}")
    checkpoint = args.out / CHECKPOINT
    if checkpoint.is_file():
        trainer.load(checkpoint)
        print(f"Going on from step {trainer.step:,} after {trainer.seconds:,.0f} s.")
    train(trainer, checkpoint)
    export(trainer, tokenizer)


if __name__ == "__main__":
    main()
