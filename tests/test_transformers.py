"""The kernels in Llama and Qwen models of random weights: same tokens, same errors, and all of it undone again."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
import torch.nn.functional as functional
from operator_checks import DEVICE, DTYPES, INTERPRETED, assert_right, randn
from torch.utils._python_dispatch import TorchDispatchMode

from triton_kernel_lab import routing
from triton_kernel_lab.integrations.transformers import Decoder, patch, patch_report, unpatch
from triton_kernel_lab.integrations.transformers._modules import Int4Linear
from triton_kernel_lab.integrations.transformers._rotate import (
    Cache,
    HeadNorms,
    rotate_and_store,
    rotate_and_store_reference,
    slots,
)
from triton_kernel_lab.integrations.transformers._row_linear import row_linear

if os.environ.get("CI") or os.environ.get("TKL_EXPECT_GPU") == "1":
    import transformers  # Where all is installed, missing it is a failure and no skip.
else:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
VOCABULARY, PROMPT, NEW = 97, 3, 3


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form of an operator."""
    with routing.strict():
        yield


def configuration(family: str, **settings: Any) -> Any:
    """Two narrow layers; weights so large that the likeliest token changes from step to step."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return FAMILIES[family](**(sizes | heads | special | {"initializer_range": 0.4} | settings))


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of seeded weights, biases and norms among them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model.to(dtype).to(DEVICE).eval()


@functools.cache
def eager(family: str) -> Any:
    """Never patched itself; tests take copies."""
    return build(configuration(family))


def prompts(batch: int = 2, tokens: int = PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch + tokens)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator).to(DEVICE)


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    """The tokens that the library's own loop chooses."""
    mask = torch.ones_like(ids) if mask is None else mask
    settings |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


@functools.cache
def expected(family: str) -> torch.Tensor:
    tokens = greedy(eager(family), prompts())
    # A model that says the same whatever it reads would hide every mistake.
    assert tokens.unique().numel() > NEW
    return tokens


def last_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits [B, 2, V] after the last token and the one before it."""
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits[:, -2:]
    return found


def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same from a decoder, by a prompt and a step."""
    decoder = Decoder(model, *ids.shape)
    return torch.stack([decoder.prefill(ids[:, :-1]), decoder.step(ids[:, -1])], 1)


def assert_near(found: torch.Tensor, logits: torch.Tensor) -> None:
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def refuses(sentence: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(sentence)}")


