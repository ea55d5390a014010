"""The help of every command fits on a screen, says what it is by an example, and hides nothing."""

from __future__ import annotations

import doctest
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from cli_runs import exit_code
from vitrim import cli
from vitrim.cli import COMMANDS, app
from vitrim.cli.help import EXAMPLES


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_is_one_screen_and_names_every_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = []
    for flag in ("-h", "--help"):
        assert exit_code(monkeypatch, *([command] if command else []), flag) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    lines = found[0].splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert "9223372036854775807" not in found[0]
    assert lines[0].count("[") == lines[0].count("]")
    assert lines[0].count("KEY=VALUE") == (command == "train")
    group = typer.main.get_command(app)
    for one in (group.commands[command] if command else group).params:
        if one.name != "help" and one.param_type_name == "option":
            assert any(line.startswith("  -") and name in line for line in lines for name in one.opts), one.name


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_group_stand_under_its_heading(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that a group inherits, too: how images are read stands where the images are."""
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(monkeypatch, command, "-h") == 0
    heading, under = "", {}
    for line in capsys.readouterr().out.splitlines():
        heading = line if line[:1].isupper() else heading
        under.update({word: heading for word in line.split()[:1] if line.startswith("  --")})
    for option, expected in {"--split": "Images", "--image-column": "Images", "--model-option": "Model"}.items():
        assert under.get(option, expected) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_it_takes(command: str) -> None:
    words = shlex.split(EXAMPLES[command])
    assert words[:2] == ["vitrim", command]
    known = typer.main.get_command(app).commands[command]
    known.make_context(command, words[2:])  # raises what the command line would refuse


def test_completion_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # typer reads it as it makes the command
    monkeypatch.setattr(cli, "app", typer.main.get_command(app))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert exit_code(monkeypatch, "--install-completion", "bash") == 0
    assert "vitrim" in (tmp_path / ".bashrc").read_text()
    assert "bash completion installed" in capsys.readouterr().out


def test_examples() -> None:
    result = doctest.testmod(import_module("vitrim.cli.help"))
    assert (result.failed, result.attempted) == (0, 2)


def test_help_imports_nothing_that_takes_time() -> None:
    program = "import sys, vitrim.cli; print([name for name in ('torch', 'numpy', 'yaml') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
