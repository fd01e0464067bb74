"""Values that contradict each other, and paths that do not exist: found before anything is loaded.

A rule reads attributes and yields problems. A rule whose attributes could not be read from the command line is skipped,
so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from instep.algorithms.catalog import OFFLINE, algorithm_of
from instep.arguments.algorithm.critic_rules import critic
from instep.arguments.algorithm.resolve import resolve_algorithm
from instep.arguments.algorithm.rules import COMBINATIONS
from instep.arguments.args import Args
from instep.arguments.cluster_rules import engines, parallel, placement
from instep.arguments.debug_rules import debugging, derive_debug
from instep.arguments.engine_rules import derive_backend, topology
from instep.arguments.files import evaluation, paths, row_names_reward, saving
from instep.arguments.flag import http_address
from instep.arguments.parser import Problem, Scan
from instep.arguments.serving import derive_serving, serving
from instep.arguments.table import own_flags
from instep.cluster.placement import num_critic_gpus
from instep.engines.topology import responses_per_request, served_models

Rule = Callable[[Args, set[str]], Iterator[Problem]]

# What a run of on-policy distillation without a reward gets.
NO_REWARD, NO_REWARDS = "instep.rollout.teacher.no_reward", "instep.rollout.teacher.no_rewards"
_ONLY_DPO = ("dpo_beta", "dpo_label_smoothing", "chosen_key", "rejected_key")
_NOT_IN_DPO = ("calculate_per_token_loss", "constant_loss_length", "label_key", "rollout_temperature")


def validate(args: Args, scan: Scan) -> list[Problem]:
    """All problems of `args` that forbid the run, which is completed on the way (`derive` and the eval data sets).

    Those that do not forbid it become `args.notes`.
    """
    found: list[Problem] = []
    given = set(scan.given)
    for rule, reads in {"plan": PLAN_RULES, "serve": SERVE_RULES}.get(args.command, RULES):
        if not scan.broken.intersection(reads.split()):
            found += rule(args, given)
    args.notes += [f"{problem.where}: {problem.what}" for problem in found if not problem.refused]
    return [problem for problem in found if problem.refused]


def missing(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.hf_checkpoint is None:
        yield Problem("is required", "--hf-checkpoint", "the Hugging Face folder of the model")


def missing_data(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.prompt_data is None and args.rollout_global_dataset and "data_source_path" not in given:
        if args.num_rollout != 0:
            yield Problem("is required", "--prompt-data", "a jsonl or parquet file (or --data-source-path)")


def missing_batch(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.rollout_batch_size is None and args.num_rollout != 0:
        yield Problem("is required", "--rollout-batch-size", "how many prompts a rollout takes")


def length(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.num_rollout is None and args.num_epoch is None:
        yield Problem("is required", "--num-rollout", "how many rounds to run (or --num-epoch)")
    if args.num_rollout is not None and args.num_epoch is not None:
        yield Problem("says the same as --num-rollout", "--num-epoch", "give one of the two")
    if None not in (args.num_rollout, args.start_rollout_id) and args.start_rollout_id > args.num_rollout:
        yield Problem(f"is beyond --num-rollout {args.num_rollout}", "--start-rollout-id", "raise --num-rollout")
    if args.num_epoch is not None and not args.rollout_global_dataset:
        yield Problem("needs the built-in data set", "--num-epoch", "give --num-rollout")


def not_yet(args: Args, given: set[str]) -> Iterator[Problem]:
    """Values of flags that act, but not with every value."""
    if args.command in OFFLINE:
        return
    for name, algorithm in OFFLINE.items():
        if args.loss_type == algorithm.loss.type:
            remedy = f"run `instep {name}` with the same flags"
            yield Problem(f"is what `instep {name}` sets", f"--loss-type {args.loss_type}", remedy)


def offline(args: Args, given: set[str]) -> Iterator[Problem]:
    """What makes no sense where nothing is sampled, and that DPO's flags belong to it."""
    for name in _ONLY_DPO if args.command != "dpo" else _NOT_IN_DPO:
        if name in given:
            flag = "--" + name.replace("_", "-")
            what = "acts in `instep dpo` only" if args.command != "dpo" else "has no meaning for `instep dpo`"
            yield Problem(what, flag, "leave it out")
    if args.command not in OFFLINE:
        return
    if args.n_samples_per_prompt != 1:
        yield Problem(f"{args.command} reads the responses from the data", "--n-samples-per-prompt", "leave it out")
    if args.apply_chat_template:
        yield Problem(f"{args.command} reads the messages themselves", "--apply-chat-template", "leave it out")
    for name in ("eval_interval", "eval_prompt_data", "eval_config"):
        if name in given:
            flag = "--" + name.replace("_", "-")
            yield Problem("there is no engine to evaluate with", flag, "use it with `instep train`")
    loss_type = algorithm_of(args).loss.type
    if args.loss_type != loss_type:
        yield Problem(f"is {args.loss_type}, but {args.command} trains {loss_type}", "--loss-type", "leave it out")
    names = {flag.attribute: flag.name for flag in own_flags().values()}
    for name in _ONLY_RL.split():
        if name in given:
            yield Problem(f"has no meaning for `instep {args.command}`", names[name], "leave it out")


