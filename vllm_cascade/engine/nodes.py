# SPDX-License-Identifier: Apache-2.0
"""Compares the settings of a deployment's nodes, each of which reads its own flags.

A node with other settings would answer by another policy, or evict other tokens than the stages
before it. vLLM compares nothing of ``additional_config``. So two places compare it at start:

- the workers of an engine (``check_workers``), which may run on several nodes,
- a front-end and its data-parallel engines (``patches/ready_response.py``).

``recall_memory`` may differ, since its default depends on a node's memory. The workers of an engine
take the smallest, and the scheduler reads it from their cache specs.
"""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from vllm.config import VllmConfig

from vllm_cascade.engine.configure import MEASURED
from vllm_cascade.engine.session_header import policy_settings
from vllm_cascade.log import logger
from vllm_cascade.policies.arguments import ARGUMENTS, FLAGS, KEYS, OTHERS
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import CONFIG_KEY, Given, KVPolicyError
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


class Own(NamedTuple):
    """What a rank lets the others know.

    Attributes:
        settings: its ``shared_settings``.
        memory: its ``recall_memory`` in GiB; None: not set, because nothing is recalled.
        engine: number of its data-parallel engine.
    """

    settings: str
    memory: float | None = None
    engine: int = 0


def shared_settings(additional_config: Any) -> str:
    """JSON of the settings that all nodes must have, by their flags; ``{}`` for stock vLLM.

    Without ``recall_memory``, of which an engine takes the smallest, and paths.
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


def check_workers(config: VllmConfig) -> None:
    """Compare the settings of all workers in vLLM's process group, of which this is one.

    Args:
        config: its ``recall_memory`` becomes the smallest of this engine's workers.

    Raises:
        KVPolicyError: settings differ, or other workers do not run a policy.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found, policy = config.additional_config, policy_of(config.additional_config)
    assert policy is not None and isinstance(found, dict), "stock workers do not call this"
    own = policy.recall_memory
    mine = Own(shared_settings(found), own, config.parallel_config.data_parallel_index)
    store = dist.PrefixStore("kv_policy", _get_default_store())
    least = compare_ranks(store, dist.get_rank(), dist.get_world_size(), mine)
    if least != own:
        logger.info("KV policy: recall_memory is %s GiB, as on another rank of this engine", least)
        settings = Given(found[CONFIG_KEY])
        settings.measured = {MEASURED: least}
        config.additional_config = {**found, CONFIG_KEY: settings}


def compare_ranks(
    store: dist.Store, rank: int, num: int, own: Own, patience: timedelta = PATIENCE
) -> float | None:
    """Compare the settings of ``num`` ranks; every rank calls this.

    Through the store, because a worker of stock vLLM would miss a collective call, which has no
    timeout of its own: the start would hang.

    Returns:
        The smallest ``recall_memory`` of this rank's engine in GiB; None: it has none.

    Raises:
        KVPolicyError: they differ, or a rank does not call this.
    """
    start = store.add(f"starts of {rank}", 1)  # a process may run several engines, one by one
    keys = [f"{start} {one}" for one in range(num)]
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait(keys, patience)
        found = [Own(*json.loads(store.get(key))) for key in keys]
    except dist.DistError:
        raise KVPolicyError(
            "kv_policy: another node of this engine runs without a KV policy, or has stopped (its "
            f"log says why). {SAME}"
        ) from None
    for one, other in enumerate(found):
        if other.settings != found[0].settings:
            _let_others_read(store, keys, rank)
            check_same(found[0].settings, other.settings, ("on rank 0", f"on rank {one}"))
    memories = [other.memory for other in found if other.engine == own.engine]
    return min((memory for memory in memories if memory is not None), default=None)


def _let_others_read(store: dist.Store, keys: list[str], rank: int) -> None:
    store.set(f"{keys[rank]} read", "")
    with suppress(dist.DistError):
        store.wait([f"{key} read" for key in keys], LEAVE)
