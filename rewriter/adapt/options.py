"""Options of a run of `rewrite adapt`, and the Trainer's settings that `--set` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import read
from rewriter.kernels import parse_format

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

FITTING = ("seed", "use_cpu", "per_device_eval_batch_size")
"""Settings of a run without gradients."""
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim` that step each element by itself, and so need not see whole tensors."""
MOST_TOKENS = 10**15  # a run of more is a slip of the pen: the largest so far saw 10**14


@dataclass(frozen=True)
class AdaptOptions:
    """Options of a run; see `rewrite adapt --help`. `settings` are TrainingArguments by name (those of `SETTINGS`).

    `prompt_weights`: weights of the prompt's own. `link`: files of weights that training left as they were are hard
    links. `method` and `train` are None where they follow from the run (`resolved`); without `too_long`, texts are
    split and conversations truncated. Raises RewriterError for values out of range and options that exclude each other.
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
    prompt_weights: bool = False
    link: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self.settings)
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
        if self.base is not None:
            try:
                parse_format(self.base)
            except ValueError as error:
                raise RewriterError(f"--base: {error}") from None
        for excluded, message in self._conflicts():
            if excluded:
                raise RewriterError(message)

    def resolved(self, original_known: bool) -> AdaptOptions:
        """With a method: distillation where there is an original to learn from; it trains what is rewritten, where
        that can be trained apart."""
        distills = original_known and not self.from_scratch
        method = self.method or ("distill" if distills else "sft")
        apart = method == "distill" and not any(used for _, used, _ in self._trained_whole())
        packing = self.packing and not self.prompt_weights  # a cache holds one example in a row
        return replace(self, method=method, train=self.train or ("rewritten" if apart else "all"), packing=packing)

    @property
    def budgeted(self) -> bool:
        """True where settings follow from the tokens of the run, not from the recipe."""
        return self.method == "distill" or self.tokens is not None

    @property
    def sharded(self) -> bool:
        """True where the runtime module trains, its ranks sharing heads, channels or tokens."""
        return self.tp > 1 or self.sp > 1

    @property
    def fully_sharded(self) -> bool:
        """True where FSDP2 shards the weights of the Hugging Face model."""
        return self.zero in ("3", "plus-plus", "node-local")

    def _trained_whole(self) -> tuple[tuple[str, Any, str], ...]:
        """Options that train all weights: the name, a true value where it is used, and why."""
        return (
            ("--lora", self.lora, "adapters are on all linear layers"),
            ("--from-scratch", self.from_scratch, "random weights are all to be trained"),
            ("--tp or --sp", self.sharded, "the sharded module trains whole"),
            (f"--zero {self.zero}", self.fully_sharded, "its shards hold trained and frozen weights together"),
            ("--ep", self.ep > 1, "the ranks that share experts train all of them"),
        )

    def _conflicts(self) -> list[tuple[Any, str]]:
        """Options that exclude each other: a true value where both are given, and the error."""
        where, ep = f"--tp {self.tp}" if self.tp > 1 else f"--sp {self.sp}", f"with --ep {self.ep}"
        return [
            (self.cross_entropy and self.method == "sft",
             f"--cross-entropy {self.cross_entropy} is a part of the distillation loss. Add --method distill"),
            (self.from_scratch and self.method == "distill",
             "--from-scratch --method distill: the teacher is the same weights under the original wiring, and those "
             "are random. Leave out one of the two"),
            (self.from_scratch and self.lora,
             "--from-scratch --lora: an adapter on random weights learns nothing. Leave out one"),
            *((used and self.train == "rewritten", f"--train rewritten with {name}: {why}. Leave out --train")
              for name, used, why in self._trained_whole()),
            *((self.prompt_weights and used,
               f"--prompt-weights with {name}: weights of the prompt's own are fitted to the keys and values of the "
               f"original, {why}. Leave out one of the two")
              for name, used, why in (
                  ("--method sft", self.method == "sft", "not to targets of the data"),
                  ("--cross-entropy", self.cross_entropy, "not to targets of the data"),
                  ("--temperature", self.temperature != 1, "not to its predictions"),
                  ("--from-scratch", self.from_scratch, "of which random weights have none"),
                  ("--train all", self.train == "all", "of rewritten layers alone"),
                  ("--lora", self.lora, "for which adapters are not implemented"),
                  (f"--set {', '.join(sorted(self.settings.keys() - FITTING))}", self.settings.keys() - FITTING,
                   "by least squares, which need no setting of a training loop"),
                  ("--ep", self.ep > 1, "which is done on whole models"),
                  ("--tp or --sp", self.sharded, "which is done on whole models"),
                  (f"--zero {self.zero}", self.fully_sharded, "which is done on whole models"))),
            (self.base and not self.lora,
             f"--base {self.base}: weights that are trained cannot be quantized. Add --lora R"),
            (self.base and self.zero == "plus-plus",
             f"--base {self.base} with --zero plus-plus: weights that are quantized already are gathered as they "
             "are. Use --zero 3"),
            (self.ep > 1 and self.tp > 1,
             f"--tp {ep}: its ranks share heads and channels, experts too. Use one of the two"),
            (self.ep > 1 and self.sp > 1,
             f"--sp {ep}: experts are sharded in the Hugging Face model. Train on data-parallel ranks"),
            (self.ep > 1 and self.zero, f"--zero {ep}: each rank steps all that it holds. Leave out --zero"),
            (self.ep > 1 and self.base, f"--base {ep}: experts are not quantized. Leave out one of the two"),
            (self.sharded and self.lora,
             f"--lora with {where}: adapters are added to the Hugging Face model. Train on data-parallel ranks"),
            *((self.sharded and self.settings.get(name),
               f"--set {name} with {where}: the sharded module has none. Use data-parallel ranks")
              for name in ("neftune_noise_alpha", "gradient_checkpointing")),
            (self.sharded and self.zero not in (None, "3"),
             f"--zero {self.zero} with {where}: it is for data-parallel ranks alone. Use --zero 3"),
        ]  # fmt: skip


def _one_of(name: str, value: Any, kind: Any, optional: bool = False) -> None:
    known = get_args(kind)
    if value not in known and not (optional and value is None):
        raise RewriterError(f"{name} {value}: expected {', '.join(known)}")


def parse_settings(assignments: list[str]) -> dict[str, Any]:
    """`["max_steps=100"]` as `{"max_steps": 100}`; values are read as YAML. Raises RewriterError for what is neither
    an assignment nor one of `SETTINGS`."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            raise RewriterError(f"--set {assignment}: expected NAME=VALUE, such as max_steps=1000")
        if name in settings:
            raise RewriterError(f"--set {assignment}: {name} is set twice")
        document = read(value)
        if document.problems:
            raise RewriterError(f"--set {assignment}: {document.problems[0].message}")
        settings[name] = document.data
    return check_settings(settings)


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
