"""Code shared by timm's host families."""

from __future__ import annotations

from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vitrim.core.attention import Attention, add_bias, split_heads
from vitrim.core.host import Host
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import JointBlock, check_attentions, check_calls, part_of, scale_of, with_form
from vitrim.hosts.timm.versions import in_chans, refuse_shifted_bias


def kernel(attn: Any) -> dict[str, Any]:
    """The kernel of timm's ``attn``: fused with dropout, or a written-out map with a dropout module."""
    if attn.fused_attn:
        return {"dropout": attn.attn_drop.p if attn.training else 0.0}
    return {"fused": False, "drop": attn.attn_drop}


def refuse_mask(mask: Tensor | None, is_causal: bool = False) -> None:
    """Raise ValueError for a mask over all N0 tokens, which a reduced block cannot apply."""
    if isinstance(mask, Proxy):  # torch.fx passes one: the block's own error explains
        return
    if mask is not None or is_causal:
        raise ValueError(
            "a reduced model takes no attn_mask and no is_causal (padded NaFlex batches bring a mask): a mask for the "
            "full sequence has no meaning once tokens are gone; call it without, or vitrim.restore_(model) first"
        )


class TimmBlock(JointBlock):
    """The reduced form of a timm block."""

    output_names: ClassVar[tuple[str, ...]] = ("proj", "proj_drop")

    attn: Any

    def attention_of(
        self,
        attn: Any,
        state: TokenState,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        table: Tensor | None = None,
        rows: int | None = None,
        k_raw: Tensor | None = None,
    ) -> Attention:
        """Attention with the settings of ``attn``.

        A ``table`` (H, N0, N0) over pairs of input tokens is added to the state's bias, for the first ``rows`` if
        given.
        """
        bias = state.key_bias(q.dtype, self.proportional)
        if table is not None:
            bias = add_bias(bias, state.pair_bias(table, rows).to(q.dtype))
        return Attention(q, k, v, scale_of(attn.fused_attn, attn, q), bias, k_raw=k_raw, **kernel(attn))


class BiasBeside(TimmBlock):
    """The attention of EVA and BEiT: the bias of q, k and v may be beside ``qkv``, which may be three layers."""

    def comes_apart(self, attn: Any) -> bool:
        return attn.qkv is None or self.reads_weight(attn) or super().comes_apart(attn)

    def reads_weight(self, attn: Any) -> bool:
        """True if the library itself uses the weight of ``qkv`` without calling it, with the bias beside it."""
        return getattr(attn, "q_bias", None) is not None and not attn.qkv_bias_separate

    def part(self, attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
        if attn.qkv is not None:
            return super().part(attn, y, first, end)
        # grouped queries have fewer key and value heads
        heads = (attn.num_heads, *[getattr(attn, "num_kv_heads", attn.num_heads)] * 2)
        layers = (attn.q_proj, attn.k_proj, attn.v_proj)
        return tuple(split_heads(layers[each](y), heads[each]) for each in range(first, end))

    def joined(self, attn: Any, y: Tensor, first: int, end: int) -> Tensor:
        if self.reads_weight(attn):
            return part_of(attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)), y, first, end)
        projected = super().joined(attn, y, first, end)
        if getattr(attn, "q_bias", None) is not None:
            # in place as in timm: keeps the dtype under autocast
            projected += torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)[first:end])
        return projected


class PreNorm(TimmBlock):
    """Norms before attention and MLP, layer scales behind them."""

    update_names: ClassVar[tuple[str, ...]] = ("ls1", "drop_path1")
    mlp_names: ClassVar[tuple[str, ...]] = ("norm2", "mlp", "ls2", "drop_path2")


class PreNormGamma(TimmBlock):
    """`PreNorm` with layer scales that are parameters or None, not modules: EVA and BEiT."""

    update_names = ("gamma_1", "drop_path1")
    mlp_names = ("norm2", "mlp", "gamma_2", "drop_path2")


class PostNorm(TimmBlock):
    """Norms behind attention and MLP, no layer scale."""

    norm_name = None
    update_names = ("norm1", "drop_path1")
    mlp_names = ("mlp", "norm2", "drop_path2")


