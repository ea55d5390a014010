"""Threads that share one reduced model: each must get what it would get alone.

The threads of these tests meet after every block, so that their forwards overlap in every run and not by luck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.block import ReducedBlock

PAIR = ("host", "config")
STAMPED = tiny.matrix(tiny.configs(), tiny.PLAIN, [], others=tiny.FEW, once=["vit"], variants=["mctf"], full=tiny.PLAIN)
NEW_TENSORS = tiny.matrix(tiny.configs(), tiny.PLAIN, [], others=["tome"], once=["vit"], full=tiny.PLAIN)
SECONDS = 20  # how long a thread waits for the others before the test fails


def plain(model: nn.Module, images: Tensor) -> list[Tensor]:
    output = tiny.logits(model(images))
    return list(output) if isinstance(output, tuple) else [output]


def dense(model: nn.Module, images: Tensor) -> list[Tensor]:
    if not hasattr(model, "forward_intermediates") and not hasattr(model, "config"):
        return plain(model, images)  # torchvision has no call for dense features
    return tiny.dense_tokens(model, images)


@contextmanager
def in_step(model: nn.Module, parties: int, new_tensors: bool) -> Iterator[None]:
    """Threads wait for each other after every block; with ``new_tensors`` the blocks' outputs lose what is stamped on
    them."""
    barrier = threading.Barrier(parties, timeout=SECONDS)

    def meet(block: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        barrier.wait()
        return output.clone() if new_tensors else None

    hooks = [block.register_forward_hook(meet) for block in tiny.blocks(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, each run in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(call) for call in calls]]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(PAIR, STAMPED)
def test_threads_get_what_they_get_alone(host: str, config: vitrim.MethodConfig) -> None:
    check_threads(host, config, new_tensors=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(PAIR, NEW_TENSORS)
def test_threads_get_what_they_get_alone_where_hooks_return_new_tensors(host: str, config: vitrim.MethodConfig) -> None:
    check_threads(host, config, new_tensors=True)


def check_threads(host: str, config: vitrim.MethodConfig, new_tensors: bool) -> None:
    model = tiny.HOSTS[host]().eval()
    if config.name == "random":
        pytest.skip("draws from torch's global generator, which threads share")
    reduction = vitrim.reduce_(model, tiny.fits(config, model), record=True)
    first, second = tiny.images(seed=3), tiny.images(seed=4)

    def call(kind: Callable[[nn.Module, Tensor], list[Tensor]], images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            outputs = kind(model, images)
        return outputs, [state.source for state in reduction.states]

    wishes = [(plain, first), (dense, second), (plain, second)]
    alone = [call(*wish) for wish in wishes]
    with in_step(model, len(wishes), new_tensors):
        shared = together(*[lambda wish=wish: call(*wish) for wish in wishes])
    for (expected, sources), (got, others) in zip(alone, shared, strict=True):
        assert [value.shape for value in got] == [value.shape for value in expected]
        assert all(map(torch.equal, got, expected))
        assert all(map(torch.equal, others, sources))
    (after, _), (before, _) = call(plain, first), alone[0]
    assert all(map(torch.equal, after, before))  # nothing stays behind


def test_a_dense_call_that_fails_leaves_nothing_behind() -> None:
    model = tiny.HOSTS["vit"]().eval()
    vitrim.reduce_(model, "topk:keep_rate=0.5")
    before = model(tiny.images())
    with pytest.raises(Exception, match="Input height"):
        model.forward_intermediates(torch.zeros(1, 3, 7, 7))
    torch.testing.assert_close(model(tiny.images()), before, atol=0, rtol=0)


def test_the_state_is_that_of_the_own_thread() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4")
    model(tiny.images(batch=2))
    (other,) = together(lambda: (model(tiny.images(batch=3)), reduction.state.size.shape[0])[1])
    assert (other, reduction.state.size.shape[0]) == (3, 2)


def test_a_thread_that_ran_nothing_has_no_state() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    together(lambda: model(tiny.images()))
    for ask in (lambda: reduction.state, lambda: reduction.states):
        with pytest.raises(vitrim.VitrimError, match="in this thread"):
            ask()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "set": lambda model: vitrim.get_reduction(model).set(r=2),
    "restore_": vitrim.restore_,
    "reduce_": lambda model: vitrim.reduce_(model, "tome:r=4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_while_another_thread_runs_the_model(change: str) -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4") if change != "reduce_" else None
    before = model(tiny.images())
    inside, done = threading.Event(), threading.Event()
    hook = model.blocks[1].register_forward_hook(lambda *_: (inside.set(), done.wait(SECONDS))[:0] or None)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(model, tiny.images())
        assert inside.wait(SECONDS)
        with pytest.raises(vitrim.VitrimError, match="runs in another thread"):
            CHANGES[change](model)
        done.set()
        torch.testing.assert_close(served.result(SECONDS), before, atol=0, rtol=0)
    hook.remove()
    assert vitrim.get_reduction(model) is reduction
    torch.testing.assert_close(model(tiny.images()), before, atol=0, rtol=0)
    CHANGES[change](model)  # now it may


def test_a_forward_that_starts_during_a_change_is_refused() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4")
    with reduction.changing(), pytest.raises(RuntimeError, match="being changed in another thread"):
        model(tiny.images())
    model(tiny.images())


def test_a_change_that_begins_during_a_forward_does_not_abort_it() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4")
    before = model(tiny.images())
    # between the moment a change begins and the one when it finds the forward and is refused
    model.blocks[0].register_forward_hook(lambda *_: setattr(reduction._trace, "changing", True))
    torch.testing.assert_close(model(tiny.images()), before, atol=0, rtol=0)


def test_a_forward_that_starts_while_blocks_are_adopted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.HOSTS["vit"]().eval()
    own = ReducedBlock.adopt.__func__  # type: ignore[attr-defined]
    seen = []

    def adopt(cls: Any, block: nn.Module, reducer: Any, **settings: Any) -> None:
        own(cls, block, reducer, **settings)
        with pytest.raises(RuntimeError, match="being changed in another thread"):
            model(tiny.images())
        seen.append(block)

    monkeypatch.setattr(ReducedBlock, "adopt", classmethod(adopt))
    vitrim.reduce_(model, "tome:r=4")
    assert len(seen) == 4
    model(tiny.images())


def test_a_forward_that_failed_does_not_count_as_running() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4")
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(model, tiny.images()).exception(SECONDS), ZeroDivisionError)
        hook.remove()
        reduction.set(r=2)  # its thread is still alive


@pytest.mark.slow  # eager models are in every row above
def test_a_compiled_model_leaves_its_state_in_the_thread_that_called_it() -> None:
    model = tiny.vit(depth=1)()
    reduction = vitrim.reduce_(model, "tome:r=4")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    sizes: list[torch.Size] = []

    def call(batch: int) -> None:
        with torch.no_grad():
            compiled(tiny.images(batch=batch))
        sizes.append(reduction.state.size.shape)

    call(2)
    other = threading.Thread(target=call, args=(3,))
    other.start()
    other.join()
    assert sizes == [(2, 33), (3, 33)]
    assert reduction.state.size.shape == (2, 33)


def test_the_own_thread_may_change_amounts_from_a_hook() -> None:
    model = tiny.HOSTS["vit"]().eval()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    model.register_forward_pre_hook(lambda *_: reduction.set(r=2))
    model(tiny.images())
    assert reduction.tokens_per_block == [35, 33, 31, 29]
