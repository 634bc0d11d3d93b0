"""token_logprobs: log-probs by hand and against autograd, without ever holding all logits of a batch."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.compute import logprobs
from trainer.compute.batching import Layout
from trainer.compute.logprobs import token_logprobs
from trainer.generation.stops import EarlyEnds


@pytest.fixture(params=["a CPU's functions", "torch's functions", "a GPU's functions"], autouse=True)
def functions(request, monkeypatch):
    """torch's are for machines without a compiler. A GPU's run in Triton's interpreter, on tensors of the
    CPU."""
    if request.param == "torch's functions":
        monkeypatch.setattr(logprobs, "kernels_for", lambda *tensors, **result: None)
    if request.param == "a GPU's functions":
        pytest.importorskip("triton", reason="Triton exists for Linux only")
        import triton_interpreter  # noqa: F401

        from trainer.compute.cuda import kernels

        if torch.cuda.is_available():
            pytest.skip("Triton compiles for the GPU, and these tensors are not there")
        monkeypatch.setattr(logprobs, "kernels_of", lambda kind: kernels)
        monkeypatch.setattr(logprobs, "GPU", "cpu")


def head_of(rows, bias=None):
    """A head that maps the state (1,) to the given logits."""
    head = torch.nn.Linear(1, len(rows), bias=bias is not None)
    head.weight.data = torch.tensor(rows)[:, None]
    if bias is not None:
        head.bias.data = torch.tensor(bias)
    return head


def test_by_hand():
    logs, entropy = token_logprobs(head_of([0.0, math.log(3.0)]), torch.ones(1, 1), torch.tensor([1]), 1.0)
    assert logs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_the_temperature_divides_the_logits():
    """softmax(log p / 0.5) is p^2 normalised: (1, 9) / 10. A bias of ln 3 acts like a weight."""
    for head in (head_of([0.0, math.log(3.0)]), head_of([0.0, 0.0], bias=[0.0, math.log(3.0)])):
        logs, _ = token_logprobs(head, torch.ones(1, 1), torch.tensor([1]), 0.5)
        assert logs.item() == pytest.approx(math.log(0.9))


def test_entropy_of_an_impossible_token_is_no_nan():
    head = head_of([0.0, 0.0], bias=[0.0, -torch.inf])
    logs, entropy = token_logprobs(head, torch.ones(1, 1), torch.tensor([0]), 1.0)
    assert (logs.item(), entropy.item()) == (0, 0)


def test_fp32_under_autocast():
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            logs, _ = token_logprobs(torch.nn.Linear(4, 3), torch.zeros(1, 4), torch.tensor([0]), 1.0)
        assert logs.dtype == torch.float32


def test_in_fp16_values_and_gradients_are_near_those_of_fp32(sizes):
    torch.manual_seed(0)
    head, states = torch.nn.Linear(16, 50), torch.randn(33, 16, requires_grad=True)
    targets, upstream, results = torch.randint(50, (33,)), torch.randn(33), []
    for mixed in (False, True):
        head.zero_grad()
        states.grad = None
        with torch.autocast("cpu", torch.float16, enabled=mixed):
            logs, entropy = token_logprobs(head, states, targets, 0.7)
        (logs * upstream).sum().backward()
        results.append([logs, entropy, states.grad, *(p.grad for p in head.parameters())])
    for exact, rounded in zip(*results, strict=True):
        assert 0 < (exact - rounded).norm() < 2e-3 * exact.norm()


@pytest.fixture(params=["one chunk, kept", "chunks, kept", "chunks, computed again"])
def sizes(request, monkeypatch):
    if request.param != "one chunk, kept":
        monkeypatch.setattr(logprobs, "CHUNK", {"cpu": 7 * 50})
        monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    if request.param == "chunks, computed again":
        monkeypatch.setattr(logprobs, "MAX_KEPT", {"cpu": 0})


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_autograd(sizes, bias):
    torch.manual_seed(0)
    head, states = torch.nn.Linear(16, 50, bias=bias), torch.randn(33, 16, requires_grad=True)
    targets, upstream = torch.randint(50, (33,)), torch.randn(33)
    results = []
    for function in (token_logprobs, plain_logprobs):
        head.zero_grad()
        states.grad = None
        logs, entropy = function(head, states, targets, 0.7)
        (logs * upstream).sum().backward()
        results.append([logs, entropy, states.grad, *(p.grad for p in head.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_ids_that_come_too_early_have_no_probability_and_no_gradient(sizes):
    """Two responses of 20 and 13 tokens; ids 3 and 49 may not be among the first five of each."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(16, 50), torch.randn(33, 16, requires_grad=True)
    targets, upstream, results = torch.randint(4, 49, (33,)), torch.randn(33), []
    targets[[5, 19, 32]] = torch.tensor([3, 3, 49])  # where they may be
    layout = Layout.of_responses([2, 4], [20, 13])
    forbid_ = EarlyEnds(6, [3, 49, 1000]).of(layout)  # no model has an id of 1000
    early = torch.tensor([*range(5), *range(20, 25)])
    mask = torch.zeros(33, 50, dtype=torch.bool)
    mask[early[:, None], torch.tensor([3, 49])] = True
    for function, more in ((token_logprobs, forbid_), (plain_logprobs, mask)):
        head.zero_grad()
        states.grad = None
        logs, entropy = function(head, states, targets, 0.7, more)
        (logs * upstream).sum().backward()
        results.append([logs, entropy, states.grad, *(p.grad for p in head.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def plain_logprobs(head, states, targets, temperature, forbidden=False):
    logits = head(states) / temperature
    log_p = F.log_softmax(logits.masked_fill(torch.as_tensor(forbidden), -1e30), -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def test_the_logits_of_a_chunk_are_freed_before_the_next(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK", {"cpu": 7 * 50})
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(logprobs, "MAX_KEPT", {"cpu": 0})
    computed, before = logprobs.head_logits, []

    def watched(*args):
        assert not before or before.pop()() is None
        logits = computed(*args)
        before.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(logprobs, "head_logits", watched)
    states = torch.randn(33, 16, requires_grad=True)
    token_logprobs(torch.nn.Linear(16, 50), states, torch.randint(50, (33,)), 0.7)[0].sum().backward()


def test_no_logits_of_the_whole_batch_exist(monkeypatch):
    """The largest tensor made on the way, forward and backward, is one chunk of logits."""
    monkeypatch.setattr(logprobs, "CHUNK", {"cpu": 7 * 5000})
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(logprobs, "MAX_KEPT", {"cpu": 0})
    head, states = torch.nn.Linear(4, 5000, bias=False), torch.randn(100, 4, requires_grad=True)
    with Largest() as largest:
        logs, _ = token_logprobs(head, states, torch.randint(5000, (100,)), 1.0)
        logs.sum().backward()
    assert largest.elements == 7 * 5000


@pytest.mark.parametrize(("tokens_in_chunk", "products"), [(12, 3), (5, 12)])
def test_logits_are_computed_again_only_if_they_are_several_chunks(monkeypatch, tokens_in_chunk, products):
    """Three products a chunk: logits, gradient of the states, of the weight; a fourth for logits again."""
    monkeypatch.setattr(logprobs, "CHUNK", {"cpu": tokens_in_chunk * 50})
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(logprobs, "MAX_KEPT", {"cpu": 12 * 50 if products == 3 else 0})
    head, states = torch.nn.Linear(16, 50, bias=False), torch.randn(12, 16, requires_grad=True)
    with Operations() as done:
        token_logprobs(head, states, torch.randint(50, (12,)), 1.0)[0].sum().backward()
    assert sum(name.startswith(("aten.mm", "aten.addmm")) for name, _ in done.seen) == products


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the number of elements of the largest floating-point tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_logits_are_fp32_and_products_are_in_the_dtype(dtype):
    """Tensors without numbers stand for those of a GPU: only what is asked of it is known."""
    with FakeTensorMode(), Operations() as asked:
        states, weight, bias = (torch.empty(*s, device="cuda") for s in ((3, 8), (20, 8), (20,)))
        for b in (None, bias):
            logits = logprobs.head_logits(states, weight, b, dtype)
            assert (logits.dtype, logits.shape, logits.is_cuda) == (torch.float32, (3, 20), True)
    products = [args for name, args in asked.seen if name.startswith("aten.mm")]
    assert [args[0].dtype for args in products] == [args[1].dtype for args in products] == [dtype] * 2


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that is built for CUDA")
def test_on_a_gpu_gradients_of_the_weight_are_added_in_fp32():
    """Chunks are summed in one operation each, in place, and no product is rounded to bf16."""
    with FakeTensorMode(), Operations() as asked:
        grad, states = (torch.empty(*s, device="cuda", dtype=torch.bfloat16) for s in ((5, 20), (5, 8)))
        logprobs._add_product(torch.zeros(20, 8, device="cuda"), grad.T, states)
    assert [name for name, _ in asked.seen if "mm" in name] == ["aten.addmm.dtype_out"]


def test_on_a_cpu_logits_are_in_the_dtype_of_the_products():
    states, weight = torch.randn(3, 8), torch.randn(20, 8)
    assert logprobs.head_logits(states, weight, None, torch.bfloat16).dtype == torch.bfloat16
    logits = logprobs.head_logits(states, weight, None, torch.float32)
    torch.testing.assert_close(logits, states @ weight.T)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operation with its arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((str(function), args))
        if function is torch.ops.aten.addmm.dtype_out:  # without numbers, torch 2.11 fails here
            return kwargs["out"]
        return function(*args, **(kwargs or {}))
