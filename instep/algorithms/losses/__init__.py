"""Losses: one pure function of flat token columns each. `policy.py` puts the policy loss together."""
