"""The keywords of `instep.train` and `instep.Run` are the flags of the command line, with the same checks."""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import instep
from instep.api import _CALLED_HERE
from instep.cli import arguments
from instep.data.dataset import check_file, load_dataset
from instep.data.formats import row_format
from instep.data.rows import RowFormat, split_files
from instep.errors import ConfigError, DataError, InstepError
from instep.preflight import inputs
from instep.rollout.rewards.dispatch import trl_arguments as rewards_of_trl
from instep.system import hooks
from instep.system.run_context import RunContext
from instep.types import Sample
from tests.assets import make_checkpoint, make_tokenizer
from tests.command_line import argv, keywords, make_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    make_folder(tmp_path, monkeypatch)
    Path("model").rename("no_model")
    Path("model").symlink_to(checkpoint)


def reward(args: Any, sample: Any) -> float:
    return 1.0


def graded(completions: Any, level: Any, **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def args_of(extra: str = "", **more: Any) -> dict[str, Any]:
    return vars(instep.Run(**{**keywords(argv(f"--device cpu {extra}")), **more}).args)


def test_keywords_are_the_flags() -> None:
    words = argv("--device cpu --rollout-temperature 0.7 --colocate --weight-sync shm --adam-beta2 0.9")
    assert vars(instep.Run(**keywords(words)).args) == vars(arguments("train", words))
    given = args_of(
        lr=1e-3,
        colocate=False,  # a switch that is not given
        offload_train=False,
        save=None,
        rollout_stop=["END", "x y"],
        apply_chat_template_kwargs={"enable_thinking": False},
        eval_prompt_data={"held-out": Path("data.jsonl")},
        eval_interval=1,
        vllm_max_num_seqs=8,
    )
    words = [
        *argv("--device cpu --lr 1e-3 --no-offload-train --eval-prompt-data held-out data.jsonl --eval-interval 1"),
        *("--rollout-stop", "END", "x y", "--vllm-max-num-seqs", "8"),
        *("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
    ]
    assert given == vars(arguments("train", words))


class Kind(Enum):
    HF = "hf"


@pytest.mark.parametrize(
    ("flag", "value", "meant"),
    [
        *(("rollout_shuffle", value, True) for value in (True, 1, np.True_, "true")),
        *(("rollout_shuffle", value, False) for value in (0, np.False_, "no")),
        *(("rollout_batch_size", value, 4) for value in (4.0, np.int64(4), torch.tensor(4), "4e0")),
        *(
            ("rollout_stop_token_ids", value, [1, 2])
            for value in ((1, 2), np.array([1, 2]), range(1, 3), {1: 0, 2: 0}.keys())
        ),
        ("rollout_stop", {"\n"}, ["\n"]),
        ("rollout_stop", "\n", ["\n"]),
        ("rollout_stop", (stop for stop in ("--end", "-x", " ")), ["--end", "-x", " "]),
        ("train_backend", Kind.HF, "hf"),
        ("save", Path("~/x"), str(Path("~/x").expanduser())),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_are_taken_as_they_are_meant(flag: str, value: Any, meant: Any) -> None:
    assert args_of(**{flag: value})[flag] == meant


def test_other_commands_take_their_own_flags() -> None:
    words = argv("--device cpu --max-staleness 2")
    run = instep.Run(command="train-async", **keywords(words))
    assert vars(run.args) == vars(arguments("train-async", words)) and run.args.run_dir == "runs/train-async"
    with pytest.raises(ConfigError, match="acts in `instep train-async` only"):
        instep.Run(**keywords(words))
    with pytest.raises(ConfigError, match="unknown command 'train_async'"):
        instep.Run(command="train_async", **keywords(words))
    row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    flags = keywords(argv("--device cpu", "--hf-checkpoint --prompt-data --rm-type --label-key --input-key"))
    flags = {"model": "model", "prompts": [row], "input_key": "messages", "lr": 1e-3, **flags}
    drop = ("n_samples_per_prompt", "rollout_max_response_len")
    args = instep.Run(command="sft", **{name: value for name, value in flags.items() if name not in drop}).args
    assert args.command == "sft" and args.prompt_data.startswith("runs/sft/prompts-")


def test_model_prompts_and_reward() -> None:
    base = keywords(argv("--device cpu", "--hf-checkpoint --prompt-data --rm-type --label-key"))
    rows = [{"prompt": "1 + 1", "label": 2}, {"prompt": [{"role": "user", "content": "2?"}], "label": "2"}]
    args = instep.Run(model=Path("model"), prompts=rows, reward=reward, run_dir="here", **base).args
    assert args.hf_checkpoint == "model" and args.custom_rm_path == f"{__name__}.reward"
    assert (args.input_key, args.label_key) == ("prompt", "label")
    assert [json.loads(line) for line in Path(args.prompt_data).open()] == rows and args.prompt_data.startswith("here/")
    assert Path(args.prompt_data).stat().st_mode & 0o077 == 0
    again = instep.Run(model="model", prompts=rows, reward="math", run_dir="here", **base).args
    other = instep.Run(model="model", prompts=["3"], reward=f"{__name__}.reward", run_dir="here", **base).args
    assert again.prompt_data == args.prompt_data != other.prompt_data and other.label_key is None
    assert (again.rm_type, again.custom_rm_path) == ("math", None) and other.custom_rm_path == args.custom_rm_path
    named = instep.Run(model="model", prompts="data.jsonl", reward="math", label_key="label", **base).args
    assert (named.prompt_data, named.input_key) == ("data.jsonl", "input")


ROWS = [{"prompt": "1 + 1", "label": 2, "level": 1}, {"prompt": "2 + 2", "label": 4, "level": 2}]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
FORMS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(ROWS),
    "generator": lambda: (row for row in ROWS),
    "columns": lambda: COLUMNS,
    "numpy columns": lambda: {name: np.array(values) for name, values in COLUMNS.items()},
    "numpy values": lambda: [{**row, "label": np.int64(row["label"]), "level": np.array(row["level"])} for row in ROWS],
    "pyarrow": lambda: pytest.importorskip("pyarrow").Table.from_pylist(ROWS),
    "pandas": lambda: pytest.importorskip("pandas").DataFrame(ROWS),
    "polars": lambda: pytest.importorskip("polars").DataFrame(ROWS),
    "datasets": lambda: pytest.importorskip("datasets").Dataset.from_list(ROWS),
    "iterable": lambda: pytest.importorskip("datasets").Dataset.from_list(ROWS).to_iterable_dataset(),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_taken_in_every_form(form: str) -> None:
    base = keywords(argv("--device cpu", "--hf-checkpoint --prompt-data --rm-type --label-key"))
    for name, more in (
        ("prompts", base | {"reward": "math"}),
        ("train_dataset", {"device": "cpu", "reward_funcs": graded}),
    ):
        args = instep.Run(model="model", **more, **{name: FORMS[form]()}).args
        rows = list(load_dataset(args.prompt_data, row_format(args)))
        assert [(row.prompt, row.label, row.metadata) for row in rows] == [
            (row["prompt"], row["label"], {"level": row["level"]}) for row in ROWS
        ]
        assert [row.where for row in rows] == ["prompts[0]", "prompts[1]"]
    samples = [Sample(label=row.label, metadata=row.metadata) for row in rows]
    assert rewards_of_trl(args, samples)["level"] == [1, 2]


def test_files_may_be_a_list() -> None:
    base = keywords(argv("--device cpu", "--prompt-data"))
    Path("more.json").write_text(Path("data.jsonl").read_text())  # JSON lines under another name
    for files in (["data.jsonl", "more.json"], [Path("data.jsonl"), Path("more.json")], "data.jsonl, more.json"):
        args = instep.Run(prompts=files, **base).args
        first, second = (load_dataset(file, row_format(args)) for file in split_files(args.prompt_data))
        assert [row.prompt for row in first] == [row.prompt for row in second]


class Split(list[Any]):
    column_names = ("prompt",)  # as of datasets.Dataset


@pytest.mark.parametrize(
    "prompts,where,what",
    [
        ({"train": Split(ROWS), "test": Split()}, "prompts", "(?s)2 data sets: train, test.*prompts=data.'train'."),
        ({"prompt": ["a", "b"], "label": [1]}, "prompts", "not of columns of one length"),
        ({"prompt": "a"}, "prompts", "not of columns of one length"),
        ({"a", "b"}, "prompts", "is a set, which has no rows in order"),
        (b"ab", "prompts", "is a bytes"),
        (7, "prompts", "is a int"),
        (["a", 7], "prompts[1]", "the prompt is no JSON: int 7"),
        ([Path("a.txt")], "prompts[0]", "no JSON: PosixPath"),
        (["a", {"prompt": "b", "label": {1}}], "prompts[1]", "no JSON: set {1}"),
        (["a", ""], "prompts[1]", "'prompt' is empty"),
        (
            [[{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]],
            "prompts[0]",
            "ends in an assis",
        ),
        ([], "", "there are no rows"),
    ],
)
def test_what_is_no_rows_is_refused_by_its_place(prompts: Any, where: str, what: str) -> None:
    base = keywords(argv("--device cpu", "--hf-checkpoint --prompt-data --rm-type --label-key"))
    with pytest.raises(InstepError, match=what) as caught:
        inputs.check_inputs(instep.Run(model="model", prompts=prompts, reward=reward, **base).args)
    assert caught.value.where == where or not where


def test_a_token_that_the_model_does_not_have_is_named_by_its_row(tmp_path: Path) -> None:
    """The tokenizer has one token more than the model, a line break; nothing has been loaded."""
    small = make_checkpoint(tmp_path / "small", vocab_size=len(make_tokenizer()) - 1)
    base = keywords(argv("--device cpu --rm-type random", "--hf-checkpoint --prompt-data --label-key --input-key"))
    run = instep.Run(model=small, prompts=["1 + 1", "2 +\n2"], **base)
    with pytest.raises(DataError, match="token 52 of the tokenizer, the model has 52 tokens") as caught:
        next(iter(run))
    assert caught.value.where == "prompts[1]" and not list(Path(run.args.run_dir).glob("logs/*"))


def loaded(run: instep.Run, path: str) -> Any:
    """The function that the hooks of the run find at `path`."""
    with run._entered(RunContext()):
        return hooks.load_function(path)


def test_functions_that_no_module_has() -> None:
    base = keywords(argv("--device cpu", "--rm-type"))
    for answer in (1.0, 2.0):  # a cell of a notebook is run twice

        def score(args: Any, sample: Any) -> float:
            return answer  # noqa: B023

        run = instep.Run(reward=score, dynamic_sampling_filter_path=lambda args, group: True, **base)
        assert run.args.custom_rm_path == "instep_functions.score"
        assert loaded(run, run.args.custom_rm_path)(None, None) == answer
    assert run.args.dynamic_sampling_filter_path == "instep_functions.dynamic_sampling_filter_path"
    with pytest.raises(ConfigError, match="no module that the trainer's processes can import"):
        instep.Run(reward=score, custom_tis_function_path=lambda: None, **base)


def test_functions_of_sample_hooks_and_advantages() -> None:
    """Those of one flag may be several, in a list; a function of a module goes by its name."""
    base = keywords(argv("--device cpu"))
    hook = "rollout_sample_hook_path"

    def found(value: Any) -> list[Any]:
        run = instep.Run(**base, **{hook: value})
        return [loaded(run, path) for path in run.args.rollout_sample_hook_path]

    one, two = (lambda args, sample: None), (lambda args, sample: sample)
    assert found(one) == [one] and found([one, two, reward]) == [one, two, reward]
    assert found(f"{__name__}.reward") == [reward]
    run = instep.Run(**base, custom_advantage_function_path=two)
    assert loaded(run, run.args.custom_advantage_function_path) is two


async def slow(args: Any, sample: Any) -> float:
    return 3.0


@pytest.mark.parametrize(("more", "total"), [({}, 4.0), ({"reward_weights": [1, 0.5]}, 2.5)])
def test_several_rewards_are_added_up(more: dict[str, Any], total: float) -> None:
    base = {**keywords(argv("--device cpu")), "rm_type": None}
    both = instep.Run(**base, reward=[reward, slow], **more)
    assert both.args.reward_key == "reward"
    found = asyncio.run(loaded(both, both.args.custom_rm_path)(None, Sample()))
    assert found == {"reward_0": 1.0, "slow": 3.0, "reward": total}
    at_once = instep.Run(**base, reward=(reward for _ in "ab"), reward_key="reward_1")
    assert loaded(at_once, at_once.args.custom_rm_path)(None, None)["reward"] == 2.0
    assert at_once.args.reward_key == "reward_1"


@pytest.mark.parametrize(
    ("given", "names", "label"),
    [
        ([{"prompt": "1+1=", "label": "2"}], ["eval"], "label"),
        ({"prompt": ["1+1="], "label": ["2"]}, ["eval"], "label"),
        ({"easy": [{"prompt": "1", "label": "1"}], "hard": [{"prompt": "2", "label": "2"}]}, ["easy", "hard"], "label"),
        ([{"prompt": "1+1=", "answer": "2"}], ["eval"], "answer"),
    ],
)
def test_rows_to_evaluate_on(given: Any, names: list[str], label: str) -> None:
    more = {} if label == "label" else {"eval_label_key": label}
    sets = args_of("--eval-interval 1 --rm-type math", eval_prompts=given, **more)["eval_datasets"]
    assert [one.name for one in sets] == names and {one.label_key for one in sets} == {label}
    assert all(one.input_key == "prompt" and check_file(one.path, RowFormat("prompt", label)) for one in sets)


def test_each_hook_is_called_by_this_process_or_by_the_trainer() -> None:
    acting = runpy.run_path(str(Path(__file__).parents[2] / "scripts/docs/hooks.py"))["acting"]
    of_trainer = {flag.name.removeprefix("--").replace("-", "_") for flag in acting()} - _CALLED_HERE
    of_megatron = {name for name in of_trainer if "megatron" in name} | {"custom_model_provider_path", "spec"}
    of_loss = {f"custom_{name}_function_path" for name in ("loss", "tis", "pg_loss_reducer")}
    assert of_trainer == of_megatron | of_loss | {"rollout_data_postprocess_path"}


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"rolout_batch_size": 4}, "did you mean --rollout-batch-size"),
        ({"rolout_batch_size": False}, "did you mean --rollout-batch-size"),
        ({"colocated": None}, "did you mean --colocate"),
        ({"lr": False}, "is not a number"),
        ({"lr": object()}, "no flag takes this object"),
        ({"rollout_stop": b"END"}, "no flag takes this bytes"),
        ({"rollout_stop": [["END"]]}, "no flag takes this list"),
        ({"apply_chat_template_kwargs": {"tools": {1}}}, "no flag takes this dict"),
        ({"reward": [reward, "math"], "rm_type": None}, "rewards is not a function, or has no weight"),
        (
            {"reward": [reward], "reward_weights": [1, 2], "rm_type": None},
            "rewards is not a function, or has no weight",
        ),
        ({"callbacks": [print]}, "`for step in instep.Run(...)` is the loop"),
        ({"eval_prompts": ["a"], "eval_prompt_data": "data.jsonl"}, "eval_prompts and eval_prompt_data say the same"),
        ({"tokenizer": reward}, "the folder of --hf-checkpoint has it"),
        ({"run_name": "mine"}, "use --wandb-group (with --use-wandb)"),
        ({"prompt_data": ["data.jsonl", "b.jsonl"]}, "join the files by commas: data.jsonl,b.jsonl"),
        ({"eval_prompt_data": ["data.jsonl", "data.jsonl"]}, "each file has a name before it"),
        ({"lr": "fast"}, "is not a number"),
        ({"colocate": 2}, "takes only true or false as value"),
        ({"num_epoch": 2}, "says the same as --num-rollout"),
        ({"model": "m"}, "model and hf_checkpoint say the same"),
        ({"reward": "dapo"}, "reward and rm_type say the same"),
    ],
)
def test_what_is_wrong_is_refused(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        args_of(**flags)
    assert what in str(caught.value)


def test_import_instep_is_light() -> None:
    code = "import sys, instep; print({'torch', 'transformers', 'numpy', 'aiohttp'} & {*sys.modules}, instep.train)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("set() <function train")


def test_two_runs_keep_their_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(args: Any) -> Iterator[float]:
        for _ in range(2):
            yield hooks.load_function(args.custom_rm_path)()

    monkeypatch.setattr("instep.train_sync.steps", steps)  # which calls a reward, and starts nothing
    given = keywords(argv(""))
    given.pop("rm_type", None)
    runs = [instep.Run(reward=lambda *_, n=n: n, **given) for n in (1, 2)]
    assert list(zip(*runs, strict=True)) == [(1, 2)] * 2
    assert [list(run) for run in runs] == [[1, 1], [2, 2]]


def test_a_module_that_is_loaded_again_gives_its_new_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "again.py").write_text("def score(args, sample):\n    return 1.0\n")
    base = keywords(argv("--device cpu", "--rm-type"))
    module = importlib.import_module("again")
    run = instep.Run(reward=module.score, **base)
    assert loaded(run, run.args.custom_rm_path)(None, None) == 1.0
    (tmp_path / "again.py").write_text("def score(args, sample):\n    return 2.00\n")
    importlib.reload(module)
    run = instep.Run(reward=module.score, **base)
    assert loaded(run, run.args.custom_rm_path)(None, None) == 2.0
