# SPDX-License-Identifier: Apache-2.0
"""How large the table of further rules is: it is allocated once, since graphs hold its address."""

from vllm_cascade.kernels.columns import MOST_RULES, RULE_COLUMNS
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.step.plan import SPARE

MOST_BYTES = 1 << 28
"""Largest table for kept prompts whose schedules have more rules than ``MOST_RULES``."""


def most_rules(engine: Schedule) -> int:
    """Most further rules of one request's schedule.

    A request's own policy has at most ``MOST_RULES``. A shorter kept prompt shifts the ranks of the
    engine's rules and leaves their number as it is.
    """
    return max(MOST_RULES, len(engine.further) if engine.policy.keep_prompt else 0)


def rule_room(engine: Schedule, max_requests: int) -> int:
    """Rows of the table: a row of zeros, the engine's rules, two full batches and spare ones."""
    return 1 + len(engine.further) + (2 * max_requests + SPARE) * most_rules(engine)


def too_large(policy: Policy, max_requests: int) -> bool:
    """Whether kept prompts need a table of more than ``MOST_BYTES``."""
    engine = compiled(policy)
    room = rule_room(engine, max_requests) * RULE_COLUMNS * 4
    return most_rules(engine) > MOST_RULES and room > MOST_BYTES
