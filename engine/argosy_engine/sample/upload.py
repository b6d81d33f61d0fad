"""Copies from the host's arrays to a device, without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return a copy of the array on the device; on a CPU, the array's own memory.

    The copy is asynchronous, out of pinned memory that torch caches and hands out again only once the copy is done.
    """
    host = torch.from_numpy(array)
    return _pinned(host).to(device, non_blocking=True) if device.type == "cuda" else host


def upload_into(target: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy the array into a tensor of the same shape and dtype on any device, asynchronously."""
    host = torch.from_numpy(array)
    target.copy_(_pinned(host) if target.device.type == "cuda" else host, non_blocking=True)


def _pinned(host: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(host, pin_memory=True).copy_(host)
