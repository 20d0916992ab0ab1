"""``load`` reads directories that stock ``save_state_dict`` wrote, in every form that Paddle's optimizers give their states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
from harness import RankPool, RankPools
from stock_forms import (
    FORMS,
    MODELS,
    SCALARS,
    assert_holds,
    expected,
    go_on,
    gradients_after_load,
    load_into,
    load_nested,
    load_parts,
    named,
    refused,
    save_form,
    save_model,
    save_some_states,
    train_and_save,
    value_of,
)

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]
KINDS = ["distcp", "safetensors"]
STATES = ("moment1_0", "moment2_0", *(f"{name}_0" for name in SCALARS))


@pytest.fixture(scope="session", params=[(form, kind) for form in FORMS for kind in KINDS], ids=" ".join)
def saved(request: pytest.FixtureRequest, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form, kind = request.param
    path = tmp_path_factory.mktemp("stock") / "saved"
    rank_pools.pool(2).run(save_form, form, "awkward", str(path), kind == "safetensors")
    return path


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_into_our_runtime(saved: Path, world_size: int, ranks: Ranks) -> None:
    loaded = ranks(world_size).run(load_into, "ours", "awkward", str(saved))
    assert_holds(loaded, expected("awkward"))
    for one in loaded:
        assert (one.report.step, one.report.world_size, one.report.extra_state) == (None, 2, None)
        assert one.report.without_state == []
        (said,) = one.report.differences
        assert said.startswith("stock Paddle wrote the checkpoint, which doesn't say of what class the optimizer was")


@pytest.mark.parametrize("source", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_from_other_numbers_of_ranks(form: str, source: int, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(source).run(save_form, form, "awkward", path, source == 3 and form != "stage 3")
    assert_holds(ranks(2).run(load_into, "ours", "awkward", path), expected("awkward"))


@pytest.mark.parametrize("runtime", ["Paddle's", "unsharded"])
@pytest.mark.parametrize(
    ("form", "kind"), [("plain", "distcp"), ("sharding v2", "safetensors"), ("stage 2", "distcp"), ("stage 3", "distcp")]
)
def test_into_other_runtimes(form: str, kind: str, runtime: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(save_form, form, "blocks", path, kind == "safetensors")
    assert_holds(ranks(2).run(load_into, runtime, "blocks", path), expected("blocks"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("runtime", "target"), [("ours", 1), ("ours", 3), ("Paddle's", 2), ("unsharded", 2)])
def test_master_weights(runtime: str, target: int, kind: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(save_form, "sharding v2", "blocks", path, kind == "safetensors", True)
    assert_holds(ranks(target).run(load_into, runtime, "blocks", path, True), expected("blocks", masters=True))


def test_model_or_optimizer_alone(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(save_form, "sharding v2", "awkward", path, False)
    right = expected("awkward")
    states = {key for key in right if key.endswith(STATES)}
    alone = ranks(2).run(load_parts, path)
    assert_holds([model for model, _ in alone], {key: values for key, values in right.items() if key not in states})
    assert_holds([both for _, both in alone], right)
    for model, both in alone:
        assert set(model.report.not_asked_for) == states
        assert set(both.report.not_asked_for) == right.keys() - states
        assert (model.report.parts, both.report.parts) == (["model"], ["optimizer"])


@pytest.mark.parametrize(
    ("form", "model", "optimizer", "error"),
    [
        ("plain", "awkward", "Momentum", "MismatchError: .*holds beta1_pow_acc, beta2_pow_acc, moment1, moment2 .*Momentum keeps velocity"),
        ("plain", "awkward", "Adamax", "MismatchError: .*Adamax keeps"),
        ("plain", "awkward", "SGD", "MismatchError"),
        ("plain", "blocks", "AdamW", "MismatchError: .*in the checkpoint, and not in the objects"),
        ("none", "awkward", "AdamW", "IncompleteCheckpointError: .*has no states of the parameters of AdamW"),
    ],
)
def test_what_does_not_fit_is_refused(form: str, model: str, optimizer: str, error: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    if form == "none":
        ranks(2).run(save_model, "awkward", path)
    else:
        ranks(2).run(save_form, form, "awkward", path, False)
    for text, unchanged in ranks(2).run(refused, model, optimizer, path):
        assert unchanged
        assert re.search(error, text, re.DOTALL), text


def test_tied_names_must_have_the_same_values(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "saved")
    ranks(2).run(save_form, "plain", "untied", path, True)
    for text, unchanged in ranks(2).run(refused, "awkward", "AdamW", path):
        assert unchanged
        assert "again.weight = embed.weight is one tied parameter in the model, and has other values under each name" in text


def test_parameters_without_states_are_reported(tmp_path: Path, ranks: Ranks, single: RankPool) -> None:
    path = str(tmp_path / "saved")
    single.run(save_some_states, path)
    ((names, report),) = single.run(gradients_after_load, path)
    assert sorted(report.without_state) == ["gain", "head.weight"]
    assert set(names) == {key.removesuffix(".moment1_0") for key in expected("awkward") if key.endswith(".moment1_0")} - {
        "head.weight",
        "gain",
    }
    (said,) = [text for text in report.differences if text.startswith("2 parameters of AdamW have no states in it and were left without: ")]
    assert "head.weight" in said and "gain" in said


def one_without_states(path: str) -> tuple[str, bool, str]:
    """Load what has states of one of two optimizers: into both, what is said; into that one; and by a prefix that nothing has."""
    save_some_states(path)
    model = MODELS["awkward"]()
    bare = [one for name, one in named(model).items() if name in ("gain", "head.weight")]
    held = [one for one in model.parameters() if not any(one is other for other in bare)]
    first, second = (paddle.optimizer.AdamW(0.01, parameters=some) for some in (held, bare))
    ckpt.fully_shard(model, optimizer=[first, second])
    with pytest.raises(ckpt.IncompleteCheckpointError) as both:
        ckpt.load(path, model=model, optimizer=[first, second])
    ckpt.load(path, model=model, optimizer=[first], parts={"model", "optimizer"})
    gain = model.gain
    with ckpt.local_parameters(model):
        is_loaded = bool((gain.numpy() == value_of("gain", gain.shape)).all())
    with pytest.raises(ckpt.IncompleteCheckpointError) as prefixed:
        ckpt.load(path, model=model, optimizer=[first], key_map={"": "run."})
    return str(both.value), is_loaded and not any(second._accumulators.values()), str(prefixed.value)


def test_an_optimizer_of_which_nothing_is_there(tmp_path: Path, single: RankPool) -> None:
    ((both, is_loaded, prefixed),) = single.run(one_without_states, str(tmp_path / "saved"))
    assert is_loaded
    for message in (both, prefixed):
        assert "has no states of the parameters of AdamW; nothing was changed. It has states of others: " in message
        assert "give key_map; or leave AdamW out of the optimizers that you give" in message


def test_nested_dicts_are_loaded_by_their_names(tmp_path: Path, single: RankPool) -> None:
    assert_holds(single.run(load_nested, str(tmp_path / "saved")), expected("awkward"))


@pytest.mark.parametrize(("runtime", "target"), [("unsharded", 1), ("ours", 1), ("ours", 2)])
def test_run_goes_on(runtime: str, target: int, tmp_path: Path, ranks: Ranks) -> None:
    """Where stock Paddle saved a run in the middle, it goes on as if it hadn't been interrupted."""
    path = str(tmp_path / "saved")
    (uninterrupted,) = ranks(1).run(train_and_save, path)
    losses = np.mean(ranks(target).run(go_on, runtime, path), axis=0)
    np.testing.assert_allclose(losses, uninterrupted, rtol=0 if runtime == "unsharded" else 1e-5)
