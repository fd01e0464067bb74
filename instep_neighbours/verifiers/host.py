"""The environment's process: `PYTHON -P host.py CONFIG`. It runs in the user's Python, and imports nothing of instep.

CONFIG is a JSON file: `env`, `select` and `serve` (names of verifiers), `tasks` (the file for the tasks, a JSON object
per line; or null) and `address` (where to serve; or "", then the process ends after the tasks). It ends with its parent
process, and so do the programs of its episodes.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

LIFELINE = "INSTEP_LIFELINE_FD"  # a socket that only the parent's end closes
GRACE = 10.0  # seconds for the programs and sandboxes of episodes to end


def follow_parent() -> None:
    """End the episodes, then this process, when the parent has ended."""
    line = socket.socket(fileno=int(os.environ.pop(LIFELINE)))

    def wait() -> None:
        try:
            line.recv(1)
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # then verifiers ends its programs and sandboxes
        time.sleep(GRACE)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def fail(message: str) -> None:
    print(f"ERROR {message}", file=sys.stderr, flush=True)
    sys.exit(3)


def write_tasks(config: Any, select: dict, path: str) -> None:
    """Write each task's data in the server's format, and its prompt as text."""
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    tasks = load_taskset(config.taskset).select(SelectConfig.model_validate(select))
    if not tasks.bounded:
        fail('the taskset is infinite: give --env-args \'{"select": {"limit": N}}\'')
    num = 0
    with open(path + ".part", "w", encoding="utf-8") as file:
        for task in tasks:
            data = task.data
            prompt = data.prompt_text or data.name or data.id or f"task {data.idx}"
            file.write(json.dumps({"input": prompt, "metadata": {"task": data.model_dump(mode="json")}}) + "\n")
            num += 1
    if not num:
        fail("the taskset has no tasks")
    os.replace(path + ".part", path)


def main() -> None:
    follow_parent()
    sys.path.insert(0, os.getcwd())  # where users keep their modules
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    try:
        import verifiers
        from verifiers.v1.serve import serve_env
        from verifiers.v1.utils.loaders import resolve_env_config
    except ImportError as error:
        fail(f"{sys.executable} has no verifiers from 0.4 on ({error}): pip install 'verifiers>=0.4', or --env-python")
    print(f"verifiers {verifiers.__version__}", flush=True)
    if unknown := given["serve"].keys() - {"max_concurrent"}:
        fail(f"serve: {', '.join(sorted(unknown))}: of [serve] only max_concurrent acts (else --env-num-servers)")
    config = resolve_env_config(given["env"])
    if given["tasks"]:
        write_tasks(config, given["select"], given["tasks"])
    if given["address"]:
        serve_env(max_workers=1, address=given["address"], config=config, **given["serve"])


if __name__ == "__main__":
    main()
