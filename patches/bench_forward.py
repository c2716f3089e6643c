# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.entrypoints.cli.benchmark.forward.BenchmarkForwardSubcommand.cmd``.

What: ``vllm bench forward``, new in vLLM 0.33, refuses a KV policy.
Why: it calls the model runner without our worker, which tells a policy of a step's requests. Every
row would count as a warm-up's: the command would time a model without attention, or fail.
Removed when: the command runs steps through the worker.
"""

import argparse
import functools

from vllm_cascade.patches.engine_args import has_settings
from vllm_cascade.policies.settings import KVPolicyError


def apply() -> None:
    """Wrap the method, if there is one. ``patches.apply_all`` calls this once."""
    try:
        from vllm.entrypoints.cli.benchmark.forward import (  # pyright: ignore[reportMissingImports]
            BenchmarkForwardSubcommand,
        )
    except ImportError:  # before vLLM 0.33
        return
    original = BenchmarkForwardSubcommand.cmd

    @functools.wraps(original)
    def cmd(args: argparse.Namespace) -> None:
        if has_settings(args):
            raise KVPolicyError(
                "vllm bench forward cannot be combined with --kv-policy or --kv-sessions: it calls "
                "the model without the worker, which tells the policy of a step's requests; remove "
                "these settings, or time whole engines with vllm bench latency"
            )
        original(args)

    BenchmarkForwardSubcommand.cmd = staticmethod(cmd)
