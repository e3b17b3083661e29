"""The checkout is small, and the package's directories are links: what git tracks, and how."""

import subprocess

import pytest

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
    assert heads == {"scripts/embedded_target", "scripts/smollm2/eagle3"}


def test_the_package_consists_of_links():
    """A checkout without them (git's core.symlinks=false, a zip file) has an empty package."""
    links = {path for mode, path in tracked() if mode == "120000"}
    rooms = {"conf", "heads", "inference", "scripts", "train"}
    assert {f"foredraft/{room}" for room in rooms} <= links
    assert all((ROOT / link).is_symlink() and (ROOT / link).exists() for link in links)
