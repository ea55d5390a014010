"""The trial of a description: a model, its first block and the reduced form of this run on one image of noise."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitrim.core.block import Idle, ReducedBlock
from vitrim.core.host import Host
from vitrim.core.plan import plan
from vitrim.core.registry import make_method
from vitrim.core.tokens import TokenState, Trace
from vitrim.errors import UnsupportedModelError


class TrialRun:
    """A run of a dense model, described by ``host``, on one image of noise."""

    def __init__(self, host: type[Host], model: nn.Module, like: Tensor) -> None:
        self.host = host
        self.model = model
        self.facts = host.facts(model)
        noise = torch.rand(1, *self.facts.input_size, generator=torch.Generator().manual_seed(0))
        # Always the same noise: a description passes or fails, never by chance.
        self.images = noise.to(like)
        # in half precision, long sums round in another order
        self.tolerance = 0.03 if torch.finfo(like.dtype).bits < 32 else 1e-3
        self.got: Tensor | None = None
        self.spoils = False

    def run(self) -> None:
        """Compare the first block, and the tokens that the head reads, with the description."""
        blocks = self.host.blocks(self.model)
        first = blocks[0].register_forward_hook(self.keep, with_kwargs=True)
        with first, blocks[-1].register_forward_hook(self.spoil):
            logits = self.model(self.images)
            # Once more with changed rows that the head should not read: the logits must be the same to the last bit.
            self.spoils = self.facts.head_rows is not None
            spoilt = self.model(self.images)
        if self.got is None:
            raise self.wrong("its blocks do not run in a forward of the model", "name those that do in blocks_name")
        self.compare_block(blocks[0], self.got)
        if not all(torch.equal(one, other) for one, other in zip(tensors(spoilt), tensors(logits), strict=True)):
            raise self.wrong(
                f"its head reads more than the first {self.facts.head_rows} tokens",
                'say heads = ("patches",), or ("no class token",) where there is none',
            )

    def keep(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hook that keeps the first block's input, (1, N, C), or (N, 1, C) of PyTorch's layer."""
        extra = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor)]
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor) or extra:
            raise self.wrong(
                "its blocks do not take tokens alone and give tokens",
                "write a host with a project of its own, as examples/own_host.py does",
            )
        self.got = args[0]

    def spoil(self, block: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Hook that, in the second run, changes all tokens that the head should not read."""
        if not self.spoils or not isinstance(output, Tensor):
            return None
        tokens = self.batch_first(block, output.clone())
        tokens[:, self.facts.head_rows :] += 1.0
        return self.batch_first(block, tokens)

    def batch_first(self, block: Any, x: Tensor) -> Tensor:
        """Swap the axes of tokens between (N, B, C) and (B, N, C) if PyTorch's layer has the former."""
        sequence_first = isinstance(block, nn.TransformerEncoderLayer) and not block.self_attn.batch_first
        return x.transpose(0, 1) if sequence_first else x

    def compare_block(self, block: nn.Module, given: Tensor) -> None:
        """Compare a block with its reduced form on the tokens ``given``.

        Weights are perturbed: two untrained norms compute the same, so one could stand in for the other.
        """
        x, (rows, columns) = self.batch_first(block, given), self.facts.grid_size
        wanted = self.facts.num_prefix + rows * columns
        if x.shape[1] != wanted:
            raise self.wrong(
                f"{x.shape[1]} tokens enter its blocks, and {self.facts.num_prefix} + {rows} x {columns} are {wanted}",
                'say heads, e.g. ("no class token",), num_prefix, image_size and patch_size',
            )
        weights = shaken(block)
        whole, last = self.reduced(block, None), self.reduced(block, 1)
        expected, found, first = (
            self.batch_first(block, functional_call(each, weights, (given,))) for each in (block, whole, last)
        )
        if not self.is_update(found, expected, x):
            raise self.wrong(
                f"a {type(block).__name__} computes something else than what its reduced form was told",
                "name its norms, attention and MLP, or override project, attention_branch and mlp_branch",
            )
        if not self.is_update(first, expected[:, :1], x[:, :1]):
            raise self.wrong("project leaves out rows", "give the queries of the first rows only, where rows are given")
        state = TokenState.start(x, self.facts.num_prefix)
        # Sizes that differ must change the attention, or merged tokens would count as one patch.
        heavier = replace(state, size=state.size * torch.arange(1, wanted + 1, device=x.device), uniform=False)
        bias, plain = (whole.project(x, each, None, None).bias for each in (heavier, state))
        if bias is None or (plain is not None and torch.equal(bias, plain)):
            raise self.wrong(
                "project leaves out the sizes of tokens", "give Attention state.key_bias(q.dtype, self.proportional)"
            )

    def is_update(self, found: Tensor, expected: Tensor, x: Tensor) -> bool:
        """True if what a block added to ``x`` is as ``expected``; compares the change, which may be small."""
        if found.shape != expected.shape:
            return False
        found, wanted, before = found.double(), expected.double(), x.double()
        # A block that changes little, such as an untrained one with small layer scales, may differ by rounding alone.
        rounding = 8 * torch.finfo(x.dtype).eps * wanted.norm()
        return bool((found - wanted).norm() <= self.tolerance * (wanted - before).norm() + rounding)

    def reduced(self, block: nn.Module, rows: int | None) -> ReducedBlock:
        """A twin of ``block`` that shares its parts, reduced by ``none``; the last block if ``rows`` are given."""
        twin = copy.copy(block)
        twin._modules = dict(block._modules)
        nothing = make_method("none")
        self.host.reduced_class(block).adopt(
            twin,
            Idle(nothing, plan(nothing, self.facts, 1)[0]),
            depth=0,
            num_prefix=self.facts.num_prefix,
            proportional=True,
            last=rows is not None,
            head_rows=rows,
            unmerge_at_end=False,
            restore=None,
            trace=Trace(),
        )
        return cast(ReducedBlock, twin)

    def wrong(self, what: str, instead: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.host.__name__} does not describe this {type(self.model).__name__}: {what}; {instead}"
        )


def shaken(block: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters of ``block`` by name, with a little noise added."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: parameter + 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        for name, parameter in block.named_parameters()
        if parameter.is_floating_point()
    }


def tensors(output: Any) -> list[Tensor]:
    """The tensors in an output: a tensor, tuple, list or dict."""
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]
