"""Code shared by the original repositories of DINOv2 and DINOv3."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from vitrim.core.block import replaced
from vitrim.core.host import Host
from vitrim.core.library import input_channels
from vitrim.core.plan import Head, HostFacts
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import JointBlock, check_attentions


class ReducedDinoBlock(JointBlock):
    """The reduced form of a block with timm's names: norms in front, layer scales behind, q, k and v from one layer."""

    output_names = ("proj", "proj_drop")
    update_names: ClassVar[tuple[str, ...]] = ("ls1",)
    mlp_names: ClassVar[tuple[str, ...]] = ("norm2", "mlp", "ls2")
    scales_up_to: ClassVar[float] = 0.0
    """Stochastic depth above this rate drops images from a block; below, it scales their updates."""

    attn: Any
    sample_drop_ratio: float

    def run_one(self, tokens: Any, given: Any = None) -> Any:
        """Run the block on what the model gives it, tokens or a list of one such tensor, and return the same form.

        Refused: crops of several sizes, and stochastic depth that drops images.
        """
        if isinstance(tokens, list) and len(tokens) != 1:
            raise UnsupportedModelError(
                f"a reduced model takes images of one size, not a list of {len(tokens)} crops; vitrim.restore_(model) "
                "first"
            )
        if self.training and self.sample_drop_ratio > self.scales_up_to:
            raise UnsupportedModelError(
                f"stochastic depth of {self.sample_drop_ratio:g} leaves images of a batch out of a block, and the "
                "tokens of the others would be reduced apart; create the model with drop_path_rate=0"
            )
        return [self.run(tokens[0], given)] if isinstance(tokens, list) else self.run(tokens, given)


class DinoHost(Host):
    """A `DinoVisionTransformer`. Its ``forward_features`` returns class token and patches, un-merged."""

    heads: ClassVar[tuple[Head, ...]] = ("patches",)
    model_class: ClassVar[type[nn.Module]]
    registers: ClassVar[str]
    """The attribute that counts tokens between class token and patches."""
    dense_calls = ("get_intermediate_layers",)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        for call in ("forward", "forward_features"):
            overridden = getattr(type(model), call) is not getattr(cls.model_class, call)
            if overridden or replaced(type(model), call) is not None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} overrides {call} of {cls.model_class.__name__}, so vitrim cannot know "
                    "what it does with its tokens"
                )
        check_attentions(cls, model)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        if not getattr(model, "chunked_blocks", False):
            return list(model.blocks)
        # Chunks are filled up with identities in front, so that blocks keep their numbers.
        return [block for chunk in model.blocks for block in chunk if not isinstance(block, nn.Identity)]

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        patch_height, patch_width = model.patch_embed.patch_size
        height, width = model.patch_embed.img_size
        return HostFacts(
            dim=model.embed_dim,
            num_heads=model.num_heads,
            num_classes=0,
            num_prefix=1 + getattr(model, cls.registers),
            has_class_token=True,
            grid_size=(height // patch_height, width // patch_width),
            head_rows=None,
            input_size=(input_channels(model.patch_embed), height, width),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.patch_embed  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        height, width = maker.patch_size
        return args[0].shape[2] // height, args[0].shape[3] // width
