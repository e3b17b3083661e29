"""Read files of a head that somebody else wrote. They are data, and nothing in them is executed.

A `.pt` or `.bin` is a zip of raw tensors and a pickle. The zip is inspected before it is opened: torch stores members
uncompressed, so a compressed one, or one larger than the file, is a bomb and not a head. The pickle is read by torch's
weights-only unpickler, which supports tensors and containers and refuses every other name.
"""

import json
import pickle
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foredraft.heads.formats.base import HeadFiles
from foredraft.heads.formats.gguf.tensors import FILE, read_gguf
from foredraft.heads.target_model.files import check_no_pointer

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SAFE = ("model.safetensors", INDEX, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
WEIGHTS = (*SAFE, FILE, *PICKLED)  # in this order: if a directory has both, pickles are never read
PREFIXES = ("model.", "draft_model.", "module.")  # of classes: SGLang and NeMo have the first one
LARGEST_JSON = 2**24  # bytes; a config has a few thousand
# Published drafters that are not supported: parts of an architecture's or a model type's name, in lower case without _ ->
# what it is, and the remedy.
DRAFTERS = {
    "dflare": ("a DFlare block drafter", "train head=dflash for its target"),
    "lilicorr": ("a LiLiCorr block drafter", "train head=dflash for its target"),
    "gemma4dspark": ("a DSpark or DFlash drafter with Gemma's layers (DeepSpec)", "train head=dspark for its target"),
    "gemma4eagle3": ("an EAGLE-3 drafter with Gemma's layers (DeepSpec)", "train head=eagle3 for its target"),
    "mlpspeculator": ("an MLP speculator (IBM's accelerators)", "train head=hydra for its target"),
    "mtp": ("a multi-token-prediction layer", "train head=mtp, which starts from the layer in its target's checkpoint"),
    "medusamodel": ("Medusa in the layout that vLLM read up to 0.32", "use the head that it was converted from"),
    "eaglespeculator": (
        "EAGLE-1 in the first layout (0.1) of the speculators package",
        "use the head that it was converted from",
    ),
}
KNOWN = "Medusa, Hydra, EAGLE-1/2/3, P-EAGLE, DFlash, DFlash-2, JetSpec, DSpark, Domino and xPress"


def read(directory: Path) -> HeadFiles:
    """Read the config and the weights in `directory`. Raises ValueError with the file and what is wrong with it."""
    config = read_config(directory)
    weights = weights_file(directory)
    parts = shards(weights) if weights.name == INDEX else [weights]
    for part in parts:
        check_no_pointer(part)
    if weights.name in SAFE:
        tensors = {name: tensor for part in parts for name, tensor in read_safetensors(part).items()}
    elif weights.name == FILE:
        tensors = read_gguf(weights)
    else:
        tensors = read_pickled(weights)
    return HeadFiles(config, without_prefix(config, tensors), directory, [])


def without_prefix(config: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of their layout, before which the classes of engines and trainers have a prefix."""
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}fc.weight" in tensors), "")
    if "foredraft" in config or "fc.weight" in tensors:
        return tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def weights_file(directory: Path) -> Path:
    """Return the file with the weights of the head in `directory`, the first of WEIGHTS."""
    file = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if file is None:
        raise ValueError(f"{directory} contains no weights: none of {', '.join(WEIGHTS)}")
    return file


def read_config(directory: Path, name: str = "") -> dict:
    """Read config.json. Raises ValueError if its drafter is not supported, or if it names code. name: for errors."""
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(f"{directory} has no {CONFIG}: give the directory that training wrote (<output_dir>/head)")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} contains no settings, but {type(config).__name__}")
    if not isinstance(config.get("architectures"), list | None):
        raise ValueError(f"{path} has architectures={config['architectures']!r}, which is not a list of names")
    record = config.get("foredraft")
    if not isinstance(record, dict | None):
        raise ValueError(f"{path} has foredraft={record!r}, which contains no settings")
    if record is None:
        config.pop("foredraft", None)  # null means absent
    check_supported_drafter(config, name or directory)
    code = [key for key in ("auto_map", "custom_pipelines", "trust_remote_code") if config.get(key)]
    if isinstance(config.get("auto_map"), dict) and config["auto_map"].keys() == {""}:
        code.remove("auto_map")  # speculators writes this: nothing would load a class without a name
    elif "auto_map" in code and "dflash_config" in config:
        code.remove("auto_map")  # z-lab and SpecForge name the class that they train, which is not needed here
    if code:
        raise ValueError(
            f"{path} names its own code ({', '.join(code)}): a head is data here, and nothing that comes with it is "
            "executed; remove the entry if the weights are in a published layout"
        )
    return config


def check_supported_drafter(config: dict[str, Any], where: str | Path) -> None:
    """Raise ValueError, with the kind, for a drafter that is not supported, before any download of its weights."""
    names = [*(config.get("architectures") or []), config.get("model_type"), config.get("speculators_model_type")]
    for name in (str(name).lower() for name in names if name not in (None, "Eagle3Speculator", "PEagleSpeculator")):
        for what, remedy in (words for part, words in DRAFTERS.items() if part in name.replace("_", "")):
            sentence = f"is {what}, which is not supported: {remedy}, or choose another ({KNOWN})"
            raise ValueError(f"the head in {where} {sentence}")


def read_json(path: Path) -> object:
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} is {path.stat().st_size:,} bytes, which is too large for a config")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def shards(index: Path) -> list[Path]:
    """Return the parts that an index names. Raises ValueError unless each of them is next to it."""
    entries = read_json(index)
    parts = entries.get("weight_map") if isinstance(entries, dict) else None
    if not isinstance(parts, dict):
        raise ValueError(f"{index} has no weight_map")
    names = sorted(set(map(str, parts.values())))
    for name in names:
        if name != PurePosixPath(name).name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}: a part must be a .safetensors file in the same directory")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name}, which is missing")
    return [index.parent / name for name in names]


def read_pickled(path: Path) -> dict[str, Tensor]:
    check_zip(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("WeightsUnpickler error: ")[-1].split("\n")[0].strip()
        raise ValueError(f"{path} contains more than tensors, and was not executed: {reason}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path} is not a dict of tensors by name, which a head is")
    return dict(tensors)


def check_zip(path: Path) -> None:
    """Raise ValueError unless `path` is a zip as torch.save writes it."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a zip file, which torch.save writes since 1.6: save it again as safetensors")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is a damaged zip file: {error}") from None
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path} has a compressed member, {member.filename!r}, which torch never writes: it was not opened"
            )
    total = sum(member.file_size for member in members)
    if total > path.stat().st_size:
        raise ValueError(f"{path} would unpack {total:,} bytes out of {path.stat().st_size:,}: it was not opened")
