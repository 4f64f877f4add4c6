"""`fusedtrain.profile`, its families, and the summary of recordings of a pretended GPU."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.advisor.profiling import (
    FAMILIES,
    Kernel,
    Record,
    Recording,
    family_of,
    summary,
    top_operators,
    uses_tensor_cores,
)
from fusedtrain.advisor.profiling._convert import Conversion
from fusedtrain.advisor.profiling._records import recording
from fusedtrain.advisor.profiling._watcher import ProfilingWatcher

BACKWARD = "autograd::engine::evaluate_function: ConvolutionBackward0"
NAMES = {
    "conv": ["aten::conv2d", "aten::convolution_backward", "aten::mkldnn_convolution",
             "aten::cudnn_convolution", BACKWARD,
             "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
             "void cudnn::winograd_nonfused::winogradForwardFilter4x4<float>"],
    "matmul": ["aten::linear", "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm",
               "aten::scaled_dot_product_attention", "ampere_fp16_s16816gemm_fp16_128x64_ldg8_tn",
               "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "void gemv2T_kernel_val<int>",
               "aten::_flash_attention_forward"],
    "norm": ["aten::batch_norm", "aten::native_batch_norm_backward", "aten::native_layer_norm",
             "aten::cudnn_batch_norm", "aten::group_norm", "fusedtrain::batch_norm_act",
             "fusedtrain::batch_norm_act_backward", "BatchNormActBackward",
             "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>"],
    "pointwise": ["aten::relu_", "aten::silu_backward", "aten::add_", "aten::mul", "aten::gelu",
                  "aten::threshold_backward", "aten::native_dropout", "fusedtrain::mish",
                  "aten::where", "aten::clamp_min", "aten::logical_not", "triton_poi_fused_add_0",
                  "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>"],
    "pooling": ["aten::max_pool2d_with_indices", "aten::avg_pool2d_backward",
                "fusedtrain::max_pool2d", "aten::adaptive_avg_pool2d"],
    "optimizer": ["aten::_foreach_add_", "aten::_fused_adamw_",
                  "aten::_amp_foreach_non_finite_check_and_unscale_", "fusedtrain::optimizer_step",
                  "void at::native::multi_tensor_apply_kernel<int>"],
    "copies": ["aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::zero_",
               "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "aten::contiguous"],
    "other": ["aten::_log_softmax", "aten::view", "aten::nll_loss_forward", "aten::empty",
              "aten::upsample_bilinear2d", "aten::sum", "detach"],
}  # fmt: skip


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, names in NAMES.items() for n in names])
def test_families(family: str, name: str) -> None:
    assert family in FAMILIES
    assert family_of(name) == family


def test_ranges_decide() -> None:
    assert family_of("aten::mul", ["fusedtrain: optimizer step"]) == "optimizer"
    assert family_of("aten::zero_", ["Optimizer.zero_grad#SGD.zero_grad"]) == "optimizer"
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert family_of("aten::stack", [loader]) == "loader"
    assert family_of("aten::mul", ["aten::rms_norm"]) == "norm"
    # For an operator without a name that says more, the nearest that has one.
    assert family_of("aten::empty", ["aten::conv2d", "aten::linear"]) == "conv"
    assert family_of("aten::add", ["aten::conv2d"]) == "pointwise"


def test_the_operator_says_more_than_its_kernel() -> None:
    gemm = "ampere_fp16_s16816gemm_fp16_128x64_ldg8_tn"
    assert family_of(gemm, (), "aten::cudnn_convolution") == "conv"
    assert family_of(gemm, (), "aten::addmm") == "matmul"
    assert family_of(gemm, (), "aten::unheard_of") == "matmul"


def test_tensor_cores() -> None:
    for name in (
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_32x6_tn",
        "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
        "cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_nn_align8",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "void cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits>",
    ):
        assert uses_tensor_cores(name), name
    for name in (
        "ampere_sgemm_128x64_nn",
        "void gemv2T_kernel_val<int, int, float>",
        "void cudnn::winograd_nonfused::winogradForwardFilter4x4<float>",
        "volta_sgemm_64x32_sliced1x4_tn",
    ):
        assert not uses_tensor_cores(name), name


def times(seen: dict[str, Any]) -> dict[str, float]:
    return {row["family"]: row["ms"] for row in seen["families"]}


def gpu_window() -> Recording:
    """Two steps of 1 ms each, in which kernels of two streams overlap."""
    tensor, plain = Kernel("s16816gemm", 300.0), Kernel("sgemm", 100.0)
    records = [
        Record("aten::addmm", 5.0, 0.0, ("fusedtrain line: train.py:7",), sequence=3,
               kernels=(tensor,)),
        Record("aten::mm", 5.0, 1.0, ("autograd::engine::evaluate_function: AddmmBackward0",),
               sequence=3, kernels=(plain,)),
        Record("aten::copy_", 5.0, 2.0, kernels=(Kernel("Memcpy HtoD", 200.0),)),
        Record("aten::add", 5.0, 3.0, ("fusedtrain: optimizer step",),
               kernels=(Kernel("elementwise_kernel", 400.0),)),
    ]  # fmt: skip
    busy = [(0.0, 300.0), (300.0, 400.0), (350.0, 550.0), (600.0, 1000.0)]
    return Recording(records, 2000.0, 2, busy)


def test_summary_of_a_gpu() -> None:
    seen = summary(gpu_window())
    assert seen["clock"] == "kernels on the GPU"
    assert seen["wall_ms"] == 1.0
    ms = times(seen)
    assert ms["matmul"] == pytest.approx(0.2)
    assert ms["copies"] == pytest.approx(0.1)
    assert ms["optimizer"] == pytest.approx(0.2)
    # Something ran in 550 and 400 of 2000 us: the copy overlaps a product by 50.
    assert ms["idle"] == pytest.approx((2000 - 950) / 2e3)
    assert seen["tensor_core_share"] == pytest.approx(0.75)
    matmul = next(row for row in seen["families"] if row["family"] == "matmul")
    assert (matmul["forward"], matmul["backward"]) == pytest.approx((0.15, 0.05))
    assert sum(row["share"] for row in seen["families"]) == pytest.approx(1.0)


def test_lines_reach_the_backward() -> None:
    top = top_operators(gpu_window())
    assert [(row["operator"], row["pass"], row["line"]) for row in top] == [
        ("s16816gemm", "forward", "train.py:7"),
        ("Memcpy HtoD", "forward", None),
        ("sgemm", "backward", "train.py:7"),
    ]
    assert top[0]["share"] == pytest.approx(0.3)  # of all, the optimizer's included


def event(name: str, start: float, end: float, device: str = "CPU", **more: Any) -> SimpleNamespace:
    """As torch.profiler's; those of a GPU cannot be had here."""
    made = SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), kernels=[], thread=1,
        device_type=SimpleNamespace(name=device), is_user_annotation=False, sequence_nr=-1,
        self_cpu_time_total=end - start, cpu_parent=None,
    )  # fmt: skip
    made.__dict__.update(more)
    return made