def test_the_integration_loads_transformers_when_a_model_is_patched() -> None:
    """Neither the package nor the integration imports transformers."""
    code = "import triton_kernel_lab.integrations.transformers, sys; print('transformers' in sys.modules)"
    assert checks.run_python(code).stdout.split() == ["False"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_patched_model_chooses_the_tokens_of_the_eager_one(family: str) -> None:
    """In fp32, over a cache that grows, with every norm, MLP and attention replaced."""
    model = patch(copy.deepcopy(eager(family)))
    norms = 5 if family != "qwen3" else 9
    assert patch_report(model).replaced == {"rms_norm": norms, "swiglu": 2, "attention": 2}
    assert patch_report(model).kept == {}
    assert torch.equal(greedy(model, prompts()), expected(family))


@pytest.mark.parametrize(("cache", "padding"), [("dynamic", 2), ("static", 0)])
def test_patched_model_leaves_out_what_is_masked(cache: str, padding: int) -> None:
    """Padding on the left, and the rows of the library's static cache that are not filled yet."""
    ids, mask = prompts(), torch.ones(2, PROMPT, dtype=torch.int64, device=DEVICE)
    mask[0, :padding] = 0
    tokens = greedy(eager("llama"), ids, mask) if padding else expected("llama")
    assert torch.equal(tokens, expected("llama")) is not bool(padding)
    model = patch(copy.deepcopy(eager("llama")))
    assert torch.equal(greedy(model, ids, mask, cache_implementation=cache, disable_compile=True), tokens)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_decoder_chooses_the_tokens_of_the_eager_model(family: str) -> None:
    """In fp32, from an unpatched model, over a static cache."""
    decoder = Decoder(eager(family), 2, PROMPT + NEW)
    assert torch.equal(decoder.generate(prompts(), NEW), expected(family))
    assert decoder.length == PROMPT + NEW - 1


def test_decoder_starts_anew_in_pages_of_any_order() -> None:
    """Nothing of an earlier sequence is seen, whatever pages the table names."""
    decoder = Decoder(eager("llama"), 2, 16, paged=True, page_size=2)
    decoder.generate(prompts(tokens=PROMPT + NEW), 2)
    assert decoder.page_table is not None
    decoder.page_table.copy_(decoder.page_table.flip(0, 1))
    assert torch.equal(decoder.generate(prompts(), NEW), expected("llama"))


def test_decoder_reads_prompts_of_different_lengths() -> None:
    """Padding on the right counts for nothing: each sequence goes on as it would alone."""
    ids = prompts()
    decoder = Decoder(eager("llama"), 2, PROMPT + 2)
    lengths = torch.tensor([PROMPT - 1, PROMPT], device=DEVICE)
    first = decoder.prefill(ids, lengths).argmax(-1)
    together = torch.stack([first, decoder.step(first).argmax(-1)], 1)
    for row, length in enumerate(lengths.tolist()):
        alone = greedy(eager("llama"), ids[row : row + 1, :length])
        assert torch.equal(together[row], alone[0, :2])


def test_rows_that_a_step_sees_are_chosen_in_one_launch() -> None:
    """Each sequence's rows up to its position are named once, the others are no choice, and one operation says so."""

    class Noting(TorchDispatchMode):  # type: ignore[misc]  # Lint reads no types of torch.
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(op)
            return op(*args, **(kwargs or {}))

    ran: list[Any] = []
    decoder = Decoder(eager("llama"), 2, 8)
    decoder.prefill(prompts(tokens=5), torch.tensor([2, 5], device=DEVICE))
    with Noting():
        indices = decoder._seen(6)
    assert [[index for index in row if index >= 0] for row in indices.tolist()] == [[2, 1, 0], [5, 4, 3, 2, 1, 0]]
    assert (indices.shape, indices.dtype, indices.is_contiguous()) == ((2, 6), torch.int32, True)
    assert [op for op in ran if not op.is_view] == [torch.ops.aten.sub.Tensor]


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_logits_are_no_further_from_exact_than_twice_the_eager_ones(dtype: torch.dtype) -> None:
    """Of prompt and step, against the same weights in float64, patched and decoded."""
    model = build(configuration("llama", initializer_range=0.1), dtype)
    ids = prompts(tokens=PROMPT + 1)
    exact, usual = last_two(copy.deepcopy(model).double(), ids), last_two(model, ids)
    decoder, patched = decoded(model, ids), last_two(patch(model), ids)
    allowed = 2 * (usual.double() - exact).abs().max()
    assert 0 < allowed < 0.1 * exact.abs().max()
    for logits in (decoder, patched):
        assert logits.dtype == dtype
        assert (logits.double() - exact).abs().max() <= allowed


def test_int4_model_is_the_dense_model_of_the_stored_weights() -> None:
    """With INT4 linears, patched and decoded, the logits are those of a dense model that has the rounded weights."""
    model = patch(copy.deepcopy(eager("qwen2")), int4=True, group_size=32)
    assert patch_report(model).replaced["int4_linear"] == 14
    dense = copy.deepcopy(eager("qwen2"))
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, Int4Linear):
                weight = dense.get_submodule(name).weight
                assert 0 < (weight - layer.weight_stored()).abs().max() < 0.2 * weight.abs().max()
                weight.copy_(layer.weight_stored())
    ids = prompts()
    logits = last_two(dense, ids)
    assert (last_two(eager("qwen2"), ids) - logits).abs().max() > 0.1
    assert_near(last_two(model, ids), logits)
    assert_near(decoded(model, ids), logits)


