"""Of two operators one acts. One that slept past its Lease and whose last write arrives late does no harm."""

import pytest

from testbed.http import eventually
from testbed.operators import Fate, holder, operators
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

QUICK = {"sessionSeconds": 1, "drainSeconds": 0}


def test_one_that_slept_past_its_lease_does_no_harm(cluster, kube, edge, operator, tmp_path):
    """It is stopped (SIGSTOP) with a write under way; another takes over and carries out a newer plan; then
    the old write arrives, and at last the sleeper wakes up."""
    pool = LivePool(kube, edge, "tortured")
    deployment = ("deployment/tortured-engine", "-n", "default")
    with operators(cluster, kube, tmp_path, "sleeper", "other") as (sleeper, other):
        try:
            sleeper.start()
            pool.apply(replicas=1, rollout=QUICK)
            pool.settles(1)
            other.start()
            assert holder(kube) == "sleeper"
            assert other.writes == []

            sleeper.at_write = hold_deployment
            pool.scale(3)
            sleeper.wait_for_held()
            sleeper.pause()
            eventually(lambda: is_held_by(kube, "other"), timeout_s=60)
            pool.scale(2)
            pool.settles(2)
            slept = len(sleeper.writes)
            version = kube.get(*deployment)["metadata"]["resourceVersion"]
            acted = len(other.writes)

            sleeper.release()
            eventually(lambda: is_mended(kube, deployment, version, other, acted), timeout_s=60)
            pool.settles(2)

            sleeper.at_write = lambda write: Fate.PASS
            sleeper.resume()
            pool.scale(1)
            pool.settles(1)
            assert sleeper.writes[slept:] == []
            assert holder(kube) == "other"

            other.kill()
            pool.scale(2)
            eventually(lambda: is_held_by(kube, "sleeper"), timeout_s=60)
            pool.settles(2)
        finally:
            pool.delete()


def hold_deployment(write):
    return Fate.HOLD if "/deployments/" in write else Fate.PASS


def is_held_by(kube, identity):
    assert holder(kube) == identity


def is_mended(kube, deployment, version, other, acted):
    """Assert that the late write arrived (the version moved), and that the acting operator has written its
    own plan again."""
    found = kube.get(*deployment)
    assert found["metadata"]["resourceVersion"] != version
    assert any("/deployments/tortured-engine" in write for write in other.writes[acted:])
    assert found["spec"]["replicas"] == 2
