"""Models timed in turn at one setting: dense and reduced, on several engines, at several image sizes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import handle_of
from vitrim.core.registry import ask
from vitrim.engines.copies import dense_copies, reduced_copy, shared_copy
from vitrim.engines.engine import Eager, Engine, compilation, engines_named, listed
from vitrim.engines.exported import Exported
from vitrim.engines.formats.base import PRECISIONS
from vitrim.engines.macs import count_macs
from vitrim.engines.prefill import Prefill
from vitrim.engines.runnable import Module, Runnable, outputs
from vitrim.errors import VitrimError
from vitrim.measure.latency import (
    Budget,
    FloatArray,
    fastest,
    in_turn,
    paired_speedup,
    speed_row,
    summarise,
    time_interleaved,
    watched_machine,
)
from vitrim.measure.limit import slice_of, sliced, sliced_copy
from vitrim.measure.records import Row
from vitrim.measure.speed_report import engine_of
from vitrim.measure.stopwatch import Stopwatch
from vitrim.report import DENSE, at_px
from vitrim.tasks import tasks

Tell: TypeAlias = Callable[[str], None]

WHOLE = "whole model"
"""The ``part`` of rows of an entire dense-prediction model."""


@dataclass(frozen=True)
class Sized:
    """A dense model at one image size, and the images for it.

    Attributes:
        model: a module, or a file.
        ring, calibration, held_out: ``images`` and others of `measure`.
        img_size: None for the model's own size.
        others: as many images as ``ring``, to warm up on; none if one batch is timed.
    """

    model: Any
    ring: Sequence[Tensor]
    calibration: Tensor | None = None
    held_out: Sequence[tuple[Tensor, Any]] = ()
    img_size: int | None = None
    others: Sequence[Tensor] = ()


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of ``model`` in this dtype and eval mode; it shares parameters that already have the dtype."""
    same = next(model.parameters()).dtype == dtype
    return (shared_copy(model) if same else copy.deepcopy(model).to(dtype)).eval()


def silent(text: str) -> None:
    """Report no progress."""


