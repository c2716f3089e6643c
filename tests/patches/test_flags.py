# SPDX-License-Identifier: Apache-2.0
"""The three flags, the three ``LLM`` arguments, and what they become."""

import copy
import functools
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli import snapshot
from vllm.entrypoints.cli.preload import PreloadSubcommand
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_cascade.engine.configure
from tests.conftest import MODEL, ROOT
from tests.patches import front_end
from tests.test_packaging import BIN
from vllm_cascade import patches
from vllm_cascade.engine import recall_memory
from vllm_cascade.engine.request_bodies import MIDDLEWARE
from vllm_cascade.patches import environment, preload, unsupported
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.settings import SessionSettings

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
try:
    from vllm.entrypoints.cli.benchmark.forward import BenchmarkForwardSubcommand
except ImportError:  # before vLLM 0.33
    BenchmarkForwardSubcommand = None


def parse(*flags: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(MODEL), *flags]))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--kv-policy", "full"], None),
        (["--kv-policy", "cascade"], {"name": "cascade"}),
        (["--kv-policy", "sink", "--kv-budget", "99"], {"name": "sink", "budget": 99}),
        (
            ["--kv-policy", "cascade", "--kv-policy-config", '{"num_subcaches": 2}'],
            {"name": "cascade", "num_subcaches": 2},
        ),
        (
            ["--kv-policy", "cascade", "--kv-policy-config.num_subcaches", "2"],
            {"name": "cascade", "num_subcaches": 2},
        ),
        (["--kv-policy-config", '{"name": "sink"}'], {"name": "sink"}),
        (
            [
                *("--kv-policy", "cascade", "--kv-policy-config.tie", "incoming"),
                *("--kv-policy-config", '{"num_subcaches": 2, "tie": "resident"}'),
            ],
            {"name": "cascade", "num_subcaches": 2, "tie": "incoming"},
        ),
    ],
)
def test_flags(flags: list[str], expected: dict[str, Any] | None) -> None:
    assert parse(*flags).additional_config.get("kv_policy") == expected


def test_a_flag_adds_to_a_file_of_settings(tmp_path: Path) -> None:
    """vLLM puts the file's values before the flags."""
    (tmp_path / "a.yaml").write_text(
        "kv-policy: cascade\nkv-policy-config: {num_sinks: 2, tie: resident}\n"
    )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--config")
    flags = ["--config", str(tmp_path / "a.yaml"), "--kv-policy-config.tie", "incoming"]
    args = AsyncEngineArgs.from_cli_args(parser.parse_args([*flags, "--model", str(MODEL)]))
    assert args.additional_config["kv_policy"] == {
        "name": "cascade",
        "num_sinks": 2,
        "tie": "incoming",
    }


def test_a_server_looks_at_bodies() -> None:
    """Beside what a user adds, and only where a parser is a server's."""
    server = make_arg_parser(FlexibleArgumentParser())
    assert server.parse_args([]).middleware == [MIDDLEWARE]
    assert server.parse_args(["--middleware", "a.b"]).middleware == [MIDDLEWARE, "a.b"]
    module, name = MIDDLEWARE.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)
    engine = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    assert not hasattr(engine.parse_args([]), "middleware")


SERVED = ("--kv-policy", "sink", "--kv-budget", "128", "--max-model-len", "20000")


def served(*flags: str) -> Any:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([str(MODEL), *flags])
    args.model = args.model_tag
    return args


@pytest.mark.slow
def test_spawned_servers_have_the_policy() -> None:
    """With more than one API server, and those of a supervisor, which configures nothing itself."""
    shared, supervised = served(*SERVED), copy.copy(served(*SERVED))
    config = AsyncEngineArgs.from_cli_args(shared).create_engine_config()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as spawned:
        found = [*spawned.map(front_end.configured, [shared, supervised])]
        engine = spawned.submit(vars, config).result()  # as an engine's process gets it
    (policy, *others), (own, *_) = found
    assert policy_of(policy) == policy_of(config.additional_config)
    assert policy_of(engine["additional_config"]) == policy_of(config.additional_config)
    assert policy == own == config.additional_config
    expected = config.parallel_config.worker_cls, 20_000, config.compute_hash()
    assert found[1][1:] == tuple(others) == expected


