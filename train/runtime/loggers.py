"""wandb and tensorboard: what transformers' own callbacks (trainer.report_to) leave out. Only one process logs."""

import importlib.util
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.integrations import INTEGRATION_TO_CALLBACK

from foredraft.train.runtime.locks import write_atomically

OF_RUN: dict[str, str] = {}  # variables of the environment that the newest run of this process has set
MODULES = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": "os"}  # with another name, or without any


def check(report_to: str | Sequence[str]) -> None:
    """Raise ValueError if transformers does not support a logger, or if it is not installed. None is imported."""
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    for name in names if names not in (["none"], ["all"]) else []:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"trainer.report_to={name}: give a list of {', '.join(INTEGRATION_TO_CALLBACK)}")
        if importlib.util.find_spec(MODULES.get(name, name)) is None:
            raise ValueError(f"trainer.report_to={name}: {MODULES.get(name, name)} is not installed")


def prepare(report_to: list[str], directory: Path) -> None:
    """Set, before training, where loggers write, which is not below the checkpoints; without a key wandb stays offline.
    Called by the one process that logs."""
    if "wandb" in report_to:
        os.environ.setdefault("WANDB_PROJECT", "foredraft")
        set_of_run("WANDB_DIR", str(directory))
        kept = directory / "wandb_id"  # a resumed run continues the same curves
        if not kept.exists():
            write_atomically(kept, uuid.uuid4().hex[:8])
        set_of_run("WANDB_RUN_ID", kept.read_text())
        os.environ.setdefault("WANDB_RESUME", "allow")
        if not has_wandb_key():
            os.environ.setdefault("WANDB_MODE", "offline")
    if "tensorboard" in report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(directory / "tensorboard")


def set_of_run(name: str, value: str) -> None:
    """Set a variable of the environment for this run of the process, unless the user has set it."""
    if os.environ.get(name) == OF_RUN.get(name):
        os.environ[name] = OF_RUN[name] = value


def has_wandb_key() -> bool:
    """Return whether `wandb login` has stored a key. wandb itself would read WANDB_MODE when it is asked, and only then."""
    from requests.utils import get_netrc_auth  # wandb needs requests too

    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(address))


def log_results(report_to: list[str], directory: Path, config: str, metrics: dict[str, Any]) -> None:
    """Log, after the last measurement, the resolved config, the final figures and the report. config: as yaml."""
    figures = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    if "wandb" in report_to:
        import wandb
        import yaml

        assert wandb.run is not None  # transformers' callback began it
        wandb.config.update({"foredraft": yaml.safe_load(config)}, allow_val_change=True)
        wandb.summary.update(figures)
        artifact = wandb.Artifact(f"report-{wandb.run.id}", type="report")
        for name in ("report.html", "metrics.json", "history.json"):
            artifact.add_file(str(directory / name))
        wandb.log_artifact(artifact)
        wandb.finish()
    if "tensorboard" in report_to:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(directory / "tensorboard")) as writer:
            writer.add_text("config", f"```yaml\n{config}\n```")
            for name, value in figures.items():
                writer.add_scalar(f"final/{name}", value)
