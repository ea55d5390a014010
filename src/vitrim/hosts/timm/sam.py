"""timm's `VisionTransformerSAM`: SAM's image encoder and ViTDet. Windows are batch rows."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import Block, VisionTransformerSAM, get_rel_pos
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import scale_of
from vitrim.hosts.shared.windows import WindowBlock, WindowedHost
from vitrim.hosts.timm.common import PreNorm, TimmBlock, TimmHost, kernel
from vitrim.hosts.timm.library import TimmMapLibrary


class TimmWindowBlock(WindowBlock, TimmBlock):
    """The reduced form of timm's blocks with windows. Their host argument is a rotary table, see `rows_of_table`."""

    relative: ClassVar[Any] = None
    """See `WindowBlock.window_attention`."""

    def project(self, x: Tensor, state: Any, rows: int | None, given: Any) -> Attention:
        attn, table = self.attn, given
        q, k, v = self.project_all(x, rows)
        q, k = attn.q_norm(q), attn.k_norm(k)
        k_raw = None
        if table is not None:
            angles, k_raw = self.rows_of_table(table, state, x.shape[0]), k
            half = getattr(attn, "rotate_half", False)
            q, k = (apply_rot_embed_cat(each, angles, half=half).to(x.dtype) for each in (q, k))
        scale = scale_of(attn.fused_attn, attn, q)
        return self.window_attention(state, attn, q, k, v, scale, relative=self.relative, k_raw=k_raw, **kernel(attn))


class ReducedSamBlock(PreNorm, TimmWindowBlock, Block):
    attention_classes = (SamAttention,)
    relative = staticmethod(get_rel_pos)

    def forward(self, x: Tensor) -> Tensor:
        rope = self.attn.rope
        return self.run(x, None if rope is None else rope.get_embed())


class TimmSam(WindowedHost, TimmHost):
    """SAM's image encoder and ViTDet, whose neck reads a map: [windows](hosts.md#windows)."""

    name = "timm VisionTransformerSAM"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedSamBlock,)
    model_classes = (VisionTransformerSAM,)

    @classmethod
    def check(cls, model: Any) -> None:
        super().check(model)
        if model.patch_drop.__class__ is not nn.Identity:
            raise UnsupportedModelError(f"{type(model).__name__} with patch_drop_rate is not supported: it has windows")

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        return ()  # with any pooling its head reads the neck's map


class TimmSamLibrary(TimmMapLibrary):
    """A model whose head is behind the neck."""

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.head.fc] if isinstance(model.head.fc, nn.Linear) else []
