"""Keys, allow-lists and TLS on a real server: each role can do its work, and nothing else."""

from __future__ import annotations

import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from bus_examples import KINDS, example, request, summary, ticket
from bus_worlds import store
from scenes.brokers import SERVER, Broker, broker, free_ports
from scenes.memory_bus import matches

from bus import Bus, BusError, Conflict, Denied, NotFound, codec, connect, provision
from bus.access import ADMIN, ROLES, permissions
from bus.credentials import ACCOUNT, SEEDS, public_key, read_seed, seed_file, trust, write_account
from bus.messages import (
    BatchTrained,
    DesignFailed,
    DesignRejected,
    DesignSample,
    DesignTicket,
    EnvironmentReady,
    EpisodeFailed,
    EpisodeFinished,
    EpisodeRequest,
    EpisodeSample,
    EvaluationFinished,
    Heartbeat,
    Message,
    PolicyPublished,
    RoundClosed,
    RunOrdered,
    ServerLost,
    ServerServing,
)
from bus.subjects import CONSUMERS, Names

RUN = "secured"
GUEST = "counter"
QUICK = 8.0  # far less than a call waits for an answer
NAMES = Names(RUN)
# A fact is said by the role in its subject; these may say it, too, or in its place.
ALSO: dict[type[Message], set[str]] = {
    DesignFailed: {"designer", "scorer"},
    EpisodeFailed: {"agent", "scorer"},
    ServerLost: {"server", "scorer"},
    DesignTicket: {"scorer"},
    EpisodeRequest: {"scorer"},
    RoundClosed: {"scorer"},
    RunOrdered: set(),  # by the supervisor
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("secured"), RUN, tls=True, roles=(GUEST,)) as running:
        anyio.run(lambda: provision(running.url, run=RUN, store_gb=1, roles=[GUEST], **running.login()))
        yield running


@asynccontextmanager
async def joined(secured: Broker, role: str, **given: Any) -> AsyncIterator[Bus]:
    login = {**secured.login(role), **given}
    async with connect(secured.url, run=RUN, role=role, instance=f"{role}-0", **login) as bus:
        yield bus


async def first(records: AsyncIterator[Any]) -> Any:
    with anyio.fail_after(10):
        return await anext(records)


# The lists themselves.


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.stream not in ("", "DLQ")])
def test_a_message_may_be_said_by_those_whose_it_is(kind: type[Message]) -> None:
    tail = example(kind).tail
    allowed = {
        role
        for role in ROLES
        if any(matches(one, NAMES.subject(tail)) for one in permissions(NAMES, role)["publish"])
    }
    assert allowed == ALSO.get(kind, {tail.split(".")[1]})


@pytest.mark.parametrize("role", [*ROLES, GUEST])
def test_no_role_may_manage_streams_or_read_others_inboxes(role: str) -> None:
    allowed = permissions(NAMES, role)
    forbidden = [
        f"$JS.API.STREAM.{verb}.{stream}_{RUN}"
        for verb in ("CREATE", "UPDATE", "DELETE", "MSG.DELETE", "RESTORE", "SNAPSHOT")
        for stream in ("TASK", "EVENT", "SAMPLE", "LEASE")
    ]
    forbidden += [f"$JS.API.CONSUMER.{verb}.TASK_{RUN}.agent" for verb in ("CREATE", "DELETE")]
    forbidden += [f"$JS.API.CONSUMER.INFO.TASK_{RUN}.{other}" for other in CONSUMERS if other != role]
    forbidden += [f"$JS.API.CONSUMER.DURABLE.CREATE.EVENT_{RUN}.{role}", "spade.other.event.agent.finished"]
    assert not [one for one in forbidden if any(matches(pattern, one) for pattern in allowed["publish"])]
    others = [f"_INBOX.{other}.x" for other in (*ROLES, ADMIN) if other != role]
    others += [NAMES.subject("event.agent.finished"), "_INBOX.x", "$SYS.REQ.SERVER.PING"]
    assert not [one for one in others if any(matches(pattern, one) for pattern in allowed["subscribe"])]


@pytest.mark.parametrize("role", ["Agent", "a.b", "", "x>", "*"])
def test_a_role_that_is_no_token_gets_no_list(role: str) -> None:
    with pytest.raises(BusError, match="cannot be part of a subject"):
        permissions(NAMES, role)


