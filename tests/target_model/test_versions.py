"""What differs between the versions of transformers that pyproject.toml admits, as models that behave like each of them."""

import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Cache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.utils import ModelOutput

from foredraft.heads import Target
from foredraft.heads.caches.state_cache import can_crop
from foredraft.heads.target_model.capabilities import cache_name
from foredraft.inference import generate
from tests.support import architectures
from tests.support.decoding import Oracle
from tests.support.tiny import tiny_config

PROMPT = torch.arange(5, 17)[None]


@dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None
    cache: Cache | None = None


def renamed(model: LlamaForCausalLM, name: str) -> LlamaForCausalLM:
    """Rename the cache argument of the model's forward to `name`."""
    forward, own = model.forward, cache_name(model)
    assert own is not None

    def call(input_ids: torch.Tensor, **kwargs: Any) -> ModelOutput:
        if name in kwargs:
            kwargs[own] = kwargs.pop(name)
        out = forward(input_ids, **kwargs)
        return Output(out.logits, out.get(own)) if name == "cache" else out

    signature = inspect.signature(forward)
    arguments = [one.replace(name=name if one.name == own else one.name) for one in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=arguments)  # type: ignore[attr-defined]
    model.forward = call
    return model


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # before 5.24, and since
def test_a_cache_of_either_name_is_used(name: str, trees: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    settings = {"max_new_tokens": 12, "eos_token_id": -1}
    expected = generate(Target(model), None, PROMPT, **settings).new_tokens
    target, lengths = Target(renamed(model, name)), []
    assert target.capabilities.trees
    target.capabilities.why = None if trees else "it is to draft chains"
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: lengths.append(output.shape[1]))
    drafter = Oracle([PROMPT[0].tolist() + expected[0]], target.vocab_size, right=True)
    drafted = generate(target, drafter, PROMPT, **settings)
    assert drafted.new_tokens == expected and drafted.acceptance_length > 3
    assert max(lengths[-2:]) < PROMPT.shape[1]  # else the whole text was computed again


@pytest.mark.parametrize("layers", [[0], [2, 6], [1, 3, 5]])
def test_hidden_states_are_those_of_the_layers_however_a_list_is_numbered(layers: list[int]) -> None:
    """Check versions before 5.23, whose numbers of a list start at the first layer's output."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    states, forward = model(PROMPT, output_hidden_states=True).hidden_states, model.forward

    @functools.wraps(forward)
    def older(*args: Any, output_hidden_states: Any = None, **kwargs: Any) -> ModelOutput:
        out = forward(*args, output_hidden_states=bool(output_hidden_states), **kwargs)
        if isinstance(output_hidden_states, list | tuple | set):
            numbered = enumerate(out.hidden_states[1:])
            out.hidden_states = tuple(one if number in output_hidden_states else None for number, one in numbered)
        return out

    for model.forward in (forward, older):
        ours = Target(model).forward(PROMPT, layers=layers).aux_hidden_states
        torch.testing.assert_close(ours, torch.cat([states[layer] for layer in layers], -1))


# A short convolution goes back, a recurrent state does not, and MiniMax has its states next to its layers.
CROPS = {"lfm2": True, "llama4": True, "qwen3_5": False, "minimax": False}


@pytest.mark.parametrize("kind", CROPS)
def test_a_cache_is_cropped_only_if_that_leaves_no_trace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = architectures.hybrid(kind).target.forward_from(PROMPT, 0, None)
    monkeypatch.delattr(MiniMaxCache, "is_croppable", raising=False)  # as before 5.23
    assert can_crop(state) == CROPS[kind]
    state.layers.append(type("Other", (DynamicLayer,), {})())
    assert not can_crop(state)


def test_a_model_that_runs_its_layers_in_loops_drafts_no_trees() -> None:
    """Use Dory, of 5.24, which appends a copy of every layer of the cache for each loop."""
    config = tiny_config(n_recurrent_loops=2)
    assert re.search(
        "model_type llama runs its layers several times", Target(LlamaForCausalLM(config)).capabilities.why or ""
    )
