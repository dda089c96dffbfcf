"""The plan of a run on GPUs: what fits, what it leaves on disks, how long a round takes, and a better split.

All of it is reckoned before anything starts, from the recipe and the sizes of its model; the assumptions are
the constants below (``docs/full-scale.md`` says where they come from).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from bus.subjects import STREAMS
from engine import model_cache, models, placement
from engine.config import Config
from engine.errors import ConfigError
from engine.inference import frozen
from engine.inference.adapters import kept
from engine.placement import arguments, workers
from engine.records import history
from engine.running.round_time import Latencies, Plays, Round, fastest, round_of
from engine.training import footprint
from engine.training.footprint import GIB, Footprint, Shape
from engine.weights.bus_capacity import FULL_SHARE


class Card(NamedTuple):
    """A GPU: its memory in GiB, bf16 TFLOP/s without sparsity, memory bandwidth in TB/s."""

    gib: float
    tflops: float
    bandwidth: float


CARDS = {
    "A100-40": Card(39, 312, 1.56),
    "A100-80": Card(79, 312, 2.04),
    "H100": Card(79, 989, 3.35),
    "H200": Card(140, 989, 4.8),
    "B200": Card(178, 2250, 8.0),
}
RESERVE = 4.0  # GiB of a learner's device: its context, NCCL's buffers, fragmentation
WORKSPACE = 3.0  # GiB of a server's device: activations, graphs
UTILISATION = 0.92  # vLLM's default
MFU, MFU_EXPERTS = 0.4, 0.15
BANDWIDTH_USED, STEP_OVERHEAD = 0.8, 0.005  # of a decoding step
# Seconds for a GiB of published weights: to the host, cast, to the file, its digest; digest and load of a
# server; the same way over the bus; of a checkpoint.
PUBLISH, LOAD, BUS, CHECKPOINT = 1.7, 0.58, 2.0, 0.88
SAMPLE_BYTES = 9  # of a token in the stream of samples
# Of its context a play samples this part, the longest so many times as much; prompts and observations.
REPLY_SHARE, THINKING_SHARE, LONGEST, PROMPT_SHARE = 1 / 8, 5 / 8, 4, 1 / 16
_OTHER_CARD = "Another card is named in run.card; run.card= goes on without this check."
FASTER = 0.95  # a split is proposed when its round takes no more than this part of the recipe's

SHAPES = {
    "Qwen3-4B": Shape(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen3-8B": Shape(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
    "Qwen3-30B-A3B": Shape(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    ),
}  # fmt: skip
"""Of the models of the shipped recipes, which need not be on this host for a plan."""


def shape_of(config: Config, model: Path | None = None) -> Shape | None:
    """Return the sizes of the recipe's model, None where its config.json is not here or is of another kind.

    ``model`` is its directory where that is known. Nothing is downloaded.
    """
    path, table = config.model.path, config.warmstart
    if path.startswith(models.WARMSTART):
        return Shape(
            hidden_size=table.hidden_size,
            intermediate_size=table.intermediate_size,
            num_hidden_layers=table.layers,
            num_attention_heads=table.heads,
            vocab_size=table.vocabulary,
        )
    if path.startswith(models.PACKAGE) and model is None:
        model = next(model_cache.directory().glob(f"{path.removeprefix(models.PACKAGE)}-*"), None)
    file = (model or Path(path).expanduser()) / "config.json"
    if path.startswith(models.HUB) and model is None:
        from huggingface_hub import try_to_load_from_cache

        found = None
        with suppress(ValueError):  # for what cannot be a name on the hub
            found = try_to_load_from_cache(path.removeprefix(models.HUB), "config.json")
        if not isinstance(found, str):
            names = (size for size in SHAPES if f"{path}-".startswith(f"{models.HUB}Qwen/{size}-"))
            return SHAPES.get(max(names, key=len, default=""))
        file = Path(found)
    try:
        return footprint.read(file)
    except (OSError, msgspec.MsgspecError):
        return None


class Server(NamedTuple):
    """One device of a server: bytes of its weights, of its KV cache, and of a token in it."""

    weights: float
    cache: float
    token: float


def server_of(config: Config, shape: Shape, card: Card) -> Server:
    """Return the memory of a device of the servers in ``config``."""
    flags, engines = arguments(config.server), _number(config, "data-parallel-size", 1)
    parts, spread = workers(config.server) / engines, engines if flags.get("enable-expert-parallel") else 1
    width = 1 if "quantization" in flags else _width(config)
    experts = shape.num_hidden_layers * shape.num_experts * shape.expert
    weights = width * (shape.parameters - experts + experts / spread) / parts
    token = 2 * shape.num_hidden_layers * shape.keys * _width(config) / parts
    room = _number(config, "gpu-memory-utilization", UTILISATION) * card.gib - WORKSPACE
    return Server(weights, max(room * GIB - weights, 0.0), token)


def _number(config: Config, flag: str, default: float) -> float:
    with suppress(ValueError):
        return float(arguments(config.server).get(flag, default))
    return default


def _width(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def ranks(config: Config) -> int:
    """Return how many processes the learner has, on all hosts of its launch."""
    words = " ".join(config.learner.launch).replace("=", " ").replace("_", "-").split()
    sizes = {one: int(two) for one, two in pairwise(words) if two.isdigit()}
    local = sizes.get("--nproc-per-node", len(config.learner.devices) or 1)
    return sizes.get("--num-processes", local * sizes.get("--nnodes", config.launch.hosts.get("learner", 1)))


def learner_of(config: Config, shape: Shape, processes: int | None = None) -> Footprint:
    """Return the memory of a device of the learner, of ``processes`` (None: those of the recipe)."""
    longest = max(config.model.max_model_len, config.learner.micro_batch_tokens)
    sharded = placement.shards(config) if processes is None else processes > 1
    size = ranks(config) if processes is None else processes
    return footprint.learner(shape, config.learner, row=longest, devices=size if sharded else 1)


def require_fitting(config: Config, shape: Shape | None) -> None:
    """Check that a play fits into a message and this host's parts on the card that the recipe names.

    Raises ConfigError.
    """
    if shape is None:
        return
    play = config.agent.context_tokens * (SAMPLE_BYTES + shape.routed) / (1 << 20)
    if config.learner.router_replay and play > config.bus.max_payload_mb:
        raise ConfigError(
            f"A play of agent.context_tokens = {config.agent.context_tokens} with its experts takes up to "
            f"{math.ceil(play)} MB, and bus.max_payload_mb is {config.bus.max_payload_mb}",
            where="bus.max_payload_mb",
            remedy="Raise it, or shorten plays.",
        )
    card = CARDS.get(config.run.card)
    if card is None:
        return
    learner = config.learner
    known = not learner.launch or placement.shards(config)  # a launch of one's own may shard in other ways
    if "learner" in config.run.roles and learner.devices and known:
        needs = learner_of(config, shape).gib
        if needs + RESERVE > card.gib:
            raise ConfigError(
                f"A device of the learner takes about {needs:.0f} GiB and {RESERVE:g} for its context, and "
                f"{config.run.card} has {card.gib:g}",
                where="learner.devices",
                remedy=f"Give it more devices, or shorten its rows (model.max_model_len). {_OTHER_CARD}",
            )
    row = config.model.max_model_len
    for key, _, server in _served(config, shape, card):
        if server.cache < server.token * row:
            raise ConfigError(
                f"A device of a server has {server.weights / GIB:.1f} GiB of weights, and {config.run.card} "
                f"no room beside them for one sequence of {row} tokens",
                where=f"{key}.devices",
                remedy=f"Spread a server over more devices (tensor-parallel-size). {_OTHER_CARD}",
            )


def _served(config: Config, shape: Shape, card: Card) -> Iterator[tuple[str, tuple[int, ...], Server]]:
    """Yield key, devices and memory of the servers that this host starts on devices."""
    if "server" in config.run.roles and config.server.devices:
        yield "server", config.server.devices, server_of(config, shape, card)
    if "designer" in config.run.roles and config.designer.starts_frozen and config.designer.frozen.devices:
        own = frozen.config_of(config)
        size = shape if own.model.path == config.model.path else shape_of(own)
        if size is not None:
            yield "designer.frozen", own.server.devices, server_of(own, size, card)


class Disk(NamedTuple):
    """Bytes of a version and of a checkpoint, and how many of each are there at most."""

    version: float
    versions: int
    checkpoint: float
    checkpoints: int

    @property
    def most(self) -> float:
        """Bytes that a run takes at most, without its bus."""
        return self.version * self.versions + self.checkpoint * self.checkpoints


def disk_of(config: Config, shape: Shape) -> Disk:
    """Return what the learner writes: versions kept and a new one, checkpoints likewise, and the best one."""
    learner, rank = config.learner, config.learner.lora.rank
    trained = shape.adapted(rank) if rank else shape.parameters
    versions = kept(config.curriculum.lead) + 1 if config.server.weights in ("file", "bus") else 0
    return Disk(
        version=4 * trained if config.adapters else _width(config) * shape.parameters,
        versions=versions,
        checkpoint=trained * (4 + footprint.MOMENTS[learner.optimizer.kind]),
        checkpoints=learner.checkpoints_kept + 1 + bool(learner.best_by),
    )


class Work(NamedTuple):
    """A round's plays and trained positions; ``context`` is what a play has in the cache on average.

    ``measured`` counts the recorded plays that the tokens come from; 0: they are assumed.
    """

    plays: float
    tokens: float
    longest: float
    positions: float
    context: float
    measured: int = 0


def work_of(config: Config, database: Path | None = None) -> Work:
    """Return the work of a round, by the plays in ``database`` where there are some."""
    table, agent = config.curriculum, config.agent
    thinks = config.model.thinking == "on"
    tokens, measured = agent.context_tokens * (THINKING_SHARE if thinks else REPLY_SHARE), 0
    longest, seen = min(LONGEST * tokens, agent.context_tokens), agent.context_tokens * PROMPT_SHARE
    if database is not None and database.exists():
        with suppress(sqlite3.Error), closing(history.open_for_reading(database)) as connection:
            found = connection.execute("SELECT COUNT(*), AVG(tokens), MAX(tokens) FROM episodes").fetchone()
            measured, tokens, longest = found if found[0] and found[1] else (0, tokens, longest)
    forgets = thinks and config.model.history == "template"  # a segment for each turn, without old thoughts
    plain = table.environments * table.plays_per_round
    hinted = table.environments * table.hinted_plays * table.hinted_rounds / table.rounds_per_window
    designs = table.environments / table.rounds_per_window * config.designer.sampling.max_tokens / 2
    trained = plain + (hinted if config.learner.train_hinted else 0)
    positions = trained * (tokens * (1 + forgets) + seen) + designs
    return Work(plain + hinted, tokens, longest, positions, tokens / (4 if forgets else 2) + seen, measured)


def plays_of(config: Config, work: Work, server: Server) -> Plays:
    """Return a round's plays as they are dealt to servers, by what each has room for."""
    engines = _number(config, "data-parallel-size", 1)
    places = min(config.server.max_concurrency, engines * server.cache / (server.token * work.context))
    at_once = config.curriculum.lead + 1
    return Plays(work.plays, work.tokens, work.longest, at_once, config.agent.concurrency, places)