# The work of each role, in one small run.


async def test_all_roles_play_one_round_under_their_lists(secured: Broker) -> None:
    async with AsyncExitStack() as stack:
        buses = {
            role: await stack.enter_async_context(joined(secured, role)) for role in (ADMIN, *ROLES, GUEST)
        }
        await _begin(buses[ADMIN])
        beats = await stack.enter_async_context(buses["scorer"].listen("hb.>"))
        for role, bus in buses.items():
            assert await bus.state_get("config") is not None, role
            await bus.publish(example(Heartbeat, role=role, instance=f"{role}-0"))
        assert {(await first(beats)).role for _ in buses} == set(buses)

        await _serve(buses["learner"], buses["server"])
        await _score(buses["scorer"])
        await _design(buses["designer"])
        await _play(buses["agent"])
        await _close(buses["scorer"])
        await _train(buses["learner"])
        await _evaluate(buses["evaluator"])
        await _look_on(buses[GUEST])

        for role, bus in buses.items():
            assert bus.connection.counts["denied"] == 0, role


async def test_a_role_of_ones_own_takes_work_from_its_queue(secured: Broker) -> None:
    async with joined(secured, ADMIN) as admin, joined(secured, GUEST) as guest:
        frame = codec.encode(request(1), run=RUN, role="scorer", instance="s")
        await store(admin, "TASK", f"task.{GUEST}.count.e1", frame)
        async with guest.consume(GUEST, limit=1) as work:
            delivery = await first(work)
            assert delivery.message == request(1)
            await delivery.ack()
        assert not [one async for one in admin.replay("TASK", tails=[f"task.{GUEST}.>"])]
    async with joined(secured, "evaluator") as bus:
        with pytest.raises(BusError, match=r"unknown consumer.*or your own role's name"):
            async with bus.consume(GUEST, limit=1):
                pass


async def _begin(bus: Bus) -> None:
    await bus.state_put("config", b"{}")
    await bus.state_put("control", b"run")


async def _serve(learner: Bus, server: Bus) -> None:
    async with learner.lease("leader.learner", ttl=2) as lease:
        assert lease.revision > 0
        revision = await learner.state_put("learner", b"0")
        await learner.state_update("learner", b"1", revision)
        with pytest.raises(Conflict):
            await learner.state_update("learner", b"2", revision)
        await learner.blobs.put("weights", b"first" * 1_000_000)
        await learner.blobs.put("weights", b"second")
        await learner.publish(example(PolicyPublished))
    assert (await server.last("event.learner.published")) is not None
    assert await server.blobs.get("weights") == b"second"
    assert await learner.blobs.remove("weights")
    async with server.follow("EVENT", tails=["event.learner.published"]) as records:
        assert isinstance((await first(records)).message, PolicyPublished)
    await server.publish(example(ServerServing))


async def _score(bus: Bus) -> None:
    async with bus.lease("leader.scorer", ttl=2):
        await bus.state_put("scorer.snapshot", b"s")
        await bus.publish_all([ticket(1), request(1)])
        assert await bus.last(ticket(1).tail) is not None


async def _design(bus: Bus) -> None:
    async with bus.consume("designer", limit=1) as work:
        delivery = await first(work)
        held = example(DesignSample, design=delivery.message.design)
        await bus.publish_all([held, example(DesignRejected), example(EnvironmentReady)])
        assert (await bus.last(held.tail)) is not None
        assert [record.message async for record in bus.replay("EVENT", tails=["event.designer.ready.*"])]
        await delivery.ack()


async def _play(bus: Bus) -> None:
    async with bus.follow("EVENT", tails=["event.server.serving", "event.server.lost"]) as servers:
        assert isinstance((await first(servers)).message, ServerServing)
        async with bus.consume("agent", limit=2) as work:
            delivery = await first(work)
            await bus.publish(example(EpisodeSample, episode=delivery.message.episode))
            await bus.publish(example(EpisodeFinished, episode=delivery.message.episode))
            await delivery.ack()


async def _close(bus: Bus) -> None:
    async with bus.follow("EVENT", tails=["event.agent.*"]) as records:
        record = await first(records)
        assert isinstance(await bus.get("EVENT", record.sequence), EpisodeFinished)
    async with bus.follow("DLQ"):
        await bus.publish_all([summary(1), example(RoundClosed)])