def test_events_of_a_gpu() -> None:
    """A range of the host has a twin among the GPU's events, and among the range's kernels."""
    kernel = SimpleNamespace(name="s16816gemm", duration=40.0)
    twin = SimpleNamespace(name="Optimizer.step#SGD.step", duration=90.0)
    node = event("autograd::engine::evaluate_function: MmBackward0", 0, 50, sequence_nr=7)
    step = event(twin.name, 50, 99, kernels=[twin], is_user_annotation=True)
    seen = recording(
        [
            node,
            event("aten::mm", 5, 20, cpu_parent=node, kernels=[kernel], sequence_nr=9),
            step,
            event("s16816gemm", 30, 70, "CUDA"),
            event(twin.name, 10, 100, "CUDA", is_user_annotation=True),
        ],
        100.0,
        1,
    )
    assert seen.busy == [(30, 70)]
    assert [record.kernels for record in seen.records] == [(), (Kernel("s16816gemm", 40.0),), ()]
    product = seen.records[1]
    assert product.backward
    assert product.sequence == 7  # the node's, by which the forward is found
    ms = times(summary(seen))
    assert ms["matmul"] == pytest.approx(0.04)
    assert ms["optimizer"] == 0.0
    assert ms["idle"] == pytest.approx(0.06)


def test_other_threads_do_not_count_on_the_host() -> None:
    records = [
        Record("fusedtrain: optimizer step", 100.0, thread=1),
        Record("aten::copy_", 900.0, thread=2),
    ]
    seen = summary(Recording(records, 1000.0, 1))
    assert times(seen)["copies"] == 0.0
    assert times(seen)["idle"] == pytest.approx(0.9)


