"""The state finds its way from block to block through hooks and checkpointing, or the block says that it cannot."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiny
import vitrim
from vitrim.core.attention import merge_heads, split_heads
from vitrim.core.block import Idle
from vitrim.core.registry import methods
from vitrim.core.schedule import Amount, Remove
from vitrim.core.tokens import STAMP, TokenState
from vitrim.engines.memory import peak_memory_mib

METHODS = [config for config in tiny.configs() if config.name in ("tome", "topk", "evit", "atm")]
every_method = pytest.mark.parametrize("config", METHODS, ids=lambda config: config.describe())


def reduced(config: vitrim.MethodConfig, host: str = "vit") -> tuple[nn.Module, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, config, record=True)


def hand_on_a_copy(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A user's hook that loses the stamp."""
    return output.clone()


# ---- the host's own forward ---------------------------------------------------------------------------------------


def depths_of_own_forwards(model: nn.Module, monkeypatch: pytest.MonkeyPatch, images: Tensor) -> list[int]:
    """Blocks whose host's own forward runs, by depth, in one forward of ``images``."""
    host_class = type(model.blocks[0]).host_class
    own, seen = host_class.forward, []

    def noting(self: Any, x: Tensor, **options: Any) -> Any:
        seen.append(self.depth)
        return own(self, x, **options)

    with torch.no_grad(), monkeypatch.context() as within:
        within.setattr(type(model.blocks[0]), "host_class", type("Noting", (), {"forward": noting}))
        model(images)
    return seen


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("none", [0, 1, 2, 3]),
        ("none:last_block=class_token", [0, 1, 2]),
        ("topk:blocks=[1],keep_rate=0.5", [0, 2, 3]),  # decides inside of block 1
        ("random:blocks=[1],keep_rate=0.5", [0, 1, 2, 3]),  # decides in front of it
        ("tome:keep_rate=0.7,blocks=[1]", [0]),  # merged tokens attend in proportion to their size
        ("tome:keep_rate=0.7,blocks=[1],proportional=false", [0, 2, 3]),
        ("ia_red2:blocks=[1],threshold=0.5", [0]),  # images of a batch keep different numbers: a mask
        ("evo_vit:blocks=[1]", []),
    ],
)
def test_the_hosts_own_forward_runs_where_it_does_the_same(
    method: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, method)
    assert depths_of_own_forwards(model, monkeypatch, tiny.images()) == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_the_hosts_own_forward_changes_nothing(
    config: vitrim.MethodConfig, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reduction = reduced(config)
    model.double().train(training)
    results = []
    for plain in (True, False):
        monkeypatch.setattr(type(model.blocks[0]), "plain", plain)
        torch.manual_seed(0)
        output = model(tiny.images().double())
        tokens = reduction.tokens_per_block
        model.zero_grad()
        output.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((output.detach(), tokens, gradients))
    (output, tokens, gradients), (expected, expected_tokens, expected_gradients) = results
    assert tokens == expected_tokens
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-9, rtol=1e-6)


# ---- memory ----------------------------------------------------------------------------------------------------------

NEED_KEYS = [config for config in tiny.configs() if getattr(config, "attention", None) == "after"]


@pytest.mark.parametrize(
    "config", [config for config in tiny.configs() if config not in NEED_KEYS], ids=lambda config: config.describe()
)
def test_keys_do_not_live_through_the_mlp(config: vitrim.MethodConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """There memory peaks. `mctf` with attention after the block is the one that needs them later."""
    model, _ = reduced(config)
    with torch.no_grad():
        model(tiny.images())  # the first call of a loop compiles it, and Numba holds its arguments in cycles
    block_class = type(model.blocks[0])
    keys: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    project = block_class.project

    def noting(self: Any, *args: Any) -> Any:
        attention = project(self, *args)
        keys.append(weakref.ref(attention.k))
        return attention

    monkeypatch.setattr(block_class, "project", noting)
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda module, args: alive.append(any(key() is not None for key in keys)))
    with torch.no_grad():
        model(tiny.images())
    assert alive[:3] == [False] * 3  # the last computes one row for the head; where the host attends, no keys are noted


MORE_THAN_DENSE = {"a_vit": 1.10}
"""A-ViT sums, for every token, what it was in each block."""


