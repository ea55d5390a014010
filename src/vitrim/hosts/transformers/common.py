"""Code shared by the hosts of Hugging Face transformers: reduced layers, and hooks on the module around them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from vitrim.core.attention import Attention, KnownMap, split_heads
from vitrim.core.block import Installed, Reducer, foreign, replaced
from vitrim.core.host import GridHook, Host
from vitrim.core.method import Needs
from vitrim.core.plan import Head, HostFacts
from vitrim.core.tokens import Asked, Call, TokenState, Trace, unmerge
from vitrim.core.versions import constant, require
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import JointBlock, NamedBlock, check_attentions, with_form

USUAL_SIDE = 32
"""Side in patches, 448 pixels, of images for models that have no size of their own."""

READ = ("output_attentions", "output_hidden_states", "return_dict")
"""Arguments that decorators of the library read; a forward passes on to attention what neither it nor they know."""

CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
"""Names of the last layers of image classifiers."""


@dataclass(eq=False)
class LayerCall(Call):
    """A forward of the library.

    Attributes:
        maps, map: it returns attention maps; that of the running block.
        passed: arguments that the library passes on to a user's attention function.
    """

    maps: bool = False
    map: Tensor | None = None
    passed: Mapping[str, Any] = field(default_factory=dict)


class ReducedLayer(NamedBlock):
    """The reduced form of an encoder layer, with ViT's names; other families set their own."""

    call_class: ClassVar[type[Call]] = LayerCall
    trace: Any
    attention_name = "attention"
    norm_name = "layernorm_before"
    output_names: ClassVar[tuple[str, ...]] = ("o_proj",)
    update_names: ClassVar[tuple[str, ...]] = ("dropout",)
    mlp_names: ClassVar[tuple[str, ...]] = ("layernorm_after", "mlp", "dropout")
    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")
    norms_heads: ClassVar[bool] = False
    """Queries and keys have norms over all heads, ``q_norm`` and ``k_norm``."""
    scale_name: ClassVar[str] = "scaling"
    head_dim_name: ClassVar[str] = "head_dim"
    dropout_name: ClassVar[str] = "attention_dropout"

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        refuse_mask(attention_mask)
        return self.run(hidden_states)

    def run(self, x: Tensor, given: Any = None) -> Tensor:
        out = super().run(x, given)
        if self.trace.call.maps:
            # The attention module is bypassed, so the library's hooks on it are called here.
            (attn,), found = self.attentions(self), self.trace.call.map
            self.trace.call.map = None
            for hook in tuple(attn._forward_hooks.values()):  # the library's, which collect maps
                if found is not None and getattr(hook, "__module__", "").startswith("transformers."):
                    hook(attn, (), (None, found))
        return out

    def map_for_host(self, found: Tensor) -> Tensor:
        """The attention map (B, H, M, N) in the host's order of tokens."""
        return found

    def map_from_host(self, host_map: Tensor) -> Tensor:
        """Undo `map_for_host`."""
        return host_map

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attention = self.projected(x, state, rows, given)
        if not self.trace.call.maps:
            return attention
        if all(
            getattr(type(self.reducer), name) is getattr(Reducer, name)
            for name in ("prepare", "attend", "query", "attend_reduced")
        ):  # the method leaves attention as it is: compute the output from the map
            host_map = self.map_for_host(attention.probabilities().to(attention.q.dtype))
            self.trace.call.map = host_map  # the output is computed from it, so gradients reach it
            return KnownMap(**attention.parts(), known=self.map_from_host(host_map))
        # attention over identity values gives the map, however a method changes attention; a block that projects
        # again attends with its last projection
        n = attention.k.shape[2]
        identity = torch.eye(n, dtype=attention.q.dtype, device=x.device).expand(*attention.k.shape[:2], n, n)
        over_identity = self.reducer.prepare(replace(attention, v=identity, dropout=0.0, drop=None), state)
        self.trace.call.map = self.map_for_host(self.reducer.attend(over_identity, state))
        return attention

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        (attn,) = self.attentions(self)
        q, k, v = self.queries_keys_values(attn, self.pre_norm(x), rows)
        bias = state.key_bias(q.dtype, self.proportional)
        return Attention(q=q, k=k, v=v, scale=getattr(attn, self.scale_name), bias=bias, **self.kernel(attn))

    def queries_keys_values(self, attn: Any, y: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values (B, H, N, d) of normed tokens ``y`` (B, N, C); see `ReducedBlock.project`."""
        q_proj, k_proj, v_proj = (getattr(attn, name) for name in self.projections)
        q, k = q_proj(y if rows is None else y[:, :rows]), k_proj(y)
        if self.norms_heads:
            q, k = attn.q_norm(q), attn.k_norm(k)
        v = None if self.reducer.fresh_values and rows is None else self.split_heads(attn, v_proj(y))
        return self.split_heads(attn, q), self.split_heads(attn, k), v

    def kernel(self, attn: Any) -> dict[str, Any]:
        """The kernel of attention: its dropout, and whether fused; or the user's own function."""
        name = attn.config._attn_implementation
        dropout = getattr(attn, self.dropout_name) if attn.training else 0.0
        if not calls_own(type(attn), name):
            return {"dropout": dropout, "fused": name != "eager"}
        given = {**self.trace.call.passed, "scaling": getattr(attn, self.scale_name), "dropout": dropout}
        if hasattr(attn, "is_causal"):
            given["is_causal"] = attn.is_causal
        return {"dropout": dropout, "own": partial(_call_own, _function(type(attn), name), attn, given)}

    def values(self, x: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        return self.split_heads(attn, getattr(attn, self.projections[2])(self.pre_norm(x)))

    def split_heads(self, attn: Any, projected: Tensor) -> Tensor:
        # A projection has as many heads as widths of a head fit into it: fewer for grouped keys and values.
        return split_heads(projected, projected.shape[-1] // getattr(attn, self.head_dim_name))


def _function(kind: type, name: str | None) -> Any:
    """The function that attention of class ``kind`` calls under the ``name`` of an implementation, as the library does.

    It is from the library's ``AttentionInterface`` or, for "eager", from the module of the class.
    """
    module = sys.modules[kind.__module__]
    functions = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
    return None if functions is None else functions.get(name, getattr(module, "eager_attention_forward", None))


@constant  # a compiler evaluates it once
def calls_own(kind: type, name: str | None) -> bool:
    """True if that function is a user's: registered with ``AttentionInterface``, or put in place of the library's.

    Kernels from the library's hub, "owner/kernel", are not: their attention is the same for all.
    """
    function = None if name is not None and "/" in name else _function(kind, name)
    return function is not None and foreign(function, "transformers") is not None


def _call_own(
    function: Callable[..., Any], attn: nn.Module, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, bias: Any
) -> Tensor:
    """The output (B, H, M, d) of a user's ``function``, called as the library does; the bias is its mask."""
    # A user's function expects a row per query.
    mask = None if bias is None else bias.expand(-1, -1, q.shape[2], -1)
    out: Tensor = function(attn, q, k, v, mask, **given)[0]
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


class ReducedJointLayer(JointBlock, ReducedLayer):
    """The reduced form of layers with one projection ``qkv``."""

    def queries_keys_values(self, attn: Any, y: Tensor, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.project_qkv(attn, y, rows)


class ReducedClipLayer(ReducedLayer):
    """The reduced form of layers with CLIP's names, such as SigLIP's."""

    attention_name = "self_attn"
    norm_name = "layer_norm1"
    output_names = ("out_proj",)
    update_names = ()
    mlp_names = ("layer_norm2", "mlp")
    scale_name = "scale"
    dropout_name = "dropout"


class ReducedDinoLayer(ReducedLayer):
    """The reduced form of layers with DINOv2's names: LayerScale, and one drop path used twice."""

    norm_name = "norm1"
    update_names: ClassVar[tuple[str, ...]] = ("layer_scale1", "drop_path")
    mlp_names = ("norm2", "mlp", "layer_scale2", "drop_path")


def refuse_mask(attention_mask: Tensor | None) -> None:
    """Refuse a mask over all N0 tokens.

    Under export and compilation the library makes one that masks nothing; `TrunkHook` refuses a user's own.
    """
    if attention_mask is not None and not torch.compiler.is_compiling():
        raise ValueError(
            "a reduced model takes no attention_mask: a mask for the full sequence has no meaning once tokens are "
            "gone; call it without, or vitrim.restore_(model) first"
        )


class ReducedNestedLayer(ReducedLayer):
    """The older form of attention: ``attention.attention`` projects in, ``attention.output`` projects out."""

    update_names: ClassVar[tuple[str, ...]] = ()
    projections = ("query", "key", "value")
    head_dim_name = "attention_head_size"
    dropout_name = "dropout_prob"

    attention: Any

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        return [block.attention.attention]

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.attention, block.attention.attention]

    def project_output(self, out: Tensor) -> Tensor:
        return self.attention.output(out, None)  # type: ignore[no-any-return]


class ReducedOlderLayer(ReducedNestedLayer):
    """The older form of a layer, whose MLP is no module either: ``intermediate``, then ``output``."""

    intermediate: Any
    output: Any
    layernorm_after: Any

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        return [block.attention, block.attention.attention, block.output]  # the last adds its second argument

    def mlp_branch(self, x: Tensor) -> Tensor:
        hidden = self.intermediate(self.layernorm_after(x))
        return self.output.dropout(self.output.dense(hidden))  # type: ignore[no-any-return]


logger = logging.get_logger(__name__)


@dataclass(eq=False, repr=False)
class TrunkHook(Installed):
    """Runs before the forward of the module that owns the layers, and decides what this forward returns.

    With ``output_hidden_states``, and always in an ``AutoBackbone`` whose feature maps are hidden states: full grids,
    un-merged after every layer. With ``output_attentions``: each layer's map over its own tokens, which needs eager
    attention. Refuses masks over the full sequence, and inputs that the family refuses. A hook, and not a new forward,
    because export and trainers read the signature of ``model.forward``.
    """

    host: type[TransformersHost]
    trace: Any
    positional: tuple[str, ...]  # names of the trunk's arguments, in order: a mask may be a positional one
    pools: bool  # a head reads all tokens, and must read the same ones whatever else is returned

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self.positional, args)), **kwargs}  # noqa: B905 - torch.compile of 2.9 takes strict for true
        maps = _wanted("output_attentions", trunk, given)
        if maps and trunk.config._attn_implementation != "eager" and not self.host.own_attention(trunk):
            logger.warning_once(  # the library's own warning, whose attention does not run here
                f"`{trunk.config._attn_implementation}` attention does not support `output_attentions=True`. Please "
                "set your attention to `eager` if you want any of these features."
            )
            maps = False
        call = self.trace.call
        call.maps = maps
        call.passed = {name: value for name, value in given.items() if name not in (*self.positional, *READ)}
        for name in ("attention_mask", "bool_masked_pos"):
            if given.get(name) is not None:
                raise UnsupportedModelError(f"a reduced model takes no {name}; vitrim.restore_(model) first")
        is_backbone = hasattr(trunk, "forward_with_filtered_kwargs")
        hidden = _wanted("output_hidden_states", trunk, given) and not call.asked.compact
        # Features and hidden states are read as full grids, with one number of rows in all layers.
        call.once = Asked(is_backbone or hidden, spares_last=hidden and self.pools and not is_backbone)
        if not self.host.has_maps and (maps or given.get("output_attentions")):
            call.maps = False
            raise UnsupportedModelError(
                f"a reduced {type(trunk).__name__} hands out no attention maps; vitrim.restore_(model) first"
            )
        self.host.check_inputs(trunk, given)


