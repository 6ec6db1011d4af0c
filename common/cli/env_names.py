"""Names of environments: a bare id is gymnax's, `suite:id` another suite's, `package.module:factory` a user's own."""

HOST_SUITES = ("envpool", "gymnasium")  # their environments step on the host, not on the device


def split_name(name: str) -> tuple[str, str]:
    """Suite and id of an environment's name; the suite of a user's own is empty."""
    suite, _, rest = name.partition(":")
    if suite in HOST_SUITES:
        return suite, rest
    suite, _, rest = name.rpartition(":")
    return ("gymnax", rest) if suite in ("", "gymnax") else ("", name)


def is_custom(name: str) -> bool:
    """Whether `name` refers to a user's own code; gymnasium's `module:id` does too."""
    suite, rest = split_name(name)
    return not suite or (suite == "gymnasium" and ":" in rest)


def steps_on_host(name: str) -> bool:
    return split_name(name)[0] in HOST_SUITES