def latencies_of(config: Config, shape: Shape, card: Card, work: Work, servers: int) -> Latencies:
    """Return the seconds of a round's parts on ``card``: decoding reads memory, training computes."""
    server, disk, learner = server_of(config, shape, card), disk_of(config, shape), config.learner
    rate = BANDWIDTH_USED * card.bandwidth * 1e12
    passes = 3 + learner.gradient_checkpointing + (learner.kl > 0)  # of a forward pass; backward takes two
    passes *= 1 if learner.minibatches else learner.steps_per_batch
    attention = 2 * shape.num_hidden_layers * shape.query * 2 * work.context
    operations = passes * work.positions * (2 * shape.active + attention)
    way = {"bus": PUBLISH + BUS, "nccl": 0.0}.get(config.server.weights, PUBLISH)
    return Latencies(
        step=STEP_OVERHEAD + server.weights / rate,
        play=server.token * work.context / rate / _number(config, "data-parallel-size", 1),
        train=operations / ((MFU_EXPERTS if shape.num_experts else MFU) * card.tflops * 1e12),
        publish=(disk.version * way + disk.checkpoint * CHECKPOINT / learner.checkpoint_every) / GIB,
        load=disk.version / GIB * LOAD * (servers if config.server.rollout == "rolling" else 1),
    )


