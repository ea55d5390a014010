"""Peak memory of functions whose peak is known by arithmetic."""

from functools import partial

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

from vitrim.engines.copies import dense_copies, reduced_copy, shared_copy
from vitrim.engines.memory import peak_memory_mib, running_peak

KIB = 1 / 1024


def mib(size, dtype=torch.float32):
    """An uninitialised tensor of ``size`` MiB."""
    return torch.empty(int(size * 2**20) // dtype.itemsize, dtype=dtype)


def two_then_freed():
    first, second = mib(1), mib(2)
    del first, second


def freed_before_the_next():
    first = mib(3)
    del first
    return mib(2)


def result_counts():
    first = mib(1)
    return first, mib(1), mib(1)


def late_peak():
    kept = mib(1)
    for size in (2, 5, 3):
        mib(size)
    return kept


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (two_then_freed, 3.0),
        (freed_before_the_next, 3.0),
        (result_counts, 3.0),
        (late_peak, 6.0),
        (partial(mib, 2, torch.bfloat16), 2.0),
        (lambda: None, 0.0),
    ],
)
def test_known_peaks(run, expected):
    assert peak_memory_mib(run) == expected
    assert peak_memory_mib(run) == expected  # what the first measurement made is gone


def test_what_was_there_before_does_not_count():
    weights = mib(8)
    assert peak_memory_mib(lambda: weights[: 2**18] + 1) == pytest.approx(1.0, abs=KIB)


def test_what_an_earlier_forward_left_is_not_subtracted():
    holder = {}

    def forward():
        holder.pop("state", None)  # as a model forgets its state of the last forward
        holder["state"] = mib(4)
        return mib(1)

    assert [peak_memory_mib(forward) for _ in range(3)] == [5.0, 5.0, 5.0]


def test_operations_count_like_plain_allocations():
    x = torch.randn(64, 4096)
    mlp = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.GELU(), nn.Linear(4096, 4096, bias=False))
    with torch.inference_mode():
        mlp(x)
        # 64 x 4096 float32 is 1 MiB: two of the three results are alive at any time (Sequential drops its input last)
        assert peak_memory_mib(lambda: mlp(x)) == pytest.approx(2.0, abs=KIB)


def test_autograd_keeps_more_than_inference():
    x = torch.randn(64, 4096)
    mlp = nn.Sequential(*(nn.GELU() for _ in range(6)))
    x.requires_grad_()
    assert peak_memory_mib(lambda: mlp(x)) == pytest.approx(6.0, abs=KIB)
    with torch.inference_mode():
        assert peak_memory_mib(lambda: mlp(x)) == pytest.approx(2.0, abs=KIB)


def test_memory_is_proportional_to_the_batch_and_ordered_by_kernel():
    model = VisionTransformer(img_size=64, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5).eval()
    copies = dense_copies(model)

    def peak(name, batch):
        with torch.inference_mode():
            return peak_memory_mib(partial(copies[name], torch.zeros(batch, 3, 64, 64)))

    assert peak("unfused", 4) == pytest.approx(2 * peak("unfused", 2), rel=0.01)
    # the map of 4 heads over 257 tokens alone
    assert peak("unfused", 4) > peak("fused", 4)
    assert peak("unfused", 4) > 4 * 4 * 257**2 * 4 / 2**20


def test_copies_of_a_model_need_what_the_model_needs():
    model = VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5).eval()
    reduced = reduced_copy(model, "tome:r=16")
    images = torch.zeros(2, 3, 32, 32)
    with torch.inference_mode():
        reduced(images)
        assert peak_memory_mib(partial(shared_copy(reduced), images)) == peak_memory_mib(partial(reduced, images))


def test_running_peak():
    assert running_peak([]) == 0
    assert running_peak([(1, 10), (1, -10), (1, 30), (1, -30)]) == 30  # an address is used again
    assert running_peak([(7, -50), (1, 10), (7, -50), (2, 10)]) == 20  # from before: not ours
    assert running_peak([(1, 10), (2, 20), (1, -10), (3, 5)]) == 30


def test_devices_without_a_counter():
    assert peak_memory_mib(lambda: pytest.fail("must not run"), "mps") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda():
    def run():
        first = torch.empty(2**20, device="cuda")
        del first
        return torch.empty(2**19, device="cuda")

    assert peak_memory_mib(run, "cuda") == 4.0
