"""One suite for each port of ``core/ports.py``; the fake of the tests and the real thing both pass it."""

import asyncio
import contextlib
import errno
import json
import random

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, DiskFull, FaultKind, PromptFault, ServerFault, StoreError
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import Checkup, Chunk, Inquire, Probe, Prompt, ServerSpec, Start, Vitals
from genpipe.driver import Driver
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.source import FileSource
from genpipe.edges.requests import Bodies
from genpipe.edges.sglang import Endpoint, Monotonic, SglangTransport
from genpipe.edges.store import Store
from genpipe.edges.store_thread import StoreThread
from genpipe.sim.server import SimConfig, SimFleet
from tests.driver.fakes import FakeSource, FakeStore, FakeTransport, RecordingReporter
from tests.driver.virtual import VirtualClock
from tests.edges import audit
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles
from tests.edges.samples import WALL, given_up, group

# ---- Source ----


class FakeSourceCase:
    """Bad lines are those that the test names."""

    def __init__(self, tmp_path, count, *, done=(), bad=()):
        self.source = FakeSource(count, done=done, bad=bad, chunk_max=7)

    def spoil(self):
        self.source.trouble = dict.fromkeys(range(99), ConfigError("cannot read"))

    def close(self):
        pass


class FileSourceCase:
    """The same prompts, in two files."""

    def __init__(self, tmp_path, count, *, done=(), bad=()):
        texts = [None if index in bad else f"number {index}" for index in range(count)]
        self.files = [tmp_path / "a", tmp_path / "b"]
        for path, part in zip(self.files, (texts[: count // 2], texts[count // 2 :]), strict=True):
            self.write(path, part)
        self.source = FileSource(
            files=self.files,
            dialect=Dialect(),
            index_path=None,
            done=Bitmap(done),
            warn=pytest.fail,
        )

    def write(self, path, texts):
        lines = [b"{no json" if text is None else json.dumps({"prompt": text}).encode() for text in texts]
        path.write_bytes(b"".join(line + b"\n" for line in lines))

    def spoil(self):
        for path in self.files:
            path.unlink()

    def close(self):
        self.source.close()


class PackedSourceCase(FileSourceCase):
    def write(self, path, texts):
        super().write(path, texts)
        path.write_bytes(zstandard.compress(path.read_bytes()))


class ParquetSourceCase(FileSourceCase):
    def write(self, path, texts):
        parquet.write_table(pa.table({"prompt": pa.array(texts, pa.string())}), path, row_group_size=3)


@pytest.fixture(
    params=[FakeSourceCase, FileSourceCase, PackedSourceCase, ParquetSourceCase],
    ids=["fake", "jsonl", "zstd", "parquet"],
)
def source_of(request, tmp_path):
    cases = []

    def make(count, **options):
        cases.append(request.param(tmp_path, count, **options))
        return cases[-1]

    yield make
    for case in cases:
        case.close()


def read_all(case, count):
    """Chunks until the end, each of at most ``count`` records."""

    async def main():
        chunks: list[Chunk] = []
        while not chunks or not chunks[-1].exhausted:
            chunks.append(await case.source.read(count))
            assert len(chunks[-1].prompts) + len(chunks[-1].bad) <= count
        return chunks

    return asyncio.run(main())


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_a_source_gives_every_prompt_once_and_in_order(source_of, count):
    chunks = read_all(source_of(20), count)

    assert [prompt.index for chunk in chunks for prompt in chunk.prompts] == list(range(20))
    assert all(prompt.payload for chunk in chunks for prompt in chunk.prompts)


def test_a_source_leaves_out_what_is_done(source_of):
    chunks = read_all(source_of(20, done=(0, 3, 4, 19)), 6)

    left = [index for index in range(20) if index not in (0, 3, 4, 19)]
    assert [prompt.index for chunk in chunks for prompt in chunk.prompts] == left


def test_a_source_tells_of_bad_lines_which_keep_their_index(source_of):
    chunks = read_all(source_of(12, bad=(2, 11)), 5)

    assert [bad.index for chunk in chunks for bad in chunk.bad] == [2, 11]
    assert len([prompt for chunk in chunks for prompt in chunk.prompts]) == 10
    assert all(bad.reason and bad.file and bad.line >= 1 for chunk in chunks for bad in chunk.bad)


def test_a_source_with_nothing_left_says_so_at_once(source_of):
    chunks = read_all(source_of(4, done=range(4)), 100)

    assert [prompt for chunk in chunks for prompt in chunk.prompts] == []


def test_a_source_knows_the_total_at_the_end_and_no_wrong_one_before(source_of):
    case = source_of(20, done=(1,))
    before = case.source.total
    read_all(case, 4)

    assert before in (None, 20)
    assert case.source.total == 20


def test_a_source_that_cannot_be_read_is_the_operators_to_mend(source_of):
    case = source_of(20)
    case.spoil()

    with pytest.raises(ConfigError):
        read_all(case, 4)


# ---- Store ----


class FakeStoreCase:
    def __init__(self):
        self.store = FakeStore()

    async def open(self):
        return self.store

    def spoil(self):
        self.store.trouble = dict.fromkeys(range(99), StoreError("disk gone"))

    def fill(self):
        self.store.trouble = dict.fromkeys(range(99), DiskFull("no room"))

    def free(self):
        self.store.trouble = {}

    async def close(self):
        # What was begun is carried to its end.
        await asyncio.sleep(0.01)

    def durable(self):
        return sorted(self.store.done), sorted(self.store.failed)


class StoreThreadCase:
    def __init__(self):
        self.files = MemoryFiles([FOLDER])

    async def open(self):
        self.inner = Store.open(FOLDER, self.files, shard_records=4, wall=WALL, warn=pytest.fail)
        self.store = StoreThread(self.inner)
        return self.store

    def spoil(self):
        for name in ("part-000000.jsonl.open", "part-000001.jsonl.open", "failed.jsonl"):
            self.files.refuse["sync", name] = errno.EIO

    def fill(self):
        self.files.refuse["write", "part-000000.jsonl.open"] = errno.ENOSPC

    def free(self):
        self.files.refuse.clear()

    async def close(self):
        await self.store.close()

    def durable(self):
        after_power_loss = self.files.crash()
        again = Store.open(FOLDER, after_power_loss, shard_records=4, wall=WALL, warn=lambda text: None)
        done = sorted(again.done)
        again.close()
        failed = sorted(
            line["index"] for line in audit.whole_lines(after_power_loss.read(FOLDER / "failed.jsonl"))
        )
        assert max(audit.counts(after_power_loss).values(), default=1) == 1
        return done, failed


@pytest.fixture(params=[FakeStoreCase, StoreThreadCase], ids=["fake", "thread"])
def store_case(request):
    return request.param()


def test_what_a_store_has_committed_is_durable_and_what_was_given_up_is_not_done(store_case):
    async def main():
        store = await store_case.open()
        await store.commit(group(3, 1, failures=[given_up(7)], number=1))
        await store.commit(group(*range(10, 19), number=2))
        await store.close() if isinstance(store_case, StoreThreadCase) else None

    asyncio.run(main())

    assert store_case.durable() == ([1, 3, *range(10, 19)], [7])


def test_a_store_that_fails_says_so_and_what_was_durable_stays_so(store_case):
    async def main():
        store = await store_case.open()
        await store.commit(group(0, 1, number=1))
        store_case.spoil()
        with pytest.raises(StoreError):
            await store.commit(group(2, number=2))
        await store_case.close()

    asyncio.run(main())

    done, _ = store_case.durable()
    assert done[:2] == [0, 1]


def test_a_group_that_found_no_room_may_come_again(store_case):
    async def main():
        store = await store_case.open()
        await store.commit(group(0, 1, number=1))
        store_case.fill()
        for _ in range(2):
            with pytest.raises(DiskFull):
                await store.commit(group(2, 3, failures=[given_up(7)], number=2))
        store_case.free()
        space = await store.commit(group(2, 3, failures=[given_up(7)], number=2))
        assert 0 < space.free_bytes <= space.total_bytes
        assert await store.space() == space
        await store_case.close()

    asyncio.run(main())

    assert store_case.durable() == ([0, 1, 2, 3], [7])


def test_commits_that_are_begun_together_end_in_their_order(store_case):
    ended = []

    async def one(store, number, *indices):
        await store.commit(group(*indices, number=number))
        ended.append(number)

    async def main():
        store = await store_case.open()
        await asyncio.gather(one(store, 1, *range(40)), one(store, 2, 50), one(store, 3, 51))
        await store_case.close()

    asyncio.run(main())

    assert ended == [1, 2, 3]
    assert store_case.durable() == ([*range(40), 50, 51], [])


def test_a_store_carries_a_commit_to_its_end_though_its_caller_is_cancelled(store_case):
    async def main():
        store = await store_case.open()
        task = asyncio.ensure_future(store.commit(group(0, 1, 2)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store_case.close()

    asyncio.run(main())

    assert store_case.durable() == ([0, 1, 2], [])


# ---- Transport ----

ORDERS = {
    "good": "tokens=5",
    "slow": "delay=100",
    "busy": "status=503 why=queue_full retry_after=3",
    "broken": "status=500",
    "lost": "reset=1",
    "refused": "status=400",
    "abort": "finish=abort",
    "nochoices": "body=nochoices",
    "html": "body=html",
}
"""What a prompt makes its server do, in the words of the simulated one."""

FAULTS = {
    "busy": lambda: ServerFault("queue full", kind=FaultKind.BUSY, status=503, retry_after_s=3.0),
    "broken": lambda: ServerFault("internal", kind=FaultKind.BROKEN, status=500),
    "lost": lambda: ServerFault("reset", kind=FaultKind.LOST),
    "refused": lambda: PromptFault("bad", status=400),
    "abort": lambda: ServerFault("no answer", kind=FaultKind.BROKEN, status=200),
    "nochoices": lambda: ServerFault("no answer", kind=FaultKind.BROKEN, status=200),
    "html": lambda: ServerFault("no answer", kind=FaultKind.BROKEN, status=200),
}
"""The same for the fake."""

WELL, DEAD = 0, 1


@contextlib.asynccontextmanager
async def fake_transport():
    def what(start):
        return json.loads(start.prompt.payload)[0]["content"].partition("<<")[0]

    def fault(start):
        if start.server == DEAD:
            return ServerFault("refused", kind=FaultKind.UNREACHABLE)
        return FAULTS.get(what(start), lambda: None)()

    def vitals(server):
        if server == DEAD:
            return Vitals(trouble="cannot connect: refused")
        return Vitals(known=len(transport.open), mark=f"{asyncio.get_running_loop().time()}")

    transport = FakeTransport(
        VirtualClock(asyncio.get_running_loop()),
        latency_s=lambda start: 100.0 if what(start) == "slow" else 0.001,
        fault=fault,
        trouble=lambda server: (
            Checkup(trouble="cannot connect: refused", refused=True) if server == DEAD else None
        ),
        probe_s=0.001,
        vitals=vitals,
    )
    transport.reconnects = [0, 0]
    yield transport


@contextlib.asynccontextmanager
async def real_transport():
    config = SimConfig(orders=True, health_delay_s=0.0, disconnect_notice_s=0.0)
    async with SimFleet(config, [0, 0]) as fleet:
        endpoints = [Endpoint(url=url) for url in fleet.urls]
        await fleet._listeners[fleet.ports[DEAD]].close()
        async with SglangTransport(endpoints, bodies=Bodies(model="m")) as transport:
            yield transport


def with_transport(make, test):
    async def main():
        async with make() as transport, asyncio.timeout(20):
            return await test(transport)

    return asyncio.run(main())


transports = pytest.mark.parametrize("make", [fake_transport, real_transport], ids=["fake", "sglang"])


def a_start(what, server=WELL, attempt=1):
    content = f"{what}<<{ORDERS[what]}>>"
    payload = json.dumps([{"role": "user", "content": content}]).encode()
    now_s = Monotonic().now_s()
    return Start(
        attempt=attempt, prompt=Prompt(index=7, payload=payload), server=server, tries=1, started_s=now_s
    )


@transports
def test_a_transport_brings_a_reply_with_its_instants_and_finds_the_answer_in_it(make):
    async def test(transport):
        start = a_start("good")
        reply = await transport.generate(start)
        return (
            start.started_s,
            reply,
            Monotonic().now_s(),
            transport.examine(start, reply),
            transport.examine(start, reply),
        )

    started_s, reply, now_s, answer, again = with_transport(make, test)

    assert started_s <= reply.wire_s <= reply.last_s <= now_s
    assert isinstance(answer.response["content"], str)
    assert (answer.size_bytes, answer.finish_reason) == (len(reply.body), "stop")
    assert answer.output_tokens >= 1
    assert answer == again


@transports
@pytest.mark.parametrize(
    ("what", "kind", "status"),
    [("busy", FaultKind.BUSY, 503), ("broken", FaultKind.BROKEN, 500), ("lost", FaultKind.LOST, None)],
)
def test_a_transport_names_the_kind_of_a_servers_fault(make, what, kind, status):
    async def test(transport):
        with pytest.raises(ServerFault) as caught:
            await transport.generate(a_start(what))
        return caught.value

    fault = with_transport(make, test)

    assert (fault.kind, fault.status) == (kind, status)
    assert fault.wire_s is not None
    assert fault.retry_after_s == (3.0 if what == "busy" else None)
    assert "\n" not in str(fault)


@transports
def test_a_transport_blames_the_prompt_for_a_refusal(make):
    async def test(transport):
        with pytest.raises(PromptFault) as caught:
            await transport.generate(a_start("refused"))
        return caught.value

    assert with_transport(make, test).status == 400


@transports
@pytest.mark.parametrize("what", ["abort", "nochoices", "html"])
def test_a_transport_lets_a_200_land_and_sees_later_that_it_is_no_answer(make, what):
    async def test(transport):
        start = a_start(what)
        reply = await transport.generate(start)
        with pytest.raises(ServerFault) as caught:
            transport.examine(start, reply)
        return caught.value

    fault = with_transport(make, test)

    assert (fault.kind, fault.status) == (FaultKind.BROKEN, 200)


@transports
def test_a_transport_that_reaches_nobody_never_was_on_the_wire(make):
    async def test(transport):
        with pytest.raises(ServerFault) as caught:
            await transport.generate(a_start("good", server=DEAD))
        return caught.value

    assert with_transport(make, test).kind is FaultKind.UNREACHABLE


@transports
def test_a_cancelled_request_ends_at_once_and_the_next_one_works(make):
    async def test(transport):
        task = asyncio.ensure_future(transport.generate(a_start("slow")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await transport.generate(a_start("good", attempt=2))

    assert with_transport(make, test).body


@transports
@pytest.mark.parametrize("ask", [False, True])
def test_a_probe_says_nothing_of_a_server_that_is_well_and_one_line_of_one_that_is_not(make, ask):
    async def test(transport):
        return [await transport.probe(Probe(server=server, ask=ask)) for server in (WELL, DEAD)]

    well, dead = with_transport(make, test)

    assert well == Checkup(asked=ask)
    assert dead == Checkup(trouble=dead.trouble, refused=True)
    assert dead.trouble
    assert "\n" not in dead.trouble


@transports
def test_an_inquiry_counts_what_a_server_has_and_says_in_one_line_why_another_says_nothing(make):
    async def test(transport):
        task = asyncio.ensure_future(transport.generate(a_start("slow")))
        await asyncio.sleep(0.05)
        busy = await transport.inquire(Inquire(server=WELL, timeout_s=5.0))
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.05)
        idle = await transport.inquire(Inquire(server=WELL, timeout_s=5.0))
        return busy, idle, await transport.inquire(Inquire(server=DEAD, timeout_s=5.0))

    busy, idle, dead = with_transport(make, test)

    assert (busy.trouble, busy.known, idle.known) == (None, 1, 0)
    assert 0.0 <= busy.age_s < 2.0
    assert None not in (busy.mark, idle.mark)
    assert busy.mark != idle.mark
    assert dead == Vitals(trouble=dead.trouble)
    assert dead.trouble
    assert "\n" not in dead.trouble


@transports
def test_a_transport_counts_what_it_sent_again_by_server(make):
    async def test(transport):
        await transport.generate(a_start("good"))
        return list(transport.reconnects)

    assert with_transport(make, test) == [0, 0]


# ---- all of them together ----


@transports
def test_a_driver_gets_a_run_done_over_any_transport(make):
    """One server is dead and the other one does all."""

    async def test(transport):
        core = Core(
            FlowSettings(ramp_s=0.0),
            [ServerSpec(url=f"http://s{number}", limit=4) for number in range(2)],
            random.Random(1),
            Monotonic().now_s(),
        )
        store, source = FakeStore(), Worded(12)
        driver = Driver(
            core,
            source=source,
            transport=transport,
            store=store,
            clock=Monotonic(),
            reporter=RecordingReporter(),
        )
        await driver.run()
        core.check()
        return sorted(store.done)

    assert with_transport(make, test) == list(range(12))


class Worded(FakeSource):
    """Prompts with words in them."""

    async def read(self, count):
        chunk = await super().read(count)
        payload = b'[{"role":"user","content":"good<<tokens=3>>"}]'
        prompts = tuple(Prompt(index=prompt.index, payload=payload) for prompt in chunk.prompts)
        return type(chunk)(prompts=prompts, exhausted=chunk.exhausted)
