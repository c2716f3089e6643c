# SPDX-License-Identifier: Apache-2.0
"""``vllm-cascade``: lists policies, traces and checks one, counts a corpus, shows sessions."""

import argparse
import json
import os
from collections import deque
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_cascade.policies.arguments import FLAGS, OTHERS, default_of, parse, settings_of
from vllm_cascade.policies.flags import add_dotted_flags, add_flags
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, policy_of, resolve
from vllm_cascade.policies.settings import CONFIG_KEY, Given, KVPolicyConfig, KVPolicyError
from vllm_cascade.policies.simulate import Step, simulate

if TYPE_CHECKING:
    from vllm_cascade.attention.selfcheck_layer import LayerShape

STREAM = {"tokens": 1000, "scores": None, "head": 0, "every": 1, "json": None, "png": None}
"""Flags of ``trace`` without a model, and their defaults."""
PAGE = {"text": None, "model": None, "layer": None, "beside": ()}
"""The same for a page of a text: flags that ``--html`` needs or takes."""
SMALL_PAGE = 16
"""Tokens of vLLM's smallest usual pages: settings that fit larger ones fit these."""


def show_policies() -> None:
    """Print a table of all policies with their settings, defaults and sources."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="KV policies of vllm_cascade", show_lines=True)
    for header in ("policy", "what it keeps", "settings of its own (default)", "source"):
        table.add_column(header, overflow="fold")
    for name, cls in POLICIES.items():
        table.add_row(name, (cls.__doc__ or "").split("\n")[0], _settings(cls), cls.paper)
    console = Console()
    console.print(table)
    console.print("Every policy has:\n" + _settings(KVPolicyConfig), highlight=False)


def _settings(cls: type[KVPolicyConfig]) -> str:
    """List the settings that ``cls`` adds or gives another default."""
    fields = settings_of(cls).items()
    return "\n".join(f"{key} ({default_of(f)}): {f.description}" for key, f in fields)


def _given(args: argparse.Namespace) -> Given | None:
    """The settings of the flags, those of ``cascade`` if no policy is named; None for ``full``.

    Raises:
        KVPolicyError: as ``parse`` does.
    """
    values = vars(args)
    if CONFIG_KEY not in values and "name" not in values.get(OTHERS, {}):
        values = {**values, CONFIG_KEY: "cascade"}
    return parse(values, FLAGS)


def trace(args: argparse.Namespace) -> None:
    """Print which tokens of a stream a policy keeps, and write the JSON and PNG files asked for.

    Raises:
        KVPolicyError: the settings are invalid.
        ValueError: another flag or the shape of the scores is invalid, flags exclude one another,
            or there is no matplotlib.
    """
    settings = _given(args)
    if settings is None:
        raise KVPolicyError("full keeps every token; choose another --kv-policy to trace")
    _complete(args)
    for flag in ("html", "json", "png"):
        _check_place(f"--{flag}", getattr(args, flag, None))
    if args.html is not None:
        write_html(args, settings)
        return
    for flag in ("tokens", "every"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} {getattr(args, flag)}: it must be at least 1")
    if args.png and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install matplotlib")
    policy = resolve(settings)
    probs = load_scores(args.scores, args.head) if args.scores else None
    last = args.tokens // args.every * args.every
    if not last:
        raise ValueError(f"--every {args.every} is more than --tokens {args.tokens}")
    every = args.every if args.json or args.png else last
    steps = simulate(policy, args.tokens, probs, every)
    if args.json:
        steps = _written(policy, steps, args.json)
    kept = deque(steps, maxlen=None if args.png else 1)  # a step has a list of the whole cache
    summarise(policy, kept[-1])
    if args.png:
        draw(policy, kept, args.png)


def _written(policy: Policy, steps: Iterator[Step], path: Path) -> Iterator[Step]:
    """Pass on steps, each of which is first written to a JSON file."""
    resolved = {"name": policy.name, **policy.model_dump()}
    with path.open("w") as file:
        file.write(f'{{"policy": {json.dumps(resolved)}, "steps": [')
        between = ""
        for step in steps:
            file.write(between + json.dumps(vars(step)))
            between = ", "
            yield step
        file.write("]}")


def _complete(args: argparse.Namespace) -> None:
    """Fill in the defaults of a trace's flags.

    Raises:
        ValueError: a flag that would be ignored, with or without ``--html``.
    """
    mine, others = (STREAM, PAGE) if args.html is None else (PAGE, STREAM)
    for flag in others:
        if flag in args:
            how = "without" if args.html is None else "with"
            raise ValueError(f"--{flag} has no effect {how} --html")
    for flag, default in mine.items():
        setattr(args, flag, getattr(args, flag, default))


def _check_place(flag: str, path: Path | None) -> None:
    """Check before the work that its result can be written.

    Raises:
        ValueError: there is no folder for the file, or the path is a folder.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path}: it is a folder; name a file in it")


