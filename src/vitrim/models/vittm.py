"""ViTTM: Vision Token Turing Machines (Jajal et al.), two streams of tokens, of which only one is processed.

Process tokens go through transformer blocks; memory tokens keep the rest. In every layer process tokens read from
memory, are processed, and write back:

    m, p = LN(m), LN(p)                one LayerNorm for both streams; its output replaces them
    p = fuse(Read(source=m, target=p), p)
    p = Block(p)
    m, p = LN'(m), LN'(p)
    m = fuse(Write(source=p, target=m), m)
    m = MemoryBlock(m)                 the identity, or m + MLP(LN(m))

Both streams come from the same image, each with its own patch size; names have those of process and memory, in this
order. The classifier of the memory predicts; training adds the loss of a second one, on the process tokens
(`vitrim.models.streams.objective`). `vitrim.models.vittm_parts` has the alternatives for each part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vitrim.errors import VitrimError, check_known
from vitrim.models.common import create, fit_positions, pretrained_cfg, renamed, unwrapped
from vitrim.models.streams import (
    TwoStreamClassifier,
    grid_of,
    initialise,
    join_keys_and_values,
    transformer_blocks,
)
from vitrim.models.vittm_parts import (
    FUSIONS,
    HEADS,
    LatentHead,
    LinearHead,
    MemoryMlp,
    StreamEmbed,
)

PUBLISHED_PATCH = 16  # patch size of the published code's base class, whose unused parts it keeps


class ViTTMLayer(nn.Module):
    """One layer: read, process, write (section 3). The caller passes the fusions, which all layers share."""

    def __init__(self, block: nn.Module, read: nn.Module, write: nn.Module, memory_block: nn.Module, dim: int) -> None:
        super().__init__()
        self.read_norm = LayerNorm(dim, eps=1e-6)
        self.read = read
        self.block = block
        self.write_norm = LayerNorm(dim, eps=1e-6)
        self.write = write
        self.memory_block = memory_block

    def forward(
        self, memory: Tensor, process: Tensor, read_fusion: nn.Module, write_fusion: nn.Module, drop: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Update memory (B, N, C) and process tokens (B, M, C)."""
        memory, process = self.read_norm(memory), self.read_norm(process)
        process = self.block(read_fusion(drop(self.read(memory, process)), process))
        # Normed streams go on: as published, there is no residual around the norm.
        memory, process = self.write_norm(memory), self.write_norm(process)
        return self.memory_block(write_fusion(drop(self.write(process, memory)), memory)), process


