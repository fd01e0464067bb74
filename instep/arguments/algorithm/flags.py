"""The flags of the algorithm: advantages, losses, KL."""

from instep.algorithms.catalog import ALGORITHMS, OFFLINE, listed, names_where
from instep.arguments.flag import read_flags


def _own_defaults(attribute: str) -> str:
    """Return the defaults of a flag that algorithms set themselves: `0.5 with a, 2 with b`."""
    return ", ".join(f"{a.defaults[attribute]:g} with {a.name}" for a in ALGORITHMS.values() if attribute in a.defaults)


_DEFAULT = next(iter(ALGORITHMS.values()))
_OWN_LOSS = [a for a in ALGORITHMS.values() if a.estimator == _DEFAULT.estimator and a != _DEFAULT]

ALGORITHM = read_flags(
    __file__,
    default=_DEFAULT.name,
    algorithms=tuple(ALGORITHMS),
    own_losses=listed([f"{a.name} ({a.paper})" for a in _OWN_LOSS], "and"),
    default_loss=_DEFAULT.loss.type,
    losses=(_DEFAULT.loss.type, *(a.loss.type for a in OFFLINE.values()), "custom_loss"),
    eps_clip=_own_defaults("eps_clip"),
    eps_clip_high=_own_defaults("eps_clip_high"),
    discounted=listed(names_where(lambda estimator, loss: estimator.discounts), "and"),
    with_critic=listed(names_where(lambda estimator, loss: estimator.has_critic), "and"),
)
