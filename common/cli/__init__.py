"""Between a person and a program: flags and their checks, errors, whole files.

Everything here is imported before the slow libraries, so that `--help` and usage errors answer at once: it imports
nothing of the other rooms, and neither JAX nor NumPy.
"""