def peak(model: nn.Module) -> float:
    """MiB of the second forward of an image."""
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        model(images)
        found = peak_memory_mib(lambda: model(images))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def large() -> tuple[nn.Module, float]:
    """A dense model, for reductions that are taken back, and its peak."""
    model = VisionTransformer(img_size=224, embed_dim=384, depth=4, num_heads=6, num_classes=10).eval()
    return model, peak(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", [*methods(), "cropr:r=40", "gtp:num_prop=40", "mctf:r=40", "pitome:keep_rate=0.8"])
def test_no_method_needs_more_memory_than_the_dense_model(method: str, large: tuple[nn.Module, float]) -> None:
    model, dense = large
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrim.ReductionWarning)  # learned parts are untrained, tokens may run out
        vitrim.reduce_(model, method)
    try:
        assert peak(model) <= MORE_THAN_DENSE.get(method, 1.02) * dense
    finally:
        vitrim.restore_(model)


# ---- hooks of the user -----------------------------------------------------------------------------------------------


@every_method
def test_hooks_that_hand_on_a_new_tensor_change_nothing(config: vitrim.MethodConfig) -> None:
    model, reduction = reduced(config)
    images = tiny.images()
    with torch.no_grad():
        expected = model(images)
        counts = reduction.tokens_per_block
        assert counts[0] < 37 or counts[1] < 37  # there is a state to lose
        for block in model.blocks:
            block.register_forward_hook(hand_on_a_copy)
        assert torch.equal(model(images), expected)
        assert reduction.tokens_per_block == counts
        final, _ = model.forward_intermediates(images)
        assert final.shape == (2, 37, 32)


@pytest.mark.sampled(4)
@every_method
@pytest.mark.parametrize("forwards", [1, 2])
def test_hooks_that_hand_on_a_new_tensor_survive_checkpointing(config: vitrim.MethodConfig, forwards: int) -> None:
    model, _ = reduced(config)
    model.double()
    batches = [tiny.images(seed=seed).double() for seed in range(forwards)]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        sum(model(batch).square().sum() for batch in batches).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    for block in model.blocks:
        block.register_forward_hook(hand_on_a_copy)
    model.set_grad_checkpointing(True)
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_hook_that_changes_values_is_obeyed() -> None:
    model, _ = reduced(vitrim.ToMe(r=4))
    images = tiny.images()
    with torch.no_grad():
        plain = model(images)
        model.blocks[1].register_forward_hook(lambda module, inputs, output: 1.5 * output)
        changed = model(images)
    assert changed.isfinite().all()
    assert not torch.allclose(changed, plain)


def test_a_hook_that_changes_the_number_of_tokens_is_told_which_block_noticed() -> None:
    model, reduction = reduced(vitrim.ToMe(r=4))
    hook = model.blocks[1].register_forward_hook(lambda module, inputs, output: output[:, :20])
    message = "block 2 got 20 tokens where 29 left the block before it: something between the blocks changed the number"
    with pytest.raises(RuntimeError, match=message):
        model(tiny.images())
    hook.remove()
    model(tiny.images())
    assert reduction.tokens_per_block == [33, 29, 25, 21]


def test_a_changed_number_of_tokens_is_noticed_on_the_full_grid_too() -> None:
    model, _ = reduced(vitrim.ToMe(r=4))
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output[:, :29])  # what it had reduced to
    with pytest.raises(RuntimeError, match="block 2 got 29 tokens where 37 left the block before it"):
        model.forward_intermediates(tiny.images())


def test_hooks_on_blocks_survive_reducing_and_restoring() -> None:
    model = tiny.HOSTS["vit"]()
    seen: list[tuple[str, int]] = []
    handles = [
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: seen.append(("pre", inputs[0].shape[1]))),
        model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(("post", output.shape[1]))),
    ]
    with torch.no_grad():
        model(tiny.images())
        vitrim.reduce_(model, "tome:r=4")
        model(tiny.images())
        vitrim.restore_(model)
        model(tiny.images())
    assert seen == [("pre", 37), ("post", 37), ("pre", 33), ("post", 29), ("pre", 37), ("post", 37)]
    for handle in handles:
        handle.remove()
    model(tiny.images())
    assert len(seen) == 6


# ---- out of order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forwards", [0, 1])
def test_a_block_that_runs_alone_says_what_is_wrong(forwards: int) -> None:
    model, _ = reduced(vitrim.ToMe(r=4))
    for _ in range(forwards):
        model(tiny.images())
    for depth in (1, 3):
        with pytest.raises(RuntimeError, match=f"block {depth} got tokens of unknown history: .* must run in order"):
            model.blocks[depth](torch.zeros(2, 25, 32))


