"""A file for each suite of environments. Most are named as a package: this is no folder to run
Python in.
"""
