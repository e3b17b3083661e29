"""What every drafter promises: the target's own text, whatever it drafts; and what each of them drafts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.heads import Target, hub, save_head
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.draft_model import DraftModelHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.inference import Engine, Request, generate, load_drafter
from foredraft.inference.drafters import (
    AutoTree,
    Chain,
    Drafter,
    DraftModel,
    DynamicTree,
    Lookahead,
    NgramDrafter,
    StaticTree,
    SuffixDrafter,
    Union,
    drafter_for,
    tree_of,
)
from foredraft.inference.drafters.base import Accepted, PendingAccepted, bonus_only, chains, trees
from foredraft.inference.drafters.cached_tree import CachedTree
from foredraft.inference.drafters.measurements import Costs
from foredraft.inference.drafters.union import merge
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.tree import TokenTree
from tests.support import nightly_but
from tests.support.decoding import SETTINGS, OneBranch, drafters
from tests.support.head_factory import make_head
from tests.support.tiny import prompt, random_model


@pytest.fixture(scope="module")
def small() -> Target:
    return random_model(1)


def eagle(target: Target) -> DynamicTree:
    torch.manual_seed(2)
    head = Eagle3Head.for_target(target, ttt_steps=4).eval()
    return DynamicTree(head, target, nodes=10, depth=4, width=3, min_probability=0)


def medusa(target: Target) -> StaticTree:
    return StaticTree(MedusaHead.for_target(target, num_heads=3).eval(), target, nodes=9)


def suffix_or(head: AutoTree) -> AutoTree:
    head.add_suffix(SuffixDrafter(per_match=9.0))
    return head


DRAFTERS = {
    "lookahead of one column": lambda target: Lookahead(window=1, ngram=2, guesses=1),
    "draft model, auto": lambda target: AutoTree(DraftModel(random_model(3), target, min_probability=0), target),
    "several draft models": lambda target: Union(
        [DraftModel(random_model(seed), target, min_probability=0) for seed in (3, 1)]
    ),
    "ngram and heads": lambda target: Union([NgramDrafter(), eagle(target), medusa(target)]),
    "lookahead and suffix": lambda target: Union([Lookahead(), SuffixDrafter()]),
    "a suffix or a head": lambda target: suffix_or(AutoTree(eagle(target), target)),
    "auto with ngram": lambda target: Union([AutoTree(medusa(target), target), NgramDrafter()]),
}


def everyone(target: Target) -> dict[str, Drafter]:
    return {name: build(target) for name, build in DRAFTERS.items()} | drafters(target)


def new_tokens(target: Target, drafter: Drafter | None, rows: list[list[int]], side=1, **settings) -> list[list[int]]:
    """Return the new tokens. side: -1 pads on the right."""
    padded = [([0] * (max(map(len, rows)) - len(row)) + row[::side])[::side] for row in rows]
    mask = [([0] * (max(map(len, rows)) - len(row)) + [1] * len(row))[::side] for row in rows]
    ids, mask = torch.tensor(padded), torch.tensor(mask)
    return generate(target, drafter, ids, mask, **{"seed": 0} | settings).new_tokens


@pytest.mark.parametrize("name", nightly_but(["greedy", "top-p", "top-k", "penalty"], "top-p"))
def test_every_drafter_writes_the_plain_text_alone_and_in_a_ragged_batch(small, name):
    rows = [prompt(length, seed) for seed, length in enumerate((3, 17, 1, 8))]
    settings = SETTINGS[name] | {"max_new_tokens": 20, "eos_token_id": -1}
    alone = [new_tokens(small, None, [row], seed=seed, **settings)[0] for seed, row in enumerate(rows)]
    ends = settings | {"eos_token_id": alone[1][9]}  # so that rows end at different times
    ended = new_tokens(small, None, rows, **ends)
    assert len({len(text) for text in ended}) > 1 and new_tokens(small, None, rows, side=-1, **ends) == ended
    for who, drafter in everyone(small).items():
        assert new_tokens(small, drafter, [rows[1]], seed=1, **settings) == [alone[1]], who
        assert new_tokens(small, drafter, rows, **ends) == ended, who


def test_text_up_to_the_last_position_of_the_context_whatever_is_drafted(small):
    ids = torch.tensor([prompt(246)])
    plain = generate(small, None, ids, max_new_tokens=100, eos_token_id=-1).sequences
    assert plain.shape[1] == 256
    big = {"big": DynamicTree(eagle(small).head, small, nodes=300, depth=4, width=12, min_probability=0)}
    for who, drafter in (everyone(small) | big).items():
        assert torch.equal(generate(small, drafter, ids, max_new_tokens=100, eos_token_id=-1).sequences, plain), who


def accepted(*texts: list[int], width: int = 0) -> Accepted:
    """Return what a first step sees of these texts."""
    counts = [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1] = torch.tensor(text[1:])
    return Accepted(tokens, torch.zeros(*tokens.shape, width), counts, [list(text) for text in texts])


def begun(drafter: Drafter, batch: int = 1) -> Drafter:
    drafter.begin(batch, 100, Sampling.of([SamplingParams()] * batch, 1024))
    return drafter


def branches(tree, row: int = 0) -> set[tuple[int, ...]]:
    """Return the paths of all nodes below the root, as tokens."""
    found = set()
    for node in range(1, tree.tokens.shape[1]):
        if tree.tokens[row, node] >= 0:
            found.add(tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]))
    return found


def test_an_ngram_goes_on_as_it_did_last():
    text = [9, 1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    tree = begun(NgramDrafter(longest=2, depth=3)).propose(accepted(text), None)
    assert tree.tokens[0, :2].tolist() == [2, 4]
    # the longest n-gram is asked first: what followed [9, 1] counts, not what followed [1]
    text = [9, 1, 5, 8, 1, 6, 9, 1]
    assert begun(NgramDrafter(longest=2, depth=1)).propose(accepted(text), None).tokens.tolist() == [[1, 5]]
    nothing = begun(NgramDrafter()).propose(accepted([1, 2, 3]), None)
    assert nothing.tokens.tolist() == [[3]]


def test_suffixes_draft_a_tree_of_what_followed_and_more_of_a_longer_match():
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3]
    tree = begun(SuffixDrafter(longest=6, nodes=16, per_match=2.0)).propose(accepted(text), None)
    found = branches(tree)
    assert {(4,), (6,), (4, 5), (6, 7)} <= found and tree.tokens.shape[1] == 7  # a match of three tokens, six drafts
    few = begun(SuffixDrafter(longest=6, nodes=16, per_match=0.67)).propose(accepted(text), None)
    assert branches(few) in ({(4,), (6,)}, {(4,), (4, 5)}, {(6,), (6, 7)})
    often = [1, 2, 1, 2, 1, 3, 1]
    first = begun(SuffixDrafter(per_match=1.0)).propose(accepted(often), None)
    assert branches(first) == {(2,)}


def test_suffixes_remember_past_outputs_but_not_past_prompts(small):
    drafter = SuffixDrafter()
    settings = {"max_new_tokens": 41, "eos_token_id": -1, "temperature": 1.0, "seed": 0}
    ids = torch.tensor([prompt(9)])
    first, again = (generate(small, drafter, ids, **settings) for _ in range(2))
    assert again.new_tokens == first.new_tokens
    assert again.acceptance_length > 2 * first.acceptance_length
    begun(drafter)
    assert prompt(9)[0] not in drafter.past.children or prompt(9)[0] in first.new_tokens[0]
    forgetful = SuffixDrafter(past=0)
    generate(small, forgetful, ids, **settings)
    assert not begun(forgetful).past.children


def test_lookahead_learns_ngrams_that_the_target_wrote_and_drafts_them(small):
    drafter = begun(Lookahead(window=3, ngram=3, guesses=2))
    tree = drafter.propose(accepted([11, 12, 13, 14, 15, 16, 17]), None)
    assert tree.tokens.tolist() == [[17, 12, 13, 14, 15, 16, 17]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert branches(tree) == {(12,), (12, 13), (12, 13, 14), (12, 15), (12, 13, 16), (12, 13, 14, 17)}
    # behind each column the target writes 21, 22, 23: its n-grams are (12, 15, 21), (13, 16, 22), (14, 17, 23)
    drafter.observe([[0]], torch.tensor([[18, 0, 0, 0, 21, 22, 23]]))
    tree = drafter.propose(accepted([17, 13]), None)
    assert tree.tokens[0, 1:7].tolist() == [15, 16, 17, 21, 22, 23]  # the rounds moved down
    assert tree.tokens[0, 7:].tolist() == [16, 22] and (16, 22) in branches(tree)
    # two tokens accepted: the window moves one column
    drafter.observe([[0, 1]], torch.tensor([[0, 0, 0, 0, 31, 32, 33, 0, 0]]))
    assert [line[:2] for line in drafter.windows[0]] == [[22, 23], [32, 33]]


@pytest.mark.parametrize(
    ("path", "dtype"), [("lookahead", "float32"), ("lookahead", "bfloat16"), ("lookahead+ngram", "bfloat16")]
)
def test_lookahead_gains_where_the_text_repeats_itself(path, dtype):
    """Check half precision, too, which keeps bits here: others draft chains."""
    forgetful = random_model(1).model.to(getattr(torch, dtype))
    for layer in forgetful.model.layers:  # what comes next depends on the last token alone: it runs in a circle
        layer.self_attn.o_proj.weight.data.zero_(), layer.mlp.down_proj.weight.data.zero_()
    target = Target(forgetful)
    assert target.capabilities.prefers_chains == (dtype == "bfloat16")
    drafter = load_drafter(path, target)
    out = generate(target, drafter, torch.tensor([prompt(9)]), max_new_tokens=100, eos_token_id=-1)
    assert len(set(out.new_tokens[0])) < 50 and out.acceptance_length > 2


def test_a_union_names_every_path_once_and_keeps_all_of_them():
    step = accepted([1, 2, 3], [4, 5, 6])
    one = chains(step, [[10, 11, 12], [20]])
    two = trees(step, [[(10, 0), (13, 1), (14, 0)], [(21, 0), (22, 1)]], depth=2)
    tree, (ours, theirs) = merge([one, two], depth=3)
    assert branches(tree, 0) == {(10,), (10, 11), (10, 11, 12), (10, 13), (14,)}
    assert branches(tree, 1) == {(20,), (21,), (21, 22)}
    assert tree.tokens.shape == (2, 6)  # the first row's nodes, (10,) counted once
    for row in range(2):
        for source, places in ((one, ours), (two, theirs)):
            for node, place in enumerate(places[row].tolist()):
                if source.tokens[row, node] >= 0:
                    assert tree.tokens[row, place] == source.tokens[row, node]


def test_drafters_in_a_union_observe_their_own_nodes():
    one, two = OneBranch([10, 11]), OneBranch([10, 12, 13])
    both = begun(Union([one, two]))
    tree = both.propose(accepted([1, 2]), None)
    assert tree.tokens.tolist() == [[2, 10, 11, 12, 13]]
    both.observe([[0, 1, 3]], torch.tensor([[10, 12, 0, 14, 15]]))
    assert one.observed == [([[0, 1]], [[10, 12, 0]])]
    assert two.observed == [([[0, 1, 2]], [[10, 12, 14, 15]])]


def test_a_union_gives_each_drafter_the_features_it_asked_for():
    class Wants(OneBranch):
        def propose(self, step, gumbel):
            self.got = step.aux_hidden_states
            return bonus_only(step)

    one, two, three = Wants([1]), Wants([1]), Wants([1])
    one.layers, two.layers = [1, 6], [3]
    both = begun(Union([one, two, three]))
    assert both.layers == [1, 3, 6]
    aux_hidden_states = torch.tensor([1.0, 1, 3, 3, 6, 6]).expand(1, 1, -1)
    both.propose(accepted([1, 2])._replace(aux_hidden_states=aux_hidden_states), None)
    assert one.got.flatten().tolist() == [1, 1, 6, 6] and two.got.flatten().tolist() == [3, 3]
    assert three.got.shape == (1, 1, 0)


def test_a_union_accepts_at_least_what_each_accepts_alone(small):
    ids, settings = torch.tensor([prompt(17)]), {"max_new_tokens": 60, "eos_token_id": -1}
    alone = [
        DraftModel(random_model(seed), small, 5, 4, 1, min_probability=0) for seed in (1, 3)
    ]  # seed 1 is the target itself
    steps = generate(small, Union(alone[::-1]), ids, **settings).steps
    assert [step.accepted for step in steps[:-1]] == [[4]] * (len(steps) - 1)
    assert max(step.nodes for step in steps) <= 9


@torch.inference_mode()
def test_a_tree_stops_where_little_is_left_to_gain(small):
    head = eagle(small).head
    texts, aux_hidden_states = [[1, 2, 3], [4, 5]], len(head.layers) * small.hidden_size
    for min_probability, levels in ((0.0, 4), (1.1, 1)):
        drafter = DynamicTree(head, small, nodes=10, depth=4, width=3, min_probability=min_probability)
        drafter.begin(2, 64, Sampling.of([SamplingParams()] * 2, 1024))
        assert drafter.propose(accepted(*texts, width=aux_hidden_states), None).depths.max() == levels
    drafter = DynamicTree(head, small, nodes=10, depth=4, width=3)
    shares = torch.tensor([[0.05, 0.04, 0.03], [0.3, 0.1, 0.1], [0.2, 0.06, 0.0]]).log()
    below = drafter.stop_improbable(shares)
    assert below is not None and below.isfinite().any(1).tolist() == [False, True, True]
    assert below[1:].equal(shares[1:]) and drafter.stop_improbable(shares[:1]) is None


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "draft model"])
def test_the_drafts_of_a_text_stop_alike_alone_and_in_a_batch(target, kind, monkeypatch):
    settings = {"nodes": 12, "depth": 4, "width": 3, "min_probability": 0.6}
    if kind == "draft model":
        drafter: CachedTree = DraftModel(target, target, **settings)
    else:
        drafter = drafter_for(make_head(kind, target), target, **settings)
    drafts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}  # of each text, by what was written of it
    uneven, propose = [], drafter.propose

    def record(accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = propose(accepted, gumbel)
        drafted = [branches(tree, row) for row in range(len(tree.tokens))]
        for text, paths in zip(accepted.text, drafted, strict=True):
            assert drafts.setdefault(tuple(text), paths) == paths
        uneven.append(len({max(map(len, paths)) for paths in drafted}) > 1)
        return tree

    monkeypatch.setattr(drafter, "propose", record)
    for max_num_seqs in (1, 4):
        engine = Engine(target, drafter, max_num_seqs=max_num_seqs)
        for seed in range(4):
            engine.add(Request(prompt(9, seed), SamplingParams(1.0), 24, seed))
        while engine.has_work:
            engine.step()
    assert any(uneven), "in no step one text stopped before another"


def test_short_words_name_drafters(target, tiny_path):
    load = partial(load_drafter, target=target)
    assert isinstance(load("suffix", nodes=4).suffix, SuffixDrafter)
    union = load(f"lookahead+draft:{tiny_path}")
    assert isinstance(union, Union) and isinstance(union.drafters[1], DraftModel)  # of a fixed tree
    for spec in (f"draft:{tiny_path}+suffix", f"suffix+draft:{tiny_path}"):
        assert isinstance(load(spec).suffix, SuffixDrafter)
    both = load(f"draft:{tiny_path}+suffix", tree="fixed")
    assert isinstance(both, Union) and isinstance(both.drafters[0], DraftModel)
    assert isinstance(load(f"draft:{tiny_path}"), AutoTree) and isinstance(
        load(f"draft:{tiny_path}", tree="fixed"), DraftModel
    )
    assert isinstance(load(f"draft:{tiny_path}", tree="auto", nodes=4), AutoTree)


def test_a_revision_is_that_of_every_part_of_a_drafter(target, monkeypatch):
    def missing(path: str, revision: str | None = None, **_) -> None:
        raise ValueError(f"{path} at {revision}")

    monkeypatch.setattr("foredraft.inference.drafters.find", missing)
    monkeypatch.setattr(Target, "from_pretrained", missing)
    for path in ("org/head", "org/head+suffix", "suffix+org/head", "draft:org/head", "draft:org/head+suffix"):
        with pytest.raises(ValueError, match="org/head at v2"):
            load_drafter(path, target, "v2")


def test_a_revision_is_that_of_the_hubs_part_next_to_a_directory(target, monkeypatch, tmp_path):
    save_head(make_head("medusa", target), tmp_path / "mine", target)
    asked = {}

    def find(path: str, revision: str | None = None) -> Path:
        asked[path] = revision
        return hub.find(tmp_path / "mine" if path == "org/head" else path, None if path == "org/head" else revision)

    monkeypatch.setattr("foredraft.inference.drafters.find", find)
    mine = str(tmp_path / "mine")
    assert isinstance(load_drafter(f"{mine}+org/head", target, "v2"), Union) and asked == {mine: None, "org/head": "v2"}
    with pytest.raises(ValueError, match="is a directory, which has no revision=v2"):
        load_drafter(f"{mine}+suffix", target, "v2")


def test_a_heads_window_can_be_set_for_drafting(target, tmp_path):
    for kind in ("eagle3", "medusa"):
        save_head(make_head(kind, target), tmp_path / kind, target)
    drafter = load_drafter(str(tmp_path / "eagle3"), target, window=16)
    assert tree_of(drafter).head.window == 16
    ids = torch.tensor([prompt(60)])
    text = generate(target, drafter, ids, max_new_tokens=20).sequences
    assert torch.equal(text, generate(target, None, ids, max_new_tokens=20).sequences)
    with pytest.raises(ValueError, match=r"drafter\.window=2 must be a number of positions above"):
        load_drafter(str(tmp_path / "eagle3"), target, window=2)
    joined = load_drafter(f"{tmp_path / 'eagle3'}+suffix", target, window=16)
    assert joined.inner.head.window == 16
    with pytest.raises(ValueError, match="window=16 is not an option of this drafter"):
        load_drafter(str(tmp_path / "medusa"), target, window=16)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_options_of_another_type_are_named(kind, target, tmp_path):
    save_head(make_head(kind, target), tmp_path / "head", target)
    names = {"eagle3": ["nodes", "depth", "width"], "medusa": ["nodes", "width"], "dflash": ["nodes", "depth", "width"]}
    for name in names[kind]:
        for value in ("16", 1.5, [5], True):
            with pytest.raises(ValueError, match=f"^{name}=.* is not a whole number"):
                load_drafter(tmp_path / "head", target, **{name: value})
        with pytest.raises(ValueError, match=f"{name}=0"):
            load_drafter(tmp_path / "head", target, **{name: 0})
    assert load_drafter(tmp_path / "head", target, width=None).nodes > 1
    if kind != "medusa":
        with pytest.raises(ValueError, match=r"min_probability='0\.5' is not a number"):
            load_drafter(tmp_path / "head", target, min_probability="0.5")


def test_bad_settings_are_named(target, tiny_path):
    draft = f"draft:{tiny_path}"
    for spec, options, message in (
        ("ngrams", {}, "'ngrams' is not one of"),
        ("ngram", {"longest": 0}, "longest=0"),
        ("suffix", {"nodes": 1}, "nodes=1"),
        ("suffix", {"per_match": 0}, "per_match=0"),
        ("suffix", {"per_match": float("nan")}, "per_match=nan"),
        ("suffix", {"past": 1.5}, "past=1.5 is not a whole number"),
        ("ngram", {"depth": None}, "depth=None is not a whole number"),
        ("lookahead", {"guesses": "3"}, "guesses='3' is not a whole number"),
        (draft, {"min_probability": float("nan")}, "min_probability=nan"),
        ("lookahead", {"window": 0}, "window=0"),
        ("lookahead", {"ngram": 1}, "ngram=1"),
        (draft, {"width": 0}, "width=0"),
        (draft, {"tree": "wide"}, "tree=wide"),
        (f"{draft}+suffix", {"tree": "wide"}, "tree=wide is not one of auto, fixed"),
        ("suffix+", {}, r"'suffix\+' lacks a drafter next to a \+"),
    ):
        with pytest.raises(ValueError, match=message):
            load_drafter(spec, target, **options)
    with pytest.raises(ValueError, match="random 9 has 300 tokens"):
        DraftModel(random_model(9, vocab_size=300), target)
    with pytest.raises(ValueError, match="at least two drafters"):
        Union([NgramDrafter()])
    with pytest.raises(ValueError, match="nodes=1"):
        StaticTree(MedusaHead.for_target(target), target, nodes=1)
    with pytest.raises(ValueError, match="tree=wide is not one of"):
        drafter_for(MedusaHead.for_target(target), target, tree="wide")


class Largest(TorchDispatchMode):
    """Record the largest number of elements of any tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra_pp", "draft model"])