def test_the_first_block_may_run_alone() -> None:
    model, _ = reduced(vitrim.ToMe(r=4))
    assert model.blocks[0](torch.randn(2, 37, 32)).shape == (2, 33, 32)
    assert model.blocks[0](torch.randn(2, 20, 32)).shape == (2, 16, 32)


def test_a_skipped_block_is_noticed() -> None:
    model, _ = reduced(vitrim.ToMe(r=4))
    first = model.blocks[0](torch.randn(2, 37, 32))
    with pytest.raises(RuntimeError, match="block 2 got tokens of unknown history"):
        model.blocks[2](first.clone())


@every_method
def test_interleaved_forwards_do_not_mix_their_states(config: vitrim.MethodConfig) -> None:
    """The stamp travels with the tokens, so two sequences may take turns."""
    model, _ = reduced(config)
    a, b = torch.randn(2, 37, 32), torch.randn(3, 26, 32)

    def alone(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    with torch.no_grad():
        expected = alone(a), alone(b)
        for block in model.blocks:
            a, b = block(a), block(b)
    assert torch.equal(a, expected[0])
    assert torch.equal(b, expected[1])


def test_a_foreign_stamp_is_ignored() -> None:
    """What is left of a state in a tensor that was saved and loaded is an empty dict."""
    model, _ = reduced(vitrim.ToMe(r=4))
    x = torch.randn(2, 37, 32)
    with torch.no_grad():
        expected = model.blocks[1](model.blocks[0](x))
        first = model.blocks[0](x)
        setattr(first, STAMP, {})
        assert torch.equal(model.blocks[1](first), expected)


# ---- reducers --------------------------------------------------------------------------------------------------------


class Probe(vitrim.MethodConfig):
    """Removes one patch per block and has a parameter and a buffer, to see where they end up."""

    name = "test_probe"

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return [None if depth == 2 else Remove(1) for depth in range(num_layers)]


@vitrim.reduces(Probe)
class ProbeReducer(vitrim.Reducer[Probe]):
    site = "before"

    def __init__(self, config: Probe, layer: vitrim.Layer) -> None:
        super().__init__(config, layer)
        self.scale = nn.Parameter(torch.ones(layer.dim))
        self.dropout = nn.Dropout()
        self.register_buffer("table", torch.zeros(3))

    def assign(self, x: Tensor, attention: Any, state: TokenState) -> vitrim.Hard:
        score = (x * self.scale).sum(-1)[:, state.num_prefix :]
        return vitrim.prune(state, score.topk(self.num_keep(state), dim=1).indices)


def test_a_misspelt_site_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"Typo.site is 'betwen'; valid sites: before, query, between, after"):

        class Typo(vitrim.Reducer):
            site = "betwen"


def test_a_block_is_not_spared_by_a_method_that_is_never_called() -> None:
    with pytest.raises(TypeError, match=r"Called.spares_block is a property or an attribute, not a method"):

        class Called(vitrim.Reducer):
            def spares_block(self) -> bool:
                return False


@pytest.mark.parametrize("site", ["before", "query", "between", "after"])
def test_every_site_is_accepted_and_acts(site: str) -> None:
    reducer = type("AtSite", (ProbeReducer,), {"site": site})

    class AtSite(Probe):
        def amounts(self, num_layers: int) -> list[Amount | None]:
            return [Remove(1)] * num_layers

    vitrim.reduces(AtSite)(reducer)
    _, reduction = reduced(AtSite())
    reduction.model(tiny.images())
    assert reduction.tokens_per_block == [36, 35, 34, 33]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_reducers_are_where_their_blocks_are(dtype: torch.dtype, device: str) -> None:
    model = tiny.HOSTS["vit"]().to(device=device, dtype=dtype)
    vitrim.reduce_(model, Probe())
    for depth in (0, 1, 3):
        reducer = model.blocks[depth].reducer
        assert isinstance(reducer, ProbeReducer)
        for tensor in (reducer.scale, reducer.table):
            assert tensor.dtype == dtype
            assert tensor.device.type == device
    model.float()  # and they follow the model
    assert model.blocks[0].reducer.scale.dtype == torch.float32


def test_reducers_are_in_the_mode_of_their_block() -> None:
    model = tiny.HOSTS["vit"]().train()
    model.blocks[3].eval()  # partly frozen
    vitrim.reduce_(model, Probe())
    assert [block.reducer.training for block in model.blocks] == [True, True, True, False]
    assert not model.blocks[3].reducer.dropout.training
    model.eval()
    assert not any(block.reducer.training for block in model.blocks)
    assert isinstance(model.blocks[2].reducer, Idle)


