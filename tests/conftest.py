"""The fixtures of all tests: a tiny random target saved as transformers saves any model, its heads, drafters and texts."""

import gc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.train.run import main
from tests.support import ROOT, golden, nightly_but, typed
from tests.support.decoding import with_trees
from tests.support.head_factory import KINDS, PLAIN_KINDS, make_head
from tests.support.hub_server import TOKEN, HubServer
from tests.support.processes import Ended
from tests.support.tiny import TEXT, VOCAB, tiny_model

os.environ["FOREDRAFT_REMEMBER"] = "0"  # no test drafts by what another one timed

# The longest files start first, so that none is left for the end of a run in several processes (measured in CPU time).
SLOWEST = typed("""
    test_floors test_strategies test_fresh_text test_resume test_learn test_extras test_kills test_nodes test_row_parts
    test_magpie test_run test_hidden_states_server test_docs test_mutants test_package test_search test_bits test_prefill
""")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders whose marker is not asked for: they take seconds to import."""
    unwanted = collection_path.parent == ROOT / "tests" and f"not {collection_path.name}" in config.option.markexpr
    return unwanted or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail whose reason FOREDRAFT_EXPECTED_SKIPS, a regular expression, does not match: CI has what tests
    need."""
    report = yield
    expected = os.environ.get("FOREDRAFT_EXPECTED_SKIPS")
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and expected is not None and not re.search(expected, str(report.longrepr)):
        report.outcome = "failed"
    return report


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules: each collection would walk through a million objects of theirs."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(SLOWEST)))
    if not sys.platform.startswith("linux"):
        for item in items:
            if item.get_closest_marker("linux"):
                item.add_marker(pytest.mark.skip(reason="only Linux has what it needs"))


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """Make a directory as a user would have it: config, float32 weights, tokenizer."""
    path = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, **learned)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target(tiny_path) -> Target:
    return with_trees(Target.from_pretrained(tiny_path, dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def embedded() -> Target:
    """Load the test model as a user does."""
    return Target.from_pretrained(ROOT / "scripts" / "test_model", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def deep(tmp_path_factory) -> Target:
    """Make a target of eight layers: deep enough for the paper's choice of three."""
    path = tmp_path_factory.mktemp("deep")
    tiny_model(num_hidden_layers=golden.N).save_pretrained(path)
    return with_trees(Target.from_pretrained(path, dtype="float32", device="cpu"))


@pytest.fixture
def fresh(tiny_path: Path) -> Target:
    """Load a target that the test may change."""
    return with_trees(Target.from_pretrained(tiny_path, dtype="float32", device="cpu", pack=False))


@pytest.fixture(params=nightly_but(KINDS, *PLAIN_KINDS))
def head_kind(request: pytest.FixtureRequest) -> str:
    """Return every head of conf/head, and the variants of tests/support/heads.yaml."""
    return request.param


@pytest.fixture
def head(head_kind: str, target: Target) -> DraftHead:
    """Make a head of every kind."""
    return make_head(head_kind, target)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twelve small files; the tokenizer of `tiny_path` was trained on such text."""
    path = tmp_path_factory.mktemp("texts")
    for number in range(12):
        line = "def add_{0}_{1}(self, other):\n    return {2} + other.value\n"
        (path / f"{number}.txt").write_text("\n".join(line.format(number, i, i * number) for i in range(9)))
    return path


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable]:
    """Return call(main, *arguments), which runs a program's `main` in this process and in a separate folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREDRAFT_TRACE", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(main: Callable[[], None], *arguments: str) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["train/run.py", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            code = stop.code
        return Ended(code, *capfd.readouterr())

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def here(call: Callable[..., Ended]) -> Callable[..., Ended]:
    """Return here(*arguments), which runs `python train/run.py` by `call`."""
    return partial(call, main)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Start an empty Hub with an empty cache and a valid token; the client is unchanged, but does not wait between its
    retries."""
    with HubServer() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as the environment may say
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield hub


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
