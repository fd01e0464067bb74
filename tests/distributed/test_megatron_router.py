"""The auxiliary losses of Megatron's routers, beside their formulas in plain torch: padding has no part in them."""

import pytest
import torch

from tests.distributed.helpers import run_ranks

EXPERTS, Z, BALANCE, TOKENS = 4, 0.02, 0.5, 6


def gradients(z: float, balance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of logits [TOKENS + 2, EXPERTS], the last two of padding: the router's, and by the formulas."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from instep.training.megatron.router import Router

    parallel_state.initialize_model_parallel()
    sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=2)
    config = TransformerConfig(**sizes, moe_z_loss_coeff=z, moe_aux_loss_coeff=balance)
    router = Router(config, ProcessGroupCollection.use_mpu_process_groups()).train()
    router.per_token = 1 / TOKENS
    logits = torch.randn(TOKENS + 2, 1, EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    padding = torch.arange(TOKENS + 2)[:, None] >= TOKENS
    probs, _ = router.routing(logits, padding)
    (probs.sum() * 0).backward()
    assert logits.grad is not None

    mine = logits.detach()[:TOKENS, 0].requires_grad_()
    share = torch.zeros(EXPERTS)
    for row in mine.topk(2).indices:
        share[row] += 1 / (2 * TOKENS)
    loss = z * mine.logsumexp(-1).square().mean() + balance * EXPERTS * (share * mine.softmax(-1).mean(0)).sum()
    loss.backward()
    return logits.grad[:, 0], torch.cat([mine.grad, torch.zeros(2, EXPERTS)])


@pytest.mark.parametrize(("z", "balance"), [(Z, 0.0), (0.0, BALANCE), (Z, BALANCE)])
def test_padding_has_no_part_in_the_losses_of_a_router(z: float, balance: float) -> None:
    got, expected = run_ranks(gradients, 1, z, balance, megatron=True)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert expected[:TOKENS].abs().min() > 0
