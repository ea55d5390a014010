"""timm's `VisionTransformerSAM`: SAM's image encoder and ViTDet. Windows are rows of a batch."""

from __future__ import annotations

from typing import Any

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import Block, VisionTransformerSAM, get_rel_pos
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.library import no_tokens
from vitrim.core.plan import HostFacts, Starting
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.windows import WindowBlock, Windows
from vitrim.hosts.timm.common import PreNorm, TimmHost, kernel, project_qkv
from vitrim.hosts.timm.library import TimmLibrary


class ReducedSamBlock(PreNorm, WindowBlock, Block):
    """SAM's block under reduction."""

    host_class = Block
    attention_classes = (SamAttention,)

    window_size: int

    @property
    def crosses(self) -> bool:
        return self.window_size == 0

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def project(self, x: Tensor, state: Any, rows: int | None, *host_args: Any) -> Attention:
        attn = self.attn
        q, k, v = project_qkv(attn, self.pre_norm(x), rows, self.reducer.fresh_values)
        q, k = attn.q_norm(q), attn.k_norm(k)
        k_raw = None
        if attn.rope is not None:
            table, k_raw = self.angles(state, attn.rope.get_embed(), len(x)), k
            q, k = (apply_rot_embed_cat(each, table).to(x.dtype) for each in (q, k))
        return self.window_attention(
            state,
            q,
            k,
            v,
            attn.scale,
            tables=self.tables(state),
            k_raw=k_raw,
            **kernel(attn),
        )

    def angles(self, state: Any, table: Tensor, batch: int) -> Tensor:
        """Rows of the rotary table (P, 2d), of a window or of the image, for the tokens: (1 or B*W, 1, N, 2d)."""
        windows: Windows = state.windows
        rows, columns = state.lines(self.crosses)
        if not self.crosses:
            return table[rows * windows.width + columns].unsqueeze(1)
        angles = table[rows * (windows.columns * windows.width) + columns]
        angles = angles.view(-1, state.num_tokens, table.shape[1])  # of the windows of all images, or of one
        return angles.repeat(batch // len(angles), 1, 1).unsqueeze(1)

    def tables(self, state: Any) -> tuple[Tensor, Tensor] | None:
        if not self.attn.use_rel_pos:
            return None
        windows: Windows = state.windows
        down, across = (windows.rows, windows.columns) if self.crosses else (1, 1)
        lines = (down * windows.height, across * windows.width)
        own = (self.attn.rel_pos_h, self.attn.rel_pos_w)
        height, width = (get_rel_pos(count, count, each) for count, each in zip(lines, own, strict=True))
        return height, width


class TimmSam(TimmHost):
    """SAM's image encoder and ViTDet, whose neck reads a map: [windows](#windows)."""

    name = "timm VisionTransformerSAM"
    purpose = "segmentation, detection, poses, depth"
    heads = ("grid",)
    reduced_blocks = (ReducedSamBlock,)
    model_classes = (VisionTransformerSAM,)

    @classmethod
    def side(cls, model: Any) -> int:
        """The side of the model's windows in patches, 0 if it has none."""
        return max(int(block.window_size) for block in model.blocks)

    @classmethod
    def check(cls, model: Any) -> None:
        super().check(model)
        Windows.of(cls.geometry(model)[0], cls.side(model))
        if model.patch_drop.__class__ is not nn.Identity:
            raise UnsupportedModelError(f"{type(model).__name__} with patch_drop_rate is not supported: it has windows")

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        grid, image_size = cls.geometry(model)
        windows = Windows.of(grid, cls.side(model))
        return HostFacts(
            dim=model.embed_dim,
            num_heads=model.blocks[0].attn.num_heads,
            num_classes=model.num_classes,
            num_prefix=0,
            has_class_token=False,
            grid_size=(windows.height, windows.width),
            head_rows=None,
            input_size=(model.in_chans, *image_size),
            dense=True,
            across_windows=windows.number > 1 and any(block.window_size == 0 for block in model.blocks),
        )

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        return ()  # its head reads the neck's map, however it pools

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        super().install(model, trace)
        side = cls.side(model)
        for block in model.blocks:
            block.side = side

    @classmethod
    def uninstall(cls, model: Any) -> None:
        super().uninstall(model)
        for block in model.blocks:
            del block.side


class TimmSamLibrary(TimmLibrary):
    """Hands out the map of its neck and no tokens."""

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.head.fc] if isinstance(model.head.fc, nn.Linear) else []

    def starting(self, model: nn.Module) -> Starting | None:
        return None

    def without_head(self, model: nn.Module) -> nn.Module:
        raise no_tokens(model)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        raise no_tokens(model)