@pytest.mark.parametrize("int4", [False, True])
def test_unpatch_leaves_the_model_as_it_was(int4: bool) -> None:
    """Weights, modules, attention and logits are the model's own again, bit for bit."""
    original, model = eager("qwen3"), copy.deepcopy(eager("qwen3"))
    assert patch(model, int4=int4, group_size=32) is model
    assert model.config._attn_implementation != original.config._attn_implementation
    assert unpatch(model) is model
    assert model.config._attn_implementation == original.config._attn_implementation
    assert str(model) == str(original)
    assert not any("forward" in vars(module) for module in model.modules())
    state = model.state_dict()
    assert state.keys() == original.state_dict().keys()
    assert all(torch.equal(state[name], weight) for name, weight in original.state_dict().items())
    assert torch.equal(last_two(model, prompts()), last_two(original, prompts()))
    patch(model)


def test_quantising_leaves_a_weight_alone_that_another_model_shares() -> None:
    """Patching a copy that shares its parameters changes nothing of the first model."""
    original = copy.deepcopy(eager("llama"))
    model = copy.deepcopy(original, memo={id(weight): weight for weight in original.parameters()})
    patch(model, int4=True, group_size=32)
    assert all(weight.device.type == DEVICE.type for weight in original.parameters())
    assert torch.equal(last_two(original, prompts()), last_two(eager("llama"), prompts()))