@pytest.mark.parametrize("first", ["much", "little"])
@pytest.mark.parametrize("in_config", [True, False])
def test_another_configuration_is_the_same(
    first: str, in_config: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API servers are configured after the engines, which may have taken the host's memory."""
    flags = SERVED
    if in_config:
        inside = '{"kv_policy": "sink", "kv_budget": 128, "kv_sessions": true}'
        flags = ("--additional-config", inside, *SERVED[4:])
    args, policies = served(*flags), []
    for available in (64 << 30, 1 << 10) if first == "much" else (1 << 10, 64 << 30):
        monkeypatch.setattr(recall_memory, "available_bytes", lambda most=available: most)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        policies.append(policy_of(config.additional_config))
        assert (SessionSettings.of(config.additional_config) is not None) is in_config
    assert policies[0] == policies[1]
    assert (policies[0].recall > 0) is (policies[0].recall_memory is not None)
    assert (policies[0].recall > 0) is (first == "much")


def test_a_server_that_renders_only() -> None:
    """It creates a model's configuration and no engine's."""
    args = AsyncEngineArgs.from_cli_args(served(*SERVED))
    assert args.create_model_config().max_model_len == 20_000
    with pytest.raises(ValueError, match="max_model_len"):
        AsyncEngineArgs.from_cli_args(served(*SERVED[4:])).create_model_config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"nonsense": 1}, "nonsense: unknown key"), ({"budget": -1}, "budget")],
)
def test_settings_of_a_server_that_renders_only(settings: dict[str, Any], message: str) -> None:
    """They are checked as far as they can be without an engine's limits."""
    flags = ("--kv-policy", "sink", "--kv-policy-config", json.dumps(settings))
    args = AsyncEngineArgs.from_cli_args(served(*flags))
    with pytest.raises(KVPolicyError, match=message):
        args.create_model_config()
    flags = ("--kv-policy", "sink", "--kv-policy-config", '{"unit": "page", "recall": 4}')
    assert AsyncEngineArgs.from_cli_args(served(*flags)).create_model_config()


