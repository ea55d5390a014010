"""A reduced block calls what the dense block calls, so that adapters, hooks and offloading act alike on both.

The oracle is the dense model with the same change. Over every host; what a reduced block calls otherwise is written
down here, with the reason.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_align_device_hook
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize
from torch.nn.utils.prune import random_unstructured
from torch.utils.flop_counter import FlopCounterMode

import tiny
import vitrim
from vitrim.core.block import is_bare
from vitrim.core.registry import host_of

EVERYWHERE = {**tiny.HOSTS, **tiny.FURTHER}
FAMILIES = [next(iter(hosts)) for further in (False, True) for hosts in tiny.families(further).values()]

TWICE = {
    "in_norm": "timm's parallel block projects q, k, v before, and the MLP behind, a reduction at the query",
    "in_proj": "timm's parallel block projects q, k, v before, and the MLP behind, a reduction at the query",
}
TWICE_BY_MCTF = dict.fromkeys(
    ("norm1", "ln_1", "layernorm_before", "layer_norm1", "rms_norm1", "attention_norm"),
    "MCTF projects values from fused tokens: they are normed again",
)


def output(model: nn.Module, host: str, inputs: Tensor | None = None) -> Tensor:
    found = tiny.run(model, tiny.given(host) if inputs is None else inputs)
    return found[0] if isinstance(found, tuple) else found


def shaken(host: str) -> nn.Module:
    """A host whose biases and norms are not at their first values, in double precision."""
    torch.manual_seed(0)
    model = EVERYWHERE[host]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def bypassed(block: nn.Module, host: type) -> list[nn.Module]:
    kind = type(block) if hasattr(block, "reducer") else host.reduced_class(block)
    return kind.bypassed(block)


def inside(block: nn.Module) -> dict[str, nn.Module]:
    """What the library put into a block, by name."""
    return {name: part for name, part in block.named_modules() if name and "reducer" not in name.split(".")}


def calls(model: nn.Module, host: str) -> Counter[tuple[int, str]]:
    """How often each module in each block is called in one forward."""
    seen: Counter[tuple[int, str]] = Counter()
    handles = []
    for depth, block in enumerate(tiny.blocks(model)):
        for name, part in inside(block).items():
            at = (depth, name)
            handles.append(part.register_forward_hook(lambda *_, at=at: seen.update([at])))
    for block in tiny.blocks(model):  # hooks on those are refused, as they would be skipped
        for part in bypassed(block, host_of(model)):
            part._forward_hooks.clear()
    with torch.no_grad():
        output(model, host)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.sampled(5)
@pytest.mark.parametrize("host", EVERYWHERE)
def test_a_reduced_block_calls_what_the_dense_block_calls(host: str) -> None:
    model = EVERYWHERE[host]().eval()
    wanted = calls(model, host)
    skipped = {
        (depth, name)
        for depth, block in enumerate(tiny.blocks(model))
        for name, part in inside(block).items()
        if any(part is own for own in bypassed(block, host_of(model)))
    }
    for method in ("none:last_block=auto", "tome:r=0", "mctf:r=0"):
        try:
            vitrim.reduce_(model, method)
        except vitrim.UnsupportedModelError:
            assert method == "mctf:r=0"  # which cannot serve blocks that attend across windows
            continue
        found = calls(model, host)
        vitrim.restore_(model)
        for at in (wanted.keys() | found.keys()) - skipped:
            more = found[at] - wanted[at]
            twice = at[1] in TWICE or (method == "mctf:r=0" and at[1] in TWICE_BY_MCTF)
            assert more == 0 or (twice and more == 1), (method, at, more)


# ---- layers that are more than their weights -------------------------------------------------------------------------


class Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [
        part
        for block in tiny.blocks(model)
        for part in inside(block).values()
        if isinstance(part, nn.Linear) and part.weight.shape[0] > 0
    ]


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda layer: setattr(layer, "forward", lambda x, own=layer.forward: 1.5 * own(x)),
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, out: 1.5 * out),
    "pre_hook": lambda layer: layer.register_forward_pre_hook(lambda module, args: (1.5 * args[0],)),
    "parametrisation": lambda layer: parametrize.register_parametrization(layer, "weight", Tripled()),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", FAMILIES)
def test_what_is_put_on_a_layer_acts_on_the_reduced_model_too(host: str, change: str) -> None:
    def put(model: nn.Module) -> None:
        for layer in linear_layers(model):
            CHANGES[change](layer)

    dense = shaken(host)
    inputs = tiny.given(host)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    methods = ["none:last_block=auto"]
    if not host_of(dense).facts(dense).across_windows:
        methods.append("mctf:r=0")
    with torch.no_grad():
        before = output(dense, host, inputs)
        models = [copy.deepcopy(dense) for _ in methods]
        put(dense)
        wanted = output(dense, host, inputs)
        assert not torch.allclose(before, wanted, atol=1e-6)  # the change is one
        for model, method in zip(models, methods, strict=True):
            vitrim.reduce_(model, method)
            put(model)
            torch.testing.assert_close(output(model, host, inputs), wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("method", ["ia_red2:threshold=0.5", "cropr:k_proj=true,r=6"])
def test_layers_that_a_method_learns_are_called_too_where_they_are_more_than_their_weights(method: str) -> None:
    """The oracle: the same function as weights, which may be read."""
    torch.manual_seed(0)
    model = EVERYWHERE["vit"]().double().eval()
    vitrim.reduce_(model, method)
    layers = [
        layer
        for name, layer in model.named_modules()
        if "reducer" in name and isinstance(layer, nn.Linear) and layer.bias is None
    ]
    assert layers
    for layer in layers:
        nn.init.normal_(layer.weight)
    inputs = tiny.images().double()
    called = copy.deepcopy(model)
    for name, layer in called.named_modules():
        if isinstance(layer, nn.Linear) and "reducer" in name and layer.bias is None:
            layer.register_forward_hook(lambda module, args, out: 1.5 * out)
    with torch.no_grad():
        before = decisions(model, inputs)
        for layer in layers:
            layer.weight.mul_(1.5)
        wanted = decisions(model, inputs)
        found = decisions(called, inputs)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    assert not torch.equal(before, wanted)


def decisions(model: nn.Module, inputs: Tensor) -> Tensor:
    """The scores by which the reducers of one forward decide."""
    seen: list[Tensor] = []
    for block in tiny.blocks(model):
        reducer = block.reducer
        for part in reducer.children():
            if hasattr(part, "scores"):
                own = part.scores
                part.scores = lambda x, own=own: seen.append(own(x)) or seen[-1]
            elif hasattr(part, "policy"):
                part.register_forward_hook(lambda module, args, out: seen.append(out))
    output(model, "vit", inputs)
    for block in tiny.blocks(model):
        for part in block.reducer.children():
            vars(part).pop("scores", None)
            part._forward_hooks.clear()
    return torch.cat([scores.flatten() for scores in seen])


@pytest.mark.parametrize("host", FAMILIES)
def test_offloaded_weights_are_loaded_or_refused_in_one_line(host: str) -> None:
    model = EVERYWHERE[host]().eval()
    vitrim.reduce_(model, "none:last_block=auto")
    with torch.no_grad():
        wanted = output(model, host)
        for block in tiny.blocks(model):
            attach_align_device_hook(block, execution_device="cpu", offload=True)
        own = {id(part) for block in tiny.blocks(model) for part in bypassed(block, host_of(model))}
        at_attention = any(list(part.parameters(recurse=False)) for part in model.modules() if id(part) in own)
        if at_attention:  # whose hook the reduced block would not run
            with pytest.raises(vitrim.UnsupportedModelError, match="a forward of its own"):
                output(model, host)
        else:
            assert any(parameter.is_meta for parameter in model.parameters())
            torch.testing.assert_close(output(model, host), wanted)


@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_hooks_on_all_modules_see_the_projections_of_the_last_block(kind: str) -> None:
    model = EVERYWHERE["vit"]().eval()
    vitrim.reduce_(model, "tome:r=4,last_block=class_token")
    seen = []
    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda module, *_: seen.append(module))
    try:
        output(model, "vit").sum().backward()
    finally:
        handle.remove()
    assert all(any(block.attn.qkv is module for module in seen) for block in model.blocks)


class Wrapped(Tensor):
    """Weights of a class of their own, as quantised ones are."""


def test_a_bare_layer_is_its_weights_and_nothing_more() -> None:
    layer = nn.Linear(3, 2)
    assert is_bare(layer)
    assert is_bare(nn.Dropout(0.1), nn.Dropout)
    assert not is_bare(nn.Dropout(0.1))
    assert not is_bare(type("Adapter", (nn.Linear,), {})(3, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: 2 * x)
        assert not is_bare(layer)
    assert is_bare(layer)
    changes: list[Callable[[nn.Linear], object]] = [
        lambda it: setattr(it, "forward", it.forward),
        lambda it: it.register_forward_hook(lambda *_: None),
        lambda it: it.register_forward_pre_hook(lambda *_: None),
        lambda it: it.register_full_backward_hook(lambda *_: None),
        lambda it: it.register_full_backward_pre_hook(lambda *_: None),
        lambda it: parametrize.register_parametrization(it, "bias", Tripled()),
        lambda it: random_unstructured(it, "weight", 0.5),
        lambda it: setattr(it, "weight", nn.Parameter(it.weight.detach().as_subclass(Wrapped))),
    ]
    for change in changes:
        changed = copy.deepcopy(layer)
        change(changed)
        assert not is_bare(changed)
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
        assert not is_bare(layer)
        handle.remove()
        assert is_bare(layer)
    with FlopCounterMode(display=False):  # it notes where it is, and changes nothing
        assert is_bare(layer)


# ---- dropout of the attention map ------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, probabilities: Tensor) -> Tensor:
        return probabilities / 2


def written_out(host: str) -> nn.Module:
    """A host that writes its attention map out and calls a module on it."""
    model = shaken(host)
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    return model


def set_dropout(model: nn.Module, make: Callable[[], nn.Module]) -> int:
    changed = 0
    for block in tiny.blocks(model):
        for attn in bypassed(block, host_of(model)):
            for name in ("attn_drop", "dropout"):
                if isinstance(getattr(attn, name, None), nn.Module):
                    setattr(attn, name, make())
                    changed += 1
    return changed


DROPS = ["vit", "eva", "beit", "relpos", "samvit", "naflex_rope", "hf_blip", "dinov2_registers"]


@pytest.mark.parametrize("host", DROPS)
@pytest.mark.parametrize("training", [False, True])
def test_the_module_that_drops_from_the_map_is_called(host: str, training: bool) -> None:
    dense = written_out(host)
    assert set_dropout(dense, Halved) == len(tiny.blocks(dense))
    dense.train(training)
    inputs = tiny.images().double()
    with torch.no_grad():
        wanted = output(dense, host, inputs)
        for method in ("tome:r=0", "evit:keep_rate=1.0", "ats:r=0"):
            model = copy.deepcopy(dense)
            try:
                vitrim.reduce_(model, method)
            except vitrim.VitrimError:
                assert method != "tome:r=0"
                continue
            if method != "ats:r=0":  # which attends in its own way
                torch.testing.assert_close(output(model, host, inputs), wanted, atol=1e-9, rtol=1e-7)
            vitrim.restore_(model)
        set_dropout(model, nn.Identity)
        model.train()
        vitrim.reduce_(model, "tome:r=0")
        assert output(model, host, inputs).isfinite().all()


@pytest.mark.parametrize("host", ["vit", "hf_blip"])
def test_hooks_on_that_module_see_every_map(host: str) -> None:
    model = written_out(host)
    maps: list[Tensor] = []
    for block in tiny.blocks(model):
        for attn in bypassed(block, host_of(model)):
            drop = attn.attn_drop if hasattr(attn, "attn_drop") else attn.dropout
            drop.register_forward_hook(lambda module, args, out: maps.append(out))
    inputs = tiny.images().double()
    with torch.no_grad():
        output(model, host, inputs)
        dense, maps = maps, []
        vitrim.reduce_(model, "tome:r=0,last_block=full")
        output(model, host, inputs)
    assert len(maps) == len(dense) == len(tiny.blocks(model))
    torch.testing.assert_close(maps, dense)


def test_a_method_that_attends_in_its_own_way_calls_it_too() -> None:
    model = written_out("vit")
    halves: list[Tensor] = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: halves.append(args[0]) or out / 2)
    inputs = tiny.images().double()
    outs = []
    vitrim.reduce_(model, "ats:blocks=[1],variant=published,last_block=full")
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda module, args: outs.append(args[0]))
    with torch.no_grad():
        output(model, "vit", inputs)
        assert len(halves) == len(model.blocks)
        halved = outs[0]
        outs.clear()
        set_dropout(model, nn.Identity)
        output(model, "vit", inputs)
    torch.testing.assert_close(halved, outs[0] / 2)  # of the first block, whose tokens are the same


# ---- what is changed after reducing ----------------------------------------------------------------------------------


def holder(model: nn.Module) -> Any:
    """The list of the blocks."""
    first = tiny.blocks(model)[0]
    return next(module for module in model.modules() if any(child is first for child in module.children()))


def swap(model: nn.Module) -> None:
    blocks = holder(model)
    blocks[1], blocks[2] = blocks[2], blocks[1]


def cut(model: nn.Module) -> None:
    del holder(model)[-1]
    if hasattr(model, "num_hidden_layers"):
        model.num_hidden_layers -= 1  # EoMT counts its layers itself


def replace(model: nn.Module, place: int) -> None:
    new = tiny.blocks(EVERYWHERE[model.vitrim_host]().eval())[place]  # type: ignore[index]
    holder(model)[place % len(tiny.blocks(model))] = new


def copied(model: nn.Module) -> None:
    blocks = holder(model)
    blocks[2] = copy.deepcopy(blocks[2])


OF_BLOCKS: list[Callable[[nn.Module], None]] = [
    *(swap, cut, copied),
    *(lambda model: replace(model, 0), lambda model: replace(model, -1)),
]
OF_BYPASSED: list[Callable[[nn.Module], object]] = [
    lambda part: part.register_forward_hook(lambda module, args, out: None),
    lambda part: part.register_full_backward_hook(lambda *_: None),
    lambda part: setattr(part, "forward", part.forward),
    lambda part: setattr(part, "__class__", type("Adapted", (type(part),), {})),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", FAMILIES)
def test_blocks_that_are_changed_after_reducing_are_refused(host: str) -> None:
    whole = EVERYWHERE[host]().eval()
    vitrim.reduce_(whole, "tome:r=2")
    for change in (*OF_BLOCKS, *OF_BYPASSED):
        model = copy.deepcopy(whole)
        model.vitrim_host = host  # type: ignore[assignment]
        parts = bypassed(tiny.blocks(model)[2], host_of(model)) if change in OF_BYPASSED else [model]
        if not parts:
            continue  # a block that is its own attention bypasses nothing
        if len(tiny.blocks(model)) < len(list(holder(model).children())) and change is cut:
            continue  # EoMT's last layers are not reduced
        with torch.no_grad():
            output(model, host)
            for part in parts:
                change(part)
            with pytest.raises(vitrim.UnsupportedModelError) as caught:
                output(model, host)
        assert ("was changed after it was reduced" in str(caught.value)) or ("of its own" in str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, functools.partial(torch.compile, backend="eager")])
def test_wrappers_around_blocks_stay_allowed_and_are_restored(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = EVERYWHERE["vit"]().eval()
    for _ in range(2):  # two blocks are left: tracing each takes a second
        tiny.drop_last_block(model)
    dense = output(model, "vit")
    reduction = vitrim.reduce_(model, "tome:r=4")
    wanted = output(model, "vit")
    for depth, block in enumerate(model.blocks):
        model.blocks[depth] = wrap(block)
    torch.testing.assert_close(output(model, "vit"), wanted)
    reduction.set(r=0)
    assert not torch.allclose(output(model, "vit"), wanted)
    vitrim.restore_(model)
    torch.testing.assert_close(output(model, "vit"), dense)


def test_restoring_leaves_blocks_of_another_reduction_alone() -> None:
    model, other = (EVERYWHERE["vit"]().eval() for _ in range(2))
    reduction = vitrim.reduce_(model, "tome:r=4")
    vitrim.reduce_(other, "tome:r=2")
    wanted = output(other, "vit")
    model.blocks[3] = other.blocks[3]
    assert [block.depth for block in reduction._blocks()] == [0, 1, 2]
    vitrim.restore_(model)
    torch.testing.assert_close(output(other, "vit"), wanted)


def test_a_copied_block_runs_alone() -> None:
    model = EVERYWHERE["vit"]().eval()
    vitrim.reduce_(model, "tome:r=4")
    alone = copy.deepcopy(model.blocks[0])
    tokens = torch.randn(2, 37, 32)
    assert alone(tokens).shape[1] == 33


def test_a_block_with_a_forward_of_its_own_is_refused_both_ways() -> None:
    model = EVERYWHERE["vit"]().eval()
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: 2 * own(x)
    with pytest.raises(vitrim.UnsupportedModelError, match="block 1 has a forward of its own"):
        vitrim.reduce_(model, "tome:r=2")
    del model.blocks[1].forward
    vitrim.reduce_(model, "tome:r=2")
    model.blocks[1].forward = model.blocks[1].forward
    with pytest.raises(vitrim.UnsupportedModelError, match="block 1 has a forward of its own"):
        vitrim.restore_(model)
    assert vitrim.get_reduction(model).config.r == 2
    del model.blocks[1].forward
    vitrim.restore_(model)
