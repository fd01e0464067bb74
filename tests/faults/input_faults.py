"""What is wrong before the run begins, or comes from outside: rows, files, hooks, servers, foreign weights; engines of
which there are several."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from instep.checkpoints.integrity import check_whole
from tests.faults.data_faults import marking
from tests.faults.harness import ENDLESS, Place, Result, steps
from tests.faults.registry import scenario, unindent


def spoiled(place: Place, line: str) -> Path:
    """The data file with one more line, its third."""
    lines = (place.tiny / "train.jsonl").read_text().splitlines()
    path = place.folder / "rows.jsonl"
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    return path


@scenario(slow=True, row_broken="error: a row of the data file is no JSON")
def row_broken(place: Place) -> None:
    path = spoiled(place, '{"prompt": "1 + 1')
    with place.run("--prompt-data", str(path)) as run:
        run.error("row_broken", "DataError: ", f"{path}, line 3", code=2)


@scenario(slow=True, row_skipped="recovered: the same with `--skip-bad-rows`")
def row_skipped(place: Place) -> None:
    path = spoiled(place, '{"prompt": "1 + 1')
    with place.run("--prompt-data", str(path), "--skip-bad-rows", "--num-rollout", "1") as run:
        code, stderr, seconds = run.end()
    assert code == 0 and "1 bad row" in stderr.replace("rows", "row"), stderr[-3000:]
    place.results["row_skipped"] = Result(seconds, "a warning counts the rows that are left out")


@scenario(slow=True, row_without_prompt="error: a row lacks the column of `--input-key`")
def row_without_prompt(place: Place) -> None:
    path = spoiled(place, '{"question": "1 + 1", "label": "2"}')
    with place.run("--prompt-data", str(path)) as run:
        run.error("row_without_prompt", "DataError: ", f"{path}, line 3", "'prompt'", "--input-key", code=2)


@scenario(slow=True, data_missing="error: there is no data file")
def data_missing(place: Place) -> None:
    with place.run("--prompt-data", str(place.folder / "nowhere.jsonl")) as run:
        run.error("data_missing", "ConfigError: ", "nowhere.jsonl", "--prompt-data", code=2)


@scenario(slow=True, model_cut="error: a weight file of `--hf-checkpoint` is cut off")
def model_cut(place: Place) -> None:
    model = Path(shutil.copytree(place.tiny / "hf", place.folder / "hf"))
    weights = next(model.glob("*.safetensors"))
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with place.run("--hf-checkpoint", str(model)) as run:
        run.error("model_cut", "ConfigError: ", str(weights), code=2)


@scenario(slow=True, hook_import="error: the module of a hook cannot be imported")
def hook_import(place: Place) -> None:
    hooks = """
        import no_such_package
        async def reward(args, sample, **kwargs):
            return 1.0
        """
    with place.run(hooks=unindent(hooks)) as run:
        run.error("hook_import", "ConfigError: ", "no_such_package", "my_hooks", code=2)


@scenario(slow=True, reward_server_away="error: nothing answers at `--rm-url` (`--reward-timeout 3`)")
def reward_server_away(place: Place) -> None:
    patch = """
        import instep.rollout.http as module
        ask = module._ask
        def ask_and_mark(method, url, *args, **more):
            if ":9/" in url and not os.path.exists(os.environ["FAULT_MARK"]):
                mark()
            return ask(method, url, *args, **more)
        module._ask = ask_and_mark
        """
    flags = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/", "--reward-timeout", "3")
    with place.run(*flags, patches={"controller": patch}) as run:
        run.error("reward_server_away", "RewardError: ", "http://127.0.0.1:9/")


@scenario(
    slow=True, generate_hangs="error: a custom generate function never returns (`--rollout-timeout 3 --no-hook-trial`)"
)
def generate_hangs(place: Place) -> None:
    hooks = """
        import asyncio
        async def reward(args, sample, **kwargs):
            return 1.0
        async def generate(args, sample, sampling_params):
            await asyncio.sleep(1000)
        """
    flags = ("--custom-generate-function-path", "my_hooks.generate", "--rollout-timeout", "3", "--no-hook-trial")
    with place.run(*flags, hooks=marking(hooks, "def generate")) as run:
        words = ("RolloutError: 0 of 4 groups are ready after 3 s", "--rollout-timeout", "custom generate function")
        run.error("generate_hangs", *words)


@scenario(slow=True, generate_raises="error: a custom generate function raises")
def generate_raises(place: Place) -> None:
    hooks = """
        async def reward(args, sample, **kwargs):
            return 1.0
        async def generate(args, sample, sampling_params):
            return {}["answer"]
        """
    flags = ("--custom-generate-function-path", "my_hooks.generate")
    with place.run(*flags, hooks=marking(hooks, "def generate")) as run:
        run.error("generate_raises", "Error: ", "KeyError", "my_hooks")


@scenario(slow=True, too_many_ranks="error: 4,096 trainer ranks on the cores of this machine")
def too_many_ranks(place: Place) -> None:
    with place.run("--actor-num-gpus-per-node", "4096", "--rollout-batch-size", "1024") as run:
        words = ("ConfigError: 4096 trainer ranks on", "--actor-num-gpus-per-node", "1 is usual on a CPU")
        run.error("too_many_ranks", *words, code=2)


@scenario(slow=True, foreign_weights="error: another process changes the weights of the engine between two syncs")
def foreign_weights(place: Place) -> None:
    """In the engine, when the first request of a rollout comes (those of a sync's proof want one token)."""
    patch = """
        from instep.engines.embedded.scheduler import Scheduler
        submit, done = Scheduler.submit, []
        def submit_after_change(self, requests):
            if self.weights.version == "2" and requests[0].max_tokens > 4 and not done:
                done.append(mark())
                for parameter in self.weights.weights.values():
                    parameter.data *= -1
            return submit(self, requests)
        Scheduler.submit = submit_after_change
        """
    with place.run(*ENDLESS, patches={"engine": patch}) as run:
        run.error("foreign_weights", "SyncError: ", "engine", "version 2")
    assert len(steps(run.run_dir)) == 1


@scenario(slow=True, other_run="error: `--load` names the checkpoint of a run on other data")
def other_run(place: Place) -> None:
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    path = spoiled(place, '{"prompt": "1 + 1", "label": "2"}')
    with place.run("--load", str(ckpt), "--prompt-data", str(path), "--num-rollout", "4") as run:
        run.error("other_run", "ConfigError: --prompt-data was", "--finetune", code=2)


KILL = {  # name -> where the controller is killed in a save
    "save_killed_twice": ("instep.checkpoints.folders", "write_manifest", "True"),
    "save_killed_last": (
        "instep.checkpoints.folders",
        "write_text",
        "str(args[0]).endswith('latest_checkpointed_iteration.txt')",
    ),
}


@scenario(slow=True, save_killed_twice="recovered: a run was killed twice in the same save, and is started again")
def save_killed_twice(place: Place) -> None:
    killed_in_save(place, "save_killed_twice", 2)


@scenario(
    slow=True,
    save_killed_last="recovered: a run was killed between the renaming of a checkpoint and the writing of its number",
)
def save_killed_last(place: Place) -> None:
    killed_in_save(place, "save_killed_last", 1)


def killed_in_save(place: Place, name: str, times: int) -> None:
    module, function, condition = KILL[name]
    kill = f"""
        import {module} as module, signal
        real = module.{function}
        def die(*args, **kwargs):
            if {condition}:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        module.{function} = die
        """
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    flags = ("--load", str(ckpt), "--save", str(ckpt), "--num-rollout", "3")
    for number in range(times):
        with place.run(*flags, patches={"controller": kill}, name=f"killed-{number}") as run:
            assert run.end()[0] == -signal.SIGKILL
    with place.run(*flags, name="again") as run:
        run.mark()
        run.recovered(name, "nothing: what is not complete is not there")
        assert run.end()[0] == 0
    assert [row["step"] for row in steps(run.run_dir)] == [2]
    check_whole(ckpt / "iter_0000002")


# ---- two engines behind a router -------------------------------------------------------------------------------------


@scenario(
    slow=True,
    one_engine_killed="recovered: one of two engines is killed (SIGKILL)",
    one_engine_stopped="recovered: one of two engines is stopped (SIGSTOP)",
    router_killed="error: the router in front of the engines is killed (SIGKILL)",
)
def two_engines(place: Place) -> None:
    said = place.folder / "said"
    with said.open("w") as out, place.run(*ENDLESS, "--rollout-num-gpus", "2", stdout=out.fileno()) as run:
        run.wait_steps()
        run.signal("engine", signal.SIGKILL)
        run.recovered("one_engine_killed", "a line; its requests are made again, and it is restarted")
        run.wait(lambda: "serves again" in said.read_text())
        run.signal("engine", signal.SIGSTOP)
        run.wait(lambda: "is stopped: it is restarted" in said.read_text())
        run.recovered("one_engine_stopped", "a line; its requests are made again, and it is restarted", 20)
        run.signal("router", signal.SIGKILL)
        run.error("router_killed", "EngineError: the router died (SIGKILL)", "log")
