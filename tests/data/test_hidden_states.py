"""Features on disk: the losses of the features themselves, and whatever is wrong with a shard is said."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.attention.masks import PackedMask
from foredraft.heads.base import PackedBatch
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states import offline, online, storage
from foredraft.train.runtime import distributed
from tests.support.batches import batch, batch_of, documents
from tests.support.tiny import tiny_config

LAYERS = [1, 2, 3]


def rows(seed: int = 0) -> Packed:
    torch.manual_seed(5)
    return Packed(documents(40, 25, 33, 60, 21, 50, 44), length=32, seed=seed)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes of these tests: the same bits
    yield
    torch.set_num_threads(threads)


def stored(target: Target, path: Path, dtype: str = "float32", packed: Packed | None = None):
    return offline.offline(packed or rows(), target, LAYERS, 2, str(path), dtype=dtype, shard_rows=2)


def read(target: Target, path: Path, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read hidden states as the head gets them, from sequences with nothing but what is stored."""
    batch = batch_of(stored(target, path, dtype))
    here = {name: value for name, value in batch.items() if name not in PackedBatch._fields}
    each = offline.bytes_per_position(target, LAYERS, dtype)
    assert sum(value.nbytes for value in here.values()) == each * len(rows()) * 32
    assert here["features"].dtype == storage.DTYPES[dtype]
    return storage.unpack(here)


def hidden(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return online.forward_target(target, PackedBatch(**batch_of(rows())), LAYERS)


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    """Write the states in one run."""
    path = tmp_path_factory.mktemp("features") / "whole"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stored(target, path)
    torch.set_num_threads(threads)
    return path


@pytest.mark.parametrize(("dtype", "relative", "absolute"), [("bfloat16", 2**-8, 0), ("float8", 2**-4, 2**-9 / 448)])
def test_stored_states_are_rounded_and_nothing_else(
    target, tmp_path: Path, dtype: str, relative: float, absolute: float
):
    """Check half a unit in the last of eight binary places, or of four of each layer's scale. Sums of another order of rows
    may tip one over."""
    for given, exact in zip(read(target, tmp_path, dtype), hidden(target), strict=True):
        assert given.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        given, exact = (x.float().unflatten(-1, (-1, target.hidden_size)) for x in (given, exact))
        largest = exact.abs().amax(-1, keepdim=True)
        assert ((given - exact).abs() <= relative * exact.abs() + absolute * largest + 1e-5).all()


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_a_store_with_more_layers_serves_a_head_that_takes_some(target, tmp_path: Path, dtype: str):
    more = [layer for layer in range(target.num_layers + 1) if layer not in LAYERS]
    given = {"path": str(tmp_path), "dtype": dtype, "shard_rows": 2}
    first = batch_of(offline.offline(rows(), target, LAYERS, 2, **given, extra_layer_ids=more))
    for wanted in (LAYERS, more[:1], [LAYERS[0], more[0]], [*LAYERS, *more][::-1]):
        found = storage.unpack(batch_of(offline.offline(rows(), target, wanted, 2, **given)))
        exact = online.forward_target(target, PackedBatch(**batch_of(rows())), wanted)
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.float(), theirs, atol=1e-5 if dtype == "float32" else 0.15, rtol=0.07)
    assert first["features"].shape[-1] == len(LAYERS) * target.hidden_size
    with pytest.raises(ValueError, match=r"layers is \[0, 1, 2, 3, 4, 5, 6\] there, \[2, 7\] here"):
        offline.offline(rows(), target, [2, 7], 2, **given)


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_a_file_of_rows_is_bounded_in_bytes(target, tmp_path: Path, monkeypatch, dtype: str):
    """Bound the memory: 256 sequences of an 8B model are 17 GB, which each process of a run would load."""
    row = offline.bytes_per_position(target, LAYERS, dtype) * 32
    given = {"path": str(tmp_path), "dtype": dtype}
    monkeypatch.setattr(offline, "SHARD_BYTES", 3 * row + 1)
    first = batch_of(offline.offline(rows(), target, LAYERS, 2, **given))
    files = sorted(tmp_path.glob("shard-*.safetensors"))
    assert len(files) == -(-len(rows()) // 3) > 1
    assert max(file.stat().st_size for file in files) < 3 * row + 4096
    monkeypatch.undo()  # the same store is read whatever its files hold
    again = batch_of(offline.offline(rows(), target, LAYERS, 2, **given, shard_rows=2))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].view(torch.uint8), again[name].view(torch.uint8)) for name in first)
    monkeypatch.setattr(offline, "SHARD_BYTES", 1)
    assert offline.describe(rows(), target, LAYERS, dtype, 256)["shard_rows"] == 1


