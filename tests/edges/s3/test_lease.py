"""One driver has the prefix at a time, and no clock but one's own is asked."""

import threading

import orjson
import pytest

from genpipe.core.errors import Fenced, ObjectStoreError, TroubleKind
from genpipe.edges.s3 import lease as module
from genpipe.edges.s3.layout import LEASE
from genpipe.edges.s3.lease import Lease
from tests.edges.s3.memory_objects import MemoryObjects

TTL_S = 30.0
OWNER = {"host": "alpha", "pid": 41, "start": "2026-01-02T03:04:05"}


class Clock:
    """A monotonic clock that goes on only where somebody waits, and what happens meanwhile."""

    def __init__(self):
        self.now_s = 1000.0
        self.at = []

    def __call__(self):
        return self.now_s

    def pause(self, seconds):
        self.now_s += seconds
        while self.at and self.at[0][0] <= self.now_s:
            self.at.pop(0)[1]()

    def in_s(self, seconds, step):
        self.at.append((self.now_s + seconds, step))


class Place:
    """A prefix, a clock, and what was said."""

    def __init__(self, **objects):
        self.objects = MemoryObjects(**objects)
        self.clock = Clock()
        self.warnings = []

    def claim(self, nonce="new", *, previous_nonce=None, epoch_min=1, owner=OWNER, objects=None, ttl_s=TTL_S):
        return Lease.claim(
            objects or self.objects,
            owner=owner,
            nonce=nonce,
            previous_nonce=previous_nonce,
            epoch_min=epoch_min,
            ttl_s=ttl_s,
            pause=self.clock.pause,
            warn=self.warnings.append,
            now_s=self.clock,
        )

    @property
    def fields(self):
        return orjson.loads(self.objects.get(LEASE).data)

    def refuse(self, steps, *, key=LEASE):
        """Let so many of these steps fail."""
        left = list(steps)

        def trouble(step, at):
            if at == key and left and left[0] == step:
                left.pop(0)
                raise ObjectStoreError("away", kind=TroubleKind.UNREACHABLE)

        self.objects.trouble = trouble


@pytest.fixture(params=[True, False], ids=["conditional", "weak"])
def place(request):
    return Place(is_conditional=request.param)


@pytest.fixture
def strong():
    return Place()


def test_a_prefix_that_nobody_has_is_claimed_with_the_first_number(place):
    lease = place.claim("n1")

    assert (lease.epoch, lease.nonce) == (1, "n1")
    assert place.fields["epoch"] == 1
    assert place.fields["nonce"] == "n1"
    assert place.fields["owner"] == OWNER
    assert place.fields["released"] is False


def test_a_lease_always_tells_since_when_it_is_held(strong):
    strong.claim("n1", owner={"host": "alpha", "pid": 41})

    assert strong.fields["owner"]["start"].startswith("20")


def test_a_claim_on_a_strong_store_waits_for_nothing_and_warns_of_nothing(strong):
    strong.claim()

    assert strong.clock.now_s == 1000.0
    assert strong.warnings == []


def test_the_number_is_never_below_what_the_caller_has_seen(place):
    assert place.claim(epoch_min=7).epoch == 7


def test_a_released_lease_is_taken_at_once_with_the_next_number(strong):
    strong.claim("n1", epoch_min=4).release()
    lease = strong.claim("n2")

    assert lease.epoch == 5
    assert strong.clock.now_s == 1000.0
    assert strong.fields["nonce"] == "n2"


def test_the_dead_holder_of_the_same_folder_is_followed_at_once(strong):
    strong.claim("n1")
    lease = strong.claim("n2", previous_nonce="n1")

    assert lease.epoch == 2
    assert strong.clock.now_s == 1000.0


def test_a_lease_without_a_name_is_not_the_folder_that_had_none_before(strong):
    strong.objects.put(LEASE, b'{"epoch":3}')
    strong.claim("n2", previous_nonce=None)

    assert strong.clock.now_s - 1000.0 >= TTL_S


