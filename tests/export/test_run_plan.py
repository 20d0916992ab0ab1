"""``plan`` against real models: the parameters of PaddleFormers' own, and what the runtime keeps and saves of them on real ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import planned_models
import pytest
from harness import RankPool

from paddle_fsdp_ckpt.errors import CheckpointError, UnsupportedOptimizerError
from paddle_fsdp_ckpt.export.config import read_config
from paddle_fsdp_ckpt.export.inspection import Inspection, inspect
from paddle_fsdp_ckpt.export.planning import plan
from paddle_fsdp_ckpt.export.planning.architecture import PlannedParameter, PlannedUnit, planned_units
from paddle_fsdp_ckpt.export.planning.pieces import planned_layout, rank_pieces
from paddle_fsdp_ckpt.export.planning.plan import plan_run
from paddle_fsdp_ckpt.export.planning.states import planned_states
from paddle_fsdp_ckpt.optimizer_states import CATALOG
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import LENGTH_NBYTES
from paddle_fsdp_ckpt.storage.header import decode_header, encode_header, in_file_order
from paddle_fsdp_ckpt.storage.index import CheckpointIndex
from paddle_fsdp_ckpt.storage.manifest import FileRecord
from paddle_fsdp_ckpt.storage.plan import plan_read

Ranks = Callable[[int], RankPool]

PADDLEFORMERS: dict[str, planned_models.Units] = json.loads(Path(__file__).with_name("paddleformers_units.json").read_text())
"""What ``plan_units`` found in tiny models of PaddleFormers 0.4.1, made with the default dtype bfloat16: units, and their parameters."""

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama/tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": [1]},
}
QWEN3_30B_A3B: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "qwen3_30b_a3b.json").read_text())
"""What the published model's ``config.json`` says of its shape; the documentation plans it too."""


