"""Suites of environments, one module each.

Modules are named after the packages that they wrap, so do not run Python inside this folder.
"""
