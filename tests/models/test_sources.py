"""What `open_source` takes, what it refuses, and in which words. Tiny random models; no network."""

import socket

import pytest
import torch
import transformers

from streamlens.errors import InputError, SourceError, UnsupportedModelError
from streamlens.models.sources import open_source
from tests.models.tiny import llama, words


def bert(kind=transformers.BertForMaskedLM, **changes):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}
    return kind(transformers.BertConfig(**sizes | changes)).eval()


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path / "tiny")
    words().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


# What is opened.


def test_folder_gives_model_and_tokenizer_without_asking_the_hub(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a local folder must not reach for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    opened = open_source(str(folder), device="cpu")
    assert opened.tokenizer("the cat sat").input_ids == [1, 2, 3]
    assert (opened.name, opened.revision, opened.trusted) == ("tiny", None, False)
    assert opened.source == f"LlamaForCausalLM from {folder}"
    assert not opened.module.training
    for name, weight in llama().state_dict().items():
        assert torch.equal(opened.module.state_dict()[name], weight), name


def test_folder_may_be_a_path_object_and_may_lack_a_tokenizer(tmp_path):
    llama().save_pretrained(tmp_path)
    assert open_source(tmp_path).tokenizer is None
    assert open_source(tmp_path, tokenizer=words()).tokenizer("mat").input_ids == [5]


def test_tokenizer_can_be_named_by_its_folder(tmp_path, folder):
    assert open_source(llama(), tokenizer=str(folder)).tokenizer("mat").input_ids == [5]
    with pytest.raises(SourceError, match=r"no such tokenizer folder: .*nowhere"):
        open_source(llama(), tokenizer=tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"holds no tokenizer"):
        open_source(llama(), tokenizer=tmp_path)


@pytest.mark.parametrize(("asked", "got"), [(None, torch.bfloat16), (torch.float32, torch.float32), ("float64", torch.float64)])
def test_dtype_none_keeps_the_checkpoints(tmp_path, asked, got):
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.dtype for weight in open_source(tmp_path, dtype=asked).module.parameters()} == {got}


def test_loaded_module_is_taken_as_it_is():
    module = llama().train()
    flags = [weight.requires_grad_(False) for weight in module.parameters()]
    opened = open_source(module, tokenizer=(tokenizer := words()), dtype=torch.float32, device="cpu")
    assert opened.module is module
    assert opened.tokenizer is tokenizer
    assert module.training
    assert not any(weight.requires_grad for weight in flags)
    assert (opened.name, opened.source) == ("LlamaForCausalLM", "LlamaForCausalLM in memory")


def test_bert_as_a_decoder_is_served():
    module = bert(transformers.BertLMHeadModel, is_decoder=True)
    assert open_source(module).module is module


def test_gguf_file_is_dequantised_with_its_tokenizer(tmp_path):
    file, embedding = tiny_gguf(tmp_path / "tiny.gguf")
    opened = open_source(str(file), device="cpu")
    assert torch.equal(opened.module.get_input_embeddings().weight, torch.from_numpy(embedding))
    assert opened.module.config.architectures == ["LlamaForCausalLM"]
    assert opened.tokenizer.convert_ids_to_tokens([1]) == ["a"]
    assert (opened.name, opened.source) == ("tiny", f"LlamaForCausalLM, dequantised GGUF weights ({file})")


def tiny_gguf(path):
    """A two-layer Llama as a GGUF file, written tensor by tensor."""
    gguf = pytest.importorskip("gguf", reason="GGUF files need the gguf package")
    weights = llama(num_key_value_heads=4).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in {
        writer.add_block_count: 2, writer.add_context_length: 64, writer.add_embedding_length: 16, writer.add_feed_forward_length: 24,
        writer.add_head_count: 4, writer.add_head_count_kv: 4, writer.add_layer_norm_rms_eps: 1e-6, writer.add_vocab_size: 12,
        writer.add_rope_freq_base: 10000.0, writer.add_tokenizer_model: "gpt2", writer.add_token_list: ["<s>", *"abcdefghij", "ab"],
        writer.add_token_merges: ["a b"], writer.add_bos_token_id: 0, writer.add_eos_token_id: 0,
    }.items():  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights["model.embed_tokens.weight"].numpy()


# What is refused, and how.


@pytest.mark.parametrize("source", ["./nowhere", "~/nowhere-at-all", "a/b/c", "/nowhere/at/all"])
def test_missing_folder_is_named(source):
    with pytest.raises(SourceError, match=r"^no such folder: .*(nowhere|a/b/c)"):
        open_source(source)


