"""Adapters of suites of environments. Some are named as packages: this is no folder to run Python in."""
