"""A configuration as code. Trials execute the code that the user gets."""

from __future__ import annotations

from pathlib import Path

from ._job import LIBRARIES, Job, split
from ._switches import BATCH, Config, code_of

_OPTIMIZERS = {"sgd": ("SGD", "momentum=0.9"), "adamw": ("AdamW", "")}
WARMUP = 500  # steps; Goyal et al. take 5 epochs, whose length only the user knows
SOURCES = {
    "sgd": "linear, with warm-up (Goyal et al., arXiv:1706.02677)",
    "adamw": "the square root (Malladi et al., arXiv:2205.10287), with warm-up "
             "(Goyal et al., arXiv:1706.02677)",
}  # fmt: skip


def scaled_rate(job: Job, batch: int) -> float:
    """The learning rate for another batch size: linear for SGD, the square root for AdamW."""
    ratio = batch / job.batch
    return job.lr * (ratio if job.optimizer == "sgd" else ratio**0.5)


def model_source(job: Job) -> str:
    """Defines or imports the function that builds the model; its name in the code is build_model.

    For the files of a user this is only for the recipe: trials import them by their path.
    """
    where, name = split(job.model)
    options = "".join(f", {key}={value!r}" for key, value in job.config.items())
    if where == "torchvision":
        body = f'torchvision.models.get_model("{name}", weights=None, num_classes={job.classes})'
    elif where == "timm":
        body = f'timm.create_model("{name}", num_classes={job.classes})'
    elif where == "transformers":
        config = f"transformers.{name}(num_labels={job.classes}{options})"
        body = (
            f"transformers.AutoModelForSequenceClassification.from_config(\n        {config}\n    )"
        )
    else:
        return _import(job.model, "build_model")
    return f"import {where}\n\n\ndef build_model():\n    return {body}\n"


def _import(place: str, alias: str) -> str:
    where, name = split(place)
    module = Path(where).stem if where.endswith(".py") else where
    first, _, rest = name.partition(".")
    if rest:
        return f"from {module} import {first}\n\n{alias} = {name}"
    renamed = "" if name == alias else f" as {alias}"
    return f"from {module} import {name}{renamed}"


def setup(job: Job, config: Config, lr: float) -> str:
    """The code before the first step. Needs ``build_model``."""
    code = code_of(config, job.device)
    lines = [*code.get("settings", ()), f'device = torch.device("{job.device}")']
    lines += ["model = build_model().to(device).train()", *code.get("model", ())]
    for options in code.get("convert", ()):
        lines.append(f"example = {_example(job)}")
        for plan in code.get("plan", ()):
            lines += _within(code, plan)
        extra = f", {options}" if options else ""
        lines.append(f"fusedtrain.convert(model, example{extra})")
    lines += _optimizer(job, code, lr)
    for scaler in code.get("scaler", ()):
        ours = config["optimizer"] == "fusedtrain"
        lines.append(f"scaler = {scaler.replace('torch.', 'fusedtrain.') if ours else scaler}")
    lines += [*code.get("compile", ()), "criterion = torch.nn.CrossEntropyLoss()"]
    return "\n".join(lines)


def _within(code: dict[str, list[str]], line: str) -> list[str]:
    """The line in the context of forward, if there is one."""
    contexts = code.get("context", ())
    return [f"with {contexts[0]}:", f"    {line}"] if contexts else [line]


def _optimizer(job: Job, code: dict[str, list[str]], lr: float) -> list[str]:
    name, options = _OPTIMIZERS[job.optimizer]
    arguments = ["model.parameters()", f"lr={lr:.6g}", options, *code.get("options", ())]
    home = code.get("optimizer", ["torch.optim"])[0]
    return [f"optimizer = {home}.{name}({', '.join(filter(None, arguments))})"]


def _example(job: Job) -> str:
    """Four samples, on which `convert` compares the model with the stock one."""
    if job.tokens:
        return f"torch.randint({job.tokens}, {(4, *job.input)}, device=device)"
    return f"torch.randn({', '.join(map(str, (4, *job.input)))}, device=device)"


def step(job: Job, config: Config) -> str:
    """A function of inputs and targets, which returns the loss."""
    code = code_of(config, job.device)
    blocking = ", non_blocking=True" if config["pin_memory"] == "on" else ""
    layout = "".join(f", {text}" for text in code.get("inputs", ()))
    output = "model(inputs)" + (".logits" if split(job.model)[0] == "transformers" else "")
    lines = [
        f"inputs = inputs.to(device{blocking}{layout})",
        f"targets = targets.to(device{blocking})",
    ]
    loss = f"loss = criterion({output}, targets)"
    lines += _within(code, loss)
    lines.append("optimizer.zero_grad()")
    if "scaler" in code:
        lines += ["scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()"]
    else:
        lines += ["loss.backward()", "optimizer.step()"]
    lines.append("return loss.detach()")
    return "\n".join(["def step(inputs, targets):", *(f"    {line}" for line in lines)])


def loader_call(config: Config) -> str:
    """The call of the user's build_loader."""
    arguments = f"batch_size={config[BATCH]}, num_workers={config['workers']}"
    return f"build_loader({arguments}, pin_memory={config['pin_memory'] == 'on'})"


def recipe(job: Job, config: Config, target_shape: list[int], classes: int) -> str:
    """A whole script: ready to paste, and it runs as it is."""
    lr = scaled_rate(job, config[BATCH])
    body = setup(job, config, lr)
    imports = ["import torch", *["import fusedtrain"] * ("fusedtrain." in body)]
    parts = ["\n".join(imports), model_source(job).rstrip()]
    if split(job.model)[0] in LIBRARIES:
        parts.append("")
    if job.loader:
        parts[-1] += "\n" * (parts[-1] != "") + _import(job.loader, "build_loader")
    parts.append(body)
    changed = config[BATCH] != job.batch
    if changed:
        parts.append(_schedule(job, config))
    parts += ["", step(job, config), "", _data(job, config, target_shape, classes)]
    loop = "for inputs, targets in loader:\n    loss = step(inputs, targets)"
    parts.append(loop + ("\n    warmup.step()" if changed else ""))
    return "\n\n".join(parts).replace("\n\n\n\n", "\n\n\n") + "\n"


def _schedule(job: Job, config: Config) -> str:
    start = job.lr / scaled_rate(job, config[BATCH])
    return (
        f"# The learning rate was {job.lr:g} for {job.batch} samples. Rule for {config[BATCH]}:\n"
        f"# {SOURCES[job.optimizer]}.\n"
        f"# Take a warm-up of about 5 epochs for total_iters.\n"
        f"warmup = torch.optim.lr_scheduler.LinearLR(optimizer, {start:.4g}, total_iters={WARMUP})"
    )


def _data(job: Job, config: Config, target_shape: list[int], classes: int) -> str:
    if job.loader:
        return f"loader = {loader_call(config)}"
    shape = (config[BATCH], *job.input)
    inputs = f"torch.randint({job.tokens}, {shape})" if job.tokens else f"torch.randn({shape})"
    targets = f"torch.randint({classes}, {(config[BATCH], *target_shape)})"
    return (
        f"# Random samples stand for your loader, with batch_size={config[BATCH]}.\n"
        f"loader = [\n    ({inputs}, {targets})\n    for _ in range(3)\n]"
    )


def trial(job: Job, config: Config, lr: float) -> str:
    """The recipe's setup and step alone; ``build_model`` comes from the process of the trial."""
    return f"import torch\nimport fusedtrain\n\n{setup(job, config, lr)}\n\n{step(job, config)}\n"
