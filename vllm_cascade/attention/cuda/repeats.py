# SPDX-License-Identifier: Apache-2.0
"""Whether layers repeat the launches of the first one (``kernels/triton/repeat.py``)."""

import os

from triton import knobs

from vllm_cascade.attention.cuda import SWITCH
from vllm_cascade.attention.cuda.metadata import TritonMetadata
from vllm_cascade.kernels.cpp.build import BuildError
from vllm_cascade.kernels.triton.launch import DIRECT
from vllm_cascade.kernels.triton.repeat import Repeater, library
from vllm_cascade.log import logger
from vllm_cascade.policies.settings import KVPolicyError


def make_repeater() -> Repeater | None:
    """A layer's repeater; None: it makes all launches in Python.

    Raises:
        KVPolicyError: ``VLLM_CASCADE_LAUNCHES`` has an unknown value.
    """
    wanted = os.environ.get(SWITCH)
    if wanted == "python":
        return None
    if wanted is not None:
        raise KVPolicyError(f"{SWITCH}={wanted}: set it to python, or not at all")
    interpreted = knobs.runtime.interpret
    if not (DIRECT or interpreted):
        return None
    try:
        found = library()
    except BuildError as error:
        logger.warning_once(
            "Steps outside CUDA graphs take the host longer, because launches are not repeated in "
            "C: %s",
            str(error),
        )
        return None
    return Repeater() if interpreted or found is not None else None


def only_launches(metadata: TritonMetadata, alone: bool) -> bool:
    """Whether layers do nothing in the step but call launchers, and exchange what can be noted.

    Args:
        alone: whether no tensor-parallel ranks decide together. If they do, a median needs the
            logits of all.
    """
    policy = metadata.spec.policy
    if not alone and policy.uses_attention and policy.head_reduction == "median":
        return False
    for wave in metadata.waves:
        decode = wave.decode
        if wave.others or (decode is not None and not isinstance(decode.index, slice)):
            return False
    return True
