"""Power losses on real file systems: what was acknowledged is there after the next start."""

from random import Random

import pytest

from tests.faults.mounts import CannotMountError, image
from tests.faults.power import losses

ROUNDS = 4
LOSSES = 5


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_losses_take_nothing_that_was_acknowledged(launchers, tmp_path, count, soak, kind):
    counted = count(f"power losses on {kind}")
    rng = Random(f"power {kind}")
    for round_number in range(ROUNDS * soak):
        scratch = tmp_path / f"round-{round_number}"
        scratch.mkdir()
        try:
            with image(scratch, kind) as mounted, launchers.one() as launcher:
                losses(launcher, mounted, scratch, counted, rng, times=LOSSES)
        except CannotMountError as refused:
            counted.skip(str(refused))
            pytest.skip(str(refused))
