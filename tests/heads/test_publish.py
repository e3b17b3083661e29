"""The scripts that publish heads, as a user types them."""

import importlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from foredraft.heads import hub, load_head, save_head
from foredraft.heads.checkpoint import write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats import engines
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target_model import Target
from foredraft.train import publish
from tests.support.head_factory import edit, same
from tests.support.processes import Ended, succeeded


@pytest.fixture
def script(call: Callable[..., Ended]) -> Callable[..., Ended]:
    """Return script("export", "key=value", ...), which runs in a separate folder."""
    return lambda name, *arguments: call(importlib.import_module(f"foredraft.scripts.{name}").main, *arguments)


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory) -> Path:
    """Save heads as training leaves them: <kind>/head."""
    place = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    save_head(
        Eagle3Head.for_target(target, 3, None, 200, torch.arange(target.vocab_size)), place / "eagle3/head", target
    )
    save_head(MedusaHead.for_target(target, 3), place / "medusa/head", target, accuracies=[[0.5, 0.25]] * 3)
    return place


def test_export_writes_what_has_passed_the_gate_and_removes_nothing_else(script, trained, target, tmp_path):
    (tmp_path / "exported.part").mkdir()
    (tmp_path / "exported.part" / "thesis.txt").write_text("ours")
    given = (f"checkpoint={trained}/medusa/head", "format=medusa", "output_dir=exported", "target.device=cpu")
    ended = succeeded(script("export", *given))
    assert "parity gate passed" in ended.out and "text-generation-launcher" in ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "exported.part"]
    assert (tmp_path / "exported.part" / "thesis.txt").read_text() == "ours"
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["medusa_num_heads"] == 3 and config["foredraft"]["accuracies"] == [[0.5, 0.25]] * 3
    assert same(load_head("exported", target), load_head(trained / "medusa/head", target))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["format=hydra", "output_dir=x"], "does not support eagle3 heads"),
        (["format=tensorrt", "output_dir=x"], "format=tensorrt is not one of vllm, sglang"),
        (["format=vllm", "dtype=q8_0", "output_dir=x"], "dtype=q8_0 is only for format=gguf"),
        (["format=vllm", "output_dir=x", "head=y"], "head is checkpoint now"),
        (["format=gguf", "output_dir=x", "format.dtype=q8_0"], "format.dtype is dtype now"),
        (["format=gguf", "output_dir=x", "dtype=f16"], "dtype=f16 is dtype=float16 now"),
        (["format=vllm", "output_dir=taken"], "already exists"),
        (["format=vllm", "output_dir=x", "checkpoint=nowhere"], "neither a directory nor a Hub id"),
        (["format=vllm", "output_dir=x", "checkpont=y"], "did you mean checkpoint?"),
        (["output_dir=x"], "format"),
    ],
)
def test_export_says_what_is_wrong(script, trained, tmp_path, arguments, complaint):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").write_text("")
    ended = script("export", f"checkpoint={trained}/eagle3/head", *arguments)
    assert ended.code == 2 and complaint in ended.err and "Traceback" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_gate_is_a_command(script, trained, tmp_path):
    head = trained / "eagle3/head"
    ended = script("parity", f"checkpoint={head}")
    assert ended.code == 0 and "parity gate passed" in ended.out
    shutil.copytree(head, tmp_path / "other")
    edit(tmp_path / "other", lambda config: config.update(norm_before_residual=True))
    ended = script("parity", f"checkpoint={head}", "exported=other")
    assert ended.code == 2 and "parity gate: at depth 1" in ended.err


