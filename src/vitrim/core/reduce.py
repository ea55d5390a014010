"""`reduce_` and `restore_`, which check everything before they edit anything, and the handle `Reduction`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core import checks
from vitrim.core.block import ReducedBlock, access, reduced_in
from vitrim.core.checks import OuterModel
from vitrim.core.counts import TokenRun, as_html, as_text, mean, planned, recorded, saved_share, units_of
from vitrim.core.host import FormOfModel, refuse_own_forward
from vitrim.core.install import adopt, install_hooks, reduced_forms, refuse_while_running, release
from vitrim.core.method import MethodConfig
from vitrim.core.plan import Grid, HostFacts, Layer, plan
from vitrim.core.registry import (
    find_host,
    find_prompted,
    host_of,
    parse_method,
    parse_selector,
    saved_config,
    support_libraries,
    supported_parts,
    vision_language,
)
from vitrim.core.saving import read_parameters, read_reduction, saved_part, write_reduction
from vitrim.core.selection import Choosing, ImageSelector, Selector
from vitrim.core.tokens import Entered, ImagePlaces, TokenState, Trace
from vitrim.errors import VitrimError

HANDLE = "vitrim_reduction"
UNKNOWN = "how many tokens stay depends on the images: reduce with record=True, run the model, and print again"
NOT_RUN = "run the reduced model to its last block in this thread (and read before backward)"


def reduce_(
    model: nn.Module,
    method: MethodConfig | str | None = None,
    *,
    record: bool = False,
    compact: bool = False,
    select: Selector | str | None = None,
) -> Reduction:
    """Reduce the tokens of ``model`` in place and return the handle of the reduction.

    The model keeps its call, return type, parameters and state_dict keys; parameters that the method learns are added
    under ``*.reducer.*``. `restore_` undoes it. A model that is reduced already is restored first.

    Args:
        model: a supported host, e.g. any ``timm`` VisionTransformer, or a model that contains one: a vision-language
            model, DPT, a wrapper. That part is then reduced and is ``reduction.model``; `restore_` and `get_reduction`
            accept either.
        method: the method's config, or its text form: ``"tome:r=13"``, ``"@best.json"``. Optional with ``select``.
        record: keep the state after every block of the last forward (``reduction.states``).
        compact: give the language model of a vision-language ``model`` only the remaining tokens. Prompts follow, in
            ``model(...)`` and ``model.generate(...)``. See docs/selection.md.
        select: a selector of the image tokens that the language model gets, ``"divprune:tokens=64"``; implies
            ``compact``.

    Raises:
        UnsupportedModelError: the model is not supported, cannot carry this method, or has several supported parts.
        VitrimError: the model runs in another thread, an option does not fit it, or it is reduced by a method whose
            learned parameters would be lost. After an error the model is as it was.

    Warns:
        ReductionWarning: a layer cannot remove as much as asked (an error with ``strict=True`` in the config), the
            method's file was made for another model, or the method adds sizes to the attention of an MAE.

    Example:
        >>> import timm, torch, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
        >>> reduction = vitrim.reduce_(model, vitrim.ToMe(r=8))
        >>> model(torch.zeros(1, 3, 224, 224)).shape, reduction.state.num_tokens
        (torch.Size([1, 10]), 101)
        >>> vitrim.restore_(model)
    """
    config, selector = _parsed(method, select)
    parts = reduced_parts(model)
    with ExitStack() as undo:
        if len(parts) == 1:
            old, where = handle_of(parts[0][1]), access(parts[0][0])
            if any(True for block in old._blocks() for _ in block.reducer.parameters()):
                raise VitrimError(
                    f"{where} is reduced by {old.config.name}, whose learned parameters would be lost: keep them with "
                    f"reduction.save(folder), then call vitrim.restore_({where}) first"
                )
            # If the new reduction fails, the old one is put back; `pop_all` below forgets it.
            undo.callback(_take_off(old, model))
        reduction = _reduce(model, model, config, record, compact, selector)
        undo.pop_all()
    return reduction


@contextmanager
def reduced(
    model: nn.Module,
    method: MethodConfig | str | None = None,
    *,
    record: bool = False,
    compact: bool = False,
    select: Selector | str | None = None,
) -> Iterator[Reduction]:
    """Reduce ``model`` within a ``with`` statement, and leave it as it was, also after an error.

    A model that is reduced already gets its own reduction back. Arguments and errors as of `reduce_`.

    Example:
        >>> import timm, torch, vitrim
        >>> model = timm.create_model("test_vit").eval()
        >>> with vitrim.reduced(model, "tome:r=8") as reduction:
        ...     print(reduction.tokens_per_block)
        [93, 85, 77, 69, 61, 53]
    """
    config, selector = _parsed(method, select)
    parts = reduced_parts(model)
    with ExitStack() as undo:
        if len(parts) == 1:
            undo.callback(_take_off(handle_of(parts[0][1]), model))
        reduction = _reduce(model, model, config, record, compact, selector)
        undo.callback(restore_, model)
        yield reduction


def _parsed(method: MethodConfig | str | None, select: Selector | str | None) -> tuple[MethodConfig, Selector | None]:
    if method is None and select is not None:
        method = "none"
    config = parse_method(method) if isinstance(method, str) else method
    if not isinstance(config, MethodConfig):
        raise VitrimError(f"expected a method such as vitrim.ToMe(r=13) or 'tome:r=13', got {type(method).__name__}")
    return config, None if select is None else parse_selector(select)


def _reduce(
    holder: nn.Module | None,
    model: nn.Module,
    config: MethodConfig,
    record: bool,
    compact: bool,
    selector: Selector | None = None,
) -> Reduction:
    """`reduce_` on ``model``. If ``holder`` is given, the parts around it that read its tokens get all of them."""
    within = vision_language(model, selecting=selector is not None) if compact or selector is not None else None
    if (
        within is not None
        and selector is not None
        and config.kind == "none"
        and (within[1].shows_attention or selector.needs().attention == "none")
    ):
        return _select_only(within, config, selector)
    part = _reducible_part(model if within is None else within[1].tower(within[0]))
    host = host_of(part)
    forms = reduced_forms(host, part)
    fit = checks.fit(config, host, part, holder, within, selector)
    other_facts = None if fit.facts == host.facts(part) else fit.facts
    refuse_while_running(part)

    # only now edit
    trace = Trace(record, FormOfModel(host, part, forms), forms[0].call_class)
    trace.changing = True
    adopt(host.blocks(part), forms, config, fit, within is not None, trace)
    reduction = Reduction(part, config, trace, other_facts, within is not None, selector)
    _install(reduction, within)
    # a model of one of them may hold this one, and save it; a compiled model has no truth value
    support_libraries(next(one for one in (holder, within and within[0], part) if one is not None))
    return reduction


def _select_only(within: OuterModel, config: MethodConfig, selector: Selector) -> Reduction:
    """`reduce_` where nothing but a selector is asked for: the tower stays as it is."""
    outer, family = within
    family.check_selector(outer, selector, None)
    refuse_reduced(outer)
    reduction = Selection(outer, config, Trace(), None, True, selector)
    _install(reduction, within)
    support_libraries(outer)
    return reduction


def _reducible_part(model: nn.Module) -> nn.Module:
    """The part of ``model`` that is to be reduced, and is not yet: itself, or the one host in it."""
    if not isinstance(model, nn.Module):
        raise VitrimError(f"expected a torch.nn.Module to reduce, got {type(model).__name__}")
    if find_host(model) is None:
        refuse_reduced(model)
        parts = supported_parts(model)
        if len(parts) != 1:
            host_of(model)  # raises, with the reason
        model = parts[0][1]
    if any(reduced_in(block) is not None for block in host_of(model).blocks(model)):
        refuse_reduced(model)
        raise VitrimError("this model is reduced already: call vitrim.restore_(model) first")
    return model


def restore_(model: nn.Module) -> None:
    """Undo `reduce_` in place: the model computes the same as before, bit for bit. A dense model stays as it is.

    `VitrimError`: it runs in another thread, a forward was put on a block since, several parts are reduced, or
    ``model`` is only a part of the reduced model.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("test_vit")
        >>> reduction = vitrim.reduce_(model, "tome:r=8")
        >>> vitrim.restore_(model)
        >>> vitrim.restore_(model)
    """
    if not isinstance(model, nn.Module):
        raise VitrimError(f"expected a torch.nn.Module to restore, got {type(model).__name__}")
    if not isinstance(getattr(model, HANDLE, None), Reduction) and not reduced_parts(model):
        if any(isinstance(part, ReducedBlock) for part in model.modules()):
            raise VitrimError(
                f"this {type(model).__name__} is a part of what was reduced: call vitrim.restore_ on the model that "
                "vitrim.reduce_ was given"
            )
        return
    _take_off(handle_of(model), model)


def _take_off(reduction: Reduction, outer: nn.Module) -> Callable[[], None]:
    """Remove ``reduction`` from its model, which ``outer`` is or contains; return a function that puts it back."""
    model = reduction.model  # wrappers of torch.compile and peft return the handle of the wrapped model
    blocks = reduction._blocks()
    for block in blocks:
        refuse_own_forward(block, block.depth, "call vitrim.restore_ again")
    selects = isinstance(reduction, Selection)
    prompted = [model] if selects else outer.modules() if reduction.compact else ()
    families = [(part, found) for part in prompted if (found := find_prompted(part)) is not None]
    with reduction.changing():
        for part, family in families:
            family.uninstall(part)
        adopt_again = None if selects else release(model, blocks)
        delattr(model, HANDLE)

    def put_back() -> None:
        if adopt_again is not None:
            adopt_again()
        _install(reduction, families[0] if families else None)

    return put_back


def _install(reduction: Reduction, within: OuterModel | None) -> None:
    """Install hooks and handle on a model, ``within`` a vision-language model or None."""
    if not isinstance(reduction, Selection):
        install_hooks(reduction.model, reduction.config, reduction._trace, reduction._blocks()[-1])
    if within is not None:
        outer, family = within
        family.install(outer, reduction._trace, reduction._choosing)
    setattr(reduction.model, HANDLE, reduction)
    reduction._trace.changing = False


def get_reduction(model: nn.Module) -> Reduction | None:
    """The handle of a reduced model, or of the one reduced part in it; None for a dense model.

    Copies (EMA, deepcopy, unpickled) have their own. `VitrimError` if several parts of the model are reduced.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("test_vit")
        >>> vitrim.get_reduction(model) is None
        True
        >>> vitrim.reduce_(model, "tome:r=8") is vitrim.get_reduction(model)
        True
    """
    reduction = getattr(model, HANDLE, None)
    if isinstance(reduction, Reduction):
        return reduction
    parts = reduced_parts(model)
    if len(parts) > 1:
        inside = " and ".join(access(name) for name, _ in parts)
        raise VitrimError(f"several parts of this {type(model).__name__} are reduced, {inside}: give one of them")
    return get_reduction(parts[0][1]) if parts else None


def handle_of(model: nn.Module) -> Reduction:
    """`get_reduction` of a model that is known to be reduced."""
    reduction = get_reduction(model)
    assert reduction is not None, f"this {type(model).__name__} is not reduced"
    return reduction


def reduced_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of ``model`` that were given to `reduce_`, by name; ``model`` itself is ""."""
    if not isinstance(model, nn.Module):
        return []
    return [(name, part) for name, part in model.named_modules() if isinstance(vars(part).get(HANDLE), Reduction)]


