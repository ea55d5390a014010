"""What every method on every form of host must keep: parametrised over the registry, so additions are tested too."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
import torch
from timm.utils import ModelEmaV3

import tiny
import vitrim
from full_matrix import FULL_MATRIX, cells
from vitrim.core.registry import ask, make_method

CONFIGS = tiny.configs()
STATIC = tiny.static_configs()


def describe(config: vitrim.MethodConfig) -> str:
    return config.describe()


PAIR = ("host", "config")
OTHER_FORMS = [host for host in tiny.HOSTS if host not in (*tiny.PLAIN, *tiny.LIBRARIES, "vit")]
"""Hosts of a family that another host is the plain one of. On these a few methods restore: a selection, merging with
fresh values, and counts that differ per image."""
every_pair = pytest.mark.parametrize(
    PAIR,
    tiny.matrix(CONFIGS, tiny.HOSTS, thorough=["vit"], once=tiny.HOSTS)
    if FULL_MATRIX
    else [
        *tiny.matrix(
            CONFIGS, [host for host in tiny.HOSTS if host not in OTHER_FORMS], thorough=["vit"], once=tiny.LIBRARIES
        ),
        *tiny.matrix(CONFIGS, OTHER_FORMS, thorough=[], others=("evit", "mctf", "ats")),
    ],
)
"""The central test: under ``VITRIM_FULL_MATRIX=1`` every method meets every host."""
gradient_pair = pytest.mark.parametrize(
    PAIR, tiny.matrix(CONFIGS, tiny.HOSTS, thorough=["vit"], others=["mctf", "cropr"], variants=["mctf"])
)
# other settings of a method are other numbers for what `every_pair`, `gradient_pair` and `every_method` run whole


def covering_pair(number: int, *, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Row ``number`` of the covering array over methods, hosts and tests, less hosts that lack what is tested.

    Under ``VITRIM_FULL_MATRIX=1`` also that diagonal of all settings and all hosts.
    """
    row = tiny.covering(number, [host for host in tiny.PLAIN if host not in without])
    more = tiny.diagonal([host for host in tiny.HOSTS if host not in without], CONFIGS, number) if FULL_MATRIX else []
    return pytest.mark.parametrize(PAIR, tiny.cases([*row, *more]))


ALIKE = ("hf_clip", "hf_siglip", "hf_dinov2", "hf_eomt", "hf_yolos", "naflex")
"""Plain hosts whose attention is the code of another one. YOLOS is compiled in its own tests."""
DIFFERENT = [host for host in tiny.PLAIN if host not in ALIKE]
# compiling and exporting take seconds each: in `make test` a merge and a selection at the query on timm's ViT, and a
# merge on a model of transformers; code that reads a value, which breaks a graph, fails for every method on meta
# tensors (`test_block_on_meta.py`). `make test-full` has a diagonal of all methods and every kind of attention; EoMT,
# which reads in every forward whether attention is masked, is no one graph itself
MERGE, SELECTION = (next(config for config in STATIC if config.name == name) for name in ("tome", "evit"))
static_pair = pytest.mark.parametrize(
    PAIR,
    tiny.cases(
        [
            *(("vit", MERGE), ("vit", SELECTION), ("hf_vit", MERGE)),
            *(tiny.diagonal(DIFFERENT, STATIC) if FULL_MATRIX else []),
        ]
    ),
)
# export traces the operations that compiling does
export_pair = pytest.mark.parametrize(PAIR, tiny.matrix(STATIC, ["vit"], thorough=[], others=["tome"], full=DIFFERENT))
every_method = pytest.mark.parametrize("config", CONFIGS, ids=describe)


