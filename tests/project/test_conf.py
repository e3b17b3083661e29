"""A yaml of conf/ is one constructor call: every one of them builds what it names, with what the program adds to it.

Those of heads and their criteria: test_heads.py; losses: test_losses.py; formats: test_exports.py, test_gguf.py, test_mtp.py;
what a whole run chooses (optimizers, features): test_strategies.py and test_data_runs.py."""

import json
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from foredraft import config, words
from foredraft.heads import save_head
from foredraft.inference import generate
from foredraft.train.runtime.strategy import STRATEGIES, arguments_of
from foredraft.train.trainer import arguments
from tests.serving.conftest import SHORT
from tests.support import names
from tests.support.batches import PROMPT
from tests.support.configs import composed
from tests.support.head_factory import make_head
from tests.support.tiny import TEXT

ON_LINUX = [name for name in STRATEGIES if name.startswith("zero")]  # DeepSpeed is for Linux


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.linux] if n in ON_LINUX else []) for n in STRATEGIES]
)
def test_a_strategy(name: str, target, tmp_path: Path):
    cfg = composed("train", f"strategy={name}", f"output_dir={tmp_path}", "trainer.bf16=false")
    assert cfg.strategy == name
    args = arguments(cfg, target, **arguments_of(name, cfg.strategy_args))
    assert bool(args.deepspeed) == name.startswith("zero") and bool(args.fsdp) == (name == "fsdp")


@pytest.mark.parametrize(
    "typed, refused",
    [
        ("head=eagle3 head.draft_vocab_size=null", False),
        ("head=p_eagle head.draft_vocab_size=null", False),
        ("head=eagle3 head.ttt_steps=null", True),
        ("trainer.max_steps=null", True),
    ],
)
def test_null_is_taken_where_it_means_something(typed: str, refused: bool, here) -> None:
    """Check it with the program itself."""
    done = here(*typed.split(), "--cfg", "job")
    assert (done.code, "=null: a value is wanted" in done.err) == ((2, True) if refused else (0, False))


def test_stored_features_can_be_read_without_a_worker(target, tmp_path: Path):
    cfg = composed("train", "hidden_states=offline", f"output_dir={tmp_path}", "trainer.dataloader_num_workers=0")
    assert arguments(cfg, target).dataloader_prefetch_factor is None


@pytest.mark.parametrize("name", [*names("data"), "mix"])
def test_data(name: str, target, folder: Path, tmp_path: Path):
    """Read a data set of the Hub from a file, which only avoids the network."""
    logged = {"ids": [*range(1, 20)], "accepted": [2], "drafted": [4]}
    own = [
        {"number": n, "tokens": [1, n + 1, *range(1, 20)], "written": [[2, 21]], "asked": [[0, 2]]} for n in range(20)
    ]
    texts = [{"text": f"{number} {TEXT[:400]}"} for number in range(20)]
    accepted = [{"prompt_ids": [1, number + 1]} | logged for number in range(20)]
    rows = {"accepted": accepted, "self": own, "mix": own}.get(name, texts)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder if name == "text" else tmp_path / "rows.jsonl"
    changes = ["data.max_files=2"] if name == "stdlib" else [f"data.path={path}"]
    changes += ["data.tokens=0"] if name in ("self", "mix") else []
    if name == "mix":
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        changes.append(f"data.conversations={tmp_path / 'texts.jsonl'}")
    data = composed("train", f"data={name}", *changes).data
    more = {"cache_dir": str(tmp_path / "cache")} if "num_proc" in data else {}
    found = instantiate(data, tokenizer=target.tokenizer, **more)
    assert len(found.train) > 0 and len(found.validation) > 0 and len(found.test) > 0
    assert any(found.train[0].loss_mask) and found.card["source"]


def test_a_real_target_is_trained_as_published_and_the_test_model_in_minutes(monkeypatch):
    monkeypatch.setattr(words, "has_gpu", lambda: True)
    demo, real = (composed("train", "target=test_model"), composed("train", "target=ORG/NAME", "data.path=FILE"))
    assert demo.trainer.max_steps == 500 and demo.self_generated_tokens > 0 and demo.max_length == 256
    assert demo.trainer.optim == "muon" and demo.data._target_.endswith("standard_library")
    assert real.trainer.max_steps == -1 and real.self_generated_tokens == 0 and real.max_length == 2048
    assert real.trainer.learning_rate == 1e-3 and real.trainer.optim == "muon"
    assert real.data._target_ == "foredraft.train.data.conversations.corpus"
    typed = composed(
        "train", "target=test_model", "trainer.optim=adamw", "trainer.max_steps=3", "data=text", "data.path=FILE"
    )
    assert typed.trainer.optim == "adamw" and typed.trainer.max_steps == 3
    assert typed.data._target_ == "foredraft.train.data.corpus.text_files" and typed.max_length == 256


