"""On a CPU: after drafted chains and trees the target's logits equal the baseline's in every bit."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import transformers as hf
from torch import nn

from foredraft import Request, SamplingParams, Target
from foredraft.heads.attention import masked, masks, paths
from foredraft.heads.caches.device import FEWEST_ROWS
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.heads.target_model import capabilities, packing
from foredraft.heads.target_model.key_widths import CANDIDATES, measured_widths, short_widths
from foredraft.heads.target_model.packing import fewest_rows, is_faster, pack
from foredraft.inference.drafters import Drafter, DraftModel, NgramDrafter, SuffixDrafter, drafter_for, load_drafter
from foredraft.inference.evaluation.lossless import BitComparison, BitRecorder, compare_bits
from tests.support import ROOT, nightly_but
from tests.support.architectures import configs
from tests.support.decoding import prompt
from tests.support.head_factory import make_head

DTYPES = torch.bfloat16, torch.float32
LENGTHS = (9, KEY_BLOCK - 7, 30, 250)  # of prompts; the text of the second one crosses a block of keys
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "n-gram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(width=1),
    "lookahead": lambda target: load_drafter("lookahead", target),
    "eagle3": lambda target: drafter_for(make_head("eagle3", target), target, depth=3),
    "eagle3 tree": lambda target: drafter_for(make_head("eagle3", target), target, depth=3, width=3),
    "suffix tree": lambda target: SuffixDrafter(width=4),
    "itself": lambda target: DraftModel(target, target, nodes=9, depth=4, width=3, min_probability=0),
    "medusa": lambda target: drafter_for(make_head("medusa", target), target),
    "dflash": lambda target: drafter_for(make_head("dflash", target), target),
}


def check(target: Target) -> Target:
    if not target.capabilities.keeps_bits:
        assert not is_faster(target.dtype), "packed products have the same bits for any number of rows"
        pytest.skip("the products of this processor depend on how many rows are computed together")
    return target


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def trained(request) -> Target:
    return check(Target.from_pretrained(ROOT / "scripts" / "test_model", dtype=request.param, device="cpu"))


@pytest.fixture(scope="module")
def half() -> Target:
    return check(Target.from_pretrained(ROOT / "scripts" / "test_model", dtype="bfloat16", device="cpu"))


def small(family: str, dtype: torch.dtype = torch.bfloat16, **changes: int) -> Target:
    """Make a random model, packed as a loaded one in float32, where unpacked products round by the number of rows."""
    config = configs()[family]
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if dtype == torch.float32:
        pack(model.requires_grad_(False))
    return check(Target(model))


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def llama(request) -> Target:
    """Make a model whose products have sizes of real ones: with 32 inputs and 48 outputs, a Zen 4 sums one and two rows in
    another order than three and more."""
    return small("llama", request.param, hidden_size=64, intermediate_size=128)


def decode(
    target: Target,
    drafter: Drafter | None,
    temperature: float,
    batch: int,
    lengths: Sequence[int] = LENGTHS,
    preempt_every: int | None = None,
    **settings,
) -> BitRecorder:
    """Decode prompts of these lengths. settings: of the engine."""
    requests = []
    for seed, length in enumerate(lengths):
        # They repeat themselves, so that drafts are accepted.
        text = [token % target.vocab_size for token in (prompt(11, seed) * length)[:length]]
        requests.append(Request(text, SamplingParams(temperature), 24, seed))
    return BitRecorder(target, drafter, max_num_seqs=batch, **settings).decode(requests, preempt_every)


@pytest.fixture(scope="module")
def baselines(llama) -> dict[float, BitRecorder]:
    return {temperature: decode(llama, None, temperature, 1) for temperature in (0.0, 1.0)}


CASES = [(name, *case) for name in DRAFTERS for case in ((0.0, 1), (1.0, 3))]
BY_DAY = [case for case in CASES if case[1] or case[0] in ("ngram", "suffix")]


@pytest.mark.parametrize(("name", "temperature", "batch"), nightly_but(CASES, *BY_DAY))
def test_drafts_change_no_bit(llama, baselines, name, temperature, batch):
    """Check it for a single sequence, and in a batch that others join and leave."""
    drafted = decode(llama, DRAFTERS[name](llama), temperature, batch)
    found = BitComparison.of(baselines[temperature], drafted)
    assert found.is_equal and found.rows > 60
    least = {
        "n-gram": 0,
        "suffix": 0,
        "suffix tree": 0,
        "itself": 50,
    }  # at temperature 1 the text does not repeat itself
    assert drafted.accepted > (least.get(name, -1) if temperature == 0 or name == "itself" else -1)


@pytest.mark.parametrize("chunk", [pytest.param(7, marks=pytest.mark.nightly), 64])
def test_prefill_changes_no_bit(llama, baselines, chunk):
    """Check it for prompts that are prefilled in parts, continue the entries of others, and are prefilled again with what
    was written."""
    how = {"preempt_every": 9, "prefill_chunk": chunk, "reuse_prefixes": True}
    found = BitComparison.of(baselines[1.0], decode(llama, NgramDrafter(), 1.0, 3, **how))
    assert found.is_equal and found.rows > 40


@pytest.mark.parametrize(("width", "threads"), nightly_but([(688, 1), (4864, 3)], (4864, 3)))
def test_no_thread_and_no_width_changes_a_bit(width, threads):
    """Check widths of which threads compute a rest: torch's activations round it differently."""
    target, before = small("llama", torch.float32, hidden_size=64, intermediate_size=width), torch.get_num_threads()
    itself = DraftModel(target, target, nodes=16, depth=4, width=4, min_probability=0)
    torch.set_num_threads(threads)
    try:
        found = BitComparison.of(decode(target, None, 1.0, 1), decode(target, itself, 1.0, 4))
    finally:
        torch.set_num_threads(before)
    assert found.is_equal and found.rows > 60