def test_a_silent_lease_is_watched_for_its_whole_time_and_then_taken_over(place):
    place.claim("n1", owner={**OWNER, "host": "beta", "pid": 7})
    began_s = place.clock.now_s
    looks = len(place.objects.calls)
    lease = place.claim("n2")

    assert lease.epoch == 2
    assert TTL_S <= place.clock.now_s - began_s <= 1.3 * TTL_S
    assert len([call for call in place.objects.calls[looks:] if call == ("get", LEASE)]) >= 5
    assert any("beta" in text and "pid 7" in text and "waiting 30 s" in text for text in place.warnings)
    assert any("taking it over" in text for text in place.warnings)


def test_a_holder_that_renews_seldom_is_watched_for_as_long_as_it_says(place):
    place.claim("old")
    began_s = place.clock.now_s
    place.claim("new", ttl_s=1.0)

    assert place.clock.now_s - began_s >= TTL_S


def test_no_lease_is_waited_for_for_ever_whatever_it_says(strong):
    strong.claim("old", ttl_s=1e9)
    began_s = strong.clock.now_s
    strong.claim("new")

    assert strong.clock.now_s - began_s < 2 * module.TTL_MAX_S


@pytest.mark.parametrize("seconds", [1, 15, 29.9])
def test_a_lease_that_changes_while_it_is_watched_belongs_to_somebody(place, seconds):
    first = place.claim("n1", owner={**OWNER, "host": "beta"})
    before = place.clock.now_s
    place.clock.in_s(seconds, first.renew)
    with pytest.raises(Fenced) as caught:
        place.claim("n2")

    assert "host beta, pid 41, since 2026-01-02T03:04:05" in str(caught.value)
    assert "s3://memory/run" in str(caught.value)
    assert "--s3" in str(caught.value)
    assert place.fields["nonce"] == "n1"
    assert place.clock.now_s - before <= seconds + TTL_S / module.LOOKS


def test_a_holder_that_ends_while_it_is_watched_is_followed_at_once(strong):
    first = strong.claim("n1")
    strong.clock.in_s(5, first.release)
    lease = strong.claim("n2")

    assert lease.epoch == 2
    assert strong.clock.now_s - 1000.0 < TTL_S / 2


def test_a_lease_that_vanishes_while_it_is_watched_is_written_anew_with_a_higher_number(strong):
    strong.claim("n1", epoch_min=3)
    strong.clock.in_s(5, lambda: strong.objects.delete(LEASE))
    lease = strong.claim("n2")

    assert lease.epoch == 4
    assert strong.fields["epoch"] == 4


@pytest.mark.parametrize("data", [b"", b"no json", b"[1]", b'{"epoch":"x","nonce":"n","owner":{}}', b"7"])
def test_a_lease_that_cannot_be_read_is_watched_like_any_other(strong, data):
    strong.objects.put(LEASE, data)
    lease = strong.claim("n2", epoch_min=6)

    assert lease.epoch == 6
    assert strong.clock.now_s - 1000.0 >= TTL_S
    assert strong.fields["nonce"] == "n2"


def test_a_claim_whose_reply_is_lost_is_ours(strong):
    # The port tries again by itself, and meets its own object.
    def after(step, key):
        if step == "put":
            strong.objects.after = lambda step, key: None
            strong.objects.put(key, b"", if_none_match=True)

    strong.objects.after = after
    lease = strong.claim("n1")
    lease.renew()

    assert lease.epoch == 1
    assert strong.fields["beat"] == 2


def test_two_that_claim_at_once_are_told_apart(strong):
    """Whoever comes second within another's claim is refused, wherever it comes in."""
    outcomes = []

    def other():
        strong.objects.trouble = lambda step, key: None
        outcomes.append(strong.claim("other", owner={**OWNER, "host": "beta"}).nonce)

    strong.objects.trouble = lambda step, key: other() if step == "put" else None
    with pytest.raises(Fenced, match="host beta"):
        strong.claim("n1")

    assert outcomes == ["other"]
    assert strong.fields["nonce"] == "other"


