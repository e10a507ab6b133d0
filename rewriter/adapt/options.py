"""What a run of `rewrite adapt` was asked for, and the settings of the Trainer that follow from it and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rewriter.common.errors import RewriterError
from rewriter.common.suggestions import did_you_mean
from rewriter.common.yaml_documents import read
from rewriter.kernels import parse_format
from rewriter.recipes.recipe import Adaptation

Method = Literal["sft", "distill"]
Zero = Literal["1", "2", "3", "plus-plus", "node-local"]
ExpertOrder = Literal["D+E", "E+D"]
TooLong = Literal["truncate", "split", "refuse"]
Train = Literal["all", "rewritten"]

_SETTINGS: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "seed",
      "data_seed", "save_total_limit", "dataloader_num_workers"), int, "a whole number"),
    (("num_train_epochs", "learning_rate", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
      "max_grad_norm", "neftune_noise_alpha", "logging_steps", "eval_steps", "save_steps"), int | float, "a number"),
    (("bf16", "tf32", "gradient_checkpointing", "full_determinism", "use_cpu", "dataloader_pin_memory"), bool,
     "true or false"),
    (("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs"), object, ""),
)  # fmt: skip
SETTINGS = tuple(name for names, _, _ in _SETTINGS for name in names)
"""The names of transformers.TrainingArguments that mean here what they mean there."""
_OR_NONE = ("neftune_noise_alpha", "save_total_limit", "tf32")

FREE = (
    "logging_steps", "save_steps", "save_total_limit", "per_device_train_batch_size", "gradient_accumulation_steps",
    "per_device_eval_batch_size", "eval_steps", "dataloader_num_workers", "dataloader_pin_memory", "use_cpu",
)  # fmt: skip
"""Settings that do not change what is learned: a run may be resumed with others."""

DEFAULTS: Mapping[str, Any] = {
    # Ladder Residual (arXiv 2501.06589), section 4.2.1
    "optim": "adamw_torch", "learning_rate": 5e-6, "warmup_steps": 200, "lr_scheduler_type": "cosine",
    "num_train_epochs": 2.0, "max_grad_norm": 1.0, "weight_decay": 0.0, "save_total_limit": 2, "logging_steps": 1,
    "seed": 0,
}  # fmt: skip
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim` that step each element by itself, and so need not see whole tensors."""
MOST_TOKENS = 10**15  # a run of more is a slip of the pen: the largest so far saw 10**14
BATCH = 32  # rows of an optimizer step, over all ranks; the paper's
MICRO_BATCH = 8  # rows that a rank computes at once, at most, where nothing else is said