def rounds_of(config: Config, shape: Shape, card: Card, work: Work) -> tuple[Round, tuple[int, Round] | None]:
    """Return the round of the recipe, and the number of servers of a faster split of the same devices."""
    plays = plays_of(config, work, server_of(config, shape, card))
    each, devices = workers(config.server), len(config.server.devices) + len(config.learner.devices)

    def of(servers: int, learners: int = 0) -> Round:
        takes = latencies_of(config, shape, card, work, servers)
        return round_of(plays, takes, servers=servers, learners=learners or devices - servers * each)

    now = of(config.server.count, ranks(config))
    if config.learner.launch or config.launch.hosts:
        return now, None
    fit = [
        servers
        for servers in range(1, (devices - 1) // each + 1)
        if learner_of(config, shape, devices - servers * each).gib + RESERVE <= card.gib
    ]
    best = fastest(fit, of)
    return now, best if best is not None and best[1].seconds < FASTER * now.seconds else None


def needs(config: Config, shape: Shape | None, database: Path | None = None) -> Iterator[str]:
    """Yield the lines of a plan about devices, disks and the time of a round, as far as they are known."""
    if shape is None:
        name = config.model.path.removeprefix(models.HUB)
        yield f"sizes      unknown: devices, disk and rounds need config.json of {name} on this"
        yield f"           host, of a kind that is reckoned ({', '.join(footprint.KINDS)})"
        return
    card, work = CARDS.get(config.run.card), work_of(config, database)
    yield from _devices(config, shape, card)
    yield from _disk(config, shape, work)
    if card and not config.server.urls and {"server", "learner"} <= set(config.run.roles):
        yield from _seconds(config, shape, card, work)


def _devices(config: Config, shape: Shape, card: Card | None) -> Iterator[str]:
    row, of = config.model.max_model_len, f" of {card.gib:g}" if card else ""
    if not config.server.devices and not config.learner.devices:
        return
    named = config.run.card or "unknown: run.card names it, and servers and rounds can be reckoned"
    yield f"card       {named}; GiB of each device:"
    if config.learner.devices and "learner" in config.run.roles:
        found = learner_of(config, shape)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found._asdict().items())
        yield f"  learner      {list(config.learner.devices)}: {found.gib:.1f}{of}: {parts}"
    for key, devices, one in _served(config, shape, card) if card else ():
        yield (
            f"  {key:<12} {list(devices)}: weights {one.weights / GIB:.1f}, KV cache {one.cache / GIB:.1f}"
            f"{of}: {one.cache / one.token / row:.1f} sequences of {row:,} tokens"
        )


