# SPDX-License-Identifier: Apache-2.0
"""Names of attributes, for those whose owner's type is not known: common ones, and vLLM's."""

import argparse
import builtins
import collections
import contextvars
import logging
import os
import pathlib
import re

import numpy as np
import prometheus_client
import pydantic
import torch
import triton
from rich.table import Table

WELL_KNOWN = [
    *vars(builtins).values(),
    *(argparse.ArgumentParser, argparse.ArgumentParser().add_subparsers(), argparse.Namespace),
    *(collections.OrderedDict, collections.deque, contextvars.ContextVar),
    *(logging.Logger, os, pathlib.Path, np, np.ndarray),
    *(prometheus_client.Counter, prometheus_client.Gauge, pydantic.BaseModel),
    *(Table, torch, torch.Tensor, torch.cuda, torch.nn.Module, triton, triton.language),
]
COMMON = {name for owner in WELL_KNOWN for name in dir(owner)}
"""Members of well-known types: an attribute of such a name is not taken for vLLM's."""

VLLM_FOLDERS = (
    *("config", "engine", "v1", "v1/attention", "v1/attention/backends", "v1/core"),
    *("v1/core/sched", "v1/engine", "v1/metrics", "v1/worker", "v1/worker/gpu", "platforms"),
    *("model_executor/layers/attention", "model_executor/layers/rotary_embedding"),
)
MEMBER = re.compile(
    r"^    (?:async )?def (\w+)\(|^    (\w+): |^    ([A-Z]\w*) = |\bself\.(\w+)(?:: [^=\n]+)? = ",
    re.MULTILINE,
)


def vllm_members(package: pathlib.Path) -> set[str]:
    """Names of methods, fields, enumeration members and instance attributes in VLLM_FOLDERS.

    Regular expressions find them: to parse all files would take many seconds.
    """
    files = [file for folder in VLLM_FOLDERS for file in (package / folder).glob("*.py")]
    found = [MEMBER.findall(file.read_text("utf-8")) for file in files]
    return {name for groups in found for group in groups for name in group if name}