def test_unknown_hub_name_is_one_line():
    with pytest.raises(SourceError, match=r"^cannot open no-such-model-anywhere: it is neither .* HF_HUB_OFFLINE keeps .*asked$"):
        open_source("no-such-model-anywhere")
    with pytest.raises(SourceError, match=r"asked; did you mean 'smollm2-135m'\?$"):
        open_source("smolm2-135m")
    with pytest.raises(SourceError, match=r"nor a possible name on the Hugging Face hub$"):
        open_source("not a name")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GatedRepoError", "accept this model's terms"),
        ("RevisionNotFoundError", "no such revision"),
        ("RepositoryNotFoundError", "no public model on the Hugging Face hub has this name"),
    ],
)
def test_what_the_hub_answers_becomes_one_line(name, reason, monkeypatch):
    def answer(*args, **kwargs):
        raise OSError("a long text\nof many lines") from type(name, (Exception,), {})("the hub's own words")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", answer)
    with pytest.raises(SourceError, match=rf"^cannot open someone/model: .*{reason}") as caught:
        open_source("someone/model", revision="v1")
    assert "\n" not in str(caught.value)


def test_other_failures_keep_their_first_line(monkeypatch):
    def answer(*args, **kwargs):
        raise ValueError("\nit is broken\nand here is why")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", answer)
    with pytest.raises(SourceError, match=r"^cannot open someone/model: it is broken \(ValueError\)$"):
        open_source("someone/model")


def test_a_bug_is_not_dressed_up_as_a_bad_source(monkeypatch):
    def answer(*args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", answer)
    with pytest.raises(ZeroDivisionError, match=r"a bug"):
        open_source("someone/model")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(SourceError, match=r"holds no config.json"):
        open_source(tmp_path)
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(SourceError, match=r"notes.txt is neither a model folder nor a GGUF file"):
        open_source(tmp_path / "notes.txt")


def test_damaged_files_are_one_line(folder, tmp_path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"^cannot open .*tiny: .*SafetensorError\)$"):
        open_source(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"^cannot open .*tiny: "):
        open_source(folder)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(SourceError, match=r"^cannot open .*broken.gguf: "):
        open_source(tmp_path / "broken.gguf")
    whole, _ = tiny_gguf(tmp_path / "cut.gguf")
    whole.write_bytes(whole.read_bytes()[:-5000])
    with pytest.raises(SourceError, match=r"^cannot open .*cut.gguf: "):
        open_source(whole)
    with pytest.raises(SourceError, match=r"no such GGUF file: nowhere.gguf"):
        open_source("nowhere.gguf")


def test_weights_that_would_be_random_are_named(tmp_path):
    llama().model.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"does not hold all weights of a LlamaForCausalLM: lm_head.weight would be random"):
        open_source(tmp_path)
    llama(num_hidden_layers=3).config.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"lm_head.weight and 9 more would be random"):
        open_source(tmp_path)


def test_encoders_are_refused_from_their_config_alone(tmp_path):
    bert().config.save_pretrained(tmp_path / "bert")
    transformers.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    transformers.DistilBertConfig().save_pretrained(tmp_path / "distilbert")
    for kind, message in {"bert": "Bert.* is an encoder-only", "t5": "T5.* is an encoder-decoder", "distilbert": "an encoder-only"}.items():
        with pytest.raises(UnsupportedModelError, match=message):
            open_source(tmp_path / kind)


def test_modules_that_are_no_causal_model_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"BertForMaskedLM is an encoder-only model"):
        open_source(bert())
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no language-model head; load it with AutoModelForCausalLM"):
        open_source(llama().model)
    with pytest.raises(InputError, match=r"got the module Linear"):
        open_source(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    module = llama()
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 2] = value
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1.mlp.up_proj.weight holds 1 NaN or infinite"):
        open_source(module)


def test_large_finite_float16_weights_are_no_infinity():
    module = llama().half()
    with torch.no_grad():
        module.lm_head.weight.fill_(60000.0)
    assert open_source(module).module is module


@pytest.mark.parametrize("source", [None, 3, ["gpt2"], "", "  "])
def test_sources_of_no_kind(source):
    with pytest.raises(InputError, match=r"source must be a model's name, a folder, a GGUF file"):
        open_source(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.bfloat16}, "dtype must be None or torch.float32 for a model that is loaded already; got torch.bfloat16"),
        ({"dtype": torch.int8}, "dtype must be None or a floating-point torch dtype"),
        ({"dtype": "float33"}, "dtype must be None or a floating-point torch dtype .*; got 'float33'"),
        ({"device": "meta"}, "device must be None or cpu for a model that is loaded already; got meta"),
        ({"device": "abacus"}, "device must be None or a torch device .*; got 'abacus'"),
        ({"device": "cuda:99"}, "device must be one that is present"),
        ({"revision": "main"}, "revision must be None unless source is a name on the Hugging Face hub; got 'main'"),
    ],
)
def test_options_that_do_not_fit_a_loaded_module(options, message):
    with pytest.raises(InputError, match=message):
        open_source(llama(), **options)


# What is left as it was.


def test_opening_prints_nothing_and_restores_verbosity(folder, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    open_source(folder)
    with pytest.raises(SourceError):
        open_source("no-such-model-anywhere")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
