# SPDX-License-Identifier: Apache-2.0
"""From the host's memory to a device's, without waiting for it.

A copy out of ordinary memory waits until the device has it, and so for all work before it: a step
would begin when the one before has ended. Out of pinned memory it takes its turn on the stream;
PyTorch gives that memory to nobody else before the copy has been made.
"""

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host on ``device``; the tensor itself where that is the host."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
