import math

import pytest
import torch
from model_families import FAMILIES, random_model_of
from tiny_models import whole
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ludic.errors import ModelError
from ludic.training.batches.packing import pack
from ludic.training.logprobs import check_head, linear_logprobs, token_logprobs
from ludic.training.model import shard


def plain(hidden, weight, bias, targets, temperatures, softcap=None):
    """Logprobs and entropies by the whole (A, V) tensor."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


def a_head(*, bias=False, dtype=torch.float64):
    """7 hidden states of 5, a vocabulary of 11; targets and temperatures."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (11, 5)] + ([(11,)] if bias else [])
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    targets, temperatures = torch.randint(11, (7,), generator=generator), torch.linspace(0.5, 2, 7)
    return tensors if bias else [*tensors, None], targets, temperatures


def test_logprobs_and_entropy_worked_out_by_hand():
    # probabilities 1/4 and 3/4; at temperature 2 the odds of 9 become 3
    hidden = torch.tensor([[0.0, math.log(3)], [0.0, math.log(9)]])
    targets, temperatures = torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
    logprobs, entropy = linear_logprobs(hidden, torch.eye(2), None, targets, temperatures)
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert entropy.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)] * 2)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_values_and_gradients_of_the_whole(chunk_tokens, softcap, bias):
    tensors, targets, temperatures = a_head(bias=bias)
    inputs = [tensor for tensor in tensors if tensor is not None]
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)

    def both(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs + weights.square() * entropies).sum(), inputs)

    expected = plain(*tensors, targets, temperatures, softcap)
    options = {"softcap": softcap, "chunk_tokens": chunk_tokens, "entropy_gradient": True}
    found = linear_logprobs(*tensors, targets, temperatures, **options)
    for one, other in zip([*found, *both(*found)], [*expected, *both(*expected)], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return out


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_is_larger_than_a_chunk_or_the_head(entropy_gradient):
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in [(400, 8), (1000, 8)])
    targets, temperatures = torch.zeros(400, dtype=torch.int64), torch.ones(400)
    options = {"chunk_tokens": 10, "softcap": 3.0, "entropy_gradient": entropy_gradient}
    with LargestTensor() as largest:
        logprobs, entropies = linear_logprobs(hidden, weight, None, targets, temperatures, **options)
        (logprobs + entropies).sum().backward()
    assert largest.num_elements == 10 * 1000  # of 400 x 1000 logits, and the head's 8 x 1000


def test_gradients_agree_with_finite_differences():
    (hidden, weight, _), targets, temperatures = a_head()

    def run(hidden, weight):
        options = {"softcap": 2.0, "chunk_tokens": 3, "entropy_gradient": True}
        return linear_logprobs(hidden, weight, None, targets, temperatures, **options)

    assert torch.autograd.gradcheck(run, (hidden, weight))


def test_entropy_has_no_gradient_unless_asked():
    tensors, targets, temperatures = a_head()
    logprobs, entropies = linear_logprobs(*tensors, targets, temperatures)
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_a_frozen_head_gets_no_gradient():
    (hidden, weight, _), targets, temperatures = a_head()
    linear_logprobs(hidden, weight.detach(), None, targets, temperatures)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_bfloat16_is_summed_up_in_float32():
    tensors, targets, temperatures = a_head(dtype=torch.bfloat16)
    logprobs, entropies = linear_logprobs(*tensors, targets, temperatures, chunk_tokens=2)
    assert logprobs.dtype == entropies.dtype == torch.float32
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = plain(*exact, targets, temperatures)
    assert torch.allclose(logprobs.double(), expected[0], atol=0.05)
    found_gradients = torch.autograd.grad(logprobs.sum(), tensors[:2])
    for found, wanted in zip(found_gradients, torch.autograd.grad(expected[0].sum(), exact[:2]), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), wanted, atol=0.05)


def test_many_chunks_lose_nothing_of_the_heads_gradient_in_bfloat16():
    # Each row adds 2^-9 to an entry of about 1 or 2: one by one in bfloat16, nothing would be added.
    hidden, weight = torch.full((512, 1), 2.0**-8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    targets, temperatures = torch.zeros(512, dtype=torch.int64), torch.ones(512)
    linear_logprobs(hidden, weight, None, targets, temperatures, chunk_tokens=1)[0].sum().backward()
    assert weight.grad[:, 0].tolist() == [1.0, -1.0]  # 512 x (1 - 1/2) x 2^-8


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_every_family_are_those_of_its_own_forward_pass(family, sequences):
    model = random_model_of(family, attention="eager").double()
    for sequence in sequences(4, 1):
        batch = pack([sequence])
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[0, batch.logit_positions]
        wanted = (logits / batch.temperatures[:, None]).log_softmax(-1)
        wanted = wanted[torch.arange(len(batch.targets)), batch.targets]
        found = token_logprobs(model, batch, chunk_tokens=4)[0]
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_have_the_loss_and_gradients_of_separate_ones(mesh, family, sequences):
    some, models = sequences(6, 1), [random_model_of(family) for _ in range(2)]
    for model in models:
        shard(model, mesh)
    together = token_logprobs(models[0], pack(some), chunk_tokens=16)[0]
    together.sum().backward()
    alone = []
    for sequence in some:
        alone.append(token_logprobs(models[1], pack([sequence]))[0])
        alone[-1].sum().backward()
    assert torch.allclose(together, torch.cat(alone), rtol=0, atol=1e-5)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        one, other = whole(one.grad), whole(other.grad)
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * max(1, other.abs().max().item())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sequence_of_any_family_sees_another(family, sequences):
    model, some = random_model_of(family), sequences(3, 1)
    before = pack(some)
    some[1].prompt_tokens[:] = 7
    some[1].response_tokens[:] = 9
    after, other = pack(some), before.sequence_ids != 1
    found = [token_logprobs(model, batch)[0] for batch in (before, after)]
    assert torch.equal(found[0][other], found[1][other])
    assert not torch.equal(found[0][~other], found[1][~other])


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_all_families_are_known(family):
    check_head(random_model_of(family), family)


def test_a_head_that_scales_its_logits_in_its_own_way_is_refused():
    model = random_model_of("llama")
    forward = model.forward

    def scaled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(ModelError, match="here: LlamaForCausalLM computes its logits in an unsupported way"):
        check_head(model, "here")
