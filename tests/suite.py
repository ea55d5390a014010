"""Fixtures and the tables the contract tests are parametrised over."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import yaml

from full_matrix import FULL_MATRIX
from golden_files import Reference, using_up
from older import left_out, refusal
from vitrim import loading, progress
from vitrim.measure import timing
from vitrim.measure.latency import MachineWatch

# no test asserts a time, and a machine that is shared is slow now and then
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=100 if FULL_MATRIX else 20)
hypothesis.settings.load_profile("untimed")

for device, seeds in ((torch.cuda, torch.cuda.random), (torch.xpu, torch.xpu.random), (torch.mtia, torch.mtia)):
    if not device.is_available():
        # torch.manual_seed keeps every seed for a device that may come, with the lines of code that led to it: within
        # pytest that takes a millisecond for each kind
        seeds._lazy_call = lambda *_, **__: None

# ten thousand tests and the libraries that they import stay to the end: looking through them for garbage is a sixth of
# the time of collecting them
gc.disable()


def pytest_collection_finish() -> None:
    """Have garbage collected among what the tests make, after 50,000 new objects rather than 700: a sixth less time."""
    gc.freeze()
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    gc.enable()


@pytest.hookimpl(trylast=True)  # pytest looks for garbage once more in its own, which takes seconds
def pytest_unconfigure() -> None:
    """Let the interpreter end as it does elsewhere."""
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that may import what an older library does not have."""
    names = [name for name, _ in left_out() if name.endswith(".py")]
    return True if any(collection_path.as_posix().endswith(f"/{name}") for name in names) else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``slow``, and give each group to one worker; ``VITRIM_FULL_MATRIX=1`` runs everything.

    ``-m slow`` runs one case of every slow test.

    Of the cases of a test that is marked ``sampled(n)``, every n-th stays. In a table of hosts and methods, host by
    host, that is a diagonal: it meets all hosts and all methods where n divides neither number.

    Tests that share a fixture of their module are a group: in two workers the fixture would be made twice. Large groups
    come first by themselves, so that the workers end with single tests, and at about the same time.
    """
    for name, reason in left_out():
        for item in items:
            if fnmatch(item.nodeid, f"*{name.replace('[', '[[]')}*"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if not FULL_MATRIX:
        places, asked, unasked = Counter[str](), list[pytest.Item](), list[pytest.Item]()
        wanted = config.option.markexpr == "slow"
        for item in items:
            mark, test = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
            fits = (item.get_closest_marker("slow") is not None) == wanted
            every = len(items) if wanted else mark.args[0] if mark else 1
            (unasked if not fits or places[test] % every else asked).append(item)
            places[test] += fits
        config.hook.pytest_deselected(items=unasked)
        items[:] = asked
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        shared = {
            one.baseid
            for fixtures in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
            for one in fixtures[-1:]
            if one.scope == "module"
        }
        if shared and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test in which the installed library is too old for what it asks for."""
    report: Any = yield
    if report.failed and call.excinfo is not None and (reason := refusal(call.excinfo.value)) is not None:
        report.outcome, report.longrepr = "skipped", (*item.location[:2], reason)
    return report


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)  # what a module's fixtures compute is made before this runs for its first test


@pytest.fixture(autouse=True)
def _a_calm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other, which reports of times would say."""

    @contextmanager
    def calm() -> Iterator[list[MachineWatch]]:
        yield [MachineWatch(1.0, 1.0, 1.0, 2)]

    monkeypatch.setattr(timing, "watched_machine", calm)


@pytest.fixture(autouse=True)
def _no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow now and then would add lines on what a command is doing."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 3600.0)


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images to train on, and 11 to test on: shares of 6 and 5, which batches of 5 make two and one."""
    from tiny_training import write_images

    folder = write_images(tmp_path_factory.mktemp("uneven"))
    (folder / "test/ant/0.png").unlink()
    return folder


@pytest.fixture(scope="session")
def two_processes(uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes leave that `training_worker.py` runs in: they are started once for all tests."""
    from cli_runs import in_two_processes
    from tiny_training import COPIES, TINY

    out = tmp_path_factory.mktemp("two")
    tiny = out / "tiny.yaml"
    tiny.write_text(yaml.safe_dump({**TINY, **COPIES, "dataset": "folders of colours"}))
    in_two_processes(Path(__file__).with_name("training_worker.py"), uneven, tiny, out)
    return out


@pytest.fixture
def neither_len_nor_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where vitrim calls ``len(x)``, in an exported file a constant, or asks if a module is true.

    A compiled module has a ``__len__`` that fails.
    """
    length, package = torch.Tensor.__len__, Path(loading.__file__).parent

    def refuse(asked: str) -> None:
        caller = Path(sys._getframe(2).f_code.co_filename)
        assert package not in caller.parents, f"{caller.relative_to(package)} asks for {asked}"

    def read(x: torch.Tensor) -> int:
        if x.dim() > 1 and not isinstance(x, torch.nn.Parameter):
            refuse("the len of a tensor: x.shape[0]")
        return length(x)

    def truth(module: torch.nn.Module) -> bool:
        refuse("the truth of a module: is not None")
        return True

    monkeypatch.setattr(torch.Tensor, "__len__", read)
    monkeypatch.setattr(torch.nn.Module, "__bool__", truth, raising=False)


FITTING = set[str]()


@pytest.fixture(autouse=True)
def _models_that_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a model on the meta device, a tenth of a second, is made once for every name and options."""
    check = loading._check_fit

    def known(name: str, options: Any, device: Any) -> None:
        key = repr((name, options, device))
        if key not in FITTING:
            check(name, options, device)
            FITTING.add(key)

    monkeypatch.setattr(loading, "_check_fit", known)


PROFILES: dict[tuple[object, ...], Any] = {}


@pytest.fixture(scope="module")
def macs_counted_once() -> Iterator[None]:
    """Searches know the MACs that an earlier one counted from shapes alone, for the same layers and method.

    A search counts some twenty settings before its first, which takes a second; most tests search the same model.
    """
    from vitrim.tuning import cost

    count = cost.profile_of

    def known(model: torch.nn.Module, method: Any, images: Any) -> Any:
        if not isinstance(images, torch.Tensor) or images.device.type != "meta":
            return count(model, method, images)
        key = (repr(model), None if method is None else method.describe(), images.shape)
        if key not in PROFILES:
            PROFILES[key] = count(model, method, images)
        return PROFILES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "profile_of", known)
        yield


@pytest.fixture
def ref(request: pytest.FixtureRequest) -> Reference:
    """A reference file that the test names by `golden_files.cases` and has to use up."""
    return Reference(request.param)


# a test that leaves out an array of its reference file fails
pytest_pyfunc_call = pytest.hookimpl(wrapper=True)(using_up)