def refuse_reduced(model: nn.Module) -> None:
    """Raise `VitrimError` if ``model`` or a part of it is reduced: for functions that need a dense one."""
    parts = reduced_parts(model)
    if parts:
        raise VitrimError(f"this model is reduced already: call vitrim.restore_({access(parts[0][0])}) first")


class Reduction:
    """The handle of one reduced model, made by `reduce_`; ``compact``: the language model gets only what remains."""

    def __init__(
        self,
        model: nn.Module,
        config: MethodConfig,
        trace: Trace,
        within: HostFacts | None,
        compact: bool,
        select: Selector | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._choosing = None if select is None else Choosing(select)
        self._trace = trace
        self._within = within  # facts that differ from the model's own, because of its reader
        self.compact = compact

    @property
    def select(self) -> Selector | None:
        """The current selector of image tokens behind the tower; None without one."""
        return None if self._choosing is None else self._choosing.selector

    def __repr__(self) -> str:
        return f"Reduction({self._described()} on {type(self.model).__name__})"

    def _described(self) -> str:
        return self.config.describe() + ("" if self.select is None else f", select {self.select.describe()}")

    def __str__(self) -> str:
        """Tokens that enter and leave every block, and MACs saved.

        Example:
            >>> import timm, vitrim
            >>> print(vitrim.reduce_(timm.create_model("test_vit"), "tome:r=[0,40]"))
            tome:r=[0,40] on VisionTransformer
              block        0   1   2   3   4   5
              tokens in  101 101  61  61  61  61
              tokens out 101  61  61  61  61  61
            about 33 % of the MACs of its blocks are saved
        """
        title = f"{self._described()} on {type(self.model).__name__}"
        if not self._is_alive():
            return f"{title}: undone since"
        counts = self._counts()
        return "\n".join([title, *([f"  {UNKNOWN}"] if counts is None else as_text(counts)), *self._savings()])

    def _repr_html_(self) -> str:
        """`__str__` for notebooks, with a bar for the tokens that leave every block."""
        if not self._is_alive():
            return f"<p>{escape(str(self))}</p>"
        title = f"<b>{escape(self._described())}</b> on {escape(type(self.model).__name__)}"
        counts, savings = self._counts(), map(escape, self._savings())
        if counts is None:
            return f"<p>{'<br>'.join([title, escape(UNKNOWN), *savings])}</p>"
        return f"<p>{title}</p>{as_html(counts)}<p>{'<br>'.join(savings)}</p>"

    @property
    def units(self) -> list[Grid]:
        """Rows and columns of the patches, or of their cells, in this thread's last forward, once per image size."""
        return [units_of(entered, self._facts) for entered in self._trace.call.entered]

    def _planned(self) -> list[TokenRun]:
        """The runs of this thread's last forward, else of an image of the model's own size, as planned."""
        facts, blocks = self._facts, self._blocks()
        rows, columns = facts.grid_size
        own = Entered(self.config, facts.windows, rows * columns, facts.grid_size, facts.windows)
        seen = [entered for entered in self._trace.call.entered if entered.rows > 0]  # a batch may be empty
        return [planned(self.config, facts, blocks, entered) for entered in seen or (own,)]

    def _runs(self) -> list[TokenRun] | None:
        """The planned counts, or the recorded ones where counts depend on the images; None if unknown."""
        if not self.config.is_adaptive():
            return self._planned()
        call = self._trace.call
        if not self._trace.recording or call.final is None or call.entered[0].config is not self.config:
            return None  # only with the current options: `set` may have changed them since
        return recorded(call, self._blocks())

    def _counts(self) -> list[tuple[float, float]] | None:
        """Mean tokens that enter and leave every block; None if unknown."""
        runs = self._runs()
        if runs is None:
            return None
        if self.config.is_adaptive():  # without padding
            entering = [state.mean_tokens() for state in self._trace.call.states[:-1]]
            return list(zip(entering, self.mean_tokens_per_block, strict=True))
        return list(zip(mean(runs, "entering"), mean(runs, "leaving"), strict=True))

    def _savings(self) -> list[str]:
        """Lines about the MACs saved (of projections, attention and MLPs), and about the language model's tokens."""
        runs, lines = self._runs(), list[str]()
        if runs is not None:
            share = saved_share(runs, self._blocks(), self._facts.dim, self.config.kind)
            lines.append(f"about {100 * share:.0f} % of the MACs of its blocks are saved")
            lines += self._of_which_images()
        return [*lines, *(["the language model gets only the tokens that are left"] if self.compact else [])]

    def _of_which_images(self) -> list[str]:
        """A line with the size that a plan made before any images is for, if they come in sizes of their own."""
        if self._trace.call.entered or not self._facts.any_size:
            return []
        _, height, width = self._facts.input_size
        return [f"as planned for images of {height} x {width} px; print again after a forward of yours"]

    @property
    def image_tokens(self) -> list[int]:
        """Tokens of each image that the language model got in this thread's last prompt with images."""
        return [image.number for image in self.image_places]

    @property
    def image_places(self) -> list[ImagePlaces]:
        """The places of each image in the prompt that `image_tokens` counts: which are kept, and which are merged."""
        if self._trace.call.image_places is None:
            raise VitrimError(
                "no image tokens yet: reduce_(model, method, compact=True), then run the whole model in this thread"
            )
        return self._trace.call.image_places

    @property
    def state(self) -> TokenState:
        """The `TokenState` after the last block of this thread's last forward."""
        if self._trace.call.final is None:
            raise VitrimError(f"no state yet: {NOT_RUN}")
        return self._trace.call.final

    @property
    def states(self) -> tuple[TokenState, ...]:
        """The states of this thread's last forward: on entry, then after every block. Needs ``record``."""
        if not self._trace.recording:
            raise VitrimError("states are kept only when recording: vitrim.reduce_(..., record=True)")
        if self._trace.call.final is None:
            raise VitrimError(f"no states yet: {NOT_RUN}")
        return self._trace.call.states

    @property
    def tokens_per_block(self) -> list[int]:
        """Tokens (prefix and padding included) after every block: of the last forward under ``record``, else as
        planned.

        Plans are for images of the size of this thread's last forward (the largest of several), or of the model's own
        size. The last block counts the patches that come back behind it (``restore``), or only the rows that its head
        reads. `VitrimError` if counts depend on the images and nothing was recorded.
        """
        self._check_alive()
        if not self._trace.recording:
            if self.config.is_adaptive():
                raise VitrimError(
                    f"the counts of {self.config.describe()} depend on the images, and states are kept only when "
                    "recording: vitrim.reduce_(..., record=True)"
                )
            return [max(counts) for counts in zip(*(run.of_images("leaving") for run in self._planned()), strict=True)]
        counts = [state.num_tokens for state in self.states[1:]]
        rows = self._blocks()[-1].head_rows
        return counts if rows is None or self.states[-1].asked.full_grids else [*counts[:-1], rows]

    @property
    def _facts(self) -> HostFacts:
        return self._within or host_of(self.model).facts(self.model)

    @property
    def mean_tokens_per_block(self) -> list[float]:
        """The `tokens_per_block`, averaged over the images of the last forward without padding."""
        pairs = zip(self.tokens_per_block, self.states[1:], strict=True)
        # The last entry may be the head's rows, which are the same in every image.
        return [state.mean_tokens() if count == state.num_tokens else count for count, state in pairs]

    def aux(self, name: str) -> list[Tensor]:
        """Auxiliary outputs called ``name`` of the last forward, in block order. Read them before backward."""
        found = [value for key, _, value in self.state.aux if key == name]
        if not found:
            have = sorted({key for key, _, _ in self.state.aux}) or ["none"]
            raise VitrimError(f"no auxiliary output '{name}'; this forward has: {', '.join(have)}")
        return found

    def set(self, *, select: Selector | str | None = None, **changes: Any) -> None:
        """Change amounts between forwards: ``reduction.set(r=16)`` or ``set(select="divprune:tokens=32")``.

        ``select`` replaces the selector of image tokens: it must need the same attention of the tower and place tokens
        in the same way. `VitrimError` for an option that cannot change at run time, an invalid value, or a forward in
        another thread; nothing is changed then.
        """
        self._check_alive()
        selector = self.select if select is None else self._replacing(parse_selector(select))
        config, layers = self._changed(changes)
        with self.changing(), torch.inference_mode(False):  # as in `reduce_`
            for block in self._blocks():
                block.reducer.follow(config, layers[block.depth])
            self.config = config
            if self._choosing is not None and selector is not None:
                self._choosing.selector = selector

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Refuse forwards that other threads start within the context."""
        # A forward that began before the flag is set is found by its frame.
        refuse_while_running(self.model)  # first without refusing forwards, since this may fail
        # A forward between the two checks is found by the second; one that starts later finds the flag.
        self._trace.changing = True
        try:
            refuse_while_running(self.model)
            yield
        finally:
            self._trace.changing = False

    def config_with(self, **changes: Any) -> MethodConfig:
        """The options that `set` would leave, or its error; nothing is changed."""
        return self._changed(changes)[0]

    def _changed(self, changes: Mapping[str, Any]) -> tuple[MethodConfig, tuple[Layer, ...]]:
        """The options that `set` would leave, and their plan."""
        # Options that shape parameters or choose blocks are fixed when the reducers are made.
        fixed = sorted(set(changes) - self.config.runtime)
        if fixed:
            valid = ", ".join(sorted(self.config.runtime)) or "none"
            raise VitrimError(f"{self.config.name} cannot change {', '.join(fixed)} at run time; it can: {valid}")
        config = self.config.changed(**changes)
        layers = plan(config, self._facts, len(host_of(self.model).blocks(self.model)))
        checks.check_blocks(config, layers, [block.reducer for block in self._blocks()])
        checks.check_amounts(config, layers, stacklevel=4)
        return config, layers

    def _replacing(self, selector: Selector) -> Selector:
        """``selector``, if it can replace the current one."""
        old = self.select
        if old is None:
            raise VitrimError("no selector is behind this tower to be replaced: give vitrim.reduce_ one, select=")

        def asks(one: Selector) -> tuple[Any, ...]:
            of_images = type(one) if isinstance(one, ImageSelector) else None
            return one.needs().attention, one.needs().class_token, one.positions, one.keeps_places(), of_images

        if asks(selector) != asks(old):
            raise VitrimError(
                f"{selector.describe()} needs other things of the model than {old.describe()}, or places tokens in "
                "another way: call vitrim.reduce_ again"
            )
        return selector

    def save(self, folder: str | Path, *, state: Mapping[str, Tensor] | None = None, module: str = "") -> None:
        """Write the method's options and its learned parameters, but nothing of the host.

        Args:
            folder: created if it does not exist.
            state: the model's full ``state_dict``, if the model itself holds only shards.
            module: name of the reduced part in the model that is saved beside it; "" for that model itself.
        """
        self._check_alive()
        selected = None if self.select is None else self.select.describe()
        whole = self._within is not None
        write_reduction(self.model, self.config, folder, state, module, self.compact, whole, selected)

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path, *, record: bool = False) -> Reduction:
        """Reduce ``model`` as saved in ``folder``, learned parameters included.

        If a part was saved (``model.vit``), the same part of ``model`` is reduced, or ``model`` if it is that part; the
        handle is the part's. A compact reduction needs the whole vision-language model. An error leaves the model
        unchanged.
        """
        saved = read_reduction(folder)
        compact = bool(saved.get("compact"))
        part = model if compact else saved_part(model, saved, folder)
        holder, config = model if saved.get("whole") else None, saved_config(saved)
        selector = parse_selector(saved["select"]) if saved.get("select") else None
        reduction = _reduce(holder, part, config, record, compact, selector)
        try:
            reduction.load_parameters(folder)
        except VitrimError:
            restore_(part)
            raise
        return reduction

    def load_parameters(self, folder: str | Path) -> None:
        """Load the learned parameters of a saved reduction of the same method; its other options may differ."""
        self._check_alive()
        read_parameters(self.model, self.config, folder)

    def _is_alive(self) -> bool:
        return getattr(self.model, HANDLE, None) is self

    def _check_alive(self) -> None:
        if not self._is_alive():
            raise VitrimError("this reduction was undone: call vitrim.reduce_(model, method) again")
        if self._trace.form is not None:  # all blocks may have been replaced, so that none could see it
            self._trace.form()

    def _blocks(self) -> list[ReducedBlock]:
        inner = [reduced_in(block) for block in host_of(self.model).blocks(self.model)]
        return [block for block in inner if block is not None and block.trace is self._trace]


class Selection(Reduction):
    """The handle of a vision-language model with a selector behind a tower that is not reduced."""

    def __str__(self) -> str:
        return f"{self._described()} on {type(self.model).__name__}" + ("" if self._is_alive() else ": undone since")

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"

    @property
    def tokens_per_block(self) -> list[int]:
        raise VitrimError("the tower is as it was: only image tokens behind it are selected (reduction.image_tokens)")

    def _changed(self, changes: Mapping[str, Any]) -> tuple[MethodConfig, tuple[Layer, ...]]:
        if changes:
            raise VitrimError(f"no method reduces this tower: {', '.join(sorted(changes))} cannot change; select can")
        return self.config, ()

    def load_parameters(self, folder: str | Path) -> None:
        """Do nothing: selectors have no parameters."""

    def _blocks(self) -> list[ReducedBlock]:
        return []