def test_tied_head_stays_dense() -> None:
    """A head that is the embedding works, and INT4 leaves it."""
    model = build(configuration("qwen2", tie_word_embeddings=True))
    assert_near(decoded(model, prompts()), last_two(model, prompts()))
    patch(model, int4=True, group_size=32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert patch_report(model).replaced["int4_linear"] == 14


def test_weight_of_two_modules_stays_dense() -> None:
    """INT4 leaves a layer whose weight another one shares, and says so."""
    model = copy.deepcopy(eager("llama"))
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    patch(model, int4=True, group_size=32)
    reason = "its weight belongs to another module too"
    assert patch_report(model).kept == {f"model.layers.{i}.self_attn.q_proj": reason for i in range(2)}


def test_modules_of_other_formulas_stay_eager() -> None:
    """Cohere's norms subtract the mean: nothing of that model is touched, and each part is reported."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    config = transformers.CohereConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model = build(config)
    before = last_two(model, prompts())
    patch(model)
    assert torch.equal(last_two(model, prompts()), before)
    report = patch_report(model)
    assert report.replaced == {}
    layer = "model.layers.0."
    assert {*report.kept} == {layer + "self_attn", layer + "mlp", layer + "input_layernorm", "model.norm"}
    assert "model.norm kept: CohereLayerNorm of transformers.models.cohere" in str(report)
    with refuses("Decoder: model: expected layers whose formulas are known, got model.layers.0.self_attn: Cohere"):
        Decoder(model, 1, 8)


def test_another_activation_stays_eager() -> None:
    """An MLP that activates with GELU keeps its forward; the rest is replaced."""
    model = build(configuration("llama", hidden_act="gelu"))
    logits = last_two(model, prompts())
    patch(model)
    assert patch_report(model).kept["model.layers.0.mlp"] == "LlamaMLP activates with GELUActivation, not with SiLU"
    assert str(patch_report(model)).startswith("rms_norm: 5 replaced\nattention: 2 replaced\nmodel.layers.0.mlp kept:")
    assert_near(last_two(model, prompts()), logits)


def test_biased_mlp_and_attention_are_served() -> None:
    """Biases in every projection, dense and INT4, patched and decoded."""
    model, ids = build(configuration("llama", mlp_bias=True, attention_bias=True)), prompts()
    logits = last_two(model, ids)
    assert_near(decoded(model, ids), logits)
    assert_near(last_two(patch(model), ids), logits)
    patch(unpatch(model), int4=True, group_size=32)
    assert_near(decoded(model, ids), last_two(model, ids))


def test_hooks_of_linear_layers_still_run() -> None:
    """What an adapter adds to a projection reaches the output of a patched MLP; the decoder refuses it."""
    model = copy.deepcopy(eager("llama"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda layer, inputs, output: output + 1)
    logits = last_two(model, prompts())
    assert (last_two(eager("llama"), prompts()) - logits).abs().max() > 0.1
    with refuses("Decoder: model: expected plain linear layers, got model.layers.0.mlp.up_proj: Linear."):
        Decoder(model, 1, 8)
    patch(model, int4=True, group_size=32)
    assert patch_report(model).kept == {"model.layers.0.mlp.up_proj": "Linear is no plain linear layer"}
    assert_near(last_two(patch(unpatch(model)), prompts()), logits)


def test_gradients_are_those_of_the_eager_model() -> None:
    """Training a patched model: each parameter's gradient in fp32."""
    found = []
    for model in (copy.deepcopy(eager("llama")), patch(copy.deepcopy(eager("llama")))):
        model(prompts(), labels=prompts()).loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_patch_says_what_is_wrong() -> None:
    """Bad arguments get one sentence, and change nothing."""
    model = copy.deepcopy(eager("llama"))
    with refuses("patch: group_size: expected a positive even number, got 33."):
        patch(model, int4=True, group_size=33)
    for function in (unpatch, patch_report):
        with refuses(f"{function.__name__}: model: expected a model that patch has changed, got another."):
            function(model)
    patch(model)
    with refuses("patch: model: expected a model that is not patched, got one that is."):
        patch(model)


def test_decoder_says_what_is_wrong() -> None:
    """Models, sizes, prompts and steps that do not fit get one sentence."""
    model = eager("llama")
    with refuses("Decoder: batch: expected a positive integer, got 0."):
        Decoder(model, 0, 8)
    with refuses("Decoder: model: expected a causal language model of transformers, got LlamaModel."):
        Decoder(model.model, 1, 8)
    with refuses("Decoder: max_length: expected at most the sliding window, 8, got 9."):
        Decoder(build(configuration("mistral", sliding_window=8)), 1, 9)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with refuses("Decoder: model: expected rotary frequencies that do not move, got dynamic ones."):
        Decoder(build(configuration("llama", rope_parameters=scaled)), 1, 8)
    decoder = Decoder(model, 1, 3)
    with refuses("Decoder.step: token_ids: expected a prompt before, and at most 3 tokens, got 0."):
        decoder.step(prompts(1, 1)[0])
    with refuses("Decoder.prefill: input_ids: expected [1, L] with L from 1 to 3, got (1, 4)."):
        decoder.prefill(prompts(1, 4))
    with refuses("Decoder.prefill: lengths: expected 1 numbers from 1 to 3, got"):
        decoder.prefill(prompts(1, 3), torch.tensor([0], device=DEVICE))
    decoder.prefill(prompts(1, 2))
    with refuses("Decoder.step: token_ids: expected the shape (1,), got (2,)."):
        decoder.step(prompts(1, 2)[0])
    decoder.step(prompts(1, 1)[0])
    with refuses("Decoder.step: token_ids: expected a prompt before, and at most 3 tokens, got 3."):
        decoder.step(prompts(1, 1)[0])


def rotated(heads: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The library's own rotation of heads [B, T, H, D], in float64."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    turns = [torch.cat((table, table), -1)[positions.long()].double() for table in (cos, sin)]
    q, _ = apply_rotary_pos_emb(heads.double(), heads.double(), *turns, unsqueeze_dim=2)
    return q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("d", [6, 16])
def test_rotation_is_the_librarys_and_writes_only_its_rows(d: int, paged: bool, dtype: torch.dtype) -> None:
    """Keys turned and values as they are at their rows, in kernel and reference; no other row changes."""
    batch, tokens, hq, hkv, rows, page_size = 2, 3, 4, 2, 12, 4
    qkv = randn(batch, tokens, (hq + 2 * hkv) * d, dtype=dtype)
    angles = randn(rows, d // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([[0, 5, 11], [4, 3, 7]], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32, device=DEVICE) if paged else None
    shape = (batch * rows // page_size, page_size, hkv, d) if paged else (batch, rows, hkv, d)
    q, k, v = qkv.view(batch, tokens, -1, d).split([hq, hkv, hkv], 2)
    at = torch.arange(batch, device=DEVICE)[:, None] * rows + positions.long()
    at = at if table is None else slots(table, positions, page_size)
    for form in (rotate_and_store, rotate_and_store_reference):
        k_cache, v_cache = (torch.full(shape, checks.POISON, dtype=dtype, device=DEVICE) for _ in range(2))
        cache = Cache(k_cache, v_cache, table)
        assert_right(form(qkv, cos, sin, positions, cache), rotated(q, positions, cos, sin), dtype)
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        assert_right(keys[at], rotated(k, positions, cos, sin), dtype)
        assert torch.equal(values[at], v)
        others = torch.ones(batch * rows, dtype=torch.bool, device=DEVICE).index_fill(0, at.flatten(), False)
        assert bool((keys[others] == checks.POISON).all())
        assert bool((values[others] == checks.POISON).all())


def test_head_norms_come_before_the_rotation() -> None:
    """Queries and keys are normalised by their own weights; a position of 0 turns nothing."""
    d, qkv = 8, randn(1, 1, 4 * 8)
    norms = HeadNorms(randn(d, seed=1), randn(d, seed=2), 1e-5)
    cache = Cache(torch.zeros(1, 1, 1, d, device=DEVICE), torch.zeros(1, 1, 1, d, device=DEVICE), None)
    zero = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    cos, sin = torch.ones(1, d // 2, device=DEVICE), torch.zeros(1, d // 2, device=DEVICE)
    q = rotate_and_store(qkv, cos, sin, zero, cache, norms)
    heads = qkv.view(4, d).double()
    unit = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_right(q[0, 0], unit[:2] * norms.q.double(), torch.float32)
    assert_right(cache.k[0, 0, 0], unit[2] * norms.k.double(), torch.float32)
    assert torch.equal(cache.v[0, 0, 0], qkv.view(4, d)[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [(7, 24), (4, 2048), (3, 2050)])
def test_row_times_dense_weight(n: int, k: int, biased: bool, dtype: torch.dtype) -> None:
    """One row is multiplied as float64 multiplies it, also with tails in both directions; more rows are cuBLAS's."""
    weight, bias = randn(n, k, dtype=dtype), randn(n, dtype=dtype) if biased else None
    wide = None if bias is None else bias.double()
    x = randn(1, 1, k, dtype=dtype) / k**0.5
    assert_right(row_linear(x, weight, bias), functional.linear(x.double(), weight.double(), wide), dtype)
    rows = randn(2, k, dtype=dtype)
    assert torch.equal(row_linear(rows, weight, bias), functional.linear(rows, weight, bias))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("paged", [False, True])
def test_step_is_one_graph_that_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """Replayed steps launch no kernel from the host, synchronise nothing, and go from one graph on to the next."""
    monkeypatch.setattr("triton_kernel_lab.integrations.transformers._decoder._LEAST_ROWS", 4)
    decoder = Decoder(eager("llama"), 2, PROMPT + NEW, paged=paged, page_size=2)
    decoder.generate(prompts(), NEW)
    token = decoder.prefill(prompts()).argmax(-1)
    tokens = [token]
    try:
        torch.cuda.set_sync_debug_mode("error")
        monkeypatch.setattr(decoder, "_hidden", None)
        for _ in range(NEW - 1):
            tokens.append(decoder.step(tokens[-1]).argmax(-1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.stack(tokens, 1), expected("llama"))


@pytest.mark.gpu
def test_decoder_outlives_an_earlier_one() -> None:
    """Its graphs write to no memory that is given back with another decoder's, such as what cuBLAS works in."""
    first, second = (Decoder(eager("llama"), 2, PROMPT + NEW) for _ in range(2))
    first.generate(prompts(), NEW)
    second.generate(prompts(), NEW)
    del first
    torch.cuda.empty_cache()
    assert torch.equal(second.generate(prompts(), NEW), expected("llama"))
