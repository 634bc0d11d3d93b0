"""token_logprobs: log-probs, entropies and their gradients, without ever holding all logits of a batch."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.compute import logprobs
from trainer.compute.batching import Layout
from trainer.compute.logprobs import token_logprobs
from trainer.generation.stops import Forbidden


@pytest.fixture(params=["a CPU's functions", "torch's functions", "a GPU's functions"], autouse=True)
def functions(request, monkeypatch):
    """torch's are for machines without a compiler. A GPU's run in Triton's interpreter, on CPU tensors."""
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
    return request.param


COUNT = 17  # tokens
ONE, SEVERAL, AGAIN = (999, 1 << 20), (7, 1 << 20), (7, 0)  # one chunk, several, several computed again


def cut(monkeypatch, tokens, kept, size=50):
    """A chunk has so many tokens; of at most ``kept`` numbers something is kept for the gradient."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", {"cpu": tokens * size})
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(logprobs, "MAX_KEPT", {"cpu": kept})


def draw(spread=1.0, bias=True, size=50):
    """A head of ``size`` tokens whose logits vary by ``spread``, states, targets, upstream gradients."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(16, size, bias=bias), torch.randn(COUNT, 16)
    with torch.no_grad():
        head.weight.mul_(spread)
    return head, states, torch.randint(size, (COUNT,)), torch.randn(2, COUNT)


def gradients(head, states, targets, upstream, forbid_=None, dtype=None, learn_entropy=True, temperature=0.7):
    """Log-probs, entropies and the gradients of (log-probs, entropies) times ``upstream`` [2, N], by this
    project; dtype: of autocast."""
    states = states.clone().requires_grad_()
    head.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        found = token_logprobs(head, states, targets, temperature, forbid_, learn_entropy)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert found[1].requires_grad == learn_entropy
    (torch.stack(found) * upstream).sum().backward()
    return [*(x.detach() for x in found), states.grad, *(p.grad for p in head.parameters())]


def exact_gradients(head, states, targets, upstream, forbidden=False, temperature=0.7):
    """The same by autograd over log_softmax, in fp64."""
    states = states.double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in head.parameters()]
    logits = torch.nn.functional.linear(states, *weights).masked_fill(torch.as_tensor(forbidden), -torch.inf)
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = torch.where(log_p.isinf(), 0.0, -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0))).sum(-1)
    found = log_p.gather(1, targets[:, None]).squeeze(1), entropy
    return [*found, *torch.autograd.grad((torch.stack(found) * upstream).sum(), [states, *weights])]


def same(ours, wanted, tolerance=1e-5):
    for one, other in zip(ours, wanted, strict=True):
        assert (one - other).abs().max() < tolerance * max(1.0, other.abs().max())


@pytest.mark.parametrize(
    ("sizes", "drawn", "temperature"),
    [
        (ONE, {}, 1.0),
        (ONE, {"size": 3000}, 0.7),
        (ONE, {"bias": False, "size": 1}, 0.7),
        (ONE, {"spread": 40.0}, 0.5),  # probabilities down to e^-100 and below
        (SEVERAL, {"bias": False, "size": 16}, 1.0),
        (AGAIN, {"spread": 40.0}, 0.7),
    ],
)
def test_values_and_gradients_are_those_of_autograd(monkeypatch, sizes, drawn, temperature):
    cut(monkeypatch, *sizes, drawn.get("size", 50))
    ours, wanted = (f(*draw(**drawn), temperature=temperature) for f in (gradients, exact_gradients))
    same(ours, wanted, 3e-5 if "spread" in drawn else 1e-5)


@torch.no_grad()
def test_impossible_targets_and_logits_that_are_no_numbers(functions):
    """The log-prob of an impossible target is about the lowest number; NaN stays NaN."""
    lowest = torch.finfo(torch.float32).min
    rows = torch.zeros(3, 300)
    rows[0, 7], rows[1, 100], rows[2] = -torch.inf, torch.nan, -torch.inf
    head = torch.nn.Linear(3, 300)
    head.weight.data, head.bias.data = torch.zeros(300, 3), torch.zeros(300)
    given = lambda logits, chunk: logits.copy_(rows[chunk])  # noqa: E731
    logs, entropy = token_logprobs(head, torch.eye(3), torch.full((3,), 7), 1.0, given)
    assert logs[0] == pytest.approx(lowest)
    assert entropy[0].exp().item() == pytest.approx(299, rel=1e-4)
    assert logs[1].isnan() and entropy[1].isnan()
    if functions == "a GPU's functions":  # of a row without a possible token: as if all were equal
        assert entropy[2].exp().item() == pytest.approx(300, rel=1e-4)


