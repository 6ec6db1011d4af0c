"""Whether an environment of envpool can draw itself on this machine.

Those of MuJoCo end the whole process where they cannot, so one of its own finds out:
`python common/envs/envpool_frames.py ID PARAMS WHEN` draws once and ends with 0 where that works.
"""

import ctypes
import json
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

FRAMES = {"render_mode": "rgb_array"}
LONGEST = 300  # seconds, after which it counts as one that cannot


@cache
def load_graphics() -> bool:
    """MuJoCo draws without a display by the system's EGL, if that is loaded before envpool, which has a copy of it.

    Returns whether it was in time.
    """
    in_time = "envpool" not in sys.modules
    with suppress(OSError):
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    return in_time


def draws(env_id: str, params: dict[str, Any], before_envpool: bool) -> bool:
    """Whether `EnvpoolEnvs.frame` works here with these `params`; `before_envpool` is what `load_graphics` returned."""
    when = "before" if before_envpool else "after"
    command = [sys.executable, "-P", __file__, env_id, json.dumps(params), when]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=LONGEST).returncode == 0
    return False


def _draw_once(env_id: str, params: dict[str, Any], when: str) -> None:
    if when == "before":
        load_graphics()
    import envpool  # slow

    load_graphics()
    envs = envpool.make(env_id, env_type="gymnasium", num_envs=1, **params)
    envs.reset()
    envs.render()


if __name__ == "__main__":
    _draw_once(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
