"""Activations and models of transformers before and after `convert`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.models import transformers

# Class -> what it becomes, or the call in its forward that is converted.
ACTIVATIONS = {
    "PytorchGELUTanh": "GELU", "GELUActivation": "GELU", "SiLUActivation": "SiLU",
    "FastGELUActivation": "GELU", "QuickGELUActivation": "QuickGELU", "MishActivation": "Mish",
    # On CUDA autocast computes their powers in float32, so they keep their class.
    "NewGELUActivation": "gelu", "ReLUSquaredActivation": "relu_squared",
    # It has a number that may change.
    "AccurateGELUActivation": "gelu",
    "LaplaceActivation": "",
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    transformers()
    from transformers import activations

    if not hasattr(activations, name):
        pytest.skip("needs a version of transformers with this activation")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), getattr(activations, name)()), torch.randn(4, 8)
    want, target = model(x), ACTIVATIONS[name]
    report = fusedtrain.convert(model, x)
    torch.testing.assert_close(model(x), want)
    if not target:
        assert [left.name for left in report.left] == ["1"]
    elif target.islower():
        assert [call.activation for call in report.calls] == [target]
    else:
        assert [entry.target for entry in report.converted] == [f"fusedtrain.nn.{target}"]
    assert fusedtrain.revert(model) == bool(target)
    assert torch.equal(model(x), want)


_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 60, "pad_token_id": 0,
}  # fmt: skip
_LLAMA = _TEXT | {"num_key_value_heads": 2}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 16,
        "num_attention_heads": 4, "patch_size": 8}  # fmt: skip
# Name -> model, arguments of its configuration, activations, gated products and RMS norms.
MODELS: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "Llama": ("LlamaModel", _LLAMA, 2, 2, 5),
    "Mistral": ("MistralModel", _LLAMA, 2, 2, 5),
    "Gemma": ("GemmaModel", _LLAMA | {"head_dim": 8}, 2, 2, 5),  # 1 + weight
    "GPT2": (
        "GPT2Model", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60} | _IDS, 2, 0, 0
    ),
    "Bert": ("BertModel", _TEXT, 3, 0, 0),
    "T5": ("T5EncoderModel", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8,
                              "vocab_size": 60, "feed_forward_proj": "gated-gelu"}, 0, 2, 5),
    "Qwen2": ("Qwen2Model", _LLAMA, 2, 2, 5),
    "Qwen3": ("Qwen3Model", _LLAMA | {"head_dim": 8}, 2, 2, 9),  # of queries and keys, too
    "Phi3": ("Phi3Model", _LLAMA | _IDS, 2, 2, 5),  # gate and value are chunks of one output
    "ViT": ("ViTModel", _VIT, 3, 0, 0),
    "ConvNext": ("ConvNextModel", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}, 8, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    package: Any = transformers()
    kind, options, activations, products, norms = MODELS[name]
    torch.manual_seed(0)
    model = getattr(package, kind)(getattr(package, f"{name}Config")(**options)).train()
    key, example = "input_ids", torch.randint(3, 60, (2, 7))
    if name in ("ViT", "ConvNext"):
        key, example = "pixel_values", torch.randn(2, 3, *(2 * (16 if name == "ViT" else 32,)))
    stock, keys = copy.deepcopy(model), list(model.state_dict())
    report = fusedtrain.convert(model, {key: example})
    functions = [call.activation for call in report.calls]
    functions += [entry.target.rpartition(".")[2] for entry in report.converted]
    assert functions.count("rms_norm") == norms
    attention = functions.count("scaled_dot_product_attention")
    assert attention == 2 * (name != "ConvNext")
    assert len(functions) - norms - attention == activations
    assert len(report.products) == products
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        want, got = (m.eval()(**{key: example})[0] for m in (stock, model))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert fusedtrain.revert(model) > 0
    with torch.no_grad():
        assert torch.equal(model(**{key: example})[0], want)
