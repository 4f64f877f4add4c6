"""A stock model beside its converted copy, through the same edits and calls."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

import fusedtrain

from . import zoo

LOGS: dict[str, list[Any]] = {"stock": [], "ours": []}
LIMIT = 1e-8
Edit = Callable[..., Any]


class Recorder:
    """A hook that notes the tensors that it is handed. It can be copied and pickled."""

    def __init__(self, side: str, tag: str, effect: str = "") -> None:
        self.side, self.tag, self.effect = side, tag, effect

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        LOGS[self.side].append((self.tag, tensors_of(values)))
        if self.effect == "raises":
            raise ValueError(self.tag)
        if self.effect == "changes":
            last = values[0] if "pre" in self.tag or "backward" in self.tag else values[-1]
            if isinstance(last, tuple):
                last = tuple(t if t is None else t * 0.5 for t in last)
                return (last, values[1]) if self.tag == "pre with_kwargs" else last
            return last * 0.5
        return None


def tensors_of(value: Any) -> Any:
    """A copy of what a hook or caller gets."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return [tensors_of(item) for item in value]
    if isinstance(value, dict):
        return {key: tensors_of(item) for key, item in value.items()}
    return "proxy" if isinstance(value, fx.Proxy) else value


class Side:
    """One of the two models, with what its edits need later."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.handles: list[RemovableHandle] = []
        self.everywhere: list[tuple[str, Recorder]] = []  # hooks of all modules
        self.spare: dict[str, Any] = {}

    def part(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def place(self, path: str) -> tuple[nn.Module, str]:
        above, _, name = path.rpartition(".")
        return self.part(above), name

    def recorder(self, tag: str, effect: str = "") -> Recorder:
        return Recorder(self.name, tag, effect)


class Pair:
    """`edit` changes both models alike, and `call` compares what both do."""

    def __init__(
        self, make: Callable[[], nn.Module], memory: Any = "store", training: bool = True
    ) -> None:
        torch.manual_seed(0)
        model = make().double()
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.2, 0.9) if tensor.dim() == 1 else nn.init.normal_(tensor)
        self.memory, self._patched = memory, []  # type: tuple[Any, list[tuple[Any, str, Any]]]
        self.sides = [Side("stock", model), Side("ours", copy.deepcopy(model))]
        self.convert(training=True)
        for side in self.sides:
            side.model.train(training)
            LOGS[side.name].clear()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: Any) -> None:
        zoo.SETTINGS["gain"] = zoo.SIZES[0] = 1.5  # programs change them in place
        for owner, name, value in reversed(self._patched):
            delattr(owner, name) if value is None else setattr(owner, name, value)

    def convert(self, training: bool = False) -> None:
        try:
            self.report = fusedtrain.convert(self.sides[1].model, memory=self.memory)
        except ValueError as error:
            if "cannot be replaced" not in str(error):  # a forward that the program has patched
                raise
            raise SystemExit from error
        except RecursionError as error:  # a module within itself
            raise SystemExit from error

    def revert(self) -> None:
        try:
            fusedtrain.revert(self.sides[1].model)
        except RuntimeError as error:
            if "cannot be reverted" not in str(error):
                raise
            raise SystemExit from error

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Something that both models have in common, until the end of the program."""
        self._patched.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def edit(self, change: Edit, *args: Any) -> None:
        errors = []
        for side in self.sides:
            torch.manual_seed(1)
            try:
                result = change(side, *args)
                if isinstance(result, nn.Module):
                    side.model = result
                errors.append(None)
            except Exception as error:
                errors.append(error)
        self._same_error(errors)

    def call(self, way: Edit, *args: Any) -> None:
        """Compares outputs, gradients, buffers, errors, and what hooks have noted."""
        results, errors, logs = [], [], []
        for side in self.sides:
            LOGS[side.name].clear()
            model = side.model
            model.zero_grad(set_to_none=True)
            torch.manual_seed(2)
            x = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
            handles = [
                getattr(nn.modules.module, f"register_module_{kind}_hook")(recorder)
                for kind, recorder in side.everywhere
            ]
            output, error = None, None
            try:
                output = way(side, x * 1.0, *args)
                if isinstance(output, Tensor) and output.requires_grad:
                    # Not of the output itself: cos(1e7) has 8 digits less than its argument.
                    torch.manual_seed(3)
                    (output * torch.randn_like(output)).sum().backward()
            except Exception as raised:
                error = raised
            finally:
                for handle in handles:
                    handle.remove()
            errors.append(error)
            logs.append(list(LOGS[side.name]))
            grads = {name: p.grad for name, p in model.named_parameters()}
            # A call that fails halfway leaves only its error and the statistics to compare.
            results.append(
                [dict(model.named_buffers()), *([] if error else [output, x.grad, grads])]
            )
        self._same_error(errors)
        # Torch's statistics move twice there, and before torch finds an input wrong.
        if "checkpoint" in inspect.getsource(way) or isinstance(errors[0], RuntimeError):
            for result in results:
                del result[0]
            for ours, stock in zip(self.sides[1].model.buffers(), self.sides[0].model.buffers()):
                ours.data.copy_(stock)
        if way.__name__ == "traced":  # whether torch.fx calls a part or looks into it
            logs = [[], []]
        rough = 100 * torch.finfo(torch.float32).eps if "float" in args else LIMIT
        for ours, stock in ((logs[1], logs[0]), (results[1], results[0])):
            _compare(tensors_of(ours), tensors_of(stock), "", rough)

    def _same_error(self, errors: list[Any]) -> None:
        stock, ours = errors
        if isinstance(stock, RecursionError):  # a module within itself
            raise SystemExit
        if stock is ours is None:
            return
        if None not in errors and (isinstance(ours, type(stock)) or isinstance(stock, type(ours))):
            return  # torch.compile raises classes of its own
        # The bound forward of a fused class, in a module that has another class now.
        if stock is None and "no attribute 'save'" in str(ours):
            raise SystemExit
        # As the docstring of `convert` says of activations that keep their output.
        if stock is None and "inplace operation" in str(ours):
            raise SystemExit
        # A fused ReLU keeps its input instead, which nothing has overwritten.
        if ours is None and "inplace operation" in str(stock):
            raise SystemExit
        # torch.fx looks into every class outside of torch.nn, and Dynamo refuses the part's
        # compiled code there; a norm alone under recompute has `act` and `drop` of its class.
        if "trace a dynamo-optimized function" in str(ours):
            raise SystemExit
        if ours is None and re.search("no attribute .(act|drop)", str(stock)):
            raise SystemExit
        raise AssertionError(f"stock: {stock!r}; ours: {ours!r}") from ours