def test_a_prompt_is_read_without_a_mask_of_its_length_squared(target, kind):
    head = DraftModelHead(target, target.vocab_size) if kind == "draft model" else make_head(kind, target)
    length = 240
    tokens = torch.arange(length)[None] % target.vocab_size
    aux_hidden_states = target.forward(tokens, layers=head.layers).aux_hidden_states
    inputs = aux_hidden_states, head.embed(tokens, target)
    with torch.no_grad(), Largest() as whole:
        read = head.draft_extend(*inputs, KVCache(head.cache_layers, 1, length, "cpu"))
    assert whole.elements < length**2
    halves = KVCache(head.cache_layers, 1, length, "cpu")
    with torch.no_grad(), Largest() as masked:
        first = head.draft_extend(*(x[:, : length // 2] for x in inputs), halves)
        halves.set_lengths([length // 2])
        second = head.draft_extend(*(x[:, length // 2 :] for x in inputs), halves)
    torch.testing.assert_close(torch.cat([first, second], 1), read, atol=1e-4, rtol=1e-4)
    assert masked.elements >= (length // 2) * length  # the second half did need one


class Counted(TorchDispatchMode):
    """Count the kernels that run inside."""

    kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += 1
        return func(*args, **(kwargs or {}))


def test_what_many_steps_accepted_is_put_together_at_once():
    """Check that few kernels run after steps without drafts of many sequences: not some for each sequence and step, and
    none when one joins."""
    draw = torch.Generator().manual_seed(0)
    texts, pending = [[0], [0], [0]], PendingAccepted()
    with Counted() as counted:
        for step in range(40):
            if step in (20, 21):  # the first one leaves, the last one takes its place, and another joins
                pending.select([2, 1, None])
                texts = [texts[2], texts[1], [0]]
            counts = torch.randint(1, 4, (3,), generator=draw).tolist()
            tokens = torch.randint(1, 99, (3, 4), generator=draw)
            texts = [text + row[:count] for text, row, count in zip(texts, tokens.tolist(), counts, strict=True)]
            if step == 39:
                counts[1] = 0  # it has ended
            pending.append(Accepted(tokens, tokens[..., None].float().expand(-1, -1, 2), counts, texts))
        before = counted.kernels
        together = pending.take()
        assert counted.kernels - before < 100
    assert together.counts == [len(texts[0]) - 1, 0, len(texts[2]) - 1] and together.text == texts
    for row in (0, 2):
        count = together.counts[row]
        assert together.tokens[row, :count].tolist() == texts[row][1:]
        assert torch.equal(together.aux_hidden_states[row, :count, 1], together.tokens[row, :count].float())
    pending.append(together)
    assert pending.take() is together  # nothing is left of before


def test_rows_that_pad_the_targets_vocabulary_are_never_drafted(target):
    """Pad the logits to equal width, or noise and losses would not fit: Qwen2.5-0.5B has fewer rows than Qwen2.5-7B."""
    small, hidden = random_model(9, vocab_size=target.vocab_size - 8), torch.randn(2, 3, target.hidden_size)
    logits = DraftModelHead(small, target.vocab_size).logits(hidden, 1)
    assert torch.equal(logits[..., :-8], small.logits(hidden)) and logits.shape[-1] == target.vocab_size
    assert logits.isfinite().all() and logits.softmax(-1)[..., -8:].sum() == 0


@pytest.mark.parametrize("kind", ["suffix", "union", "switch", "chain"])
def test_a_trace_shows_no_text_of_another_request(target, kind, monkeypatch):
    """Check rejected drafts: others' answers are drafted, and nobody sees them if they are rejected."""
    suffix = SuffixDrafter(per_match=9.0)
    auto = AutoTree(DynamicTree(make_head("eagle3", target), target, nodes=4, depth=2, min_probability=0), target)
    known = {"suffix": suffix, "union": Union([suffix, NgramDrafter()]), "switch": auto}
    drafter = Chain(suffix) if kind == "chain" else known[kind]
    if kind == "switch":
        auto.add_suffix(suffix)
        monkeypatch.setattr(Costs, "seconds", lambda self, arm, nodes: 1e-9 if arm == "suffix" else 1.0)
    engine, opening = Engine(target, drafter, max_num_seqs=1), prompt(9)
    for seed in (0, 1, 2, 0, 1, 2):  # the same text again is drafted well
        engine.add(Request(opening, SamplingParams(0.7), 30, seed, trace=0))
    drafted = shown = 0
    while engine.has_work:
        for output in engine.step():
            if output.accepted is not None and (kind != "switch" or drafter.by_suffix):
                drafted += output.nodes - 1
                shown += len(output.trace.tokens) - 1
                assert output.trace.path == list(range(len(output.trace.tokens)))
                accepted = output.trace.tokens[1:]  # of which the text's end may cut some off
                assert accepted[: len(output.tokens)] == output.tokens[: len(accepted)]
                assert output.trace.parents == [max(0, node - 1) for node in output.trace.path]
    assert drafted > shown > 0
