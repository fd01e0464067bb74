"""All combinations of the algorithm's flags, in the order in which docs/algorithms.md shows them."""

from instep.arguments.algorithm import advantage_rules, critic_rules, loss_rules

COMBINATIONS = (*advantage_rules.RULES, *loss_rules.RULES, *critic_rules.RULES)
