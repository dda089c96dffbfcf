"""The learner's side of ``weights = "nccl"``: weights from its GPU straight into the servers' GPUs.

vLLM's own trainer engine does the transfer; it needs a client that speaks for all servers at once. This
client also pauses them before the first byte, and labels and resumes them after the last, so that a token's
version is true here as with every way. Everything blocks: it runs in the trainer's thread. It is checked
against vLLM's interface, not on GPUs yet.
"""

from __future__ import annotations

import hashlib
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec
import structlog

from engine import placement
from engine.config import Config
from engine.errors import ConfigError, SpadeError
from engine.lineage import Version
from engine.weights.publisher import Policy, Publisher
from engine.weights.store import Release, as_published, published_type

if TYPE_CHECKING:
    import torch

CONTROL_SECONDS = 60.0
_HEALTH_SECONDS = 3.0
_ASK_SECONDS = 0.5
_ATTEMPTS = 2

log = structlog.get_logger("spade.weights")


class TransferFailed(SpadeError):
    """A server did not do its part of a transfer."""


@dataclass
class Fleet:
    """All servers behind the four methods of vLLM's ``VLLMWeightSyncClient``.

    ``workers`` is the number of vLLM workers of each server, ``seconds`` bounds one call of a transfer,
    ``cache`` is the policy of the pause, ``label`` becomes the version of the weights that are sent.
    """

    urls: tuple[str, ...]
    workers: int
    seconds: float
    cache: Literal["recompute", "keep"] = "recompute"
    label: str = ""

    @property
    def world_size(self) -> int:
        """All ranks of a transfer: the learner's, which is 0, and one for each worker of each server."""
        return 1 + self.workers * len(self.urls)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all servers join at once, each with ranks of its own."""

        def join(index: int, url: str) -> None:
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self.workers
            self._post(url, "init_weight_transfer_engine", {"init_info": info})

        self._all(join)

    def start_weight_update(self) -> None:
        """Pause all servers, keeping their requests, and open a session in each."""
        clear = "true" if self.cache == "recompute" else "false"

        def start(index: int, url: str) -> None:
            self._post(url, f"pause?mode=keep&clear_cache={clear}")
            try:
                self._post(url, "start_weight_update")
            except TransferFailed as error:
                if "already active" not in error.what:
                    raise
                # Left by a transfer that failed elsewhere; what it left will all be written over.
                self._post(url, "finish_weight_update", {"weight_version": None})
                self._post(url, "start_weight_update")

        self._all(start)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let all servers receive what vLLM's engine sends meanwhile."""
        info = update_info
        if isinstance(info, dict):
            info = {key: value for key, value in info.items() if value is not None}
        self._all(lambda _, url: self._post(url, "update_weights", {"update_info": info}, self.seconds))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish in all servers, under the label, and only then let them sample."""
        body = {"weight_version": weight_version or self.label}
        self._all(lambda _, url: self._post(url, "finish_weight_update", body, self.seconds))
        self._all(lambda _, url: self._post(url, "resume"))

    def leave(self) -> None:
        """Take the servers out of the group; one that is gone needs nothing."""
        for url in self.urls:
            try:
                self._post(url, "shutdown_weight_transfer_engine")
            except TransferFailed as error:
                log.debug("server_not_released", server=url, reason=error.what)

    def _all(self, call: Callable[[int, str], object]) -> None:
        """Call for each server at the same time: they meet in the transfer."""
        with ThreadPoolExecutor(max_workers=len(self.urls)) as pool:
            futures = [pool.submit(call, index, url) for index, url in enumerate(self.urls)]
        faults = [error for future in futures if (error := future.exception()) is not None]
        if faults:
            raise faults[0]

    def _post(self, url: str, path: str, body: object = None, seconds: float = CONTROL_SECONDS) -> bytes:
        return request(f"{url}/{path}", {} if body is None else body, seconds=seconds)


class DeviceWriter:
    """Sends versions to all servers that answer, and again to servers that start later.

    ``open_engine`` builds vLLM's trainer engine, once for each group of servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        workers: int,
        cache: Literal["recompute", "keep"],
        seconds: float,
        open_engine: Callable[[Fleet], Any],
    ) -> None:
        self._urls, self._workers, self._cache, self._seconds = tuple(urls), workers, cache, seconds
        self._open_engine = open_engine
        self._fleet: Fleet | None = None
        self._engine: Any = None
        self._sent = ""

    def write(self, version: int, *, patience: float = 0.0) -> tuple[str, ...]:
        """Send the weights to all servers that answer, waiting up to ``patience`` seconds for all of them.

        Returns the servers that have them. Raises TransferFailed when none has after two attempts.
        """
        fault = TransferFailed("no server answers", remedy="Look at the servers' logs.")
        for _ in range(_ATTEMPTS):
            urls = self._reachable(patience)
            if not urls:
                break
            try:
                self._send(urls, str(version))
            except Exception as error:
                log.warning("transfer_failed", version=version, reason=str(error))
                fault = TransferFailed(f"the weights could not be sent: {error}")
                self.close()
            else:
                self._sent = str(version)
                return urls
        raise fault

    def attend(self, version: int) -> tuple[str, ...]:
        """Send the weights once more if a server that answers does not carry ``version`` (it was restarted).

        Returns the servers that did not carry it.
        """
        behind = tuple(url for url in self._reachable(0.0) if label_of(url) != str(version))
        if not behind or self._sent != str(version):
            return ()
        self.close()
        try:
            self.write(version)
        except TransferFailed as error:
            log.warning("servers_not_joined", servers=behind, reason=error.what)
            return ()
        return behind

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
        if self._fleet is not None:
            self._fleet.leave()
        self._engine = self._fleet = None

    def _send(self, urls: tuple[str, ...], label: str) -> None:
        if self._fleet is None or self._fleet.urls != urls or self._engine is None:
            self.close()
            self._fleet = Fleet(urls, self._workers, self._seconds, self._cache)
            self._engine = self._open_engine(self._fleet)
        self._fleet.label = label
        self._engine.send_weights()

    def _reachable(self, patience: float) -> tuple[str, ...]:
        end = monotonic() + patience
        while True:
            found = tuple(url for url in self._urls if healthy(url))
            if len(found) == len(self._urls) or monotonic() >= end:
                return found
            sleep(_ASK_SECONDS)