# What acts on rewards, advantages and the policy loss only; a flag that needs one of these is reported by its own rule.
_ONLY_RL = (
    "advantage_estimator rewards_normalization grpo_std_normalization normalize_advantages gamma lambd kl_coef "
    "use_kl_loss custom_advantage_function_path overlong_buffer_len eps_clip eps_clip_high eps_clip_c sapo_tau_pos "
    "sapo_tau_neg entropy_coef use_tis use_rs use_opsm use_rollout_logprobs partial_rollout group_rm critic_load "
    "critic_save critic_lr critic_lr_warmup_iters num_critic_only_steps value_clip megatron_config_path use_opd"
)


def batches(args: Args, given: set[str]) -> Iterator[Problem]:
    """samples of a rollout = global_batch_size * num_steps_per_rollout; each step is shared by all ranks."""
    if args.rollout_batch_size is None:
        return
    total = args.rollout_batch_size * args.n_samples_per_prompt
    size, steps = args.global_batch_size, args.num_steps_per_rollout
    formula = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {total} samples per rollout"
    if size is not None and steps is not None and size * steps != total:
        yield Problem(
            f"{size} x {steps} steps = {size * steps}, but {formula}",
            "--global-batch-size and --num-steps-per-rollout",
            "give only one of the two, the other follows",
        )
    elif steps is not None and total % steps:
        yield Problem(f"{formula}, which {steps} steps do not divide", "--num-steps-per-rollout", _near(total, steps))
    elif size is not None and total % size:
        yield Problem(f"{formula}, which {size} does not divide", "--global-batch-size", _near(total, size))
    else:
        args.global_batch_size = size or total // (steps or 1)
        args.num_steps_per_rollout = total // args.global_batch_size
        yield from _shares(args)


def _shares(args: Args) -> Iterator[Problem]:
    size, ranks = args.global_batch_size, args.dp_size
    unit = ranks * args.micro_batch_size
    if args.use_dynamic_batch_size and size < ranks:
        yield Problem(
            f"{size} samples a step for {ranks} data-parallel ranks", "--global-batch-size", f"at least {ranks}"
        )
    if not args.use_dynamic_batch_size and size % unit:
        yield Problem(
            f"{size} samples a step do not divide among {ranks} data-parallel ranks x {args.micro_batch_size} samples "
            "per micro-batch",
            "--global-batch-size",
            f"use {' or '.join(str(n) for n in (size // unit * unit, (size // unit + 1) * unit) if n)}, "
            "another --micro-batch-size, or --use-dynamic-batch-size",
        )


