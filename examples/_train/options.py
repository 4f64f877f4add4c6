"""The command line of train.py."""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from _train.models import MODELS
from _train.modes import MEMORY
from _train.optimizers import MASTERS, RECIPES, STATES

DTYPES = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be zero or a positive whole number, not {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value


def norm(text: str) -> float | None:
    return None if text == "off" else positive_float(text)


def decay(text: str) -> float | None:
    if text == "off":
        return None
    value = positive_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, or off, not {text!r}")
    return value


def data_name(text: str) -> str:
    is_folder = text.startswith("folder:") and text != "folder:"
    if is_folder or text in ("digits", "fashion-mnist", "cifar10"):
        return text
    raise argparse.ArgumentTypeError(
        f"must be digits, fashion-mnist, cifar10 or folder:PATH, not {text!r}"
    )


def model_width(text: str) -> int:
    value = positive(text)
    if value % 8:
        raise argparse.ArgumentTypeError(f"must be a multiple of 8, not {text!r}")
    return value


def common_options(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that all training scripts have."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=data_name,
        default="digits",
        help="digits (embedded), fashion-mnist, cifar10 or folder:PATH",
    )
    add("--data-root", type=Path, default=Path("data"), help="where data sets lie or are put")
    add("--workers", "-j", type=not_negative, default=0, help="data loader processes")
    add("--test-images", type=positive, help="use only so many images of the test split")
    add("--seed", type=not_negative, default=0, help="of weights, order and augmentation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--threads", type=positive, help="CPU threads (torch's choice if not given)")
    add("--channels-last", action="store_true", help="NHWC memory format")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options given, with the device decided; exits with status 2 where they are unusable."""
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; use --device cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options(
        "train.py", "Train on real images with stock PyTorch and with fusedtrain, and compare."
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="efficientnet_b0", help="network")
    add("--width", type=model_width, default=32, help="channels of the stem; 64 is full size")
    add("--epochs", type=positive, default=2, help="passes over the training split")
    add("--steps", type=positive, help="stop each mode after this many optimizer steps")
    add("--batch-size", type=positive, default=32, help="images per process and micro-batch")
    add("--accumulate", type=positive, default=1, help="micro-batches per optimizer step")
    add(
        "--optimizer",
        choices=tuple(RECIPES),
        default="adamw",
        help="torch's (fused where it has it) or timm's in the eager modes, fusedtrain's else",
    )
    add("--lr", type=positive_float, help="peak learning rate (default by optimizer; AdamW 0.001)")
    add("--clip", type=norm, default=1.0, metavar="NORM", help="of all gradients; off: no clipping")
    add("--ema", type=decay, default=0.99, metavar="DECAY", help="of averaged weights; off: none")
    add(
        "--optimizer-state",
        choices=tuple(STATES),
        default="float32",
        help="of the fused modes: states of the optimizer (q8: codes of 8 bits)",
    )
    add(
        "--masters",
        choices=tuple(MASTERS),
        default="none",
        help="of the fused modes with AMP: weights of 16 bits, and what the optimizer keeps of "
        "their float32 values (split32: 16 more bits, split24: 8)",
    )
    add(
        "--amp",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: fp16 with GradScaler on CUDA, bf16 on a CPU with AVX-512 (else off)",
    )
    add(
        "--cudnn-benchmark",
        action="store_true",
        help="let cuDNN time its algorithms (gives up run-to-run equality)",
    )
    add("--compile", action="store_true", help="torch.compile every mode")
    add(
        "--frozen-norms",
        action="store_true",
        help="then fine-tune the fp32 eager checkpoint with frozen batch norms, stock and folded",
    )
    add(
        "--memory",
        nargs="+",
        choices=MEMORY,
        default=(),
        help="then train in float32 with what backward needs kept in these ways, beside eager "
        "torch and torch.utils.checkpoint",
    )
    add(
        "--tolerance",
        type=positive_float,
        help="limit for the relative difference of the first losses (measured default by dtype)",
    )
    add("--output", type=Path, default=Path("runs/train"), help="for results.json and train.png")
    add("--no-progress", action="store_true", help="no progress bar")
    args = parsed(parser, argv)
    if args.lr is None:
        args.lr = RECIPES[args.optimizer].lr
    if args.amp == "auto":
        args.amp = _amp_of(args.device)
        if args.amp == "off":
            print("AMP is off: 16-bit convolutions are slow on this processor (--amp bf16: use it)")
    if args.masters != "none" and args.amp == "off":
        parser.error(
            f"--masters {args.masters} is for weights of 16 bits, and AMP is off; add --amp bf16"
        )
    return args


def _amp_of(device: str) -> str:
    if device == "cuda":
        return "fp16"
    # oneDNN has bfloat16 convolutions from AVX-512 on. Without them a ResNet-18 took 8 times as
    # long in bfloat16 as in float32 (AMD EPYC with AVX2, torch 2.13, 2026-11-23).
    slow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return "off" if slow and platform.machine() in ("x86_64", "AMD64") else "bf16"
