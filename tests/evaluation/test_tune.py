"""foredraft tune: from measured acceptance and seconds to the settings of engines."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads import save_head
from foredraft.inference import generate
from foredraft.inference.drafters import DynamicTree, drafter_for
from foredraft.inference.evaluation import tuning
from foredraft.inference.evaluation.tuning import Tuning, reached_depths
from foredraft.inference.generation import Generation, Step
from foredraft.scripts import evaluate, tune
from tests.support import typed
from tests.support.head_factory import make_head

# A second draft is accepted in a quarter of the steps. With many requests a step takes longer the more it verifies.
KNOWN = Tuning(
    [0.75, 0.25, 0.0],
    {
        1: {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3},
        4: {0: 1.0, 1: 1.3, 2: 1.6, 3: 2.0},
        8: {0: 1.0, 1: 1.3, 2: 1.6, 3: 2.0},
        32: {0: 1.0, 1: 1.9, 2: 2.8, 3: 3.7},
    },
)


def test_the_best_number_of_drafts_by_number_of_requests():
    assert KNOWN.speedup(1, 2) == pytest.approx(2.0 / 1.2)
    assert KNOWN.speedup(32, 1) == pytest.approx(1.75 / 1.9)
    assert [KNOWN.best(requests) for requests in KNOWN.seconds] == [2, 1, 1, 0]
    assert KNOWN.schedule() == [[1, 3, 2], [4, 31, 1], [32, 1024, 0]]
    many = Tuning([1.0], {2000: {0: 1.0, 1: 1.0}, 3000: {0: 1.0, 1: 9.0}})
    assert many.schedule() == [[1, 2999, 1], [3000, 3000, 0]]  # up to the largest number that was measured
    assert Tuning([0.5, 0.005], {1: {0: 1.0, 1: 1.0, 2: 1.0}}).best(1) == 1  # the fewest of nearly equal speeds


def test_the_share_of_steps_that_reach_a_depth():
    steps = [Step([0, 2], [1, 3], 4, [0, 1]), Step([3], [4], 4, [0])]
    generation = Generation(torch.zeros(2, 0, dtype=torch.int64), [[], []], steps)
    assert reached_depths([generation], 4) == [2 / 3, 2 / 3, 1 / 3, 0]


@pytest.fixture
def run(call, tiny_path, folder):
    """Return run(*arguments), which runs scripts/tune.py with them."""
    given = f"target.path={tiny_path} target.device=cpu data=text data.path={folder} limit=3 prompt_tokens=16"
    return partial(call, tune.main, *typed(given), "max_new_tokens=8", "steps=2")


def test_a_head_is_tuned_for_the_engines_that_load_it(run, target, tmp_path, monkeypatch):
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    monkeypatch.setattr(
        tuning, "seconds_per_step", lambda target, chain, prompts, count, *rest: 1 + (chain is not None)
    )
    given = [f"drafter={tmp_path}/head", "requests=[1,2]", "drafts=[1,3]", f"output={tmp_path}/tune.json"]
    nothing = run(*given)
    assert nothing.code == 0 and "no number of drafts is faster here than decoding without" in nothing.out
    assert json.loads((tmp_path / "tune.json").read_text())["schedule"] == [[1, 1024, 0]]

    def seconds(target, chain, prompts, count, *rest) -> float:
        return 1.0 if chain is None or count == 1 else 9.0

    monkeypatch.setattr(tuning, "seconds_per_step", seconds)
    monkeypatch.setattr(tune, "reached_depths", lambda texts, depth: [0.5, 0.2, 0.1][:depth])
    found = run(*given)
    assert "1 requests: 1 drafts 1.50x, 3 drafts 1.80x; best 3" in found.out
    written = json.loads((tmp_path / "tune.json").read_text())
    assert written["schedule"] == [[1, 1, 3], [2, 1024, 0]]
    assert (
        '"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 3]'
        in written["commands"]["vLLM"]
    )


def test_drafts_count_as_other_engines_draft_them(run, target, tmp_path, monkeypatch):
    """Other engines lack the target's noise: with it, more drafts are accepted at a temperature above 0."""
    save_head(head := make_head("eagle3", target), tmp_path / "head", target)
    noise: list[Tensor | None] = []
    propose = DynamicTree.propose
    monkeypatch.setattr(
        DynamicTree, "propose", lambda tree, accepted, gumbel: noise.append(gumbel) or propose(tree, accepted, gumbel)
    )
    monkeypatch.setattr(tune, "seconds_by_drafts", lambda *given: {0: 1.0, 2: 1.0})
    given = f"drafter={tmp_path}/head requests=[1] drafts=[2] temperature=1.0 output={tmp_path}/tune.json"
    assert run(*given.split()).code == 0
    (chain,) = [one for one in evaluate.with_variants("head", drafter_for(head, target), target, 2) if one.once]
    generate(target, chain.drafter, torch.tensor([[3, 4, 5]]), max_new_tokens=4, eos_token_id=-1, temperature=1.0)
    assert noise and all(gumbel is None for gumbel in noise)


