"""Blocks whose parts are found by name, and attention projections that hosts of several libraries share."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import project_parts, split_parts
from vitrim.core.block import ReducedBlock, class_of, is_bare, reduced_in, replaced
from vitrim.core.host import Host
from vitrim.core.tokens import STAMP, whole
from vitrim.errors import UnsupportedModelError

FACTORS = (Tensor, float)


class NamedBlock(ReducedBlock):
    """The reduced form of a block whose family names its norms, attention and MLP.

    Names may contain dots. Parts are called as modules, so adapters and hooks on them keep working. A name may also
    stand for a scale per channel, a parameter or None.
    """

    attention_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The host's own attention classes; blocks with others are refused."""
    attention_name: ClassVar[str] = "attn"
    norm_name: ClassVar[str | None] = "norm1"
    """The norm before attention; None without one."""
    output_names: ClassVar[tuple[str, ...]] = ("proj",)
    """Parts of the attention that its output passes, in order: projection, dropout."""
    update_names: ClassVar[tuple[str, ...]] = ()
    """Parts of the block behind the attention: layer scale, drop path."""
    mlp_names: ClassVar[tuple[str, ...]] = ("norm2", "mlp")
    """Parts of the block's second branch: norm, MLP, layer scale, drop path."""

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        """The attention modules of a block, reduced or not; most blocks have one."""
        return [named(block, cls.attention_name)]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return cls.attentions(block)

    def pre_norm(self, x: Tensor) -> Tensor:
        return x if self.norm_name is None else named(self, self.norm_name)(x)

    def project_output(self, out: Tensor) -> Tensor:
        """Attention output (B, M, C) from concatenated heads (B, M, H*d)."""
        return through(named(self, self.attention_name), self.output_names, out)

    def attention_branch(self, out: Tensor) -> Tensor:
        return through(self, self.update_names, self.project_output(out))

    def mlp_branch(self, x: Tensor) -> Tensor:
        return through(self, self.mlp_names, x)


class JointBlock(NamedBlock):
    """A block whose attention has one layer ``qkv`` for q, k and v of one width per head, with its rows in this order.

    What a library's attention has besides, such as a bias beside the layer, its host says by overriding `part`,
    `joined` or `bias_of`.
    """

    linear_classes: ClassVar[tuple[type[nn.Linear], ...]] = (nn.Linear,)
    """Classes of ``qkv`` that can be applied in parts: they use only weight and bias (`bias_of`)."""
    heads_name: ClassVar[str] = "num_heads"
    """In the attention, the number of heads."""

    def project_all(self, x: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of tokens ``x`` (B, N, C); see `project_qkv`."""
        (attn,) = self.attentions(self)
        return self.project_qkv(attn, self.pre_norm(x), rows)

    def values(self, x: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        return self.project_values(attn, self.pre_norm(x))

    def project_qkv(self, attn: Any, y: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values (B, H, N, d) of normed tokens ``y`` (B, N, C), before their own norms.

        With ``rows``, only queries of that many tokens; no values if the reducer computes them afresh.
        """
        if self.comes_apart(attn):
            return project_parts(partial(self.part, attn), y, rows, self.reducer.fresh_values)
        q, k, v = self.part(attn, y, 0, 3)
        return q[:, :, :rows], k, v

    def project_values(self, attn: Any, y: Tensor) -> Tensor:
        """The values (B, H, N, d); see `project_qkv`."""
        return self.part(attn, y, 2, 3)[0] if self.comes_apart(attn) else self.part(attn, y, 0, 3)[2]

    def comes_apart(self, attn: Any) -> bool:
        """True if q, k and v can be computed separately; an adapter or a hook needs the whole call."""
        return any(is_bare(attn.qkv, kind) for kind in self.linear_classes)

    def part(self, attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
        return split_parts(self.joined(attn, y, first, end), end - first, getattr(attn, self.heads_name))

    def joined(self, attn: Any, y: Tensor, first: int, end: int) -> Tensor:
        """These parts side by side, (B, N, (end - first) H d)."""
        if (first, end) == (0, 3):
            return attn.qkv(y)  # type: ignore[no-any-return]
        return part_of(attn.qkv.weight, self.bias_of(attn), y, first, end)

    def bias_of(self, attn: Any) -> Tensor | None:
        """The bias that ``qkv`` adds."""
        return attn.qkv.bias  # type: ignore[no-any-return]


def part_of(weight: Tensor, bias: Tensor | None, y: Tensor, first: int, end: int) -> Tensor:
    """Parts first..end of the projection of ``y`` by the rows of q, k and v in one ``weight``, side by side."""
    width = weight.shape[0] // 3
    rows = slice(first * width, end * width)
    return F.linear(y, weight[rows], None if bias is None else bias[rows])


def named(owner: Any, name: str) -> Any:
    """The part of ``owner`` at a dotted ``name``."""
    if "." not in name:  # the usual case, twelve times in every block of a forward
        return getattr(owner, name)
    for each in name.split("."):
        owner = getattr(owner, each)
    return owner


def through(owner: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """``x`` after the parts of ``owner`` in turn: modules are called, parameters multiply, None is skipped."""
    for name in names:
        part = named(owner, name)
        if part is not None:
            x = part * x if isinstance(part, FACTORS) else part(x)
    return x


def scale_of(fused: bool, attn: Any, q: Tensor) -> float:
    """The factor of the logits in ``attn``: where the library's kernel is ``fused``, its own, not ``attn.scale``."""
    return whole(q.shape[-1]) ** -0.5 if fused else attn.scale  # type: ignore[no-any-return]


def with_form(host: type[Host], block: nn.Module) -> tuple[nn.Module, Any]:
    """``block``, or the reduced one that it wraps, and its reduced form."""
    reduced = reduced_in(block)
    return (block, host.reduced_class(block)) if reduced is None else (reduced, type(reduced))


def check_calls(model: nn.Module, library: str, known: tuple[type[nn.Module], ...], calls: tuple[str, ...]) -> None:
    """Refuse a ``model`` whose class overrides one of the ``calls`` of its forward, or has another in its place."""
    for call in calls:
        # A method put on the class later counts as an override, too: `replaced` finds it.
        overridden = all(getattr(type(model), call) is not getattr(kind, call) for kind in known)
        if overridden or replaced(type(model), call) is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} overrides {call} of {library}'s {known[0].__name__}, so vitrim cannot know "
                f"what its head reads; supported: {', '.join(kind.__name__ for kind in known)}"
            )


def check_attentions(host: type[Host], model: nn.Module) -> None:
    """Refuse blocks of ``model``, or attention in them, of classes that ``host`` does not know."""
    for block in host.blocks(model):
        reduced: Any = host.reduced_class(block)
        for attn in reduced.attentions(block):
            # The exact class: a subclass may compute something else under the same names.
            if class_of(attn) not in reduced.attention_classes:
                raise UnsupportedModelError(
                    f"{host.name} with attention of class {type(attn).__name__} is not supported; supported: "
                    + ", ".join(known.__name__ for known in reduced.attention_classes)
                )


def hand_stamp(source: Tensor, target: Tensor) -> None:
    """Copy the state stamped on ``source`` to ``target``, the same tokens in another shape."""
    if hasattr(source, STAMP):
        setattr(target, STAMP, getattr(source, STAMP))
