"""Plain loops in the place of many small operators, compiled by Numba where it is installed (``vitrim[fast]``).

On a CPU at batch 1 deciding costs what its operators cost, not what they compute: some eighty in a block that merges.
A loop does the same in one call. It is an ordinary function of NumPy arrays and numbers, which fills arrays that it is
given, beside the operators that it stands for; those run everywhere else and say what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vitrim.core.tokens import is_traced

INSTALLED = find_spec("numba") is not None

MOST = 2**18
"""Numbers in the largest tensor that loops are for: they use one core, and operators all of them. On two cores both are
equally fast from DeiT-S at batch 8 on, whatever is the most."""

_DTYPES = (torch.float32, torch.float64)


class Loop:
    """A function of arrays and numbers, compiled when it is called first; tensors are handed to it as arrays.

    The function returns nothing. Tensors that it reads are made contiguous, so that it is compiled once per dtype; what
    it fills must be.

    Example:
        >>> def double(x, out):
        ...     for i in range(len(x)):
        ...         out[i] = 2.0 * x[i]
        >>> filled = torch.empty(2)
        >>> Loop(double)(torch.tensor([1.0, 2.0]), filled)
        >>> filled
        tensor([2., 4.])
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *values: Any) -> None:
        if self._compiled is None:
            self._compiled = _compile(self.function)
        self._compiled(*[value.contiguous().numpy() if isinstance(value, Tensor) else value for value in values])


def suit(*tensors: Tensor) -> bool:
    """Return whether loops take the place of operators on ``tensors``, whose values are decided by or moved.

    Small tensors on a CPU in float32 or float64, not empty, whose gradient nobody asks for. A compiler, an exporter, a
    tracer and what watches operators (counters, `torch.func`) must see operators.
    """
    if not INSTALLED or torch.compiler.is_compiling() or is_traced():
        return False
    for x in tensors:
        own = type(x) is Tensor and x.device.type == "cpu" and x.dtype in _DTYPES
        if not own or x.requires_grad or not 0 < x.numel() <= MOST:
            return False
    watchers = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    # differentiated in another way than `requires_grad` tells
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return watchers == 0 and not transformed


def memory_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The memory (S,) behind a view (B, H, N, d) of rows without gaps, and how far images, heads and tokens lie apart.

    NumPy cannot tell of a view that its rows are runs, and without that they are read number by number.
    """
    length = sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True)) + 1
    image, head, token, _ = x.stride()
    return x.as_strided((length,), (1,)), image, head, token


def _compile(function: Callable[..., None]) -> Callable[..., None]:
    import numba  # takes half a second, so only where it is used

    # sums in any order, so that they use whole vectors; NaN and infinity stay what they are
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        compiled: Callable[..., None] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it for the next process: neither the package's folder nor the user's
        compiled = numba.njit(**options)(function)
    return compiled
