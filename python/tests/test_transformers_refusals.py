"""Models, versions and wishes that imbrex.transformers refuses by name, and T5's family, whose position bias it takes."""
import importlib.util
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import imbrex.transformers  # noqa: E402
from imbrex.transformers import _versions  # noqa: E402
from test_transformers import ids_of, model_of  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

INTERFACE = "does not go through transformers' attention interface"
SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
OUTSIDE = {
    "bloom": ("BloomForCausalLM", dict(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)),
    "mpt": ("MptForCausalLM", dict(vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=64)),
    "codegen": ("CodeGenForCausalLM", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)),
    "xglm": ("XGLMForCausalLM", dict(vocab_size=128, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4)),
    "mpnet": ("MPNetForMaskedLM", dict(SMALL, intermediate_size=96)),
    "falcon": ("FalconForCausalLM", SMALL),
    "gptj": ("GPTJForCausalLM", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)),
    "gpt_neo": ("GPTNeoForCausalLM", dict(vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])),
    "deberta_v2": ("DebertaV2ForMaskedLM", dict(SMALL, intermediate_size=96)),
    "git": ("GitForCausalLM", dict(SMALL, intermediate_size=96, vision_config=dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4))),
}


def config_of(name, options):
    return getattr(transformers, name).config_class(**options)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_outside_the_interface_are_refused_at_load(name, tmp_path):
    stem, options = OUTSIDE[name]
    cls = getattr(transformers, stem)
    with pytest.raises(NotImplementedError, match=f"imbrex: {stem[:3]}.*{INTERFACE}"):
        cls._from_config(config_of(stem, options), attn_implementation="imbrex")
    model = cls._from_config(config_of(stem, options), attn_implementation="eager")
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=INTERFACE):
        model.set_attn_implementation("imbrex")
    assert model.config._attn_implementation == before
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=INTERFACE):
        cls.from_pretrained(tmp_path, attn_implementation="imbrex")


def test_a_part_that_switches_to_code_of_its_own_is_refused():
    options = dict(vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    with pytest.raises(NotImplementedError, match=f"BigBirdPegasus.*{INTERFACE}"):
        transformers.BigBirdPegasusModel._from_config(transformers.BigBirdPegasusConfig(**options), attn_implementation="imbrex")


REMOTE = """
import torch
from transformers import LlamaConfig, PreTrainedModel

class RemoteAttention(torch.nn.Module):
    def forward(self, x, attention_mask=None):
        scores = x @ x.transpose(-1, -2)
        return torch.softmax(scores if attention_mask is None else scores + attention_mask[:, 0], -1) @ x

class RemoteModel(PreTrainedModel):
    config_class = LlamaConfig
    def __init__(self, config):
        super().__init__(config)
        self.attention = RemoteAttention()
        self.post_init()

class SayingModel(RemoteModel):
    _supports_attention_backend = True
"""


@pytest.mark.parametrize("name", ["RemoteModel", "SayingModel"])
def test_remote_code_with_an_attention_of_its_own_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "remote_model.py").write_text(REMOTE)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("remote_model", tmp_path / "remote_model.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "remote_model", module)
    spec.loader.exec_module(module)
    with pytest.raises(NotImplementedError, match=f"imbrex: {name}: .*{INTERFACE}"):
        getattr(module, name)._from_config(transformers.LlamaConfig(), attn_implementation="imbrex")


def parts(**implementation):
    encoder = transformers.MPNetConfig(**SMALL, intermediate_size=96)
    decoder = transformers.BertConfig(**SMALL, intermediate_size=96, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel._from_config(config, **implementation).eval()


def test_parts_of_a_model_choose_for_themselves():
    with pytest.raises(NotImplementedError, match=f"imbrex: MPNetModel: .*{INTERFACE}"):
        parts(attn_implementation="imbrex")
    model = parts(attn_implementation="eager")
    with pytest.raises(NotImplementedError, match="imbrex: MPNetModel"):
        model.set_attn_implementation("imbrex")
    assert model.decoder.config._attn_implementation == "eager"
    ids, mask = ids_of("cpu", True)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits
    model.set_attn_implementation({"": "imbrex", "encoder": "eager", "decoder": "imbrex"})
    assert (model.encoder.config._attn_implementation, model.decoder.config._attn_implementation) == ("eager", "imbrex")
    ours = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_bias_of_the_model_is_refused_with_the_reason():
    options = dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    model = transformers.SwinModel._from_config(transformers.SwinConfig(**options), attn_implementation="eager").eval()
    torch.nn.init.normal_(model.encoder.layers[0].blocks[0].attention.relative_position_bias.relative_position_bias_table)
    with pytest.raises(NotImplementedError, match="a bias that the model adds|does not go through"):
        model.set_attn_implementation("imbrex")
        model(torch.randn(1, 3, 32, 32))


T5 = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4, decoder_start_token_id=0)
T5_FAMILY = {"T5": {}, "MT5": {}, "UMT5": {}, "SwitchTransformers": dict(num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)}


def t5_of(name, buckets, distance):
    torch.manual_seed(31)
    options = dict(T5, relative_attention_num_buckets=buckets, relative_attention_max_distance=distance, **T5_FAMILY[name])
    model = getattr(transformers, name + "ForConditionalGeneration")(getattr(transformers, name + "Config")(**options)).eval()
    if not model._can_set_attn_implementation():
        pytest.skip("this version of transformers keeps T5 outside of its interface, where it is refused by name")
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "relative_attention_bias" in parameter_name else 0.1)
    return model


