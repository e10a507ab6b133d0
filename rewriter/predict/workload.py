"""Jobs that are predicted and measured: a generation on ranks of a cluster, and its forward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from rewriter.common.errors import RewriterError, shortened

MOST_TOKENS = 1 << 32
AttentionKernels = Literal["fused", "plain"]
WeightFormat = Literal["float8", "int8", "int4", "nvfp4", "mxfp4"]
FIRST_TOKEN_PROMPTS = (1024, 8192, 32768)  # tokens of the prompts whose time to first token is predicted besides


@dataclass(frozen=True)
class Workload:
    """`batch` sequences of `prompt` tokens get `generate` more on `tp` ranks in all.

    `graphed`: replayed from CUDA graphs; otherwise the host launches every kernel. `compiled`: glue that stands
    together is one kernel, otherwise every operator is one (None: as `graphed`). `sp`: ranks that share tokens, in
    recipes that do (None: all). `nodes`: over how many nodes the ranks are spread (None: as few as hold them).
    `attention`: one kernel, or "plain": products with the scores between them in memory, over keys and values that are
    repeated for every query head, and over the whole static cache in a prefill, too (ranks that share the tokens of a
    prompt keep their own kernels). `all_logits`: a prefill computes those of every position, not of the last alone.
    `served`: intervals are of what a server's clients measure. `weights`: the format of the layers' weights (None: as
    the config says). `cache`: the dtype of keys and values (None: the model's). `l2_prefetch`, `sequence_parallel`:
    with these options of engines (`predict.exact`). Raises RewriterError for a number below
    1, for more tokens than 2^32, and for attention, weights or a cache of another name.
    """

    batch: int = 1
    prompt: int = 1024
    generate: int = 512
    graphed: bool = True
    tp: int = 8
    sp: int | None = None
    nodes: int | None = None
    compiled: bool | None = None
    attention: AttentionKernels = "fused"
    all_logits: bool = False
    served: bool = False
    weights: WeightFormat | None = None
    cache: Literal["float8"] | None = None
    l2_prefetch: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.attention not in get_args(AttentionKernels):
            raise RewriterError(f"--attention {self.attention}: expected {' or '.join(get_args(AttentionKernels))}")
        if self.weights is not None and self.weights not in (known := get_args(WeightFormat)):
            raise RewriterError(
                f"--weights {self.weights!r:.40}: expected {', '.join(known)}. Leave it out for the config's own"
            )
        if self.cache not in (None, "float8"):
            raise RewriterError(f"--cache {self.cache!r:.40}: expected float8. Leave it out for the model's dtype")
        for name in ("tp", "nodes", "sp"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise RewriterError(f"--{name} {number}: expected 1 or more")
        for name in ("batch", "prompt", "generate"):
            if getattr(self, name) < 1:
                raise RewriterError(f"{name}: {getattr(self, name)}; expected 1 or more")
        tokens = self.batch * (self.prompt + self.generate)
        if tokens > MOST_TOKENS:
            raise RewriterError(
                f"batch × (prompt + generate) is {shortened(tokens, 30)} tokens; expected {MOST_TOKENS:,} at most. "
                "Give smaller numbers"
            )

    @property
    def fused(self) -> bool:
        return self.graphed if self.compiled is None else self.compiled

    @property
    def past(self) -> int:
        """Tokens before the decode step that is measured: the mean of a generation."""
        return self.prompt + self.generate // 2


@dataclass(frozen=True)
class Cluster:
    """A fabric by name, file or value, changes to its delays, and whose library's collectives (None: those of the
    engine, or the fabric's first where none is compared with; of several the fastest)."""

    fabric: Any = "h100-nvlink"
    what_if: tuple[str, ...] = ()
    library: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class Draft:
    """`tokens` proposed for each step, of which each is accepted with probability `acceptance` if those before it are.

    Raises RewriterError for fewer than one token, and for a probability outside of [0, 1).
    """

    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0.0 <= self.acceptance < 1.0:
            raise RewriterError(
                f"--draft {self.tokens}:{self.acceptance:g}: expected a number of tokens above 0 and a rate below 1, "
                "such as 3:0.7"
            )

    @property
    def expected_tokens(self) -> float:
        """Tokens that a step yields (Leviathan et al., arXiv 2211.17192, equation 1)."""
        return (1 - self.acceptance ** (self.tokens + 1)) / (1 - self.acceptance)


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a layer's products. `bits`: of each, its share of scales included. `computes`: the dtype that
    activations are rounded to, where the device has such products; else, and where it is empty, weights are made the
    model's dtype as they are read, and products are those of that dtype. `only_experts`: other weights are of the
    model's dtype. `kept`: modules of the model's dtype by name, as configs list them: a part of the name, a name with
    asterisks, or after "re:" a regular expression. `head`: the head's weight is of the format, too."""

    name: WeightFormat
    bits: float
    computes: str = ""
    only_experts: bool = False
    kept: tuple[str, ...] = ()
    head: bool = False

    def share(self, itemsize: int) -> float:
        """Bytes over those of weights of `itemsize` bytes."""
        return self.bits / (8 * itemsize)


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass: `tokens` new ones of each of `batch` sequences; `keys` that a new token reads in attention,
    where there are earlier ones (0: the prompt, of which each token sees those before it). `before`: the tokens before
    those of a part of a prompt.

    The static cache of `rewriter.runtime` is read in full, so `keys` is its length. `logits` is of how many last tokens
    the head is wanted (0: of all). `fused`: the module is compiled. `plain`: over how many keys a prefill's attention
    goes where no kernel is fused, the cache's length (0: kernels are fused). `cache_only`: the pass is for its keys and
    values, so all that none of them needs is left out: the last attention but for what it stores, and what follows it.
    `weights`: the format of the layers' weights, None for the model's dtype. `small_cache`:
    keys and values are of 8 bits.
    """

    batch: int
    tokens: int
    keys: int = 0
    logits: int = 1
    fused: bool = True
    plain: int = 0
    cache_only: bool = False
    before: int = 0
    weights: StoredWeights | None = None
    small_cache: bool = False

    @property
    def is_decode(self) -> bool:
        return self.keys > 0
