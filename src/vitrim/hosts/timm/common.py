"""Code shared by timm's host families: how their attention projects q, k and v, and how their models are laid out."""

from __future__ import annotations

from functools import partial
from math import isqrt
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from vitrim.core.attention import Attention, add_bias, project_parts, split_heads
from vitrim.core.block import ReducedBlock, reduced_in
from vitrim.core.hooks import DenseCall
from vitrim.core.host import Host
from vitrim.core.modules import class_of, is_bare
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError


def kernel(attn: Any) -> dict[str, Any]:
    """The way timm's ``attn`` runs: a fused kernel that is told a probability, or a map that a module drops from."""
    if attn.fused_attn:
        return {"dropout": attn.attn_drop.p if attn.training else 0.0}
    return {"fused": False, "drop": attn.attn_drop}


SEPARATE = ("q_proj", "k_proj", "v_proj")


def refuse_mask(mask: Tensor | None, is_causal: bool = False) -> None:
    """Raise ValueError for a mask made for all N0 tokens, which a reduced block cannot take."""
    if isinstance(mask, Proxy):  # torch.fx asks what would be done with one: the block says why it cannot be traced
        return
    if mask is not None or is_causal:
        raise ValueError(
            "a reduced model takes no attn_mask and no is_causal (padded NaFlex batches bring a mask): a mask for the "
            "full sequence has no meaning once tokens are gone; call it without, or vitrim.restore_(model) first"
        )