@pytest.mark.parametrize(("chunk", "width"), nightly_but([(1, 32), (2, 48)], (1, 32)))
def test_a_chunk_of_few_tokens_changes_no_bit(chunk, width):
    """Check models of small layers. torch sums few rows in another way than many: up to four in those of 1,024 numbers, and
    up to two in those of 32 inputs and 48 outputs."""
    target = small("llama", hidden_size=32, intermediate_size=width, num_hidden_layers=8)
    pack(target.model)
    lengths = (20, 133, 40)
    baseline = decode(target, None, 1.0, 1, lengths)
    itself = DraftModel(target, target, nodes=9, depth=4, width=3, min_probability=0)
    for drafter, batch, settings in ((None, 1, {"prefill_chunk": chunk}), (itself, 3, {})):
        found = BitComparison.of(baseline, decode(target, drafter, 1.0, batch, lengths, **settings))
        assert found.is_equal and found.rows > 60


def test_the_logits_after_a_prompt_have_the_bits_of_decoding():
    """Check many prompts of a wide model: an lm_head of one row sums more than 1,024 inputs in another order."""
    target = small("llama", hidden_size=1536, num_hidden_layers=1, vocab_size=1000, head_dim=32)
    text = torch.randint(1000, (1, 140), generator=torch.Generator().manual_seed(0))
    nodes = torch.arange(4)[None]
    with torch.inference_mode():
        for length in range(96, 130):
            cache = target.new_cache(1, 512)
            prefilled = target.prefill(text[:, :length], [length], cache).logits[0, 0]
            cache.set_lengths([length - 1])
            drafts, mask = text[:, length - 1 : length + 3], cache.mask(nodes[..., None] >= nodes[:, None])
            assert torch.equal(target.forward_tree(drafts, cache.seq_lens + nodes, mask, cache).logits[0, 0], prefilled)


FAMILIES = [(family, torch.bfloat16) for family in ("gemma3_text", "gemma2", "gpt_oss", "mixtral", "deepseek_v3")]
# Not experts, whose products are not packed.
FAMILIES += [(family, torch.float32) for family in ("gemma3_text", "gemma2")]


@pytest.mark.parametrize(("family", "dtype"), nightly_but(FAMILIES, ("gemma3_text", torch.bfloat16)), ids=str)
def test_other_kinds_of_attention_keep_every_bit(family, dtype):
    """Check rings, soft caps, sinks, experts and latent attention: trees whose drafts are mostly accepted, and chains after
    interrupted prefills, in texts that leave a ring of 1,024 entries."""
    sizes = {"max_position_embeddings": 2048, "hidden_size": 64, "intermediate_size": 128}
    target, lengths = small(family, dtype, **sizes), (9, KEY_BLOCK - 7, 600, 1100)
    itself = DraftModel(target, target, nodes=9, depth=4, width=3, min_probability=0)
    how = {"preempt_every": 9, "prefill_chunk": 200, "reuse_prefixes": True}
    baseline = decode(target, None, 1.0, 1, lengths)
    for drafter, settings in ((itself, {}), (NgramDrafter(), how)):
        drafted = decode(target, drafter, 1.0, 3, lengths, **settings)
        found = BitComparison.of(baseline, drafted)
        assert found.is_equal and found.rows > 60 and (drafted.accepted > 50 or drafter is not itself)


