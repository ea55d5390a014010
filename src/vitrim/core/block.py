"""The data flow. `ReducedBlock.step` is the only place where the sequence of a reduced block is written.

A method is a `Reducer`: it decides. A host is a subclass of `ReducedBlock` that says where its submodules are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args

from torch import Tensor, nn
from torch.fx import Proxy

from vitrim.core.assignment import Hard, Soft
from vitrim.core.attention import Attention, merge_heads, unfused_is_faster
from vitrim.core.method import MethodConfig, Restore
from vitrim.core.modules import FromMeta, change_class
from vitrim.core.plan import Layer
from vitrim.core.tokens import STAMP, TokenState, product_dtype, take, unmerge
from vitrim.core.trace import Trace, recomputes
from vitrim.errors import UnsupportedModelError

Site = Literal["before", "query", "between", "after"]
Step = tuple[Tensor, TokenState]
C = TypeVar("C", bound=MethodConfig)


class Reducer(FromMeta, Generic[C]):
    """Decides, in one block, which tokens stay. Subclasses implement `assign`; few need `reduce`, `query` or `attend`.

    A reducer reads its options from ``config`` and its amount from ``layer``; `reduction.set` gives it new ones.

    Class attributes:
        site: where it acts. ``before`` the block, on its input; at the ``query``, when q and k exist but attention has
            not run (a selection then computes only the query rows it keeps; a merge pools the output rows);
            ``between`` attention and MLP; ``after`` the block.
        fresh_values: its `attend_reduced` projects the values itself, from the reduced tokens: the block need not.
        everywhere: it has something to do in blocks without an amount, too; otherwise these get an `Idle` one.
    """

    site: ClassVar[Site] = "between"
    fresh_values: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    config: C
    layer: Layer

    @property
    def needs_full_last_block(self) -> bool:
        """True if, in the last block, `reduce` has work to do after attention: all tokens must then be computed."""
        return self.site == "after"

    def spares_block(self) -> bool:
        """True if only what enters the block changes, if anything: the host's own forward may then run."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.site not in get_args(Site):  # a misspelt site would reduce nothing, silently
            raise TypeError(f"{cls.__name__}.site is {cls.site!r}; valid sites: {', '.join(get_args(Site))}")

    def __init__(self, config: C, layer: Layer) -> None:
        super().__init__()
        self.follow(config, layer)

    def follow(self, config: C, layer: Layer) -> None:
        """Take over a plan: at construction, and when ``reduction.set`` makes a new one."""
        self.config = config
        self.layer = layer

    def again(self) -> Reducer[Any]:
        return type(self)(self.config, self.layer)

    def num_keep(self, state: TokenState) -> int:
        """Number of patch tokens this layer keeps, a Python int."""
        return self.layer.keep(self.config, state.initial_patches, state.num_patches)

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
        planned = self.layer.amount is not None and not self.config.is_adaptive()
        if planned and self.num_removed(state) == 0:
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
    """The host's own block class."""
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
        """One block as a pure function of tokens (B, N, C) and their state."""
        reducer = self.reducer
        x, state = reducer.reduce("before", x, None, state)
        rows = None if state.full_grid else self.head_rows
        if rows is not None:
            return self.last_step(x, state, rows, *host_args)
        watched = state.compact and self.trace.watches(self.depth)
        # for fewer calls between products
        if self.plain and not (host_args or watched) and reducer.spares_block() and self.attends_as_host(x, state):
            handed_over = [x]
            del x  # or what was reduced here would live beside what attention makes of it, through the MLP
            return self.host_class.forward(self, handed_over.pop()), state
        attention = reducer.prepare(self.project(x, state, None, *host_args), state)
        if watched:
            self.trace.note_attention(self.depth, attention.images(0, len(x)).detach(), state)
        x, out, state = self.attend(x, attention, state, None, *host_args)
        x = self.add_attention(x, out)
        del out
        x, state = reducer.reduce("between", x, attention, state)
        seen = reducer.remember(attention, state) if reducer.site == "after" else None
        del attention  # or q, k and v would live through the MLP, where memory peaks
        return reducer.reduce("after", self.add_mlp(x), seen, state)

    def attends_as_host(self, x: Tensor, state: TokenState) -> bool:
        """True if the host's attention gives what ours does, as fast: sizes and a mask would be a bias."""
        unbiased = state.mask is None and (state.uniform or not self.proportional)
        batch, n, heads = x.shape[0], x.shape[1], self.reducer.layer.num_heads
        return unbiased and not unfused_is_faster(x.device, product_dtype(x), batch, heads, n, n)

    def last_step(self, x: Tensor, state: TokenState, rows: int, *host_args: Any) -> Step:
        """The last block for a head that reads only the first ``rows`` tokens: exact, and the rest is not computed.

        A saving, not a reduction: size, source and position stay. Nothing is decided ``between`` any more, since
        no token but these goes on.
        """
        if self.reducer.site == "query":
            attention = self.reducer.prepare(self.project(x, state, None, *host_args), state)
            x, out, state = self.attend(x, attention, state, rows, *host_args)
        else:
            attention = self.reducer.prepare(self.project(x, state, rows, *host_args), state)
            out = merge_heads(self.reducer.attend(attention, state))
        return self.add_mlp(self.add_attention(x[:, :rows], out)), state

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """Tokens (B, M, C) with the attention output (B, M, H*d) added; in a parallel block, with the MLP too."""
        update = self.attention_branch(out)
        return x + update + self.mlp_branch(x) if self.parallel else x + update

    def add_mlp(self, x: Tensor) -> Tensor:
        """Tokens (B, M, C) with the MLP added, unless `add_attention` did."""
        return x if self.parallel else x + self.mlp_branch(x)

    def attend(
        self, x: Tensor, attention: Attention, state: TokenState, rows: int | None, *host_args: Any
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Attention with the reduction of the ``query`` site: tokens (B, M, C), output (B, M, H*d), state."""
        if self.reducer.site == "query":
            return self.reducer.query(self, x, attention, state, rows, *host_args)
        return x, merge_heads(self.reducer.attend(attention, state)), state

    def run(self, x: Tensor, *host_args: Any) -> Tensor:
        """Replacement for the host's ``forward``: find the state, step, hand tokens and state on."""
        if isinstance(x, Proxy):
            raise UnsupportedModelError(
                "torch.fx cannot trace through a reduced block: trace with blocks as leaves, e.g. "
                "create_feature_extractor(..., tracer_kwargs={'leaf_modules': [vitrim.core.block.ReducedBlock]})"
            )
        x, state = self.receive(x, self.incoming(x), *host_args)
        if self.last and self.restore == "last_block":
            x, state = state.bring_back(x)
        return self.outgoing(*self.step(x, state, *host_args))

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
            seen = self.trace.take_grid()
            grid = stamp.grid if seen is None and isinstance(stamp, TokenState) else seen
            banking, compact = self.restore in ("end", "last_block"), self.trace.compact
            state = TokenState.start(x, self.num_prefix, full_grid, grid, banking, compact)
            self.trace.start(state)
            if full_grid or grid is not None:
                setattr(x, STAMP, state)
            return state
        if isinstance(stamp, TokenState):
            state = stamp
        else:
            depth, latest = self.trace.latest or (-1, None)  # of this thread
            if latest is None or depth != self.depth - 1 or recomputes():
                if self.trace.form is not None:  # it may be that block 0 is another one
                    self.trace.form.check()
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
        full = state.full_grid and not (self.last and self.trace.spares_last)
        if state.reduced and (full or (self.unmerge_at_end and not fewer)):
            x = unmerge(*(state.bring_back(x) if restored else (x, state)))
        if not self.last:
            setattr(x, STAMP, state)
        return x

    # ---- in and out of a model -------------------------------------------------------------------------------------

    OWN = ("depth", "num_prefix", "proportional", "last", "head_rows", "unmerge_at_end", "restore", "trace")

    @classmethod
    def adopt(cls, block: nn.Module, reducer: Reducer[Any], **settings: Any) -> None:
        """Turn the host's ``block`` into a reduced one, in place. ``settings`` are the attributes named in ``OWN``."""
        change_class(block, cls)
        block.add_module("reducer", reducer)
        for name in cls.OWN:
            setattr(block, name, settings[name])

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