def test_without_a_gpu_a_real_target_is_trained_for_hours(monkeypatch):
    monkeypatch.setattr(words, "has_gpu", lambda: False)

    def found(*changes):
        made = composed("train", "target=ORG/NAME", *changes, "data.path=FILE")
        return made.max_length, made.trainer.learning_rate, made.trainer.optim

    assert found() == (512, 3e-3, "muon")
    assert found("preset=gpu") == (2048, 1e-3, "muon") and found("data=accepted") == (2048, 1e-4, "adamw")
    assert found("recipe=qwen3_8b_eagle3")[1:] == (1e-3, "muon")
    assert found("init_from=HEAD") == (512, 2e-4, "muon") and found("init_from=null") == found()
    assert found("init_from=HEAD", "trainer.learning_rate=1e-3")[1] == 1e-3
    assert "trainer.learning_rate" not in str(words.overrides_of("train", ["target=test_model", "init_from=HEAD"]))
    assert words.suited("train", ["preset=mine", "init_from=HEAD"]) == []
    logged = words.overrides_of("train", ["target=smollm2", "data=accepted", "init_from=HEAD"])
    assert logged[:2] == ["preset=cpu", "trainer.learning_rate=2e-4"]
    assert found("init_from=HEAD", "lora_r=4") == found() and found("init_from=HEAD", "data=accepted")[1] == 1e-4


@pytest.mark.parametrize("name", ["tiny", "config.json", "test_model"])
def test_a_target(name: str, tiny_path: Path):
    named = {"tiny": str(tiny_path), "config.json": str(tiny_path / "config.json")}.get(name, name)
    settings = composed("train", f"target={named}").target
    found = instantiate(settings, device="cpu")
    assert found.num_layers > 0 and (found.tokenizer is not None or name == "config.json")
    if name == "config.json":
        with pytest.raises(InstantiationException, match=r"target.quantization=4bit: .* whose weights are random"):
            instantiate(settings, quantization="4bit")


def test_an_option_that_a_drafter_has_not_is_an_error(target):
    settings = composed("lossless", "drafter=ngram", "drafter.window=5").drafter
    with pytest.raises(
        InstantiationException, match=r"window=5 is not an option of this drafter: .*: tree, longest, depth\)"
    ):
        instantiate(settings, target=target)
    for name, said in {
        "none": r"this drafter: .*: none\)",
        "ngram+suffix": r"joined by \+: .*: tree, window\)",
    }.items():
        with pytest.raises(InstantiationException, match=f"nodes=8 is not an option of .*{said}"):
            instantiate(composed("lossless", f"drafter={name}", "drafter.nodes=8").drafter, target=target)
    settings = composed("lossless", "drafter=suffix", "drafter.width=1", "drafter.nodes=4").drafter
    assert instantiate(settings, target=target).nodes == 4


@pytest.mark.parametrize("name", ["draft_model", "head", "lookahead", "ngram", "none", "suffix", "union"])
def test_a_drafter(name: str, target, tiny_path: Path, tmp_path: Path):
    save_head(make_head("eagle3", target), head := tmp_path / "head", target)
    named = {"head": f"{head}", "draft_model": f"draft:{tiny_path}", "union": f"ngram+{head}"}.get(name, name)
    drafter = instantiate(composed("lossless", f"drafter={named}").drafter, target=target)
    prompt = torch.tensor([[*PROMPT[:4], *PROMPT[:4], 7]])  # said twice, so that there is something to look up
    text = generate(target, None, prompt, max_new_tokens=12, eos_token_id=-1).new_tokens
    assert generate(target, drafter, prompt, max_new_tokens=12, eos_token_id=-1).new_tokens == text


def test_the_training_of_the_serving_tests_is_known():
    """They run only where an engine is installed, and had kept the keys of an earlier version."""
    with config.opened():
        checked = config.check("train", words.overrides_of("train", ["head=eagle3", *SHORT]))
    assert checked.data.max_files == 150


def test_a_prompt_with_an_interpolation_stays_text():
    with config.opened():
        checked = config.check("generate", words.overrides_of("generate", ["target=ORG/NAME", "prompt=f(${b})"]))
    assert checked.prompt == "f(${b})"
