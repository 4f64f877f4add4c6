"""Output of nvcc for the kernels, without a GPU: registers, memory accesses, symbols."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fusedtrain
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _sass
from helpers.processes import python

LIBRARY = Path(fusedtrain.__file__).parent / "_C_cuda.so"
# Logs of the sources of today: a folder of objects may have those of files that are gone.
LOGS = [
    log for log in sorted((ROOT / "build/ninja/cuda/cuda").glob("*.ptxas"))
    if (ROOT / "csrc/cuda" / log.name.removesuffix(".o.ptxas")).exists()
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="needs _C_cuda.so: install nvcc, then FUSEDTRAIN_CUDA=1 make build"
)

# A kernel of each family, by its mangled name: type, vectors.
WIDE = {
    "forward_kernel.*float.*Mish": "pointwise",
    "backward_kernel.*half.*Mish": "pointwise",
    "forward_kernel.*bfloat16.*Silu": "pointwise",
    "forward_kernel.*double.*Elu": "pointwise",
    "segments_kernel.*Prelu.*(true|false), true, ": "channelwise",
    "columns_kernel.*StarRelu.*(true|false), true, ": "channelwise",
    "normalise_kernel.*Mish.*bfloat16, true": "batch_norm",
    "restore_kernel.*half, true": "batch_norm",
    "reduce_kernel.*OneFormula.*Silu.*half, true": "batch_norm",
    "grad_input_kernel.*OneFormula.*Relu.*float, true": "batch_norm",
    "gated_backward_kernel.*Silu.*bfloat16, true": "gated",
    "planes_kernel<.*ScaleBackwardJob<float, true>, true>": "scale_add",
    "columns_kernel<.*BiasActBackwardJob<.*Gelu, .*half, true>, true>": "bias_act",
    "forward_kernel.*bfloat16, .*Gelu<float>": "few_bit",
    "backward_kernel<float>.*Slopes": "few_bit",
    "max_pool2d_kernel<__half, int, 3, true>": "pool",
    "max_pool2d_kernel<float, int, 2, true>": "pool",
    "max_pool2d_backward_kernel<__nv_bfloat16, int, true>": "pool",
    "update_kernel.*OneRule.*Adam": "optimizer",
    "update_kernel.*OneRule.*Sgd": "optimizer",
}
# Loads of bytes are a quarter or a half as wide; the last kernel takes bytes from where they are.
STORES = (
    "to_planes_kernel<float, true, false>",
    "three_channels_kernel<__half, false>",
    "to_last_kernel<__nv_bfloat16, true, true>",
    "to_last_kernel<float, true, false>",
)


def built() -> dict[str, list[str]]:
    return json.loads((LIBRARY.parent / "_build_info.json").read_text())


def test_every_source_was_compiled_for_every_architecture() -> None:
    sources = {p.name for p in (ROOT / "csrc/cuda").glob("*.cu")}
    assert {p.name.removesuffix(".o.ptxas") for p in LOGS} == sources
    for log in LOGS:
        assert set(re.findall(r"for 'sm_(\d+)'", log.read_text())) == set(built()["cuda_archs"])


@pytest.mark.parametrize("log", LOGS, ids=lambda p: p.name)
def test_nothing_spills(log: Path) -> None:
    """No stack frame, no register in memory: ptxas says so of every kernel."""
    frames = re.findall(
        r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores",
        log.read_text(),
    )
    assert len(frames) >= len(built()["cuda_archs"])
    assert [f for f in frames if (f[1], f[2]) != ("0", "0")] == []


@pytest.fixture(scope="module")
def sass() -> dict[str, str]:
    """Instructions by kernel, for sm_80 where that is built: on sm_75 kernels only have to run."""
    archs = built()["cuda_archs"]
    arch = next((a for a in archs if int(a) >= 80), archs[0])
    if _sass.cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (the CUDA toolkit and Triton have it)")
    bodies = _sass.disassembly(LIBRARY, arch).split("Function : ")[1:]
    names = subprocess.run(
        ["c++filt"], input="\n".join(b.split("\n", 1)[0] for b in bodies),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(names.stdout.splitlines(), bodies, strict=True))


@pytest.mark.parametrize("pattern", WIDE)
def test_kernels_load_and_store_16_bytes(sass: dict[str, str], pattern: str) -> None:
    bodies = [body for name, body in sass.items() if re.search(pattern, name)]
    assert bodies, "no such kernel"
    for body in bodies:
        assert re.search(r"LDG\.E(\.\w+)*\.128", body)
        assert re.search(r"STG\.E(\.\w+)*\.128", body)
        assert not re.search(r"\b(LDL|STL)\b", body), "local memory"


@pytest.mark.parametrize("name", STORES)
def test_kernels_store_16_bytes(sass: dict[str, str], name: str) -> None:
    (body,) = (body for kernel, body in sass.items() if name in kernel)
    assert re.search(r"STG\.E(\.\w+)*\.128", body)
    assert not re.search(r"\b(LDL|STL)\b", body), "local memory"
    if name != STORES[-1]:
        assert re.search(r"LDG\.E \w" if "float" in name else r"LDG\.E\.64", body)


def test_it_loads_under_a_torch_without_cuda() -> None:
    """So the symbols it needs are those of libtorch_cpu; every op is registered for CUDA."""
    code = f"""
import torch, fusedtrain
from fusedtrain.reference import FAMILIES
if torch.version.cuda is None:
    torch.ops.load_library({str(LIBRARY)!r})
for op in (op for ops in FAMILIES.values() for op in ops):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("fusedtrain::" + op, "CUDA"), op
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
