from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch

from vitrim.core.assignment import prune
from vitrim.core.tokens import Asked, TokenState, Trace


def trace_with_history(recording: bool) -> tuple[Trace, list[TokenState]]:
    x = torch.zeros(1, 7, 4)
    states = [TokenState.start(x, num_prefix=1)]
    for keep in (5, 3):
        states.append(prune(states[-1], torch.arange(keep).unsqueeze(0)).advance(x, states[-1]))
    trace = Trace(recording)
    trace.start(states[0])
    trace.leave(0, states[1], last=False)
    trace.leave(1, states[2], last=True)
    return trace, states


@pytest.mark.parametrize("recording", [True, False])
def test_trace_keeps_the_final_state_and_all_of_them_when_recording(recording: bool) -> None:
    trace, states = trace_with_history(recording)
    assert trace.call.final is states[2]
    assert trace.call.latest is not None
    assert trace.call.latest[0] == 1
    assert trace.call.latest[1] is states[2]
    assert [state.num_tokens for state in trace.call.states] == ([7, 6, 4] if recording else [])


def test_a_recomputed_block_is_not_recorded_twice() -> None:
    trace, states = trace_with_history(recording=True)
    trace.leave(0, states[1], last=False)  # what gradient checkpointing does in backward
    trace.leave(1, states[2], last=True)
    assert [state.num_tokens for state in trace.call.states] == [7, 6, 4]


def test_a_new_forward_forgets_the_previous_one_at_once() -> None:
    trace, states = trace_with_history(recording=True)
    trace.start(states[0])
    assert trace.call.final is None
    assert trace.call.latest is None
    assert trace.call.states == (states[0],)


@pytest.mark.parametrize("recording", [True, False])
def test_copies_of_a_trace_start_empty(recording: bool) -> None:
    trace, _ = trace_with_history(recording)
    for twin in (copy.deepcopy(trace), copy.copy(trace), pickle.loads(pickle.dumps(trace))):
        assert twin is not trace
        assert twin.recording is recording
        assert (twin.call.latest, twin.call.final, twin.call.states, twin.asked) == (None, None, (), Asked())


def test_dense_ends_with_its_block_also_after_an_error() -> None:
    trace = Trace()
    with trace.asking(Asked(full_grids=True)):
        with contextlib.suppress(KeyError), trace.asking(Asked(full_grids=True)):
            raise KeyError
        assert trace.asked.full_grids  # an inner call does not end the outer one
    assert not trace.asked.full_grids
    with contextlib.suppress(KeyError), trace.asking(Asked(full_grids=True)):
        raise KeyError
    assert not trace.asked.full_grids


def test_full_grids_asked_for_the_next_forward_are_of_that_one_alone() -> None:
    trace, states = trace_with_history(recording=False)
    trace.call.once = Asked(full_grids=True)
    assert trace.asked.full_grids
    trace.start(states[0])
    assert not trace.asked.full_grids
