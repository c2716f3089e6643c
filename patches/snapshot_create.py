# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.entrypoints.cli.snapshot.validate_create_args``.

What: ``vllm snapshot create`` works beside the plugin, and refuses a KV policy.
Why: it refuses servers with middleware, and our middleware is the default of every server's parser.
Its server parses the flags again, in a process of its own. A policy whose process was dumped and
restored is not tested.
Removed when: the command accepts middleware, and tests restore a server with a policy.
"""

import argparse
import functools

from vllm.entrypoints.cli import snapshot

from vllm_cascade.engine.request_bodies import MIDDLEWARE
from vllm_cascade.patches.engine_args import has_settings
from vllm_cascade.policies.settings import KVPolicyError


def apply() -> None:
    """Wrap the function. ``patches.apply_all`` calls this once."""
    original = snapshot.validate_create_args

    @functools.wraps(original)
    def validate_create_args(args: argparse.Namespace) -> None:
        if has_settings(args):
            raise KVPolicyError(
                "vllm snapshot create is not tested with a KV policy or sessions; remove these "
                "settings, or start the server with vllm serve"
            )
        args.middleware = [path for path in args.middleware if path != MIDDLEWARE]
        original(args)

    snapshot.validate_create_args = validate_create_args
