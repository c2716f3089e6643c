# SPDX-License-Identifier: Apache-2.0
"""Compares the settings of a deployment's nodes, each of which reads its own flags.

A node with other settings would answer by another policy, or evict other tokens than the stages
before it. vLLM compares nothing of ``additional_config``. So two places compare it at start:

- the workers of an engine (``check_workers``), which may run on several nodes,
- a front-end and its data-parallel engines (``patches/ready_response.py``).
"""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vllm_cascade.engine.session_header import policy_settings
from vllm_cascade.policies.arguments import ARGUMENTS, FLAGS, KEYS, OTHERS
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import CONFIG_KEY, KVPolicyError
from vllm_cascade.sessions.settings import SESSIONS, SessionSettings

PATIENCE = timedelta(minutes=3)
"""How long a worker waits for others, which joined vLLM's group with it a moment ago."""
LEAVE = timedelta(seconds=10)
"""How long a worker that found a difference stays up so that others can read the store."""
SAME = (
    f"All nodes must have the same {', '.join(map(FLAGS.name, ARGUMENTS))} and "
    f"{FLAGS.name(SESSIONS)}"
)
RECALL_DEFAULT = "; set --kv-recall on all of them, since its default depends on a node's memory"


def shared_settings(additional_config: Any) -> str:
    """JSON of the settings that all nodes must have, by their flags; ``{}`` for stock vLLM.

    Without ``recall_memory``, of which each node may have its own, and paths.
    """
    policy = policy_of(additional_config)
    if policy is None:
        return "{}"
    names = {key: FLAGS.name(argument) for argument, key in KEYS.items()}
    found = {
        names.get(key) or FLAGS.inside.format(FLAGS.name(OTHERS), key): value
        for key, value in policy_settings(policy).items()
    }
    sessions = SessionSettings.of(additional_config)
    if sessions is not None:
        found[FLAGS.name(SESSIONS)] = "given"
        if sessions.dir is not None:
            found[FLAGS.name(f"{SESSIONS}_dir")] = "given"
    return json.dumps(found, sort_keys=True)


def check_same(one: str, other: str, places: tuple[str, str]) -> None:
    """Compare the ``shared_settings`` of two places.

    Raises:
        KVPolicyError: they differ; names the flags.
    """
    if one != other:
        raise KVPolicyError(_difference(json.loads(one), json.loads(other), places))


def _difference(one: dict[str, Any], other: dict[str, Any], places: tuple[str, str]) -> str:
    """What differs: the policy, else other flags of one setting, else settings in the object."""
    flags = [FLAGS.name(argument) for argument in KEYS]
    own = [flag for flag in (*flags, *one, *other) if one.get(flag) != other.get(flag)]
    own = list(dict.fromkeys(own))
    policy, recall = FLAGS.name(CONFIG_KEY), FLAGS.name("kv_recall")
    shown = [flag for flag in own if flag == policy] or [f for f in own if f in flags] or own
    parts = [
        f"{flag} is {_shown(flag, one)} {places[0]}, but {_shown(flag, other)} {places[1]}"
        for flag in shown
    ]
    hint = RECALL_DEFAULT if recall in shown else ""
    return f"kv_policy: {'; '.join(parts)}. {SAME}{hint}"


def _shown(flag: str, settings: dict[str, Any]) -> str:
    missing = "full" if flag == FLAGS.name(CONFIG_KEY) else "not given"
    value = settings.get(flag, missing)
    return value if isinstance(value, str) else json.dumps(value)


def check_workers(additional_config: Any) -> None:
    """Compare the settings of all workers in vLLM's process group, of which this is one.

    Raises:
        KVPolicyError: they differ, or other workers do not run a policy.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.PrefixStore("kv_policy", _get_default_store())
    settings = shared_settings(additional_config)
    compare_ranks(store, dist.get_rank(), dist.get_world_size(), settings)


def compare_ranks(
    store: dist.Store, rank: int, num: int, settings: str, patience: timedelta = PATIENCE
) -> None:
    """Compare the settings of ``num`` ranks; every rank calls this.

    Through the store, because a worker of stock vLLM would miss a collective call, which has no
    timeout of its own: the start would hang.

    Raises:
        KVPolicyError: they differ, or a rank does not call this.
    """
    start = store.add(f"starts of {rank}", 1)  # a process may run several engines, one by one
    keys = [f"{start} {one}" for one in range(num)]
    store.set(keys[rank], settings)
    try:
        store.wait(keys, patience)
        found = [store.get(key).decode() for key in keys]
    except dist.DistError:
        raise KVPolicyError(
            "kv_policy: another node of this engine runs without a KV policy, or has stopped (its "
            f"log says why). {SAME}"
        ) from None
    for one, other in enumerate(found):
        if other != found[0]:
            _let_others_read(store, keys, rank)
            check_same(found[0], other, ("on rank 0", f"on rank {one}"))


def _let_others_read(store: dist.Store, keys: list[str], rank: int) -> None:
    store.set(f"{keys[rank]} read", "")
    with suppress(dist.DistError):
        store.wait([f"{key} read" for key in keys], LEAVE)
