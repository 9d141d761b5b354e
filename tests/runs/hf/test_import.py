"""Folders that transformers wrote, as runs; and what of them does not fit, in a sentence."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from muown_train.cli.commands.hf import main_export, main_import
from muown_train.cli.errors import WRONG
from muown_train.config.compose import compose_config
from muown_train.config.instantiate import list_settings
from muown_train.data.text.train_bpe import train_bpe
from muown_train.runs.hf import llama, qwen2
from muown_train.runs.hf.export import export_run
from muown_train.runs.hf.folder import read_transformers_folder
from muown_train.runs.hf.import_hf import import_folder, suggest_overrides
from muown_train.runs.saved_run import open_run

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=101, hidden_size=24, intermediate_size=40, num_hidden_layers=2, max_position_embeddings=16)
LLAMA = SIZES | dict(num_attention_heads=4, tie_word_embeddings=True, rms_norm_eps=1e-5)
QWEN2 = SIZES | dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


def with_noise(model):
    """Biases and gains that are not zeros and ones, which would hide a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def saved_llama(folder, **changes):
    model = with_noise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | changes))))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_a_llama_of_transformers(tmp_path, shard):
    theirs = saved_llama(tmp_path / "llama")
    theirs.save_pretrained(tmp_path / "llama", max_shard_size=shard)
    imported = import_folder(tmp_path / "llama", tmp_path / "run")
    assert imported.parameters == theirs.num_parameters() and imported.tokenizer is None
    ours = open_run(tmp_path / "run").load_model()
    ids = torch.randint(101, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert suggest_overrides(imported.model) == [
        *("model=tiny", "model.vocab_size=101", "model.layers=2", "model.dim=24"),
        *("+model.mlp_hidden=40", "+model.rope_base=10000.0", "+model.norm_eps=1e-05"),
    ]


def test_a_run_s_command_line_is_given_back_with_nothing_that_goes_without_saying():
    """Of a model of ours that was exported: what it was trained with, and no setting that has its value by itself."""
    for given in ([], ["model.dim=64"], ["model.dim=64", "+model.mlp_hidden=40"], ["+model.rope_base=10000.0"]):
        settings = list_settings(dict(compose_config([*given, "model.seq_len=256"]).model), "model")
        model = {"_target_": llama.TARGET} | llama.to_settings({"vocab_size": 4096} | llama.to_config(settings))
        assert suggest_overrides(model) == ["model=tiny", *given]
    qwen = ["model=qwen2_0_5b", "model.mlp_hidden=64"]
    settings = list_settings(dict(compose_config(qwen).model), "model")
    model = {"_target_": qwen2.TARGET} | qwen2.to_settings({"vocab_size": 151936} | qwen2.to_config(settings))
    assert suggest_overrides(model) == qwen


def test_bfloat16_becomes_float32(tmp_path):
    saved_llama(tmp_path / "llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    weights = read_transformers_folder(tmp_path / "llama").weights
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(tie_word_embeddings=False), "tie_word_embeddings=False: for a llama model only tie_word_embeddings=True"),
        (dict(num_key_value_heads=2), "num_key_value_heads=2: for a llama model only num_key_value_heads=4"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(head_dim=8), "head_dim=8"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rotates by .*linear"),
    ],
)
def test_a_llama_that_our_gpt_is_not(tmp_path, changes, says):
    saved_llama(tmp_path / "llama", **changes)
    with pytest.raises(ValueError, match=f"llama: config.json (has )?{says}"):
        import_folder(tmp_path / "llama", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_what_is_no_such_folder(tmp_path):
    folder, out = tmp_path / "llama", tmp_path / "run"
    with pytest.raises(ValueError, match=r"has no config.json"):
        import_folder(tmp_path, out)
    saved_llama(folder)
    edited(folder, model_type="gpt2")
    with pytest.raises(ValueError, match=r"model_type='gpt2': only llama and qwen2"):
        import_folder(folder, out)
    edited(folder, model_type="llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"there is no weight model.layers.2.input_layernorm.weight in"):
        import_folder(folder, out)
    edited(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"there is a weight model.layers.1\S+ \(9 such\) that has no place"):
        import_folder(folder, out)
    edited(folder, num_hidden_layers=2, intermediate_size=56)
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.gate_proj.weight has the shape \(40, 24\), by config.json it is \(56, 24\)"
    ):
        import_folder(folder, out)
    edited(folder, hidden_size="24")
    with pytest.raises(ValueError, match=r"hidden_size='24' must be a whole number of at least 1"):
        import_folder(folder, out)
    (folder / "model.safetensors").write_bytes(b"nonsense, but long enough")
    edited(folder, hidden_size=24)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        import_folder(folder, out)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"there is no model\*.safetensors"):
        import_folder(folder, out)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        import_folder(folder, out)


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(rope_parameters=None, rope_theta=None), "rope_theta=None must be a positive number"),
        (dict(rope_parameters={"rope_theta": [1e4]}), r"rope_theta=\[10000.0\] must be a positive number"),
        (dict(rope_parameters={"rope_theta": -1.0}), "rope_theta=-1.0 must be a positive number"),
        (dict(rope_parameters="default"), "rotates by 'default': it must be a mapping"),
        (dict(rms_norm_eps=None), "rms_norm_eps=None must be a positive number"),
        (dict(rms_norm_eps=-1e-5), "rms_norm_eps=-1e-05 must be a positive number"),
        (dict(vocab_size=10**6), r"embed_tokens.weight has the shape \(101, 24\), by config.json it is \(10{6}, 24"),
        (dict(vocab_size=10**18), "sizes that no model can have|vocab_size=10{18} must be"),
        (dict(max_position_embeddings=10**18), "sizes that no model can have|seq_len=10{18} must be"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000, and there are 20 weights"),
        (dict(num_attention_heads=5, num_key_value_heads=5, head_dim=None), "model.dim=24 does not split into"),
        (dict(quantization_config={"bits": 4}), "has a quantization_config"),
    ],
)
def test_an_odd_configuration_is_one_sentence(tmp_path, changes, says):
    saved_llama(tmp_path / "llama")
    edited(tmp_path / "llama", **changes)
    with pytest.raises(ValueError, match=f"^{tmp_path}/llama: .*{says}"):
        import_folder(tmp_path / "llama", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "weight, says",
    [
        (torch.zeros(24, 12), r"q_proj.weight has the shape \(24, 12\)"),
        (torch.zeros(()), r"q_proj.weight has the shape \(\)"),
        (torch.full((24, 24), math.nan), "q_proj.weight holds numbers that are not finite"),
        (torch.full((24, 24), 1e300, dtype=torch.float64), "q_proj.weight holds numbers that are not finite"),
    ],
)
def test_an_odd_weight_is_one_sentence(tmp_path, weight, says):
    saved_llama(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.0.self_attn.q_proj.weight": weight}, file)
    with pytest.raises(ValueError, match=f"^{tmp_path}/llama: .*{says}"):
        import_folder(tmp_path / "llama", tmp_path / "run")


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "muown_train.json is no JSON"),
        ('{"step": null}', "muown_train.json: step=None must be a whole number"),
        ('{"step": "x"}', "muown_train.json: step='x' must be a whole number"),
        ('{"step": -1}', "muown_train.json: step=-1 must be a whole number"),
    ],
)
def test_an_odd_origin_is_one_sentence(tmp_path, content, says):
    saved_llama(tmp_path / "llama")
    (tmp_path / "llama" / "muown_train.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/llama: {says}"):
        import_folder(tmp_path / "llama", tmp_path / "run")