def _near(total: int, wanted: int) -> str:
    """The divisors of `total` on both sides of `wanted`."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return f"use {' or '.join(str(d) for d in below + above)}"


def dynamic_batches(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield Problem("needs --max-tokens-per-gpu", "--use-dynamic-batch-size", "give the tokens of one micro-batch")
    if args.use_dynamic_batch_size and "micro_batch_size" in given:
        yield Problem("has no effect with --use-dynamic-batch-size", "--micro-batch-size", "give one of the two")
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        yield Problem("has no effect without --use-dynamic-batch-size", "--max-tokens-per-gpu", "give both, or none")


def partial_rollouts(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        yield Problem("has no effect without --partial-rollout", "--mask-offpolicy-in-partial-rollout", "give both")


def lengths(args: Args, given: set[str]) -> Iterator[Problem]:
    whole, response = args.rollout_max_context_len, args.rollout_max_response_len
    if whole is not None and args.rollout_max_prompt_len is not None and args.rollout_max_prompt_len >= whole:
        yield Problem(f"leaves no room for a response in {whole} tokens", "--rollout-max-prompt-len", f"below {whole}")
    if args.vllm_max_model_len is not None and response is not None and response >= args.vllm_max_model_len:
        yield Problem(
            f"leaves no room for a prompt in --vllm-max-model-len {args.vllm_max_model_len}",
            f"--rollout-max-response-len {response}",
            "raise the former or lower the latter",
        )
    if args.rollout_top_k == 0 or args.rollout_top_k < -1:
        yield Problem(f"{args.rollout_top_k} keeps no token", "--rollout-top-k", "use -1 (off) or at least 1")
    if args.over_sampling_batch_size is not None and args.rollout_batch_size is not None:
        if args.over_sampling_batch_size < args.rollout_batch_size:
            yield Problem(
                f"{args.over_sampling_batch_size} is less than --rollout-batch-size {args.rollout_batch_size}",
                "--over-sampling-batch-size",
                f"use at least {args.rollout_batch_size}",
            )


def rewards(args: Args, given: set[str]) -> Iterator[Problem]:
    own_rollout = "rollout_function_path" in given or args.custom_generate_function_path is not None
    if args.command == "train" and args.rm_type is None and args.custom_rm_path is None and not own_rollout:
        if not (args.eval_config and args.num_rollout == 0) and not row_names_reward(args):
            yield Problem("no reward is named", "--rm-type", "give --rm-type math, or --custom-rm-path of your own")
    if args.rm_type is not None and args.rm_type.endswith("remote_rm") and args.rm_url is None:
        yield Problem("needs the address of a server", "--rm-type remote_rm", "give --rm-url")
    if args.group_rm and args.custom_rm_path is None:
        yield Problem("needs a reward that takes lists", "--group-rm", "give --custom-rm-path")


def precision(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.bf16 and "precision" in given and args.precision != "bf16":
        yield Problem(f"contradicts --precision {args.precision}", "--bf16", "give one of the two")


def learning_rate(args: Args, given: set[str]) -> Iterator[Problem]:
    if args.min_lr > args.lr:
        yield Problem(f"{args.min_lr} is above --lr {args.lr}", "--min-lr", "lower it")
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        yield Problem("both are given", "--lr-warmup-iters and --lr-warmup-fraction", "give one of the two")
    if args.lr_decay_iters is not None and args.lr_warmup_iters >= args.lr_decay_iters:
        yield Problem(
            f"{args.lr_warmup_iters} is not below --lr-decay-iters",
            "--lr-warmup-iters",
            f"use less than {args.lr_decay_iters}",
        )
    if args.lr_warmup_init > args.lr:
        yield Problem(f"{args.lr_warmup_init} is above --lr {args.lr}", "--lr-warmup-init", "lower it")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield Problem("needs the steps of its last decay", "--lr-decay-style WSD", "give --lr-wsd-decay-iters")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(args, name) == 1:
            yield Problem("must be below 1", "--" + name.replace("_", "-"), "0.9 and 0.999 are usual")


def loggers(args: Args, given: set[str]) -> Iterator[Problem]:
    extra = sorted(
        f.name for f in set(own_flags().values()) if f.attribute in given and f.attribute.startswith("wandb_")
    )
    if extra and not args.use_wandb:
        yield Problem("has no effect without --use-wandb", ", ".join(extra), "give both")


# Rules, and the attributes that they need to have been read. `instep plan` asks only where things go.
PLAN_RULES: tuple[tuple[Rule, str], ...] = (
    (
        topology,
        "vllm_config vllm_router_ip vllm_router_port prefill_num_servers rollout_num_gpus rollout_num_gpus_per_engine "
        "rollout_backend",
    ),
    (
        placement,
        "actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node num_gpus_per_node "
        "rollout_num_gpus rollout_num_gpus_per_engine cluster sync_way advantage_estimator vllm_config "
        "prefill_num_servers engine_port",
    ),
)
SERVE_RULES: tuple[tuple[Rule, str], ...] = (
    (missing, "hf_checkpoint"),
    (serving, ""),
    (saving, "run_dir"),
    (paths, ""),
    (engines, "rollout_num_gpus rollout_num_gpus_per_engine"),
    *PLAN_RULES,
    (precision, "precision"),
)
RULES: tuple[tuple[Rule, str], ...] = (
    (missing, "hf_checkpoint"),
    (serving, ""),
    (missing_data, "prompt_data data_source_path num_rollout"),
    (missing_batch, "rollout_batch_size num_rollout"),
    (length, "num_rollout num_epoch"),
    (not_yet, "advantage_estimator loss_type"),
    (offline, "n_samples_per_prompt loss_type"),
    *((rule, f"advantage_estimator {rule.reads}") for rule in COMBINATIONS),
    (
        batches,
        "rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout micro_batch_size "
        "actor_num_gpus_per_node tensor_model_parallel_size pipeline_model_parallel_size",
    ),
    (dynamic_batches, "max_tokens_per_gpu"),
    (partial_rollouts, ""),
    (lengths, "rollout_max_context_len rollout_max_prompt_len rollout_top_k rollout_max_response_len"),
    (rewards, "rm_type custom_rm_path rollout_function_path custom_generate_function_path eval_config num_rollout"),
    (saving, "save save_interval save_hf critic_save run_dir load ckpt_step"),
    (paths, ""),
    (
        parallel,
        "tensor_model_parallel_size pipeline_model_parallel_size actor_num_gpus_per_node recompute_method "
        "train_backend",
    ),
    (engines, "rollout_num_gpus rollout_num_gpus_per_engine"),
    *PLAN_RULES,
    (
        critic,
        "advantage_estimator num_critic_only_steps num_rollout critic_num_nodes critic_num_gpus_per_node "
        "actor_num_gpus_per_node tensor_model_parallel_size pipeline_model_parallel_size global_batch_size "
        "micro_batch_size critic_lr critic_lr_warmup_iters lr min_lr lr_decay_iters megatron_config_path",
    ),
    (precision, "precision"),
    (learning_rate, "lr min_lr lr_warmup_iters lr_warmup_fraction lr_decay_iters lr_warmup_init lr_wsd_decay_iters"),
    (evaluation, "eval_config eval_prompt_data eval_interval num_rollout"),
    (loggers, ""),
    (debugging, "load_debug_rollout_data save_debug_rollout_data save_debug_train_data num_rollout start_rollout_id"),
)


def derive_distillation(args: Args, given: set[str]) -> None:
    """slime's names of the kinds of teachers to ours; what is not said follows from what is. The teacher is enough:
    where no reward is named there is none."""
    args.opd_type = {"sglang": "engine", "megatron": "model"}.get(args.opd_type, args.opd_type)
    if not args.use_opd:
        return
    args.opd_type = args.opd_type or ("engine" if args.opd_teacher_load is None else "model")
    remote_reward = (args.rm_type or "").endswith("remote_rm")
    if args.opd_type == "engine" and args.opd_teacher_url is None and args.rm_url is not None and not remote_reward:
        args.opd_teacher_url = http_address(args.rm_url)
    if not {"rm_type", "custom_rm_path", "rollout_function_path", "custom_generate_function_path"} & given:
        if not row_names_reward(args):
            args.custom_rm_path = NO_REWARD
            args.custom_reward_post_process_path = args.custom_reward_post_process_path or NO_REWARDS


def derive(args: Args, given: dict[str, Any]) -> None:
    """Fill in what follows from other arguments. Runs before the rules; divisions that may fail are theirs."""
    if args.train_backend == "fsdp":
        args.train_backend = "hf"
    if args.bf16:
        args.precision = "bf16" if args.precision == "auto" else args.precision
    args.notes = []
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.dp_size = max(1, args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size))
    resolve_algorithm(args, given)
    if args.command in OFFLINE:
        args.rollout_num_gpus = 0
    elif args.rollout_external_engine_addrs:
        args.rollout_num_gpus = 0  # of this run
    elif args.colocate:
        trainer = args.world_size + num_critic_gpus(args)
        if args.rollout_num_gpus not in (None, trainer):
            args.notes.append(
                f"--colocate: --rollout-num-gpus {args.rollout_num_gpus} is ignored, the engines use the trainer's "
                f"{trainer}"
            )
        args.rollout_num_gpus = trainer
    elif args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine
    derive_serving(args)
    derive_debug(args)
    derive_backend(args)
    models = served_models(args) if args.command not in OFFLINE else ()
    args.topology_num_gpus = sum(model.num_gpus for model in models)
    file_decides = args.vllm_topology is not None and (args.colocate or "rollout_num_gpus" not in given)
    if file_decides and not args.debug_train_only:
        args.rollout_num_gpus = args.topology_num_gpus
    args.responses_per_request = responses_per_request(args, models) if models else 1
    args.rollout_num_engines = sum(group.num_engines for model in models for group in model.groups)
    derive_distillation(args, set(given))
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    args.run_dir = args.run_dir or f"runs/{args.command}"
    args.eval_datasets = []