class TimmHost(Host):
    """A timm model with ``blocks``, ``head`` and ``forward_intermediates``.

    Subclasses name the model classes whose forward they know, and the calls that it consists of.
    """

    model_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    calls: ClassVar[tuple[str, ...]] = ("forward", "forward_features", "forward_head")
    # get_intermediate_layers and feature wrappers call it, too
    dense_calls: ClassVar[tuple[str, ...]] = ("forward_intermediates",)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        if hasattr(model, "patch_generator"):
            raise UnsupportedModelError(
                f"this {type(model).__name__} has a patch_generator in place of its embedding, as NVIDIA's remote code "
                "of C-RADIO puts it there; load the model as RadioModel of transformers, without trust_remote_code, "
                "which is supported"
            )
        check_calls(model, "timm", cls.model_classes, cls.calls)
        for call, own in vars(model).items():
            # wrappers of forward on the instance (accelerate, autocast) call the model's own
            if call in cls.calls and call != "forward" and not type(own).__module__.startswith("vitrim."):
                raise UnsupportedModelError(
                    f"this {type(model).__name__} has a {call} of its own, so vitrim cannot know what its head reads; "
                    f"supported: {', '.join(known.__name__ for known in cls.model_classes)} as timm builds them"
                )
        check_attentions(cls, model)
        for block in cls.blocks(model):
            refuse_shifted_bias(block)
            reduced: Any = cls.reduced_class(block)
            if any(getattr(attn, "gate", None) is not None for attn in reduced.attentions(block)):
                raise UnsupportedModelError(f"{cls.name} with gated attention is not supported")

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        grid_size, image_size = cls.geometry(model)
        first, kind = with_form(cls, model.blocks[0])
        return HostFacts(
            dim=model.embed_dim,
            num_heads=sum(attn.num_heads for attn in kind.attentions(first)),
            num_classes=model.num_classes,
            num_prefix=getattr(model, "num_prefix_tokens", 0),
            # NaFlexVit keeps it with its other embeddings
            has_class_token=getattr(getattr(model, "embeds", model), "cls_token", None) is not None,
            grid_size=grid_size,
            head_rows=cls.head_rows(model),
            input_size=(in_chans(model), *image_size),
        )

    @classmethod
    def geometry(cls, model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of patches, and height and width of the images, that ``model`` was made for.

        For a user's own patch embedding, from the position table and ``pretrained_cfg``; refused if neither tells.
        """
        embed = getattr(model, "patch_embed", None)
        grid_size, image_size = getattr(embed, "grid_size", None), getattr(embed, "img_size", None)
        if grid_size is None and (table := getattr(model, "pos_embed", None)) is not None:
            # A table without rows for the prefix has one for every patch.
            places = table.shape[1] - (0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens)
            side = isqrt(max(places, 0))
            grid_size = (side, side) if side * side == places > 0 else None
        if image_size is None:
            image_size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (None, None))[-2:]
        if grid_size is None or image_size is None or None in image_size:
            raise UnsupportedModelError(
                f"this {type(model).__name__} does not say how many patches it was made for: give its patch_embed "
                "grid_size=(rows, columns) and img_size=(height, width) as attributes"
            )
        rows, columns = grid_size
        height, width = image_size
        return (rows, columns), (height, width)

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.patch_embed  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        if not isinstance(output, Tensor):
            return None
        if output.dim() == 4:  # models with dynamic_img_size
            size = output.shape[2:] if getattr(maker, "output_fmt", None) == "NCHW" else output.shape[1:3]
        elif hasattr(maker, "dynamic_feat_size"):
            size = maker.dynamic_feat_size(args[0].shape[-2:])
        else:
            return None
        return size[0], size[1]

    @classmethod
    def head_rows(cls, model: Any) -> int | None:
        if getattr(model, "attn_pool", None) is None and model.global_pool == "token":
            return 1
        return None

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        # timm's reset_classifier changes the head's rows, set_input_size the grid; a user may set either
        grid_size = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        return cls.head_rows(model), None if grid_size is None else tuple(grid_size)

    @classmethod
    def hands_out_tokens(cls, model: Any) -> bool:
        return getattr(model, "attn_pool", None) is None and not model.global_pool