async def _train(bus: Bus) -> None:
    async with bus.lease("leader.learner", ttl=2), bus.follow("SAMPLE") as samples:
        kinds = [type((await first(samples)).message) for _ in range(3)]
        assert set(kinds) == {DesignSample, EpisodeSample, RoundClosed}
        await bus.publish(example(BatchTrained))
        await bus.purge("SAMPLE", below=2)


async def _evaluate(bus: Bus) -> None:
    facts = [record.message async for record in bus.replay("EVENT", tails=["event.learner.trained"])]
    assert facts
    await bus.publish(example(EvaluationFinished))


async def _look_on(bus: Bus) -> None:
    async with bus.follow("EVENT") as records:
        assert (await first(records)).sequence == 1
    await bus.state_put(f"{GUEST}.seen", b"1")


# What is refused.

REFUSED: dict[str, tuple[str, Any]] = {
    "says another role's fact": ("agent", lambda bus: bus.publish(example(PolicyPublished))),
    "hands out work": ("agent", lambda bus: bus.publish(request(9))),
    "makes an agent's samples": ("designer", lambda bus: bus.publish(example(EpisodeSample))),
    "gives credit": ("agent", lambda bus: bus.publish(example(RoundClosed))),
    "commands": ("evaluator", lambda bus: bus.connection.api("STREAM.PURGE.EVENT_secured")),
    "deletes a stream": ("learner", lambda bus: bus.connection.api("STREAM.DELETE.SAMPLE_secured")),
    "purges another's stream": ("learner", lambda bus: bus.purge("EVENT")),
    "writes another's state": ("agent", lambda bus: bus.state_put("learner", b"x")),
    "writes the recipe": ("scorer", lambda bus: bus.state_put("config", b"x")),
    "takes another's lease": ("designer", lambda bus: _lease(bus, "leader.learner")),
    "ends another's lease": (
        "learner",
        lambda bus: bus.connection.api("STREAM.MSG.DELETE.LEASE_secured", {"seq": 1}),
    ),
    "pulls another's queue": ("agent", lambda bus: _take(bus, "designer")),
    "makes a consumer on the queue": ("agent", lambda bus: bus.connection.api(*_consumer("TASK", "spy"))),
    "makes a durable": (
        "agent",
        lambda bus: bus.connection.api("CONSUMER.DURABLE.CREATE.EVENT_secured.mine", {}),
    ),
    "reads the samples": ("agent", lambda bus: _follow(bus, "SAMPLE")),
    "reads a held design": ("agent", lambda bus: bus.last("sample.designer.0.d1-0")),
    "reads the queue": ("evaluator", lambda bus: bus.last(request(1).tail)),
    "hears others' heartbeats": ("agent", lambda bus: _listen(bus, "hb.>")),
    "taps a stream": (GUEST, lambda bus: _listen(bus, "event.>")),
    "works for another": (GUEST, lambda bus: _take(bus, "agent")),
    "writes named bytes": ("agent", lambda bus: bus.blobs.put("weights", b"false")),
    "speaks for another": (GUEST, lambda bus: bus.publish(example(EpisodeFailed))),
}


async def _lease(bus: Bus, name: str) -> None:
    async with bus.lease(name, ttl=2):
        pass


async def _take(bus: Bus, consumer: str) -> None:
    async with bus.consume(consumer, limit=1) as work:
        await anext(work)


async def _follow(bus: Bus, stream: str) -> None:
    async with bus.follow(stream) as records:
        await anext(records)


async def _listen(bus: Bus, tail: str) -> None:
    async with bus.listen(tail) as arrivals:
        await anext(arrivals)


def _consumer(stream: str, name: str) -> tuple[str, dict[str, Any]]:
    config = {"name": name, "ack_policy": "none"}
    return f"CONSUMER.CREATE.{stream}_{RUN}.{name}", {"stream_name": f"{stream}_{RUN}", "config": config}


