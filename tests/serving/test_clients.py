"""Load generators and clients of OpenAI's protocol, unchanged, against `foredraft serve`. Each runs in its own environment:

    bash scripts/clients_env.sh && python -m pytest -m serving tests/serving/test_clients.py

FOREDRAFT_CLIENTS_ENV names the folder of the environments (default .venv-clients).
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foredraft.inference import generate
from tests.serving.conftest import EMBEDDED, call
from tests.support import ROOT, typed
from tests.support.processes import Served, served

pytestmark = pytest.mark.serving

CLIENTS = Path(__file__).resolve().parent / "clients"
ENVIRONMENTS = Path(os.environ.get("FOREDRAFT_CLIENTS_ENV", ROOT / ".venv-clients"))
# Tools in Hermes' format: the test model's own template has none.
TEMPLATE = """{%- if tools %}{{ 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role + ": " + (message.content or "") }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + "(" }}
{%- for key, value in call.function.arguments.items() %}{{ key ~ "=" ~ value }}{% endfor %}{{ ")" }}
{%- endfor %}{{ "\n" }}{% endfor %}{{ "assistant:" }}"""
ROWS = [("def add(self, other):\n    return self", " + other", " -> None:"), ("import os\nimport", " sys", " 7")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clients") / "tiny"
    shutil.copytree(EMBEDDED, path, ignore=shutil.ignore_patterns("self_generated"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    facts = [f"target={model}", "target.dtype=float32", "target.device=cpu", "drafter=suffix", "max_tokens=300"]
    with served(model.parent, *facts) as running:
        yield running


def program(environment: str, name: str = "python") -> Path:
    path = ENVIRONMENTS / environment / "bin" / name
    if not path.is_file():
        pytest.fail(f"{path} is not there: bash scripts/clients_env.sh makes it")
    return path


@pytest.mark.parametrize("name", ["litellm", "langchain", "agents", "outlines"])
def test_a_client_s_own_loop_runs(server, name):
    call(program(name), CLIENTS / f"{name}_client.py", server.url)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_load_generator_measures_the_server(server, model, embedded, tmp_path, path):
    """Run guidellm, which needs answers of a fixed length and counts in every chunk of a stream."""
    given = typed(f"""
        --backend kind=openai_http,target={server.url},model=tiny,request_format={path}
        --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=24
        --data kind=synthetic_text,prompt_tokens=48,output_tokens=16 --tokenizer kind=hf_auto,model={model}
        --output kind=json,path={tmp_path / "report.json"} --disable-console-interactive
    """)
    call(program("guidellm", "guidellm"), "run", *given)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 24, "errored": 0, "incomplete": 0, "total": 24}
    assert metrics["output_token_count"]["successful"]["total_sum"] == 24 * 16
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == 16 and request["time_to_first_token_ms"] > 0 and request["output"]
        body = json.loads(request["request_args"])["body"]
        if "prompt" in body:
            assert request["prompt_tokens"] == len(embedded.text_tokenizer(body["prompt"]).input_ids)


def test_a_harness_scores_with_the_target_s_log_likelihoods(server, model, embedded, tmp_path, monkeypatch):
    """Run lm-eval's local-completions: a task of choices, texts that are scored whole, and texts that are continued."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "good": good, "bad": bad}) + "\n" for text, good, bad in ROWS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
    data |= {"doc_to_text": "{{text}}", "target_delimiter": ""}
    tasks: dict[str, dict] = {
        "choose": {"output_type": "multiple_choice", "doc_to_choice": "{{[good, bad]}}", "doc_to_target": 0},
        "perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
        "continue": {"output_type": "generate_until", "doc_to_target": "{{good}}"},
    }
    tasks["choose"]["metric_list"] = [{"metric": "acc"}]
    tasks["perplexity"]["metric_list"] = [{"metric": "word_perplexity"}]
    tasks["continue"]["metric_list"] = [{"metric": "exact_match"}]
    tasks["continue"]["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(data | task | {"task": name}))
    given = typed(f"""
        --model local-completions --tasks {",".join(tasks)} --include_path {tmp_path}
        --model_args model=tiny,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2,max_retries=1
        --output_path {tmp_path / "out"} --log_samples
    """)
    call(program("lm_eval", "lm_eval"), "run", *given)

    def samples(name: str) -> list:
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        return [json.loads(line)["filtered_resps"] for line in file.read_text().splitlines()]

    tokenizer = embedded.text_tokenizer

    def likelihood(before: str, after: str) -> float:
        ids, start = tokenizer(before + after).input_ids, len(tokenizer(before).input_ids)
        logprobs = embedded.forward(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(logprobs[at - 1, ids[at]].item() for at in range(start, len(ids)))

    found = [[float(one[0]) for one in row] for row in samples("choose")]
    assert found == [pytest.approx([likelihood(text, one) for one in choices], abs=1e-3) for text, *choices in ROWS]
    found = [float(one) for (one,) in samples("perplexity")]
    assert found == pytest.approx([likelihood(tokenizer.eos_token, text) for text, *_ in ROWS], abs=1e-3)
    for (written,), (text, *_) in zip(samples("continue"), ROWS, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = generate(embedded, None, ids, max_new_tokens=12, temperature=0).new_tokens[0]
        assert written == tokenizer.decode(new, skip_special_tokens=True).split("\n")[0]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    right = [likelihood(text, good) > likelihood(text, bad) for text, good, bad in ROWS]
    assert scores["choose"]["acc,none"] == sum(right) / len(right)
