"""A user's own ViT, described by the names of its parts: `OwnBlock` and `OwnHost`, and PyTorch's encoder layer.

A wrong description may raise no error (another scale, a missing class token), so `OwnHost.check` compares one run.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vitrim.core.attention import Attention, project_parts, split_heads, split_parts
from vitrim.core.block import is_bare, running
from vitrim.core.host import Host
from vitrim.core.library import pair
from vitrim.core.plan import Head, HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import NamedBlock, hand_stamp, named, part_of, with_form
from vitrim.hosts.shared.multihead import MultiheadBlock, check_options, packed_part
from vitrim.hosts.torch.trial import TrialRun

UNDESCRIBED = (
    "an nn.TransformerEncoder does not say which of its tokens are patches; say so in six lines, as 'A model of your "
    "own' in docs/hosts.md does, and reduce the whole model"
)


class OwnBlock(NamedBlock):
    """The reduced form of your own block, x + attention(norm(x)), then x + MLP(norm(x)), by the names of its parts.

    Declare ``class ReducedBlock(vitrim.OwnBlock, Block)``, where Block is the model's class, and set the names that
    differ from the defaults. Names may contain dots.

    Attributes:
        norm_name: in the block, the norm before attention; None without one.
        attention_name: in the block, the attention; None if the block itself has the following parts.
        qkv_names: in the attention, one layer that gives q, k and v side by side, each (B, N, C) with concatenated
            heads, or three layers. An `nn.MultiheadAttention` needs none.
        heads_name: in the attention, the number of heads.
        output_names: in the attention, the output projection and what follows it there.
        update_names: in the block, what follows the attention: layer scale, drop path.
        mlp_names: in the block, norm, MLP and what follows it.

    A block that does more, such as norms of queries and keys, overrides ``project``.
    """

    attention_name: ClassVar[str | None] = "attn"  # type: ignore[assignment]
    qkv_names: ClassVar[tuple[str, ...]] = ("qkv",)
    heads_name: ClassVar[str] = "num_heads"

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        # A block without an attention of its own has the projections itself.
        return [block if cls.attention_name is None else named(block, cls.attention_name)]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [] if cls.attention_name is None else cls.attentions(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        y = self.pre_norm(x)
        if self.comes_apart():
            q, k, v = project_parts(self.part, y, rows, self.reducer.fresh_values)
        else:
            q, k, v = self.part(y, 0, 3)
            q = q[:, :, :rows]
        return Attention(q, k, v, q.shape[-1] ** -0.5, state.key_bias(q.dtype, self.proportional))

    def comes_apart(self) -> bool:
        """True if queries, keys and values can be computed separately."""
        (attn,) = self.attentions(self)
        if isinstance(attn, nn.MultiheadAttention) or len(self.qkv_names) > 1:
            return True
        return is_bare(named(attn, self.qkv_names[0]))

    def values(self, x: Tensor) -> Tensor:
        return self.part(self.pre_norm(x), 2, 3)[0]

    def part(self, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
        (attn,) = self.attentions(self)
        if isinstance(attn, nn.MultiheadAttention):
            return packed_part(attn, y, first, end)
        heads, layers = named(attn, self.heads_name), [named(attn, name) for name in self.qkv_names]
        if len(layers) > 1:
            return tuple(split_heads(layer(y), heads) for layer in layers[first:end])
        if not self.comes_apart():
            return tuple(split_heads(each, heads) for each in layers[0](y).chunk(3, dim=-1)[first:end])
        projected = part_of(layers[0].weight, layers[0].bias, y, first, end)
        return split_parts(projected, end - first, heads)

    def project_output(self, out: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        if isinstance(attn, nn.MultiheadAttention):
            return MultiheadBlock.project_output(cast(Any, self), out)
        for name in self.output_names:
            out = named(attn, name)(out)
        return out


class ReducedEncoderLayer(MultiheadBlock, nn.TransformerEncoderLayer):
    """PyTorch's `nn.TransformerEncoderLayer`, reduced: with pre- or post-norm, and either order of axes."""

    attention_name = "self_attn"

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if src_mask is not None or src_key_padding_mask is not None or is_causal:
            raise ValueError(
                "a reduced encoder layer takes no mask: one for all tokens has no meaning once some are gone"
            )
        if self.self_attn.batch_first:
            return self.run(src)
        tokens = src.transpose(0, 1)
        hand_stamp(src, tokens)
        tokens = self.run(tokens)
        out = tokens.transpose(0, 1)
        hand_stamp(tokens, out)
        return out

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x) if self.norm_first else x

    def attention_branch(self, out: Tensor) -> Tensor:
        update: Tensor = self.dropout1(self.project_output(out))
        return update

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        x = super().add_attention(x, out)
        return x if self.norm_first else self.norm1(x)

    def mlp_branch(self, x: Tensor) -> Tensor:
        if self.norm_first:
            return self._ff_block(self.norm2(x))
        after: Tensor = self.norm2(x + self._ff_block(x))
        return after - x  # the norm is applied to the sum, and `step` adds the branch