@dataclass(frozen=True)
class Options:
    """How to train; see `rewrite adapt --help`. `settings` are TrainingArguments by name (those of `SETTINGS`).

    `method` and `train` are None where they follow from the run (`resolved`); without `too_long`, texts are split and
    conversations truncated.
    """

    method: Method | None = None
    tokens: int | None = None
    train: Train | None = None
    temperature: float = 1.0
    cross_entropy: float = 0.0
    lora: int = 0
    base: str | None = None
    zero: Zero | None = None
    ep: int = 1
    ep_order: ExpertOrder = "D+E"
    tp: int = 1
    sp: int = 1
    from_scratch: bool = False
    length: int | None = None
    too_long: TooLong | None = None
    packing: bool = True
    trust_remote_code: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("--method", self.method, Method, optional=True)
        _one_of("--train", self.train, Train, optional=True)
        _one_of("--zero", self.zero, Zero, optional=True)
        _one_of("--ep-order", self.ep_order, ExpertOrder)
        _one_of("--too-long", self.too_long, TooLong, optional=True)
        for name, value, least in (
            ("--tp", self.tp, 1), ("--sp", self.sp, 1), ("--ep", self.ep, 1), ("--lora", self.lora, 0),
            ("--length", self.length, 2), ("--tokens", self.tokens, 1), ("--cross-entropy", self.cross_entropy, 0),
        ):  # fmt: skip
            if value is not None and not value >= least:
                raise RewriterError(f"{name} {value}: expected {least} or more")
            if value is not None and value > MOST_TOKENS:
                raise RewriterError(f"{name} {str(value)[:60]}: expected at most {MOST_TOKENS:,}")
        if not self.temperature > 0:
            raise RewriterError(f"--temperature {self.temperature}: expected more than 0")
        self._check_combinations()

    def resolved(self, original_known: bool) -> Options:
        """With a method: distillation where there is an original to learn from; it trains what is rewritten, where
        that can be trained apart."""
        distills = original_known and not self.from_scratch
        method = self.method or ("distill" if distills else "sft")
        apart = method == "distill" and not any(used for _, used, _ in self._trained_whole())
        return replace(self, method=method, train=self.train or ("rewritten" if apart else "all"))

    @property
    def budgeted(self) -> bool:
        """Whether settings follow from the tokens of the run, not from the recipe."""
        return self.method == "distill" or self.tokens is not None

    @property
    def sharded(self) -> bool:
        """Whether the runtime module trains, its ranks sharing heads, channels or tokens."""
        return self.tp > 1 or self.sp > 1

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 shards the weights of the Hugging Face model."""
        return self.zero in ("3", "plus-plus", "node-local")

    def _check_combinations(self) -> None:
        self._check_method()
        self._check_train()
        self._check_base()
        if self.ep > 1:
            self._check_experts()
        if self.sharded:
            self._check_sharded()

    def _check_train(self) -> None:
        for name, used, why in self._trained_whole():
            if used and self.train == "rewritten":
                raise RewriterError(f"--train rewritten with {name}: {why}. Leave out --train")

    def _trained_whole(self) -> tuple[tuple[str, Any, str], ...]:
        """What trains all weights: the option, whether it is used, and why."""
        return (
            ("--lora", self.lora, "adapters are on all linear layers"),
            ("--from-scratch", self.from_scratch, "random weights are all to be trained"),
            ("--tp or --sp", self.sharded, "the sharded module trains whole"),
            (f"--zero {self.zero}", self.fully_sharded, "its shards hold trained and frozen weights alike"),
            ("--ep", self.ep > 1, "the ranks that share experts train all of them"),
        )

    def _check_base(self) -> None:
        if self.base is None:
            return
        try:
            parse_format(self.base)
        except ValueError as error:
            raise RewriterError(f"--base: {error}") from None
        if not self.lora:
            raise RewriterError(f"--base {self.base}: weights that are trained cannot be quantized. Add --lora R")
        if self.zero == "plus-plus":
            raise RewriterError(
                f"--base {self.base} with --zero plus-plus: weights that are quantized already are gathered as they "
                "are. Use --zero 3"
            )

    def _check_experts(self) -> None:
        for name, used, instead in (
            ("--tp", self.tp > 1, "its ranks share heads and channels, experts too. Use one of the two"),
            ("--sp", self.sp > 1, "experts are sharded in the Hugging Face model. Train on data-parallel ranks"),
            ("--zero", self.zero, "each rank steps all that it holds. Leave out --zero"),
            ("--base", self.base, "experts are not quantized. Leave out one of the two"),
        ):
            if used:
                raise RewriterError(f"{name} with --ep {self.ep}: {instead}")

    def _check_method(self) -> None:
        distills = self.method == "distill"
        if self.cross_entropy and self.method == "sft":
            raise RewriterError(
                f"--cross-entropy {self.cross_entropy} is a part of the distillation loss. Add --method distill"
            )
        if distills and self.from_scratch:
            raise RewriterError(
                "--from-scratch --method distill: the teacher is the same weights under the original wiring, and those "
                "are random. Leave out one of the two"
            )
        if self.from_scratch and self.lora:
            raise RewriterError("--from-scratch --lora: an adapter on random weights learns nothing. Leave out one")

    def _check_sharded(self) -> None:
        where = f"--tp {self.tp}" if self.tp > 1 else f"--sp {self.sp}"
        if self.lora:
            raise RewriterError(
                f"--lora with {where}: adapters are added to the Hugging Face model. Train on data-parallel ranks"
            )
        for name in ("neftune_noise_alpha", "gradient_checkpointing"):
            if self.settings.get(name):
                raise RewriterError(f"--set {name} with {where}: the sharded module has none. Use data-parallel ranks")
        if self.zero not in (None, "3"):
            raise RewriterError(f"--zero {self.zero} with {where}: it is for data-parallel ranks alone. Use --zero 3")


def _one_of(name: str, value: Any, kind: Any, optional: bool = False) -> None:
    known = get_args(kind)
    if value not in known and not (optional and value is None):
        raise RewriterError(f"{name} {value}: expected {', '.join(known)}")


def parse_settings(assignments: list[str]) -> dict[str, Any]:
    """`["max_steps=100"]` as `{"max_steps": 100}`; values are read as YAML. Raises RewriterError for what is neither
    an assignment nor one of `SETTINGS`."""
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            raise RewriterError(f"--set {assignment}: expected NAME=VALUE, such as max_steps=1000")
        if name in found:
            raise RewriterError(f"--set {assignment}: {name} is set twice")
        document = read(value)
        if document.problems:
            raise RewriterError(f"--set {assignment}: {document.problems[0].message}")
        found[name] = document.data
    return check_settings(found)


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings. Raises RewriterError for a name that means nothing here, and for a value of another kind."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise RewriterError(f"--set {name}: {did_you_mean(name, SETTINGS, what='settings that adapt takes')}")
        for names, kind, words in _SETTINGS:
            fits = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
            if name in names and not fits and not (value is None and name in _OR_NONE):
                raise RewriterError(f"--set {name}={value}: expected {words}")
    return dict(settings)


@dataclass(frozen=True)
class Schedule:
    """Sizes that follow from the settings: rows per rank and backward pass, passes per step, steps, rows per step."""

    micro_batch: int
    accumulation: int
    steps: int
    batch: int


def defaults(adapt: Adaptation | None) -> dict[str, Any]:
    """What the recipe's `adapt` section says, in the Trainer's names; the paper's where it says nothing."""
    found = dict(DEFAULTS)
    if adapt is not None:
        found |= {
            "optim": "adamw_torch",
            "learning_rate": adapt.learning_rate,
            "warmup_steps": adapt.warmup_steps,
            "lr_scheduler_type": adapt.schedule,
            "num_train_epochs": adapt.epochs,
        }
    return found


