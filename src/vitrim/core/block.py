"""The data flow. `ReducedBlock.step` is the only place where the sequence of a reduced block is written.

A method is a `Reducer`: it decides. A host is a subclass of `ReducedBlock` that names its submodules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeGuard, TypeVar, cast, get_args

import torch
import torch.nn.modules.module as hooks_of_all
from torch import Tensor, nn
from torch.fx import Proxy

from vitrim.core.assignment import Hard, Soft
from vitrim.core.attention import Attention, merge_heads, unfused_is_faster
from vitrim.core.method import MethodConfig, Restore
from vitrim.core.plan import Layer
from vitrim.core.schedule import Pattern
from vitrim.core.tokens import STAMP, Call, Note, TokenState, Trace, product_dtype, take, unmerge, whole
from vitrim.errors import UnsupportedModelError, VitrimError

Site = Literal["before", "query", "between", "after"]
StepOutput = tuple[Tensor, TokenState]
C = TypeVar("C", bound=MethodConfig)
M = TypeVar("M", bound=nn.Module)


class Reducer(nn.Module, Generic[C]):
    """Decides which tokens of one block stay. Subclasses implement `assign`; few need `reduce`, `query` or `attend`.

    Its options are in ``config``, its amount in ``layer``; `Reduction.set` replaces both.

    Class attributes:
        site: ``before`` the block, on its input; at the ``query``, when q and k exist but attention has not run (a
            selection then computes only the query rows it keeps; a merge pools the output rows); ``between`` attention
            and MLP; ``after`` the block.
        fresh_values: its `attend_reduced` projects the values itself, from the reduced tokens.
        attends_anew: its `attend_reduced` projects and attends again among the reduced tokens, after a map has decided.
        everywhere: it also acts in blocks without an amount, which otherwise get an `Idle` reducer.
    """

    site: ClassVar[Site] = "between"
    fresh_values: ClassVar[bool] = False
    attends_anew: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    config: C
    layer: Layer
    planned: bool
    """The number of tokens kept follows from the amount, not from the images."""

    @property
    def needs_full_last_block(self) -> bool:
        """True if `reduce` acts after attention in the last block, which must then compute all tokens."""
        return self.site == "after"

    @property
    def spares_block(self) -> bool:
        """True if the reducer changes at most the block's input: the host's own forward may then run."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.site not in get_args(Site):  # a misspelt site would silently reduce nothing
            raise TypeError(f"{cls.__name__}.site is {cls.site!r}; valid sites: {', '.join(get_args(Site))}")
        if callable(cls.spares_block):  # a bound method is always true
            raise TypeError(f"{cls.__name__}.spares_block is a property or an attribute, not a method")

    def __init__(self, config: C, layer: Layer) -> None:
        super().__init__()
        self.follow(config, layer)

    def follow(self, config: C, layer: Layer) -> None:
        """Adopt a plan, at construction and in ``reduction.set``."""
        self.config = config
        self.layer = layer
        self.planned = layer.amount is not None and not config.is_adaptive()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` (``to``, ``to_empty``, ...), and initialise the tensors that leave the meta device."""
        # `to_empty` leaves memory uninitialised, and a host's checkpoint contains neither the tables nor the parameters
        # of a method: take them from a new reducer of the same plan.
        was_meta = any(tensor.is_meta for tensor in self.state_tensors().values())
        super()._apply(fn, recurse)
        if not was_meta or any(tensor.is_meta for tensor in self.state_tensors().values()):
            return self
        with torch.inference_mode(False), torch.no_grad():
            first = type(self)(self.config, self.layer).state_tensors()
            for name, tensor in self.state_tensors().items():
                values = first[name]
                if type(tensor.data).__module__.startswith("torch.distributed"):  # FSDP2: a part in each process
                    from torch.distributed.tensor import DTensor, distribute_tensor

                    assert isinstance(tensor.data, DTensor)
                    whole = values.to(device=tensor.device, dtype=tensor.dtype)
                    values = distribute_tensor(whole, tensor.data.device_mesh, tensor.data.placements)
                tensor.copy_(values)
        return self

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, including those that are not in the ``state_dict``."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def num_keep(self, state: TokenState) -> int:
        """Patch tokens this layer keeps, a Python int."""
        grid = None
        if isinstance(self.layer.amount, Pattern):
            rows, columns = state.known_grid(self.config.name)
            grid = (whole(rows), whole(columns))
        return self.layer.keep(self.config, state.initial_patches, state.num_patches, grid)

    def num_removed(self, state: TokenState) -> int:
        """Patch tokens this layer removes, a Python int."""
        return state.num_patches - self.num_keep(state)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | Soft | None:
        """Assign the tokens ``x`` (B, N, C) to new ones by `prune`, `merge` or a `Soft`; None leaves them.

        Not called where the amount removes nothing. ``attention`` is None at the site ``before``.
        """
        raise NotImplementedError

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        """The scores (B, P) by which `assign` ranks patches, the highest stay: for analysis. None if it ranks none."""
        return None

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | Soft | None:
        # a module call, so that the MAC counter can attribute its cost to deciding
        if self.planned and self.num_removed(state) == 0:
            return None
        return self.assign(x, cast(Attention, attention), state)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        """Reduce ``x`` (B, N, C) if ``site`` is its own. Called at ``before``, ``between`` and ``after``."""
        if site != self.site:
            return x, state
        assignment = self(x, attention, state)
        return (x, state) if assignment is None else self.carry_out(assignment, x, state)

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> StepOutput:
        """Move the tokens ``x`` (B, N, C) as `assign` decided. Override it to change the tokens that come out."""
        return assignment.apply(x, state)

    def query(self, attention: Attention, inputs: BlockInput) -> tuple[Tensor, Tensor, TokenState]:
        """Decide and attend among all tokens, at the site ``query``: tokens (B, M, C), attention (B, M, H*d), state."""
        block, x, state, rows, _ = inputs
        assignment = self(x, attention, state)
        # The last block attends for the head's rows alone, but `assign` has seen all.
        if rows is not None:
            attention = attention.rows(rows)
        if assignment is None:
            if attention.v is None:
                attention = replace(attention, v=block.values(x))
            return x, merge_heads(self.attend(attention, state)), state
        if isinstance(assignment, Soft):
            raise TypeError("a soft assignment cannot act at the query site; use 'before'")
        return self.attend_reduced(assignment, attention, inputs)

    def attend_reduced(
        self, assignment: Hard, attention: Attention, inputs: BlockInput
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Move the tokens and attend, after `query` decided. ``attention`` has the queries of ``inputs.rows`` alone."""
        _, x, state, rows, _ = inputs
        reduced, after = assignment.apply(x, state)
        if assignment.is_selection and rows is None:
            return reduced, merge_heads(self.attend(attention.select(assignment.anchor), after)), after
        out = merge_heads(self.attend(attention, state))
        # pooling is linear: x + attention pools to pooled x + pooled attention
        return reduced, out if rows is not None else assignment.pool(out, state.size), after

    def prepare(self, attention: Attention, state: TokenState) -> Attention:
        """The attention that `attend` and `assign` receive; a method that is defined by the map may store it here."""
        return attention

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, H, M, d) attention output of this block."""
        return attention.output()

    def remember(self, attention: Attention, state: TokenState) -> Any:
        """The part of ``attention`` that `reduce` receives at the site ``after``; less of it frees memory."""
        return attention


class Idle(Reducer[C]):
    """Reduces nothing, in blocks where the method does not act. Attention stays proportional to size."""

    @property
    def spares_block(self) -> bool:
        return True

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        return x, state


class BlockInput(NamedTuple):
    """The tokens among which a block attends.

    Attributes:
        rows: only the first ``rows`` tokens attend; None for all.
        given: what the host passes to the block besides tokens, see `ReducedBlock.project`.
    """

    block: ReducedBlock
    x: Tensor
    state: TokenState
    rows: int | None
    given: Any


class ReducedBlock(nn.Module):
    """Mixin that replaces the forward of a host's transformer block. A host file writes four methods, marked below.

    `adopt` gives an existing block a static subclass of its own class, and `release` gives the class back.
    """

    host_class: ClassVar[type[nn.Module]]
    """The host's own block class; by default the last base."""
    parallel: ClassVar[bool] = False
    """Attention and MLP read the same tokens: x + attention(x) + mlp(x). The site ``between`` then acts at the end
    of the block, with this block's attention."""
    call_class: ClassVar[type[Call]] = Call
    """The record of a forward; a subclass for a family whose blocks share more, such as tables or attention maps."""
    plain: ClassVar[bool] = False
    """The host's own forward takes tokens only and equals `step` where the logits get no bias."""

    reducer: Reducer[Any]
    depth: int
    num_prefix: int
    proportional: bool
    last: bool
    head_rows: int | None
    unmerge_at_end: bool
    restore: Restore | None
    trace: Trace

    @property
    def crosses(self) -> bool:
        """True if this block attends across the windows of an image, which are reduced separately."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = cls.__bases__[-1]
        if "host_class" not in vars(cls) and not issubclass(own, ReducedBlock):
            cls.host_class = own

    # ---- what the host file writes ---------------------------------------------------------------------------------

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        """The attention of tokens ``x`` (B, N, C), pre-norm included; with ``rows``, only that many queries.

        ``given`` is what the host passes to its blocks besides tokens, made for all N0 input tokens: read tables of
        positions through ``state.patch_rows`` and ``state.pair_bias``.
        """
        raise NotImplementedError

    def values(self, x: Tensor) -> Tensor:
        """(B, H, N, d) values of tokens ``x`` (B, N, C), norm included."""
        raise NotImplementedError

    def attention_branch(self, out: Tensor) -> Tensor:
        """Residual update (B, M, C) from attention output (B, M, H*d): projection, norm or layer scale, drop path."""
        raise NotImplementedError

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Residual update (B, M, C) from tokens (B, M, C): norm, MLP, layer scale, drop path."""
        raise NotImplementedError

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        """The modules that the dense ``block`` calls and the reduced one does not, because it calls their parts.

        Hooks or a forward put on one of them would be skipped, so `reduce_` and every reduced forward refuse them.
        """
        return []

    # ---- the data flow ---------------------------------------------------------------------------------------------

    def step(self, x: Tensor, state: TokenState, given: Any = None) -> StepOutput:
        """One block as a pure function of tokens (B, N, C) and their state."""
        reducer = self.reducer
        x, state = reducer.reduce("before", x, None, state)
        # A head that reads only the first rows makes the others of the last block useless: they are not computed, and
        # nothing is decided at "between" or "after". Exact, and no reduction: size, source and position stay.
        rows = None if state.asked.full_grids else self.head_rows
        watched = self.depth in state.asked.watched

        # the host's own forward, where nothing else happens: fewer calls between products
        if self.plain and rows is None and not watched and reducer.spares_block:
            # it must compute the same (sizes and a mask would add a bias), and as fast
            unbiased = state.mask is None and (state.uniform or not self.proportional)
            batch, n, heads = x.shape[0], x.shape[1], reducer.layer.num_heads
            if unbiased and not unfused_is_faster(x.device, product_dtype(x), batch, heads, n, n):
                held = [x]
                del x  # else the block's input would stay in memory
                return self.host_class.forward(self, held.pop()), state

        # attention; a decision at the query needs the queries of all tokens
        at_query = reducer.site == "query"
        attention = reducer.prepare(self.project(x, state, None if at_query else rows, given), state)
        if watched:
            self.trace.call.attentions.append(Note(self.depth, replace(attention, v=None).detach(), state))
        if at_query:
            x, out, state = reducer.query(attention, BlockInput(self, x, state, rows, given))
        else:
            out = merge_heads(reducer.attend(attention, state))
        x = self.add_attention(x if rows is None else x[:, :rows], out)
        del out
        seen = None
        if rows is None:
            x, state = reducer.reduce("between", x, attention, state)
            seen = reducer.remember(attention, state) if reducer.site == "after" else None
        del attention  # else q, k and v would live through the MLP, where memory peaks

        if not self.parallel:
            x = x + self.mlp_branch(x)
        return (x, state) if rows is not None else reducer.reduce("after", x, seen, state)

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """Add attention output (B, M, H*d), and in a parallel block the MLP's, to tokens (B, M, C)."""
        update = self.attention_branch(out)
        return x + update + self.mlp_branch(x) if self.parallel else x + update

    def run(self, x: Tensor, given: Any = None) -> Tensor:
        """Replace the host's ``forward``: find the state, step, pass tokens and state on."""
        if isinstance(x, Proxy):
            raise UnsupportedModelError(
                "torch.fx cannot trace through a reduced block: trace with blocks as leaves, e.g. "
                "create_feature_extractor(..., tracer_kwargs={'leaf_modules': [vitrim.core.block.ReducedBlock]})"
            )
        # Only vmap's failure needs other words, and looking for it costs as much as an operator.
        if torch.compiler.is_compiling() or not torch._C._functorch.is_batchedtensor(x):
            return self._run(x, given)
        try:
            return self._run(x, given)
        except RuntimeError as error:
            name = self.reducer.config.name
            raise VitrimError(
                f"{name} does not run under torch.vmap, which shows it no values of tensors: give the model the whole "
                "batch, or map it under none, tome or topk"
            ) from error

    def _run(self, x: Tensor, given: Any) -> Tensor:
        x, state = self.receive(x, self.incoming(x), given)
        # Patches return in front of the last block, which then attends among all of them.
        if self.last and self.restore == "last_block":
            x, state = state.bring_back(x)
        return self.outgoing(*self.step(x, state, given))

    def receive(self, x: Tensor, state: TokenState, given: Any) -> StepOutput:
        """The tokens (B, N, C) that the block works on, from its input and the state that `incoming` found."""
        # A full grid cannot give these tokens back (mixed, or restored in the middle), so they wait in the state.
        if state.held is not None:
            return state.held, replace(state, held=None)
        if state.asked.full_grids and state.reduced:
            x = take(x, state.position)  # the anchor holds its group's value
        return x, state

    def incoming(self, x: Tensor) -> TokenState:
        """The state of the incoming tokens: stamped on the tensor, else left by the previous block."""
        # The stamp survives host checkpointing and two forwards before one backward; the state left in the trace
        # survives hooks and wrappers that pass on a new tensor (FSDP2). A recomputation finds the stamp that the latter
        # sets.
        stamp = getattr(x, STAMP, None)
        if self.depth > 0:
            state = stamp if isinstance(stamp, TokenState) else self._left_before(x)
            expected = state.num_inputs if state.asked.full_grids else state.num_tokens
            if x.shape[1] != expected:
                raise RuntimeError(
                    f"block {self.depth} got {x.shape[1]} tokens where {expected} left the block before it: something "
                    "between the blocks changed the number of tokens"
                )
            return state
        if self.trace.changing:  # `refuse_while_running` finds forwards that run already
            raise RuntimeError(
                "the reduction of this model is being changed in another thread: call set, restore_ and reduce_ while "
                "no forward runs"
            )
        # a recomputed first block reads both from its input, since the embedding does not run again
        asked, call = self.trace.asked, self.trace.call
        if isinstance(stamp, TokenState) and stamp.asked.full_grids:
            asked = stamp.asked
        grid, pixels = call.grid, call.pixels
        if grid is not None:  # used once: it must not apply to later tokens that no patch embedding made
            call.grid = call.pixels = None
        elif isinstance(stamp, TokenState):
            grid, pixels = stamp.grid, stamp.pixels
        banking = self.restore in ("end", "last_block")
        state = TokenState.start(x, self.num_prefix, grid, banking, asked, pixels)
        self.trace.start(state, self.reducer.config)
        if asked.full_grids or grid is not None:
            setattr(x, STAMP, state)
        return state

    def _left_before(self, x: Tensor) -> TokenState:
        """The state that the previous block left in this thread; it is stamped on its tokens ``x``."""
        depth, latest = self.trace.call.latest or (-1, None)
        # a backward pass recomputes blocks out of order
        recomputes = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if latest is None or depth != self.depth - 1 or recomputes:
            if self.trace.form is not None:  # block 0 may have been replaced
                self.trace.form()
            raise RuntimeError(
                f"block {self.depth} got tokens of unknown history: the blocks of a reduced model must run in "
                "order, and reentrant checkpointing is not supported (use use_reentrant=False)"
            )
        setattr(x, STAMP, latest)
        return latest

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        """Record the state, un-merge where the output must be complete, and stamp the state on the tokens."""
        if not (self.last or state.asked.full_grids):  # the usual case: every check costs as much as an operator
            self.trace.leave(self.depth, state, False)
            setattr(x, STAMP, state)
            return x
        if state.banking and self.last:
            x, state = state.bring_back(x)
        restored = state.banking and len(state.bank) > 0
        asked = state.asked
        if asked.full_grids and (state.mixed or (restored and not self.last)):
            state = replace(state, held=x)
        self.trace.leave(self.depth, state, self.last)
        fewer = asked.compact or (state.pruned and self.restore is None)  # a head then pools over the survivors
        full = asked.full_grids and not (self.last and asked.spares_last)
        if state.reduced and (full or (self.unmerge_at_end and not fewer)):
            # One row per input token, in their order: every token's value at the places of its group.
            x = unmerge(*(state.bring_back(x) if restored else (x, state)))
        if not self.last:
            setattr(x, STAMP, state)
        return x

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward" and not any(isinstance(hook, ForwardWatch) for hook in self._forward_hooks.values()):
            self.register_forward_pre_hook(ForwardWatch())
            self.register_forward_hook(ForwardWatch())

    # ---- in and out of a model -------------------------------------------------------------------------------------

    OWN: ClassVar[tuple[str, ...]] = (
        *("depth", "num_prefix", "proportional", "last", "head_rows", "unmerge_at_end", "restore", "trace"),
    )
    """Attributes that a block has only while it is reduced. A family adds its own, which its `Host.install` sets."""

    @classmethod
    def adopt(cls, block: nn.Module, reducer: Reducer[Any], **settings: Any) -> None:
        """Turn the host's ``block`` into a reduced one, in place. ``settings`` are the attributes named in ``OWN``."""
        change_class(block, cls)
        block.add_module("reducer", reducer)
        for name, value in settings.items():
            setattr(block, name, value)

    def release(self) -> None:
        """Turn this block back into the host's own, in place."""
        del self._modules["reducer"]
        for name in self.OWN:
            delattr(self, name)
        change_class(self, self.host_class)


class Installed:
    """Base class of hooks and method replacements that a reduction puts on modules.

    Objects, not functions: the model can be copied and pickled, and `vitrim.core.host.take_off` finds them in a copy.
    """


class ForwardWatch(Installed):
    """Runs before and after a reduced block whose forward was replaced since, and sees whether the reduced one ran."""

    def __call__(self, block: ReducedBlock, args: tuple[Any, ...], *output: Any) -> None:
        call = block.trace.call
        # A wrapper that calls the forward it replaced (accelerate, autocast, checkpointing) leaves a state.
        if not output:
            if block.depth == 0:
                call.latest = None  # of the forward before
        elif call.latest is None or call.latest[0] != block.depth:
            raise UnsupportedModelError(
                f"block {block.depth} has a forward of its own, put on the instance after vitrim.reduce_, which does "
                "not call the one that it replaced, so nothing is reduced there: take it off (del block.forward), or "
                "call vitrim.restore_ before you put it on"
            )


def reduced_in(block: nn.Module) -> ReducedBlock | None:
    """``block`` if it is reduced, else the reduced block it wraps (checkpointing, compiling); None without one."""
    if isinstance(block, ReducedBlock):
        return block
    return next((part for part in block.modules() if isinstance(part, ReducedBlock)), None)


# ---- what a module is besides its class -----------------------------------------------------------------------------


def is_bare(module: nn.Module, kind: type[M] = nn.Linear) -> TypeGuard[M]:  # type: ignore[assignment]
    """True if reading the weights of ``module`` equals calling it: it is a ``kind`` and nothing more.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> is_bare(layer), is_bare(nn.Identity())
        (True, False)
        >>> handle = layer.register_forward_hook(lambda module, args, output: 2 * output)
        >>> is_bare(layer)
        False
    """
    # More than its weights: a subclass (adapter, quantised layer, parametrisation), a forward or hooks on the instance
    # (LoRA, offloading), a forward put on its class, hooks on all modules, or weights of another class (quantised,
    # sharded).
    if type(module) is not kind or is_altered(module):
        return False
    if kind.forward.__module__.partition(".")[0] != kind.__module__.partition(".")[0]:
        return False
    # hooks on all modules, except those of PyTorch's module tracker
    of_all = (
        hooks_of_all._global_forward_hooks,
        hooks_of_all._global_forward_pre_hooks,
        hooks_of_all._global_backward_hooks,
        hooks_of_all._global_backward_pre_hooks,
    )
    owners = [getattr(hook, "__module__", "") for hooks in of_all for hook in hooks.values()]
    if any(owner != "torch.utils.module_tracker" for owner in owners):
        return False
    # PyTorch's own tensors, or those its tracers substitute
    kinds = [type(parameter).__module__ for parameter in module._parameters.values() if parameter is not None]
    return all(name == "torch" or name.startswith(("torch.nn.", "torch._subclasses.")) for name in kinds)


def is_altered(module: nn.Module, *, by_others: bool = False) -> bool:
    """True if a forward or hooks were put on ``module``; ``by_others``: those of its own library only record."""
    if "forward" in module.__dict__:
        return True
    found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not (found[0] or found[1] or found[2] or found[3]):  # runs for every block in every forward
        return False
    own = type(module).__module__.partition(".")[0] + "."
    return any(
        not (by_others and getattr(hook, "__module__", "").startswith(own))
        for hooks in found
        for hook in hooks.values()
    )


DECORATORS = (sys.stdlib_module_names | {"torch"}) - {"__main__"}
"""Packages whose code around a function leaves it what it is."""


def replaced(kind: type, call: str = "forward") -> str | None:
    """The name of the function that someone put in place of a method of the class ``kind``; None if it is its own.

    Example:
        >>> class Head(nn.Linear):
        ...     def forward(self, input):
        ...         return super().forward(input)
        >>> replaced(Head) is None, replaced(nn.Linear) is None
        (True, True)
    """
    # Its own is code of the class's package, under decorators of that package, of torch or of Python.
    owner = next(base for base in kind.__mro__ if call in vars(base))
    return foreign(vars(owner)[call], owner.__module__.partition(".")[0])


def foreign(function: Any, library: str) -> str | None:
    """The name of ``function``, or of what it wraps or is wrapped in, if code of it is not the ``library``'s."""
    while function is not None:
        function = getattr(function, "__func__", getattr(function, "func", function))  # a method, a partial
        module = str(getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", ""))
        package = module.partition(".")[0]
        if package != library and package not in DECORATORS:
            return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
        function = getattr(function, "__wrapped__", None)
    return None


def draw_linear_(module: nn.Module) -> None:
    """Initialise all linear layers in ``module`` as ViTs do: truncated normal of deviation 0.02, biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def running(training: bool, *modules: nn.Module) -> Iterator[None]:
    """Put ``modules``, not their children, into training mode or out of it, and restore each mode afterwards."""
    # Those in that mode already are not touched, so threads may share a model in evaluation.
    changed = [module for module in modules if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


def sharded(block: nn.Module) -> bool:
    """True if FSDP2 (``fully_shard``) has put its own class above the class of ``block``."""
    return any(base.__module__.startswith("torch.distributed") for base in type(block).__bases__)


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class of ``block`` as its library wrote it: Block, where FSDP2 made it FSDPBlock(FSDPModule, Block)."""
    return type(block).__bases__[-1] if sharded(block) else type(block)


def change_class(block: nn.Module, kind: Any) -> None:
    """Give ``block`` the class ``kind``, below FSDP2's own class if there is one."""
    own: Any = type(block)
    block.__class__ = _shard_of(own, kind) if sharded(block) else kind


@cache  # one class for all blocks: compiled code is guarded by it
def _shard_of(wrapped: Any, kind: Any) -> type[nn.Module]:
    """The class FSDP2 would have made from ``kind``, as it made ``wrapped``."""
    return type(f"FSDP{kind.__name__}", (*wrapped.__bases__[:-1], kind), {"__deepcopy__": wrapped.__deepcopy__})


def access(name: str, root: str = "model") -> str:
    """The Python expression for the submodule that ``named_modules`` calls ``name``.

    Example:
        >>> access("towers.0.vision")
        'model.towers[0].vision'
    """
    if not name:
        return root
    return root + "".join(
        f".{part}" if part.isidentifier() else f"[{part}]" if part.isdigit() else f"[{part!r}]"
        for part in name.split(".")
    )


class Exchange(nn.Module):
    """Marks modules that exchange information between two streams of tokens: ViTTM's heads, LookupViT's attention.

    The MAC counter lists products inside their ``forward`` separately: published figures count them even where they
    leave out self-attention.

    Example:
        >>> class Mean(Exchange):
        ...     def forward(self, source, target):
        ...         return target + source.mean(1, keepdim=True)
    """
