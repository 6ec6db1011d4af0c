"""Names of environments: a bare id is gymnax's, `suite:id` another suite's, `package.module:factory` a user's own.

A suite is one line here; what else there is to know of it stands in its file, `common/envs/SUITE_suite.py`.
"""

from typing import Literal

OWN = ""
SUITES: dict[str, Literal["device", "host"]] = {
    "gymnax": "device",
    "pmaprl": "device",
    "brax": "device",
    "craftax": "device",
    "playground": "device",
    "jumanji": "device",
    "pgx": "device",
    "navix": "device",
    "xminigrid": "device",
    "jaxmarl": "device",
    "octax": "device",
    "envpool": "host",
    "gymnasium": "host",
}
"""Where the environments of a suite step."""


def split_name(name: str) -> tuple[str, str]:
    """Suite and id of an environment's name."""
    suite, colon, env_id = name.partition(":")
    if not colon:
        return "gymnax", name
    return (suite, env_id) if suite in SUITES else (OWN, name)


def is_custom(name: str) -> bool:
    """Whether `name` refers to a user's own code, as `package.module:factory` and `gymnasium:module:id` do."""
    return ":" in split_name(name)[1]


def steps_on_host(name: str) -> bool:
    return SUITES.get(split_name(name)[0]) == "host"
