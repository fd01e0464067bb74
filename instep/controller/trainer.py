"""The trainer of a run: the actor and PPO's critic, their first weights, and the files that they write."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.algorithms.catalog import uses_reference
from instep.arguments.args import Args
from instep.arguments.roles import args_of_role
from instep.arguments.settings import DataSettings, ModelSettings
from instep.checkpoints.folders import (
    CRITIC,
    begin_checkpoint,
    critic_folder,
    reference_folder,
    teacher_folder,
    weights_folder,
)
from instep.checkpoints.integrity import linked_digests
from instep.checkpoints.save_markers import remove_notes, wait_written
from instep.cluster.base import Cluster
from instep.controller.role import RoleTrainer
from instep.controller.run_state import Beginning
from instep.data.tokenizer import load_tokenizer
from instep.errors import ConfigError
from instep.system.atomic import link_or_copy
from instep.training import lr_schedule

Earlier = Callable[[Path], None] | None  # see `begin_checkpoint`


class Trainer:
    """The actor, and the critic if there is one, with all their models loaded.

    Args:
        cluster: its processes are started, and have not done any work.
        beginning: the checkpoint of `--load`, and whether its run is resumed.
        num_rollout: the number of rollouts after which the learning-rate schedules end.
        scratch: the folder for the refreshed reference.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        args: Args,
        cluster: Cluster,
        beginning: Beginning,
        *,
        num_rollout: int,
        scratch: Path,
        tell: Callable[[str], None],
    ):
        self._args, self._scratch = args, scratch
        groups = [group for group in (cluster.workers, cluster.critic) if group.num_ranks]
        bound = args.worker_start_timeout
        setups = [g.start("setup", timeout=bound, per_rank=cluster.setup_requests[g.role]) for g in groups]
        layouts = [wait() for wait in setups]
        self.roles = []
        for group, layout in zip(groups, layouts, strict=True):
            own = args_of_role(args, group.role)
            rollouts = num_rollout - (args.num_critic_only_steps if group.role == "actor" else 0)
            schedule = lr_schedule.from_args(own, num_steps_of_run(args, rollouts))
            self.roles.append(RoleTrainer(own, group, layout, schedule))
        self.actor, self.critic = self.roles[0], next(iter(self.roles[1:]), None)
        goes_on = beginning.state is not None or beginning.foreign_optimizer
        self._with_optimizer = goes_on and not args.no_load_optim
        self._load_actor(beginning.checkpoint)
        if self.critic is not None:
            tell(self._load_critic(self.critic, beginning.checkpoint))
        if uses_reference(args):
            self._load_reference(beginning.checkpoint if beginning.state is not None else None)
        if args.use_opd and args.opd_type == "model":
            self._load_teacher()
        remarks = [role.workers.call("remark", timeout=bound)[0] for role in self.roles]
        for line in dict.fromkeys(line for remark in remarks for line in remark.splitlines()):
            tell(line)

    # ---- which weights they begin with ---------------------------------------------------------------------------

    def _load_actor(self, checkpoint: Path | None) -> None:
        """Load `checkpoint` from `--load`, else `--ref-load`, else `--hf-checkpoint` (slime's rule).

        The checkpoint of an adapter does not include its base: load the base first.
        """
        if checkpoint is None or self._args.lora_rank:
            self.actor.load_weights(first_weights(self._args))
        if checkpoint is not None:
            self.actor.load(checkpoint, optimizer=self._with_optimizer)

    def _load_critic(self, critic: RoleTrainer, checkpoint: Path | None) -> str:
        """Load the critic of `checkpoint`, else `--critic-load`, else the actor's weights with a new head.

        Returns:
            A line for the user: where the critic begins.
        """
        if checkpoint is not None and (checkpoint / CRITIC).is_dir():
            critic.load(checkpoint / CRITIC, optimizer=self._with_optimizer)
            return f"the critic continues from {checkpoint / CRITIC}"
        if self._args.critic_load is not None:
            path = critic_folder(self._args)
        else:
            path = first_weights(self._args) if self._args.lora_rank else checkpoint or first_weights(self._args)
        has_head = (path / CRITIC).is_dir()
        path = path / CRITIC if has_head else path
        critic.load_weights(path, fresh_head=not has_head)
        return f"the critic begins with {path}{'' if has_head else ', and a value head of zeros'}"

    # ---- reference and teacher -----------------------------------------------------------------------------------

    @property
    def _refreshed(self) -> Path:
        return self._scratch / "reference"

    def _load_reference(self, resumed: Path | None) -> None:
        """Load the refreshed reference of `--ref-update-interval`, else `--ref-load`, else `--hf-checkpoint`.

        Args:
            resumed: the checkpoint of the resumed run.
        """
        path = reference_folder(self._args)
        if resumed is not None and (resumed / "reference").is_dir():
            path = Path(shutil.copytree(resumed / "reference", self._refreshed))
        self.actor.workers.call("load_reference", path, timeout=self._args.worker_start_timeout)

    def refresh_reference(self) -> None:
        """Replace the reference by a copy of the current actor."""
        self.actor.workers.call("refresh_reference", self._refreshed, timeout=self._args.train_timeout)

    def _load_teacher(self) -> None:
        """Load the model of `--opd-teacher-load`.

        Raises:
            ConfigError: there is no such model, or its tokenizer is not the student's.
        """
        path = teacher_folder(self._args)
        if (path / "config.json").exists():
            trusted = self._args.trust_remote_code
            ours, theirs = (load_tokenizer(str(p), trusted).get_vocab() for p in (self._args.hf_checkpoint, path))
            other = [token for token, i in sorted(ours.items(), key=lambda item: item[1]) if theirs.get(token) != i]
            if other:
                what = f"{ours[other[0]]} is {other[0]!r} to the student, {theirs.get(other[0])} to the teacher"
                raise ConfigError(
                    f"the teacher has another vocabulary: {len(other)} of {len(ours)} tokens differ, token {what}",
                    where=f"--opd-teacher-load {path}",
                    remedy="distillation compares log-probs token by token: use a teacher with the student's tokenizer",
                )
        self.actor.workers.call("load_teacher", path, timeout=self._args.worker_start_timeout)

    # ---- what it leaves behind -----------------------------------------------------------------------------------

    def begin_save(
        self, root: Path, iteration: int, state: dict[str, Any], earlier: Earlier, ended: threading.Event
    ) -> Callable[[], Path]:
        """Begin to write a complete checkpoint: every role's files, the refreshed reference, the controller's `state`.

        Args:
            ended: set when the run has ended and no process writes any more.

        Returns:
            A function that ends it and returns its folder. With --async-save a thread may call it while training
            continues, but not during a refresh of the reference.
        """

        def begin(folder: Path) -> Callable[[], dict[str, str]]:
            wait = self._save_roles(self.roles, folder, ended)

            def end() -> dict[str, str]:
                if self._refreshed.is_dir():
                    shutil.copytree(self._refreshed, folder / "reference")
                return wait()

            return end

        return begin_checkpoint(root, iteration, begin, state, earlier)

    def begin_critic(self, root: Path, iteration: int, earlier: Earlier, ended: threading.Event) -> Callable[[], Path]:
        """Begin to write a checkpoint of the critic alone (--critic-save); see `begin_save`."""
        critic = [role for role in self.roles if role.is_critic]
        return begin_checkpoint(root, iteration, lambda folder: self._save_roles(critic, folder, ended), None, earlier)

    def link_critic(self, root: Path, iteration: int, whole: Path, earlier: Earlier) -> None:
        """Write a checkpoint of the critic alone, linked to the new checkpoint in `whole`."""

        def begin(folder: Path) -> Callable[[], dict[str, str]]:
            shutil.copytree(whole / CRITIC, folder / CRITIC, copy_function=link_or_copy)
            digests = linked_digests(folder, whole)
            return lambda: digests

        begin_checkpoint(root, iteration, begin, None, earlier)()

    def _save_roles(
        self, roles: list[RoleTrainer], folder: Path, ended: threading.Event
    ) -> Callable[[], dict[str, str]]:
        """Begin to write the actor's files into `folder` and the critic's into `folder/critic`, at the same time.

        Returns:
            A function that waits for the digests of the ranks' files, by name.
        """
        saves = []
        for role in roles:
            place = folder / CRITIC if role.is_critic else folder
            place.mkdir(exist_ok=True)
            saves.append((f"{CRITIC}/" if role.is_critic else "", place, role, role.begin_save(place)))
        known = {inner + n: digest for inner, _, _, wait in saves for rank in wait() for n, digest in rank.items()}
        if not self._args.async_save:
            return lambda: known
        deadline = time.monotonic() + self._args.train_timeout

        def written() -> dict[str, str]:
            for inner, place, role, _ in saves:
                for news in wait_written(place, range(role.workers.num_ranks), deadline, ended).values():
                    known.update({inner + name: digest for name, digest in news["digests"].items()})
                remove_notes(place)
            return known

        return written


def first_weights(args: ModelSettings) -> Path:
    """Return the folder of the first weights of an actor without a checkpoint."""
    if args.load and (Path(args.load) / "config.json").exists():
        return weights_folder(Path(args.load), None, "--load")
    return reference_folder(args)


def num_steps_of_run(args: DataSettings, num_rollouts: int) -> int:
    """Return the number of optimizer steps of `num_rollouts` rollouts, at least 1."""
    if num_rollouts <= 0:
        return 1
    return max(1, num_rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