@pytest.mark.parametrize("what", REFUSED)
async def test_pitfall_30_a_role_that_does_more_is_told_at_once_where(secured: Broker, what: str) -> None:
    role, act = REFUSED[what]
    async with joined(secured, role) as bus:
        with anyio.fail_after(QUICK), pytest.raises(Denied) as caught:
            await act(bus)
        assert caught.value.action in ("publish", "subscribe")
        assert caught.value.subject in str(caught.value)
        assert RUN in caught.value.subject
        own = example(Heartbeat, role=role, instance=f"{role}-0")
        assert await bus.publish(own) == 0, "the connection lives on"


async def test_others_inboxes_cannot_be_read(secured: Broker) -> None:
    async with joined(secured, "learner") as victim, joined(secured, "agent") as bus:
        heard: list[str] = []
        denied: list[Denied] = []
        bus.connection.watch(lambda error: denied.append(error) if error else None)
        for subject in (f"{victim.connection.inbox}.>", "_INBOX.>", ">"):
            await bus.connection.subscribe(subject, lambda message: heard.append(message.subject))
        await bus.connection.api("INFO")
        assert [error.action for error in denied] == ["subscribe"] * 3
        await victim.state_put("learner", b"secret")
        await bus.connection.api("INFO")
        assert not heard


async def test_a_refused_publication_does_not_stop_the_allowed_ones(secured: Broker) -> None:
    async with joined(secured, "agent") as bus:
        messages = [
            example(EpisodeFailed, episode="before"),
            request(5),
            example(EpisodeFailed, episode="after"),
        ]
        with pytest.raises(Denied, match=r"task\.agent"):
            await bus.publish_all(messages)
        assert await bus.publish(example(EpisodeFailed, episode="later")) > 0
        assert bus.statistics()["publish_in_flight"] == 0


async def test_a_message_that_was_copied_into_a_stream_is_not_believed(secured: Broker) -> None:
    forged = codec.encode(example(EpisodeSample, episode="forged"), run=RUN, role="agent", instance="s")
    async with joined(secured, "agent") as bus, joined(secured, "learner") as learner:
        names = bus.names
        stored = await store(bus, "EVENT", "event.agent.finished", forged)
        last = (await learner.stream_info("SAMPLE")).last
        asked = b'{"seq": %d}' % stored
        answer = names.subject("sample.agent.x.forged")
        assert bus.connection.write(f"$JS.API.DIRECT.GET.{names.stream('EVENT')}", asked, answer)
        async with joined(secured, "agent") as agent, learner.follow("SAMPLE", start=last + 1) as samples:
            with anyio.fail_after(10):
                while (await learner.stream_info("SAMPLE")).last == last:  # noqa: ASYNC110 (what a stranger sent)
                    await anyio.sleep(0.01)
            honest = example(EpisodeSample, episode="honest")
            await agent.publish(honest)
            assert (await first(samples)).message == honest


# Who gets in at all.


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"seed_file": None}, "without a token or a key"),
        ({"seed_file": None, "token": "guess"}, "refused the token"),
        ({"tls": None}, "TLS with the broker"),
    ],
)
async def test_strangers_stay_outside(secured: Broker, given: dict[str, Any], complaint: str) -> None:
    with anyio.fail_after(QUICK), pytest.raises(BusError, match=complaint) as caught:
        async with joined(secured, "agent", **given):
            pass
    assert caught.value.remedy


async def test_a_tls_url_needs_no_more(secured: Broker) -> None:
    url = secured.url.replace("nats://", "tls://")
    async with connect(url, run=RUN, role="agent", instance="a", **secured.login("agent")) as bus:
        assert await bus.publish(example(EpisodeFailed, episode="over tls")) > 0


async def test_a_server_that_is_down_is_passed_over(secured: Broker) -> None:
    url = f"tls://127.0.0.1:{free_ports(1)[0]}, {secured.url}"
    for _ in range(4):  # the client tries them in random order
        async with connect(url, run=RUN, role="agent", instance="a", **secured.login("agent")) as bus:
            assert await bus.state_get("nothing") is None


async def test_a_key_of_another_run_is_refused(secured: Broker, tmp_path: Path) -> None:
    write_account("another", tmp_path / "other")
    with pytest.raises(BusError, match=r"refused the key .*agent\.seed"):
        async with joined(secured, "agent", seed_file=seed_file(tmp_path / "other" / "seeds", "agent")):
            pass