@pytest.mark.parametrize(
    ("host", "prefix", "has_class_token", "classes"),
    [
        ("vit", 1, True, 5),
        ("distilled", 2, True, 5),
        ("registers", 4, True, 5),
        ("map", 0, False, 5),
        ("headless", 1, True, 0),
    ],
)
def test_a_method_is_told_the_geometry_of_its_host(host: str, prefix: int, has_class_token: bool, classes: int) -> None:
    told: list[vitrim.Layer] = []

    class Curious(vitrim.MethodConfig):
        name = "test_curious"

    @vitrim.reduces(Curious)
    def listen(config: Curious, layer: vitrim.Layer) -> None:
        told.append(layer)

    vitrim.reduce_(tiny.HOSTS[host](), Curious())
    assert [layer.depth for layer in told] == [0, 1, 2, 3]
    for layer in told:
        assert (layer.num_layers, layer.dim, layer.num_heads) == (4, 32, 2)
        assert (layer.grid_size, layer.initial_patches) == ((6, 6), 36)
        assert (layer.num_prefix, layer.has_class_token, layer.num_classes) == (prefix, has_class_token, classes)


def test_a_soft_assignment_at_the_query_is_refused() -> None:
    class SoftReducer(vitrim.Reducer):
        site = "query"

        def assign(self, x: Tensor, attention: Any, state: TokenState) -> vitrim.Soft:
            return vitrim.Soft(torch.ones(x.shape[0], 2, state.num_patches))

    class SoftAtQuery(vitrim.MethodConfig):
        name = "test_soft_query"

    vitrim.reduces(SoftAtQuery)(lambda config, layer: SoftReducer)
    model, _ = reduced(SoftAtQuery())
    with pytest.raises(TypeError, match="cannot act at the query site; use 'before'"):
        model(tiny.images())


# ---- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 0])
def test_heads_are_consecutive_channels(batch: int) -> None:
    x = torch.randn(batch, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (batch, 3, 5, 4)
    assert torch.equal(heads[:, 1], x[..., 4:8])
    assert torch.equal(merge_heads(heads), x)
    part = x.chunk(2, dim=-1)[1]  # as of a fused projection: not contiguous
    assert torch.equal(split_heads(part, 3)[:, 2], x[..., 10:12])


@pytest.mark.parametrize("between", [False, True], ids=["alone", "after_another_forward"])
@pytest.mark.parametrize("method", ["tome:r=4", "topk:blocks=[1]", "cropr"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reentrant_checkpointing_is_always_refused(depth: int, method: str, between: bool) -> None:
    """Also where another forward has just left the state of the block before the one that is recomputed."""
    model: Any = tiny.HOSTS["vit"]().train()
    vitrim.reduce_(model, method)
    block = model.blocks[depth]
    own = block.forward
    block.forward = lambda x, **kwargs: checkpoint(own, x, use_reentrant=True)
    loss = model(tiny.images()).sum()
    if between:
        with torch.no_grad():
            model.forward_intermediates(tiny.images(seed=9), indices=[depth - 1], stop_early=True, output_fmt="NLC")
    with pytest.raises(RuntimeError, match="reentrant checkpointing is not supported"):
        loss.backward()


UNMAPPED = ("a_vit", "algm", "atc", "atm", "ats", "cubist_merge", "gtp", "ia_red2", "pixelprune", "ppt", "saint")
"""Methods that do what torch.vmap cannot map, in their settings here."""


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_vmap_gives_each_image_its_own_result_or_one_line(config: vitrim.MethodConfig) -> None:
    model, images = tiny.HOSTS["vit"](), tiny.images()
    vitrim.reduce_(model, config)
    with torch.no_grad():
        mapped: Any = functools.partial(torch.vmap(lambda image: model(image[None])[0], randomness="different"), images)
        if config.name in UNMAPPED and not mappable(config):
            with pytest.raises(vitrim.VitrimError, match=rf"^{config.name} does not run under torch\.vmap, [^\n]+$"):
                mapped()
        elif config.name == "random":
            assert mapped().isfinite().all()
        else:
            alone = torch.cat([model(image[None]) for image in images])
            torch.testing.assert_close(mapped(), alone, atol=1e-5, rtol=1e-5)


def mappable(config: Any) -> bool:
    """PPT that always prunes, SAINT with fixed counts, and ATC's tree of single linkage read no values."""
    settings = {"ppt": ("threshold", 0.0), "atc": ("linkage", "single")}
    if config.name == "saint":
        return config.r is not None
    option, value = settings.get(config.name, ("name", None))
    return bool(getattr(config, option) == value)
