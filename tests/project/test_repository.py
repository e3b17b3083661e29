"""The repository itself: what git tracks, and what GitHub reads."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from foredraft import __version__
from tests.support import ROOT

LARGEST_CHECKOUT = 45 << 20  # bytes; heads that users can rebuild do not belong into it


def tracked() -> list[tuple[str, str]]:
    """Return the mode and the path of every tracked file."""
    listed = subprocess.run(["git", "ls-files", "-z", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    found = [entry.split("\t", 1) for entry in listed.stdout.split("\0") if entry]
    return [(facts.split()[0], path) for facts, path in found]


def test_the_checkout_stays_small():
    sizes = {path: (ROOT / path).lstat().st_size for _, path in tracked() if (ROOT / path).exists()}
    assert sum(sizes.values()) < LARGEST_CHECKOUT, sorted(sizes.items(), key=lambda item: -item[1])[:5]


def test_one_trained_head_is_tracked():
    heads = {path.rsplit("/", 1)[0] for _, path in tracked() if path.endswith("model.safetensors")}
    assert heads == {"scripts/test_model", "scripts/smollm2/eagle3"}
    assert (ROOT / "scripts/smollm2/eagle3/model.safetensors").stat().st_size < 12e6  # without the rows of the target


def test_the_package_consists_of_links():
    """Check that a checkout without them (git's core.symlinks=false, a zip file) has an empty package."""
    links = {path for mode, path in tracked() if mode == "120000"}
    rooms = {"conf", "heads", "inference", "scripts", "train"}
    assert {f"foredraft/{room}" for room in rooms} <= links
    assert all((ROOT / link).is_symlink() and (ROOT / link).exists() for link in links)


def test_the_core_can_be_read_in_an_evening():
    section = (
        (ROOT / "docs/developer/architecture.md").read_text().split("## The core in an evening")[1].split("\n## ")[0]
    )
    rows = [re.findall(r"`([\w/]+\.py)`", line) for line in section.splitlines() if line.startswith("| `")]
    files = [Path(row[0]).parent / Path(file).name for row in rows for file in row]
    lines = [(ROOT / file).read_text().count("\n") for file in files]
    assert len(files) > 10 and sum(lines) <= 3000, list(zip(files, lines, strict=True))


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_what_github_reads_is_yaml_whose_scripts_exist(path: Path):
    text = path.read_text()
    assert yaml.safe_load(text)
    assert [file for file in re.findall(r"bash ([\w./]+\w)", text) if not (ROOT / file).is_file()] == []


def test_workflows_do_not_download_cuda_in_forks():
    for name in ("ci", "nightly", "release", "docs"):
        assert workflow(name)["env"]["PIP_EXTRA_INDEX_URL"].endswith("|| 'https://download.pytorch.org/whl/cpu' }}")


def test_serving_jobs_run_all_tests_of_engines_and_clients_with_every_environment_that_these_need():
    commands = workflow("nightly")["jobs"]["nightly"]["strategy"]["matrix"]["command"]
    job = " ".join(one for one in commands if "serving" in one)
    assert all(str(file.relative_to(ROOT)) in job for file in (ROOT / "tests" / "serving").glob("test_*.py"))
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    (needed,) = (re.search(r"scripts/\{(.+)\}_env\.sh", marker) for marker in markers if marker.startswith("serving"))
    assert needed is not None and all(f"scripts/{name}_env.sh" in job for name in needed[1].split(","))


def test_a_release_publishes_what_was_built_installed_and_run():
    jobs = workflow("release")["jobs"]
    assert any("scripts/package.sh dist" in step.get("run", "") for step in jobs["build"]["steps"])
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {"id-token": "write"}
    script = (ROOT / "scripts" / "package.sh").read_text()
    assert all(word in script for word in ("twine check --strict", 'foredraft" --version', 'foredraft" env'))


def test_an_issue_asks_for_what_foredraft_env_prints():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (asked,) = (field for field in form["body"] if field["id"] == "env")
    assert "foredraft env" in asked["attributes"]["label"] and asked["validations"]["required"]


def test_the_hooks_have_the_version_of_constraints():
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={hooks['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_the_changelog_has_the_version_or_says_that_it_is_unreleased():
    """Check also that its sections are those of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert versions[0] == "Unreleased" or versions[0] == __version__
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    assert all(f"\n[{version}]: https://" in text for version in versions)


def test_the_test_model_has_the_plain_chat_template():
    plain = ROOT / "train" / "data" / "plain_chat.jinja"
    assert (ROOT / "scripts" / "test_model" / "chat_template.jinja").read_bytes() == plain.read_bytes()
