"""The slider of a method: its ends, its initial value, and the method at one of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from vitrim.app.messages import Slide
from vitrim.core.method import MethodConfig, Tunable
from vitrim.core.options import split_options
from vitrim.core.registry import make_method, parse_method
from vitrim.errors import VitrimError

LONGEST = 300
"""Largest length of further options."""
STRENGTH = 0.3
"""Initial strength if the method's default removes nothing."""
STEPS = 7
"""Bisections of a slider to match the cost of another method."""


def slide_of(name: str, patches: int) -> Slide:
    """The slider of a method on a model with this number of patches; `VitrimError` for a method without an amount.

    Example:
        >>> slide = slide_of("tome", patches=64)
        >>> slide.label, slide.minimum, slide.maximum, slide.value
        ('tokens merged per block (r)', 0, 32, 8)
    """
    config, tunable = make_method(name), _tunable(name)
    given = getattr(config, tunable.option)
    end = tunable.end(patches)
    # A keep rate falls and an amount rises with strength: the slider always rises.
    low, high = sorted((tunable.mildest, end))
    value = given if isinstance(given, int | float) and given != tunable.mildest else tunable.value(STRENGTH, patches)
    if not tunable.digits and not float(value).is_integer():  # a share of the patches
        value = tunable.removing(value, patches)
    # the description of the option without lists and other forms
    label = re.split(r"; |, or | or a list|, for all", str(type(config).model_fields[tunable.option].description))[0]
    return Slide(
        label=f"{label.rpartition(': ')[2]} ({tunable.option})",
        info=f"{tunable.mildest:g} removes nothing, {end:g} the most",
        minimum=low,
        maximum=high,
        step=0.01 if tunable.digits else 1,
        value=min(max(value, low), high),
    )


def _tunable(name: str) -> Tunable:
    tunable = make_method(name).tunable
    if tunable is None:
        raise VitrimError(f"{name} has no one option that says how much is removed")
    return tunable


def config_of(name: str, value: float, more: str = "") -> MethodConfig:
    """The method with its slider at a value, and further options, ``key=value,key=value``.

    Example:
        >>> config_of("tome", 12.0, "proportional=false").describe()
        'tome:r=12,proportional=false'
    """
    if len(more) > LONGEST:
        raise VitrimError(f"the options have {len(more)} characters; at most {LONGEST} are read")
    tunable = _tunable(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise VitrimError(f"{tunable.option}={str(value)[:20]} is no number")
    number = round(value, tunable.digits) if tunable.digits else round(value)
    given = {part.partition("=")[0].strip() for part in split_options(more)}
    fixed = [f"{key}={value}" for key, value in tunable.fixed.items() if key not in given]
    return parse_method(f"{name}:" + ",".join([f"{tunable.option}={number}", *fixed, *split_options(more)]))


def matched(name: str, patches: int, cost: Callable[[MethodConfig], float], wanted: float) -> MethodConfig:
    """The method at the slider value with about the ``wanted`` cost, or the nearest within reach; costs fall with the
    amount.

    Example:
        >>> matched("tome", 64, lambda config: 100.0 - config.r, 88.0).describe()
        'tome:r=12'
    """
    tunable = _tunable(name)
    mild, strong = float(tunable.mildest), float(tunable.end(patches))
    tried = []
    for _ in range(STEPS):
        # Costs fall from mild to strong: halve the side that holds the wanted one.
        middle = (mild + strong) / 2
        config = config_of(name, middle)
        found = cost(config)
        tried.append((abs(found - wanted), config))
        if found > wanted:
            mild = middle
        else:
            strong = middle
    return min(tried, key=lambda one: one[0])[1]
