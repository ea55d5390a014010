"""Blocks whose parts are found by name, and attention projections that hosts of several libraries share."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import project_parts, split_heads
from vitrim.core.block import ReducedBlock, class_of, is_bare, reduced_in, replaced
from vitrim.core.host import Host
from vitrim.core.tokens import STAMP, whole
from vitrim.errors import UnsupportedModelError

FACTORS = (Tensor, float)
SEPARATE = ("q_proj", "k_proj", "v_proj")


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
    """A block with one attention, named as in timm, with one width per head for q, k and v (`project_qkv`)."""

    linear_classes: ClassVar[tuple[type[nn.Linear], ...]] = (nn.Linear,)
    """Classes of ``qkv`` that can be applied in parts: they use only weight and bias, times a ``bias_mask`` if
    present."""

    def project_all(self, x: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of tokens ``x`` (B, N, C); see `project_qkv`."""
        (attn,) = self.attentions(self)
        return project_qkv(attn, self.pre_norm(x), rows, self.reducer.fresh_values, self.linear_classes)

    def values(self, x: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        return project_values(attn, self.pre_norm(x), self.linear_classes)


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
            if class_of(attn) not in reduced.attention_classes:
                raise UnsupportedModelError(
                    f"{host.name} with attention of class {type(attn).__name__} is not supported; supported: "
                    + ", ".join(known.__name__ for known in reduced.attention_classes)
                )


def project_qkv(
    attn: Any, y: Tensor, rows: int | None, skip_values: bool, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and values (B, H, N, d) of normed tokens ``y`` (B, N, C), before their own norms.

    ``attn`` is any attention with the same width per head for q, k and v, named as in timm: one ``qkv``, with its bias
    or with ``q_bias`` and ``v_bias`` beside it, or three projections. With ``rows``, only queries of that many tokens;
    otherwise no values if ``skip_values``. A layer that is bare and of one of ``kinds`` computes only what is needed.
    """
    if _comes_apart(attn, kinds):
        return project_parts(partial(_part, attn), y, rows, skip_values)
    q, k, v = _part(attn, y, 0, 3)
    return q[:, :, :rows], k, v


def project_values(attn: Any, y: Tensor, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)) -> Tensor:
    """The values (B, H, N, d); see `project_qkv`."""
    return _part(attn, y, 2, 3)[0] if _comes_apart(attn, kinds) else _part(attn, y, 0, 3)[2]


def _comes_apart(attn: Any, kinds: tuple[type[nn.Linear], ...]) -> bool:
    return attn.qkv is None or _calls_weight(attn) or any(is_bare(attn.qkv, kind) for kind in kinds)


def _calls_weight(attn: Any) -> bool:
    """True if attention uses the weight of ``qkv`` without calling it: EVA and BEiT with a separate bias."""
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
    heads = getattr(attn, "num_heads", None) or attn.num_attention_heads  # SAM's name
    return tuple(split_heads(part, heads) for part in projected.chunk(end - first, dim=-1))


def hand_stamp(source: Tensor, target: Tensor) -> None:
    """Copy the state stamped on ``source`` to ``target``, the same tokens in another shape."""
    if hasattr(source, STAMP):
        setattr(target, STAMP, getattr(source, STAMP))
