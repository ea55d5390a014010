"""Groups of options: how a command gets them, what they refuse, and where results go."""

from __future__ import annotations

import doctest
import json
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vitrim.cli.options import Compute, Data, Images, Machine, Model, flat
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec
from vitrim.measure.inputs import ScoredData
from vitrim.report import Report, Table


def invoke(command: object, *arguments: object) -> str:
    """Standard output of ``command`` with these arguments; errors come out as they are raised."""
    app = typer.Typer()
    app.command()(flat(command))  # type: ignore[arg-type]
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout


def test_a_command_gets_the_options_of_its_groups() -> None:
    seen = []

    def show(*, model: Model, data: Data, machine: Machine, output: Output, more: int = 1) -> None:
        """Show."""
        seen.append((model, data, machine, output, more))

    arguments = ["vit", "--pretrained", "--model-option", "depth=2", "--data", "here", "--split", "test", "--limit", 3]
    invoke(show, *arguments, "--seed", 5, "--more", 2)
    [(model, data, machine, output, more)] = seen
    assert model == Model(name="vit", pretrained=True, model_option=["depth=2"])
    assert model.spec(model.name) == ModelSpec("vit", pretrained=True, options={"depth": 2})
    assert data == Data(source="here", split="test", limit=3)
    assert data.read(workers=2) == ScoredData("here", split="test", limit=3, workers=2, options={})
    assert machine == Machine(device="cpu", threads=None, seed=5)
    assert (output, more) == (Output(json=None), 2)


def test_an_option_that_two_groups_have_is_a_mistake() -> None:
    def show(*, first: Compute, second: Machine) -> None:
        """Show."""

    with pytest.raises(ValueError, match="duplicate parameter name"):
        flat(show)


def test_a_report_is_printed_and_its_record_written(tmp_path: Path) -> None:
    report = Report("show", {"seed": 0}, [{"a": 1}], [Table("t", "", ("a",), [(1,)])], ["read it so"])

    def show(*, output: Output) -> None:
        """Show."""
        output.finish(report)

    printed = invoke(show, "--json", tmp_path / "new" / "record.json")
    assert "note: read it so" in printed
    assert json.loads((tmp_path / "new" / "record.json").read_text()) == report.record
    assert json.loads(invoke(show, "--json", "-")) == report.record  # and the tables on standard error
    assert invoke(show) == printed


def test_a_record_that_cannot_be_written_stops_the_command_before_it_begins(tmp_path: Path) -> None:
    def show(*, output: Output) -> None:
        """Show."""
        pytest.fail("it has begun")

    with pytest.raises(VitrimError, match="it is a folder"):
        invoke(show, "--json", tmp_path)


@pytest.mark.parametrize("option", ["split", "image_column", "label_column"])
def test_which_images_to_read_says_nothing_where_none_are(option: str) -> None:
    message = f"--{option.replace('_', '-')} says which images to read, and none are: give --images too"
    with pytest.raises(VitrimError, match=message):
        Images(**{option: "x"})
    Images(source="somewhere", **{option: "x"})


def test_examples() -> None:
    result = doctest.testmod(import_module("vitrim.cli.options"))
    assert (result.failed, result.attempted) == (0, 4)


@pytest.mark.parametrize("given", [("a.png", "a.png"), ("a.png", "b/../a.png"), ("a.png", "link.png")])
def test_two_results_in_one_file_are_refused_before_the_work(
    given: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    Path("link.png").symlink_to("a.png")

    def draw(*, figure: Path | None = None, output: Output) -> None:
        raise AssertionError("it ran")

    with pytest.raises(VitrimError, match=r"two results would be written to (a|b/../a|link)\.png: give each a place"):
        invoke(draw, "--figure", given[0], "--json", given[1])
    assert not Path("a.png").exists()


def test_results_of_which_one_is_a_device_or_both_are_folders_may_share_a_place(tmp_path: Path) -> None:
    ran = []

    def write(
        *, out: Path | None = None, decisions: Path | None = None, figure: Path | None = None, output: Output
    ) -> None:
        ran.append(output.json)

    folders = ("--out", tmp_path, "--decisions", tmp_path)
    invoke(write, *folders, "--json", "/dev/null", "--figure", "/dev/null")
    invoke(write, *folders, "--json", "-", "--figure", "-")
    assert ran == ["/dev/null", "-"]