def count_calls(monkeypatch):
    """A list that grows with every layer that imbrex computes: the modules."""
    modules = []

    def counted(module, *args, **kwargs):
        modules.append(module)
        return imbrex.transformers.attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "imbrex", counted)
    return modules


@pytest.mark.parametrize("buckets,distance", [(32, 128), (8, 20)])
@pytest.mark.parametrize("name", T5_FAMILY)
def test_t5(name, buckets, distance, monkeypatch):
    """Encoder, decoder and cross attention; greedy tokens of growing and of static caches, and of beams. In float64 eager is exact beside either."""
    model = t5_of(name, buckets, distance)
    calls = count_calls(monkeypatch)
    torch.manual_seed(32)
    ids, decoder_ids = torch.randint(1, 128, (3, 45)), torch.randint(1, 128, (3, 33))
    for padded in (False, True):
        mask = torch.ones_like(ids)
        if padded:
            mask[0, 20:] = 0
            mask[1, :5] = 0
        results = {}
        for implementation in ("eager", "imbrex"):
            model.set_attn_implementation(implementation)
            calls.clear()
            options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
            results[implementation] = [
                model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits,
                model.generate(ids, **options),
                model.generate(ids, cache_implementation="static", disable_compile=True, **options),
                model.generate(ids, num_beams=3, **options),
            ]
            assert len(set(calls)) == (3 + 2 * 3 if implementation == "imbrex" else 0)  # self attention of 6 layers, cross attention of 3
        model.set_attn_implementation("eager")
        exact = model.double()(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        model.float()
        eager, ours = ((results[i][0] - exact).abs().max() / exact.abs().max() for i in ("eager", "imbrex"))
        assert ours < 2 * eager + 1e-6, (ours, eager)
        for expected, tokens in zip(results["eager"][1:], results["imbrex"][1:]):
            assert torch.equal(expected, tokens)


def test_a_position_bias_is_any_function_of_the_distance():
    """More keys than queries and fewer, where the model counts from another place, with a mask and without one, shared by a batch."""
    layer = torch.nn.Module().eval()
    torch.manual_seed(33)
    for query_len, seq_len, first, masked in ((7, 7, 0, False), (1, 19, 18, False), (5, 40, 3, True), (9, 4, 0, False), (1, 1, 0, False)):
        by_distance = torch.randn(4, 200)
        distance = torch.arange(seq_len)[None] - torch.arange(query_len)[:, None] - first
        bias = by_distance[:, distance + 100][None]
        q, k, v = torch.randn(2, 4, query_len, 16), torch.randn(2, 4, seq_len, 16), torch.randn(2, 4, seq_len, 16)
        mask = (torch.rand(2, 1, query_len, seq_len) > 0.3) | (torch.arange(seq_len) == 0) if masked else None
        logits = q.double() @ k.double().transpose(-1, -2) + bias
        expected = (logits if mask is None else logits.masked_fill(~mask, float("-inf"))).softmax(-1) @ v.double()
        out, _ = imbrex.transformers.attention_forward(layer, q, k, v, mask, scaling=1.0, is_causal=False, position_bias=bias)
        assert (out.transpose(1, 2) - expected).abs().max() < 1e-5
    for wrong, why in (
        (torch.randn(1, 4, 5, 5), "depends on more than the distance"),
        (torch.randn(2, 4, 1, 1), "differs between the requests"),
        (torch.randn(4, 5, 5), r"expected \[1, heads, query_len, seq_len\]"),
    ):
        q = torch.randn(wrong.shape[0], 4, wrong.shape[-2], 16)
        with pytest.raises(NotImplementedError, match=f"imbrex: position_bias: .*{why}"):
            imbrex.transformers.attention_forward(layer, q, q, q, None, is_causal=False, position_bias=wrong)


def test_gradients_are_refused_and_never_dropped():
    model = model_of("llama", "cpu")
    model.set_attn_implementation("imbrex")
    ids, mask = ids_of("cpu", False)
    with torch.enable_grad():
        logits = model(ids, attention_mask=mask).logits  # evaluation may leave gradients enabled
        with pytest.raises(NotImplementedError, match="imbrex: there is no backward pass"):
            logits.sum().backward()
        model.train()
        with pytest.raises(NotImplementedError, match="training mode.*no backward pass"):
            model(ids, attention_mask=mask)
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)  # without gradients a mode changes nothing
    model.requires_grad_(False)
    with torch.enable_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, logits)


