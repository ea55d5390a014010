"""`reduce_` and `restore_`: the only code that edits a model. Everything is checked before anything is edited."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core import checks
from vitrim.core.block import ReducedBlock, reduced_in
from vitrim.core.cells import build_reducer
from vitrim.core.hooks import FormOfModel, GridHook, ZeroHook, refuse_own_forward
from vitrim.core.host import Host
from vitrim.core.method import MethodConfig
from vitrim.core.modules import access
from vitrim.core.plan import HostFacts, Layer, plan
from vitrim.core.registry import (
    check_model,
    find_host,
    find_vision_language,
    host_of,
    make_method,
    parse_method,
    supported_parts,
    vision_language,
)
from vitrim.core.saving import REDUCERS_FILE as REDUCERS_FILE  # its users import these two from here
from vitrim.core.saving import read_parameters, read_reduction, saved_part, write_reduction
from vitrim.core.saving import saved_method as saved_method
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace, refuse_while_running
from vitrim.errors import VitrimError

HANDLE = "vitrim_reduction"
NOT_RUN = "run the reduced model to its last block in this thread (and read before backward)"


def reduce_(model: nn.Module, method: MethodConfig | str, *, record: bool = False, compact: bool = False) -> Reduction:
    """Reduce the tokens of ``model`` in place and return the handle of the reduction.

    The model keeps its call, its return type, its parameters and its state_dict keys; parameters learned by the method
    live under ``*.reducer.*``. Undo with `restore_`.

    Args:
        model: a supported host, e.g. any ``timm`` VisionTransformer, or a model that holds one: the tower of a
            vision-language model, the backbone of DPT, what a wrapper wraps. That part is reduced then, and the handle
            is its own (``reduction.model``); `restore_` and `get_reduction` take either.
        method: the method's config, or its text form as on the command line: ``"tome:r=13"``, ``"@best.json"``.
        record: keep the state after every block of the last forward (``reduction.states``).
        compact: ``model`` is a vision-language model, whose language model is to get only the tokens that are left: the
            image tokens of a prompt follow, in ``model(...)`` and ``model.generate(...)``. See docs/hosts.md.

    Returns:
        The handle: state, auxiliary outputs, amounts that may change at run time, save and load.

    Raises:
        UnsupportedModelError: the model's family or form is not supported, or cannot carry this method; or it holds
            several supported parts, which the message names.
        VitrimError: the model is reduced already or runs in another thread, or an option does not fit the model. The
            model is then unchanged.

    Warns:
        ReductionWarning: a layer cannot remove as much as asked; an error with ``strict=True`` in the config. Or the
            method is from a file that was made for another model.

    Example:
        >>> import timm, torch, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
        >>> reduction = vitrim.reduce_(model, vitrim.ToMe(r=8))
        >>> model(torch.zeros(1, 3, 224, 224)).shape, reduction.state.num_tokens
        (torch.Size([1, 10]), 101)
        >>> vitrim.restore_(model)
    """
    config = parse_method(method) if isinstance(method, str) else method
    if not isinstance(config, MethodConfig):
        raise VitrimError(f"expected a method such as vitrim.ToMe(r=13) or 'tome:r=13', got {type(method).__name__}")
    return _reduce(model, model, config, record, compact)


def _reduce(holder: nn.Module | None, model: nn.Module, config: MethodConfig, record: bool, compact: bool) -> Reduction:
    """`reduce_` on ``model``; what reads its tokens in the ``holder``, if that is given, gets all of them."""
    outer, family = vision_language(model) if compact else (None, None)
    model = _tower(model if outer is None or family is None else family.tower(outer))
    host = _host(model)
    facts = host.facts(model)
    if outer is not None and family is not None:
        family.check(outer)
        facts = checks.compact_facts(config, facts, family.cell(outer))
    elif holder is not None:
        facts = checks.facts_within(holder, host, model, facts)
    blocks = host.blocks(model)
    trunk = host.trunk_host(model)
    adopters = [trunk.reduced_class(block) for block in blocks]
    head_rows = checks.head_rows(config, facts)
    checks.check_origin(config, host, model)
    checks.check_head(config, facts, within=facts.dense and not host.facts(model).dense)
    restore = checks.restoring(config, facts, len(blocks))
    maker = checks.patch_maker(config, host, model)
    layers = plan(config, facts, len(blocks))
    checks.check_amounts(config, layers)
    with torch.inference_mode(False):  # tensors made within could never be trained, nor saved for a backward
        reducers = [build_reducer(config, layer, block, facts) for layer, block in zip(layers, blocks, strict=True)]
    checks.check_reducers(config, blocks, reducers, head_rows)

    refuse_while_running(model)
    trace = Trace(record, FormOfModel(host, model, adopters))
    trace.changing = True
    whole = config.kind != "soft" and (compact or facts.averages_patches or restore is not None)
    for depth, (block, adopter, reducer) in enumerate(zip(blocks, adopters, reducers, strict=True)):
        last = depth == len(blocks) - 1
        adopter.adopt(
            block,
            reducer,
            depth=depth,
            num_prefix=facts.num_prefix,
            proportional=config.proportional,
            last=last,
            head_rows=head_rows if last else None,
            # a head that averages patches gets every merged token as often as it counts: exact for any pooling; soft
            # tokens belong to no patch, and the head reads them as they are
            unmerge_at_end=last and whole,
            restore=restore,
            trace=trace,
        )
    host.install(model, trace)
    if maker is not None:
        maker.register_forward_hook(GridHook(trunk, trace))
    ZeroHook.install(model, blocks[-1], trace, config, restore)
    if "transformers.modeling_utils" in sys.modules:  # such a model may hold this one: its save_pretrained must know
        importlib.import_module("vitrim.hosts.transformers.saving")
    if outer is not None and family is not None:
        family.install(outer, trace)
    reduction = Reduction(model, config, trace, None if facts == host.facts(model) else facts, compact)
    setattr(model, HANDLE, reduction)
    trace.changing = False
    return reduction


def restore_(model: nn.Module) -> None:
    """Undo `reduce_`, in place: the model computes what it computed before, bit for bit.

    Raises:
        VitrimError: the model is not reduced, or runs in another thread, or a block has a forward that was put on it
            since.
    """
    reduction, outer = get_reduction(model), model
    model = reduction.model  # torch.compile's and peft's wrappers hand out the handle of what they hold
    host = host_of(model)
    for block in reduction._blocks():
        refuse_own_forward(block, block.depth, "call vitrim.restore_ again")
    with reduction.changing():
        for part in outer.modules():
            if (family := find_vision_language(part)) is not None:
                family.uninstall(part)
        ZeroHook.remove(model)
        for block in reduction._blocks():  # one that was put in since then is the user's own
            block.release()
        host.uninstall(model)
        GridHook.remove(host.patch_maker(model))
        delattr(model, HANDLE)


def get_reduction(model: nn.Module) -> Reduction:
    """The handle of a reduced model, or of the one reduced part in it; also of a copy (EMA, deepcopy, unpickled).

    Raises:
        VitrimError: the model is not reduced.
    """
    reduction = getattr(model, HANDLE, None)
    if isinstance(reduction, Reduction):
        return reduction
    parts = reduced_parts(model)
    if len(parts) == 1:
        return get_reduction(parts[0][1])
    inside = " and ".join(access(name) for name, _ in parts)
    hint = f"{inside} in it are: give one of them" if parts else "call vitrim.reduce_(model, method) first"
    raise VitrimError(f"this {type(model).__name__} is not reduced: {hint}")


def reduced_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules in ``model``, itself among them as "", that were given to `reduce_`, by name."""
    if not isinstance(model, nn.Module):
        return []
    return [(name, part) for name, part in model.named_modules() if isinstance(vars(part).get(HANDLE), Reduction)]


