"""`instep.train` in TRL's words: fields of GRPOConfig and reward_funcs become the flags that mean the same."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import instep
from instep.arguments.all_flags import find
from instep.errors import ConfigError
from instep.types import Sample, Status
from instep_neighbours.settings import TRL
from instep_neighbours.trl import rewards
from instep_neighbours.trl.config import as_flags
from instep_neighbours.trl.fields import FIELDS, KNOWN, TRAINER, Config
from scripts.docs.grpo_config import markdown
from tests.assets import make_checkpoint

SEQUENCE = {"importance_sampling_level": "sequence"}
TIS = "vllm_importance_sampling_"
ROWS = [{"prompt": f"{n} + 1", "answer": str(n + 1), "level": n} for n in range(64)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["answer"]} for row in ROWS]


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    return [float(a in c) if a != "2" else None for c, a in zip(completions, answer, strict=True)]


async def short(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flags_of(args: Any = None, **more: Any) -> dict[str, Any]:
    """The flags of a call with 64 prompts, on one CPU process."""
    return as_flags("train", args, right, ROWS, None, {"device": "cpu"} | more).flags


def test_docs_are_made_from_the_table() -> None:
    path = Path(__file__).parents[2] / "docs/neighbours/trl_config.md"
    assert path.read_text() == markdown(), "python scripts/docs/grpo_config.py > docs/neighbours/trl_config.md"


def test_the_table_names_flags_that_act_and_agrees_with_that_of_the_command_line() -> None:
    assert len(FIELDS) == len(KNOWN) == 189
    for row in (*FIELDS, *TRAINER):
        named = re.findall(r"--[a-z0-9-]+", row.here)
        assert all((flag := find(name)) is not None and flag.status == "acts" for name in named), row.name
        assert (row.kind == "acts") == bool(row.here) or row.name == "args", row.name
        assert row.here or row.note, row.name
    for row in TRL:  # what one types: docs/migration.md
        for name, _, here in row.names:
            if (known := KNOWN.get(name)) is not None and known.kind == "acts" and row.flags:
                shared = set(re.findall(r"--[a-z0-9-]+", here)) & set(re.findall(r"--[a-z0-9-]+", known.here))
                assert shared or name in ("output_dir", "steps_per_generation"), name


# Calls that read every field that acts; each flag that one gives must be named by a field that is read.
CALLS: list[dict[str, Any]] = [
    {},
    {"loss_type": "sapo", "save_strategy": "no", "max_steps": 8},
    {"loss_type": "cispo", "epsilon_high": 5.0, "entropy_coef": 0.01, "off_policy_mask_threshold": 0.5},
    {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4, "delta": 2.0},
    {"use_vllm": True, "vllm_model_impl": "auto", "vllm_max_model_length": 99, "vllm_enable_sleep_mode": True},
    {"eval_strategy": "steps", "num_generations_eval": 2, "scale_rewards": "batch", "top_k": 5, "top_p": 0.9},
    {"mask_truncated_completions": True, "use_cpu": True, "chat_template_kwargs": {"a": 1}, "bf16": True},
    {"report_to": ["wandb", "tensorboard", "trackio"], "run_name": "a", "project": "b", "num_completions_to_print": 3},
    {"output_dir": "there", "resume_from_checkpoint": True, "trust_remote_code": True, "full_determinism": True},
    {"gradient_checkpointing": True, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5},
]


def test_every_field_that_acts_is_read_and_names_what_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    monkeypatch.setattr(Config, "__getitem__", lambda self, name: read.add(name) or self.values[name])
    written: set[str] = set()
    for call in CALLS:
        evaluated = ROWS[:4] if "eval_strategy" in call else None
        written |= as_flags("train", None, [right, short], ROWS, evaluated, {"use_cpu": True, **call}).flags.keys()
    idle = {name for name in read if KNOWN[name].kind != "acts"}
    assert not idle and {f.name for f in FIELDS if f.kind == "acts"} <= read
    named = {flag[2:].replace("-", "_") for f in (*FIELDS, *TRAINER) for flag in re.findall(r"--[a-z0-9-]+", f.here)}
    assert written - named <= {"reward_key", "recompute_method", "recompute_num_layers"}


def test_the_defaults_are_those_of_trl(checkpoint: Path) -> None:
    run = instep.Run(model=checkpoint, reward_funcs=right, train_dataset=CHATS, use_cpu=True)
    args = run.args
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (1, 8, 8)
    assert (args.max_tokens_per_gpu, args.num_rollout, args.rollout_max_response_len) == (1024, 192, 512)  # 3 epochs
    assert (args.lr, args.lr_decay_style, args.lr_warmup_iters, args.weight_decay) == (1e-6, "linear", 0, 0)
    assert args.calculate_per_token_loss and not args.use_kl_loss and not args.use_tis and args.rollout_shuffle
    assert args.apply_chat_template and (args.input_key, args.label_key) == ("prompt", "label") and args.group_rm
    assert (args.seed, args.rollout_seed, args.save) == (42, 42, "runs/train/checkpoints")
    assert args.custom_rm_path == f"{__name__}.right" and "changes nothing" not in str(args.notes)


def test_rows_keep_their_columns(checkpoint: Path) -> None:
    run = instep.Run(
        model=str(checkpoint),
        reward_funcs=[right, short],
        reward_weights=[1, 0.5],
        train_dataset=ROWS,
        eval_dataset={"held-out": CHATS[:2]},
        eval_strategy="steps",
        eval_steps=4,
        max_steps=8,
        device="cpu",
        torch_compile=True,
        run_name="mine",
    )
    args = run.args
    rows = [json.loads(line) for line in Path(args.prompt_data).read_text().splitlines()]
    assert rows[3] == {"prompt": "3 + 1", "metadata": {"answer": "4", "level": 3}} and not args.apply_chat_template
    assert (args.eval_interval, args.skip_eval_before_train, args.n_samples_per_eval_prompt) == (4, True, 8)
    name, file = args.eval_prompt_data
    assert name == "held-out" and json.loads(Path(file).read_text().splitlines()[1]) == CHATS[1]
    assert args.reward_key == "reward" and args.custom_rm_path == "instep_functions.rewards"
    assert any(note.startswith("torch_compile: it changes nothing here") for note in args.notes)
    assert "run_name: it changes nothing without report_to='wandb' or 'trackio'" in args.notes
    assert args.wandb_group is None
    function = run._functions[args.custom_rm_path]
    assert not set(args.custom_rm_path) & {" "} and "completions" in function.__annotations__


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("per_device", "accumulation", "slices"), [(8, 1, None), (4, 4, None), (4, 2, 8), (16, 1, 4)])
def test_batches_are_those_that_trl_would_make(
    per_device: int, accumulation: int, slices: int | None, ranks: int
) -> None:
    """Oracle: TRL's loop, one micro-step after the other, on 64 prompts for one epoch."""
    flags = flags_of(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=slices,
        num_train_epochs=1,
        actor_num_gpus_per_node=ranks,
        num_generations=4,
    )
    generations = optimizer_steps = micro_steps = trained = 0
    buffered = prompts = 0
    while True:
        if buffered == 0:
            taken = per_device * ranks * (slices or accumulation) // 4
            if prompts + taken > 64:
                break
            prompts, generations, buffered = prompts + taken, generations + 1, slices or accumulation
        buffered, micro_steps, trained = buffered - 1, micro_steps + 1, trained + per_device * ranks
        optimizer_steps += micro_steps % accumulation == 0
    assert flags["num_rollout"] == generations and flags["rollout_batch_size"] * generations == prompts
    assert flags["global_batch_size"] * optimizer_steps == trained == prompts * flags["n_samples_per_prompt"]
    assert flags["micro_batch_size"] == per_device


