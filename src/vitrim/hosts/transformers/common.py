"""Code shared by the hosts of Hugging Face transformers: reduced layers, and the module around them.

A family's file says where a layer keeps its norms, attention and MLP, and which of its model classes own the layers."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from vitrim.core.attention import Attention, KnownMap, split_heads
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.host import Host
from vitrim.core.modules import class_of
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import STAMP, TokenState, unmerge
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError

CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
"""Names of the last layers of the library's image classifiers."""


class ReducedLayer(ReducedBlock):
    """The reduced form of an encoder layer. A family names its attention and its first norm, and writes two branches.

    Attention, norms and projections are called as modules, so adapters and hooks on them keep working.
    """

    attention_class: ClassVar[type[nn.Module]]
    """The host's own attention class; with another one the layer is refused."""
    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")
    scale_name: ClassVar[str] = "scaling"
    head_dim_name: ClassVar[str] = "head_dim"
    dropout_name: ClassVar[str] = "attention_dropout"

    @property
    def attn(self) -> Any:
        """The module that has the `projections`."""
        raise NotImplementedError

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [cls.attn.fget(block)]  # type: ignore[attr-defined]

    def pre_norm(self, x: Tensor) -> Tensor:
        """The norm before attention, (B, N, C)."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        refuse_mask(attention_mask)
        return self.run(hidden_states)

    def run(self, x: Tensor, *host_args: Any) -> Tensor:
        out = super().run(x, *host_args)
        if self.trace.maps:
            found = self.trace.take_map()
            for hook in tuple(self.attn._forward_hooks.values()):  # those by which the library collects maps
                if found is not None and getattr(hook, "__module__", "").startswith("transformers."):
                    hook(self.attn, (), (None, found))
        return out

    def map_for_host(self, found: Tensor) -> Tensor:
        """The attention map (B, H, M, N) as it is handed out."""
        return found

    def map_from_host(self, handed: Tensor) -> Tensor:
        """Undo `map_for_host`."""
        return handed

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attention = self.projected(x, state, rows, *host_args)
        if self.trace.maps and attends_plainly(self.reducer):
            handed = self.map_for_host(attention.probabilities().to(attention.q.dtype))
            self.trace.note_map(handed)  # the output is made of it: gradients reach it
            return KnownMap(**attention.parts(), known=self.map_from_host(handed))
        if self.trace.maps:
            # whatever a method makes of attention, over identity values it gives the map; a block that projects anew
            # attends by its last
            n = attention.k.shape[2]
            identity = torch.eye(n, dtype=attention.q.dtype, device=x.device).expand(*attention.k.shape[:2], n, n)
            over_identity = self.reducer.prepare(replace(attention, v=identity, dropout=0.0, drop=None), state)
            self.trace.note_map(self.map_for_host(self.reducer.attend(over_identity, state)))
        return attention

    def projected(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        """See `ReducedBlock.project`."""
        attn, y = self.attn, self.pre_norm(x)
        q_proj, k_proj, v_proj = (getattr(attn, name) for name in self.projections)
        q = self.split_heads(q_proj(y if rows is None else y[:, :rows]))
        return Attention(
            q=q,
            k=self.split_heads(k_proj(y)),
            v=None if self.reducer.fresh_values and rows is None else self.split_heads(v_proj(y)),
            scale=getattr(attn, self.scale_name),
            bias=state.key_bias(q.dtype, self.proportional),
            dropout=getattr(attn, self.dropout_name) if attn.training else 0.0,
            fused=attn.config._attn_implementation != "eager",
        )

    def values(self, x: Tensor) -> Tensor:
        return self.split_heads(getattr(self.attn, self.projections[2])(self.pre_norm(x)))

    def split_heads(self, projected: Tensor) -> Tensor:
        """(B, N, H*d) to (B, H, N, d), for as many heads as there are."""
        return split_heads(projected, projected.shape[-1] // getattr(self.attn, self.head_dim_name))


def attends_plainly(reducer: Reducer[Any]) -> bool:
    """True if a method leaves attention as it is: the map of the layer is then that of its output."""
    own = type(reducer)
    return all(
        getattr(own, name) is getattr(Reducer, name) for name in ("prepare", "attend", "query", "attend_reduced")
    )


class ReducedPlainLayer(ReducedLayer):
    """The reduced form of layers that name their parts as ViT's do."""

    attention: Any
    layernorm_before: Any
    layernorm_after: Any
    dropout: Any
    mlp: Any

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.dropout(self.attn.o_proj(out))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(self.layernorm_after(x)))  # type: ignore[no-any-return]


