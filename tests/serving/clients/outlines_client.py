"""outlines against a server, as it calls vLLM (`structured_outputs`) and SGLang (`regex`, `ebnf`): choices, patterns, models
of pydantic and grammars. Runs in the environment of scripts/clients_env.sh:

python outlines_client.py URL
"""

import re
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel


class Choice(BaseModel):
    kind: Literal["alpha", "beta"]


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
# outlines checks a grammar with Lark's own parser before it sends it to vLLM. SGLang gets EBNF, which it does not check.
for model, grammar in (
    (outlines.from_vllm(client, "tiny"), 'start: "a" | "b" "c"'),
    (outlines.from_sglang(client, "tiny"), 'root ::= "a" | "b" "c"'),
):
    settings = {"max_tokens": 200, "seed": 1}
    assert model("def", Literal["yes", "no"], **settings) in ("yes", "no")
    assert re.fullmatch("[ab]{2}/[0-9]", model("def", Regex("[ab]{2}/[0-9]"), **settings))
    assert "".join(model.stream("def", Regex("[ab]{3}"), **settings)).strip("ab") == ""
    assert Choice.model_validate_json(model("def", Choice, **settings)).kind in ("alpha", "beta")
    assert model("def", CFG(grammar), **settings) in ("a", "bc")