def create_snapshot(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    """The arguments with which ``vllm snapshot create`` begins its work."""
    args = served("--revision", "a" * 40, *flags)
    args.model = args.model_tag = "some/model"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    snapshot.validate_create_args(args)
    return args


def test_snapshots_of_stock_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses servers that have middleware, and all have ours."""
    create_snapshot(monkeypatch)
    with pytest.raises(ValueError, match="one unauthenticated plaintext HTTP server"):
        create_snapshot(monkeypatch, "--middleware", "a.b")


@pytest.mark.parametrize(
    "flags",
    [SERVED, ("--kv-sessions",), ("--additional-config", '{"kv_policy": {"name": "sink"}}')],
)
def test_snapshots_of_policies(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVPolicyError, match="vllm snapshot create"):
        create_snapshot(monkeypatch, *flags)


@pytest.mark.parametrize("flags", [SERVED, ("--kv-sessions",)])
def test_preloaded_weights_have_no_policy(flags: tuple[str, ...]) -> None:
    """The command's daemons could not build the model."""
    with pytest.raises(KVPolicyError, match="vllm preload holds weights and no cache"):
        PreloadSubcommand.cmd(served(*flags))


@pytest.mark.skipif(BenchmarkForwardSubcommand is None, reason="new in vLLM 0.33")
def test_a_model_without_a_worker_has_no_policy() -> None:
    """The command calls the model runner itself; without a policy it goes on to its cases."""
    parser = FlexibleArgumentParser()
    BenchmarkForwardSubcommand.add_cli_args(parser)
    with pytest.raises(ValueError, match="Pass at least one --case"):
        BenchmarkForwardSubcommand.cmd(parser.parse_args([]))
    in_config = ("--additional-config", '{"kv_policy": {"name": "sink"}}')
    for flags in (("--kv-policy", "sink"), ("--kv-sessions",), in_config):
        with pytest.raises(KVPolicyError, match=r"vllm bench forward .* vllm bench latency"):
            BenchmarkForwardSubcommand.cmd(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-policy", "cascad"], "invalid choice: 'cascad'"),
        (["--kv-budget", "many"], "--kv-budget: invalid int value: 'many'"),
        (["--kv-policy", "sink", "--kv-policy-config", "{"], "--kv-policy-config: not JSON"),
        (["--kv-policy", "sink", "--kv-policy-config", "[1]"], "must be a JSON object"),
    ],
)
def test_flags_that_do_not_parse(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)
    assert message in capsys.readouterr().err


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "recall alone": (
        {"kv_recall": 8},
        "no policy is named for --kv-recall; add --kv-policy window",
    ),
    "recall twice": (
        {"kv_policy": "sink", "kv_recall": 1, "kv_policy_config": {"recall": 1}},
        "--kv-recall and --kv-policy-config.recall are the same",
    ),
    "full with recall": ({"kv_policy": "full", "kv_recall": 8}, "remove --kv-recall"),
    "budget alone": (
        {"kv_budget": 64},
        "no policy is named for --kv-budget; add --kv-policy window",
    ),
    "config alone": ({"kv_policy_config": {"tie": "resident"}}, "no policy is named"),
    "full with a budget": ({"kv_policy": "full", "kv_budget": 64}, "remove --kv-budget"),
    "unknown": ({"kv_policy": "casade"}, "did you mean 'cascade'"),
    "budget twice": (
        {"kv_policy": "sink", "kv_budget": 1, "kv_policy_config": {"budget": 1}},
        "--kv-budget and --kv-policy-config.budget are the same",
    ),
    "policy twice": (
        {"kv_policy": "sink", "kv_policy_config": {"name": "sink"}},
        "--kv-policy and --kv-policy-config.name are the same",
    ),
    "two places": (
        {"kv_policy": "sink", "additional_config": {"kv_policy": "sink"}},
        "given twice",
    ),
    "config no object": (
        {"kv_policy": "sink", "kv_policy_config": [1]},
        r"--kv-policy-config = \[1\]: Input should be a valid dictionary",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
def test_arguments_that_cannot_work(name: str, cls: type[EngineArgs]) -> None:
    arguments, message = BAD[name]
    with pytest.raises(KVPolicyError, match=message):
        cls(model=str(MODEL), **arguments)


def test_arguments() -> None:
    args = EngineArgs(
        model=str(MODEL),
        kv_policy="cascade",
        kv_budget=256,
        kv_policy_config={"num_subcaches": 2},
        additional_config={"other": 1},
    )
    assert args.additional_config == {
        "other": 1,
        "kv_policy": {"name": "cascade", "budget": 256, "num_subcaches": 2},
    }


def test_recall_is_an_argument_and_a_flag() -> None:
    wanted = {"kv_policy": {"name": "sink", "recall": 8}}
    args = EngineArgs(model=str(MODEL), kv_policy="sink", kv_recall=8)
    assert args.additional_config == wanted
    assert parse("--kv-policy", "sink", "--kv-recall", "8").additional_config == wanted
    config = EngineArgs(
        model=str(MODEL), kv_policy="sink", kv_budget=256, kv_recall=8
    ).create_engine_config()
    policy = policy_of(config.additional_config)
    assert policy is not None
    assert (policy.recall, policy.unit, policy.num_sinks, policy.recalled) == (8, 16, 16, 128)


def test_keep_prompt_is_an_argument_and_a_flag() -> None:
    wanted = {"kv_policy": {"name": "sink", "keep_prompt": 64}}
    args = EngineArgs(model=str(MODEL), kv_policy="sink", kv_keep_prompt=64)
    assert args.additional_config == wanted
    assert parse("--kv-policy", "sink", "--kv-keep-prompt", "64").additional_config == wanted
    inside = {"kv_policy": "sink", "kv_keep_prompt": 64, "kv_recall": 0}
    config = EngineArgs(model=str(MODEL), additional_config=inside).create_engine_config()
    policy = policy_of(config.additional_config)
    assert policy is not None and (policy.keep_prompt, policy.num_sinks) == (64, 4)
    assert policy.capacity == 64 + policy.budget


def test_the_policy_is_logged_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def log(message: str, *args: Any) -> None:
        lines.append(message % args)

    monkeypatch.setattr(
        vllm_cascade.engine.configure, "logger", SimpleNamespace(info=log, warning=log)
    )
    monkeypatch.setattr(
        vllm_cascade.engine.configure, "UNUSABLE", {"sink": "other:Sink: the name is taken"}
    )
    config = EngineArgs(
        model=str(MODEL), kv_policy="sink", kv_recall=0, kv_policy_config={"tie": "resident"}
    ).create_engine_config()
    assert config.cache_config.enable_prefix_caching
    (summary,) = [line for line in lines if line.startswith("KV policy sink: budget=")]
    assert "budget=764, num_sinks=4, keep_prompt=0, prefill_stride=256" in summary
    assert "fits in the model's 1024 positions" in summary
    assert "KV policy sink: settings without effect on it: tie" in lines
    (ignored,) = [line for line in lines if "other:Sink" in line]
    assert "KV policy 'sink' of another package is ignored" in ignored


DRAFTS = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 1}
NGRAM = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("most", "settings", "count"),
    [
        (256, {}, 1),
        (260, {}, 5),
        (2048, {}, None),
        (2048, {"max_num_scheduled_tokens": 260}, 5),
        (266, {"speculative_config": NGRAM}, 6),
        # A row of two tokens and the room that vLLM keeps for a draft; the prompt's room, too.
        (272, {"speculative_config": DRAFTS}, 6),
    ],
)
def test_a_stride_that_must_wait_is_logged(
    most: int, settings: dict[str, Any], count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda *_: None, warning=lambda line, *_: lines.append(line))
    monkeypatch.setattr(vllm_cascade.engine.configure, "logger", log)
    EngineArgs(
        model=str(MODEL),
        kv_policy="sink",
        max_num_batched_tokens=most,
        max_num_seqs=64,
        **settings,
    ).create_engine_config()
    waits = [line for line in lines if "and waits" in line]
    assert len(waits) == (count is not None)
    assert all(
        f"while {count} or more requests decode, a prompt's stride of 256" in w for w in waits
    )