class ReducedClipLayer(ReducedLayer):
    """The reduced form of layers that name their parts as CLIP's do; the SigLIP towers have the same layer."""

    scale_name = "scale"
    dropout_name = "dropout"

    self_attn: Any
    layer_norm1: Any
    layer_norm2: Any
    mlp: Any

    @property
    def attn(self) -> Any:
        return self.self_attn

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layer_norm1(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attn.out_proj(out)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class ReducedDinoLayer(ReducedLayer):
    """The reduced form of layers that name their parts as DINOv2's do: LayerScale, and one drop path used twice."""

    attention: Any
    norm1: Any
    norm2: Any
    layer_scale1: Any
    layer_scale2: Any
    drop_path: Any
    mlp: Any

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path(self.layer_scale1(self.attn.o_proj(out)))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


def refuse_mask(attention_mask: Tensor | None) -> None:
    """Refuse a mask: it is made for all N0 tokens.

    Under export and compilation the library makes one that masks nothing, for models that were given none; a mask
    of the user's own is refused by `TrunkHook`.
    """
    if attention_mask is not None and not torch.compiler.is_compiling():
        raise ValueError(
            "a reduced model takes no attention_mask: a mask for the full sequence has no meaning once tokens are "
            "gone; call it without, or vitrim.restore_(model) first"
        )


class ReducedOlderLayer(ReducedLayer):
    """A layer of the library's older form: ``attention.attention`` projects, ``attention.output`` projects back."""

    projections = ("query", "key", "value")
    head_dim_name = "attention_head_size"
    dropout_name = "dropout_prob"

    attention: Any
    intermediate: Any
    output: Any
    layernorm_before: Any
    layernorm_after: Any

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.attention, block.attention.attention, block.output]  # the last adds what it is given

    @property
    def attn(self) -> Any:
        return self.attention.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attention.output(out, None)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(self.layernorm_after(x))
        return self.output.dropout(self.output.dense(hidden))  # type: ignore[no-any-return]