def test_a_trained_model_keeps_every_bit(trained):
    for how, found in compare_bits(trained, SuffixDrafter(width=4), [prompt(11, 0) * 4, prompt(11, 1) * 9], 24, 1.0, 2):
        assert found.is_equal and found.rows > 40, how


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_keeps_the_bits_of_a_row_for_any_number_of_rows(threads, dtype, monkeypatch):
    """Check sizes around the kernel's blocks: for fewer than four rows at the end of a block it rounds differently."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 520, 64, generator=generator, dtype=dtype) for heads in (9, 3, 3))
    seen = torch.arange(KEY_BLOCK) < torch.arange(300, 820)[:, None]
    mask = masks.additive_mask(seen, dtype)[None, None]

    def first(rows: int) -> torch.Tensor:
        shared = query[:, :, :rows], key[:, :, :KEY_BLOCK], value[:, :, :KEY_BLOCK]
        return masked.attend(*shared, mask[:, :, :rows])[:, :, 0]

    assert all(torch.equal(first(rows), first(1)) for rows in (2, 3, 11, 22, 33, 43, 65, 86, 150, 300, 511))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_node_of_a_tree_gets_the_bits_of_its_path(seed, dtype):
    """Check a tree whose branches stand among each other, in a text that may end in a second block of keys."""
    chance, nodes, width = random.Random(seed), 24, 2 * KEY_BLOCK
    first = (20, 250, 500)[seed % 3]
    parents = [0] + [chance.randrange(max(0, node - 4), node) for node in range(1, nodes)]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 9, nodes, 64), (1, 3, width, 64), (1, 3, width, 64))
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    seen = torch.zeros(1, nodes, width, dtype=torch.bool)
    seen[:, :, :first], seen[0, :, first : first + nodes] = True, ancestors
    mask = masks.additive_mask(seen[:, None], dtype)
    paths.note_paths(mask, seen, [first], torch.ones(1, nodes, dtype=torch.bool))
    before = key.clone(), value.clone()
    out = masked.attend(query, key, value, mask)
    found = paths.attend_paths(out, query, key, value, vars(mask)["paths"], masked.attend)
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])
    for node in range(nodes):
        line = ancestors[node].nonzero()[:, 0]
        moved = [states.clone() for states in before]
        for states, new in zip(moved, before, strict=True):
            states[:, :, first : first + len(line)] = new[:, :, first + line]
        own = masks.additive_mask((torch.arange(width) < first + len(line)).expand(1, 1, 1, -1), dtype)
        assert torch.equal(found[:, :, node], masked.attend(query[:, :, node : node + 1], *moved, own)[:, :, 0])


def test_forwards_keep_to_shapes_that_keep_bits(half, monkeypatch):
    """Check that fewer rows of queries, single rows and other widths, which give other bits on some processors, do not
    occur."""
    attention, products = set(), set()
    attend, forward = torch.nn.functional.scaled_dot_product_attention, half.forward

    def noted(query, key, *args, **kwargs):
        if kwargs.get("attn_mask") is not None:
            attention.add((query.shape[2], key.shape[2]))
        return attend(query, key, *args, **kwargs)

    def counted(tokens, *args, **kwargs):
        products.add(tokens.numel())
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", noted)
    monkeypatch.setattr(half, "forward", counted)
    decode(half, None, 0.0, 3)
    short = half.capabilities.short_widths
    assert attention and all(rows % 4 == 0 and (width % 512 == 0 or width % 512 in short) for rows, width in attention)
    assert min(products) == half.capabilities.fastest_rows >= fewest_rows(half.model)


def test_steps_of_fewer_rows_keep_every_bit(monkeypatch):
    """Check it in float32, for the numbers of rows among which this processor's speed decides."""
    config = configs()["llama"]
    config.hidden_size = config.intermediate_size = config.vocab_size = 256  # each product is large enough to be packed
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = 64
    torch.manual_seed(0)
    target = Target(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    pack(target.model)
    if fewest_rows(target.model) == FEWEST_ROWS:
        pytest.skip("the products of this processor have the same number of rows anyway")
    texts = []
    for rows in range(fewest_rows(target.model), FEWEST_ROWS + 1):
        monkeypatch.setitem(vars(target.capabilities), "fastest_rows", rows)
        texts.append(decode(target, None, 0.0, 1, lengths=(9, 30)))
    for text in texts[:-1]:
        found = BitComparison.of(text, texts[-1])
        assert found.is_equal and found.rows > 40


@pytest.mark.parametrize(
    ("instructions", "single", "half"),
    [(["avx2"], 1, 4), (["avx2", "avx512"], 2, 2), (["avx2", "avx512", "amx_tile"], 2, 4), ([], 4, 4)],
)
def test_fewer_rows_are_computed_where_they_have_the_bits_of_many(monkeypatch, instructions, single, half):
    for each in ("avx2", "avx512", "amx_tile"):
        monkeypatch.setattr(f"torch.cpu._is_{each}_supported", lambda each=each: each in instructions)
    embedding = nn.Embedding(8, 8)
    packed = nn.Sequential(embedding, nn.LayerNorm(8))
    assert fewest_rows(packed) == single
    tied = nn.Linear(8, 8, bias=False)
    tied.weight = embedding.weight
    others = nn.Module()
    others.register_buffer("weight", torch.zeros(8, 8, dtype=torch.uint8))
    for more in (nn.Linear(8, 8), tied, others):
        assert fewest_rows(nn.Sequential(*packed, more)) == FEWEST_ROWS
    assert fewest_rows(packed.bfloat16()) == half


@pytest.mark.parametrize(
    ("milliseconds", "fastest"),
    [({2: 50, 3: 38, 4: 36}, 4), ({2: 27, 3: 27, 4: 30}, 2), ({2: 37, 3: 36, 4: 36}, 2), ({2: 44, 3: 36, 4: 36}, 3)],
)
def test_a_step_has_the_rows_that_are_fastest(monkeypatch, milliseconds, fastest):
    now, model = 0.0, nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    pack(model.requires_grad_(False))
    if not any(isinstance(layer, packing.PackedLinear) for layer in model):
        pytest.skip("the products of this processor have the same number of rows anyway")

    def product(layer, x):
        nonlocal now
        now += milliseconds[len(x)] / 3

    monkeypatch.setattr(packing.PackedLinear, "product", product)
    monkeypatch.setattr(packing, "fewest_rows", lambda model: 2)
    monkeypatch.setattr(packing.time, "perf_counter", lambda: now)
    assert packing.fastest_rows(model) == fastest


def test_fewer_columns_than_a_block_are_measured(half, monkeypatch, tmp_path):
    """Check that a kernel which sums 128 keys in another order is noticed, and that the result is kept."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("FOREDRAFT_REMEMBER", raising=False)
    attend, calls = masked.attend, []

    def reordered(query, key, value, mask, **kwargs):
        calls.append(key.shape[2])
        if key.shape[2] == 128:  # from the last key to the first
            key, value, mask = (x.flip(axis) for x, axis in ((key, 2), (value, 2), (mask, 3)))
        return attend(query, key, value, mask, **kwargs)

    monkeypatch.setattr(masked, "attend", reordered)
    measured_widths.cache_clear()
    try:
        found = short_widths(half.model)
        assert calls and 128 not in found and 0 < len(found) < len(CANDIDATES)
        calls.clear()
        measured_widths.cache_clear()
        assert short_widths(half.model) == found and not calls
    finally:
        measured_widths.cache_clear()


@pytest.mark.nightly
def test_the_audit_compares_bits_and_sees_a_single_rounding(half, monkeypatch):
    prompts = [(prompt(11, seed) * 3)[:30] for seed in range(2)]
    alone, together = (found for _, found in compare_bits(half, NgramDrafter(), prompts, 24, 0.0, batch=2))
    assert alone.is_equal and together.is_equal and min(alone.rows, together.rows) > 40
    forward = half.forward_tree

    def rounded(tokens, *args, **kwargs):
        output = forward(tokens, *args, **kwargs)
        if tokens.shape[1] > 2:  # a drafted chain
            output.logits.view(torch.int16)[0, 0, 5] ^= 1  # the last bit of one number
        return output

    monkeypatch.setattr(half, "forward_tree", rounded)
    assert next(compare_bits(half, NgramDrafter(), prompts, 24, 0.0, batch=2))[1].unequal > 0


def test_what_a_machine_does_to_bits_is_measured_once(half, monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("FOREDRAFT_REMEMBER", "1")
    found = iter([False])
    monkeypatch.setattr(capabilities, "is_batch_invariant", lambda target: next(found))
    assert [capabilities.Capabilities(half).prefers_chains for _ in range(2)] == [False, False]
    with monkeypatch.context() as patch, pytest.raises(StopIteration):  # steps of other sizes are measured anew
        patch.setattr(capabilities, "fewest_rows", lambda model: 3)
        _ = capabilities.Capabilities(half).prefers_chains
    (file,) = (tmp_path / "bits").iterdir()
    file.write_text("{")  # so is a damaged file
    with pytest.raises(StopIteration):
        _ = capabilities.Capabilities(half).prefers_chains


def test_drafts_are_chains_where_they_keep_bits_unless_branches_are_asked_for(trained):
    head = make_head("eagle3", trained)
    assert not drafter_for(head, trained, tree="auto").branches and not load_drafter("suffix", trained).branches
    assert drafter_for(head, trained, tree="auto", width=3).branches and drafter_for(head, trained).branches
    assert load_drafter("suffix", trained, tree="fixed").branches
    assert (
        not load_drafter("suffix+ngram", trained).branches
        and load_drafter("suffix+ngram", trained, tree="fixed").branches
    )
