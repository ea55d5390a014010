"""open_clip's `VisionTransformer`, the image tower of most of its models. Other towers are timm's and found inside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from open_clip.transformer import Attention as CustomAttention
from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from vitrim.core.attention import Attention, project_parts
from vitrim.core.block import Installed
from vitrim.core.host import Host
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState, Trace, take
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import NamedBlock, check_attentions, check_calls, scale_of
from vitrim.hosts.shared.multihead import MultiheadBlock, check_options, packed_part

CALLS = ("forward", "forward_intermediates", "_embeds", "_pool", "_global_pool")


class ReducedResidualAttentionBlock(MultiheadBlock, ResidualAttentionBlock):
    norm_name = "ln_1"
    update_names = ("ls_1",)
    mlp_names = ("ln_2", "mlp", "ls_2")

    def forward(
        self, q_x: Tensor, k_x: Tensor | None = None, v_x: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        _refuse(k_x, v_x, attn_mask)
        return self.run(q_x)


class ReducedCustomBlock(NamedBlock, CustomResidualAttentionBlock):
    """Reduced `CustomResidualAttentionBlock`: norms of queries, keys and context, scales of heads."""

    attention_classes = (CustomAttention,)
    norm_name = "ln_1"
    output_names = ("ln_inner", "out_proj", "out_drop")
    update_names = ("ln_attn", "ls_1")
    mlp_names = ("ln_2", "mlp", "ls_2")

    attn: Any

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        v_x: Tensor | None = None,
        checkpoint_mask: Tensor | None = None,
    ) -> Tensor:
        _refuse(attn_mask, v_x, checkpoint_mask)
        return self.run(x)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        q, k, v = project_parts(partial(packed_part, attn), self.pre_norm(x), rows, self.reducer.fresh_values)
        q, k = attn.ln_q(q), attn.ln_k(k)
        bias, dropout = state.key_bias(q.dtype, self.proportional), attn.attn_drop.p if attn.training else 0.0
        return Attention(q, k, v, scale_of(attn.use_fsdpa, attn, q), bias, dropout, fused=attn.use_fsdpa)

    def values(self, x: Tensor) -> Tensor:
        return packed_part(self.attn, self.pre_norm(x), 2, 3)[0]

    def project_output(self, out: Tensor) -> Tensor:
        attn = self.attn
        if attn.head_scale is not None:
            out = (out.unflatten(-1, (attn.num_heads, attn.head_dim)) * attn.head_scale[:, 0]).flatten(-2)
        return super().project_output(out)


def _refuse(*given: Tensor | None) -> None:
    if any(one is not None for one in given):
        raise ValueError(
            "a reduced image tower takes no attn_mask and no other keys: a mask for the full sequence has no meaning "
            "once tokens are gone; call it without, or vitrim.restore_(model) first"
        )


@dataclass(eq=False, repr=False)
class OwnPool(Installed):
    """The pooling of a reduced model, over the remaining tokens even where full grids, with zeros for pruned patches,
    return.
    """

    model: nn.Module
    trace: Trace

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = self.trace.call.final
        if state is not None and state.asked.full_grids:
            if state.held is not None:
                x = state.held
            elif state.pruned:
                x = take(x, state.position)
        return VisionTransformer._pool(self.model, x)  # type: ignore[no-any-return]


class OpenClipViT(Host):
    """The image tower, alone or beside a text tower (CLIP, CoCa). It pools the class token, patches, or attends."""

    name = "open_clip VisionTransformer"
    purpose = "images and text"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedResidualAttentionBlock, ReducedCustomBlock)
    dense_calls = ("forward_intermediates",)

    @classmethod
    def check(cls, model: Any) -> None:
        check_calls(model, "open_clip", (VisionTransformer,), CALLS)
        if not model.transformer.batch_first:
            raise UnsupportedModelError(f"{cls.name} with batch_first=False is not supported; supported: True")
        check_attentions(cls, model)
        block: Any
        for block in cls.blocks(model):
            if isinstance(block.attn, nn.MultiheadAttention):
                check_options(block.attn, cls.name)
            elif block.attn.logit_scale is not None:
                raise UnsupportedModelError(
                    f"{cls.name} with scaled_cosine_attn is not supported; supported: Attention without it"
                )

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.transformer.resblocks)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        # Only then may the last block compute the class token's row alone.
        pools_class_token = model.attn_pool is None and model.pool_type == "tok" and not model.output_tokens
        block: Any = cls.blocks(model)[0]
        return HostFacts(
            dim=model.transformer.width,
            num_heads=block.attn.num_heads,
            num_classes=0,
            num_prefix=1,
            has_class_token=True,
            grid_size=tuple(model.grid_size),
            head_rows=1 if pools_class_token else None,
            input_size=(model.conv1.in_channels, *model.image_size),
        )

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        return model.attn_pool is None, model.pool_type, model.output_tokens

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.conv1  # type: ignore[no-any-return]

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        super().install(model, trace)
        model._pool = OwnPool(model, trace)