def _compare(ours: Any, stock: Any, where: str, rough: float) -> None:
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        if not stock.abs().max() < 1e8 if stock.numel() else False:
            raise SystemExit  # it diverges
        limit = rough * max(1.0, float(stock.detach().abs().max())) if stock.numel() else 0.0
        torch.testing.assert_close(
            ours, stock, rtol=rough, atol=limit, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(stock, (list, tuple)) and isinstance(ours, (list, tuple)):
        names = [[row[0] for row in rows if isinstance(row, tuple)] for rows in (ours, stock)]
        assert len(ours) == len(stock), f"{where}: {len(ours)} for {len(stock)}: {names}"
        for number, (one, other) in enumerate(zip(ours, stock)):
            _compare(one, other, f"{where}[{number}]", rough)
    elif isinstance(stock, dict) and isinstance(ours, dict):
        assert list(ours) == list(stock), f"{where}: {list(ours)} for {list(stock)}"
        for key in stock:
            _compare(ours[key], stock[key], f"{where}[{key!r}]", rough)
    elif not isinstance(stock, nn.Module):
        same = type(ours) is type(stock) and ours == stock
        assert same, f"{where}: {ours!r} for {stock!r}"


def block(name: str, act: nn.Module, **options: Any) -> nn.Module:
    made: nn.Module = getattr(zoo, name)(act, **options)
    return made
