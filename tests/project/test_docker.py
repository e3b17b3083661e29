"""The container's files hold together: what is copied exists and is enough, and its command is one that this project has."""

import re
import shlex
import tomllib
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from foredraft.__main__ import PROGRAMS
from tests.support import ROOT

FOLDER = ROOT / "scripts" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lines(instruction: str) -> list[str]:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    return [
        rest.strip() for name, _, rest in (line.partition(" ") for line in text.splitlines()) if name == instruction
    ]


def test_what_is_copied_exists_and_is_what_the_build_may_see():
    copied = [source for line in lines("COPY") for source in shlex.split(line)[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    seen = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert sorted(seen) == sorted(copied)


def test_all_that_the_package_is_made_of_is_copied():
    copied = {source for line in lines("COPY") for source in shlex.split(line)[:-1]}
    rooms = {path.readlink().name for path in (ROOT / "foredraft").iterdir() if path.is_symlink()}
    assert {"heads", "inference", "train", "conf", "scripts"} <= rooms
    assert rooms | {"foredraft", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied


def test_what_is_installed_exists():
    (install,) = (line for line in lines("RUN") if "pip install" in line)
    assert '".[$EXTRAS]"' in install
    (served,) = (line.partition("=")[2] for line in lines("ARG") if line.startswith("EXTRAS="))
    trained = re.search(r"--build-arg EXTRAS=(\S+)", (ROOT / "scripts" / "kubernetes.yaml").read_text())
    assert trained
    for extras in (served, trained[1]):
        assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_container_serves_and_not_as_root():
    (user,), (entry,), (command,) = lines("USER"), lines("ENTRYPOINT"), lines("CMD")
    assert user.isdecimal() and int(user) > 0 and f"--uid {user} " in " ".join(lines("RUN"))
    assert yaml.safe_load(entry) == ["foredraft"] and PROJECT["project"]["scripts"].keys() == {"foredraft"}
    check(yaml.safe_load(command))
    (port,) = lines("EXPOSE")
    assert OmegaConf.load(ROOT / "conf" / "serve.yaml").port == int(port)


def test_compose_starts_the_same_command():
    service = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["foredraft"]
    assert (FOLDER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    check(service["command"])
    drain = OmegaConf.load(ROOT / "conf" / "serve.yaml").drain
    assert int(service["stop_grace_period"].removesuffix("s")) > drain
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_pods_keep_what_they_fetch_and_may_have_a_token():
    _, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    settings = {entry["name"]: entry for entry in container["env"]}
    claimed = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    kept = [Path(mount["mountPath"]) for mount in container["volumeMounts"] if mount["name"] in claimed]
    assert any(path in Path(settings["HF_HOME"]["value"]).parents for path in kept)
    assert settings["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]


def check(command: list[str]) -> None:
    """Check that a program exists and has these keys."""
    program, *settings = command
    assert program == "serve" and program in PROGRAMS
    known = OmegaConf.load(ROOT / "conf" / "serve.yaml").keys()
    for key in (setting.partition("=")[0] for setting in settings):
        group, _, name = key.partition(".")
        assert key in known or (ROOT / "conf" / "options" / f"{group}.yaml").is_file(), key
        assert not name or name == "path"