def test_full_leaves_no_trace() -> None:
    stock = EngineArgs(model=str(MODEL)).create_engine_config()
    full = EngineArgs(model=str(MODEL), kv_policy="full").create_engine_config()
    spelled = EngineArgs(
        model=str(MODEL), additional_config={"kv_policy": {"name": "full"}}
    ).create_engine_config()
    assert stock.compute_hash() == full.compute_hash() == spelled.compute_hash()
    assert spelled.additional_config == {}
    assert full.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert full.scheduler_config.scheduler_cls is None
    assert full.cache_config.enable_prefix_caching


def test_settings_stay_as_the_user_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process gets them, too, with defaults and a memory of its own."""
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 64 << 30)
    written: dict[str, Any] = {"kv_policy": {"name": "sink", "budget": 96}, "other": 1}
    settings = copy.deepcopy(written)
    first = EngineArgs(model=str(MODEL), max_num_batched_tokens=64)
    first.additional_config = settings  # the plugin loads in the first one's initialisation
    config = first.create_engine_config()
    again = replace(first, max_model_len=500).create_engine_config()
    for one in (config, again):
        policy = policy_of(one.additional_config)
        assert policy is not None and policy.recall and policy.recall_memory
    assert settings == first.additional_config == written
    settings["kv_policy"] = {"name": "full"}
    assert first.create_engine_config().additional_config == {"other": 1}
    assert settings == {"kv_policy": {"name": "full"}, "other": 1}


def test_configurations_of_other_platforms() -> None:
    """``additional_config`` may be an object of theirs."""

    class Own:
        def compute_hash(self) -> str:
            return "theirs"

    own: Any = Own()
    args = served()
    args.additional_config = own
    for made in (
        EngineArgs(model=str(MODEL), additional_config=own),
        AsyncEngineArgs.from_cli_args(args),
    ):
        config = made.create_engine_config()
        assert config.additional_config is own and config.compute_hash()
    message = r"--kv-policy is kept in additional_config, which must be a dict, not Own; remove one"
    with pytest.raises(KVPolicyError, match=message):
        EngineArgs(model=str(MODEL), additional_config=own, kv_policy="sink")


def test_registering_again_changes_nothing() -> None:
    before = EngineArgs.__init__, EngineArgs.create_engine_config
    vllm_cascade.register()
    patches.apply_all()
    assert before == (EngineArgs.__init__, EngineArgs.create_engine_config)


def test_a_patch_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ignores what the import of a plugin raises; the next import must not pass."""

    def fail(why: str) -> None:
        raise AttributeError("create_engine_config")

    monkeypatch.setattr(patches, "_applied", set())
    with monkeypatch.context() as other:
        other.setattr(patches, "why_unsupported", lambda: "another version")
        other.setattr(unsupported, "apply", fail)
        for _ in range(2):
            with pytest.raises(AttributeError, match="create_engine_config"):
                patches.apply_all()
    done: list[str] = []
    names = ("environment", "max_model_len", "engine_args", "bench_forward", "pool_size", "preload")
    names += ("ready_response", "request_checks", "snapshot_create", "stat_loggers")
    for name in names:
        patch = importlib.import_module(f"vllm_cascade.patches.{name}")
        monkeypatch.setattr(patch, "apply", functools.partial(done.append, name))
    with monkeypatch.context() as broken:
        broken.setattr(preload, "apply", functools.partial(fail, "a name that is gone"))
        with pytest.raises(AttributeError):
            patches.apply_all()
    patches.apply_all()
    assert done == list(names), "none is applied twice"


