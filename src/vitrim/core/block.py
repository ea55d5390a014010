"""The data flow. `ReducedBlock.step` is the only place where the sequence of a reduced block is written.

A method is a `Reducer`: it decides. A host is a subclass of `ReducedBlock` that says where its submodules are. Behind
them stands what a module is besides its class: hooked or adapted (`is_bare`), in parts under FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeGuard, TypeVar, cast, get_args

import torch
import torch.nn.modules.module as hooks_of_all
from torch import Tensor, nn
from torch.fx import Proxy

from vitrim.core.assignment import Hard, Soft
from vitrim.core.attention import Attention, merge_heads, unfused_is_faster
from vitrim.core.method import MethodConfig, Restore
from vitrim.core.plan import Layer
from vitrim.core.schedule import Pattern
from vitrim.core.tokens import STAMP, TokenState, Trace, product_dtype, take, unmerge, whole
from vitrim.errors import UnsupportedModelError, VitrimError

Site = Literal["before", "query", "between", "after"]
Step = tuple[Tensor, TokenState]
C = TypeVar("C", bound=MethodConfig)
M = TypeVar("M", bound=nn.Module)


class Reducer(nn.Module, Generic[C]):
    """Decides, in one block, which tokens stay. Subclasses implement `assign`; few need `reduce`, `query` or `attend`.

    A reducer reads its options from ``config`` and its amount from ``layer``; `reduction.set` gives it new ones.

    Class attributes:
        site: where it acts. ``before`` the block, on its input; at the ``query``, when q and k exist but attention has
            not run (a selection then computes only the query rows it keeps; a merge pools the output rows);
            ``between`` attention and MLP; ``after`` the block.
        fresh_values: its `attend_reduced` projects the values itself, from the reduced tokens: the block need not.
        attends_anew: its `attend_reduced` projects and attends among the reduced tokens, besides what decides.
        everywhere: it has something to do in blocks without an amount, too; otherwise these get an `Idle` one.
    """

    site: ClassVar[Site] = "between"
    fresh_values: ClassVar[bool] = False
    attends_anew: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    config: C
    layer: Layer
    planned: bool
    """The number of tokens that stay follows from the amount, and not from the images."""

    @property
    def needs_full_last_block(self) -> bool:
        """True if, in the last block, `reduce` has work to do after attention: all tokens must then be computed."""
        return self.site == "after"

    @property
    def spares_block(self) -> bool:
        """True if only what enters the block changes, if anything: the host's own forward may then run."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.site not in get_args(Site):  # a misspelt site would reduce nothing, silently
            raise TypeError(f"{cls.__name__}.site is {cls.site!r}; valid sites: {', '.join(get_args(Site))}")
        if callable(cls.spares_block):  # a method is true, whatever it would give
            raise TypeError(f"{cls.__name__}.spares_block is a property or an attribute, not a method")

    def __init__(self, config: C, layer: Layer) -> None:
        super().__init__()
        self.follow(config, layer)

    def follow(self, config: C, layer: Layer) -> None:
        """Take over a plan: at construction, and when ``reduction.set`` makes a new one."""
        self.config = config
        self.layer = layer
        self.planned = layer.amount is not None and not config.is_adaptive()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` as every module does (``to``, ``to_empty``, ...); what leaves meta gets its first values.

        ``to_empty`` leaves memory as it finds it, and neither tables nor parameters of a method are in the weights of
        the host that are loaded afterwards.
        """
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
        """Number of patch tokens this layer keeps, a Python int."""
        grid = None
        if isinstance(self.layer.amount, Pattern):
            rows, columns = state.known_grid(self.config.name)
            grid = (whole(rows), whole(columns))
        return self.layer.keep(self.config, state.initial_patches, state.num_patches, grid)

    def num_removed(self, state: TokenState) -> int:
        """Number of patch tokens this layer removes, a Python int."""
        return state.num_patches - self.num_keep(state)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | Soft | None:
        """Decide what becomes of the tokens ``x`` (B, N, C); None leaves them.

        Not called where the amount removes nothing. At ``before`` there is no ``attention`` yet: it is None there.
        """
        raise NotImplementedError

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        """The scores (B, P) that `assign` ranks patches by, the highest stay; for looking at. None: it ranks none."""
        return None

    def fused_maps(self, given: Hard, block: ReducedBlock, *args: Any, **host: Any) -> tuple[Tensor, Tensor] | None:
        """Maps (B, H, M, M) given to fused tokens and computed among them; as `attend_reduced`. None: it computes."""
        return None

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | Soft | None:
        # a module call, so that the MAC counter can tell what is spent on deciding
        if self.planned and self.num_removed(state) == 0:
            return None
        return self.assign(x, cast(Attention, attention), state)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> Step:
        """Called at ``before``, ``between`` and ``after`` of the block; acts at its own site."""
        if site != self.site:
            return x, state
        assignment = self(x, attention, state)
        return (x, state) if assignment is None else self.carry_out(assignment, x, state)

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> Step:
        """Move the tokens ``x`` (B, N, C) as `assign` decided; a method that changes what comes out overrides it."""
        return assignment.apply(x, state)

    def query(
        self,
        block: ReducedBlock,
        x: Tensor,
        attention: Attention,
        state: TokenState,
        rows: int | None,
        *host_args: Any,
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Called instead of plain attention where the site is ``query``: tokens (B, M, C), output (B, M, H*d), state.

        ``x`` (B, N, C) are the tokens that ``attention`` was projected from. With ``rows`` the output is of the first
        ``rows`` tokens only. Decides; `attend_reduced` says how tokens attend that are moved.
        """
        assignment = self(x, attention, state)
        if rows is not None:
            attention = attention.rows(rows)
        if assignment is None:
            if attention.v is None:
                attention = replace(attention, v=block.values(x))
            return x, merge_heads(self.attend(attention, state)), state
        if isinstance(assignment, Soft):
            raise TypeError("a soft assignment cannot act at the query site; use 'before'")
        return self.attend_reduced(assignment, block, x, attention, state, rows, *host_args)

    def attend_reduced(
        self,
        assignment: Hard,
        block: ReducedBlock,
        x: Tensor,
        attention: Attention,
        state: TokenState,
        rows: int | None,
        *host_args: Any,
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Move tokens and attend, as `query`; ``attention`` is of all tokens, of their first ``rows`` queries if given.

        A selection computes the query rows it keeps; a merge pools the output rows.
        """
        reduced, after = assignment.apply(x, state)
        if assignment.is_selection and rows is None:
            return reduced, merge_heads(self.attend(attention.select(assignment.anchor), after)), after
        out = merge_heads(self.attend(attention, state))
        # x + attention pools to the pooled x + the pooled attention: rows are linear
        return reduced, out if rows is not None else assignment.pool(out, state.size), after

    def prepare(self, attention: Attention, state: TokenState) -> Attention:
        """The attention as `attend` and `assign` both get it; a method that is defined by the map may keep it here."""
        return attention

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, H, M, d), the attention output of this block."""
        return attention.output()

    def remember(self, attention: Attention, state: TokenState) -> Any:
        """The part of ``attention`` that the site ``after`` gets in its place; called in front of the MLP.

        All of it, unless a method says that less will do: q, k and v then need not live through the MLP.
        """
        return attention


class Idle(Reducer[C]):
    """Reduces nothing: for blocks where the method does not act. They still attend in proportion to size."""

    @property
    def spares_block(self) -> bool:
        return True

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> Step:
        return x, state


class ReducedBlock(nn.Module):
    """Mixin that replaces the forward of a host's transformer block. The host file adds the four methods marked below.

    It is mixed in by giving an existing block a static subclass of its own class (`adopt`) and taken out by giving the
    class back (`release`): module identity, parameters, hooks, state_dict keys and mode stay as they are.
    """

    host_class: ClassVar[type[nn.Module]]
    """The host's own block class; where it is not named, the last base."""
    parallel: ClassVar[bool] = False
    """Attention and MLP read the same tokens, x + attention(x) + mlp(x). Nothing lies between them then: what a method
    would do there happens at the end of the block, with this block's attention."""
    plain: ClassVar[bool] = False
    """The host's own forward takes tokens alone, and does what `step` would where no logits get a bias."""

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
        """True if this block attends across the windows of an image, which are reduced apart."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Any = cls.__bases__[-1]
        if "host_class" not in vars(cls) and not issubclass(own, ReducedBlock):
            cls.host_class = own

    # ---- what the host file writes ---------------------------------------------------------------------------------

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        """Attention of tokens ``x`` (B, N, C), pre-norm included; queries of the first ``rows`` tokens only if given.

        ``host_args`` is what the host gives its blocks besides the tokens, for all N0 input tokens: tables of positions
        are read through ``state.patch_rows`` and ``state.pair_bias``.
        """
        raise NotImplementedError

    def values(self, x: Tensor) -> Tensor:
        """(B, H, N, d) values of tokens ``x`` (B, N, C), norm included."""
        raise NotImplementedError

    def attention_branch(self, out: Tensor) -> Tensor:
        """(B, M, H*d) attention output to the residual update (B, M, C): projection, norm or layer scale, drop path."""
        raise NotImplementedError

    def mlp_branch(self, x: Tensor) -> Tensor:
        """(B, M, C) tokens to the residual update (B, M, C): norm, MLP, layer scale, drop path."""
        raise NotImplementedError

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        """The modules that the dense ``block`` calls and the reduced one does not: it calls what is in them instead.

        A forward or a hook put on one of them would be skipped, so `reduce_` refuses it, and so does every forward
        of the reduced model. ``block`` is reduced or not.
        """
        return []

    # ---- the data flow ---------------------------------------------------------------------------------------------

    def step(self, x: Tensor, state: TokenState, *host_args: Any) -> Step:
        """One block as a pure function of tokens (B, N, C) and their state.

        The last block may serve a head that reads only the first ``head_rows`` tokens: exact, and the rest is not
        computed. A saving, not a reduction: size, source and position stay. Nothing is decided ``between`` or ``after``
        any more, since no token but these goes on.
        """
        reducer = self.reducer
        x, state = reducer.reduce("before", x, None, state)
        rows = None if state.full_grid else self.head_rows
        watched = state.compact and self.depth in self.trace.call.watched

        # where nothing else happens, the host's own forward: fewer calls between products
        if self.plain and rows is None and not (host_args or watched) and reducer.spares_block:
            # its attention gives what ours does, as fast: sizes and a mask would be a bias
            unbiased = state.mask is None and (state.uniform or not self.proportional)
            batch, n, heads = x.shape[0], x.shape[1], reducer.layer.num_heads
            if unbiased and not unfused_is_faster(x.device, product_dtype(x), batch, heads, n, n):
                handed_over = [x]
                del x  # or what was reduced here would live beside what attention makes of it, through the MLP
                return self.host_class.forward(self, handed_over.pop()), state

        # attention; who decides at the query sees the queries of all tokens
        at_query = reducer.site == "query"
        attention = reducer.prepare(self.project(x, state, None if at_query else rows, *host_args), state)
        if watched:
            call = self.trace.call
            kept = replace(attention, v=None).detach()
            call.attentions.append((self.depth, kept, state, call.images))
        if at_query:
            x, out, state = reducer.query(self, x, attention, state, rows, *host_args)
        else:
            out = merge_heads(reducer.attend(attention, state))
        x = self.add_attention(x if rows is None else x[:, :rows], out)
        del out
        seen = None
        if rows is None:
            x, state = reducer.reduce("between", x, attention, state)
            seen = reducer.remember(attention, state) if reducer.site == "after" else None
        del attention  # or q, k and v would live through the MLP, where memory peaks

        if not self.parallel:
            x = x + self.mlp_branch(x)
        return (x, state) if rows is not None else reducer.reduce("after", x, seen, state)

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """Tokens (B, M, C) with the attention output (B, M, H*d) added; in a parallel block, with the MLP too."""
        update = self.attention_branch(out)
        return x + update + self.mlp_branch(x) if self.parallel else x + update

    def run(self, x: Tensor, *host_args: Any) -> Tensor:
        """Replacement for the host's ``forward``: find the state, step, hand tokens and state on."""
        if isinstance(x, Proxy):
            raise UnsupportedModelError(
                "torch.fx cannot trace through a reduced block: trace with blocks as leaves, e.g. "
                "create_feature_extractor(..., tracer_kwargs={'leaf_modules': [vitrim.core.block.ReducedBlock]})"
            )
        if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
            return self._run_mapped(x, *host_args)
        return self._run(x, *host_args)

    def _run(self, x: Tensor, *host_args: Any) -> Tensor:
        x, state = self.receive(x, self.incoming(x), *host_args)
        if self.last and self.restore == "last_block":
            x, state = state.bring_back(x)
        return self.outgoing(*self.step(x, state, *host_args))

    def _run_mapped(self, x: Tensor, *host_args: Any) -> Tensor:
        """`_run` under ``torch.vmap``, which hides values that some methods decide by.

        Raises:
            VitrimError: torch cannot map what this method does.
        """
        try:
            return self._run(x, *host_args)
        except RuntimeError as error:
            name = self.reducer.config.name
            raise VitrimError(
                f"{name} does not run under torch.vmap, which shows it no values of tensors: give the model the whole "
                "batch, or map it under none, tome or topk"
            ) from error

    def receive(self, x: Tensor, state: TokenState, *host_args: Any) -> Step:
        """The current tokens (B, N, C) from what the host hands this block, after `incoming` found their state."""
        if state.held is not None:
            return state.held, replace(state, held=None)
        if state.full_grid and state.reduced:
            x = take(x, state.position)  # the anchor holds its group's value
        return x, state

    def incoming(self, x: Tensor) -> TokenState:
        """The state of the incoming tokens: stamped on the tensor, else what the previous block left.

        The stamp survives host checkpointing and two forwards before one backward; the fallback survives hooks and
        wrappers that hand on a new tensor (FSDP2). A recomputation finds the stamp that the fallback leaves.
        """
        if self.depth == 0 and self.trace.changing:  # one that runs already is found by `refuse_while_running`
            raise RuntimeError(
                "the reduction of this model is being changed in another thread: call set, restore_ and reduce_ while "
                "no forward runs"
            )
        stamp = getattr(x, STAMP, None)
        if self.depth == 0:
            # a recomputed first block finds on its input what the forward it repeats found: no embedding runs again
            full_grid = self.trace.full_grid or (isinstance(stamp, TokenState) and stamp.full_grid)
            call = self.trace.call
            grid = call.grid
            if grid is not None:  # once: tokens that no patch embedding made must not find an older one's
                call.grid = None
            elif isinstance(stamp, TokenState):
                grid = stamp.grid
            banking = self.restore in ("end", "last_block")
            state = TokenState.start(x, self.num_prefix, full_grid, grid, banking, call.compact)
            self.trace.start(state, self.reducer.config)
            if full_grid or grid is not None:
                setattr(x, STAMP, state)
            return state
        if isinstance(stamp, TokenState):
            state = stamp
        else:
            depth, latest = self.trace.call.latest or (-1, None)  # of this thread
            # in a backward pass a block repeats a forward, which did not leave the latest state
            recomputes = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
            if latest is None or depth != self.depth - 1 or recomputes:
                if self.trace.form is not None:  # it may be that block 0 is another one
                    self.trace.form()
                raise RuntimeError(
                    f"block {self.depth} got tokens of unknown history: the blocks of a reduced model must run in "
                    "order, and reentrant checkpointing is not supported (use use_reentrant=False)"
                )
            state = latest
            setattr(x, STAMP, state)
        expected = state.num_inputs if state.full_grid else state.num_tokens
        if x.shape[1] != expected:
            raise RuntimeError(
                f"block {self.depth} got {x.shape[1]} tokens where {expected} left the block before it: something "
                "between the blocks changed the number of tokens"
            )
        return state

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        """Note the state, un-merge where the output must be complete, and stamp the state on the tokens."""
        if not (self.last or state.full_grid):  # first: at batch 1 every further question costs as much as an operator
            self.trace.leave(self.depth, state, False)
            setattr(x, STAMP, state)
            return x
        if state.banking and self.last:
            x, state = state.bring_back(x)
        restored = state.banking and len(state.bank) > 0
        if state.full_grid and (state.mixed or (restored and not self.last)):
            state = replace(state, held=x)
        self.trace.leave(self.depth, state, self.last)
        fewer = state.compact or (state.pruned and self.restore is None)  # a head then pools over the survivors
        full = state.full_grid and not (self.last and self.trace.call.spares_last)
        if state.reduced and (full or (self.unmerge_at_end and not fewer)):
            x = unmerge(*(state.bring_back(x) if restored else (x, state)))
        if not self.last:
            setattr(x, STAMP, state)
        return x

    # ---- in and out of a model -------------------------------------------------------------------------------------

    OWN: ClassVar[tuple[str, ...]] = (
        *("depth", "num_prefix", "proportional", "last", "head_rows", "unmerge_at_end", "restore", "trace"),
    )
    """Attributes that a block has only while it is reduced; those of a family's own are set by `Host.install`."""

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


def reduced_in(block: nn.Module) -> ReducedBlock | None:
    """The reduced block that ``block`` is, or that it wraps, as checkpointing and compiling do; None without one."""
    if isinstance(block, ReducedBlock):
        return block
    return next((part for part in block.modules() if isinstance(part, ReducedBlock)), None)


# ---- what a module is besides its class -----------------------------------------------------------------------------


def is_bare(module: nn.Module, kind: type[M] = nn.Linear) -> TypeGuard[M]:  # type: ignore[assignment]
    """True if reading the weights of ``module`` does what calling it does: it is a ``kind`` and nothing more.

    The one place that knows how a module can be more than its weights: a subclass (an adapter, a quantised layer, a
    parametrisation), a forward or hooks put on the instance (LoRA patches, offloading), hooks put on all modules, or
    weights of a class of their own (quantised, sharded). Such a module must be called.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> is_bare(layer), is_bare(nn.Identity())
        (True, False)
        >>> handle = layer.register_forward_hook(lambda module, args, output: 2 * output)
        >>> is_bare(layer)
        False
    """
    if type(module) is not kind or is_altered(module):
        return False
    # hooks that run at every module, other than those by which PyTorch's counters note where they are
    of_all = (
        hooks_of_all._global_forward_hooks,
        hooks_of_all._global_forward_pre_hooks,
        hooks_of_all._global_backward_hooks,
        hooks_of_all._global_backward_pre_hooks,
    )
    owners = [getattr(hook, "__module__", "") for hooks in of_all for hook in hooks.values()]
    if any(owner != "torch.utils.module_tracker" for owner in owners):
        return False
    # tensors of PyTorch's own, or what its tracers put in the place of one
    kinds = [type(parameter).__module__ for parameter in module._parameters.values() if parameter is not None]
    return all(name == "torch" or name.startswith(("torch.nn.", "torch._subclasses.")) for name in kinds)


def is_altered(module: nn.Module, library: str | None = None) -> bool:
    """True if ``module`` has a forward or hooks that were put on the instance.

    Args:
        library: whose own hooks do not count, by the name of its package: they only record what passes.

    Example:
        >>> is_altered(nn.Linear(2, 2))
        False
    """
    if "forward" in module.__dict__:
        return True
    found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not (found[0] or found[1] or found[2] or found[3]):  # asked of every block in every forward
        return False
    return any(
        library is None or not getattr(hook, "__module__", "").startswith(f"{library}.")
        for hooks in found
        for hook in hooks.values()
    )


def draw_linear_(module: nn.Module) -> None:
    """Draw the weights of all linear layers in ``module`` as ViTs do: truncated normal of deviation 0.02, biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def running(training: bool, *modules: nn.Module) -> Iterator[None]:
    """``modules``, themselves and not those in them, in training mode or out of it; each gets its own mode back.

    Nothing is touched where they are in that mode already, as in evaluation, when threads may share a model.
    """
    changed = [module for module in modules if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


def sharded(block: nn.Module) -> bool:
    """True if FSDP2 (``fully_shard``) has put a class of its own above the class of ``block``."""
    return any(base.__module__.startswith("torch.distributed") for base in type(block).__bases__)


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class of ``block`` as its library wrote it, which FSDP2 turns from Block to FSDPBlock(FSDPModule, Block)."""
    return type(block).__bases__[-1] if sharded(block) else type(block)


def change_class(block: nn.Module, kind: Any) -> None:
    """Give ``block`` the class ``kind`` in place of its own, below what FSDP2 may have put above it."""
    own: Any = type(block)
    block.__class__ = _shard_of(own, kind) if sharded(block) else kind


@cache  # one class for all blocks: compiled code is guarded by it
def _shard_of(wrapped: Any, kind: Any) -> type[nn.Module]:
    """The class FSDP2 would have made from ``kind``, as it made ``wrapped`` from another."""
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
    """Base class of modules that carry information between two streams of tokens.

    ViTTM's read and write heads and LookupViT's two-way attention are such modules. The class does nothing itself: it
    tells the MAC counter (`vitrim.measure.macs`) which products are exchange, because published figures count them
    even where they leave the self-attention of the blocks out. Only products inside ``forward`` are recognised.

    Example:
        >>> class Mean(Exchange):
        ...     def forward(self, source, target):
        ...         return target + source.mean(1, keepdim=True)
    """