def project_qkv(attn: Any, y: Tensor, rows: int | None, skip_values: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and values of normed tokens ``y`` (B, N, C), each (B, H, N, d), before any norm of their own.

    ``attn`` is any of timm's attention classes with q, k and v of one width per head: fused in ``qkv``, with its own
    bias or with ``q_bias`` and ``v_bias`` beside it, or separate. Queries of the first ``rows`` tokens only if given;
    without that, no values if ``skip_values``. Where the layer comes apart, what is not asked for is not computed.
    """
    if _comes_apart(attn):
        return project_parts(partial(_part, attn), y, rows, skip_values)
    q, k, v = _part(attn, y, 0, 3)
    return q[:, :, :rows], k, v


def project_values(attn: Any, y: Tensor) -> Tensor:
    """The values (B, H, N, d) alone; see `project_qkv`."""
    return _part(attn, y, 2, 3)[0] if _comes_apart(attn) else _part(attn, y, 0, 3)[2]


def project_output(attn: Any, out: Tensor) -> Tensor:
    """Project the heads of ``attn``, side by side (B, M, H*d): its own norm if it has one, projection, dropout."""
    if hasattr(attn, "norm"):
        out = attn.norm(out)
    return attn.proj_drop(attn.proj(out))  # type: ignore[no-any-return]


def position_bias(table: Tensor | None, state: TokenState, rows: int | None, dtype: torch.dtype) -> Tensor | None:
    """Bias (B, H, M, N) in ``dtype`` from a table over pairs of input tokens (H, N0, N0); the first ``rows`` only."""
    return None if table is None else state.pair_bias(table, rows).to(dtype)


def project_together(attn: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `project_qkv` for all tokens and timm's plain `Attention`, which has no other form: in few operations."""
    q, k, v = attn.qkv(y).view(*y.shape[:2], 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _comes_apart(attn: Any) -> bool:
    return attn.qkv is None or _calls_weight(attn) or is_bare(attn.qkv)


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
        projected = F.linear(y, attn.qkv.weight[rows], bias if bias is None or bias is beside else bias[rows])
    if beside is not None and not _calls_weight(attn):
        projected += beside  # in place as in timm: keeps the dtype under autocast
    return tuple(split_heads(part, attn.num_heads) for part in projected.chunk(end - first, dim=-1))


class TimmBlock(ReducedBlock):
    """The reduced form of a timm block, with the attention classes that it can stand for."""

    attention_classes: ClassVar[tuple[type[nn.Module], ...]] = ()

    @staticmethod
    def attentions(block: Any) -> list[Any]:
        """The attention modules of a block, reduced or not."""
        return [block.attn]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [attn for attn in cls.attentions(block) if attn is not block]

    def attention_of(
        self,
        attn: Any,
        state: TokenState,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        bias: Tensor | None = None,
        k_raw: Tensor | None = None,
    ) -> Attention:
        """Attention with the settings of ``attn``; ``bias`` is that of positions, to which that of the state comes."""
        own = state.key_bias(q.dtype, self.proportional)
        return Attention(
            q=q,
            k=k,
            v=v,
            scale=attn.scale,
            bias=own if bias is None else add_bias(own, bias),
            k_raw=k_raw,
            **kernel(attn),
        )


class SerialBlock(TimmBlock):
    """A block with one attention, ``attn``, and an MLP behind it. `PreNorm` and `PostNorm` say where its norms are."""

    attn: Any
    norm1: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    drop_path2: Any

    def pre_norm(self, x: Tensor) -> Tensor:
        """The norm before attention, (B, N, C)."""
        raise NotImplementedError

    def values(self, x: Tensor) -> Tensor:
        return project_values(self.attn, self.pre_norm(x))


class PreNorm(SerialBlock):
    """Norms before attention and MLP, layer scales behind them as modules."""

    ls1: Any
    ls2: Any

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path1(self.ls1(project_output(self.attn, out)))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class PreNormGamma(PreNorm):
    """`PreNorm` where layer scales are parameters, or None, and have no module of their own: EVA and BEiT."""

    gamma_1: Any
    gamma_2: Any

    def ls1(self, update: Tensor) -> Tensor:
        return update if self.gamma_1 is None else self.gamma_1 * update

    def ls2(self, update: Tensor) -> Tensor:
        return update if self.gamma_2 is None else self.gamma_2 * update


class PostNorm(SerialBlock):
    """Norms behind attention and MLP, and no layer scale."""

    def pre_norm(self, x: Tensor) -> Tensor:
        return x

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path1(self.norm1(project_output(self.attn, out)))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(self.norm2(self.mlp(x)))  # type: ignore[no-any-return]


class TimmHost(Host):
    """A timm model with a list of ``blocks``, a ``head`` and ``forward_intermediates``.

    Subclasses name the model classes whose forward they know, and the calls that make it up.
    """

    reduced_blocks: ClassVar[tuple[type[TimmBlock], ...]] = ()
    model_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    calls: ClassVar[tuple[str, ...]] = ("forward", "forward_features", "forward_head")

    @classmethod
    def check(cls, model: nn.Module) -> None:
        supported = ", ".join(known.__name__ for known in cls.model_classes)
        for call in cls.calls:
            if all(getattr(type(model), call) is not getattr(known, call) for known in cls.model_classes):
                raise UnsupportedModelError(
                    f"{type(model).__name__} overrides {call} of timm's {cls.model_classes[0].__name__}, so vitrim "
                    f"cannot know what its head reads; supported: {supported}"
                )
            # who wraps forward on the instance (accelerate, autocast) calls the model's own
            own = vars(model).get(call)
            if call != "forward" and own is not None and not type(own).__module__.startswith("vitrim."):
                raise UnsupportedModelError(
                    f"this {type(model).__name__} has a {call} of its own, so vitrim cannot know what its head reads; "
                    f"supported: {supported} as timm builds them"
                )
        for block in cls.blocks(model):
            classes = cls.reduced_class(block).attention_classes
            for attn in cls.attentions(block):
                if class_of(attn) not in classes:
                    raise UnsupportedModelError(
                        f"{cls.name} with attention of class {type(attn).__name__} is not supported; supported: "
                        + ", ".join(known.__name__ for known in classes)
                    )
                if getattr(attn, "gate", None) is not None:
                    raise UnsupportedModelError(f"{cls.name} with gated attention is not supported")

    @classmethod
    def reduced_class(cls, block: nn.Module) -> type[TimmBlock]:
        reduced = super().reduced_class(block)
        assert issubclass(reduced, TimmBlock)
        return reduced

    @classmethod
    def attentions(cls, block: nn.Module) -> list[Any]:
        """The attention modules of a block, reduced or not."""
        reduced = reduced_in(block)  # what may have been put around it knows nothing of attention
        if reduced is None:
            return cls.reduced_class(block).attentions(block)
        assert isinstance(reduced, TimmBlock)
        return reduced.attentions(reduced)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        grid_size, image_size = cls.geometry(model)
        return HostFacts(
            dim=model.embed_dim,
            num_heads=sum(attn.num_heads for attn in cls.attentions(model.blocks[0])),
            num_classes=model.num_classes,
            num_prefix=model.num_prefix_tokens,
            has_class_token=cls.has_class_token(model),
            grid_size=grid_size,
            head_rows=cls.head_rows(model),
            input_size=(model.in_chans, *image_size),
        )

    @classmethod
    def geometry(cls, model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of patches, and height and width of the images, that ``model`` was made for.

        A patch embedding of the user's own need not say: the table of positions and the model's ``pretrained_cfg`` do
        then.

        Raises:
            UnsupportedModelError: nothing says it.
        """
        embed = getattr(model, "patch_embed", None)
        grid_size, image_size = getattr(embed, "grid_size", None), getattr(embed, "img_size", None)
        if grid_size is None and (table := getattr(model, "pos_embed", None)) is not None:
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
    def has_class_token(cls, model: Any) -> bool:
        """True if token 0 of ``model`` is a class token."""
        return model.cls_token is not None

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.patch_embed  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        if not isinstance(output, Tensor):
            return None
        if output.dim() == 4:  # of models with dynamic_img_size
            size = output.shape[2:] if getattr(maker, "output_fmt", None) == "NCHW" else output.shape[1:3]
        elif hasattr(maker, "dynamic_feat_size"):
            size = maker.dynamic_feat_size(args[0].shape[-2:])
        else:
            return None
        return size[0], size[1]

    @classmethod
    def head_rows(cls, model: Any) -> int | None:
        """See `HostFacts.head_rows`."""
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

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        # get_intermediate_layers and feature wrappers come through here too
        model.forward_intermediates = DenseCall(model, "forward_intermediates", trace)

    @classmethod
    def uninstall(cls, model: Any) -> None:
        del model.forward_intermediates
