"""Names of environments: a bare id is gymnax's, `suite:id` another suite's, `package.module:factory` a user's own.

A suite is one line here, with the module that makes its environments; `docs/environments.md` has the steps to add one.
"""

OWN = ""
DEVICE_SUITES = {
    "gymnax": "common.envs.gymnax_suite",
    OWN: "common.envs.own",
}
HOST_SUITES = {
    "envpool": "common.envs.envpool_suite",
    "gymnasium": "common.envs.gymnasium_suite",
}


def split_name(name: str) -> tuple[str, str]:
    """Suite and id of an environment's name."""
    suite, colon, env_id = name.partition(":")
    if not colon:
        return "gymnax", name
    if suite and suite in DEVICE_SUITES | HOST_SUITES:
        return suite, env_id
    return OWN, name


def is_custom(name: str) -> bool:
    """Whether `name` refers to a user's own code, as `package.module:factory` and `gymnasium:module:id` do."""
    return ":" in split_name(name)[1]


def steps_on_host(name: str) -> bool:
    return split_name(name)[0] in HOST_SUITES
