"""The learner's own way into the servers, against fake servers; what vLLM's engines do needs GPUs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from scenes.fake_vllm import FakeVllm, fake_vllm

from engine import placement
from engine.config import Config, ModelConfig, RunConfig, ServerConfig
from engine.errors import ConfigError
from engine.weights import nccl
from engine.weights.nccl import DeviceWriter, Fleet, TransferFailed, addresses
from engine.weights.store import Release

NAMES = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]}


class Engine:
    """Does what vLLM's trainer engines do with their client."""

    def __init__(self, client: Fleet) -> None:
        self.client, self.closed, self.sent = client, False, 0
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": client.world_size})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights(NAMES)
        self.client.finish_weight_update()
        self.sent += 1

    def shutdown(self) -> None:
        self.closed = True


class Learner:
    def __init__(self, *fakes: FakeVllm, urls: tuple[str, ...] = ()) -> None:
        self.engines: list[Engine] = []
        self.writer = DeviceWriter(
            urls or [fake.url for fake in fakes],
            workers=2,
            cache="keep",
            seconds=5.0,
            open_engine=self._open,
        )

    def _open(self, client: Fleet) -> Engine:
        self.engines.append(Engine(client))
        return self.engines[-1]

    async def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await anyio.to_thread.run_sync(call, *arguments)


async def test_all_servers_are_paused_labelled_and_resumed_together() -> None:
    async with fake_vllm() as a, fake_vllm() as b:
        learner = Learner(a, b)
        assert await learner.do(learner.writer.write, 7) == (a.url, b.url)
        for fake, offset in ((a, 1), (b, 3)):
            assert fake.joined == [{"rank_offset": offset, "world_size": 5}]
            assert fake.version == fake.loaded == "7"
            assert not fake.paused
            assert {"clear_cache": "false"} in fake.bodies
            order = [name for name in fake.order if name not in ("health", "init_weight_transfer_engine")]
            assert order == [
                "pause",
                "start_weight_update",
                "update_weights",
                "finish_weight_update",
                "resume",
            ]
        await learner.do(learner.writer.write, 8)
        assert len(learner.engines) == 1, "the group is opened once"
        assert a.version == b.version == "8"


async def test_no_server_resumes_before_all_have_the_weights() -> None:
    """B fails in the middle: A keeps its new weights and waits; the second attempt is harmless."""
    async with (
        fake_vllm(version="1", loaded="1") as a,
        fake_vllm(version="1", loaded="1", faults={"/update_weights": [500]}) as b,
    ):
        learner = Learner(a, b)
        assert await learner.do(learner.writer.write, 2) == (a.url, b.url)
        assert a.version == b.version == "2"
        assert a.order.index("resume") > max(
            place for place, name in enumerate(a.order) if name == "finish_weight_update"
        )
        assert len(learner.engines) == 2
        assert learner.engines[0].closed


async def test_a_server_that_never_works_leaves_nothing_running_on_old_labels() -> None:
    async with fake_vllm(version="1", loaded="1", faults={"/update_weights": [500] * 9}) as fake:
        learner = Learner(fake)
        with pytest.raises(TransferFailed, match="could not be sent"):
            await learner.do(learner.writer.write, 2)
        assert fake.paused
        assert fake.version == "1"


async def test_a_server_that_is_not_there_is_left_out_and_joins_later() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with fake_vllm() as a, fake_vllm() as b:
        learner = Learner(urls=(a.url, b.url, nobody))
        b.healthy = False
        assert await learner.do(learner.writer.write, 3) == (a.url,)
        assert await learner.do(learner.writer.attend, 3) == ()
        b.healthy = True
        assert await learner.do(learner.writer.attend, 3) == (b.url,)
        assert b.version == "3"
        assert await learner.do(learner.writer.attend, 3) == ()
        assert await learner.do(learner.writer.attend, 4) == (), "what was not sent is nobody's to bring"
        assert [engine.client.world_size for engine in learner.engines] == [3, 5]


async def test_a_label_that_cannot_be_read_is_none() -> None:
    faults: dict[str, list[int | str]] = {"/is_paused": ["garbage"], "/weight_info": ["garbage"]}
    async with fake_vllm(version="3", faults=faults) as fake:
        for _ in range(2):
            assert await anyio.to_thread.run_sync(nccl.label_of, fake.url) == ""
        assert await anyio.to_thread.run_sync(nccl.label_of, fake.url) == "3"


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """A server that dies while it speaks must not end the learner."""
    faults = {"/health": ["stub"], "/is_paused": ["stub"]}
    async with fake_vllm(faults=faults) as fake:
        assert not await anyio.to_thread.run_sync(nccl.healthy, fake.url)
        assert await anyio.to_thread.run_sync(nccl.label_of, fake.url) == ""