def measure(
    model: nn.Module | Exported,
    methods: Mapping[str, MethodConfig],
    images: Tensor | Sequence[Tensor],
    *,
    engines: Sequence[str | Engine] = ("eager",),
    budget: Budget | None = None,
    learned: Path | None = None,
    files: Mapping[str, Exported] | None = None,
    calibration: Tensor | None = None,
    held_out: Sequence[tuple[Tensor, Any]] | None = None,
    on_progress: Tell | None = None,
) -> list[Row]:
    """Time a dense model and its reductions at one batch size, in one interleaved run, and measure peak memory.

    The baseline is the fastest dense model over engines, precisions and attention kernels.

    Args:
        model: an unreduced host in eval mode, or the `Prefill` of a vision-language model; not changed. Or a file,
            without methods.
        methods: configs by row name.
        images: (B, C, H, W) on the model's device, (B, n, C, H, W) for a `Prefill`; or several such batches for methods
            whose token counts depend on the images: every other one warms up, and the rest is timed, first in a turn of
            new images, then round by round.
        engines: names (see `vitrim.engines.engine.engines`), with the precision of the model's parameters, or engines.
            An engine that needs a fixed graph skips methods without one.
        budget: see `bench`.
        learned: folder of a saved reduction, whose parameters the methods of that name load.
        files: exported files by row name, each on its own engine; one named "dense" is a dense model, too.
        calibration: (N, C, H, W) for int8; None for ``images``.
        held_out: batches of B images (B, C, H, W) with targets, to compare dense models on.
        on_progress: called with a short text before a model is prepared, and between rounds.

    Returns:
        One row per engine and precision for the dense model with its faster attention kernel (method "dense"), then one
        per method, engine and precision, each with ``method, engine, precision, compiled, images_per_second,
        latency_ms`` (p50, p95, min, iqr), ``rounds, peak_memory_mib`` (None if it cannot be measured), ``speedup,
        speedup_q1, speedup_q3`` over the baseline, ``macs_speedup`` (dense MACs over reduced MACs), ``ratio``
        (speedup over macs_speedup), ``dense_engine, dense_precision, dense_kernel`` of the baseline,
        ``engine_speedup`` over the dense model on the same engine and precision, its ``dense_p50_ms`` (by kernel), and
        ``prepare_seconds`` (compiling or exporting, and the first run). Of several batches also ``new_p50_ms,
        new_speedup, new_speedup_q1, new_speedup_q3`` on new images. With ``budget.slice``, static methods have
        ``of_limit, of_limit_q1, of_limit_q3``: their speed over that of the row "plain slice of METHOD".

        A dense-prediction model (`vitrim.models.segmenter`, `vitrim.models.vitdet`) has two rows each, with ``part``:
        the layers before its heads, compared with the same part of the dense model, and the entire model.

        For a `vitrim.engines.prefill.Prefill`, rows also have ``text_tokens, prompt_images, image_tokens, new_tokens``
        of a prompt, ``kv_cache_bytes`` per prompt at the end, and ``parts_ms`` (`vitrim.measure.stopwatch.PARTS`,
        medians); images per second count all images of the prompts.

    Raises:
        VitrimError: a method does not fit the model or runs on none of the engines, or an engine cannot run here.

    Example:
        >>> import timm
        >>> from vitrim.core.registry import parse_method
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
        >>> rows = measure(model, {"tome:r=1": parse_method("tome:r=1")}, torch.zeros(1, 3, 32, 32),
        ...                budget=Budget(min_rounds=1, min_seconds=0.0))
        >>> [(row["method"], row["engine"]) for row in rows]
        [('dense', 'eager'), ('tome:r=1', 'eager')]
    """
    given = [images] if isinstance(images, Tensor) else list(images)
    sized = Sized(model, given, calibration, held_out or ())
    return measure_sizes(
        [sized], methods, engines=engines, budget=budget or Budget(), learned=learned, files=files or {},
        tell=on_progress or silent,
    )  # fmt: skip


def measure_sizes(
    sized: Sequence[Sized],
    methods: Mapping[str, MethodConfig],
    *,
    engines: Sequence[str | Engine],
    budget: Budget,
    learned: Path | None,
    files: Mapping[str, Exported],
    tell: Tell,
) -> list[Row]:
    """`measure` of a model at several image sizes, its own first, in the same rounds."""
    sized = [replace(one, ring=one.ring[::2], others=one.ring[1::2]) for one in sized]
    own = sized[0]
    model, ring = own.model, own.ring
    device, size, chosen = ring[0].device, len(ring[0]), list[Engine]()
    entries = list(_file_entries(files, model, sized))
    if isinstance(model, Exported):
        entries = [*_file_entries({DENSE: model}, model, sized), *entries]
    else:
        precision = next(name for name, dtype in PRECISIONS.items() if dtype == next(model.parameters()).dtype)
        chosen, _ = engines_named(listed(engines), [precision], device)
        check_engines(chosen, methods, model, size)
        slices = sliced(model, methods) if budget.slice else {}
        entries = [
            *(entry for one in sized for entry in _entries(one, methods, slices, chosen, learned, own)),
            *entries,
        ]
    each = [DENSE, *(name for method in methods for name in (method, slice_of(method)))]
    names = [at_px(name, one.img_size) for one in sized for name in each]
    with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in chosen)):
        _prepare(entries, Path(folder), tell)
        watched = _Watched(**vars(_whole_turns(budget, len(ring))), tell=tell)
        with torch.inference_mode():
            if own.others:
                tell("timing new images")
                _meet(entries, device)
            for entry in entries:
                entry.call = in_turn(entry.runnable.run, [entry.runnable.given(each) for each in entry.sized.ring])
            with ExitStack() as watching:
                for entry in entries:
                    entry.watch(watching, device)
                calls = {entry.key: entry.call for entry in entries}
                with watched_machine() as machine:
                    times = time_interleaved(calls, device, watched)
            rows = _rows(entries, times, [*names, *files], own, tell)
        disturbed = machine[0].disturbance()
        return rows if disturbed is None else [Row(row.method, {**row, "disturbed": disturbed}) for row in rows]


