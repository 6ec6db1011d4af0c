"""Environments on the host, stepped in threads beside a learner."""
