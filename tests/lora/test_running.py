"""Models with adapters beside them: on files of every kind, every engine, traced, cut and batched like any other."""

from __future__ import annotations

import numpy as np
import pytest

import starscope
from starscope.convert import convert
from starscope.merge import merge
from starscope.microscope import Edit
from support.adapters import halves, make_adapter, write_folder

IDS = [1, 5, 9, 30, 77, 200, 31, 4]
ULP = 2.0**-23
ENGINES = ("numpy", "torch", "native")
TARGETS = ["c_attn", "c_proj", "c_fc", "lm_head"]


@pytest.fixture(scope="module")
def adapters(checkpoint, multi_head, tmp_path_factory):
    """Two of each base."""
    folder = tmp_path_factory.mktemp("adapters")
    for base, source in (("tied", checkpoint), ("untied", multi_head)):
        for seed in (0, 1):
            make_adapter(source, folder / f"{base}-{seed}", targets=TARGETS[seed:], seed=seed, r=3 + seed)
    return folder


@pytest.fixture(scope="module")
def files(checkpoint, multi_head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for base, source in (("tied", checkpoint), ("untied", multi_head)):
        for kind in ("f32", "q8_0", "q4_k_m", "bf16"):
            convert(source, folder / f"{base}-{kind}.gguf", to=kind)
    return folder


def logits(path, engine="numpy", ids=IDS, **options):
    return starscope.load(path, engine=engine, **options).engine.forward([ids], None, "all")[0]


def share(found, wanted):
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m", "bf16"])
@pytest.mark.parametrize("base", ["tied", "untied"])
def test_engines_agree_with_adapters_as_they_do_without(files, adapters, base, kind):
    file, lora = files / f"{base}-{kind}.gguf", adapters / f"{base}-0"
    wanted, plain = logits(file, lora=lora), logits(file)
    cached = 0 if kind == "f32" else 2.0**-11  # a key or value that is rounded to the next float16
    assert share(logits(file, "torch", lora=lora), wanted) <= max(64 * ULP, cached)
    usual = share(logits(file, "native"), plain)
    assert share(logits(file, "native", lora=lora), wanted) <= max(2 * usual, 64 * ULP)
    assert share(plain, wanted) > max(10 * usual, 0.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_scale_of_zero_gives_the_bits_of_the_base(files, adapters, engine, kind):
    file = files / f"tied-{kind}.gguf"
    assert np.array_equal(logits(file, engine, lora=[(adapters / "tied-0", 0.0)]), logits(file, engine))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m"])
def test_an_adapter_whose_b_is_zero_gives_the_bits_of_the_base(files, engine, kind, tmp_path):
    """The layers are cut apart then, and a cut changes no bit."""
    pairs = {f"transformer.h.{i}.{m}": halves(s, 3) for i in (0, 1) for m, s in SHAPES.items()}
    zero = {name: (a, np.zeros_like(b)) for name, (a, b) in pairs.items()}
    write_folder(tmp_path, {"r": 3, "lora_alpha": 3}, zero)
    file = files / f"tied-{kind}.gguf"
    assert np.array_equal(logits(file, engine, lora=tmp_path), logits(file, engine))


SHAPES = {"attn.c_attn": (96, 64), "attn.c_proj": (64, 64), "mlp.c_fc": (256, 64), "mlp.c_proj": (64, 256)}


@pytest.mark.parametrize("engine", ENGINES)
def test_several_adapters_with_scales_are_the_sum_of_their_changes(files, adapters, engine):
    """Against weights that have all changes in them."""
    file, scales = files / "untied-f32.gguf", (0.7, -1.5)
    given = [(adapters / f"untied-{seed}", scale) for seed, scale in enumerate(scales)]
    plain = starscope.load(file, engine="numpy")
    arrays = {name: plain.weights[name].copy() for name in plain.weights}
    for path, scale in given:
        adapter = starscope.lora.read_adapter(path, plain.family, plain.hparams)
        for name, pair in adapter.pairs.items():
            arrays[name] += np.float32(scale * pair.scale) * pair.b @ pair.a
    from starscope.engine import Weights, make_engine
    from starscope.engine.weights import ArraySource

    weights = Weights(list(plain.weights.slots.values()), ArraySource(arrays))
    [wanted] = make_engine("numpy", plain.graph, weights).forward([IDS], None, "all")
    assert share(logits(file, engine, lora=given), wanted) <= 64 * ULP
    assert share(logits(file, engine, lora=given[::-1]), wanted) <= 64 * ULP


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m"])
def test_the_native_engine_keeps_its_bits_however_a_prompt_is_cut_or_batched(files, adapters, kind):
    model = starscope.load(files / f"tied-{kind}.gguf", engine="native", lora=adapters / "tied-0")
    [whole] = model.engine.forward([IDS], None, "all")
    cache = model.engine.new_cache()
    parts = [model.engine.forward([part], [cache], "all")[0] for part in (IDS[:3], IDS[3:4], IDS[4:])]
    assert np.array_equal(np.concatenate(parts), whole)
    _, batched = model.engine.forward([[7, 8, 9], IDS], None, "all")
    assert np.array_equal(batched, whole)
    one = starscope.load(files / f"tied-{kind}.gguf", engine="native", lora=adapters / "tied-0", threads=1)
    assert np.array_equal(one.engine.forward([IDS], None, "all")[0], whole)
    assert np.array_equal(model.engine.forward([IDS], None, "last")[0], whole[-1:])


@pytest.mark.parametrize("engine", ENGINES)
def test_values_are_read_and_edited_as_without_adapters(files, adapters, engine):
    model = starscope.load(files / "tied-q8_0.gguf", engine=engine, lora=adapters / "tied-0")
    [plain] = model.engine.forward([IDS], None, "last")
    with model.trace(IDS):
        pattern = model.layers[1].self_attn.attention_probabilities.clone()
        seen = model.layers[1].self_attn.attention_output.clone()
        last = model.logits.clone()
    assert np.array_equal(np.asarray(last)[0, -1], plain[0])
    assert seen.shape == (1, len(IDS), 64)
    assert np.allclose(np.asarray(pattern).sum(-1), 1, atol=1e-5)
    with model.trace(IDS):
        model.layers[1].layer_output[:] = 0
        edited = model.logits.clone()
    assert not np.array_equal(np.asarray(edited), np.asarray(last))
    zeroed = model.with_edits([Edit("layer_output", "zero", layers=1)])
    assert np.allclose(zeroed.engine.forward([IDS], None, "last")[0], np.asarray(edited)[0, -1:], atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_text_is_generated_with_an_adapter(files, adapters, engine):
    model = starscope.load(files / "tied-q8_0.gguf", engine=engine, lora=adapters / "tied-0")
    made = model.generate("def f(", max_new_tokens=6)
    ids = model.tokenizer.encode("def f(")
    for token in made.token_ids:
        assert token == int(model.engine.forward([ids], None, "last")[0].argmax())
        ids.append(token)


def test_gradients_flow_through_an_adapter(files, adapters):
    model = starscope.load(files / "tied-f32.gguf", engine="torch", lora=adapters / "tied-0")
    with model.trace(IDS, grad=True):
        middle = model.layers[0].layer_output
        model.logits[0, -1, 3].backward()
    assert np.abs(middle.grad.numpy()).max() > 0


def test_a_base_in_higher_precision_gives_the_weights_of_a_merged_file(files, adapters, tmp_path):
    file, original = files / "tied-q8_0.gguf", files / "tied-f32.gguf"
    model = starscope.load(file, engine="numpy", lora=adapters / "tied-0", lora_base=original)
    assert model.weights.format_name("layers.0.mlp.up_proj.weight") == "Q8_0"
    exact = logits(original, lora=adapters / "tied-0")
    assert 0 < share(logits(file, lora=adapters / "tied-0", lora_base=original), exact) < 0.05
    merged = merge(file, tmp_path / "merged.gguf", lora=[adapters / "tied-0"], lora_base=original).out
    for engine in ENGINES:
        found = logits(file, engine, lora=adapters / "tied-0", lora_base=original)
        np.testing.assert_array_equal(found, logits(merged, engine))


def test_a_folder_may_be_the_base_in_higher_precision(files, adapters, checkpoint):
    options = {"lora": adapters / "tied-0"}
    of_folder, of_file = (
        logits(files / "tied-q8_0.gguf", lora_base=base, **options) for base in (checkpoint, files / "tied-f32.gguf")
    )
    assert np.array_equal(of_folder, of_file)


@pytest.mark.parametrize("rank", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_any_rank_runs_in_the_native_engine(files, rank, kind, tmp_path):
    pairs = {f"transformer.h.1.{m}": halves(s, min(rank, min(s))) for m, s in SHAPES.items()}
    write_folder(tmp_path, {"r": rank, "lora_alpha": rank}, pairs)
    file = files / f"tied-{kind}.gguf"
    found, wanted = (logits(file, engine, lora=tmp_path) for engine in ("native", "numpy"))
    usual = share(logits(file, "native"), logits(file))
    assert share(found, wanted) <= max(2 * usual, 64 * ULP)


def test_what_is_rounded_is_the_originals_weight_with_the_change_in_it(files, adapters):
    from starscope.formats import decode, encode, find_format

    original = starscope.load(files / "tied-f32.gguf", engine="numpy")
    model = starscope.load(
        files / "tied-q8_0.gguf", engine="numpy", lora=(adapters / "tied-0", 0.5), lora_base=files / "tied-f32.gguf"
    )
    adapter = starscope.lora.read_adapter(adapters / "tied-0", model.family, model.hparams)
    for name, pair in adapter.pairs.items():
        exact = original.weights[name] + (pair.b * np.float32(0.5 * pair.scale)) @ pair.a
        q8_0 = find_format("Q8_0")
        wanted = decode(q8_0, encode(q8_0, exact)).reshape(exact.shape)
        assert (model.weights[name] != wanted).mean() < 0.002, name  # a sum's last bit may turn a rounding


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m", "bf16"])
def test_an_embedding_that_peft_saved_unchanged_leaves_the_models_own_as_it_is_stored(files, adapters, kind):
    file = files / f"tied-{kind}.gguf"
    model = starscope.load(file, engine="numpy", lora=(adapters / "tied-0", 0.5))  # of lm_head, among others
    stored = starscope.load(file, engine="numpy").weights.format_name("embed_tokens.weight")
    assert model.weights.format_name("embed_tokens.weight") == stored
    assert model.weights.is_tied("lm_head.weight")
