"""What every method on every form of host must keep: parametrised over the registry, so additions are tested too."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from timm.utils import ModelEmaV3

import tiny
import vitrim
from vitrim.registry import make_method

CONFIGS = tiny.configs()
STATIC = tiny.static_configs()


def describe(config: vitrim.MethodConfig) -> str:
    return config.describe()


every_host = pytest.mark.parametrize("host", tiny.HOSTS)
every_method = pytest.mark.parametrize("config", CONFIGS, ids=describe)
static_method = pytest.mark.parametrize("config", STATIC, ids=describe)


def reduced(host: str, config: vitrim.MethodConfig, **kwargs) -> tuple[torch.nn.Module, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, tiny.fits(config, model), **kwargs)


def loss_of(model: torch.nn.Module, out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A loss that reaches everything that is trained: the outputs, and the auxiliary ones a method reports."""
    auxiliary = [value for _, _, value in vitrim.get_reduction(model).state.aux if value.requires_grad]
    return sum(part.square().sum() for part in (*(out if isinstance(out, tuple) else (out,)), *auxiliary))


def run(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)  # for the random method: the same draw in every run that is compared
    return model(images)


@every_host
@every_method
def test_restore_is_bit_identical_and_keys_never_change(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    images = tiny.images()
    blocks = list(model.blocks)
    with torch.no_grad():
        dense = model(images)
        keys = list(model.state_dict())
        reduction = vitrim.reduce_(model, tiny.fits(config, model), record=True)
        added = [key for key in model.state_dict() if key not in keys]
        out = model(images)
        fewest = min(state.num_tokens for state in reduction.states)
        vitrim.restore_(model)
        again = model(images)
    assert all(".reducer." in key for key in added)
    assert [type(block).__name__ for block in model.blocks] == ["Block"] * len(blocks)
    assert all(a is b for a, b in zip(blocks, model.blocks, strict=True))
    assert list(model.state_dict()) == keys
    assert torch.equal(dense, again)
    assert out.isfinite().all()
    if config.kind != "none":
        assert fewest < tiny.images().shape[-1] ** 2 // 16  # it did reduce
        assert host == "no_pool" or not torch.equal(dense, out)
    with pytest.raises(vitrim.VitrimError, match="not reduced"):
        vitrim.restore_(model)


@every_host
@every_method
def test_prefix_tokens_never_move(host: str, config: vitrim.MethodConfig) -> None:
    model, reduction = reduced(host, config, record=True)
    with torch.no_grad():
        model(tiny.images())
    prefix = torch.arange(model.num_prefix_tokens)
    for state in reduction.states:
        assert torch.equal(state.position[:, : len(prefix)], prefix.expand(2, -1))
        assert torch.equal(state.source[:, : len(prefix)], prefix.expand(2, -1))
        assert (state.size[:, : len(prefix)] == 1).all()


IDENTITY = {
    "zero_tprune": [{"num_similar": 0, "keep_rate": 1.0}],
    "gtp": [{"num_prop": 0}],
    "a_vit": [{"gate_center": 1e4}],
    "tome": [{"r": 0}],
    "atm": [{"alpha": 1.0, "beta": 0.0, "theta_min": 1.0}, {"alpha": 1.0, "theta_min": 1.0, "granularity": "image"}],
    "topk": [{"keep_rate": 1.0}],
    "evit": [{"keep_rate": 1.0}, {"keep_rate": 1.0, "fuse_token": False}],
    "random": [{"keep_rate": 1.0}],
    "l1": [{"keep_rate": 1.0}],
    "l2": [{"keep_rate": 1.0}],
    "linf": [{"keep_rate": 1.0}],
    "patchmerger": [{"keep_rate": 1.0}],
    "sit": [{"keep_rate": 1.0}],
    "sinkhorn": [{"keep_rate": 1.0}],
    "cropr": [{"r": 0, "first_extra": 0}],
    "dpc_knn": [{"keep_rate": 1.0}],
    "dynamicvit": [{"keep_rate": 1.0}],
    "kmedoids": [{"keep_rate": 1.0}],
    "diffrate": [{"r": 0}, {"prune_kept": [40] * 4}],
    "tofu": [{"keep_rate": 1.0}],
    "pitome": [{"keep_rate": 1.0}],
    "mctf": [{"r": 0}, {"r": 0, "attention_map": "shared"}, {"r": 0, "attention": "precise"}],
    "none": [{}, {"last_block": "auto"}],
}


@every_host
@pytest.mark.parametrize(
    "config", [make_method(n, **o) for n, options in IDENTITY.items() for o in options], ids=describe
)
def test_reducing_nothing_equals_dense(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    images = tiny.images()
    with torch.no_grad():
        dense = model(images)
        vitrim.reduce_(model, tiny.fits(config, model))
        torch.testing.assert_close(model(images), dense, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("host", ["distilled", "map"])
@every_method
def test_fused_and_unfused_attention_agree(host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    images = tiny.images()
    with torch.no_grad():
        outputs = []
        for fused in (True, False):
            for block in model.blocks:
                block.attn.fused_attn = fused
            outputs.append(run(model.double(), images.double()))
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)


@every_host
@every_method
def test_gradients_flow(host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    model.train()
    loss_of(model, model(tiny.images())).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing
    assert model.patch_embed.proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("host", ["vit", "distilled", "avg_fc_norm"])
@every_method
def test_autocast_bfloat16(host: str, config: vitrim.MethodConfig) -> None:
    model, reduction = reduced(host, config)
    images = tiny.images()
    with torch.no_grad():
        full = run(model, images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = run(model, images)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    assert reduction.state.size.dtype == torch.float32
    # decisions are taken in float32 but on bfloat16 keys: close, not equal
    assert torch.nn.functional.cosine_similarity(full.flatten(), half.float().flatten(), dim=0) > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_method
def test_other_dtypes(dtype: torch.dtype, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS["vit"]().to(dtype)
    reduction = vitrim.reduce_(model, config)
    with torch.no_grad():
        out = model(tiny.images().to(dtype))
    assert out.dtype == dtype
    assert reduction.state.size.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@every_method
def test_copies_are_independent(config: vitrim.MethodConfig) -> None:
    model, reduction = reduced("vit", config)
    images = tiny.images()
    with torch.no_grad():
        expected = run(model, images)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = {
            "deepcopy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "torch.save": torch.load(buffer, weights_only=False),
            "ema": ModelEmaV3(model, decay=0.5).module,
        }
        for name, twin in copies.items():
            assert torch.equal(run(twin, images), expected), name
            handle = vitrim.get_reduction(twin)
            assert handle is not reduction, name
            assert handle.model is twin, name
            assert handle.state is not reduction.state, name
            before = copy.deepcopy(reduction.state.source)
            twin(tiny.images(seed=9))
            assert torch.equal(reduction.state.source, before), name  # the original saw nothing of it
            vitrim.restore_(twin)
            assert torch.equal(run(model, images), expected), name


@every_method
def test_ema_follows_a_training_step(config: vitrim.MethodConfig) -> None:
    model, _ = reduced("vit", config)
    model.train()
    ema = ModelEmaV3(model, decay=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(tiny.images()).square().mean().backward()
    optimizer.step()
    ema.update(model)
    model.eval(), ema.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(ema.module, tiny.images()), run(model, tiny.images()))


def _gradients(model: torch.nn.Module, *batches: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    sum(model(batch).square().sum() for batch in batches).backward()
    # in evaluation nothing trains what only decides
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("forwards", [1, 2])
@every_method
def test_gradient_checkpointing_equals_plain(forwards: int, config: vitrim.MethodConfig) -> None:
    model, _ = reduced("vit", config)
    model.double()
    batches = [tiny.images(seed=seed).double() for seed in range(forwards)]  # both forwards before the one backward
    plain = _gradients(model, *batches)
    model.set_grad_checkpointing(True)
    checkpointed = _gradients(model, *batches)
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("host", ["distilled", "avg_fc_norm"])
@static_method
def test_export(host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    images = tiny.images(3)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},), strict=False).module()
        for count in (2, 5):
            given = tiny.images(count, seed=count)
            torch.testing.assert_close(run(exported, given), run(model, given), atol=1e-5, rtol=1e-5)
    copy.deepcopy(model)  # what export leaves behind in the trace must not poison copies


@pytest.mark.parametrize("training", [False, True])
@static_method
def test_compile_fullgraph(training: bool, config: vitrim.MethodConfig) -> None:
    model, _ = reduced("vit", config)
    model.train(training)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = tiny.images()
    torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)
    if training:
        loss_of(model, run(compiled, images)).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.adaptive], ids=describe)
def test_compile_runs_adaptive_methods_too(config: vitrim.MethodConfig) -> None:
    model, _ = reduced("vit", config)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for seed in (3, 4):
            images = tiny.images(seed=seed)
            torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)


@every_method
def test_dense_outputs_cover_the_full_grid(config: vitrim.MethodConfig) -> None:
    model, _ = reduced("vit", config)
    images = tiny.images()
    with torch.no_grad():
        run(model, images)
        torch.manual_seed(5)
        final, maps = model.forward_intermediates(images)
        torch.manual_seed(5)
        tokens = model.get_intermediate_layers(images, n=4, return_prefix_tokens=True)
    assert [tuple(entry.shape) for entry in maps] == [(2, 32, 6, 6)] * 4
    assert final.shape == (2, 37, 32)
    for grid, (flat, prefix) in zip(maps, tokens, strict=True):
        assert torch.equal(grid.flatten(2).transpose(1, 2), flat)
        assert prefix.shape == (2, 1, 32)


@every_method
def test_dense_outputs_are_the_reduced_tokens_unmerged(config: vitrim.MethodConfig) -> None:
    config = config.model_copy(update={"last_block": "full"})
    model, reduction = reduced("vit", config, record=True)
    images = tiny.images()
    found = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out)) for block in model.blocks]
    with torch.no_grad():
        run(model, images)
        states = reduction.states[1:]
        for hook in hooks:
            hook.remove()
        torch.manual_seed(5)
        _, intermediates = model.forward_intermediates(images, output_fmt="NLC", return_prefix_tokens=True)
    for (patches, prefix), tokens, state in zip(intermediates, found, states, strict=True):
        expected = vitrim.unmerge(tokens, state)
        torch.testing.assert_close(torch.cat([prefix, patches], 1), expected, atol=1e-5, rtol=1e-5)


