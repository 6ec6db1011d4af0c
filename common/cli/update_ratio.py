"""How many gradient updates are due after so many environment steps, exactly."""

from fractions import Fraction
from typing import Any, NamedTuple

from common.cli.checks import LARGEST, readable
from common.cli.errors import UsageError


class UpdateRatio(NamedTuple):
    """Gradient updates per environment step, from the end of the warm-up on."""

    numerator: int
    denominator: int
    learning_starts: int  # steps of the warm-up

    @classmethod
    def of(cls, utd_ratio: float, learning_starts: int) -> "UpdateRatio":
        """The ratio as the fraction that was meant: 0.3 is 3/10."""
        return cls(*Fraction(str(utd_ratio)).as_integer_ratio(), learning_starts)

    def due(self, transitions: Any) -> Any:
        """Gradient updates due in all once so many `transitions` were stored; an integer or an array of them."""
        learned = transitions - self.learning_starts
        learned = learned * (learned > 0)
        whole, rest = learned // self.denominator, learned % self.denominator  # the product may not fit into 32 bits
        return whole * self.numerator + rest * self.numerator // self.denominator

    def check(self, transitions: int) -> None:
        """Raise UsageError where counting up to so many `transitions` needs more than the devices' 32 bit integers."""
        if self.numerator * self.denominator > LARGEST:
            raise UsageError(
                f"--utd-ratio {self.numerator / self.denominator} is too fine to count exactly: "
                "round it to four digits or fewer"
            )
        if transitions > LARGEST:
            raise UsageError(f"--total-timesteps must be at most {LARGEST:,}, got {readable(transitions)}")
        if self.due(transitions) > LARGEST:
            ratio = self.numerator / self.denominator
            raise UsageError(f"--utd-ratio {ratio} asks for more than {LARGEST:,} gradient updates")
