"""Import and export of Hugging Face weights: equal logits, and clear errors for unsupported models."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import vocab_bpe

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.data.manifest import TokenizerEntry
from ezpz_llm.training.data.tokenizer_files import load
from ezpz_llm.training.data.tokenizers import get_tokenizer, install_gpt2, to_entry
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.hf import config
from ezpz_llm.training.hf.config import from_hf, stored_tensors, to_hf
from ezpz_llm.training.hf.export import export
from ezpz_llm.training.hf.source import find_source, with_model_changes
from ezpz_llm.training.hf.tokenizer import write_tokenizer
from ezpz_llm.training.hf.weights import open_weights
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import HEAD, MODELS, TABLE, ModelConfig, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, load_values
from ezpz_llm.training.model.parameters import parameter_count, parameter_shapes, whole_box

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

VOCABULARY, BLOCK = 97, 24
GPT2 = {"vocab_size": VOCABULARY, "n_positions": BLOCK, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
        "eos_token_id": 0}
LLAMA = {"vocab_size": VOCABULARY, "max_position_embeddings": BLOCK, "hidden_size": 32, "intermediate_size": 88,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 777.0,
         "bos_token_id": 0, "eos_token_id": 0}
SLOWED = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 40}
KINDS = ("gpt2", "gpt2-untied", "gpt2-inner", "gpt2-erf", "llama", "llama-tied", "llama-biases", "llama-slowed",
         "llama-heads", "mistral", "mistral-window", "qwen3", "qwen3-slowed", "olmo2", "olmo2-grouped")


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, BLOCK), generator=torch.Generator().manual_seed(2))


def make(kind: str) -> Any:
    """Return a model of transformers with large random weights, including biases and norms."""
    import transformers

    family, _, variant = kind.partition("-")
    if family == "gpt2":
        changes: dict[str, dict[str, Any]]
        changes = {"untied": {"tie_word_embeddings": False}, "inner": {"n_inner": 40},
                   "erf": {"activation_function": "gelu"}}.get(variant, {})
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **changes))
    else:
        name = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "olmo2": "Olmo2"}[family]
        changes = {
            "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True},
            "slowed": {"rope_parameters": SLOWED}, "heads": {"head_dim": 12}, "window": {"sliding_window": BLOCK},
            "": {"num_key_value_heads": 4, "pad_token_id": None} if family == "olmo2" else {}}
        settings = {**LLAMA, "tie_word_embeddings": False, "head_dim": 20 if family == "qwen3" else 8,
                    **({"sliding_window": None} if family == "mistral" else {}),
                    **({"pad_token_id": None} if family == "olmo2" else {}), **changes.get(variant, {})}
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def read(folder: Path, **changes: Any) -> GPT:
    """Load a folder's weights into our model."""
    source = find_source(str(folder), "test")
    model = GPT(with_model_changes(source.model, "test", **changes))
    with open_weights(source) as weights:
        load_values(model, weights.read)
    return model.eval()


@torch.no_grad()
def difference(ours: GPT, theirs: Any) -> float:
    return (ours(tokens())[..., :VOCABULARY] - theirs(tokens()).logits).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_imported_logits_are_those_of_transformers_and_export_is_the_way_back(kind: str, tmp_path: Path) -> None:
    import transformers

    theirs = make(kind)
    theirs.save_pretrained(tmp_path / "hf")
    assert difference(read(tmp_path / "hf"), theirs) < 1e-4
    done = export(find_source(str(tmp_path / "hf"), "test"), tmp_path / "out", shard_bytes=9000)
    assert done.files > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in theirs.named_parameters())
    assert not list(tmp_path.glob(".*"))


def test_greedy_text_equals_that_of_transformers(tmp_path: Path) -> None:
    theirs = make("gpt2")
    theirs.save_pretrained(tmp_path / "hf")
    ours, ids = read(tmp_path / "hf"), tokens(1)[:, :4]
    text = theirs.generate(ids, max_new_tokens=15, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        while ids.shape[1] < text.shape[1]:
            ids = torch.cat((ids, ours(ids)[:, -1:, :VOCABULARY].argmax(-1)), dim=1)
    assert torch.equal(ids, text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_supported(dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    make("llama").to(dtype).save_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert difference(read(tmp_path / "hf"), theirs) < 1e-4


def test_files_of_the_first_releases_are_supported(tmp_path: Path) -> None:
    """Omit the base model's prefix and most of config.json, and store masks with the weights."""
    from safetensors.torch import save_file

    theirs = make("gpt2")
    state = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in theirs.state_dict().items()
             if name != "lm_head.weight"}
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, BLOCK, BLOCK)
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "gpt2", "n_ctx": BLOCK, "n_positions": BLOCK, "n_embd": 32, "n_layer": 2, "n_head": 4,
         "vocab_size": VOCABULARY}))
    assert difference(read(tmp_path), theirs) < 1e-4


