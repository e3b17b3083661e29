"""Promise: a head that is written over another one takes its place whole, or the other one stays as it was."""

import contextlib
import json
from pathlib import Path

import pytest

from foredraft.heads import load_head, save_head
from foredraft.heads.target_model import Target
from tests.support.head_factory import make_head, same


@pytest.mark.parametrize(("first", "second"), [("eagle3", "medusa"), ("dflash", "medusa"), ("medusa", "hydra")])
def test_files_of_another_layout_do_not_stay(first: str, second: str, target: Target, tmp_path) -> None:
    save_head(make_head(first, target), tmp_path / "head", target)
    save_head(head := make_head(second, target), tmp_path / "head", target)
    assert same(load_head(tmp_path / "head", target), head)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("foreign", [False, True])
def test_an_interrupted_write_leaves_the_head_that_was_there(
    call, foreign, target: Target, tmp_path, monkeypatch
) -> None:
    """Check a folder with nothing but a head. In others each file is replaced separately, and other files stay."""
    folder, old, new = tmp_path / "head", make_head("medusa", target), make_head("eagle3", target)
    save_head(old, folder, target)
    if foreign:
        (folder / "notes.txt").write_text("mine")
    calls, rename = [], Path.rename

    def interrupted(self: Path, *args):
        calls.append(self)
        if len(calls) == call:
            raise KeyboardInterrupt
        return rename(self, *args)

    monkeypatch.setattr(Path, "rename", interrupted)
    finished = foreign or call not in (1, 2)
    with contextlib.nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        save_head(new, folder, target)
    assert same(load_head(folder, target), new if finished else old)
    assert not foreign or (folder / "notes.txt").read_text() == "mine"


def test_a_card_of_the_head_before_goes_and_another_text_stays(target: Target, tmp_path) -> None:
    for text, stays in (("SHA-256 of the weights: " + "0" * 64, False), ("# Notes", True)):
        save_head(make_head("medusa", target), tmp_path / "head", target)
        (tmp_path / "head" / "README.md").write_text(text)
        save_head(head := make_head("medusa", target), tmp_path / "head", target)
        assert same(load_head(tmp_path / "head", target), head)
        assert (tmp_path / "head" / "README.md").is_file() == stays


def test_a_head_is_written_into_the_current_directory(target: Target, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("medusa", "eagle3"):
        save_head(head := make_head(kind, target), ".", target)
        assert same(load_head(".", target), head)
    assert json.loads(Path("config.json").read_text())["foredraft"]["kind"] == "eagle3"


def test_the_home_directory_has_a_short_name(target: Target, tiny_path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny_path)
    assert Target.from_pretrained("~/model", dtype="float32", device="cpu").vocab_size == target.vocab_size
    save_head(head := make_head("medusa", target), "~/head", target)
    assert same(load_head("~/head", target), head)
    with pytest.raises(ValueError, match="~/nothing is neither a directory"):
        load_head("~/nothing", target)


def test_a_readme_in_another_encoding_is_no_obstacle(target: Target, tmp_path) -> None:
    save_head(make_head("medusa", target), tmp_path, target)
    (tmp_path / "README.md").write_bytes("Köpfe".encode("latin-1"))
    save_head(head := make_head("medusa", target), tmp_path, target)
    assert same(load_head(tmp_path, target), head)