@dataclass(eq=False, repr=False)
class HiddenHook(Installed):
    """Runs after the trunk's forward, and lays the last hidden state out on the full grid.

    If a head reads all tokens, the last block returns the same as without hidden states (`TrunkHook`): a mean over
    patches or an attention pooling must not read the zeros of pruned ones.
    """

    trace: Any

    def __call__(self, trunk: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state = self.trace.call.final
        if state is None or not state.asked.spares_last:
            return None
        if not isinstance(output, tuple):
            if output.hidden_states is None:  # the model around the trunk collects them
                require(
                    "transformers", "5.6", f"hidden states of a reduced {type(trunk).__name__}", UnsupportedModelError
                )
            output.hidden_states = spread(output.hidden_states, state)
            return output
        # attention maps have four axes
        return tuple(
            spread(x, state) if isinstance(x, tuple) and any(each is not None and each.dim() == 3 for each in x) else x
            for x in output
        )


def spread(hidden: tuple[Tensor | None, ...], state: TokenState) -> tuple[Tensor | None, ...]:
    """The ``hidden`` states with the last one un-merged by ``state``, if it exists and is reduced."""
    last = hidden[-1]
    return hidden if last is None or last.shape[1] == state.num_inputs else (*hidden[:-1], unmerge(last, state))


def _wanted(name: str, trunk: Any, given: Mapping[str, Any]) -> bool:
    value = given.get(name)
    if value is None:
        value = getattr(trunk.config, name, None)
    return value is not None and value is not False  # a list of layers is one, too


class TransformersHost(Host):
    """A family of Hugging Face models. Subclasses name their classes and layers."""

    trunk_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The classes that own patch embedding and layers; a task model contains one of them."""
    layers_name: ClassVar[str] = "encoder.layer"
    """Dotted name of the layers in a trunk."""
    maker_name: ClassVar[str | None] = ""
    """Dotted name of the `patch_maker` in a trunk; "": the convolution in its embeddings; None: there is none."""
    counter_name: ClassVar[str | None] = None
    """Dotted name of the convolution whose output counts the patches where there is no `patch_maker`."""
    size_names: ClassVar[tuple[str, ...]] = ("image_size",)
    """The config's names of an image's height and width; one name for both."""
    width_name: ClassVar[str] = "hidden_size"
    """The config's name of C."""
    heads_name: ClassVar[str] = "num_attention_heads"
    """The config's name of H."""
    channels_name: ClassVar[str] = "num_channels"
    """The config's name of an image's channels; 3 without."""
    any_size: ClassVar[bool] = False
    """`HostFacts.any_size`."""
    num_prefix: ClassVar[int] = 1
    """Tokens in front of the patches, without registers; the first is a class token."""
    prefix_readers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Models whose head reads only the prefix. Others average patches, or return their last hidden states."""
    grid_readers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Models in which something reads every patch at its place (`HostFacts.dense`). If "grid" is the only kind of
    head, all models do."""
    pools: ClassVar[bool] = True
    """Heads that read all tokens take a mean, or attend: they must not read the zeros of pruned patches."""
    has_maps: ClassVar[bool] = True
    """Attention maps can be returned; False if batch rows of tokens are not images."""
    tokens_of_images: ClassVar[bool] = True
    """The trunk turns images (B, C, H, W) into tokens (B, N, C); False: it takes something else, or returns maps."""
    chooses_kernel: ClassVar[bool] = True
    """The config says whether attention runs fused."""
    forward_class: ClassVar[type[Any] | None] = None
    """The class, constructed from trunk and trace, that replaces a trunk's forward."""

    @classmethod
    def trunk(cls, model: nn.Module) -> Any:
        """The module in ``model`` that owns the layers."""
        level = [model]
        while level:  # level by level: runs in every forward, and a text tower in front may be deep
            for module in level:
                if isinstance(module, cls.trunk_classes):
                    return module
            level = [child for module in level for child in module.children()]
        raise UnsupportedModelError(f"there is no {cls.trunk_classes[0].__name__} in this {type(model).__name__}")

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return cls.prefix_of(cls.trunk(model)) if isinstance(model, cls.prefix_readers) else None

    @classmethod
    def check(cls, model: nn.Module) -> None:
        trunk = cls.trunk(model)
        overridden = all(type(trunk).forward is not known.forward for known in cls.trunk_classes)
        if overridden or replaced(type(trunk)) is not None:
            raise UnsupportedModelError(
                f"{type(trunk).__name__} overrides the forward of {cls.trunk_classes[0].__name__}, so vitrim cannot "
                "know what it does with its tokens"
            )
        check_attentions(cls, model)

    @classmethod
    def check_inputs(cls, trunk: Any, given: Mapping[str, Any]) -> None:
        """Refuse inputs of a reduced ``trunk``'s forward that the family cannot handle."""

    @classmethod
    def blocks(cls, model: nn.Module) -> list[nn.Module]:
        return list(cls.trunk(model).get_submodule(cls.layers_name))

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        trunk = cls.trunk(model)
        config = trunk.config
        height, width = cls.image_size(config)
        patch_height, patch_width = _pair(config.patch_size)
        # Several classifiers of one model, as of DeiT, have the same classes.
        first = next(iter(classifiers(model)), None)
        return HostFacts(
            dim=getattr(config, cls.width_name),
            num_heads=getattr(config, cls.heads_name),
            num_classes=first.out_features if isinstance(first, nn.Linear) else 0,
            num_prefix=cls.prefix_of(trunk),
            has_class_token=cls.num_prefix > 0,
            grid_size=(height // patch_height, width // patch_width),
            # a user's own forward may read any token
            head_rows=cls.head_rows(model) if type(model).forward.__module__.startswith("transformers.") else None,
            input_size=(getattr(config, cls.channels_name, 3), height, width),
            dense=cls.heads == ("grid",) or isinstance(model, cls.grid_readers),
            own_attention=cls.own_attention(model),
            any_size=cls.any_size,
        )

    @classmethod
    def own_attention(cls, model: nn.Module) -> bool:
        """True if a function of the user's computes the attention of ``model``."""
        block, form = with_form(cls, cls.blocks(model)[0])
        if not issubclass(form, ReducedLayer):
            return False
        (attn,) = form.attentions(block)
        return calls_own(type(attn), getattr(getattr(attn, "config", None), "_attn_implementation", None))

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        if cls.maker_name is None:
            return None
        trunk = cls.trunk(model)
        if cls.maker_name:
            return trunk.get_submodule(cls.maker_name)  # type: ignore[no-any-return]
        maker: nn.Module
        for name, maker in trunk.embeddings.named_modules():  # a user's embeddings may hold the library's
            if name.rpartition(".")[2] in ("patch_embeddings", "patch_embedding"):
                return getattr(maker, "projection", maker)
        return None

    @classmethod
    def patches_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> int | None:
        if isinstance(output, Tensor) and output.dim() > 4:  # frames, rows, columns
            return prod(output.shape[2:])
        return super().patches_of(maker, args, output)

    @classmethod
    def image_size(cls, config: Any) -> tuple[int, int]:
        """Height and width of the images."""
        sizes = [getattr(config, name) for name in cls.size_names]
        return _pair(sizes if len(sizes) == 2 else sizes[0])

    @classmethod
    def prefix_of(cls, trunk: Any) -> int:
        """Tokens in front of the patches, with the config's registers; also a user's prompts, if counted there."""
        return cls.num_prefix + int(getattr(trunk.config, "num_register_tokens", 0))

    @classmethod
    def hands_out_tokens(cls, model: nn.Module) -> bool:
        trunk = cls.trunk(model)  # an AutoBackbone's maps are full grids anyway
        return trunk is model and cls.head_rows(model) is None and not hasattr(trunk, "forward_with_filtered_kwargs")

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        trunk = cls.trunk(model)
        positional = tuple(inspect.signature(type(trunk).forward).parameters)[1:]
        facts = cls.facts(model)
        # A mean over patches must not read the zeros of pruned ones when hidden states are asked for.
        hook = TrunkHook(cls, trace, positional, cls.pools and facts.averages_patches and not facts.dense)
        trunk.register_forward_pre_hook(hook, with_kwargs=True)
        trunk.register_forward_hook(HiddenHook(trace))
        if cls.counter_name is not None:
            trunk.get_submodule(cls.counter_name).register_forward_hook(GridHook(cls, trace, Needs()))
        if cls.forward_class is not None:
            trunk.forward = cls.forward_class(trunk, trace)


class ClassTokenTower(TransformersHost):
    """A tower with a class token, which image embeddings read; the bare tower returns its tokens."""

    purpose = "images and text"
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches")
    layers_name = "encoder.layers"


class PatchTower(TransformersHost):
    """A tower without a class token."""

    purpose = "images and text"
    heads: ClassVar[tuple[Head, ...]] = ("no class token",)
    num_prefix = 0
    layers_name = "encoder.layers"


class ConnectedTower(TransformersHost):
    """A tower whose connector joins neighbouring tokens, so it reads every patch at its place."""

    purpose = "vision-language models"
    heads = ("grid",)


class DenseBackbone(TransformersHost):
    """A model whose maps are read place by place, so pruned patches come back."""

    purpose = "segmentation, detection, poses, depth"
    heads: ClassVar[tuple[Head, ...]] = ("grid",)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The last layers of an image classifier of the library; empty for other models."""
    return [getattr(model, name) for name in CLASSIFIERS if hasattr(model, name)]
