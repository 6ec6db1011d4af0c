"""Whether an environment of envpool can draw itself on this machine.

Those of MuJoCo end the whole process where they cannot, so one of its own finds out:
`python common/envs/envpool_frames.py ID PARAMS` draws once and ends with 0 where that works.
"""

import ctypes
import json
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

LONGEST = 300  # seconds, after which it counts as one that cannot


def draws(env_id: str, env_params: dict[str, Any]) -> bool:
    """Whether `EnvpoolEnvs.frame` will work in this process too, in which envpool may not have been imported yet."""
    if not _load_graphics():
        return False
    command = [sys.executable, "-P", __file__, env_id, json.dumps(env_params)]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=LONGEST).returncode == 0
    return False


@cache
def _load_graphics() -> bool:
    """MuJoCo draws without a display by the system's EGL, if that is loaded before envpool, which has a copy of it.

    Returns whether it was in time.
    """
    in_time = "envpool" not in sys.modules
    with suppress(OSError):
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    return in_time


def _draw_once(env_id: str, env_params: dict[str, Any]) -> None:
    import envpool  # slow

    envs = envpool.make(env_id, env_type="gymnasium", num_envs=1, render_mode="rgb_array", **env_params)
    envs.reset()
    envs.render()


if __name__ == "__main__":
    _load_graphics()
    _draw_once(sys.argv[1], json.loads(sys.argv[2]))
