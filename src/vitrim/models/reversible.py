"""Reversible blocks, and a stack of them that keeps no activations for training (Mangalam et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

Branch = Callable[[Tensor], Tensor]


class RevBlock(Block):
    """timm's block with its residual branches on two streams (B, N, C), which makes it reversible (section 3.1).

    y1 = x1 + attention(norm(x2)) and y2 = x2 + mlp(norm(y1)).
    """

    def attention_branch(self, x: Tensor) -> Tensor:
        """Update of the first stream, from the second (B, N, C)."""
        return self.drop_path1(self.attn(self.norm1(x)))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Update of the second stream, from the first (B, N, C)."""
        return self.drop_path2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y1 = x1 + self.attention_branch(x2)
        return y1, x2 + self.mlp_branch(y1)

    def branches(self) -> tuple[tuple[Branch, list[nn.Parameter]], tuple[Branch, list[nn.Parameter]]]:
        """Attention and MLP branch, each with its trained parameters."""
        return (
            (self.attention_branch, trained(self.norm1, self.attn)),
            (self.mlp_branch, trained(self.norm2, self.mlp)),
        )


def trained(*modules: nn.Module) -> list[nn.Parameter]:
    """Parameters of ``modules`` that require a gradient."""
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


# ---- the reversible stack --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardState:
    """Random state and autocast before an operation, to run it again with the same dropout and drop path."""

    random: Tensor
    devices: list[int]
    device_random: list[Tensor]
    device_type: str
    autocast: tuple[bool, torch.dtype] | None

    @classmethod
    def before(cls, x: Tensor) -> ForwardState:
        """Record the state before the next operation on ``x``."""
        kind = x.device.type
        devices, states = get_device_states(x)
        autocast = None
        if torch.amp.is_autocast_available(kind):
            autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(torch.get_rng_state(), devices, states, kind, autocast)

    def rerun(self, branch: Branch, x: Tensor) -> Tensor:
        """Compute ``branch(x)`` with gradients in this state, and restore the current random state."""
        # Drop path draws again what it drew in the forward, and later draws are not moved by it.
        fork_type = self.device_type if self.devices else "cuda"  # any device type, where none is forked
        autocast: AbstractContextManager[object] = nullcontext()
        if self.autocast is not None:
            enabled, dtype = self.autocast
            autocast = torch.autocast(self.device_type, dtype=dtype, enabled=enabled)
        with torch.random.fork_rng(self.devices, device_type=fork_type), torch.enable_grad(), autocast:
            torch.set_rng_state(self.random)
            if self.devices:
                set_device_states(self.devices, self.device_random, device_type=self.device_type)
            return branch(x)


@dataclass
class Tape:
    """Streams on their way back through the blocks of one forward: the inputs of the last undone block."""

    streams: tuple[Tensor, Tensor] | None = None


class ReversibleStep(torch.autograd.Function):
    """One block that saves nothing for backward; the last one saves its two output streams.

    Backward undoes the block: it recomputes a branch from its input, subtracts it from the stream that it was added to,
    and differentiates it; then the other branch. The tape passes the recovered streams to the block before. Only the
    activations of one branch exist at a time, and gradients of parameters are released block by block.
    """

    @staticmethod
    def forward(
        ctx: Any, block: RevBlock, tape: Tape, last: bool, x1: Tensor, x2: Tensor, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        (attention, _), (mlp, _) = block.branches()
        before_attention = ForwardState.before(x2)
        y1 = x1 + attention(x2)
        before_mlp = ForwardState.before(y1)
        y2 = x2 + mlp(y1)
        ctx.block, ctx.tape, ctx.last, ctx.states = block, tape, last, (before_attention, before_mlp)
        if last:
            ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> tuple[Any, ...]:
        # The last block saved its outputs; every other one gets them as the inputs that the next one recovered.
        y1, y2 = ctx.saved_tensors if ctx.last else ctx.tape.streams
        (attention, attention_weights), (mlp, mlp_weights) = ctx.block.branches()
        before_attention, before_mlp = ctx.states
        # In reverse order: y2 was made of y1, which the attention of x2 made of x1.
        x2, through_mlp, of_mlp = undo(mlp, mlp_weights, before_mlp, y1, y2, grad2)
        grad1 = grad1 + through_mlp
        x1, through_attention, of_attention = undo(attention, attention_weights, before_attention, x2, y1, grad1)
        ctx.tape.streams = x1, x2
        return None, None, None, grad1, grad2 + through_attention, *of_attention, *of_mlp


def undo(
    branch: Branch, parameters: list[nn.Parameter], state: ForwardState, x: Tensor, total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Recover y (B, N, C) from ``total = y + branch(x)``, and differentiate the branch.

    ``branch`` returns the same result when rerun in ``state``; ``grad`` is the gradient of ``total``. Returns y, the
    gradient of ``x`` through the branch, and those of its ``parameters``.
    """
    # A leaf of its own: the graph of this branch alone is built, differentiated and freed.
    x = x.detach().requires_grad_()
    added = state.rerun(branch, x)
    through, *of_parameters = torch.autograd.grad(added, (x, *parameters), grad.to(added.dtype), allow_unused=True)
    return total - added.detach(), through, [*of_parameters]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reversible(blocks: Sequence[RevBlock], x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Run the streams (B, N, C) through ``blocks`` without saving activations for backward.

    Outputs equal those of the plain blocks bit for bit, gradients up to the rounding of the recomputed streams.
    Differentiable once; runs outside compiled graphs.
    """
    tape = Tape()
    for depth, block in enumerate(blocks):
        weights = [weight for _, own in block.branches() for weight in own]
        x1, x2 = ReversibleStep.apply(block, tape, depth == len(blocks) - 1, x1, x2, *weights)
    return x1, x2