class ViTTM(TwoStreamClassifier):
    """Vision Token Turing Machine. ``model(images)`` returns the logits of the memory's classifier.

    Parameters that the published code never uses do not exist here: `published_unused_params` counts them, and
    `checkpoint_filter_fn` drops them. Images may have any size that divides into both kinds of patches, except with
    token_learner heads and add_erase fusion, which are for one number of tokens.

    Args:
        process_patch_size, memory_patch_size: side of the patches of each stream, in pixels; they divide ``img_size``.
        global_pool: only ``avg``.
        read_write: a key of `HEADS`.
        fusion: a key of `FUSIONS`.
        latent_scale: C over the channels of queries and keys of the heads ("latent size scale").
        memory_mlp: an MLP on the memory in every layer.
        read_write_drop_path: stochastic depth of reads and writes (the published segmentation model).

    Example:
        >>> model = ViTTM(img_size=32, process_patch_size=8, memory_patch_size=4, embed_dim=32, depth=1, num_heads=2)
        >>> [stream.shape[1] for stream in model.forward_features(torch.zeros(2, 3, 32, 32))]
        [64, 16]
    """

    embed: StreamEmbed

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        process_patch_size: int = 28,
        memory_patch_size: int = 28,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        read_write: str = "linear",
        fusion: str = "add",
        latent_scale: float = 4,
        memory_mlp: bool = False,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        read_write_drop_path: float = 0.0,
    ) -> None:
        check_known("read/write head", read_write, HEADS)
        check_known("fusion", fusion, FUSIONS)
        super().__init__(img_size, in_chans, embed_dim, num_classes, global_pool, drop_rate)
        self.embed = StreamEmbed(self.img_size, process_patch_size, memory_patch_size, in_chans, embed_dim)
        memory, process = self.embed.num_tokens
        head, latent_dim = HEADS[read_write], int(embed_dim // latent_scale)
        self.fixed_length = head.fixed_length or FUSIONS[fusion].fixed_length
        self.read_fusion = FUSIONS[fusion](embed_dim, process)
        self.write_fusion = FUSIONS[fusion](embed_dim, memory)
        self.read_write_drop = DropPath(read_write_drop_path)
        drops = {"proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate}
        blocks = transformer_blocks(
            embed_dim, num_heads, depth, drop_path_rate, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, **drops
        )
        self.layers = nn.ModuleList(
            ViTTMLayer(
                block,
                head(embed_dim, num_heads, latent_dim, process),
                head(embed_dim, num_heads, latent_dim, memory),
                MemoryMlp(embed_dim) if memory_mlp else nn.Identity(),
                embed_dim,
            )
            for block in blocks
        )
        self.process_norm = LayerNorm(embed_dim, eps=1e-6)
        channels = 2 * embed_dim if self.embed.shared else embed_dim
        self.feature_info = [
            {"module": f"layers.{index}", "num_chs": channels, "reduction": process_patch_size}
            for index in range(depth)
        ]
        initialise(self.embed, self.layers, self.read_fusion, self.write_fusion)

    # ---- forward -----------------------------------------------------------------------------------------------------

    @property
    def shared_parts(self) -> tuple[nn.Module, ...]:
        """Both fusions and the drop path of reads and writes."""
        return self.read_fusion, self.write_fusion, self.read_write_drop

    def run_layer(self, layer: nn.Module, tokens: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """Run both streams through ``layer``; `VitrimError` if its parts are for other numbers of tokens."""
        given, made_for = (tokens.shape[1], auxiliary.shape[1]), self.embed.num_tokens
        if self.fixed_length and given != made_for:
            parts = "token_learner heads and add_erase fusion"
            raise VitrimError(f"{parts} are made for {made_for} memory and process tokens, got {given}")
        return super().run_layer(layer, tokens, auxiliary)

    def forward_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute memory (B, N, C) and normalised process tokens (B, M, C) of images (B, 3, H, W)."""
        memory, process = super().forward_features(x)
        return memory, self.process_norm(process)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Compute feature maps after some layers, for dense prediction and timm's ``features_only=True``, whose
        arguments it has.

        Where both streams have the same grid, a map has process and memory channels in that order (B, 2C, H', W'); else
        only the process stream (B, C, H', W'). ``norm`` applies the final LayerNorm to the process tokens of every map;
        the published code does not.
        """
        check_known("output format", output_fmt, ("NCHW", "NLC"))
        take, last = feature_take_indices(len(self.layers), indices)
        memory_grid, process_grid = (grid_of(x.shape[-2:], patch) for patch in self.embed.patch_sizes)
        memory, process = self.embed(x)
        maps: list[Tensor] = []
        for index, layer in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            memory, process = self.run_layer(layer, memory, process)
            if index in take:
                tokens = self.process_norm(process) if norm else process
                # The two streams lie on one grid if their patches are of one size: their channels are put side by side.
                maps.append(torch.cat((tokens, memory), -1) if memory_grid == process_grid else tokens)
        if output_fmt == "NCHW":
            maps = [tokens.transpose(1, 2).unflatten(2, process_grid).contiguous() for tokens in maps]
        return maps if intermediates_only else ((memory, self.process_norm(process)), maps)

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def published_unused_params(self) -> int:
        """Number of further parameters that the published code has and never uses.

        An output projection in every linear head; class token, position table and (unless the memory uses it) patch
        embedding of the ViT-*/16 that its model class inherits from.
        """
        dim, patch = self.embed_dim, PUBLISHED_PATCH
        heads = sum(isinstance(module, LinearHead) for module in self.modules())
        rows = 1 + (self.img_size[0] // patch) * (self.img_size[1] // patch)
        # The base class's embedding is used where the memory has its patch size.
        embed = 0 if self.embed.patch_sizes[0] == patch else (self.in_chans * patch * patch + 1) * dim
        return heads * (dim * dim + dim) + (1 + rows) * dim + embed


# ---- published checkpoints -------------------------------------------------------------------------------------------

_RENAMED = (
    (r"^(memory|process)_pos_embed", r"embed.\1_pos"),
    (r"^blocks\.(\d+)\.", r"layers.\1.block."),
    (r"^(read|write)_norm\.(\d+)\.", r"layers.\2.\1_norm."),
    (r"^(read|write)_head\.(\d+)\.norm_q\.", r"layers.\2.\1.q_norm."),
    (r"^(read|write)_head\.(\d+)\.mlp2\.", r"layers.\2.\1.q_mlp."),
    (r"^(read|write)_head\.(\d+)\.", r"layers.\2.\1."),
    (r"^mem_blocks\.(\d+)\.", r"layers.\1.memory_block."),
    (r"^fc_norm_process\.", "auxiliary_fc_norm."),
    (r"^process_head\.", "auxiliary_head."),
)
"""Rules from the authors' names to ours, applied in turn."""
_RENAMED_LATENT = (*_RENAMED, (r"\.(read|write)\.(norm|mlp)\.", r".\1.k_\2."))
"""The same for latent heads, whose parts of the keys have no letter in their names."""


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: ViTTM) -> dict[str, Tensor]:
    """Fit a checkpoint of the authors' code, or of this class, to ``model``.

    Renames weights, drops unused ones (`unused_names` lists them), joins keys and values and, for equal patch sizes,
    both patch embeddings, and resamples position tables. Unknown weights keep their names, so that loading reports
    them.
    """
    state = unwrapped(state_dict)
    if any(name.startswith("process_embedder.") for name in state):
        state = _renamed(state, model)
    for name, grid in zip(("embed.memory_pos", "embed.process_pos"), model.embed.grids, strict=True):
        fit_positions(state, name, grid)
    return state


def unused_names(state_dict: Mapping[str, Any], model: ViTTM) -> list[str]:
    """Names of the weights in an authors' checkpoint that their code never uses, in its order.

    Excludes the patch embedding that is stored under two names where memory uses the one of the code's base class.
    """
    state = unwrapped(state_dict)
    pattern = r"cls_token|pos_embed"
    if isinstance(model.layers[0].read, LinearHead):
        pattern += r"|(read|write)_head\.\d+\.proj\..*"
    own, memory = (state.get(f"{module}.proj.weight") for module in ("patch_embed", "memory_embedder"))
    if own is not None and memory is not None and own.shape != memory.shape:
        pattern += r"|patch_embed\..*"
    return [name for name in state if re.fullmatch(pattern, name)]


def _renamed(state: Mapping[str, Tensor], model: ViTTM) -> dict[str, Tensor]:
    unused = set(unused_names(state, model))
    rules = _RENAMED_LATENT if isinstance(model.layers[0].read, LatentHead) else _RENAMED
    out = renamed({name: value for name, value in state.items() if name not in unused}, rules)
    for head in {name.rpartition(".k.")[0] for name in out if ".k." in name}:
        join_keys_and_values(out, head)
    memory = "memory_embedder" if "memory_embedder.proj.weight" in out else "patch_embed"
    for kind in ("weight", "bias"):
        streams = out.pop(f"{memory}.proj.{kind}"), out.pop(f"process_embedder.proj.{kind}")
        tables = (torch.cat(streams),) if model.embed.shared else streams
        out.pop(f"patch_embed.proj.{kind}", None)  # the memory's, under a second name
        out |= {f"embed.patches.{index}.proj.{kind}": table for index, table in enumerate(tables)}
    return out


# ---- the models of the paper -----------------------------------------------------------------------------------------

NAMES = ("vittm_small_28_28", "vittm_base_28_28", "vittm_base_32_16")
_CFG = pretrained_cfg(fixed_input_size=False, classifier=("head", "auxiliary_head"))
default_cfgs = generate_default_cfgs(dict.fromkeys(NAMES, _CFG))


_create = partial(create, ViTTM, checkpoint_filter_fn, out_indices=1)


@register_model
def vittm_small_28_28(pretrained: bool = False, **kwargs: Any) -> ViTTM:
    """ViTTM-S(28,28): 64 process and 64 memory tokens at 224 px."""
    return _create("vittm_small_28_28", pretrained, kwargs, embed_dim=384, num_heads=6)


@register_model
def vittm_base_28_28(pretrained: bool = False, **kwargs: Any) -> ViTTM:
    """ViTTM-B(28,28): 64 process and 64 memory tokens at 224 px."""
    return _create("vittm_base_28_28", pretrained, kwargs)


@register_model
def vittm_base_32_16(pretrained: bool = False, **kwargs: Any) -> ViTTM:
    """ViTTM-B(32,16): 49 process and 196 memory tokens at 224 px."""
    return _create("vittm_base_32_16", pretrained, kwargs, process_patch_size=32, memory_patch_size=16)
