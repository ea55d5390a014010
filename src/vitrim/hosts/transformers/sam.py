"""Hugging Face SAM's image encoder and ViTDet: windows are batch rows (`vitrim.hosts.shared.windows`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.sam.modeling_sam import (
    SamVisionAttention,
    SamVisionEncoder,
    SamVisionLayer,
    SamVisionSdpaAttention,
)
from transformers.models.vitdet.modeling_vitdet import (
    VitDetAttention,
    VitDetBackbone,
    VitDetLayer,
    VitDetModel,
    get_rel_pos,
)

from vitrim.core.attention import Attention, split_heads
from vitrim.core.plan import HostFacts, Part
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.windows import WindowBlock, Windows
from vitrim.hosts.transformers.common import NoMapsHook, TransformersHost
from vitrim.hosts.transformers.library import TransformersLibrary


class _ReducedWindowLayer(WindowBlock):
    """The attention SAM and ViTDet have in common: q, k and v of one projection, relative positions in two axes."""

    window_size: int

    @property
    def attention_module(self) -> Any:
        raise NotImplementedError

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [cls.attention_module.fget(block)]  # type: ignore[attr-defined]

    @property
    def num_heads(self) -> int:
        raise NotImplementedError

    @property
    def crosses(self) -> bool:
        return self.window_size == 0

    def pre_norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def table(self, lines: int, own: Tensor) -> Tensor:
        """The vectors (S, S, d) of relative positions between ``lines`` from the layer's own parameter."""
        raise NotImplementedError

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        q, k, v = (
            split_heads(part, self.num_heads) for part in self.attention_module.qkv(self.pre_norm(x)).chunk(3, dim=-1)
        )
        return self.window_attention(
            state, q, k, v, self.attention_module.scale, tables=self.tables(state), **self.kernel()
        )

    def tables(self, state: Any) -> tuple[Tensor, Tensor] | None:
        if not hasattr(self.attention_module, "rel_pos_h"):
            return None
        windows: Windows = state.windows
        down, across = (windows.rows, windows.columns) if self.crosses else (1, 1)
        return (
            self.table(down * windows.height, self.attention_module.rel_pos_h),
            self.table(across * windows.width, self.attention_module.rel_pos_w),
        )

    def kernel(self) -> dict[str, Any]:
        """The way attention runs: its dropout, and whether fused."""
        return {"fused": False}

    def values(self, x: Tensor) -> Tensor:
        return split_heads(self.attention_module.qkv(self.pre_norm(x)).chunk(3, dim=-1)[2], self.num_heads)


class ReducedSamVisionLayer(_ReducedWindowLayer, SamVisionLayer):
    """`SamVisionLayer` under reduction."""

    host_class = SamVisionLayer
    attention_classes = (SamVisionAttention, SamVisionSdpaAttention)

    def forward(self, hidden_states: Tensor) -> Any:
        return self.run(hidden_states)

    @property
    def attention_module(self) -> Any:
        return self.attn

    @property
    def num_heads(self) -> int:
        return self.attention_module.num_attention_heads  # type: ignore[no-any-return]

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layer_norm1(x)  # type: ignore[no-any-return]

    def table(self, lines: int, own: Tensor) -> Tensor:
        return self.attention_module.get_rel_pos(lines, lines, own)  # type: ignore[no-any-return]

    def kernel(self) -> dict[str, Any]:
        if isinstance(self.attention_module, SamVisionSdpaAttention):  # which has no dropout
            return {"fused": True}
        return {"fused": False, "dropout": self.attention_module.dropout if self.training else 0.0}

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attention_module.proj(out)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class ReducedVitDetLayer(_ReducedWindowLayer, VitDetLayer):
    """`VitDetLayer` under reduction."""

    host_class = VitDetLayer
    attention_classes = (VitDetAttention,)
    channels_first = True

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
        return (self.run(hidden_states),)

    @property
    def attention_module(self) -> Any:
        return self.attention

    @property
    def num_heads(self) -> int:
        return self.attention_module.num_heads  # type: ignore[no-any-return]

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x)  # type: ignore[no-any-return]

    def table(self, lines: int, own: Tensor) -> Tensor:
        return get_rel_pos(lines, lines, own)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path(self.attention_module.proj(out))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class _Windowed(TransformersHost):
    """The map of the last layer is read place by place, so pruned patches come back at the end."""

    heads = ("grid",)
    hook_class = NoMapsHook
    num_prefix = 0
    has_class_token = False
    tokens_of_images = False  # it hands out maps, of a neck or of its own layout
    chooses_kernel = False  # the class of the attention says which it is

    @classmethod
    def side(cls, model: nn.Module) -> int:
        """The side of the model's windows in patches, 0 if it has none."""
        return max(int(block.window_size) for block in cls.blocks(model))  # type: ignore[arg-type]

    @classmethod
    def check(cls, model: nn.Module) -> None:
        trunk = cls.trunk(model)
        if all(type(trunk).forward is not known.forward for known in cls.trunk_classes):
            raise UnsupportedModelError(
                f"{type(trunk).__name__} overrides the forward of {cls.trunk_classes[0].__name__}, so vitrim cannot "
                "know what it does with its tokens"
            )
        Windows.of(cls.whole_grid(model), cls.side(model))
        for block in cls.blocks(model):
            reduced: Any = cls.reduced_class(block)
            attn = reduced.attention_module.fget(block)
            if type(attn) not in reduced.attention_classes:
                raise UnsupportedModelError(
                    f"{cls.name} with attention of class {type(attn).__name__} is not supported; supported: "
                    + ", ".join(known.__name__ for known in reduced.attention_classes)
                )

    @classmethod
    def whole_grid(cls, model: nn.Module) -> tuple[int, int]:
        """Rows and columns of the patches of a whole image."""
        return super().facts(model).grid_size

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        windows = Windows.of(cls.whole_grid(model), cls.side(model))
        crosses = any(block.window_size == 0 for block in cls.blocks(model))
        return replace(
            super().facts(model),
            grid_size=(windows.height, windows.width),
            dense=True,
            across_windows=crosses and windows.number > 1,
        )

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        super().install(model, trace)
        side = cls.side(model)
        for block in cls.blocks(model):
            block.side = side  # type: ignore[assignment]

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        super().uninstall(model)
        for block in cls.blocks(model):
            del block.side


class HFSam(_Windowed):
    """The image encoder, whose neck reads every patch at its place: [windows](#windows)."""

    name = "transformers SAM"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedSamVisionLayer,)
    trunk_classes = (SamVisionEncoder,)
    layers_name = "layers"

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return cls.trunk(model).patch_embed  # type: ignore[no-any-return]


class HFVitDet(_Windowed):
    """ViTDet without the convolutional blocks that some have between their layers: [windows](#windows)."""

    name = "transformers ViTDet"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedVitDetLayer,)
    trunk_classes = (VitDetModel, VitDetBackbone)
    layers_name = "encoder.layer"

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if any(block.use_residual_block for block in cls.blocks(model)):
            raise UnsupportedModelError(
                f"{type(model).__name__} with residual_block_indices is not supported: convolutions between its "
                "layers read every patch at its place"
            )

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return cls.trunk(model).embeddings.projection  # type: ignore[no-any-return]


class HFSamLibrary(TransformersLibrary):
    """The neck is the head."""

    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TransformersLibrary.parts,
        "head": ("neck",),
        "positions": ("pos_embed",),
    }
