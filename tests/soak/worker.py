"""The process that trains, and that may be killed at any moment.

Beside its checkpoint, FOLDER gets log.jsonl: a line for each step, a digest of everything a
checkpoint holds every few steps, and samples of the memory. A step that a resumed process makes
again has another line. `end` beside FOLDER, where it exists, holds the number of the last step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, memory
from .recipes import RECIPES
from .training import PARTS, Training


class Log:
    """Whole lines, also where the process before died while it wrote one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def write(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak.worker")
    add = parser.add_argument
    add("folder", type=Path)
    add("--images", type=Path, required=True)
    add("--recipe", type=int, choices=range(len(RECIPES)), required=True)
    add("--seed", type=int, required=True)
    add("--steps", type=int, required=True)
    add("--save-every", type=int, default=20)
    add("--look-every", type=int, default=10, help="steps from one digest and sample to the next")
    add("--forget", choices=PARTS, nargs="*", default=[], help="a fault: not loaded on resuming")
    add("--leak", type=int, default=0, help="a fault: tensors of 256 KiB kept at each step")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = options(argv)
    parent = os.getppid()
    torch.set_num_threads(1)  # sums depend on the number of threads
    images = torch.load(args.images, weights_only=True)
    run = Training(RECIPES[args.recipe], (images["pixels"], images["labels"]), args.seed)
    path, end = args.folder / "checkpoint.pt", args.folder.parent / "end"
    death = checkpoint.death(args.folder)
    log = Log(args.folder / "log.jsonl")
    saved = checkpoint.read(path)
    if saved is not None:
        run.load_state_dict(saved, args.forget)
    gc.collect()
    gc.freeze()  # what exists by now neither leaks nor is looked at again
    leaked = []
    last = args.steps
    while run.done < last and os.getppid() == parent:
        row = run.step()
        leaked += [torch.ones(1 << 16) for _ in range(args.leak)]
        if end.exists():
            last = min(last, int(end.read_text()))
        if run.done % args.look_every == 0 or run.done >= last:
            row["digest"], row["bits"] = run.digest()
        log.write(**row)
        if run.done % args.look_every == 0:
            log.write(memory=memory.sample(run.done))
        if run.done % args.save_every == 0:
            if death.exists():
                share = float(death.read_text())
                death.unlink()
                checkpoint.die_while_writing(path, run.state_dict(), share)
            checkpoint.write(path, run.state_dict())
    log.write(end=run.done)