def reduced(host: str, config: vitrim.MethodConfig, **kwargs) -> tuple[torch.nn.Module, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    return model, vitrim.reduce_(model, tiny.fits(config, model), **kwargs)


def traced(host: str, config: vitrim.MethodConfig) -> torch.nn.Module:
    """As `reduced`, with as few blocks as the method takes."""
    model = tiny.traceable(host, config)
    vitrim.reduce_(model, tiny.fits(config, model))
    return model


def loss_of(model: torch.nn.Module, output: object) -> torch.Tensor:
    """A loss that reaches everything that is trained: the outputs, and the auxiliary ones a method reports."""
    out = tiny.logits(output)
    auxiliary = [value for _, _, value in vitrim.get_reduction(model).state.aux if value.requires_grad]
    return sum(part.square().sum() for part in (*(out if isinstance(out, tuple) else (out,)), *auxiliary))


run = tiny.run


@pytest.mark.usefixtures("neither_len_nor_truth")
@pytest.mark.sampled(3)
@every_pair
def test_restore_is_bit_identical_and_keys_never_change(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    images = tiny.images()
    blocks, classes = tiny.blocks(model), [type(block) for block in tiny.blocks(model)]
    with torch.no_grad():
        dense = tiny.run(model, images)
        keys = list(model.state_dict())
        reduction = vitrim.reduce_(model, tiny.fits(config, model), record=True)
        added = [key for key in model.state_dict() if key not in keys]
        out = tiny.run(model, images)
        fewest = min(state.num_tokens for state in reduction.states)
        check_prefix(reduction)
        assert reduction.state.num_prefix == tiny.num_prefix(model)
        vitrim.restore_(model)
        again = tiny.run(model, images)
    assert all(".reducer." in key for key in added)
    assert [type(block) for block in tiny.blocks(model)] == classes
    assert all(a is b for a, b in zip(blocks, tiny.blocks(model), strict=True))
    assert list(model.state_dict()) == keys
    assert torch.equal(dense, again)
    assert out.isfinite().all()
    if config.kind != "none":
        assert fewest < tiny.images().shape[-1] ** 2 // 16  # it did reduce
        assert out.shape != dense.shape or not torch.equal(dense, out)
    vitrim.restore_(model)
    assert vitrim.get_reduction(model) is None


def check_prefix(reduction: vitrim.Reduction) -> None:
    """Prefix tokens never move, in no block."""
    prefix = torch.arange(reduction.state.num_prefix)
    for state in reduction.states:
        assert torch.equal(state.position[:, : len(prefix)], prefix.expand(2, -1))
        assert torch.equal(state.source[:, : len(prefix)], prefix.expand(2, -1))
        assert (state.size[:, : len(prefix)] == 1).all()


def test_the_covering_array_has_every_method_every_host_and_most_pairs() -> None:
    """Each test once with every method, and on every host; none of its rows is refused."""
    models = {host: tiny.HOSTS[host]() for host in tiny.PLAIN}
    pairs = set()
    for number in range(9):
        rows = tiny.covering(number)
        assert {config.name for _, config in rows} == {config.name for config in CONFIGS}
        assert {host for host, _ in rows} == set(tiny.PLAIN), number
        pairs |= {(host, config.name) for host, config in rows}
        for host, config in rows:
            tiny.fits(config, models[host])
    assert len(pairs) > 0.4 * len(tiny.PLAIN) * len({config.name for config in CONFIGS})


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture
def deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_algorithms", "neither_len_nor_truth")
@pytest.mark.parametrize("device", ["cpu", GPU])
@every_method
def test_same_input_same_output(config: vitrim.MethodConfig, device: str) -> None:
    """Bit for bit, forward and gradients; methods that draw at random draw the same from the same seed."""
    model, _ = reduced("vit", config)
    model, images = model.to(device).train(), tiny.images(3).to(device)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        out = run(model, images)
        loss_of(model, out).backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


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
    "bat": [{"keep_rate": 1.0}],
    "evo_vit": [{"keep_rate": 1.0}, {"keep_rate": 1.0, "fast_update": True}],
    "ia_red2": [{"threshold": 0.0}],
    "diffrate": [{"r": 0}, {"prune_kept": [40] * 4}],
    "tofu": [{"keep_rate": 1.0}],
    "pitome": [{"keep_rate": 1.0}],
    "mctf": [{"r": 0}, {"r": 0, "attention_map": "shared"}, {"r": 0, "attention": "precise"}],
    "atc": [{"keep_rate": 1.0}, {"r": 0}],
    "ppt": [{"r": 0}],
    "saint": [{"threshold": 1.0}],
    "vid_tldr": [{"r": 0}],
    "cubist_merge": [{"keep_rate": 1.0}, {"rows": 0}],
    "none": [{}, {"last_block": "auto"}],
}


IDENTITIES = [make_method(name, **options) for name, settings in IDENTITY.items() for options in settings]


@pytest.mark.parametrize(PAIR, tiny.matrix(IDENTITIES, tiny.HOSTS, thorough=["vit"], others=["tome", "mctf"]))
def test_reducing_nothing_equals_dense(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    images = tiny.images()
    with torch.no_grad():
        dense = run(model, images)
        vitrim.reduce_(model, tiny.fits(config, model))
        torch.testing.assert_close(run(model, images), dense, atol=1e-6, rtol=1e-6)


@covering_pair(0, without=("torchvision_vit",))
def test_fused_and_unfused_attention_agree(host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    images = tiny.images()
    outputs = []
    with torch.no_grad():
        for fused in (True, False):
            if not ask(model).set_fused(model, fused):
                pytest.skip("this host has one kernel")
            outputs.append(run(model.double(), images.double()))
    # the layers of EoMT that are not reduced take their softmax in float32 where it is written out
    close = 1e-5 if host in tiny.OWN_HEAD else 1e-10
    torch.testing.assert_close(*outputs, atol=close, rtol=close)


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.isfinite().all()}


@gradient_pair
def test_gradients_flow(host: str, config: vitrim.MethodConfig) -> None:
    """To every parameter of the host that gets one without reduction, and to every one of the method's own."""
    model, _ = reduced(host, config)
    model.train()
    loss_of(model, model(tiny.images())).backward()
    dense = tiny.HOSTS[host]().train()
    out = tiny.logits(dense(tiny.images()))
    sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,))).backward()
    own = {name for name, _ in model.named_parameters() if ".reducer." in name}
    assert trained(model) == trained(dense) | own
    first = next(name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0)
    assert "embed" in first or "conv_proj" in first or "cls_token" in first or "class_token" in first


