"""Find the setting of a method that meets a target."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.measure.macs import profile_of


def match_macs(
    model: nn.Module,
    images: Tensor,
    setting: Callable[[float], MethodConfig],
    share: float,
    *,
    low: float,
    high: float,
    tolerance: float = 0.005,
    max_steps: int = 20,
) -> MethodConfig:
    """The ``setting(value)`` whose MACs on ``images`` are ``share`` of the dense model's, by bisection over ``value``.

    Args:
        model: the dense model; left as it was.
        images: (B, C, H, W), as representative as the counts of an adaptive method should be.
        setting: the method as a function of one number, e.g. ``lambda theta: vitrim.ATM(alpha=theta, beta=0.0)``.
        share: wanted share of the dense MACs, in (0, 1].
        low, high: range of ``value``; MACs must be monotone in it, in either direction.
        tolerance: accepted difference in share.
        max_steps: after so many halvings the nearest setting is returned, since counts are whole tokens.

    Raises:
        VitrimError: ``share`` is out of reach between ``low`` and ``high``.

    Example:
        >>> import timm, torch, vitrim
        >>> model = timm.create_model("test_vit", num_classes=10).eval()
        >>> images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
        >>> def setting(rate): return vitrim.TopK(keep_rate=rate)
        >>> 0.4 < match_macs(model, images, setting, 0.8, low=0.3, high=1.0).keep_rate < 0.9
        True
    """
    dense = profile_of(model, None, images).macs.total

    def reached(value: float) -> float:
        return profile_of(model, setting(value), images).macs.total / dense

    at_low, at_high = reached(low), reached(high)
    if not min(at_low, at_high) - tolerance <= share <= max(at_low, at_high) + tolerance:
        raise VitrimError(
            f"{setting(low).name} cannot reach {share:.0%} of the dense MACs here: {low} gives {at_low:.1%} and "
            f"{high} gives {at_high:.1%}"
        )
    best = min(((abs(at_low - share), low), (abs(at_high - share), high)))
    for _ in range(max_steps):
        middle = (low + high) / 2
        at_middle = reached(middle)
        best = min(best, (abs(at_middle - share), middle))
        if best[0] <= tolerance:
            break
        if (at_middle < share) == (at_low < share):
            low, at_low = middle, at_middle
        else:
            high = middle
    return setting(best[1])