class OwnHost(Host):
    """A user's own ViT, described by names in the model, which may contain dots, or by values.

    Put ``@vitrim.register_host(f"{__name__}.MyViT")`` on a subclass that sets what differs from the defaults.

    Attributes:
        reduced_blocks: `OwnBlock`s, the reduced form of its blocks; by default that of PyTorch's encoder layer.
        heads: the tokens that the head reads, one of ("class token",), ("patches",) (with a class token), ("no class
            token",), or ("grid",) (every patch at its place, as in segmentation).
        blocks_name: the list of blocks.
        image_size, patch_size: in pixels, one number or height and width.
        num_prefix: tokens in front of the patches; None: one if ``heads`` imply a class token, else none.
        head_name: the classifier, or what contains it; None without one.
        patches_name: the module that outputs the map of patches, (B, C, rows, columns), for methods that read rows and
            columns; None without one.

    Example:
        >>> import vitrim
        >>> class ViT(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches, self.positions = nn.Conv2d(3, 64, 8, 8), nn.Parameter(torch.randn(1, 65, 64))
        ...         layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
        ...         self.encoder, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(64, 10)
        ...     def forward(self, images):
        ...         x = self.patches(images).flatten(2).transpose(1, 2)
        ...         return self.head(self.encoder(nn.functional.pad(x, (0, 0, 1, 0)) + self.positions)[:, 0])
        >>> @vitrim.register_host(f"{ViT.__module__}.{ViT.__qualname__}")
        ... class ViTHost(vitrim.OwnHost):
        ...     name, blocks_name, image_size, patch_size = "my ViT", "encoder.layers", 64, 8
        >>> vitrim.reduce_(ViT(), "tome:r=8").tokens_per_block
        [57, 49, 41, 33]
        >>> from vitrim.core.registry import _HOSTS
        >>> _ = _HOSTS.entries.pop(f"{ViT.__module__}.{ViT.__qualname__}")  # it was an example
    """

    reduced_blocks = (ReducedEncoderLayer,)
    heads: ClassVar[tuple[Head, ...]] = ("class token",)
    blocks_name: ClassVar[str] = "blocks"
    image_size: ClassVar[str | int | tuple[int, int]] = "image_size"
    patch_size: ClassVar[str | int | tuple[int, int]] = "patch_size"
    num_prefix: ClassVar[str | int | None] = None
    head_name: ClassVar[str | None] = "head"
    patches_name: ClassVar[str | None] = None

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(cls._named(model, "blocks_name"))

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return None if cls.patches_name is None else cls._named(model, "patches_name")

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        size, patch = pair(cls._named(model, "image_size")), pair(cls._named(model, "patch_size"))
        assert size is not None
        assert patch is not None
        head, first = cls.heads[0], cls.blocks(model)[0]
        prefix = cls._named(model, "num_prefix")
        # Both heads imply a class token in front.
        prefix = int(head in ("class token", "patches")) if prefix is None else prefix
        dim, num_heads = width_and_heads(*with_form(cls, first))
        classifier = cls.classifier(model)
        convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        return HostFacts(
            dim=dim,
            num_heads=num_heads,
            num_classes=0 if classifier is None else classifier.out_features,
            num_prefix=prefix,
            has_class_token=head in ("class token", "patches") or (head == "grid" and prefix > 0),
            grid_size=(size[0] // patch[0], size[1] // patch[1]),
            head_rows=prefix if head == "class token" else None,
            input_size=(3 if convolution is None else convolution.in_channels, *size),
            dense=head == "grid",
        )

    @classmethod
    def classifier(cls, model: Any) -> nn.Linear | None:
        """The layer that outputs the logits, the last one of the head; None without a head."""
        holder = None if cls.head_name is None else cls._named(model, "head_name")
        linear = [] if holder is None else [layer for layer in holder.modules() if isinstance(layer, nn.Linear)]
        return linear[-1] if linear else None

    @classmethod
    def _named(cls, model: Any, attribute: str) -> Any:
        """The part of ``model`` that an attribute of the description names, or the attribute's value."""
        given = getattr(cls, attribute)
        if not isinstance(given, str):
            return given
        try:
            return attrgetter(given)(model)
        except AttributeError:
            raise UnsupportedModelError(
                f"{cls.__name__} says {attribute} = {given!r}, and this {type(model).__name__} has no such part: name "
                "one that it has, or say the value"
            ) from None

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Refuse a description that does not fit ``model``: run it twice on one image of noise."""
        blocks = cls.blocks(model)
        if not blocks:
            return
        if type(blocks[0]) is nn.ModuleList:
            raise UnsupportedModelError(
                f"{cls.__name__} names lists of parts in {cls.blocks_name!r}, and a list does not run: make blocks of "
                "them, as 'Blocks as pairs' in docs/hosts.md does"
            )
        for block in blocks:
            reduced: Any = cls.reduced_class(block)
            for attn in reduced.attentions(block):
                if isinstance(attn, nn.MultiheadAttention) and not isinstance(block, nn.TransformerEncoderLayer):
                    check_options(attn, cls.name or cls.__name__)
        first = next(model.parameters())
        if not first.is_meta:
            with torch.inference_mode(), running(False, *model.modules()):
                TrialRun(cls, model, first).run()


def width_and_heads(block: nn.Module, kind: type[NamedBlock]) -> tuple[int, int]:
    (attn, *_) = kind.attentions(block)
    if isinstance(attn, nn.MultiheadAttention):
        return attn.embed_dim, attn.num_heads
    own = cast("type[OwnBlock]", kind)
    return named(attn, own.qkv_names[0]).in_features, named(attn, own.heads_name)
