"""Code shared by the hosts of Hugging Face transformers: layers with q_proj, k_proj, v_proj, and the trunk around them.

A family's file says where a layer keeps its norms, attention and MLP, and which of its model classes own the layers.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrim.core.attention import Attention, KnownMap, split_heads
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.host import no_tokens
from vitrim.core.modules import class_of
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError, VitrimError, first_line
from vitrim.hosts.transformers.general import TransformersModel
from vitrim.hosts.transformers.hooks import HiddenHook, TrunkHook


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
    """Return whether a method leaves attention as it is: the map of the layer is then that of its output."""
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


class TransformersHost(TransformersModel):
    """A family of Hugging Face models. Subclasses name their classes and where the layers are."""

    trunk_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The classes that own patch embedding and layers; a task model holds one of them."""
    layers_name: ClassVar[str] = ""
    """Dotted name of a trunk's layers, e.g. ``encoder.layers``."""
    hook_class: ClassVar[type[TrunkHook]] = TrunkHook
    num_prefix: ClassVar[int] = 1
    has_class_token: ClassVar[bool] = True

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
            num_classes=sum(_outputs(layer) for layer in cls.find_classifiers(model)[:1]),
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
    def features_and_logits(cls, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        cls.classifiers(model)
        seen: list[Tensor] = []
        # a classifier's own output has no last hidden states, and `output_hidden_states` asks for full grids
        hook = cls.trunk(model).register_forward_hook(lambda trunk, args, output: seen.append(output[0]))
        try:
            logits = cls.logits(model(images))
        finally:
            hook.remove()
        return seen[0], logits

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        trunk = cls.trunk(model)  # of an AutoBackbone the maps are full grids anyway
        return trunk is model and cls.head_rows(model) is None and not hasattr(trunk, "forward_with_filtered_kwargs")

    @classmethod
    def without_head(cls, model: nn.Module) -> nn.Module:
        trunk = cls.trunk(model)
        if hasattr(trunk, "forward_with_filtered_kwargs"):  # an AutoBackbone: maps of some layers
            raise no_tokens(trunk)
        return trunk  # type: ignore[no-any-return]

    @classmethod
    def tokens(cls, model: Any, images: Tensor) -> Tensor:
        size = images.shape[2], images.shape[3]
        resized = size != cls.image_size(model.config) and "interpolate_pos_encoding" in _arguments(model.__class__)
        options = {"interpolate_pos_encoding": True} if resized else {}
        try:
            return model(images, **options).last_hidden_state  # type: ignore[no-any-return]
        except ValueError as error:
            raise VitrimError(f"{type(model).__name__} does not take these images: {first_line(error)}") from error

    @classmethod
    def set_fused(cls, model: nn.Module, fused: bool) -> bool:
        cls.trunk(model).config._attn_implementation = "sdpa" if fused else "eager"
        return True

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


@cache
def _arguments(kind: Any) -> frozenset[str]:
    """The names of the arguments of the forward of a class."""
    return frozenset(inspect.signature(kind.forward).parameters)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else 0
