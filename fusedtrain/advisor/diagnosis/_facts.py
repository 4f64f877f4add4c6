"""Facts of a run as plain numbers; the rules decide by these alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from .._views import Site


@dataclass
class Loader:
    """A DataLoader. `wait`: the seconds that a batch is usually waited for."""

    site: Site | None
    workers: int
    pinned: bool
    batches: int = 0
    wait: float = 0.0
    iterable: bool = False


@dataclass
class Copy:
    """Copies from the host to a device by one line, a step."""

    site: Site | None
    count: float
    bytes: float
    pinned: bool
    non_blocking: bool


@dataclass
class Event:
    """Work of one line in each step. `what`: the operator or call, `seconds`: its time."""

    site: Site | None
    what: str
    count: float
    bytes: float = 0.0
    seconds: float = 0.0
    device: str = "cpu"


@dataclass
class Timing:
    """Seconds of an optimizer's step on copies of the parameters, by the way it is computed."""

    now: float
    torch_fused: float | None = None
    fusedtrain: float | None = None


@dataclass
class Optimizer:
    """An optimizer. `seconds`: of a step in the run, the median; `bytes`: of its parameters."""

    site: Site | None
    type: str
    exact: bool  # a class of torch.optim, not a subclass of one
    foreach: bool | None
    fused: bool | None
    tensors: int
    bytes: int
    seconds: float = 0.0
    timing: Timing | None = None


@dataclass
class Layer:
    """A module with a fault. `alone`: every module that its line has built has the fault."""

    name: str
    type: str
    site: Site | None
    bytes: int = 0
    seconds: float = 0.0
    count: float = 1.0
    alone: bool = True
    note: str = ""


@dataclass
class Kept:
    """Graphs of autograd that outlive their step. `bytes`: kept for backward, a step."""

    site: Site | None
    name: str  # of the variable that keeps them; "" if unknown
    steps: int
    nodes: int
    bytes: int
    backward: bool  # backward has freed what these graphs had saved
    local: bool = False  # the site adds to a variable of its function


@dataclass
class Evaluation:
    """Calls of a model in eval mode whose graph nobody used."""

    site: Site | None
    type: str
    calls: int
    bytes: int


@dataclass
class Fusable:
    """Changes that `convert` would make in a model: `changed` names what it fuses; bytes are kept
    for backward. `passes`: seconds of forward and backward "now", with `memory` and with "dropout"
    fused, and how many times faster that is at least."""

    type: str
    site: Site | None
    changed: str
    before: int
    store: int
    recompute: int
    masks: int = 0  # of dropout
    passes: dict[str, list[float]] = field(default_factory=dict)

    @property
    def saves_most(self) -> str:
        """The `memory` that keeps least, of two that keep about the same "store"."""
        return "store" if self.store <= self.recompute * 1.02 else "recompute"


@dataclass
class Depthwise:
    """Depthwise convolutions of a model for which our kernels are faster. `name`: of the one that
    gains most; `now`, `converted`: seconds a step of forward and backward of all."""

    type: str
    site: Site | None
    layers: int
    name: str
    now: float
    converted: float


@dataclass
class Scaler:
    site: Site | None
    used: int


@dataclass
class RunFacts:
    """`device`: "cpu" or "cuda". `assumed`: the run was on another device than that."""

    script: str = ""
    device: str = "cpu"
    assumed: bool = False
    capability: tuple[int, int] = (0, 0)
    gpus: int = 0
    cores: int = 1
    threads: int = 1
    ranks: int = 1
    threads_site: Site | None = None
    oversubscribed: float = 0.0  # time of a parallel operator, by its time with a thread a core
    steps: int = 0
    ignored: int = 0  # steps of threads that were not watched
    timed: int = 0
    step: float = 0.0  # seconds, the median
    busy: float = 0.0  # of which the main thread runs, other processes do not
    wait: float = 0.0  # of which the training loop waits for loaders
    loading: float = 0.0  # seconds of the processor while the loop waits
    clearing: float = 0.0  # seconds of three passes over what memsets clear
    drain: float | None = None  # seconds a GPU still works when the host has enqueued a step
    faults: float = 0.0  # minor page faults a step
    fault: float = 0.0  # seconds that one costs
    large: float = 0.0  # bytes a step of new tensors of 1 MB or more
    operators: float = 0.0  # a step
    elements: float = 0.0  # the median of the operators' outputs
    operator: float = 0.0  # seconds of the smallest operator
    peak: int | None = None  # the most bytes at once: allocated on the GPU, resident on the CPU
    memory: int | None = None  # bytes of the GPU, or of the machine
    model_site: Site | None = None
    loaders: list[Loader] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)
    memsets: list[Event] = field(default_factory=list)
    clones: list[Event] = field(default_factory=list)
    matmuls: dict[str, float] = field(default_factory=dict)  # calls a step by dtype
    convolutions: float = 0.0  # calls a step
    half_convolutions: float = 0.0  # of these in 16 bits
    single_convolutions: float = 0.0  # of these in float32
    contiguous: float = 0.0  # of these with an input that is not channels_last
    tried: bool = True  # models were copied and run again
    shapes_vary: bool = False
    compiled: bool = False  # by torch.compile, at least one model
    autotuner: bool = False
    deterministic: bool = False
    tf32_matmul: bool = False
    tf32_conv: bool = True
    autocast: dict[str, int] = field(default_factory=dict)  # calls of modules by dtype
    autocast_site: Site | None = None
    zeros: float = 0.0  # share of the gradients' elements
    scalers: list[Scaler] = field(default_factory=list)
    clips: list[Event] = field(default_factory=list)  # of gradients times a loss scale
    direct_steps: list[Event] = field(default_factory=list)  # `what`: "scaler", or "": none steps
    half_convolution: str = ""  # a convolution of the model in the dtype of autocast
    half_ratio: float = 0.0  # its time by its time in float32
    optimizers: list[Optimizer] = field(default_factory=list)
    parallel: list[Layer] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    twice: list[Layer] = field(default_factory=list)
    frozen: list[Layer] = field(default_factory=list)
    biases: list[Layer] = field(default_factory=list)
    in_place: list[Layer] = field(default_factory=list)  # `note`: the operator
    evaluations: list[Evaluation] = field(default_factory=list)
    fusable: list[Fusable] = field(default_factory=list)
    depthwise: list[Depthwise] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunFacts:
        """The facts that `to_json` has written, after a way through JSON."""
        hints = get_type_hints(cls)
        return cls(**{name: _restored(hints[name], value) for name, value in data.items()})


def _restored(hint: Any, value: Any) -> Any:
    """The value of JSON as the type that a field is annotated with."""
    if value is None:
        return None
    kind, *_ = get_args(hint) or (hint,)
    if get_origin(hint) is list:
        return [_restored(kind, item) for item in value]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _restored(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if kind is Site:
        return Site(*value)
    return tuple(value) if get_origin(hint) is tuple else value
