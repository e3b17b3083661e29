"""Publishing a trained head: the gate that its files must pass, and what is sent along with them."""

import html
import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads import formats, hub
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import fingerprint, load_head, same_weights
from foredraft.heads.formats.base import projection_names
from foredraft.heads.formats.engines import engines
from foredraft.heads.formats.files import INDEX, read_config, shards, weights_file
from foredraft.heads.formats.gguf.layout import GGUFFormat
from foredraft.heads.formats.gguf.tensors import FILE
from foredraft.heads.hub.card import model_card
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import commit_of
from foredraft.inference.drafters import load_drafter
from foredraft.inference.evaluation.measure import run, texts
from foredraft.inference.generation import tokens_per_forward
from foredraft.train import parity_gate

TEXTS, LENGTH = 4, 48  # texts that the gate decodes, and their tokens
CARD, METRICS, REPORT = "README.md", "metrics.json", "report.html"
PATH_SETTING = re.compile(r"(?m)[:-] ['\"]?(~?/.+/.+?)['\"]?$")  # in YAML


def target_names(config: dict[str, Any]) -> list[str]:
    """Return the names of the target in the config.json of a head."""
    names = config.get("foredraft", {}).get("target", {}).get("name"), config.get("base_model_name_or_path")
    verifier = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return [name for name in (*names, verifier) if name]


def open_target(settings: DictConfig, head: str | Path) -> Target:
    """Open the target of a script's config; if its path is null, the one that the config of `head` names."""
    if settings.path is not None:
        return instantiate(settings)
    path = next(iter(target_names(read_config(hub.find(head)))), None)
    if path is None:
        raise ValueError(f"the config of {head} names no target: give it, target.path=...")
    try:
        return instantiate(settings, path=path)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):  # a relative path, or a target that has moved
            raise ValueError(f"{error.__cause__} (the config of {head} names it: set target=PATH)") from error
        raise


