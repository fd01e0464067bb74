"""What a critic needs, and which flags have no effect without one."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import algorithm_of, listed, names_where
from instep.arguments.algorithm.combination import Combination, given
from instep.arguments.args import Args
from instep.arguments.concern import Problem, Settings, flag_name
from instep.arguments.model import folder_to_load, known_config
from instep.arguments.parallel import undivided, undivided_experts
from instep.arguments.roles import args_of_role
from instep.cluster.placement import num_critic_gpus
from instep.models.shape import num_experts

_NO_CRITIC = "there is no critic without PPO"
_WITH_CRITIC = names_where(lambda estimator, loss: estimator.has_critic)
_WITHOUT_CRITIC = names_where(lambda estimator, loss: not estimator.has_critic)
_ADD_CRITIC = f"leave it out, or add --advantage-estimator {listed(_WITH_CRITIC)}"
_FLAGS = (
    "--critic-load --critic-save --critic-lr --critic-lr-warmup-iters --num-critic-only-steps --value-clip "
    "--megatron-config-path"
).split()
RULES = tuple(Combination(flag, given(flag), _NO_CRITIC, _ADD_CRITIC, algorithms=_WITHOUT_CRITIC) for flag in _FLAGS)


def size(args: Settings, given: set[str]) -> Iterator[Problem]:
    for name in ("critic_num_nodes", "critic_num_gpus_per_node"):
        if name in given and not algorithm_of(args).has_critic:
            yield Problem(_NO_CRITIC, flag_name(name), _ADD_CRITIC)


def critic(args: Args, given: set[str]) -> Iterator[Problem]:
    """Check the critic's sizes and learning rates against those of the run."""
    if not num_critic_gpus(args):
        return
    if args.num_rollout is not None and args.num_critic_only_steps > args.num_rollout:
        what = f"{args.num_critic_only_steps} rollouts for the critic alone, but the run has {args.num_rollout}"
        remedy = f"use less than {args.num_rollout}: with {args.num_rollout} the actor is never trained"
        yield Problem(what, "--num-critic-only-steps", remedy)
    own = args_of_role(args, "critic")
    ranks = f"{own.world_size} ranks of the critic, which has the actor's parallel sizes"
    yield from undivided(own, ranks, "--critic-num-gpus-per-node")
    if args.train_backend == "megatron" and num_experts(known_config(args)):
        yield from undivided_experts(own, ranks, "--critic-num-gpus-per-node")
    unit = own.dp_size * (1 if args.use_dynamic_batch_size else args.micro_batch_size)
    size = args.global_batch_size
    if size is not None and (size < unit or (not args.use_dynamic_batch_size and size % unit)):
        what = f"{size} samples per step do not divide among the critic's {own.dp_size} data-parallel ranks"
        yield Problem(what, "--critic-num-gpus-per-node", "use the actor's number")
    if own.min_lr > own.lr:
        yield Problem(f"--min-lr {own.min_lr} is above the critic's {own.lr}", "--critic-lr", "raise it")
    if own.lr_decay_iters is not None and own.lr_warmup_iters >= own.lr_decay_iters:
        what = f"{own.lr_warmup_iters} is not below the {own.lr_decay_iters} steps of the decay"
        yield Problem(what, "--critic-lr-warmup-iters", f"use less than {own.lr_decay_iters}")
    yield from folder_to_load("critic_load")(args, given)
