"""The command `pmaprl`: `pmaprl play RUN` is `python -m pmaprl.play RUN`, and so on."""

import runpy
import sys

from pmaprl.cli.startup import end_at_interrupts

COMMANDS = {
    "play": "play episodes with the policy of a run, and draw one",
    "plot": "draw learning curves of runs",
    "compare": "tell how runs ended, with intervals",
    "export": "write the policy of a run into one file",
    "check-env": "play an environment by random actions, and say what is wrong with it",
}


def main() -> None:
    """Run the command that the first word names; end with exit code 2 if there is none."""
    end_at_interrupts()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"pmaprl.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
        return
    usage = "\n".join(f"  pmaprl {command:<10} {text}" for command, text in COMMANDS.items())
    if name in ("-h", "--help"):
        print(
            f"usage: pmaprl COMMAND ...\n\n{usage}\n\npmaprl COMMAND --help shows the flags "
            "of a command."
        )
        return
    sys.exit(_refusal(name, usage))


def _refusal(name: str, usage: str) -> int:
    print(f"error: pmaprl has no command {name!r}; it has\n{usage}", file=sys.stderr)
    return 2
