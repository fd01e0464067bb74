from collections.abc import Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """A test that is the only rank of a process group; others find no group, and torch's random state as it was."""
    import torch

    state = torch.get_rng_state()
    yield
    torch.distributed.destroy_process_group()
    torch.set_rng_state(state)
