"""Speed and memory of reduced models against the dense one, at one batch size and dtype, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.ask import ask
from vitrim.core.config import MethodConfig
from vitrim.core.reduce import get_reduction
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError, first_line
from vitrim.measure.latency import (
    Budget,
    FloatArray,
    dense_copies,
    fastest,
    images_per_second,
    paired_speedup,
    reduced_copy,
    shared_copy,
    summarise,
    time_interleaved,
)
from vitrim.measure.macs import count_macs
from vitrim.measure.memory import peak_memory_mib
from vitrim.measure.records import DENSE, Row
from vitrim.tasks import tasks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED_VARIANTS = 1000
WHOLE = "whole model"
"""The part of a dense model that is all of it."""


def measure(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    images: Tensor,
    *,
    compiled: bool = False,
    budget: Budget | None = None,
) -> list[Row]:
    """Speed and peak memory of a dense model and its reductions at one batch size and dtype, in one interleaved run.

    Args:
        model: an unreduced host in eval mode; it is not changed.
        methods: configs by the name that the rows should carry.
        images: (B, C, H, W) on the device and in the dtype of the model.
        compiled: compile all of them with torch.compile in its default mode.
        budget: how long to time.

    Returns:
        One row for the dense model with the faster attention kernel (method "dense"), then one per method, each with
        ``method, dense_kernel, dense_p50_ms`` (by kernel), ``images_per_second, latency_ms`` (p50, p95, min, iqr),
        ``rounds, peak_memory_mib`` (None where it cannot be measured), ``speedup, speedup_q1, speedup_q3,
        promised_speedup`` (dense MACs over reduced MACs) and ``ratio`` (speedup over promised_speedup).

        Of a dense model (`vitrim.models.segmenter`, `vitrim.models.vitdet`) two rows each, with ``part``: what runs in
        front of its heads, against the same part of the dense model, and the whole model.

    Raises:
        VitrimError: a method does not fit the model.

    Example:
        >>> import timm
        >>> from vitrim.core.registry import parse_method
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
        >>> rows = measure(model, {"tome:r=1": parse_method("tome:r=1")}, torch.zeros(1, 3, 32, 32),
        ...                budget=Budget(min_rounds=1, min_seconds=0.0))
        >>> [row["method"] for row in rows]
        ['dense', 'tome:r=1']
    """
    kernels = dense_copies(model)
    copies = {_dense_name(kernel): dense for kernel, dense in kernels.items()}
    copies |= {name: reduced_copy(model, config) for name, config in methods.items()}
    parts = _parts(model)
    # counted on the very copies that are timed: learned reducers are drawn anew for every copy
    promised = {
        part: _promises(take(model), {name: take(copies[name]) for name in methods}, images)
        for part, take in parts.items()
    }
    models = {_key(name, part): take(copy) for part, take in parts.items() for name, copy in copies.items()}
    with torch.inference_mode(), compilation(compiled):
        if compiled:
            models = {name: torch.compile(candidate) for name, candidate in models.items()}  # type: ignore[misc]
        runs: dict[str, Callable[[], object]] = {name: partial(candidate, images) for name, candidate in models.items()}
        times = time_interleaved(runs, images.device, budget)
        fastest_of = {
            part: fastest({name: times[_key(_dense_name(name), part)] for name in kernels}, kernels) for part in parts
        }
        peaks = {
            # a copy, because what a model still holds of its last forward would be released in this one
            key: peak_memory_mib(runs[key] if compiled else partial(shared_copy(models[key]), images), images.device)
            for part in parts
            for key in (_key(name, part) for name in [_dense_name(fastest_of[part]), *methods])
        }
    rows = []
    for label in (DENSE, *methods):
        for part in parts:
            dense = _key(_dense_name(fastest_of[part]), part)
            key, promise = (dense, 1.0) if label == DENSE else (_key(label, part), promised[part][label])
            facts: dict[str, Any] = {} if part is None else {"part": part}
            facts["dense_kernel"] = fastest_of[part]
            facts["dense_p50_ms"] = {
                kernel: summarise(times[_key(_dense_name(kernel), part)]).p50_ms for kernel in kernels
            }
            rows.append(Row(label, {**facts, **_numbers(times, key, dense, len(images), peaks[key], promise)}))
    return rows


class Front(nn.Module):
    """The part of a dense model in front of its heads (`Host.front`), as a model that can be counted and compiled.

    Example:
        >>> from vitrim.loading import create_model
        >>> options = {"img_size": 32, "depth": 1, "num_classes": 3}
        >>> model = create_model("segmenter:vit_tiny_patch16_224", options=options)
        >>> Front(model)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5, 192])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.host = ask(model)

    def forward(self, images: Tensor) -> Any:
        """Compute what the heads read of ``images`` (B, C, H, W)."""
        return self.host.front(self.model, images)


