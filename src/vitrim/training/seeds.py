"""Seeds of all random generators, from the numbers that say where in a run they are."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*numbers: int) -> None:
    """Seed `random`, numpy's and torch's global streams, of all devices, from ``numbers``."""
    torch.manual_seed(seed_cpu(*numbers))


def seed_cpu(*numbers: int) -> int:
    """Seed the global streams of the CPU from ``numbers``, by numpy's hash; the seed that torch got.

    Cheap enough for every image: `torch.manual_seed` would queue a call for every device each time.
    """
    first, second = (int(word) for word in np.random.SeedSequence(numbers).generate_state(2))
    random.seed(first)
    np.random.seed(second)
    seed = (first << 31) ^ second
    torch.default_generator.manual_seed(seed)
    return seed
