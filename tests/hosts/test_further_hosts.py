"""Hosts of later dates, with layers like those of the contract's: few methods each, all in `make test-full`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from full_matrix import FULL_MATRIX
from vitrim.core.registry import ask, host_of, make_method

EACH = ("tome",)
SOME = ("topk", "mctf", "cropr")
"""Selection at the query, fresh values, a bank: on the first host of each family."""
PLAIN = [next(iter(hosts)) for hosts in tiny.families(further=True).values() if hosts]


every_pair = pytest.mark.parametrize(
    ("host", "config"),
    tiny.cases(
        (host, config)
        for host in tiny.FURTHER
        for config in tiny.first_settings(tiny.configs())[::-1]
        if FULL_MATRIX or config.name in EACH or (config.name in SOME and host in PLAIN)
    ),
)
every_host = pytest.mark.parametrize("host", tiny.FURTHER)


def tensors(output: Any) -> list[Tensor]:
    """Every tensor in an output of any library, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [x for part in output for x in tensors(part)] if isinstance(output, list | tuple) else []


def run(model: Any, images: Tensor, **options: Any) -> list[Tensor]:
    """All outputs; ViTMAE shuffles patches, the random method draws: the same in every run that is compared."""
    torch.manual_seed(5)
    with torch.no_grad():
        return tensors(model(images, **options))


def with_hidden(model: Any, images: Tensor) -> list[Tensor]:
    """Outputs with the features after every block."""
    if hasattr(model, "forward_intermediates"):
        with torch.no_grad():
            return tensors(model.forward_intermediates(images))
    if hasattr(model, "get_intermediate_layers"):
        with torch.no_grad():
            return tensors([model(images, is_training=True), *model.get_intermediate_layers(images, n=4)])
    return run(model, images, output_hidden_states=True)


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def reduce(model: nn.Module, config: vitrim.MethodConfig, **kwargs: Any) -> vitrim.Reduction:
    """Reduces, or skips the test where the method is refused for a reason of the host's."""
    config = tiny.fits(config, model)
    facts = host_of(model).facts(model)
    if facts.across_windows and config.needs().attention_map:
        pytest.skip("refused: the map of a window is not that of the image")
    if config.needs().grid and host_of(model).patch_maker(model) is None:
        pytest.skip("refused: no rows and columns")
    if config.needs().pixels and host_of(model).name == "transformers AST":
        pytest.skip("refused: patches overlap")
    return vitrim.reduce_(model, config, **kwargs)


@pytest.mark.sampled(2)
@every_host
def test_reducing_nothing_gives_what_the_library_gives(host: str) -> None:
    """Hidden states, maps and pooled outputs, to 1e-6 (in float64, as some libraries take their softmax in float32)."""
    model, images = tiny.FURTHER[host]().double(), tiny.given(host).double()
    for call in (run, with_hidden):
        dense = call(model, images)
        for method in ("none", "tome:r=0"):
            vitrim.reduce_(model, method)
            close(call(model, images), dense, 1e-6)
            vitrim.restore_(model)
            assert all(torch.equal(*pair) for pair in zip(call(model, images), dense, strict=True))


@pytest.mark.sampled(3)
@every_pair
def test_reduced_hosts_keep_the_contract(host: str, config: vitrim.MethodConfig) -> None:
    """Fewer tokens, full grids of hidden states, equal copies, gradients everywhere, and back bit for bit."""
    model, images = tiny.FURTHER[host](), tiny.given(host)
    dense, keys = run(model, images), list(model.state_dict())
    reduction = reduce(model, config, record=True)
    out = run(model, images)
    counts = [state.num_tokens for state in reduction.states]
    assert all(part.isfinite().all() for part in out)
    if config.kind != "none" and not config.is_adaptive():  # random weights may leave a threshold nothing to remove
        assert min(counts) < counts[0]
    check_states(reduction, len(images))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(*pair) for pair in zip(run(twin, images), out, strict=True))
    check_gradients(model, host, images)
    hidden = [part.shape for part in with_hidden(tiny.FURTHER[host](), images)]
    assert config.kind not in ("none", "merge") or [part.shape for part in with_hidden(model, images)] == hidden
    vitrim.restore_(model)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(*pair) for pair in zip(run(model, images), dense, strict=True))