class PackedLayer(ReducedLayer):
    """A layer that is told how many images its sequence has, and gives them on as the second host argument."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # outside of what gradient checkpointing repeats: by then the trace may hold another forward's images
        table = self.trace.table
        images = 1 if table is None else table.shape[0]
        return super().__call__(hidden_states, *args, images=images, **kwargs)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        mask_or_lengths: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        images: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        return self.run(hidden_states, position_embeddings, images)


def hand_stamp(source: Tensor, target: Tensor) -> None:
    """Let the state that is stamped on ``source`` go on with ``target``, the same tokens in another shape."""
    if hasattr(source, STAMP):
        setattr(target, STAMP, getattr(source, STAMP))


logger = logging.get_logger(__name__)


class TrunkHook:
    """Hook that runs before the forward of the module that owns the layers and decides what this forward hands out.

    With ``output_hidden_states``, and always in an ``AutoBackbone`` whose feature maps are hidden states: full grids,
    un-merged after every layer. With ``output_attentions``: the map of every layer over the tokens it has, as in the
    dense model where attention is eager only. Masks over the full sequence are refused. A hook and not a forward of its
    own, because export and trainers read the signature of ``model.forward``. An object and not a function, so that the
    model can still be copied and pickled.
    """

    def __init__(self, trace: Trace, positional: tuple[str, ...], pools: bool) -> None:
        self.trace = trace
        self.positional = positional  # names of the trunk's arguments, in order: a mask may be given by its place
        self.pools = pools  # a head reads all tokens, and is to read the same ones whatever is handed out beside

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        maps = _wanted("output_attentions", trunk, kwargs)
        if maps and trunk.config._attn_implementation != "eager":
            logger.warning_once(  # in the words of the library, whose own attention does not run here
                f"`{trunk.config._attn_implementation}` attention does not support `output_attentions=True`. Please "
                "set your attention to `eager` if you want any of these features."
            )
            maps = False
        self.trace.hand_out_maps(maps)
        for name in ("attention_mask", "bool_masked_pos"):
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"a reduced model takes no {name}; vitrim.restore_(model) first")
        is_backbone = hasattr(trunk, "forward_with_filtered_kwargs")
        hidden = _wanted("output_hidden_states", trunk, kwargs) and not self.trace.compact
        self.trace.next_dense(is_backbone or hidden, spare_last=self.pools and not is_backbone)


class HiddenHook:
    """Hook that runs after the forward of such a module and lays the last hidden state out on the full grid.

    Where a head reads all tokens, the last block hands out what it does without hidden states (`TrunkHook`): a mean
    over patches, or a probe's attention, must not read the zeros of pruned ones.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __call__(self, trunk: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.trace.spares_last:
            return None
        if not isinstance(output, tuple):
            output.hidden_states = self.spread(output.hidden_states)
            return output
        # attention maps have four axes
        return tuple(
            self.spread(part) if isinstance(part, tuple) and any(x is not None and x.dim() == 3 for x in part) else part
            for part in output
        )

    def spread(self, hidden: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The hidden states with the last one un-merged, if it is there and has not all tokens."""
        last, state = hidden[-1], self.trace.final
        if last is None or state is None or last.shape[1] == state.num_inputs:
            return hidden
        return (*hidden[:-1], unmerge(last, state))


class NoMapsHook(TrunkHook):
    """`TrunkHook` that refuses attention maps, of models that lay out tokens otherwise than by image."""

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__call__(trunk, args, kwargs)
        if self.trace.maps or {**dict(zip(self.positional, args, strict=False)), **kwargs}.get("output_attentions"):
            self.trace.hand_out_maps(False)
            raise UnsupportedModelError(
                f"a reduced {type(trunk).__name__} hands out no attention maps; vitrim.restore_(model) first"
            )


def _wanted(name: str, trunk: Any, kwargs: dict[str, Any]) -> bool:
    value = kwargs.get(name)
    if value is None:
        value = getattr(trunk.config, name, None)
    return value is not None and value is not False  # a list of layers is a wish, too


class TransformersHost(Host):
    """A family of Hugging Face models. Subclasses name their classes and where the layers are."""

    trunk_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The classes that own patch embedding and layers; a task model holds one of them."""
    layers_name: ClassVar[str] = ""
    """Dotted name of a trunk's layers, e.g. ``encoder.layers``."""
    hook_class: ClassVar[type[TrunkHook]] = TrunkHook
    num_prefix: ClassVar[int] = 1
    has_class_token: ClassVar[bool] = True
    tokens_of_images: ClassVar[bool] = True
    """The trunk makes tokens (B, N, C) of images (B, C, H, W); False: of something else, or it hands out maps."""
    chooses_kernel: ClassVar[bool] = True
    """The config says whether attention runs fused."""

    @classmethod
    def trunk(cls, model: nn.Module) -> Any:
        """The module in ``model`` that owns the layers."""
        level = [model]
        while level:  # level by level: asked in every forward, and a text tower in front may be deep
            for module in level:
                if isinstance(module, cls.trunk_classes):
                    return module
            level = [child for module in level for child in module.children()]
        raise UnsupportedModelError(f"there is no {cls.trunk_classes[0].__name__} in this {type(model).__name__}")

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        """See `HostFacts.head_rows`. None for models that average patches or hand out their last hidden states."""
        return None

    @classmethod
    def check(cls, model: nn.Module) -> None:
        trunk = cls.trunk(model)
        if all(type(trunk).forward is not known.forward for known in cls.trunk_classes):
            raise UnsupportedModelError(
                f"{type(trunk).__name__} overrides the forward of {cls.trunk_classes[0].__name__}, so vitrim cannot "
                "know what it does with its tokens"
            )
        for block in cls.blocks(model):
            reduced = cls.reduced_class(block)
            assert issubclass(reduced, ReducedLayer)
            attn = reduced.attn.fget(block)  # type: ignore[attr-defined]
            if class_of(attn) is not reduced.attention_class:
                raise UnsupportedModelError(
                    f"{cls.name} with attention of class {type(attn).__name__} is not supported; supported: "
                    f"{reduced.attention_class.__name__}"
                )

    @classmethod
    def blocks(cls, model: nn.Module) -> list[nn.Module]:
        return list(cls.trunk(model).get_submodule(cls.layers_name))

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        trunk = cls.trunk(model)
        config = trunk.config
        height, width = cls.image_size(config)
        patch_height, patch_width = _pair(config.patch_size)
        return HostFacts(
            dim=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_classes=sum(_outputs(layer) for layer in classifiers(model)[:1]),
            num_prefix=cls.prefix_of(trunk),
            has_class_token=cls.has_class_token,
            grid_size=(height // patch_height, width // patch_width),
            # a forward of the user's own may read any token
            head_rows=cls.head_rows(model) if type(model).forward.__module__.startswith("transformers.") else None,
            input_size=(getattr(config, "num_channels", 3), height, width),
        )

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        """The convolution that makes the patches, whatever the family calls it."""
        embeddings = cls.trunk(model).embeddings
        maker = getattr(embeddings, "patch_embeddings", None) or getattr(embeddings, "patch_embedding", None)
        return getattr(maker, "projection", maker)

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        """Height and width of the images the model takes."""
        return _pair(config.image_size)

    @classmethod
    def prefix_of(cls, trunk: Any) -> int:
        """Tokens in front of the patches; registers, where a family has them, are in the config."""
        return cls.num_prefix + int(getattr(trunk.config, "num_register_tokens", 0))

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        trunk = cls.trunk(model)  # of an AutoBackbone the maps are full grids anyway
        return trunk is model and cls.head_rows(model) is None and not hasattr(trunk, "forward_with_filtered_kwargs")

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        trunk = cls.trunk(model)
        positional = tuple(inspect.signature(type(trunk).forward).parameters)[1:]
        facts = cls.facts(model)
        pools = facts.averages_patches and not facts.dense
        trunk.vitrim_hook = trunk.register_forward_pre_hook(cls.hook_class(trace, positional, pools), with_kwargs=True)
        trunk.vitrim_hidden_hook = trunk.register_forward_hook(HiddenHook(trace))

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        trunk = cls.trunk(model)
        trunk.vitrim_hook.remove()
        trunk.vitrim_hidden_hook.remove()
        del trunk.vitrim_hook, trunk.vitrim_hidden_hook


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The last layers of one of the library's image classifiers; none of another model."""
    return [getattr(model, name) for name in CLASSIFIERS if hasattr(model, name)]


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else 0