def train(steps: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 16, 16)).square().mean().backward()
        optimizer.step()


def test_profile_in_a_program(tmp_path: Path) -> None:
    train(1)
    path = tmp_path / "trace.json"
    with fusedtrain.profile(lines=True, trace=path) as p:
        train(3)
    assert p.summary["steps"] == 3
    ms = times(p.summary)
    assert min(ms["conv"], ms["norm"], ms["pointwise"], ms["optimizer"]) > 0
    assert sum(ms.values()) == pytest.approx(p.summary["wall_ms"], rel=0.02)
    assert any("test_profiling.py:" in (row["line"] or "") for row in p.top_operators)
    assert "3 steps" in str(p)
    assert "conv" in str(p)
    assert json.loads(path.read_text())["traceEvents"]
    # Nothing stays behind: no hook, no mode.
    before = dict(p.summary)
    train(1)
    assert p.summary == before
    with fusedtrain.profile() as second:
        train(2)
    assert second.summary["steps"] == 2
    assert second.top_operators == []


def test_profile_of_a_block_that_raises() -> None:
    assert "nothing was profiled" in str(fusedtrain.profile())
    p = fusedtrain.profile()

    def fails() -> None:
        with p:
            train(1)
            raise LookupError

    with pytest.raises(LookupError):
        fails()
    assert p.summary["steps"] == 1
    with fusedtrain.profile() as again:
        torch.ones(3).exp()
    assert again.summary["steps"] == 0
    assert times(again.summary)["pointwise"] > 0


def test_conversion_of_two_networks_with_an_optimizer_each() -> None:
    """As a GAN has them. What spectral_norm calls is part of a network."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())

    conversion = Conversion()
    conversion.begin()
    try:
        first, second = network(), network()
        nn.utils.parametrizations.spectral_norm(second[0])
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
        for _ in range(2):
            for net in (first, second):
                net(torch.randn(2, 3, 6, 6))
            for optimizer in optimizers:
                conversion.apply(optimizer)
    finally:
        conversion.end()
    assert conversion.report == ["Sequential: 1 norms, 1 activations converted"] * 2
    assert all(has_own_forward(net) for net in (first, second))
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def _in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _steps(count: int) -> Callable[[], None]:
    layer = nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def train() -> None:
        for _ in range(count):
            layer(torch.randn(4, 3, 16, 16)).sum().backward()
            optimizer.step()

    return train


def test_steps_of_another_thread_are_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="into the function of that thread"),
        fusedtrain.profile() as p,
    ):
        _in_a_thread(_steps(2))
    assert not p.summary


def test_a_watched_script_that_trains_in_a_thread() -> None:
    """The profiler that began with the script sees nothing of it, and begins again."""
    watcher = ProfilingWatcher("", steps=2, warmup=0)
    _in_a_thread(watcher.begin)  # the profiler of this thread stays as it is
    counts = itertools.count(1)
    ends: list[bool] = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *call: ends.append(watcher.step(next(counts), optimizer))
    )
    try:
        _in_a_thread(_steps(6))
    finally:
        hook.remove()
    results = watcher.finish()
    assert ends == [False] * 5 + [True]
    assert results["steps"] == 2
    assert next(row for row in results["families"] if row["family"] == "conv")["ms"] > 0
    assert results["top_operators"]
    with fusedtrain.profile() as p:  # the process still has a profiler
        _steps(1)()
    assert p.summary["steps"] == 1
