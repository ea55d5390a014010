"""The slider of a method: its ends, its start, and the method at one of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from vitrim.app.messages import Slide
from vitrim.core.method import MethodConfig, Tunable
from vitrim.core.registry import make_method, parse_method, split_options
from vitrim.errors import VitrimError

LONGEST = 300
"""Characters of further options."""
STRENGTH = 0.3
"""Of a slider's start where the method's own default removes nothing."""
STEPS = 7
"""Halvings of a slider until two methods cost the same."""


def slide_of(name: str, patches: int) -> Slide:
    """The slider of a method on a model of so many patches.

    Raises:
        VitrimError: an unknown method, or one without an option that says how much is removed.

    Example:
        >>> slide = slide_of("tome", patches=64)
        >>> slide.label, slide.minimum, slide.maximum, slide.value
        ('tokens merged per block (r)', 0, 32, 8)
        >>> slide_of("topk", patches=64).info
        '1 removes nothing, 0.05 the most'
    """
    config, tunable = make_method(name), _tunable(name)
    given = getattr(config, tunable.option)
    end = tunable.end(patches)
    low, high = sorted((tunable.mildest, end))
    value = given if isinstance(given, int | float) and given != tunable.mildest else tunable.value(STRENGTH, patches)
    if not tunable.digits and not float(value).is_integer():  # a share of the patches
        value = tunable.removing(value, patches)
    # the description of the option up to what it says of lists and other forms
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
    """The option of a method that a slider moves.

    Raises:
        VitrimError: an unknown method, or one without such an option.
    """
    tunable = make_method(name).tunable
    if tunable is None:
        raise VitrimError(f"{name} has no one option that says how much is removed")
    return tunable


def config_of(name: str, value: float, more: str = "") -> MethodConfig:
    """The method with its slider at a value, and further options.

    Args:
        name: of the method.
        value: of the option that the slider moves.
        more: ``key=value,key=value``, as on the command line.

    Raises:
        VitrimError: an option or value that is not valid, or an option that is given twice.

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
    """The method at the value of its slider at which it costs about as much as wanted.

    Args:
        name: of the method.
        patches: of the image.
        cost: of a setting; the more is removed, the less.
        wanted: where no value costs as little, or as much, it is the nearest.

    Raises:
        VitrimError: see `config_of`.

    Example:
        >>> matched("tome", 64, lambda config: 100.0 - config.r, 88.0).describe()
        'tome:r=12'
    """
    tunable = _tunable(name)
    mild, strong = float(tunable.mildest), float(tunable.end(patches))
    tried = []
    for _ in range(STEPS):
        middle = (mild + strong) / 2
        config = config_of(name, middle)
        found = cost(config)
        tried.append((abs(found - wanted), config))
        if found > wanted:
            mild = middle
        else:
            strong = middle
    return min(tried, key=lambda one: one[0])[1]