@every_method
def test_save_and_load(config: vitrim.MethodConfig, tmp_path) -> None:
    model, reduction = reduced("vit", config)
    images = tiny.images()
    reduction.save(tmp_path / "saved")
    twin = tiny.HOSTS["vit"]()
    loaded = vitrim.Reduction.load(twin, tmp_path / "saved")
    assert loaded.config == config
    with torch.no_grad():
        assert torch.equal(run(twin, images), run(model, images))


@every_method
def test_other_image_sizes(config: vitrim.MethodConfig) -> None:
    model, reduction = reduced("dynamic_img_size", config)
    if config.kind == "soft":  # has parameters for one number of patches
        with pytest.raises(vitrim.VitrimError, match="for 6 x 6 = 36 patches, and this image has 64"):
            model(tiny.images(size=32))
        return
    with torch.no_grad():
        for size in (32, 16, 24):
            model(tiny.images(size=size))
            initial = (size // 4) ** 2
            assert reduction.state.source.shape[1] == initial + 1
            counts = reduction.config.counts(initial, 4)
            if counts is not None:
                assert reduction.state.num_patches == counts[-1]


@every_method
def test_one_image_and_empty_prefix_batches_agree(config: vitrim.MethodConfig) -> None:
    """Unless the method says otherwise, an image's result does not depend on its batch mates."""
    if config.name == "random" or (config.batch_dependent and "image" not in config.describe()):
        pytest.skip("batch dependent by definition")
    model, _ = reduced("vit", config)
    images = tiny.images(4).double()
    model.double()
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


@every_method
def test_stochastic_depth_and_dropout_run_in_training(config: vitrim.MethodConfig) -> None:
    model = tiny._vit(drop_path_rate=0.5, attn_drop_rate=0.2, proj_drop_rate=0.2)().train()
    vitrim.reduce_(model, config)
    a, b = model(tiny.images()), model(tiny.images())
    assert not torch.equal(a, b)
    model.eval()
    assert torch.equal(run(model, tiny.images()), run(model, tiny.images()))