@pytest.mark.parametrize("left", ["nothing", "released", "previous", "silent"])
def test_of_many_that_claim_in_the_same_instant_one_wins(left):
    place = Place()
    if left != "nothing":
        first = place.claim("n0", epoch_min=5)
        if left == "released":
            first.release()
    together, barrier = threading.Barrier(8), threading.Barrier(8)
    won, refused = [], []

    def claim(number):
        clock = Clock()
        waited: list[float] = []

        def pause(seconds):
            # Whoever has to wait for a winner has lost; the silent one is waited for by all.
            if left != "silent" or len(waited) > module.LOOKS:
                raise Fenced("it would wait")
            waited.append(seconds)
            clock.pause(seconds)
            if clock.now_s - 1000.0 >= TTL_S:
                together.wait(5)

        barrier.wait(5)
        try:
            won.append(
                Lease.claim(
                    place.objects,
                    owner={**OWNER, "pid": number},
                    nonce=f"c{number}",
                    previous_nonce="n0" if left == "previous" else None,
                    epoch_min=1,
                    ttl_s=TTL_S,
                    pause=pause,
                    warn=lambda text: None,
                    now_s=clock,
                )
            )
        except Fenced as error:
            refused.append(error)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    (lease,) = won
    assert len(refused) == 7
    assert lease.epoch == (1 if left == "nothing" else 6)
    assert place.fields["nonce"] == lease.nonce


def test_what_a_dead_driver_sent_before_it_died_does_not_refuse_its_follower(strong):
    dead = strong.claim("n1")

    def late():
        strong.objects.trouble = lambda step, key: None
        dead.renew()

    strong.objects.trouble = lambda step, key: late() if step == "put" else None
    lease = strong.claim("n2", previous_nonce="n1")

    assert lease.epoch == 2
    assert strong.fields["nonce"] == "n2"


def test_each_renewal_is_another_object(place):
    lease = place.claim()
    etags = {place.objects.get(LEASE).etag}
    for _ in range(5):
        lease.renew()
        etags.add(place.objects.get(LEASE).etag)

    assert len(etags) == 6


def test_a_lease_that_was_taken_over_is_not_renewed(place):
    first = place.claim("n1")
    place.claim("n2", previous_nonce="n1", owner={**OWNER, "host": "beta", "pid": 9})
    with pytest.raises(Fenced, match=r"taken over by another driver .host beta, pid 9"):
        first.renew()

    assert place.fields["nonce"] == "n2"
    puts = place.objects.calls.count(("put", LEASE))
    for step in (first.renew, lambda: first.check(1e9)):
        with pytest.raises(Fenced):
            step()
    first.release()
    assert place.objects.calls.count(("put", LEASE)) == puts


def test_a_renewal_that_landed_late_is_our_own(strong):
    lease = strong.claim("n1")

    def lost(step, key):
        if step == "put":
            strong.objects.after = lambda step, key: None
            raise ObjectStoreError("no reply", kind=TroubleKind.TIMEOUT)

    strong.objects.after = lost
    with pytest.raises(ObjectStoreError):
        lease.renew()
    lease.renew()
    lease.renew()

    assert strong.fields["nonce"] == "n1"
    assert strong.fields["beat"] == 4


def test_a_lease_that_was_removed_or_damaged_is_written_anew(strong):
    lease = strong.claim("n1", epoch_min=3)
    strong.objects.delete(LEASE)
    lease.renew()
    assert strong.fields["epoch"] == 3
    strong.objects.put(LEASE, b"{")
    lease.renew()

    assert strong.fields["nonce"] == "n1"


def test_the_store_is_asked_only_if_its_last_word_is_too_old(place):
    lease = place.claim()
    calls = len(place.objects.calls)
    place.clock.pause(10)
    lease.check(15)
    assert len(place.objects.calls) == calls
    place.clock.pause(10)
    lease.check(15)
    assert place.objects.calls[-1] == ("put", LEASE)
    calls = len(place.objects.calls)
    lease.check(15)

    assert len(place.objects.calls) == calls


