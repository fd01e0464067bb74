"""`instep.train(...)` and `instep.Run(...)`: the training commands in a script or a notebook.

Keywords are the command's flags with underscores. They become the words of a command line. So the same checks run, and
the same errors are raised.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from instep.errors import ConfigError, writing
from instep.system.run_context import RunContext

if TYPE_CHECKING:
    from instep.controller.round import Step

Reward = str | Callable[..., Any] | Iterable[Callable[..., Any]]

_COMMANDS = ("train", "train-async", "sft", "dpo")
_FUNCTIONS = "instep_functions"  # the module in the paths of functions that no module has
# Hooks that this process calls; the others are called by the trainer's processes.
_CALLED_HERE = frozenset(
    "custom_rm_path custom_generate_function_path custom_reward_post_process_path dynamic_sampling_filter_path "
    "rollout_sample_filter_path rollout_all_samples_process_path buffer_filter_path custom_rollout_log_function_path "
    "custom_eval_rollout_log_function_path rollout_function_path eval_function_path data_source_path "
    "custom_convert_samples_to_train_data_path rollout_sample_hook_path custom_advantage_function_path".split()
)


def train(**keywords: Any) -> dict[str, Any]:
    """Train as `instep train` or another command does, to the end.

    Args:
        keywords: those of `Run`.

    Returns:
        The summary of the run, as in `summary.json`; `model` is the folder of the last export (`save_hf`).

    Raises:
        InstepError: the flags are wrong, or the run cannot go on.
    """
    run = Run(**keywords)
    for _ in run:
        pass
    return run.summary


class Run:
    """A run whose loop belongs to the user: `for step in instep.Run(...)`. Its arguments are checked at once.

    Each step includes training and sync, and save and evaluation when they are due. While the body of the loop runs,
    the trainer and the engines wait; only the engines of `train-async` go on. When the loop ends (by its end, `break`,
    an error or Ctrl-C), all processes of the run end, and its report is written. With `save` and `load`, the next `Run`
    continues from the last checkpoint. A second loop over the same object is another session of the run. `Run` is also
    a context manager, for a loop that is stored in a variable.

    Args:
        command: "train", "train-async", "sft" or "dpo".
        model: `--hf-checkpoint`.
        prompts: `--prompt-data`, or a list of files; or texts, conversations (lists of messages) or rows (dicts) in any
            iterable, data frame, data set or dict of columns; these are written into the run's folder. The prompt of a
            row is under `prompt` or `input_key`, the optional label under `label` or `label_key`.
        eval_prompts: `--eval-prompt-data`; or rows in any form of `prompts`, or a dict of such sets by name.
        reward: a function `(args, sample) -> number` or dict, async or not; a dotted path (`--custom-rm-path`); the
            name of a built-in reward (`--rm-type`); or a list of functions, whose sum counts (`reward_weights`).
        flags: all other flags by name, as `rollout_batch_size=32`. None leaves a flag out. True gives a switch; False
            leaves it out, or gives its `--no-` form. A flag of several values takes a list, or a dict of names and
            files (`eval_prompt_data`); a JSON flag takes a dict; a flag of a hook takes the function.
        reward_funcs, train_dataset, eval_dataset, args: as in TRL's `GRPOTrainer`. With one of these, `flags` may have
            the names of `GRPOConfig` fields, and missing values have TRL's defaults (docs/neighbours/trl_config.md).

    Attributes:
        args: the checked arguments.
        summary: the summary of the last finished session; empty before.
    """

    def __init__(
        self,
        *,
        command: str = "train",
        model: str | Path | None = None,
        prompts: Any = None,
        eval_prompts: Any = None,
        reward: Reward | None = None,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        args: Any = None,
        **flags: Any,
    ):
        from instep.cli import arguments
        from instep.data.memory import listed
        from instep.system.private import private_files

        if command not in _COMMANDS:
            remedy = f"give one of {', '.join(_COMMANDS)}"
            raise ConfigError(f"unknown command {command!r}", where="command=...", remedy=remedy)
        evaluations: dict[str, list[dict[str, Any]]] = {}
        notes: list[str] = []
        if not (reward_funcs is train_dataset is eval_dataset is args is None):
            from instep.system.hooks.neighbours import added

            if not command.startswith("train"):
                what = f"TRL's reward_funcs, train_dataset and args belong to GRPO, not to {command!r}"
                raise ConfigError(what, where="instep", remedy="give prompts= and instep's own flags")
            _refuse_both("prompts", prompts, "train_dataset", train_dataset)
            _refuse_both("reward", reward, "reward_funcs", reward_funcs)
            if not (found := added("call")):
                what = "TRL's arguments are read by the package instep_neighbours, which is not installed here"
                remedy = "pip install instep: a clone on PYTHONPATH is not enough"
                raise ConfigError(what, where="instep", remedy=remedy)
            as_flags = found[0]
            flags, rows, evaluations, notes = as_flags(command, args, reward_funcs, train_dataset, eval_dataset, flags)
            prompts = prompts if rows is None else rows
        if _is_several(reward):
            from instep.rollout.rewards.several import SUM, one_of

            reward, flags = one_of(list(reward), flags.pop("reward_weights", None)), {"reward_key": SUM, **flags}
        of_reward = "custom_rm_path" if callable(reward) or (reward and "." in reward) else "rm_type"
        given = {"model": ("hf_checkpoint", model), "prompts": ("prompt_data", prompts), "reward": (of_reward, reward)}
        given["eval_prompts"] = ("eval_prompt_data", eval_prompts)
        for name, (flag, value) in given.items():
            _refuse_both(name, value, flag, flags.get(flag))
            if value is not None:
                flags[flag] = value
        with private_files():
            if prompts is not None and not isinstance(prompts, (str, Path)):
                flags |= _written(command, listed(prompts, "prompts"), flags)
            if eval_prompts is not None and not isinstance(eval_prompts, (str, Path)):
                column = flags.get("eval_input_key") or flags.get("input_key") or "prompt"
                named = isinstance(eval_prompts, Mapping) and column not in eval_prompts
                sets = eval_prompts if named else {"eval": eval_prompts}
                evaluations = {name: listed(rows, f"eval_prompts {name}") for name, rows in sets.items()}
            flags |= _evaluated(command, evaluations, flags)
            self._functions: dict[str, Callable[..., Any]] = {}
            words = list(_words(flags, self._functions))
            with self._entered(RunContext()):
                self.args = arguments(command, words)
            self.args = self.args.replace(notes=[*self.args.notes, *notes])
        self.summary: dict[str, Any] = {}
        self._session: Callable[[], Generator[Step, None, None] | None] = lambda: None

    def __iter__(self) -> Iterator[Step]:
        self.close()
        session = self._steps()
        self._session = weakref.ref(session)  # only the loop holds it, so it ends with the loop
        return session

    def _steps(self) -> Generator[Step, None, None]:
        from instep.cli import loop_of
        from instep.observability.output import lasting_output
        from instep.system.private import private_files

        context, loop = RunContext(), loop_of(self.args).steps(self.args)

        @contextlib.contextmanager
        def at_work() -> Iterator[None]:  # not in the user's part of the loop
            with self._entered(context), private_files(), lasting_output(Path(self.args.run_dir) / "logs"):
                yield

        with context.opened():
            try:
                while True:
                    with at_work():
                        try:
                            step = next(loop)
                        except StopIteration as end:
                            self.summary = end.value
                            return
                    yield step
            finally:
                with at_work():
                    loop.close()

    @contextlib.contextmanager
    def _entered(self, context: RunContext) -> Iterator[None]:
        from instep.system.hooks.user_code import functions_of_run

        with context.entered():
            functions_of_run().update(self._functions)
            yield

    def _repr_html_(self) -> str:
        """Return the run's figures and curves as of now; `display(run, display_id=True).update(run)` renews them."""
        from instep.observability.report import fragment

        return fragment(Path(self.args.run_dir))

    def close(self) -> None:
        """End the session, if one is open."""
        if (session := self._session()) is not None:
            session.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _refuse_both(name: str, value: Any, other_name: str, other: Any) -> None:
    if value is not None and other is not None:
        raise ConfigError(f"{name} and {other_name} say the same", where="instep", remedy="give one of the two")


