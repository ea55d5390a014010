"""timm's `VOLO`: its transformer blocks, which attend among all places of one map. Outlookers are not reduced."""

from __future__ import annotations

from typing import Any

from timm.models.volo import VOLO, Transformer
from timm.models.volo import Attention as VoloAttention
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.hosts.shared.windows import WindowBlock, WindowedHost
from vitrim.hosts.timm.common import PreNorm, TimmHost
from vitrim.hosts.timm.versions import in_chans


class ReducedVoloBlock(PreNorm, WindowBlock, Transformer):
    """VOLO's reduced transformer block: the map is one window."""

    attention_classes = (VoloAttention,)
    update_names = ("drop_path1",)
    mlp_names = ("norm2", "mlp", "drop_path2")
    window_size = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        q, k, v = self.project_all(x, rows)
        return self.attention_of(self.attn, state, q, k, v)


class TimmVolo(WindowedHost, TimmHost):
    """VOLO's transformer blocks. Its class token joins behind them and attends to a token for every patch."""

    name = "timm VOLO"
    purpose = "images"
    reduced_blocks = (ReducedVoloBlock,)
    model_classes = (VOLO,)
    calls = (*TimmHost.calls, "forward_tokens", "forward_cls")

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return [block for stage in model.network[2:] for block in stage.children()]  # outlookers, a convolution, these

    @classmethod
    def side(cls, model: nn.Module) -> int:
        return 0

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        rows, columns = model.pos_embed.shape[1:3]
        # Pixels per place of the map that these blocks see.
        size = model.feature_info[-1]["reduction"]
        return HostFacts(
            dim=model.num_features,
            num_heads=cls.blocks(model)[0].attn.num_heads,  # type: ignore[union-attr,arg-type]
            num_classes=model.num_classes,
            num_prefix=0,
            has_class_token=False,
            grid_size=(rows, columns),
            head_rows=None,
            input_size=(in_chans(model), rows * size, columns * size),
            dense=True,
        )

    @classmethod
    def form(cls, model: Any) -> tuple[Any, ...]:
        return ()  # with any pooling, later layers read a token for every patch
