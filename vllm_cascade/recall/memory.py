# SPDX-License-Identifier: Apache-2.0
"""Whether a host has the memory that evicted units may come to take."""

import psutil

from vllm_cascade.log import logger
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.recall.log import CHUNK_UNITS, UnitShape


def store_bytes(shape: UnitShape, num_units: int) -> int:
    """Most memory of one request that stores so many units: whole chunks, two of them in part."""
    chunks = -(-num_units // CHUNK_UNITS) + 1
    return chunks * CHUNK_UNITS * shape.unit_bytes


def check_host_memory(shape: UnitShape, max_num_seqs: int, available: int | None = None) -> None:
    """Refuse a store that cannot be, and warn of one that may grow too large.

    Memory is taken as units are evicted, so that what many short requests take is less.

    Args:
        available: bytes; None: what the machine has now.

    Raises:
        KVPolicyError: one request's store alone is larger.
    """
    free = psutil.virtual_memory().available if available is None else available
    one = store_bytes(shape, shape.most_units)
    tokens = shape.most_units * shape.unit
    fits = (free // (CHUNK_UNITS * shape.unit_bytes) - 1) * CHUNK_UNITS * shape.unit
    if one > free:
        raise KVPolicyError(
            f"kv_policy: a store of recall_store {tokens} tokens takes {one / 2**30:.1f} GiB of "
            f"host memory a request, and {free / 2**30:.1f} GiB are free; "
            f"set recall_store to at most {max(fits, 0)}, or --kv-recall 0"
        )
    if one * max_num_seqs > free:
        logger.warning(
            f"KV policy: {max_num_seqs} requests (--max-num-seqs) that each evict recall_store "
            f"{tokens} tokens would take {one * max_num_seqs / 2**30:.1f} GiB of host memory, and "
            f"{free / 2**30:.1f} GiB are free; lower recall_store or --max-num-seqs if so many "
            "long requests come together"
        )
