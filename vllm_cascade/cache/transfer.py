# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from host memory to a device.

A copy from pageable memory blocks the host until the device has finished all earlier work, so
consecutive steps could not overlap. A copy from pinned memory is enqueued on the stream. PyTorch
does not reuse the pinned memory before the copy completes.
"""

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to ``device``. If that is the host, return the tensor itself."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