def test_a_word_of_the_store_is_as_old_as_the_question(strong):
    lease = strong.claim()
    strong.objects.after = lambda step, key: strong.clock.pause(20)
    lease.renew()
    strong.objects.after = lambda step, key: None
    calls = len(strong.objects.calls)
    lease.check(15)

    assert len(strong.objects.calls) == calls + 1


def test_a_store_that_is_away_fences_nobody(strong):
    lease = strong.claim()
    strong.refuse(["put", "put"])
    for _ in range(2):
        with pytest.raises(ObjectStoreError, match="away"):
            lease.renew()
    lease.renew()

    assert strong.fields["nonce"] == "new"


def test_a_word_that_did_not_come_makes_the_last_one_no_younger(strong):
    lease = strong.claim()
    strong.clock.pause(20)
    strong.refuse(["put"])
    with pytest.raises(ObjectStoreError):
        lease.check(15)
    lease.check(15)

    assert strong.fields["beat"] == 3


def test_a_released_lease_stays_and_keeps_its_number(place):
    lease = place.claim(epoch_min=4)
    lease.release()
    lease.release()
    lease.renew()

    assert place.fields["released"] is True
    assert place.fields["epoch"] == 4
    assert place.objects.calls.count(("put", LEASE)) == 2


def test_a_release_does_not_touch_anothers_lease(place):
    first = place.claim("n1")
    place.claim("n2", previous_nonce="n1")
    first.release()

    assert place.fields["nonce"] == "n2"
    assert place.fields["released"] is False


def test_a_release_that_does_not_work_says_nothing(strong):
    lease = strong.claim()
    strong.refuse(["put"])
    lease.release()

    assert strong.fields["released"] is False


def test_a_release_does_not_wait_for_a_renewal_that_hangs(strong, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    lease = strong.claim()
    hung, go_on = threading.Event(), threading.Event()

    def hang(step, key):
        hung.set()
        assert go_on.wait(5)

    strong.objects.trouble = hang
    thread = threading.Thread(target=lease.renew)
    thread.start()
    assert hung.wait(5)
    strong.objects.trouble = lambda step, key: None
    lease.release()
    assert strong.fields["released"] is False
    go_on.set()
    thread.join(5)

    assert not thread.is_alive()


def test_a_store_without_conditions_is_told_of_once():
    place = Place(is_conditional=False)
    place.claim()

    (text,) = place.warnings
    assert "ignores conditions" in text
    assert "only one driver" in text
    assert place.clock.now_s - 1000.0 >= max(1.0, TTL_S / 10)


def test_a_claim_that_another_overwrote_is_seen_where_there_are_no_conditions():
    place = Place(is_conditional=False)

    def overwrite():
        data = orjson.dumps({"epoch": 1, "nonce": "x", "owner": {"host": "beta"}, "released": False})
        place.objects.put(LEASE, data)

    place.clock.in_s(0.5, overwrite)
    with pytest.raises(Fenced, match="host beta"):
        place.claim()


def test_a_store_that_is_away_ends_a_claim(strong):
    strong.refuse(["get"])
    with pytest.raises(ObjectStoreError):
        strong.claim()


def test_a_lease_that_changes_hands_again_and_again_is_given_up(strong):
    strong.objects.put(LEASE, b"{}")

    def vanish_and_return(step, key):
        if step == "put":
            strong.objects.trouble = lambda step, key: None
            data = {"epoch": strong.objects.calls.count(("put", LEASE)), "nonce": "p", "owner": {}}
            strong.objects.put(LEASE, orjson.dumps({**data, "released": True}))
            strong.objects.trouble = vanish_and_return

    strong.objects.trouble = vanish_and_return
    with pytest.raises(Fenced, match="again and again"):
        strong.claim()
