"""Environments by name, behind two interfaces: `Env` for those that step on the device, `HostEnvs` for the host's.

Here belongs what knows a suite of environments, one module for each, and what algorithms ask of spaces. `registry.py`
makes environments; the texts of `environment.py` and `host.py` are the pages to read before adding a suite. Imports
`cli` only.
"""