@covering_pair(1)
def test_autocast_bfloat16(host: str, config: vitrim.MethodConfig) -> None:
    model, reduction = reduced(host, config, record=True)
    images = tiny.images()
    with torch.no_grad():
        full = run(model, images)
        decided = [state.source for state in reduction.states]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = run(model, images)
            again = [state.source for state in reduction.states]
            dense = run(tiny.HOSTS[host](), images)  # a final norm gives float32, a head bfloat16
    assert half.dtype == dense.dtype
    assert half.isfinite().all()
    assert reduction.state.size.dtype == torch.float32
    # decisions are taken in float32 but on bfloat16 keys: an image that decides alike differs by rounding
    alike = torch.stack([(one == other).all(1) for one, other in zip(decided, again, strict=True)]).all(0)
    assert (torch.cosine_similarity(full.flatten(1), half.float().flatten(1))[alike] > 0.98).all()
    # the others are close, too; some other hosts, untrained, are nearly tied
    if alike.all() or host == "vit":
        assert torch.nn.functional.cosine_similarity(full.flatten(), half.float().flatten(), dim=0) > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@covering_pair(2)
def test_other_dtypes(dtype: torch.dtype, host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]().to(dtype)
    reduction = vitrim.reduce_(model, tiny.fits(config, model))
    with torch.no_grad():
        out = run(model, tiny.images().to(dtype))
    assert out.dtype == dtype
    assert reduction.state.size.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@covering_pair(3)
