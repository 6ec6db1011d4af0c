"""The algorithms. In the repository their files are in its folder `algos`; an installed package has
them here.
"""

from pmaprl.cli.files import ALGOS

__path__ = [str(ALGOS)]