def check_states(reduction: vitrim.Reduction, batch: int) -> None:
    """Every state is of images, and the prefix stays in front."""
    for state in reduction.states:
        assert state.size.shape[0] == state.source.shape[0] == batch
        assert state.position.shape == state.size.shape
        prefix = torch.arange(state.num_prefix).expand(batch, -1)
        assert torch.equal(state.position[:, : state.num_prefix], prefix)
        if reduction.config.kind == "merge" and state.mask is None:  # padding has no anchor
            own = torch.arange(state.num_tokens).expand(batch, -1)
            assert torch.equal(state.source.gather(1, state.position), own)  # an anchor is one of its token's own


def check_gradients(model: nn.Module, host: str, images: Tensor) -> None:
    """Whatever the dense model trains, the reduced one does."""

    def trained(one: nn.Module) -> set[str]:
        torch.manual_seed(5)
        one.zero_grad()
        sum(part.square().sum() for part in tensors(one(images)) if part.requires_grad).backward()
        return {name for name, p in one.named_parameters() if p.grad is not None and p.grad.isfinite().all()}

    own = {name for name, _ in model.named_parameters() if ".reducer." in name}
    assert trained(model) - own == trained(tiny.FURTHER[host]())


@pytest.mark.sampled(3)
@every_host
def test_an_image_alone_gives_what_it_gives_in_a_batch(host: str) -> None:
    model, images = tiny.FURTHER[host]().double(), tiny.given(host, 3).double()
    if host == "hf_vit_mae":
        pytest.skip("every image is shuffled in its own way")
    vitrim.reduce_(model, "tome:r=4")
    together = tiny.logits(model(images))
    alone = [tiny.logits(model(image[None])) for image in images]
    parts = (together, alone) if isinstance(together, Tensor) else (together[0], [one[0] for one in alone])
    joined = torch.cat(parts[1], dim=1 if host == "hf_pixtral" else 0)  # Pixtral packs its images
    torch.testing.assert_close(parts[0], joined, atol=1e-9, rtol=1e-9)


POSITIONS = (
    *("position_embeddings", "position_embedding", "positional_embedding", "position_embedding_table"),
    *("pos_embed", "rel_pos_h", "rel_pos_w"),
)
FREQUENCIES = ("bands", "inv_freq")
"""Buffers of rotary tables that are made in every forward: without any, nothing is rotated."""
ROTARY = ("dinov3_storage", "samvit_rope", "hf_vjepa2", "hf_vjepa2_model", "hf_pixtral")
SHUFFLED = ("hf_vit_mae",)
FIXED = ("hf_aimv2_native",)
OVERLAPPING = ("volo", "volo_avg", "volo_stages", "hf_ast", "hf_ast_model", "hf_vitpose", "hf_vitpose_backbone")


def without_positions(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in POSITIONS for word in name.split(".")):
                parameter.zero_()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in FREQUENCIES:
            buffer.zero_()
    for module in model.modules():  # VideoMAE's table is no parameter
        table = vars(module).get("position_embeddings")
        if isinstance(table, Tensor):
            table.zero_()
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "host", [host for host in tiny.FURTHER if host not in (*ROTARY, *SHUFFLED, *FIXED, *OVERLAPPING)]
)
def test_merging_equal_patches_changes_nothing(host: str) -> None:
    """Every other patch repeats its left neighbour: pooling, heads and attention weigh what is merged by its size."""
    model = without_positions(tiny.FURTHER[host]().double())
    side = 2 * ask(model).layout(model).patch_size[1]  # two patches
    images = tiny.given(host).double().unflatten(-1, (-1, side))
    images[..., side // 2 :] = images[..., : side // 2]
    images = images.flatten(-2)
    dense = run(model, images)
    reduction = vitrim.reduce_(model, "tome:r=[9,0,0,0]")  # half of the pairs, so that sizes differ
    close(run(model, images), dense, 1e-6)  # where attention is eager, softmax is in float32
    assert reduction.state.size.unique().tolist() == [1.0, 2.0]


@pytest.mark.sampled(5)
@every_host
def test_a_saved_reduction_is_found_again(host: str, tmp_path: Any) -> None:
    model, images = tiny.FURTHER[host](), tiny.given(host)
    reduction = vitrim.reduce_(model, make_method("tome", r=4))
    reduction.save(tmp_path)
    twin = tiny.FURTHER[host]()
    vitrim.Reduction.load(twin, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(run(twin, images), run(model, images), strict=True))