def _evaluated(command: str, sets: Mapping[str, list[dict[str, Any]]], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write evaluation sets as prompts are written, and return their flags."""
    if not sets:
        return {}
    written = {name: _written(command, rows, {"run_dir": flags.get("run_dir")}) for name, rows in sets.items()}
    label = next((keys["label_key"] for keys in written.values() if keys["label_key"]), None)
    keys = {key: flags.get(f"eval_{key}") or flags.get(key) for key in ("input_key", "label_key")}
    keys = {"eval_input_key": keys["input_key"] or "prompt", "eval_label_key": keys["label_key"] or label}
    return {"eval_prompt_data": {name: keys["prompt_data"] for name, keys in written.items()}, **keys}


def _written(command: str, prompts: list[Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write prompts that are not in a file into the run's folder, and return their flags.

    The name of the file depends on its contents. So a resume finds it, and files of other runs are not replaced.
    """
    from instep.data.memory import as_lines
    from instep.data.rows import ENDINGS
    from instep.system.atomic import write_text

    names = [str(given) for given in prompts if isinstance(given, (str, Path))]
    if prompts and len(names) == len(prompts) and all(name.partition("@[")[0].endswith(ENDINGS) for name in names):
        return {"prompt_data": ",".join(names)}
    text, name, rows = as_lines(prompts)
    path = Path(flags.get("run_dir") or f"runs/{command}").expanduser() / name
    with writing(path, "run_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    label = "label" if any("label" in row for row in rows) else None
    keys = {"input_key": flags.get("input_key") or "prompt", "label_key": flags.get("label_key") or label}
    return {"prompt_data": path, **keys}


def _words(flags: Mapping[str, Any], functions: dict[str, Callable[..., Any]]) -> Iterator[str]:
    """Yield the keywords as words of a command line. Functions that no module has are added to `functions`."""
    from instep.arguments.all_flags import find
    from instep.arguments.config_file import typed
    from instep.arguments.extra import find_on_path

    for name, value in flags.items():
        word = "--" + name.replace("_", "-")
        flag = find(word) or find_on_path(word)
        if flag is None:
            yield f"{word}={value}" if isinstance(value, str) else word
        elif value is True:
            yield word
        elif value is not None:
            several = list(value) if _is_several(value) else value
            yield from typed(word, flag, several, partial(_typed, name, functions=functions))


def _is_several(value: Any) -> TypeGuard[Iterable[Any]]:
    of_one = isinstance(value, (str, bytes, Mapping)) or callable(value) or getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not of_one


def _typed(name: str, value: Any, functions: dict[str, Callable[..., Any]]) -> str:
    """Return one value as a user would type it."""
    value = value.item() if getattr(value, "shape", None) == () else value  # of numpy or torch
    value = value.value if isinstance(value, Enum) else value
    if callable(value):
        return _path(name, value, functions)
    if isinstance(value, (str, PathLike)):
        return str(value)
    if isinstance(value, (int, float, Mapping)):
        with contextlib.suppress(TypeError):  # of what a dict holds
            return json.dumps(value)
    remedy = "give text, numbers, a list of them or a dict of what JSON can hold"
    raise ConfigError(f"no flag takes this {type(value).__name__}", where=f"{name}=...", remedy=remedy)


def _path(name: str, function: Callable[..., Any], functions: dict[str, Callable[..., Any]]) -> str:
    """Return the dotted path of a hook that is given as a function. Add it to `functions` if no module has it."""
    module, own = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), own, None) is function:
        return f"{module}.{own}"
    if name not in _CALLED_HERE:
        raise ConfigError(
            f"{own or function!r} is in no module that the trainer's processes can import",
            where=f"{name}=...",
            remedy="put the function into a file beside this one, and import it from there",
        )
    own = getattr(function, "__name__", "")
    if not own.isidentifier() or f"{_FUNCTIONS}.{own}" in functions:
        own = name if f"{_FUNCTIONS}.{name}" not in functions else f"{name}_{len(functions)}"  # of several
    functions[path := f"{_FUNCTIONS}.{own}"] = function
    return path