@pytest.mark.parametrize("stem", ["GPT2", "OPT", "Llama"])
def test_weights_of_attention_are_refused(stem):
    options = dict(GPT2=dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4), OPT=dict(SMALL, ffn_dim=96, word_embed_proj_dim=64, pad_token_id=0))
    config = getattr(transformers, stem + "Config")(**options.get(stem, dict(SMALL, intermediate_size=96)))
    made = getattr(transformers, stem + "ForCausalLM" if stem != "GPT2" else "GPT2LMHeadModel")
    ids, _ = ids_of("cpu", False)
    loaded = made._from_config(config, attn_implementation="imbrex").eval()
    changed = made._from_config(config, attn_implementation="eager").eval()
    assert len(changed(ids, output_attentions=True).attentions) == 2
    changed.set_attn_implementation("imbrex")
    for model in (loaded, changed):
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model(ids, output_attentions=True)
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    changed.set_attn_implementation("eager")
    assert len(changed(ids, output_attentions=True).attentions) == 2


def test_a_query_that_sees_nothing_is_zero():
    layer = torch.nn.Module().eval()
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 2, :] = False
    out, _ = imbrex.transformers.attention_forward(layer, q, k, v, mask)
    assert out[:, 2].abs().max() == 0 and out[:, 3].abs().min() > 0


def test_old_versions_are_refused():
    for version in ("4.57.6", "5.0.0", "5.3.0"):
        with pytest.raises(ImportError, match=f"expected transformers 5.4 or later, got {version}"):
            _versions.check(version)
    for version in ("5.4.0", "5.12.1", "5.23.0", "6.0.0.dev0"):
        _versions.check(version)
    for version in ("5.4.0", "5.15.1"):
        with pytest.raises(NotImplementedError, match=f"continuous batching: expected transformers 5.16 or later, got {version}"):
            _versions.check_continuous_batching(version)
    _versions.check_continuous_batching("5.16.0")


def test_continuous_batching_of_an_old_version_is_refused(monkeypatch):
    if hasattr(transformers, "ContinuousBatchingConfig"):
        monkeypatch.setattr(_versions, "OLDEST_WITH_CONTINUOUS_BATCHING", (99, 0))
    model = model_of("llama", "cpu")
    model.set_attn_implementation("imbrex")
    with pytest.raises(NotImplementedError, match="continuous batching: expected transformers"):
        model.generate_batch([[1, 2, 3]], generation_config=transformers.GenerationConfig(max_new_tokens=2), progress_bar=False)
    assert model.config._attn_implementation == "imbrex"


def test_threads_generate_on_one_model():
    model = model_of("gemma2", "cpu")
    prompts = [torch.randint(1, 128, (1, n), generator=torch.Generator().manual_seed(n)) for n in (5, 21, 40)]

    def generate(prompt):
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)

    model.set_attn_implementation("eager")
    expected = [generate(p) for p in prompts]
    model.set_attn_implementation("imbrex")
    found = [None] * 3

    def work(i):
        with torch.no_grad():
            found[i] = [generate(prompts[i]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for tokens, want in zip(found, expected):
        assert all(torch.equal(t, want) for t in tokens)