def schedule(
    settings: Mapping[str, Any], adapt: Adaptation | None, rows: int, replicas: int, budgeted: int | None = None
) -> Schedule:
    """The sizes for `rows` rows of data and so many data-parallel ranks.

    A step sees `gradient_accumulation_steps × per_device_train_batch_size × replicas` rows where the former is set;
    else as many as are `budgeted`, or as the recipe's `batch_size` says, on any number of ranks. Raises RewriterError
    where that does not divide.
    """
    micro = settings.get("per_device_train_batch_size")
    accumulation = settings.get("gradient_accumulation_steps")
    if accumulation is not None:
        micro = micro or MICRO_BATCH
        batch = _count("gradient_accumulation_steps", accumulation) * micro * replicas
    else:
        batch = budgeted or (BATCH if adapt is None else adapt.batch_size)
        if batch % replicas:
            raise RewriterError(
                f"a step of {batch} rows cannot be divided over {replicas} data-parallel ranks. Use a number of ranks "
                "that divides it, or --set gradient_accumulation_steps=N, which makes it a multiple"
            )
        own = batch // replicas
        if micro is None:
            micro = max(n for n in range(1, min(own, MICRO_BATCH) + 1) if own % n == 0)
        if own % _count("per_device_train_batch_size", micro):
            raise RewriterError(
                f"per_device_train_batch_size={micro}: a rank has {own} of the {batch} rows of a step, which it does "
                f"not divide. Use a divisor of {own}, or set gradient_accumulation_steps too"
            )
        accumulation = own // micro
    steps = settings.get("max_steps", -1)
    if steps is None or steps <= 0:
        epochs = float(settings.get("num_train_epochs", 1.0))
        steps = max(1, int(rows * epochs // batch))
    return Schedule(int(micro), int(accumulation), int(steps), int(batch))


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise RewriterError(f"--set {name}={value}: expected a whole number from 1")
    return value
