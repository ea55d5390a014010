"""Blocks whose parts a family names, and the projections of attention that hosts of several libraries have."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import project_parts, split_heads
from vitrim.core.block import ReducedBlock, class_of, is_bare
from vitrim.core.host import Host
from vitrim.core.tokens import STAMP
from vitrim.errors import UnsupportedModelError

FACTORS = (Tensor, float)
SEPARATE = ("q_proj", "k_proj", "v_proj")


class NamedBlock(ReducedBlock):
    """The reduced form of a block whose family says by name where its norms, attention and MLP are.

    Names may have dots. Parts are called as modules, so adapters and hooks on them keep working; a scale per channel,
    which is a parameter or None, may stand among them.
    """

    attention_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The host's own attention classes; with another one the block is refused."""
    attention_name: ClassVar[str] = "attn"
    norm_name: ClassVar[str | None] = "norm1"
    """The norm before attention; None without one."""
    output_names: ClassVar[tuple[str, ...]] = ("proj",)
    """The parts of the attention that its output goes through, in order: projection, dropout."""
    update_names: ClassVar[tuple[str, ...]] = ()
    """The parts of the block behind the attention: layer scale, drop path."""
    mlp_names: ClassVar[tuple[str, ...]] = ("norm2", "mlp")
    """The parts of the block's second branch: norm, MLP, layer scale, drop path."""

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        """The attention modules of a block, reduced or not; most have one."""
        return [named(block, cls.attention_name)]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return cls.attentions(block)

    def pre_norm(self, x: Tensor) -> Tensor:
        """The norm before attention, (B, N, C)."""
        return x if self.norm_name is None else named(self, self.norm_name)(x)

    def project_output(self, out: Tensor) -> Tensor:
        """The output of attention (B, M, C) from that of its heads, side by side (B, M, H*d)."""
        return through(named(self, self.attention_name), self.output_names, out)

    def attention_branch(self, out: Tensor) -> Tensor:
        return through(self, self.update_names, self.project_output(out))

    def mlp_branch(self, x: Tensor) -> Tensor:
        return through(self, self.mlp_names, x)


class JointBlock(NamedBlock):
    """A block of one attention with q, k and v of one width per head, by timm's names; see `project_qkv`."""

    linear_classes: ClassVar[tuple[type[nn.Linear], ...]] = (nn.Linear,)
    """Classes of ``qkv`` that come apart: they compute with their weight, and their bias, times a ``bias_mask``."""

    def project_all(self, x: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of tokens ``x`` (B, N, C), as `project_qkv`; no values if the method has its own."""
        (attn,) = self.attentions(self)
        return project_qkv(attn, self.pre_norm(x), rows, self.reducer.fresh_values, self.linear_classes)

    def values(self, x: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        return project_values(attn, self.pre_norm(x), self.linear_classes)


def named(owner: Any, name: str) -> Any:
    """The part of ``owner`` of this name, with dots where it is a part of a part."""
    for each in name.split("."):
        owner = getattr(owner, each)
    return owner


def through(owner: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """``x`` after the parts of ``owner`` in turn: modules are called, parameters are factors, None is left out."""
    for name in names:
        part = named(owner, name)
        if part is not None:
            x = part * x if isinstance(part, FACTORS) else part(x)
    return x


def check_calls(model: nn.Module, library: str, known: tuple[type[nn.Module], ...], calls: tuple[str, ...]) -> None:
    """Refuse a ``model`` whose class has a forward of its own, or another of the ``calls`` it is made of.

    Raises:
        UnsupportedModelError: none of the ``known`` classes of the ``library`` has that call.
    """
    for call in calls:
        if all(getattr(type(model), call) is not getattr(kind, call) for kind in known):
            raise UnsupportedModelError(
                f"{type(model).__name__} overrides {call} of {library}'s {known[0].__name__}, so vitrim cannot know "
                f"what its head reads; supported: {', '.join(kind.__name__ for kind in known)}"
            )


def check_attentions(host: type[Host], model: nn.Module) -> None:
    """Refuse blocks of ``model`` of classes that the ``host`` does not know, or with attention of such a class.

    Raises:
        UnsupportedModelError: saying which.
    """
    for block in host.blocks(model):
        reduced: Any = host.reduced_class(block)
        for attn in reduced.attentions(block):
            if class_of(attn) not in reduced.attention_classes:
                raise UnsupportedModelError(
                    f"{host.name} with attention of class {type(attn).__name__} is not supported; supported: "
                    + ", ".join(known.__name__ for known in reduced.attention_classes)
                )


def project_qkv(
    attn: Any, y: Tensor, rows: int | None, skip_values: bool, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and values of normed tokens ``y`` (B, N, C), each (B, H, N, d), before any norm of their own.

    ``attn`` is any attention with q, k and v of one width per head, by timm's names: together in ``qkv``, with its own
    bias or with ``q_bias`` and ``v_bias`` beside it, or separate. Queries of the first ``rows`` tokens only if given;
    without that, no values if ``skip_values``. Where the layer comes apart, which is of one of ``kinds`` and nothing
    more, what is not asked for is not computed.
    """
    if _comes_apart(attn, kinds):
        return project_parts(partial(_part, attn), y, rows, skip_values)
    q, k, v = _part(attn, y, 0, 3)
    return q[:, :, :rows], k, v


def project_values(attn: Any, y: Tensor, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)) -> Tensor:
    """The values (B, H, N, d) alone; see `project_qkv`."""
    return _part(attn, y, 2, 3)[0] if _comes_apart(attn, kinds) else _part(attn, y, 0, 3)[2]


def _comes_apart(attn: Any, kinds: tuple[type[nn.Linear], ...]) -> bool:
    return attn.qkv is None or _calls_weight(attn) or any(is_bare(attn.qkv, kind) for kind in kinds)


def _calls_weight(attn: Any) -> bool:
    """True if attention uses the weight of ``qkv`` without calling it: EVA and BEiT with a bias beside it."""
    return getattr(attn, "q_bias", None) is not None and not attn.qkv_bias_separate


def _part(attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
    """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
    if attn.qkv is None:
        # grouped queries have fewer key and value heads
        heads = (attn.num_heads, *[getattr(attn, "num_kv_heads", attn.num_heads)] * 2)
        return tuple(split_heads(getattr(attn, SEPARATE[part])(y), heads[part]) for part in range(first, end))
    beside = None
    if getattr(attn, "q_bias", None) is not None:
        beside = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)[first:end])
    if (first, end) == (0, 3) and not _calls_weight(attn):
        projected = attn.qkv(y)
    else:
        width = attn.qkv.weight.shape[0] // 3
        rows = slice(first * width, end * width)
        bias = beside if _calls_weight(attn) else attn.qkv.bias
        if bias is not None and getattr(attn.qkv, "bias_mask", None) is not None:
            bias = bias * attn.qkv.bias_mask.to(bias.dtype)
        projected = F.linear(y, attn.qkv.weight[rows], bias if bias is None or bias is beside else bias[rows])
    if beside is not None and not _calls_weight(attn):
        projected += beside  # in place as in timm: keeps the dtype under autocast
    heads = getattr(attn, "num_heads", None) or attn.num_attention_heads  # so called by SAM
    return tuple(split_heads(part, heads) for part in projected.chunk(end - first, dim=-1))


def hand_stamp(source: Tensor, target: Tensor) -> None:
    """Let the state that is stamped on ``source`` go on with ``target``, the same tokens in another shape."""
    if hasattr(source, STAMP):
        setattr(target, STAMP, getattr(source, STAMP))
