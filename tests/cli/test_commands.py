"""What holds for every command: its arguments, the options that it shares; ``vitrim --version``."""

from __future__ import annotations

import inspect
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.main

import vitrim
import vitrim.cli
from cli_runs import exit_code
from vitrim.cli import COMMANDS, app
from vitrim.cli.options import flat
from vitrim.cli.output import resumable

OWN = {
    "bench": {"--precision", "--figure"},  # several values; a picture of times
    "compare": {"--precision", "--figure"},
    # engines that run files, and by default those that are here; image sizes to try, by default those around the own;
    # images that are needed, as by freeze
    "optimize": {"--out", "--resume", "--engine", "--precision", "--img-size", "--images"},
    "profile": {"--limit"},  # of random images too
    "demo": {"--out"},
    "freeze": {"--method", "--out", "--images"},  # one; a file, not a folder
    "export": {"--precision", "--out", "--img-size"},  # one each; a file, not a folder
    "eval": {"--out", "--resume", "--select"},  # several selectors, of retrievers of pages
    "tune": {
        "--out",
        "--resume",
        "--check",
        "--engine",
        "--precision",
        "--img-size",
    },  # data, not a number of images; the engines of one clock; one size
    "analyze": {
        "--data",
        "--out",
        "--format",
        "--blocks",
    },  # no data where there are stored records; blocks of two figures
    "show": {"--data", "--out", "--limit", "--format"},  # no data where there are files; few pictures; one kind
    "train": {
        *("--data", "--checkpoint", "--device", "--out", "--resume"),  # a recipe chooses, and accelerate
        *("--model", "--limit"),  # changes of the recipe
    },
}
"""Options that mean something else in this command than in the others that have them."""


def parameters(command: str) -> list[Any]:
    return list(typer.main.get_command(app).commands[command].params)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_argument_is_hidden_and_every_option_says_what_it_is(command: str) -> None:
    for parameter in parameters(command):
        assert not getattr(parameter, "hidden", False), parameter.name
        assert parameter.name == "help" or parameter.help, parameter.name


def test_an_option_of_several_commands_is_one_option() -> None:
    """It is declared once, and has one default, but for two: `bench` must be given a method and times several sizes."""
    found: dict[str, dict[str, tuple[Any, Any]]] = defaultdict(dict)
    for command, function in COMMANDS.items():
        for one in inspect.signature(flat(function)).parameters.values():
            if one.annotation is typer.Context:
                continue
            [option] = one.annotation.__metadata__
            if not isinstance(option, typer.models.OptionInfo):
                continue
            names = [name for name in (option.default, *(option.param_decls or ())) if str(name).startswith("--")]
            name = names[0] if names else f"--{one.name.replace('_', '-')}"
            if name not in OWN.get(command, ()):
                found[name][command] = (option, one.default)
    for name in set(found) - {"--method", "--batch-size"}:
        options, defaults = zip(*found[name].values(), strict=True)
        assert all(option is options[0] for option in options), name
        assert len(set(defaults)) == 1, name
    assert set(found["--json"]) == set(COMMANDS) - {"app"}  # which serves, and ends with nothing to record
    for name in ("--pretrained", "--checkpoint", "--model-option", "--seed", "--threads", "--split"):
        assert {"profile", "bench", "eval"} <= set(found[name])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_names_every_command(command: str) -> None:
    assert f"vitrim {command}" in (Path(__file__).parents[2] / "README.md").read_text()


def test_version_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--version") == 0
    assert capsys.readouterr() == (f"vitrim {vitrim.__version__}\n", "")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),  # 128 and the number of the signal, as of any program in a shell
        (typer.Abort(), 130, "interrupted"),
        (130, 130, "interrupted"),  # typer's result where it saw the signal itself
        (SystemExit(143), 143, "terminated"),
        (vitrim.VitrimError("one\ntwo"), 2, "error: one two"),
        (OSError(28, "No space left on device", "x.json"), 2, "error: x.json: No space left on device"),
        (SystemExit(7), 7, ""),
        (None, 0, ""),
    ],
    ids=repr,
)
def test_how_a_command_ends(
    end: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**_: object) -> Any:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(vitrim.cli, "app", run)
    assert exit_code(monkeypatch) == code
    assert capsys.readouterr().err.strip() == said


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**_: object) -> None:
        raise OSError(5000, "no error of a system")

    monkeypatch.setattr(vitrim.cli, "app", run)
    with pytest.raises(OSError, match="no error of a system"):
        exit_code(monkeypatch)


def test_a_signal_ends_a_command_and_is_then_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(vitrim.cli, "app", lambda **_: signal.raise_signal(signal.SIGTERM))
    assert exit_code(monkeypatch) == 143
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)], ids=["ctrl-c", "sigterm"])
def test_a_long_command_that_is_ended_says_how_to_go_on(
    end: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "optimized" / "study.jsonl"
    with pytest.raises(type(end)), resumable(kept):
        raise end  # before anything was kept
    assert capsys.readouterr().err == ""
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(type(end)), resumable(kept):
        raise end
    assert capsys.readouterr().err == f"kept in {kept.parent}: the same command with --resume goes on from there\n"
