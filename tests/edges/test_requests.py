"""Bodies of requests: what all share, what a record adds, and that each name stands there once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genpipe.core.errors import ConfigError, PromptFault
from genpipe.core.values import Prompt
from genpipe.edges import strict_json
from genpipe.edges.requests import TAILS_KEPT, Bodies, demand_names

RID = "0123456789abcdef0123456789abcdef"


def prompt_of(payload=b'"hi"', member="prompt", **own):
    return Prompt(index=0, payload=payload, member=member, **own)


def names_once(pairs):
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


def read(body):
    return json.loads(body, object_pairs_hook=names_once)


# ---- one body an endpoint ----


@pytest.mark.parametrize(
    ("api", "path", "member", "body"),
    [
        (
            "chat",
            "/v1/chat/completions",
            "messages",
            b'{"messages":["hi"],"model":"m","top_p":0.5,"max_tokens":9,"priority":1,"rid":"%s"}',
        ),
        (
            "completions",
            "/v1/completions",
            "prompt",
            b'{"prompt":["hi"],"model":"m","top_p":0.5,"max_tokens":9,"priority":1,"rid":"%s"}',
        ),
        (
            "generate",
            "/generate",
            "input_ids",
            b'{"input_ids":["hi"],"sampling_params":{"top_p":0.5,"max_tokens":9},"priority":1,"rid":"%s"}',
        ),
    ],
)
def test_the_body_of_each_endpoint(api, path, member, body):
    bodies = Bodies(model="m", api=api, sampling={"top_p": 0.5, "max_tokens": 9}, extra_body={"priority": 1})

    assert bodies.path == path
    prompt = prompt_of(b'["hi"]', member)
    assert bodies.encode(prompt, RID) == body % RID.encode()
    assert bodies.encode(prompt, None) == (body % RID.encode()).replace(b',"rid":"%s"' % RID.encode(), b"")


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_without_options_a_body_is_an_object_too(api):
    body = read(Bodies(model='a "model"', api=api).encode(prompt_of(), None))

    assert body.pop("model", 'a "model"') == 'a "model"'
    assert body in ({"prompt": "hi"}, {"prompt": "hi", "sampling_params": {}})


# ---- what a record has of its own ----


def test_a_record_s_own_members_stand_over_the_run_s_and_its_digits_are_kept():
    bodies = Bodies(model="m", sampling={"temperature": 0.7, "top_p": 0.9}, extra_body={"top_k": 5})
    prompt = prompt_of(
        sampling_json=b'"temperature":0.50,"seed":123456789012345678901234567890,"top_k":1e0',
        body_json=b'"tools":[{"n":1.10}]',
    )

    body = bodies.encode(prompt, None)

    assert b'"temperature":0.50,' in body
    assert b'"seed":123456789012345678901234567890' in body
    assert b'"tools":[{"n":1.10}]' in body
    assert read(body) | {"prompt": ""} == {
        "prompt": "",
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 1.0,
        "seed": 123456789012345678901234567890,
        "tools": [{"n": 1.1}],
    }
    assert read(bodies.encode(prompt_of(), None))["temperature"] == 0.7


def test_for_generate_they_stand_in_sampling_params():
    bodies = Bodies(model="m", api="generate", sampling={"top_p": 0.9, "n": 2}, extra_body={"priority": 1})
    prompt = prompt_of(member="text", sampling_json=b'"n":3', body_json=b'"priority":2,"extra_key":"k"')

    body = read(bodies.encode(prompt, RID))

    assert body == {
        "text": "hi",
        "sampling_params": {"top_p": 0.9, "n": 3},
        "priority": 2,
        "extra_key": "k",
        "rid": RID,
    }
    assert (bodies.samples_of(prompt), bodies.samples_of(prompt_of(member="text"))) == (3, 2)


@pytest.mark.parametrize(
    ("run", "own", "samples"),
    [
        ({}, b"", 1),
        ({"n": 4}, b"", 4),
        ({"n": 4}, b'"n":2', 2),
        ({"n": 4}, b'"n":null', 1),
        ({"n": 0}, b"", 1),
        ({"n": "4"}, b"", 1),
    ],
)
def test_so_many_answers_are_asked_for(run, own, samples):
    bodies = Bodies(model="m", sampling=run)

    assert bodies.samples_of(prompt_of(sampling_json=own)) == samples
    assert bodies.samples_of(prompt_of(body_json=own)) == samples


def test_what_genpipe_sets_itself_is_refused_in_a_record():
    for section, named in (("sampling_json", "sampling"), ("body_json", "body")):
        with pytest.raises(PromptFault, match=f"{named}.stream is set by genpipe itself"):
            Bodies(model="m").encode(prompt_of(**{section: b'"stream":true'}), RID)


def test_names_that_generate_does_not_have_are_refused_and_named():
    with pytest.raises(ConfigError, match=r"request.sampling.max_tokens: .*calls it max_new_tokens"):
        demand_names("generate", ["temperature", "max_tokens"])
    demand_names("chat", ["max_tokens"])


def test_any_number_of_kinds_of_records_takes_no_more_memory_than_a_few():
    bodies = Bodies(model="m")
    for seed in range(4 * TAILS_KEPT):
        prompt = prompt_of(sampling_json=b'"seed":%d' % seed)
        assert read(bodies.encode(prompt, None))["seed"] == seed
    large = prompt_of(body_json=b'"tools":"%s"' % (b"x" * 100_000))
    assert len(read(bodies.encode(large, None))["tools"]) == 100_000

    assert bodies._tail.cache_info().currsize == TAILS_KEPT
    assert bodies._tail.cache_info().misses == 4 * TAILS_KEPT


# ---- token ids ----


@pytest.mark.parametrize(
    ("api", "member", "asks"),
    [
        ("chat", "messages", {"return_token_ids": True}),
        ("completions", "prompt", {"return_token_ids": True}),
        ("generate", "text", {"return_prompt_token_ids": True}),
        ("generate", "input_ids", {}),
    ],
)
def test_ids_are_asked_for_where_they_do_not_come_by_themselves(api, member, asks):
    prompt = prompt_of(member=member)
    with_ids = read(Bodies(model="m", api=api, token_ids=True).encode(prompt, None))
    without = read(Bodies(model="m", api=api).encode(prompt, None))

    assert with_ids == {**without, **asks}


@pytest.mark.parametrize(
    ("api", "name"), [("chat", "return_token_ids"), ("generate", "return_prompt_token_ids")]
)
def test_the_user_s_own_word_on_ids_stands(api, name):
    bodies = Bodies(model="m", api=api, token_ids=True, extra_body={name: False})

    assert read(bodies.encode(prompt_of(member="text"), None))[name] is False


# ---- warnings ----


def test_an_option_of_records_that_nobody_reads_is_warned_of_once():
    told: list[str] = []
    bodies = Bodies(model="m", warn=told.append)
    for seed in range(3):
        bodies.encode(prompt_of(sampling_json=b'"max_token":1,"seed":%d' % seed), RID)

    assert len(told) == 1
    assert "a record's own sampling.max_token:" in told[0]
    assert told[0].endswith("did you mean max_tokens?")


# ---- whatever they are ----

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["temperature", "top_k", "n", 'a"b', "ü"]) | st.text(min_size=1).map("x{}".format)
OPTIONS = st.dictionaries(NAMES, JSON, max_size=4)


def cleaned(value):
    return json.loads(strict_json.dumps(value))


@settings(max_examples=25, deadline=None)
@given(
    api=st.sampled_from(["chat", "completions", "generate"]),
    run=OPTIONS,
    extra=OPTIONS,
    own=OPTIONS,
    body=OPTIONS,
)
def test_each_option_stands_once_and_the_nearest_counts(api, run, extra, own, body):
    prompt = prompt_of(
        member="text", sampling_json=strict_json.dumps(own)[1:-1], body_json=strict_json.dumps(body)[1:-1]
    )
    sent = read(Bodies(model="m", api=api, sampling=run, extra_body=extra).encode(prompt, RID))

    assert (sent.pop("text"), sent.pop("rid"), sent.pop("model", "m")) == ("hi", RID, "m")
    if api == "generate":
        assert sent.pop("sampling_params") == cleaned(run | own)
        assert sent == cleaned(extra | body)
    else:
        assert sent == cleaned(run | extra | own | body)
