"""Writing results: whole or not at all, and refused before the work."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from vitrim.errors import VitrimError
from vitrim.files import (
    cache_folder,
    check_file,
    check_folder,
    json_text,
    remembered,
    safe_name,
    save_file,
    whole_lines,
    write_text,
)
from vitrim.measure.records import Row

NOBODY = 65534


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.json"
    write_text(file, "one")
    write_text(file, "two")
    assert file.read_text() == "two"
    assert os.listdir(file.parent) == ["b.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_and_a_device_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(VitrimError, match="cannot write /dev/full: No space left on device"):
        write_text(Path("/dev/full"), "text")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_file_of_the_users_that_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    (tmp_path / "x.json.partial").write_text("mine")
    write_text(tmp_path / "x.json", "text")
    assert (tmp_path / "x.json.partial").read_text() == "mine"


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text("old")

    def full(self: Path, text: str, encoding: str | None = None) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(VitrimError, match="No space left on device"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_what_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = {
        "": "a folder, or an empty name",
        str(tmp_path): "it is a folder",
        str(tmp_path / "file" / "x.json"): "file is a file|Not a directory",
        str(tmp_path / "file" / "deep" / "x.json"): "file is a file|Not a directory",
        "x" * 500: "File name too long",
        "/dev/full.onnx": "/dev holds devices, and there is none of this name",
    }
    for name, message in cases.items():
        with pytest.raises(VitrimError, match=message):
            check_file(Path(name))
    with pytest.raises(VitrimError, match="the folder to write to is the current one or empty"):
        check_folder(Path())
    with pytest.raises(VitrimError, match="file is a file"):
        check_folder(tmp_path / "file" / "run")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user who owns nothing where root runs the tests: root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.setresuid(NOBODY, NOBODY, 0)  # the real one, too: that is whom os.access asks about
    except (AttributeError, OSError) as error:
        pytest.skip(f"root cannot become another user here: {error}")
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_no_permission() -> None:
    with TemporaryDirectory() as name:  # tmp_path is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir()
        (folder / "closed").chmod(0o555)
        (folder / "read_only").write_text("old")
        (folder / "read_only").chmod(0o444)
        (folder / "secret").mkdir()
        (folder / "secret").chmod(0o000)
        closed = folder / "closed"
        with unprivileged():
            for check, place in ((check_file, closed / "x.json"), (check_folder, closed / "run")):
                with pytest.raises(VitrimError, match=f"cannot write to {place}: no permission in {closed}$"):
                    check(place)
            with pytest.raises(VitrimError, match=r"no permission to change it$"):
                check_file(folder / "read_only")
            with pytest.raises(VitrimError, match=r"cannot write .*: Permission denied$"):
                check_file(folder / "secret" / "x.json")
            for file in (closed / "x.json", folder / "read_only", folder / "secret" / "x.json"):
                with pytest.raises(VitrimError, match="cannot write"):
                    write_text(file, "new")
        (folder / "secret").chmod(0o700)
        assert (folder / "read_only").read_text() == "old"
        assert not list(closed.iterdir())
        assert not list((folder / "secret").iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_weights_have_the_mode_of_other_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights.safetensors").stat().st_mode) == 0o666 & ~umask
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["a"], torch.zeros(2))


def test_weights_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    shared = torch.zeros(2)
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": shared, "b": shared}, tmp_path / "weights.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", [f"a/{'x' * 300}/b.json", f"{'é' * 200}/b.json"], ids=["long", "bytes"])
def test_a_folder_whose_name_is_too_long_is_found_beforehand(tmp_path: Path, name: str) -> None:
    for check in (check_file, check_folder):
        with pytest.raises(VitrimError, match="File name too long"):
            check(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_json_is_strict():
    """What other programs read: no NaN, and rows as objects."""
    text = json_text({"a": [1.5, float("nan")], "b": Row("tome", {"c": float("inf")}), "d": (True, None, "x")})
    assert json.loads(text) == {"a": [1.5, None], "b": {"method": "tome", "c": None}, "d": [True, None, "x"]}
    assert "NaN" not in text
    with pytest.raises(TypeError):
        json_text({"a": object()})


def test_a_log_is_read_to_its_damaged_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for text, found in (
        (b"", ([], 0)),
        (b"12", ([], 0)),
        (b"1\n22\n3", ([1, 22], 5)),
        (b"1\nx\ny\n3", ([1], 2)),
        (b"x\n", ([], 0)),
    ):
        file.write_bytes(text)
        assert whole_lines(file, int) == found
    file.write_bytes(b"1\nx\ny\n3\n")
    with pytest.raises(VitrimError, match=r"log, line 2, is damaged: invalid literal for int"):
        whole_lines(file, int)
    with pytest.raises(VitrimError, match=r"^cannot read .*: No such file"):
        whole_lines(tmp_path / "none", int)


def test_long_names_are_cut_and_stay_different() -> None:
    assert safe_name("a" * 120, "") == "a" * 120
    first, second = (safe_name("a" * 121 + end, "") for end in "xy")
    assert first != second
    assert len(first) == len(second) == 109


# ---- choices that are kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitrim" / "choice.json"


def test_a_choice_is_made_once_on_a_machine(cache: Path) -> None:
    asked: list[str] = []

    def measure(answer: str) -> Callable[[], str]:
        def measured() -> str:
            asked.append(answer)
            return answer

        return measured

    valid = ("a", "b")
    assert remembered("choice.json", "one", measure("a"), valid) == "a"
    assert remembered("choice.json", "one", measure("b"), valid) == "a"  # as another process would
    assert remembered("choice.json", "other", measure("b"), valid) == "b"
    assert asked == ["a", "b"]
    assert json.loads(cache.read_text()) == {"one": "a", "other": "b"}
    assert [path.name for path in cache.parent.iterdir()] == ["choice.json"]


@pytest.mark.parametrize("content", [b"{broken", b"[]", b"\xff", b'{"one": "c"}', b'{"one": ["a"]}', b"[" * 100_000])
def test_a_damaged_choice_is_made_anew(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert remembered("choice.json", "one", lambda: "b", ("a", "b")) == "b"
    assert json.loads(cache.read_text())["one"] == "b"


def test_without_a_cache_every_process_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert remembered("choice.json", "one", lambda: "b", ("a", "b")) == "b"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert remembered("choice.json", "one", lambda: "a", ("a", "b")) == "a"


def test_the_cache_is_where_the_user_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # does not count, by the specification
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "someone")
    assert cache_folder() == tmp_path / "someone" / ".cache" / "vitrim"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "vitrim"