@pytest.mark.parametrize("sizes", [SEVERAL, AGAIN])
def test_ids_that_come_too_early_have_no_probability_and_no_gradient(monkeypatch, sizes):
    """Two responses of 10 and 7 tokens; ids 3 and 49 may not be among the first five of each."""
    cut(monkeypatch, *sizes)
    head, states, targets, upstream = draw()
    targets = targets.clamp(4, 48)
    targets[[5, 9, 16]] = torch.tensor([3, 3, 49])  # where they may be
    forbid_ = Forbidden(6, [3, 49, 1000]).of(Layout.of_responses([2, 4], [10, 7]))  # no model has id 1000
    early = torch.tensor([*range(5), *range(10, 15)])
    mask = torch.zeros(COUNT, 50, dtype=torch.bool)
    mask[early[:, None], torch.tensor([3, 49])] = True
    ours = gradients(head, states, targets, upstream, forbid_)
    same(ours, exact_gradients(head, states, targets, upstream, mask))


def test_in_half_precision_they_are_near(monkeypatch):
    for dtype, tolerance, sizes in ((torch.float16, 4e-3, AGAIN), (torch.bfloat16, 3e-2, ONE)):
        cut(monkeypatch, *sizes)
        for ours, exact in zip(gradients(*draw(), dtype=dtype), exact_gradients(*draw()), strict=True):
            assert 0 < (ours - exact).norm() < tolerance * exact.norm()


def test_without_learn_entropy_it_has_no_gradient_and_the_rest_has_the_same_bits(monkeypatch):
    """With it, and no weight on the entropy, the log-probs' gradient differs by rounding at most."""
    cut(monkeypatch, *AGAIN)
    head, states, targets, upstream = draw()
    upstream[1] = 0
    plain, learned = (gradients(head, states, targets, upstream, learn_entropy=x) for x in (False, True))
    assert all(a.equal(b) for a, b in zip(plain[:2], learned[:2], strict=True))
    same(learned, plain, 1e-6)
    with torch.no_grad():
        found = token_logprobs(head, states, targets, 0.7, learn_entropy=True)
    assert not any(x.requires_grad for x in found)


class Operations(TorchDispatchMode):
    """Notes every operation with the types of its arguments, and the largest tensor of floats."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((str(function), [getattr(x, "dtype", None) for x in args]))
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *(x.numel() * x.is_floating_point() for x in tensors), 0)
        return result


@pytest.mark.parametrize(("chunk", "kept", "products"), [(12, 12, 3), (5, 0, 12)])
def test_logits_are_computed_again_only_if_they_are_several_chunks(monkeypatch, chunk, kept, products):
    """Three products a chunk: logits, gradient of the states, of the weight; a fourth for logits again. The
    largest tensor made on the way is one chunk of logits, and it is freed before the next."""
    cut(monkeypatch, chunk, kept * 500, 500)
    head, states = torch.nn.Linear(4, 500, bias=False), torch.randn(12, 4, requires_grad=True)
    computed, before = logprobs.head_logits, []

    def watched(*args):
        assert not before or before.pop()() is None
        logits = computed(*args)
        before.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(logprobs, "head_logits", watched)
    with Operations() as done:
        token_logprobs(head, states, torch.randint(500, (12,)), 1.0)[0].sum().backward()
    assert sum(name.startswith(("aten.mm", "aten.addmm")) for name, _ in done.seen) == products
    assert done.largest == chunk * 500


@pytest.mark.parametrize("functions", ["torch's functions"], indirect=True)
def test_logits_are_fp32_on_a_gpu_and_products_are_in_the_dtype():
    """Tensors without numbers stand for those of a GPU: only what is asked of it is known."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with FakeTensorMode(), Operations() as asked:
            states, weight, bias = (torch.empty(*s, device="cuda") for s in ((3, 8), (20, 8), (20,)))
            for b in (None, bias):
                logits = logprobs.head_logits(states, weight, b, dtype)
                assert (logits.dtype, logits.shape, logits.is_cuda) == (torch.float32, (3, 20), True)
        products = [types for name, types in asked.seen if name.startswith("aten.mm")]
        assert [types[:2] for types in products] == [[dtype] * 2] * 2
    states, weight = torch.randn(3, 8), torch.randn(20, 8)
    assert logprobs.head_logits(states, weight, None, torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.head_logits(states, weight, None, torch.float32), states @ weight.T)
