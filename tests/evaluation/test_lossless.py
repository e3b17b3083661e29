"""scripts/lossless.py as a user types it: lossless decoding is reported as such, and a verifier that lets drafts through is
caught."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from foredraft.heads import Target, save_head
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.heads.target_model.packing import is_faster
from foredraft.inference import generate, target_sampler
from foredraft.inference.drafters import NgramDrafter, NoDrafter, load_drafter
from foredraft.inference.evaluation import lossless as levels
from foredraft.inference.evaluation import measure
from foredraft.inference.evaluation.lossless import PaddedDrafter
from foredraft.inference.sampling import SamplingParams
from foredraft.scripts import lossless
from tests.support import typed
from tests.support.batches import prompt
from tests.support.head_factory import make_head


@pytest.fixture
def run(tiny_path, folder, call):
    given = f"target.path={tiny_path} data=text data.path={folder} num_prompts=2 prompt_tokens=24 max_new_tokens=16"
    return partial(call, lossless.main, *typed(given))


@pytest.mark.nightly
def test_the_ngram_drafter_is_lossless(run):
    said = run().out
    assert said.count("L1  float32") == 4 == said.count("100.0% identical\n") and said.endswith("lossless\n")
    kept = 4 * is_faster(torch.float32)
    assert said.count("L2  float32") == kept == said.count("2 of 2 texts identical, 0 of ")


@pytest.mark.parametrize("joined", ["", "+suffix"])
def test_a_head_drafts_in_every_step_that_is_checked(target, tmp_path, joined):
    """Use a head whose drafts are wrong, after which tree=auto decodes without."""
    save_head(make_head("medusa", target), tmp_path / "head", target)
    drafter = lossless.in_every_step(load_drafter(f"{tmp_path}/head{joined}", target), target)
    steps = generate(target, drafter, prompt(9), max_new_tokens=24, eos_token_id=-1).steps
    assert min(step.nodes for step in steps[:-1]) > 1


def test_a_drafter_that_never_drafts_is_not_checked(run):
    ended = run("drafter=none")
    assert ended.code == 2 and "drafter=none drafts nothing" in ended.err and "lossless" not in ended.out


def test_texts_that_the_context_does_not_hold_are_not_checked(run):
    ended = run("max_new_tokens=240")
    assert "make texts of 264 tokens, more than the context of 256" in ended.err and "identical" not in ended.out


def test_a_verifier_that_changes_the_text_is_caught(run, monkeypatch):
    choose = target_sampler.choose_and_verify

    def careless(*given):
        verification, valid = choose(*given)
        drafted = verification.choices.shape[1] > 1  # then it writes another token than the right one
        return verification._replace(tokens=(verification.tokens + drafted) % 300), valid

    monkeypatch.setattr(target_sampler, "choose_and_verify", careless)
    ended = run()
    assert ended.code != 0 and "drafting changes the text" in ended.err


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("inner", [NoDrafter, NgramDrafter])
def test_a_padded_tree_has_the_rows_of_the_largest(target, inner, temperature):
    """Check also steps without drafts, as tree=auto makes them if drafts do not pay off."""
    given = {"max_new_tokens": 20, "eos_token_id": -1, "temperature": temperature, "seed": 1}
    drafted = generate(target, PaddedDrafter(inner()), prompt(9), **given)
    assert drafted.new_tokens == generate(target, None, prompt(9), **given).new_tokens
    assert {step.nodes for step in drafted.steps} == {max(2, inner().nodes)}


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    "dtype, second, arithmetic", [("bfloat16", 8.0625, True), ("bfloat16", 8.5, False), ("float32", 8.0625, False)]
)
def test_neighbours_of_a_dtype_differ_by_rounding(monkeypatch, dtype, second, arithmetic, temperature):
    """Use bfloat16, in which nothing lies between 8 and 8.0625: forwards that agree here need not, in pieces of other
    lengths."""
    scores = torch.tensor([0.0, 8.0, second, 1.0])
    monkeypatch.setattr(levels, "recompute_logits", lambda *_: scores)
    monkeypatch.setattr(levels.Noise, "at", lambda self, positions: torch.zeros(*positions.shape, 4))
    target = SimpleNamespace(vocab_size=4, device=torch.device("cpu"), dtype=getattr(torch, dtype))
    place = levels.audit(target, [3], [0, 2], [0, 1], [1, 4], SamplingParams(temperature))
    assert place.token == 1 and place.is_arithmetic == arithmetic


def test_what_rounding_does_to_other_tokens_explains_nothing(monkeypatch):
    """Use a forward of many tokens that is far off at a token of neither text, and close at the two in question."""
    one = torch.tensor([0.0, 8.0, 8.5, 1.0])
    many = one + torch.tensor([3.0, 0.01, 0.01, 0.0])
    monkeypatch.setattr(levels, "recompute_logits", lambda target, text, prompt, size: one if size == 1 else many)
    target = SimpleNamespace(vocab_size=4, device=torch.device("cpu"), dtype=torch.float32)
    assert not levels.audit(target, [3], [0, 2], [0, 1], nodes=[1, 4]).is_arithmetic
    one[2] = 8.01
    assert levels.audit(target, [3], [0, 2], [0, 1], nodes=[1, 4]).is_arithmetic


@pytest.mark.parametrize(
    "penalty, text", [({"repetition_penalty": 1.2}, 0), ({"presence_penalty": 1.6}, 2), ({"frequency_penalty": 0.8}, 2)]
)
def test_scores_are_compared_with_their_penalties(monkeypatch, penalty, text):
    """Use a token that stands in the prompt, and stands twice in the new text of the second and third case."""
    scores = torch.tensor([0.0, 8.0, 9.6, 1.0])
    monkeypatch.setattr(levels, "recompute_logits", lambda *_: scores)
    target = SimpleNamespace(vocab_size=4, device=torch.device("cpu"), dtype=torch.float32)
    both = [text, text, 2], [text, text, 1]
    assert levels.audit(target, [2], *both, [1] * 3, SamplingParams(**penalty)).is_arithmetic
    assert not levels.audit(target, [2], *both, [1] * 3).is_arithmetic


@pytest.mark.parametrize("name", levels.SETTINGS)
def test_each_setting_is_audited(target, monkeypatch, name):
    settings, rows = levels.SETTINGS[name], [prompt(9)[0].tolist()]
    assert levels.divergences(target, NgramDrafter(), rows, 12, **settings) == []

    def other(target, drafter, ids, **given):
        out = generate(target, drafter, ids, **given)
        if drafter is not None:
            out.new_tokens[0][5] = (out.new_tokens[0][5] + 1) % target.vocab_size
        return out

    monkeypatch.setattr(levels, "generate", other)
    (place,) = levels.divergences(target, NgramDrafter(), rows, 12, **settings)
    assert place.token == 5 and not place.is_arithmetic


def test_a_token_that_rounding_moves_out_of_top_p_is_no_fault(monkeypatch):
    """Let half of the probability be just reached without the second token, and just not reached in the other forward."""
    one, many = (torch.tensor([0.0, 8.0, 8.0, 1.0]) for _ in range(2))
    one[2] -= 1e-3
    many[2] += 1e-3
    monkeypatch.setattr(levels, "recompute_logits", lambda target, text, prompt, size: one if size == 1 else many)
    target = SimpleNamespace(vocab_size=4, device=torch.device("cpu"), dtype=torch.float32)
    params = SamplingParams(1.0, top_p=0.4)
    assert levels.audit(target, [3], [0, 1], [0, 2], [1, 4], params).filtered
    assert not levels.audit(target, [3], [0, 1], [0, 3], [1, 4], params).is_arithmetic


def test_a_near_tie_in_float32_is_no_fault(run, monkeypatch):
    monkeypatch.setattr(Capabilities, "prefers_chains", False)
    monkeypatch.setattr(Capabilities, "keeps_bits", False)
    monkeypatch.setattr(lossless, "divergences", lambda *_, **__: [levels.Divergence(0, 3, 1e-6, 2e-6)])
    ended = run()
    assert ended.code == 0 and ended.out.endswith("lossless\n")
    assert ended.out.count("token 3: gap 1e-06, forwards differ by 2e-06: rounding") == 4 == ended.out.count("L1 ")
    assert "L2" not in ended.out and "L3" not in ended.out
    monkeypatch.setattr(lossless, "divergences", lambda *_, **__: [levels.Divergence(0, 3, 1e-3, 2e-6)])
    assert "4 checks failed" in run().err
    ended = run("dtype=bfloat16")
    assert "8 checks failed" in ended.err and ended.out.count("L2 ") == 4 == ended.out.count("L3 ")


def test_bits_that_change_in_float32_are_a_fault(run, monkeypatch):
    monkeypatch.setattr(Capabilities, "keeps_bits", True)
    monkeypatch.setattr(lossless, "compare_bits", lambda *_: iter([("alone", levels.BitComparison(2, 2, 30, 1))]))
    ended = run()
    assert ended.code == 2 and "2 checks failed" in ended.err
    assert (
        ended.out.count("L2  float32, temperature") == 2 == ended.out.count("1 of 30 rows of logits differ in any bit")
    )


def test_a_difference_is_judged_by_the_tree_of_its_step():
    """Use tree=auto, which chooses another size in every step, sometimes none."""
    assert levels.nodes_by_token([3, 1, 2], [8, 1, 4]) == [1, 8, 8, 8, 1, 4, 4]


def test_the_tree_that_was_used_is_audited(monkeypatch):
    """Let forwards of many tokens be far off; the step in question was one of a single token, so that explains nothing."""
    one = torch.tensor([0.0, 8.0, 8.5, 1.0])
    sizes: list[int] = []

    def logits(target, text, prompt, size):
        sizes.append(size)
        return one if size == 1 else one + torch.tensor([0.0, 1.0, 1.0, 0.0])

    monkeypatch.setattr(levels, "recompute_logits", logits)
    target = SimpleNamespace(vocab_size=4, device=torch.device("cpu"), dtype=torch.float32)
    texts = [0, 0, 0, 2], [0, 0, 0, 1]
    assert not levels.audit(target, [3], *texts, nodes=levels.nodes_by_token([2, 1], [16, 1])).is_arithmetic
    assert levels.audit(target, [3], *texts, nodes=levels.nodes_by_token([2, 1], [1, 16])).is_arithmetic
    assert sizes == [1, 1, 1, 16]


def test_a_float32_copy_is_of_the_same_weights(monkeypatch, tiny_path):
    """Decode with another branch of the Hub, or code of the checkpoint."""
    half = Target.from_pretrained(tiny_path, dtype="bfloat16", device="cpu", context=64, trust_remote_code=True)
    half.revision, loaded = "a-branch", list[dict]()
    monkeypatch.setattr(Target, "from_pretrained", lambda name, **given: loaded.append(given | {"name": name}))
    measure.float32_target(half)
    wanted = {"name": half.name, "dtype": "float32", "device": half.device, "quantization": None, "sharding": None}
    assert loaded == [wanted | {"revision": "a-branch", "trust_remote_code": True, "context": 64}]


def test_a_float32_copy_without_memory_is_not_loaded(monkeypatch, tiny_path, capsys):
    half = Target.from_pretrained(tiny_path, dtype="bfloat16", device="cpu")
    monkeypatch.setattr(measure, "free_memory", lambda device: 1000)
    monkeypatch.setattr(Target, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    assert measure.float32_target(half) is None and "losslessness is not checked" in "".join(capsys.readouterr())