class NcclPublisher(Publisher):
    """Sends versions; they are announced when the servers have them."""

    def __init__(self, writer: DeviceWriter, *, patience: float) -> None:
        self._writer, self._patience = writer, patience

    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Send ``version`` to all servers. Raises TransferFailed."""
        self._writer.write(version.pack(), patience=self._patience)
        self._patience = 0.0  # it is for the start, when servers and learner start together
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return Release("nccl:", fingerprint(tensors, dtype), size)

    def attend(self, version: Version) -> tuple[str, ...]:
        """Send ``version`` to servers that started later; return them."""
        return self._writer.attend(version.pack())


def fingerprint(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> str:
    """Return a digest of names and sums of the bytes that are sent, computed where the tensors lie."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        sent = as_published(name, tensor.detach(), dtype)
        total = sent.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)
        digest.update(f"{name}={int(total)};".encode())
    return digest.hexdigest()


def open_publisher(config: Config, policy: Policy) -> NcclPublisher:
    """Return the learner's side for a recipe with ``weights = "nccl"``. Raises ConfigError."""
    import torch

    remedy = 'Set it to "file" (one host, or a shared disk) or "bus" (any host).'
    if not torch.cuda.is_available():
        what = 'server.weights = "nccl" sends weights from the learner\'s GPU, and PyTorch finds none here'
        raise ConfigError(what, where="server.weights", remedy=remedy)
    if policy.sharded:
        raise ConfigError(
            'server.weights = "nccl" sends weights from one device, and learner.launch spreads them over '
            "several",
            where="server.weights",
            remedy=remedy,
        )
    server = config.server
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else None
    writer = DeviceWriter(
        addresses(config),
        workers=placement.workers(server),
        cache=server.pause_cache,
        seconds=server.start_seconds,
        open_engine=opener(policy.weights, dtype),
    )
    return NcclPublisher(writer, patience=server.start_seconds)


def addresses(config: Config) -> tuple[str, ...]:
    """Return the URLs of the servers of a recipe, which must be known beforehand."""
    server = config.server
    if server.urls:
        return tuple(url.rstrip("/") for url in server.urls)
    return tuple(f"http://127.0.0.1:{server.port + index}" for index in range(server.count))


def opener(
    weights: Callable[[], Mapping[str, torch.Tensor]], dtype: torch.dtype | None
) -> Callable[[Fleet], Any]:
    """Return a function that builds vLLM's trainer engine for a fleet.

    ``weights`` returns the current parameters by name; floating-point ones are sent as ``dtype``.
    """

    def build(fleet: Fleet) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(
            init_info(fleet), client=fleet, source=source(weights, dtype)
        )

    return build


def init_info(fleet: Fleet) -> Any:
    """Return vLLM's description of a transfer from rank 0, in packed buffers."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address, port = meeting_point(fleet.urls[0])
    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=fleet.world_size, packed=True, rank=0
    )


def source(weights: Callable[[], Mapping[str, torch.Tensor]], dtype: torch.dtype | None) -> Any:
    """Return vLLM's ``WeightSource`` over what ``weights`` returns at the time of each pass."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM is imported without types
        def metadata(self) -> list[Any]:
            return [
                ParamMeta(name, published_type(name, one.dtype, dtype), tuple(one.shape))
                for name, one in weights().items()
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, one in weights().items():
                yield name, as_published(name, one.detach(), dtype).contiguous()

    return Source()


def meeting_point(url: str) -> tuple[str, int]:
    """Return an address of this host that the server at ``url`` can reach, and a free port on it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        address = str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return address, int(listener.getsockname()[1])


def healthy(url: str) -> bool:
    """Return whether a server answers."""
    try:
        request(f"{url}/health", None, seconds=_HEALTH_SECONDS)
    except TransferFailed:
        return False
    return True


def label_of(url: str) -> str:
    """Return the label of a server's weights, empty where it cannot be asked or is paused half-way."""
    try:
        paused = _table(request(f"{url}/is_paused", None, seconds=_HEALTH_SECONDS)).get("is_paused")
        answer = _table(request(f"{url}/weight_info", None, seconds=_HEALTH_SECONDS))
    except (TransferFailed, msgspec.DecodeError):
        return ""
    return "" if paused is not False else str(answer.get("weight_version", ""))


def _table(payload: bytes) -> dict[str, Any]:
    return msgspec.json.decode(payload, type=dict[str, Any])


def request(url: str, body: object, *, seconds: float) -> bytes:
    """Post ``body`` as JSON (get, for None) and return the answer. Raises TransferFailed."""
    data = None if body is None else msgspec.json.encode(body)
    message = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with _direct.open(message, timeout=seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = " ".join(error.read()[:1000].decode(errors="replace").split())
        raise TransferFailed(f"HTTP {error.code}: {text}", where=url) from error
    except (OSError, HTTPException) as error:
        raise TransferFailed(f"no answer: {error!r}", where=url) from error


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
