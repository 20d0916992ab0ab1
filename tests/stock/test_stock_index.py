"""Directories that stock Paddle wrote: which save is read, and that files which are not of one save are refused."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, RankPools, this_rank
from paddle.distributed import save_state_dict
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from stock_forms import save_form

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.storage.comparison import have_same_values
from paddle_fsdp_ckpt.storage.plan import plan_read
from paddle_fsdp_ckpt.storage.reader import check_duplicates, execute_read
from paddle_fsdp_ckpt.storage.stock import open_index

Ranks = Callable[[int], RankPool]
KINDS = ["distcp", "safetensors"]


def whole_values(path: Path, key: str, dtype: str) -> np.ndarray:
    """Read a whole tensor as any load does."""
    index = open_index(path)
    shape = index.global_shape(key)
    array = np.full(shape, 77, dtype)
    plan = plan_read(index, [index.whole_piece(key)], index.stored)
    plan.problems.raise_if_any()
    check_duplicates(plan)
    execute_read(plan, [memoryview(array.reshape(-1)).cast("B")])
    return array


def save_boxes(path: str, kind: str) -> None:
    """Four ranks: two halves of the columns, each flattened and cut in two; and tensors of every dtype and of no dimension, whole."""
    rank = this_rank().rank
    half, part = divmod(rank, 2)
    box = np.arange(2 * 3 * 8, dtype="float32").reshape(2, 3, 8)[:, :, 4 * half : 4 * half + 4].reshape(-1)
    flat = slice(0, 7) if part == 0 else slice(7, 24)
    weights = {"w": ShardedWeight("w", paddle.to_tensor(box[flat]), (2, 3, 4), (2, 3, 8), (0, 0, 4 * half), True, flat)}
    for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        weights[dtype] = ShardedWeight(dtype, paddle.to_tensor([[1.0, 0.0, 3.0]]).astype(dtype), (1, 3), (1, 3), (0, 0))
    weights["none"] = ShardedWeight("none", paddle.to_tensor(2.5), (), (), ())
    save_state_dict(weights, path, safetensors=kind == "safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_flat_ranges_and_dtypes_are_read(kind: str, tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "saved"
    ranks(4).run(save_boxes, str(path), kind)
    np.testing.assert_array_equal(whole_values(path, "w", "float32"), np.arange(48, dtype="float32").reshape(2, 3, 8))
    assert whole_values(path, "none", "float32") == 2.5
    assert whole_values(path, "none", "float32").shape == ()
    for dtype in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        np.testing.assert_array_equal(whole_values(path, dtype, dtype), np.array([[1, 0, 3]]).astype(dtype))
    np.testing.assert_array_equal(whole_values(path, "bfloat16", "uint16"), [[0x3F80, 0, 0x4040]])
    index = open_index(path)
    assert index.manifest is None
    assert [one.name for one in index.files] == [f"{rank}_0.{kind}" for rank in range(4)]
    assert {piece.piece.flat_range for piece in index.pieces("w")} == {Range(0, 7), Range(7, 24)}


def save_numbers(path: str, safetensors: bool, first: float, settings: dict[str, Any] | None = None) -> None:
    """One tensor cut over the ranks, one that all have, and a rank's own."""
    place = this_rank()
    mine = paddle.arange(6 // place.world_size, dtype="float32") + first + place.rank * 10
    size = mine.shape[0] * place.world_size
    weights = {
        "cut": ShardedWeight("cut", mine, (mine.shape[0],), (size,), (place.rank * mine.shape[0],)),
        "same": ShardedWeight("same", paddle.full([2], first), (2,), (2,), (0,)),
        f"only {place.rank}": ShardedWeight(f"only {place.rank}", paddle.full([1], first), (1,), (1,), (0,)),
    }
    save_state_dict(weights, path, safetensors=safetensors, **settings or {})


@pytest.fixture(scope="session", params=KINDS)
def original(request: pytest.FixtureRequest, rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numbers") / "saved"
    rank_pools.pool(2).run(save_numbers, str(path), request.param == "safetensors", 1.0)
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def kind_of(path: Path) -> str:
    return "safetensors" if (path / "0_0.safetensors").exists() else "distcp"


def test_second_save_at_the_same_layout_is_the_one_read(saved: Path, ranks: Ranks) -> None:
    ranks(2).run(save_numbers, str(saved), kind_of(saved) == "safetensors", 2.0)
    np.testing.assert_array_equal(whole_values(saved, "cut", "float32"), [2, 3, 4, 12, 13, 14])


@pytest.mark.parametrize("world_size", [1, 3])
def test_second_save_at_another_world_size_is_refused(world_size: int, saved: Path, ranks: Ranks) -> None:
    """Paddle keeps the first save's metadata, and mixes both when it loads."""
    ranks(world_size).run(save_numbers, str(saved), kind_of(saved) == "safetensors", 2.0)
    with pytest.raises(CorruptCheckpointError, match="not of one save: Paddle doesn't rewrite 0.metadata"):
        open_index(saved)


def test_replicas_are_read_once(tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "saved"
    ranks(2).run(save_numbers, str(path), False, 1.0, {"save_replicas": True})
    index = open_index(path)
    assert len(list(index.pieces("same"))) == 1
    np.testing.assert_array_equal(whole_values(path, "same", "float32"), [1, 1])


def test_of_several_saves_the_last_is_read(tmp_path: Path, ranks: Ranks) -> None:
    path = tmp_path / "saved"
    for unique_id in (0, 3):
        ranks(2).run(save_numbers, str(path), False, 1.0 + unique_id, {"unique_id": unique_id})
    np.testing.assert_array_equal(whole_values(path, "same", "float32"), [4, 4])
    assert {one.name for one in open_index(path).files} == {"0_3.distcp", "1_3.distcp"}
    for unique_id in (0, 3):
        ranks(2).run(save_numbers, str(tmp_path / "other"), True, 1.0, {"unique_id": unique_id})
    with pytest.raises(CorruptCheckpointError, match="several saves"):  # stock takes the first
        open_index(tmp_path / "other")


def test_missing_files_are_named(saved: Path) -> None:
    name = f"1_0.{kind_of(saved)}"
    (saved / name).rename(saved / "elsewhere")
    with pytest.raises(IncompleteCheckpointError, match=f"lacks the file {name}"):
        open_index(saved)
    (saved / f"0_0.{kind_of(saved)}").unlink()
    with pytest.raises(IncompleteCheckpointError, match="no files with values"):
        open_index(saved)
    (saved / "elsewhere").rename(saved / name)
    (saved / "0.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError):
        open_index(saved)


def test_files_of_other_saves_are_refused(saved: Path) -> None:
    kind = kind_of(saved)
    shutil.copy(saved / f"1_0.{kind}", saved / f"2_0.{kind}")
    with pytest.raises(CorruptCheckpointError, match="2_0.* don't have the same keys"):
        open_index(saved)
    (saved / f"2_0.{kind}").unlink()
    shutil.copy(saved / f"1_0.{kind}", saved / f"0_0.{kind}")
    with pytest.raises(CorruptCheckpointError, match="not of one save"):
        open_index(saved)


def test_lock_and_mixed_kinds_are_refused(saved: Path) -> None:
    (saved / "0.metadata.lock").touch()
    with pytest.raises(IncompleteCheckpointError, match=r"0\.metadata\.lock: a save is under way, or was killed"):
        open_index(saved)
    (saved / "0.metadata.lock").unlink()
    other = "distcp" if kind_of(saved) == "safetensors" else "safetensors"
    (saved / f"0_0.{other}").touch()
    with pytest.raises(CorruptCheckpointError, match="both .distcp and .safetensors"):
        open_index(saved)


def test_metadata_of_another_id_is_not_taken(saved: Path) -> None:
    (saved / "0.metadata").rename(saved / "10.metadata")  # which stock takes: it ends in "0.metadata"
    with pytest.raises(IncompleteCheckpointError, match=r"no 0\.metadata"):
        open_index(saved)


def test_truncated_files_are_corrupt(saved: Path) -> None:
    for name in os.listdir(saved):
        whole = (saved / name).read_bytes()
        for keep in {0, 5, len(whole) // 2, len(whole) - 1}:
            (saved / name).write_bytes(whole[:keep])
            with pytest.raises(CheckpointError, match=name):
                open_index(saved)
        (saved / name).write_bytes(whole)
    open_index(saved)


def test_mutated_files_end_in_an_index_or_an_error(saved: Path) -> None:
    draw = random.Random(0)
    for name in os.listdir(saved):
        whole = (saved / name).read_bytes()
        for _ in range(200):
            mutated = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                mutated[draw.randrange(len(mutated))] = draw.randrange(256)
            (saved / name).write_bytes(mutated)
            with suppress(CheckpointError):
                open_index(saved)
        (saved / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["../0_0.distcp", "/etc/passwd", "0_0.distcp/../../x", "0_0.pickle", "x" * 1000, ""])
def test_file_names_that_lead_elsewhere_are_refused(name: str, saved: Path) -> None:
    one = LocalTensorMetadata((0,), (1,), "float32", (1,))
    metadata = Metadata({"w": [one]}, {LocalTensorIndex("w", (0,), local_shape=(1,)): name}, {"w": ("w",)})
    (saved / "0.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(UnsafeCheckpointError, match="may lead out of its directory; it was not opened"):
        open_index(saved)


def test_link_out_of_the_directory_is_refused(saved: Path) -> None:
    name = f"1_0.{kind_of(saved)}"
    (saved / name).rename(saved.parent / name)
    (saved / name).symlink_to(saved.parent / name)
    with pytest.raises(UnsafeCheckpointError, match="leads out of its directory"):
        open_index(saved)


def test_crafted_files_run_nothing(saved: Path) -> None:
    mark = saved.parent / "it ran"

    class Crafted:
        def __reduce__(self) -> object:
            return os.system, (f"touch '{mark}'",)

    for name in ("0.metadata", "0_0.distcp"):
        if (saved / name).exists():
            whole = (saved / name).read_bytes()
            (saved / name).write_bytes(pickle.dumps({"w": Crafted()}, protocol=4))
            with pytest.raises(UnsafeCheckpointError, match="nothing of it was run"):
                open_index(saved)
            (saved / name).write_bytes(whole)
    assert not mark.exists()


def save_transposed(path: str) -> None:
    weight = paddle.arange(6, dtype="float32").reshape([2, 3]).t()
    save_state_dict({"w": ShardedWeight("w", weight, (3, 2), (3, 2), (0, 0))}, path)


def test_transposed_view_is_refused_by_name(tmp_path: Path, single: RankPool) -> None:
    single.run(save_transposed, str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="key 'w': it was saved from a transposed view"):
        open_index(tmp_path / "saved")


def save_piece_of_one_element(path: str) -> None:
    """What dygraph_sharding_optimizer.py makes of it: "if int(tensor.numel()) == 1:  # Handle scalar parameters"."""
    one = ShardedWeight("m", paddle.zeros([8]), (9,), (9,), (0,), True, slice(0, 8))
    if this_rank().rank == 1:
        one = ShardedWeight("m", paddle.zeros([1]), (1,), (1,), (0,))
    save_state_dict({"m": one}, path)


def test_piece_whose_place_stock_lost_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_piece_of_one_element, str(tmp_path / "saved"))
    with pytest.raises(CorruptCheckpointError, match="'m': both float32 .* a piece of one element as if it were a tensor"):
        open_index(tmp_path / "saved")


def save_by_us(path: str) -> None:
    model = paddle.nn.Linear(2, 3)
    ckpt.save(path, model=model)


def test_our_unfinished_save_is_not_taken_for_stock(tmp_path: Path, single: RankPool) -> None:
    path = tmp_path / "ours"
    single.run(save_by_us, str(path))
    assert open_index(path).manifest is not None
    (path / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"written by paddle_fsdp_ckpt, and the directory has no manifest\.json"):
        open_index(path)
    staging = path.rename(tmp_path / ".ours.staging-0123456789abcdef")
    with pytest.raises(IncompleteCheckpointError, match="an unfinished save"):
        open_index(staging)


def test_same_values_are_told_apart(tmp_path: Path, ranks: Ranks) -> None:
    for name, model in (("tied", "awkward"), ("untied", "untied")):
        ranks(2).run(save_form, "plain", model, str(tmp_path / name), False)
        keys = ["again.weight", "embed.weight"]
        assert have_same_values(open_index(tmp_path / name), keys) is (name == "tied")
        assert not have_same_values(open_index(tmp_path / name), ["embed.weight", "head.weight"])
