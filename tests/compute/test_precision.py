"""What is set for a GPU (TF32, cuDNN, deterministic algorithms), and what is computed in real fp32."""

import os

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_llama

from model.weights import ScoreHead
from trainer.compute import precision, scoring
from trainer.compute.kernels import difference
from trainer.compute.precision import fast_dtype, set_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


MATMUL = torch.backends.cuda.matmul
SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@pytest.fixture(autouse=True)
def settings_as_before():
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    sums = {name: getattr(MATMUL, name) for name in SUMS}
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])
    for name, value in sums.items():
        setattr(MATMUL, name, value)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(
    ("able", "onednn", "expected"),
    [
        ({"avx512_bf16": True}, True, torch.bfloat16),
        ({"amx_bf16": True}, True, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, True, torch.float32),
        ({"avx512_fp16": True, "amx_fp16": True}, True, torch.float32),
        ({"avx512_bf16": True}, False, torch.float32),  # with ONEDNN_MAX_CPU_ISA=AVX2
    ],
)
def test_auto_takes_bf16_on_cpus_that_have_it(monkeypatch, able, onednn, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.setattr(precision, "onednn_takes_bf16", lambda: onednn)
    assert fast_dtype("auto", CPU) == expected
    assert [fast_dtype(name, CPU) for name in ("float32", "bfloat16")] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("capability", [(6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (9, 0)])
def test_auto_takes_fp16_on_gpus_that_are_fast_in_it_and_have_no_bf16(monkeypatch, capability):
    """A V100 or T4, not a GTX 10. Sums of products stay in fp32."""
    expected = {6: torch.float32, 7: torch.float16}.get(capability[0], torch.bfloat16)
    bf16 = expected == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert set_precision("auto", GPU) == expected
    assert not any(getattr(MATMUL, name) for name in SUMS)
    assert fast_dtype("float32", GPU) == torch.float32


def test_on_a_gpu_tf32_is_for_mixed_precision_only_and_cudnn_attention_is_off():
    """cuDNN's attention makes a plan for each shape, and packed rows have many. A CPU's settings stay."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    set_precision("float32", CPU)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for name, products in (("float32", "highest"), ("bfloat16", "high")):
        assert set_precision(name, GPU) == getattr(torch, name)
        assert torch.get_float32_matmul_precision() == products
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_models_are_compared_without_tf32_and_autocast_and_then_all_is_as_before():
    """In TF32 the comparison of packed with padded states fails by rounding, and so does that of layers."""
    torch.set_float32_matmul_precision("high")

    def product():
        assert torch.get_float32_matmul_precision() == "highest"
        x = torch.ones(1, 1) @ torch.ones(1, 1)
        assert x.dtype == torch.float32
        return x

    with torch.autocast("cpu", torch.bfloat16):
        assert difference(product, product, CPU) == ""
        assert difference(product, lambda: 1 / 0, CPU) == "division by zero"
    model, seen = tiny_llama(20, layers=2).base_model, []
    for module in (model.layers[0].mlp, model.layers[1].self_attn):
        module.register_forward_hook(lambda *args: seen.append(torch.get_float32_matmul_precision()))
    with torch.autocast("cpu", torch.bfloat16):
        assert scoring.pack_sequences(model)
    # Padded and packed; packed with transformers' layers and with ours; whole sequences, shared beginnings
    assert seen == ["highest"] * 12
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_computes_in_fp32_and_on_a_gpu_without_a_matrix_product(bias, monkeypatch):
    head, x = ScoreHead(16, 1, bias=bias), torch.randn(7, 16)
    results = []
    for on_gpu in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", on_gpu)
            if on_gpu:
                patch.setattr(F, "linear", None)
            y = head(x.requires_grad_(True))
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *head.parameters()])])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(wanted, found, rtol=1e-5, atol=1e-6)
    exact = head(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(x).equal(exact)
        assert not exact.equal(F.linear(x, head.weight, head.bias).float())
    assert exact.dtype == torch.float32


def test_deterministic_is_switched_on_and_off(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_precision("float32", CPU)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_precision("float32", CPU, deterministic=1)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # read by cuBLAS at the first product
    assert not torch.utils.deterministic.fill_uninitialized_memory  # costs time, and nothing needs it
    set_precision("float32", CPU)
    assert not torch.are_deterministic_algorithms_enabled()