@pytest.mark.parametrize("module", ["attn.c_proj", "mlp.c_fc"])
def test_a_layer_that_is_not_transposed_is_noticed(module: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A square matrix has the same shape transposed, so only the logits reveal it."""
    theirs = make("gpt2")
    theirs.save_pretrained(tmp_path / "hf")
    right = config._gpt2_tensors

    def wrong(*args: Any) -> Any:
        for stored in right(*args):
            yield replace(stored, transposed=stored.transposed and module not in stored.name)

    monkeypatch.setattr(config, "_gpt2_tensors", wrong)
    if module == "attn.c_proj":
        assert difference(read(tmp_path / "hf"), theirs) > 0.1
    else:
        with pytest.raises(UserError, match=r"c_fc.weight is \[32, 128\] in the weights, but \[128"):
            read(tmp_path / "hf")


def test_padded_rows_take_no_more_than_their_share(tmp_path: Path) -> None:
    """Use logits far below zero, as in GPT-2: rows of zeros would get nearly all of the probability."""
    theirs = make("gpt2")
    with torch.no_grad():
        theirs.transformer.ln_f.weight.zero_()
        theirs.transformer.wte.weight[:] = 0.1 * theirs.transformer.wte.weight - 1.0
        theirs.transformer.ln_f.bias.fill_(1.0)
        assert theirs(tokens()).logits.max() < -20
    theirs.save_pretrained(tmp_path / "hf")
    targets = tokens().roll(-1, dims=1)
    with torch.no_grad():
        exact = read(tmp_path / "hf")(tokens(), targets)
        padded = read(tmp_path / "hf", vocab_multiple=64)
        assert padded.lm_head.weight.shape[0] == 128
        assert 0 <= padded(tokens(), targets) - exact <= torch.log(torch.tensor(128 / VOCABULARY)) + 1e-6
        padded.lm_head.weight[VOCABULARY:] = 0
        assert padded(tokens(), targets) > exact + 15


def test_a_shorter_context_is_truncated_and_a_longer_one_rejected(tmp_path: Path) -> None:
    theirs = make("gpt2")
    theirs.save_pretrained(tmp_path / "hf")
    ours = read(tmp_path / "hf", block_size=8)
    with torch.no_grad():
        assert torch.allclose(ours(tokens()[:, :8]), theirs(tokens()[:, :8]).logits, atol=1e-4)
    with pytest.raises(UserError, match="block_size is 99, the weights have 24"):
        read(tmp_path / "hf", block_size=99)
    with pytest.raises(UserError, match="n_layer is 3, the weights have 2"):
        read(tmp_path / "hf", n_layer=3)
    make("llama").save_pretrained(tmp_path / "llama")
    assert read(tmp_path / "llama", block_size=99).config.block_size == 99


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Olmo2"])
def test_an_absent_key_has_the_default_of_transformers(family: str) -> None:
    import transformers

    needed = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "hidden_size": 2048,
              "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 32}
    theirs = getattr(transformers, f"{family}Config")(**needed)
    ours = from_hf({"model_type": family.lower(), **needed}, "config.json")
    assert ours.window == (getattr(theirs, "sliding_window", None) or 0)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2048 // 32)
    assert ours.n_kv_head == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.tied, ours.bias) == (theirs.tie_word_embeddings, getattr(theirs, "attention_bias", False))
    if family == "Mistral":  # null differs from absent
        assert from_hf({"model_type": "mistral", **needed, "sliding_window": None}, "config.json").window == 0


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("gpt2", {"model_type": "bert"}, "model_type is 'bert'"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu', which is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"n_layer": None}, "n_layer is missing"),
    ("gpt2", {"n_layer": 3}, "the weights have no tensor transformer.h.2.ln_1.weight"),
    ("gpt2", {"n_layer": 1}, r"the weights have a tensor transformer.h.1.\S+, which the model of this config"),
    ("gpt2", {"n_positions": 25}, r"wpe.weight is \[24, 32\] in the weights, but \[25, 32\]"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope_type is 'yarn'"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("olmo2", {"attention_bias": True}, "attention_bias is True"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3", {"model_type": "llama"}, r"have a tensor model.layers.\d.self_attn.[qk]_norm.weight, which"),
    ("olmo2", {"model_type": "llama"}, "the weights have no tensor model.layers.0.input_layernorm.weight"),
    ("llama", {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is 'linear'"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is True, which is not supported"),
    ("llama", {"rope_traditional": True}, "rope_traditional is True, which is not supported"),
    ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_interleave": True}}, "rope_interleave is True"),
    ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is 'sliding_attention'"),
    ("llama", {"head_dim": 16}, r"q_proj.weight is \[32, 32\] in the weights, but \[64, 32\]"),
    ("llama", {"attention_bias": True}, "mlp_bias is False"),
    ("llama", {"num_attention_heads": 0}, "a setting is invalid"),
    ("llama", {"hidden_size": "32"}, "a setting is invalid"),
    ("llama", {"rope_scaling": [1], "rope_parameters": None}, "a setting is invalid"),
    ("llama", {"num_key_value_heads": 4}, r"k_proj.weight is \[16, 32\] in the weights, but \[32, 32\]"),
])
def test_an_unsupported_or_mismatched_model_is_rejected(kind: str, changes: dict[str, Any], message: str,
                                                        tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    for name, message in (("model.safetensors.index.json", "neither model.safetensors nor"),
                          ("model-00002-of-*.safetensors", "cannot be read")):
        folder = tmp_path / message[:7]
        shutil.copytree(tmp_path / "hf", folder)
        next(folder.glob(name)).unlink()
        with pytest.raises(UserError, match=message):
            read(folder)
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        find_source(str(tmp_path / "list"), "test")
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "hf", cut)
    file = next(cut.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        read(cut)
    for where, message in ((tmp_path / "nothing", "no folder at"), (tmp_path, "no complete checkpoint")):
        with pytest.raises(UserError, match=message):
            find_source(str(where), "test")


def test_a_hub_id_is_looked_up_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make("gpt2")
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    theirs.save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_source("some/model", "test").folder == snapshot
    with pytest.raises(UserError, match="no model with that id") as caught:
        find_source("some/other", "--init-from")
    assert "ezpz-llm checkpoint fetch some/other" in str(caught.value)


def test_a_missing_run_is_not_treated_as_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run directory or checkpoint at runs/train-1"):
        find_source("runs/train-1", "SOURCE")
    (tmp_path / "mine" / "train-20261122").mkdir(parents=True)
    with pytest.raises(UserError, match="no run directory or checkpoint at mine/train-2026112") as caught:
        find_source("mine/train-2026112", "SOURCE")
    assert "did you mean mine/train-20261122?" in str(caught.value)
    assert "fetch" not in str(caught.value)
    # The name alone, with and without a run of a similar name.
    (tmp_path / "runs" / "train-20261123").mkdir(parents=True)
    for name, advice in (("train-2026", "did you mean runs/train-20261123?"), ("other", "its owner: OWNER/other")):
        with pytest.raises(UserError, match=f"no run directory, checkpoint or model folder at {name}") as caught:
            find_source(name, "SOURCE")
        assert advice in str(caught.value)
        assert "fetch" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_shape_has_a_hugging_face_equivalent(name: str) -> None:
    import transformers

    config = MODELS[name]
    stored = stored_tensors(config)
    shapes = parameter_shapes(config)
    with torch.device("meta"):
        assert {key: tuple(value.shape) for key, value in GPT(config).named_parameters()} == shapes
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameter_count(config)
    covered = dict.fromkeys(shapes, 0)
    for tensor in stored:
        if tensor.ours in covered:
            assert covered[tensor.ours] == tensor.first
            covered[tensor.ours] = tensor.stop
    rows = {name: config.vocab_size if name in (TABLE, HEAD) else shape[0] for name, shape in shapes.items()}
    assert covered == rows
    theirs = to_hf(config)
    back = from_hf(theirs, "test")
    # GPT-2 in transformers always has biases; dropout is for training only.
    bias = True if theirs["model_type"] == "gpt2" else config.bias
    assert back == replace(config, bias=bias, dropout=0.0, init=back.init, rope_theta=back.rope_theta,
                           vocab_multiple=back.vocab_multiple)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**theirs))
    assert {key: tuple(value.shape) for key, value in model.named_parameters()} == {
        tensor.name: tensor.stored_shape for tensor in stored}


def test_the_published_124m_has_149_tensors_with_the_head() -> None:
    assert len(stored_tensors(MODELS["gpt2-124m"])) + 1 == 149


def saved(config: ModelConfig, folder: Path) -> tuple[GPT, Path]:
    """Save a checkpoint of a new model; return both."""
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0), RunDir(folder))
    model = GPT(config)
    torch.manual_seed(4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = build_engine(model, resolve(Request("ddp", world_size=1,
                                                 precision="fp32")), dist, lr=1.0, betas=(0.9, 0.9),
                          eps=1e-8, param_groups=decay_groups(model, 0.0))
    RunDir(folder).create()
    progress = checkpoint.Progress(
        step=1, consumed=2, sample_hash="", seed=1, data="", model=vars(config),
        tokenizer=TokenizerEntry("char", "", bytes(range(33, 33 + VOCABULARY)).decode("latin")))
    saved = checkpoint.save(engine, dist, RunDir(folder), progress)
    return model.eval(), getattr(saved, "folder", saved)


@pytest.mark.parametrize("shape", ["tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("bias", [True, False])
def test_an_export_has_no_padded_rows_and_the_same_logits(shape: str, bias: bool, tmp_path: Path) -> None:
    import transformers

    config = get_model_config(shape, n_layer=2, n_head=4, n_embd=32, block_size=BLOCK, vocab_size=VOCABULARY,
                              vocab_multiple=64, bias=bias, n_kv_head=2 if shape == "tiny-llama" else None)
    ours, folder = saved(config, tmp_path / "run")
    done = export(find_source(str(tmp_path / "run"), "test"), tmp_path / "out")
    assert done.notes == ()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert ours.lm_head.weight.shape[0] == 128
    assert theirs.get_output_embeddings().weight.shape[0] == VOCABULARY
    assert difference(ours, theirs) < 1e-4
    half = export(find_source(str(folder), "test"), tmp_path / "half", dtype="bf16")
    assert half.bytes * 2 == done.bytes
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert rounded.dtype == torch.bfloat16
    with pytest.raises(UserError, match="is not an empty folder"):
        export(find_source(str(folder), "test"), tmp_path / "out")


def test_a_model_without_a_hugging_face_equivalent_is_rejected(tmp_path: Path) -> None:
    config = get_model_config("tiny-gpt2", n_layer=1, n_embd=32, block_size=BLOCK, vocab_size=VOCABULARY)
    _, folder = saved(replace(config, norm="rmsnorm"), tmp_path / "run")
    with pytest.raises(UserError, match="have no model with rmsnorm, learned, gelu"):
        export(find_source(str(folder), "test"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_byte_stops_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    config = get_model_config("tiny-gpt2", n_layer=1, n_embd=32, block_size=BLOCK, vocab_size=VOCABULARY)
    _, folder = saved(config, tmp_path / "run")
    file = folder / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"rank-00000\.safetensors has sha256"):
        export(find_source(str(folder), "test"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_model_config("tiny-gpt2", n_layer=4, n_embd=64, block_size=BLOCK, vocab_size=VOCABULARY)
    _, folder = saved(config, tmp_path / "run")
    read: list[Any] = []
    import weakref

    from ezpz_llm.training.hf import weights

    inner = weights.CheckpointWeights.read_stored

    def watched(self: Any, name: str, box: Any) -> torch.Tensor:
        assert sum(reference() is not None for reference in read) <= 1
        values = inner(self, name, box)
        read.append(weakref.ref(values))
        return values

    monkeypatch.setattr(weights.CheckpointWeights, "read_stored", watched)
    export(find_source(str(folder), "test"), tmp_path / "out")
    assert len(read) == len(parameter_shapes(config))


@pytest.mark.parametrize("name", ["bytes", "char", "gpt2"])
def test_the_exported_tokenizer_gives_the_same_ids(name: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    text = "Hello, I'm a language model,  naïve café 漢字 🙂\n\n\ttabs 123"
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    if name == "gpt2":
        install_gpt2(vocab_bpe().parent)
    ours = get_tokenizer(name, "".join(sorted(set(text))))
    assert write_tokenizer(to_entry(ours), BLOCK, tmp_path) == (ours.end_of_text, None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.end_of_text
    mine = load(tmp_path / "tokenizer.json")
    assert mine.encode(text).tolist() == ids
    assert mine.decode(ids) == text
    assert (mine.vocab_size, mine.end_of_text) == (ours.vocab_size, ours.end_of_text)
    if name != "char":
        assert mine.encode("<|endoftext|>").tolist() == ours.encode("<|endoftext|>").tolist()


def test_boxes_equal_slices_of_the_whole_parameter(tmp_path: Path) -> None:
    """Read every parameter in several boxes: all give the same values, for any number of tensors."""
    make("llama").save_pretrained(tmp_path)
    source = find_source(str(tmp_path), "test")
    with open_weights(source) as weights:
        for name, shape in parameter_shapes(source.model).items():
            if len(shape) < 2:
                continue
            complete = weights.read(name, whole_box(shape))
            for rows, columns in (((3, 29), (0, shape[1])), ((0, shape[0]), (5, 9)), ((31, 35), (7, 8))):
                if rows[1] <= shape[0]:
                    part = weights.read(name, (rows, columns))
                    assert torch.equal(part, complete[slice(*rows), slice(*columns)])
