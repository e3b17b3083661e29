"""Texts that follow a grammar: the same with drafts and without, and what the mask of every prefix allows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.heads import Target
from foredraft.inference import Engine, Grammars, Request, SamplingParams, generate
from foredraft.inference import grammar as compiler
from foredraft.inference.drafters import DraftModel, DynamicTree, NgramDrafter
from tests.support.batches import prompt
from tests.support.decoding import alone, run
from tests.support.head_factory import make_head

PAIR = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "alphabet", "beta"]}, "many": {"type": "array", "maxItems": 3}},
    "required": ["kind", "many"],
    "additionalProperties": False,
}
PAIR["properties"]["many"]["items"] = {"type": "integer", "minimum": -20, "maximum": 400}


@pytest.fixture(scope="module")
def grammars(target: Target) -> Grammars:
    return Grammars(target)


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Any]:
    """Return one drafter that drafts the target's own tokens before the grammar forbids them, and two that are hardly ever
    right."""
    return {
        "the target itself": DraftModel(target, target, depth=4),
        "a random head": DynamicTree(make_head("eagle3", target), target, depth=3, nodes=12),
        "repetitions": NgramDrafter(),
    }


def written(target: Target, drafter: Any, grammar: Any, seed: int, tokens: int = 24, **settings: Any) -> Any:
    facts = {"grammar": grammar, "seed": seed, "max_new_tokens": tokens, **settings}
    return generate(target, drafter, prompt(9, seed), **facts)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 9, "frequency_penalty": 0.4}])
@pytest.mark.parametrize("name", ["the target itself", "a random head", "repetitions"])
def test_text_is_the_same_with_drafts(target, grammars, drafters, name, settings):
    # A random target's own words are not JSON, but often without vowels: there its drafts are accepted.
    strict, loose, accepted = grammars.json_schema(PAIR), grammars.lark("start: /[^aeiou]*/"), 0
    for seed, grammar in enumerate((strict, loose)):
        plain = written(target, None, grammar, seed, **settings)
        drafted = written(target, drafters[name], grammar, seed, **settings)
        assert drafted.new_tokens == plain.new_tokens
        accepted += sum(sum(step.accepted) for step in drafted.steps)
    assert accepted or name != "the target itself"


def test_greedy_text_is_the_likeliest_that_every_prefix_allows(target, grammars):
    """Compare with a loop without trees, caches and states."""
    grammar = grammars.json_schema(PAIR)
    found = written(target, DraftModel(target, target, depth=4), grammar, 1, 25).new_tokens[0]
    text, new = prompt(9, 1)[0].tolist(), list[int]()
    for _ in found:
        matcher = grammar.matcher.deep_copy()
        assert matcher.consume_tokens(new)
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(target.vocab_size) if mask[token // 8] >> (token % 8) & 1]
        logits = target.forward(torch.tensor([text + new])).logits[0, -1]
        new.append(allowed[int(logits[allowed].argmax())])
    assert found == new


def test_rows_of_a_batch_have_grammars_of_their_own(target, grammars):
    pair, thing, plain = grammars.json_schema(PAIR), grammars.json_schema({"type": "object"}), None
    params = [SamplingParams(temperature=1.0, grammar=grammar) for grammar in (pair, plain, thing, plain, pair)]

    def requests() -> list[Request]:
        ends = frozenset(target.eos_token_ids)
        return [Request(prompt(4 + i, i)[0].tolist(), one, 24, i, ends) for i, one in enumerate(params)]

    drafter = DraftModel(target, target, depth=3)
    engine = Engine(target, drafter, max_num_seqs=3)

    def between(step: int) -> None:
        if step and len(engine.slots.sequences) == 3 and engine.waiting:
            engine.preempt()  # what was written is read anew

    assert run(engine, requests(), between)[0] == alone(target, requests())


def test_after_the_end_only_ends_come(target, grammars):
    """Decode after it, with drafts and without."""
    one = grammars.json_schema({"enum": ["a"]})
    texts = [
        written(target, drafter, one, 0, 12, eos_token_id=-1).new_tokens[0]
        for drafter in (None, DraftModel(target, target, depth=3), NgramDrafter())
    ]
    assert texts[0] == texts[1] == texts[2] and texts[0][-4:] == [*target.eos_token_ids] * 4


def test_a_text_that_its_grammar_completes_ends_before_its_minimum(fresh):
    """The end token is not 0, which a maximum over nothing but banned tokens chooses."""
    end, texts = 7, []
    fresh.model.generation_config.eos_token_id = end
    fresh.tokenizer.eos_token = fresh.tokenizer.convert_ids_to_tokens(end)
    one = SamplingParams(grammar=Grammars(fresh).json_schema({"enum": ["a"]}))
    for drafter in (None, DraftModel(fresh, fresh, depth=3)):
        asked = Request(prompt(5, 1)[0].tolist(), one, 12, eos_token_ids=frozenset([end]), min_new_tokens=9)
        (text,), reasons = run(Engine(fresh, drafter), [asked])
        texts.append(text)
        assert reasons == ["stop"] and text[-1] == end and fresh.tokenizer.decode(text[:-1]) == '"a"'
    assert texts[0] == texts[1]


def test_settings_that_leave_no_token_end_their_text_alone(target, grammars):
    """Let the user ban all that is allowed; a step that costs more than llguidance allows ends in the same way."""
    bans = tuple((token, float("-inf")) for token in range(target.vocab_size))
    params = SamplingParams(grammar=grammars.json_schema(PAIR), logit_bias=bans)
    engine = Engine(target, DraftModel(target, target, depth=3))
    every = params, SamplingParams(), replace(params, grammar=None)
    asked = [Request(prompt(5, 1)[0].tolist(), one, 12) for one in every]
    texts, reasons = run(engine, asked)
    assert reasons == ["error", "length", "error"] and "ban every token" in asked[2].failure
    assert texts[1] == generate(target, None, prompt(5, 1), max_new_tokens=12).new_tokens[0]


def deep(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema, reason",
    [
        ([1], "not an object"),
        (True, "not an object"),
        ({"type": "nothing"}, "nothing"),
        ({"type": {1}}, "not JSON"),
        ({"enum": [float("nan")]}, "not JSON"),
        ({"enum": ["a" * 70_000]}, "at most 65536"),
        (deep(100), "recursion limit"),
        (deep(5000), "nested too deeply"),
        ({"$ref": "#"}, "no text matches it"),
        ({"$ref": "https://example.com/schema.json"}, "compiled"),
        ({"$ref": "file:///etc/passwd"}, "compiled"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "compiled"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "not supported. Use anyOf.$"),
        pytest.param(
            {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]},
            "more than 5 seconds",
            marks=pytest.mark.nightly,
        ),
        ({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(5)]} for i in range(12)]}, "too large"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_a_sentence(grammars, schema, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        grammars.json_schema(schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and "root:" not in str(caught.value)


TAGGED = {
    kind: {
        "type": "object",
        "properties": {"kind": {"const": kind, "default": kind}, "parts": {"$ref": "#/$defs/parts"}},
    }
    for kind in ("a", "b")
}
TAGGED["parts"] = {"type": "array", "items": {"discriminator": {"propertyName": "kind"}}}
TAGGED["parts"]["items"]["oneOf"] = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]


ZOD = {  # patterns that zod 4 writes next to these formats
    "email": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    "duration": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    "time": r"^([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?$",
}
PAIR = {"type": "array", "items": [{"type": "null"}], "additionalItems": False}  # as drafts before 2020-12 have it


@pytest.mark.parametrize(
    "schema, fits, differs",
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, '{"a": null}', '{"a": 1}'),
        ({"type": "array", "uniqueItems": False, "unevaluatedProperties": True}, "[1, 1]", "1"),
        *(
            ({"$schema": draft, "properties": {"$schema": {"type": "string"}}}, '{"$schema": "a"}', '{"$schema": 1}')
            for draft in ("https://json-schema.org/draft-07/schema#", "http://json-schema.org/schema#", "draft-07")
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "#a", "type": "null"}, "null", "1"),
        ({"$schema": "https://json-schema.org/draft-07/schema#", **PAIR}, "[null]", "[null, 1]"),
        *(
            ({"$ref": f"#/definitions/{name}", "definitions": {name: {"type": "null"}}}, "null", "1")
            for name in ("List<string>", "R[int]", "Größe", "a b")
        ),
        ({"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "null"}}}, "null", "1"),
        *(
            ({"type": kind, "minimum": -most, "maximum": most}, "-5", "9" * 20)
            for kind, most in (("integer", 2**63), ("integer", 1.7e308), ("number", 3.4e38))
        ),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "1", "0"),
        ({"$ref": "#/$defs/parts", "$defs": TAGGED}, '[{"kind": "a", "parts": [{"kind": "b"}]}]', "[{}]"),
        *(
            ({"type": "string", "format": name, "pattern": ZOD[name]}, f'"{fits}"', f'"{differs}"')
            for name, fits, differs in (
                ("email", "a.b'c@x.org", "a..b@x.org"),
                ("email", "a@b-c.x.de", ".a@x.org"),
                ("email", "a@x.org", "a!b@x.org"),
                ("duration", "P1DT2H", "PT"),
                ("duration", "P3W", "P3W1D"),
                ("duration", "PT5M", "P"),
                ("time", "23:59:00.5", "24:00:00"),
            )
        ),
    ],
)
def test_a_schema_means_what_zod_pydantic_and_openapi_mean(target, grammars, schema, fits, differs):
    grammar = grammars.json_schema(schema)
    for text, is_right in ((fits, True), (differs, False)):
        matcher, ids = grammar.matcher.deep_copy(), target.text_tokenizer(text).input_ids
        assert is_right == (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"},
        {"type": "string", "pattern": ".*a.{30}b.{30}.*"},
        {"type": "array", "minItems": 10**6},
        {"type": "string", "maxLength": 10**9},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
        {"x-guidance": {"whitespace_pattern": "(a|b)*"}, "type": "object"},
    ],
)
def test_a_costly_schema_costs_no_more_than_others_can_bear(target, grammars, schema):
    """Expect an error for schemas that can take minutes: the limit is the test's own."""
    try:
        (text,) = written(target, None, grammars.json_schema(schema), 0, 20, temperature=1.0).new_tokens
        assert 0 < len(text) <= 20
    except ValueError as error:
        assert "compiled" in str(error) or "exceeded the limits" in str(error)


def test_a_grammar_whose_conversion_takes_long_is_refused(grammars, monkeypatch):
    assert grammars.as_lark('root ::= "a"').split() == ["%llguidance", "{}", "start:", '"a"']
    monkeypatch.setattr(compiler, "LIMITED", compiler.LIMITED.replace("(5, 5)", "(1, 1)"))
    with pytest.raises(ValueError, match="needs more than"):
        grammars.as_lark('root ::= "a"' + "\n" * 60_000)


def test_a_target_without_an_end_token_has_no_grammar(target, monkeypatch):
    monkeypatch.setattr(Target, "eos_token_ids", frozenset())
    with pytest.raises(ValueError, match="end token"):
        Grammars(target)


def test_a_missing_library_is_named(target, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance.hf", None)
    with pytest.raises(ValueError, match=r"foredraft\[grammar\]"):
        Grammars(target)