def test_killed_writers_go_on_and_leave_the_same_manifest(target, whole: Path, tmp_path: Path):
    """End two writers in their second files, which stay half written."""
    path, calls, save_file = tmp_path / "features", itertools.count(), offline.save_tensors

    def save(tensors: dict, file: Path, **facts) -> None:
        if next(calls) % 2:
            file.write_bytes(b"half of")
            raise KeyboardInterrupt
        save_file(tensors, file, **facts)

    for rank in (0, 1):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(offline, "save_tensors", save)
            facts = offline.describe(rows(), target, LAYERS, "float32", 2)
            offline.write(rows(), target, facts, path, 2, rank, 2)
    there = {file.name: file.stat().st_mtime_ns for file in path.glob("shard-*.safetensors")}
    wanted = json.loads((whole / offline.MANIFEST).read_text())["shards"]
    assert there.keys() == {"shard-00000.safetensors", "shard-00001.safetensors"} and len(there) < len(wanted)
    assert not (path / offline.MANIFEST).exists()
    for number, half in enumerate(sorted(path.glob("*.part"))):
        os.utime(half, (half.stat().st_atime, time.time() - number * 2 * offline.UNFINISHED_S))
    fresh = path / "dataset.jsonl.part"  # of another program
    fresh.touch()
    stored(target, path)
    for file in whole.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    assert all((path / name).stat().st_mtime_ns == time for name, time in there.items())  # not written twice
    assert len(list(path.glob("shard-*.part"))) == 1 and fresh.exists()  # a newer one may still have its writer
    assert len({file.stat().st_mode for file in whole.iterdir()}) == 1  # others may read all or nothing


def test_all_processes_decide_alike_whether_there_are_states(target, whole: Path, monkeypatch):
    """Another run has finished between the looks of the first process and of this one."""
    waits = list[None]()
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "broadcast", lambda value: False)
    monkeypatch.setattr(distributed, "barrier", lambda: waits.append(None))
    stored(target, whole)
    assert len(waits) == 2  # as the first process


def test_a_cut_or_missing_shard_is_named(target, whole: Path, tmp_path: Path):
    shutil.copytree(whole, path := tmp_path / "features")
    file = path / "shard-00002.safetensors"
    for size in (-7, 100, 3):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"shard-00002\.safetensors is damaged \(.*\); delete it and the manifest"):
            batch_of(stored(target, path))
    file.unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors is missing"):
        stored(target, path)


def test_another_targets_shard_and_other_data_are_named(target, whole: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"data_hash is"):
        stored(target, whole, packed=rows(seed=1))
    torch.manual_seed(9)
    other = Target(LlamaForCausalLM(tiny_config()), name="other/model")
    stored(other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"hidden states in .* are of another run \(target_hash is"):
        stored(target, tmp_path / "other")
    shutil.copytree(whole, path := tmp_path / "features")
    shutil.copy(tmp_path / "other" / "shard-00001.safetensors", path)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors was written for other/model \(target_hash"):
        batch_of(stored(target, path))
    (path / offline.MANIFEST).unlink()  # nor is it kept when a writer goes on
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors was written for other/model"):
        stored(target, path)


def test_states_of_a_target_in_another_dtype_are_named(tiny_path: Path, tmp_path: Path):
    """Its weights are the same where they lie on disk in the smaller one."""
    half = Target.from_pretrained(tiny_path, dtype="bfloat16", device="cpu")
    half.model.save_pretrained(tmp_path / "half")
    full = Target.from_pretrained(tmp_path / "half", dtype="float32", device="cpu")
    stored(half, path := tmp_path / "features")
    refused = pytest.raises(
        ValueError, match=r"\(target_dtype is bfloat16 there, float32 here\): set target.dtype=bfloat16"
    )
    with refused:
        stored(full, path)
    manifest = path / offline.MANIFEST
    without = json.loads(manifest.read_text())
    manifest.unlink()
    with pytest.raises(
        ValueError, match=r"shard-00000\.safetensors was written for .* \(target_dtype bfloat16, not float32"
    ):
        stored(full, path)
    del without["target_dtype"]
    manifest.write_text(json.dumps(without))
    assert len(stored(full, path)) == len(rows())  # an earlier version wrote it


def test_a_full_disk_is_said_before_anything_is_written(target, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(offline.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"has 1,?000 bytes free and the hidden states take .* kB|1 kB free"):
        stored(target, tmp_path / "full")
    assert "hidden states: " in capsys.readouterr().out and not list((tmp_path / "full").glob("shard-*"))


def test_a_fine_tune_has_another_hash(target, tiny_path: Path):
    other = Target.from_pretrained(tiny_path, dtype="float32", device="cpu", pack=False)
    assert offline.target_hash(other) == offline.target_hash(target)
    with torch.no_grad():
        other.model.model.layers[3].mlp.up_proj.weight.mul_(1.01)
    assert offline.target_hash(other) != offline.target_hash(target)


def test_few_shards_are_open_at_a_time(target, whole: Path, monkeypatch):
    monkeypatch.setattr(offline, "OPEN", 2)
    rows = stored(target, whole)
    for row in [*range(len(rows)), *range(len(rows))]:
        rows[row]
        assert len(rows.opened) <= 2
    assert len(rows.files) > 2


def test_no_mask_of_a_packed_row_is_made(target: Target, monkeypatch: pytest.MonkeyPatch):
    """Check another attention implementation, with which documents become a padded batch: the hidden states are the same."""
    text = batch(40, 25)
    expected = target.forward(
        text.tokens, text.positions, target.masks(text.mask(), target.dtype), layers=[2, target.num_layers]
    )
    for module, name in ((PackedBatch, "mask"), (PackedMask, "dense")):
        monkeypatch.delattr(module, name)
    for packed in (True, False):
        monkeypatch.setattr(Capabilities, "packed_rows", packed)
        found = torch.cat(online.forward_target(target, text, [2]), -1)
        torch.testing.assert_close(found, expected.aux_hidden_states, rtol=1e-4, atol=1e-5)