@dataclass
class GRPOConfig:  # as TRL's: what is not given is filled in by __post_init__
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    bf16: bool | None = None
    fp16: bool = False
    use_cpu: bool = False
    report_to: Any = "none"
    learning_rate: float = 2e-6  # the default of another version
    something_new: int = 0
    include_for_metrics: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bf16, self.report_to = self.bf16 is None or self.bf16, []
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * self.steps_per_generation


def test_a_config_counts_where_it_differs_from_its_own_defaults() -> None:
    flags = flags_of(GRPOConfig(gradient_accumulation_steps=4), temperature=0.7)
    assert (flags["rollout_batch_size"], flags["lr"], flags["rollout_temperature"]) == (4, 2e-6, 0.7)
    assert "precision" not in flags and flags_of(GRPOConfig(bf16=False))["precision"] == "fp32"
    assert flags_of({"bf16": True, "gradient_accumulation_steps": 4})["precision"] == "bf16"
    with pytest.raises(ConfigError, match="given twice"):
        flags_of(GRPOConfig(gradient_accumulation_steps=4), gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match="no field something_new"):
        flags_of(GRPOConfig(something_new=1))


def test_a_flag_of_instep_wins_over_a_default() -> None:
    flags = flags_of(lr=1e-5, use_dynamic_batch_size=True, max_tokens_per_gpu=8192, num_epoch=2, weight_decay=0.1)
    assert flags["lr"] == 1e-5 and flags["weight_decay"] == 0.1 and not {"micro_batch_size", "num_rollout"} & {*flags}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, {"calculate_per_token_loss": True}),
        ({"loss_type": "grpo", "epsilon_high": 0.28}, {"eps_clip": 0.2, "eps_clip_high": 0.28}),
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, {"constant_loss_length": 99}),
        (
            {"loss_type": "luspo", **SEQUENCE},
            {
                "constant_loss_length": 1,
                "advantage_estimator": "gspo",
                "gspo_gradient": "sequence",
                "eps_clip": 0.2,
                "eps_clip_high": 0.2,
            },
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {
                "advantage_estimator": "cispo",
                "calculate_per_token_loss": True,
                "eps_clip": 1,
                "eps_clip_high": 4.0,
            },
        ),
        (
            {"loss_type": "grpo", "beta": 0.1},
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
        ),
        (
            {"loss_type": "grpo", "use_vllm": True},
            {"use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_clip": 3.0},
        ),
        (
            {"loss_type": "grpo", "use_vllm": True, **{f"{TIS}mode": "token_truncate", f"{TIS}clip_max": 2.0}},
            {"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_clip": 2.0},
        ),
        (
            {"loss_type": "grpo", "use_vllm": True, **{f"{TIS}clip_min": 0.5, f"{TIS}clip_max": None}},
            {"use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_clip": 1e6, "tis_clip_low": 0.5},
        ),
        ({"loss_type": "grpo", "scale_rewards": False}, {"disable_grpo_std_normalization": True}),
    ],
)
def test_the_flags_of_a_loss(call: dict[str, Any], expected: dict[str, Any]) -> None:
    """What they compute is compared with TRL's own loss by tests/oracles/test_oracle_trl_config.py."""
    names = "loss eps_ kl tis rs_ opsm estimator gspo sapo normalization entropy custom_reward_post"
    found = {name: value for name, value in flags_of(**call).items() if any(part in name for part in names.split())}
    assert found == expected


