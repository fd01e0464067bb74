"""Losses: one pure function of flat token columns each. `policy.py` combines the policy loss."""
