"""hidden_states=offline: what the target makes of the packed rows is written once, and read row by row.

A shard is a safetensors file of some packed rows:

    features   (rows, length, layers * hidden)   what the head reads
    last       (rows, length, hidden)            the last hidden state, which gives the teacher logits
    *_scale    (rows, length, layers) float32    with float8 only: what a stored position is multiplied by

manifest.json is written last and names target, layers, data and shards. A shard has its final name only when it is complete,
so a killed writer continues where it was. The processes of a run write side by side, and another run waits for them.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.heads.hub.card import size
from foredraft.heads.llama_config import probe_tokens
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.ends import drop_layers, refuse
from foredraft.heads.target_model.files import save_tensors
from foredraft.inference.evaluation.progress import Progress
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states.online import batch_of, forward_target
from foredraft.train.hidden_states.storage import DTYPES, store
from foredraft.train.runtime import distributed
from foredraft.train.runtime.locks import hold, write_atomically

MANIFEST, PROBE = "manifest.json", "probe.safetensors"
UNFINISHED_S = 3600  # age of a half-written shard of which no writer is left
SHARD_BYTES = 1 << 30  # of a shard, which a process holds in memory while it writes it; a row may be larger
OWNER = ("target_hash", "target_dtype", "layers", "dtype", "top_k", "data_hash", "shard_rows", "target")
OPEN = 64  # shards at a time: a system has a limit of files, often 1,024
AGAIN = "delete it and the manifest, and both are written again"


def offline(
    packed: Packed,
    target: Target,
    layers: list[int],
    batch: int,
    path: str,
    dtype: str = "bfloat16",
    shard_rows: int = 256,
    load_full_target: bool = True,
    extra_layer_ids: list[int] | None = None,
) -> "StoredRows":
    """Return the rows with the target's hidden states, read from `path`. They are written there first if need be.

    dtype: float32, bfloat16 or float8 (e4m3, a scale per position). load_full_target: keep the target's layers, which nothing
    but measurements need once all is stored. extra_layer_ids: hidden states to store in addition to those of `layers`, so
    that other heads read the same files. shard_rows: rows per file at most; as many as SHARD_BYTES hold where those are
    fewer.

    Raise ValueError that names what does not fit: the target, the layers, the data, a shard.
    """
    if dtype not in DTYPES:
        raise ValueError(f"hidden_states.dtype={dtype} is not known: {', '.join(DTYPES)}")
    if shard_rows < 1:
        raise ValueError(f"hidden_states.shard_rows={shard_rows} must be at least 1")
    if target.is_collective:
        raise ValueError(
            f"hidden_states=offline: each process writes its own shards, and target.sharding={target.sharding} needs all of "
            "them to read together"
        )
    directory = Path(path)
    facts = describe(packed, target, sorted({*layers, *(extra_layer_ids or [])}), dtype, shard_rows)
    file, rank = directory / MANIFEST, distributed.rank()
    # A complete store may lie where nobody can write.
    distributed.check_shared(directory, "hidden_states.path", file if distributed.broadcast(file.exists()) else None)
    directory.mkdir(parents=True, exist_ok=True)
    # One run at a time writes. The first process decides for all, since another run may write the manifest meanwhile.
    with hold(directory, "hidden_states.path", wait=True) if rank == 0 and not file.exists() else nullcontext():
        if not distributed.broadcast(file.exists()):
            write(packed, target, facts, directory, batch, rank, distributed.world_size())
            distributed.barrier()
            distributed.appear([directory / name for name in names(facts)])
            if rank == 0:
                clear_unfinished(directory)
                write_probe(target, facts["layers"], directory)
                manifest = facts | {"shards": [{"file": name} for name in names(facts)]}
                write_atomically(file, json.dumps(manifest, indent=2) + "\n")
            distributed.barrier()
    distributed.appear([file])
    compare(json.loads(file.read_text()), facts | {"layers": layers}, directory)
    if not load_full_target and not target.embeddings_only:
        drop_layers(target)
    return StoredRows(packed, directory, layers)


def describe(packed: Packed, target: Target, layers: list[int], dtype: str, shard_rows: int) -> dict[str, Any]:
    """Return the manifest without the shards."""
    row = bytes_per_position(target, layers, dtype) * packed.length
    return {
        "target": target.name,
        "target_hash": None if target.embeddings_only else target_hash(target),
        "ends_hash": ends_hash(target),
        "target_dtype": str(target.dtype).removeprefix("torch."),  # stores of earlier versions do not say it
        "layers": list(layers),
        "dtype": dtype,
        "top_k": None,  # stores of earlier versions may have the largest logits in place of `last`
        "rows": len(packed),
        "length": packed.length,
        "tokens": packed.tokens,
        "data_hash": packed.digest,
        "shard_rows": min(shard_rows, max(1, SHARD_BYTES // row)),
    }


def target_hash(target: Target) -> str:
    """Return a hash of every parameter: a fine-tune of the same model has another."""
    return hash_of(target.model.state_dict(), 64)


def ends_hash(target: Target) -> str:
    """Return a hash of what `embeddings_only` leaves of it, of more numbers, since a fine-tune may change few there."""
    inputs, outputs = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    return hash_of({"embedding": inputs.weight, "lm_head": outputs.weight}, 1 << 16)


def hash_of(weights: Mapping[str, Tensor], numbers: int) -> str:
    """Hash every weight's name, shape and about `numbers` of its numbers."""
    total = hashlib.sha256()
    for name, weight in weights.items():
        some = weight.detach().flatten()[:: max(1, weight.numel() // numbers)]
        total.update(f"{name}{tuple(weight.shape)}".encode() + some.float().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def compare(manifest: dict, facts: dict, directory: Path) -> None:
    """Raise ValueError where stored hidden states are not those that this run needs. There may be more layers of them, and
    other numbers of rows in a file."""
    left_out = {"target", "shard_rows"} | {"target_dtype"} - manifest.keys()
    if not facts["target_hash"]:  # not known of ends alone
        left_out.add("target_hash")
    if set(facts["layers"]) <= set(manifest.get("layers", [])):
        left_out.add("layers")
    names = [name for name in facts if name not in left_out and manifest.get(name) != facts[name]]
    if names:
        different = "; ".join(f"{name} is {manifest.get(name)} there, {facts[name]} here" for name in names)
        remedy = "delete them, or give another hidden_states.path"
        if names == ["target_dtype"]:
            remedy = f"set target.dtype={manifest['target_dtype']}"
        raise ValueError(f"the hidden states in {directory} are of another run ({different}): {remedy}")


def names(facts: dict) -> list[str]:
    return [f"shard-{number:05d}.safetensors" for number in range(-(-facts["rows"] // facts["shard_rows"]))]


def bytes_per_position(target: Target, layers: list[int], dtype: str) -> int:
    scale = 4 if dtype == "float8" else 0
    return (len(layers) + 1) * (target.hidden_size * DTYPES[dtype].itemsize + scale)


def clear_unfinished(directory: Path) -> None:
    """Delete what killed writers left. Where a file system has no locks, another run may be writing: its files are newer."""
    for half in directory.glob("shard-*.part"):
        with suppress(FileNotFoundError):  # it may be complete by now
            if half.stat().st_mtime < time.time() - UNFINISHED_S:
                half.unlink()


def write(packed: Packed, target: Target, facts: dict, directory: Path, batch: int, rank: int, processes: int) -> None:
    """Write every shard that is missing and falls to this process (one in `processes`). Print first how large they are, and
    raise ValueError if the disk has less free."""
    each = bytes_per_position(target, facts["layers"], facts["dtype"])
    total = each * facts["rows"] * facts["length"]
    directory.mkdir(parents=True, exist_ok=True)
    present = {file.name for file in directory.glob("shard-*.safetensors")}
    need = total - sum((directory / name).stat().st_size for name in present)
    free = shutil.disk_usage(directory).free
    if rank == 0:
        print(f"hidden states: {size(total)} in {directory}, {size(max(0, need))} still to write", flush=True)
    if need > free:
        raise ValueError(
            f"hidden_states.path={directory} has {size(free)} free and the hidden states take {size(need)}: store them as "
            "float8, take fewer rows or another disk, or hidden_states=online"
        )
    progress = Progress("hidden states stored", facts["rows"] if processes == 1 else None)
    for number, name in list(enumerate(names(facts)))[rank::processes]:
        if name in present:
            open_shard(directory / name, facts)
            progress.total = None  # fewer are left
            continue
        start = number * facts["shard_rows"]
        rows = range(start, min(start + facts["shard_rows"], facts["rows"]))
        tensors = shard(packed, target, facts, rows, batch, progress if rank == 0 else None)
        half = directory / f"{name}.{uuid.uuid4().hex}.part"  # process ids may be the same in all containers
        save_tensors(tensors, half, metadata={"foredraft": json.dumps({name: facts[name] for name in OWNER})})
        with half.open("rb") as opened:
            os.fsync(opened.fileno())
        half.rename(directory / name)  # complete or absent
    progress.close()


def open_shard(file: Path, facts: dict) -> Any:
    """Open a shard. Raise ValueError where it is damaged, or was written for another target, other layers or other data."""
    try:
        opened = safe_open(file, "pt")
        owner = json.loads((opened.metadata() or {}).get("foredraft", "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); {AGAIN}") from error
    owner = {"target_dtype": facts.get("target_dtype")} | owner
    wrong = [
        f"{name} {owner.get(name)}, not {facts[name]}" for name in OWNER[:-1] if owner.get(name) != facts.get(name)
    ]
    if wrong:
        raise ValueError(
            f"{file} was written for {owner.get('target')} ({'; '.join(wrong)}) and does not belong here: {AGAIN}"
        )
    return opened


@torch.no_grad()
def shard(
    packed: Packed, target: Target, facts: dict, rows: range, batch: int, progress: Progress | None
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for start in range(rows.start, rows.stop, batch):
        items = [packed[row] for row in range(start, min(start + batch, rows.stop))]
        text = batch_of(items, target)
        aux_hidden_states, last = forward_target(target, text, facts["layers"])
        stored = store("features", aux_hidden_states, facts["dtype"], len(facts["layers"]))
        stored |= store("last", last, facts["dtype"], 1)
        for name, tensor in stored.items():
            if name not in found:
                found[name] = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype)
            found[name][start - rows.start :][: len(items)].copy_(tensor)
        if progress is not None:
            progress.add(len(items))
    return found


def write_probe(target: Target, layers: list[int], directory: Path) -> None:
    """Write what heads ask of a target before they learn, for runs that load only its ends."""
    wanted = sorted({*layers, target.num_layers})
    states = target.forward(probe_tokens(target), layers=wanted, keep_logits=1).aux_hidden_states[0]
    parts = {str(layer): part.contiguous() for layer, part in zip(wanted, states.cpu().chunk(len(wanted), -1))}
    save_tensors(parts, directory / PROBE)


def stored_probe(target: Target, directory: Path) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Return what replaces `Target.remote_hidden_states`. It raises ValueError that names layers which are not stored."""
    probe, states = probe_tokens(target), load_file(directory / PROBE, device=str(target.device))

    def read(tokens: Tensor, layers: Sequence[int]) -> Tensor:
        if not torch.equal(tokens, probe):
            refuse()
        if lacking := [layer for layer in layers if str(layer) not in states]:
            raise ValueError(
                f"hidden_states.path={directory} has hidden states {', '.join(sorted(states, key=int))}, and this head reads "
                f"{', '.join(map(str, lacking))} too: set another hidden_states.path, or delete these and list all layers in "
                "hidden_states.extra_layer_ids of the run that writes them"
            )
        return torch.cat([states[str(layer)] for layer in layers], dim=-1)[None]

    return read


class StoredRows(Dataset):
    """Read packed rows with their stored hidden states; only what is indexed is read."""

    def __init__(self, packed: Packed, directory: Path, layers: list[int]):
        manifest = json.loads((directory / MANIFEST).read_text())
        self.packed, self.manifest = packed, manifest
        self.columns = [manifest["layers"].index(layer) for layer in layers]
        self.files = [directory / entry["file"] for entry in manifest["shards"]]
        for file in self.files:
            if not file.exists():
                raise ValueError(f"{file} is missing: delete {directory / MANIFEST} and it is written again")
        self.opened: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        number, place = divmod(row, self.manifest["shard_rows"])
        if number not in self.opened:
            while len(self.opened) >= OPEN:
                self.opened.pop(next(iter(self.opened)))  # the first one that was opened
            self.opened[number] = open_shard(self.files[number], self.manifest)
        shard = self.opened[number]
        stored = {name: shard.get_slice(name)[place] for name in shard.keys()}  # noqa: SIM118 -- no dict
        if self.columns != list(range(len(self.manifest["layers"]))):
            parts = stored["features"].unflatten(-1, (len(self.manifest["layers"]), -1))
            stored["features"] = parts[..., self.columns, :].flatten(-2)
            if "features_scale" in stored:
                stored["features_scale"] = stored["features_scale"][..., self.columns]
        text = {name: value for name, value in self.packed[row].items() if name != "images"}  # they are in the features
        return text | stored

    def __getstate__(self) -> dict:
        return self.__dict__ | {"opened": {}}  # a loader's worker opens the files itself