def _whole_turns(budget: Budget, batches: int) -> Budget:
    """The budget with rounds that use each of several batches equally often, in both halves of the rounds."""
    if batches == 1:
        return budget
    whole = -(-budget.min_rounds // (2 * batches)) * 2 * batches
    return replace(budget, min_rounds=whole, max_rounds=whole)


def _meet(entries: Sequence[Entry], device: torch.device) -> None:
    """Time a turn of the batches of each ring, which are new to every model, after the others."""
    calls: dict[str, Callable[[], object]] = {}
    for entry in entries:
        for images in entry.sized.others:
            entry.runnable.run(entry.runnable.given(images))
        batches = [entry.runnable.given(images) for images in entry.sized.ring]
        calls[entry.key] = partial(next, map(entry.runnable.run, cycle(batches)))
    turn = len(entries[0].sized.ring)
    times = time_interleaved(calls, device, Budget(turn, 0.0, turn, warmup_rounds=0))
    for entry in entries:
        entry.new_ms = times[entry.key][:turn]  # on a restless machine there are more, of images met


def _entries(
    sized: Sized,
    methods: Mapping[str, MethodConfig],
    slices: Mapping[str, MethodConfig],
    engines: Sequence[Engine],
    learned: Path | None,
    own: Sized,
) -> Iterator[Entry]:
    """Yield the dense model and its reductions, in parts, on every engine that can run them.

    Their promise compares with the model at its ``own`` size.
    """
    model, ring = sized.model, sized.ring
    front = front_name(model)
    # how to get each separately timed part from a model; None if there is only one
    parts: dict[str | None, Callable[[nn.Module], nn.Module]]
    parts = {None: lambda whole: whole} if front is None else {front: Front, WHOLE: lambda whole: whole}
    configs = {**methods, **slices}
    for dtype in dict.fromkeys(engine.dtype for engine in engines):
        base = in_dtype(model, dtype)
        copies = {(DENSE, kernel): dense for kernel, dense in dense_copies(base).items()}
        for name, config in methods.items():
            copies[name, ""] = reduced_copy(base, config, learned)
        copies |= {(name, ""): sliced_copy(base, config, learned) for name, config in slices.items()}
        for part, take in parts.items():
            # count the copies that are timed: learned reducers are initialised randomly in every copy
            reduced = {name: take(copies[name, ""]) for name in configs}
            promised = macs_speedups(take(base), reduced, [batch.to(dtype) for batch in ring])
            if sized is not own:
                macs = [count_macs(take(in_dtype(one.model, dtype)), one.ring[0][:1].to(dtype)) for one in (own, sized)]
                cheaper = macs[0].total / macs[1].total
                promised = {DENSE: cheaper, **{name: cheaper * promise for name, promise in promised.items()}}
            for engine in engines:
                for (name, kernel), copied in copies.items():
                    runs = name == DENSE or engine.obstacle(configs[name], len(ring[0])) is None
                    if engine.dtype == dtype and runs:
                        whole = take(copied)
                        make = partial(engine.prepare, whole)
                        promise = promised.get(name, 1.0)
                        yield Entry(at_px(name, sized.img_size), kernel, str(engine), part, whole, promise, make, sized)


def _file_entries(
    files: Mapping[str, Exported], model: nn.Module | Exported, sized: Sequence[Sized]
) -> Iterator[Entry]:
    """Yield exported files, each on its own engine."""
    part = None if front_name(model) is None else WHOLE
    for name, file in files.items():
        known = file.metadata
        # a file that is the baseline may be reduced itself
        base = model.metadata.get("gmacs") if isinstance(model, Exported) else known.get("dense_gmacs")
        promise = base / known["gmacs"] if base and known.get("gmacs") else 1.0
        on = engine_of({"engine": file.engine, "precision": file.precision})
        mine = next((one for one in sized if tuple(one.ring[0].shape[-2:]) == file.preprocessing.size), sized[0])
        kernel = "host" if name == DENSE else ""
        yield Entry(name, kernel, on, part, file, promise, lambda *_, file=file: file, mine)


def _prepare(entries: Sequence[Entry], folder: Path, tell: Tell) -> None:
    """Compile or export every model; the precisions of one engine share the folder of a model."""
    models: dict[int, int] = {}
    for number, entry in enumerate(entries, 1):
        tell(f"making {entry.key} ready, {number} of {len(entries)}")
        place = folder / str(models.setdefault(id(entry.model), len(models)))
        entry.prepare(place)


@dataclass(frozen=True)
class _Watched(Budget):
    """A budget that reports its progress. `spent` is called between rounds, outside the timed sections."""

    tell: Tell = silent
    times: list[int] = field(default_factory=list)
    """An entry each time that the budget is spent from its start: `time_interleaved` does so on a restless machine."""

    def spent(self, rounds: int, seconds: float, candidates: int) -> bool:
        if rounds == 0:
            self.times.append(rounds)
        share = min(rounds / self.min_rounds, seconds / (self.min_seconds * candidates) if self.min_seconds else 1.0)
        again = f" again (time {len(self.times)} of at most 3), because timings drift" if len(self.times) > 1 else ""
        self.tell(f"timing{again}, round {rounds + 1}, {100 * min(share, 1.0):.0f} %")
        return super().spent(rounds, seconds, candidates)


@dataclass
class Entry:
    """One model, or a part of it, on one engine.

    Attributes:
        kernel: attention kernel of a dense model.
        on: the engine and its precision.
        part: part of the model; None if the model is timed as one.
        promised: dense MACs over its MACs.
        make: makes the ``runnable`` from images, a folder and images to calibrate on; see `Engine.prepare`.
        sized: the images for it.
        call: one forward of the images.
        seconds: duration of `prepare`.
        parts: timers of the parts of a `Prefill`.
        new_ms: times of one turn of images that were new; None if none were.
    """

    name: str
    kernel: str
    on: str
    part: str | None
    model: nn.Module | Exported
    promised: float
    make: Callable[[Tensor, Path, Tensor | None], Runnable]
    sized: Sized
    runnable: Runnable = field(init=False)
    call: Callable[[], object] = field(init=False)
    seconds: float = field(init=False)
    parts: Stopwatch | None = None
    new_ms: FloatArray | None = None

    @property
    def key(self) -> str:
        """The unique name of the entry in a run."""
        kernel = f" ({self.kernel})" if self.kernel else ""
        on = "" if self.on == Eager.label else f" on {self.on}"
        return self.name + kernel + on + ("" if self.part is None else f" [{self.part}]")

    def prepare(self, folder: Path) -> None:
        """Compile or export the model for batches like those it is timed on, with files in ``folder``."""
        folder.mkdir(exist_ok=True)
        start, ring = time.perf_counter(), self.sized.ring
        self.runnable = self.make(ring[0], folder, self.sized.calibration)
        with torch.inference_mode():
            self.runnable.run(self.runnable.given(ring[0]))
        self.seconds = time.perf_counter() - start

    def watch(self, within: ExitStack, device: torch.device) -> None:
        """Also time the parts of a `Prefill`."""
        if isinstance(self.model, Prefill):
            self.parts = within.enter_context(Stopwatch(self.model, self.call, device))
            self.call = self.parts


def check_engines(engines: Sequence[Engine], methods: Mapping[str, MethodConfig], model: nn.Module, batch: int) -> None:
    """Refuse engines that cannot run this model, and methods that run on none of them, and suggest a remedy."""
    part = front_name(model)
    for engine in engines:
        if isinstance(model, Prefill) and not engine.runs_prompts:
            raise VitrimError(f"engine {engine.label} runs models of images, not prompts: time prefill on eager")
        if part is not None and engine.whole_models_only:
            raise VitrimError(f"engine {engine.label} runs whole models only, and the {part} is timed by itself here")
    for name, config in methods.items():
        obstacles = [engine.obstacle(config, batch) for engine in engines]
        if None not in obstacles:
            raise VitrimError(f"{name} runs on none of these engines: {obstacles[0]}; give eager too")


def _rows(
    entries: Sequence[Entry],
    times: Mapping[str, FloatArray],
    names: Sequence[str],
    own: Sized,
    tell: Tell,
) -> list[Row]:
    """A row per method, engine and part; for the dense model on an engine, that of its faster kernel.

    Dense models of every image size have a kernel; those of the ``own`` size are the baseline.
    """

    def quickest(among: Iterable[Entry]) -> Entry:
        by_key = {entry.key: entry for entry in among}
        return by_key[fastest(times, by_key)]

    kernels: dict[tuple[str, str, str | None], list[Entry]] = {}
    for entry in entries:
        if entry.kernel:
            kernels.setdefault((entry.name, entry.on, entry.part), []).append(entry)
    dense = {place: quickest(every) for place, every in kernels.items()}
    baseline = {
        part: quickest(one for one in dense.values() if one.name == DENSE and one.part == part) for *_, part in dense
    }
    kept = [*dense.values(), *(entry for entry in entries if not entry.kernel)]
    limits = {(entry.name, entry.on, entry.part): times[entry.key] for entry in entries}
    exact = None
    if own.held_out and None in baseline and isinstance(own.model, nn.Module):
        exact = _exact(own.model, own.held_out)
    sized, rows = any(entry.sized is not own for entry in entries), []
    for entry in sorted(kept, key=lambda entry: names.index(entry.name)):
        place, base, images = (DENSE, entry.on, entry.part), baseline[entry.part], entry.sized.ring[0]
        facts: dict[str, Any] = {"img_size": images.shape[-2]} if sized else {}
        facts |= _facts(entry, base, images, len(times[base.key]))
        # a file may use an engine without dense entries
        facts["dense_p50_ms"] = {one.kernel: summarise(times[one.key]).p50_ms for one in kernels.get(place, ())}
        peak = entry.runnable.peak_mib(entry.runnable.given(images))
        count = len(images) * facts.get("prompt_images", 1)
        numbers = speed_row(times[entry.key], times[base.key], count, entry.promised)
        own_dense = times[dense.get(place, base).key]
        numbers["engine_speedup"] = paired_speedup(own_dense, times[entry.key]).median
        numbers["prepare_seconds"] = entry.seconds
        if entry.new_ms is not None and base.new_ms is not None:
            met = paired_speedup(base.new_ms, entry.new_ms)
            numbers |= {"new_p50_ms": summarise(entry.new_ms).p50_ms, "new_speedup": met.median}
            numbers |= {"new_speedup_q1": met.q1, "new_speedup_q3": met.q3}
        limit = limits.get((slice_of(entry.name), entry.on, entry.part))
        if limit is not None:
            reached = paired_speedup(limit, times[entry.key])
            numbers |= {"of_limit": reached.median, "of_limit_q1": reached.q1, "of_limit_q3": reached.q3}
        if exact is not None and entry.kernel:
            tell(f"comparing {entry.key} with fp32")
            numbers |= _agreement(entry, entry.sized.held_out, exact)
        rows.append(Row(entry.name, {**facts, **numbers, "peak_memory_mib": peak}))
    return rows


def _facts(entry: Entry, base: Entry, images: Tensor, rounds: int) -> dict[str, Any]:
    """The columns of a row that are no speeds: its engine, the baseline, and the prompt of a `Prefill`."""
    facts: dict[str, Any] = {} if entry.part is None else {"part": entry.part}
    runs, against = entry.runnable, base.runnable
    compiled = isinstance(runs, Module) and runs.call is not None
    facts |= {"engine": runs.engine, "precision": runs.precision, "compiled": compiled}
    facts |= {"dense_engine": against.engine, "dense_precision": against.precision, "dense_kernel": base.kernel}
    prompt = entry.model
    if isinstance(prompt, Prefill):
        facts |= {"text_tokens": prompt.text, "prompt_images": prompt.shape[0]}
        facts |= {"image_tokens": prompt.image_tokens(images), "new_tokens": prompt.new_tokens}
        facts["kv_cache_bytes"] = prompt.cache_bytes
        if entry.parts is not None:
            facts["parts_ms"] = entry.parts.medians(rounds)
        if prompt.select is not None and entry.name != DENSE:
            facts["select"] = prompt.select.describe()
    return facts


def _exact(model: nn.Module, held_out: Sequence[tuple[Tensor, Any]]) -> Tensor | None:
    """(N,) classes that the dense model gives the images in fp32; None for a model without classes."""
    if not ask(model).num_classes(model):
        return None
    plain = Module(in_dtype(model, torch.float32))
    found = [outputs(plain, images).cpu() for images, _ in held_out]
    return torch.cat(found).argmax(1) if found[0].ndim == 2 else None


def _agreement(entry: Entry, held_out: Sequence[tuple[Tensor, Any]], exact: Tensor) -> dict[str, Any]:
    """The share of images with the class ``exact`` (N,), and top-1 if there are labels."""
    found = torch.cat([outputs(entry.runnable, images).cpu() for images, _ in held_out]).argmax(1)
    numbers: dict[str, Any] = {"agreement": (found == exact).double().mean().item()}
    labels = [labels for _, labels in held_out]
    if all(isinstance(one, Tensor) and one.ndim == 1 and bool((one >= 0).all()) for one in labels):
        numbers["top1"] = (found == torch.cat(labels)).double().mean().item()
    return {**numbers, "scored": len(found)}


class Front(nn.Module):
    """The layers of a dense-prediction model before its heads (`Host.front`), as a module to count and compile.

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
        self.library = ask(model)

    def forward(self, images: Tensor) -> Any:
        """Compute the heads' input for ``images`` (B, C, H, W)."""
        front = self.library.front(self.model)
        assert front is not None
        return front[1](images)


def macs_speedups(dense: nn.Module, reduced: Mapping[str, nn.Module], ring: Sequence[Tensor]) -> dict[str, float]:
    """Dense MACs over the MACs of every ``reduced`` model: the speed-up if time were proportional to MACs.

    Counted on all batches (B, C, H, W) of ``ring`` if counts depend on the images, else on one image.
    """
    found: dict[str, float] = {}
    of_dense: dict[bool, int] = {}  # by True if all batches are counted
    for name, taken in reduced.items():
        model = taken.model if isinstance(taken, Front) else taken
        varies = handle_of(model).config.is_adaptive() or (taken is model and cost_varies(model))
        sample = ring if varies else [ring[0][:1]]
        if varies not in of_dense:
            of_dense[varies] = sum(count_macs(dense, batch).total for batch in sample)
        found[name] = of_dense[varies] / sum(count_macs(taken, batch).total for batch in sample)
    return found


def cost_varies(model: Any) -> bool:
    """True if the MACs of ``model`` depend on the image content, as those of RoI heads do on the proposals.

    Example:
        >>> cost_varies(nn.Linear(1, 1))
        False
    """
    return front_name(model) is not None and tasks()[ask(model).tasks(model)[0]].cost_varies


def front_name(model: Any) -> str | None:
    """The part of ``model`` before its heads, which is timed by itself; None for a model that is timed as a whole.

    Example:
        >>> front_name(nn.Linear(1, 1)) is None
        True
    """
    found = ask(model).front(model)
    return None if found is None else found[0]