def own_texts(target: Target) -> list[list[int]]:
    """Return some texts that the target writes itself, of 1 + LENGTH tokens."""
    starts = [[1 + number * (target.vocab_size - 2) // TEXTS] for number in range(TEXTS)]
    written = run(target, None, starts, max_new_tokens=LENGTH, temperature=1.0, eos_token_id=-1)
    return [start + row for start, row in zip(starts, texts(written), strict=True)]


@torch.no_grad()
def gate(trained: Path, target: Target, files: Path) -> float:
    """Compare the head in `files` with the one in `trained`, print and return their acceptance length. Raise ValueError
    unless both draft the same.

    The texts are the target's own, so no data is needed. Both heads draft for the very target that is given.
    """
    rows = own_texts(target)
    head = load_head(trained, target, dtype=torch.float32)
    difference = max(parity_gate.check(head, target, text[: LENGTH // 2], saved=files) for text in rows[:2])
    prompts, lengths = [text[: LENGTH // 3] for text in rows], list[float]()
    for path in (trained, files):
        drafter = load_drafter(str(path), target, tree="fixed")
        lengths.append(tokens_per_forward(run(target, drafter, prompts, max_new_tokens=LENGTH, eos_token_id=-1)))
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"parity gate: the trained head gains {lengths[0]:.4f} tokens per forward and the files in {files} "
            f"{lengths[1]:.4f}; they are not the same head"
        )
    print(
        f"parity gate passed: draft logits agree to {difference:.1e}, acceptance length {lengths[0]:.2f} from the trained "
        "head and from the files",
        flush=True,
    )
    return lengths[0]


def layout_of(files: formats.HeadFiles) -> formats.Format:
    """Return the layout of a head's files. Tensors of a GGUF file are read with the names of our own files."""
    layout = formats.detect(files)
    return GGUFFormat(layout, "float16") if weights_file(files.directory).name == FILE else layout


def head_metadata(head: DraftHead, target: Target, written: formats.Format | None = None) -> dict[str, Any]:
    """Return what the model card says about a head itself. written: layout of its files; None for the one that training
    writes."""
    written = written or formats.default_format(head)
    return {
        "kind": head.kind,
        "target": target.name,
        "gguf": target.gguf,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "depth": head.depth,
        "layers": head.layers,
        "draft_vocab_size": None if head.draft_ids is None else len(head.draft_ids),
        "license": None,
        "format": written.title,
        "module": None if type(head).__module__.startswith("foredraft.") else type(head).__module__,
        # Other engines read the model as transformers saves it, not the GGUF file.
        "engines": engines(head, target, "TARGET" if target.gguf else target.name, written=written),
    }


def public_name(name: str) -> str:
    """Return the name of a target without the place of its files: the Hub id of a cached copy, else the last part."""
    if cached := re.search(r"models--([^/]+)--([^/]+)/snapshots/", name):
        return "/".join(cached.groups())
    path = Path(name).expanduser()
    return Path(os.path.abspath(path)).name if name.startswith((".", "/", "~")) or path.exists() else name


def hide_paths(folder: Path, target: Target, config: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Replace paths of this machine and the training's in the text files of `folder` by their last parts.

    config: of the head. recorded: of its metrics.json."""
    ours, run = public_name(target.name), folder / "config.yaml"
    fits = same_weights(config.get("foredraft", {}).get("target", {}), fingerprint(target))
    settings = re.findall(PATH_SETTING, run.read_text("utf-8")) if run.is_file() else []
    # python /PATH/train/run.py data.path=/PATH
    started = [word.split("=", 1)[-1] for word in shlex.split(recorded.get("command", ""))]
    trained_on = [*target_names(config), recorded.get("about", {}).get("target", "")]
    names = {path: Path(path).name for path in (*settings, *started) if path.startswith(("/", "~/"))}
    names |= {name: ours if fits else public_name(name) for name in trained_on}
    names |= dict.fromkeys((target.name, target.checkpoint), ours)
    names = {name: public for name, public in names.items() if re.search(r"/.", name) and public_name(name) != name}
    for file in folder.iterdir():
        if file.suffix in (".json", ".yaml", ".html", ".md") and file.name != INDEX:
            text = file.read_text("utf-8")
            for name in sorted(names, key=len, reverse=True):
                shell = name, shlex.quote(name).strip("'"), name.replace("'", "'\\''")
                for form in {form for each in shell for form in (each, json.dumps(each)[1:-1], html.escape(each))}:
                    text = re.sub(rf"(?<![\w.~-]){re.escape(form)}(?![\w-])", names[name].replace("\\", r"\\"), text)
            file.write_text(text, "utf-8")


def stage(head: Path, folder: Path, repo: str, target: Target, license: str | None) -> None:
    """Copy to `folder` what the Hub gets of the head in `head`: its files, card, metrics, config and report. Raises
    ValueError for files that only foredraft can read."""
    weights = weights_file(head)
    parts = [part.name for part in shards(weights)] if weights.name == INDEX else []  # no others, of an earlier head
    for path in sorted(head.iterdir()):
        if path.is_file() and path.name in (*hub.WEIGHTS, *parts, "config.json", "config.yaml", METRICS):
            shutil.copy(path, folder)
    if (head.parent / REPORT).is_file() and (head.parent / METRICS).is_file():
        shutil.copy(head.parent / REPORT, folder)
    recorded = json.loads((head / METRICS).read_text()) if (head / METRICS).is_file() else {}
    files, sha256 = formats.read(head), hub.weights_sha256(folder)
    if recorded.get("about", {}).get("sha256", sha256) != sha256:
        raise ValueError(f"head={head}: its {METRICS} was measured with other weights than those next to it: remove it")
    loaded, layout = load_head(head, target), layout_of(files)
    if loaded.lm_head_is_targets and not projection_names(layout, loaded) <= files.weights.keys():
        raise ValueError(
            f"head={head} leaves out the rows of the target's lm_head, which other engines need: push what foredraft export "
            "writes of it"
        )
    metadata = head_metadata(loaded, target, layout)
    facts = metadata | recorded.get("about", {})
    # The target may have been trained from a directory and have a public name now.
    trained_on = files.config.get("foredraft", {}).get("target", {})
    if trained_on and same_weights(trained_on, fingerprint(target)):
        facts |= {key: metadata[key] for key in ("target", "engines")}
    if "/snapshots/" in facts["target"]:  # of the Hub's cache
        facts["target"] = public_name(facts["target"])
    facts |= {"repo": repo, "sha256": sha256, "revision": commit_of(target)}
    if license is not None:
        facts["license"] = license
    (folder / CARD).write_text(model_card(recorded, facts, recorded.get("data")))
    hide_paths(folder, target, files.config, recorded)


def push(
    head: Path,
    target: Target,
    repo: str,
    private: bool = True,
    replace: bool = False,
    dry_run: bool = False,
    license: str | None = None,
) -> str:
    """Pass the gate with staged files and send them; return a sentence on what was done."""
    head = head.expanduser()
    if not head.is_dir():
        raise ValueError(f"head={head} is not a directory: a head is pushed from where training wrote it")
    hub.check_name(repo)
    head = hub.find(head)  # in the directory of a run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage(head, folder, repo, target, license)
        gate(head, target, folder)
        return hub.push(folder, repo, private=private, replace=replace, dry_run=dry_run)
