"""What a head is in training, in drafting and on disk is one thing; every known way to part them is caught."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from foredraft.heads import Target, eagle, eagle3, hydra, llama_config, load_head, save_head, vocab
from foredraft.heads.attention import step_attention as steps
from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.heads.draft_model import DraftModelHead
from foredraft.train import parity_gate
from tests.support.batches import PROMPT, batch
from tests.support.head_factory import criterion, edit, make_head, same
from tests.support.modes import LiveBytes


def states(head, target: Target, text: PackedBatch) -> list[torch.Tensor]:
    mask = target.masks(text.mask(), target.dtype)
    aux_hidden_states = target.forward(text.tokens, text.positions, mask, None, head.layers, 1).aux_hidden_states
    outs = head(aux_hidden_states, target.embed(text.tokens), text)
    return [head.logits(out, depth) for depth, out in enumerate(outs, start=1)]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "p_eagle"])
def test_a_new_head_is_sure_of_nothing(tiny_path, kind: str):
    """Use a target with large logits: the first loss is the vocabulary's, or the first steps would only make them
    smaller."""
    target = Target.from_pretrained(tiny_path)
    target.model.get_output_embeddings().weight.data *= 50
    head, text = make_head(kind, target), batch(12)
    for logits in states(head, target, text):
        assert logits.float().std(-1).mean() < 6  # 112 without


# -- the alignment rule -----------------------------------------------------------------------------------------------


def test_supervision_follows_the_token_that_a_draft_names():
    """Check that the loss covers tokens 4..7, the answer after a prompt of 4 tokens. The draft at slot p names token p +
    2. Unshifted (loss_mask[p] for slot p) it would lose slots 2 and 3, the first drafts behind the prompt."""
    text = batch(8)
    text = text._replace(loss_mask=text.positions >= 4)
    # Depth 3 at slot 2 started at position 0 and names token 4; at slot 1 it would have started before the text.
    for depth in (1, 3):
        assert draft_loss_mask(text, depth)[0].nonzero()[:, 0].tolist() == [2, 3, 4, 5]


def test_no_draft_crosses_documents_or_learns_from_padding():
    text = batch(5, 4)
    for depth in range(1, 5):
        for slot in draft_loss_mask(text, depth)[0].nonzero()[:, 0].tolist():
            begin = slot + 1 - depth
            assert begin >= 0 and text.documents[0, begin] == text.documents[0, slot + 2]
    assert draft_loss_mask(text, 1)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6]
    padded = text._replace(documents=torch.where(text.documents == 1, -1, text.documents))
    assert not draft_loss_mask(padded, 1)[0, 3:].any()


def test_a_head_says_where_it_is(target):
    assert make_head("medusa", target).device == torch.device("cpu")


def test_drafts_that_start_at_anchors_alone_count():
    text = batch(8)._replace(anchors=torch.tensor([[2, 1, 7, -1]]))
    counted = [draft_loss_mask(text, depth)[0].nonzero()[:, 0].tolist() for depth in (1, 2, 4)]
    assert counted == [[1, 2], [2, 3], [4, 5]]  # after 7 there is nothing to draft


def test_a_token_without_a_row_conditions_as_the_last_one(target):
    head = make_head("dspark", target)
    hidden, last = torch.randn(1, head.depth, head.width), torch.full((1, head.depth), target.vocab_size - 1)
    assert torch.equal(head.condition_on_text(hidden, last + 9), head.condition_on_text(hidden, last))
    assert not torch.equal(head.condition_on_text(hidden, last - 1), head.condition_on_text(hidden, last))


# -- training, drafting and files draft the same ------------------------------------------------------------------------


def test_training_drafting_and_files_are_one_head(target, head, tmp_path):
    save_head(head, tmp_path, target)
    assert parity_gate.check(head, target, PROMPT, saved=tmp_path) < 1e-4
    again = load_head(tmp_path, target)
    assert again.kind == head.kind and same(again, head)
    pointers = [parameter.data_ptr() for parameter in head.parameters()]
    assert len(pointers) == len(set(pointers))  # no layers are tied by accident


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("options", [{"window": 9}, {"rope": YARN}, {"rope": YARN, "window": 9}])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.filterwarnings("error")
def test_a_window_and_another_rope_draft_as_they_train(target, kind: str, options, tmp_path):
    """Use a prompt much longer than the window."""
    head, plain, prompt = make_head(kind, target, **options), make_head(kind, target), PROMPT * 3
    plain.load_state_dict(head.state_dict())
    save_head(head, tmp_path, target)
    assert parity_gate.check(head, target, prompt, saved=tmp_path) < 1e-4
    again = load_head(tmp_path, target, strict=True)
    assert again.window == options.get("window") and again.config.rope_parameters == head.config.rope_parameters
    text = batch(40, 60)
    assert (torch.stack(states(head, target, text)) - torch.stack(states(plain, target, text))).abs().max() > 1e-3


def test_a_window_that_a_head_does_not_have_is_named(target, tmp_path):
    """Use a head whose layer has no window here, with the settings of one that has."""
    save_head(make_head("eagle", target), tmp_path, target)
    for settings in ({"use_sliding_window": True}, eagle3.WINDOWED):
        edit(tmp_path, lambda config, more=settings: config.update(more | {"sliding_window": 16}))
        with pytest.warns(UserWarning, match="sliding_window=16 is not applied, drafts see the whole text"):
            assert load_head(tmp_path, target).window is None


def test_an_impossible_window_or_rope_is_refused(target):
    for options, words in (
        ({"window": 3}, "head.window=3 must be a number of positions above 7"),
        ({"rope": {"factor": 2.0}}, "head.rope.rope_type=None is not one of default, linear, yarn, llama3"),
        ({"rope": YARN | {"base": 1}}, "head.rope.base is not one of "),
        ({"window": 20.0}, "head.window=20.0 must be a number of positions above 7"),
        ({"rope": {"rope_type": "linear", "factor": 0}}, "head.rope.factor=0 must be a number of at least 1"),
        ({"rope": {"rope_type": "linear", "factor": "4"}}, "head.rope.factor='4' must be a number of at least 1"),
        ({"rope": {"rope_type": "yarn"}}, "also needs factor and original_max_position_embeddings"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            eagle3.Eagle3Head.for_target(target, **options)


def test_packed_documents_draft_as_they_do_alone(target, head):
    text = batch(12, 9, 15)
    packed = states(head, target, text)
    for number, (first, last) in enumerate([(0, 12), (12, 21), (21, 36)]):
        alone = PackedBatch(*(tensor[:, first:last] for tensor in text[:4]))
        alone = alone._replace(documents=torch.zeros_like(alone.documents))
        for depth, (whole, single) in enumerate(zip(packed, states(head, target, alone), strict=True), start=1):
            inside = draft_loss_mask(alone, depth)
            assert torch.equal(inside, draft_loss_mask(text, depth)[:, first:last]), number
            torch.testing.assert_close(whole[:, first:last][inside], single[inside], atol=1e-4, rtol=1e-4)


def test_every_parameter_learns(target, head_kind, head):
    text = batch(20, 12)
    criterion(head_kind, head.train(), target)(*text).loss.backward()
    rows = {id(p) for part in head.projections for p in part.parameters() if head.lm_head_is_targets}
    for name, parameter in head.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns != (id(parameter) in rows), name


def test_the_begin_and_the_end_of_training_change_neither_drafts_nor_weights(target, head):
    text = batch(20, 12)
    before, drafts = {name: tensor.clone() for name, tensor in head.state_dict().items()}, states(head, target, text)
    head.on_train_begin(target)
    torch.testing.assert_close(states(head, target, text), drafts)
    head.on_train_end()
    assert head.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "p_eagle"])
def test_an_optimizers_step_counts_alike_for_hidden_states_of_all_sizes(fresh, kind: str):
    for layer in fresh.model.model.layers[2:]:  # their outputs are far larger than those of the first two
        layer.mlp.down_proj.weight.data *= 50
    head = make_head(kind, fresh, target_layer_ids=[1, 4])
    hidden = llama_config.probe(fresh, head.layers)
    small, large = hidden.chunk(2, dim=-1)
    assert large.std() > 30 * small.std()
    head.on_train_begin(fresh)
    before, moved = head.fc(hidden), []
    for columns in head.fc.weight.chunk(2, dim=1):
        step = torch.randn_like(columns)
        with torch.no_grad():
            columns.add_(step)
        moved.append((head.fc(hidden) - before).std().item())
        with torch.no_grad():
            columns.sub_(step)
    assert 0.4 < moved[0] / moved[1] < 2.5


# -- pitfalls: each is broken on purpose and seen -----------------------------------------------------------------------


def ahead(step):
    return lambda self, h, e, positions, m, c: step(self, h, e, positions + 1, m, c)


def rolled(forward):
    return lambda self, *text: [out.roll(1, 1) for out in forward(self, *text)]


def one_more(merge):
    """Move the text that later steps see."""

    def merged(text, log_sums, q, drafted):
        moved = (x.roll(-1, 2) if drafted else x for x in (text, log_sums))
        return merge(*moved, q, drafted)

    return merged


def everything(attend):
    """Attend to the whole sequence, the future included."""
    return lambda q, keys, values, _: (F.scaled_dot_product_attention(q, keys, values), None)


# name -> kind, the depth at which it shows, where the function is that is changed, and how
FAULTS = {
    "positions one off": ("eagle3", 2, eagle3.Eagle3Head, "draft_step", ahead),
    "a draft model one position off": ("draft_model", 1, DraftModelHead, "forward", rolled),
    "training steps that look at text they have not got": ("eagle3", 2, steps, "merge_attention", one_more),
    "a prefix layer that reads other text": ("hydra_pp", 1, steps.TextAttention, "apply", everything),
}
MOVES = {"eagle3": eagle3, "hass": eagle, "hydra": hydra, "hydra_pp": hydra}
for moved, module in MOVES.items():
    FAULTS[f"hidden states that are not moved, {moved}"] = moved, 2, module, "shift_right", lambda _: lambda x, steps: x


@pytest.mark.parametrize("name", FAULTS)
def test_gate_sees(target, name, monkeypatch):
    kind, depth, place, function, change = FAULTS[name]
    head = make_head(kind, target)
    monkeypatch.setattr(place, function, change(getattr(place, function)))
    with pytest.raises(ValueError, match=f"parity gate: at depth {depth}"):
        parity_gate.check(head, target, PROMPT)


def test_gate_sees_missing_depths_and_logits_that_are_no_numbers(target, monkeypatch):
    head = make_head("medusa", target)
    with monkeypatch.context() as patched:
        patched.setattr(head, "forward", lambda *args: type(head).forward(head, *args)[:2])
        with pytest.raises(ValueError, match=r"MedusaHead\.forward returns drafts of 2 depths, and its depth is 3"):
            parity_gate.check(head, target, PROMPT)
    with torch.no_grad():
        next(head.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="parity gate: at depth 1 the draft's logits are not finite"):
        parity_gate.check(head, target, PROMPT)


@pytest.mark.parametrize(("kind", "wrong"), [("eagle3", "layers one lower"), ("medusa", "after another norm")])
def test_gate_sees_other_hidden_states_in_training(target, kind, wrong, monkeypatch):
    """Return those of other layers, or of before the final norm, in every other forward, as one engine did."""
    head, forward, calls = make_head(kind, target), Target.forward, itertools.count()

    def other(self, *args, **kwargs):
        if next(calls) % 2:
            return forward(self, *args, **kwargs)
        if wrong == "layers one lower":
            return forward(self, *args, **kwargs | {"layers": [layer - 1 for layer in kwargs["layers"]]})
        output = forward(self, *args, **kwargs)
        return output._replace(aux_hidden_states=self.model.model.norm(output.aux_hidden_states))

    monkeypatch.setattr(Target, "forward", other)
    with pytest.raises(ValueError, match="parity gate: at depth 1"):
        parity_gate.check(head, target, PROMPT)


def test_a_draft_model_does_not_begin_with_packed_layers(fresh):
    layer = fresh.model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.down_proj\.weight is packed: load the target unquantized, or set head.path"
    ):
        DraftModelHead.for_target(fresh, num_hidden_layers=1)


@torch.no_grad()
def test_rejected_drafts_do_not_stay_in_the_heads_cache(target, monkeypatch):
    """Check that a second proposal equals that of a drafter that never saw the rejected branch."""
    from foredraft.inference.drafters import DynamicTree
    from foredraft.inference.drafters.base import Accepted
    from foredraft.inference.sampling import Sampling, SamplingParams

    head = make_head("eagle3", target)
    text = torch.tensor([PROMPT])
    aux_hidden_states = target.forward(text, layers=head.layers).aux_hidden_states

    seen: list[torch.Tensor] = []

    def record(hidden: torch.Tensor, depth: int) -> torch.Tensor:
        seen.append(type(head).logits(head, hidden, depth))
        return seen[-1]

    def drafts(pieces: list[tuple[int, int]]) -> list[torch.Tensor]:
        drafter = DynamicTree(head, target, nodes=12, depth=4, width=3, min_probability=0)
        drafter.begin(1, 100, Sampling.of([SamplingParams()] * 1, 1024))
        for first, last in pieces:
            seen.clear()
            new = text[:, first + 1 : last + 1]
            drafter.propose(Accepted(new, aux_hidden_states[:, first:last], [last - first], [PROMPT[: last + 1]]), None)
        return list(seen)

    monkeypatch.setattr(head, "logits", record)
    for once, again in zip(drafts([(0, 20)]), drafts([(0, 12), (12, 17), (17, 20)]), strict=True):
        torch.testing.assert_close(once, again, atol=1e-4, rtol=1e-4)


def plainly(q, parts, mask):
    """Compute `attend_steps` with all scores at once, for autograd to differentiate."""
    later_steps, length = len(parts) - 1, q.shape[2]
    groups = q.shape[1] // parts[0][0].shape[1]
    (k0, v0), *own = [[x.repeat_interleave(groups, 1) for x in pair] for pair in parts]
    text = (q @ k0.mT).masked_fill(~mask.roll(later_steps, 1)[:, None], -torch.inf)
    rolled = [[x.roll(later_steps - 1 - i, 2) for x in pair] for i, pair in enumerate(own)]
    beside = [(q * k).sum(-1, keepdim=True) for k, _ in rolled]
    weights = (torch.cat([text, *beside], -1) * q.shape[-1] ** -0.5).softmax(-1)
    out = weights[..., :length] @ v0
    return out + sum(weights[..., length + i, None] * v for i, (_, v) in enumerate(rolled))


@pytest.mark.parametrize("by_document", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_step_attention_and_its_gradients(count, by_document, monkeypatch):
    monkeypatch.setattr("foredraft.heads.attention.block_attention.QUERIES", 7)
    monkeypatch.setattr("foredraft.heads.attention.step_attention.by_document", lambda q: by_document)
    torch.manual_seed(0)
    length, rows = 25, (batch(15, 10), batch(4, 1, 20))
    q = torch.randn(2, 6, length, 4, dtype=torch.float64)
    parts = [[torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(2)] for _ in range(count)]
    starts, mask = torch.cat([row.document_starts() for row in rows]), torch.cat([row.mask() for row in rows])
    found = []
    for ours in (True, False):
        leaves = [q.clone().requires_grad_(), *(x.clone().requires_grad_() for pair in parts for x in pair)]
        pairs = list(zip(leaves[1::2], leaves[2::2], strict=True))
        if ours:
            moved = [steps.at_start(*pair, step, rows[0]) for step, pair in enumerate(pairs)]
            out = steps.attend_steps(leaves[0], moved, starts)[:, :, count - 1 :]
        else:
            out = plainly(leaves[0], pairs, mask)[:, :, count - 1 :]
        (out * torch.linspace(-1, 1, 4)).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("by_document", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_step_attention_keeps_neither_scores_nor_masks(count, by_document, monkeypatch):
    monkeypatch.setattr("foredraft.heads.attention.block_attention.QUERIES", 25)
    monkeypatch.setattr("foredraft.heads.attention.step_attention.by_document", lambda q: by_document)
    length = 300
    x = torch.randn(1, 1, length, 8, requires_grad=True)
    with LiveBytes([x]) as live:
        out = steps.attend_steps(x, [(x, x)] * count, batch(length).document_starts())
    assert out.requires_grad and live.peak < 4 * length * length


# -- files: strict ----------------------------------------------------------------------------------------------------


def test_a_head_that_is_saved_again_is_whole_whenever_that_is_interrupted(target, tmp_path, monkeypatch):
    old, new = make_head("eagle3", target), make_head("eagle3", target)
    save_head(old, tmp_path / "head", target, note="ours")
    (tmp_path / "head" / "metrics.json").write_text("{}")

    def fail(self, *args: object, **kwargs: object) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="no space"):
        broken.setattr("pathlib.Path.write_text", fail)
        save_head(new, tmp_path / "head", target)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    for head in (old, new):
        assert same(load_head(tmp_path / "head", target, torch.float32), head)
        save_head(new, tmp_path / "head", target)
    assert (tmp_path / "head" / "metrics.json").exists()
    assert len({path.stat().st_mode for path in (tmp_path / "head").iterdir()}) == 1  # others may read all or nothing


def test_settings_of_ours_may_be_null_and_are_settings_else(target, tmp_path):
    save_head(make_head("eagle3", target), tmp_path, target)
    edit(tmp_path, lambda config: config.update(foredraft=None))
    load_head(tmp_path, target)
    edit(tmp_path, lambda config: config.update(foredraft=[1]))
    with pytest.raises(ValueError, match=r"foredraft=\[1\], which contains no settings"):
        load_head(tmp_path, target)


def test_missing_files_are_named(target, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_head(tmp_path, target)
    with pytest.raises(ValueError, match="neither a directory nor a Hub id"):
        load_head(tmp_path / "nothing" / "here", target)
    save_head(make_head("medusa", target), tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        load_head(tmp_path, target)


# -- the draft vocabulary -------------------------------------------------------------------------------------------------


def test_offsets_and_ids_are_inverse():
    counts = torch.tensor([5, 0, 9, 9, 1, 0, 7])
    ids = vocab.most_frequent(counts, 4)
    assert ids.tolist() == [0, 2, 3, 6]
    d2t, t2d = vocab.to_offsets(ids, 7)
    assert d2t.tolist() == [0, 1, 1, 3] and t2d.tolist() == [True, False, True, True, False, False, True]
    assert torch.equal(vocab.from_offsets(d2t), ids)
    assert vocab.coverage(counts, ids) == pytest.approx(30 / 31)
    with pytest.raises(ValueError, match="draft_vocab_size=8"):
        vocab.most_frequent(counts, 8)


def test_layers_of_the_paper():
    assert eagle3.default_aux_layer_ids(32) == [2, 16, 29] and eagle3.default_aux_layer_ids(80) == [2, 40, 77]
    assert eagle3.default_aux_layer_ids(6) == [1, 3, 4] and eagle3.default_aux_layer_ids(2) == [1]