class Reduction:
    """The handle of one reduced model. Made by `reduce_`.

    Attributes:
        model: the reduced model.
        config: the method's options as they are now.
    """

    def __init__(
        self, model: nn.Module, config: MethodConfig, trace: Trace, within: HostFacts | None, compact: bool
    ) -> None:
        self.model = model
        self.config = config
        self._trace = trace
        self._within = within  # its facts by what reads its tokens, where they are not those of the model alone
        self._compact = compact

    def __repr__(self) -> str:
        return f"Reduction({self.config.describe()} on {type(self.model).__name__})"

    @property
    def compact(self) -> bool:
        """True where the model is the tower of a vision-language model that gets only the tokens that are left."""
        return self._compact

    @property
    def image_tokens(self) -> list[int]:
        """Tokens that the language model got of each image, in this thread's last prompt with images."""
        if self._trace.handed is None:
            raise VitrimError(
                "no image tokens yet: reduce_(model, method, compact=True), then run the whole model in this thread"
            )
        return self._trace.handed

    @property
    def state(self) -> TokenState:
        """The `TokenState` after the last block of the last forward of this thread."""
        if self._trace.final is None:
            raise VitrimError(f"no state yet: {NOT_RUN}")
        return self._trace.final

    @property
    def states(self) -> tuple[TokenState, ...]:
        """The states of this thread's last forward: on entry, then after every block. Needs ``record``."""
        if not self._trace.recording:
            raise VitrimError("states are kept only when recording: vitrim.reduce_(..., record=True)")
        if not self._trace.states:
            raise VitrimError(f"no states yet: {NOT_RUN}")
        return self._trace.states

    @property
    def tokens_per_block(self) -> list[int]:
        """Tokens (prefix included) after every block of the last forward. Needs ``record``.

        A last block that computes only the rows its head reads is counted with those rows. Where counts differ per
        image, padding slots count: they are computed.
        """
        counts = [state.num_tokens for state in self.states[1:]]
        rows = self._blocks()[-1].head_rows
        return counts if rows is None or self.states[-1].full_grid else [*counts[:-1], rows]

    @property
    def mean_tokens_per_block(self) -> list[float]:
        """As `tokens_per_block`, but padding slots do not count: means over the images of the last forward."""
        pairs = zip(self.tokens_per_block, self.states[1:], strict=True)
        return [state.mean_tokens() if count == state.num_tokens else count for count, state in pairs]

    def aux(self, name: str) -> list[Tensor]:
        """Auxiliary outputs called ``name`` of the last forward, in block order. Read them before backward."""
        found = [value for key, _, value in self.state.aux if key == name]
        if not found:
            have = sorted({key for key, _, _ in self.state.aux}) or ["none"]
            raise VitrimError(f"no auxiliary output '{name}'; this forward has: {', '.join(have)}")
        return found

    def set(self, **changes: Any) -> None:
        """Change amounts between forwards, e.g. ``reduction.set(r=16)``.

        Raises:
            VitrimError: an option that cannot change at run time, an invalid value, or a forward of the model that runs
                in another thread. Nothing is changed then.
        """
        self._check_alive()
        config, layers = self._changed(changes)
        with self.changing(), torch.inference_mode(False):  # as in `reduce_`
            for block in self._blocks():
                block.reducer.follow(config, layers[block.depth])
            self.config = config

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Refuse forwards that another thread starts while the reduction is being changed.

        Raises:
            VitrimError: a forward of the model runs in another thread.
        """
        refuse_while_running(self.model)  # before forwards that start now are refused, too: this may be in vain
        self._trace.changing = True
        try:
            refuse_while_running(self.model)
            yield
        finally:
            self._trace.changing = False

    def config_with(self, **changes: Any) -> MethodConfig:
        """Return the options as `set` would leave them; nothing is changed.

        Raises:
            VitrimError: an option that cannot change at run time, or a value that is invalid or does not fit the model.
        """
        return self._changed(changes)[0]

    def _changed(self, changes: Mapping[str, Any]) -> tuple[MethodConfig, tuple[Layer, ...]]:
        """The options as `set` would leave them, and their plan."""
        fixed = sorted(set(changes) - self.config.runtime)
        if fixed:
            valid = ", ".join(sorted(self.config.runtime)) or "none"
            raise VitrimError(f"{self.config.name} cannot change {', '.join(fixed)} at run time; it can: {valid}")
        config = self.config.changed(**changes)
        host = host_of(self.model)
        layers = plan(config, self._within or host.facts(self.model), len(host.blocks(self.model)))
        checks.check_blocks(config, layers, [block.reducer for block in self._blocks()])
        checks.check_amounts(config, layers, stacklevel=4)
        return config, layers

    def save(self, folder: str | Path, *, state: Mapping[str, Tensor] | None = None, module: str = "") -> None:
        """Write the method's options, and its learned parameters if it has some, and nothing of the host.

        Args:
            folder: made if it does not exist.
            state: the model's whole ``state_dict``, where the model itself has only shards of it.
            module: what the reduced model is called in the model that is saved beside it; "" where it is that model.

        Raises:
            VitrimError: the folder cannot be made or written to.
        """
        self._check_alive()
        write_reduction(self.model, self.config, folder, state, module, self.compact, self._within is not None)

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path, *, record: bool = False) -> Reduction:
        """Reduce ``model`` as the saved reduction in ``folder`` says, learned parameters included.

        Of a saved part of a model (``model.vit``) the same part of ``model`` is reduced, or ``model`` where it is that
        part; the handle is that of the part. A compact reduction takes the whole vision-language model.

        Raises:
            VitrimError: missing or unreadable files, or parameters that do not fit. The model is then unchanged.
        """
        saved = read_reduction(folder)
        compact = bool(saved.get("compact"))
        part = model if compact else saved_part(model, saved, folder)
        holder, config = model if saved.get("whole") else None, make_method(saved["method"], **saved["options"])
        reduction = _reduce(holder, part, config, record, compact)
        try:
            reduction.load_parameters(folder)
        except VitrimError:
            restore_(part)
            raise
        return reduction

    def load_parameters(self, folder: str | Path) -> None:
        """Take over the learned parameters of a saved reduction of the same method, whatever its other options.

        Raises:
            VitrimError: missing or unreadable files, another method or version of it, or parameters that do not fit.
                The model is then unchanged.
        """
        self._check_alive()
        read_parameters(self.model, self.config, folder)

    def _check_alive(self) -> None:
        if getattr(self.model, HANDLE, None) is not self:
            raise VitrimError("this reduction was undone: call vitrim.reduce_(model, method) again")

    def _blocks(self) -> list[ReducedBlock]:
        inner = [reduced_in(block) for block in host_of(self.model).blocks(self.model)]
        return [block for block in inner if block is not None and block.trace is self._trace]


def _tower(model: nn.Module) -> nn.Module:
    """Return ``model`` where it is a host, else the one part of it that is."""
    if not isinstance(model, nn.Module):
        raise VitrimError(f"expected a torch.nn.Module to reduce, got {type(model).__name__}")
    if find_host(model) is not None:
        return model
    _refuse_reduced(model)
    parts = supported_parts(model)
    if len(parts) != 1:
        host_of(model)  # says why not
    return parts[0][1]


def _refuse_reduced(model: nn.Module) -> None:
    parts = reduced_parts(model)
    if parts:
        raise VitrimError(f"this model is reduced already: call vitrim.restore_({access(parts[0][0])}) first")


def _host(model: nn.Module) -> type[Host]:
    host = host_of(model)
    if any(reduced_in(block) is not None for block in host.blocks(model)):
        _refuse_reduced(model)
        raise VitrimError("this model is reduced already: call vitrim.restore_(model) first")
    checks.check_shared(host, model)
    check_model(host, model)
    return host
