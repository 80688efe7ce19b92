"""A driver with fakes all around it, for tests that run it over virtual time."""

import random

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import ServerSpec
from genpipe.driver import Driver
from tests.driver.fakes import FakeSource, FakeStore, FakeTransport, RecordingReporter
from tests.driver.virtual import VirtualClock


class Rig:
    """A driver with fakes all around it."""

    def __init__(
        self,
        loop,
        *,
        count=40,
        limits=(2,),
        source=None,
        store=None,
        settings=None,
        kind=FakeTransport,
        **transport,
    ):
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.source = source or FakeSource(count)
        self.transport = kind(self.clock, **transport)
        self.store = store or FakeStore()
        self.reporter = RecordingReporter()
        specs = [ServerSpec(url=f"http://s{number}", limit=limit) for number, limit in enumerate(limits)]
        self.core = Core(
            FlowSettings(**{"ramp_s": 0.0, **(settings or {})}), specs, random.Random(1), loop.time()
        )
        self.driver = Driver(
            self.core,
            source=self.source,
            transport=self.transport,
            store=self.store,
            clock=self.clock,
            reporter=self.reporter,
        )

    @classmethod
    def from_seed(cls, loop, seed):
        """A small world with trouble of every kind."""
        rng = random.Random(seed)

        def fault(start):
            draw = rng.random()
            if draw < 0.05:
                return PromptFault("no", status=400)
            if draw < 0.1:
                return ServerFault("no answer", kind=FaultKind.BROKEN, status=200)
            if draw < 0.2:
                return ServerFault("x", kind=rng.choice(list(FaultKind)))
            return None

        return cls(
            loop,
            limits=[rng.randint(1, 5) for _ in range(rng.randint(1, 3))],
            source=FakeSource(
                rng.randint(20, 120),
                bad=range(0, 100, 9),
                chunk_max=rng.choice([3, 1000]),
                read_s=rng.choice([0.0, 0.3]),
            ),
            store=FakeStore(rng.choice([0.0, 0.003, 1.0])),
            settings={
                "group_records_max": rng.choice([3, 256]),
                "group_interval_s": rng.choice([0.025, 2.0]),
            },
            latency_s=lambda start: rng.choice([0.0, 1.0, rng.expovariate(1.0)]),
            fault=fault,
        )

    def check_saved(self):
        """What had come is durable, once; the rest is neither lost nor failed."""
        assert set(self.store.done) == set(self.transport.came)
        assert len(self.transport.came) == len(self.store.done) + self.core.late
        assert self.core.done == len(self.store.done)
        assert self.core.gave_up == len(self.store.failed)
        assert self.core.unsaved == 0
        assert self.core.in_flight == 0
        assert not self.transport.open
        self.core.check()
