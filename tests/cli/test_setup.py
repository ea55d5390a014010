"""Groups of options: how a command gets them, and what they come to."""

from __future__ import annotations

import doctest
import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from vitrim.cli.setup import Compute, Data, Images, Machine, Model, Record, Weights, flat
from vitrim.errors import VitrimError


def invoke(command: object, *arguments: object) -> str:
    """Standard output of ``command`` with these arguments; errors come out as they are raised."""
    app = typer.Typer()
    app.command()(flat(command))  # type: ignore[arg-type]
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout


def test_a_command_gets_the_options_of_its_groups() -> None:
    seen = []

    def show(*, model: Model, data: Data, machine: Machine, record: Record, more: int = 1) -> None:
        """Show."""
        seen.append((model, data, machine, record, more))

    arguments = ["vit", "--pretrained", "--model-option", "depth=2", "--data", "here", "--split", "test", "--limit", 3]
    invoke(show, *arguments, "--seed", 5, "--more", 2)
    [(model, data, machine, record, more)] = seen
    assert model == Model(name="vit", pretrained=True, model_option=["depth=2"])
    assert model.options == {"depth": 2}
    assert data == Data(source="here", split="test", limit=3)
    assert machine == Machine(device="cpu", threads=None, seed=5)
    assert (record, more) == (Record(json=None), 2)


def test_an_option_that_two_groups_have_is_a_mistake() -> None:
    def show(*, first: Compute, second: Machine) -> None:
        """Show."""

    with pytest.raises(ValueError, match="duplicate parameter name"):
        flat(show)


def test_the_record_is_checked_before_the_command_and_written_by_it(tmp_path: Path) -> None:
    def show(*, record: Record) -> None:
        """Show."""
        record.write("show", rows=[1])

    invoke(show, "--json", tmp_path / "new" / "record.json")
    assert json.loads((tmp_path / "new" / "record.json").read_text()) == {"command": "show", "rows": [1]}
    assert json.loads(invoke(show, "--json", "-")) == {"command": "show", "rows": [1]}
    assert invoke(show) == ""


def test_a_record_that_cannot_be_written_stops_the_command_before_it_begins(tmp_path: Path) -> None:
    def show(*, record: Record) -> None:
        """Show."""
        pytest.fail("it has begun")

    with pytest.raises(VitrimError, match="it is a folder"):
        invoke(show, "--json", tmp_path)


@pytest.mark.parametrize("option", ["split", "image_column", "label_column"])
def test_which_images_to_read_says_nothing_where_none_are(option: str) -> None:
    message = f"--{option.replace('_', '-')} says which images to read, and none are: give --images too"
    with pytest.raises(VitrimError, match=message):
        Images(**{option: "x"})
    assert Images().open() is None
    Images(source="somewhere", **{option: "x"})


def test_a_model_with_its_weights(tmp_path: Path) -> None:
    model = Model(name="test_vit", model_option=["num_classes=3", "img_size=32"])
    Compute(seed=1).start()
    first = model.load()
    assert first.num_classes == 3
    assert model.weights == "random"
    Compute(seed=1).start()
    again = Weights(model_option=model.model_option).create("test_vit")
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())
    kept = Model(name="test_vit", checkpoint=tmp_path / "x.safetensors")
    assert kept.weights == str(tmp_path / "x.safetensors")
    assert kept.learned is None


def test_threads_are_set_where_they_are_given() -> None:
    before = torch.get_num_threads()
    try:
        assert Machine(threads=before + 1).select() == torch.device("cpu")
        assert torch.get_num_threads() == before + 1
        Compute().start()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(VitrimError, match="unknown device 'warp'"):
        Machine(device="warp").select()


def test_examples() -> None:
    result = doctest.testmod(import_module("vitrim.cli.setup"))
    assert (result.failed, result.attempted) == (0, 3)