def test_vllm_knows_our_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(envs.environment_variables)
    monkeypatch.setattr(envs, "environment_variables", known)
    monkeypatch.setenv("VLLM_CASCADE_CPU", "pytorch")
    monkeypatch.delenv("VLLM_CASCADE_LAUNCHES", raising=False)
    with pytest.raises(ValueError, match=r"Unknown vLLM environment .*VLLM_CASCADE_CPU"):
        current_platform.validate_environ(True)
    environment.apply()
    current_platform.validate_environ(True)
    assert envs.VLLM_CASCADE_CPU == "pytorch" and "VLLM_CASCADE_LAUNCHES" not in known
    sources = (ROOT / "vllm_cascade").rglob("*.py")
    text = "".join(file.read_text("utf-8") for file in sources)
    assert set(re.findall(r"VLLM_CASCADE_[A-Z]+", text)) == set(environment.NAMES)


UNCHECKED = """
import vllm
vllm.__version__ = "0.34.0"
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
load_general_plugins()
def attempt(**settings):
    try:
        made = EngineArgs(model=%r, **settings).create_engine_config()
        print("made", made.scheduler_config.scheduler_cls, made.additional_config)
    except Exception as error:
        print("refused", type(error).__name__, error)
attempt()
attempt(additional_config={"kv_policy": "full"})
attempt(additional_config={"kv_policy": "sink", "kv_budget": 64})
attempt(additional_config={"kv_policy": {"name": "sink"}})
attempt(additional_config={"kv_policy_config": {"name": "sink", "budget": 64}})
"""


def test_an_unchecked_vllm_runs_no_policy() -> None:
    """vLLM loads the plugin as in every process, with a version that a test makes up."""
    assert (
        patches.why_unsupported("0.32.9") is None and patches.why_unsupported("0.33.0+cpu") is None
    )
    assert "vLLM 0.32.*, 0.33.*, but vLLM 0.31.2" in str(patches.why_unsupported("0.31.2"))
    command = [sys.executable, "-c", UNCHECKED % str(MODEL)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    made = [line for line in ran.stdout.splitlines() if line.startswith(("made", "refused"))]
    assert made[:2] == ["made None {}", "made None {'kv_policy': 'full'}"], ran
    why = f"refused KVPolicyError {patches.why_unsupported('0.34.0')}"
    assert made[2:] == [why, why, why]
    assert "Traceback" not in ran.stdout + ran.stderr
    assert "but vLLM 0.34.0 is installed" in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.33.0", True),
        ("0.33.1", True),
        ("0.33.1rc1", True),
        ("0.33.0+cpu", True),
        ("0.33.0+dev.7", True),  # a local tag
        ("0.33.1rc1.dev214+g1a2b3c4", False),  # made after 0.33.0: the code of 0.34
        ("0.33.0.dev0", False),
        ("dev", False),  # what vLLM says of a checkout that was not installed
    ],
)
def test_development_builds_run_no_policy(version: str, supported: bool) -> None:
    why = patches.why_unsupported(version)
    assert (why is None) is supported
    if not supported:
        assert "Development builds" in why and "VLLM_VERSION_OVERRIDE=0.33.0" in why


