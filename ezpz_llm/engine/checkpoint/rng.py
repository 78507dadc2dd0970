"""The random states of this process, as tensors: torch's, the device's, Python's and numpy's."""

from __future__ import annotations

import random

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """All random states, by name."""
    version, words, gauss = random.getstate()
    del version  # 3 in every Python since 3.2
    kind, keys, position, has_gauss, cached = np.random.get_state()
    del kind  # MT19937: what numpy's global generator is, unless a program replaced it
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(keys.astype(np.int64), [position, has_gauss])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def restore(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `capture` gave. A device state of another kind of device (another size) is left out."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss,
                         states["numpy_gauss"].item()))
    if device.type != "cpu" and "device" in states:
        module = torch.get_device_module(device)
        if module.get_rng_state().numel() == states["device"].numel():
            module.set_rng_state(states["device"])