def test_a_target_that_has_moved_is_asked_for(script, trained, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    edit(tmp_path / "head", lambda config: config["foredraft"]["target"].update(name="./gone"))
    ended = script("parity", "checkpoint=head")
    assert ended.code == 2 and "target ./gone is not a directory" in ended.err
    assert ended.err.endswith("(the config of head names it: set target=PATH)\n")


def test_a_card_names_the_target_by_the_name_that_push_is_given(trained, target, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    about = {"target": "/home/me/model", "engines": [], "sha256": hub.weights_sha256(tmp_path / "head")}
    (tmp_path / "head" / "metrics.json").write_text(json.dumps({"about": about}))
    for name, expected in (("org/model", "org/model"), ("org/other", "model")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if name == "org/other":  # its weights are not those that were measured
            edit(tmp_path / "head", lambda config: config["foredraft"]["target"].update(embedding_digest="other"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            publish.stage(tmp_path / "head", folder, "org/head", Target(target.model, target.tokenizer, name), None)
        card = (folder / "README.md").read_text()
        assert f'Target.from_pretrained("{expected}")' in card
        assert ("vllm serve org/model" in card) == (name == "org/model")


def test_what_is_pushed_names_no_place_on_a_disk(trained, target, tmp_path):
    run = tmp_path / "my runs" / "out"
    shutil.copytree(trained / "medusa/head", run / "head")
    (run / "head" / "config.yaml").write_text(
        f"target:\n  path: {target.name}\ndata:\n  path:\n  - '{run}/ü.txt'\n  glob: '*/*'\n"
    )
    about = {"target": "/home/me/model", "engines": [], "sha256": hub.weights_sha256(run / "head")}
    recorded = {
        "about": about,
        "data": {"source": f"{run}/ü.txt"},
        "command": f"python /opt/x/run.py 'data.path={run}/ü.txt' --config-dir=/etc/mine",
    }
    (run / "head" / "metrics.json").write_text(json.dumps(recorded))
    (run / "report.html").write_text(f"<title>eagle3 for {target.name}</title>see https://x.org/home/me/model")
    (run / "metrics.json").write_text("{}")
    edit(run / "head", lambda config: config.update(base_model_name_or_path=target.checkpoint))
    for name in (target.name, "/Anna's/Target", "org/model", "/hub/models--org--model/snapshots/c0ffee"):
        folder = tmp_path / f"staged {len(name)}"
        folder.mkdir()
        publish.stage(run / "head", folder, "org/head", Target(target.model, target.tokenizer, name), None)
        sent = {file.name: file.read_text() for file in folder.iterdir() if file.suffix != ".safetensors"}
        assert sent.keys() == {"README.md", "config.json", "config.yaml", "metrics.json", "report.html"}
        for place in (str(tmp_path), json.dumps(target.name)[1:-1], "/opt/x", "my runs", "/hub/", "/etc/", "Anna"):
            assert not [file for file, text in sent.items() if place in text]
        local = name in (target.name, "/Anna's/Target")
        public = Path(name).name if local else "org/model"
        assert ('base_model: "org/model"' in sent["README.md"]) == (not local)
        assert ("The target has no public name here" in sent["README.md"]) == local
        config = json.loads(sent["config.json"])
        assert config["foredraft"]["target"]["name"] == config["base_model_name_or_path"] == public
        assert json.loads(sent["metrics.json"])["data"]["source"] == "ü.txt" and "glob: '*/*'" in sent["config.yaml"]
        assert (
            sent["report.html"].endswith("https://x.org/home/me/model")
            and f'from_pretrained("{public}")' in sent["README.md"]
        )
    assert str(tmp_path) in (run / "head" / "config.yaml").read_text()  # resuming needs it


def test_a_published_head_names_its_target_as_speculators_does(trained, target, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    named = {"speculators_config": {"verifier": {"name_or_path": target.name}}}
    edit(tmp_path / "head", lambda config: config.update(named, foredraft={}))
    settings = OmegaConf.create({"_target_": "foredraft.loading.open_target", "path": None, "device": "cpu"})
    assert publish.open_target(settings, tmp_path / "head").name == target.name


@pytest.mark.nightly  # three new interpreters; by day test_hub.py pushes in this one
def test_push_as_it_is_typed(script, trained, server, monkeypatch):
    given = ("push", f"checkpoint={trained}/eagle3/head", "repo=org/name", "license=mit")
    ended = script(*given, "dry_run=true")
    assert ended.code == 0 and "would send to a new private repository org/name" in ended.out and not server.repos
    ended = script(*given)
    assert ended.code == 0 and "parity gate passed" in ended.out and "sent to" in ended.out
    assert server.repos["org/name"].private and "README.md" in server.repos["org/name"].files
    monkeypatch.setenv("HF_TOKEN", "hf_wrong-but-secret")
    ended = script(*given)
    assert ended.code == 2 and "hf auth login" in ended.err and "secret" not in ended.out + ended.err


def staged(head: Path, place: Path, target) -> str:
    """Return the card of what would be sent."""
    place.mkdir()
    publish.stage(head, place, "org/name", target, None)
    return (place / "README.md").read_text()


@pytest.mark.parametrize(
    ("layout", "title"), [("speculators", "the speculators package"), ("gguf", "GGUF as llama.cpp")]
)
def test_a_card_describes_the_files_that_are_pushed(layout, title, embedded, tmp_path):
    head = Eagle3Head.for_target(embedded, 3, None, 200, torch.arange(embedded.vocab_size))  # with the target's rows
    export = engines.export_for(layout, head, embedded)
    write_head(head, tmp_path / "head", embedded, export.layout, export.layout.weight_files)
    card = staged(tmp_path / "head", tmp_path / "staged", embedded)
    assert re.search(rf"format of the files \| .*{title}", card)
    assert "SGLang loads these files unchanged" not in card and "SGLang loads an export" in card


@pytest.mark.nightly
def test_the_directory_of_a_run_is_its_head(trained, target, monkeypatch):
    sent: list[Path] = []
    monkeypatch.setattr(hub, "push", lambda folder, repo, **how: sent.extend(folder.iterdir()) or "sent")
    monkeypatch.setenv("HOME", str(trained))
    for place in (trained / "eagle3", Path("~/eagle3")):
        publish.push(place, target, "org/name")
    assert [path.name for path in sent].count("model.safetensors") == 2


def test_figures_of_other_weights_are_not_published(trained, target, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    about = {"sha256": hub.weights_sha256(tmp_path / "head")}
    (tmp_path / "head" / "metrics.json").write_text(json.dumps({"acceptance_length": 3.21, "about": about}))
    assert "3.21" in staged(tmp_path / "head", tmp_path / "staged", target)
    save_head(Eagle3Head.for_target(target, 3), tmp_path / "head", target)
    with pytest.raises(ValueError, match=r"metrics\.json was measured with other weights .* remove it"):
        staged(tmp_path / "head", tmp_path / "again", target)


def test_all_parts_of_a_head_are_pushed_and_count_for_its_digest(trained, target, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    whole = tmp_path / "head" / "model.safetensors"
    weights, names = load_file(whole), {}
    for number, name in enumerate(sorted(weights)):
        names[name] = f"model-{number % 2}.safetensors"
    for part in set(names.values()):
        save_file({name: weights[name] for name in names if names[name] == part}, whole.with_name(part))
    whole.unlink()
    (tmp_path / "head" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shutil.copy(tmp_path / "head" / "model-0.safetensors", tmp_path / "head" / "model-00001-of-00009.safetensors")
    digest = hub.weights_sha256(tmp_path / "head")
    assert digest in staged(tmp_path / "head", tmp_path / "staged", target)
    assert {path.name for path in (tmp_path / "staged").glob("*.safetensors")} == set(names.values())  # no stale part
    assert same(load_head(tmp_path / "staged", target), load_head(trained / "eagle3/head", target))
    changed = {name: tensor + 1 for name, tensor in weights.items() if names[name] == "model-1.safetensors"}
    save_file(changed, whole.with_name("model-1.safetensors"))
    assert hub.weights_sha256(tmp_path / "head") != digest