def _parts(model: nn.Module) -> dict[str | None, Callable[[nn.Module], nn.Module]]:
    """The parts that are timed each by itself: how they are taken from a model, by name; None: there is only one."""
    name = ask(model).front_name(model)
    return {None: _itself} if name is None else {name: Front, WHOLE: _itself}


def _itself(model: nn.Module) -> nn.Module:
    return model


def _key(name: str, part: str | None) -> str:
    return name if part is None else f"{name} [{part}]"


def _dense_name(kernel: str) -> str:
    return f"{DENSE} ({kernel})"


def _numbers(
    times: Mapping[str, FloatArray], name: str, dense: str, batch_size: int, peak_mib: float | None, promised: float
) -> dict[str, Any]:
    latency = summarise(times[name])
    speedup = paired_speedup(times[dense], times[name])
    return {
        "images_per_second": images_per_second(batch_size, latency.p50_ms),
        "latency_ms": {
            "p50": latency.p50_ms,
            "p95": latency.p95_ms,
            "min": latency.min_ms,
            "iqr": latency.iqr_ms,
        },
        "rounds": len(times[name]),
        "peak_memory_mib": peak_mib,
        "speedup": speedup.median,
        "speedup_q1": speedup.q1,
        "speedup_q3": speedup.q3,
        "promised_speedup": promised,
        "ratio": speedup.median / promised,
    }


def _promises(dense: nn.Module, reduced: Mapping[str, nn.Module], images: Tensor) -> dict[str, float]:
    """`promised_speedup` of several reduced models, or fronts of models."""
    return {name: promised_speedup(dense, candidate, images) for name, candidate in reduced.items()}


def promised_speedup(dense: nn.Module, reduced: nn.Module, images: Tensor) -> float:
    """Dense MACs over the MACs of the ``reduced`` model: the speed-up if time were proportional to MACs.

    Counted on all of ``images`` (B, C, H, W) where counts depend on them, else on one.
    """
    model = reduced.model if isinstance(reduced, Front) else reduced
    varies = get_reduction(model).config.is_adaptive() or (reduced is model and cost_varies(model))
    sample = images if varies else images[:1]
    return count_macs(dense, sample).total / count_macs(reduced, sample).total


def cost_varies(model: nn.Module) -> bool:
    """Tell whether the work of ``model`` depends on what is in the images: that of RoI heads does, on the proposals.

    Example:
        >>> cost_varies(nn.Linear(1, 1))
        False
    """
    host = ask(model)
    task = host.task(model)
    return host.front_name(model) is not None and task is not None and tasks()[task].cost_varies


@contextmanager
def compilation(compiled: bool) -> Iterator[None]:
    """torch.compile for many variants of one model.

    Its cache is per source line, so the dense and all reduced models share one: with the usual limit of 8 entries the
    ninth would silently run uncompiled. What earlier settings compiled is forgotten, because a second batch size
    would else be compiled for any size.
    """
    if not compiled:
        yield
        return
    import torch._dynamo  # takes a second to load

    torch.compiler.reset()
    limits = {"recompile_limit": COMPILED_VARIANTS, "accumulated_recompile_limit": COMPILED_VARIANTS}
    with torch._dynamo.config.patch(limits):
        yield


@contextmanager
def one_line_errors(setting: str, kept: str = "; settings finished before are kept") -> Iterator[None]:
    """Turn running out of memory, and a dtype that the device cannot compute in, into a `VitrimError`.

    Args:
        setting: what ran, for the message.
        kept: what the message says of what was there before.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise VitrimError(f"out of memory at {setting}{kept}") from error
    except RuntimeError as error:
        message = str(error)
        if any(sign in message for sign in ("can't allocate memory", "Storage size calculation overflowed")):
            raise VitrimError(f"out of memory at {setting}{kept}") from error
        if "not implemented for" in message:
            raise VitrimError(f"cannot run at {setting}: {first_line(error)}{kept}") from error
        raise


def random_images(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Standard normal images (count, C, H, W), float32 on the CPU, of the size and channels that ``model`` takes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *host_of(model).facts(model).input_size, generator=generator)