def test_answers_of_one_token_say_nothing_of_drafts(run, target, tmp_path):
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    ended = run(f"drafter={tmp_path}/head", "requests=[1]", "drafts=[1]", "max_new_tokens=1")
    assert ended.code == 2 and "every answer ends with its first token" in ended.err


def test_every_engine_gets_its_own_settings(deep):
    commands = tune.settings(KNOWN.schedule(), 2, "mine/head", make_head("eagle3", deep), deep)
    table = (
        '"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 3, 2], [4, 31, 1], [32, 1024, 0]]'
    )
    assert table in commands["vLLM"] and "mine/head" in commands["vLLM"]
    flags = "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
    assert commands["SGLang"].endswith(flags)
    assert commands["llama.cpp"].startswith(
        "foredraft export checkpoint=mine/head format=gguf output_dir=exported-gguf\n"
    )
    assert commands["llama.cpp"].endswith("-md exported-gguf/head.gguf --spec-type draft-eagle3 --spec-draft-n-max 2")
    commands = tune.settings(KNOWN.schedule(), 2, "my runs/head", make_head("eagle3", deep), deep)
    assert shlex.split(commands["llama.cpp"])[2] == "checkpoint=my runs/head"
    assert '"model": "my runs/head"' in commands["vLLM"] and "-draft-model-path 'my runs/head' " in commands["SGLang"]


def test_engines_get_the_head_of_a_run_and_the_directory_of_a_target_in_gguf(deep, tmp_path, monkeypatch):
    save_head(head := make_head("eagle3", deep), tmp_path / "run/head", deep)
    monkeypatch.setattr(deep, "name", "FILE.gguf")
    command = tune.settings(KNOWN.schedule(), 2, str(tmp_path / "run"), head, deep)["vLLM"]
    assert f'"model": "{tmp_path}/run/head"' in command and command.startswith(f"vllm serve {deep.checkpoint} ")


def test_blocks_are_drafted_whole_where_an_engine_has_no_number_for_them(deep):
    commands = tune.settings([[1, 2, 0], [3, 1024, 2]], 2, "mine/head", make_head("dflash", deep), deep)
    assert "SGLang" not in commands and "[[1, 2, 0], [3, 1024, 2]]" in commands["vLLM"]


def test_shorter_blocks_are_other_drafts_unless_they_are_causal(deep):
    """Engines run a block of as many positions as drafts are wanted, and the anchor, through all layers."""
    head = make_head("dflash", deep)
    assert tune.shorter_blocks(head, head.depth) == "" == tune.shorter_blocks(make_head("jetspec", deep), 2)
    assert tune.shorter_blocks(make_head("eagle3", deep), 2) == ""
    assert "shorten the block to 3 positions" in tune.shorter_blocks(head, 2)
    inputs = head.inputs(deep.embed(torch.tensor([5])))
    short, whole = (drafts_of(head, inputs[:, :size]) for size in (3, head.block_size))
    assert (short - whole[:, :3]).abs().max() > 1e-3


def drafts_of(head, block: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of a block without text before it, by the rule of vLLM and llama.cpp."""
    cos, sin = head.rotary(torch.arange(block.shape[1])[None], 64, block.dtype)
    with torch.no_grad():
        for layer in head.blocks:
            q, k, v, _ = layer.self_attn.project(layer.inputs(block)[0], cos, sin)
            attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            block = layer.feed_forward(block, layer.self_attn.project_out(attended))
    return head.norm(block)


def test_many_requests_of_long_prompts_are_timed_together(target):
    prompts = [torch.randint(1, 300, (100 + number,)).tolist() for number in range(3)]
    assert tuning.seconds_per_step(target, None, prompts, 20, 3, 0.0) > 0
    with pytest.raises(
        ValueError, match=r"requests=200 of 102 tokens and steps=3 need \d+ new tokens, more than the 256"
    ):
        tuning.seconds_per_step(target, None, prompts, 200, 3, 0.0)


def test_steps_are_timed_and_acceptance_is_that_of_the_chain(run, target, tmp_path):
    save_head(make_head("medusa", target), tmp_path / "head", target)
    output = Path(tmp_path / "tune.json")
    assert run(f"drafter={tmp_path}/head", "requests=[2]", "drafts=[1,2,9]", f"output={output}").code == 0
    written = json.loads(output.read_text())
    assert written["seconds"].keys() == {"2"} and all(seconds > 0 for seconds in written["seconds"]["2"].values())
    assert len(written["accepted"]) == 2 and written["about"]["n"] == 3  # 9 drafts are more than the head makes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("requests=[4,1]", "requests=[4, 1]: give ascending numbers from 1 on"),
        ("drafts=[0,1]", "drafts=[0, 1]: give ascending numbers from 1 on"),
        ("drafts=[9]", "drafts=[9]: the head drafts 3 tokens at most"),
        ("steps=0", "steps=0 must be at least 1"),
    ],
)
def test_bad_input(run, target, tmp_path, settings, message):
    save_head(make_head("medusa", target), tmp_path / "head", target)
    ended = run(f"drafter={tmp_path}/head", settings)
    assert ended.code == 2 and message in ended.err
