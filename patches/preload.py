# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.entrypoints.cli.preload.PreloadSubcommand.cmd``.

What: ``vllm preload`` refuses a KV policy.
Why: its daemons hold weights and have no cache. They build the model without a worker, and only our
workers register the attention backend that a policy chooses, so vLLM's error would name neither
the flag nor the fix.
Removed when: plugins can say which flags a command takes.
"""

import argparse
import functools

from vllm.entrypoints.cli.preload import PreloadSubcommand

from vllm_cascade.patches.engine_args import has_settings
from vllm_cascade.policies.settings import KVPolicyError


def apply() -> None:
    """Wrap the method. ``patches.apply_all`` calls this once."""
    original = PreloadSubcommand.cmd

    @functools.wraps(original)
    def cmd(args: argparse.Namespace) -> None:
        if has_settings(args):
            raise KVPolicyError(
                "vllm preload holds weights and no cache; leave the KV policy and sessions to "
                "vllm serve --load-format ipc_cache"
            )
        original(args)

    PreloadSubcommand.cmd = staticmethod(cmd)