async def test_the_key_of_another_role_is_noticed_at_once(secured: Broker) -> None:
    with anyio.fail_after(QUICK), pytest.raises(Denied, match=r"subscribe to _INBOX\.designer"):
        async with joined(secured, "designer", seed_file=secured.seed("agent")):
            pass


async def test_a_broker_for_another_host_name_is_not_trusted(secured: Broker) -> None:
    url = secured.url.replace("127.0.0.1", "localhost")
    with pytest.raises(BusError, match=r"TLS with the broker.*localhost"):
        async with connect(url, run=RUN, role="agent", instance="a", **secured.login("agent")):
            pass


def test_certificates_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(BusError, match=r"missing\.pem cannot be used"):
        trust(tmp_path / "missing.pem")
    (tmp_path / "empty.pem").write_text("nothing\n")
    with pytest.raises(BusError, match=r"empty\.pem cannot be used"):
        trust(tmp_path / "empty.pem")


async def test_a_key_made_later_works_after_a_reload(tmp_path: Path) -> None:
    with broker(tmp_path, RUN) as running:
        await provision(running.url, run=RUN, store_gb=1, **running.login())
        write_account(RUN, tmp_path, ("late",))
        async with joined(running, "agent") as bus:
            running.process.send_signal(signal.SIGHUP)
            with anyio.fail_after(10):
                while not await _gets_in(running, "late"):  # noqa: ASYNC110 (the server does not tell)
                    await anyio.sleep(0.01)
            assert await bus.publish(example(EpisodeFailed, episode="still there")) > 0


async def _gets_in(running: Broker, role: str) -> bool:
    try:
        async with joined(running, role) as bus:
            return await bus.publish(example(Heartbeat, role=role, instance="x")) == 0
    except BusError:
        return False


async def test_runs_of_one_broker_do_not_see_each_other(tmp_path: Path) -> None:
    with broker(tmp_path / "one", "one", start=False) as running:
        write_account("two", tmp_path / "two")
        seed = tmp_path / "two" / SEEDS / f"{ADMIN}.seed"
        config = tmp_path / "one" / SERVER
        included = f'include "{ACCOUNT}"'
        config.write_text(config.read_text().replace(included, f'{included}\n  include "../two/{ACCOUNT}"'))
        running.start()
        await provision(running.url, run="one", store_gb=1, **running.login())
        await provision(running.url, run="two", store_gb=1, seed_file=seed)
        async with connect(running.url, run="two", role=ADMIN, instance="s", seed_file=seed) as bus:
            names = (await bus.connection.api("STREAM.NAMES", {}))["streams"]
            assert names
            assert not [name for name in names if "one" in name]
            with pytest.raises(NotFound):
                await bus.connection.api("STREAM.INFO.EVENT_one")


# Files.


def test_keys_are_private_and_stay_when_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    write_account("files", directory, (GUEST,))
    seeds = {path.stem: path for path in (directory / SEEDS).iterdir()}
    keys = {role: path.read_text() for role, path in seeds.items()}
    account = (directory / ACCOUNT).read_text()
    write_account("files", directory)
    assert {role: path.read_text() for role, path in seeds.items()} == keys
    assert (directory / ACCOUNT).read_text() == account
    assert set(keys) == {ADMIN, *ROLES, GUEST}
    for path in seeds.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert public_key(read_seed(path)) in account
        assert path.read_text().strip() not in account
    assert len(set(keys.values())) == len(keys)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with pytest.raises(BusError, match="holds the keys of another run"):
        write_account("other", directory)


def test_a_broken_key_is_not_replaced(tmp_path: Path) -> None:
    write_account("files", tmp_path)
    broken = tmp_path / "seeds" / "agent.seed"
    broken.write_text("SUAAAA\n")
    with pytest.raises(BusError, match=r"agent\.seed holds no nkey seed"):
        write_account("files", tmp_path)
    assert broken.read_text() == "SUAAAA\n"
    broken.chmod(0o644)
    with pytest.raises(BusError, match="can be read by others"):
        read_seed(broken)


def test_a_missing_key_names_its_role(tmp_path: Path) -> None:
    with pytest.raises(BusError, match="no key of role agent"):
        seed_file(tmp_path, "agent")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "seeds").touch()
    with pytest.raises(BusError, match="cannot be written"):
        write_account("files", tmp_path)