def load_scores(path: str, head: int) -> np.ndarray:
    """The array of ``--scores``, or one head of it.

    Raises:
        OSError, ValueError: the file cannot be read, or has no such head.
    """
    found = np.load(path)
    if not isinstance(found, np.ndarray):
        raise ValueError(f"--scores {path}: it must be a .npy file of one array, not .npz")
    if found.ndim == 3:
        if not 0 <= head < len(found):
            raise ValueError(f"--head {head}: {path} has {len(found)} heads")
        found = found[head]
    return found


def write_html(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Run a text through an engine for each policy, and write a page that shows what they keep.

    All that can be wrong with the flags is found before the first engine starts.

    Raises:
        OSError: ``--text`` cannot be read.
        ValueError: ``--text`` or ``--model`` is missing, or a policy's settings are invalid.
    """
    if not (args.text and args.model):
        raise ValueError("--html needs --text and --model")
    text = args.text.read_text("utf-8")
    _check_settings(settings)
    shared = {"budget": settings["budget"]} if "budget" in settings else {}
    policies = [settings, *(_beside(word, shared) for word in args.beside)]
    from vllm_cascade import register
    from vllm_cascade.engine.trace_page import write_page

    register()
    _leave_memory()
    write_page(args.html, text, args.model, policies, args.layer)


def _beside(word: str, shared: dict[str, Any]) -> dict[str, Any]:
    """The settings of a policy of ``--beside``.

    Raises:
        ValueError: they are invalid, or no JSON.
    """
    try:
        own = {**shared, **(json.loads(word) if word.startswith("{") else {"name": word})}
        if own.get("name") == "full":
            raise ValueError("full keeps every token; leave it out")
        _check_settings(own)
    except ValueError as error:
        raise ValueError(f"--beside {word}: {error}") from None
    return own


def _check_settings(settings: dict[str, Any]) -> None:
    """Check what does not depend on the model. An engine has pages, other than a trace without one.

    Raises:
        KVPolicyError: the settings are invalid.
    """
    resolve(settings, block_size=SMALL_PAGE if settings.get("unit") == "page" else None)


def _leave_memory() -> None:
    """Let an engine on the CPU reserve a quarter of the memory that is free, unless the user says.

    By default it wants 92 % of all memory to be free. One request at a time is all that runs.
    """
    from vllm_cascade.engine.recall_memory import available_bytes

    gigabytes = available_bytes() // 4 >> 30
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(gigabytes, 1)))


def _of_engine(settings: Given, model: str | None) -> tuple[Policy, tuple["LayerShape", ...]]:
    """The policy of an engine with these settings, and the shapes of its layers.

    Args:
        model: None: the layers are those of Llama 3 8B, and positions are unbounded.

    Raises:
        KVPolicyError: the settings are invalid, or an engine refuses the model.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from vllm_cascade import register
    from vllm_cascade.attention.selfcheck_layer import LayerShape
    from vllm_cascade.engine.certify import shapes_of
    from vllm_cascade.engine.configure import default_recall
    from vllm_cascade.engine.devices import this_device

    if model:
        register()
        arguments = EngineArgs(model=model, additional_config={CONFIG_KEY: settings})
        config = arguments.create_engine_config()
        policy = policy_of(config.additional_config)
        assert policy is not None
        return policy, shapes_of(config)
    page = this_device().page_tokens or LayerShape.block_size
    policy = default_recall(settings, lambda some: (resolve(some, block_size=page), ""))
    return policy, (LayerShape(32, 8, 128, torch.bfloat16, page),)


def check(args: argparse.Namespace) -> None:
    """Compare a policy's kernels with PyTorch on this machine, and print a table.

    Raises:
        KVPolicyError: a kernel differs, or the settings are invalid.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from vllm_cascade.attention.selfcheck_layer import LayerShape
    from vllm_cascade.engine.certify import certify
    from vllm_cascade.engine.devices import this_device

    device = this_device()
    settings = _given(args)
    if settings is None:
        raise KVPolicyError("full is stock vLLM; choose another --kv-policy to check")
    policy, shapes = _of_engine(settings, args.model)
    rows = certify(policy, shapes, device, torch.device(device.name), "always")
    table = Table(
        title=f"{policy.name} on {device.name}: {', '.join(map(LayerShape.label, shapes))}"
    )
    for header in ("step", "compared with PyTorch", "largest relative error"):
        table.add_column(header)
    for row in rows:
        table.add_row(row.what, row.compared, f"{row.error:.1e}")
    Console().print(table)


def idf(args: argparse.Namespace) -> None:
    """Count a corpus and write its table of document frequencies.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the corpus has no text, or there is no folder for the table.
    """
    _check_place("--out", args.out)
    from vllm.tokenizers import get_tokenizer

    from vllm_cascade.policies.idf import build_from_files

    tokenizer = get_tokenizer(
        args.tokenizer, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
    )
    table = build_from_files(tokenizer, args.corpus)
    if table.num_sentences == 0:
        raise ValueError("--corpus has no text in it")
    table.save(args.out)
    print(
        f"{args.out}: {int(table.counts.sum()):,} tokens, {table.num_sentences:,} sentences, "
        f"{int((table.counts > 0).sum()):,} of {len(table.counts):,} token ids seen"
    )


def sessions(args: argparse.Namespace) -> None:
    """List, verify or remove the sessions in a folder.

    Raises:
        ValueError, OSError: as ``command.run``.
    """
    from vllm_cascade.sessions.command import run

    run(args.dir, args.action, args.names)


def summarise(policy: Policy, step: Step) -> None:
    """Print the kept tokens of one step by region."""
    print(f"{policy.name} after {step.t} tokens: {len(step.kept)} kept")
    for region in dict.fromkeys(step.region):
        members = [i for i, name in zip(step.kept, step.region, strict=True) if name == region]
        print(f"  {region:8} {len(members):5}  {runs(members)}")
    if policy.recall:
        print(
            f"  recalled {step.recalled:5}  besides, of {step.stored} evicted tokens in host "
            f"memory; queries select {step.recalled // policy.unit} units of {policy.unit}"
        )


def runs(indices: list[int]) -> str:
    """Format indices as ranges: ``[0, 1, 2, 5, 9, 10]`` gives ``0-2, 5, 9-10``."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def draw(policy: Policy, steps: Collection[Step], path: Path) -> None:
    """Plot the cached tokens (x) against the tokens seen (y), coloured by region."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for step in steps for name in step.region))
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    for name in names:
        points = [
            (index, step.t)
            for step in steps
            for index, region in zip(step.kept, step.region, strict=True)
            if region == name
        ]
        axes.scatter(*zip(*points, strict=True), s=1, label=name, linewidths=0)
    axes.set(
        xlabel="token's index in the stream",
        ylabel="tokens seen",
        title=f"Tokens that {policy.name} keeps (budget {policy.budget}, {policy.protected} sinks)",
    )
    axes.invert_yaxis()
    axes.legend(markerscale=8, loc="upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(prog="vllm-cascade", description=__doc__)
    commands = main_parser.add_subparsers(dest="command", required=True)
    commands.add_parser("policies", help="list the policies, their settings and sources")
    tracer = commands.add_parser("trace", help="show which tokens a policy keeps, without a model")
    # The defaults depend on --html, with which flags of a stream are refused.
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    tracer.add_argument("--tokens", type=int, **absent, help="length of the stream (default: 1000)")
    tracer.add_argument(
        "--scores",
        **absent,
        help=".npy of attention probabilities [T, T] or [heads, T, T], row = query; for dgc's "
        "tfidf: [T], the tokens' importance",
    )
    tracer.add_argument("--head", type=int, **absent, help="which head of --scores (default: 0)")
    tracer.add_argument("--every", type=int, **absent, help="tokens between two steps (default: 1)")
    tracer.add_argument("--json", type=Path, **absent, help="write every step here")
    tracer.add_argument("--png", type=Path, **absent, help="draw every step here")
    page = tracer.add_argument_group("a page", "of a text that runs through an engine")
    page.add_argument("--html", type=Path, help="write the page here")
    page.add_argument("--text", type=Path, **absent, help="the text, UTF-8")
    page.add_argument("--model", **absent, help="the model's name or folder")
    page.add_argument(
        "--layer",
        type=int,
        **absent,
        help="which attention layer (default: the middle one of those without a window)",
    )
    page.add_argument(
        "--beside", nargs="+", **absent, help="more policies: names, or objects of settings"
    )
    checker = commands.add_parser(
        "check", help="compare a policy's kernels with PyTorch on this machine"
    )
    checker.add_argument(
        "--model",
        help="whose layers' shapes are checked, as far as its "
        "configuration says (default: Llama 3 8B's)",
    )
    for command in (tracer, checker):
        add_flags(command, default="cascade")
        add_dotted_flags(command)
    idf = commands.add_parser("idf", help="count a corpus for dgc's importance tfidf")
    idf.add_argument("--tokenizer", required=True, help="the model's name or folder")
    idf.add_argument("--corpus", required=True, nargs="+", type=Path, help="text files, UTF-8")
    idf.add_argument("--out", required=True, type=Path, help="the table, .safetensors")
    idf.add_argument("--tokenizer-mode", default="auto", help="as vLLM's")
    idf.add_argument("--trust-remote-code", action="store_true", help="as vLLM's")
    lister = commands.add_parser("sessions", help="list, verify or remove the sessions in a folder")
    lister.add_argument("dir", type=Path, help="the folder of --kv-sessions-dir")
    lister.add_argument(
        "action",
        nargs="?",
        choices=("list", "verify", "remove"),
        default="list",
        help="list the sessions, verify every file's checksum, or remove sessions",
    )
    lister.add_argument(
        "names", nargs="*", help="for remove: names, or ids, at least their first 8 letters"
    )
    return main_parser


def main(argv: list[str] | None = None) -> None:
    main_parser = parser()
    args = main_parser.parse_args(argv)
    if args.command == "policies":
        show_policies()
        return
    try:
        commands = {"idf": idf, "check": check, "trace": trace, "sessions": sessions}
        commands[args.command](args)
    except (ValueError, OSError) as error:
        main_parser.error(str(error))
    except ModuleNotFoundError as error:
        main_parser.error(
            f"{args.command} needs {error.name}: with a GPU, install vllm-cascade[cuda]; on a CPU, "
            "run `make setup` in a checkout, or build the target cpu of its Dockerfile"
        )


if __name__ == "__main__":
    main()