def test_the_schedule_and_the_intervals() -> None:
    flags = flags_of(max_steps=40, warmup_steps=0.11, lr_scheduler_type="cosine", save_steps=8, steps_per_generation=2)
    assert (flags["lr_warmup_iters"], flags["lr_decay_style"], flags["num_rollout"]) == (5, "cosine", 20)
    assert (flags["save_interval"], flags["save_hf"]) == (4, Path("runs/train/hf"))
    kwargs = {"min_lr_rate": 0.1}
    flags = flags_of(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=kwargs, learning_rate=1e-4)
    assert flags["min_lr"] == pytest.approx(1e-5)
    assert flags_of(lr_scheduler_type="constant", warmup_steps=5)["lr_warmup_iters"] == 0  # as transformers has it


@pytest.mark.parametrize(
    ("call", "where", "what"),
    [
        ({"min_p": 0.1}, "min_p", "is not supported"),
        ({"num_iterations": 2}, "num_iterations", "trained on once"),
        ({"vllm_server_port": 9000}, "vllm_server_port", "starts and ends its engines itself"),
        ({"callbacks": [1]}, "callbacks", "is the loop"),
        ({"loss_type": "bnpo"}, "loss_type", "'bnpo' is not supported"),
        ({"loss_type": "cispo"}, "epsilon_high", "the bound of the ratio itself"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon", "no effect with loss_type sapo"),
        (
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            "importance_sampling_level",
            "ratios of tokens",
        ),
        ({"delta": 1.1}, "delta", "two-sided"),
        ({"beta": 0.1, **SEQUENCE}, "use_bias_correction_kl", "the sequence ratio in TRL"),
        ({"sync_ref_model": True}, "sync_ref_model", "no reference"),
        ({"loss_type": "dr_grpo", "entropy_coef": 0.1}, "entropy_coef", "would scale"),
        ({"generation_batch_size": 12}, "generation_batch_size", "not a multiple of 8"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "generation_batch_size", "steps_per_generation"),
        ({"per_device_train_batch_size": 6}, "num_generations", "6 completions of a rollout"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, "steps_per_generation", "within an optimizer"),
        ({"max_steps": 3, "steps_per_generation": 2}, "max_steps", "not a whole number of rollouts"),
        ({"per_device_train_batch_size": 800}, "train_dataset", "64 prompts are fewer than the 100"),
        ({"learning_rate": 1e-5, "lr": 1e-5}, "learning_rate", "learning_rate and lr have the same meaning"),
        ({"max_steps": 4, "num_rollout": 4}, "max_steps", "have the same meaning"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type", "'polynomial' is not supported"),
        ({"report_to": "mlflow"}, "report_to", "the logger 'mlflow'"),
        ({"eval_strategy": "steps"}, "eval_strategy", "nothing to evaluate"),
        ({"eval_steps": 5}, "eval_steps", "no evaluation"),
        ({"args": 7}, "args", "not a GRPOConfig"),
        ({"args": {"max_prompt_length": 7}}, "args", "no field max_prompt_length"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "none"}, "vllm_importance_sampling_mode", "'none' is not"),
    ],
)
def test_what_is_not_here_is_an_error_of_that_field(call: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        flags_of(**call)
    assert caught.value.where == where


def test_what_is_given_besides_is_checked(checkpoint: Path) -> None:
    def wrong(**more: Any) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            instep.Run(**({"model": checkpoint, "device": "cpu", "train_dataset": ROWS} | more))
        return caught.value

    assert "no parameter completions" in wrong(reward_funcs=lambda args, sample: 1.0).what
    assert "not the dotted path" in wrong(reward_funcs="org/a-reward-model").what
    assert "2 functions" in wrong(reward_funcs=[right, short], reward_weights=[1.0]).what
    assert "needs trainer_state" in wrong(reward_funcs=lambda completions, trainer_state: [1.0]).what
    assert "reward and reward_funcs say the same" in wrong(reward_funcs=right, reward="math").what
    assert "to GRPO, not to 'sft'" in wrong(command="sft").what
    assert "has no rows in order" in wrong(train_dataset="rows.jsonl", reward_funcs=right).what
    assert wrong(train_dataset=[{"text": "a"}], reward_funcs=right).where == "train_dataset[0]"
    assert "images" in wrong(train_dataset=[{"prompt": "a", "image": 1}], reward_funcs=right).what
    assert "--lr" in str(wrong(train_dataset=None, prompts=["a"], reward="math", learning_rate=1e-5))


def graded(values: list[dict[str, Any] | float], groups: list[int]) -> list[Sample]:
    pairs = zip(values, groups, strict=True)
    return [Sample(index=n, group_index=g, reward=value) for n, (value, g) in enumerate(pairs)]


def test_a_reward_of_several_functions() -> None:
    flags = rewards.flags_of([right, short, right], [1.0, 0.5, 2.0])
    found = asyncio.run(flags["custom_rm_path"](completions=["1", "22"], answer=["1", "2"]))
    assert found == [
        {"right": 1.0, "short": -1.0, "right_2": 1.0, "reward": 2.5},
        {"right": None, "short": -2.0, "right_2": None, "reward": -1.0},
    ]
    assert rewards.together({"right": right}, [1.0])(completions=["a"], answer=["2"]) == [
        {"right": None, "reward": None}
    ]


def test_scale_rewards_batch_and_normalize_then_sum() -> None:
    args, groups = SimpleNamespace(reward_key="reward"), [0, 1, 0, 1, 0, 1]
    values = [1.0, 0.0, 0.5, 4.0, 0.0, 1.0]
    raw, advantages = rewards.scaled_by_batch(args, graded(values, groups))
    means = {0: 0.5, 1: 5 / 3}
    std = statistics.stdev(values)
    assert raw == values
    assert advantages == pytest.approx([(v - means[g]) / (std + 1e-4) for v, g in zip(values, groups, strict=True)])

    both = [{"right": v, "short": 2 * v + 1, "reward": v} for v in values]
    _, advantages = rewards.normalize_then_sum([right, short], [1.0, 3.0])(args, graded(both, groups))
    stds = {g: statistics.stdev([v for v, of in zip(values, groups, strict=True) if of == g]) for g in (0, 1)}
    total = [
        (v - means[g]) / (stds[g] + 1e-4) + 3 * (2 * v - 2 * means[g]) / (2 * stds[g] + 1e-4)
        for v, g in zip(values, groups, strict=True)
    ]
    scale = statistics.stdev(total) + 1e-4
    assert advantages == pytest.approx([(x - statistics.mean(total)) / scale for x in total])


def test_truncated_completions_are_removed() -> None:
    whole, cut = Sample(status=Status.COMPLETED), Sample(status=Status.TRUNCATED)
    rewards.remove_truncated(None, [[whole, cut]])
    assert (whole.remove_sample, cut.remove_sample) == (False, True)
