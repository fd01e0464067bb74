"""Checks of this machine and of the installed packages: do they have what a run needs?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

import instep
from instep.errors import ConfigError
from instep.observability.versions import git_state, package_version
from instep.preflight.doctor.check import Check, Status
from instep.preflight.doctor.purposes import PURPOSES, check_purposes
from instep.system.gpus import no_driver
from instep.system.limits import cgroup, host_memory
from instep.system.ports import check_loopback
from instep.system.processes import num_usable_cpus
from instep.system.scratch import left, memory_root

# What needs the package.
USES = {
    "torch": "everything but `instep report`, `samples` and `doctor`",
    "transformers": "models and tokenizers",
    "megatron-core": "--train-backend megatron",
}
VLLM_SECONDS = 120.0  # for `import vllm`, cold
MIN_FILES = 4096  # descriptors: a rollout keeps up to 2048 connections
MIN_SHM = 1 << 30  # bytes; a sync over `shm` keeps two buckets of --update-weight-buffer-size there
MIN_DISK = 5_000_000_000  # bytes; a checkpoint of 0.6 B parameters takes about twice that
PROCESS_MARKS = ("instep.cluster.worker_main", "instep.engines.embedded", "instep.rollout.rewards.worker")


def check_installation(purposes: Sequence[str] = ()) -> list[Check]:
    """Return all checks; what `purposes` need must be here. A fault comes before the faults that it causes."""
    checks = [_instep(), _python(), *_packages(), *_torch(), *_built_for_torch(), _shm(), *_disks(), _files()]
    return [*checks, *_cores(), _memory(), _loopback(), *_leftovers(), *check_purposes(purposes)]


def _instep() -> Check:
    root = Path(instep.__file__).resolve().parents[1]
    commit, changed = git_state(root)
    state = f", commit {commit[:12]}{' with changes' if changed else ''}" if commit else ""
    return Check("instep", "ok", f"{instep.__version__} at {root}{state}")


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    text = f"{platform.python_version()} at {sys.executable}"
    return Check("python", "ok" if ok else "fail", text, "use Python 3.11 to 3.13")


def _packages() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    for name, use in USES.items():
        pin = PURPOSES["megatron"].needs[name]
        found, remedy = package_version(name), f"pip install '{name}{pin}'"
        if found is None:
            status: Status = "warn" if name == "megatron-core" else "fail"
            brought = f"instep install {'cpu' if no_driver() else 'cuda'}"
            yield Check(name, status, f"not installed; needed for {use}", brought)
        elif found in SpecifierSet(pin, prereleases=True):
            yield Check(name, "ok", found)
        else:
            yield Check(name, "warn", f"{found}, tested with {pin}", remedy)
    yield _vllm()
    spec = importlib.util.find_spec("torch") if sys.dont_write_bytecode else None
    if spec is not None and spec.origin and not Path(importlib.util.cache_from_source(spec.origin)).exists():
        text = "there is no bytecode of torch, and Python writes none: each process of a run imports seconds longer"
        yield Check("bytecode", "warn", text, "unset PYTHONDONTWRITEBYTECODE, or set PYTHONPYCACHEPREFIX to a folder")


def _vllm() -> Check:
    """Check that vLLM can be imported. A separate process imports it, because a crash must not end the doctor."""
    found = package_version("vllm")
    if found is None:
        return Check("vllm", "ok", "not installed; the embedded engine does not need it")
    remedy = "install the vllm that is built for this torch, or use --rollout-backend embedded"
    try:
        done = subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, timeout=VLLM_SECONDS)
    except subprocess.TimeoutExpired:
        return Check("vllm", "warn", f"{found}; `import vllm` takes more than {VLLM_SECONDS:.0f} s", remedy)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return Check("vllm", "fail", f"{found}, but it cannot be imported: {said[-1]}", remedy)
    return Check("vllm", "ok", f"{found}, can be imported")


def _torch() -> Iterator[Check]:
    if package_version("torch") is None:
        return
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    try:
        import torch
    except (ImportError, OSError) as error:  # such as an incompatible CUDA library
        yield Check("torch import", "fail", str(error), "install the torch build for this machine")
        return
    build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPU only"
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        yield Check("gpu", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; {build}")
    elif driver and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Check("gpu", "warn", f"CUDA_VISIBLE_DEVICES hides it; {build}", "unset CUDA_VISIBLE_DEVICES")
    elif driver:
        remedy = "install torch's build for the CUDA version that `nvidia-smi` shows, or use --device cpu"
        yield Check("gpu", "fail", f"there is an NVIDIA driver, but torch sees no device; {build}", remedy)
    else:
        yield Check("gpu", "ok", f"none; {build}")


def _built_for_torch() -> Iterator[Check]:
    """Check that packages with compiled code fit this version of torch. transformers imports some of them."""
    from packaging.requirements import Requirement

    installed = package_version("torch")
    for name in ("torchvision", "torchaudio", "xformers", "vllm"):
        if installed is None or package_version(name) is None:
            continue
        needs = [Requirement(r) for r in importlib.metadata.requires(name) or []]
        wanted = next((r.specifier for r in needs if r.name == "torch" and (not r.marker or r.marker.evaluate())), None)
        if wanted and installed.partition("+")[0] not in wanted:
            text = f"{name} {package_version(name)} is built for torch{wanted}, but torch is {installed}"
            yield Check(name, "fail", text, f"pip uninstall {name}, or install the version for this torch")


def _shm() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shared memory", "warn", f"no /dev/shm; {tempfile.gettempdir()} is used", "mount /dev/shm: faster")
    usage = shutil.disk_usage(path)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free in /dev/shm"
    if not os.access(path, os.W_OK):
        return Check("shared memory", "fail", "/dev/shm cannot be written", "mount it writable (docker: --shm-size=8g)")
    remedy = "docker: --shm-size=8g; or a smaller --update-weight-buffer-size, or --weight-sync disk"
    return Check("shared memory", "ok" if usage.free >= MIN_SHM else "warn", text, remedy)


def _disks() -> Iterator[Check]:
    """Check the free space for runs (default folder) and for temporary files."""
    for name, path in (("disk", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(path)
        text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {path}"
        yield Check(name, "ok" if usage.free >= MIN_DISK else "warn", text, "free space, or use another --run-dir")


def _files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {MIN_FILES if hard < 0 else min(hard, 65536)}"
    return Check("open files", "ok" if soft >= MIN_FILES or soft < 0 else "warn", f"limit {soft} (hard {hard})", remedy)


def _cores() -> Iterator[Check]:
    usable, limit = num_usable_cpus(), cgroup("cpu.max")
    quota = int(limit[0]) / int(limit[1]) if limit else usable
    text = f"{usable} usable of {os.cpu_count()}" + (f", quota {quota:g}" if limit else "")
    remedy = f"--num-threads {max(1, int(quota))}: more threads than the quota wait for each other"
    yield Check("cores", "warn" if usable > quota + 0.5 else "ok", text, remedy)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name)
        if value and (not value.isdigit() or int(value) > min(usable, quota)):
            yield Check(name, "warn", f"is {value}, with {min(usable, quota):g} cores", f"unset {name}")


def _memory() -> Check:
    available, total = psutil.virtual_memory().available, host_memory()
    text = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB" + (" (cgroup)" if cgroup("memory.max") else "")
    low = min(available, total) < 2e9
    return Check("memory", "warn" if low else "ok", text, "the quickstart takes 2 GB: end something else")


def _loopback() -> Check:
    try:
        port = check_loopback()
    except ConfigError as error:
        return Check("loopback", "fail", error.what, error.remedy)
    return Check("loopback", "ok", f"127.0.0.1 answers (port {port} tried)")


def _leftovers() -> Iterator[Check]:
    """Check for folders of killed runs, and for processes of runs whose controller has ended."""
    ray = os.environ.get("RAY_TMPDIR")
    roots = dict.fromkeys([memory_root(), Path(tempfile.gettempdir()), *([Path(ray)] if ray else [])])
    yield leftover_folders(roots)
    if "instep" in " ".join(psutil.Process(1).cmdline()):  # a container whose first process is the run itself
        yield Check("leftover processes", "ok", "not checked: process 1 is a run")
        return
    infos = [process.info for process in psutil.process_iter(["pid", "ppid", "cmdline"]) if process.info["ppid"] == 1]
    commands = {info["pid"]: " ".join(info["cmdline"] or []) for info in infos}
    orphans = [pid for pid, command in commands.items() if any(f"-m {mark}" in command for mark in PROCESS_MARKS)]
    text = f"processes without an owner: {orphans}" if orphans else "none"
    yield Check("leftover processes", "fail" if orphans else "ok", text, f"kill {' '.join(map(str, orphans))}")


def leftover_folders(roots: Iterable[Path]) -> Check:
    """Check for folders of killed runs in `roots`. Folders of active runs do not count."""
    dead = [path for root in roots for path in left(root)]
    where = ", ".join(map(str, roots))
    text = f"{len(dead)} folders of killed runs: {', '.join(map(str, dead[:3]))}" if dead else f"none in {where}"
    remedy = f"the next run removes them; or: rm -r {' '.join(map(shlex.quote, map(str, dead)))}"
    return Check("leftover folders", "warn" if dead else "ok", text, remedy)
