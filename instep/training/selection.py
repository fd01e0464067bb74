"""Training a part of the weights: `--only-train-params-name-list` and `--freeze-params-name-list`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from instep.errors import ConfigError

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


@dataclass(frozen=True)
class Selection:
    """Which weights are trained, by regular expressions that are searched for in their names.

    Attributes:
        only: the weights that match are trained and no others; else those that match are frozen.
    """

    patterns: tuple[str, ...]
    only: bool

    @property
    def flag(self) -> str:
        return "--only-train-params-name-list" if self.only else "--freeze-params-name-list"

    def trains(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.patterns) == self.only

    def apply(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the parameters of this rank, by name, need a gradient or not (collective).

        Raises:
            ConfigError: a pattern matches no weight of any rank, or a rank has nothing to train.
        """
        for name, parameter in parameters.items():
            parameter.requires_grad_(self.trains(name))
        matched = {p for p in self.patterns if any(re.search(p, name) for name in parameters)}
        mine = matched, any(p.requires_grad for p in parameters.values()), sorted(parameters)[:3]
        found = [mine] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if idle := [p for p in self.patterns if not any(p in of_rank for of_rank, _, _ in found)]:
            raise ConfigError(
                f"{idle[0]!r} is in the name of no weight; names are like {', '.join(found[0][2])}",
                where=self.flag,
                remedy="give regular expressions that are found in names of weights",
            )
        if not all(trains for _, trains, _ in found):
            raise ConfigError(
                "nothing is left to train on some rank",
                where=self.flag,
                remedy="train a weight of each pipeline stage, or use --pipeline-model-parallel-size 1",
            )


def selection_of(args: Settings) -> Selection | None:
    """What the flags select; None: all weights are trained."""
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    patterns = only or frozen
    return Selection(tuple(patterns), bool(only)) if patterns else None
