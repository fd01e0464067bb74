"""All rules about the algorithm's flags, the combinations in the order in which docs/algorithms.md shows them."""

from instep.arguments.algorithm import advantage_rules, critic_rules, loss_rules
from instep.arguments.algorithm.combination import needing
from instep.arguments.algorithm.flags import ALGORITHM
from instep.arguments.algorithm.resolve import RESOLVERS, own_defaults

__all__ = ["COMBINATIONS", "RESOLVERS", "RULES", "own_defaults"]

_ALL = (*advantage_rules.RULES, *loss_rules.RULES, *critic_rules.RULES)
COMBINATIONS = (*_ALL, *needing([ALGORITHM]))
RULES = (*_ALL, critic_rules.size, critic_rules.critic)
