"""The wheel of instep, outside the repository: with nothing but what it asks for, and in a real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import forks
from tests.e2e.commands import grpo_arguments

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, in an environment that sees the packages that it asks for and no others. Returns its `instep`."""
    folder = tmp_path_factory.mktemp("wheel")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in [*product_files(), "pyproject.toml", "README.md", "LICENSE"]:
        (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "src" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    python = folder / "env/bin/python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    with forks.cold():
        subprocess.run([*pip, *words, str(folder / "src")], check=True, env=env)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        subprocess.run([*pip, *install, *folder.glob("*.whl")], check=True, env=env)
    paths = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    link_needs(Path(sysconfig.get_path("purelib", "venv", paths)))
    return folder / "env/bin/instep"


def site_of(installed: Path) -> Path:
    (site,) = installed.parents[1].glob("lib/python*/site-packages")
    return site


def product_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if name.startswith("instep") and (ROOT / name).exists()]


def link_needs(site: Path) -> None:
    """Link the packages that instep asks for without extras, and those that they ask for."""
    import importlib.metadata

    from packaging.requirements import Requirement

    wanted, seen = ["instep"], set()
    while wanted:
        own = importlib.metadata.distribution(wanted.pop())
        needs = [Requirement(need) for need in own.requires or []]
        needs = [need for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
        wanted += [need.name for need in needs if canonical(need.name) not in seen]
        seen |= {canonical(need.name) for need in needs}
        tops = {file.parts[0] for file in own.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops if own.name != "instep" else ():
            if not (site / top).exists():
                (site / top).symlink_to(own.locate_file(top))


def instep(program: Path, *words: str, folder: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_the_wheel_has_every_file_of_its_packages(installed):
    site = site_of(installed)
    wanted = [name for name in product_files() if name[-3:] != ".md"]
    assert len(wanted) > 400 and [name for name in wanted if not (site / name).exists()] == []


def test_the_wheel_works_outside_the_repository_with_what_it_asks_for(installed, tmp_path):
    for words in (["--help"], ["train", "--help"], ["install", "--help"], ["plan", "--help"], ["doctor", "--help"]):
        done = instep(installed, *words, folder=tmp_path)
        assert done.returncode == 0 and len(done.stdout) > 200, done.stderr
    assert "vllm-serve" in instep(installed, "--help", folder=tmp_path).stdout  # the neighbours' entry points
    done = instep(installed, "doctor", "--json", "--for", "vllm", folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and checks["instep"]["text"].endswith(f" at {site_of(installed)}")
    assert (checks["torch"]["status"], checks["torch"]["remedy"]) == ("fail", "instep install cpu")
    found = {name: checks[f"for {name}"] for name in ("cpu", "vllm", "ray", "trl", "tensorboard")}
    assert [check["status"] for check in found.values()] == ["absent", "fail", "absent", "absent", "ok"]
    remedies = [check["remedy"] for check in found.values()][:4]
    assert remedies == [f"instep install {name}" for name in ("cpu", "vllm", "ray", "trl")]
    assert list(tmp_path.iterdir()) == []


def test_a_run_needs_nothing_of_the_repository(installed, tiny, tmp_path):
    """The packages that train are those of the tests; instep is the wheel's, in every process of the run."""
    others = site_of(installed) / "others.pth"
    others.write_text(f"{sysconfig.get_path('purelib')}\n")
    (tmp_path / "here").mkdir()
    done = instep(installed, *grpo_arguments(tiny, Path("run")), folder=tmp_path / "here")
    others.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "here/run"
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 2 and (run / "report.html").exists()
    assert json.loads((run / "config.json").read_text())["versions"]["git_commit"] is None
    assert str(ROOT) not in done.stdout + done.stderr + "".join(p.read_text() for p in (run / "logs").iterdir())
