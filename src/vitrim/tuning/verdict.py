"""Paired comparison of two settings on the same images: is one better beyond noise?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vitrim.errors import VitrimError

ERRORS = 2.0
"""Standard errors beyond which a difference is no noise."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its standard error.

    Attributes:
        mean: of the one minus the other; below 0 the one is better.
        error: standard error of the mean.
        images: how many pairs there are.
    """

    mean: float
    error: float
    images: int

    @property
    def better(self) -> bool:
        """Tell whether the one is better beyond noise."""
        return self.mean < 0.0 and self.mean < -ERRORS * self.error

    @property
    def worse(self) -> bool:
        """Tell whether the one is worse beyond noise."""
        return self.mean > 0.0 and self.mean > ERRORS * self.error


def difference(one: ArrayLike, other: ArrayLike) -> Difference:
    """Compare scores (N,) of the same images, N at least 2; less is better.

    Raises:
        VitrimError: fewer than two images: nothing is known about noise.

    Example:
        >>> difference([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.5])
        Difference(mean=-1.125, error=0.125, images=4)
    """
    pairs = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if len(pairs) < 2:
        raise VitrimError(f"{len(pairs)} images say nothing about noise: give at least 2 to every comparison")
    return Difference(float(pairs.mean()), float(pairs.std(ddof=1) / np.sqrt(len(pairs))), len(pairs))