async def test_nobody_there_is_an_error() -> None:
    async with fake_vllm(healthy=False) as fake:
        learner = Learner(fake)
        with pytest.raises(TransferFailed, match="no server answers"):
            await learner.do(learner.writer.write, 1)


async def test_the_announcement_says_who_brought_it() -> None:
    async with fake_vllm() as fake:
        learner = Learner(fake)
        outlet = nccl.NcclPublisher(learner.writer, patience=1.0)
        from engine.lineage import Version

        release = await anyio.to_thread.run_sync(lambda: outlet.release(Version(0, 4), {}))
        assert release == Release("nccl:", nccl.fingerprint({}, None), 0)
        assert fake.version == "4"


def test_a_fingerprint_tells_what_is_sent_not_what_is_kept() -> None:
    torch = pytest.importorskip("torch")
    kept = {"w": torch.full((7,), 0.02), "count": torch.arange(3)}
    sent = nccl.fingerprint(kept, torch.bfloat16)
    moved = {**kept, "w": kept["w"] + 1e-6}
    assert nccl.fingerprint(moved, torch.bfloat16) == sent, "bfloat16 rounds it away"
    assert nccl.fingerprint(moved, None) != nccl.fingerprint(kept, None)
    assert nccl.fingerprint({**kept, "w": kept["w"] + 1e-3}, torch.bfloat16) != sent


def config(**settings: Any) -> Config:
    return Config(run=RunConfig(name="t"), model=ModelConfig(path="x"), server=ServerConfig(**settings))


def test_servers_and_their_workers_are_known_from_the_recipe() -> None:
    started = config(count=2, port=9000, args={"tensor_parallel_size": 4, "pipeline-parallel-size": 2})
    assert addresses(started) == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    assert placement.workers(started.server) == 8
    assert addresses(config(urls=("http://h:1/",))) == ("http://h:1",)


def test_a_learner_without_a_gpu_says_so_before_anything_starts() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="PyTorch finds none here"):
        nccl.open_publisher(config(weights="nccl", port=9000), None)


def test_the_meeting_point_is_an_address_of_this_host() -> None:
    address, port = nccl.meeting_point("http://127.0.0.1:8000")
    assert address == "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((address, port))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_vllm_understands_what_its_engines_are_given() -> None:
    """VLLM's own dataclasses and parsers, without a GPU."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    group = Fleet(("http://127.0.0.1:1", "http://127.0.0.1:2"), 2, 1.0)
    assert isinstance(group, VLLMWeightSyncClient)
    info = nccl.init_info(group)
    assert (info.world_size, info.is_sender, info.packed) == (5, True, True)
    assert info.backend in WeightTransferTrainerFactory._registry
    joins: list[dict[str, Any]] = []
    group._post = lambda url, path, body=None, seconds=0: joins.append(body["init_info"])  # type: ignore
    worker = NCCLWeightTransferInitInfo(
        master_address=info.master_address,
        master_port=info.master_port,
        rank_offset=1,
        world_size=info.world_size,
    )
    group.init_weight_transfer_engine(worker_init_payload(worker))
    parsed = [NCCLWeightTransferInitInfo(**one) for one in joins]
    assert sorted(one.rank_offset for one in parsed) == [1, 3]
    weights = {"w": torch.randn(3, 2), "count": torch.arange(4)}
    sent = nccl.source(lambda: weights, torch.bfloat16)
    checked = list(NCCLTrainerWeightTransferEngine._checked_iter(sent, sent.metadata()))
    assert [(name, tensor.dtype) for name, tensor in checked] == [
        ("w", torch.bfloat16),
        ("count", torch.int64),
    ]
    described = NCCLWeightTransferUpdateInfo(
        names=[one.name for one in sent.metadata()],
        dtype_names=[str(one.dtype).split(".")[-1] for one in sent.metadata()],
        shapes=[list(one.shape) for one in sent.metadata()],
    )
    carried = msgspec.json.decode(msgspec.json.encode(vars(described)))
    assert NCCLWeightTransferUpdateInfo(**carried) == described