def write_config(tmp_path: Path, fields: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("case", OTHERS)
def test_parameters_are_those_of_paddleformers(case: str, tmp_path: Path) -> None:
    fields = TINY | {"model_type": case.partition("/")[0]} | OTHERS[case]
    for nested in (fields, {"model_type": "outer", "thinker_config": {"text_config": fields}}):
        units = planned_units(read_config(write_config(tmp_path, nested)), "bfloat16")
        assert units == [
            PlannedUnit(name, tuple(PlannedParameter(tuple(names), tuple(shape), dtype) for names, shape, dtype in parameters))
            for name, parameters in PADDLEFORMERS[case]
        ]


@pytest.mark.parametrize(
    ("case", "optimizer", "options"),
    [
        ("qwen3_moe", "AdamW", {"multi_precision": True}),
        ("llama/tied", "AdamW", {}),
        *(("qwen2", name, {}) for name in CATALOG if name != "AdamW"),
    ],
)
def test_a_real_run_keeps_and_saves_what_was_planned(
    case: str, optimizer: str, options: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    config = write_config(tmp_path, TINY | {"model_type": case.partition("/")[0]} | OTHERS[case])
    planned = plan_run(config, [2], optimizer=optimizer, master_weights=bool(options))
    results = ranks(2).run(planned_models.shard_and_save, str(tmp_path / "saved"), PADDLEFORMERS[case], optimizer, options)
    layout = planned_layout(planned_units(read_config(config), "bfloat16"), 2)
    (world,) = planned.worlds
    for buffers, kept, units in results:
        assert buffers == list(layout.buffers)
        assert units == [name for name, _ in PADDLEFORMERS[case]]
        assert (kept["parameters"], kept["gradients"]) == (world.parameters, world.gradients)
        assert kept["states"] <= world.states and kept["master_weights"] <= world.master_weights
    assert max(kept["states"] + kept["master_weights"] for _, kept, _ in results) == world.states + world.master_weights
    found = inspect(tmp_path / "saved", keys="*")
    assert isinstance(found, Inspection) and found.is_good
    assert (len(found.keys), sum(len(key.ranges) for key in found.keys)) == (world.keys, world.pieces)
    assert sum(amount.nbytes for amount in found.amounts) == world.values
    sizes = [path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")]
    # The order of states decides how long the offsets in a header are, and is known of AdamW's.
    slack = 0 if optimizer == "AdamW" else 200
    assert sum(sizes) == pytest.approx(world.checkpoint, abs=slack)
    assert max(sizes) == pytest.approx(world.largest_file, abs=slack)


def test_qwen3_30b_a3b(tmp_path: Path) -> None:
    found = plan_run(write_config(tmp_path, QWEN3_30B_A3B), [64])
    assert (found.parameters, found.elements, found.units) == (18_867, 30_532_122_624, 51)
    for world in found.worlds:
        assert world.keys == 18_867 * 6 - 48  # routers are float32, and have no master weight
        routers = 48 * 2048 * 128
        elementwise = 2 * found.elements + 2 * routers + 8 * found.elements + 4 * (found.elements - routers)
        assert world.values == elementwise + 2 * 4 * 18_867
        assert world.parameters * world.world_size == 2 * found.elements + 2 * routers + world.padding
        assert 0 < world.padding < 1e-3 * world.values
    assert "18,867 parameters" in str(found)
    assert "the head is counted by itself" not in str(found)
    tied = plan_run(write_config(tmp_path, QWEN3_30B_A3B | {"tie_word_embeddings": True, "num_hidden_layers": 1}), [2])
    assert "the head is counted by itself" in str(tied)


def test_heads_of_qwen3_are_128_wide_where_nothing_is_said(tmp_path: Path) -> None:
    units = planned_units(read_config(write_config(tmp_path, TINY | {"model_type": "qwen3"})), "float32")
    assert [one.shape for one in units[1].parameters if one.names[0].endswith("q_norm.weight")] == [(128,)]


def test_every_element_lies_on_just_one_rank(tmp_path: Path) -> None:
    units = planned_units(read_config(write_config(tmp_path, QWEN3_30B_A3B)), "bfloat16")
    for world_size in (8, 64, 1024):
        layout = planned_layout(units, world_size)
        reached: dict[str, int] = {}
        for rank in range(world_size):
            for buffer in layout.buffers:
                for slot, part in buffer.local_pieces(rank):
                    assert part == buffer.local_range(slot, rank)
                    assert reached.get(slot.name, 0) == part.start
                    reached[slot.name] = part.stop
        numel = {slot.name: slot.numel for buffer in layout.buffers for slot in buffer.slots}
        assert reached == numel
        assert len(numel) == 18_867
        for buffer in layout.buffers:
            ends = [slot.range.stop for slot in buffer.slots]
            assert all(slot.offset >= end for slot, end in zip(buffer.slots[1:], ends, strict=False))
            assert ends[-1] <= buffer.numel


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python a call takes: its work, however fast the machine is."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def plan_everything(config: Path, world_size: int) -> tuple[int, int, int]:
    """Lay out, plan one rank's save, and its load on fewer ranks; return the work, the pieces of all ranks, and the rank's own."""
    units = planned_units(read_config(config), "bfloat16")

    def states_of(dtype: str) -> list[Any]:
        return planned_states("AdamW", dtype, master_weights=True)

    layout = planned_layout(units, world_size)
    files = [list(rank_pieces(layout, rank, states_of)) for rank in range(world_size)]
    headers = [encode_header([pieces[i] for i in in_file_order(pieces)]) for pieces in files]
    sizes = [len(header) + data_nbytes(pieces) for header, pieces in zip(headers, files, strict=True)]
    records = tuple(FileRecord(f"{rank}_0.safetensors", size, 0) for rank, size in enumerate(sizes))
    index = CheckpointIndex(Path("saved"), records, {}, {})
    wanted = list(rank_pieces(planned_layout(units, world_size // 2), 1, states_of))
    plans = []

    def work() -> None:
        own = rank_pieces(planned_layout(units, world_size), 1, states_of)
        pieces = list(own)
        encode_header([pieces[i] for i in in_file_order(pieces)])
        for number, (header, size) in enumerate(zip(headers, sizes, strict=True)):
            assert not list(index.add(number, decode_header(header[LENGTH_NBYTES:], size, "a file")))
        plans.append(plan_read(index, wanted, index.keys()))

    lines = lines_run(work)
    assert not plans[0].problems
    return lines, sum(map(len, files)), len(wanted)


def data_nbytes(pieces: list[Piece]) -> int:
    sizes = {"float32": 4, "bfloat16": 2}
    return sum(piece.numel * sizes[piece.dtype] for piece in pieces)


def test_planning_costs_as_much_as_there_are_pieces(tmp_path: Path) -> None:
    fields = TINY | {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 12, "head_dim": 8, "hidden_size": 64}
    costs = []
    for layers, world_size in ((1, 8), (4, 8), (1, 32), (4, 32)):
        lines, pieces, wanted = plan_everything(write_config(tmp_path, fields | {"num_hidden_layers": layers}), world_size)
        costs.append(lines / (pieces + wanted))
    assert max(costs) < 1.5 * min(costs), costs


def test_a_save_and_a_load_take_no_more_than_planned(tmp_path: Path, ranks: Ranks) -> None:
    names = [f"model.layers.{i // 60}.mlp.experts.{i % 60}.gate_proj.weight" for i in range(600)]
    units: planned_models.Units = [("all of it", [([name], [4, 4], "float32") for name in names])]
    ((save, load),) = ranks(1).run(planned_models.peaks, str(tmp_path / "saved"), units)
    pieces = 5 * len(names)
    index = pieces * (plan._INDEX_KEY_NBYTES + plan._INDEX_PIECE_NBYTES)  # on one rank, each key is one piece
    assert save <= pieces * plan._SAVED_PIECE_NBYTES + index
    assert load <= pieces * plan._LOADED_PIECE_NBYTES + index + plan._READ_NBYTES


@pytest.mark.parametrize(
    ("fields", "world_sizes", "options", "message"),
    [
        ({"model_type": "gpt2"}, [2], {}, "model_type 'gpt2', and a plan can be made for llama, qwen2"),
        ({"model_type": ["llama"]}, [2], {}, "model_type"),
        (TINY | {"model_type": "llama", "hidden_size": "16"}, [2], {}, "hidden_size = '16', and a whole number"),
        (TINY | {"model_type": "qwen3_moe"}, [2], {}, "moe_intermediate_size = None"),
        (
            TINY | {"model_type": "llama", "num_hidden_layers": 10**9},
            [2],
            {},
            "num_hidden_layers = 1000000000, and a whole number from 1 to",
        ),
        (TINY | OTHERS["qwen3_moe"] | {"model_type": "qwen3_moe", "num_experts": 10**9}, [2], {}, "num_experts = 1000000000, and a"),
        (TINY | {"model_type": "llama", "tie_word_embeddings": 1}, [2], {}, "tie_word_embeddings = 1, and true or false"),
        (TINY | {"model_type": "qwen3_moe", "mlp_only_layers": 3}, [2], {}, "mlp_only_layers = 3, and a list"),
        (TINY | {"model_type": "llama", "torch_dtype": "int8"}, [2], {}, "can't be 'int8'"),
        (TINY | {"model_type": "llama", "hidden_size": 3}, [2], {}, "makes no model: flat buffer"),
        (TINY | {"model_type": "llama", "vocab_size": 10**30}, [2], {}, r"makes no model: it would have .*e\+31 elements"),
        (TINY | {"model_type": "llama"}, [2, 0], {}, "can't have 0 ranks"),
        (TINY | {"model_type": "llama"}, [10**9], {}, "can't have 1000000000 ranks"),
        (TINY | {"model_type": "llama"}, [], {}, "can't have no ranks"),
        (TINY | {"model_type": "llama"}, [2], {"optimizer": "Lamb"}, "'Lamb' can't step a sharded model: its trust ratio"),
    ],
)
def test_what_no_plan_can_be_made_of(
    fields: dict[str, Any], world_sizes: list[int], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedOptimizerError), match=message):
        plan_run(write_config(tmp_path, fields), world_sizes, **options)


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        plan_run(tmp_path / "nowhere.json", [2])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        plan_run(tmp_path, [2])
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        plan_run(tmp_path, [2])
