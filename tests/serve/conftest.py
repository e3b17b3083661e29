"""A server of the tiny target, as a module asks for it: TEMPLATE is the chat template, CONTEXT the context if not 256 tokens,
SETTINGS are words of the command, in which {model} is the target's folder, and KEY is the API key."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.processes import Served, on_cpu, served


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_path, path)
    if template := getattr(request.module, "TEMPLATE", None):
        (path / "chat_template.jinja").write_text(template)
    if context := getattr(request.module, "CONTEXT", None):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return path


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Served]:
    key = {"FOREDRAFT_API_KEY": request.module.KEY} if hasattr(request.module, "KEY") else {}
    words = [word.replace("{model}", str(model)) for word in request.module.SETTINGS]
    with served(model.parent, *on_cpu(model), *words, **key) as running:
        yield running


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, server: Served) -> openai.OpenAI:
    return server.client(getattr(request.module, "KEY", "none"))