def test_a_constant_that_old_versions_stored_is_left_out(tmp_path):
    saved_llama(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, file)
    import_folder(tmp_path / "llama", tmp_path / "run")
    assert not any("inv_freq" in name for name in open_run(tmp_path / "run").load_weights())


def test_configurations_of_both_versions_of_transformers():
    settings = llama.to_settings(LLAMA | {"rope_theta": 5e5})  # before 5
    assert settings == llama.to_settings(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert settings["rope_base"] == 5e5 and llama.to_settings(LLAMA)["rope_base"] == 1e4
    assert llama.to_settings(LLAMA | llama.to_config(settings)) == settings


def test_qwen2_has_the_names_and_sizes_of_transformers():
    settings = qwen2.to_settings(QWEN2)
    config = transformers.Qwen2Config(vocab_size=101, **qwen2.to_config(settings))
    theirs = dict(transformers.Qwen2ForCausalLM(config).named_parameters())
    ours = qwen2.import_weights(theirs, settings)
    assert ours.keys() == {f"qwen2.{name}" for name in theirs}
    assert qwen2.export_weights(ours).keys() == theirs.keys()
    assert qwen2.to_settings(config.to_dict()) == settings
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (10_000.0, 1e-6)
    with pytest.raises(ValueError, match="use_sliding_window=True"):
        qwen2.to_settings(QWEN2 | {"use_sliding_window": True})


def test_a_qwen2_of_transformers_and_back(tmp_path):
    pytest.importorskip("muown_train.models.qwen2")
    config = transformers.Qwen2Config(**(QWEN2 | {"vocab_size": 300}))
    theirs = with_noise(transformers.Qwen2ForCausalLM(config))
    theirs.save_pretrained(tmp_path / "qwen2")
    (tmp_path / "qwen2" / "tokenizer.json").write_bytes(train_bpe(lambda: iter(["a text"])))
    imported = import_folder(tmp_path / "qwen2", tmp_path / "run")
    assert {"model=qwen2_0_5b", "model.heads=4"} <= set(suggest_overrides(imported.model))
    saved = open_run(tmp_path / "run")
    export_run(saved, tmp_path / "hf")
    size = saved.load_tokenizer().size
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert size < 300 and type(again) is type(theirs)
    ids = torch.randint(size, (2, 16))
    with torch.no_grad():
        logits = theirs(ids).logits
        torch.testing.assert_close(saved.load_model()(ids), logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again(ids).logits, logits[..., :size], atol=1e-5, rtol=1e-5)


def said(capsys, main, *words) -> tuple[int, str]:
    """Exit status and output of a command."""
    try:
        status = main([str(word) for word in words]) or 0
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_commands(tmp_path, capsys):
    saved_llama(tmp_path / "llama", vocab_size=300)
    (tmp_path / "llama" / "tokenizer.json").write_bytes(train_bpe(lambda: iter(["a text"])))
    words = (tmp_path / "llama", "--out", tmp_path / "run")
    status, text = said(capsys, main_import, *words)
    assert status == 0 and f"init_from={tmp_path}/run model=tiny model.vocab_size=300" in text
    status, text = said(capsys, main_import, *words)
    assert status == WRONG and text.endswith("run exists: give another folder with --out, or remove it\n")
    status, text = said(capsys, main_import, tmp_path / "llama", "--out", tmp_path / "a run")
    assert status == WRONG and "name='a run' must be" in text and text.endswith("give another folder with --out\n")
    status, text = said(capsys, main_export, tmp_path / "run", "--dtype", "bfloat16")
    assert status == 0 and "padded rows cut off" in text
    assert (tmp_path / "run" / "hf" / "config.json").exists()
    status, text = said(capsys, main_export, tmp_path / "run", "--step", 7)
    assert status == WRONG and "has no checkpoint of step 7; there are 0" in text
    status, text = said(capsys, main_export, tmp_path / "nothing")
    assert status == WRONG and text.startswith("error: there is no folder")
    assert "Traceback" not in text
