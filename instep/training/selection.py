"""Training of a part of the weights: `--only-train-params-name-list` and `--freeze-params-name-list`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from instep.arguments.settings import ModelSettings
from instep.errors import ConfigError


@dataclass(frozen=True)
class Selection:
    """The weights to train, by regular expressions that are searched in their names.

    Attributes:
        only: train only the weights that match; otherwise freeze them.
    """

    patterns: tuple[str, ...]
    only: bool

    @property
    def flag(self) -> str:
        return "--only-train-params-name-list" if self.only else "--freeze-params-name-list"

    def trains(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.patterns) == self.only

    def apply(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set for each parameter of this rank, by name, whether it needs a gradient (collective).

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
            what = f"{idle[0]!r} matches no weight name; names are like {', '.join(found[0][2])}"
            raise ConfigError(what, where=self.flag, remedy="give regular expressions that match parts of weight names")
        if not all(trains for _, trains, _ in found):
            raise ConfigError(
                "a rank has nothing left to train",
                where=self.flag,
                remedy="train a weight of each pipeline stage, or use --pipeline-model-parallel-size 1",
            )


def selection_of(args: ModelSettings) -> Selection | None:
    """Return the selection of the flags; None: all weights are trained."""
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    patterns = only or frozen
    return Selection(tuple(patterns), bool(only)) if patterns else None
