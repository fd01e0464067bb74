"""The data source of an environment: its tasks, in their order or shuffled, epoch after epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.data.dataset import load_dataset
from instep.data.mixture import Mixture
from instep.data.rows import RowFormat
from instep.data.source import RolloutDataSourceWithBuffer
from instep_neighbours.verifiers.servers import environment_of

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


class Tasks(RolloutDataSourceWithBuffer):
    """Groups of samples whose `metadata["task"]` is what verifiers calls the task's data.

    A checkpoint goes on with the task that is next; it refuses a taskset that has changed.

    Raises:
        ConfigError: the environment does not start.
    """

    def read(self, args: Settings, tokenizer: Any) -> Mixture:
        environment = environment_of(args)  # type: ignore[arg-type]  # a data source gets what hooks get
        dataset = load_dataset(str(environment.tasks()), RowFormat(), cache_path=str(environment.folder))
        return Mixture([dataset], None, args.rollout_seed if args.rollout_shuffle else None)