def _disk(config: Config, shape: Shape, work: Work) -> Iterator[str]:
    if "learner" not in config.run.roles:
        return
    disk, every = disk_of(config, shape), config.learner.checkpoint_every
    versions = f"{disk.versions} versions of {_size(disk.version)}, " if disk.versions else ""
    written = _size(bool(disk.versions) * disk.version + disk.checkpoint / every)
    yield f"disk       {written} per round; at most {_size(disk.most)} at a time:"
    yield f"           {versions}{disk.checkpoints} checkpoints of {_size(disk.checkpoint)}"
    made = work.positions * (SAMPLE_BYTES + shape.routed * config.learner.router_replay)
    room = FULL_SHARE * STREAMS["SAMPLE"].share * config.bus.store_gb * GIB
    yield (
        f"bus        {_size(made)} of samples per round, {_size(2 * every * made)} in {2 * every} rounds, "
        f"two intervals of checkpoints; room for {_size(room)}"
    )
    if 2 * every * made > room:
        yield "           Checkpoints will be written before their time: raise bus.store_gb."


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size > GIB / 10 else f"{size / (1 << 20):,.1f} MiB"


def _seconds(config: Config, shape: Shape, card: Card, work: Work) -> Iterator[str]:
    server = server_of(config, shape, card)
    if not config.server.devices or not config.learner.devices or server.cache < server.token * work.longest:
        return
    now, better = rounds_of(config, shape, card, work)
    told = f"of {work.measured:,} recorded plays" if work.measured else "assumed: nothing is recorded yet"
    yield f"round      {now}"
    yield (
        f"           {work.plays:,.0f} plays of {work.tokens:,.0f} tokens, the longest {work.longest:,.0f} "
        f"({told})"
    )
    if better is not None:
        devices = sorted((*config.server.devices, *config.learner.devices))
        at = better[0] * workers(config.server)
        settings = f"server.devices={devices[:at]} learner.devices={devices[at:]}".replace(", ", ",")
        yield f"faster     server.count={better[0]} {settings}"
        yield f"           {better[1]}"
