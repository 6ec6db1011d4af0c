"""SAC with actors is a part of sac_pmap.py: python algos/sac_pmap.py --env envpool:HalfCheetah-v4"""

import shlex
import sys

if __name__ == "__main__":
    command = shlex.join(["python", sys.argv[0].replace("asac_pmap", "sac_pmap"), *sys.argv[1:]])
    print(f"error: sac_pmap.py trains on environments of the host too: {command}", file=sys.stderr)
    sys.exit(2)