def test_serve_help_lists_the_flags(tmp_path: Path) -> None:
    """As a user sees them anywhere, through vLLM's own command and the installed entry point."""
    command = [str(BIN / "vllm"), "serve", "--help=KVPolicy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "--kv-policy {full,window,sink,cascade,beehive,lazy,dgc,h2o,random}" in text
    assert "Which tokens stay in the KV cache." in text and "(default: full)" in text
    assert "--kv-budget" in text and "(default: 2048, or the largest that fits" in text
    assert "(default: None)" not in text and "SUPPRESS" not in text
    assert "--kv-policy-config" in text and "num_subcaches (4)" in text


def test_when_kernels_are_checked_is_an_argument_and_a_flag() -> None:
    """It reaches the workers beside the policy, and goes with ``full``."""
    assert parse("--kv-policy", "sink", "--kv-policy-check", "always").additional_config == {
        "kv_policy": {"name": "sink"},
        "kv_policy_check": "always",
    }
    args = EngineArgs(model=str(MODEL), kv_policy="full", kv_policy_check="off")
    args.create_engine_config()
    assert args.additional_config == {}
    with pytest.raises(KVPolicyError, match=r"--kv-policy-check compares .*; add --kv-policy, or"):
        parse("--kv-policy-check", "once")


@pytest.mark.parametrize("policy", ["sink", "full"])
def test_a_check_in_additional_config_goes_with_flags(policy: str) -> None:
    more = json.dumps({"kv_policy_check": "always"})
    args = parse("--kv-policy", policy, "--additional-config", more)
    expected = {"kv_policy": {"name": "sink"}, "kv_policy_check": "always"}
    assert args.additional_config == (expected if policy == "sink" else {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_policy": "sink", "kv_policy_check": "never"}, "= 'never': choose from off, once, a"),
        ({"kv_policy": "sink", "kv_policy_check": False}, '= False: .*; in YAML, write "off" in q'),
        ({"kv_policy": "sink", "kv_policy_chek": "off"}, "did you mean 'kv_policy_check'"),
        ({"kv_policy_check": "always"}, "--kv-policy-check compares .*; add --kv-policy, or"),
    ],
)
def test_a_wrong_check_stops_before_a_model_is_loaded(given: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        EngineArgs(model=str(MODEL), additional_config=given).create_engine_config()


def test_a_package_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its policy is chosen by the flag."""
    for module in ("flags", "registry"):
        unusable = {"tova": "tova:Tova: ImportError: none"}
        monkeypatch.setattr(f"vllm_cascade.policies.{module}.UNUSABLE", unusable)
    with pytest.raises(KVPolicyError, match=r"--kv-policy tova: its package cannot .* none"):
        parse("--kv-policy", "tova")
    with pytest.raises(SystemExit):
        parse("--kv-policy", "toba")
    choices = capsys.readouterr().err.rpartition("choose from")[2]
    assert "random" in choices and "tova" not in choices


SESSIONS = ("--kv-policy", "sink", "--kv-sessions")


def test_flags_and_arguments_of_sessions(tmp_path: Path) -> None:
    flags = ["--kv-sessions-memory", "2", "--kv-sessions-dir", str(tmp_path)]
    flags += ["--kv-sessions-disk", "0.5", "--kv-sessions-ttl", "60"]
    wanted = SessionSettings(memory=2.0, dir=str(tmp_path), disk=0.5, ttl=60.0)
    parsed = parse(*SESSIONS, *flags).additional_config
    arguments: dict[str, Any] = {
        "kv_sessions": True,
        "kv_sessions_memory": 2,
        "kv_sessions_dir": str(tmp_path),
        "kv_sessions_disk": 0.5,
        "kv_sessions_ttl": 60,
    }
    given = EngineArgs(model=str(MODEL), kv_policy="sink", **arguments).additional_config
    placed = EngineArgs(
        model=str(MODEL), additional_config={"kv_policy": "sink", **arguments}
    ).additional_config
    assert SessionSettings.of(parsed) == SessionSettings.of(given) == wanted
    assert SessionSettings.of(placed) == wanted
    assert SessionSettings.of(parse(*SESSIONS).additional_config) == SessionSettings()
    assert SessionSettings.of(parse("--kv-policy", "sink").additional_config) is None
    for flag, prompts in (("--kv-sessions-prompts", True), ("--no-kv-sessions-prompts", False)):
        found = SessionSettings.of(parse(*SESSIONS, flag).additional_config)
        assert found == SessionSettings(prompts=prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_sessions_ttl": 5.0}, "--kv-sessions-ttl has no effect without --kv-sessions"),
        (
            {"kv_sessions": True, "kv_sessions_disk": 5.0},
            "--kv-sessions-disk has no effect without --kv-sessions-dir",
        ),
        ({"kv_sessions": True, "kv_sessions_memory": 0.0}, "--kv-sessions-memory = 0.0"),
        (
            {"kv_sessions": True, "kv_sessions_memory": 1e300},
            r"sessions-memory = 1e\+300: .*less",
        ),
        (
            {"kv_sessions": True, "kv_sessions_memory": 1e-12},
            "--kv-sessions-memory = 1e-12: ",
        ),
        (
            {"kv_sessions": True, "kv_sessions_dir": "x", "kv_sessions_disk": 1e300},
            r"--kv-sessions-disk = 1e\+300: ",
        ),
        (
            {"kv_sessions": True, "kv_sessions_dir": "x", "kv_sessions_disk": 1e-12},
            "--kv-sessions-disk = 1e-12: ",
        ),
        ({"kv_sessions": True, "kv_sessions_dir": ""}, "--kv-sessions-dir = '': name a folder"),
        ({"kv_sessions": True, "kv_sessions_dir": " "}, "--kv-sessions-dir = ' ': name a folder"),
        (
            {"kv_sessions": True, "kv_sessions_dir": "~no-such-user/x"},
            "--kv-sessions-dir = '~no-such-user/x': there is no such user",
        ),
        ({"kv_sessions": "yes"}, "--kv-sessions = 'yes': it must be true or false"),
        ({"kv_sessions": True, "kv_sessions_prompts": "no"}, "--kv-sessions-prompts = 'no'"),
        (
            {"kv_sessions": True, "additional_config": {"kv_sessions": True}},
            "--kv-sessions and .* are the same; remove one",
        ),
        (
            {"kv_policy": "full", "kv_sessions": True},
            "--kv-sessions keeps states of a bounded cache; add --kv-policy",
        ),
        (
            {"additional_config": {"kv_policy": "sink", "kv_sessions_memroy": 1}},
            "kv_sessions_memroy.* has no effect; did you mean 'kv_sessions_memory'",
        ),
    ],
)
def test_settings_of_sessions_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    policy = {} if "additional_config" in arguments else {"kv_policy": "sink"}
    with pytest.raises(KVPolicyError, match=message):
        EngineArgs(model=str(MODEL), **{**policy, **arguments}).create_engine_config()


def test_sessions_switch_asynchronous_scheduling_off() -> None:
    settings: dict[str, Any] = {"kv_policy": "sink", "kv_budget": 256, "async_scheduling": True}
    config = EngineArgs(model=str(MODEL), **settings, kv_sessions=True).create_engine_config()
    assert not config.scheduler_config.async_scheduling
    assert "Async" not in str(config.scheduler_config.scheduler_cls)