def test_copies_are_independent(host: str, config: vitrim.MethodConfig) -> None:
    model, reduction = reduced(host, config)
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


@covering_pair(4)
def test_ema_follows_a_training_step(host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    model.train()
    ema = ModelEmaV3(model, decay=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run(model, tiny.images()).square().mean().backward()
    optimizer.step()
    ema.update(model)
    model.eval(), ema.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(ema.module, tiny.images()), run(model, tiny.images()))


def _gradients(model: torch.nn.Module, *batches: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    sum(tiny.logits(model(batch)).square().sum() for batch in batches).backward()
    # in evaluation nothing trains what only decides
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


# the second forward's state is there when the first one's blocks run again: what one forward shows, two do
@pytest.mark.parametrize("forwards", cells([1, 2], [2]))
@covering_pair(5, without=("torchvision_vit", "hf_eomt"))
def test_gradient_checkpointing_equals_plain(forwards: int, host: str, config: vitrim.MethodConfig) -> None:
    model, _ = reduced(host, config)
    switch_on = tiny.checkpoints(model.double())
    batches = [tiny.images(seed=seed).double() for seed in range(forwards)]  # both forwards before the one backward
    plain = _gradients(model, *batches)
    switch_on()
    checkpointed = _gradients(model, *batches)
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@export_pair
def test_export(host: str, config: vitrim.MethodConfig) -> None:
    model = traced(host, config)
    images = tiny.images(3)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(model, (images,), dynamic_shapes=({0: batch},), strict=False).module()
        for count in (2, 5):
            given = tiny.images(count, seed=count)
            torch.testing.assert_close(run(exported, given), run(model, given), atol=1e-5, rtol=1e-5)
    copy.deepcopy(model)  # what export leaves behind in the trace must not poison copies


def whole_graph(model: torch.nn.Module, backend: str) -> object:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@static_pair
def test_compile_fullgraph(host: str, config: vitrim.MethodConfig) -> None:
    """Python that becomes one graph, and the same one for a batch of any size.

    Sizes that are symbols take twice the time to trace; in `make test` only what represents the others has them, and
    only on the host that every method is compiled on.
    """
    model = traced(host, config)
    images = tiny.images(3)
    any_size = FULL_MATRIX or (host == "vit" and config.name in tiny.FEW)
    if any_size:
        torch._dynamo.mark_dynamic(images, 0)
    compiled = whole_graph(model, "eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)
        other = tiny.images(5 if any_size else 3, seed=5)
        torch.testing.assert_close(run(compiled, other), run(model, other), atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # the graph of the forward is the one above, its gradients those of `test_gradients_flow`
@pytest.mark.parametrize("config", STATIC, ids=describe)
def test_compile_fullgraph_in_training(config: vitrim.MethodConfig) -> None:
    model = traced("vit", config)
    model.train()
    compiled, images = whole_graph(model, "aot_eager"), tiny.images()
    torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)
    loss_of(model, compiled(images)).backward()
    assert trained(model)


# they break no more graphs than their eager forward has reads, and those are in `test_block_on_meta.py`
@pytest.mark.slow
@pytest.mark.parametrize("config", [config for config in CONFIGS if config not in STATIC], ids=describe)
def test_compile_runs_what_is_no_one_graph_too(config: vitrim.MethodConfig) -> None:
    """In several graphs: they may break where a count is read."""
    model = traced("vit", config)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for seed in (3, 4):
            images = tiny.images(seed=seed)
            torch.testing.assert_close(run(compiled, images), run(model, images), atol=1e-5, rtol=1e-5)


@covering_pair(6, without=("torchvision_vit",))
def test_dense_outputs_are_the_reduced_tokens_unmerged(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.shaken(tiny.HOSTS[host]())
    config = tiny.fits(config, model).model_copy(update={"last_block": "full"})
    reduction = vitrim.reduce_(model, config, record=True)
    images = tiny.images()
    found = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out)) for block in tiny.blocks(model)[:-1]]
    with torch.no_grad():
        run(model, images)
        states = reduction.states[1:]
        for hook in hooks:
            hook.remove()
        dense = tiny.dense_tokens(model, images)
    assert [tuple(tokens.shape) for tokens in dense] == [(2, 36 + tiny.num_prefix(model), 32)] * 4
    for grid, tokens, state in zip(dense, found, states, strict=False):
        if host in tiny.OWN_HEAD:  # a patch that comes back is not zeros there (`test_restore.py`)
            grid = grid * (state.source >= 0).unsqueeze(-1)
        torch.testing.assert_close(grid, vitrim.unmerge(tokens, state), atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(4)
@every_method
def test_feature_maps_cover_the_full_grid(config: vitrim.MethodConfig) -> None:
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


@covering_pair(7)
def test_save_and_load(host: str, config: vitrim.MethodConfig, tmp_path) -> None:
    model, reduction = reduced(host, config)
    images = tiny.images()
    reduction.save(tmp_path / "saved")
    twin = tiny.HOSTS[host]()
    loaded = vitrim.Reduction.load(twin, tmp_path / "saved")
    assert loaded.config == reduction.config
    with torch.no_grad():
        assert torch.equal(run(twin, images), run(model, images))


@pytest.mark.sampled(4)
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


@covering_pair(8)
def test_an_image_alone_gives_what_it_gives_in_a_batch(host: str, config: vitrim.MethodConfig) -> None:
    """Unless the method says otherwise, an image's result does not depend on its batch mates."""
    if config.name == "random" or (config.traits.batch_dependent and "image" not in config.describe()):
        pytest.skip("batch dependent by definition")
    model, _ = reduced(host, config)
    images = tiny.images(4).double()
    model.double()
    with torch.no_grad():
        together = run(model, images)
        alone = torch.cat([run(model, image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


@pytest.mark.sampled(4)
@every_method
def test_an_image_that_is_not_finite_spoils_itself_only(config: vitrim.MethodConfig) -> None:
    if config.traits.batch_dependent and "image" not in config.describe():
        pytest.skip("batch dependent by definition")
    model, _ = reduced("vit", config)
    images = tiny.images(3)
    broken = images.clone()
    broken[0, 0, 0, 0] = torch.nan
    with torch.no_grad():
        torch.manual_seed(0)
        expected = run(model, images)
        torch.manual_seed(0)
        out = run(model, broken)
    assert not out[0].isfinite().any()
    torch.testing.assert_close(out[1:], expected[1:])


@pytest.mark.sampled(5)
@every_method
def test_stochastic_depth_and_dropout_run_in_training(config: vitrim.MethodConfig) -> None:
    model = tiny.vit(drop_path_rate=0.5, attn_drop_rate=0.2, proj_drop_rate=0.2)().train()
    vitrim.reduce_(model, config)
    a, b = model(tiny.images()), model(tiny.images())
    assert not torch.equal(a, b)
    model.eval()
    assert torch.equal(run(model, tiny.images()), run(model, tiny.images()))


@pytest.mark.slow  # a minute of the C++ compiler; what comes before it, the graphs, is compiled above
def test_compile_to_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that people use, once: it asks the C++ compiler, which takes a while. The others stop at graphs."""
    if not any(which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name):
        pytest.skip("inductor needs a C++ compiler, and none is installed")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no pool of processes for a handful of kernels
    # finding out which vector instructions there are takes as long as the kernels do
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", None if tiny.FULL_MATRIX else False)
    model = tiny.vit(depth=1)()
    vitrim.reduce_(model, "tome:r=4")
    images = tiny.images()
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(whole_graph(model, "inductor")(images), expected, atol=1e-4, rtol=1e-4)
