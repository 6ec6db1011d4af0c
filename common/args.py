from dataclasses import dataclass
def check(*a,**k): pass
def main(*a): pass
def parse(*a): pass
@dataclass(kw_only=True)
class RunArgs:
    env: str="CartPole-v1"
    num_seeds: int=1
    eval_episodes: int=128
    dtype=None
    def __post_init__(self): pass
