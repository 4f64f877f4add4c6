"""A training run that can be saved between any two steps, and loaded in another process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedtrain

from .recipes import Recipe, network

Row = dict[str, Any]
BATCH = 16
# Parts of a checkpoint; each but "step" can be left out on loading, to prove that a run notices.
PARTS = ("model", "optimizer", "averages", "stream", "scaler", "scheduler", "sampler", "random")
_OF_THE_OPTIMIZER = {"averages", "stream"}


class Sampler:
    """Batches of indices in an order that the seed and the epoch decide; it knows its place."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch, self.place = count, seed, 0, 0
        self.order = self._shuffled()

    def _shuffled(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
        return torch.randperm(self.count, generator=generator)

    def batch(self) -> Tensor:
        if self.place + BATCH > self.count:
            self.epoch, self.place = self.epoch + 1, 0
            self.order = self._shuffled()
        self.place += BATCH
        return self.order[self.place - BATCH : self.place]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.order = self._shuffled()


class Training:
    """Everything that a step reads and writes.

    Args:
        recipe: how to train.
        images: (N, 1, 16, 16) bytes, and their labels.
        seed: of weights, order, augmentation, dropout, and of the injected infs.
    """

    def __init__(self, recipe: Recipe, images: tuple[Tensor, Tensor], seed: int) -> None:
        self.recipe, (self.pixels, self.labels), self.seed = recipe, images, seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.done = 0
        self.model = network(recipe)
        self.params = list(self.model.parameters())
        self.optimizer = recipe.optimizer(self.params, **recipe.options)
        self.scaler = fusedtrain.amp.GradScaler("cpu", **recipe.scaler)
        self.scheduler = recipe.schedule(self.optimizer)
        self.sampler = Sampler(len(self.labels), seed)

    def step(self) -> Row:
        """One step of the optimizer; what it did, bit for bit."""
        injected = self._injection()
        scale = self.scaler.get_scale()
        losses = []
        for turn in range(self.recipe.accumulation):
            hook = None
            if injected is not None and turn == self.recipe.accumulation - 1:
                hook = self._inject(*injected)
            loss = self._loss()
            if injected is not None and injected[0] is None:
                loss = loss * injected[1]
            self.scaler.scale(loss / self.recipe.accumulation).backward()
            losses.append(float(loss.detach()).hex())
            if hook is not None:
                hook.remove()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.done += 1
        norm = self.optimizer.grad_norm
        return {
            "step": self.done,
            "loss": losses,
            "norm": float(norm).hex(),
            "scale": float(scale).hex(),
            "lr": [float(group["lr"]).hex() for group in self.optimizer.param_groups],
            "skipped": bool(self.optimizer.last_step_skipped),
            "injected": None if injected is None else injected[2],
        }

    def _loss(self) -> Tensor:
        chosen = self.sampler.batch()
        x = self.pixels[chosen].float().div_(128).sub_(1)
        # Augmentation by each of the generators that scripts use.
        x = x.roll(random.randint(-1, 1), dims=3)
        if np.random.rand() < 0.5:
            x = x.flip(3)
        x = x + 0.05 * torch.randn(x.shape)
        with torch.autocast("cpu", self.recipe.autocast):
            logits = self.model(x)
        return F.cross_entropy(logits.float(), self.labels[chosen])

    # --- infs, at steps and in places that the seed alone decides

    def _injection(self) -> tuple[int | None, float, str] | None:
        """Number of a parameter, or None for the loss; what is put there; both in words."""
        dice = random.Random(f"{self.seed} {self.done}")
        if dice.random() >= self.recipe.share:
            return None
        value = dice.choice((float("inf"), float("-inf"), float("nan")))
        which = dice.choice((None, dice.randrange(len(self.params))))
        where = "loss" if which is None else f"parameter {which}"
        return which, value, f"{value} in {where}"

    def _inject(self, which: int | None, value: float, _: str) -> Any:
        if which is None:
            return None
        dice = random.Random(f"{self.seed} {self.done} element")

        def one_element(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[dice.randrange(grad.numel())] = value
            return grad

        return self.params[which].register_hook(one_element)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "random": [torch.get_rng_state(), random.getstate(), *_numpy_state()],
        }

    def load_state_dict(self, state: dict[str, Any], forget: Collection[str] = ()) -> None:
        """Goes on where the saved run was.

        Args:
            forget: of PARTS, those that stay as they are: a fault that tests plant.
        """
        self.done = state["step"]
        if "optimizer" in forget:
            forget = {*forget, *_OF_THE_OPTIMIZER}
        saved = dict(state["optimizer"])
        if "stream" in forget:
            saved.pop("rounding_stream", None)
        if "averages" in forget:
            states = saved["state"].items()
            saved["state"] = {n: {k: v for k, v in s.items() if k != "ema"} for n, s in states}
        if "model" not in forget:
            self.model.load_state_dict(state["model"])
        if "optimizer" not in forget:
            self.optimizer.load_state_dict(saved)
        for part in ("scaler", "scheduler", "sampler"):
            if part not in forget:
                getattr(self, part).load_state_dict(state[part])
        if "random" not in forget:
            of_torch, of_python, kind, keys, *rest = state["random"]
            torch.set_rng_state(of_torch)
            random.setstate(of_python)
            np.random.set_state((kind, keys.numpy(), *rest))

    def digest(self) -> tuple[str, int]:
        """A hash of every bit that a checkpoint holds, and how many bits of tensors these are."""
        digest, bits = hashlib.blake2b(digest_size=16), 0
        for item in _leaves(self.state_dict()):
            if isinstance(item, Tensor):
                data = item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                bits += 8 * len(data)
                digest.update(f"{item.dtype} {tuple(item.shape)}".encode())
                digest.update(data)
            else:
                digest.update(repr(item).encode())
        return digest.hexdigest(), bits


def _numpy_state() -> list[Any]:
    """Without numpy's types, so that torch.load needs no trust."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [kind, torch.tensor(keys), *rest]


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        for key, value in item.items():
            yield key
            yield from _leaves(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)
    else:
        yield item
